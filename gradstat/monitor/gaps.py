"""`Gaps`: what of a run is not watched, told once: tensors that cannot be measured, and errors of gradstat's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradstat._core.collectives import UnreachableRankError
from gradstat._core.native import BackendUnavailableError
from gradstat.monitor.findings import Finding
from gradstat.monitor.reporting import warn, warn_of_failure

# Every other error of a step is gradstat's own, and must not end what is watched.
NOT_OURS = (BackendUnavailableError, UnreachableRankError)
RULE = "not-watched"
"""What findings about the watch itself are called; no policy applies to them."""


class Gaps:
    """Warns of gaps, and adds a finding about each to ``findings``."""

    def __init__(self, findings: list[Finding]) -> None:
        self._findings = findings
        self._told: set[str] = set()
        self.left_out: dict[str, list[str]] = {}  # by kind, what keeps tensors from being measured

    def tell_left_out(self, step: int) -> None:
        """Tells of what was left out in ``step``, of each kind once."""
        new = {kind: refusals for kind, refusals in self.left_out.items() if kind not in self._told}
        self.left_out.clear()
        if not new:
            return
        self._told |= new.keys()
        told = [
            f"the {kind} {refusals[0]}" + f" (and {len(refusals) - 1} more)" * (len(refusals) > 1)
            for kind, refusals in new.items()
        ]
        text = "; ".join(told)
        self._findings.append(Finding(RULE, "info", step, "monitor", {k: len(r) for k, r in new.items()}, text=text))
        warn(f"not watched: {text}", UserWarning)

    def tell_failure(self, step: int, what: str) -> None:
        """Tells of the error that is being handled, the first of its sort."""
        if what not in self._told:
            self._told.add(what)
            self._findings.append(Finding(RULE, "warning", step, "monitor", {}, text=f"{what}: gradstat failed"))
            warn_of_failure(what)

    @contextmanager
    def contained(self, step: int, what: str) -> Iterator[None]:
        """Errors of what is inside are told as by `tell_failure`, and end nothing."""
        try:
            yield
        except NOT_OURS:
            raise
        except Exception:
            self.tell_failure(step, what)
