"""The operator: what tensors would lose in a format, counted on their device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core.backends import resolve
from gradstat._core.tensors import name_by_position, readable
from gradstat._core.text import expect
from gradstat.lowprecision import _reference
from gradstat.lowprecision.formats import Format, blocks_of, format_of

QUANTIZATION_FIELDS: tuple[str, ...] = (
    *("nonzero", "flushed", "saturated", "nonfinite", "sq_sum", "sq_error"),
    *("blocks", "blocks_flushed", "blocks_zero", "scale_min", "scale_max"),
)
"""Names of the columns of a table, as `quantization_stats` returns it, in order."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def quantization_stats(
    tensors: Iterable[Tensor] | Tensor,
    format: str,
    *,
    dim: int = -1,
    weight: bool = False,
    backend: str | None = None,
) -> Tensor:
    """What each tensor would lose if it were stored in a format of eight or four bits; no host sync.

    The tensors are not changed. Formats whose scale needs the whole tensor read it twice, all others once. The columns,
    all float64:

    - ``nonzero``: finite elements that are not zero; -0 is a zero.
    - ``flushed``: those of them that become zero.
    - ``saturated``: finite elements whose rounding passes the largest element (IEEE 754's overflow), which they become.
    - ``nonfinite``: NaN and Inf. They count in no other column.
    - ``sq_sum``: the sum of the squares of the finite elements.
    - ``sq_error``: the sum of the squares of their errors. 10 log10(sq_sum / sq_error) is the signal-to-noise ratio in
      decibels, sqrt(sq_error / sq_sum) the relative error.
    - ``blocks``: groups of elements that share a scale. The last one along a dimension may have fewer elements.
    - ``blocks_flushed``: blocks in which an element is flushed.
    - ``blocks_zero``: blocks with elements that are not zero, which all are flushed.
    - ``scale_min``, ``scale_max``: least and largest scale, by which stored elements are multiplied, of blocks with a
      finite element that is not zero; +Inf and -Inf if there is none.

    By the definitions of the formats a NaN or Inf makes its whole block NaN, or its whole tensor where that has one
    scale. Here scales follow from the finite elements only, so that their losses stay visible next to
    ``nonfinite``. Elements are read as float32, to which float64 ones are rounded first.

    Args:
        tensors: Tensors of float64, float32, bfloat16 or float16, on one device, in any strided layout; or one of them.
            Of a distributed tensor this rank's shard is measured, and a block ends with it.
        format: ``"e4m3"``, ``"e5m2"``, ``"e4m3-128"``, ``"mxfp8"``, ``"mxfp8-rceil"``, ``"mxfp4"`` or ``"nvfp4"``.
            The page on low precision says how each scales, and who defines it.
        dim: The dimension along which elements form blocks: the one over which a matrix product sums. It matters for
            formats of blocks only. A tensor without dimensions has one of one element.
        weight: Whether the tensors are weights, for which ``e4m3-128`` and ``nvfp4`` have square blocks in the last two
            dimensions, of 128 x 128 and 16 x 16 elements, the same for every ``dim``.
        backend: ``"native"`` (on CPUs), ``"triton"`` (on GPUs) or ``"reference"``; None selects one automatically.

    Returns:
        ``[n, len(gradstat.QUANTIZATION_FIELDS)]`` float64 on the tensors' device; on the CPU for an empty list. The
        CPU and the reference add exact errors in float64; Triton errors of float32, which are exact too where scales
        are powers of two, and else within 1e-5 of their sum.

    Raises:
        TypeError: What is not a tensor of these dtypes and layouts.
        ValueError: An unknown ``format`` or ``backend``, tensors on several devices, or one that holds no data.
        IndexError: A tensor has no dimension ``dim``.
        BackendUnavailableError: ``backend`` cannot run here.
    """
    expect("tensors", tensors, Iterable, "a tensor or a list of tensors")
    expect("dim", dim, int, "the number of a dimension")
    expect("format", format, str, "the name of a format")
    format_of(format)
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not listed:
        return torch.empty((0, len(QUANTIZATION_FIELDS)), dtype=torch.float64)
    with torch.no_grad():
        plain = readable(listed, name_by_position)
        for position, (given, tensor) in enumerate(zip(listed, plain, strict=True)):
            _require(given, tensor, plain[0].device, dim, name_by_position(position))
        table: Tensor = _quantization_stats(plain, format, dim, weight, backend)
        return table


def _require(given: Tensor, tensor: Tensor, device: torch.device, dim: int, name: str) -> None:
    """Raises unless blocks along ``dim`` of ``tensor``, which is ``given`` or its local data, can be measured."""
    if given.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got layout {given.layout}; convert it with .to_dense()")
    if tensor.dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        remedy = "measure torch.view_as_real of it" if tensor.is_complex() else "convert it, for example with .float()"
        raise TypeError(f"{name}: expected one of {known}, got {tensor.dtype}; {remedy}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected all tensors on {device}, got {tensor.device}; call once for each device")
    most = max(tensor.dim(), 1)
    if not -most <= dim < most:
        raise IndexError(f"dim: expected -{most} to {most - 1} for {name} of shape {list(tensor.shape)}, got {dim}")


def table_of(tensors: list[Tensor], format: Format, dim: int, weight: bool, backend: str | None = None) -> Tensor:
    """`quantization_stats` of dense tensors, at least one, on one device."""
    kernels = resolve(backend, tensors[0].device.type, True)
    # An empty tensor is measured as one that holds a zero, in no block.
    filled = [tensor if tensor.numel() else tensor.new_zeros(()) for tensor in tensors]
    given, shapes = map(list, zip(*(blocks_of(tensor, format, dim, weight) for tensor in filled), strict=True))
    largest = torch.zeros(len(given), device=given[0].device)
    if format.rule == "two-level" or not format.block:  # the scales depend on it
        low, high = kernels.check(given)[0][:, [_fields.INDEX["min"], _fields.INDEX["max"]]].unbind(1)
        largest = torch.maximum(-low, high).float().clamp(0.0, torch.finfo(torch.float32).max)
    if kernels.quantization_rows is None:
        table = _reference.rows(given, shapes, format, largest)
    else:
        table = kernels.quantization_rows(given, shapes, format.numbers, largest)
    if not format.block:  # what was measured are pieces of one block
        nonzero, flushed = table[:, 0], table[:, 1]
        table[:, 6:9] = torch.stack([flushed >= 0, flushed > 0, (flushed > 0) & (flushed == nonzero)], 1)
    for row, tensor in enumerate(tensors):
        if not tensor.numel():
            table[row, 6] = 0
    return table


@torch.library.custom_op("gradstat::quantization_stats", mutates_args=())
def _quantization_stats(tensors: list[Tensor], format: str, dim: int, weight: bool, backend: str | None) -> Tensor:
    return table_of(tensors, format_of(format), dim, weight, backend)


@_quantization_stats.register_fake
def _(tensors: list[Tensor], format: str, dim: int, weight: bool, backend: str | None) -> Tensor:
    return tensors[0].new_empty((len(tensors), len(QUANTIZATION_FIELDS)), dtype=torch.float64)
