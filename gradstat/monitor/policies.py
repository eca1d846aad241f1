"""Policies: how to respond to a finding, by severity or by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gradstat._core.text import printable
from gradstat._core.warn import show_finding
from gradstat.recording.findings import SEVERITIES, Finding

POLICIES: tuple[str, ...] = ("record", "warn", "raise", "skip", "stop", "snapshot", "rollback", "replay")
"""Names of policies; docs/monitor.md says what each does."""

Policy = str | Callable[[Any, Finding], object]  # a callable gets the `Monitor` and the finding
Policies = Policy | Sequence[Policy] | Mapping[str, Policy | Sequence[Policy]] | None

# A rule warns at most once in this many steps.
_WARN_EVERY = 100


class AnomalyError(RuntimeError):
    """Raised for a finding by the policy ``"raise"``.

    Attributes:
        finding: The finding, or None.
    """

    def __init__(self, message: str, finding: Finding | None = None) -> None:
        super().__init__(message)
        self.finding = finding


class PolicyTable:
    """The policies of ``on_anomaly`` by severity and rule, or the default ones. Each is a callable or in ``names``."""

    def __init__(self, on_anomaly: Policies, rules: Sequence[str], names: Sequence[str] = POLICIES) -> None:
        self._by: dict[str, tuple[Policy, ...]] = {"error": ("warn",), "warning": ("warn",), "info": ("record",)}
        if isinstance(on_anomaly, Mapping):
            for key, policies in on_anomaly.items():
                if key not in SEVERITIES and key not in rules:
                    raise ValueError(
                        f"on_anomaly[{key!r}]: expected a severity ({', '.join(SEVERITIES)}) or the name of a rule "
                        f"({', '.join(rules)})"
                    )
                self._by[key] = _listed(policies, names)
        elif on_anomaly is not None:
            self._by["error"] = _listed(on_anomaly, names)
            if on_anomaly == "record":
                self._by["warning"] = ("record",)

    def of(self, finding: Finding) -> tuple[Policy, ...]:
        return self._by.get(finding.rule, self._by[finding.severity])

    def uses(self, policy: str) -> bool:
        """Whether a policy applies to any severity or rule."""
        return any(policy in policies for policies in self._by.values())


def _listed(policies: Any, names: Sequence[str]) -> tuple[Policy, ...]:
    listed = tuple(policies) if isinstance(policies, Iterable) and not isinstance(policies, str) else (policies,)
    for policy in listed:
        if isinstance(policy, str):
            if policy not in names:
                raise ValueError(f"unknown policy {policy!r}; known: {', '.join(names)}, or a callable")
        elif not callable(policy):
            raise TypeError(
                f"on_anomaly: expected one of {', '.join(names)}, a callable, several of these, or a mapping by "
                f"severity or rule, got {type(policy).__name__}"
            )
    return listed


class Warner:
    """Warns about findings and logs them, at most once in a hundred steps for each rule."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, bool], int] = {}
        self._held_back: dict[tuple[str, bool], int] = {}

    def show(self, finding: Finding, now: int, warns: bool) -> None:
        """Logs the finding at step ``now``, and ``warns`` of it; or counts it as held back."""
        key = finding.rule, warns
        if now - self._last.get(key, -_WARN_EVERY) < _WARN_EVERY:
            self._held_back[key] = self._held_back.get(key, 0) + 1
            return
        self._last[key] = now
        held_back = self._held_back.pop(key, 0)
        more = f" ({held_back} more since the last warning)" if held_back else ""
        advice = f" What to try: {printable(finding.advice[0])}." if finding.advice else ""
        show_finding(f"{finding}{more}.{advice}", finding.severity, warns)
