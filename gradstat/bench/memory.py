"""Peak memory of a call.

On a GPU it is what torch's caching allocator counts. On a CPU it is the peak of torch's own allocations, replayed from
its profiler, plus the peak of Python's (``tracemalloc``), where ``detect_anomaly`` keeps its stack traces. The two
peaks need not coincide, so this is an upper bound, by a few kilobytes without ``detect_anomaly``. The resident set size
would be too coarse: the C library keeps freed blocks, so differences below a few megabytes do not show.
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
    """Peak bytes held during ``call`` beyond what was held before it. ``call`` must have run once already.

    ``prepare`` runs, uncounted, before each call (two on a CPU). It frees the memory that the call would free: older
    memory freed inside the call would offset its allocations.
    """
    collecting = gc.isenabled()
    gc.disable()  # older garbage must not be freed during the call
    try:
        prepare()
        if device.type != "cuda":
            return _torch_peak(call) + _python_peak(call, prepare)
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - allocated
    finally:
        if collecting:
            gc.enable()


def _torch_peak(call: Callable[[], object]) -> int:
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    allocated = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
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
    """Silences the messages that the profiler's C++ code writes to stderr."""
    sys.stderr.flush()
    copy = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(copy, 2)
        os.close(copy)
