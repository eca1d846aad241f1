"""Statistics of quantization, compared with ml_dtypes: every pattern of bits of 16-bit types, alone and in blocks."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import gradstat
from gradstat.lowprecision._reference import quantized
from gradstat.lowprecision.formats import FORMATS, Format

ELEMENTS = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2, "E2M1": ml_dtypes.float4_e2m1fn}
GREATEST = np.finfo(np.float32).max


def cast(values: np.ndarray, element: str) -> tuple[np.ndarray, np.ndarray]:
    """Float32 values as elements by ml_dtypes, and which of them overflow: what is stored of those is the largest."""
    cast = values.astype(ELEMENTS[element]).astype(np.float32)
    largest = float(ml_dtypes.finfo(ELEMENTS[element]).max)
    # float4_e2m1fn saturates by itself. 7 is half of the way from 6 to 8, which is even.
    overflows = ~np.isfinite(cast) if element != "E2M1" else np.abs(values) >= 7
    return np.where(overflows, np.copysign(largest, values), cast), overflows


def scale_of(amax: float, of_tensor: float, made: Format) -> tuple[np.float32, float]:
    """The multiplier and the scale of a block by the definition, in float32 and rational arithmetic."""
    element, one = made.element, np.float32(1)
    largest, exponent = np.float32(element.largest), math.frexp(amax)[1] - 1
    if made.rule == "float32":
        multiplier = min(largest / np.float32(amax), GREATEST)
        return multiplier, float(one / multiplier)
    if made.rule == "two-level":
        encode = min(np.float32(448 * 6) / np.float32(of_tensor), GREATEST)
        code = np.float32(amax) * (encode * (one / largest))
        code = np.float32(np.float32(min(code, 448)).astype(ml_dtypes.float8_e4m3fn))
        multiplier = min(one / (code * (one / encode)), GREATEST) if code else np.float32(0)
        return multiplier, float(code) * float(one / encode)
    if made.rule == "floor":
        power = exponent - math.frexp(element.largest)[1] + 1
    else:
        power = exponent - math.frexp(element.largest)[1]
        power += next(i for i in range(3) if float(largest) * 2.0 ** (power + i) >= amax)
    power = max(power, -127)
    assert float(np.float32(2.0**power).astype(ml_dtypes.float8_e8m0fnu)) == 2.0**power
    return np.float32(2.0**-power), 2.0**power


def expected(blocks: np.ndarray, made: Format) -> tuple[np.ndarray, list[float]]:
    """What is stored of ``[n, size]`` blocks, float64, and the row of the statistics."""
    finite = np.isfinite(blocks)
    exact = np.where(finite, blocks, 0).astype(np.float64)
    with np.errstate(all="ignore"):
        wide = np.clip(exact, -GREATEST, GREATEST).astype(np.float32)
        amax = np.abs(wide).max(1)
        scales = [scale_of(float(a), float(amax.max()), made) if a else (np.float32(0), 1.0) for a in amax]
        multiplier, scale = (np.array(each)[:, None] for each in zip(*scales, strict=True))
        code, overflows = cast(wide * multiplier.astype(np.float32), made.element.name)
    stored = code.astype(np.float64) * scale
    flushed = (exact != 0) & (stored == 0)
    used = scale[amax > 0]
    lost = flushed.any(1) & ((exact != 0) <= flushed).all(1)
    row = [(exact != 0).sum(), flushed.sum(), overflows.sum(), (~finite).sum()]
    row += [(exact**2).sum(), ((exact - stored) ** 2).sum(), len(blocks), flushed.any(1).sum(), lost.sum()]
    row += [used.min(initial=math.inf), used.max(initial=-math.inf)]
    return np.where(finite, stored, blocks), [float(value) for value in row]


def check(blocks: Tensor, name: str) -> None:
    made = FORMATS[name]
    stored, row = expected(blocks.double().numpy() if blocks.dtype == torch.bfloat16 else blocks.numpy(), made)
    assert torch.equal(quantized(blocks, made).nan_to_num(), torch.from_numpy(stored.astype(np.float64)).nan_to_num())
    got = gradstat.quantization_stats(blocks, name, backend="reference")[0].tolist()
    for field, a, b in zip(gradstat.QUANTIZATION_FIELDS, got, row, strict=True):
        assert a == pytest.approx(b, rel=1e-13 if field in ("sq_sum", "sq_error") else 0, abs=0), field


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_bits_in_blocks(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    size = FORMATS[name].block or len(every)
    check(every[torch.randperm(65536)].reshape(-1, size), name)
    check(every.reshape(-1, size), name)
