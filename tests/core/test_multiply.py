"""Multiplying tensors in place, by one factor for all, for each tensor, or for each unit, in every backend."""

import math
import random
from typing import Any

import pytest
import torch
from helpers.devices import BACKENDS, INTERPRETED, thinned, unscale_
from helpers.exact import COMPLEX, FLOAT8, REAL, assert_rows_match
from helpers.fuzz import Batch, Recipe
from helpers.fuzz_operations import judge_products

from gradstat._core.backends import Kernels

# Triton's interpreter computes with numpy, which warns of the overflows that the fast loop allows by design.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Triton does not multiply float8, and its interpreter truncates bfloat16.
CASES = [
    pytest.param(where, dtype, id=f"{where[0]}-{where[1]}-{dtype}")
    for where in BACKENDS
    for dtype in [*REAL, *COMPLEX, *FLOAT8]
    if where[0] != "triton" or dtype not in (*FLOAT8, *[torch.bfloat16] * (where == INTERPRETED))
]


@pytest.mark.parametrize(("where", "dtype"), CASES, indirect=["where"])
def test_products_and_their_rows_are_right(dtype: torch.dtype, where: tuple[str, str]) -> None:
    """For lengths around vectors, steps, blocks and chunks, with special values, aligned and not."""
    longest = {INTERPRETED: 9001, ("emulated", "cpu"): 40_321}.get(where, 3 * 65536 + 321)
    plain = [Recipe(dtype, (size,), (1,), 0, "few special") for size in (0, 1, 3, 17, 255, 1023, 1025, 4097, longest)]
    moved = [Recipe(dtype, (4096,), (1,), 1, "few special"), Recipe(dtype, (longest - 3,), (1,), 3, "few special")]
    for seed in (3, 5, 0, 1, 10, 12, 14) if where[0] == "native" else (3, 5):  # each draws another factor
        judge_products(Batch([*plain, *moved], seed, where[1]), random.Random(seed), where[0])


def factor_of(value: float, device: str) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def multipliers_of(values: list[float], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def test_one_leaves_every_bit(kernels: Kernels, where: tuple[str, str]) -> None:
    """Also the payload of a NaN, which a multiplication could change; the reference promises values only."""
    if where[0] == "reference":
        pytest.skip("multiplies by 1 like by any other number")
    codes = thinned(torch.arange(2**16, dtype=torch.int32).to(torch.int16), where, 4000).to(where[1])
    bits = [codes.clone(), codes.clone()]
    tensors = [bits[0].view(torch.float16), bits[1].view(torch.bfloat16)]
    assert_rows_match(unscale_(kernels, tensors, factor_of(1.0, where[1])), tensors)
    other = torch.ones(3, device=where[1])
    kernels.scale_each_([*tensors, other], multipliers_of([1, 1, 2], where[1]))
    assert all(torch.equal(each, codes) for each in bits)
    assert other.tolist() == [2.0] * 3


def test_a_tensor_listed_again_is_multiplied_again(kernels: Kernels, where: tuple[str, str]) -> None:
    device = where[1]
    x, y = torch.randn(700, device=device), torch.randn(3, 5, device=device).bfloat16()
    expected = x / 8, y / 2
    table = unscale_(kernels, [x, x, y, x], factor_of(0.5, device))
    assert all(map(torch.equal, (x, y), expected))
    assert_rows_match(table, [x, x, y, x])
    x, y, empty = torch.ones(10, device=device), torch.ones(70, device=device), torch.zeros(0, device=device)
    kernels.scale_each_([x, empty, y, x, x, y], multipliers_of([2, 9, 3, 1, 5, 7], device))
    assert (x.unique().tolist(), y.unique().tolist()) == ([10], [21])
    x, y = torch.ones(2, 3, device=device), torch.ones(3, 2, device=device).t()
    kernels.scale_units_([x, y, x, y], multipliers_of([2, 3, 5, 7, 11, 13, 17, 19], device))
    assert x.tolist() == [[22.0] * 3, [39.0] * 3]
    assert y.tolist() == [[85.0] * 3, [133.0] * 3]


# The smallest magnitude that would round to a number above the largest, and what it becomes.
TOO_LARGE = {
    torch.float8_e4m3fn: (464.0, 448.0),
    torch.float8_e5m2: (61440.0, math.inf),
    torch.float8_e4m3fnuz: (248.0, math.nan),
    torch.float8_e5m2fnuz: (61440.0, math.nan),
}


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("where", [where for where in BACKENDS if where[0] != "triton"], indirect=True, ids="-".join)
def test_float8_beyond_the_largest_number(dtype: torch.dtype, kernels: Kernels, where: tuple[str, str]) -> None:
    """Every code, of which one is 1.0, by every kind of multiplier. To the bit, but for the payload of NaN."""
    limit, becomes = TOO_LARGE[dtype]
    codes = torch.arange(256, dtype=torch.uint8, device=where[1])
    around = torch.tensor(limit).nextafter(torch.tensor([0.0, math.inf])).tolist()
    for by in [*around, limit, -limit, 1.03, -1.03, 3.7, -(2.0**120), 1e39, math.inf, -math.inf, math.nan, -0.0]:
        numbers = factor_of(by, where[1]), multipliers_of([by] * 3, where[1]), multipliers_of([by] * 6, where[1])
        multiplies: Any = (lambda *given: unscale_(kernels, *given)), kernels.scale_each_, kernels.scale_units_
        for multiply, given in zip(multiplies, numbers, strict=True):
            tensors = [x.view(dtype) for x in (codes.clone(), codes.repeat(20)[3:], codes.reshape(4, 64).clone())]
            expected = []
            for tensor in tensors:
                exact = tensor.float() * factor_of(by, where[1])
                too_large = torch.full_like(exact, becomes).copysign(exact)
                expected.append(torch.where(exact.abs() >= limit, too_large, exact).to(dtype))
            multiply(tensors, given)
            for got, wanted in zip(tensors, expected, strict=True):
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
