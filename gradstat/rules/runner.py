"""Runs the rules on new steps, and switches off one that fails."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradstat._core.warn import warn_of_failure
from gradstat.recording.findings import Finding
from gradstat.rules.base import WRONG_SIGN, Band, Rule
from gradstat.rules.changes import Changes
from gradstat.rules.consequences import Consequences
from gradstat.rules.finite import NonfiniteGradient, NonfiniteLoss, NonfiniteOptimizerState
from gradstat.rules.gradients import ExplodingGradient
from gradstat.rules.rows import Floats, Window
from gradstat.rules.training import LossSpike
from gradstat.rules.weights import ParameterJump

# Number of rows that may wait for a review, unless they are of less than 64 steps: 16 MB.
_MAX_ROWS = 200_000


# What grows after a change, or where a loss that lies so many times its first value below zero is minimised. Of what is
# not finite only the latter is said, since other causes are known better.
_GROWS = {LossSpike.name, ExplodingGradient.name, ParameterJump.name}
_ENDS = {NonfiniteLoss.name, NonfiniteGradient.name, NonfiniteOptimizerState.name}
_FAR_BELOW = 10.0


class RuleRunner:
    """Runs the rules; at most ``every`` healthy steps are between two reviews.

    Reviews come right after a step whose number is a multiple of ``weights``, in which parameters are measured, so that
    these numbers do not wait; 0 if they never are.

    Attributes:
        next_review: The number of steps after which the next review is due.
        refused_at: The last step for which a guard had refused the one before, minus infinity if there is none.
    """

    def __init__(self, rules: Sequence[Rule], every: int, weights: int = 0) -> None:
        self.rules = list(rules)
        self._every, self._weights = every, weights
        self._losses: list[float] = []  # the first and the last finite one
        self.next_review = 1
        self.resume(0, {})

    def is_out_of_band(self, scalars: Mapping[str, float]) -> bool:
        """Whether one of ``scalars`` is outside of a rule's band, so that the step is reviewed at once."""
        for name, (low, high) in self._bands.items():  # noqa: SIM110 - a generator takes longer, in every step
            if name in scalars and not low <= scalars[name] <= high:
                return True
        return False

    def review(self, window: Window, is_end: bool = False) -> list[Finding]:
        """The findings of the rules, by the steps in which they began.

        ``is_end``: the window has what the last step has made of the parameters, for rules that judge the end.
        """
        findings: list[Finding] = []
        # Squares and sums of huge float64 numbers overflow, but comparisons with them stay correct.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self._changes.note(window)
            for rule in self.rules:
                if is_end and not rule.judges_end:
                    continue
                if rule.explained_by and self.last_steps(rule.explained_by):
                    continue
                try:
                    findings += list(rule.review(window))
                except Exception:
                    self._switch_off(rule)
            findings = [self._in_context(finding, window) for finding in findings]
        end = int(window.steps[-1]) + 1 if len(window.steps) else None
        self._remember(end or 0, window.scalars)
        rows = window.measured.get("gradient")
        self.refresh(end, 0 if rows is None else len(rows.names))
        findings.sort(key=lambda finding: finding.step)
        return self._consequences.marked(findings, window)

    def _in_context(self, finding: Finding, window: Window) -> Finding:
        """``finding`` with what the scalars show before its other causes."""
        is_rise = finding.rule in _GROWS
        if not is_rise and finding.rule not in _ENDS:
            return finding
        causes, advice = self._changes.before(finding.step) if is_rise else [], finding.advice
        if causes:
            advice = ("print what has changed, in the steps before it", *advice)
        elif not window.run.has_other_optimizer and self._is_far_below(finding.step, window):
            causes = [*WRONG_SIGN]
        causes += (cause for cause in finding.causes if cause not in causes)
        return replace(finding, causes=tuple(causes), advice=advice)

    def _is_far_below(self, step: int, window: Window) -> bool:
        """Whether the last finite loss up to ``step`` is far below zero."""
        steps, _, values = window.losses
        losses = [*self._losses, *values[: bisect_right(steps, step)]]
        return bool(losses) and losses[-1] < -_FAR_BELOW * abs(losses[0])

    def resume(self, steps: int, scalars: Mapping[str, Floats]) -> None:
        """Goes on after ``steps`` steps, the last ones with these ``scalars``; the rules have loaded their states."""
        self.refused_at = -math.inf
        self._changes, self._consequences = Changes(), Consequences({rule.name: rule.explains for rule in self.rules})
        self._remember(steps, scalars)
        self.refresh(steps)

    def _remember(self, end: int, scalars: Mapping[str, Floats]) -> None:
        """Keeps what later reviews need of the ``scalars`` of the last steps before ``end``."""
        losses = scalars.get("loss", np.empty(0))
        finite = [*self._losses, *losses[np.isfinite(losses)].tolist()]
        self._losses = [*finite[:1], *finite[-1:]]
        reasons = scalars.get("refused", np.empty(0))
        refused = np.flatnonzero(reasons > 1)
        self.refused_at = end - len(reasons) + int(refused[-1]) if len(refused) else self.refused_at

    def last_steps(self, names: Collection[str]) -> list[int]:
        """The last steps of all problems that the rules ``names`` met, also of those that were reported long before."""
        recorded = [getattr(rule, "_episodes", {}) for rule in self.rules if rule.name in names]
        return [step for episodes in recorded for step in episodes.values()]

    def refresh(self, steps: int | None, tensors: int = 0) -> None:
        """Updates the bands of all rules; if ``steps``, the number so far, is given, schedules the next review.

        ``tensors`` are measured in every step: rows that wait for the review take memory.
        """
        self._bands: dict[str, Band] = {}
        for rule in self.rules:
            try:
                for name, (low, high) in rule.bands().items():
                    band = self._bands.get(name, (-math.inf, math.inf))
                    self._bands[name] = (max(low, band[0]), min(high, band[1]))
            except Exception:  # noqa: PERF203 - in most reviews there is none
                self._switch_off(rule)
        if steps is not None:
            # The first steps are reviewed soon, so that problems from the start are reported early. Later a review may
            # be late by a sixteenth of the run: its cost per step falls with the number of steps. A review of a step
            # out of band does not put off the next one, so that whatever began in that step is reported early, too.
            later = min(steps // 16, _MAX_ROWS // max(tensors, 1))
            due = steps + min(max(steps, 1), max(later, 64), self._every)
            if self._weights:
                measured = (due - 1) // self._weights * self._weights + 1
                due = measured if measured > steps else due
            self.next_review = self.next_review if steps < self.next_review < due else due

    def _switch_off(self, rule: Rule) -> None:
        """Monitoring must not end the training: after the exception being handled, ``rule`` does not run again."""
        self.rules = [other for other in self.rules if other is not rule]
        warn_of_failure(f"the rule {rule.name!r} failed and is switched off")
