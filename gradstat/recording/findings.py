"""`Finding`: one problem that a rule found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gradstat._core.saved import MAPPING, TEXT, WHOLE, Kind, require
from gradstat._core.text import plain_fields, printable

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[str, ...] = get_args(Severity)
"""From the least to the most severe."""

# What a saved finding has.
FINDING = {
    **dict.fromkeys(("rule", "name", "text", "about"), TEXT),
    "severity": Kind(f"one of {', '.join(SEVERITIES)}", lambda value: TEXT.fits(value) and value in SEVERITIES),
    "step": WHOLE,
    "evidence": MAPPING,
    "causes": [TEXT],
    "advice": [TEXT],
}

# Words shown in place of evidence keys that are meant for programs.
_WORDS = {
    "all": "not finite",
    "nonfinite_tensors": "number that are not finite",
    "nan_count": "NaN elements",
    "inf_count": "Inf elements",
    "numel": "elements",
    "first": "index of the first NaN or Inf",
    "lr": "learning rate",
}


def in_words(evidence: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The evidence of a finding as it is shown: names and values, without None and what its text says."""
    words = _WORDS | ({"parameters": _WORDS["all"]} if "nonfinite_tensors" in evidence else {})
    shown = {str(key): value for key, value in evidence.items() if value is not None and key != "what"}
    return [(words.get(key, key.replace("_", " ")), value) for key, value in shown.items()]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem that a rule found.

    Attributes:
        rule: Name of the rule, ``"nonfinite-gradient"`` for example.
        severity: ``"info"``, ``"warning"`` or ``"error"``.
        step: The step in which the problem began, counted from 0. It may have been found later.
        name: The parameter, module or series, such as ``"loss"``, that has the problem.
        evidence: The numbers that show the problem, by name; JSON-able.
        causes: Likely causes, the likeliest first.
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

    def __post_init__(self) -> None:
        require(int(self.step), WHOLE, "the step of a finding")

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        return {**plain_fields(self), "evidence": dict(self.evidence)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], place: str = "finding") -> Finding:
        """The inverse of `to_dict`: a finding from its ``values``.

        Raises:
            ValueError: A value is missing or of a wrong type. The message names it, as one of the ``place``.
        """
        require(values, FINDING, place)
        fields: dict[str, Any] = {name: values[name] for name in FINDING}
        lists = {name: tuple(values[name]) for name in ("causes", "advice")}
        return cls(**{**fields, **lists, "evidence": dict(values["evidence"])})

    def __str__(self) -> str:
        return printable(f"[{self.severity}] since step {self.step}, {self.rule}: {self.text or self.name}")


def reference_to(finding: Finding) -> str:
    """How the evidence ``"follows"`` of a consequence names its cause."""
    return f"{finding.rule} in step {finding.step}"
