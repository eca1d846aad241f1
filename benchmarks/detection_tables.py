"""Tables of the benchmark of detection, from rows only."""

from __future__ import annotations

from collections.abc import Sequence

import tables
from rows import Row

MONITOR = "gradstat"
WHEN = ("mid-run", "from step 0")
GOLDEN = "golden"  # faults from step 0, compared with golden runs
HEALTHY_RUNS = "healthy | all"  # the case of rows about healthy runs compared with golden ones
HEALTHY, TIME = "detection, healthy", "detection, time"
# Beginnings of metrics, before a program's name: its runs that diverged, and those of them with findings.
DIVERGED, FOUND_IN = "diverged: ", "diverged, with findings: "
ALL = "all"  # the fault of rows about a whole set
FAULT = "fault"  # the provider of rows about the fault itself
STATUS = ("harmful", "harmless", "no effect", "raises")  # what a case of a fault does


def group_of(when: str) -> str:
    """The group of rows about faults that begin ``when``."""
    return f"detection, {when}"


def case_of(which: str, fault: str = ALL) -> str:
    """The case of rows about a fault of a set."""
    return f"{which} | {fault}"


Values = dict[str, dict[str, dict[str, Row]]]  # by case, provider and metric


def _values(rows: Sequence[Row], group: str) -> Values:
    found: Values = {}
    for row in rows:
        if row.group == group:
            found.setdefault(row.case, {}).setdefault(row.provider, {})[row.metric] = row
    return found


def _count(of: dict[str, Row], metric: str) -> float:
    return of[metric].value if metric in of else 0.0


def _scores(of: dict[str, Row]) -> list[str]:
    """Runs found, precision, delay, and the share of right places."""
    runs, found, false = (_count(of, metric) for metric in ("runs", "found", "twins flagged"))
    placed = _count(of, "found, with a place")
    return [
        f"{found:.0f} of {runs:.0f}",
        _share(found, found + false),
        f"{of['delay'].value:.0f}" if "delay" in of else "-",
        _share(_count(of, "place right"), placed),
    ]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def sets(rows: Sequence[Row]) -> str:
    """For every set: how many cases do harm, and how many of their runs the monitor finds, when and where."""
    lines = []
    for when in WHEN:
        every = _values(rows, group_of(when))
        for case, by in every.items():
            which, fault = case.split(" | ", 1)
            if fault != ALL:
                continue
            of = by[MONITOR]
            about = [each[FAULT] for name, each in every.items() if name.startswith(f"{which} | ") and FAULT in each]
            cases = {status: sum(_count(each, status) for each in about) for status in STATUS}
            harmful = f"{cases['harmful']:.0f} of {sum(cases.values()):.0f}"
            found, *others = _scores(of)
            in_all = _share(_count(of, "found") + _count(of, "found later"), _count(of, "runs"))
            lines.append([f"{which}, {when}", harmful, found, in_all, *others])
    header = ["set", "harmful cases", "runs found", "by the end", "precision", "delay", "place right"]
    return tables.grid(header, lines)


def tools(rows: Sequence[Row]) -> str:
    """The recall of every tool in every set."""
    cells: dict[str, dict[str, str]] = {}
    for when in WHEN:
        for case, by in _values(rows, group_of(when)).items():
            which, fault = case.split(" | ", 1)
            if fault == ALL:
                for tool, of in by.items():
                    share = _share(_count(of, "found"), _count(of, "runs"))
                    cells.setdefault(tool, {})[f"{which}, {when}"] = share
    columns = list(dict.fromkeys(column for by in cells.values() for column in by))
    lines = [[tool, *(by.get(column, "-") for column in columns)] for tool, by in cells.items()]
    return tables.grid(["recall of", *columns], lines)


def missed(rows: Sequence[Row]) -> str:
    """The harmful faults that the monitor does not find with every model and seed, not even later."""
    text = ""
    for when in WHEN:
        listed: dict[str, list[str]] = {}
        for case, by in _values(rows, group_of(when)).items():
            which, fault = case.split(" | ", 1)
            if fault == ALL or MONITOR not in by:
                continue
            runs, found, later = (_count(by[MONITOR], metric) for metric in ("runs", "found", "found later"))
            if found + later < runs:
                listed.setdefault(which, []).append(f"{fault} ({runs - found - later:.0f} of {runs:.0f})")
        of_sets = [f" {which.capitalize()}: {'; '.join(each)}." for which, each in listed.items()]
        text += f"Missed {when}, also by the end.{''.join(of_sets)}\n\n" if of_sets else ""
    return text.removesuffix("\n")


def golden(rows: Sequence[Row]) -> str:
    """For every set, the faults from step 0 that golden runs find. Lists missed faults below."""
    lines, alarms, listed = [], "", []
    for case, by in _values(rows, group_of(GOLDEN)).items():
        ((_, of),) = by.items()
        (which, fault), (runs, found) = case.split(" | ", 1), (_count(of, metric) for metric in ("runs", "found"))
        if case == HEALTHY_RUNS:
            alarms = f"\nHealthy runs called unlike golden ones: {found:.0f} of {runs:.0f}.\n"
        elif fault == ALL:
            lines.append([which, *_scores(of)])
        elif found < runs:
            listed.append(f"{which}: {fault} ({runs - found:.0f} of {runs:.0f})")
    header = [f"golden runs, {WHEN[1]}", "runs found", "precision", "delay", "place right"]
    text = f"\nNot called unlike golden runs: {'; '.join(listed)}.\n" if listed else ""
    return tables.grid(header, lines) + alarms + text


def healthy(rows: Sequence[Row]) -> str:
    """Findings of every tool in healthy trainings, and the cost of its step. Runs that diverged are listed below."""
    of_time, by_case = _values(rows, TIME), _values(rows, HEALTHY)
    lines, diverged = [], []
    for tool in dict.fromkeys(tool for by in by_case.values() for tool in by):
        cells = []
        for by in by_case.values():
            of = by.get(tool, {})
            cells.append(f"{of['findings'].value:.0f} in {of['steps'].value:,.0f}" if of else "-")
            diverged += [
                f"{name} (findings in {_count(of, FOUND_IN + name):.0f} of {of[DIVERGED + name].value:.0f})"
                for name in (metric.removeprefix(DIVERGED) for metric in of if metric.startswith(DIVERGED))
            ]
        slower = [f"{by[tool]['time ratio'].value:.2f}" for by in of_time.values() if tool in by]
        lines.append([tool, *cells, ", ".join(slower) or "-"])
    header = ["findings in healthy steps", *by_case, f"step time with / without: {', '.join(of_time)}"]
    text = f"\nDiverged and not counted: {'; '.join(diverged)}.\n" if diverged else ""
    return tables.grid(header, lines) + text


def in_short(rows: Sequence[Row]) -> str:
    """How many published faults and ordinary mistakes the monitor and the best other tool find, and false findings."""
    sets = {case_of(which) for which in ("mistakes", "operators", "silent errors")}

    def found(when: str, *metrics: str) -> dict[str, str]:
        """By tool, how many of how many runs; the one that found most first."""
        totals: dict[str, tuple[float, float]] = {}
        for case, by in _values(rows, group_of(when)).items():
            for tool, of in by.items() if case in sets else ():
                more, runs = sum(_count(of, metric) for metric in metrics), _count(of, "runs")
                totals[tool] = (totals.get(tool, (0, 0))[0] + more, totals.get(tool, (0, 0))[1] + runs)
        ranked = sorted(totals.items(), key=lambda each: -each[1][0])
        return {tool: f"{some:.0f} of {runs:.0f}" for tool, (some, runs) in ranked}

    middle, start = found(WHEN[0], "found"), found(WHEN[1], "found", "found later")
    other = next(tool for tool in middle if tool != MONITOR)
    ((with_golden, *_),) = (list(found(GOLDEN, "found").values()),)
    lines = [["begun mid-run, within 60 steps", middle[MONITOR], middle[other]]]
    from_start = f"{start[MONITOR]}; [golden runs](docs/golden.md): {with_golden}"
    lines.append(["present from the first step, by step 300", from_start, start[other]])
    healthy = _values(rows, HEALTHY).values()
    false = []
    for tool in (MONITOR, other):
        steps, alarms = (sum(_count(by.get(tool, {}), metric) for by in healthy) for metric in ("steps", "findings"))
        false.append(f"{alarms:.0f} in {steps:,.0f}")
    lines.append(["false findings in healthy steps", *false])
    return tables.grid(["[harmful faults](docs/detection.md) found", "gradstat", f"best other tool ({other})"], lines)


def everything(rows: Sequence[Row]) -> str:
    """All tables."""
    return "\n".join([sets(rows), tools(rows), healthy(rows), golden(rows), missed(rows)])
