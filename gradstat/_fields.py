"""The statistics: the fields of a row, how they merge, and values derived from them; standard library only.

A *row* describes one tensor. Rows form a monoid: a tensor's row is the merge of the rows of its chunks, whatever their
grouping. The sum of squares is kept in three columns, after J. L. Blue (ACM TOMS 4(1), 1978; constants as in LAPACK
3.10 ``la_constants``, from E. Anderson, Algorithm 978, ACM TOMS 44(1), 2017): a float64 element whose square would
overflow or vanish is first scaled by a power of two. Narrower dtypes use ``sq_sum`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Merge = Literal["sum", "min", "max"]

_IDENTITY: dict[str, float] = {"sum": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(frozen=True, slots=True)
class Field:
    """One statistic of one tensor: a column of a table."""

    name: str
    merge: Merge  # how two values combine
    degree: int  # multiplying the elements by a positive s multiplies the value by s**degree
    meaning: str
    is_index: bool = False  # whether it is an element's index: in a shard it is meaningful only together with the rank

    @property
    def identity(self) -> float:
        """The value that leaves every other value unchanged under this field's merge."""
        return _IDENTITY[self.merge]


FIELDS: tuple[Field, ...] = (
    Field("nan_count", "sum", 0, "elements that are NaN"),
    Field("inf_count", "sum", 0, "elements that are +Inf or -Inf"),
    Field("zero_count", "sum", 0, "elements equal to zero, of either sign"),
    Field("sum", "sum", 1, "sum of the finite elements"),
    Field("sq_sum", "sum", 2, "sum of squares of the finite elements of ordinary magnitude"),
    Field("sq_sum_large", "sum", 2, "sum of (x * 2**-538)**2 over the finite elements with |x| > 2**486"),
    Field("sq_sum_small", "sum", 2, "sum of (x * 2**537)**2 over the elements with |x| < 2**-511"),
    Field("min", "min", 1, "smallest finite element"),
    Field("max", "max", 1, "largest finite element"),
    Field("first_nonfinite", "min", 0, "smallest flat index of a NaN or Inf, in memory order", is_index=True),
)

NAMES: tuple[str, ...] = tuple(field.name for field in FIELDS)  # the columns of a table, in order
COUNT: int = len(FIELDS)  # the number of columns of a table
INDEX: dict[str, int] = {name: column for column, name in enumerate(NAMES)}  # column number by field name

NONFINITE: slice = slice(INDEX["nan_count"], INDEX["inf_count"] + 1)
"""The two adjacent columns that count non-finite elements (tests/core/test_fields.py checks that they are adjacent)."""

DEGREES: tuple[int, ...] = tuple(field.degree for field in FIELDS)  # the degree of each column
IDENTITY: tuple[float, ...] = tuple(field.identity for field in FIELDS)  # the row of a tensor without elements

SUMMED: slice = slice(0, sum(field.merge == "sum" for field in FIELDS))
"""The summed columns, which come first, so that slicing gives a view (tests/core/test_fields.py checks the order)."""

# Blue's thresholds and scales for float64: squares of magnitudes in [SMALL, LARGE] neither vanish nor
# overflow, even when 2**52 of them are added.
LARGE = 2.0**486
SMALL = 2.0**-511
LARGE_SCALE = 2.0**-538
SMALL_SCALE = 2.0**537

FINGERPRINT: str = ",".join(
    [f"{field.name}:{field.merge}" for field in FIELDS]
    + [number.hex() for number in (LARGE, SMALL, LARGE_SCALE, SMALL_SCALE)]
)
"""Identifies fields, merges and Blue's constants. A compiled extension carries its own."""


def l2_norm(xp: Any, rows: Any) -> Any:
    """L2 norms ``[...]`` of ``rows`` ``[..., len(FIELDS)]``; ``xp`` is numpy or torch. Only a result can overflow.

    If there are large elements, the ordinary ones are added at the large scale, and the small ones are below rounding.
    Otherwise the small ones are added to the ordinary ones, or stand alone at their own scale.
    """
    sq_sum, sq_sum_large, sq_sum_small = (rows[..., INDEX[name]] for name in ("sq_sum", "sq_sum_large", "sq_sum_small"))
    with_large = xp.sqrt(sq_sum_large + sq_sum * LARGE_SCALE * LARGE_SCALE) / LARGE_SCALE
    ordinary = xp.sqrt(sq_sum + sq_sum_small / SMALL_SCALE / SMALL_SCALE)
    only_small = xp.sqrt(sq_sum_small) / SMALL_SCALE
    without_large = xp.where(sq_sum > 0, ordinary, only_small)
    return xp.where(sq_sum_large > 0, with_large, without_large)


def std(xp: Any, rms: Any, mean: Any) -> Any:
    """Population standard deviation from root mean square and mean, without squaring them.

    Accurate to about 1e-4 of the root mean square, so meaningless for nearly constant elements.
    """
    mean = abs(mean)
    # A quarter of rms + mean does not overflow, and scaling by powers of two is exact.
    return 2.0 * xp.sqrt(xp.maximum(rms - mean, 0.0)) * xp.sqrt(rms / 4 + mean / 4)


def merge(xp: Any, rows: Any) -> Any:
    """Merges all ``rows`` into one: ``[n, len(FIELDS)]``, n at least 1, to ``[len(FIELDS)]``."""
    reduce = {"sum": xp.sum, "min": xp.amin, "max": xp.amax}
    return xp.stack([reduce[field.merge](rows[:, column], 0) for column, field in enumerate(FIELDS)])
