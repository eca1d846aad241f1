"""Where a run deviates from golden ones, and what kind of change that is, in words: from what is unlike first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradstat.monitor.recording.golden_statistics import Floats

_MOST = 0.5
"""A share of tensors above which it is everywhere."""
# Norms that are multiplied by one factor differ by less than this part of its logarithm.
_ALIKE = 0.2


@dataclass(frozen=True)
class Unlike:
    """How the tensors of one kind, or a scalar, deviate.

    Attributes:
        names: ``[n]``.
        excess: ``[windows, n]``: the largest deviation of the features over its limit, so that above 1 it is unlike.
        change: ``[windows, n]``: by how much the logarithm of the norm, or of the scalar, is larger; NaN if not known.
    """

    names: tuple[str, ...]
    excess: Floats
    change: Floats


def explained(unlike: Mapping[str, Unlike], window: int) -> tuple[str, str]:
    """Where the run deviates in ``window``, the first in which it does, and what kind of change that is."""
    at = {kind: one.excess[window] > 1 for kind, one in unlike.items()}
    is_unlike = {kind: bool(one.any()) for kind, one in at.items()}
    rates = [kind for kind in unlike if kind.startswith("lr") and is_unlike[kind]]
    if rates:
        return "the learning rate", f"times {np.exp(unlike[rates[0]].change[window, 0]):.4g}"
    if is_unlike.get("batch"):
        return "the batch", "the inputs are distributed otherwise"
    for kind in ("parameter", "buffer"):
        if window == 0 and is_unlike.get(kind):
            factor = _factor(unlike[kind].change[0][at[kind]])
            times = "" if factor is None else f", norms times {factor:.3g}"
            return _place(unlike[kind], 0), f"the initial {kind}s{times}"
    loss = is_unlike.get("loss", False)
    gradient = unlike.get("gradient")
    if gradient is None or not is_unlike["gradient"]:
        others = [kind for kind, one in is_unlike.items() if one and kind != "loss"]
        if others:
            return _place(unlike[others[0]], window), "not the gradients: the optimizer, its settings or its state"
        return "the loss", "not the gradients: how the loss is reduced, averaged or reported"
    factor = _factor(gradient.change[window])
    where = _place(gradient, window)
    if factor is not None and where == "everywhere":
        return where, f"all norms times {factor:.3g}: " + (
            "the loss is scaled" if loss else "gradients are scaled, the loss is not"
        )
    if where == "everywhere" and window == 0:
        return where, "from the first step on" + ", and the loss" * loss + ": data, labels, loss or forward pass"
    if where == "everywhere" or any(is_unlike.get(kind) for kind in ("parameter", "update")):
        return where, "not in the first step" + ", and the loss" * loss + ": updates, or data that vary otherwise"
    return where, "its gradients" + ", and the loss" * loss


def _factor(change: Floats) -> float | None:
    """The factor that all norms have in common, None if there is none."""
    known = change[np.isfinite(change)]
    middle = float(np.median(known)) if known.size else 0.0
    spread = float(np.median(np.abs(known - middle))) if known.size else 0.0
    return float(np.exp(middle)) if abs(middle) > 0.1 and spread < _ALIKE * abs(middle) else None


def _place(one: Unlike, window: int) -> str:
    """``"everywhere"``, a module, a kind of modules, or the module that deviates most and how many others do."""
    excess = one.excess[window]
    found = np.flatnonzero(excess > 1)
    if len(found) > max(1, _MOST * np.isfinite(excess).sum()):
        return "everywhere"
    found = found[np.argsort(-excess[found], kind="stable")]
    modules = list(dict.fromkeys(_module(one.names[j]) for j in found))
    kinds = _kinds(modules)
    if len(kinds) == 1:
        return kinds[0] if len(modules) > 1 else modules[0]
    return f"{modules[0]} and {len(modules) - 1} other modules"


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _kinds(modules: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module) for module in modules))
