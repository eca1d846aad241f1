"""Weights and biases that begin far off, in the first measurement of each."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

from gradstat.rules.base import median, sizes_of_weights
from gradstat.rules.gradients import NEVER_INITIALISED
from gradstat.rules.rows import Bools, Rows, Window

_INITIAL = 1e8  # the magnitude above which no initialised parameter begins
# The root mean square of a weight at the start over that of its twins in other layers, of the same shape and with a
# name that differs only in the numbers of layers: the median, or the smaller of two. Initial weights divided by the
# root of their layer's number differ by 6.4 in 80 layers. Or the size of a layer's weight: up to 2.1 in 44 public
# programs, if no normal distribution of standard deviation 1.
_UNLIKE = 10.0
# The size, as `sizes_of_weights` defines it, above which that counts: the last of a residual branch may begin far
# smaller than others on purpose. Where all of three or more but one are alike up to the factor `_ALIKE_BY`, `_ALONE` is
# enough: the hidden weights of a network of sines begin with a size of 0.05.
_LARGE, _ALIKE_BY, _ALONE = 5.0, 2.0, 1.0
# Or the size of a layer's weight and its ratio to the median of at least so many layers: in those programs it is up
# to 4.1 where the size is above 1.
_WIDE, _TIMES, _LAYERS = 2.5, 20.0, 4
# The number of inputs up to which a layer may make waves of coordinates, as far as a standard deviation of 1 may be off
# by chance, and the largest element over it, which is 1.73 in uniform distributions.
_COORDINATES, _NORMAL, _TAILS = 4, 0.05, 2.5
# The magnitude of a constant bias, of which usual ones are 0, 1 or -4.6; and the sum of its gradient over the largest
# that this norm allows.
_FAR_BIAS, _ONE_SIDED = 20.0, 0.9
_OF_LAYER = ("an initialisation of this layer that differs from the others, or was applied twice",)
_OF_BIAS = ("an initialisation of this bias with a wrong value, which saturates what follows or has to be unlearned",)

_FarOff = tuple[str, str, dict[str, Any]]  # a parameter, what is wrong with it, and what else its finding has


def far_off(window: Window, rows: Rows, is_new: Bools) -> Iterator[_FarOff]:
    """Judges the first of ``rows``, for parameters with a gradient that were not measured before."""
    fresh = rows.tensors.matrices & is_new
    if "gradient" not in window.latest or not fresh.any():
        return
    fresh &= window.latest["gradient"].of(rows.names).present[-1]
    for i in np.flatnonzero(fresh & (rows.max_abs[0] > _INITIAL)).tolist():
        text = f"{rows.names[i]} has an element of magnitude {rows.max_abs[0, i]:.3g} at the start"
        yield rows.names[i], text, {**NEVER_INITIALISED, "now": rows.max_abs[0, i]}
    sizes_at = dict(zip(*sizes_of_weights(rows, 0), strict=True))
    name, ratio = _unlike(rows, fresh, sizes_at)
    more = {"severity": "warning", "causes": _OF_LAYER}
    if ratio > _UNLIKE:
        text = f"{name} is {ratio:.3g} times as large at the start as the weights of the same name in other layers"
        yield name, text, {**more, "ratio": ratio}
    else:
        layers = {name for seen in window.seen.get("layers", []) for name in seen.value}
        sizes = {i: size for i, size in sizes_at.items() if fresh[i] and _is_of_layer(rows, i, layers)}
        i, size = max(sizes.items(), key=operator.itemgetter(1), default=(-1, 0.0))
        usual = median([*sizes.values()]) if len(sizes) >= _LAYERS else size
        if size > min(_UNLIKE, max(_WIDE, _TIMES * usual)):
            text = f"{rows.names[i]} begins with {size:.3g} times the standard deviation that preserves activations' "
            text += "scale" + (f", and the median layer with {usual:.2g} times it" if usual < size else "")
            yield rows.names[i], text, {**more, "ratio": size}
    if is_new.all():
        yield from _far_biases(window, rows)


def _far_biases(window: Window, rows: Rows) -> Iterator[_FarOff]:
    """Constant biases far from 0.

    A head may begin with the mean of its targets, but then it is not too large, or too small, for all of them.
    """
    gradients, values = window.latest["gradient"].of(rows.names), rows.field("min")[0]
    is_far = ~rows.tensors.matrices & (values == rows.field("max")[0]) & (np.abs(values) > _FAR_BIAS)
    norms, sums = gradients.l2_norm[-1], np.abs(gradients.field("sum")[-1])
    one_sided = (sums > _ONE_SIDED * norms * np.sqrt(rows.tensors.numel)) & (rows.tensors.numel > 1)
    for i in np.flatnonzero(is_far & gradients.present[-1]).tolist():
        name, is_head = rows.names[i], rows.names[i] in window.run.backward_order[:2]
        if "bias" in name.rpartition(".")[2] and (one_sided[i] or not norms[i] > 0 or not is_head):
            more = {"severity": "warning", "causes": _OF_BIAS, "value": values[i]}
            yield name, f"all elements of {name} are {values[i]:.4g} at the start", more


def _is_of_layer(rows: Rows, i: int, layers: Container[str]) -> bool:
    """Whether a weight is of one of the ``layers`` or has a bias, and may not be large on purpose.

    As those are that make waves of a few coordinates, and those drawn from the standard normal distribution.
    """
    is_normal = abs(rows.std[0, i] - 1) < _NORMAL and rows.max_abs[0, i] > _TAILS * rows.std[0, i]
    is_wide = math.prod(rows.tensors.shapes[i][1:]) > _COORDINATES
    return is_wide and not is_normal and bool(rows.tensors.of_layers[i] or rows.names[i] in layers)


def _unlike(rows: Rows, judged: Bools, sizes_at: Mapping[int, float]) -> tuple[str, float]:
    """The weight that is largest beside its twins, among those ``judged``, in the first row, and by which factor."""
    twins: dict[Any, list[int]] = {}
    for i, (name, shape) in enumerate(zip(rows.names, rows.tensors.shapes, strict=True)):
        if judged[i] and rows.rms[0, i] > 0:
            twins.setdefault((re.sub(r"\b\d+\.", "", name), shape), []).append(i)
    ratios = {"": 0.0}
    for group in twins.values():
        sizes = np.sort(rows.rms[0, group])
        largest = group[int(rows.rms[0, group].argmax())]
        is_alone = len(group) > 2 and sizes[-2] < _ALIKE_BY * sizes[0]
        if sizes_at.get(largest, math.inf) > (_ALONE if is_alone else _LARGE):
            ratios[rows.names[largest]] = float(sizes[-1] / sizes[(len(sizes) - 1) // 2])
    return max(ratios.items(), key=operator.itemgetter(1))
