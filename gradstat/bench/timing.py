"""Fair timing: calls take turns round by round, so that a slow moment of the machine meets all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from gradstat.bench.machine import synchronize


class Quartiles(NamedTuple):
    """First quartile, median and third quartile."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of one or more values."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def ratios(values: Sequence[float], base: Sequence[float]) -> Quartiles:
    """Quartiles of ``values`` over ``base``, round by round: what slows a round down cancels out."""
    return quartiles([value / other for value, other in zip(values, base, strict=True)])


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 3,
    *,
    device: torch.device | None = None,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str, float], object] = lambda name, seconds: None,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Times every call once per round, in an order drawn anew (but the same on every run) for each.

    Args:
        calls: By name.
        rounds, warmup: Timed rounds, and those before them that are not counted.
        device: Where the work is done; None is the CPU.
        before, after: Run, untimed, around every call, with its name; then also with the seconds until it returned.
        progress: Called after every round, uncounted ones included.

    Returns:
        Seconds from each call to the end of all its work, a final sync included.
    """
    device = device or torch.device("cpu")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for number in range(warmup + rounds):
        shuffle(order)
        for name in order:
            before(name)
            synchronize(device)
            start = time.perf_counter()
            calls[name]()
            returned = time.perf_counter()
            synchronize(device)
            end = time.perf_counter()
            after(name, returned - start)
            if number >= warmup:
                samples[name].append(end - start)
        progress()
    return samples
