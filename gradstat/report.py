"""A table that has reached the host, with the names put back: `Report`, `TensorStats` and the error.

Nothing is derived before it is read. What a report holds is the table, the names and the layouts; never a
tensor, so keeping a report keeps no gradient alive.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradstat import _fields
from gradstat._tensors import TensorInfo

Array = npt.NDArray[np.float64]

# The derived values a tensor has besides the stored fields, each with its function of a table.
_ORDERINGS = (
    "severity",
    "l2_norm",
    "max_abs",
    "nan_count",
    "inf_count",
    "zero_count",
    "mean",
    "std",
    "min",
    "max",
    "numel",
)


class NonFiniteGradientError(RuntimeError):
    """Gradients hold NaN or Inf; the message names the first bad ones, how many and where.

    Attributes:
        report: The whole `Report`.
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.report)


class TensorStats:
    """What is known about one tensor. All values are Python numbers, computed when read.

    Counts are of elements; an element of a complex tensor is NaN if either part is, else Inf if either part
    is, and zero if both are. ``sum``, ``l2_norm``, ``min``, ``max``, ``max_abs``, ``mean`` and ``std`` run over
    the finite elements, for complex ones over their real and imaginary parts.
    """

    __slots__ = ("_info", "_row", "name")

    def __init__(self, name: str, row: Array, info: TensorInfo) -> None:
        self.name = name
        self._row = row
        self._info = info

    def _field(self, field: str) -> float:
        return float(self._row[_fields.INDEX[field]])

    @property
    def shape(self) -> torch.Size:
        """Sizes; of the local shard for a distributed tensor, of the values for a sparse one."""
        return self._info.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._info.dtype

    @property
    def device(self) -> torch.device:
        return self._info.device

    @property
    def numel(self) -> int:
        """Elements."""
        return self._info.shape.numel()

    @property
    def nan_count(self) -> int:
        """NaN elements."""
        return int(self._field("nan_count"))

    @property
    def inf_count(self) -> int:
        """Elements that are +Inf or -Inf."""
        return int(self._field("inf_count"))

    @property
    def zero_count(self) -> int:
        """Elements equal to zero, of either sign."""
        return int(self._field("zero_count"))

    @property
    def nonfinite_count(self) -> int:
        """NaN and Inf elements together."""
        return self.nan_count + self.inf_count

    @property
    def ok(self) -> bool:
        """Whether every element is finite."""
        return self.nonfinite_count == 0

    @property
    def sum(self) -> float:
        """Sum of the finite elements; infinite if it exceeds float64."""
        return self._field("sum")

    @property
    def l2_norm(self) -> float:
        """Square root of the sum of squares of the finite elements."""
        return float(_l2_norm(self._row))

    @property
    def min(self) -> float:
        """Smallest finite element; NaN when there is none."""
        return _nan_if_infinite(self._field("min"))

    @property
    def max(self) -> float:
        """Largest finite element; NaN when there is none."""
        return _nan_if_infinite(self._field("max"))

    @property
    def max_abs(self) -> float:
        """Largest magnitude of a finite element; NaN when there is none."""
        return max(abs(self.min), abs(self.max))

    @property
    def finite_values(self) -> int:
        """Finite elements; two for each complex one."""
        return (self.numel - self.nonfinite_count) * (2 if self.dtype.is_complex else 1)

    @property
    def mean(self) -> float:
        """Mean of the finite elements; NaN when there is none."""
        return self.sum / self.finite_values if self.finite_values else math.nan

    @property
    def std(self) -> float:
        """Population standard deviation of the finite elements; NaN when there is none.

        From the sums, as sqrt(mean of squares - squared mean): relative to the root mean square it is good to
        about 1e-4, so the spread of nearly constant elements is lost in it.
        """
        if not self.finite_values:
            return math.nan
        rms = self.l2_norm / math.sqrt(self.finite_values)
        return math.sqrt(max(rms - abs(self.mean), 0.0)) * math.sqrt(rms + abs(self.mean))

    @property
    def zero_fraction(self) -> float:
        """Share of elements that are zero; NaN for a tensor without elements."""
        return self.zero_count / self.numel if self.numel else math.nan

    @property
    def first_nonfinite(self) -> tuple[int, ...] | None:
        """Index of the first NaN or Inf, one number per dimension; None when all are finite.

        The first in memory order, which for a contiguous tensor is row-major order.
        """
        flat = self._field("first_nonfinite")
        if math.isinf(flat):
            return None
        shape, order = self.shape, self._info.order
        if order is None:
            return tuple(int(i) for i in np.unravel_index(int(flat), shape))
        in_order = np.unravel_index(int(flat), [shape[d] for d in order])
        index = dict(zip(order, in_order, strict=True))
        return tuple(int(index[d]) for d in range(len(shape)))

    def to_dict(self) -> dict[str, Any]:
        """Everything above as JSON-able values: numbers, strings, lists, None for what is not defined."""
        first = self.first_nonfinite
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "numel": self.numel,
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
            "zero_count": self.zero_count,
            **{
                key: _none_if_not_finite(getattr(self, key))
                for key in ("l2_norm", "min", "max", "max_abs", "mean", "std")
            },
            "first_nonfinite": list(first) if first is not None else None,
        }

    def __repr__(self) -> str:
        where = f", first_nonfinite={self.first_nonfinite}" if not self.ok else ""
        return (
            f"TensorStats({self.name!r}, shape={tuple(self.shape)}, nan_count={self.nan_count}, "
            f"inf_count={self.inf_count}, l2_norm={self.l2_norm:.6g}, min={self.min:.6g}, max={self.max:.6g}{where})"
        )


class Report:
    """The statistics of many tensors at one moment. Iterates over `TensorStats`; ``report[name]`` finds one.

    Made by `check`, `check_async` and `check_tensors`. Totals run over all tensors measured.
    """

    def __init__(
        self,
        names: Callable[[], Sequence[str]],
        table: Array,
        infos: Sequence[TensorInfo],
        missing: Callable[[], Sequence[str]] = tuple,
        what: str = "gradient",
    ) -> None:
        self._names = names
        self._table = table
        self._infos = infos
        self._missing = missing
        self._what = what

    def __getstate__(self) -> dict[str, Any]:
        return {
            "names": self.names,
            "table": self._table,
            "infos": [tuple(info) for info in self._infos],
            "missing": self.missing,
            "what": self._what,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        names, missing = state["names"], state["missing"]
        infos = [TensorInfo(*info) for info in state["infos"]]
        self.__init__(lambda: names, state["table"], infos, lambda: missing, state["what"])  # type: ignore[misc]

    # Totals ----------------------------------------------------------------------------------------------

    def _column(self, field: str) -> Array:
        column: Array = self._table[:, _fields.INDEX[field]]
        return column

    @functools.cached_property
    def _totals(self) -> list[float]:
        reduce: dict[str, Callable[[Array], Any]] = {"sum": np.sum, "min": np.min, "max": np.max}
        if not len(self._table):
            return [field.identity for field in _fields.FIELDS]
        return [float(reduce[f.merge](self._table[:, i])) for i, f in enumerate(_fields.FIELDS)]

    def _total(self, field: str) -> float:
        return self._totals[_fields.INDEX[field]]

    @functools.cached_property
    def ok(self) -> bool:
        """Whether every element of every tensor is finite."""
        return not self._table[:, [_fields.INDEX["nan_count"], _fields.INDEX["inf_count"]]].any()

    @property
    def nan_count(self) -> int:
        """NaN elements in all tensors."""
        return int(self._total("nan_count"))

    @property
    def inf_count(self) -> int:
        """Infinite elements in all tensors."""
        return int(self._total("inf_count"))

    @property
    def zero_count(self) -> int:
        """Zero elements in all tensors."""
        return int(self._total("zero_count"))

    @functools.cached_property
    def numel(self) -> int:
        """Elements in all tensors."""
        return sum(info.shape.numel() for info in self._infos)

    @property
    def total_norm(self) -> float:
        """L2 norm of all elements together, as torch would report it: NaN if any is NaN, else Inf if any is."""
        if self.nan_count:
            return math.nan
        return math.inf if self.inf_count else self.finite_norm

    @property
    def finite_norm(self) -> float:
        """L2 norm of the finite elements."""
        return float(_l2_norm(np.array(self._totals)))

    @property
    def max_abs(self) -> float:
        """Largest magnitude of a finite element; NaN when there is none."""
        low, high = self._total("min"), self._total("max")
        return max(abs(low), abs(high)) if low <= high else math.nan

    # Tensors ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors measured, in order."""
        return tuple(self._names())

    @functools.cached_property
    def missing(self) -> tuple[str, ...]:
        """Names of parameters that require a gradient and have none."""
        return tuple(self._missing())

    @functools.cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def _at(self, position: int) -> TensorStats:
        return TensorStats(self.names[position], self._table[position], self._infos[position])

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[TensorStats]:
        return (self._at(i) for i in range(len(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._position

    def __getitem__(self, key: str | int) -> TensorStats:
        if isinstance(key, int):
            return self._at(range(len(self))[key])
        try:
            return self._at(self._position[key])
        except KeyError:
            if key in self.missing:
                raise KeyError(f"{key!r} has no {self._what}; see report.missing") from None
            raise KeyError(f"no tensor named {key!r} in this report; see report.names") from None

    @functools.cached_property
    def nonfinite(self) -> list[TensorStats]:
        """The tensors that hold NaN or Inf, worst first: most NaN, then most Inf, then in order."""
        nan, inf = self._column("nan_count"), self._column("inf_count")
        bad = np.flatnonzero(nan + inf)
        return [self._at(int(i)) for i in bad[np.lexsort((-inf[bad], -nan[bad]))]]

    def worst(self, n: int = 10, by: str = "severity") -> list[TensorStats]:
        """The ``n`` tensors that stand out most, worst first.

        Args:
            n: How many at most.
            by: ``"severity"``: those with NaN or Inf first, then by largest magnitude. Or a value of
                `TensorStats`, largest first: ``l2_norm``, ``max_abs``, ``nan_count``, ``inf_count``, ``zero_count``,
                ``mean``, ``std``, ``min``, ``max``, ``numel``.

        Raises:
            ValueError: ``by`` is not one of these; the message lists them.
        """
        if by not in _ORDERINGS:
            raise ValueError(f"cannot order by {by!r}; known: {', '.join(_ORDERINGS)}")
        if by == "severity":
            bad = [stats.name for stats in self.nonfinite[:n]]
            rest = [stats for stats in self.worst(n, by="max_abs") if stats.ok]
            return (self.nonfinite[:n] + rest)[:n] if bad else rest[:n]
        values = self.to_numpy()[by].astype(np.float64)
        order = np.argsort(-np.nan_to_num(values, nan=-math.inf), kind="stable")
        return [self._at(int(i)) for i in order[:n]]

    # Forms -----------------------------------------------------------------------------------------------

    def to_numpy(self) -> npt.NDArray[np.void]:
        """A structured array, one record per tensor.

        Columns: ``name``, ``numel``, ``nan_count``, ``inf_count``, ``zero_count``, ``l2_norm``, ``min``, ``max``,
        ``max_abs``, ``mean``, ``std``, ``sum``, and ``first_nonfinite`` as a flat index in memory order, -1 when all
        elements are finite.
        """
        count = len(self)
        width = max((len(name) for name in self.names), default=1) or 1
        integers = ("numel", "nan_count", "inf_count", "zero_count")
        floats = ("l2_norm", "min", "max", "max_abs", "mean", "std", "sum")
        dtype = np.dtype(
            [("name", f"U{width}"), *((f, np.int64) for f in integers), *((f, np.float64) for f in floats)]
            + [("first_nonfinite", np.int64)]
        )
        out = np.zeros(count, dtype)
        if not count:
            return out
        out["name"] = self.names
        out["numel"] = [info.shape.numel() for info in self._infos]
        for field in integers[1:]:
            out[field] = self._column(field)
        parts = np.where([info.dtype.is_complex for info in self._infos], 2, 1)
        finite = (out["numel"] - out["nan_count"] - out["inf_count"]) * parts
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            out["l2_norm"] = _l2_norm(self._table.T)
            out["min"] = np.where(finite > 0, self._column("min"), np.nan)
            out["max"] = np.where(finite > 0, self._column("max"), np.nan)
            out["max_abs"] = np.maximum(np.abs(out["min"]), np.abs(out["max"]))
            out["sum"] = self._column("sum")
            out["mean"] = np.where(finite > 0, out["sum"] / finite, np.nan)
            rms, mean = out["l2_norm"] / np.sqrt(finite), np.abs(out["mean"])
            out["std"] = np.sqrt(np.maximum(rms - mean, 0.0)) * np.sqrt(rms + mean)
        first = self._column("first_nonfinite")
        out["first_nonfinite"] = np.where(np.isfinite(first), first, -1)
        return out

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values; numbers that are not finite become None."""
        return {
            "ok": self.ok,
            "total_norm": _none_if_not_finite(self.total_norm),
            "finite_norm": _none_if_not_finite(self.finite_norm),
            "max_abs": _none_if_not_finite(self.max_abs),
            "numel": self.numel,
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
            "zero_count": self.zero_count,
            "missing": list(self.missing),
            "tensors": [stats.to_dict() for stats in self],
        }

    def scalars(self, prefix: str = "grad/", per_tensor: Sequence[str] = ()) -> dict[str, float]:
        """Flat floats for any logger.

        Args:
            prefix: Put before every key.
            per_tensor: Columns of `to_numpy` to add for every tensor, as ``prefix + column + "/" + name``.

        Raises:
            ValueError: A column is not known; the message lists them.
        """
        totals = {
            "total_norm": self.total_norm,
            "max_abs": self.max_abs,
            "nan_count": float(self.nan_count),
            "inf_count": float(self.inf_count),
            "zero_fraction": self.zero_count / self.numel if self.numel else math.nan,
        }
        out = {prefix + key: value for key, value in totals.items()}
        if per_tensor:
            array = self.to_numpy()
            for column in per_tensor:
                if column == "name" or column not in (array.dtype.names or ()):
                    known = ", ".join((array.dtype.names or ())[1:])
                    raise ValueError(f"unknown column {column!r}; known: {known}")
                values = array[column].astype(np.float64).tolist()
                out.update({f"{prefix}{column}/{name}": v for name, v in zip(self.names, values, strict=True)})
        return out

    def raise_if_nonfinite(self) -> None:
        """Raises `NonFiniteGradientError`, naming the worst tensors, if any element is NaN or Inf."""
        if self.ok:
            return
        shown = self.nonfinite[:5]
        lines = [f"  {stats.name}: {_bad_words(stats)}" for stats in shown]
        if len(self.nonfinite) > len(shown):
            lines.append(f"  and {len(self.nonfinite) - len(shown)} more")
        raise NonFiniteGradientError(
            f"{len(self.nonfinite)} of {len(self)} {self._what}s are not finite "
            f"({self.nan_count} NaN, {self.inf_count} Inf):\n" + "\n".join(lines),
            self,
        )

    def __repr__(self) -> str:
        state = "ok" if self.ok else f"{len(self.nonfinite)} not finite"
        return f"Report({len(self)} {self._what}s, {state}, total_norm={self.total_norm:.6g})"

    def _headline(self) -> str:
        if not len(self):
            return f"gradstat: no {self._what} to check"
        if self.ok:
            return (
                f"gradstat: {len(self)} {self._what}s of {self.numel:,} elements, all finite, "
                f"norm {self.total_norm:.4g}, largest |x| {self.max_abs:.4g}"
            )
        return (
            f"gradstat: {len(self.nonfinite)} of {len(self)} {self._what}s are NOT FINITE: "
            f"{self.nan_count:,} NaN and {self.inf_count:,} Inf in {self.numel:,} elements"
        )

    def _sections(self) -> list[tuple[str, list[TensorStats]]]:
        """What the text and the HTML show: the bad ones, then the extremes of the healthy ones."""
        sections = []
        if self.nonfinite:
            sections.append(("not finite, worst first", self.nonfinite[:_SHOWN]))
        healthy = [stats for stats in self.worst(len(self), by="l2_norm") if stats.ok]
        if len(healthy) <= 2 * _EXTREMES:
            sections.append(("by norm", healthy))
        else:
            sections.append(("largest norm", healthy[:_EXTREMES]))
            sections.append(("smallest norm", healthy[-_EXTREMES:]))
        return [(title, rows) for title, rows in sections if rows]

    def _footers(self) -> list[str]:
        lines = []
        if len(self.nonfinite) > _SHOWN:
            lines.append(f"... and {len(self.nonfinite) - _SHOWN} more that are not finite")
        if self.missing:
            shown = ", ".join(self.missing[:_SHOWN])
            more = f" and {len(self.missing) - _SHOWN} more" if len(self.missing) > _SHOWN else ""
            lines.append(f"no {self._what} ({len(self.missing)}): {shown}{more}")
        return lines

    def __str__(self) -> str:
        sections = [(title, [_cells(stats) for stats in rows]) for title, rows in self._sections()]
        every = [_HEADER, *(cells for _, rows in sections for cells in rows)]
        widths = [max(len(cells[c]) for cells in every) for c in range(len(_HEADER))]

        def line(cells: Sequence[str]) -> str:
            padded = [cells[0].ljust(widths[0])] + [
                cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)
            ]
            return "  " + "  ".join(padded).rstrip()

        out = [self._headline()]
        for title, rows in sections:
            out += [f"{title}:", line(_HEADER), *(line(cells) for cells in rows)]
        return "\n".join(out + self._footers())

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(self._headline())}</b></p>"]
        for title, rows in self._sections():
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEADER)
            body = "".join(
                f"<tr{'' if stats.ok else _BAD_STYLE}>"
                + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(stats))
                + "</tr>"
                for stats in rows
            )
            parts.append(
                f"<p>{html.escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            )
        return "".join(parts + [f"<p>{html.escape(line)}</p>" for line in self._footers()])


_SHOWN = 20
_EXTREMES = 3
_BAD_STYLE = ' style="color:#b00020;font-weight:bold"'
_HEADER = ("name", "shape", "NaN", "Inf", "first bad", "norm", "min", "max", "zeros")


def _cells(stats: TensorStats) -> tuple[str, ...]:
    first = stats.first_nonfinite
    return (
        stats.name,
        "x".join(map(str, stats.shape)) or "scalar",
        f"{stats.nan_count:,}" if stats.nan_count else "-",
        f"{stats.inf_count:,}" if stats.inf_count else "-",
        f"[{', '.join(map(str, first))}]" if first is not None else "-",
        _short(stats.l2_norm),
        _short(stats.min),
        _short(stats.max),
        f"{stats.zero_fraction:.1%}" if stats.zero_count else "-",
    )


def _bad_words(stats: TensorStats) -> str:
    counts = [f"{n} {kind}" for n, kind in ((stats.nan_count, "NaN"), (stats.inf_count, "Inf")) if n]
    where = ", ".join(map(str, stats.first_nonfinite or ()))
    place = f"first at [{where}] (shape {tuple(stats.shape)}, {stats.dtype})"
    return f"{' and '.join(counts)} of {stats.numel} elements, {place}"


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _l2_norm(rows: Array) -> Array:
    """L2 norms from columns stacked along the first dimension."""
    with np.errstate(over="ignore", under="ignore"):
        norm: Array = _fields.l2_norm(
            np, *(rows[_fields.INDEX[name]] for name in ("sq_sum", "sq_sum_large", "sq_sum_small"))
        )
    return norm


def _nan_if_infinite(value: float) -> float:
    return math.nan if math.isinf(value) else value


def _none_if_not_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
