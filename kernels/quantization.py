"""What a tensor would lose in a format of few bits, in Triton: one template over elements, scales and shapes of blocks.

A tensor is [outer, rows, columns] in memory, its blocks are BLOCK_ROWS x BLOCK_COLUMNS. A program reads BLOCKS adjacent
blocks and stores their row; fields are those of gradstat.lowprecision.stats. Rules are those of its reference, bit for
bit, except that the errors and squares of a block are added in float32, in units of its scale, so that none overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from gradstat.kernels._table import on_device

FIELD_COUNT = tl.constexpr(11)
LARGEST_FLOAT32 = tl.constexpr(2.0**128 - 2.0**104)
INF = tl.constexpr(float("inf"))
LARGEST_E4M3 = tl.constexpr(448.0)
FLOAT32, FLOOR, _, TWO_LEVEL = map(tl.constexpr, range(4))  # the rules of scales

# The numbers of a format (gradstat.lowprecision.formats.Format.numbers) that the kernel is compiled for.
FORMAT = ("RULE", "IS_WHOLE", "STEPS", "LEAST", "LARGEST", "GREATEST")
PROGRAM = 4096  # elements of most programs


@triton.jit
def _load_blocks(
    x,
    rows,
    columns,
    strips,
    chunks,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    JOINS: tl.constexpr,
):
    """This program's elements, [ROWS, BLOCKS, COLUMNS], as float64 or float32 with 0 beyond the ends of the tensor.

    Also the number of its blocks. JOINS: they are of ROWS x COLUMNS elements, otherwise of 1 x COLUMNS.
    """
    program = tl.program_id(0)
    strip, chunk = program // chunks, (program % chunks).to(tl.int64)
    first = strip % strips * ROWS
    row = first + tl.arange(0, ROWS)[:, None, None]
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    at = ((strip // strips).to(tl.int64) * rows + row) * columns + column
    values = tl.load(x + at, mask=(row < rows) & (column < columns), other=0)
    count = tl.minimum(tl.cdiv(columns, COLUMNS) - chunk * BLOCKS, BLOCKS)
    if not JOINS:
        count *= tl.minimum(rows - first, ROWS)
    if values.dtype == tl.bfloat16:
        # On the bits: the conversion in Triton's interpreter loses subnormals.
        wide = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif values.dtype == tl.float16:
        wide = values.to(tl.float32)
    else:
        wide = values
    return wide, count


@triton.jit
def _as_float32(magnitude):
    """Finite magnitudes as float32, of which float64 ones may become zero or the largest."""
    if magnitude.dtype == tl.float64:
        magnitude = tl.minimum(magnitude.to(tl.float32), LARGEST_FLOAT32)
    return magnitude


@triton.jit
def _rounded(magnitude, STEPS: tl.constexpr, LEAST: tl.constexpr):
    """Rounded to the nearest element, halves to even, as if there were no largest element; see the reference."""
    power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, LEAST) * STEPS
    return (magnitude + shift) - shift


@triton.jit
def _scales(amax, largest, RULE: tl.constexpr, LARGEST: tl.constexpr, GREATEST: tl.constexpr):
    """For blocks: multiplier and scale; what elements are measured by, which is not 0 where a multiplier is."""
    one = tl.zeros_like(amax) + 1.0
    if RULE == TWO_LEVEL:
        of_tensor = tl.minimum(tl.div_rn(one * (LARGEST_E4M3 * LARGEST), largest), LARGEST_FLOAT32)
        decode = tl.div_rn(one, of_tensor)
        sought = amax * (of_tensor * tl.div_rn(one, one * LARGEST))
        code = tl.minimum(_rounded(sought, 1.5 * 2.0**20, 2.0**-6), LARGEST_E4M3)
        is_lost = code == 0
        multiplier = tl.minimum(tl.div_rn(one, tl.where(is_lost, 1.0, code * decode)), LARGEST_FLOAT32)
        unit_scale = tl.where(is_lost, 1.0, code).to(tl.float64) * decode.to(tl.float64)
        scale = tl.where(is_lost, 0.0, unit_scale)
        return tl.where(is_lost, 0.0, multiplier), scale, tl.where(is_lost, of_tensor, multiplier), unit_scale
    if RULE == FLOAT32:
        multiplier = tl.minimum(tl.div_rn(one * LARGEST, amax), LARGEST_FLOAT32)
    else:
        if RULE == FLOOR:
            exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - (127 + GREATEST), -127)
        else:
            bits = tl.div_rn(amax, one * LARGEST).to(tl.int32, bitcast=True)
            exponent = tl.where(bits <= 0x400000, -127, ((bits + 0x7FFFFF) >> 23) - 127)
        multiplier = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = tl.div_rn(one, multiplier).to(tl.float64)
    return multiplier, scale, multiplier, scale


@triton.jit
def _sum(values, JOINS: tl.constexpr):
    """The sums of blocks, one for each, as their scales are kept."""
    sums = tl.sum(values, axis=2, keep_dims=True)
    return tl.sum(sums, axis=0, keep_dims=True) if JOINS else sums


@triton.jit
def _store(row, field: tl.constexpr, values):
    """Stores the sum of the values of all blocks."""
    tl.store(row + field, tl.sum(values).to(tl.float64))


# Not compiled again for every address and number. Whether columns are a multiple of 16 decides about wide loads.
@triton.jit(do_not_specialize=["rows", "strips", "chunks"], do_not_specialize_on_alignment=["largest"])
def rows_kernel(
    x,
    largest,
    out,
    rows,
    columns,
    strips,
    chunks,
    RULE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    STEPS: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    GREATEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    JOINS: tl.constexpr,
):
    """The row of each program's blocks. IS_WHOLE: they are parts of one block, whose largest magnitude is `largest`."""
    wide, count = _load_blocks(x, rows, columns, strips, chunks, ROWS, BLOCKS, COLUMNS, JOINS)
    row = out + tl.program_id(0).to(tl.int64) * FIELD_COUNT
    exact = tl.abs(wide)
    is_finite = exact < INF
    exact = tl.where(is_finite, exact, 0.0)
    # Counted and stored before anything else, since predicates of all elements hold registers.
    _store(row, 0, _sum((exact > 0).to(tl.int32), JOINS))
    _store(row, 3, _sum((is_finite == 0).to(tl.int32), JOINS))
    of_tensor = tl.load(largest)
    greatest = tl.max(exact, axis=2, keep_dims=True)
    if JOINS:
        greatest = tl.max(greatest, axis=0, keep_dims=True)
    amax = _as_float32(greatest)
    if IS_WHOLE:
        amax = tl.zeros_like(amax) + of_tensor
    multiplier, scale, unit, unit_scale = _scales(amax, of_tensor, RULE, LARGEST, GREATEST)

    magnitude = _as_float32(exact)
    rounded = _rounded(magnitude * multiplier, STEPS, LEAST)
    code = tl.minimum(rounded, LARGEST)
    _store(row, 2, _sum((rounded > LARGEST).to(tl.int32), JOINS))
    if exact.dtype == tl.float64:
        squares = _sum(exact * exact, JOINS)
        error = exact - code.to(tl.float64) * scale
        errors = _sum(error * error, JOINS)
    else:
        scaled = magnitude * unit
        error = scaled - code
        squares = _sum(scaled * scaled, JOINS).to(tl.float64) * unit_scale * unit_scale
        errors = _sum(error * error, JOINS).to(tl.float64) * unit_scale * unit_scale
    _store(row, 4, squares)
    _store(row, 5, errors)
    tl.store(row + 6, count.to(tl.float64))
    flushed = _sum(((exact > 0) & (code == 0)).to(tl.int32), JOINS)
    _store(row, 1, flushed)
    _store(row, 7, (flushed > 0).to(tl.int32))
    # Rounding keeps the order, so that nothing of a block is kept if its largest element is not.
    _store(row, 8, ((greatest > 0) & (_rounded(amax * multiplier, STEPS, LEAST) == 0)).to(tl.int32))
    tl.store(row + 9, tl.min(tl.where(amax > 0, scale, INF)))
    tl.store(row + 10, tl.max(tl.where(amax > 0, scale, -INF)))


def program_of(block_rows: int, block_columns: int, rows: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """The blocks that a program reads, as compile-time arguments, and its warps."""
    height = 32 if block_rows == 1 < rows else block_rows
    least = 64 if block_columns == 1 else 1  # adjacent elements, to load whole sectors of memory
    # With more than 128 columns of 16, Triton 3.6 spills registers for sm_80.
    blocks = min(max(PROGRAM // (height * block_columns), least), 128)
    warps = height * blocks * block_columns // (32 * elements_per_thread(dtype))
    return {"ROWS": height, "BLOCKS": blocks, "COLUMNS": block_columns, "JOINS": block_rows > 1}, warps


def elements_per_thread(dtype: torch.dtype) -> int:
    """As many as the registers of a thread hold."""
    return 16 if dtype == torch.float64 else 32


def rows(
    tensors: list[torch.Tensor], shapes: Sequence[Sequence[int]], format: Sequence[float], largest: torch.Tensor
) -> torch.Tensor:
    """See `gradstat.lowprecision._reference.rows`; ``format`` is `Format.numbers`."""
    with on_device(largest.device):
        each = zip(tensors, shapes, largest.unbind(), strict=True)
        return torch.stack([_row(*given, dict(zip(FORMAT, format, strict=True))) for given in each])


def _row(tensor: torch.Tensor, shape: Sequence[int], largest: torch.Tensor, format: dict[str, Any]) -> torch.Tensor:
    outer, rows, columns, block_rows, block_columns = shape
    program, warps = program_of(block_rows, block_columns, rows, tensor.dtype)
    strips, chunks = -(-rows // program["ROWS"]), -(-columns // (program["BLOCKS"] * block_columns))
    parts = torch.empty((outer * strips * chunks, FIELD_COUNT.value), dtype=torch.float64, device=tensor.device)
    # Without fusion: a product with a multiplier is rounded to float32 before it is rounded to an element.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    sizes = rows, columns, strips, chunks
    rows_kernel[(len(parts),)](tensor, largest, parts, *sizes, **format, **program, **options)
    return torch.cat([parts[:, :9].sum(0), parts[:, 9].amin(0, True), parts[:, 10].amax(0, True)])
