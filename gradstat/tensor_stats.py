"""`TensorStats`: the statistics of one tensor, derived from its row when read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gradstat import _fields
from gradstat._core.tensors import TensorInfo

Array = npt.NDArray[np.float64]

INTEGERS = ("numel", "nan_count", "inf_count", "zero_count")
FLOATS = ("l2_norm", "min", "max", "max_abs", "mean", "std")

T = TypeVar("T")


class Judged:
    """What is true in a condition only if it is `ok`, so that ``assert gradstat.check(model)`` means what it says."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        raise NotImplementedError

    def __bool__(self) -> bool:
        return self.ok


class ByName(Generic[T]):
    """Entries by name or position: made by ``_at`` when asked for; ``_absent`` says why there is none of a name."""

    _names: Callable[[], Sequence[str]]
    _at: Callable[[int], T]
    _absent: Callable[[str], str]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors or parameters, in order."""
        return tuple(self._names())

    @functools.cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[T]:
        return map(self._at, range(len(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._position

    def __getitem__(self, key: str | int) -> T:
        if isinstance(key, int):
            return self._at(range(len(self))[key])
        if key not in self._position:
            raise KeyError(self._absent(key))
        return self._at(self._position[key])


def derived(rows: Array, numel: Any, parts: Any = 1) -> dict[str, Array]:
    """The values of `TensorStats` that are computed from rows ``[..., len(FIELDS)]``, by name, each ``[...]``.

    ``numel`` elements of ``parts`` numbers each, 2 for complex ones, belong to a row. NaN where a value is undefined.
    """
    columns = {name: rows[..., i] for name, i in _fields.INDEX.items()}
    low, high = columns["min"], columns["max"]
    with np.errstate(all="ignore"):  # sums may have overflowed float64
        low, high = (np.where(low <= high, extreme, np.nan) for extreme in (low, high))
        finite = (numel - columns["nan_count"] - columns["inf_count"]) * parts
        norm, mean = l2_norm_of(rows), np.where(finite > 0, columns["sum"] / finite, np.nan)
        of_bad = np.where(columns["nan_count"] > 0, np.nan, np.inf)
        return {
            "l2_norm": np.where(columns["nan_count"] + columns["inf_count"] > 0, of_bad, norm),
            "finite_norm": norm,
            "min": low,
            "max": high,
            "max_abs": np.maximum(abs(low), abs(high)),
            "mean": mean,
            "std": _fields.std(np, norm / np.sqrt(finite), mean),
            "zero_fraction": columns["zero_count"] / np.where(numel, numel, np.nan),
        }


class RowValues:
    """Values that derive from a row alone, whether of one tensor or of several together."""

    __slots__ = ()
    _row: Array
    numel: int
    _derived: dict[str, Any]

    def _field(self, field: str) -> float:
        return float(self._row[_fields.INDEX[field]])

    @property
    def nan_count(self) -> int:
        """Number of NaN elements."""
        return int(self._field("nan_count"))

    @property
    def inf_count(self) -> int:
        """Number of elements that are +Inf or -Inf."""
        return int(self._field("inf_count"))

    @property
    def zero_count(self) -> int:
        """Number of elements equal to zero, of either sign."""
        return int(self._field("zero_count"))

    @property
    def zero_fraction(self) -> float:
        """Fraction of elements that are zero; NaN when there are no elements."""
        return float(self._derived["zero_fraction"])

    @property
    def finite_norm(self) -> float:
        """L2 norm of the finite elements."""
        return float(self._derived["finite_norm"])

    @property
    def max_abs(self) -> float:
        """Largest magnitude of a finite element; NaN when there is none."""
        return float(self._derived["max_abs"])

    def _json(self, *names: str) -> dict[str, float | None]:
        """The named values; None for those that are not finite."""
        values = {name: getattr(self, name) for name in names}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


class TensorStats(Judged, RowValues):
    """The statistics of one tensor. All values are Python numbers, computed when read.

    Counts are of elements. An element of a complex tensor is NaN if either part is NaN, else Inf if either part is Inf,
    and zero if both parts are zero. ``sum``, ``finite_norm``, ``min``, ``max``, ``max_abs``, ``mean`` and ``std`` are
    over the finite elements, for complex ones over their real and imaginary parts. Norms have a relative error of at
    most 1e-7. Counts, extremes and indices are exact.

    Attributes:
        name: The name of the parameter or tensor in the report.
    """

    __slots__ = ("_info", "_row", "_values", "name")

    def __init__(self, name: str, row: Array, info: TensorInfo, values: dict[str, Any] | None = None) -> None:
        """``values`` are those of ``derived``, if they are known already."""
        self.name = name
        self._row = row
        self._info = info
        self._values = values

    @property
    def _derived(self) -> dict[str, Any]:  # type: ignore[override]
        if self._values is None:
            self._values = derived(self._row, self.numel, 2 if self.dtype.is_complex else 1)
        return self._values

    @property
    def shape(self) -> torch.Size:
        """The shape; of the whole tensor for a distributed one."""
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
    def numel(self) -> int:  # type: ignore[override]
        """Number of elements; of those that a sparse tensor stores, since all values are over these."""
        return self._info.numel

    @property
    def nonfinite_count(self) -> int:
        """Number of NaN and Inf elements together."""
        return self.nan_count + self.inf_count

    @property
    def ok(self) -> bool:
        """Whether every element is finite."""
        return self.nonfinite_count == 0

    @property
    def sum(self) -> float:
        """Sum of the finite elements; infinite or NaN if a partial sum overflows float64."""
        return self._field("sum")

    @property
    def l2_norm(self) -> float:
        """L2 norm of all elements, as torch would compute it: NaN if any is NaN, else Inf if any is."""
        return float(self._derived["l2_norm"])

    @property
    def min(self) -> float:
        """Smallest finite element; NaN when there is none."""
        return float(self._derived["min"])

    @property
    def max(self) -> float:
        """Largest finite element; NaN when there is none."""
        return float(self._derived["max"])

    @property
    def finite_values(self) -> int:
        """Number of finite values; a complex element has two."""
        return (self.numel - self.nonfinite_count) * (2 if self.dtype.is_complex else 1)

    @property
    def mean(self) -> float:
        """Mean of the finite values; NaN when there is none."""
        return float(self._derived["mean"])

    @property
    def std(self) -> float:
        """Population standard deviation of the finite values, to about 1e-4 of their root mean square; or NaN."""
        return float(self._derived["std"])

    @property
    def first_nonfinite(self) -> tuple[int, ...] | None:
        """Index of the first NaN or Inf, one number per dimension; None when all elements are finite.

        The first in memory order, which for a contiguous or sparse tensor is row-major order. For a distributed tensor
        the first one on `rank`, as an index in the whole tensor; None if its shards are interleaved.
        """
        flat = self._field("first_nonfinite")
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
        flat, shards = self._field("first_nonfinite"), self._info.shards
        return None if shards is None or math.isinf(flat) else shards.split(flat)[0]

    @property
    def bad_ranks(self) -> int | None:
        """Number of ranks whose shards contain NaN or Inf; None for a tensor that is not distributed."""
        return None if self._info.shards is None else int(self._row[_fields.COUNT])

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
            **({} if self._info.shards is None else {"rank": self.rank, "bad_ranks": self.bad_ranks}),
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
    with np.errstate(over="ignore", under="ignore"):
        norm: Array = _fields.l2_norm(np, rows)
    return norm
