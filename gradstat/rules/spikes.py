"""Jumps of losses and gradient norms: values far above their running median, and levels that change at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from gradstat.guard import MAD, OF_LARGEST, OF_MEDIAN
from gradstat.rules.base import Records, Rule, carried
from gradstat.rules.rows import Floats

_BEGINNING = 20  # values that define the initial level
_FEW = 5  # values before there is any limit
WINDOW = 100  # steps
# A limit is at least this fraction of the way from the median back to the initial level, the third quartile of the
# first values.
LOST_PROGRESS = 0.25
_COUNT, _WITHIN = 4, 5  # a jump is so many values above the limit in so many steps, and began with the first
_EVERY = 32  # values after which limits are updated, whatever the length of windows
_BLOCK = 8  # the last values, whose median is the level before a jump
# Of a shift: values before it, and of those how many tell the level; values after it, and in how many pairs with those
# before it they may lie on the other side; and values on each side of it that differ at once.
_OLDER, _LAST, _PAIRS, _FIRST = 32, 16, ((8, 0), (16, 48)), 4


class Shift(NamedTuple):
    """A level that changed in step ``began``, which showed in ``step``."""

    began: int
    step: int
    before: float  # the median of the last values before it
    after: float
    least: float  # the smaller one of two differences: all from before, and the first ones from those right before


class LevelRule(Rule):
    """A series whose level changes at once, and lasts.

    Values are compared by rank, so that neither their scale nor their tails matter: 8 of them are beyond each of the 32
    before, or 16 are in all but 48 of the 512 pairs. Of independent values they are by chance in 1 of 8 * 10 ** 7 and
    in 1 of 3 * 10 ** 6 steps (Mann and Whitney, Annals of Mathematical Statistics 18, 1947). Values that drift are
    beyond earlier ones as well, so `Shift.least` also has by how much the first four differ from the last four.
    """

    _recent, _recent_steps = carried(list[float]()), carried(list[int]())  # the last values

    def shifts(self, steps: npt.NDArray[np.int64], values: Floats, sign: int) -> list[Shift]:
        """Adds the ``values`` of ``steps``; returns where their level has risen (``sign`` 1) or fallen (-1)."""
        is_finite, found = np.isfinite(values), list[Shift]()
        self._recent += values[is_finite].tolist()
        self._recent_steps += steps[: len(values)][is_finite].tolist()
        for count, most in _PAIRS:
            fresh = min(int(is_finite.sum()), len(self._recent) - _OLDER - count + 1)
            if fresh <= 0:
                continue
            every = sign * sliding_window_view(np.array(self._recent), _OLDER + count)[-fresh:]
            older, newer = every[:, :_OLDER], every[:, _OLDER:]
            crossed = (older[:, :, None] >= newer[:, None, :]).sum((1, 2))
            for row in np.flatnonzero(crossed <= most).tolist():
                before, after = median(older[row, -_LAST:]), median(newer[row])
                at_once = median(newer[row, :_FIRST]) - median(older[row, -_FIRST:])
                # It began where the sum of signs around the middle, from there on, is largest.
                length = int(np.sign(newer[row, ::-1] - (before + after) / 2).cumsum().argmax())
                began, showed = (self._recent_steps[row - len(every) - back] for back in (length, 0))
                found.append(Shift(began, showed, sign * before, sign * after, min(after - before, at_once)))
        del self._recent[: -_OLDER - _PAIRS[-1][0] + 1], self._recent_steps[: -_OLDER - _PAIRS[-1][0] + 1]
        return sorted(found, key=lambda shift: shift.step)


class Jump(NamedTuple):
    """A value above its limit: that of ``step``, and of this step the rest as well.

    ``before`` is the median of the last values before it, ``median`` that of the window by which the limit was set, 0
    while there is none. ``lasts``: whether others of the next values are above it as well.
    """

    step: int
    value: float
    before: float
    median: float
    limit: float
    lasts: bool


class SpikeRule(Rule):
    """A series that jumps and stays high, or that jumps beyond all earlier values.

    A jump of one step means little: the better a model has learned, the more a single hard sample stands out, at any
    ratio to the median, up to the values with which training began. So a finding takes several values above the limit
    within few steps; one that is beyond the initial level is an info.
    """

    # The limit is so many spreads above the median, both as a `gradstat.SpikeGuard` defines them, of the newer half of
    # the window, since losses fall; and also at least this many times the median.
    sigmas: float
    factor: float = 1.0
    # It is also at least this many robust standard deviations of the log magnitudes above the median. On this scale,
    # tails that are heavy because samples differ by factors, or because a loss sums over varying counts, are no heavier
    # than those of a normal distribution.
    log_sigmas: ClassVar[float]
    # A single value is told if it is above this many times the initial level and the largest in the window.
    single_factor: ClassVar[float]
    # Until half a window is known, the limit is this many times the largest of at least five values.
    warmup_factor: ClassVar[float] = math.inf
    # A jump comes within a few steps: of the way from the median to the values above the limit, those right before it
    # had climbed at most this share.
    climbed: ClassVar[float] = math.inf

    _values = carried(list[float]())
    _first = carried(list[float]())
    _above = carried(Records(5))  # the last values above the limit, as `Jump` up to ``limit``
    _new = carried(0)  # values since limits were updated
    _median = carried(math.nan)  # of the window, when it is half full
    _scatter = carried(1.0)  # the factor by which values of this series usually differ
    _high, _beyond = carried(math.inf), carried(math.inf)

    def detect_jump(self, step: int, value: float) -> Jump | None:
        """Adds a finite ``value`` of ``step``; returns the jump that is detected now, by where it began, or None."""
        found = None
        is_alone, is_high = value > self._beyond, value > self._high
        if is_alone or is_high:
            known = 0.0 if math.isnan(self._median) else self._median
            now = [step, value, median(self._values[-_BLOCK:]), known, min(self._high, self._beyond)]
            if is_high:
                self._above[:] = [*(one for one in self._above if step - one[0] < _WITHIN), now]
            lasts = is_high and self._is_at_once()
            if (is_alone or lasts) and self.begins("leap" if lasts else "alone", step):
                began, jumped, before, middle, limit = self._above[0] if lasts else now
                found = Jump(int(began), jumped, before, middle, limit, lasts)
        if self.single_factor * value > self._beyond and value <= max(2.0, self.factor) * max(
            self._values[-_WITHIN:], default=math.inf
        ):
            self._beyond = self.single_factor * value  # steady growth is not a jump
        if len(self._first) < _BEGINNING:
            self._first.append(value)
        self._values.append(value)
        self._new += 1
        # Counted in values, so that results do not depend on where one review ends and the next begins.
        if self._new == _EVERY:
            self._new = 0
        if not self._new or len(self._values) in (_FEW, WINDOW // 2):
            self.set_limits()
        return found

    def _is_at_once(self) -> bool:
        """Whether enough of the last values are above the limit, and have not climbed there."""
        _, _, before, known, _ = self._above[0]
        now = median(value for _, value, *_ in self._above)
        return len(self._above) >= _COUNT and before - known <= self.climbed * (now - known)

    def beginning(self) -> float:
        """The initial level: the third quartile of the first values."""
        first = sorted(self._first or self._values)
        return first[len(first) * 3 // 4]

    def set_limits(self) -> None:
        """Updates the limits for the next steps."""
        del self._values[:-WINDOW]
        if len(self._values) < WINDOW // 2:
            largest = max(self._values)
            self._high = self._beyond = self.warmup_factor * largest if largest > 0 else math.inf
            return
        # Sorting a hundred numbers is faster than numpy's median of them.
        newer = sorted(self._values[-WINDOW // 2 :])
        self._median = median = newer[len(newer) // 2]
        first = self.beginning()
        sizes = newer if newer[0] > 0 else sorted(abs(value) for value in newer if value)
        if sizes:
            self._scatter = math.exp(min(self.log_sigmas * _spread(sizes, math.log), 100.0))
        size = sizes[len(sizes) // 2] if sizes else 0.0
        relapse = max(LOST_PROGRESS * (first - median), abs(first) / 100)  # a hundredth is nothing
        spread = max(_spread(newer), OF_LARGEST * (newer[-1] - median), OF_MEDIAN * size)
        above = max(self.sigmas * spread, (self.factor - 1) * size, relapse)
        self._beyond = max(median + above, self.single_factor * max(first, *self._values))
        self._high = median + max(above, (self._scatter - 1) * size)


def _spread(values: Sequence[float], scale: Callable[[float], float] = float) -> float:
    """A robust standard deviation of sorted ``values``, on a monotonic ``scale``."""
    scaled, half = list(map(scale, values)), len(values) // 2
    return MAD * sorted(abs(value - scaled[half]) for value in scaled)[half]
