"""Policies that a framework carries out, in place of the monitor: noted by it, done by the integration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradstat.monitor import POLICIES, Finding, Monitor

NOTED: tuple[str, ...] = ("raise", "replay", "checkpoint")
"""What an integration does by itself; ``"checkpoint"`` is no policy of a monitor."""


class Noted(NamedTuple):
    """A policy that applies to a finding."""

    policy: str
    finding: Finding


def names_in(given: Any) -> set[Any]:
    """The names of all policies in what was given as ``on_anomaly``.

    Raises:
        ValueError: One is not known.
    """
    if given is None:
        return set()
    parts = list(given.values()) if isinstance(given, Mapping) else [given]
    listed = [policy for part in parts for policy in ([part] if isinstance(part, str) or callable(part) else part)]
    names = {policy for policy in listed if isinstance(policy, str)}
    known = (*POLICIES, "checkpoint")
    for name in sorted(names):
        if name not in known:
            raise ValueError(f"unknown policy {name!r}; known: {', '.join(known)}, or a callable")
    return names


def translated(given: Any, notes: list[Noted]) -> Any:
    """``on_anomaly`` for a monitor that only takes note of `NOTED`, in ``notes``."""
    if given is None or given == "record":  # alone, it has a meaning of its own
        return given
    if isinstance(given, Mapping):
        return {key: translated(value, notes) if value != "record" else value for key, value in given.items()}
    listed = [given] if isinstance(given, str) or callable(given) else list(given)
    return [_noting(policy, notes) if policy in NOTED else policy for policy in listed]


def _noting(policy: str, notes: list[Noted]) -> Callable[[Monitor, Finding], object]:
    def note(_: Monitor, finding: Finding) -> None:
        notes.append(Noted(policy, finding))

    return note
