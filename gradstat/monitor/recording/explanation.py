"""Where a run deviates from golden ones, and what kind of change that is, in words."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradstat._core.text import count_of
from gradstat.monitor.recording.golden_statistics import Floats

# If more than this share of the gradients deviates, the deviation is everywhere.
_EVERYWHERE = 0.4
# A module with more than this share of all tensors is too large to be named as the place.
_NEARLY_ALL = 0.8
# All norms have a factor in common if it is no smaller than this, and those of tensors, and of the first window, differ
# from it by no more than these parts, on a logarithmic scale.
_LEAST_FACTOR = math.log(1.15)
_OF_TENSORS, _OF_WINDOWS = 0.2, 0.4


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


def explained(unlike: Mapping[str, Unlike], first: int) -> tuple[str, str]:
    """Where the run deviates, and what kind of change it is; ``first`` is the first window in which it deviates."""
    at_first = {kind: bool((of_kind.excess[first] > 1).any()) for kind, of_kind in unlike.items()}
    for kind, of_kind in unlike.items():
        if kind.startswith("lr") and at_first[kind]:
            return "the learning rate" + f" {kind}" * (kind != "lr"), f"times {math.exp(of_kind.change[first, 0]):.4g}"
    if at_first.get("batch"):
        return "the batch", "its values are distributed otherwise"
    for kind, told in (("parameter", "the initial parameters"), ("buffer", "buffers after the first forward pass")):
        if first == 0 and at_first.get(kind):
            of_kind = unlike[kind]
            factor = _factor(of_kind.change[:1, of_kind.excess[0] > 1])
            return _place(of_kind, 0), told + ("" if factor is None else f", norms times {factor:.3g}")
    gradient = unlike.get("gradient")
    if gradient is not None and np.isinf(gradient.excess[first]).any():
        absent = replace(gradient, excess=np.where(np.isinf(gradient.excess), np.inf, np.nan))
        place = _place(absent, first)
        if place == "everywhere":  # those from which a part of the graph is cut off
            where = np.flatnonzero(absent.excess[first] > 1)
            place = f"{_module_of(absent.names[where[0]])} to {_module_of(absent.names[where[-1]])}"
        return place, "gradients are absent"
    loss = bool("loss" in unlike and (unlike["loss"].excess > 1).any())
    if gradient is not None:
        change, deviates = gradient.change[first:], gradient.excess[first:] > 1
        factor = _factor(change)
        if factor is not None and (loss or deviates.any()):
            scaled = _scaled(unlike.get("loss"), first, factor)
            return "everywhere", f"all norms of gradients times {factor:.3g}, {scaled}"
        if deviates.any() and (at_first["gradient"] or at_first.get("loss", False)):
            place = _place(gradient, first + int(np.argmax(deviates.any(1))))
            what = "gradients and the loss" if loss else "gradients"
            overall = replace(gradient, excess=np.fmax.reduce(gradient.excess[first:], 0)[None])
            if _place(overall, 0) == "everywhere":
                place = "everywhere" + f", first in {place}" * (place != "everywhere")
                what += " (data, labels, loss or forward pass" + ", or updates)" * (first > 0) + ")" * (first == 0)
            return place, what
    for kind, of_kind in unlike.items():
        if at_first[kind] and kind != "loss":
            why = "the optimizer, its settings, clipping, or how batches repeat"
            return _place(of_kind, first), f"{kind}, not the gradients before ({why})"
    return "the loss", "not the gradients (how it is reduced, smoothed or reported)"


def _factor(change: Floats) -> float | None:
    """The factor that the norms have in common over ``[windows, n]`` changes of logarithms, None if there is none."""
    by_tensor = _means(change)
    if not by_tensor.size:
        return None
    middle = float(np.median(by_tensor))
    now = float(np.median(_means(change[:1]))) if np.isfinite(change[0]).any() else middle
    spread = float(np.median(np.abs(by_tensor - middle)))
    is_common = abs(middle) > _LEAST_FACTOR and spread < _OF_TENSORS * abs(middle)
    return math.exp(middle) if is_common and abs(now - middle) < _OF_WINDOWS * abs(middle) else None


def _means(change: Floats) -> Floats:
    """``[n]``: means over the windows that are known, without tensors of which none is."""
    means: Floats = np.nanmean(change[:, ~np.isnan(change).all(0)], axis=0)
    return means


def _scaled(loss: Unlike | None, first: int, factor: float) -> str:
    """Whether the loss changed by the factor of the norms, in words."""
    of_loss = _means(loss.change[first:]) if loss is not None else np.empty(0)
    if of_loss.size and abs(float(of_loss[0]) - math.log(factor)) < _OF_WINDOWS * abs(math.log(factor)):
        return "as the loss (it is scaled)"
    return "the loss not (the size or variety of batches, or a scale after the loss)"


def _place(of_kind: Unlike, window: int) -> str:
    """The module of what deviates, the kind of modules, ``"everywhere"``, or the modules that deviate most."""
    excess, modules = of_kind.excess[window], list(map(_module_of, of_kind.names))
    farthest = [j for j in np.argsort(-excess, kind="stable").tolist() if excess[j] > 1]
    deviating = dict.fromkeys(modules[j] for j in farthest)
    same_kind: dict[str, set[str]] = {}
    for module in modules:
        same_kind.setdefault(_kind_of(module), set()).add(module)
    whole = {kind for kind, members in same_kind.items() if members <= deviating.keys()}
    names = list(dict.fromkeys(_kind_of(module) if _kind_of(module) in whole else module for module in deviating))
    if len(names) == 1:
        return names[0]
    shared = _shared(list(deviating))
    inside = sum(module.split(".")[: len(shared)] == shared for module in modules)
    if _EVERYWHERE * inside < len(farthest) and inside < _NEARLY_ALL * len(modules):
        return ".".join(shared)
    if len(farthest) > _EVERYWHERE * len(excess):
        return "everywhere"
    return " and ".join([*names[:2], *([count_of(len(names) - 2, "other module")] if len(names) > 2 else [])])


def _kind_of(module: str) -> str:
    """The name with a star for every number, if anything else is left."""
    kind = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)
    return kind if any(map(str.isalpha, kind)) else module


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def _shared(modules: Sequence[str]) -> list[str]:
    levels = zip(*(module.split(".") for module in modules), strict=False)
    return [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]
