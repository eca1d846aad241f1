"""A table that has reached the host, with the names put back: `Report`, its text, and the error it raises.

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

from gradstat import _fields
from gradstat._core.compiling import never_traced
from gradstat._core.tensors import TensorInfo
from gradstat.tensor_stats import Array, TensorStats, l2_norm_of, none_if_not_finite

_INTEGERS = ("numel", "nan_count", "inf_count", "zero_count")
_FLOATS = ("l2_norm", "min", "max", "max_abs", "mean", "std")
# What `Report.worst` can order by.
_ORDERINGS = ("severity", *_FLOATS, *_INTEGERS)
# Of the text.
_SHOWN = 20
_EXTREMES = 3
_BAD_STYLE = ' style="color:#d32f2f;font-weight:bold"'
_HEADER = ("name", "shape", "NaN", "Inf", "first bad", "norm", "min", "max", "zeros")


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
        loss_scale: float | None = None,
        total: Array | None = None,
    ) -> None:
        """``total`` is the row of all tensors of all ranks, if there are more than the table has."""
        self._total_row = total
        self._names = names
        self._table = table
        self._loss_scale = loss_scale
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
            "loss_scale": self._loss_scale,
            "total": self._total_row,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        names, missing = state["names"], state["missing"]
        infos = [TensorInfo(*info) for info in state["infos"]]
        self.__init__(  # type: ignore[misc]
            lambda: names, state["table"], infos, lambda: missing, state["what"], state["loss_scale"], state["total"]
        )

    # Totals ----------------------------------------------------------------------------------------------

    def _column(self, field: str) -> Array:
        column: Array = self._table[:, _fields.INDEX[field]]
        return column

    @functools.cached_property
    def _totals(self) -> list[float]:
        if self._total_row is not None:
            return [float(value) for value in self._total_row]
        if not len(self._table):
            return list(_fields.IDENTITY)
        with np.errstate(over="ignore", invalid="ignore"):  # sums of float64 gradients may leave its range
            return list(map(float, _fields.merge(np, self._table)))

    def _total(self, field: str) -> float:
        return self._totals[_fields.INDEX[field]]

    @functools.cached_property
    def ok(self) -> bool:
        """Whether every element of every tensor is finite."""
        rows = self._table if self._total_row is None else self._total_row
        return not np.count_nonzero(rows[..., _fields.NONFINITE])

    @property
    def loss_scale(self) -> float | None:
        """What the loss was multiplied by when these gradients were computed; it is divided out of all values here.

        None if they were not measured in a scaled step.
        """
        return self._loss_scale

    @property
    def overflowed(self) -> bool:
        """Whether the loss scale accounts for what is not finite: Inf and no NaN, in a scaled step.

        Such a step is skipped and the scale lowered, which is how loss scaling finds its scale. NaN is another
        matter, unless it comes of an Inf further down and goes when the scale has fallen.
        """
        return self._loss_scale is not None and self.inf_count > 0 and self.nan_count == 0

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
        return float(l2_norm_of(np.array(self._totals)))

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

    def rank_of(self, name: str) -> int | None:
        """The lowest rank on which the distributed tensor ``name`` holds NaN or Inf; None otherwise. See `TensorStats`.

        Raises:
            KeyError: There is no tensor of that name.
        """
        return self[name].rank

    @never_traced
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
            healthy = [stats for stats in self.worst(n, by="max_abs") if stats.ok]
            return (self.nonfinite[:n] + healthy)[:n]
        values = self.to_numpy()[by].astype(np.float64)
        order = np.argsort(-np.nan_to_num(values, nan=-math.inf), kind="stable")
        return [self._at(int(i)) for i in order[:n]]

    # Forms -----------------------------------------------------------------------------------------------

    @never_traced
    def to_numpy(self) -> npt.NDArray[np.void]:
        """A structured array, one record per tensor.

        Columns: ``name``, ``numel``, ``nan_count``, ``inf_count``, ``zero_count``, ``l2_norm``, ``min``, ``max``,
        ``max_abs``, ``mean``, ``std``, ``sum``, and ``first_nonfinite`` as a flat index in memory order, in the shard
        for a distributed tensor, -1 when all elements are finite.
        """
        count = len(self)
        width = max((len(name) for name in self.names), default=1) or 1
        floats = [(f, np.float64) for f in (*_FLOATS, "sum")]
        dtype = np.dtype(
            [("name", f"U{width}"), *((f, np.int64) for f in _INTEGERS), *floats, ("first_nonfinite", np.int64)]
        )
        out = np.zeros(count, dtype)
        if not count:
            return out
        out["name"] = self.names
        out["numel"] = [info.shape.numel() for info in self._infos]
        for field in _INTEGERS[1:]:
            out[field] = self._column(field)
        parts = np.where([info.dtype.is_complex for info in self._infos], 2, 1)
        finite = (out["numel"] - out["nan_count"] - out["inf_count"]) * parts
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            out["l2_norm"] = l2_norm_of(self._table)
            out["min"] = np.where(finite > 0, self._column("min"), np.nan)
            out["max"] = np.where(finite > 0, self._column("max"), np.nan)
            out["max_abs"] = np.maximum(np.abs(out["min"]), np.abs(out["max"]))
            out["sum"] = self._column("sum")
            out["mean"] = np.where(finite > 0, out["sum"] / finite, np.nan)
            out["std"] = _fields.std(np, out["l2_norm"] / np.sqrt(finite), out["mean"])
        first = self._column("first_nonfinite")
        out["first_nonfinite"] = np.where(np.isfinite(first), first, -1)
        for i in np.flatnonzero(np.isfinite(first)).tolist():
            shards = self._infos[i].shards
            if shards is not None:
                out["first_nonfinite"][i] = shards.split(first[i])[1]
        return out

    @never_traced
    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values; numbers that are not finite become None."""
        return {
            "ok": self.ok,
            "loss_scale": self.loss_scale,
            "overflowed": self.overflowed,
            "total_norm": none_if_not_finite(self.total_norm),
            "finite_norm": none_if_not_finite(self.finite_norm),
            "max_abs": none_if_not_finite(self.max_abs),
            "numel": self.numel,
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
            "zero_count": self.zero_count,
            "missing": list(self.missing),
            "tensors": [stats.to_dict() for stats in self],
        }

    @never_traced
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

    @never_traced
    def raise_if_nonfinite(self) -> None:
        """Raises `NonFiniteGradientError`, naming the worst tensors, if any element is NaN or Inf."""
        if self.ok:
            return
        shown = self.nonfinite[:5]
        lines = [f"  {stats.name}: {bad_words(stats)}" for stats in shown] or ["  all of them on other ranks"]
        if len(self.nonfinite) > len(shown):
            lines.append(f"  and {len(self.nonfinite) - len(shown)} more")
        raise NonFiniteGradientError(
            f"{len(self.nonfinite)} of {len(self)} {self._what}{'s' * (len(self) != 1)} not finite "
            f"({self.nan_count} NaN, {self.inf_count} Inf){_at_scale(self.loss_scale)}:\n" + "\n".join(lines),
            self,
        )

    def __repr__(self) -> str:
        state = "ok" if self.ok else f"{len(self.nonfinite)} not finite"
        return f"Report({len(self)} {self._what}s, {state}, total_norm={self.total_norm:.6g})"

    @never_traced
    def __str__(self) -> str:
        return _text(self, self._what)

    def _repr_html_(self) -> str:
        return _page(self, self._what)


# Text: bad tensors first, then the extremes ---------------------------------------------------------------------


def bad_words(stats: TensorStats) -> str:
    """How many elements of a tensor are bad and where the first one is, in words."""
    counts = [f"{n} {kind}" for n, kind in ((stats.nan_count, "NaN"), (stats.inf_count, "Inf")) if n]
    first = stats.first_nonfinite
    where = "" if first is None else f" at [{', '.join(map(str, first))}]"
    if stats.rank is not None:
        where += f" on rank {stats.rank}" + f" (of {stats.bad_ranks} ranks that have some)" * (
            (stats.bad_ranks or 0) > 1
        )
    place = f"first{where} (shape {tuple(stats.shape)}, {stats.dtype})"
    return f"{' and '.join(counts)} of {stats.numel} elements, {place}"


def _at_scale(loss_scale: float | None) -> str:
    """The circumstance of a scaled step, in words to be appended; nothing for others."""
    return "" if loss_scale is None else f" at loss scale {loss_scale:g}"


def _headline(report: Report, what: str) -> str:
    if not len(report):
        return f"gradstat: no {what} to check"
    if report.ok:
        return (
            f"gradstat: {len(report)} {what}{'s' * (len(report) != 1)} of {report.numel:,} elements, all finite, "
            f"norm {report.total_norm:.4g}, largest |x| {_short(report.max_abs)}"
        )
    return (
        f"gradstat: {len(report.nonfinite)} of {len(report)} {what}{'s' * (len(report) != 1)} "
        f"{'OVERFLOWED' if report.overflowed else 'NOT FINITE'}: {report.nan_count:,} NaN and {report.inf_count:,} Inf "
        f"in {report.numel:,} elements{_at_scale(report.loss_scale)}"
    )


def _sections(report: Report) -> list[tuple[str, list[TensorStats]]]:
    """What the text and the HTML show: the bad ones, then the extremes of the healthy ones."""
    sections = []
    if report.nonfinite:
        sections.append(("not finite, worst first", report.nonfinite[:_SHOWN]))
    healthy = [stats for stats in report.worst(len(report), by="l2_norm") if stats.ok]
    if len(healthy) <= 2 * _EXTREMES:
        sections.append(("by norm", healthy))
    else:
        sections.append(("largest norm", healthy[:_EXTREMES]))
        sections.append(("smallest norm", healthy[-_EXTREMES:]))
    return [(title, rows) for title, rows in sections if rows]


def _footers(report: Report, what: str) -> list[str]:
    lines = []
    if report.overflowed:
        lines.append("Inf and no NaN: the loss scale was too large. The step is skipped and the scale lowered")
    elif report.loss_scale is not None and report.nan_count and report.inf_count:
        lines.append("NaN beside Inf may come of it (Inf - Inf). If it stays while the loss scale falls, it does not")
    if len(report.nonfinite) > _SHOWN:
        lines.append(f"... and {len(report.nonfinite) - _SHOWN} more that are not finite")
    if report.missing:
        shown = ", ".join(report.missing[:_SHOWN])
        more = f" and {len(report.missing) - _SHOWN} more" if len(report.missing) > _SHOWN else ""
        lines.append(f"no {what} ({len(report.missing)}): {shown}{more}")
    return lines


def _text(report: Report, what: str) -> str:
    """A table for terminals and logs; ``what`` says what the tensors are."""
    sections = [(title, [_cells(stats) for stats in rows]) for title, rows in _sections(report)]
    every = [_HEADER, *(cells for _, rows in sections for cells in rows)]
    widths = [max(len(cells[c]) for cells in every) for c in range(len(_HEADER))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)
        ]
        return "  " + "  ".join(padded).rstrip()

    out = [_headline(report, what)]
    for title, rows in sections:
        out += [f"{title}:", line(_HEADER), *(line(cells) for cells in rows)]
    return "\n".join(out + _footers(report, what))


def _page(report: Report, what: str) -> str:
    """The same as HTML, with names escaped."""
    parts = [f"<p><b>{html.escape(_headline(report, what))}</b></p>"]
    for title, rows in _sections(report):
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEADER)
        body = "".join(
            f"<tr{'' if stats.ok else _BAD_STYLE}>"
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(stats))
            + "</tr>"
            for stats in rows
        )
        parts.append(f"<p>{html.escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    return "".join(parts + [f"<p>{html.escape(line)}</p>" for line in _footers(report, what)])


def _cells(stats: TensorStats) -> tuple[str, ...]:
    return (
        stats.name,
        "x".join(map(str, stats.shape)) or "scalar",
        f"{stats.nan_count:,}" if stats.nan_count else "-",
        f"{stats.inf_count:,}" if stats.inf_count else "-",
        _place(stats),
        _short(stats.l2_norm),
        _short(stats.min),
        _short(stats.max),
        f"{stats.zero_fraction:.1%}" if stats.zero_count else "-",
    )


def _place(stats: TensorStats) -> str:
    first, rank = stats.first_nonfinite, stats.rank
    index = "-" if first is None else f"[{', '.join(map(str, first))}]"
    return index if rank is None else f"{index} rank {rank}"


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"
