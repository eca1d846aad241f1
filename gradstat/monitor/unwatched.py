"""`Unwatched`: reports once each tensor that cannot be measured, and each internal error of gradstat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradstat._core.collectives import UnreachableRankError
from gradstat._core.native import BackendUnavailableError
from gradstat._core.text import and_more, printable
from gradstat._core.warn import warn, warn_of_failure
from gradstat.recording.findings import Finding

# Any other error in a step is internal to gradstat, and must not end the training.
PROPAGATED_ERRORS = (BackendUnavailableError, UnreachableRankError)
RULE = "not-watched"  # the rule name of findings about the monitor itself; no policy applies to them


class Unwatched:
    """Warns of what is not watched, and adds a finding about it to ``findings``."""

    def __init__(self, findings: list[Finding]) -> None:
        self._findings = findings
        self._reported: set[str] = set()
        self.left_out: dict[str, list[str]] = {}  # by kind, why tensors could not be measured

    def report_left_out(self, step: int) -> None:
        """Reports the tensors left out in ``step``, once for each kind."""
        new = {kind: refusals for kind, refusals in self.left_out.items() if kind not in self._reported}
        self.left_out.clear()
        if not new:
            return
        self._reported |= new.keys()
        reasons = [f"the {kind} {each[0]}{and_more(len(each) - 1, ' (and {} more)')}" for kind, each in new.items()]
        text = printable("; ".join(reasons))
        self._findings.append(Finding(RULE, "info", step, "monitor", {k: len(r) for k, r in new.items()}, text=text))
        warn(f"not watched: {text}", UserWarning)

    def leave_out(self, kind: str, why: str) -> None:
        """Notes for `report_left_out` why something that is asked for cannot be measured."""
        self.left_out.setdefault(kind, []).append(why)

    def report_failure(self, step: int, what: str) -> None:
        """Reports the exception being handled, once for each ``what``."""
        if what not in self._reported:
            self._reported.add(what)
            self._findings.append(Finding(RULE, "warning", step, "monitor", {}, text=f"internal error: {what}"))
            warn_of_failure(what)

    @contextmanager
    def suppress_errors(self, step: int, what: str) -> Iterator[None]:
        """A context that catches errors, except `PROPAGATED_ERRORS`, and reports them by `report_failure`."""
        try:
            yield
        except PROPAGATED_ERRORS:
            raise
        except Exception:
            self.report_failure(step, what)
