"""Jumps of losses and gradient norms: values far above their running median, and levels that change at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

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
_STEEP = 8  # standard errors by which a level moves the other way where only the newer half of those before count
_BLOCK, _KNOWN = 8, 12  # values of which a level is the median; levels to know before the last ones are judged


class Shift(NamedTuple):
    """A level that changed in step ``began``, which showed in ``step``; and the deviation of single values from it.

    ``still`` is by how much the last levels, whose mean is ``after``, go on in this direction, from first to last.
    """

    began: int
    step: int
    before: float
    after: float
    deviation: float
    still: float


class LevelRule(Rule):
    """A series whose level changes at once, and lasts.

    A single value may be anything, but medians of eight are nearly normally distributed, however heavy the tails. The
    mean of the last ones is compared with those before, continued by their trend, so that neither learning nor a slow
    drift counts; each of them exceeds all but one of those before.

    While they move the other way, only the newer half of those before says where the level was.

    The level moved by so many standard ``errors``, estimated from differences of neighbouring values; six are where a
    guard draws the line. It also moved by ``moves`` times its largest earlier move in this direction, since values may
    depend on each other. Other thresholds are conventions of gradstat: the smallest round numbers with which healthy
    trainings and programs of its tests are silent over five seeds.
    """

    fresh: ClassVar[int] = 2
    before: ClassVar[int] = 6
    kept: ClassVar[int] = 18
    errors: ClassVar[float] = 10.0
    moves: ClassVar[float] = 4.0

    _recent = carried(list[float]())  # the values of the last levels and those behind them, with these
    _recent_steps = carried(list[int]())

    def shifts(self, steps: npt.NDArray[np.int64], values: Floats, sign: int) -> Iterator[Shift]:
        """Adds the ``values`` of ``steps``; yields when their level has risen (``sign`` 1) or fallen (-1)."""
        is_finite, known = np.isfinite(values), len(self._recent) // _BLOCK
        self._recent += values[is_finite].tolist()
        self._recent_steps += steps[: len(values)][is_finite].tolist()
        count = len(self._recent) // _BLOCK
        if count == known:
            return
        blocks = np.array(self._recent[: count * _BLOCK]).reshape(count, _BLOCK)
        ordered, apart = np.sort(blocks), np.sort(np.abs(blocks[:, 1:] - blocks[:, :-1]))
        levels, scatters = (ordered[:, 3] / 2 + ordered[:, 4] / 2).tolist(), apart[:, 3].tolist()
        for end in range(known + 1, count + 1):
            last = slice(max(0, end - self.kept), end)
            moved = self._moved(levels[last], scatters[last], sign)
            if moved is not None:
                before, after, deviation = moved
                # By a line through them.
                places = np.arange(self.fresh) - (self.fresh - 1) / 2
                slope = float(places @ levels[end - self.fresh : end] / (places @ places))
                # It began where the sum of signs around the middle, from there on, is largest.
                middle, at = before / 2 + after / 2, end * _BLOCK - 1
                span = self._recent[at - (self.fresh + 1) * _BLOCK + 1 : at + 1]
                sums = list(itertools.accumulate(1 if sign * (value - middle) > 0 else -1 for value in reversed(span)))
                began = at - sums.index(max(sums))
                still = sign * slope * (self.fresh - 1)
                yield Shift(self._recent_steps[began], self._recent_steps[at], before, after, deviation, still)
        first = max(0, count - self.kept) * _BLOCK
        self._recent, self._recent_steps = self._recent[first:], self._recent_steps[first:]

    def _moved(self, levels: list[float], scatters: list[float], sign: int) -> tuple[float, float, float] | None:
        """If it has moved, the level before, as its trend would have continued it, and now, and the deviation."""
        fresh, count = self.fresh, self.before
        older, now = levels[:-fresh], levels[-fresh:]
        if len(older) < _KNOWN:  # too few moves to know the usual ones
            return None
        reference, half = older[-count:], count // 2
        newer = reference[half:]
        least = min(sign * level for level in now)
        if least <= sorted(sign * level for level in newer)[-2]:  # mostly
            return None
        trend = median(newer) - median(reference[:half])
        # The standard error of a median is 1.25 times that of a mean.
        deviation = MAD / math.sqrt(2) * median(scatters[:-fresh])
        if sign * trend < -_STEEP * 1.25 * deviation * math.sqrt(2 / (half * _BLOCK)):
            reference = newer  # older ones do not say where it has come to
        elif least <= sorted(sign * level for level in reference)[-2]:
            return None
        before, after = median(reference), sum(now) / fresh
        shift = sign * (after - before) - max(0.0, sign * trend * (count + fresh) / count)
        error = 1.25 * deviation * math.sqrt(1 / (fresh * _BLOCK) + 1 / (len(reference) * _BLOCK))
        if not shift > self.errors * error:
            return None
        means = np.convolve(older, np.ones(fresh) / fresh, "valid")
        moves = means[fresh:] - means[:-fresh]
        is_far = shift > self.moves * float((sign * moves).max())
        return (after - sign * shift, after, deviation) if is_far else None


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
