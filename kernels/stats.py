"""Gradient statistics in Triton, in one launch for any list of tensors.

Each program reads one chunk of one tensor (see _table.py). The fast path reads 16-byte vectors, in tiles, by the
method of csrc/stats_cpu_kernel.h: a vector is summed in float32 and promoted to float64 once. A tile whose sum of
squares leaves [SAFE_LOW, SAFE_HIGH] is read again exactly. Incomplete steps, the ends of a tensor, and float8 are only
read exactly.

Chunks of a tensor form groups. The program that finishes a group last merges the rows of its chunks, and the one that
finishes the last group merges the rows of the groups. The merge order does not depend on which programs these are.
"""

from __future__ import annotations

import math
import threading

import torch
import triton
import triton.language as tl

from gradstat import _fields
from gradstat.kernels import _table
from gradstat.kernels._table import ADDRESS, CHUNKS, ENTRY_WIDTH, FIRST_CHUNK, KIND, SHIFT, VALUES, Launcher

WARPS = 4

# Each lane holds one 16-byte vector, and each thread one lane. A step of the fast loop reads UNROLL vectors per thread,
# to keep enough bytes in flight. A tile is checked, and if necessary read again, as a whole.
LANES = tl.constexpr(32 * WARPS)
UNROLL = tl.constexpr(4)
STEPS_PER_TILE = tl.constexpr(8)
CHUNK_VECTORS = tl.constexpr(_table.CHUNK_VECTORS)

# The range in which a tile's sum of squares is trusted. Below it, underflowed float32 squares (each under 2**-126, at
# most 2**16 of them) could matter; above it, a square may have overflowed. For float64: within it no element is above
# LARGE, and none below SMALL matters.
SAFE_LOW = tl.constexpr(2.0**-80)
SAFE_HIGH = tl.constexpr(2.0**120)
SAFE_LOW_DOUBLE = tl.constexpr(2.0**-900)
SAFE_HIGH_DOUBLE = tl.constexpr(2.0**970)

LARGE, SMALL = tl.constexpr(_fields.LARGE), tl.constexpr(_fields.SMALL)
LARGE_SCALE, SMALL_SCALE = tl.constexpr(_fields.LARGE_SCALE), tl.constexpr(_fields.SMALL_SCALE)

FIELD_COUNT = tl.constexpr(_fields.COUNT)
MERGES = tl.constexpr(tuple({"sum": 0, "min": 1, "max": 2}[field.merge] for field in _fields.FIELDS))

# The sums that lanes accumulate, besides minimum and maximum. For a new sum add its name here and its lift in _lift.
_SUMMED = ("sq_sum", "sum")
_OTHERS = ("nan_count", "inf_count", "zero_count", "sq_sum_large", "sq_sum_small", "min", "max", "first_nonfinite")
assert {*_SUMMED, *_OTHERS} == {*_fields.NAMES}, 'a field has no lift here: CONTRIBUTING.md, "Add a field"'
NAN_COUNT, INF_COUNT, ZERO_COUNT, SQ_SUM_LARGE, SQ_SUM_SMALL, MIN, MAX, FIRST_NONFINITE = (
    tl.constexpr(_fields.INDEX[name]) for name in _OTHERS
)
SQ_SUM = tl.constexpr(_fields.INDEX["sq_sum"])
SUMMED = tl.constexpr(len(_SUMMED))
SUM_COLUMNS = tl.constexpr(tuple(_fields.INDEX[name] for name in _SUMMED))
SQUARES = tl.constexpr(_SUMMED.index("sq_sum"))

# Chunks per group. All rows of a group are loaded at once, and so are the rows of all groups, so that merging waits
# twice for memory, however many chunks there are.
GROUP = tl.constexpr(128)
NORM_ROWS = tl.constexpr(512)  # that the norm's program reads at a time
MERGED_ROWS = tl.constexpr(128)
COLUMNS = tl.constexpr(16)
assert COLUMNS.value >= _fields.COUNT
assert GROUP.value * MERGED_ROWS.value >= _table.MAX_CHUNKS

INF = tl.constexpr(float("inf"))
NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _decode_float8(x, kind):
    """Converts float8 codes to float32: float8_to_float of csrc/stat.h."""
    four_three = (kind == _table.FLOAT8_E4M3FN) | (kind == _table.FLOAT8_E4M3FNUZ)
    ordinary = (kind == _table.FLOAT8_E4M3FN) | (kind == _table.FLOAT8_E5M2)
    # 2**(127 - bias), with the biases 7, 15, 8 and 16: rebiases the exponent, and normalizes subnormals.
    scale = tl.where(four_three, 2.0**120, 2.0**112) * tl.where(ordinary, 1.0, 0.5)
    # Codes that are not finite: 0x80 alone in the fnuz types, otherwise the largest magnitudes.
    highest = tl.where(ordinary, tl.where(four_three, 0x7E, 0x7B), 0x7F)
    nan_code = tl.where(ordinary, 0x100, 0x80)
    inf_magnitude = tl.where(kind == _table.FLOAT8_E5M2, 0x7C, 0x100)
    bits = x.to(tl.int32)
    magnitude = bits & 0x7F
    value = (magnitude << tl.where(four_three, 20, 21)).to(tl.float32, bitcast=True) * scale
    special = tl.where(magnitude == inf_magnitude, INF, float("nan"))
    value = tl.where((magnitude > highest) | (bits == nan_code), special, value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def _widen(x, kind):
    """Converts elements to float32, or leaves them float64."""
    if x.dtype == tl.uint8:
        wide = _decode_float8(x, kind)
    elif x.dtype == tl.bfloat16:
        # On the bits: the conversion in Triton's interpreter loses subnormals.
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float64:
        wide = x
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _split_even_odd(x):
    """The elements at even and at odd positions of each row."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


# The sums of a lane are a tuple: the sums of SUM_COLUMNS, minimum, maximum.


@triton.jit
def _lift(x, ordinary):
    """What finite elements x add to the sums. `ordinary`: x with 0 in place of huge and tiny magnitudes."""
    return ordinary * ordinary, x


@triton.jit
def _empty_sums(REAL: tl.constexpr):
    """The sums of no elements, per lane."""
    sums = ()
    for _ in tl.static_range(SUMMED):
        sums = sums + (tl.zeros((LANES,), tl.float64),)
    return sums + (tl.full((LANES,), INF, REAL), tl.full((LANES,), -INF, REAL))


@triton.jit
def _merge_sums(a, b):
    sums = ()
    for i in tl.static_range(SUMMED):
        sums = sums + (a[i] + b[i],)
    return sums + (tl.minimum(a[SUMMED], b[SUMMED]), tl.maximum(a[SUMMED + 1], b[SUMMED + 1]))


@triton.jit
def _add_step(even, odd, sums):
    """Adds vectors, one per row, given as their elements at even and odd positions, to the lanes' sums."""
    LANE_ROWS: tl.constexpr = even.shape[0] // LANES
    step = _merge_sums(_lift(even, even) + (even, even), _lift(odd, odd) + (odd, odd))
    # Each term is rounded at most three times: in three additions of eight elements of 2-byte types, whose squares are
    # exact in float32, or in its square and two additions of the four elements of float32.
    for level in tl.static_range(1, 4):
        if 2**level <= even.shape[1]:
            evens = ()
            odds = ()
            for i in tl.static_range(SUMMED + 2):
                part = step[i]
                if level == 3 and i < SUMMED:
                    part = part.to(tl.float64)
                a, b = _split_even_odd(part)
                evens = evens + (a,)
                odds = odds + (b,)
            step = _merge_sums(evens, odds)
    lanes = ()
    for i in tl.static_range(SUMMED):
        lanes = lanes + (tl.sum(tl.reshape(step[i].to(tl.float64), (LANE_ROWS, LANES)), axis=0),)
    low = tl.min(tl.reshape(step[SUMMED], (LANE_ROWS, LANES)), axis=0)
    high = tl.max(tl.reshape(step[SUMMED + 1], (LANE_ROWS, LANES)), axis=0)
    return _merge_sums(sums, lanes + (low, high))


@triton.jit
def _read_tile(pointer, steps, VECTOR: tl.constexpr, PAIR: tl.constexpr, REAL: tl.constexpr):
    """Sums and zero counts, per lane, of `steps` whole steps."""
    sums = _empty_sums(REAL)
    zeros = tl.zeros((LANES,), tl.int32)
    STEP: tl.constexpr = UNROLL * LANES * VECTOR
    # One vector per row, in the layout in which adjacent threads load adjacent vectors.
    offsets = tl.arange(0, UNROLL * LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for step in range(steps):
        even, odd = _split_even_odd(_widen(tl.load(pointer + step * STEP + offsets), 0))
        sums = _add_step(even, odd, sums)
        if PAIR:
            counts = ((even == 0) & (odd == 0)).to(tl.int32)
        else:
            counts = (even == 0).to(tl.int32) + (odd == 0).to(tl.int32)
        zeros += tl.sum(tl.reshape(tl.sum(counts, axis=1), (UNROLL, LANES)), axis=0)
    return sums, zeros


@triton.jit
def _lift_finite(x, good, sums, scaled_sums):
    """lift_finite of csrc/stat.h, per lane, for those elements of x, [LANES, n], that are `good`."""
    sq_sum_large, sq_sum_small = scaled_sums
    wide = tl.where(good, x, 0.0).to(tl.float64)
    ordinary = wide
    if x.dtype == tl.float64:
        magnitude = tl.abs(wide)
        is_large = magnitude > LARGE
        is_small = magnitude < SMALL
        scaled = tl.where(is_large, wide * LARGE_SCALE, 0.0)
        sq_sum_large += tl.sum(scaled * scaled, axis=1)
        scaled = tl.where(is_small, wide * SMALL_SCALE, 0.0)
        sq_sum_small += tl.sum(scaled * scaled, axis=1)
        ordinary = tl.where(is_large | is_small, 0.0, wide)
    each = _lift(wide, ordinary)
    lifted = ()
    for i in tl.static_range(SUMMED):
        lifted = lifted + (tl.sum(each[i], axis=1),)
    low = tl.min(tl.where(good, x, INF), axis=1)
    high = tl.max(tl.where(good, x, -INF), axis=1)
    return _merge_sums(sums, lifted + (low, high)), (sq_sum_large, sq_sum_small)


@triton.jit
def _read_exact(
    base, begin, end, offset, kind, rare, sums, zeros, VECTOR: tl.constexpr, PAIR: tl.constexpr, WHOLE: tl.constexpr
):
    """The exact path: adds values [begin, end) from the aligned address `base` to rare, sums and zeros.

    Each lane takes VECTOR values at a time. WHOLE promises that begin is 0 and end a multiple of VECTOR, which keeps
    16-byte loads. offset is the index of the element at `base`, negative if that is before the tensor.
    """
    nans, infs, sq_sum_large, sq_sum_small, first = rare
    WIDTH: tl.constexpr = 2 if PAIR else 1
    lane = tl.arange(0, LANES)[:, None]
    value = lane * VECTOR + tl.arange(0, VECTOR)[None, :]
    element = lane * (VECTOR // WIDTH) + tl.arange(0, VECTOR // WIDTH)[None, :]
    lane_nans = tl.zeros((LANES,), tl.int32)
    lane_infs = tl.zeros((LANES,), tl.int32)
    lane_first = tl.full((LANES,), NO_INDEX, tl.int32)
    scaled_sums = (tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64))
    for start in range(0, end, LANES * VECTOR):
        if WHOLE:
            # Per lane, so that the compiler sees that vectors are loaded as a whole.
            is_inside = start + lane * VECTOR < end
            mask = is_inside & (value >= 0)
            valid = is_inside & (element >= 0)
        else:
            mask = (start + value >= begin) & (start + value < end)
            valid = (start + element * WIDTH >= begin) & (start + element * WIDTH < end)
        x = _widen(tl.load(base + (start + value), mask=mask, other=0), kind)
        if PAIR:
            real, imaginary = tl.split(tl.reshape(x, (LANES, VECTOR // WIDTH, 2)))
            is_nan = (real != real) | (imaginary != imaginary)
            is_nonfinite = is_nan | (tl.abs(real) == INF) | (tl.abs(imaginary) == INF)
            is_zero = (real == 0) & (imaginary == 0)
        else:
            is_nan = x != x
            is_nonfinite = is_nan | (tl.abs(x) == INF)
            is_zero = x == 0
        # Masked elements were loaded as 0, which is finite but must not be counted as a zero.
        good = valid & (is_nonfinite == 0)
        lane_nans += tl.sum(is_nan.to(tl.int32), axis=1)
        lane_infs += tl.sum((is_nonfinite & (is_nan == 0)).to(tl.int32), axis=1)
        index = tl.where(is_nonfinite, start // WIDTH + element, NO_INDEX)
        lane_first = tl.minimum(lane_first, tl.min(index, axis=1))
        zeros += tl.sum((is_zero & valid).to(tl.int32), axis=1)
        if PAIR:
            sums, scaled_sums = _lift_finite(real, good, sums, scaled_sums)
            sums, scaled_sums = _lift_finite(imaginary, good, sums, scaled_sums)
        else:
            sums, scaled_sums = _lift_finite(x, good, sums, scaled_sums)
    nans += tl.sum(lane_nans)
    infs += tl.sum(lane_infs)
    if sums[SUMMED].dtype == tl.float64:
        sq_sum_large += tl.sum(scaled_sums[0])
        sq_sum_small += tl.sum(scaled_sums[1])
    local = tl.min(lane_first)
    first = tl.where(local == NO_INDEX, first, tl.minimum(first, (offset + local).to(tl.float64)))
    return (nans, infs, sq_sum_large, sq_sum_small, first), sums, zeros


@triton.jit
def _read_edges(
    aligned, begin, end, chunk, chunk_vectors, kind, rare, sums, zeros, ELEMENT: tl.constexpr, PAIR: tl.constexpr
):
    """Adds the partial vectors: in the first chunk before the first whole vector, in the last after the last one."""
    VECTOR: tl.constexpr = 128 // ELEMENT.primitive_bitwidth
    WIDTH: tl.constexpr = 2 if PAIR else 1
    tail = end // VECTOR
    is_last = end <= (chunk + 1) * chunk_vectors * VECTOR
    for edge in range(2):
        is_tail = edge == 1
        is_needed = (is_tail & is_last & (end % VECTOR != 0) & ((tail > 0) | (begin == 0))) | (
            (edge == 0) & (chunk == 0) & (begin > 0)
        )
        if is_needed:
            at = tl.where(is_tail, tail, 0)
            pointer = tl.multiple_of((aligned + at * 16).to(tl.pointer_type(ELEMENT)), 16)
            edge_begin = tl.where(is_tail, 0, begin).to(tl.int32)
            edge_end = tl.minimum(end - at * VECTOR, VECTOR).to(tl.int32)
            # An exact division, also for positions before the tensor: pairs are aligned and never straddle a vector.
            first_index = (at * VECTOR - begin) // WIDTH
            # Less than a vector: one element per lane.
            rare, sums, zeros = _read_exact(
                pointer, edge_begin, edge_end, first_index, kind, rare, sums, zeros, WIDTH, PAIR, False
            )
    return rare, sums, zeros


@triton.jit
def _store_row(row, row_stride, rare, sums, zeros):
    """Merges the lanes and stores the fields, with columns `row_stride` apart."""
    tl.store(row + NAN_COUNT * row_stride, rare[0].to(tl.float64))
    tl.store(row + INF_COUNT * row_stride, rare[1].to(tl.float64))
    tl.store(row + SQ_SUM_LARGE * row_stride, rare[2])
    tl.store(row + SQ_SUM_SMALL * row_stride, rare[3])
    tl.store(row + FIRST_NONFINITE * row_stride, rare[4])
    for i in tl.static_range(SUMMED):
        tl.store(row + SUM_COLUMNS[i] * row_stride, tl.sum(sums[i]))
    tl.store(row + MIN * row_stride, tl.min(sums[SUMMED]).to(tl.float64))
    tl.store(row + MAX * row_stride, tl.max(sums[SUMMED + 1]).to(tl.float64))
    tl.store(row + ZERO_COUNT * row_stride, tl.sum(zeros).to(tl.float64))


@triton.jit
def _read_chunk(
    address, values, chunk, chunk_vectors, row, row_stride, kind, ELEMENT: tl.constexpr, PAIR: tl.constexpr
):
    """Reads one chunk of one tensor and stores its row.

    Positions, in values or vectors, count from the address rounded down to a vector.
    """
    BYTES: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    WIDTH: tl.constexpr = 2 if PAIR else 1
    REAL: tl.constexpr = tl.float64 if tl.float64 == ELEMENT else tl.float32
    # With sixteen bytes per lane, each converted to float64, too many registers would be needed.
    EXACT: tl.constexpr = 8 if VECTOR == 16 else VECTOR
    STEP_VECTORS: tl.constexpr = UNROLL * LANES
    # Gradients are hardly ever float8, so it has no fast path.
    MOST_STEPS: tl.constexpr = 0 if tl.uint8 == ELEMENT else STEPS_PER_TILE
    begin = address % 16 // BYTES
    end = begin + values
    aligned = address - address % 16

    # The whole vectors of this chunk.
    vector = tl.maximum(chunk * chunk_vectors, (begin + VECTOR - 1) // VECTOR)
    last_vector = tl.minimum((chunk + 1) * chunk_vectors, end // VECTOR)

    zero = tl.full((), 0.0, tl.float64)
    none = tl.full((), 0, tl.int32)
    rare = (none, none, zero, zero, zero + INF)
    sums = _empty_sums(REAL)
    zeros = tl.zeros((LANES,), tl.int32)

    while vector < last_vector:
        # A tile has at most MOST_STEPS steps. What remains of the chunk after the last step is read exactly.
        pointer = tl.multiple_of((aligned + vector * 16).to(tl.pointer_type(ELEMENT)), 16)
        steps = tl.minimum((last_vector - vector) // STEP_VECTORS, MOST_STEPS).to(tl.int32)
        vectors = (steps * STEP_VECTORS).to(tl.int64)
        if steps == 0:
            vectors = last_vector - vector
        is_trusted = steps > 0
        if tl.uint8 != ELEMENT:
            tile_sums, tile_zeros = _read_tile(pointer, steps, VECTOR, PAIR, REAL)
            if is_trusted:
                squares = tl.sum(tile_sums[SQUARES])
                if tl.float64 == REAL:
                    is_trusted = (squares >= SAFE_LOW_DOUBLE) & (squares <= SAFE_HIGH_DOUBLE)
                else:
                    is_trusted = (squares >= SAFE_LOW) & (squares <= SAFE_HIGH)
                if squares == 0:
                    is_trusted = tl.sum(tile_zeros) * WIDTH == vectors * VECTOR
            if is_trusted:
                sums = _merge_sums(sums, tile_sums)
                zeros += tile_zeros
        if not is_trusted:
            first_index = (vector * VECTOR - begin) // WIDTH
            count = vectors.to(tl.int32) * VECTOR
            rare, sums, zeros = _read_exact(pointer, 0, count, first_index, kind, rare, sums, zeros, EXACT, PAIR, True)
        vector += vectors

    rare, sums, zeros = _read_edges(aligned, begin, end, chunk, chunk_vectors, kind, rare, sums, zeros, ELEMENT, PAIR)
    _store_row(row, row_stride, rare, sums, zeros)


@triton.jit
def _merge_rows(rows, column_stride, row_stride, count, out, out_stride):
    """Merges at most MERGED_ROWS rows into `out`; the strides are counted in numbers."""
    column = tl.arange(0, COLUMNS)
    merge = tl.full((COLUMNS,), 0, tl.int32)
    for field in tl.static_range(FIELD_COUNT):
        merge = tl.where(column == field, MERGES[field], merge)
    # A maximum is computed as the negated minimum of negated values.
    sign = tl.where(merge == 2, -1.0, 1.0).to(tl.float64)
    identity = tl.where(merge == 0, 0.0, INF).to(tl.float64) * sign
    index = tl.arange(0, MERGED_ROWS)
    at = column[:, None] * column_stride.to(tl.int64) + index[None, :] * row_stride
    mask = (column[:, None] < FIELD_COUNT) & (index[None, :] < count)
    # The rows were written by other programs; .cg bypasses L1, which is not coherent.
    part = tl.load(rows + at, mask=mask, other=0.0, cache_modifier=".cg")
    part = tl.where(mask, part, identity[:, None])
    merged = tl.where(merge == 0, tl.sum(part, axis=1), sign * tl.min(part * sign[:, None], axis=1))
    tl.store(out + column * out_stride, merged, mask=column < FIELD_COUNT)


@triton.jit
def _read_chunk_of_kind(address, values, chunk, chunk_vectors, row, row_stride, kind):
    """Compiles a loop for each type of elements; float8, decoded as its kind says, has one for all."""
    if kind == _table.BFLOAT16:
        _read_chunk(address, values, chunk, chunk_vectors, row, row_stride, kind, tl.bfloat16, False)
    elif kind == _table.FLOAT32:
        _read_chunk(address, values, chunk, chunk_vectors, row, row_stride, kind, tl.float32, False)
    elif kind == _table.FLOAT16:
        _read_chunk(address, values, chunk, chunk_vectors, row, row_stride, kind, tl.float16, False)
    elif kind == _table.FLOAT64:
        _read_chunk(address, values, chunk, chunk_vectors, row, row_stride, kind, tl.float64, False)
    elif kind == _table.FLOAT32 + _table.PAIR:
        _read_chunk(address, values, chunk, chunk_vectors, row, row_stride, kind, tl.float32, True)
    elif kind == _table.FLOAT16 + _table.PAIR:
        _read_chunk(address, values, chunk, chunk_vectors, row, row_stride, kind, tl.float16, True)
    elif kind == _table.FLOAT64 + _table.PAIR:
        _read_chunk(address, values, chunk, chunk_vectors, row, row_stride, kind, tl.float64, True)
    else:
        _read_chunk(address, values, chunk, chunk_vectors, row, row_stride, kind, tl.uint8, False)


@triton.jit
def _merge_chunks(rows, tickets, out, chunk, first_chunk, count, chunks):
    """Takes this chunk's ticket. Whoever takes the last of a group, or of all groups, merges their rows."""
    group = chunk // GROUP
    first_of_group = first_chunk + group * GROUP
    in_group = tl.minimum(count - group * GROUP, GROUP).to(tl.int32)
    groups = (count + GROUP - 1) // GROUP
    # All threads of this program must store their parts of the row before the ticket releases it to other programs.
    tl.debug_barrier()
    done = tl.atomic_add(tickets + first_of_group, 1, sem="acq_rel", scope="gpu")
    if done == in_group - 1:
        tl.store(tickets + first_of_group, 0)
        if groups == 1:
            _merge_rows(rows + first_chunk, chunks, 1, count, out, 1)
        else:
            # Stored in place of the row of the group's first chunk, which has been read by then.
            _merge_rows(rows + first_of_group, chunks, 1, in_group, rows + first_of_group, chunks)
            tl.debug_barrier()
            # The groups' ticket is that of the second chunk, which no group uses.
            done = tl.atomic_add(tickets + first_chunk + 1, 1, sem="acq_rel", scope="gpu")
            if done == groups - 1:
                tl.store(tickets + first_chunk + 1, 0)
                _merge_rows(rows + first_chunk, chunks, GROUP, groups, out, 1)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def stats_kernel(table, rows, tickets, out, tensors, chunks):
    """One program per chunk. rows: [fields, chunks]; tickets: [chunks] int32, 0 before and after the launch."""
    program = tl.program_id(0)
    tensor_of_chunk = (table + tensors.to(tl.int64) * ENTRY_WIDTH).to(tl.pointer_type(tl.int32))
    tensor = tl.load(tensor_of_chunk + program).to(tl.int64)
    entry = table + tensor * ENTRY_WIDTH
    address = tl.load(entry + ADDRESS)
    values = tl.load(entry + VALUES)
    kind = tl.load(entry + KIND).to(tl.int32)
    chunk_vectors = CHUNK_VECTORS << tl.load(entry + SHIFT)
    first_chunk = tl.load(entry + FIRST_CHUNK)
    chunk = program - first_chunk

    count = tl.load(entry + CHUNKS).to(tl.int32)
    row_of_tensor = out + tensor * FIELD_COUNT
    # A tensor's only chunk stores the tensor's row directly.
    row = row_of_tensor
    row_stride = tl.full((), 1, tl.int64)
    if count > 1:
        row = rows + program
        row_stride = chunks.to(tl.int64)

    _read_chunk_of_kind(address, values, chunk, chunk_vectors, row, row_stride, kind)
    if count > 1:
        _merge_chunks(rows, tickets, row_of_tensor, chunk, first_chunk, count, chunks)


@triton.jit(do_not_specialize=["count", "infinity"])
def norm_kernel(table, out, count, infinity, max_norm: tl.float64):
    """One program. out: the multiplier that clips all tensors of a table together, and their norm; see norms.py."""
    zero = tl.zeros((NORM_ROWS,), tl.float64)
    nans, infs, squares, large, small, largest = zero, zero, zero, zero, zero, zero
    for start in range(0, count, NORM_ROWS):
        at = start + tl.arange(0, NORM_ROWS)
        row = table + at * FIELD_COUNT
        nans += tl.load(row + NAN_COUNT, mask=at < count, other=0.0)
        infs += tl.load(row + INF_COUNT, mask=at < count, other=0.0)
        squares += tl.load(row + SQ_SUM, mask=at < count, other=0.0)
        large += tl.load(row + SQ_SUM_LARGE, mask=at < count, other=0.0)
        small += tl.load(row + SQ_SUM_SMALL, mask=at < count, other=0.0)
        least = tl.load(row + MIN, mask=at < count, other=0.0)
        largest = tl.maximum(largest, tl.maximum(tl.load(row + MAX, mask=at < count, other=0.0), -least))
    norm = tl.max(largest)
    if infinity == 0:
        ordinary, above, below = tl.sum(squares), tl.sum(large), tl.sum(small)
        norm = tl.sqrt(ordinary + below / SMALL_SCALE / SMALL_SCALE)
        norm = tl.where(ordinary > 0, norm, tl.sqrt(below) / SMALL_SCALE)
        with_large = tl.sqrt(above + ordinary * LARGE_SCALE * LARGE_SCALE) / LARGE_SCALE
        norm = tl.where(above > 0, with_large, norm)
    norm = tl.where(tl.sum(infs) > 0, INF, norm)
    norm = tl.where(tl.sum(nans) > 0, float("nan"), norm)
    multiplier = max_norm / (norm + 1e-6)
    tl.store(out, tl.where(multiplier > 1.0, 1.0, multiplier))
    tl.store(out + 1, norm)


_launch_stats = Launcher(stats_kernel, WARPS)
_launch_norm = Launcher(norm_kernel, WARPS)
_scratch: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
_lock = threading.Lock()


def _scratch_for(table: _table.Table, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and zeroed tickets for the chunks of a launch, one pair per stream: launches on a stream are ordered."""
    # A captured graph may be replayed on another stream, so it gets tensors of its own.
    captured = _table.is_capturing(device)
    key = (device, 0 if captured else _table.stream_of(device))
    # A launch that splits no tensor uses neither, but passing other dtypes would compile another kernel.
    count = table.chunks if table.chunks > table.tensors else 1
    with _lock:
        kept = None if captured else _scratch.get(key)
        if kept is not None and len(kept[1]) >= count:
            return kept
        # Grows by half, so that lists that become a little longer each time do not allocate each time.
        count = count if captured else count * 3 // 2
        rows = torch.empty(count * _fields.COUNT, dtype=torch.float64, device=device)
        tickets = torch.zeros(count, dtype=torch.int32, device=device)
        if not captured:
            _scratch[key] = (rows, tickets)
    return rows, tickets


def stats(tensors: list[torch.Tensor], entries: bytes | None = None) -> torch.Tensor:
    """The table of ``tensors``, at least one, all on one device, as `gradstat._core.tensors.readable` returns them.

    ``entries`` may be given if they are known.
    """
    assert tensors, "expected at least one tensor"
    device = tensors[0].device
    with _table.on_device(device):
        table = _table.table_of(_table.entries_of(tensors) if entries is None else entries, device)
        rows, tickets = _scratch_for(table, device)
        out = torch.empty((table.tensors, _fields.COUNT), dtype=torch.float64, device=device)
        _launch_stats(device, table.chunks, (table.buffer, rows, tickets, out), table.tensors, table.chunks)
    return out


def norm(table: torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
    """``[2]`` float64: the multiplier that clips the tensors of a table together, and their norm, of order 2 or inf."""
    out = table.new_empty(2)
    with _table.on_device(table.device):
        _launch_norm(table.device, 1, (table, out), len(table), int(norm_type == math.inf), max_norm)
    return out
