"""Fair timing: calls take turns round by round, so that a slow moment of the machine meets all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch

from gradstat.bench.machine import synchronize

_HOST_TIMES = 2.0  # that the GPU sleeps for while the host queues a call
_LEAST_HEAD_START, _LONGEST_HEAD_START = 1e-4, 0.5  # seconds
_CALIBRATING_CYCLES = 20_000_000
_TRIES = 2  # at a call that the host does not get ahead with


class Quartiles(NamedTuple):
    """First quartile, median and third quartile."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of one call, a number per round.

    Attributes:
        wall: From the call to the end of all its work, a final sync included.
        host: Until the call returned. On a CPU the same as ``wall``.
        device: On a GPU, between events around the call: its kernels and copies, but no time of the host, which
            queued all of it while the GPU slept. Rounds in which it did not are left out, so this is empty for a
            call that waits for the GPU or launches more than the queue holds (1,024), and on a CPU.
    """

    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)


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
    before: Callable[[str], object] | None = None,
    progress: Callable[[], object] | None = None,
    device_time: bool = True,
) -> dict[str, Samples]:
    """Times every call once per round, in an order drawn anew (but the same on every run) for each.

    Args:
        calls: By name.
        rounds, warmup: Timed rounds, and those before them that are not counted.
        device: Where the work is done; None is the CPU.
        before: Run, untimed, ahead of every call, with its name.
        progress: Called after every round, uncounted ones included.
        device_time: On a GPU, run every call a second time per round for ``Samples.device``.
    """
    device = device or torch.device("cpu")
    samples = {name: Samples() for name in calls}
    tries = dict.fromkeys(calls, _TRIES if device.type == "cuda" and device_time else 0)
    order, shuffle = list(calls), random.Random(0).shuffle
    for number in range(warmup + rounds):
        shuffle(order)
        for name in order:
            if before is not None:
                before(name)
            synchronize(device)
            start = time.perf_counter()
            calls[name]()
            returned = time.perf_counter()
            synchronize(device)
            end = time.perf_counter()
            on_device = None
            if tries[name]:
                if before is not None:
                    before(name)
                on_device = _device_seconds(calls[name], returned - start)
                tries[name] = _TRIES if on_device is not None else tries[name] - 1
            if number >= warmup:
                samples[name].wall.append(end - start)
                samples[name].host.append(returned - start)
                if on_device is not None:
                    samples[name].device.append(on_device)
        if progress is not None:
            progress()
    return samples


def _device_seconds(call: Callable[[], object], host: float) -> float | None:
    """Seconds on the device of a call that takes ``host`` seconds to queue; None if the device was awake before."""
    asleep = max(_LEAST_HEAD_START, _HOST_TIMES * host)
    if asleep > _LONGEST_HEAD_START:
        return None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(asleep * _cycles_per_second()))
    start.record()
    call()
    end.record()
    was_asleep = not start.query()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 if was_asleep else None


@cache
def _cycles_per_second() -> float:
    """The fastest the GPU's clock was seen to run: a slower one sleeps longer, which does no harm."""
    fastest = 0.0
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(_CALIBRATING_CYCLES)
        end.record()
        end.synchronize()
        fastest = max(fastest, _CALIBRATING_CYCLES / (start.elapsed_time(end) / 1e3))
    return fastest
