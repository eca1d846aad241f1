"""`ZeroedPasses`: reports backward passes whose gradients are zeroed before any step uses them, by mistake."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType

from torch import Tensor

from gradstat._core.tensors import shard_of
from gradstat.check import stats
from gradstat.monitor.probes.base import OF_ZEROS, measurable
from gradstat.monitor.probes.gradients import Zeroed

_UNUSED = 50  # so many zeroed passes without a step are reported; four times as many before the first step
# So many steps in a row are reported in which as many passes are unused of as many, or so many once these numbers have
# varied, as they do at the end of an epoch, or where a program leaves out steps now and then. The last are looked at.
_ALIKE, _VARIED, _LOOKS = 3, 16, 2


class ZeroedPasses:
    """Counts the passes before each step, and those of them whose gradients were zeroed.

    A program may mean that: it reads gradients in between, evaluates them elsewhere, or moves the parameters for a
    second pass, as SAM does. So the steps after such a step are looked at. Gradients must have been zero before each
    group of passes, all groups must come from the same places of the program, nothing may have changed the parameters,
    and the step must use the gradients as the last pass has left them, but for changes that are announced. The last
    group may come from another place if the others ran inside of DDP's ``no_sync()``, which is for accumulation.

    Attributes:
        is_looking: Whether the passes before the coming step are looked at.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]], outermost: CodeType | None) -> None:
        """``parameters`` are those that are watched; ``outermost`` is as for `StepSource`."""
        self._parameters, self._outermost = parameters, outermost
        self._enough = 4 * _UNUSED  # some programs take the gradient of each sample
        self._count = 0  # zeroings between two passes, since the last step
        self._version: int | None = None  # of a parameter after the last pass
        self._row, self._needed = 0, float(_ALIKE)  # steps in a row with unused passes, and how many are reported
        self._last = 0, 0  # how many passes were unused, of how many, in the last of them
        self.is_looking = False
        self._remained: Tensor | None = None  # of a gradient before the running pass
        self._begin()

    def _begin(self) -> None:
        """The next pass is the first that the coming step may use."""
        self._all = self._since = 0  # passes, and those since gradients were zeroed
        # Of passes that add to the same gradients: a hash of their places, and whether the last was in `no_sync()`.
        self._groups: list[tuple[int, bool]] = []
        self._changes: list[Tensor | bool] = []  # whether something has changed that must not
        self._weights: Tensor | None = None
        self._left: Tensor | None = None  # of all gradients, after the last pass or announced change

    # Events ----------------------------------------------------------------------------------------------

    def before_pass(self, gradient: Tensor | None) -> None:
        """While this is looking: a pass is about to add to ``gradient``, or has, if that was said before."""
        if self._remained is None:
            self._remained = _rows_of([] if gradient is None else [gradient])

    def after_pass(
        self, were_zeroed: bool, versions: tuple[int, int], counts: bool, is_local: bool = False
    ) -> Zeroed | None:
        """A pass has left gradients. Returns what to report if no step has used those of many.

        Args:
            were_zeroed: Whether the gradients had changed since the last pass.
            versions: Of the parameter of which that is known, and of the one of which it will be known.
            counts: Whether this is training, not an evaluation, which may take gradients.
            is_local: Whether it was inside of DDP's ``no_sync()``.
        """
        goes_on = counts and self._version == versions[0]
        self._version = versions[1] if counts else None
        self._count = self._count + were_zeroed if goes_on else 0
        if not goes_on:
            self._begin()
        self._all += 1
        self._since = 1 if were_zeroed else self._since + 1
        if self.is_looking:
            self._look(were_zeroed, is_local)
        return Zeroed(self._count) if were_zeroed and self._count == self._enough else None

    def before_change(self) -> None:
        """What announces itself is about to change or to use the gradients. A scaler does both in one call."""
        left, self._left = self._left, None
        if left is not None:
            self._changes.append(_differ(_rows_of(self._gradients()), left))

    def after_change(self) -> None:
        """The gradients are others now."""
        if self.is_looking:
            self._left = _rows_of(self._gradients())

    def before_step(self) -> Zeroed | None:
        """A step is about to use the gradients. Returns what to report of the passes that it does not use."""
        counts = self._all - self._since, self._all
        if self._row and counts != self._last:
            self._needed = max(self._needed, _VARIED)
        self._last, self._row = counts, self._row + 1 if counts[0] else 0
        if not (counts[0] and self.is_looking):
            return None
        self.before_change()
        *others, last = self._groups
        is_elsewhere = len({*others}) != 1 or (last != others[0] and not others[0][1])
        if is_elsewhere or any(map(bool, self._changes)):
            self._row, self._needed = 0, 2 * max(self._needed, _VARIED)
        if self._row < self._needed:
            return None
        self._needed = math.inf
        return Zeroed(*counts, self._row)

    def after_step(self) -> None:
        """A step has ended, or was skipped."""
        self._enough = max(_UNUSED, 2 * self._count)
        self._count, self._version = 0, None
        self.is_looking = self._row >= self._needed - _LOOKS
        self._begin()

    # Looks -----------------------------------------------------------------------------------------------

    def _look(self, were_zeroed: bool, is_local: bool) -> None:
        place = _place(self._outermost)
        if were_zeroed or not self._groups:
            self._groups.append((place, is_local))
            self._changes.append(self._remained is None or (self._remained[:, OF_ZEROS] != 0).any())
        else:
            self._groups[-1] = hash((self._groups[-1], place)), is_local
        weights, self._remained = _rows_of(self._parameters()), None
        self._changes.append(self._weights is not None and _differ(weights, self._weights))
        self._weights = weights
        self.after_change()

    def _gradients(self) -> Iterable[Tensor]:
        return (parameter.grad for parameter in self._parameters() if parameter.grad is not None)


def _rows_of(tensors: Iterable[Tensor]) -> Tensor:
    return stats([shard for each in tensors if measurable(shard := shard_of(each.detach()))])


def _differ(one: Tensor, other: Tensor) -> Tensor | bool:
    return one.shape != other.shape or (one != other).any()


def _place(outermost: CodeType | None) -> int:
    """A hash of the calls that led here, of each its function and the place in it."""
    calls = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        calls.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(calls))
