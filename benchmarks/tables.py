"""Renders rows as Markdown tables, for documents and the terminal. Reads nothing but rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from statistics import fmean
from typing import Any

import rows as rows_module
from cases import CHECK, CLIP, CLIPPED, FOREACH_NORM, LIMIT, STATS, STATS_TRITON, TORCH_CLIP, TORCH_CLIPPED
from rows import Row

from gradstat.bench import machine, steps
from gradstat.bench.steps import in_bytes

_CLIPS = [(CLIP, TORCH_CLIP), (CLIPPED, TORCH_CLIPPED)]
_ON_DEVICE = [STATS, STATS_TRITON, FOREACH_NORM]  # calls that sync have no device time
# Names in recorded rows that are displayed differently.
_CAPTIONS = {"time ratio": "added time", "time inside": "call alone"}
STEADY = "steady state"  # training steps on a GPU, where no sync ends a step
AUTO = "+ gradstat.auto"  # timed in the suite only
# The calls that the README compares.
_SUMMARIZED = (
    steps.CHECK,
    steps.MONITOR,
    AUTO,
    steps.CLIP,
    steps.GUARDED,
    steps.TORCH_CLIP,
    steps.TORCH_CLIP_CHECKED,
    steps.LOSS_ITEM,
    steps.NAIVE,
    steps.ANOMALY,
)


def grid(header: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table with aligned columns; all but the first ``text_columns`` are right-aligned numbers."""
    cells = [list(header), *map(list, lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        aligned = [
            v.ljust(w) if i < text_columns else v.rjust(w) for i, (v, w) in enumerate(zip(values, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])]) + "\n"


def in_time(micro: float) -> str:
    """Microseconds in a readable unit."""
    if micro < 10:
        return f"{micro:.1f} µs"
    if micro < 1e4:
        return f"{micro:,.0f} µs"
    return f"{micro / 1e3:,.1f} ms" if micro < 1e6 else f"{micro / 1e6:,.2f} s"


def guards(rows: Sequence[Row]) -> str:
    """How each guard handles each fault, averaged over the models, and healthy trainings.

    Cells hold the share flagged in time, the median number of steps until recovery, and how many trainings recovered
    sooner and later than without a guard.
    """
    by_fault = [(row.case.split(", ", 1)[1], row) for row in rows if row.group == "guards"]
    plain, *others = _in_order(row.provider for _, row in by_fault)

    def of(fault: str, name: str, metric: str) -> list[float]:
        return [row.value for about, row in by_fault if (about, row.provider, row.metric) == (fault, name, metric)]

    def cell(fault: str, name: str) -> str:
        timed, back = of(fault, name, "flagged in time"), fmean(of(fault, name, "steps until back"))
        changes = f"({sum(of(fault, name, 'sooner')):.0f}/{sum(of(fault, name, 'later')):.0f})"
        return f"{fmean(timed):.0%}, {back:.0f} {changes}" if timed else f"-, {back:.0f} {changes}"

    lines = [
        [fault, f"{fmean(of(fault, plain, 'steps until back')):.0f}", *(cell(fault, name) for name in others)]
        for fault in _in_order(fault for fault, _ in by_fault)
    ]
    healthy = []
    for name, of_guard in _grouped((row for row in rows if row.group == "guards, healthy"), "provider").items():
        got = {row.metric: row.value for row in of_guard}
        healthy.append(f"{name} {got['refused']:,.0f} of {got['steps']:,.0f}, {got['last loss above']:.3g}")
    title = "Healthy runs, steps skipped and largest rise of the final loss over no guard"
    in_words = f"{title}: {'; '.join(healthy)}.\n" if healthy else ""
    return "\n".join([grid(["fault", plain, *others], lines), in_words])


def _golden_healthy(rows: Sequence[Row]) -> str:
    """How many held-out healthy runs are called unlike on average, and in brackets by the worst set of golden runs."""
    of = {(row.case, row.provider, row.metric): row.value for row in rows}
    sizes = _in_order(row.provider for row in rows)

    def cell(case: str, size: str) -> str:
        mean, worst = of[case, size, "called unlike"], of[case, size, "called unlike, worst set"]
        return f"{mean:.3g}% ({worst:.3g}%)"

    cases = _in_order(row.case for row in rows)
    (runs,) = {case.partition(", ")[2] for case in cases}
    lines = [[case.partition(", ")[0], *(cell(case, size) for size in sizes)] for case in cases]
    return grid([f"{runs} called unlike", *sizes], lines)


def _golden_cases(rows: Sequence[Row]) -> str:
    """How many mistakes and harmless changes are called unlike, with the exceptions and their shares of runs."""

    def results(group: str) -> dict[str, dict[str, float]]:
        grouped = _grouped((row for row in rows if row.group == f"golden, {group}"), "case")
        return {case: {row.metric: row.value for row in of_case} for case, of_case in grouped.items()}

    mistakes, harmless = results("mistakes"), results("harmless")
    partly, never = [], []
    for case, of in mistakes.items():
        called, named = of["called unlike"], of.get("right place", 100)
        shares = [f"{called:.0f}%"] * (called < 100) + [f"named {named:.0f}%"] * (named < 100)
        if not called:
            never.append(case)
        elif shares:
            partly.append(f"{case} ({', '.join(shares)})")
    always = len(mistakes) - len(partly) - len(never)
    alarms = [f"{case} ({of['called unlike']:.0f}%)" for case, of in harmless.items() if of["called unlike"]]
    lines = [
        f"Of {len(mistakes)} mistakes, called unlike and rightly named in all runs: {always}.",
        f"In some: {'; '.join(partly) or 'none'}.",
        f"Never: {'; '.join(never) or 'none'}.",
        f"Of {len(harmless)} harmless changes, called unlike: {'; '.join(alarms) or 'none'}.",
    ]
    return "\n\n".join(lines) + "\n"


def golden(rows: Sequence[Row]) -> str:
    """All results about golden runs."""
    return "\n".join([_golden_healthy([row for row in rows if row.group == "golden, healthy"]), _golden_cases(rows)])


def where(rows: Sequence[Row]) -> str:
    """A line about machine, versions and date."""
    last = rows[-1]
    return f"{last.device}, {machine.driver_or_threads(last.driver, last.threads)}; {last.versions}; {last.time[:10]}."


def limits(rows: Iterable[Row], metric: str) -> dict[tuple[str, str], Row]:
    """The fastest plain read of every ``(case, dtype)``."""
    fastest: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.provider.startswith(LIMIT) and row.metric == metric:
            key = (row.case, row.dtype)
            fastest[key] = min(fastest.get(key, row), row, key=lambda r: r.value)
    return fastest


def _grouped(rows: Iterable[Row], *attributes: str) -> dict[Any, list[Row]]:
    """Rows by the value of an attribute, or the values of several."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(attrgetter(*attributes)(row), []).append(row)
    return groups


def _by_case(rows: Iterable[Row], metric: str) -> dict[tuple[str, str], dict[str, Row]]:
    groups = _grouped((row for row in rows if row.metric == metric), "case", "dtype")
    return {case: {row.provider: row for row in members} for case, members in groups.items()}


def _compared(mine: Row | None, other: Row | None) -> str:
    if mine is None:
        return ""
    return in_time(mine.value) + (f" ({other.value / mine.value:.2f})" if other is not None else "")


def _relative(row: Row | None, base: Row | None) -> str:
    if row is None:
        return ""
    return in_time(row.value) + (f" ({row.value / base.value:.2f})" if base is not None else "")


def lists(rows: Sequence[Row]) -> str:
    """The time of a check, with the ratio to the fastest plain read, and of clips, with that of torch's to gradstat's.

    If there is device time, only of the first dtype of each case, since `device_times` has all.
    """
    dtype = {row.case: row.dtype for row in reversed(rows)}
    kept = [row for row in rows if row.dtype == dtype[row.case]] if device_times(rows) else rows
    fastest, lines = limits(kept, "wall time"), []
    for key, found in _by_case(kept, "wall time").items():
        limit = fastest.get(key)
        clips = [_compared(found.get(mine), found.get(other)) for mine, other in _CLIPS]
        lines.append([*key, _relative(limit, None), _relative(found.get(CHECK), limit), *clips])
    title = "Caches flushed (in brackets: ratio of a check to the plain read, of torch's clip to gradstat's):\n"
    return "\n".join([title, grid(["gradients", "dtype", "plain read", CHECK, CLIP, CLIPPED], lines, 2)])


def device_times(rows: Sequence[Row]) -> str:
    """The device time of statistics, with the ratio to the fastest plain read; empty if there is none."""
    fastest, lines = limits(rows, "device time"), []
    for key, found in _by_case(rows, "device time").items():
        if key in fastest:
            limit = fastest[key]
            rate = f" ({limit.bytes / limit.value / 1e3:.1f} GB/s)"
            cells = [_relative(found.get(name), limit) for name in _ON_DEVICE]
            lines.append([*key, in_time(limit.value) + rate, *cells])
    return grid(["gradients", "dtype", "fastest plain read", *_ON_DEVICE], lines, 2) if lines else ""


def norm_errors(rows: Sequence[Row]) -> str:
    """The worst relative error of norms, and the share of norms lost."""
    parts, providers = [], _in_order(row.provider for row in rows)
    for kind in _in_order(row.case for row in rows):
        of_kind = [row for row in rows if row.case == kind]
        metrics = {(r.dtype, r.provider, r.metric): r.value for r in of_kind}
        dtypes = [name for name in _in_order(row.dtype for row in of_kind) if not name.endswith(("fnuz", "complex32"))]
        lines = [[dtype, *(_norm_error(metrics, dtype, provider) for provider in providers)] for dtype in dtypes]
        parts.append(f"{kind[:1].upper()}{kind[1:]} vectors, worst relative error:\n")
        parts.append(grid(["dtype", *providers], lines))
    return "\n".join(parts)


def _norm_error(metrics: dict[tuple[str, str, str], float], dtype: str, provider: str) -> str:
    if (dtype, provider, "vectors") not in metrics:
        return "unsupported"
    worst, lost, count = (metrics[dtype, provider, metric] for metric in ("worst error", "norms lost", "vectors"))
    text = f"{worst:.1e}" if count > lost else ""
    return f"{text}, lost {100 * lost / count:.1f} %".lstrip(", ") if lost else text


def _added(row: Row | None) -> str:
    return "" if row is None else f"{(row.value - 1) * 100:+.1f} %"


def step_ranges(rows: Sequence[Row]) -> str:
    """A line for each variant: first and third quartile of the time it adds to each step."""
    ratios = _by_case(rows, "time ratio")

    def percent(ratio: float) -> str:
        return f"{round(100 * (ratio - 1)):+d}"  # an int has no -0

    def cell(row: Row) -> str:
        low, high = (row.value if end is None else end for end in (row.low, row.high))
        return f"{percent(low)} to {percent(high)} %"

    kept = [name for name in _SUMMARIZED if any(name in found for found in ratios.values())]
    lines = [
        [name.removeprefix("+ "), *(cell(found[name]) if name in found else "" for found in ratios.values())]
        for name in kept
    ]
    return grid(["time added to", *(case for case, _ in ratios)], lines)


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def table_of_rows(rows: Sequence[Row]) -> str:
    """All rows: a line for each case and call, a column for each metric, times with the ratio to the first call."""
    metrics, lines = _in_order(row.metric for row in rows), []
    for (case, _), found in _grouped(rows, "case", "dtype").items():
        values = {(row.provider, row.metric): row for row in found}
        first = {row.metric: row for row in reversed(found)}
        for number, name in enumerate(_in_order(row.provider for row in found)):
            # Ratios taken round by round are more precise than the ratio of two medians.
            base = {} if "time ratio" in metrics else first
            cells = [_cell(values.get((name, metric)), base.get(metric)) for metric in metrics]
            lines.append([case * (number == 0), _CAPTIONS.get(name, name), *cells])
    return grid(["case", "call", *(_CAPTIONS.get(metric, metric) for metric in metrics)], lines, 2)


def _cell(row: Row | None, first: Row | None) -> str:
    if row is None or row.metric == "time ratio":
        return _added(row)
    if row.unit == "us":
        return _relative(row, None if row is first else first)
    if row.unit == "B":
        return in_bytes(row.value)
    return f"{row.value:{',.0f' if row.value > 100 else ',.3g'}} {row.unit}".rstrip()


def everything(rows: Iterable[Row]) -> str:
    """All tables of one device's current rows; empty if there are none."""
    kept = rows_module.current(rows)
    parts = [_of_group(name, members) for name, members in _grouped(kept, "group").items()]
    return "\n" + "\n".join([*parts, where(kept)]) + "\n" if parts else ""


def _of_group(name: str, rows: list[Row]) -> str:
    if name == "lists":
        on_device = device_times(rows)
        return "\n".join([lists(rows), *(["Device time alone:\n", on_device] if on_device else [])])
    brackets = "" if any(row.metric == "time ratio" for row in rows) else " (in brackets: ratio to the first)"
    return f"{name[:1].upper()}{name[1:]}{brackets}:\n\n{table_of_rows(rows)}"


def selected(rows: Iterable[Row], *groups: str) -> str:
    """The tables of some groups of one device."""
    return everything(row for row in rows if row.group in groups)


def summary(rows: Iterable[Row]) -> str:
    """For the README: what each call adds to training steps, in a steady state if that was measured; maybe nothing."""
    groups = _grouped(rows_module.current(rows), "group")
    step_rows = groups.get(STEADY) or groups.get("steps")
    return "\n" + "\n".join([step_ranges(step_rows), where(step_rows)]) + "\n" if step_rows else ""
