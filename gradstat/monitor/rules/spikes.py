"""The base of the rules on loss and gradient-norm spikes: a value far above its running median."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gradstat.monitor.rows import Window
from gradstat.monitor.rules.base import Episodes, Rule

# Standard deviation of a normal distribution over its median absolute deviation.
_MAD = 1.4826

# Number of values that define the initial level.
_BEGINNING = 20

# Minimum number of values before there is any limit.
_FEW = 5

# Limits are updated after this many values, whatever the length of windows.
_EVERY = 32


class SpikeRule(Rule):
    """A series that jumps and stays high, or that jumps beyond all earlier values.

    A jump of one step means little: the better a model has learned, the more a single hard sample stands out, at any
    ratio to the median, up to the values with which training began. So a finding takes several values above the limit
    within few steps, or one that is beyond the initial level.

    Args:
        sigmas, factor: The limit is ``sigmas`` robust standard deviations (1.4826 times the median absolute deviation)
            above the median of the window, and at least ``factor`` times the median.
        log_sigmas: It is also at least this many robust standard deviations of the log magnitudes above the median. On
            this scale, tails that are heavy because samples differ by factors, or because a loss sums over varying
            counts, are no heavier than those of a normal distribution.
        lost_progress: It is also at least this fraction of the way from the median back to the initial level, the third
            quartile of the first 20 values.
        floor: It is also at least this far above the median.
        min_count, within_steps: So many values above the limit in so many steps are a jump, which began with the first.
        single_factor: A single value is a jump if it is above this many times the initial level and the largest in the
            window.
        warmup_factor: Until half a window is known, the limit is this many times the largest of at least five values.
        window: Number of steps in the window.
        quiet: A jump this many steps after the last one is a new finding.
    """

    def __init__(
        self, sigmas: float, log_sigmas: float, factor: float, lost_progress: float, floor: float, min_count: int,
        within_steps: int, single_factor: float, warmup_factor: float, window: int, quiet: int,
    ) -> None:  # fmt: skip
        self.sigmas, self.log_sigmas, self.factor = sigmas, log_sigmas, factor
        self.lost_progress, self.floor, self.min_count, self.within_steps = (
            lost_progress,
            floor,
            min_count,
            within_steps,
        )
        self.single_factor, self.warmup_factor, self.window = single_factor, warmup_factor, window
        self._values: list[float] = []
        self._first: list[float] = []
        self._leaps: list[int] = []
        self._new = 0
        self._median = math.nan  # of the window, when it is half full
        self._scatter = 1.0  # the factor by which values of this series usually differ
        self._high = self._beyond = math.inf
        self._episodes = Episodes(quiet)

    def calm_below(self) -> float:
        """A value up to here is no finding, before the next `set_limits`; -Inf if not known."""
        is_known = len(self._values) > max(_FEW, self.window // 2) and len(self._first) == _BEGINNING
        return min(self._high, self._beyond) if is_known and self.single_factor > 0 else -math.inf

    def not_calm(self, window: Window, name: str) -> Iterator[tuple[int, int, float]]:
        """Rows, steps and values of the scalar ``name`` in ``window`` that need a look; adds the others itself."""
        column = window.scalars.get(name, np.empty(0))
        steps, values = window.steps.tolist(), column.tolist()
        row = 0
        while row < len(values):
            block = column[row : row + _EVERY - self._new]
            calm = block <= self.calm_below()
            count = len(calm) if calm.all() else int(calm.argmin())
            if count and self.single_factor * (highest := float(block[:count].max())) > self._beyond:
                # Growth so steady that each value may raise the limit, as in `detect_jump`: the last of them tells.
                least = min(*values[row : row + count], *self._values[-self.within_steps :])
                if highest <= self.factor * least:
                    self._beyond = self.single_factor * highest
                else:
                    count = int((self.single_factor * block > self._beyond).argmax())
            self._values += values[row : row + count]
            self._new += count
            row += count
            if self._new == _EVERY:
                self._new = 0
                self.set_limits()
            elif row < len(values):
                yield row, steps[row], values[row]
                row += 1

    def detect_jump(self, step: int, value: float) -> int | None:
        """Adds a finite value; returns the step in which a jump detected now began, or None."""
        began = None
        alone, is_high = value > self._beyond, value > self._high
        if is_high:
            self._leaps = [*(leap for leap in self._leaps if step - leap < self.within_steps), step]
        if (alone or (is_high and len(self._leaps) >= self.min_count)) and self._episodes.record("leap", step):
            began = step if alone else self._leaps[0]
        if self.single_factor * value > self._beyond and value <= self.factor * max(
            self._values[-self.within_steps :], default=math.inf
        ):
            self._beyond = self.single_factor * value  # steady growth is not a jump
        if len(self._first) < _BEGINNING:
            self._first.append(value)
        self._values.append(value)
        self._new += 1
        # Counted in values, so that results do not depend on where one review ends and the next begins.
        if self._new == _EVERY:
            self._new = 0
        if not self._new or len(self._values) in (_FEW, self.window // 2):
            self.set_limits()
        return began

    def beginning(self) -> float:
        """The initial level: the third quartile of the first values."""
        first = sorted(self._first or self._values)
        return first[len(first) * 3 // 4]

    def set_limits(self) -> None:
        """Updates the limits for the next steps."""
        del self._values[: -self.window]
        if len(self._values) < self.window // 2:
            largest = max(self._values)
            self._high = self._beyond = self.warmup_factor * largest if largest > 0 else math.inf
            return
        # Sorting a hundred numbers is faster than numpy's median of them.
        values = sorted(self._values)
        self._median = median = values[len(values) // 2]
        first = self.beginning()
        sizes = values if values[0] > 0 else sorted(abs(value) for value in values if value)
        if sizes:
            self._scatter = math.exp(min(self.log_sigmas * _spread(sizes, math.log), 100.0))
        size = sizes[len(sizes) // 2] if sizes else 0.0
        relapse = self.lost_progress * (first - median)
        above = max(self.sigmas * _spread(values), (self.factor - 1) * size, relapse, self.floor)
        self._beyond = max(median + above, self.single_factor * max(first, values[-1]))
        self._high = median + max(above, (self._scatter - 1) * size)


def _spread(values: Sequence[float], scale: Callable[[float], float] = float) -> float:
    """A robust standard deviation of sorted ``values``, on a monotonic ``scale``."""
    half = len(values) // 2
    median = scale(values[half])
    # The ``half`` nearest neighbours of the median are contiguous. Bisection finds where they begin: the first value
    # that is no farther from the median than the one just above the range.
    low, high = 0, len(values) - half - 1
    while low < high:
        middle = (low + high) // 2
        if median - scale(values[middle]) > scale(values[middle + half + 1]) - median:
            low = middle + 1
        else:
            high = middle
    return _MAD * max(median - scale(values[low]), scale(values[low + half]) - median)
