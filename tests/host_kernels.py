"""Calls of the CUDA kernels compiled for the CPU (tests/gpu_on_host), on tensors placed in memory at will."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from exact import FLOAT8, REAL
from host_build import needs_compiler

from gradstat import _fields
from gradstat._core import backends
from gradstat._core.backends import Kernels

DTYPES = {dtype: number for number, dtype in enumerate([*REAL, *FLOAT8])}


@dataclass
class Piece:
    """One tensor in memory of its own, `offset` elements behind a 16-byte boundary."""

    values: torch.Tensor  # one-dimensional; of pairs, twice as many
    is_pair: bool = False
    offset: int = 0

    def __post_init__(self) -> None:
        size = self.values.element_size() * (2 if self.is_pair else 1)
        count = self.values.numel() * self.values.element_size()
        self.memory = np.full(count + 64, 0xA5, dtype=np.uint8)
        start = -self.memory.ctypes.data % 16 + self.offset * size
        self.bytes = self.memory[start : start + count]
        self.bytes[:] = self.values.view(torch.uint8).numpy() if count else 0
        self.address = self.memory.ctypes.data + start

    @property
    def numel(self) -> int:
        return self.values.numel() // (2 if self.is_pair else 1)

    def now(self) -> torch.Tensor:
        return torch.from_numpy(self.bytes.copy()).view(self.values.dtype) if self.numel else self.values

    def doubles(self) -> np.ndarray:
        values = self.values.double().numpy()
        return values.reshape(-1, 2) if self.is_pair else values.reshape(-1, 1)


def arrays(pieces: list[Piece]) -> list:
    return [
        ctypes.c_int64(len(pieces)),
        np.array([p.address for p in pieces], dtype=np.uint64).ctypes.data_as(ctypes.c_void_p),
        np.array([p.numel for p in pieces], dtype=np.int64).ctypes.data_as(ctypes.c_void_p),
        np.array([DTYPES[p.values.dtype] for p in pieces], dtype=np.int32).ctypes.data_as(ctypes.c_void_p),
        np.array([p.is_pair for p in pieces], dtype=np.uint8).ctypes.data_as(ctypes.c_void_p),
    ]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def update_sums(
    library: ctypes.CDLL, pieces: list[Piece], rules: list[int], coefficients: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    table = np.full((len(rules), len(_fields.UPDATE_SUMS)), 1e33)
    numbers, by = np.array(rules, dtype=np.int64), coefficients.numpy()
    library.run_update(*arrays(pieces), ctypes.c_int64(len(rules)), pointer(numbers), seed, pointer(by), pointer(table))
    return torch.from_numpy(table)


def stats(
    library: ctypes.CDLL,
    pieces: list[Piece],
    blocks: int = 7,
    seed: int = 0,
    tickets: np.ndarray | None = None,
    norm_dtype: torch.dtype | None = None,
    max_norm: float = 1.0,
    infinity: bool = False,
    factor: float | None = None,
    loss_scale: float | None = None,
    verdict: np.ndarray | None = None,
    counters: np.ndarray | None = None,
) -> tuple[np.ndarray, torch.Tensor, float]:
    table = np.full((len(pieces), len(_fields.FIELDS)), 1e33)
    tickets = np.zeros(library.most_ranges(blocks) + 2, dtype=np.uint32) if tickets is None else tickets
    norm = torch.full((1,), 77.0, dtype=norm_dtype or torch.float32)
    coefficient = np.full(2, 77.0)
    library.run_stats(
        *arrays(pieces),
        blocks,
        seed,
        pointer(tickets),
        pointer(table),
        None if factor is None else pointer(np.array([factor], dtype=np.float32)),
        ctypes.c_void_p(norm.data_ptr() if norm_dtype is not None else None),
        DTYPES[norm.dtype],
        ctypes.c_double(max_norm),
        int(infinity),
        pointer(coefficient),
        None if loss_scale is None else pointer(np.array([loss_scale], dtype=np.float32)),
        None if verdict is None else pointer(verdict),
        None if counters is None else pointer(counters),
    )
    assert not tickets.any(), "tickets must be back at zero"
    return table, norm[0], float(coefficient[0])


BLOCK = pytest.param("block", marks=needs_compiler)


def kernels_for(request: pytest.FixtureRequest) -> Kernels:
    """Makes a fixture of what decides on the CPU: a backend, torch's dispatcher, or `BLOCK`, the code of a GPU."""
    if request.param not in ("dispatched", "block"):
        return backends.resolve(request.param, "cpu")
    made = Kernels(*[cast(Any, None)] * 4)
    if request.param == "dispatched":
        made.guard_ = torch.ops.gradstat.guard_.default
    else:
        library = request.getfixturevalue("kernels_on_host")
        made.decide_clip_, made.guard_ = decide_clip_on(library), guard_on(library)
    return made


def _at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def decide_clip_on(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """The operator ``decide_clip_`` as the block of a GPU computes it."""

    def decide(
        rule: int,
        options: Sequence[float],
        state: torch.Tensor,
        window: int,
        measured: torch.Tensor,
        weights: torch.Tensor | None,
        factor: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        is_table = measured.dim() == 2
        out = torch.full((len(measured) + 1 if is_table else 2,), 77.0, dtype=torch.float64)
        library.run_decide_clip(
            ctypes.c_int64(rule),
            (ctypes.c_double * 5)(*options),
            ctypes.c_int64(len(options)),
            _at(state),
            ctypes.c_int64(window),
            _at(None if is_table else measured),
            _at(measured if is_table else None),
            ctypes.c_int64(len(measured) if is_table else 0),
            *map(_at, (weights, factor, skip, out)),
            int(state[0]),
        )
        return out

    return decide


def guard_on(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """The operator ``guard_`` likewise, for float32 values."""

    def guard(
        options: Sequence[float],
        state: torch.Tensor,
        window: int,
        numbers: torch.Tensor,
        verdict: torch.Tensor,
        loss: torch.Tensor | None,
        update: torch.Tensor | None,
        counters: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.full((4,), 77.0)
        pointers = map(_at, (numbers, verdict, loss, update, counters, out))
        held = _at(state), ctypes.c_int64(window)
        library.run_guard((ctypes.c_double * 8)(*options), *held, *pointers, int(state[0]))
        return out

    return guard
