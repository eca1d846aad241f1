"""`Report`, made from a table on the host and the tensors' names, with its text, and the error it raises.

Values are derived when they are read. A report holds the table, the names and the layouts, but no tensor, so keeping a
report keeps no gradient alive.
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
from gradstat._core.text import and_more, columns, count_of, lines_of, listed, nan_and_inf, printable
from gradstat.tensor_stats import FLOATS, INTEGERS, L2_NORM, Array, Judged, OneRow, RowValues, TensorStats, row_value

# Valid values of ``by`` in `Report.worst`.
_ORDERINGS = ("severity", *FLOATS, *INTEGERS)
# Rows shown in the text.
_SHOWN = 20
_EXTREMES = 3
_NONFINITE_STYLE = ' style="color:#d32f2f;font-weight:bold"'
# Said of two or more gradients if those with NaN or Inf, times this, are at least as many as all.
_NEARLY_ALL = 1.1
_CULPRIT = "  gradstat.monitor.find_culprit(model, lambda: criterion(model(inputs), targets).backward())"
_ORIGIN = "{} gradients are affected. The cause is in the forward pass or early in the backward pass. To find it:"
# Weights of which that can be said; and what is said of them.
_FEW = 3
_BEHIND = "the cause is in the forward pass, or in the backward pass of a later layer. To find it:"
_HEADER = ("name", "shape", "NaN", "Inf", "first at", "norm", "min", "max", "zeros")


class NonFiniteGradientError(RuntimeError):
    """Gradients contain NaN or Inf. The message names the worst gradients, with counts and the first index.

    Attributes:
        report: The whole `Report`.
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report


class Report(Judged, OneRow):
    """The statistics of many tensors at one moment. Iterates over `TensorStats`; ``report[name]`` returns one.

    Returned by `check`, `check_async` and `check_tensors`. Totals are over all measured tensors. In a condition it is
    true only if it is `ok`.

    Attributes:
        loss_scale: The factor that the loss was multiplied by, divided out of all values here, or None if there was
            none.
        refused: Why a `gradstat.SpikeGuard` refused the step, as in `gradstat.GuardCounts`; empty if it did not.
    """

    _place = ()
    total_norm: float = row_value("l2_norm", L2_NORM)

    def __init__(
        self,
        names: Callable[[], Sequence[str]],
        table: Array,
        infos: Sequence[TensorInfo],
        missing: Callable[[], Sequence[str]] = tuple,
        what: str = "gradient",
        loss_scale: float | None = None,
        total: Array | None = None,
        refused: tuple[str, ...] = (),
    ) -> None:
        """``total`` is the merged row over all tensors of all ranks, if these are more than the table has."""
        self.loss_scale: float | None = loss_scale
        self.refused: tuple[str, ...] = refused
        self._names, self._table, self._infos, self._missing = names, table, infos, missing
        self._what, self._total_row = what, total

    def __reduce__(self) -> tuple[Any, ...]:
        names, missing = functools.partial(tuple, self.names), functools.partial(tuple, self.missing)
        infos = tuple(self._infos)
        arguments = (names, self._table, infos, missing, self._what, self.loss_scale, self._total_row, self.refused)
        return Report, arguments

    @functools.cached_property
    def _row(self) -> Array:
        if self._total_row is not None:
            return self._total_row
        if not len(self._table):
            return np.array(_fields.IDENTITY)
        with np.errstate(over="ignore", invalid="ignore"):  # sums of float64 gradients may overflow
            return np.asarray(_fields.merge(np, self._table))

    @functools.cached_property
    def _values(self) -> RowValues:  # type: ignore[override]
        return RowValues(self._row, self.numel, self.numel)

    @functools.cached_property
    def _each(self) -> RowValues:
        """The values of each tensor."""
        numel, is_complex = np.array([(i.numel, i.dtype.is_complex) for i in self._infos], np.int64).reshape(-1, 2).T
        return RowValues(self._table, numel, numel * (1 + is_complex))

    @functools.cached_property
    def ok(self) -> bool:
        """Whether every element of every tensor is finite. False if nothing was checked, as before ``backward()``."""
        rows = self._table if self._total_row is None else self._total_row
        return bool(len(rows)) and not np.count_nonzero(rows[..., _fields.NONFINITE])

    @property
    def overflowed(self) -> bool:
        """Whether the loss scale explains what is not finite: Inf but no NaN, in a scaled step.

        Such a step is skipped and the scale lowered, which is how loss scaling finds its scale. The scale does not
        explain NaN, except for NaN that an Inf caused in the backward pass and that disappears with a lower scale.
        """
        return self.loss_scale is not None and self.inf_count > 0 and self.nan_count == 0

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements in all tensors."""
        return sum(info.numel for info in self._infos)

    @functools.cached_property
    def missing(self) -> tuple[str, ...]:
        """Names of parameters that require a gradient and have none."""
        return tuple(self._missing())

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors or parameters, in order."""
        return tuple(self._names())

    @functools.cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def _at(self, position: int) -> TensorStats:
        return TensorStats(self.names[position], self._infos[position], self._each, position)

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[TensorStats]:
        return map(self._at, range(len(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._position

    def __getitem__(self, key: str | int) -> TensorStats:
        if isinstance(key, int):
            return self._at(range(len(self))[key])
        if key in self._position:
            return self._at(self._position[key])
        if key in self.missing:
            raise KeyError(f"{key!r} has no {self._what}; see report.missing")
        raise KeyError(f"no tensor named {key!r} in this report; see report.names")

    @functools.cached_property
    def nonfinite(self) -> list[TensorStats]:
        """The tensors that contain NaN or Inf, worst first: most NaN, then most Inf, then in order."""
        nan, inf = self._each.field("nan_count"), self._each.field("inf_count")
        nonfinite = np.flatnonzero(nan + inf)
        return [self._at(int(i)) for i in nonfinite[np.lexsort((-inf[nonfinite], -nan[nonfinite]))]]

    def rank_of(self, name: str) -> int | None:
        """`TensorStats.rank` of the tensor ``name``; KeyError if there is no such tensor."""
        return self[name].rank

    @never_traced
    def worst(self, n: int = 10, by: str = "severity") -> list[TensorStats]:
        """The ``n`` most conspicuous tensors, worst first.

        Args:
            n: Maximum number of tensors.
            by: ``"severity"``: tensors with NaN or Inf first, then by largest magnitude. Or a value of
                `TensorStats`, largest first: ``l2_norm``, ``max_abs``, ``nan_count``, ``inf_count``, ``zero_count``,
                ``mean``, ``std``, ``min``, ``max``, ``numel``. ValueError for anything else.
        """
        if by not in _ORDERINGS:
            raise ValueError(f"cannot order by {by!r}; known: {', '.join(_ORDERINGS)}")
        if by == "severity":
            healthy = [stats for stats in self.worst(n, by="max_abs") if stats.ok]
            return (self.nonfinite[:n] + healthy)[:n]
        values = self.to_numpy()[by].astype(np.float64)
        undefined = math.inf if by == "l2_norm" else -math.inf  # a norm that is NaN is not a small one
        order = np.argsort(-np.nan_to_num(values, nan=undefined, posinf=math.inf, neginf=-math.inf), kind="stable")
        return [self._at(int(i)) for i in order[:n]]

    # Output formats; the text lists nonfinite tensors first, then the extremes ---------------------------------------

    @never_traced
    def to_numpy(self) -> npt.NDArray[np.void]:
        """A structured array, one record per tensor.

        Columns: ``name``, ``numel``, ``nan_count``, ``inf_count``, ``zero_count``, ``l2_norm``, ``min``, ``max``,
        ``max_abs``, ``mean``, ``std``, ``sum``, and ``first_nonfinite``, a flat index in memory order (for a
        distributed tensor, in its shard), -1 when all elements are finite.
        """
        width = max((len(name) for name in self.names), default=1) or 1
        integers, floats = [(f, np.int64) for f in INTEGERS], [(f, np.float64) for f in (*FLOATS, "sum")]
        out = np.zeros(len(self), [("name", f"U{width}"), *integers, *floats, ("first_nonfinite", np.int64)])
        out["name"] = self.names
        for field, _ in (*integers, *floats):
            out[field] = self._each.column(field)
        first = self._each.field("first_nonfinite")
        out["first_nonfinite"] = np.where(np.isfinite(first), first, -1)
        for i in np.flatnonzero(np.isfinite(first)).tolist():
            shards = self._infos[i].shards
            if shards is not None:
                out["first_nonfinite"][i] = shards.split(first[i])[1]
        return out

    @never_traced
    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-serializable values; numbers that are not finite become None."""
        return {
            "ok": self.ok,
            "loss_scale": self.loss_scale,
            "overflowed": self.overflowed,
            **self._json("total_norm", "finite_norm", "max_abs", *INTEGERS),
            "missing": list(self.missing),
            "tensors": [stats.to_dict() for stats in self],
        }

    @never_traced
    def scalars(self, prefix: str = "grad/", per_tensor: Sequence[str] = ()) -> dict[str, float]:
        """Flat floats for any logger.

        Args:
            prefix: Prepended to every key.
            per_tensor: Columns of `to_numpy` to add for every tensor, as ``prefix + column + "/" + name``. ValueError
                for an unknown one.
        """
        totals = {
            "total_norm": self.total_norm,
            "max_abs": self.max_abs,
            "nan_count": float(self.nan_count),
            "inf_count": float(self.inf_count),
            "zero_fraction": self.zero_fraction,
        }
        if per_tensor:
            array = self.to_numpy()
            columns = (array.dtype.names or ())[1:]
            for column in per_tensor:
                if column not in columns:
                    raise ValueError(f"unknown column {column!r}; known: {', '.join(columns)}")
                values = array[column].astype(np.float64).tolist()
                totals |= {f"{column}/{name}": value for name, value in zip(self.names, values, strict=True)}
        return {prefix + key: value for key, value in totals.items()}

    @never_traced
    def raise_if_nonfinite(self) -> None:
        """Raises `NonFiniteGradientError`, which names the worst tensors, unless `ok`."""
        if self.ok:
            return
        if self._is_empty:
            raise NonFiniteGradientError(self._headline(), self)
        title = (
            f"{len(self.nonfinite)} of {count_of(len(self), self._what)} not finite "
            f"({self.nan_count:,} NaN, {self.inf_count:,} Inf){_at_scale(self.loss_scale)}:"
        )
        bad = [] if self._origin else lines_of(self.nonfinite, 5, nonfinite_line) or ["  all of them on other ranks"]
        raise NonFiniteGradientError("\n".join([title, *self._origin, *bad, *self._advice]), self)

    @property
    def _is_empty(self) -> bool:
        """Whether there was nothing to check, here and on other ranks."""
        return not len(self._table) and self._total_row is None

    def __repr__(self) -> str:
        state = "ok" if self.ok else "nothing checked" if self._is_empty else f"{len(self.nonfinite)} not finite"
        return f"Report({len(self)} {self._what}s, {state}, total_norm={self.total_norm:.6g})"

    @never_traced
    def __str__(self) -> str:
        sections, out = self._sections(), [self._headline()]
        header, *lines = columns([_HEADER, *(_cells(stats) for _, rows in sections for stats in rows)])
        for title, rows in sections:
            out += [f"{title}:", f"  {header}", *(f"  {lines.pop(0)}" for _ in rows)]
        return "\n".join(out + self._footers())

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Sequence[str], style: str = "") -> str:
            return f"<tr{style}>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        parts = [f"<p><b>{html.escape(self._headline())}</b></p>"]
        for title, rows in self._sections():
            body = "".join(row("td", _cells(stats), "" if stats.ok else _NONFINITE_STYLE) for stats in rows)
            head = row("th", _HEADER)
            parts.append(f"<p>{html.escape(title)}</p><table><thead>{head}</thead><tbody>{body}</tbody></table>")
        return "".join(parts + [f"<p>{html.escape(line)}</p>" for line in self._footers()])

    def _headline(self) -> str:
        count, what = len(self), self._what
        if self._is_empty:
            hint = f": none of {count_of(len(self.missing), 'parameter')} has one. Call backward() first"
            return f"gradstat: no {what} to check{hint * bool(self.missing)}"
        things = count_of(count, what)
        if self.ok:
            return (
                f"gradstat: {things} of {self.numel:,} elements, all finite, norm {self.total_norm:.4g}, "
                f"largest |x| {_short(self.max_abs)}"
            )
        return (
            f"gradstat: {len(self.nonfinite)} of {things} {'OVERFLOWED' if self.overflowed else 'NOT FINITE'}: "
            f"{self.nan_count:,} NaN and {self.inf_count:,} Inf in {self.numel:,} elements{_at_scale(self.loss_scale)}"
        )

    def _sections(self) -> list[tuple[str, list[TensorStats]]]:
        """The sections of the text and the HTML: nonfinite tensors, then the extremes of the healthy ones."""
        healthy = [stats for stats in self.worst(len(self), by="l2_norm") if stats.ok]
        sections = [("not finite, worst first", [] if self._origin else self.nonfinite[:_SHOWN])]
        if len(healthy) <= 2 * _EXTREMES:
            sections.append(("by norm", healthy))
        else:
            sections += [("largest norm", healthy[:_EXTREMES]), ("smallest norm", healthy[-_EXTREMES:])]
        return [(title, rows) for title, rows in sections if rows]

    @functools.cached_property
    def _origin(self) -> tuple[str, ...]:
        """What to do if nearly all gradients have NaN, since then none of them is the first; empty if not.

        Or nearly all weights up to some depth, as where the forward pass makes NaN: some biases stay finite.
        """
        if self._what != "gradient" or not self.nan_count or len(self) < 2:
            return ()
        if len(self) <= _NEARLY_ALL * len(self.nonfinite):
            return _ORIGIN.format("All" if len(self) == len(self.nonfinite) else "Nearly all"), _CULPRIT
        last = _deepest_nan(self._infos, self._each.field("nan_count"))
        if last is None or len(self) > 2 * len(self.nonfinite):
            return ()
        return f"Nearly all weights up to {printable(self.names[last])} are affected: {_BEHIND}", _CULPRIT

    @property
    def _advice(self) -> tuple[str, ...]:
        """What to do if only some gradients have NaN; empty if not."""
        is_some = self._what == "gradient" and self.nan_count and not self._origin
        return ("To find the line of code that made the first NaN:", _CULPRIT) if is_some else ()

    def _footers(self) -> list[str]:
        lines = [*self._origin]
        if self.overflowed:
            lines.append("Inf and no NaN: the loss scale was too large. The step is skipped and the scale lowered")
        elif self.loss_scale is not None and self.nan_count and self.inf_count:
            lines.append(
                "NaN may result from Inf (Inf - Inf). If NaN remains while the loss scale falls, it has another cause"
            )
        if not self._origin:
            lines.append(and_more(len(self.nonfinite) - _SHOWN, "... and {} more that are not finite"))
            lines += self._advice
        if self.missing:
            lines.append(f"no {self._what} ({len(self.missing)}): {listed(self.missing, _SHOWN)}")
        return [line for line in lines if line]


def _deepest_nan(infos: Sequence[TensorInfo], nan_counts: Array) -> int | None:
    """The last weight with NaN, if nearly all before it have NaN, too, and they are some."""
    weights = [i for i, info in enumerate(infos) if len(info.shape) > 1]
    bad = np.flatnonzero(nan_counts[weights])
    is_prefix = len(bad) >= _FEW and bad[-1] + 1 <= _NEARLY_ALL * len(bad)
    return weights[bad[-1]] if is_prefix else None


def nonfinite_words(stats: TensorStats) -> str:
    """How many elements of a tensor are not finite and where the first one is, in words."""
    first = stats.first_nonfinite
    where = "" if first is None else f" at {list(first)}"
    if stats.rank is not None:
        others = f" (of {stats.nonfinite_ranks} ranks with NaN or Inf)"
        where += f" on rank {stats.rank}{others * ((stats.nonfinite_ranks or 0) > 1)}"
    return f"{nan_and_inf(stats.nan_count, stats.inf_count)} of {stats.numel:,} elements, first{where}"


def nonfinite_line(stats: TensorStats) -> str:
    """The tensor's name, its `nonfinite_words`, shape and dtype, as an indented line."""
    return f"  {printable(stats.name)}: {nonfinite_words(stats)} (shape {tuple(stats.shape)}, {stats.dtype})"


def _at_scale(loss_scale: float | None) -> str:
    """The loss scale in words to be appended; empty if there was none."""
    return "" if loss_scale is None else f" at loss scale {loss_scale:g}"


def _cells(stats: TensorStats) -> tuple[str, ...]:
    return (
        printable(stats.name),
        "x".join(map(str, stats.shape)) or "scalar",
        f"{stats.nan_count:,}" if stats.nan_count else "-",
        f"{stats.inf_count:,}" if stats.inf_count else "-",
        _place(stats),
        f"{stats.l2_norm:.3g}",
        _short(stats.min),
        _short(stats.max),
        f"{stats.zero_fraction:.1%}" if stats.zero_count else "-",
    )


def _place(stats: TensorStats) -> str:
    index = "-" if stats.first_nonfinite is None else str(list(stats.first_nonfinite))
    return index if stats.rank is None else f"{index} rank {stats.rank}"


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value + 0.0:.3g}"  # + 0.0: -0.0 becomes 0
