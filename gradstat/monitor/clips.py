"""`Clips`: hears whether gradients are clipped to next to nothing, or before a loss scaler unscales them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradstat._core.announce import Closure, ElementLimit
from gradstat._step import torch_calls
from gradstat._step.loss_scale import is_still_scaled
from gradstat._step.optimizers import unwrapped
from gradstat.monitor.probes.optimizer import ids_of
from gradstat.monitor.recorder import Recorder
from gradstat.monitor.unwatched import Unwatched

# So many steps tell whether a program clips before it unscales: it makes its calls in one order in all steps.
_STEPS = 16
_TINY = 1e-3  # the largest limit that is noted; programs clip to norms from 0.01 to 10


class Clips:
    """Notes the limit of a clip, as the scalar ``"tiny_clip"`` if it is tiny, and in the first steps as another.

    That is ``"scaled_clip"``, if gradients are clipped and unscaled afterwards: in this order, since a program may also
    unscale by hand before it clips. It hears torch's clips and gradstat's, in the thread that trains, and reads no
    gradient. It listens as long as the monitor, since a limit may change in the middle of a run: for a model of 100
    parameters this takes 16 us per step, of which 7 us are for the backward pass.

    Attributes:
        optimizer: Whose gradients it watches.
        is_over: Whether this optimizer has stepped since the gradients were measured: to clip now changes nothing.
    """

    def __init__(self, recorder: Recorder, optimizer: Optimizer, unwatched: Unwatched, listens: bool) -> None:
        """For the scaler of ``recorder``; unless it ``listens``, another listener passes on what that one hears."""
        self.optimizer, self._recorder, self._unwatched = unwrapped(optimizer), recorder, unwatched
        self._scaler = recorder.scaler if recorder.is_scaled else None
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
        """Notes a tiny limit at once, and a clip of gradients that nothing has unscaled once they are unscaled."""
        is_tiny = scaler is None and isinstance(limit, (int, float)) and limit <= _TINY
        is_open = self._left > 0 and self._scaler is not None
        if (is_open or is_tiny) and self._thread == threading.get_ident():
            with self._unwatched.suppress_errors(0, "the order of clips and loss scalers could not be tracked"):
                those = set(map(id, parameters))
                if is_tiny and not self.is_over and self._watched <= those:
                    is_of_elements = isinstance(limit, ElementLimit)
                    numel = sum(parameter.numel() for parameter in parameters) if is_of_elements else 1
                    self._recorder.note("tiny_clip", limit * math.sqrt(numel))
                if is_open and not self._watched.isdisjoint(those):
                    self._hear(those, scaler, limit)

    def _hear(self, those: set[int], scaler: Any, limit: Any) -> None:
        if scaler is None and not is_still_scaled(self._scaler, self.optimizer):
            self._left = 0  # the program clips what it has unscaled
        elif scaler is None and not self.is_over:
            self._clipped, self._limit = those, limit
        elif scaler is self._scaler:
            if not self._clipped.isdisjoint(those) and isinstance(self._limit, (int, float)):
                self._recorder.note("scaled_clip", float(self._limit))
            self._clipped = set()
            self._left -= 1

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
