"""`Connection`: what a monitor shares with whoever takes its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from gradstat._core.parameters import Trained
from gradstat._core.wrappers import uncompiled
from gradstat.monitor.observers import leaves_of


class Connection:
    """What a monitor and who calls `Monitor.step` tell each other: the user's loop, `gradstat.auto` or an adapter."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        # Of the last step, if it had one, and its version, which another backward pass changes.
        self.first_gradient: tuple[weakref.ref[Tensor] | None, int] = None, 0
        self.wrapper: nn.Module = trained.model  # that `is_joining` asks: the DDP module, if it is another
        self.in_use: set[str] = set()  # remedies that the run uses already, so that advice leaves them out
        self.is_stepped_by_user = True  # by the user's loop
        self.runs_steps = False  # a framework does, so that the policy "replay" needs no function
        self.has_late_clip = False  # gradients were clipped between a step and the next backward pass
        self.leaves: list[tuple[weakref.ref[Tensor], int]] | None = None  # of the first loss, each with its version
        # Why no step was taken.
        self.why_nothing: Callable[[], str] = lambda: "monitor.step() has not been called"

    def saw_loss(self, losses: Sequence[Any]) -> None:
        """Looks at the graph of the first loss."""
        if self.leaves is None:
            graphs = [loss for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
            self.leaves = [leaf for loss in graphs for leaf in leaves_of(loss)] if graphs else None

    def is_joining(self) -> bool:
        """Whether this is inside of DDP's ``join()``, where ranks take fewer steps: nothing may wait for them."""
        config = getattr(uncompiled(self.wrapper), "_join_config", None)
        return config is not None and bool(config.enable)
