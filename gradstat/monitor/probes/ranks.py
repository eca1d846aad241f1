"""What ranks compare: which of them produced a NaN, whether parameters are equal, and whether batches differ."""

from __future__ import annotations

import weakref
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


class Reduction(Probe):
    """Whether DDP's reducer has run since the last look: it times each parameter in every backward pass it reduces."""

    watch = "parameters"
    early = frozenset({16})

    def __init__(self, run: Run, ddp: DistributedDataParallel) -> None:
        super().__init__(run)
        self._ddp, self._last_look, self._times = weakref.ref(ddp), 0, ddp.reducer.get_backward_stats()

    @classmethod
    def of(cls, run: Run) -> Reduction | None:
        ddp = uncompiled(run.source.wrapper)
        if not isinstance(ddp, DistributedDataParallel) or ddp._use_python_reducer:
            return None
        return cls(run, ddp) if run.settings.periods[cls.watch] else None

    def take(self, step: Pending, named: NamedParameters) -> None:
        ddp, since = self._ddp(), self._last_look
        if ddp is None or self.run.source.is_joining():
            return
        before, self._times, self._last_look = self._times, ddp.reducer.get_backward_stats(), step.step
        if before == self._times and any(parameter.grad is not None for parameter in named.parameters):
            # DDP's forward pass under no_sync() leaves that it need not synchronise parameters.
            step.observe("unreduced", (since, not ddp.require_forward_param_sync))


class Batches(Probe):
    """Whether ranks got different batches."""

    watch = "rank_batches"

    def inspect(self, step: int, batch: Any) -> list[Observation]:
        if self.run.source.is_joining():
            return []
        from gradstat.distributed import verify_batches

        return [Observation("rank_batches", step, verify_batches(batch))]
