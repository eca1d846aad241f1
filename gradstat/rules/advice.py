"""Remedies: advice to use something of gradstat, which is left out where a run uses it already or cannot.

Also adds shapes to names such as ``group0.1`` in the texts of findings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import final

from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import is_uninitialized
from gradstat._core.text import printable
from gradstat.recording.findings import Finding

_POSITIONAL = re.compile(r"\bgroup\d+\.\d+(?!\.?\w)")  # a name of `gradstat._core.parameters`


@final
class Remedy(str):
    """An advice to use something."""

    uses: str  # "replay", "skip", "rollback", "activations" or "clip"
    where_run: str  # the advice where the steps are run by a framework, so that a replay needs no function
    otherwise: str  # the advice where ``uses`` cannot be used; empty for none

    def __new__(cls, text: str, uses: str, where_run: str = "", otherwise: str = "") -> Remedy:
        made = super().__new__(cls, text)
        made.uses, made.where_run, made.otherwise = uses, where_run or text, otherwise
        return made


def replay(does: str, otherwise: str = "") -> Remedy:
    """The remedy to replay the step, which ``does`` something."""
    text = f"make the monitor with on_anomaly='replay', replay=step_fn: it runs such a step again and {does}"
    return Remedy(text, "replay", f"pass on_anomaly='replay': it runs such a step again and {does}", otherwise)


FIRST_MODULE = "watch={'activations': 1} names the first module whose output is not finite"
SKIP = Remedy("skip such steps: on_anomaly={'nonfinite-gradient': 'skip'} or gradstat.guarded_step", "skip")
CLIP = Remedy("clip gradients, with gradstat.clip_grad_norm_ for example", "clip")


def fitted(
    finding: Finding,
    named_parameters: Callable[[], NamedParameters],
    in_use: Collection[str],
    not_usable: Collection[str] = (),
    is_run: bool = False,
) -> Finding:
    """The finding for a run that trains ``named_parameters()``.

    ``in_use`` and ``not_usable`` are values of `Remedy.uses`. ``is_run`` says that a framework runs the steps.
    """
    advice = []
    for one in finding.advice:
        if isinstance(one, Remedy):
            if one.uses in in_use:
                continue
            one = one.otherwise if one.uses in not_usable else one.where_run if is_run else str(one)
        if one:
            advice.append(one)
    finding = replace(finding, advice=tuple(advice))
    if not _POSITIONAL.search(finding.text):
        return finding
    named = named_parameters()
    pairs = zip(named.names(), named.parameters, strict=True)
    shapes = {name: list(parameter.shape) for name, parameter in pairs if not is_uninitialized(parameter)}
    text = _POSITIONAL.sub(lambda m: f"{m[0]} {shapes[m[0]]}" if m[0] in shapes else m[0], finding.text)
    return replace(finding, text=text)


def causes_and_advice(finding: Finding) -> str:
    """Causes and advice of ``finding`` as lists, for an error's message."""
    causes = "".join(f"\n  - {printable(cause)}" for cause in finding.causes)
    advice = "".join(f"\n  - {printable(advice)}" for advice in finding.advice)
    return f"likely causes:{causes}\nwhat to try:{advice}"
