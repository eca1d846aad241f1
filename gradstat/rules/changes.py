"""What changed shortly before a loss or a norm rose: learning rate and settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gradstat.rules.base import series
from gradstat.rules.rows import Window

# All thresholds are conventions of gradstat. A change may explain what begins up to so many steps later.
_BEFORE = 100
# Learning rates rise by more than this factor in one step, and settings change by more than it between two reviews;
# what dropout keeps, by less.
JUMP, _KEPT = 3.0, 1.5
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
        self._seen: list[_Change] = []

    def note(self, window: Window) -> None:
        """Looks at the steps of ``window``."""
        if len(window.steps):
            self._seen = [*self._seen[-_MOST:], *self._of_settings(window), *self._of_rates(window)]

    def before(self, step: int) -> list[str]:
        """What changed before something began in ``step``, the likeliest first, in words."""
        near = [one for one in self._seen if one.first <= step <= one.last + _BEFORE]
        return [change.words for change in sorted(near, key=lambda change: -change.last)]

    def _of_rates(self, window: Window) -> Iterator[_Change]:
        for step, rate in series(window, "lr"):
            if rate > JUMP * self._rate > 0:
                yield _Change(step, step, _in_words("learning rate", self._rate, rate))
            self._rate = rate

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
