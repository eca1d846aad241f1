"""Quantization and its statistics in plain torch, on any device, without a sync: the specification of the kernels.

`gradstat.lowprecision.formats.Format` says in words what each rule of a scale is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradstat._core.tensors import memory_order
from gradstat.lowprecision.formats import E4M3, Blocks, Element, Format, blocks_of

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def rows(tensors: list[Tensor], shapes: list[Blocks], format: Format, largest: Tensor) -> Tensor:
    """The table of dense tensors, none of them empty: ``[len(tensors), len(QUANTIZATION_FIELDS)]`` float64.

    ``largest`` has the largest finite magnitude of each, float32, if the format needs it. Of a format without blocks
    the columns of blocks are those of the pieces.
    """
    return torch.stack([_row(*each, format) for each in zip(tensors, shapes, largest.unbind(), strict=True)])


def quantized(tensor: Tensor, format: Format, dim: int = -1, weight: bool = False) -> Tensor:
    """``tensor`` after it was stored in the format: float64, of the same shape. NaN and Inf stay as they are."""
    if not tensor.numel():
        return tensor.double()
    dense, shape = blocks_of(tensor.contiguous(), format, dim, weight)
    blocks = _cut(dense, shape)
    _, rounded, scale = _codes(blocks, format, _magnitude(blocks).amax())
    code = rounded.clamp(max=format.element.largest)
    stored = torch.where(blocks.isfinite(), torch.copysign(code * scale, blocks.double()), blocks.double())
    tiles = stored.reshape(shape.outer, -1, -(-shape.columns // shape.block_columns), *shape[3:]).transpose(2, 3)
    matrix = tiles.flatten(3, 4).flatten(1, 2)[:, : shape.rows, : shape.columns]
    return matrix.reshape(tensor.shape)


def _row(tensor: Tensor, shape: Blocks, largest: Tensor, format: Format) -> Tensor:
    """The row of one tensor: ``[len(QUANTIZATION_FIELDS)]`` float64 on its device."""
    blocks = _cut(tensor, shape)
    exact = blocks.double().abs().nan_to_num(0.0, 0.0)
    amax, rounded, scale = _codes(blocks, format, largest)
    code = rounded.clamp(max=format.element.largest)
    error = code.double() * scale - exact
    nonzero, is_flushed = exact > 0, (exact > 0) & (code == 0)
    has_flushed, is_lost = is_flushed.any(1), (is_flushed == nonzero).all(1)
    used = amax > 0
    row = [
        *(nonzero.sum(), is_flushed.sum(), (rounded > code).sum(), (~blocks.isfinite()).sum()),
        *(exact.square().sum(), error.square().sum()),
        *(torch.ones_like(has_flushed).sum(), has_flushed.sum(), (has_flushed & is_lost).sum()),
        *(torch.where(used, scale, torch.inf).amin(), torch.where(used, scale, -torch.inf).amax()),
    ]
    return torch.stack([value.double() for value in row])


def _codes(blocks: Tensor, format: Format, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest magnitudes of blocks, their elements in units of the scales, and the scales, float64.

    Elements are rounded as if there were no largest one. ``largest``: the largest magnitude of the tensor.
    """
    magnitude = _magnitude(blocks)
    amax = magnitude.amax(1, keepdim=True) if format.block else largest.expand(len(magnitude), 1)
    multiplier, scale = _scales(amax, format, largest)
    return amax, _rounded(magnitude * multiplier, format.element), scale


def _magnitude(blocks: Tensor) -> Tensor:
    """The magnitudes as float32, of which float64 ones may become zero or the largest; 0 for NaN and Inf."""
    return blocks.abs().nan_to_num(0.0, 0.0).float().clamp(max=_LARGEST_FLOAT32)


def _scales(amax: Tensor, format: Format, largest: Tensor) -> tuple[Tensor, Tensor]:
    """What elements are multiplied by, float32, and the scale, float64, of blocks with these largest magnitudes."""
    # A number divided by a tensor would be multiplied by the tensor's rounded reciprocal.
    if format.rule == "float32":
        multiplier = (torch.full_like(amax, format.element.largest) / amax).clamp(max=_LARGEST_FLOAT32)
    elif format.rule == "two-level":
        of_tensor = torch.full_like(largest, E4M3.largest * format.element.largest) / largest
        of_tensor = of_tensor.clamp(max=_LARGEST_FLOAT32)
        code = _rounded(amax * (of_tensor * (1 / format.element.largest)), E4M3).clamp(max=E4M3.largest)
        decode = 1 / of_tensor
        multiplier = (1 / (code * decode)).clamp(max=_LARGEST_FLOAT32)
        return torch.where(code > 0, multiplier, 0.0), code.double() * decode
    else:
        if format.rule == "floor":
            exponent = ((amax.view(torch.int32) >> 23) - 127 - format.element.greatest_exponent).clamp(min=-127)
        else:
            bits = (amax / format.element.largest).view(torch.int32)
            above = (bits + 0x7FFFFF >> 23) - 127  # the exponent of the next power of two that is not below
            exponent = torch.where(bits <= 0x400000, -127, above)  # 2**-127 is subnormal in float32
        multiplier = (127 - exponent << 23).view(torch.float32)
    return multiplier, (1 / multiplier).double()


def _rounded(magnitude: Tensor, element: Element) -> Tensor:
    """Float32 magnitudes rounded to the nearest element, halves to even, as if there were no largest element."""
    power = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=element.least)
    shift = power * element.steps
    return (magnitude + shift) - shift


def _cut(tensor: Tensor, shape: Blocks) -> Tensor:
    """The elements as ``[blocks, size]``, with zeros where a block is not full."""
    matrix = tensor.permute(memory_order(tensor)).reshape(shape[:3])
    matrix = pad(matrix, (0, -shape.columns % shape.block_columns, 0, -shape.rows % shape.block_rows))
    tiles: Tensor = matrix.unflatten(2, (-1, shape.block_columns)).unflatten(1, (-1, shape.block_rows))
    return tiles.transpose(2, 3).reshape(-1, shape.block_rows * shape.block_columns)
