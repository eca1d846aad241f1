"""Norms against exact ones: on a few vectors of each kind, the claims of docs/numerics.md."""

import ctypes
from collections.abc import Iterator

import numerics
import pytest
import torch

from gradstat.bench.timing import progress_bar

CPU = torch.device("cpu")


def batches(dtype: torch.dtype) -> Iterator[numerics.Batch]:
    return numerics.batches(dtype, 100, 1)


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
