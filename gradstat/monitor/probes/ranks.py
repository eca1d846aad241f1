"""What ranks compare: which of them produced a NaN, whether parameters are equal, and whether batches differ."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradstat._core.parameters import NamedParameters
from gradstat._core.wrappers import uncompiled
from gradstat.monitor.probes.base import Pending, Probe, Run
from gradstat.rules.rows import Observation


class Origin(Probe):
    """Which rank produced a NaN, watched before gradients are reduced; all ranks are asked after a step with one."""

    watch = "origin"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._asks, self.period = self.period, 1  # each result makes the watch begin anew
        self._tracker = _track(run.trained.model, run.settings.options.backend)
        self.handles.append(self._tracker)

    def take(self, step: Pending, named: NamedParameters) -> None:
        result = self._tracker.pending_result()
        if step.step % self._asks == 0 and not self.run.source.is_joining():
            step.late["origin"] = result


def _track(model: nn.Module, backend: str | None) -> Any:
    if not isinstance(uncompiled(model), DistributedDataParallel):
        raise TypeError(
            f"watch={{'origin': 1}} needs a DistributedDataParallel model of torch, the only wrapper that exposes "
            f"gradients before they are reduced; got {type(model).__module__}.{type(model).__qualname__}"
        )
    from gradstat.distributed import track_origin

    return track_origin(model, backend=backend)


class Replicas(Probe):
    """Whether replicated parameters are equal on all ranks."""

    watch = "replicas"

    def take(self, step: Pending, named: NamedParameters) -> None:
        if not self.run.source.is_joining():
            from gradstat.distributed import verify_replicas

            step.observe("replicas", verify_replicas(self.run.trained.model, what=("parameters",)))


class Batches(Probe):
    """Whether ranks got different batches."""

    watch = "batches"

    def inspect(self, step: int, batch: Any) -> list[Observation]:
        if self.run.source.is_joining():
            return []
        from gradstat.distributed import verify_batches

        return [Observation("batches", step, verify_batches(batch))]
