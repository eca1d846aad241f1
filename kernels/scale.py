"""In-place multiplication of many tensors by one number, or by one number each, in one Triton launch.

The multipliers stay on the device; a program returns without touching a tensor whose multiplier is exactly 1. Chunks
are processed in reverse order, because what the statistics kernel read last is most likely still in cache.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from gradstat.kernels import _table
from gradstat.kernels._table import ADDRESS, ENTRY_WIDTH, FIRST_CHUNK, KIND, SHIFT, VALUES, Launcher

WARPS = 4
LANES = tl.constexpr(32 * WARPS)
UNROLL = tl.constexpr(4)
CHUNK_VECTORS = tl.constexpr(_table.CHUNK_VECTORS)


@triton.jit
def _scaled(x, multiplier):
    """X times multiplier: in float64 for float64, otherwise in float32 and rounded back to the type of x."""
    if x.dtype == tl.float64:
        product = x * multiplier
    else:
        product = (x.to(tl.float32) * multiplier.to(tl.float32)).to(x.dtype)
    return product


@triton.jit
def _scale_chunk(address, values, chunk, chunk_vectors, multiplier, ELEMENT: tl.constexpr):
    """Scales one chunk; positions count as in _read_chunk of stats.py."""
    BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    STEP_VECTORS: tl.constexpr = UNROLL * LANES
    begin = address % 16 // BYTES
    end = begin + values
    aligned = address - address % 16

    # Partial vectors: in the first chunk before the first whole vector, in the last chunk after the last one. They
    # come first, so that what they need holds no registers in the loops.
    tail = end // VECTOR
    is_last = end <= (chunk + 1) * chunk_vectors * VECTOR
    head_end = tl.where((chunk == 0) & (begin > 0), VECTOR, 0)
    tail_begin = tl.where(is_last & ((tail > 0) | (begin == 0)), tail * VECTOR, end)
    # Each lane has one element: with fewer, other lanes would read copies of elements while these are written.
    edge = tl.arange(0, LANES)
    position = tl.where(edge < VECTOR, edge, tail * VECTOR + edge - VECTOR)
    lower = tl.where(edge < VECTOR, begin, tail_begin)
    upper = tl.where(edge < VECTOR, tl.minimum(head_end, end), end)
    inside = (position >= lower) & (position < upper)
    edges = aligned.to(tl.pointer_type(ELEMENT)) + position
    tl.store(edges, _scaled(tl.load(edges, mask=inside, other=0), multiplier), mask=inside)

    # The whole vectors of this chunk: first in whole steps, then lane by lane.
    first_vector = tl.maximum(chunk * chunk_vectors, (begin + VECTOR - 1) // VECTOR)
    last_vector = tl.minimum((chunk + 1) * chunk_vectors, end // VECTOR)
    vectors = tl.maximum(last_vector - first_vector, 0)
    pointer = tl.multiple_of((aligned + first_vector * 16).to(tl.pointer_type(ELEMENT)), 16)
    step_values = tl.arange(0, STEP_VECTORS * VECTOR)
    steps = vectors // STEP_VECTORS
    for step in range(steps):
        target = pointer + step * (STEP_VECTORS * VECTOR) + step_values
        tl.store(target, _scaled(tl.load(target), multiplier))

    lane = tl.arange(0, LANES)[:, None]
    value = lane * VECTOR + tl.arange(0, VECTOR)[None, :]
    for start in range(steps * STEP_VECTORS, vectors, LANES):
        # Per lane, so that the compiler sees that vectors are accessed as a whole.
        mask = (start + lane < vectors) & (value >= 0)
        target = pointer + start * VECTOR + value
        tl.store(target, _scaled(tl.load(target, mask=mask, other=0), multiplier), mask=mask)


@triton.jit
def _tensor_of(table, tensors, chunk):
    """The index of the tensor that a chunk belongs to."""
    tensor_of_chunk = (table + tensors.to(tl.int64) * ENTRY_WIDTH).to(tl.pointer_type(tl.int32))
    return tl.load(tensor_of_chunk + chunk).to(tl.int64)


@triton.jit(do_not_specialize=["tensors", "chunks", "stride"], do_not_specialize_on_alignment=["multipliers"])
def scale_kernel(table, multipliers, tensors, chunks, stride):
    """One program per chunk, last chunk first. stride: 0 for one multiplier, 1 for one per tensor."""
    program = chunks - 1 - tl.program_id(0)
    tensor = tl.full((), 0, tl.int64)
    if stride > 0:
        tensor = _tensor_of(table, tensors, program)
    multiplier = tl.load(multipliers + tensor)
    if multiplier != 1.0:
        entry = table + _tensor_of(table, tensors, program) * ENTRY_WIDTH
        address = tl.load(entry + ADDRESS)
        values = tl.load(entry + VALUES)
        # The parts of complex elements are scaled like reals.
        real = tl.load(entry + KIND) % _table.PAIR
        chunk_vectors = CHUNK_VECTORS << tl.load(entry + SHIFT)
        chunk = program - tl.load(entry + FIRST_CHUNK)
        if real == _table.BFLOAT16:
            _scale_chunk(address, values, chunk, chunk_vectors, multiplier, tl.bfloat16)
        elif real == _table.FLOAT32:
            _scale_chunk(address, values, chunk, chunk_vectors, multiplier, tl.float32)
        elif real == _table.FLOAT16:
            _scale_chunk(address, values, chunk, chunk_vectors, multiplier, tl.float16)
        else:
            _scale_chunk(address, values, chunk, chunk_vectors, multiplier, tl.float64)


_launch_scale = Launcher(scale_kernel, WARPS)


@functools.lru_cache(maxsize=16)
def _passes(entries: bytes) -> list[bytes]:
    """The entries, split so that no address occurs twice in a pass, with empty tensors in place of those of others."""
    listed = np.frombuffer(entries, np.int64).reshape(-1, 3)
    kinds = set(listed[:, 2].tolist())
    unsupported = [str(_table.DTYPES[kind]) for kind in kinds if _table.FLOAT8_E4M3FN.value <= kind < _table.PAIR.value]
    if unsupported:
        names = ", ".join(sorted(unsupported))
        raise NotImplementedError(f"the Triton kernels cannot scale {names}; convert to a wider type first")
    passes: list[bytes] = []  # two programs must not write the same element
    left = listed[:, 1].copy()
    while left.any() or not passes:
        occupied = np.flatnonzero(left)
        first = occupied[np.unique(listed[occupied, 0], return_index=True)[1]]
        now = listed * [1, 0, 1]
        now[first] = listed[first]
        left[first] = 0
        passes.append(now.tobytes())
    return passes


def scale_(tensors: list[torch.Tensor], multipliers: torch.Tensor, entries: bytes | None = None) -> None:
    """As `gradstat._core.reference.scale_`. A tensor listed k times is scaled k times, in k launches.

    Tensors that share memory must be identical. Raises NotImplementedError for 8-bit floats, before any is changed.
    ``entries`` may be given if they are known.
    """
    assert tensors, "expected at least one tensor"
    assert multipliers.dtype == torch.float64
    assert multipliers.shape in ((), (len(tensors),))
    device = tensors[0].device
    with _table.on_device(device):
        for part in _passes(_table.entries_of(tensors) if entries is None else entries):
            table = _table.table_of(part, device)
            _launch_scale(
                device, table.chunks, (table.buffer,), multipliers, table.tensors, table.chunks, multipliers.dim()
            )
