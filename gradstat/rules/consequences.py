"""Which findings follow from which: one NaN from another, and what is inferred from what was seen to happen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradstat.recording.findings import Finding, reference_to
from gradstat.rules.finite import CONSEQUENCES, KEPT, ROOTS, NonfiniteBuffer
from gradstat.rules.rows import Window

# What is inferred follows from what was seen within so many steps before it. A convention of gradstat.
_WITHIN = 100
_MOST = 100  # findings that may explain others, which may have begun long before they are told


def explained(
    findings: Iterable[Finding], causes: Iterable[Finding], explains: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """``findings``, of which those that one of ``causes`` explains say so, as infos if they are warnings.

    ``explains`` has `gradstat.monitor.Rule.explains` by the name of a rule. An info explains nothing.
    """
    by_effect: dict[str, list[Finding]] = {}
    for cause in sorted(causes, key=lambda cause: cause.step):
        for effect in explains.get(cause.rule, ()) if cause.severity != "info" else ():
            by_effect.setdefault(effect, []).append(cause)
    marked = []
    for finding in findings:
        before = by_effect.get(finding.rule, [])
        last = bisect_right(before, finding.step, key=lambda cause: cause.step) - 1
        if last >= 0 and finding.step - before[last].step <= _WITHIN and "follows" not in finding.evidence:
            finding = _following(finding, before[last], finding.severity == "warning")
        marked.append(finding)
    return marked


def _following(finding: Finding, cause: Finding, is_info: bool) -> Finding:
    evidence = {**finding.evidence, "follows": reference_to(cause)}
    return replace(finding, severity="info" if is_info else finding.severity, evidence=evidence)


class Consequences:
    """Says of new findings what they follow from, as their evidence ``"follows"``."""

    def __init__(self, explains: Mapping[str, Sequence[str]]) -> None:
        self._explains = explains
        self._seen: list[Finding] = []  # that may explain others
        self._nonfinite: Finding | None = None  # the cause of what is not finite
        self._healthy_at = -1  # the last step with a finite loss and finite gradients

    def marked(self, findings: Sequence[Finding], window: Window) -> list[Finding]:
        """``findings`` of the ``window``, ordered by step."""
        self._seen = [*self._seen, *(finding for finding in findings if self._explains.get(finding.rule))][-_MOST:]
        return explained(self._folded(findings, window), self._seen, self._explains)

    def _folded(self, findings: Sequence[Finding], window: Window) -> list[Finding]:
        """``findings``, of which that of one NaN stays; what follows from it becomes an info."""
        finite = np.ones(len(window.steps), dtype=bool)
        for name in ("nonfinite", "loss_nonfinite"):
            finite &= ~(window.scalars.get(name, np.zeros(len(finite))) > 0)
        healthy = [self._healthy_at, *window.steps[finite].tolist()]
        self._healthy_at = healthy[-1]
        folded = []
        for finding in findings:
            cause = self._nonfinite
            if finding.rule in ROOTS and finding.severity == "error":
                follows = cause is not None and finding.rule in CONSEQUENCES
                if cause is not None and any(cause.step < at < finding.step for at in healthy):
                    # It is over, unless it has reached what is kept from step to step and was finite before.
                    is_kept = finding.rule in KEPT and finding.evidence.get("last_finite", -1) <= cause.step
                    follows = is_kept and (finding.rule == NonfiniteBuffer.name or not window.run.skipped_by)
                if cause is not None and follows:
                    finding = _following(finding, cause, is_info=True)
                else:
                    self._nonfinite = finding
            folded.append(finding)
        return folded
