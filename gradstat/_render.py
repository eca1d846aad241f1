"""A report as text for terminals and logs, and as HTML for notebooks: bad tensors first, then the extremes."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Protocol

from gradstat.tensor_stats import TensorStats

_SHOWN = 20
_EXTREMES = 3
_BAD_STYLE = ' style="color:#d32f2f;font-weight:bold"'
_HEADER = ("name", "shape", "NaN", "Inf", "first bad", "norm", "min", "max", "zeros")


class Summary(Protocol):
    """What has to be known about a report to show it; `gradstat.report.Report` says what each means."""

    @property
    def ok(self) -> bool: ...
    @property
    def loss_scale(self) -> float | None: ...
    @property
    def overflowed(self) -> bool: ...
    @property
    def numel(self) -> int: ...
    @property
    def nan_count(self) -> int: ...
    @property
    def inf_count(self) -> int: ...
    @property
    def total_norm(self) -> float: ...
    @property
    def max_abs(self) -> float: ...
    @property
    def missing(self) -> tuple[str, ...]: ...
    @property
    def nonfinite(self) -> list[TensorStats]: ...
    def worst(self, n: int, by: str) -> list[TensorStats]: ...
    def __len__(self) -> int: ...


def _headline(report: Summary, what: str) -> str:
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
        f"in {report.numel:,} elements{at_scale(report.loss_scale)}"
    )


def at_scale(loss_scale: float | None) -> str:
    """The circumstance of a scaled step, in words to be appended; nothing for others."""
    return "" if loss_scale is None else f" at loss scale {loss_scale:g}"


def _sections(report: Summary) -> list[tuple[str, list[TensorStats]]]:
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


def _footers(report: Summary, what: str) -> list[str]:
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


def text(report: Summary, what: str) -> str:
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


def page(report: Summary, what: str) -> str:
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
