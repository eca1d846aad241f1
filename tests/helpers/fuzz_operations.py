"""Operations of gradstat on batches of fuzz.py, checked against the exact statistics.

An operation is a function of a batch, a random source for its arguments, and a backend. A wrong result raises
`exact.WrongError`, which names the tensor. Tensors that must not change, and the memory around tensors, are compared
byte by byte.
"""

import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from helpers.devices import parameters_with, unscale_
from helpers.exact import ExactStats, Floats, assert_rows, expect, rounded_product, tolerance_of
from helpers.fuzz import FLOAT8, KIND_OF, Batch, Memory, Recipe, decoded_from, view_of
from torch import Tensor, nn

import gradstat
from gradstat._core import backends
from gradstat.report import Report


def assert_unchanged(batch: Batch, before: Memory, but: Collection[int] = ()) -> None:
    """Checks the memory of all tensors, but for those at some positions, byte by byte."""
    for i, (recipe, memory, old) in enumerate(zip(batch.recipes, batch.current(), before, strict=True)):
        if i not in but and not np.array_equal(memory, old):
            at = np.flatnonzero(memory != old)[0]
            expect(False, f"byte {at} of the memory", recipe, memory[at], old[at])


def judge_stats(batch: Batch, source: random.Random, backend: str) -> None:
    before = batch.memory()
    table = gradstat.stats(batch.tensors, backend=backend)
    assert_rows(table, batch.exact_stats(), [recipe.dtype for recipe in batch.recipes], batch.recipes)
    assert_unchanged(batch, before)


def judge_check(batch: Batch, source: random.Random, backend: str) -> None:
    """Checks gradients, some of which are missing, and the tensors themselves."""
    before, exact_stats = batch.memory(), batch.exact_stats()
    named = {f"p{i}": parameter for i, parameter in enumerate(parameters_with(batch.tensors))}
    names = list(named)
    if named:
        named["missing"] = nn.Parameter(torch.zeros(3))
        report = gradstat.check(named.items(), backend=backend)
        expect(report.missing == ("missing",), "missing", "the report", report.missing, "missing")
        assert_report(report, batch, exact_stats, names)
    report = gradstat.check_tensors(dict(zip(names, batch.tensors, strict=True)), backend=backend)
    assert_report(report, batch, exact_stats, names)
    assert_unchanged(batch, before)


def assert_report(report: Report, batch: Batch, exact_stats: Sequence[ExactStats], names: Sequence[str]) -> None:
    expect(report.names == tuple(names), "names", "the report", report.names, names)
    is_ok = bool(exact_stats) and all(exact.is_finite for exact in exact_stats)
    expect(report.ok == is_ok, "ok", "the report", report.ok, is_ok)
    for name in ("nan_count", "inf_count", "zero_count"):
        total = sum(getattr(exact, name) for exact in exact_stats)
        expect(getattr(report, name) == total, name, "the report", getattr(report, name), total)
    total = norm_of(exact_stats)
    slack = tolerance_of([recipe.dtype for recipe in batch.recipes]) * total if math.isfinite(total) else 0.0
    expect(is_close(report.total_norm, total, slack), "total_norm", "the report", report.total_norm, total)
    for i, (stats, exact, recipe) in enumerate(zip(report, exact_stats, batch.recipes, strict=True)):
        expect(stats.numel == recipe.numel, "numel", recipe, stats.numel, recipe.numel)
        expect(stats.ok == exact.is_finite, "ok", recipe, stats.ok, exact.is_finite)
        norm = float(exact.norm)
        found = stats.finite_norm
        expect(is_close(found, norm, tolerance_of([recipe.dtype]) * norm), "norm", recipe, found, norm)
        whole = math.nan if stats.nan_count else math.inf if stats.inf_count else found
        expect(is_close(stats.l2_norm, whole, 0.0), "norm of all", recipe, stats.l2_norm, whole)
        if exact.min <= exact.max:
            expect((stats.min, stats.max) == (exact.min, exact.max), "range", recipe, stats, exact.min)
        else:
            expect(all(map(math.isnan, (stats.min, stats.max, stats.mean))), "range", recipe, stats, "NaN")
        assert_first(stats.first_nonfinite, exact, batch, i)
    norms = np.array([stats.l2_norm for stats in report])
    expect(np.array_equal(report.to_numpy()["l2_norm"], norms, equal_nan=True), "norms", "it", report, None)
    str(report), report.to_dict()


def assert_first(index: tuple[int, ...] | None, exact: ExactStats, batch: Batch, position: int) -> None:
    """Checks the index of a tensor's first nonfinite element, in the order in which elements are counted."""
    recipe = batch.recipes[position]
    if index is None:
        expect(exact.is_finite, "first_nonfinite", recipe, index, exact.first_nonfinite)
        return
    inside = all(0 <= i < size for i, size in zip(index, recipe.shape, strict=True))
    strides: Sequence[int] = recipe.strides
    if not recipe.is_dense:
        strides = [math.prod(recipe.shape[dim + 1 :]) for dim in range(len(recipe.shape))]
    flat = sum(i * stride for i, stride in zip(index, strides, strict=True))
    expect(inside and flat == exact.first_nonfinite, "first_nonfinite", recipe, index, exact.first_nonfinite)


def judge_units(batch: Batch, source: random.Random, backend: str) -> None:
    """Checks the rows of slices along dimension 0, which are then multiplied by a multiplier each."""
    few = batch.only(lambda recipe: len(recipe.shape) < 2 or recipe.shape[0] <= 64)
    if not few:
        return
    before = batch.memory()
    exact_stats, dtypes, where = [], [], []
    for i in few:
        recipe = batch.recipes[i]
        view = view_of(decoded_from(recipe.dtype, before[i]), recipe)
        for unit in view if len(recipe.shape) > 1 else [view]:
            exact_stats.append(ExactStats(unit.reshape(-1, KIND_OF[recipe.dtype].parts)))
            dtypes.append(recipe.dtype)
            where.append(("a unit", recipe))
    device = batch.tensors[0].device
    kernels = backends.resolve(backend, device.type)
    assert_rows(kernels.unit_stats([batch.tensors[i] for i in few]), exact_stats, dtypes, where)
    assert_unchanged(batch, before)
    products, numbers = {}, []
    chosen = [i for i in few if is_scaled_by(backend, batch.recipes[i])]
    for i in chosen:
        count = batch.recipes[i].shape[0] if len(batch.recipes[i].shape) > 1 else 1
        own = np.array([source.choice((1.0, 0.0, -0.37, 3.7)) for _ in range(count)])
        products[i] = (own.reshape(-1, *[1] * len(batch.recipes[i].shape)),) * 2
        numbers += own.tolist()
    if chosen:
        by = torch.tensor(numbers, dtype=torch.float64, device=device)
        kernels.scale_units_([batch.tensors[i] for i in chosen], by)
        assert_products(batch, before, products)


def is_scaled_by(backend: str, recipe: Recipe) -> bool:
    return recipe.is_dense and not (backend == "triton" and recipe.dtype in FLOAT8)


def norm_of(exact_stats: Sequence[ExactStats], infinity: bool = False) -> float:
    """The norm of all tensors together: NaN if any element is NaN, else Inf if any is."""
    if any(exact.nan_count for exact in exact_stats):
        return math.nan
    if any(exact.inf_count for exact in exact_stats):
        return math.inf
    if infinity:
        return max((max(exact.max, -exact.min, 0.0) for exact in exact_stats), default=0.0)
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.sum([exact.squares for exact in exact_stats], dtype=np.longdouble)))


def is_close(got: float, expected: float, slack: float) -> bool:
    return got == expected or abs(got - expected) <= slack or (math.isnan(got) and math.isnan(expected))


def norm_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    real = {torch.float32 if dtype in FLOAT8 else dtype.to_real() for dtype in dtypes}
    promoted = real.pop()
    for dtype in real:
        promoted = torch.promote_types(promoted, dtype)
    return promoted


def assert_norm(norm: Tensor, exact: float, dtypes: Sequence[torch.dtype]) -> None:
    """Checks a returned norm: it lies within the error bound, rounded to its dtype."""
    expected = norm_dtype(dtypes) if dtypes else torch.float32
    expect(norm.dtype == expected and norm.shape == (), "dtype", "the norm", norm, expected)
    got = norm.item()
    if math.isnan(exact):
        return expect(math.isnan(got), "value", "the norm", got, exact)
    slack = tolerance_of(dtypes) + (0.0 if expected == torch.float64 else 2.0**-24)  # a norm may be rounded twice
    low, high = torch.tensor([exact * (1 - slack), exact * (1 + slack)], dtype=torch.float64).to(expected).tolist()
    return expect(low <= got <= high, "value", "the norm", got, exact)


def can_have_infinity_norm(batch: Batch, chosen: Sequence[int]) -> bool:
    """False for empty tensors, where torch has no such norm, and complex ones, where it is not that of the parts."""
    return all(batch.recipes[i].numel and not batch.recipes[i].dtype.is_complex for i in chosen)


def judge_total_norm(batch: Batch, source: random.Random, backend: str) -> None:
    before, exact_stats = batch.memory(), batch.exact_stats()
    dtypes = [recipe.dtype for recipe in batch.recipes]
    infinity = source.random() < 0.3 and can_have_infinity_norm(batch, range(len(dtypes)))
    norm = gradstat.get_total_norm(batch.tensors, math.inf if infinity else 2.0, backend=backend)
    assert_norm(norm, norm_of(exact_stats, infinity), dtypes)
    assert_unchanged(batch, before)


def judge_clip(batch: Batch, source: random.Random, backend: str) -> None:
    """Clips the gradients that can be clipped. Adding an expanded gradient raises and changes nothing."""
    refused = FLOAT8 if backend == "triton" else ()
    writable = batch.only(lambda recipe: not recipe.is_expanded and recipe.dtype not in refused)
    before, every = batch.memory(), batch.exact_stats()
    gradients = [batch.tensors[i] for i in writable]
    dtypes = [batch.recipes[i].dtype for i in writable]
    infinity = source.random() < 0.2 and can_have_infinity_norm(batch, writable)
    exact = norm_of([every[i] for i in writable], infinity)
    factor = source.choice((0.0, 0.5, 1e-3, 1.0, 1 - 1e-9, 1 + 1e-9, 2.0))
    max_norm = math.inf if source.random() < 0.1 else factor * (exact if 0 < exact < 1e300 else 1.0)
    parameters = parameters_with(gradients)
    raises = math.isfinite(exact) and source.random() < 0.5  # it then waits for the norm before it scales
    order = math.inf if infinity else 2.0
    norm = gradstat.clip_grad_norm_(parameters, max_norm, order, error_if_nonfinite=raises, backend=backend)
    assert_norm(norm, exact, dtypes)
    ratio = max_norm / (exact + 1e-6)
    if max_norm == math.inf or ratio > 1 + 1e-6 or not writable:
        assert_unchanged(batch, before)
    else:
        slack = tolerance_of(dtypes) + 2.0**-50
        low, high = (min(ratio * factor, 1.0) for factor in (1 - slack, 1 + slack))
        assert_products(batch, before, dict.fromkeys(writable, (low, high)))
    expanded = [batch.tensors[i] for i in batch.only(lambda recipe: recipe.is_expanded)]
    if expanded:
        before = batch.memory()
        with_expanded = parameters_with([*gradients, source.choice(expanded)])
        try:
            gradstat.clip_grad_norm_(with_expanded, 1.0, backend=backend)
        except RuntimeError as error:
            expect("is expanded" in str(error), "error", "an expanded gradient", error, "that it is expanded")
        else:
            expect(False, "error", "an expanded gradient", None, "RuntimeError")
        assert_unchanged(batch, before)


def assert_products(
    batch: Batch, before: Memory, multipliers: dict[int, tuple[Any, Any]], keeps_bits: bool = False
) -> None:
    """Checks that tensors were multiplied and rounded as torch does, and that nothing else changed.

    ``multipliers`` gives bounds for each: two numbers, or arrays. Multiplied by exactly 1 tensors keep their values,
    and the bits of NaN if ``keeps_bits``.
    """
    multiplied = {i: by for i, by in multipliers.items() if not (keeps_bits and by == (1.0, 1.0))}
    assert_unchanged(batch, before, multiplied)
    memory = batch.current()
    for i, (low, high) in multiplied.items():
        recipe, dtype = batch.recipes[i], batch.recipes[i].dtype
        was, now = decoded_from(dtype, before[i]), decoded_from(dtype, memory[i])
        a = product(view_of(was, recipe), low, dtype)
        b = a if high is low else product(view_of(was, recipe), high, dtype)
        inside = view_of(now, recipe)
        right = (memory[i] == before[i]).reshape(*was.shape, -1).all(-1)
        with np.errstate(invalid="ignore"):
            is_between = (np.minimum(a, b) <= inside) & (inside <= np.maximum(a, b))
        view_of(right, recipe)[...] = is_between | (np.isnan(a) & np.isnan(b) & np.isnan(inside))
        for at, part in np.argwhere(~right)[:1]:
            expected = f"{was[at, part]} times {low} to {high}"
            expect(False, f"element {at} of the memory", recipe, now[at, part], expected)


def product(values: Floats, multipliers: float | Floats, dtype: torch.dtype) -> Floats:
    """Products for parts of elements, rounded to their dtype."""
    real = dtype.to_real() if dtype.is_complex else dtype
    by = torch.as_tensor(multipliers, dtype=torch.float64)
    return rounded_product(torch.from_numpy(values.copy()), by, real).double().numpy()  # type: ignore[no-any-return]


def judge_products(batch: Batch, source: random.Random, backend: str) -> None:
    """Scales by a multiplier per tensor, then by a factor while measuring; through torch's dispatcher or directly."""
    chosen = batch.only(lambda recipe: is_scaled_by(backend, recipe))
    if not chosen:
        return
    tensors = [batch.tensors[i] for i in chosen]
    device = tensors[0].device
    kernels = backends.resolve(backend, device.type)
    before = batch.memory()
    numbers = [source.choice((1.0, 0.0, -0.37, 0.8125, 3.7, 2.0**-16, math.inf, math.nan)) for _ in chosen]
    direct = source.choice((kernels.direct, backends.NOT_COMPILED))
    multipliers = torch.tensor(numbers, dtype=torch.float64, device=device)
    if direct is backends.NOT_COMPILED:
        kernels.scale_each_(tensors, multipliers)
    else:
        expect(direct.scale_each_(tensors, multipliers) is True, "return value", "scale_each_", None, True)
    by_position = {i: (number, number) for i, number in zip(chosen, numbers, strict=True)}
    assert_products(batch, before, by_position, keeps_bits=backend == "native")
    before, factor = batch.memory(), source.choice((1.0, 0.0, 1 / 65536, 0.3, 7.0, math.inf, math.nan))
    numbers = torch.tensor(factor, dtype=torch.float32, device=device)
    is_direct = direct is not backends.NOT_COMPILED
    table = direct.unscale_(tensors, numbers)[0] if is_direct else unscale_(kernels, tensors, numbers)
    if backend in ("native", "emulated"):  # in one pass
        expect(torch.equal(table, kernels.check(tensors)[0]), "table", "products", table, "that of a check")
    factor = float(np.float32(factor))
    assert_products(batch, before, dict.fromkeys(chosen, (factor, factor)), keeps_bits=backend == "native")
    exact_stats, recipes = batch.exact_stats(), [batch.recipes[i] for i in chosen]
    assert_rows(table, [exact_stats[i] for i in chosen], [recipe.dtype for recipe in recipes], recipes)


OPERATIONS: dict[str, Callable[[Batch, random.Random, str], None]] = {
    "stats": judge_stats,
    "check": judge_check,
    "unit_stats": judge_units,
    "get_total_norm": judge_total_norm,
    "clip_grad_norm_": judge_clip,
    "scale_each_, unscale_": judge_products,
}
