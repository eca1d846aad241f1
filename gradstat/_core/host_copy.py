"""Copies from a device to the host that need not be waited for, and the streams they are made on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

_peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack  # asked in every check: None outside of transforms


Streams = tuple[torch.Stream, ...]


def streams_of(tensors: Iterable[Tensor]) -> Streams:
    """The streams that tensors are being filled on, to come back to when their numbers are asked for.

    None for the CPU, and none while a CUDA graph is captured: its work runs on whatever stream replays it.
    """
    devices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    if not devices or torch.cuda.is_current_stream_capturing():
        return ()
    return tuple(map(torch.accelerator.current_stream, devices))


@contextmanager
def behind(streams: Streams) -> Iterator[None]:
    """Makes those streams current, so that what is enqueued comes behind what has been enqueued on them."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))  # type: ignore[arg-type]  # any stream of torch's does
        yield


def refuse_capture(device: torch.device, what: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured, whose every replay would reset ``what`` as recorded."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} would be made inside of a CUDA graph, and made anew by each of its replays; run one step before "
            "the capture"
        )


class HostCopy:
    """A tensor copied to the host, into pinned memory and behind the kernel that fills it, without waiting."""

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: Tensor) -> None:
        """Raises RuntimeError if ``tensor`` is one of a torch.func transform, which has no numbers."""
        if _peek_interpreter_stack() is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise RuntimeError(
                "inside of a torch.func transform (grad, vmap, jvp, functionalize) numbers cannot be brought to the "
                "host; check what the transform returns, or measure with gradstat.stats, whose table is a tensor"
            )
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
            # torch's allocator hands out pinned blocks it has used before, so this allocates nothing in
            # steady state, and it keeps the block until the copy is done.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            with torch.cuda.device(tensor.device):
                self._host.copy_(tensor, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
        else:
            # On the CPU nothing has to be copied. While a graph is captured there are no numbers yet: they are
            # copied when asked for, after a replay.
            self._host = tensor

    @property
    def travels(self) -> bool:
        """Whether there is a copy to wait for: not on the CPU, nor in a graph's capture."""
        return self._event is not None

    def done(self) -> bool:
        """Whether `wait` would return at once. Never waits itself."""
        return self._event is None or self._event.query()

    def wait(self) -> Any:
        """The numbers, as an array."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        # .cpu() waits on devices without pinned copies.
        return (self._host if self._host.device.type == "cpu" else self._host.cpu()).numpy()


class Mirror:
    """Numbers that the device keeps changing, as the host last saw them; ``numbers`` gives them as they are there."""

    def __init__(self, numbers: Callable[[], Tensor]) -> None:
        self._numbers = numbers
        self._seen: Any = None
        self._copy: HostCopy | None = None

    def read(self, wait: bool) -> Any:
        """The newest numbers that have arrived, as an array; sends for newer ones.

        Without ``wait`` only the first call waits for a GPU; what comes back later is some calls old.
        """
        if wait or self._copy is None or not self._copy.travels:
            self._copy = HostCopy(self._numbers())
        if wait or self._seen is None or self._copy.done():
            self._seen = self._copy.wait().copy()
            self._copy = HostCopy(self._numbers())
        return self._seen
