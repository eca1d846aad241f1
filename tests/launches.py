"""Counts the kernels a call runs on the GPU, copies and fills of memory not counted."""

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def count_launches(call: Callable[[], object]) -> int:
    """Kernels of one call, after three that warm up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    on_device = [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)
