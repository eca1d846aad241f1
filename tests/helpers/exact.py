"""Exact statistics of tensors, and assertions that compare tables with them: the judge of every backend."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradstat import _fields

Floats = npt.NDArray[np.float64]

assert np.finfo(np.longdouble).nmant >= 63, "exact statistics need an extended precision that this platform lacks"

NARROW_TOLERANCE = 1e-7  # of norms: the guarantee, for every input
# Of sums, relative to the sum of magnitudes: three roundings in float32.
SUM_TOLERANCE = 2.5e-7
# Of float64: as many roundings as a chunk has elements, if all are added one after the other.
WIDE_TOLERANCE = 2.0**16 * 2.0**-53

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
REAL = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]

EXACT = tuple(name for name in _fields.NAMES if name not in ("sum", "sq_sum", "sq_sum_large", "sq_sum_small"))
"""The fields that are not rounded."""


class ExactStats:
    """The exact statistics of a tensor, from its elements as ``[elements, parts]``, in the order of flat indices.

    Squares and sums are formed in extended precision, whose range they do not leave, with at least 64 bits of
    significand. They are rounded some twenty times at most, as numpy uses pairwise summation.
    """

    def __init__(self, elements: Floats) -> None:
        nan, zero = np.isnan(elements), elements == 0
        bad = ~np.isfinite(elements)
        if elements.shape[1] > 1:
            nan, zero, bad = nan.any(1), zero.all(1), bad.any(1)
        self.nan_count = int(np.count_nonzero(nan))
        number = int(np.count_nonzero(bad))
        self.inf_count = number - self.nan_count
        self.zero_count = int(np.count_nonzero(zero))
        self.first_nonfinite = float(bad.argmax()) if number else math.inf
        finite = elements[~bad.reshape(-1)] if number else elements
        self.min = float(finite.min(initial=math.inf))
        self.max = float(finite.max(initial=-math.inf))
        wide = finite.astype(np.longdouble)
        self.squares = np.square(wide).sum()
        self.sum = wide.sum()
        self.magnitudes = np.abs(wide).sum()

    @property
    def is_finite(self) -> bool:
        return self.nan_count == self.inf_count == 0

    @property
    def norm(self) -> np.longdouble:
        """L2 norm of the finite elements."""
        return np.sqrt(self.squares)


def exact_stats_of(tensor: Tensor) -> ExactStats:
    """Takes elements in memory order if the tensor is dense, else in row-major order."""
    by_stride = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = (by_stride if by_stride.is_contiguous() else tensor).reshape(-1).cpu()
    parts = torch.view_as_real(flat.to(torch.complex128)) if flat.is_complex() else flat.double()[:, None]
    return ExactStats(parts.numpy())


class WrongError(AssertionError):
    """A computed or changed value is wrong."""


def expect(holds: bool, what: str, where: object, got: object, expected: object) -> None:
    if not holds:
        raise WrongError(f"{what} of {where}: got {got!r}, expected {expected!r}")


def assert_rows(
    table: Tensor,
    exact: Sequence[ExactStats],
    dtypes: Sequence[torch.dtype],
    where: Sequence[Any],
    wide_tolerance: float = WIDE_TOLERANCE,
) -> None:
    """Checks every field of every row; ``where`` names the rows in error messages."""
    expect(table.dtype == torch.float64, "dtype", "the table", table.dtype, torch.float64)
    expect(tuple(table.shape) == (len(exact), len(_fields.NAMES)), "shape", "the table", table.shape, len(exact))
    rows = table.cpu().numpy()
    column = {name: rows[:, i] for name, i in _fields.INDEX.items()}

    def check_field(name: str, got: Floats, expected: Floats, slack: Floats | float = 0.0) -> None:
        with np.errstate(invalid="ignore"):
            right = (got == expected) | (np.abs(got - expected) <= slack)
        for i in np.flatnonzero(~right)[:1]:
            expect(False, name, where[i], got[i], expected[i])

    def exact_column(attribute: str) -> Floats:
        with np.errstate(over="ignore"):
            return np.array([getattr(each, attribute) for each in exact]).astype(np.float64)

    for name in EXACT:
        check_field(name, column[name], exact_column(name))
    is_wide = np.array([is_float64(dtype) for dtype in dtypes], dtype=np.bool_)
    for name in ("sq_sum_large", "sq_sum_small"):
        check_field(name, column[name], np.where(is_wide, column[name], 0.0))
    with np.errstate(over="ignore", invalid="ignore"):
        norms = _fields.l2_norm(np, rows)
        expected, magnitudes = exact_column("norm"), exact_column("magnitudes")
        check_field("norm", norms, expected, np.where(is_wide, wide_tolerance, NARROW_TOLERANCE) * expected)
        # Where the magnitudes add up to more than float64 can hold, partial sums may be infinite, with either sign.
        holds = magnitudes < 1e300
        slack = np.where(is_wide, wide_tolerance, SUM_TOLERANCE) * magnitudes
        check_field("sum", column["sum"][holds], exact_column("sum")[holds], slack[holds])


def assert_rows_match(table: Tensor, tensors: Sequence[Tensor], wide_tolerance: float = WIDE_TOLERANCE) -> float:
    """Compares each row, and the merge of all rows, with the tensors; returns their exact norm."""
    exact = [exact_stats_of(tensor) for tensor in tensors]
    labels = [f"tensor {i}, {tensor.dtype} of shape {tuple(tensor.shape)}" for i, tensor in enumerate(tensors)]
    assert_rows(table, exact, [tensor.dtype for tensor in tensors], labels, wide_tolerance)
    with np.errstate(over="ignore"):
        norm = float(_fields.l2_norm(np, _fields.merge(np, table.cpu().numpy())))
        total = float(np.sqrt(np.sum([each.squares for each in exact])))
    expect(math.isclose(norm, total, rel_tol=NARROW_TOLERANCE), "norm", "all rows", norm, total)
    return total


def is_float64(dtype: torch.dtype) -> bool:
    return dtype.to_real() == torch.float64


def tolerance_of(dtypes: Sequence[torch.dtype]) -> float:
    """The relative error allowed for a norm over tensors of these dtypes."""
    return WIDE_TOLERANCE if all(map(is_float64, dtypes)) else NARROW_TOLERANCE


def rounded_product(values: Tensor, multipliers: Tensor, dtype: torch.dtype) -> Tensor:
    """Real values times multipliers as torch computes them: in float64 for float64, else in float32, then rounded."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    multiplied = values.to(wide) * multipliers.to(wide)
    if dtype == torch.float8_e4m3fn:  # torch 2.10 and 2.11 return NaN for values that are too large
        multiplied = multiplied.clamp(-448.0, 448.0)
    return multiplied.to(dtype)
