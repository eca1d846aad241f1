"""The CUDA kernels on the CPU, where they differ from other backends: blocks, tickets, tables, norms and verdicts.

As the backend "emulated" they run in the same tests as all others (tests/core). This verifies the logic of the device
code: peeling, tiles, segments, tickets, the exact path and all arithmetic. It cannot verify the memory model of a real
GPU. The launchers are tested in test_cuda_launchers.py.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cuda_on_cpu import DTYPES, EmulatedKernels
from helpers.exact import COMPLEX, NARROW_TOLERANCE, assert_rows_match, rounded_product
from torch import Tensor

KINDS = [*DTYPES, *COMPLEX]


@pytest.fixture(scope="session")
def kernels(emulated_kernels: EmulatedKernels) -> EmulatedKernels:
    return emulated_kernels


def new(fill: float, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full(shape, fill, dtype=dtype)


def random_values(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=wide).mul(0.7).to(dtype)


def reals(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@pytest.mark.parametrize("factor", [None, 0.3, "each its own"])
def test_thousands_of_tensors_of_all_kinds(kernels: EmulatedKernels, factor: Any) -> None:
    """In launch parameters, and more tensors than they hold; three of a kind in a row, mostly small."""
    capacity = kernels.library.table_capacity()
    assert 1200 > capacity > 500
    for count, device in ((1200, 2), (capacity, 3), (100, 0)):
        random = np.random.default_rng(count)
        sizes = [int(random.integers(0, 60 if number % 40 else 9000)) for number in range(count)]
        values = [random_values(KINDS[i // 3 % len(KINDS)], size, i) for i, size in enumerate(sizes)]
        before = [tensor.clone() for tensor in map(reals, values)]
        multipliers, by, norm = new(1.0, count), None, new(77.0)
        if isinstance(factor, str):
            multipliers = torch.from_numpy(random.choice([1.0, 0.77, -3.0, 1e-3], count))
            kernels.scale_each_(values, multipliers)
        elif factor is not None:
            by = torch.tensor(factor)
            multipliers *= by
        table = kernels.measured(values, by, norm, multiplier=new(77.0), device=device)
        exact = assert_rows_match(table, values, wide_tolerance=1e-13)
        assert norm.item() == pytest.approx(exact, rel=NARROW_TOLERANCE, abs=0.0)
        for now, old, multiplier in zip(map(reals, values), before, multipliers, strict=True):
            expected = rounded_product(old, multiplier, old.dtype)
            torch.testing.assert_close(now.double(), expected.double(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_in_any_order_of_blocks(kernels: EmulatedKernels, dtype: torch.dtype) -> None:
    per_tile = 2**14 // dtype.itemsize
    values = [random_values(dtype, n, n) for n in (40 * per_tile + 5, 3, 7 * per_tile, 100, 2 * per_tile)]
    values[2].view(torch.uint8)[:8] = 0xFF  # NaN
    norm = new(77.0)
    first, its_norm = kernels.measured(values, None, norm, multiplier=new(77.0), device=2), norm.clone()
    assert_rows_match(first, values, wide_tolerance=1e-13)
    for _ in range(5):
        again = kernels.measured(values, None, norm, multiplier=new(77.0), device=2)
        assert torch.equal(again.view(torch.int64), first.view(torch.int64))
        assert torch.equal(norm.view(torch.int64), its_norm.view(torch.int64))


@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norm_and_multiplier(kernels: EmulatedKernels, norm_dtype: torch.dtype) -> None:
    values = [random_values(torch.float32, n, n) for n in (5000, 0, 12)]
    exact = assert_rows_match(kernels.measured(values), values, wide_tolerance=1e-13)

    def asked(max_norm: float = 1.0, infinity: bool = False) -> tuple[Tensor, float]:
        norm, multiplier = new(77.0, dtype=norm_dtype), new(77.0)
        kernels.measured(values, None, norm, max_norm, infinity, multiplier)
        return norm, multiplier.item()

    norm, multiplier = asked(2.0)
    if norm_dtype == torch.float64:
        assert norm.item() == pytest.approx(exact, rel=NARROW_TOLERANCE, abs=0.0)
    else:
        assert norm == torch.tensor(exact, dtype=torch.float64).to(norm_dtype)
    assert multiplier == pytest.approx(2.0 / (exact + 1e-6), rel=NARROW_TOLERANCE, abs=0.0)
    assert asked(1e9)[1] == asked(math.inf)[1] == 1.0
    assert asked(infinity=True)[0] == torch.cat(values).abs().max().to(norm_dtype)
    values.append(torch.tensor([1.0, math.inf]))
    assert asked() == (math.inf, 0.0)
    values.append(torch.tensor([math.nan]))
    assert all(math.isnan(number) for number in asked())
    for count in (0, 1, 700):  # nothing to read
        values[:] = [torch.zeros(0)] * count
        assert asked() == (0.0, 1.0)
