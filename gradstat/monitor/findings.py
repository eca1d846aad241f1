"""`Finding`: one problem that a rule found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[str, ...] = get_args(Severity)
"""From the least to the most severe."""


def values_of(made: Any) -> dict[str, Any]:
    """The fields of the dataclass ``made`` by name, not copied as by ``dataclasses.asdict``."""
    return {field.name: getattr(made, field.name) for field in fields(made)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem that a rule found.

    Attributes:
        rule: Name of the rule, ``"nonfinite-gradient"`` for example.
        severity: ``"info"``, ``"warning"`` or ``"error"``.
        step: The step in which it began, counted from 0; it may have been found later.
        name: What it is about: a parameter, a module or a series such as ``"loss"``.
        evidence: The numbers it is based on, by name; JSON-able.
        causes: Possible causes, the likeliest first.
        advice: What to try, the cheapest first.
        text: What was found, in one sentence.
        about: The kind of ``name``, as in `gradstat.monitor.Recording.tables`, or ``"series"``.
    """

    rule: str
    severity: Severity
    step: int
    name: str
    evidence: Mapping[str, Any]
    causes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    text: str = ""
    about: str = "series"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        return {
            **values_of(self),
            "evidence": dict(self.evidence),
            "causes": list(self.causes),
            "advice": list(self.advice),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """The inverse of `to_dict`: a finding from its ``values``.

        Raises:
            ValueError: ``severity`` is not one of the three.
            KeyError, TypeError: A value is missing or of a wrong type.
        """
        if values["severity"] not in SEVERITIES:
            raise ValueError(f"severity is {values['severity']!r}; expected one of {', '.join(SEVERITIES)}")
        return cls(
            str(values["rule"]),
            values["severity"],
            int(values["step"]),
            str(values["name"]),
            dict(values["evidence"]),
            tuple(map(str, values["causes"])),
            tuple(map(str, values["advice"])),
            str(values["text"]),
            str(values["about"]),
        )

    def __str__(self) -> str:
        return f"[{self.severity}] step {self.step}, {self.rule}: {self.text or self.name}"
