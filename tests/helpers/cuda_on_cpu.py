"""The CUDA kernels, compiled for the CPU (tests/cuda_on_cpu), on streams and as a test backend: "emulated"."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from helpers.exact import FLOAT8, REAL
from torch import Tensor

from gradstat import _fields
from gradstat._core.backends import Kernels

DTYPES = {dtype: number for number, dtype in enumerate([*REAL, *FLOAT8])}


def arrays(tensors: Sequence[Tensor]) -> list[Any]:
    """The arguments that describe dense tensors to the library's functions; complex elements are pairs."""
    kinds = [DTYPES[tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype] for tensor in tensors]
    columns = (
        np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64),
        np.array([tensor.numel() for tensor in tensors], dtype=np.int64),
        np.array(kinds, dtype=np.int32),
        np.array([tensor.is_complex() for tensor in tensors], dtype=np.uint8),
    )
    return [ctypes.c_int64(len(tensors)), *map(pointer, columns)]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


class Stream:
    """A stream of the replaced runtime, in which work runs when it is synchronized."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.handle = library, ctypes.c_void_p(library.new_stream())
        self._pending: list[object] = []  # keeps the memory that pending work will read and write

    def start(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library with tensors, lists of them, and numbers as ctypes knows them."""
        given: list[Any] = []
        for argument in arguments:
            is_tensor = isinstance(argument, Tensor)
            one = ctypes.c_void_p(argument.data_ptr()) if is_tensor else argument
            given += arrays(argument) if isinstance(argument, list) else [one]
        self._pending.append(arguments)
        self._check(getattr(self.library, f"start_{name}")(self.handle, *given))

    def stats(
        self,
        tensors: Sequence[Tensor],
        factor: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = 1.0,
        infinity: bool = False,
        multiplier: Tensor | None = None,
        step: Sequence[Tensor | None] = (None, None, None),  # loss scale, verdict, counters
        device: int = 0,
        scalings: int = 0,
    ) -> Tensor:
        """The table, multiplying by ``factor`` first and by the multiplier ``scalings`` times afterwards.

        Writes norm, multiplier and verdict to given tensors.
        """
        table = torch.full((len(tensors), len(_fields.FIELDS)), 1e33, dtype=torch.float64)
        wanted = norm, DTYPES[torch.float32 if norm is None else norm.dtype], ctypes.c_double(max_norm), int(infinity)
        self.start("stats", device, list(tensors), table, factor, *wanted, multiplier, *step, scalings)
        return table

    def scale(self, tensors: Sequence[Tensor], multipliers: Tensor, device: int = 0) -> None:
        self.start("scale", device, list(tensors), multipliers, ctypes.c_int64(multipliers.dim()))

    def synchronize(self) -> None:
        self._check(self.library.synchronize(self.handle))
        self._pending.clear()

    @contextmanager
    def capture(self) -> Iterator[Callable[[Stream], None]]:
        """Captures the work given to the stream inside; yields a function that replays it on a stream afterwards."""
        graph = ctypes.c_void_p()
        self.library.begin_capture(self.handle)
        yield lambda stream: self.library.replay(graph, stream.handle)
        graph.value = self.library.end_capture(self.handle)

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(self.library.error_text().decode())


class EmulatedKernels(Kernels):
    """Work is done when a call returns, unless it is captured. Blocks of each launch run in a different order."""

    def __init__(self, library: ctypes.CDLL, stream: Stream | None = None) -> None:
        super().__init__(self.measured, self._scale)
        self._stream = stream or Stream(library)
        self.decide_clip_, self.guard_ = self._decide, self._guard
        self._devices = itertools.cycle(range(4))  # in turn: products do not depend on the device

    def measured(self, tensors: Sequence[Tensor], *options: Any, device: int | None = None, **named: Any) -> Tensor:
        """On one of four devices, which hold 6, 3, 15 and 768 blocks: the last bits of rows differ between them."""
        place = sum(tensor.numel() + 1 for tensor in tensors) % 4 if device is None else device
        table = self._stream.stats(tensors, *options, device=place, **named)
        self._stream.synchronize()
        return table

    def _scale(self, tensors: Sequence[Tensor], multipliers: Tensor) -> None:
        left = list(tensors)
        while True:  # a launch for every time that a tensor is listed, as the operators do
            first = {one.data_ptr(): i for i, one in reversed(list(enumerate(left))) if one.numel()}
            now = [one if first.get(one.data_ptr()) == i else one.as_strided((0,), (1,)) for i, one in enumerate(left)]
            self._stream.scale(now, multipliers, next(self._devices))
            self._stream.synchronize()
            left = [one.as_strided((0,), (1,)) if done.numel() else one for done, one in zip(now, left, strict=True)]
            if not any(map(Tensor.numel, left)):
                return

    def unscale_(self, tensors: list[Tensor], factor: Tensor) -> tuple[Tensor, None]:
        if len(set(map(id, tensors))) == len(tensors):
            return self.measured(tensors, factor), None
        self.scale_(tensors, factor.double())  # the operators give a tensor listed again to a separate launch
        return self.measured(tensors), None

    def _decide(
        self,
        rule: int,
        options: Sequence[float],
        state: Tensor,
        window: int,
        measured: Tensor,
        *others: Tensor | None,  # weights, factor, skip
    ) -> Tensor:
        """The operator ``decide_clip_`` as a block on a GPU computes it."""
        norm, rows, count = (None, measured, len(measured)) if measured.dim() == 2 else (measured, None, 1)
        out = torch.full((count + 1,), 77.0, dtype=torch.float64)
        given = ctypes.c_int64(rule), (ctypes.c_double * 5)(*options), ctypes.c_int64(len(options))
        held = state, ctypes.c_int64(window), norm, rows, ctypes.c_int64(count)
        self._stream.start("decide", *given, *held, *others, out)
        self._stream.synchronize()
        return out

    def _guard(self, options: Sequence[float], state: Tensor, window: int, *others: Tensor | None) -> Tensor:
        """The operator ``guard_``, likewise; for float32 values: numbers, verdict, loss, counters."""
        out = torch.full((4,), 77.0)
        self._stream.start("guard", (ctypes.c_double * 7)(*options), state, ctypes.c_int64(window), *others, out)
        self._stream.synchronize()
        return out
