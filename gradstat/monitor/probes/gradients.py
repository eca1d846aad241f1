"""`FollowedGradient`: whether steps use gradients that contain those of the step before, seen at one parameter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradstat._core.hooks import Hook
from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import shard_of
from gradstat.check import stats
from gradstat.monitor.probes.base import OF_ZEROS, Pending, Probe, Run, measurable

_AGAIN = 50  # steps after which it is read once more whether a gradient was zeroed unseen


class FollowedGradient:
    """Tells whether a step uses a gradient that contains what the last step has used.

    A gradient that a step has used is the same tensor when the next one is added to it, and its version is higher by
    exactly one: another tensor takes its place after it was set to None, and ``zero_()`` or any other change raises the
    version once more. A change of ``gradient.data`` does not, so the first gradient that is told is read, and the next
    ones as long as they were zero, now and then.
    """

    def __init__(self) -> None:
        self._parameter: weakref.ref[Tensor] | None = None
        self._handles: list[Any] = []
        self._last: tuple[weakref.ref[Tensor], int] | None = None  # the gradient at the last event, and its version
        self._has_used = self._has_new = False  # whether it contains what a step has used, and what came afterwards
        self._was_zero, self._wait = False, 0  # when it was read, and for how many steps it is not read again

    @property
    def parameter(self) -> Tensor | None:
        return None if self._parameter is None else self._parameter()

    def follow(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Follows the first of ``parameters`` that has a gradient and can be heard; returns it, if it is another."""
        suited = (p for p in parameters if p.requires_grad and p.is_leaf and p.grad is not None)
        chosen = next(suited, None)
        if chosen is None or chosen is self.parameter:
            return None
        self.remove()
        self._parameter, self._last = weakref.ref(chosen), None
        before, after = Hook(self._before_pass), Hook(self._after_pass)
        self._handles = [chosen.register_hook(before), chosen.register_post_accumulate_grad_hook(after)]
        return chosen

    def use(self) -> bool:
        """A step uses the gradient. Returns whether it contains what the last one has used."""
        parameter = self.parameter
        gradient = None if parameter is None else parameter.grad
        is_kept = self._has_used and self._has_new and not self._was_zero
        self._has_used, self._has_new = gradient is not None, False
        self._last = None if gradient is None else (weakref.ref(gradient), gradient._version)
        self._wait -= self._was_zero
        return is_kept

    def _before_pass(self, _: Tensor) -> None:
        parameter = self.parameter
        gradient, last = None if parameter is None else parameter.grad, self._last
        if self._wait or not self._has_used or self._has_new or gradient is None or last is None:
            return
        if last[0]() is gradient and last[1] == gradient._version:
            shard, self._wait = shard_of(gradient.detach()), _AGAIN
            self._was_zero = measurable(shard) and not stats([shard])[:, OF_ZEROS].any()

    def _after_pass(self, parameter: Tensor) -> None:
        gradient, last = parameter.grad, self._last
        assert gradient is not None
        version = gradient._version
        is_continued = last is not None and last[0]() is gradient and version == last[1] + 1
        self._has_used, self._has_new = self._has_used and is_continued, True
        self._last = weakref.ref(gradient), version

    def remove(self) -> None:
        """Hears nothing any more."""
        for handle in self._handles:
            handle.remove()


class GradientUse(Probe):
    """Notes the scalar ``"not_zeroed"`` in a loop whose optimizer is not known: it has stepped if a parameter changed.

    A clip by the program hides it, as a zeroing would.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._gradient, self._version = FollowedGradient(), 0
        self.handles.append(self._gradient)

    @classmethod
    def of(cls, run: Run) -> GradientUse | None:
        settings = run.settings
        return cls(run) if settings.optimizer is None and settings.engine is None and run.source.is_loop else None

    def begin(self, step: Pending, named: NamedParameters) -> None:
        self._gradient.follow(named.parameters[::-1])

    def take(self, step: Pending, named: NamedParameters) -> None:
        parameter = self._gradient.parameter
        if parameter is not None and parameter._version != self._version:
            self._version = parameter._version
            if self._gradient.use():
                self.run.noted["not_zeroed"] = 1.0
