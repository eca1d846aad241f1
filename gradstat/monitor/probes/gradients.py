"""`FollowedGradient`: whether steps use gradients that contain those of the step before, or none, at one parameter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradstat._core.hooks import Hook
from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import shard_of
from gradstat.check import stats
from gradstat.monitor.probes.base import OF_ZEROS, Pending, Probe, Run, measurable
from gradstat.rules.rows import Observation

_AGAIN = 50  # steps after which it is read once more whether a gradient was zeroed unseen
_UNUSED = 16  # a warning needs so many passes, of `_AGAIN` or more


class Zeroed(NamedTuple):
    """Backward passes whose gradients were zeroed before a step used them.

    Attributes:
        unused: How many.
        of: Of how many passes before these steps; 0 if there was no step.
        steps: In how many steps in a row.
    """

    unused: int
    of: int = 0
    steps: int = 0


class FollowedGradient:
    """Whether a step uses a gradient that contains what the last step has used.

    A gradient that a step has used is the same tensor when the next one is added to it, and its version is higher by
    exactly one: another tensor takes its place after it was set to None, and ``zero_()`` or any other change raises the
    version once more. A change of ``gradient.data`` does not, so the first gradient that seems reused is read, and the
    next ones as long as they were zero, now and then.
    """

    def __init__(self) -> None:
        self._parameter: weakref.ref[Tensor] | None = None
        self._handles: list[Any] = []
        self._last: tuple[weakref.ref[Tensor], int] | None = None  # the gradient at the last event, and its version
        self._has_used = self._has_new = False  # whether it contains what a step has used, and what came afterwards
        self._was_zero, self._wait = False, 0  # when it was read, and for how many steps it is not read again
        self._version = 0  # of the parameter, when it was looked at
        # Since `_began`: steps, changes of the parameter, and passes that were zeroed before a step used them; and
        # whether gradients that were changed in between were zeroed, if that was read.
        self._began = self._uses = self._changes = self._unused = 0
        self._are_zeroed: bool | None = None

    @property
    def parameter(self) -> Tensor | None:
        return None if self._parameter is None else self._parameter()

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Follows the first of ``parameters`` that has a gradient and can be heard."""
        suited = (p for p in parameters if p.requires_grad and p.is_leaf and p.grad is not None)
        chosen = next(suited, None)
        if chosen is None or chosen is self.parameter:
            return
        self.remove()
        self._parameter, self._last, self._version = weakref.ref(chosen), None, chosen._version
        before, after = Hook(self._before_pass), Hook(self._after_pass)
        self._handles = [chosen.register_hook(before), chosen.register_post_accumulate_grad_hook(after)]

    def changes(self) -> int:
        """How often the parameter was changed in place since the last call."""
        parameter = self.parameter
        before, self._version = self._version, self._version if parameter is None else parameter._version
        self._changes += self._version - before
        return self._version - before

    def use(self) -> bool:
        """A step uses the gradient. Returns whether it contains what the last one has used."""
        parameter = self.parameter
        gradient = None if parameter is None else parameter.grad
        is_kept = self._has_used and self._has_new and not self._was_zero
        self._has_used, self._has_new = gradient is not None, False
        self._last = None if gradient is None else (weakref.ref(gradient), gradient._version)
        self._wait -= self._was_zero
        self._uses += 1
        return is_kept

    def observe_unused(self, step: Pending) -> None:
        """Observes passes that no step has used, once they are many and more than steps, after `changes`.

        A step in whose closure gradients are zeroed, as LBFGS has it, changes the parameter for each of them. A loss
        scaler may skip steps.
        """
        uses, unused = self._uses, self._unused
        if uses + unused >= _AGAIN:
            if unused >= _UNUSED and unused > max(uses, self._changes) and "loss_scale" not in step.on_device:
                seen = Zeroed(unused, uses and uses + unused, uses)
                step.observations.append(Observation("unused", self._began, seen))
            self._uses = self._changes = self._unused = 0
            self._began, self._are_zeroed = step.step, None

    def _before_pass(self, _: Tensor) -> None:
        parameter = self.parameter
        gradient, last = None if parameter is None else parameter.grad, self._last
        if self._has_new and last is not None:  # nothing has used it
            is_same = gradient is not None and last[0]() is gradient
            if not is_same:
                self._unused += 1
            elif gradient is not None and last[1] != gradient._version:  # it may have been clipped
                self._are_zeroed = _is_zero(gradient) if self._are_zeroed is None else self._are_zeroed
                self._unused += self._are_zeroed
        if self._wait or not self._has_used or self._has_new or gradient is None or last is None:
            return
        if last[0]() is gradient and last[1] == gradient._version:
            self._was_zero, self._wait = _is_zero(gradient), _AGAIN

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


def _is_zero(gradient: Tensor) -> bool:
    shard = shard_of(gradient.detach())
    return measurable(shard) and not stats([shard])[:, OF_ZEROS].any()


class GradientUse(Probe):
    """Notes the scalar ``"not_zeroed"`` in a loop whose optimizer is not known: it has stepped if a parameter changed.

    A clip by the program hides it, as a zeroing would.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._gradient = FollowedGradient()
        self.handles.append(self._gradient)

    @classmethod
    def of(cls, run: Run) -> GradientUse | None:
        settings = run.settings
        return cls(run) if settings.optimizer is None and settings.engine is None and run.source.is_loop else None

    def begin(self, step: Pending, named: NamedParameters) -> None:
        self._gradient.follow(named.parameters[::-1])
        self._gradient.use()  # by the step that follows

    def take(self, step: Pending, named: NamedParameters) -> None:
        if self._gradient.changes() and self._gradient.use():
            self.run.noted["not_zeroed"] = 1.0
        self._gradient.observe_unused(step)
