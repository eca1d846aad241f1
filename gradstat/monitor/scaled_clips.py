"""`ScaledClips`: hears in the first steps whether gradients are clipped before a loss scaler unscales them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradstat._core.announce import Closure
from gradstat._step import torch_calls
from gradstat._step.loss_scale import is_still_scaled
from gradstat._step.optimizers import unwrapped
from gradstat.monitor.probes.optimizer import ids_of
from gradstat.monitor.recorder import Recorder
from gradstat.monitor.unwatched import Unwatched

# So many times gradients are unscaled until it listens no more: a program makes its calls in one order in all steps.
_STEPS = 16


class ScaledClips:
    """Notes the scalar ``"scaled_clip"``, the limit of a clip, if gradients are clipped and unscaled afterwards.

    In this order, since a program may also unscale by hand before it clips. It hears torch's clips and gradstat's, in
    the thread that trains, and reads no gradient.

    Attributes:
        optimizer: Whose gradients it watches.
        is_over: Whether this optimizer has stepped since the gradients were measured: to clip now changes nothing.
    """

    def __init__(self, recorder: Recorder, optimizer: Optimizer, unwatched: Unwatched, listens: bool) -> None:
        """For the scaler of ``recorder``; unless it ``listens``, another listener passes on what that one hears."""
        self.optimizer, self._recorder, self._scaler = unwrapped(optimizer), recorder, recorder.scaler
        self._unwatched = unwatched
        self._watched = ids_of(optimizer)
        self._thread, self._left, self.is_over = threading.get_ident(), _STEPS, False
        self._clipped: set[int] = set()  # ids of parameters whose gradients were clipped since the step was measured
        self._limit: Any = None
        if listens:
            torch_calls.listen(self)

    def remove(self) -> None:
        """Hears nothing any more."""
        self._left = 0
        torch_calls.leave(self)

    def before_change(self, parameters: Sequence[Tensor], scaler: Any, loss: Any, limit: Any) -> None:
        """Notes a clip of gradients that nothing has unscaled, once they are unscaled."""
        if self._left and self._thread == threading.get_ident():
            with self._unwatched.suppress_errors(0, "the order of clips and loss scalers could not be tracked"):
                self._hear(parameters, scaler, limit)

    def _hear(self, parameters: Sequence[Tensor], scaler: Any, limit: Any) -> None:
        those = set(map(id, parameters))
        if self._watched.isdisjoint(those):
            return
        if scaler is None and not is_still_scaled(self._scaler, self.optimizer):
            self.remove()  # the program clips what it has unscaled
        elif scaler is None and not self.is_over:
            self._clipped, self._limit = those, limit
        elif scaler is self._scaler:
            if not self._clipped.isdisjoint(those) and isinstance(self._limit, (int, float)):
                self._recorder.note("scaled_clip", float(self._limit))
            self._clipped = set()
            self._left -= 1
            if not self._left:
                self.remove()

    def after_change(self, parameters: Sequence[Tensor]) -> None:
        """Is no concern of this listener, as a backward pass is none."""

    def after_backward(self, losses: Sequence[Tensor]) -> None:
        """Is no concern of this listener."""

    def backward_failed(self, error: BaseException) -> None:
        """Is no concern of this listener."""

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        """Leaves the closure as it is."""
        return closure

    def after_step(self, optimizer: Optimizer) -> None:
        """Notes that the gradients are used."""
        if optimizer is self.optimizer:
            self.is_over, self._clipped = True, set()
