"""Multiplying tensors in place, by one factor for all, for each tensor, or for each unit, in every backend."""

import math

import pytest
import torch
from helpers.devices import BACKENDS, INTERPRETED, thinned, unscale_
from helpers.exact import COMPLEX, FLOAT8, REAL, assert_rows_match, rounded_product
from test_conformance import random
from torch import Tensor

from gradstat._core import backends
from gradstat._core.backends import Kernels

# Triton's interpreter computes with numpy, which warns of the overflows that the fast loop allows by design.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FUSED = ("native", "emulated")  # the backends that multiply and measure in one pass; others do one after the other
FACTORS = [3.7, 2.0**-16, 1.0, math.nan, math.inf]


def in_every_backend(dtypes: list[torch.dtype]) -> pytest.MarkDecorator:
    """Parametrizes by backend and dtype. Triton does not multiply float8."""
    cases = [
        pytest.param(where, dtype, id=f"{where[0]}-{where[1]}-{dtype}")
        for where in BACKENDS
        for dtype in dtypes
        if where[0] != "triton" or dtype not in FLOAT8
    ]
    return pytest.mark.parametrize(("where", "dtype"), cases, indirect=["where"])


BY_DTYPE = in_every_backend([*REAL, *COMPLEX, *FLOAT8])


def apart(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment, in its own memory."""
    if not tensor.is_contiguous():
        return tensor.clone()
    vector = max(16 // tensor.element_size(), 1)
    offset = tensor.storage_offset() % vector
    memory = torch.zeros(offset + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return memory[offset:].view(tensor.shape).copy_(tensor)


def in_memory(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def assert_same_bytes(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(in_memory(a), in_memory(b))


def product(tensor: Tensor, multiplier: float | Tensor) -> Tensor:
    """The product that torch computes; complex numbers as pairs."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    by = torch.as_tensor(multiplier, dtype=torch.float64, device=tensor.device)
    multiplied = rounded_product(real, by, real.dtype)
    return torch.view_as_complex(multiplied) if tensor.is_complex() else multiplied


def assert_products(got: list[Tensor], expected: list[Tensor], where: tuple[str, str]) -> None:
    for a, b in zip(got, expected, strict=True):
        if where == INTERPRETED and a.dtype == torch.bfloat16:
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-38, equal_nan=True)  # the interpreter truncates
            continue
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


def factor_of(value: float, device: str) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def multipliers_of(values: list[float], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def every_kind(dtype: torch.dtype, where: tuple[str, str]) -> list[Tensor]:
    """Lengths around vectors, steps, blocks and chunks; with a NaN, an Inf, a zero and a subnormal."""
    device, tensors = where[1], []
    longest = {INTERPRETED: 9001, ("emulated", "cpu"): 40_321}.get(where, 3 * 65536 + 321)
    for size in (0, 1, 3, 17, 255, 1023, 1025, 4097, longest):
        x = torch.randn(size).to(dtype).to(device)
        for place, value in enumerate((math.nan, -math.inf, 0.0, 1e-40)):
            if size > 1000:
                x[(place * 577 + size // 2) % size] = torch.tensor(value).to(dtype)
        tensors.append(x)
    return [*tensors, apart(tensors[-2][1:]), *([] if where == INTERPRETED else [apart(tensors[-1][3:])])]


def assert_unscale_is_scale_and_check(kernels: Kernels, tensors: list[Tensor], value: float, device: str) -> Tensor:
    factor = factor_of(value, device)
    twins = [apart(tensor) for tensor in tensors]
    table = unscale_(kernels, tensors, factor)
    kernels.scale_(twins, factor.double())
    assert_same_bytes(tensors, twins)
    assert torch.equal(table, kernels.check(tensors)[0])
    return table


@pytest.mark.usefixtures("_poisoned")
@BY_DTYPE
def test_unscaled_values_and_rows_are_right(dtype: torch.dtype, kernels: Kernels, where: tuple[str, str]) -> None:
    for value in FACTORS if where[0] == "native" else FACTORS[:1]:
        tensors = every_kind(dtype, where)
        expected = [product(tensor, factor_of(value, where[1])) for tensor in tensors]
        if where[0] in FUSED:
            table = assert_unscale_is_scale_and_check(kernels, tensors, value, where[1])
        else:
            table = unscale_(kernels, tensors, factor_of(value, where[1]))
        assert_products(tensors, expected, where)
        assert_rows_match(table, tensors)


def test_one_leaves_every_bit(where: tuple[str, str]) -> None:
    """Also the payload of a NaN, which a multiplication could change; the reference promises values only."""
    if where[0] == "reference":
        pytest.skip("multiplies by 1 like by any other number")
    kernels, codes = backends.resolve(*where), torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    tensors = [thinned(codes, where, 4000).view(t).clone().to(where[1]) for t in (torch.float16, torch.bfloat16)]
    twins = [tensor.clone() for tensor in tensors]
    table = unscale_(kernels, tensors, factor_of(1.0, where[1]))
    assert_same_bytes(tensors, twins)
    assert_rows_match(table, tensors)
    other = torch.ones(3, device=where[1])
    kernels.scale_each_([*tensors, other], multipliers_of([1, 1, 2], where[1]))
    assert_same_bytes(tensors, twins)
    assert other.tolist() == [2.0] * 3


def test_a_tensor_listed_again_is_multiplied_again(kernels: Kernels, where: tuple[str, str]) -> None:
    device = where[1]
    x, y = random(700, torch.float32, device), random((3, 5), torch.bfloat16, device)
    expected = [product(product(product(x, 0.5), 0.5), 0.5), product(y, 0.5)]
    table = unscale_(kernels, [x, x, y, x], factor_of(0.5, device))
    assert_products([x, y], expected, where)
    assert_rows_match(table, [x, x, y, x])
    x, y, empty = torch.ones(10, device=device), torch.ones(70, device=device), torch.zeros(0, device=device)
    kernels.scale_each_([x, empty, y, x, x, y], multipliers_of([2, 9, 3, 1, 5, 7], device))
    assert (x.unique().tolist(), y.unique().tolist()) == ([10], [21])
    x, y = torch.ones(2, 3, device=device), torch.ones(3, 2, device=device).t()
    kernels.scale_units_([x, y, x, y], multipliers_of([2, 3, 5, 7, 11, 13, 17, 19], device))
    assert x.tolist() == [[22.0] * 3, [39.0] * 3]
    assert y.tolist() == [[85.0] * 3, [133.0] * 3]


@BY_DTYPE
def test_each_tensor_is_scaled_by_its_multiplier(dtype: torch.dtype, kernels: Kernels, where: tuple[str, str]) -> None:
    tensors = every_kind(dtype, where)
    values = [[0.25, -3.0, 1.0, 0.7301, math.nan, 0.0][i % 6] for i in range(len(tensors))]
    expected = [product(*pair) for pair in zip(tensors, values, strict=True)]
    kernels.scale_each_(tensors, multipliers_of(values, where[1]))
    assert_products(tensors, expected, where)


# The smallest magnitude that would round to a number above the largest, and what it becomes.
TOO_LARGE = {
    torch.float8_e4m3fn: (464.0, 448.0),
    torch.float8_e5m2: (61440.0, math.inf),
    torch.float8_e4m3fnuz: (248.0, math.nan),
    torch.float8_e5m2fnuz: (61440.0, math.nan),
}


@in_every_backend(FLOAT8)
def test_float8_beyond_the_largest_number(dtype: torch.dtype, kernels: Kernels, where: tuple[str, str]) -> None:
    """Every code, of which one is 1.0, by every kind of multiplier. To the bit, but for the payload of NaN."""
    limit, becomes = TOO_LARGE[dtype]
    codes = torch.arange(256, dtype=torch.uint8, device=where[1])
    around = torch.tensor(limit).nextafter(torch.tensor([0.0, math.inf])).tolist()
    for by in [*around, limit, -limit, 1.03, -1.03, 3.7, -(2.0**120), 1e39, math.inf, -math.inf, math.nan, -0.0]:
        tensors = [x.view(dtype) for x in (codes, codes.repeat(20)[3:], codes.reshape(4, 64))]
        expected = []
        for tensor in tensors:
            exact = tensor.float() * factor_of(by, where[1])
            too_large = torch.full_like(exact, becomes).copysign(exact)
            expected.append(torch.where(exact.abs() >= limit, too_large, exact).to(dtype))
        units = multipliers_of([by] * (1 + 1 + 4), where[1])
        for multiply in (
            lambda given, by=by: unscale_(kernels, given, factor_of(by, where[1])),
            lambda given, by=by: kernels.scale_each_(given, multipliers_of([by] * len(given), where[1])),
            lambda given, units=units: kernels.scale_units_(given, units),
        ):
            given = [apart(tensor) for tensor in tensors]
            multiply(given)
            for got, wanted in zip(given, expected, strict=True):
                same = got.view(torch.uint8) == wanted.view(torch.uint8)
                assert (same | (got.float().isnan() & wanted.float().isnan())).all(), by


def test_numbers_of_another_kind_are_refused(kernels: Kernels, where: tuple[str, str]) -> None:
    tensors = [torch.ones(2, 2, device=where[1]), torch.ones(4, device=where[1])]
    wide = torch.full((6,), 0.5, dtype=torch.float64, device=where[1])
    calls = [(kernels.scale_each_, wide[:2]), (kernels.scale_units_, wide[:3])]
    if where[0] == "native":
        calls.append((torch.ops.gradstat.unscale_, wide[:1].float()))
    for call, numbers in calls:
        for why, spoiled in (
            ("float", numbers.half()),
            ("float", numbers.to(torch.int64)),
            ("float", numbers.float() if numbers.dtype == torch.float64 else numbers.double()),
            (rf"{len(numbers)} contiguous \w+, got {len(numbers) - 1}", numbers[1:]),
            (rf"{len(numbers)} contiguous \w+, got {2 * len(numbers)}", torch.cat([numbers, numbers])),
            *([] if len(numbers) == 1 else [("contiguous", wide[: 2 * len(numbers) : 2])]),
            *([] if where[1] == "cpu" else [("device", numbers.cpu())]),
        ):
            with pytest.raises(RuntimeError, match=why):
                call(tensors, spoiled)
    assert all((tensor == 1).all() for tensor in tensors)
