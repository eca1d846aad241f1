"""`Connection`: what a monitor shares with whoever takes its steps."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gradstat._core.parameters import Trained
from gradstat._core.wrappers import uncompiled
from gradstat.monitor.recorder import Recorder


class Connection:
    """What a monitor and who calls `Monitor.step` tell each other: the user's loop, `gradstat.auto` or an adapter."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.recorder: Recorder
        self.wrapper: nn.Module = trained.model  # that `is_joining` asks: the DDP module, if it is another
        self.in_use: set[str] = set()  # remedies that the run uses already, so that advice leaves them out
        self.is_stepped_by_user = True  # by the user's loop
        self.runs_steps = False  # a framework does, so that the policy "replay" needs no function
        # Why no step was taken.
        self.why_nothing: Callable[[], str] = lambda: "monitor.step() has not been called"

    def is_joining(self) -> bool:
        """Whether this is inside of DDP's ``join()``, where ranks take fewer steps: nothing may wait for them."""
        config = getattr(uncompiled(self.wrapper), "_join_config", None)
        return config is not None and bool(config.enable)
