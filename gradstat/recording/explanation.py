"""Where a run deviates from golden ones, and what kind of change that is, in words."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gradstat._core.text import count_of
from gradstat.recording.golden_statistics import Floats, exponential
from gradstat.recording.kinds import plural_of

# If more than this share of the gradients deviates, the deviation is everywhere.
_EVERYWHERE = 0.4
# A module with more than this share of all tensors is too large to be named as the place.
_NEARLY_ALL = 0.8
# All norms have a factor in common if it is no smaller than this, and those of tensors, and of the first window, differ
# from it by no more than these parts, on a logarithmic scale.
_LEAST_FACTOR = math.log(1.15)
_OF_TENSORS, _OF_WINDOWS = 0.2, 0.4
# A logarithm that is lower by more than this is that of a zero.
_TO_ZERO = -46.0


@dataclass(frozen=True)
class Residuals:
    """How the tensors of one kind, or a scalar, deviate.

    Attributes:
        names: ``[n]``.
        excess: ``[windows, n]``: the largest deviation of the features over its limit, so that above 1 it is unlike.
        change: ``[windows, n]``: by how much the logarithm of the norm, or of the scalar, is larger; NaN if not known,
            Infinity if it is absent, minus Infinity if it is not finite.
    """

    names: tuple[str, ...]
    excess: Floats
    change: Floats


def explained(kinds: Mapping[str, Residuals], first: int) -> tuple[str, str]:
    """Where the run deviates, and what kind of change it is; ``first`` is the first window in which it deviates."""
    at_first = {kind: of_kind for kind, of_kind in kinds.items() if (of_kind.excess[first] > 1).any()}
    lost = {kind: state for kind, of_kind in at_first.items() if (state := _lost(of_kind, first))}
    for kind, of_kind in at_first.items():
        if kind.startswith("lr"):
            where = "the learning rate" + f" {kind}" * (kind != "lr")
            grown = of_kind.change[first, 0] > -_TO_ZERO
            return where, lost.get(kind, "not 0" if grown else f"times {exponential(of_kind.change[first, 0]):.4g}")
    if "batch" in at_first:
        return "the batch", f"its values are {lost.get('batch', 'distributed differently')}"
    for kind, words in (("parameter", "the initial parameters"), ("buffer", "buffers after the first forward pass")):
        if first == 0 and kind in at_first:
            of_kind = at_first[kind]
            factor = _factor(of_kind.change[:1, of_kind.excess[0] > 1])
            times = "" if factor is None else f", norms times {factor:.3g}"
            return _place(of_kind, 0), words + (f" are {lost[kind]}" if kind in lost else times)
    loss, gradient = kinds.get("loss"), kinds.get("gradient")
    is_loss_unlike = loss is not None and bool((loss.excess > 1).any())
    if gradient is not None:
        if "gradient" in lost:
            is_lost = np.isinf(gradient.excess) | (gradient.change < _TO_ZERO)
            place = _place(replace(gradient, excess=np.where(is_lost, np.inf, np.nan)), first)
            if place == "everywhere" and lost["gradient"] == "absent":  # a part of the graph is cut off from there on
                modules = [_module_of(gradient.names[j]) for j in np.flatnonzero(is_lost[first])]
                place = f"{modules[0]} to {modules[-1]}"
            return place, f"gradients are {lost['gradient']}"
        if "loss" in lost:
            return "the loss", f"it is {lost['loss']}"
        change, deviates = gradient.change[first:], gradient.excess[first:] > 1
        factor = _factor(change)
        if factor is not None and (is_loss_unlike or deviates.any()):
            return "everywhere", f"all norms of gradients times {factor:.3g}, {_scaled(loss, first, factor)}"
        if deviates.any() and ("gradient" in at_first or "loss" in at_first):
            place = _place(gradient, first + int(np.argmax(deviates.any(1))))
            what = "gradients and the loss" if is_loss_unlike else "gradients"
            overall = replace(gradient, excess=np.fmax.reduce(gradient.excess[first:], 0)[None])
            if _place(overall, 0) == "everywhere":
                place = "everywhere" + f", first in {place}" * (place != "everywhere")
                what += " (the data, labels, loss or forward pass" + ", or the updates" * (first > 0) + ")"
            return place, what
    for kind, of_kind in at_first.items():
        if kind != "loss":
            why = "the optimizer, its settings, clipping, or how batches repeat"
            words = f"{plural_of(kind)} are {lost[kind]}" if kind in lost else kind
            return _place(of_kind, first), f"{words}, though the gradients before are alike ({why})"
    return "the loss", "though the gradients are alike (how the loss is reduced, smoothed or reported)"


def _lost(of_kind: Residuals, window: int) -> str:
    """What is wrong if the run has no numbers, as `Residuals.change` says, or zeros, in words; empty if it has."""
    change = of_kind.change[window]
    for words, is_so in (("not finite", change == -math.inf), ("absent", change == math.inf), ("0", change < _TO_ZERO)):
        if is_so.any():
            return words
    return ""


def _factor(change: Floats) -> float | None:
    """The factor that the norms have in common over ``[windows, n]`` changes of logarithms, None if there is none."""
    by_tensor, at_first = _means(change), _means(change[:1])
    if not by_tensor.size:
        return None
    middle = float(np.median(by_tensor))
    now = float(np.median(at_first)) if at_first.size else middle
    spread = float(np.median(np.abs(by_tensor - middle)))
    is_common = abs(middle) > _LEAST_FACTOR and spread < _OF_TENSORS * abs(middle)
    return exponential(middle) if is_common and abs(now - middle) < _OF_WINDOWS * abs(middle) else None


def _means(change: Floats) -> Floats:
    """``[n]``: means over the windows that are known, without tensors of which none is."""
    change = np.where(np.isinf(change), np.nan, change)
    means: Floats = np.nanmean(change[:, ~np.isnan(change).all(0)], axis=0)
    return means


def _scaled(loss: Residuals | None, first: int, factor: float) -> str:
    """Whether the loss changed by the factor of the norms, in words."""
    of_loss = _means(loss.change[first:]) if loss is not None else np.empty(0)
    if of_loss.size and abs(float(of_loss[0]) - math.log(factor)) < _OF_WINDOWS * abs(math.log(factor)):
        return "like the loss (it is scaled)"
    return "unlike the loss (the size or variety of batches, or a factor applied after the loss)"


def _place(of_kind: Residuals, window: int) -> str:
    """The module of what deviates, the kind of modules, ``"everywhere"``, or the modules that deviate most."""
    excess, modules = of_kind.excess[window], list(map(_module_of, of_kind.names))
    farthest = [j for j in np.argsort(-excess, kind="stable").tolist() if excess[j] > 1]
    deviating = dict.fromkeys(modules[j] for j in farthest)
    partly = {_kind_of(module) for module in modules if module not in deviating}  # kinds of which not all deviate
    names = list(dict.fromkeys(module if _kind_of(module) in partly else _kind_of(module) for module in deviating))
    if len(names) == 1:
        return names[0]
    levels = zip(*(module.split(".") for module in deviating), strict=False)
    shared = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]
    inside = sum(module.split(".")[: len(shared)] == shared for module in modules)
    if _EVERYWHERE * inside < len(farthest) and inside < _NEARLY_ALL * len(modules):
        return ".".join(shared)
    if len(farthest) > _EVERYWHERE * len(excess):
        return "everywhere"
    more = [count_of(len(names) - 2, "other module")] if len(names) > 2 else []
    return " and ".join([*names[:2], *more])


def _kind_of(module: str) -> str:
    """The name with a star for every number, if anything else is left."""
    kind = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)
    return kind if any(map(str.isalpha, kind)) else module


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name
