"""Counts the kernels a call runs on the GPU and how often it makes the host wait, with torch's profiler."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gradstat.bench.memory import quiet

# torch.cuda.synchronize(), which ends the profile, is cudaDeviceSynchronize and not among them.
_WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


class Counts(NamedTuple):
    """Of one call: kernels (copies and fills of memory not counted) and waits of the host."""

    launches: int
    syncs: int


def busy_device() -> None:
    """Makes the device sleep some 25 ms, one launch: what is asked of it then has not arrived when the host looks."""
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]


def count(call: Callable[[], object]) -> Counts:
    """Counts one call after three that warm up. Without a GPU there is nothing to count."""
    on_gpu = torch.cuda.is_available()
    for _ in range(3):
        call()
    if on_gpu:
        torch.cuda.synchronize()
    with quiet(), profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    return counts_of(profiler.events())


def counts_of(events: Iterable[Any]) -> Counts:
    """Of what the profiler recorded. Ranges that annotate (``Optimizer.step`` opens one) show up on the device too."""
    listed = list(events)
    kernels = [
        event
        for event in listed
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return Counts(len(kernels), sum(event.name in _WAITS for event in listed))


class NoSync(TorchDispatchMode):
    """Refuses to bring a number to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError("a step waited for the device")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Names the operators that compute, not views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
