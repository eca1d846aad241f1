"""Counts the kernels that a call runs on the GPU and its host syncs, with torch's profiler."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gradstat.bench.memory import quiet

# The call of torch.cuda.synchronize() that ends the profile is cudaDeviceSynchronize, which is not in this set.
_WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


class Counts(NamedTuple):
    """Counts of one call: kernel launches (without memory copies and fills) and host syncs."""

    launches: int
    syncs: int


def busy_device() -> None:
    """Keeps the device busy for some 25 ms with one launch, so that later work is unfinished when the host checks."""
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]


def count(call: Callable[[], object]) -> Counts:
    """Counts one call, after three to warm up. Without a GPU there is nothing to count."""
    on_gpu = torch.cuda.is_available()
    for _ in range(3):
        call()
    if on_gpu:
        torch.cuda.synchronize()
    with quiet(), profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    # Annotations, as by ``Optimizer.step``, also appear on the device.
    on_device = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    kernels = [event for event in on_device if not event.name.startswith(("Memcpy", "Memset"))]
    return Counts(len(kernels), sum(event.name in _WAITS for event in profiler.events()))


class NoSync(TorchDispatchMode):
    """Raises if a number is copied to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError("the step copied a number from the device to the host")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Records the names of operators, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
