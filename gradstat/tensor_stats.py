"""`TensorStats`: the statistics of one tensor, derived from its row when read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradstat import _fields
from gradstat._core.tensors import TensorInfo

Array = npt.NDArray[np.float64]

INTEGERS = ("numel", "nan_count", "inf_count", "zero_count")
FLOATS = ("l2_norm", "min", "max", "max_abs", "mean", "std")
L2_NORM = "L2 norm of all elements, as torch would compute it: NaN if any is NaN, else Inf if any is."
_MEASURED = _fields.INDEX.keys() - {"min", "max"}
_EXTREMES = slice(_fields.INDEX["sq_sum_large"], _fields.INDEX["sq_sum_small"] + 1)


class Judged:
    """A base for results that are true in a condition only if they are `ok`: ``assert gradstat.check(model)``."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        raise NotImplementedError

    def __bool__(self) -> bool:
        return self.ok


class RowValues:
    """Values that follow from rows ``[..., len(FIELDS)]``: each ``[...]`` float64, computed when it is first read.

    Norms, extremes and moments are over the finite elements, and NaN where there is none.

    Attributes:
        raw: The rows; all NaN where a tensor was absent.
        numel: Number of elements; its shape broadcasts to ``[...]``.
        values: Count of real numbers, of the shape of ``numel``: a complex element is two.
    """

    def __init__(self, raw: Array, numel: Any, values: Any) -> None:
        self.raw: Array = raw
        self.numel: Array = numel
        self.values: Array = values

    def field(self, name: str) -> Array:
        """A measured column: ``name`` is one of `gradstat.FIELDS`."""
        column: Array = self.raw[..., _fields.INDEX[name]]
        return column

    def column(self, name: str) -> Array:
        """A value by name, whether measured or computed here."""
        if name in _MEASURED:
            return self.field(name)
        computed: dict[str, Array] = vars(self)
        if name not in computed:
            with np.errstate(all="ignore"):  # sums may have overflowed float64, and there may be nothing to divide by
                getattr(self, name)
        return computed[name]

    @functools.cached_property
    def nonfinite(self) -> Array:
        """Number of NaN and Inf elements; 0 where the tensor was absent."""
        counts = self.field("nan_count") + self.field("inf_count")
        return np.where(counts > 0, counts, 0.0)

    @functools.cached_property
    def _finite_values(self) -> Array:
        count: Array = (self.numel - self.nonfinite) * (self.values / np.maximum(self.numel, 1))
        return count

    @functools.cached_property
    def finite_norm(self) -> Array:
        """L2 norm of the finite elements."""
        return l2_norm_of(self.raw)

    @functools.cached_property
    def l2_norm(self) -> Array:
        """L2 norm of all elements, as torch would compute it: NaN if any is NaN, else Inf if any is."""
        of_nonfinite = np.where(self.field("nan_count") > 0, np.nan, np.inf)
        return np.where(self.nonfinite > 0, of_nonfinite, self.finite_norm)

    @functools.cached_property
    def rms(self) -> Array:
        """Root mean square."""
        return self.finite_norm / np.sqrt(self._finite_values)

    @functools.cached_property
    def mean(self) -> Array:
        """Mean."""
        return self.field("sum") / self._finite_values

    @functools.cached_property
    def std(self) -> Array:
        """Population standard deviation; see `gradstat.TensorStats.std` for its accuracy."""
        deviation: Array = _fields.std(np, self.rms, self.mean)
        return deviation

    def _extremum(self, name: str) -> Array:
        return np.where(np.isfinite(self.field(name)), self.field(name), np.nan)

    @functools.cached_property
    def min(self) -> Array:
        """Smallest element."""
        return self._extremum("min")

    @functools.cached_property
    def max(self) -> Array:
        """Largest element."""
        return self._extremum("max")

    @functools.cached_property
    def max_abs(self) -> Array:
        """Largest magnitude."""
        return np.maximum(np.abs(self.min), np.abs(self.max))

    @functools.cached_property
    def zero_fraction(self) -> Array:
        """Fraction of elements that are zero."""
        fraction: Array = self.field("zero_count") / self.numel
        return fraction


def row_value(name: str, meaning: str, kind: Callable[[float], Any] = float) -> Any:
    """A property: the value ``name`` of one row."""

    def value(of: OneRow) -> Any:
        return kind(of._value(name))

    value.__annotations__["return"] = kind
    return property(value, doc=meaning)


class OneRow:
    """The values of one row, which describes a tensor or several tensors together."""

    __slots__ = ()
    _values: RowValues
    _place: Any  # of the row in `_values`

    nan_count: int = row_value("nan_count", "Number of NaN elements.", int)
    inf_count: int = row_value("inf_count", "Number of elements that are +Inf or -Inf.", int)
    zero_count: int = row_value("zero_count", "Number of elements equal to zero, of either sign.", int)
    zero_fraction: float = row_value("zero_fraction", "Fraction of elements that are zero; NaN without elements.")
    finite_norm: float = row_value("finite_norm", "L2 norm of the finite elements.")
    max_abs: float = row_value("max_abs", "Largest magnitude of a finite element; NaN when there is none.")

    def _value(self, name: str) -> float:
        return float(self._values.column(name)[self._place])

    def _json(self, *names: str) -> dict[str, float | None]:
        """The named values; None for those that are not finite."""
        values = {name: getattr(self, name) for name in names}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


class TensorStats(Judged, OneRow):
    """The statistics of one tensor. All values are Python numbers, computed when read.

    Counts are of elements. An element of a complex tensor is NaN if either part is NaN, else Inf if either part is Inf,
    and zero if both parts are zero. ``sum``, ``finite_norm``, ``min``, ``max``, ``max_abs``, ``mean`` and ``std`` are
    over the finite elements, for complex ones over their real and imaginary parts. Norms have a relative error of at
    most 1e-7. Counts, extremes and indices are exact.

    Attributes:
        name: The name of the parameter or tensor in the report.
    """

    __slots__ = ("_info", "_place", "_values", "name")

    def __init__(self, name: str, info: TensorInfo, values: RowValues, place: Any = ()) -> None:
        """``place`` is that of the tensor's row in ``values``."""
        self.name: str = name
        self._info, self._values, self._place = info, values, place

    def __reduce__(self) -> tuple[Any, ...]:  # without the rows of other tensors
        values = self.numel * (2 if self.dtype.is_complex else 1)
        return TensorStats, (self.name, self._info, RowValues(self._values.raw[self._place], self.numel, values))

    @property
    def shape(self) -> torch.Size:
        """The shape. For a distributed tensor, that of the whole tensor."""
        return self._info.shape

    @property
    def dtype(self) -> torch.dtype:
        """The gradient's dtype, not that of the statistics, which are float64."""
        return self._info.dtype

    @property
    def device(self) -> torch.device:
        """The device on which the tensor was measured."""
        return self._info.device

    @property
    def numel(self) -> int:
        """Number of elements. For a sparse tensor, of the elements that it stores: all values are over these."""
        return self._info.numel

    @property
    def nonfinite_count(self) -> int:
        """Number of NaN and Inf elements together."""
        return self.nan_count + self.inf_count

    @property
    def ok(self) -> bool:
        """Whether every element is finite."""
        return self.nonfinite_count == 0

    sum: float = row_value("sum", "Sum of the finite elements; infinite or NaN if a partial sum overflows float64.")
    l2_norm: float = row_value("l2_norm", L2_NORM)
    min: float = row_value("min", "Smallest finite element; NaN when there is none.")
    max: float = row_value("max", "Largest finite element; NaN when there is none.")
    mean: float = row_value("mean", "Mean of the finite values; NaN when there is none.")
    std: float = row_value(
        "std", "Population standard deviation of the finite values, to 1e-4 of their root mean square; NaN without any."
    )

    @property
    def finite_values(self) -> int:
        """Number of finite values; a complex element has two."""
        return (self.numel - self.nonfinite_count) * (2 if self.dtype.is_complex else 1)

    @property
    def first_nonfinite(self) -> tuple[int, ...] | None:
        """Index of the first NaN or Inf, one number per dimension; None when all elements are finite.

        First means first in memory order, which for a contiguous or sparse tensor is row-major order. For a distributed
        tensor it is the first one on `rank`, as an index in the whole tensor; None if its shards are interleaved.
        """
        flat = self._value("first_nonfinite")
        if math.isinf(flat):
            return None
        shards, order = self._info.shards, self._info.order
        if shards is None:
            return _unravelled(int(flat), self.shape, order)
        rank, index = shards.split(flat)
        shard = shards.shard_of(rank, self.shape)
        if shard is None:
            return None
        sizes, start = shard
        return tuple(i + first for i, first in zip(_unravelled(index, sizes, order), start, strict=True))

    @property
    def rank(self) -> int | None:
        """The lowest rank whose shard of a distributed tensor contains NaN or Inf; None otherwise."""
        flat, shards = self._value("first_nonfinite"), self._info.shards
        return None if shards is None or math.isinf(flat) else shards.split(flat)[0]

    @property
    def nonfinite_ranks(self) -> int | None:
        """Number of ranks whose shards contain NaN or Inf; None for a tensor that is not distributed."""
        return None if self._info.shards is None else int(self._values.raw[self._place][_fields.COUNT])

    def to_dict(self) -> dict[str, Any]:
        """All of the above as JSON-serializable values: numbers, strings, lists; None where undefined."""
        first = self.first_nonfinite
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            **self._json(*INTEGERS, *FLOATS, "finite_norm"),
            "first_nonfinite": list(first) if first is not None else None,
            **({} if self._info.shards is None else {"rank": self.rank, "nonfinite_ranks": self.nonfinite_ranks}),
        }

    def __repr__(self) -> str:
        where = f", first_nonfinite={self.first_nonfinite}" if not self.ok else ""
        return (
            f"TensorStats({self.name!r}, shape={tuple(self.shape)}, nan_count={self.nan_count}, "
            f"inf_count={self.inf_count}, l2_norm={self.l2_norm:.6g}, min={self.min:.6g}, max={self.max:.6g}{where})"
        )


def _unravelled(flat: int, shape: Sequence[int], order: tuple[int, ...] | None) -> tuple[int, ...]:
    """The multi-dimensional index of the element at the flat memory position ``flat``."""
    order = tuple(range(len(shape))) if order is None else order
    in_order = np.unravel_index(flat, [shape[d] for d in order])
    return tuple(int(i) for _, i in sorted(zip(order, in_order, strict=True)))


def l2_norm_of(rows: Array) -> Array:
    """L2 norms of rows ``[..., len(FIELDS)]``, without numpy's overflow and underflow warnings."""
    if not (rows[..., _EXTREMES] > 0).any():  # nearly always, and several times as fast
        ordinary: Array = np.sqrt(rows[..., _fields.INDEX["sq_sum"]])
        return ordinary
    with np.errstate(over="ignore", under="ignore"):
        norm: Array = _fields.l2_norm(np, rows)
    return norm
