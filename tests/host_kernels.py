"""Calls of the CUDA kernels compiled for the CPU (tests/gpu_on_host), on tensors placed in memory at will."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from exact import FLOAT8, REAL

from gradstat import _fields

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
