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
    """What a monitor and whoever calls `Monitor.step` tell each other: the user's loop, `gradstat.auto` or an adapter.

    Attributes:
        trained: What is watched.
        first_gradient: The first gradient of the last step, if there was one, and its version, which another backward
            pass changes.
        wrapper: The DDP module that `is_joining` asks, if it is not the model.
        in_use: Remedies that the run uses already, so that advice leaves them out.
        is_stepped_by_user: Whether the user's loop calls `Monitor.step`.
        runs_steps: Whether a framework runs the steps, so that the policy ``"replay"`` needs no function.
        has_late_clip: Whether gradients were clipped after the last step had used them.
        leaves: The parameters in the graph of the first loss, each with its version; None before.
        why_nothing: Says why no step was taken.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.first_gradient: tuple[weakref.ref[Tensor] | None, int] = None, 0
        self.wrapper: nn.Module = trained.model
        self.in_use: set[str] = set()
        self.is_stepped_by_user, self.runs_steps, self.has_late_clip = True, False, False
        self.leaves: list[tuple[weakref.ref[Tensor], int]] | None = None
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
