"""What changed shortly before a loss or a norm rose: learning rate, settings, and a factor on the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from gradstat.rules.rows import Window

# All thresholds are conventions of gradstat. A change may explain what begins up to so many steps later.
_BEFORE = 100
# Learning rates rise by more than this factor in one step, and settings change by more than it between two reviews;
# what dropout keeps, by less.
JUMP, _KEPT = 3.0, 1.5
# A factor on the loss multiplies it and the norm of gradients alike, up to the usual scatter, beside so many values.
_FACTOR, _ALIKE, _STEPS = 30.0, 2.0, 8
_MOST = 100  # changes that are kept
# A share s of the last average, or of elements that are dropped, leaves 1 - s. Of 1 and more, hardly anything.
_SHARES, _ALL = ("momentum", "beta1", "beta2", "dropout"), 1 - 1e-9
NO_DECAY = 0.05  # what a weight decay of 0 counts as; 0.5 is far above usual ones


class _Change(NamedTuple):
    first: int  # the first step in which it may have been made
    last: int
    words: str


class Changes:
    """Remembers what changed, to say it as the cause of what rises soon after."""

    def __init__(self) -> None:
        self._settings: dict[str, float] = {}
        self._rate = math.nan
        self._losses: list[list[float]] = []  # the last ones, and the norms of gradients
        self._seen: list[_Change] = []

    def note(self, window: Window) -> None:
        """Looks at the steps of ``window``."""
        if len(window.steps):
            self._seen = [*self._seen[-_MOST:], *self._of_settings(window), *self._of_scalars(window)]

    def before(self, step: int) -> list[str]:
        """What changed before something began in ``step``, the likeliest first, in words."""
        near = [one for one in self._seen if one.first <= step <= one.last + _BEFORE]
        return [change.words for change in sorted(near, key=lambda change: -change.last)]

    def _of_scalars(self, window: Window) -> Iterator[_Change]:
        nothing = np.full(len(window.steps), math.nan)
        columns = (window.scalars.get(name, nothing).tolist() for name in ("lr", "loss", "finite_norm"))
        for step, rate, *now in zip(window.steps.tolist(), *columns, strict=True):
            if rate > JUMP * self._rate > 0:
                yield _Change(step, step, _in_words("learning rate", self._rate, rate))
            before = map(median, zip(*self._losses, strict=True)) if len(self._losses) == _STEPS else (0.0, 0.0)
            times, of_norm = (new / old if old > 0 else 0.0 for new, old in zip(now, before, strict=True))
            if times > _FACTOR and of_norm > _FACTOR and 1 / _ALIKE < times / of_norm < _ALIKE:
                of_both = f"loss and gradient norm rose {times:.3g} and {of_norm:.3g} times at once"
                yield _Change(step, step, f"a factor on the loss: {of_both}")
            self._rate, self._losses = rate, [*self._losses, now][-_STEPS:]

    def _of_settings(self, window: Window) -> Iterator[_Change]:
        changed: dict[str, list[str]] = {}  # of several modules or groups at once, only one is named
        for name, new in window.run.settings.items():
            old = self._settings.get(name, new)
            if new != old and _matters(name, old, new):
                what, of, one = name.partition(" of ")
                changed.setdefault(_in_words(f"{what}{of}\0", old, new), []).append(one)
        self._settings = {**window.run.settings}
        for words, which in changed.items():
            named = which[0] + f" and {len(which) - 1} more" * (len(which) > 1)
            yield _Change(int(window.steps[0]), int(window.steps[-1]), words.replace("\0", named))


def _matters(name: str, old: float, new: float) -> bool:
    """Whether the setting ``name``, such as ``"eps of group 0"``, has changed by far, or 1 - s of a share s."""
    what = name.partition(" ")[0]
    if what in ("number", "step"):
        return what == "number" or new < old
    if what in _SHARES:  # a momentum m averages 1 / (1 - m) gradients
        old, new = 1 - min(new, _ALL), 1 - min(old, _ALL)
    factor, limit = abs(new) / (abs(old) or NO_DECAY), _KEPT if what == "dropout" else JUMP
    return factor > limit or factor < 1 / limit


def _in_words(what: str, old: float, new: float) -> str:
    return f"the {what}, which {'rose' if new > old else 'fell'} from {old:.4g} to {new:.4g} shortly before"
