"""Random bits in random layouts through every operation: a fixed set here, a million tensors in `make fuzz`."""

import ctypes
import random
from fractions import Fraction
from typing import Any

import numerics
import numpy as np
import pytest
import tables
import torch
from fuzz import as_rows, run
from helpers.devices import INTERPRETED
from helpers.exact import WrongError, assert_rows
from helpers.fuzz import Batch, Recipe, drawn_recipe
from helpers.fuzz_operations import OPERATIONS, judge_stats

import gradstat
from gradstat.bench.timing import progress_bar


def test_the_account_is_the_exact_one() -> None:
    """Compared with rational arithmetic, which is too slow for many tensors."""
    source = random.Random(3)
    huge = Recipe(torch.complex128, (), (), 0, (0xFFEFFFFFFFFFFFFF,))  # its sum overflows float64
    for recipe in (huge, *(drawn_recipe(source, largest=600) for _ in range(100))):
        batch = Batch([recipe], 3)
        elements = batch.elements()[0]
        squares = sum((Fraction(x) ** 2 for x in elements[np.isfinite(elements).all(1)].flat), Fraction(0))
        found = Fraction(*batch.exact_stats()[0].squares.as_integer_ratio())
        assert abs(found - squares) <= squares / 10**15, recipe


@pytest.mark.parametrize("field", gradstat.FIELDS)
def test_the_judge_notices_what_is_wrong(field: str) -> None:
    batch = Batch([Recipe(torch.float32, (9, 50), (50, 1), 3, (0x3F800001, 0x3F999999, 0)) for _ in range(2)], 0)
    exact_stats, dtypes = batch.exact_stats(), [recipe.dtype for recipe in batch.recipes]
    table = gradstat.stats(batch.tensors)
    assert_rows(table, exact_stats, dtypes, batch.recipes)
    number = table[1, gradstat.FIELDS.index(field)]
    wrong = {"sum": number * 1.000003, "sq_sum": number * 1.0000003, "first_nonfinite": torch.tensor(449.0)}
    number.copy_(wrong.get(field, torch.nextafter(number, number + 1)))
    with pytest.raises(WrongError):
        assert_rows(table, exact_stats, dtypes, batch.recipes)


def test_the_judge_notices_what_is_written_beside_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([Recipe(torch.float32, (7,), (1,), 0, "ordinary")], 0)
    measure = gradstat.stats

    def careless(tensors, backend):
        table = measure(tensors, backend=backend)
        tensors[0].as_strided((1,), (1,), 7).fill_(3)
        return table

    monkeypatch.setattr(gradstat, "stats", careless)
    with pytest.raises(WrongError, match="memory"):
        judge_stats(batch, random.Random(0), "native")


# The interpreter computes with numpy, which warns of the overflows that the fast loop allows by design.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_tensors(operation: str, where: tuple[str, str]) -> None:
    """The same tensors in every run: a test that fails at random would tell nothing about a change."""
    backend, device = where
    is_slow = where == INTERPRETED
    for seed in range(4 if is_slow else 40):
        largest = 500 if is_slow else 20_000
        batch = Batch.drawn(seed, seed % (4 if is_slow else 9), device, apart=seed % 2 == 1, largest=largest)
        if is_slow:  # the interpreter truncates bfloat16 and stores its subnormal numbers wrongly
            others = [recipe for recipe in batch.recipes if recipe.dtype is not torch.bfloat16]
            batch = Batch(others, seed, apart=batch.apart)
        OPERATIONS[operation](batch, random.Random(seed), backend)


def test_many_tensors_from_a_seed_and_what_was_done_is_told(device: str) -> None:
    done = run(seed=20240229, tensors=1000, device=device)
    assert done["stats"] >= 1000
    told = tables.table_of_rows(as_rows(done, 12.3, torch.device("cpu")))
    assert " 12.3 s |" in told
    for operation, count in done.items():
        assert operation == "batches" or f"| {operation} " in told
        assert f" {count:,} |" in told


@pytest.fixture(scope="module")
def known(kernels_on_host: ctypes.CDLL) -> list[numerics.Provider]:
    """All but the backends that are slow without a GPU, and that test_conformance.py compares with exact norms."""
    providers = numerics.providers(torch.device("cpu"), kernels_on_host)
    return [each for each in providers if each.name not in ("gradstat triton", "gradstat reference")]


def errors_of(dtype: torch.dtype, known: list[numerics.Provider]) -> Any:
    with progress_bar(1000, "measuring") as progress:
        return numerics.measure([dtype], 100, 2, known, progress)


@pytest.mark.parametrize("dtype", numerics.DTYPES)
def test_norms_are_as_exact_as_promised(dtype: torch.dtype, known: list[numerics.Provider]) -> None:
    errors = errors_of(dtype, known)
    bound = 1e-14 if dtype in (torch.float64, torch.complex128) else 1e-7
    for (_, kind, name), each in errors.items():
        if name.startswith("gradstat"):
            rounding = torch.finfo(numerics.total_norm_dtype(dtype)).eps / 2 if name.endswith("clip's norm") else 0.0
            assert each.vectors > 0
            assert each.lost == 0, (kind, name)
            assert each.worst <= bound + rounding * (1 + bound), (kind, name)


def test_what_loses_norms_is_seen_to(known: list[numerics.Provider]) -> None:
    errors = errors_of(torch.float32, known)
    assert errors[torch.float32, "adversarial", "torch._foreach_norm"].lost > 0
    assert errors[torch.float32, "ordinary", "torch._foreach_norm"].lost == 0
