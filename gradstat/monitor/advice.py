"""Fits findings to a run: drops advice that it follows already or cannot follow, and adds shapes to ``group0.1``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import is_uninitialized
from gradstat._core.text import printable
from gradstat.monitor.findings import Finding

FUNCTION = ", replay=step_fn"
"""The argument that texts of advice name beside ``on_anomaly='replay'``."""

_POSITIONAL = re.compile(r"\bgroup\d+\.\d+(?!\.?\w)")  # a name of `gradstat._core.parameters`


_HOW = r"on_anomaly='replay', replay=step_fn( \(arguments of the monitor\))?"
_FOLLOWED = {
    "replay": re.compile(rf"(; |\. )?{_HOW} names .*|{_HOW}: "),
    "skip": re.compile(r".*(on_anomaly=\{'nonfinite-gradient': 'skip'\}|gradstat\.guarded_step).*"),
    "rollback": re.compile(r"(, or|:) on_anomaly='rollback'"),
    "activations": re.compile(r": gradstat\.Monitor\(model, watch=\{'activations': 10\}\)"),
    "clip": re.compile(r"clip: gradstat\.clip_grad_norm_.*|clip gradients(; |, or )"),
}
"""For each thing that a run may do already, the part of an advice that asks for it. Advice left empty is dropped."""


def fitted(
    finding: Finding,
    named_parameters: Callable[[], NamedParameters],
    replay_argument: str | None,
    in_use: Iterable[str] = (),
) -> Finding:
    """The finding for a run that trains ``named_parameters()``, where the policy ``"replay"`` needs that argument.

    An empty argument means that it needs none, None that it cannot be used. ``in_use`` are keys of `_FOLLOWED`.
    """
    advice = finding.advice
    for key in in_use:
        advice = tuple(left for one in advice if (left := _FOLLOWED[key].sub("", one)))
    if advice != finding.advice:
        finding = replace(finding, advice=advice)
    if replay_argument != FUNCTION:
        finding = replace(finding, advice=tuple(_feasible(finding.advice, replay_argument is not None)))
    if not _POSITIONAL.search(finding.text):
        return finding
    named = named_parameters()
    pairs = zip(named.names(), named.parameters, strict=True)
    shapes = {name: list(parameter.shape) for name, parameter in pairs if not is_uninitialized(parameter)}
    text = _POSITIONAL.sub(lambda m: f"{m[0]} {shapes[m[0]]}" if m[0] in shapes else m[0], finding.text)
    return replace(finding, text=text)


def _feasible(advice: Iterable[str], replays: bool) -> Iterator[str]:
    """``advice`` without the function argument if ``replays``, else without the policy ``"replay"``."""
    for one in advice:
        before, policy, after = one.partition("on_anomaly='replay'")
        if not policy:
            yield one
        elif replays:
            yield before + policy + after.removeprefix(FUNCTION).removeprefix(" (arguments of the monitor)")
        elif before:
            yield before.rstrip(".; ")
        elif "names" in after:
            yield "watch={'activations': 1} names the first module whose output is not finite"


def causes_and_advice(finding: Finding) -> str:
    """Causes and advice of ``finding`` as lists, for an error's message."""
    causes = "".join(f"\n  - {printable(cause)}" for cause in finding.causes)
    advice = "".join(f"\n  - {printable(advice)}" for advice in finding.advice)
    return f"likely causes:{causes}\nwhat to try:{advice}"
