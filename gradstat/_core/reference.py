"""The statistics in plain torch, float64, on any device, without a sync: the specification that backends are tested by.

Written for readability, not speed: it makes several passes and float64 copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core.tensors import memory_order


def stats(tensors: list[Tensor]) -> Tensor:
    """The table of strided tensors, at least one: ``[len(tensors), len(FIELDS)]`` float64 on their device."""
    return torch.stack([row(tensor) for tensor in tensors])


def row(tensor: Tensor) -> Tensor:
    """The row of one tensor: ``[len(FIELDS)]`` float64 on its device; docs/architecture.md defines complex elements."""
    elements = tensor.permute(memory_order(tensor)).reshape(-1)
    parts = torch.view_as_real(elements) if tensor.is_complex() else elements.unsqueeze(-1)
    parts = parts.to(torch.float64)  # [elements, parts]

    nan = parts.isnan().any(-1)
    inf = parts.isinf().any(-1) & ~nan
    nonfinite = nan | inf
    zero = (parts == 0).all(-1)

    usable = ~nonfinite.unsqueeze(-1)
    finite = torch.where(usable, parts, 0.0)
    magnitude = finite.abs()
    large = magnitude > _fields.LARGE
    small = magnitude < _fields.SMALL

    position = torch.arange(len(elements), dtype=torch.float64, device=tensor.device)
    fields = {
        "nan_count": nan.sum(),
        "inf_count": inf.sum(),
        "zero_count": zero.sum(),
        "sum": finite.sum(),
        "sq_sum": torch.where(large | small, 0.0, finite).square().sum(),
        "sq_sum_large": torch.where(large, finite * _fields.LARGE_SCALE, 0.0).square().sum(),
        "sq_sum_small": torch.where(small, finite * _fields.SMALL_SCALE, 0.0).square().sum(),
        "min": _smallest(torch.where(usable, parts, torch.inf)),
        "max": -_smallest(torch.where(usable, -parts, torch.inf)),
        "first_nonfinite": _smallest(torch.where(nonfinite, position, torch.inf)),
    }
    return torch.stack([fields[name].to(torch.float64) for name in _fields.NAMES])


def scale_(tensors: list[Tensor], multipliers: Tensor) -> None:
    """Multiplies every tensor in place: all by a 0-d float64 tensor on their device, or each by its own element.

    Dtypes narrower than float64 are multiplied in float32, by the multiplier rounded to float32; complex tensors as
    pairs of reals. A product that is infinite or too large for the dtype becomes infinite. In float8 types without
    infinity it becomes the largest number (float8_e4m3fn) or NaN (fnuz).
    """
    for tensor, multiplier in zip(tensors, multipliers.expand(len(tensors)), strict=True):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = torch.float64 if real.dtype == torch.float64 else torch.float32
        product = real.to(wide) * multiplier.to(wide)
        if real.dtype == torch.float8_e4m3fn:  # torch 2.10 and 2.11 convert what is too large to NaN
            largest = torch.finfo(real.dtype).max
            product = product.clamp(-largest, largest)
        real.copy_(product)


def _smallest(values: Tensor) -> Tensor:
    return values.amin() if values.numel() else values.new_full((), torch.inf)
