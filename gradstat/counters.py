"""Counters, on the device, of an optimizer's steps and skipped steps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from gradstat._core.host_copy import DeviceState, refuse_capture


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How often an optimizer was stepped by `guarded_step`.

    Attributes:
        steps: All steps, including skipped ones, but not those in which the optimizer or one of its hooks raised.
        skipped: Steps skipped because a gradient was not finite.
        consecutive_skipped: Steps skipped since the last step that was not.
    """

    steps: int
    skipped: int
    consecutive_skipped: int


class StepCounters(DeviceState):
    """The counts of an optimizer's guarded steps, kept on the device as int64.

    Attributes:
        tensor: ``[3]`` on the gradients' device; the three counts below are views of it.
        steps: All steps, 0-d.
        skipped: Steps skipped, 0-d.
        consecutive_skipped: Steps skipped since the last step that was not, 0-d.
        streams: The streams on which the last step was counted.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.zeros(3, dtype=torch.int64, device=device))
        self.steps: torch.Tensor = self.tensor[0]
        self.skipped: torch.Tensor = self.tensor[1]
        self.consecutive_skipped: torch.Tensor = self.tensor[2]

    def __repr__(self) -> str:
        return f"StepCounters({self.tensor})"

    @classmethod
    def on(cls, device: torch.device, earlier: StepCounters | None, what: str) -> StepCounters:
        """``earlier`` if it is on ``device``, else a continuation there; raises in a graph capture, naming ``what``."""
        if earlier is not None and earlier.tensor.device == device:
            return earlier
        refuse_capture(device, what)
        made = cls(device)
        if earlier is not None:
            made.tensor.copy_(earlier.tensor)
        return made

    def read(self, wait: bool = False) -> StepCounts:
        """The newest counts that have arrived on the host.

        Without ``wait`` only the first call waits for the device. On a GPU the counts are then those at the previous
        call. If this is called on every step, they are one step old.
        """
        return StepCounts(*map(int, self.newest(wait)))


_counters: weakref.WeakKeyDictionary[Optimizer, StepCounters] = weakref.WeakKeyDictionary()


def step_counters(optimizer: Optimizer) -> StepCounters:
    """The counters of ``optimizer``'s guarded steps; KeyError before the first of them."""
    try:
        return _counters[optimizer]
    except KeyError:
        raise KeyError("this optimizer has not been stepped by gradstat.guarded_step yet") from None


def counters_on(optimizer: Optimizer, device: torch.device | None) -> StepCounters:
    """The counters of ``optimizer`` on ``device``, continued or new, with the errors of `StepCounters.on`.

    None is for a step without gradients: existing counters stay on their device, and new ones are made on the CPU.
    """
    earlier = _counters.get(optimizer)
    if earlier is not None and device in (None, earlier.tensor.device):
        return earlier
    made = StepCounters.on(device or torch.device("cpu"), earlier, "the counters of guarded_step")
    _counters[optimizer] = made
    return made
