"""Interleaved timing: calls take turns in every round, so that slow phases of the machine affect all of them."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.hub import tqdm  # type: ignore[attr-defined]  # a simple substitute if tqdm is not installed

from gradstat.bench.machine import synchronize

NOISE = "too noisy to tell"


class Quartiles(NamedTuple):
    """First quartile, median and third quartile."""

    low: float
    median: float
    high: float

    def is_noise(self, neutral: float = 0.0) -> bool:
        """Whether the median is noise, as every negative median is.

        It is noise if it is smaller than the distance of the quartiles, or nearer to ``neutral`` than both of them,
        with one on each side, or below it: nothing that is added makes a step faster.
        """
        low, median, high = self
        return high - low > median or median < neutral or min(neutral - low, high - neutral) > abs(median - neutral)

    def text(self, form: Callable[[float], str], *, neutral: float = 0.0, spread: bool = False) -> str:
        """The median in words, with its quartiles if ``spread``. Only the quartiles if the median is noise."""
        between = f"({form(self.low)} to {form(self.high)})"
        if self.is_noise(neutral):
            return f"{NOISE} {between}"
        return form(self.median) + f" {between}" * spread


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of one or more values."""
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def progress_bar(total: int, what: str) -> Any:
    """A tqdm bar of ``total`` rounds on stderr; a line every 15 seconds if stderr is not a terminal."""
    seconds = 0.0 if sys.stderr.isatty() else 15.0
    options = {"mininterval": seconds or 0.1, "delay": seconds, "dynamic_ncols": True, "leave": False}
    return tqdm(total=total, desc=what, unit="round", **options)


def ratios(values: Sequence[float], base: Sequence[float]) -> Quartiles:
    """Quartiles of ``values`` over ``base``, round by round, so that what slows a whole round cancels out."""
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
    budget: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of each call in every round, until all its work on ``device`` (None: the CPU) is done.

    Each round has a random order, the same in every run; ``warmup`` rounds are not counted. ``before`` and ``after``
    run untimed around every call, ``after`` with the seconds until the call returned; ``progress`` runs after every
    round. After ``budget`` seconds it ends, but not before three rounds.
    """
    latest = time.perf_counter() + budget
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
        if number - warmup >= 2 and time.perf_counter() > latest:
            break
    return samples
