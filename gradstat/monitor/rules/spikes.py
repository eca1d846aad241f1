"""The rule that loss and gradient-norm spikes share: a value far above its running median."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gradstat.monitor.rules.base import Episodes, Rule

# Makes the median absolute deviation of a normal distribution its standard deviation.
_MAD = 1.4826

# So many values tell where training began.
_BEGINNING = 20

# So many values are the least that tell what is far too much.
_FEW = 5

# Limits are set anew after so many values, however long windows are.
_EVERY = 32


class SpikeRule(Rule):
    """A series that leaps and stays up, or that leaps beyond anything there was.

    A leap of one step means little: the better a model has learned, the more a single hard sample stands out, at any
    ratio to the median, until it brings back the values with which training began. So it takes several values above
    the limit within few steps, or one that is beyond those of the beginning.

    Args:
        sigmas, factor: The limit is so many robust standard deviations (1.4826 times the median absolute deviation)
            above the median of the window, and at least ``factor`` times the median.
        log_sigmas: And so many of the logarithms of magnitudes: on this scale tails that are heavy because samples
            differ by factors, or because a loss is a sum over more here and less there, are no heavier than those of a
            normal distribution.
        back: And at least so far above the median, as a share of the way back to where training began: the third
            quartile of the first 20 values.
        floor: And at least so far above it.
        times, within: So many values above the limit within so many steps are a leap, told of the first of them.
        beyond: A single value is one if it is above so many times that of the beginning and the largest before it.
        early: Before half a window is known, it takes so many times the largest of at least five.
        window: Of how many steps; compared from half of them on.
        quiet: A leap so many steps after the last is another one.
    """

    def __init__(
        self, sigmas: float, log_sigmas: float, factor: float, back: float, floor: float, times: int, within: int,
        beyond: float, early: float, window: int, quiet: int,
    ) -> None:  # fmt: skip
        self.sigmas, self.log_sigmas, self.factor = sigmas, log_sigmas, factor
        self.back, self.floor = back, floor
        self.times, self.within, self.beyond, self.early, self.window = times, within, beyond, early, window
        self._values: list[float] = []
        self._first: list[float] = []
        self._leaps: list[int] = []
        self._new = 0
        self._median = math.nan  # of the window, when it is half full
        self._scatter = 1.0  # the factor by which values of this series differ anyhow
        self._high = self._beyond = math.inf
        self._episodes = Episodes(quiet)

    def leapt(self, step: int, value: float) -> int | None:
        """Takes in a finite value; the step in which a leap began that shows now, or None."""
        began = None
        alone, is_high = value > self._beyond, value > self._high
        if is_high:
            self._leaps = [*(leap for leap in self._leaps if step - leap < self.within), step]
        if (alone or (is_high and len(self._leaps) >= self.times)) and self._episodes.begins("leap", step):
            began = step if alone else self._leaps[0]
        if self.beyond * value > self._beyond and value <= self.factor * max(
            self._values[-self.within :], default=math.inf
        ):
            self._beyond = self.beyond * value  # what grows from step to step is no single leap
        if len(self._first) < _BEGINNING:
            self._first.append(value)
        self._values.append(value)
        self._new += 1
        # By the count of values, so that it does not matter where one review ends and the next begins.
        if self._new == _EVERY:
            self._new = 0
        if not self._new or len(self._values) in (_FEW, self.window // 2):
            self.set_limits()
        return began

    def beginning(self) -> float:
        """The value with which training began."""
        return sorted(self._first)[len(self._first) * 3 // 4]

    def set_limits(self) -> None:
        """Sets the limits for the next steps."""
        del self._values[: -self.window]
        if len(self._values) < self.window // 2:
            largest = max(self._values)
            self._high = self._beyond = self.early * largest if largest > 0 else math.inf
            return
        # Sorting a hundred numbers is quicker than numpy's median of them.
        values = sorted(self._values)
        self._median = median = values[len(values) // 2]
        first = self.beginning()
        sizes = values if values[0] > 0 else sorted(abs(value) for value in values if value)
        if sizes:
            self._scatter = math.exp(min(self.log_sigmas * _spread(sizes, math.log), 100.0))
        size = sizes[len(sizes) // 2] if sizes else 0.0
        above = max(self.sigmas * _spread(values), (self.factor - 1) * size, self.back * (first - median), self.floor)
        self._beyond = max(median + above, self.beyond * max(first, values[-1]))
        self._high = median + max(above, (self._scatter - 1) * size)


def _spread(values: Sequence[float], scale: Callable[[float], float] = float) -> float:
    """A robust standard deviation of sorted ``values``, on a ``scale`` that keeps their order."""
    half = len(values) // 2
    median = scale(values[half])
    # The nearest ``half`` neighbours of the median are a range of values. It is found by bisection, where the value
    # below the range comes to be farther away than the one above it.
    low, high = 0, len(values) - half - 1
    while low < high:
        middle = (low + high) // 2
        if median - scale(values[middle]) > scale(values[middle + half + 1]) - median:
            low = middle + 1
        else:
            high = middle
    return _MAD * max(median - scale(values[low]), scale(values[low + half]) - median)
