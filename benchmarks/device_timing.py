"""Device time of a call without host time, and caches that are flushed between calls.

The host queues the whole call while the GPU runs a sleep kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch

from gradstat.bench import timing

_HOST_TIMES = 2.0  # how long the GPU sleeps, in units of the time that the host takes to queue the call
_LEAST_HEAD_START, _LONGEST_HEAD_START = 1e-4, 0.5  # seconds
_CALIBRATING_CYCLES = 20_000_000
TRIES = 2  # to queue a call before the GPU wakes


def cache_bytes(device: torch.device) -> int:
    """Size in bytes of the last cache before memory: a GPU's L2, a processor's last level."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    known = "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names
    return (os.sysconf("SC_LEVEL3_CACHE_SIZE") if known else 0) or 64 << 20


class Flush:
    """Evicts the caches when called between timed calls, as a training step evicts its gradients.

    It reads twice the size of the last cache. It does not write, because dirty lines would still be written back to
    memory during the timed call.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.ones(2 * cache_bytes(device) // 4, device=device)  # zeros may be one shared page

    def __call__(self) -> None:
        self._buffer.sum()


class Samples(NamedTuple):
    """Seconds of one call, a number per round.

    Attributes:
        wall: From the call to the end of all its work, a final sync included.
        device: On a GPU, between events around the call: its kernels and copies, without host time. Rounds in which
            the GPU woke before the call was queued are left out, so this is empty for a call that syncs or that
            launches more than the queue holds (1,024), and on a CPU.
    """

    wall: list[float]
    device: list[float]


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int,
    *,
    device: torch.device,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, Samples]:
    """Like `timing.interleaved`; on a GPU every call runs a second time per round, for `Samples.device`."""
    asleep: dict[str, list[float | None]] = {name: [] for name in calls}
    tries = dict.fromkeys(calls, TRIES if device.type == "cuda" else 0)

    def after(name: str, seconds: float) -> None:
        on_device = None
        if tries[name]:
            before(name)
            with torch.cuda.device(device):
                on_device = _device_seconds(calls[name], seconds, device)
            tries[name] = TRIES if on_device is not None else tries[name] - 1
        asleep[name].append(on_device)

    wall = timing.interleaved(calls, rounds, warmup, device=device, before=before, after=after)
    return {name: Samples(wall[name], [s for s in asleep[name][warmup:] if s is not None]) for name in calls}


def _device_seconds(call: Callable[[], object], host: float, device: torch.device) -> float | None:
    """Device seconds of a call that takes ``host`` seconds to queue; None if the device woke before it was queued.

    ``device`` has to be the current one.
    """
    asleep = max(_LEAST_HEAD_START, _HOST_TIMES * host)
    if asleep > _LONGEST_HEAD_START:
        return None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(asleep * _cycles_per_second(device)))
    start.record()
    call()
    end.record()
    was_asleep = not start.query()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 if was_asleep else None


@cache
def _cycles_per_second(device: torch.device) -> float:
    """The highest clock rate observed on ``device``, the current one. At a lower rate it only sleeps longer."""
    fastest = 0.0
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(_CALIBRATING_CYCLES)
        end.record()
        end.synchronize()
        fastest = max(fastest, _CALIBRATING_CYCLES / (start.elapsed_time(end) / 1e3))
    return fastest
