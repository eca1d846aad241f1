"""The Triton kernels of quantization give the rows of the reference, whatever the layout; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers.devices import DEVICES
from test_quantization import SHAPES, patterns, with_a_bit_of_all, with_companions
from torch import Tensor

import gradstat
from gradstat.lowprecision.formats import FORMATS

DEVICE = DEVICES[-1]
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("short_chunks")]


def check(x: Tensor, name: str, dim: int = -1, weight: bool = False) -> None:
    x = x.to(DEVICE)
    options = {"dim": dim, "weight": weight}
    reference = gradstat.quantization_stats(x, name, backend="reference", **options)[0]
    row = gradstat.quantization_stats(x, name, backend="triton", **options)[0]
    for field, a, b in zip(gradstat.QUANTIZATION_FIELDS, row.tolist(), reference.tolist(), strict=True):
        # Squares and errors of a block are added in float32.
        rounding = (
            {"rel": 1e-5, "abs": 1e-13 * float(reference[4])} if field.startswith("sq_") else {"rel": 0, "abs": 0}
        )
        assert a == pytest.approx(b, **rounding), field


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_pattern_of_bits_is_counted_as_by_the_reference(name: str, dtype: torch.dtype) -> None:
    """Together, and in blocks whose largest magnitude has any exponent."""
    values, size = patterns(dtype, 65536), FORMATS[name].block or 16
    check(values[torch.randperm(len(values))], name)
    check(torch.tensor([FORMATS[name].element.largest * 2.0**-127]), name)  # the least scale of E8M0
    check(with_companions(values[torch.randperm(len(values))[: 65536 // size]], size), name)


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=[str(shape) for shape in SHAPES])
def test_every_layout(index: int) -> None:
    """With two formats each, one of them in turn: the interpreter takes long."""
    shape, dim, weight = SHAPES[index]
    dtype = [torch.float32, torch.bfloat16, torch.float64, torch.float16][len(shape)]
    x = with_a_bit_of_all(shape, dtype)
    check(x, list(FORMATS)[index % len(FORMATS)], dim, weight)
    for same in (x, x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x[..., None][..., 0]):
        check(same, "nvfp4", dim, weight)


def test_dimensions_of_one_element_may_have_any_stride() -> None:
    """A matrix that is contiguous, whose memory is not in the order of its strides."""
    x = torch.randn(20, 40).as_strided((1, 20, 40), (1, 40, 1))
    check(x, "nvfp4", weight=True)
    check(x, "mxfp8", dim=0)
