"""Norms against exact ones: the exact norms, the vectors, and, on a few of each, the claims of docs/numerics.md."""

import ctypes
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numerics
import numpy as np
import plots
import pytest
import tables
import torch
from helpers.exact import square_root

from gradstat.bench.timing import progress_bar

CPU = torch.device("cpu")


def batches(dtype: torch.dtype) -> Iterator[numerics.Batch]:
    return numerics.batches(dtype, 100, 1)


def test_the_judge_is_right_about_long_vectors() -> None:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal((2, 1 << 18))).float()
    for norm, row in zip(numerics.judge(values), values.double().tolist(), strict=True):
        exact = square_root(Fraction(math.fsum(value * value for value in row)))
        assert float(norm) == pytest.approx(exact, rel=2e-16, abs=0.0)


@pytest.mark.parametrize("dtype", numerics.DTYPES)
def test_vectors_are_finite_and_hostile(dtype: torch.dtype) -> None:
    families: dict[str, list[torch.Tensor]] = {}
    for batch in batches(dtype):
        assert batch.vectors.dtype == dtype
        assert torch.isfinite(batch.vectors.to(torch.complex128 if dtype.is_complex else torch.float64)).all()
        families.setdefault(batch.family, []).append(batch.vectors)
    assert set(families) == {*numerics.ORDINARY, *numerics.ADVERSARIAL}
    assert sum(len(v) for listed in families.values() for v in listed) >= 100
    limits = torch.finfo(dtype)
    for vectors in families["squares overflow"]:
        assert numerics.judge(vectors).max() < limits.max
        assert numerics.judge(vectors).max() > math.sqrt(limits.max)
    assert any((v.abs().double() < limits.smallest_normal).any() for v in families["squares underflow"])


@pytest.fixture(scope="module")
def known(kernels_on_host: ctypes.CDLL) -> list[numerics.Provider]:
    """All but the backends that are slow without a GPU, and that test_conformance.py compares with exact norms."""
    providers = numerics.providers(CPU, kernels_on_host)
    return [each for each in providers if each.name not in ("gradstat triton", "gradstat reference")]


@pytest.mark.parametrize("dtype", numerics.DTYPES)
def test_norms_are_as_exact_as_promised(dtype: torch.dtype, known: list[numerics.Provider]) -> None:
    with progress_bar(1000, "measuring") as progress:
        errors = numerics.measure([dtype], 100, 2, known, progress)
    bound = 1e-14 if dtype in (torch.float64, torch.complex128) else 1e-7
    for (_, kind, name), each in errors.items():
        if name.startswith("gradstat"):
            rounding = torch.finfo(numerics.total_norm_dtype(dtype)).eps / 2 if name.endswith("clip's norm") else 0.0
            assert each.vectors > 0
            assert each.lost == 0, (kind, name)
            assert each.worst <= bound + rounding * (1 + bound), (kind, name, each.family)


def test_what_loses_norms_is_seen_to(known: list[numerics.Provider]) -> None:
    with progress_bar(1000, "measuring") as progress:
        errors = numerics.measure([torch.float32], 100, 2, known, progress)
    assert errors[torch.float32, "adversarial", "torch._foreach_norm"].lost > 0
    assert errors[torch.float32, "ordinary", "torch._foreach_norm"].lost == 0


def test_rows_become_a_table_and_a_chart(tmp_path: Path) -> None:
    errors = {
        (torch.float32, "ordinary", "gradstat native"): numerics.Errors(4e-8, 5e-7, 100, 0, "normal"),
        (torch.float32, "adversarial", "torch._foreach_norm"): numerics.Errors(1e-5, 3e-5, 40, 10, "one large"),
        (torch.float16, "adversarial", "torch._foreach_norm"): numerics.Errors(0.0, 0.0, 40, 40, ""),
    }
    rows = numerics.as_rows(errors, CPU)
    table = tables.norm_errors(rows)
    assert " 4.0e-08 |" in table
    assert " 1.0e-05, lost 25.0 %" in table
    assert " lost 100.0 % |" in table
    assert "unsupported" in table
    plots.norm_errors(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
