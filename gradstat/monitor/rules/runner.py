"""Runs the rules on new steps, and switches off one that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gradstat.monitor.findings import Finding
from gradstat.monitor.reporting import warn_of_failure
from gradstat.monitor.rows import Window
from gradstat.monitor.rules import Rule
from gradstat.monitor.rules.base import Band


class RuleRunner:
    """Asks the rules; at most ``every`` healthy steps are between two reviews."""

    def __init__(self, rules: Sequence[Rule], every: int) -> None:
        self.rules = list(rules)
        self._every = every
        self._failed: set[int] = set()
        self._bands: list[tuple[str, float, float]] = []
        self._next = 1
        self.refresh(0)

    def is_due(self, step: int) -> bool:
        """Whether it is time to review after ``step``."""
        return step + 1 >= self._next

    def is_out_of_band(self, scalars: Mapping[str, float]) -> bool:
        """Whether a scalar has left the band of a rule, so that a step is reviewed at once."""
        for name, low, high in self._bands:
            value = scalars.get(name)
            if value is not None and not low <= value <= high:
                return True
        return False

    def review(self, window: Window) -> list[Finding]:
        """What the rules find, in the order of the steps in which it began."""
        found: list[Finding] = []
        # Squares and sums of huge float64 numbers overflow, and comparisons with them are right all the same.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for rule in self.rules:
                if id(rule) in self._failed:
                    continue
                try:
                    found += list(rule.review(window))
                except Exception:
                    # Watching must not end what is watched. The rule is not asked again.
                    self._failed.add(id(rule))
                    warn_of_failure(f"the rule {rule.name!r} failed and is switched off")
        self.refresh(int(window.steps[-1]) + 1 if len(window.steps) else None)
        found.sort(key=lambda finding: finding.step)
        return found

    def refresh(self, steps: int | None) -> None:
        """Asks the rules for their bands; with ``steps`` so far, sets when to review next."""
        joined: dict[str, Band] = {}
        for rule in self.rules:
            for name, (low, high) in rule.bands().items():
                before = joined.get(name, (-math.inf, math.inf))
                joined[name] = (max(low, before[0]), min(high, before[1]))
        self._bands = [(name, low, high) for name, (low, high) in joined.items()]
        if steps is not None:
            # The first steps are looked at soon: what is wrong from the start should be told at the start.
            self._next = steps + min(max(steps, 1), self._every)
