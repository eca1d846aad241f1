"""`Finding`: one problem that a rule found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gradstat._core.text import plain_fields, printable

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[str, ...] = get_args(Severity)
"""From the least to the most severe."""

# By value of a saved finding: its type, and what a message calls that.
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("rule", "severity", "name", "text", "about"), (str, "text")),
    **dict.fromkeys(("causes", "advice"), (list | tuple, "a list of texts")),
    "step": (int, "an integer"),
    "evidence": (Mapping, "numbers by name"),
}

# Words shown in place of evidence keys that are meant for programs.
_WORDS = {
    "all": "not finite",
    "nonfinite_tensors": "how many are not finite",
    "nan_count": "NaN elements",
    "inf_count": "Inf elements",
    "numel": "elements",
    "first": "index of the first",
    "lr": "learning rate",
}


def in_words(evidence: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The evidence of a finding as it is shown: what each value is, and the value; without those that are None."""
    words = _WORDS | ({"parameters": _WORDS["all"]} if "nonfinite_tensors" in evidence else {})
    shown = {str(key): value for key, value in evidence.items() if value is not None}
    return [(words.get(key, key.replace("_", " ")), value) for key, value in shown.items()]


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

    def __post_init__(self) -> None:
        if not -(1 << 63) <= self.step < 1 << 63:
            raise ValueError(f"the step of a finding is {self.step}; expected an integer of 64 bits")

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        return {**plain_fields(self), "evidence": dict(self.evidence)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """The inverse of `to_dict`: a finding from its ``values``.

        Raises:
            ValueError: A value is missing or of a wrong type. The message names it.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a finding is {values!r:.80}; expected its values by name")
        if missing := [name for name in _TYPES if name not in values]:
            raise ValueError(f"a finding has no {missing[0]!r}")
        fields = {name: values[name] for name in _TYPES}
        for name, (kind, words) in _TYPES.items():
            if not isinstance(fields[name], kind) or isinstance(fields[name], bool):
                raise ValueError(f"the {name} of a finding is {fields[name]!r:.80}; expected {words}")
        if fields["severity"] not in SEVERITIES:
            raise ValueError(f"severity is {fields['severity']!r:.80}; expected one of {', '.join(SEVERITIES)}")
        for name in ("causes", "advice"):
            fields[name] = tuple(fields[name])
            if not all(isinstance(one, str) for one in fields[name]):
                raise ValueError(f"the {name} of a finding are {fields[name]!r:.80}; expected texts")
        return cls(**{**fields, "evidence": dict(fields["evidence"])})

    def __str__(self) -> str:
        return printable(f"[{self.severity}] step {self.step}, {self.rule}: {self.text or self.name}")
