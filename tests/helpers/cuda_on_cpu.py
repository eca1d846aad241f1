"""The CUDA kernels, compiled for the CPU (tests/cuda_on_cpu), as a test backend: "emulated"."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
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
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    return [
        ctypes.c_int64(len(tensors)),
        pointer(addresses),
        pointer(np.array([tensor.numel() for tensor in tensors], dtype=np.int64)),
        pointer(np.array(kinds, dtype=np.int32)),
        pointer(np.array([tensor.is_complex() for tensor in tensors], dtype=np.uint8)),
    ]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class EmulatedKernels(Kernels):
    """Work is done when a call returns, unless it is captured. Blocks of each launch run in a different order."""

    def __init__(self, library: ctypes.CDLL, stream: ctypes.c_void_p | None = None) -> None:
        super().__init__(self.measured, self._scale)
        self.library, self.stream = library, stream or ctypes.c_void_p(library.new_stream())
        self.decide_clip_, self.guard_ = self._decide, self._guard
        self._devices = itertools.cycle(range(4))  # in turn: products do not depend on the device

    def start(self, name: str, *arguments: Any) -> None:
        if getattr(self.library, f"start_{name}")(self.stream, *arguments) or self.library.synchronize(self.stream):
            raise RuntimeError(self.library.error_text().decode())

    def measured(
        self,
        tensors: Sequence[Tensor],
        factor: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = 1.0,
        infinity: bool = False,
        multiplier: Tensor | None = None,
        step: Sequence[Tensor | None] = (None, None, None),  # loss scale, verdict, counters
        device: int | None = None,
    ) -> Tensor:
        """Returns the table, multiplying by ``factor`` first; writes norm, multiplier and verdict to given tensors."""
        table = torch.full((len(tensors), len(_fields.FIELDS)), 1e33, dtype=torch.float64)
        wanted = at(norm), DTYPES[torch.float32 if norm is None else norm.dtype], ctypes.c_double(max_norm)
        place = self._multiprocessors(tensors) if device is None else device
        self.start(
            "stats",
            *(place, *arrays(tensors), at(table), at(factor), *wanted, int(infinity), at(multiplier)),
            *(*map(at, step), 0),
        )
        return table

    def _scale(self, tensors: Sequence[Tensor], multipliers: Tensor) -> None:
        left = list(tensors)
        while True:  # a launch for every time that a tensor is listed, as the operators do
            first = {one.data_ptr(): i for i, one in reversed(list(enumerate(left))) if one.numel()}
            now = [one if first.get(one.data_ptr()) == i else one.as_strided((0,), (1,)) for i, one in enumerate(left)]
            self.start("scale", next(self._devices), *arrays(now), at(multipliers), ctypes.c_int64(multipliers.dim()))
            left = [one.as_strided((0,), (1,)) if done.numel() else one for done, one in zip(now, left, strict=True)]
            if not any(map(Tensor.numel, left)):
                return

    def unscale_(self, tensors: list[Tensor], factor: Tensor) -> tuple[Tensor, None]:
        if len(set(map(id, tensors))) == len(tensors):
            return self.measured(tensors, factor), None
        self.scale_(tensors, factor.double())  # the operators give a tensor listed again to a separate launch
        return self.measured(tensors), None

    @staticmethod
    def _multiprocessors(tensors: Sequence[Tensor]) -> int:
        """One of four devices, which hold 6, 3, 15 and 768 blocks: the last bits of rows differ between them."""
        return sum(tensor.numel() + 1 for tensor in tensors) % 4

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
        held = at(state), ctypes.c_int64(window), at(norm), at(rows), ctypes.c_int64(count)
        self.start("decide", *given, *held, *map(at, (*others, out)))
        return out

    def _guard(self, options: Sequence[float], state: Tensor, window: int, *others: Tensor | None) -> Tensor:
        """The operator ``guard_``, likewise; for float32 values: numbers, verdict, loss, counters."""
        out = torch.full((4,), 77.0)
        held = at(state), ctypes.c_int64(window)
        self.start("guard", (ctypes.c_double * 7)(*options), *held, *map(at, (*others, out)))
        return out
