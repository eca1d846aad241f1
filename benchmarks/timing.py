"""Fair timing: calls take turns round by round, so that a slow moment of the machine meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Quartiles(NamedTuple):
    """Seconds per call."""

    low: float
    median: float
    high: float


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int = 15, warmup: int = 3) -> dict[str, Quartiles]:
    """Wall time of every call, device-synchronised, over ``rounds`` rounds after ``warmup`` uncounted ones."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warmup + rounds):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if number >= warmup:
                samples[name].append(time.perf_counter() - start)
    return {name: Quartiles(*statistics.quantiles(seconds, n=4)) for name, seconds in samples.items()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
