"""Renders rows as Markdown tables, for documents and the terminal. Reads nothing but rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import rows as rows_module
from cases import (
    CHECK,
    CHECK_TRITON,
    CLIP,
    CLIP_LIMIT,
    CLIPPED,
    FOREACH_NORM,
    LIMIT,
    NAIVE,
    STATS,
    STATS_TRITON,
    TORCH_CLIP,
    TORCH_CLIPPED,
    TORCH_LOOP_CLIP,
)
from optimizer_steps import FULL_CASE, GROUP, OPTIMIZERS, SEPARATOR
from rows import Row
from step_providers import ADAPTIVE, ALONE, AMP, GUARD, GUARDED, TORCH

from gradstat.bench import machine, steps
from gradstat.bench.steps import in_bytes

_MEASURING = [CHECK, CHECK_TRITON, FOREACH_NORM, NAIVE]
_ON_DEVICE = [STATS, STATS_TRITON, FOREACH_NORM]  # calls that sync have no device time
_CLIPPING = [
    CLIP,
    TORCH_CLIP,
    TORCH_LOOP_CLIP,
    CLIPPED,
    TORCH_CLIPPED,
    CLIP_LIMIT,
]
_STEPPING = [GUARDED, AMP, TORCH, ALONE]
_SETTING = ["gradients", "optimizer", "scaler, clipping"]
# Names in recorded rows that are displayed differently.
_CAPTIONS = {
    "time ratio": "added time",
    "time inside": "call alone",
}
_STATISTICS_TITLE = "From the call to the report, caches flushed (in brackets: ratio to the fastest plain read):\n"
_DEVICE_TITLE = "Device time alone:\n"
_ADAPTIVE_TITLE = "Guarded steps with adaptive clips, clipped to the same norm:\n"
# The calls that docs/alternatives.md compares within each framework, by group.
ALTERNATIVES = {
    "Lightning steps": {
        "+ gradient_clip_val": "`gradient_clip_val`, Lightning's own clip",
        "+ GradstatCallback()": "`GradstatCallback()`",
        "detect_anomaly=True": "`Trainer(detect_anomaly=True)`",
        "log_dict, logged every step": "300 norms by `self.log_dict`",
        "GradstatCallback, logged every step": "300 norms by `GradstatCallback`",
    },
    "Trainer steps": {
        "+ gradstat install": "`install(trainer)`",
        "+ DebugUnderflowOverflow": "`DebugUnderflowOverflow`",
        "+ detect_anomaly": "`detect_anomaly`",
    },
    "Weights & Biases steps": {
        "+ Monitor, all norms logged": "`Monitor`, all norms logged in every step",
        "+ wandb.watch, histograms of gradients": "`wandb.watch(log_freq=1)`, histograms in every step",
    },
}
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


def guards(rows: Sequence[Row], short: bool = False) -> str:
    """How each guard handles each fault, in each model or, if ``short``, averaged over the models.

    Cells hold the share flagged in time, the median number of steps until recovery, and how many trainings recovered
    sooner and later than without a guard.
    """
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        if row.group == "guards":
            case = row.case.split(", ", 1)[1] if short else row.case
            by_metric = found.setdefault(case, {}).setdefault(row.provider, {})
            by_metric.setdefault(row.metric, []).append(row.value)
    names = list(dict.fromkeys(name for case in found.values() for name in case))

    def cell(values: dict[str, list[float]]) -> str:
        timed = f"{fmean(values['flagged in time']):.0%}" if "flagged in time" in values else "-"
        back = f"{fmean(values['steps until back']):.0f}"
        return f"{timed}, {back} ({sum(values['sooner']):.0f}/{sum(values['later']):.0f})"

    plain, others = names[0], names[1:]
    lines = [
        [case, f"{fmean(by[plain]['steps until back']):.0f}", *(cell(by[name]) for name in others)]
        for case, by in found.items()
    ]
    healthy: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.group == "guards, healthy":
            healthy.setdefault(row.provider, {})[row.metric] = row.value
    rates = [
        [name, f"{of['refused']:.0f}", f"{of['steps']:,.0f}", f"{of['last loss above']:.2g}"]
        for name, of in healthy.items()
    ]
    headers = ["healthy trainings", "refused", "steps", "largest increase of the final loss over no guard"]
    return "\n".join([grid(["fault" if short else "model, fault", plain, *others], lines), grid(headers, rates)])


def golden_healthy(rows: Sequence[Row]) -> str:
    """How many held-out healthy runs each golden set calls unlike: on average, and by the worst set."""
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.group == "golden, healthy":
            cells.setdefault(row.case, {}).setdefault(row.provider, {})[row.metric] = row.value
    providers = list(dict.fromkeys(provider for case in cells.values() for provider in case))

    def cell(of: dict[str, float]) -> str:
        return f"{of['called unlike']:.1f} ({of['called unlike, worst set']:.0f})"

    lines = [[case, *(cell(by[provider]) for provider in providers)] for case, by in cells.items()]
    return grid(["called unlike, % on average (by the worst of the sets)", *providers], lines)


def golden_cases(rows: Sequence[Row]) -> str:
    """Which mistakes and which harmless changes are called unlike and which are not. Shares below 100 % are given."""
    listed: dict[str, list[str]] = {}
    for group, kind in (("mistakes", "Mistakes"), ("harmless", "Harmless changes")):
        cells: dict[str, dict[str, float]] = {}
        for row in rows:
            if row.group == f"golden, {group}":
                cells.setdefault(row.case, {})[row.metric] = row.value
        for case, of in cells.items():
            called, named = of["called unlike"], of.get("right place", 100)
            shares = [f"called unlike {called:.0f} %"] * (0 < called < 100)
            shares += [f"rightly named {named:.0f} %"] * (named < 100)
            title = f"{kind} {'' if called else 'not '}called unlike"
            listed.setdefault(title, []).append(case + (f" ({', '.join(shares)})" if shares else ""))
    return "\n".join(f"{title}: {'; '.join(cases)}.\n" for title, cases in listed.items())


def golden_cost(rows: Sequence[Row]) -> str:
    """The time of a comparison, and the size of a file."""
    return table_of_rows([row for row in rows if row.group == "golden, cost"])


def golden(rows: Sequence[Row]) -> str:
    """All tables of golden runs."""
    return "\n".join([golden_healthy(rows), golden_cases(rows), golden_cost(rows)])


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


def _by_case(rows: Iterable[Row], metric: str) -> dict[tuple[str, str], dict[str, Row]]:
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.metric == metric:
            found.setdefault((row.case, row.dtype), {})[row.provider] = row
    return found


def _relative(row: Row | None, base: Row | None) -> str:
    if row is None:
        return ""
    return in_time(row.value) + (f" ({row.value / base.value:.2f})" if base is not None else "")


def measuring(rows: Sequence[Row], metric: str = "wall time") -> str:
    """Statistics, with the ratio to the fastest plain read of the same bytes."""
    fastest, cases = limits(rows, metric), _by_case(rows, metric)
    known = _ON_DEVICE if metric == "device time" else _MEASURING
    columns = [name for name in known if any(name in found for found in cases.values())]
    lines = []
    for key, found in cases.items():
        if key not in fastest:
            continue
        limit = fastest[key]
        rate = f" ({limit.bytes / limit.value / 1e3:.1f} GB/s)"
        lines.append([*key, in_time(limit.value) + rate, *(_relative(found.get(name), limit) for name in columns)])
    return grid(["gradients", "dtype", "fastest plain read", *columns], lines, 2)


def clipping(rows: Sequence[Row], metric: str = "wall time") -> str:
    """Clips, torch's with the ratio to gradstat's."""
    lines = []
    for key, found in _by_case(rows, metric).items():
        if {CLIP, CLIPPED} <= found.keys():
            unclipped, clipped = found[CLIP], found[CLIPPED]
            base = dict(zip(_CLIPPING, [None, unclipped, unclipped, None, clipped, clipped], strict=True))
            lines.append([*key, *(_relative(found.get(name), base[name]) for name in _CLIPPING)])
    return grid(["gradients", "dtype", *_CLIPPING], lines, 2)


def accuracy(rows: Sequence[Row]) -> str:
    """The relative error of each norm, compared with float64."""
    cases = _by_case(rows, "norm error")
    columns = [name for name in (*_MEASURING, _CLIPPING[0], _CLIPPING[1]) if any(name in f for f in cases.values())]
    lines = [
        [*key, *(f"{found[name].value:.1e}" if name in found else "" for name in columns)]
        for key, found in cases.items()
    ]
    return grid(["gradients", "dtype", *columns], lines, 2)


def norm_errors(rows: Sequence[Row], short: bool = False) -> str:
    """The worst relative error of norms, and the share of norms lost.

    Unless ``short`` also the mean error, the reference backend, the number of vectors, complex32, and the ``fnuz``
    float8 types.
    """
    parts = []
    hidden = ("gradstat reference", "numpy.linalg.norm") if short else ()
    providers = [p for p in _in_order(row.provider for row in rows) if p not in hidden]
    for kind in _in_order(row.case for row in rows):
        of_kind = [row for row in rows if row.case == kind]
        metrics = {(r.dtype, r.provider, r.metric): r.value for r in of_kind}
        lines = []
        dtypes = _in_order(row.dtype for row in of_kind)
        for dtype in [name for name in dtypes if not (short and name.endswith(("fnuz", "complex32")))]:
            cells = [_norm_error(metrics, dtype, provider, short) for provider in providers]
            vectors = max(row.value for row in of_kind if row.metric == "vectors" and row.dtype == dtype)
            lines.append([dtype, *([] if short else [f"{vectors:,.0f}"]), *cells])
        mean = "" if short else " (in brackets: the mean)"
        parts.append(f"{kind[:1].upper()}{kind[1:]} vectors, worst relative error{mean}:\n")
        parts.append(grid(["dtype", *([] if short else ["vectors"]), *providers], lines))
    return "\n".join(parts)


def _norm_error(metrics: dict[tuple[str, str, str], float], dtype: str, provider: str, short: bool) -> str:
    if (dtype, provider, "vectors") not in metrics:
        return "unsupported"
    worst, mean, lost, count = (
        metrics[dtype, provider, metric] for metric in ("worst error", "mean error", "norms lost", "vectors")
    )
    text = f"{worst:.1e}" + ("" if short else f" ({mean:.1e})") if count > lost else ""
    return f"{text}, lost {100 * lost / count:.1f} %".lstrip(", ") if lost else text


def fuzzed(rows: Sequence[Row]) -> str:
    """The number of random tensors that each operation was tested with, none of them wrong."""
    counts = [row for row in rows if row.metric == "tensors"]
    batches, seconds = (next(row.value for row in rows if row.metric == metric) for metric in ("batches", "time"))
    listed = ";\n".join(f"`{row.case}` {row.value:,.0f}" for row in counts)
    return f"{batches:,.0f} batches in {seconds:,.0f} s, none wrong (tensors per operation):\n{listed}.\n"


def leaks(rows: Sequence[Row]) -> str:
    """The growth of a process in thousands of steps."""
    values = {(row.case, row.metric): row.value for row in rows}
    lines = [
        [
            kind,
            f"{values[kind, 'steps']:,.0f}",
            f"{values[kind, 'memory'] / 1024:,.0f} KiB",
            *(f"{values[kind, metric]:,.0f}" for metric in ("objects", "tensors")),
        ]
        for kind in _in_order(row.case for row in rows)
    ]
    return grid(["kind of step", "steps", "memory", "Python objects", "tensors"], lines)


def leaks_summary(rows: Sequence[Row]) -> str:
    """The largest growth of any kind of step, as a sentence."""
    values = {
        metric: {r.case: r.value for r in rows if r.metric == metric} for metric in ("steps", "objects", "tensors")
    }
    most = {metric: max(found.values()) for metric, found in values.items()}
    memory = max(row.value for row in rows if row.metric == "memory")
    kinds = [f"`{case}`" + f" ({n:,.0f})" * (n < most["steps"]) for case, n in values["steps"].items()]
    return (
        f"{most['steps']:,.0f} steps of {', '.join(kinds)} left at most {memory / 1024:,.0f} KiB, "
        f"{most['objects']:,.0f} Python objects, {most['tensors']:,.0f} tensors.\n"
    )


def _added(row: Row | None) -> str:
    return "" if row is None else f"{(row.value - 1) * 100:+.1f} %"


def step_times(rows: Sequence[Row]) -> str:
    """The time each variant adds to a step."""
    lines = []
    times = _by_case(rows, "wall time")
    columns = _in_order(row.provider for row in rows if row.provider != steps.PLAIN)
    for key, ratios in _by_case(rows, "time ratio").items():
        plain = times[key][steps.PLAIN].value
        lines.append([key[0], in_time(plain), *(_added(ratios.get(name)) for name in columns)])
    return grid(["training step", "plain", *columns], lines)


def step_calls(rows: Sequence[Row]) -> str:
    """The time of the added calls themselves within a step, and their share of the plain step."""
    times, inside = (_by_case(rows, metric) for metric in ("wall time", "time inside"))
    columns = _in_order(row.provider for row in rows if row.metric == "time inside" and row.provider != steps.PLAIN)
    lines = []
    for key, found in inside.items():
        plain = times[key][steps.PLAIN].value
        calls = [found[name].value if name in found else None for name in columns]
        shares = ["" if call is None else f"{in_time(call)} ({100 * call / plain:.1f} %)" for call in calls]
        lines.append([key[0], in_time(plain), *shares])
    return grid(["training step", "plain", *columns], lines)


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


def alternatives(rows: Iterable[Row]) -> str:
    """The time that gradstat and what it is compared with add to a step under each framework."""
    lines = []
    for group, names in ALTERNATIVES.items():
        kept = [row for row in rows if row.group == group]
        for (case, _), found in _by_case(kept, "time ratio").items():
            told = [(caption, found[name]) for name, caption in names.items() if name in found]
            title = f"{group.removesuffix(' steps')}, {case}"
            lines += [[title * (i == 0), caption, _added(row)] for i, (caption, row) in enumerate(told)]
    return grid(["where", "what", "added time"], lines, 2)


def step_memory(rows: Sequence[Row]) -> str:
    """The peak memory each variant adds to a step."""
    columns = _in_order(row.provider for row in rows if row.provider != steps.PLAIN)
    lines = [
        [key[0], *(in_bytes(found[name].value) if name in found else "" for name in columns)]
        for key, found in _by_case(rows, "extra memory").items()
    ]
    return grid(["training step", *columns], lines)


def optimizer_steps(rows: Sequence[Row], metric: str = "wall time", short: bool = False) -> str:
    """Optimizer steps of each provider, with the ratio to a guarded step.

    If ``short``, also with the ratio of their passes, and without the name of the gradients.
    """
    lines, moved = [], _by_case(rows, "bytes moved") if short else {}
    for key, found in _by_case(rows, metric).items():
        base = found.get(GUARDED)
        cells = [_relative(found.get(name), None if name == GUARDED else base) for name in _STEPPING]
        if GUARDED in moved.get(key, {}) and base is not None:
            passes = moved[key][GUARDED].value
            for i, name in enumerate(_STEPPING[1:], 1):
                if cells[i] and name in moved[key]:
                    cells[i] = cells[i][:-1] + f"; {moved[key][name].value / passes:.2f})"
        lines.append([*key[0].split(SEPARATOR)[short:], *cells])
    return grid([*_SETTING[short:], *_STEPPING], lines, len(_SETTING) - short)


def optimizer_passes(rows: Sequence[Row]) -> str:
    """Memory passes of each provider over as many bytes as there are gradients; the same for every list of shapes."""
    lines = {}
    for (case, _), found in _by_case(rows, "bytes moved").items():
        _, *setting = case.split(SEPARATOR)
        cells = [_passes(found.get(name), None if name == GUARDED else found.get(GUARDED)) for name in _STEPPING]
        lines[tuple(setting)] = [*setting, *cells]
    return grid([*_SETTING[1:], *_STEPPING], lines.values(), len(_SETTING) - 1)


def _passes(row: Row | None, base: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.value / row.bytes:.0f}" + (f" ({row.value / base.value:.2f})" if base is not None else "")


def adaptive_steps(rows: Sequence[Row], short: bool = False) -> str:
    """A guarded step with a fixed limit and with each adaptive clip: passes, and time with the ratio to the former.

    If ``short``, for one setting only and without the name of the gradients.
    """
    moved, lines = _by_case(rows, "bytes moved"), []
    cases = [each for each in _by_case(rows, "wall time").items() if ADAPTIVE[0] in each[1]]
    for key, found in cases[:1] if short else cases:
        for name in (GUARDED, GUARD, *ADAPTIVE):
            if name in found:
                time = _relative(found[name], None if name == GUARDED else found.get(GUARDED))
                setting = [part * (name == GUARDED) for part in key[0].split(SEPARATOR)[short:]]
                lines.append([*setting, name, _passes(moved[key][name], None), time])
    return grid([*_SETTING[short:], "call", "passes", "median"], lines, len(_SETTING) + 1 - short)


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def growth(rows: Sequence[Row], metric: str = "wall time") -> str:
    """Times for growing inputs, the fastest plain read first."""
    fastest, cases = limits(rows, metric), _by_case(rows, metric)
    columns = _in_order(r.provider for r in rows if not r.provider.startswith(LIMIT))
    lines = [
        [key[0], _relative(fastest.get(key), None), *(_relative(found.get(name), None) for name in columns)]
        for key, found in cases.items()
    ]
    return grid(["gradients", "fastest plain read", *columns], lines)


def slopes(rows: Sequence[Row], metric: str = "wall time") -> str:
    """The cost of one more small tensor, averaged between one tensor and each larger count."""
    by_count = {next(iter(found.values())).tensors: found for found in _by_case(rows, metric).values()}
    if 1 not in by_count:
        return ""
    counts = [count for count in sorted(by_count) if count >= 1000]

    def slope(name: str, count: int) -> str:
        if name not in by_count[count]:
            return ""
        return f"{1e3 * (by_count[count][name].value - by_count[1][name].value) / (count - 1):,.0f} ns"

    names = [name for name in by_count[1] if not name.startswith(LIMIT)]
    lines = [[name, *(slope(name, count) for count in counts)] for name in names]
    headers = ["per additional tensor of 64 elements", *(f"to {count:,}" for count in counts)]
    return grid(headers, lines) if counts else ""


def table_of_rows(rows: Sequence[Row]) -> str:
    """All rows: a line for each case and call, a column for each metric, times with the ratio to the first call."""
    metrics, lines = _in_order(row.metric for row in rows), []
    for (case, _), found in _groups(rows).items():
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
    if row.unit == "%":
        return f"{row.value:.2f} %"
    return in_bytes(row.value) if row.unit == "B" else f"{row.value:,.0f}"


def memory(rows: Sequence[Row]) -> str:
    """Peak memory: a line for each call, a column for each case."""
    cases = _groups(rows)
    found = {(case, row.provider): row for case, members in cases.items() for row in members}
    lines = [
        [name, *(in_bytes(found[case, name].value) if (case, name) in found else "" for case in cases)]
        for name in _in_order(row.provider for row in rows)
    ]
    return grid(["call", *(case for case, _ in cases)], lines)


def _groups(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.case, row.dtype), []).append(row)
    return found


def everything(rows: Iterable[Row]) -> str:
    """All tables of one device's current rows."""
    kept = rows_module.current(rows)
    parts = [part for name, members in _by_group(kept).items() for part in _section(name, members)]
    return "\n" + "\n".join([*parts, where(kept)]) + "\n"


def _by_group(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def _section(name: str, rows: list[Row]) -> list[str]:
    on_device = any(row.metric == "device time" for row in rows)
    if name in ("steps", STEADY):
        return _steps(rows)
    if name == "lists":
        parts = [_STATISTICS_TITLE, measuring(rows)]
        if on_device:
            parts += [_DEVICE_TITLE, measuring(rows, "device time")]
        parts += ["Clips, caches flushed (in brackets: ratio to gradstat's):\n", clipping(rows)]
        if on_device:
            parts += [_DEVICE_TITLE, clipping(rows, "device time")]
        return [*parts, "Relative error of the norm (clips return it in the gradients' dtype):\n", accuracy(rows)]
    if name == GROUP:
        return _optimizer_steps(rows)
    if name == "growth in bytes":
        return ["One float32 tensor of growing size, caches flushed:\n", growth(rows)]
    if name.startswith("growth in tensors"):
        caches = "warm caches" if name.endswith("warm") else "caches flushed, tensors' own objects included"
        return [f"A growing number of tensors of 64 float32 elements, {caches}:\n", growth(rows), slopes(rows)]
    if name == "memory":
        return ["Peak memory of a call:\n", memory(rows)]
    brackets = "" if any(row.metric == "time ratio" for row in rows) else " (in brackets: ratio to the first)"
    name = _CAPTIONS.get(name, name)
    return [f"{name[:1].upper()}{name[1:]}{brackets}:\n"] * bool(name) + [table_of_rows(rows)]


def _steps(rows: list[Row]) -> list[str]:
    each = "each block of steps" if rows[0].group == STEADY else "each step"
    parts = [f"Time added to a training step (median of the ratios to the plain step; a sync ends {each}):\n"]
    parts += [step_times(rows)]
    if any(row.metric == "time inside" for row in rows):
        parts += ["The added call alone, within a step (in brackets: share of the plain step):\n", step_calls(rows)]
    return [*parts, "Peak memory added to the step:\n", step_memory(rows)]


def _optimizer_steps(rows: list[Row]) -> list[str]:
    parts = ["From gradients to updated parameters, caches flushed (in brackets: ratio to a guarded step):\n"]
    parts += [optimizer_steps(rows)]
    if any(row.metric == "device time" for row in rows):
        parts += [_DEVICE_TITLE, optimizer_steps(rows, "device time")]
    parts += ["Calculated passes over as many bytes as there are gradients:\n", optimizer_passes(rows)]
    return [*parts, _ADAPTIVE_TITLE, adaptive_steps(rows)]


def selected(rows: Iterable[Row]) -> str:
    """For docs/performance.md: most lists, the host path, distributed gradients. Charts show steps and growth."""
    kept = rows_module.current(rows)
    groups, parts = _by_group(kept), []
    if "lists" in groups:
        first, every = _selected_lists(groups["lists"])
        on_device = any(row.metric == "device time" for row in every)
        parts += ["Caches flushed (in brackets: ratio of a check to the plain read, of torch's clip to gradstat's):\n"]
        parts += [lists(first if on_device else every)]
        if on_device:
            parts += [_DEVICE_TITLE, measuring(every, "device time")]
    if "host path" in groups:
        parts += _section("host path", [r for r in groups["host path"] if not r.provider.startswith("of a check")])
    if "distributed gradients" in groups:
        of_ranks = groups["distributed gradients"]
        parts += _section("distributed gradients", [r for r in of_ranks if r.case == of_ranks[-1].case])
    return "\n" + "\n".join([*parts, where(kept)]) + "\n" if parts else ""


def _selected_lists(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of lists in their first dtype, and these with a single tensor in every dtype; none that resemble another."""
    alike = ("Llama 7B's", "transformer", "300 tensors", "5,000 tensors")
    kept = [row for row in rows if not row.case.startswith(alike)]
    dtype = {row.case: row.dtype for row in reversed(kept)}
    first = [row for row in kept if row.dtype == dtype[row.case]]
    return first, [row for row in kept if row.tensors == 1 or row.dtype == dtype[row.case]]


def lists(rows: Sequence[Row]) -> str:
    """The time of a check, with the ratio to the fastest plain read, and of clips, torch's with that to gradstat's."""
    fastest, lines = limits(rows, "wall time"), []
    for key, found in _by_case(rows, "wall time").items():
        limit, mine, clipped = (fastest.get(key), found.get(CLIP), found.get(CLIPPED))
        bases = [(CHECK, limit), (CLIP, None), (TORCH_CLIP, mine), (CLIPPED, None), (TORCH_CLIPPED, clipped)]
        lines.append([*key, _relative(limit, None), *(_relative(found.get(name), base) for name, base in bases)])
    return grid(["gradients", "dtype", "plain read", CHECK, CLIP, TORCH_CLIP, CLIPPED, TORCH_CLIPPED], lines, 2)


def selected_optimizer_steps(rows: Iterable[Row]) -> str:
    """For docs/performance.md: steps of the longest list by an optimizer that can skip its step on the device."""
    name, kept = FULL_CASE.name, [row for row in rows_module.current(rows) if row.group == GROUP]
    shown = [row for row in kept if row.case.split(SEPARATOR)[:2] == [name, OPTIMIZERS[0].name]]
    if not shown:
        return ""
    brackets = "in brackets: ratio to a guarded step; ratio of passes"
    parts = [f"From gradients of {name} to updated parameters, caches flushed ({brackets}):\n"]
    parts += [optimizer_steps(shown, short=True), _ADAPTIVE_TITLE, adaptive_steps(shown, short=True), where(shown)]
    return "\n" + "\n".join(parts) + "\n"


def summary(rows: Iterable[Row]) -> str:
    """For the README: what each call adds to training steps, in a steady state if that was measured; maybe nothing."""
    groups = _by_group(rows_module.current(rows))
    step_rows = groups.get(STEADY) or groups.get("steps")
    return "\n" + "\n".join([step_ranges(step_rows), where(step_rows)]) + "\n" if step_rows else ""
