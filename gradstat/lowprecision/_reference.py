"""Quantization and its statistics in plain torch, on any device, without a sync: the specification of the kernels.

`gradstat.lowprecision.formats.Format` says in words what each rule of a scale is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradstat.lowprecision.formats import E4M3, Element, Format

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_CHUNK = 1 << 17  # elements on a CPU, so that what is computed from them stays in a core's cache


def rows(tensors: list[Tensor], format: Format, dim: int = -1, weight: bool = False) -> Tensor:
    """The table of strided tensors, at least one: ``[len(tensors), len(QUANTIZATION_FIELDS)]`` float64."""
    return torch.stack([_row(tensor, format, dim, weight) for tensor in tensors])


def quantized(tensor: Tensor, format: Format, dim: int = -1, weight: bool = False) -> Tensor:
    """``tensor`` after it was stored in the format: float64, of the same shape. NaN and Inf stay as they are."""
    blocks = _blocks_of(tensor, format, dim, weight)
    magnitude = _magnitude(blocks)
    multiplier, scale = _scales(magnitude.amax(1, keepdim=True), format, magnitude.amax()) if len(blocks) else (1, 1)
    code = _rounded(magnitude * multiplier, format.element).clamp(max=format.element.largest)
    stored = torch.where(blocks.isfinite(), torch.copysign(code * scale, blocks.double()), blocks.double())
    return _unblocked(stored, tensor, format, dim, weight)


def _row(tensor: Tensor, format: Format, dim: int, weight: bool) -> Tensor:
    """The row of one tensor: ``[len(QUANTIZATION_FIELDS)]`` float64 on its device."""
    blocks = _blocks_of(tensor, format, dim, weight)
    largest = torch.zeros((), device=tensor.device)
    if format.needs_largest:
        for piece in _pieces(blocks):
            largest = torch.maximum(largest, _magnitude(piece).amax())
    pieces = [_row_of_blocks(piece, format, largest) for piece in _pieces(blocks)]
    if not pieces:
        empty = [0.0] * 9 + [torch.inf, -torch.inf]
        return torch.tensor(empty, dtype=torch.float64, device=tensor.device)
    table = torch.stack(pieces)
    row = torch.cat([table[:, :-2].sum(0), table[:, -2].amin(0, True), table[:, -1].amax(0, True)])
    if not format.block:  # the pieces are of one block
        nonzero, flushed = row[0], row[1]
        row[6], row[7], row[8] = 1.0, flushed > 0, (flushed > 0) & (flushed == nonzero)
    return row


def _row_of_blocks(blocks: Tensor, format: Format, largest: Tensor) -> Tensor:
    """The row of ``[n, size]`` blocks; ``largest`` is the largest finite magnitude of the tensor, if the rule needs it.

    Only magnitudes matter, since formats are symmetric. Counts are sums of signs: torch compares and counts far slower.
    """
    wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    nonfinite = (wide - wide).nan_to_num_(1.0).sum()  # x - x is NaN only if x is not finite
    exact = wide.abs().nan_to_num_(0.0, 0.0)
    magnitude = exact.float().clamp(max=_LARGEST_FLOAT32) if exact.dtype == torch.float64 else exact
    amax = magnitude.amax(1, keepdim=True) if format.block else largest.reshape(1, 1)
    multiplier, scale = _scales(amax, format, largest)
    rounded = _rounded(magnitude * multiplier, format.element)
    code = rounded.clamp(max=format.element.largest)
    saturated = rounded.sub_(code).sign_().sum()
    nonzero, kept = exact.sign().sum(1), code.sign().sum(1)
    exact = exact.double().reshape(-1)
    error = code.double().mul_(scale).reshape(-1).sub_(exact)
    flushed = nonzero - kept
    used = amax > 0
    row = [
        *(nonzero.double().sum(), flushed.double().sum(), saturated, nonfinite),
        *(exact.dot(exact), error.dot(error)),
        *(torch.full_like(kept, 1).sum(), flushed.sign().sum(), ((nonzero > 0) & (kept == 0)).sum()),
        *(torch.where(used, scale, torch.inf).amin(), torch.where(used, scale, -torch.inf).amax()),
    ]
    return torch.stack([value.to(torch.float64) for value in row])


def _scales(amax: Tensor, format: Format, largest: Tensor) -> tuple[Tensor, Tensor]:
    """What elements are multiplied by, float32, and the scale, float64, of blocks with these largest magnitudes."""
    # A number divided by a tensor would be multiplied by the tensor's rounded reciprocal.
    if format.rule == "float32":
        multiplier = (torch.full_like(amax, format.element.largest) / amax).clamp(max=_LARGEST_FLOAT32)
        return multiplier, (1 / multiplier).double()
    if format.rule == "two-level":
        of_tensor = torch.full_like(largest, E4M3.largest * format.element.largest) / largest
        of_tensor = of_tensor.clamp(max=_LARGEST_FLOAT32)
        code = _rounded(amax * (of_tensor * (1 / format.element.largest)), E4M3).clamp(max=E4M3.largest)
        decode = 1 / of_tensor
        multiplier = (1 / (code * decode)).clamp(max=_LARGEST_FLOAT32)
        return torch.where(code > 0, multiplier, 0.0), code.double() * decode
    if format.rule == "floor":
        exponent = ((amax.view(torch.int32) >> 23) - 127 - format.element.greatest_exponent).clamp(min=-127)
    else:
        bits = (amax / format.element.largest).view(torch.int32)
        above = (bits + 0x7FFFFF >> 23) - 127  # the exponent of the next power of two that is not below
        exponent = torch.where(bits <= 0x400000, -127, above)  # 2**-127 is subnormal in float32
    return (127 - exponent << 23).view(torch.float32), (1023 + exponent.long() << 52).view(torch.float64)


def _rounded(magnitude: Tensor, element: Element) -> Tensor:
    """Float32 magnitudes rounded to the nearest element, halves to even, as if there were no largest element."""
    power = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=2.0**element.least_exponent)
    # A sum with 1.5 * 2**23 steps is rounded to whole steps, since it is a float32 of that exponent.
    shift = power.mul_(1.5 * 2.0 ** (23 - element.mantissa))
    return (magnitude + shift).sub_(shift)


def _magnitude(blocks: Tensor) -> Tensor:
    """The magnitudes as float32, of which float64 ones may become zero or the largest; 0 for NaN and Inf."""
    magnitude = blocks.abs().nan_to_num(0.0, 0.0).float()
    return magnitude.clamp(max=_LARGEST_FLOAT32) if blocks.dtype == torch.float64 else magnitude


def _blocks_of(tensor: Tensor, format: Format, dim: int, weight: bool) -> Tensor:
    """The elements as ``[blocks, size]``, with zeros where the last block of a dimension is not full."""
    if not format.block:
        return tensor.reshape(1, -1) if tensor.numel() else tensor.reshape(0, 1)
    if not tensor.numel():
        return tensor.reshape(0, 1)
    matrix = tensor.reshape(1) if tensor.dim() == 0 else tensor
    side = format.weight_block if weight else 0
    if not side:
        matrix = matrix.movedim(dim, -1)
        return pad(matrix, (0, -matrix.shape[-1] % format.block)).reshape(-1, format.block)
    matrix = matrix.reshape(-1, *matrix.shape[-2:]) if matrix.dim() > 1 else matrix.reshape(1, 1, -1)
    matrix = pad(matrix, (0, -matrix.shape[-1] % side, 0, -matrix.shape[-2] % side))
    tiles = matrix.reshape(-1, matrix.shape[-2] // side, side, matrix.shape[-1] // side, side)
    return tiles.transpose(-2, -3).reshape(-1, side * side)


def _unblocked(blocks: Tensor, tensor: Tensor, format: Format, dim: int, weight: bool) -> Tensor:
    """The elements of ``_blocks_of`` in the shape of the tensor: found by where numbers of elements go."""
    if not tensor.numel():
        return torch.empty_like(tensor, dtype=torch.float64)
    index = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).reshape(tensor.shape) + 1
    at = _blocks_of(index, format, dim, weight).reshape(-1)
    flat = torch.empty(tensor.numel(), dtype=torch.float64, device=tensor.device)
    flat[at[at > 0].long() - 1] = blocks.reshape(-1)[at > 0]
    return flat.reshape(tensor.shape)


def _pieces(blocks: Tensor) -> Iterator[Tensor]:
    """``blocks`` in pieces ``[n, size]`` of about `_CHUNK` elements on a CPU; a block alone is cut as well."""
    if blocks.device.type != "cpu" or not len(blocks):
        return iter([blocks] if len(blocks) else [])
    if len(blocks) == 1:
        return (piece.reshape(1, -1) for piece in blocks.reshape(-1).split(_CHUNK))
    return iter(blocks.split(max(_CHUNK // blocks.shape[1], 1)))
