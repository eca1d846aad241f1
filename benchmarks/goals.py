"""Performance goals on an H100, compared with recorded rows.

Ratios are to the fastest plain read of the same run. If a goal covers several measurements, the worst counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import rows as rows_module
import torch
from cases import CHECK, CLIP, CLIPPED, DTYPES, LARGEST, MIXED, STATS, TORCH_CLIP
from rows import Row, dtype_name
from tables import STEADY, grid, in_time, limits

from gradstat.bench import steps

LARGE, HUGE = 256 << 20, 10**9  # bytes
RESNET, TINY = "ResNet-50, 161 tensors", "1,000 tensors"
TRAININGS = ("ResNet-50, 64 images of 224", "GPT-2 small 124 M, batch 8x1024")
_WIDE = tuple(dtype_name(dtype) for dtype in DTYPES if dtype.itemsize > 1)
_FLOAT8 = tuple(dtype_name(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))


class Measured(NamedTuple):
    """One value, and what it was measured on."""

    value: float
    of: str


class Goal(NamedTuple):
    """One goal.

    Attributes:
        what: Its description.
        limit: The limit, in microseconds if it is a time.
        at_least: Whether the limit is a lower bound; otherwise it is an upper bound.
        shown: Formats a value.
        values: Extracts the measurements from the current rows of one device.
    """

    what: str
    limit: float
    at_least: bool
    shown: Callable[[float], str]
    values: Callable[[Sequence[Row]], list[Measured]]


def _shares(dtype: str) -> Callable[[Sequence[Row]], list[Measured]]:
    """Shares of a plain read's bandwidth, by device time, for all large lists of a dtype."""

    def values(rows: Sequence[Row]) -> list[Measured]:
        listed = [row for row in rows if row.group == "lists"]
        fastest = limits(listed, "device time")
        return [
            Measured(fastest[row.case, row.dtype].value / row.value, row.case)
            for row in _of(listed, STATS, "device time")
            if row.dtype == dtype and row.bytes >= LARGE and (row.case, row.dtype) in fastest
        ]

    return values


def _times(
    group: str, case: str, provider: str, metric: str, dtype: str = ""
) -> Callable[[Sequence[Row]], list[Measured]]:
    return lambda rows: [
        Measured(row.value, row.dtype)
        for row in _of(rows, provider, metric)
        if row.group == group and row.case == case and (not dtype or row.dtype == dtype)
    ]


def _added(name: str, training: str) -> Callable[[Sequence[Row]], list[Measured]]:
    """The time added to a training step, as a share of it, in a steady state."""
    return lambda rows: [
        Measured(row.value - 1, "")
        for row in _of(rows, name, "time ratio")
        if row.case == training and row.group == STEADY
    ]


def _beside_torch(rows: Sequence[Row]) -> list[Measured]:
    """Ratios of torch's time to gradstat's for all huge lists, with nothing to clip."""
    torchs = {(row.group, row.case, row.dtype): row.value for row in _of(rows, TORCH_CLIP, "wall time")}
    return [
        Measured(torchs[key] / row.value, f"{row.case}, {row.dtype}")
        for row in _of(rows, CLIP, "wall time")
        if row.bytes >= HUGE and (key := (row.group, row.case, row.dtype)) in torchs
    ]


def _of(rows: Sequence[Row], provider: str, metric: str) -> list[Row]:
    return [row for row in rows if row.provider == provider and row.metric == metric]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _share(dtype: str, least: float) -> Goal:
    return Goal(f"share of a plain read's bandwidth, 256 MB and more of {dtype}", least, True, _ratio, _shares(dtype))


def _within(what: str, micro: float, *where: str) -> Goal:
    return Goal(what, micro, False, in_time, _times(*where))


def _overhead(name: str, training: str, most: float) -> Goal:
    return Goal(f"{name.removeprefix('+ ')} in a step of {training}", most, False, _percent, _added(name, training))


GOALS = (
    *(_share(dtype, 0.92) for dtype in _WIDE),
    *(_share(dtype, 0.85) for dtype in _FLOAT8),
    _within("ResNet-50's gradients, on the device", 45, "lists", RESNET, STATS, "device time", "float32"),
    _within("ResNet-50's gradients, to the report", 100, "lists", RESNET, CHECK, "wall time", "float32"),
    _within("1,000 tiny tensors, to the report", 60, "growth in tensors", TINY, CHECK, "wall time"),
    _within(f"{MIXED}, clipped", 1500, "lists", MIXED, CLIPPED, "wall time"),
    _within(f"{LARGEST}, clipped", 3600, "lists", LARGEST, CLIPPED, "wall time"),
    _within(f"{LARGEST}, unclipped", 1300, "lists", LARGEST, CLIP, "wall time"),
    *(_overhead(steps.CHECK, training, 0.01) for training in TRAININGS),
    *(_overhead(name, training, 0.005) for name in (steps.CHECK_ASYNC, steps.MONITOR) for training in TRAININGS),
    Goal("torch's clip over gradstat's, 1 GB and more, unclipped", 2.5, True, _ratio, _beside_torch),
)


def table(rows: Iterable[Row]) -> str:
    """The goals as a table, each with its measurement and whether it is met."""
    kept, lines = rows_module.current(rows), []
    for goal in GOALS:
        limit = f"{'≥' if goal.at_least else '≤'} {goal.shown(goal.limit)}"
        values = sorted(goal.values(kept))
        if not values:
            lines.append([goal.what, limit, "not yet measured", ""])
            continue
        worst = values[0] if goal.at_least else values[-1]
        is_met = worst.value >= goal.limit if goal.at_least else worst.value <= goal.limit
        measured = goal.shown(worst.value) + (f" ({worst.of})" if worst.of else "")
        lines.append([goal.what, limit, measured, "yes" if is_met else "no"])
    return grid(["goal on an H100", "limit", "measured", "met"], lines)
