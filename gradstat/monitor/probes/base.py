"""`Probe`: what a monitor records in some steps; with what probes are made for, `Run`, and add to, `Pending`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gradstat._core.hooks import NOT_CALLED, Hook, opaque_parts, removed_with
from gradstat._core.parameters import PLAIN_TYPES, NamedParameters, Trained
from gradstat._core.tensors import why_not_measured
from gradstat._fields import INDEX
from gradstat.monitor.arguments import Settings
from gradstat.monitor.probes.graph import Leaves
from gradstat.monitor.segments import PendingRows, Segment
from gradstat.monitor.source import StepSource
from gradstat.monitor.unwatched import Unwatched
from gradstat.rules.rows import Observation

Part: TypeAlias = tuple[Segment, list[Tensor]]
"""Tensors of one kind, to be measured together with the gradients."""


class Run(NamedTuple):
    """The run that probes are made for."""

    settings: Settings  # the monitor's
    trained: Trained
    model: nn.Module  # the one inside of an engine
    unwatched: Unwatched
    source: StepSource
    noted: dict[str, float]  # scalars of the coming step
    leaves: dict[str, Leaves]  # of the graphs of the first loss and the first outputs


class Pending(NamedTuple):
    """A step that was measured but not read yet."""

    step: int
    numbers: list[PendingRows]  # the first has the gradients as its first segment
    on_device: list[str]  # names of the scalars in the second segment
    scalars: dict[str, float]  # known on the host
    is_scaled: bool  # whether the gradients carry the loss scale
    observations: list[Observation]  # what is known without reading numbers
    late: dict[str, Callable[[], Any]]  # by kind, further observations, which may wait for the device

    def kinds(self) -> set[str]:
        return {segment.kind for numbers in self.numbers for segment in numbers.segments}

    def observe(self, kind: str, value: Any) -> None:
        self.observations.append(Observation(kind, self.step, value))


class Probe:
    """Something that is recorded in some steps, besides the gradients.

    Attributes:
        watch: Its key in ``watch=``.
        early: Steps in which it is due besides.
        lost: What the warning says if `take` fails.
        period: It is due every so many steps; 0 for never.
        handles: Of its hooks, which are removed with it.
    """

    watch = "gradients"
    early: frozenset[int] = frozenset()
    lost = "parameters, buffers or optimizer states could not be measured"

    def __init__(self, run: Run) -> None:
        self.run, self.period = run, run.settings.periods[self.watch]
        self.handles: list[Any] = []
        self._remove = removed_with(self, self.handles)

    @classmethod
    def of(cls, run: Run) -> Probe | None:
        """A probe for a run, None if the run does not ask for it."""
        return cls(run) if run.settings.periods[cls.watch] else None

    def is_due(self, step: int) -> bool:
        return (self.period > 0 and step % self.period == 0) or step in self.early

    def switch(self, on: bool) -> None:
        """Before a step begins: whether the probe is due in it."""

    def inspect(self, step: int, batch: Any) -> list[Observation]:
        """Looks at what `Monitor.check_batch` was given for ``step``; returns what is known at once."""
        return []

    def begin(self, step: Pending, named: NamedParameters) -> None:
        """In the first step, and in any other in which the parameters are others than in the one before."""

    def state(self, named: NamedParameters) -> list[Part]:
        """What can be measured at any time, also between two steps."""
        return []

    def take(self, step: Pending, named: NamedParameters) -> Iterable[Part] | None:
        """What is to be measured in ``step``. Observations, and rows that are measured already, are added to it."""
        return self.state(named)

    def forget(self) -> None:
        """Drops what was kept for the coming step, because the parameters were changed from outside."""

    def remove(self) -> None:
        self._remove()


class HookedProbe(Probe):
    """A probe with hooks that are switched off in steps where it is not due, which is cheaper than a test in each."""

    def __init__(self, run: Run, hooks: dict[Hook, Any]) -> None:
        """``hooks`` come with their handles."""
        super().__init__(run)
        self.hooks = list(hooks)
        self.handles += hooks.values()
        self.may_tell = self.watch in run.settings.asked  # what hooks do not see, once

    def switch(self, on: bool) -> None:
        for hook in self.hooks:
            hook.on = on

    def tell_unseen(self, seen: Collection[str], hooked: Collection[str] = ("",)) -> None:
        """Warns once, where it is asked for, why the hooks of some modules, or of all, have seen no forward pass.

        Args:
            seen: The names of the modules that were seen in the first step in which the probe is due.
            hooked: Those of all modules with hooks.
        """
        if self.may_tell:
            self.may_tell = False
            whys = list(opaque_parts(self.run.model, [name for name in hooked if name not in seen]).values())
            if not hooked:
                whys = ["of a model without modules inside"]
            elif not seen and not whys:
                whys = [NOT_CALLED]
            for why in whys:
                self.run.unwatched.leave_out(self.watch, why)


def own_shards(named: NamedParameters) -> list[Any]:
    """The parameters, or with an engine this rank's shards of them."""
    return named.parameters if named.engine is None else named.engine.parameters(named.parameters)


_MEASURABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


OF_ZEROS = [INDEX[name] for name in ("nan_count", "inf_count", "min", "max")]
"""The fields that are 0 in the row of a tensor of zeros, and only there."""


def measurable(tensor: object) -> bool:
    """Whether statistics of a tensor are useful: it is floating-point or complex, with 16 bits or more."""
    return isinstance(tensor, Tensor) and tensor.dtype in _MEASURABLE and why_not_measured("", tensor) is None


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is measurable, and has elements in memory of its own."""
    is_dense = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_meta
    return is_dense and tensor.dtype in _MEASURABLE and tensor.numel() > 0
