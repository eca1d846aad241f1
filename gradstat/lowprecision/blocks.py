"""Blocks, whose elements share a scale, as rectangles of a tensor's memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradstat._core.tensors import memory_order
from gradstat.lowprecision.formats import Format

_PIECE = 128  # elements of the pieces in which a block that is a whole tensor is read


class Blocks(NamedTuple):
    """A dense tensor as ``[outer, rows, columns]`` in memory, in blocks of ``block_rows`` x ``block_columns``."""

    outer: int
    rows: int
    columns: int
    block_rows: int
    block_columns: int


def blocks_of(tensor: Tensor, format: Format, dim: int, weight: bool) -> tuple[Tensor, Blocks]:
    """The tensor, or a row-major copy if blocks are not rectangles of its memory, and its blocks."""
    count, side = tensor.numel(), format.weight_block if weight else 0
    if not format.block or tensor.dim() == 0:
        return tensor, Blocks(1, 1, count, 1, format.block or _PIECE)
    order, size = memory_order(tensor), tensor.shape
    if side and tensor.dim() == 1:
        return tensor, Blocks(1, 1, count, side, side)
    if side:
        if min(order[-2:]) < tensor.dim() - 2:
            tensor, order = tensor.contiguous(), tuple(range(tensor.dim()))
        rows, columns = size[order[-2]], size[order[-1]]
        return tensor, Blocks(count // (rows * columns), rows, columns, side, side)
    inner = torch.Size(size[i] for i in order[order.index(dim % tensor.dim()) + 1 :]).numel()
    length = size[dim]
    if inner > 1:
        return tensor, Blocks(count // (length * inner), length, inner, format.block, 1)
    if length % format.block == 0:  # no block ends with a row, so that rows do not matter
        return tensor, Blocks(1, 1, count, 1, format.block)
    return tensor, Blocks(1, count // length, length, 1, format.block)
