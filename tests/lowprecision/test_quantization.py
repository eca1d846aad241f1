"""Statistics of quantization by every backend, compared bit for bit with ml_dtypes and float arithmetic of numpy."""

import dataclasses
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.devices import DEVICES, thinned
from torch import Tensor

import gradstat
from gradstat.lowprecision._reference import quantized
from gradstat.lowprecision.formats import E2M1, E4M3, E5M2, FORMATS, Element, Format
from gradstat.lowprecision.stats import table_of

ELEMENTS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn}
GREATEST, ONE = np.finfo(np.float32).max, np.float32(1)
BACKENDS = [("reference", "cpu"), ("native", "cpu"), ("triton", DEVICES[-1])]
EVERY_BACKEND = pytest.mark.parametrize("where", BACKENDS, ids="-".join)
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("short_chunks")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def cast(values: np.ndarray, element: Element) -> tuple[np.ndarray, np.ndarray]:
    """Float32 values as elements by ml_dtypes, and which of them overflow: what is stored of those is the largest."""
    cast = values.astype(ELEMENTS[element]).astype(np.float32)
    largest = float(ml_dtypes.finfo(ELEMENTS[element]).max)
    # float4_e2m1fn saturates by itself. 7 is half of the way from 6 to 8, which is even.
    overflows = ~np.isfinite(cast) if element != E2M1 else np.abs(values) >= 7
    return np.where(overflows, np.copysign(largest, values), cast), overflows


def scales_of(amax: np.ndarray, made: Format) -> tuple[np.ndarray, np.ndarray]:
    """Multipliers, float32, and scales, float64, of blocks with these largest magnitudes, by the definitions."""
    largest, exponent = np.float32(made.element.largest), np.frexp(amax)[1] - 1
    if made.rule == "float32":
        multiplier = np.minimum(largest / amax, GREATEST)
        return multiplier, (ONE / multiplier).astype(np.float64)
    if made.rule == "two-level":
        encode = np.minimum(np.float32(448 * 6) / amax.max(), GREATEST)
        code, decode = cast(amax * (encode * (ONE / largest)), E4M3)[0], ONE / encode
        multiplier = np.where(code > 0, np.minimum(ONE / (code * decode), GREATEST), np.float32(0))
        return multiplier, code.astype(np.float64) * decode
    power = exponent - math.frexp(made.element.largest)[1] + 1
    if made.rule == "ceil":
        power = power + (amax.astype(np.float64) > float(largest) * np.exp2(power.astype(np.float64)))
    power = np.maximum(power, -127).astype(np.float64)
    assert (np.exp2(power).astype(ml_dtypes.float8_e8m0fnu).astype(np.float64) == np.exp2(power)).all()
    return np.exp2(-power).astype(np.float32), np.exp2(power)


def expected(blocks: np.ndarray, made: Format) -> tuple[np.ndarray, list[float]]:
    """What is stored of ``[n, size]`` blocks, float64, and the row of the statistics."""
    finite = np.isfinite(blocks)
    exact = np.where(finite, blocks, 0).astype(np.float64)
    wide = np.clip(exact, -GREATEST, GREATEST).astype(np.float32)
    amax = np.abs(wide).max(1)
    multiplier, scale = scales_of(amax, made)
    code, overflows = cast(np.where(wide == 0, wide, wide * multiplier[:, None]), made.element)
    stored = code.astype(np.float64) * np.where(amax > 0, scale, 1.0)[:, None]
    flushed = (exact != 0) & (stored == 0)
    used = scale[amax > 0]
    lost = flushed.any(1) & ((exact != 0) <= flushed).all(1)
    row = [(exact != 0).sum(), flushed.sum(), overflows.sum(), (~finite).sum()]
    row += [(exact**2).sum(), ((exact - stored) ** 2).sum(), len(blocks), flushed.any(1).sum(), lost.sum()]
    row += [used.min(initial=math.inf), used.max(initial=-math.inf)]
    return np.where(finite, stored, blocks), [float(value) for value in row]


def assert_row(table: Tensor, row: list[float], backend: str) -> None:
    """The only row of a table: counts and scales exactly, sums of numbers as they were added."""
    for field, a, b in zip(gradstat.QUANTIZATION_FIELDS, table[0].tolist(), row, strict=True):
        # Triton adds the squares and errors of a block in float32.
        rounding = {"rel": 1e-5, "abs": 1e-13 * row[4]} if backend == "triton" else {"rel": 1e-13, "abs": 0}
        assert a == pytest.approx(b, **rounding) if field.startswith("sq_") else a == b, field


def assert_as_ml_dtypes(blocks: Tensor, made: Format, where: tuple[str, str]) -> None:
    stored, row = expected(blocks.double().numpy(), made)
    assert torch.equal(quantized(blocks, made).nan_to_num(), torch.from_numpy(stored).nan_to_num())
    columns = blocks.T.contiguous() if made.block else blocks  # which may be of any length
    assert_row(table_of([columns.to(where[1])], made, 0, False, where[0]), row, where[0])


def patterns(dtype: torch.dtype) -> Tensor:
    """In random order every pattern of bits of a 16-bit type, or random ones of float32."""
    if dtype == torch.float32:
        return torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32).view(dtype)
    return torch.randperm(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def with_companions(values: Tensor, size: int) -> Tensor:
    """Blocks of one of the values and random companions, whose largest has a random exponent."""
    companions = torch.randn(len(values), size - 1).sign() * torch.rand(len(values), size - 1)
    companions = companions.double() * torch.exp2(torch.randint(-150, 128, (len(values), 1)).double())
    return torch.cat([values.reshape(-1, 1), companions.to(values.dtype)], 1)


@EVERY_BACKEND
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_every_pattern_of_bits_is_stored_as_by_ml_dtypes(name: str, dtype: torch.dtype, where: tuple[str, str]) -> None:
    print("seed", torch.seed())
    made, values = FORMATS[name], patterns(dtype)
    size = made.block or 16
    some = with_companions(values[: 65536 // size], size)
    assert_as_ml_dtypes(some, dataclasses.replace(made, block=size), where)
    if where[0] == "triton":
        return  # the interpreter takes 30 ms for each program
    assert_as_ml_dtypes(values.reshape(-1, 1), dataclasses.replace(made, block=1), where)
    assert_as_ml_dtypes(with_companions(values, 2), dataclasses.replace(made, block=2), where)
    if not made.block or made.rule == "two-level":  # a scale of the whole tensor, of any exponent
        for exponent in range(-140, 128, 20):
            below = torch.where(values.abs() < 2.0**exponent, values, -0.0)
            assert_as_ml_dtypes(below.reshape(-1, made.block or len(values)), made, where)


@EVERY_BACKEND
@pytest.mark.parametrize("name", FORMATS)
def test_scales_change_at_powers_of_two(name: str, where: tuple[str, str]) -> None:
    """Exactly there, also for the least scale of E8M0: float32 beside those of which the scale is a power of two."""
    largest = np.float32(FORMATS[name].element.largest)
    power = np.exp2(np.array([-126, -125, -60, -1, 0, 1, 60, 111])).astype(np.float32)
    at = np.concatenate([power, power * largest])
    at = np.concatenate([[largest * 2.0**-127], at, np.nextafter(at, np.float32(0)), np.nextafter(at, GREATEST)])
    for value in torch.from_numpy(at.astype(np.float32))[:: 16 if where[0] == "triton" else 1]:
        assert_as_ml_dtypes(value.reshape(1, 1), dataclasses.replace(FORMATS[name], block=1), where)


def blocks_in(x: Tensor, made: Format, dim: int, weight: bool) -> np.ndarray:
    """The blocks of a tensor cut out one by one, filled up with zeros."""
    if not made.block:
        return x.reshape(1, -1).double().numpy()
    side = made.weight_block if weight else 0
    height, width = (side, side) if side else (1, made.block)
    x = torch.atleast_2d(x) if side else torch.atleast_1d(x).movedim(dim, -1).unsqueeze(-2)
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % width, 0, -x.shape[-2] % height))
    return x.unfold(-2, height, height).unfold(-2, width, width).reshape(-1, height * width).double().numpy()


def with_a_bit_of_all(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Elements of many magnitudes, with zeros of both signs, NaN and Inf."""
    x = (torch.randn(shape) * torch.exp2(torch.randint(-24, 4, shape).float())).to(dtype)
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 0.0], dtype=dtype)
    return torch.where(torch.rand(shape) < 0.1, special[torch.randint(0, 6, shape)], x)


SHAPES: list[Any] = [((7, 96), -1, False), ((7, 100), 1, False), ((100, 7), 0, False), ((3, 50, 5), 1, False)]
SHAPES += [((2, 3, 130), -1, False), ((150, 20), 0, True), ((2, 20, 140), 1, True), ((70,), 0, True)]
SHAPES += [((1,), -1, False), ((), -1, False), ((), 0, True), ((4, 1, 33), 0, False), ((3, 2100), -1, False)]
SHAPES += [((40, 2100), 0, False), ((130, 300), -1, True), ((1, 20, 40), 1, False), ((1, 20, 40), -1, True)]


@EVERY_BACKEND
@pytest.mark.parametrize(("shape", "dim", "weight"), SHAPES, ids=str)
def test_blocks_along_any_dimension(shape: tuple[int, ...], dim: int, weight: bool, where: tuple[str, str]) -> None:
    backwards = tuple(reversed(range(len(shape))))
    for dtype, name in itertools.product(thinned(DTYPES, where, 1), thinned(list(FORMATS), where, 2)):
        x = with_a_bit_of_all(shape, dtype)
        row = expected(blocks_in(x, FORMATS[name], dim, weight), FORMATS[name])[1]
        turned = x.permute(backwards).contiguous().permute(backwards)
        strided = torch.stack([x, x], -1)[..., 0]
        behind = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(shape)  # not at a multiple of any vector
        strides = [step if size > 1 else 1 for size, step in zip(shape, x.stride(), strict=True)]
        loose = x.as_strided(shape, strides)  # contiguous, as a dimension of one element may have any stride
        for same in thinned([x, loose, strided, turned, behind, torch.nn.Parameter(x)], where, 2):
            table = gradstat.quantization_stats([same.to(where[1])], name, dim=dim, weight=weight, backend=where[0])
            assert_row(table, row, where[0])
        assert torch.equal(quantized(x, FORMATS[name], dim, weight).isfinite(), x.isfinite())


@pytest.mark.parametrize("name", FORMATS)
def test_neither_threads_nor_their_flushing_of_subnormals_change_a_bit(name: str) -> None:
    x = torch.randn(700, 300) * torch.exp2(torch.randint(-149, -110, (700, 300)).float())
    tensors, tables = [x, x.T, x.double()], []
    try:
        for threads, flushes in ((1, False), (2, False), (2, True)):
            torch.set_num_threads(threads)
            torch.set_flush_denormal(flushes)
            tables.append(gradstat.quantization_stats(tensors, name))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)
    assert all(torch.equal(tables[0], table) for table in tables[1:])


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_has_nothing_to_store_has_an_empty_row(name: str, weight: bool) -> None:
    tensors = [torch.zeros(0), torch.zeros(3, 0), torch.tensor([0.0, -0.0]), torch.tensor([math.nan, -math.inf])]
    table = gradstat.quantization_stats(tensors, name, weight=weight).tolist()
    for row, (nonfinite, blocks) in zip(table, [(0, 0), (0, 0), (0, 1), (2, 1)], strict=True):
        assert row == [0, 0, 0, nonfinite, 0, 0, blocks, 0, 0, math.inf, -math.inf]
    assert gradstat.quantization_stats([], name).shape == (0, len(gradstat.QUANTIZATION_FIELDS))


def test_float64_is_read_as_float32_and_its_errors_are_its_own() -> None:
    tensors = [torch.tensor(values, dtype=torch.float64) for values in ([1e150, 1.0, 1e-60], [1.0 + 2.0**-40])]
    large, exact = gradstat.quantization_stats(tensors, "mxfp8").tolist()
    assert large[:4] == [3.0, 2.0, 1.0, 0.0]
    assert [large[5], exact[5]] == [pytest.approx(1e300), 2.0**-80]


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (3, {}, TypeError, "tensors: expected a tensor or a list of tensors, got int"),
    ([torch.ones(2), None], {}, TypeError, r"tensors\[1\]"),
    ([torch.ones(2).int()], {}, TypeError, r"tensors\[0\].*int32.*\.float\(\)"),
    ([torch.ones(2), torch.ones(2).to(torch.float8_e5m2)], {}, TypeError, r"tensors\[1\].*float64.*float8_e5m2"),
    ([torch.ones(2).cfloat()], {}, TypeError, r"complex64; measure torch.view_as_real of it"),
    ([torch.eye(2).to_sparse()], {}, TypeError, r"strided.*sparse_coo.*to_dense"),
    ([torch.ones(2)], {"dim": 1}, IndexError, r"dim: expected -1 to 0 for tensors\[0\] of shape \[2\], got 1"),
    ([torch.ones(2)], {"dim": 0.5}, TypeError, "dim: expected"),
    ([torch.ones(2)], {"format": "fp8"}, ValueError, "format: expected one of e4m3, .* nvfp4, got 'fp8'"),
    ([torch.ones(2)], {"backend": "fast"}, ValueError, "unknown backend 'fast'"),
    ([torch.empty(2, device="meta")], {}, ValueError, r"tensors\[0\].*holds no data"),
]


@pytest.mark.parametrize(("tensors", "options", "error", "words"), REFUSED)
def test_what_cannot_be_stored_is_refused(tensors: Any, options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        gradstat.quantization_stats(tensors, **{"format": "mxfp8", **options})


def test_the_operator_is_one_of_torch(device: str) -> None:
    x, y = torch.randn(40, 48, device=device, requires_grad=True), torch.randn(3, device=device).bfloat16()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x: Tensor, y: Tensor) -> Tensor:
        return gradstat.quantization_stats([x * 2, y], "nvfp4") + 0

    assert torch.equal(f(x, y), gradstat.quantization_stats([x * 2, y], "nvfp4"))
    operator = torch.ops.gradstat.quantization_stats.default
    for name in FORMATS:
        torch.library.opcheck(operator, ([x.detach(), y, y[:0]], name, -1, True, None))
