"""The table that tells a Triton kernel where its tensors lie, its upload to the device, and the launch.

A tensor is a row of vectors of 16 bytes, counted from its address rounded down to 16; the vectors are cut into chunks,
and each chunk is one program. How a tensor is cut depends on that tensor alone, and so do the bits of its statistics.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

VECTOR_BYTES = 16

FUSE = True
"""Whether a multiplication and an addition may become one operation, one rounding fewer. Stated because
Triton's default differs between its versions, and with it would the last bits of a result."""

CHUNK_VECTORS = 4096
"""Vectors per chunk, 64 KB: long enough to hide a program's start, short enough to share evenly."""

MAX_CHUNKS = 8192
"""Chunks per tensor. Beyond it chunks double, because one program merges the rows of all groups of chunks."""

# The int64 columns of an entry, for the kernels. ``values`` counts reals, so a complex element is two of them.
ADDRESS, VALUES, KIND, SHIFT, FIRST_CHUNK, CHUNKS = map(tl.constexpr, range(6))
ENTRY_WIDTH = tl.constexpr(6)

# Real element types, numbered as DType in csrc/stat.h.
_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_REAL += (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOAT32, BFLOAT16, FLOAT16, FLOAT64, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT8_E4M3FNUZ, _ = map(tl.constexpr, range(8))

PAIR = tl.constexpr(16)
"""Added to the number of a real type: complex elements, each a pair of that type."""

KINDS: dict[torch.dtype, int] = {dtype: kind for kind, dtype in enumerate(_REAL)} | {
    dtype: _REAL.index(dtype.to_real()) + PAIR.value for dtype in (torch.complex64, torch.complex128, torch.complex32)
}

_REAL_BYTES = np.array([dtype.itemsize for dtype in _REAL], dtype=np.int64)

_dtype_of = operator.attrgetter("dtype")

# Tables kept on the devices. A training step has one or two lists; its gradients usually come back at the
# addresses of the step before.
_KEPT_TABLES = 16


@dataclass(frozen=True, slots=True)
class Table:
    """A table on the device."""

    buffer: torch.Tensor  # int64: the entries, then for every chunk the number of its tensor as int32
    tensors: int
    chunks: int  # of all tensors: the programs to launch
    is_split: bool  # whether any tensor has more than one chunk


_Key = tuple[torch.device, int, tuple[int, ...], tuple[int, ...], tuple[torch.dtype, ...]]
_tables: OrderedDict[_Key, Table] = OrderedDict()
_lock = threading.Lock()

# A captured upload reads its pinned source at every replay, and a graph does not tell when it is destroyed.
_sources_of_captured_uploads: list[torch.Tensor] = []


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` current, as a Triton launch requires; nothing to do for the CPU's interpreter."""
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
    """Whether work submitted now is recorded into a graph instead of being run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def table_of(tensors: Sequence[torch.Tensor]) -> Table:
    """The table of ``tensors``, uploaded without waiting, or kept from an earlier call."""
    # A kept table is never stale: it holds nothing but what its key holds. The key includes the stream, whose order
    # makes the table complete before its first use and unused before its memory is reused.
    device = tensors[0].device
    # A good part of what checking a small model costs the host; map is a tenth faster than comprehensions.
    addresses = tuple(map(torch.Tensor.data_ptr, tensors))
    lengths = tuple(map(torch.Tensor.numel, tensors))
    dtypes = tuple(map(_dtype_of, tensors))
    if is_capturing(device):
        return _upload(addresses, lengths, dtypes, device, captured=True)
    key = (device, stream_of(device), addresses, lengths, dtypes)
    with _lock:
        table = _tables.get(key)
        if table is not None:
            _tables.move_to_end(key)
            return table
    table = _upload(addresses, lengths, dtypes, device, captured=False)
    with _lock:
        _tables[key] = table
        while len(_tables) > _KEPT_TABLES:
            _tables.popitem(last=False)
    return table


def _upload(
    addresses: Sequence[int],
    lengths: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    captured: bool,
) -> Table:
    address = np.array(addresses, dtype=np.int64)
    kind = np.array([KINDS[dtype] for dtype in dtypes], dtype=np.int64)
    is_pair = kind >= PAIR.value
    real_bytes = _REAL_BYTES[kind % PAIR.value]
    values = np.array(lengths, dtype=np.int64) * np.where(is_pair, 2, 1)
    misaligned = (values > 0) & (address % np.where(is_pair, 2 * real_bytes, real_bytes) != 0)
    if misaligned.any():
        which = int(np.flatnonzero(misaligned)[0])
        raise ValueError(
            f"tensor {which} ({dtypes[which]}) starts at address {addresses[which]:#x}, which is not a "
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
    if captured:
        _sources_of_captured_uploads.append(source)
    # torch's allocator of pinned memory hands a block out again only when copies from it have finished.
    buffer = source.to(device, non_blocking=True)
    return Table(buffer, count, total, total > count)


ALIGNMENT = 16
"""Bytes. Triton compiles pointers that are multiples of this differently, so it is part of what must not vary."""


class Launcher:
    """Launches one kernel, on whichever device is current, without what Triton does before each launch.

    Binding, specialization and cache keys take it tens of microseconds of Python, more than the GPU needs for a small
    model. Our kernels are compiled once for each device, whatever the tensors, so the second launch can use what the
    first one returned: ``CompiledKernel.__getitem__`` (Triton 3.5 to 3.9). Where there is no such thing, as in the
    interpreter, every launch goes through ``kernel[grid]``.
    """

    def __init__(self, kernel: Any, warps: int) -> None:
        self.kernel = kernel
        self.warps = warps
        self.handles: dict[torch.device, Any] = {}

    def __call__(
        self, device: torch.device, programs: int, pointers: tuple[torch.Tensor, ...], *rest: torch.Tensor | int
    ) -> None:
        """Enqueues ``programs`` programs; ``pointers``, its first arguments, it is compiled to find aligned."""
        is_aligned = not any(pointer.data_ptr() % ALIGNMENT for pointer in pointers)
        handle = self.handles.get(device) if is_aligned else None
        if handle is not None:
            handle[(programs, 1, 1)](*pointers, *rest)
            return
        compiled = self.kernel[(programs,)](*pointers, *rest, num_warps=self.warps, enable_fp_fusion=FUSE)
        if is_aligned and hasattr(compiled, "__getitem__"):
            self.handles[device] = compiled
