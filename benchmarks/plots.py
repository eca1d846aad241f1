"""Draws the documents' charts, from recorded rows only.

``python benchmarks/plots.py`` writes ``docs/charts/<device>-<chart>.png`` for every device with rows for the chart.
The same rows give the same picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import rows
from cases import CHECK, CLIP, FOREACH_NORM, NAIVE, TORCH_CLIP
from rows import Row
from tables import AUTO, STEADY, in_time, limits

from gradstat.bench import machine, steps
from gradstat.bench.steps import in_bytes

ROOT = Path(__file__).resolve().parent.parent
CHARTS = ROOT / "docs" / "charts"

_GRADSTAT, _TORCH, _NAIVE, _ANOMALY, _INK, _GRID = "#1f6feb", "#767676", "#d9770b", "#d81b4a", "#1b1f24", "#e4e6e9"
_STEP_COLORS = {
    steps.CHECK: _GRADSTAT,
    steps.CHECK_ASYNC: _GRADSTAT,
    steps.MONITOR: _GRADSTAT,
    AUTO: _GRADSTAT,
    steps.CLIP: _GRADSTAT,
    steps.GUARDED: _GRADSTAT,
    steps.TORCH_CLIP: _TORCH,
    steps.TORCH_CLIP_CHECKED: _TORCH,
    steps.LOSS_ITEM: _TORCH,
    steps.NAIVE: _NAIVE,
    steps.ANOMALY_WITHOUT_NAN: "#f08aa4",
    steps.ANOMALY: _ANOMALY,
}
_LINES = {
    CHECK: (_GRADSTAT, "-", "o"),
    CLIP: ("#6ea8ff", "-", "s"),
    FOREACH_NORM: ("#a3a3a3", "-", "^"),
    TORCH_CLIP: (_TORCH, "-", "D"),
    NAIVE: (_NAIVE, "-", "v"),
}


def step_overhead(members: Sequence[Row], path: Path) -> None:
    """Bars: what each variant adds to the time of each training step, with quartiles, and to its peak memory.

    For an added call this is its own time within the step, if measured; for anomaly mode the ratio of whole steps.
    """
    from matplotlib.ticker import MaxNLocator

    ratios = _shares(members)
    memory = {(r.case, r.provider): r.value for r in members if r.metric == "extra memory"}
    plain = {r.case: r.value for r in members if r.metric == "wall time" and r.provider == steps.PLAIN}
    cases = list(plain)
    names = [name for name in _STEP_COLORS if any(r.provider == name for r in ratios)]
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    figure, axes = _figure(4.2 * columns + 1.2, 0.7 + (0.9 + 0.34 * len(names)) * lines, lines, columns)
    top = max(0.1, *(100 * ((r.high or r.value) - 1) for r in ratios))
    for place, ax in enumerate(axes.flat):
        if place >= len(cases):
            ax.set_visible(False)
            continue
        case = cases[place]
        shown = {r.provider: r for r in ratios if r.case == case}
        for y, name in enumerate(names):
            row = shown.get(name)
            if row is None:
                continue
            added, low, high = (100 * ((v or row.value) - 1) for v in (row.value, row.low, row.high))
            ax.barh(y, added, color=_STEP_COLORS[name], height=0.68)
            ax.plot([low, high], [y, y], color=_INK, linewidth=1.1)
            extra = memory.get((case, name), 0)
            label = f"{added:+.1f} %" if abs(added) < 10 else f"{added:+.0f} %"
            label += f"  ({in_bytes(extra)})" if extra >= 1e5 else ""
            ax.text(max(high, added, 0) + 0.015 * top, y, label, va="center", fontsize=9, color=_INK)
        ax.set_title(f"{case}  ({in_time(plain[case])})", loc="left", fontsize=10.5, color=_INK)
        ax.set_yticks(range(len(names)), [name.removeprefix("+ ") for name in names], fontsize=9.5)
        ax.tick_params(axis="y", length=0, labelleft=place % columns == 0)
        ax.invert_yaxis()
        ax.axvline(0, color=_INK, linewidth=0.9)
        ax.set_xlim(min(-2.0, *(100 * ((r.low or r.value) - 1) for r in ratios)), 1.38 * top)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter("{x:g} %")
        ax.grid(axis="x", color=_GRID, linewidth=0.8)
        ax.set_axisbelow(True)
    title = "Time added to a training step (in brackets: peak memory added, where 0.1 MB or more)"
    if any(r.metric == "time inside" for r in members):
        title += "\nadded calls timed alone, anomaly mode by whole steps"
    _finish(figure, title, members, path)


def _shares(members: Sequence[Row]) -> list[Row]:
    plain = {r.case: r.value for r in members if r.metric == "wall time" and r.provider == steps.PLAIN}
    inside = {(r.case, r.provider): r for r in members if r.metric == "time inside"}
    shares = []
    for row in (row for row in members if row.metric == "time ratio"):
        call = inside.get((row.case, row.provider))
        if call is not None:
            low, value, high = (1 + (v or call.value) / plain[row.case] for v in (call.low, call.value, call.high))
            row = replace(row, low=low, value=value, high=high)
        shares.append(row)
    return shares


_SIZES: dict[str, tuple[str, Callable[[float], str]]] = {
    "bytes": ("bytes of gradients, one float32 tensor", in_bytes),
    "tensors": ("number of gradients, 64 float32 elements each", "{:,.0f}".format),
}


def growth(members: Sequence[Row], path: Path, size: str) -> None:
    """Lines: time against the size of the input, an attribute of rows."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (label, formatter), place = _SIZES[size], attrgetter(size)
    times = [row for row in members if row.metric == "wall time"]
    figure, axes = _figure(8.6, 5.2)
    ax = axes.flat[0]
    for name, (color, style, marker) in _LINES.items():
        line = sorted((r for r in times if r.provider == name), key=place)
        if line:
            x = [place(r) for r in line]
            low, high = [r.low or r.value for r in line], [r.high or r.value for r in line]
            ax.fill_between(x, low, high, color=color, alpha=0.18)
            ax.plot(x, [r.value for r in line], style, color=color, marker=marker, markersize=4, label=name)
    limit = sorted(limits(times, "wall time").values(), key=place)
    if limit:
        label_of_limit = "plain read of the same bytes: the limit"
        ax.plot([place(r) for r in limit], [r.value for r in limit], "--", color=_INK, label=label_of_limit)
    ax.legend(frameon=False, fontsize=9.5)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(label, fontsize=10)
    ax.set_ylabel("time of a call, caches flushed", fontsize=10)
    ax.xaxis.set_major_locator(LogLocator(10))
    ax.yaxis.set_major_locator(LogLocator(10))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: formatter(value).replace(".0", "")))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short_time(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(color=_GRID, linewidth=0.8)
    _finish(figure, f"Time against {label.split(',')[0]} (median, quartiles shaded)", members, path)


def _short_time(micro: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if micro >= size:
            return f"{micro / size:g} {unit}"
    return f"{micro:g} µs"


def _figure(width: float, height: float, lines: int = 1, columns: int = 1) -> tuple[Any, Any]:
    # Without pyplot no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(_TORCH)
        ax.tick_params(colors=_INK, which="both", labelsize=9)
    return figure, axes


def _finish(figure: Any, title: str, members: Sequence[Row], path: Path) -> None:
    last = members[-1]
    where = machine.driver_or_threads(last.driver, last.threads)
    figure.suptitle(f"{title}\n{last.device}, {where}, {last.time[:10]}", x=0.012, ha="left", fontsize=12, color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


# For each chart, by name: the groups of rows it shows the first of, and the function that draws it.
DRAWN: dict[str, tuple[tuple[str, ...], Callable[[Sequence[Row], Path], None]]] = {
    "step-overhead": ((STEADY, "steps"), step_overhead),
    "time-vs-bytes": (("growth in bytes",), partial(growth, size="bytes")),
    "time-vs-tensors": (("growth in tensors",), partial(growth, size="tensors")),
}


def charts_of(device: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each chart, by name, for charts that a device has rows for."""
    members: dict[str, list[Row]] = {}
    for row in rows.current(device):
        members.setdefault(row.group, []).append(row)
    found = {name: next(filter(members.get, groups), "") for name, (groups, _) in DRAWN.items()}
    return {name: members[group] for name, group in found.items() if group}


def file_of(chart: str, members: Sequence[Row]) -> str:
    """The name of a chart's file."""
    return f"{rows.slug(members[0].device)}-{chart}.png"


def main() -> None:
    for device in rows.shown():
        for name, members in charts_of(device).items():
            path = CHARTS / file_of(name, members)
            DRAWN[name][1](members, path)
            print(f"drew {path}")


if __name__ == "__main__":
    main()
