"""The formats of eight and of four bits: their elements, the rules of their scales, and their blocks in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gradstat._core.tensors import memory_order

ScaleRule = Literal["float32", "floor", "ceil", "two-level"]
_PIECE = 128  # elements of the pieces in which a block that is a whole tensor is read


@dataclass(frozen=True, slots=True)
class Element:
    """A floating-point type of a few bits, with a sign, subnormal numbers and round to nearest even.

    Attributes:
        name: Its bits of exponent and mantissa, as ``E4M3``.
        mantissa: The bits of its mantissa that are stored.
        least: Its smallest normal number.
        largest: Its largest finite number.
    """

    name: str
    mantissa: int
    least: float
    largest: float

    @property
    def steps(self) -> float:
        """1.5 * 2**23 steps of 1: a sum with them is rounded to whole steps, since it is a float32 of that exponent."""
        return 1.5 * 2.0 ** (23 - self.mantissa)

    @property
    def greatest_exponent(self) -> int:
        """The exponent of `largest`."""
        return int(self.largest).bit_length() - 1


# E4M3 has no Inf and one NaN (float8_e4m3fn), E2M1 has neither.
E4M3 = Element("E4M3", mantissa=3, least=2.0**-6, largest=448.0)
E5M2 = Element("E5M2", mantissa=2, least=2.0**-14, largest=57344.0)
E2M1 = Element("E2M1", mantissa=1, least=1.0, largest=6.0)


@dataclass(frozen=True, slots=True)
class Format:
    """A format: elements that share a scale in blocks.

    A number x of a block is stored as x divided by the block's scale, rounded to the nearest element, halves to even; a
    magnitude that would round to more than the largest element is stored as the largest.

    The rules of the scale, from the block's largest finite magnitude amax:

    - ``float32``: 1 / m with the multiplier m = largest / amax, both rounded to float32; m is the largest float32 where
      the quotient is infinite. Elements are multiplied by m.
    - ``floor``: the power of two 2**(floor(log2(amax)) - greatest exponent of the elements), in E8M0, so at least
      2**-127. A block's largest magnitudes may saturate.
    - ``ceil``: the least power of two that is not below amax / largest, a quotient in float32, in E8M0. Nothing
      saturates.
    - ``two-level``: the tensor's multiplier is m = 448 * 6 / amax of the whole tensor, rounded to float32 and at most
      the largest float32. A block's scale is amax * (m / 6), rounded to E4M3, divided by m. Where it rounds to zero
      the whole block becomes zero.

    Attributes:
        element: The type of its elements.
        block: How many consecutive elements share a scale; 0 for all elements of a tensor.
        rule: The rule of the scale.
        source: Who defines it.
        weight_block: The side of the square tiles that share a scale in weights; 0 if weights have the same blocks.
    """

    element: Element
    block: int
    rule: ScaleRule
    source: str
    weight_block: int = 0

    @property
    def numbers(self) -> tuple[float, ...]:
        """The format as kernels take it: csrc/quantization.h (`QuantizationFormat`) and kernels/quantization.py."""
        element, rule = self.element, get_args(ScaleRule).index(self.rule)
        return rule, not self.block, element.steps, element.least, element.largest, element.greatest_exponent


_TENSOR = "TransformerEngine's Float8CurrentScaling (compute_scale_from_amax)"
_DEEPSEEK = "DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.3.2"
_FLOAT32_BLOCKS = "scale as TransformerEngine's Float8BlockScaling with float32 scales"
_OCP = "OCP Microscaling Formats (MX) Specification v1.0, section 6.3"
_RCEIL = "Recipes for Pre-training LLMs with MXFP8 (arXiv 2506.08027), and cuBLAS, 1D block quantization"
_NVFP4 = "Pretraining Large Language Models with NVFP4 (arXiv 2509.25149), and TransformerEngine's NVFP4BlockScaling"

FORMATS: dict[str, Format] = {
    "e4m3": Format(E4M3, 0, "float32", _TENSOR),
    "e5m2": Format(E5M2, 0, "float32", _TENSOR),
    "e4m3-128": Format(E4M3, 128, "float32", f"{_DEEPSEEK}; {_FLOAT32_BLOCKS}", weight_block=128),
    "mxfp8": Format(E4M3, 32, "floor", _OCP),
    "mxfp8-rceil": Format(E4M3, 32, "ceil", _RCEIL),
    "mxfp4": Format(E2M1, 32, "floor", _OCP),
    "nvfp4": Format(E2M1, 16, "two-level", _NVFP4, weight_block=16),
}
"""The formats by name."""


def format_of(name: str) -> Format:
    """The format of this name. ValueError, which lists the names, if there is none."""
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


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
