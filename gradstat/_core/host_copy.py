"""Asynchronous copies from a device to the host, of rows above all, and the streams they are made on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core import native
from gradstat._core.measurement import Measurement

peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack  # called in every check; None outside transforms

Streams = tuple[torch.Stream, ...]


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, whose numbers cannot be waited for. Initialises nothing."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def streams_of(tensors: Iterable[Tensor]) -> Streams:
    """The streams that ``tensors`` are being filled on, to be made current again when their numbers are read.

    Empty for CPU tensors, and during CUDA graph capture, since captured work runs on whatever stream replays it.
    """
    devices = set()
    for tensor in tensors:
        if tensor.is_cuda:
            devices.add(tensor.device.index)
    if not devices or torch.cuda.is_current_stream_capturing():
        return ()
    return tuple(map(torch.accelerator.current_stream, devices))


@contextmanager
def on_streams(streams: Streams) -> Iterator[None]:
    """Makes ``streams`` current, so that new work is enqueued behind the work that is already on them."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))  # type: ignore[arg-type]  # accepts any torch.Stream
        yield


def refuse_capture(device: torch.device, what: str) -> None:
    """Raises RuntimeError during CUDA graph capture, since every replay would reset ``what`` to its captured state."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} cannot be created during CUDA graph capture, as every replay would reset it; run one step "
            "before the capture"
        )


class HostCopy:
    """An asynchronous copy of a tensor to pinned host memory, enqueued behind the kernel that fills the tensor."""

    __slots__ = ("_form", "_host", "_receive", "needs_copy")

    def __init__(self, tensor: Tensor, receive: native.Receive | None = None) -> None:
        """``receive``: of the copy, if the launch that fills the tensor began it.

        Raises RuntimeError if ``tensor`` belongs to a torch.func transform and so has no concrete values.
        """
        if peek_interpreter_stack() is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise RuntimeError(
                "inside a torch.func transform (grad, vmap, jvp, functionalize) numbers cannot be copied to the host; "
                "check what the transform returns, or measure with gradstat.stats, whose table is a tensor"
            )
        if receive is None and tensor.is_cuda:
            library = native.cuda_copies()
            receive = _receive_by_torch(tensor) if library is None else library.to_host(tensor)
        self._receive = receive
        # Whether there is a copy to wait for. A CPU tensor needs none. During graph capture there are no values yet:
        # they are copied on request, after a replay.
        self.needs_copy = receive is not None
        self._host: Any = None if self.needs_copy else tensor
        self._form: Any = (tensor.shape, tensor.dtype) if self.needs_copy else None  # of what arrives

    def done(self) -> bool:
        """Whether `wait` would return at once. Never waits itself."""
        return self._arrives(False)

    def wait(self) -> Any:
        """The values as a NumPy array; waits for the copy."""
        if self._receive is not None:
            self._arrives(True)
        if isinstance(self._host, Tensor):
            return (self._host if self._host.is_cpu else self._host.cpu()).numpy()  # .cpu() waits for the device
        return self._host

    def _arrives(self, wait: bool) -> bool:
        receive = self._receive
        if receive is not None:
            numbers = receive(wait)
            if numbers is None:
                return False
            shape, dtype = self._form
            self._host, self._receive = np.frombuffer(numbers, _NUMPY[dtype]).reshape(shape), None
        return True


_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.int64: np.int64}


def _receive_by_torch(tensor: Tensor) -> native.Receive | None:
    if torch.cuda.is_current_stream_capturing():
        return None
    host = tensor.to("cpu", non_blocking=True)  # to pinned memory, which torch keeps until the copy is done
    event = torch.cuda.current_stream(tensor.device).record_event()

    def receive(wait: bool) -> Any:
        if wait:
            event.synchronize()
        return host.numpy() if wait or event.query() else None

    return receive


class HostRows:
    """A `Measurement` being copied to the host, with one copy per device. Holds no device memory."""

    __slots__ = ("_copies", "_failed", "_order", "_total", "has_total", "infos")

    def __init__(self, measurement: Measurement) -> None:
        self._copies = list(map(HostCopy, measurement.tables, itertools.repeat(measurement.receive)))
        self._order = measurement.order
        self.has_total = measurement.total is not None  # since some tensors are distributed
        self._total = None if measurement.total is None else HostCopy(measurement.total)
        self._failed = None if measurement.failed is None else HostCopy(measurement.failed)
        self.infos = measurement.infos

    @property
    def needs_copy(self) -> bool:
        """Whether anything has to be copied: False if everything is on the CPU."""
        for copy in self._copies:  # noqa: SIM110 - a generator takes longer, in every step
            if copy.needs_copy:
                return True
        return False

    def done(self) -> bool:
        """Whether everything has arrived. Never waits."""
        others = (copy for copy in (self._total, self._failed) if copy is not None)
        return all(copy.done() for copy in (*self._copies, *others))

    def table(self) -> Any:
        """The rows in the order of the tensors; waits for the copies, once per device."""
        if self._order is None and len(self._copies) == 1:
            return self._copies[0].wait()
        if not self._copies:
            return np.empty((0, _fields.COUNT))
        joined = np.concatenate([copy.wait() for copy in self._copies])
        return joined if self._order is None else joined[np.argsort(self._order)]

    def total(self) -> Any:
        """The total row over all tensors and ranks, or None if no tensor is distributed; waits for it.

        Raises RuntimeError if another rank could not measure its part.
        """
        if self._total is None:
            return None
        failed = 0.0 if self._failed is None else float(self._failed.wait())
        if math.isinf(failed):
            raise RuntimeError(
                "other ranks have other tensors, so the result is unknown; see the errors on those ranks. All ranks "
                "have to pass the same tensors in the same order"
            )
        if failed:
            raise RuntimeError(
                f"{failed:.0f} other rank{'s' * (failed != 1)} failed to measure their shards, so the result is "
                "unknown; see the errors on those ranks"
            )
        return self._total.wait()[0]


class DeviceState:
    """Numbers that keep changing in place on a device, on ``streams``, and a view of them on the host.

    A copy or pickle of it begins a view anew, on the current stream, since streams cannot be copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._begin(())

    def _begin(self, streams: Streams) -> None:
        self.streams = streams
        self._seen: Any = None
        self._copy: HostCopy | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "streams": (), "_seen": None, "_copy": None}

    def moved_to(self, device: torch.device, what: str) -> Tensor:
        """The tensor, moved to ``device`` if it is elsewhere. A move during graph capture raises and names ``what``."""
        if self.tensor.device != device:
            refuse_capture(device, what)
            self.tensor = self.tensor.to(device)
        return self.tensor

    def load_(self, numbers: Tensor) -> None:
        """Overwrites the tensor in place with ``numbers``, so that captured graphs see them."""
        self.tensor.copy_(numbers)
        self._begin(streams_of([self.tensor]))

    def newest(self, wait: bool, values: Callable[[], Tensor] | None = None) -> Any:
        """The newest numbers that have arrived, as an array; then starts the next copy. ``values`` derives others.

        Without ``wait`` only the first call waits for a GPU; later results may be some calls old.
        """
        with on_streams(self.streams):
            numbers = self.tensor if values is None else values()
            if wait or self._copy is None or not self._copy.needs_copy:
                self._copy = HostCopy(numbers)
            if wait or self._seen is None or self._copy.done():
                self._seen = self._copy.wait().copy()
                self._copy = HostCopy(numbers)
        return self._seen
