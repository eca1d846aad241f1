"""`StepSource`: who takes the steps of a monitor, and what a monitor cannot know without asking."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from gradstat._core.wrappers import is_joining
from gradstat.recording.findings import Finding


class StepSource:
    """A loop that calls `Monitor.step`; `gradstat.auto` and the integrations derive from it.

    Attributes:
        wrapper: The module that is asked whether ranks are joining: the DDP module, if it is another than the model.
        device: The device of this rank, if all ranks respond to findings together; None for a rank by itself.
    """

    is_loop = True  # the user's program calls `Monitor.step`
    runs_steps = False  # a step can be run again by itself, so that the policy "replay" needs no function
    saves = False  # the policy "checkpoint" exists
    tells_backward = (
        False  # `StepListener.saw_backward` is called for each backward pass, and torch's count for nothing
    )

    # What the framework knows: how many steps it will take in all, and what an epoch has.
    planned_steps = batches = samples = 0
    outermost: CodeType | None = None  # of the framework's function that runs a micro-batch, if from several places

    def __init__(self, wrapper: nn.Module, device: torch.device | None = None) -> None:
        self.wrapper, self.device = wrapper, device

    def is_complete(self) -> bool:
        """Whether the gradients are complete now, and what is about to change them concerns this model."""
        return True

    def loss(self, heard: Sequence[Any]) -> Any:
        """The loss of the step that is taken now. ``heard`` are those that announcements named: of all its parts."""
        return heard[0] if len(heard) == 1 else sum_of(heard) if heard else None

    def is_joining(self) -> bool:
        """Whether this is inside of DDP's ``join()``, where ranks take fewer steps: nothing may wait for them."""
        return is_joining(self.wrapper)

    def why_nothing(self) -> str:
        """Why no step was taken."""
        return "monitor.step() has not been called"

    def show(self, findings: list[Finding]) -> None:
        """Shows new findings in the way of a framework."""

    def save_checkpoint(self) -> None:
        """Carries out the policy ``"checkpoint"``, on all ranks."""


def sum_of(losses: Sequence[Tensor]) -> Tensor:
    """On the last one's device: parts of a model may have losses on different devices."""
    return torch.stack([loss.to(losses[-1].device).float() for loss in losses]).sum()
