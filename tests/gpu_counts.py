"""Counts the kernels a call runs on the GPU and how often it makes the host wait, with torch's profiler."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# torch.cuda.synchronize(), which ends the profile, is cudaDeviceSynchronize and not among them.
_WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


class Counts(NamedTuple):
    """Of one call: kernels (copies and fills of memory not counted) and waits of the host."""

    launches: int
    syncs: int


def count(call: Callable[[], object]) -> Counts:
    """Counts one call after three that warm up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    events = list(profiler.events())
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith(("Memcpy", "Memset"))]
    return Counts(len(kernels), sum(e.name in _WAITS for e in events))
