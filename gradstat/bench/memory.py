"""Peak memory of a call, exactly.

On a GPU it is what torch's caching allocator counts. On a CPU it is the highest sum of torch's own allocations,
replayed from its profiler, plus the peak of Python's (`tracemalloc`), which is where `detect_anomaly` keeps its stack
traces; as the two peaks need not fall together this is an upper bound, by a few kilobytes without `detect_anomaly`.
The resident size of the process would not do: the C library keeps freed blocks, so it says little below some megabytes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from gradstat.bench.machine import synchronize


def peak_bytes(call: Callable[[], object], device: torch.device, prepare: Callable[[], object] = lambda: None) -> int:
    """The most bytes that ``call``, which has run before, holds at any moment beyond what was held before it.

    ``prepare`` is run, uncounted, ahead of each call (two on a CPU), to free what the call would free: memory from
    before that is freed inside would count as nothing.
    """
    collecting = gc.isenabled()
    gc.disable()  # what was thrown away before must not be freed inside
    try:
        prepare()
        if device.type != "cuda":
            return _torch_peak(call) + _python_peak(call, prepare)
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    finally:
        if collecting:
            gc.enable()


def _torch_peak(call: Callable[[], object]) -> int:
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _python_peak(call: Callable[[], object], prepare: Callable[[], object]) -> int:
    prepare()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what the profiler's C++ part says about itself off the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
