"""Fits findings to a run: drops advice that cannot be followed there, and adds shapes to names such as ``group0.1``."""

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


def fitted(finding: Finding, named_parameters: Callable[[], NamedParameters], replay_argument: str | None) -> Finding:
    """The finding for a run that trains ``named_parameters()``, where the policy ``"replay"`` needs that argument.

    An empty argument means that it needs none, None that it cannot be used.
    """
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
    """Both as lists, for an error's message."""
    causes = "".join(f"\n  - {printable(cause)}" for cause in finding.causes)
    advice = "".join(f"\n  - {printable(advice)}" for advice in finding.advice)
    return f"likely causes:{causes}\nwhat to try:{advice}"
