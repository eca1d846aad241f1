"""Rows of quantization by the Triton kernels: the shape of a tensor's blocks in memory, and the launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core.tensors import memory_order
from gradstat.kernels import quantization, stats
from gradstat.kernels._table import on_device
from gradstat.lowprecision.formats import Format

_PROGRAM = 4096  # elements of most programs
_WHOLE = 128  # elements of the pieces of a block that is a whole tensor, which are summed in float32


class Geometry(NamedTuple):
    """A dense tensor as ``[outer, rows, columns]`` in memory, in blocks of ``block_rows`` x ``block_columns``."""

    outer: int
    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def constants(self) -> dict[str, int]:
        """What the kernels are compiled for: how many blocks of which shape a program reads."""
        height = 32 if self.block_rows == 1 < self.rows else self.block_rows
        least = 64 if self.block_columns == 1 else 1  # adjacent elements, to load whole sectors of memory
        blocks = max(_PROGRAM // (height * self.block_columns), least)
        return {"ROWS": height, "BLOCKS": blocks, "COLUMNS": self.block_columns, "JOINS": self.block_rows > 1}

    def warps(self, dtype: torch.dtype) -> int:
        """Of a program."""
        rows, blocks, columns, _ = self.constants.values()
        return rows * blocks * columns // (32 * elements_per_thread(dtype))


def elements_per_thread(dtype: torch.dtype) -> int:
    """As many as the registers of a thread hold."""
    return 16 if dtype == torch.float64 else 32


def geometry_of(tensor: Tensor, format: Format, dim: int, weight: bool) -> tuple[Tensor, Geometry]:
    """The tensor, or a row-major copy if blocks are not rectangles of its memory, and its blocks."""
    count, side = tensor.numel(), format.weight_block if weight else 0
    if not format.block or tensor.dim() == 0:
        return tensor, Geometry(1, 1, count, 1, format.block or _WHOLE)
    order, size = memory_order(tensor), tensor.shape
    if side and tensor.dim() == 1:
        return tensor, Geometry(1, 1, count, side, side)
    if side:
        if min(order[-2:]) < tensor.dim() - 2:
            tensor, order = tensor.contiguous(), tuple(range(tensor.dim()))
        rows, columns = size[order[-2]], size[order[-1]]
        return tensor, Geometry(count // (rows * columns), rows, columns, side, side)
    inner = torch.Size(size[i] for i in order[order.index(dim % tensor.dim()) + 1 :]).numel()
    length = size[dim]
    if inner > 1:
        return tensor, Geometry(count // (length * inner), length, inner, format.block, 1)
    if length % format.block == 0:  # no block ends with a row, so that rows do not matter
        return tensor, Geometry(1, 1, count, 1, format.block)
    return tensor, Geometry(1, count // length, length, 1, format.block)


def constants_of(format: Format) -> dict[str, Any]:
    """What the kernel of a format is compiled for, besides the shape of blocks."""
    element = format.element
    return {
        "RULE": quantization.RULES[format.rule],
        "IS_WHOLE": not format.block,
        "MANTISSA": element.mantissa,
        "LEAST": 2.0**element.least_exponent,
        "LARGEST": element.largest,
        "GREATEST": element.greatest_exponent,
    }


def rows(tensors: list[Tensor], format: Format, dim: int, weight: bool) -> Tensor:
    """The table of dense tensors, at least one; see `gradstat.lowprecision._reference.rows`."""
    with on_device(tensors[0].device):
        largest = torch.zeros(len(tensors), device=tensors[0].device)
        if format.needs_largest:
            extremes = stats.stats(tensors)[:, [_fields.INDEX["max"], _fields.INDEX["min"]]]
            magnitudes = torch.maximum(extremes[:, 0], -extremes[:, 1]).float()
            largest = magnitudes.clamp(0.0, torch.finfo(torch.float32).max)
        each = zip(tensors, largest.unbind(), strict=True)
        return torch.stack([_row(tensor, of_tensor, format, dim, weight) for tensor, of_tensor in each])


def _row(tensor: Tensor, largest: Tensor, format: Format, dim: int, weight: bool) -> Tensor:
    if not tensor.numel():
        return tensor.new_tensor([0.0] * 9 + [torch.inf, -torch.inf], dtype=torch.float64)
    tensor, shape = geometry_of(tensor, format, dim, weight)
    blocks = shape.constants
    strips = -(-shape.rows // blocks["ROWS"])
    chunks = -(-shape.columns // (blocks["BLOCKS"] * blocks["COLUMNS"]))
    parts = torch.empty((shape.outer * strips * chunks, 11), dtype=torch.float64, device=tensor.device)
    # Without fusion: a product with a multiplier is rounded to float32 before it is rounded to an element.
    options = {"num_warps": shape.warps(tensor.dtype), "enable_fp_fusion": False}
    sizes = shape.rows, shape.columns, strips, chunks
    quantization.rows_kernel[(len(parts),)](tensor, largest, parts, *sizes, **constants_of(format), **blocks, **options)
    row = torch.cat([parts[:, :9].sum(0), parts[:, 9].amin(0, True), parts[:, 10].amax(0, True)])
    if not format.block:
        row[6:9] = torch.stack([row[0] * 0 + 1, row[1] > 0, (row[1] > 0) & (row[0] == row[1])])
    return row
