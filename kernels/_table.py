"""The table that describes tensors to a Triton kernel, its upload to the device, and the launch.

A tensor is a sequence of 16-byte vectors, counted from its address rounded down to 16. Vectors are split into chunks,
one for each program. The split, and so the bits of the statistics, depend only on the tensor itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

VECTOR_BYTES = 16

FUSE = True
"""Whether multiplication and addition may be fused, with one rounding less. Set explicitly because Triton's default
differs between versions, and with it the last bits of results would."""

CHUNK_VECTORS = 4096
"""Vectors per chunk, 64 KB: long enough to hide a program's startup, short enough to distribute evenly."""

MAX_CHUNKS = 8192
"""Maximum number of chunks per tensor. Larger tensors get larger chunks, doubled as often as needed, since one program
merges all groups."""

# The int64 columns of an entry, as the kernels read it. ``values`` counts reals, two per complex element.
ADDRESS, VALUES, KIND, SHIFT, FIRST_CHUNK, CHUNKS = map(tl.constexpr, range(6))
ENTRY_WIDTH = tl.constexpr(6)

# Real element types, numbered as DType in csrc/stat.h.
_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REAL += (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOAT32, BFLOAT16, FLOAT16, FLOAT64, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT8_E4M3FNUZ, _ = map(tl.constexpr, range(8))

# Added to the number of a real type for complex elements, which are pairs of that type.
PAIR = tl.constexpr(16)

KINDS: dict[torch.dtype, int] = {dtype: kind for kind, dtype in enumerate(_REAL)} | {
    dtype: _REAL.index(dtype.to_real()) + PAIR.value for dtype in (torch.complex64, torch.complex128, torch.complex32)
}

DTYPES = {kind: dtype for dtype, kind in KINDS.items()}

_REAL_BYTES = np.array([dtype.itemsize for dtype in _REAL], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Table:
    buffer: torch.Tensor  # int64: the entries, then the tensor index of each chunk as int32
    tensors: int
    chunks: int  # of all tensors: the number of programs


# Each replay of a captured upload reads its pinned source, and graphs do not notify anyone when they are destroyed.
_sources_of_captured_uploads: list[torch.Tensor] = []


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` current, as Triton launches require; does nothing for the interpreter on the CPU."""
    if device.type == "cpu":
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return guard


def stream_of(device: torch.device) -> int:
    """Identifies the device's current stream."""
    if device.type == "cpu":
        return 0
    return int(torch.get_device_module(device).current_stream(device).stream_id)


def is_capturing(device: torch.device) -> bool:
    """Whether work is currently recorded into a CUDA graph instead of being run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def entries_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """Address, number of reals and kind of each tensor, three int64. ``gradstat._C`` describes a list far faster."""
    kinds = [KINDS[tensor.dtype] for tensor in tensors]
    values = [tensor.numel() << (kind >= PAIR.value) for tensor, kind in zip(tensors, kinds, strict=True)]
    return np.array([list(map(torch.Tensor.data_ptr, tensors)), values, kinds], dtype=np.int64).T.tobytes()


def table_of(entries: bytes, device: torch.device) -> Table:
    """The table of tensors as in `entries_of`, uploaded without a host sync, or kept from an earlier call."""
    make = _table_of.__wrapped__ if is_capturing(device) else _table_of
    return make(entries, device, stream_of(device))


# A training step uses one or two lists, and gradients usually have the same addresses as in the previous step. A table
# that is kept is never stale: its contents depend only on the arguments. One of them is the stream, whose order ensures
# that the upload finishes before the table is used, and that all uses finish before its memory is reused.
@functools.lru_cache(maxsize=16)
def _table_of(entries_of_all: bytes, device: torch.device, _: int) -> Table:
    address, values, kind = np.frombuffer(entries_of_all, np.int64).reshape(-1, 3).T
    is_pair = kind >= PAIR.value
    real_bytes = _REAL_BYTES[kind % PAIR.value]
    misaligned = (values > 0) & (address % np.where(is_pair, 2 * real_bytes, real_bytes) != 0)
    if misaligned.any():
        which = int(np.flatnonzero(misaligned)[0])
        raise ValueError(
            f"tensor {which} ({DTYPES[int(kind[which])]}) starts at address {int(address[which]):#x}, which is not a "
            "multiple of its element size; clone it first"
        )

    vectors = -(-(address % VECTOR_BYTES + values * real_bytes) // VECTOR_BYTES)
    vectors[values == 0] = 0
    shift = np.zeros_like(vectors)
    while True:
        chunks = np.maximum(-(-vectors // (CHUNK_VECTORS << shift)), 1)
        too_many = chunks > MAX_CHUNKS
        if not too_many.any():
            break
        shift += too_many

    count = len(address)
    total = int(chunks.sum())
    entries = count * ENTRY_WIDTH.value
    pin = device.type != "cpu"
    source = torch.empty(entries + (total + 1) // 2, dtype=torch.int64, device="cpu", pin_memory=pin)
    words = source.numpy()
    first_chunk = np.cumsum(chunks) - chunks
    words[:entries] = np.stack([address, values, kind, shift, first_chunk, chunks], axis=1).reshape(-1)
    words[entries:].view(np.int32)[:total] = np.repeat(np.arange(count, dtype=np.int32), chunks)
    if is_capturing(device):
        _sources_of_captured_uploads.append(source)
    # No host sync: torch's pinned allocator reuses a block only after copies from it have finished.
    return Table(source.to(device, non_blocking=True), count, total)


ALIGNMENT = 16  # bytes; Triton compiles a different kernel for pointers that are not multiples of this


class Launcher:
    """Launches one kernel on the current device without Triton's overhead per launch.

    Triton spends tens of microseconds of Python on binding, specialization and cache keys, more than the GPU needs for
    a small model. These kernels are compiled once per device, whatever the tensors, so that later launches can use what
    the first one returned: ``CompiledKernel.__getitem__`` (Triton 3.5 to 3.9). Where that does not exist, as in the
    interpreter, every launch goes through ``kernel[grid]``.
    """

    def __init__(self, kernel: Any, warps: int) -> None:
        self.kernel, self.warps = kernel, warps
        self.handles: dict[torch.device, Any] = {}

    def __call__(
        self, device: torch.device, programs: int, pointers: tuple[torch.Tensor, ...], *rest: torch.Tensor | float
    ) -> None:
        """Enqueues ``programs`` programs; ``pointers`` are the kernel's first arguments, compiled as aligned ones."""
        is_aligned = not any(pointer.data_ptr() % ALIGNMENT for pointer in pointers)
        handle = self.handles.get(device) if is_aligned else None
        if handle is not None:
            handle[(programs, 1, 1)](*pointers, *rest)
            return
        compiled = self.kernel[(programs,)](*pointers, *rest, num_warps=self.warps, enable_fp_fusion=FUSE)
        if is_aligned and hasattr(compiled, "__getitem__"):
            self.handles[device] = compiled
