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
    """Runs found, recall, precision, F1, delay, and the share of right places."""
    runs, found, false = (_count(of, metric) for metric in ("runs", "found", "twins flagged"))
    recall = found / runs if runs else 0.0
    precision = found / (found + false) if found + false else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    placed = _count(of, "found, with a place")
    return [
        f"{found:.0f} of {runs:.0f}",
        f"{recall:.0%}",
        f"{precision:.0%}" if found + false else "-",
        f"{f1:.2f}",
        f"{of['delay'].value:.0f}" if "delay" in of else "-",
        f"{_count(of, 'place right') / placed:.0%}" if placed else "-",
    ]


def tools(rows: Sequence[Row], when: str) -> str:
    """For every set and tool: recall, precision, F1 and delay."""
    lines = []
    for case, by in _values(rows, group_of(when)).items():
        which, fault = case.split(" | ", 1)
        if fault != ALL:
            continue
        for tool, of in by.items():
            if tool == FAULT:
                continue
            found, recall, *others = _scores(of)
            runs, in_all = _count(of, "runs"), _count(of, "found") + _count(of, "found later")
            lines.append([f"{which}, {tool}", found, recall, f"{in_all / runs:.0%}" if runs else "-", *others])
    header = [f"{when}: set, tool", "runs found", "recall", "by the end", "precision", "F1", "delay", "place right"]
    return tables.grid(header, lines)


def golden(rows: Sequence[Row]) -> str:
    """For every set, the faults from step 0 that golden runs find. Lists missed and wrongly placed faults below."""
    listed: dict[str, list[str]] = {"Missed": [], "Placed wrongly": []}
    lines, alarms = [], ""
    for case, by in _values(rows, group_of(GOLDEN)).items():
        ((_, of),) = by.items()
        (which, fault), (runs, found) = case.split(" | ", 1), (_count(of, metric) for metric in ("runs", "found"))
        if case == HEALTHY_RUNS:
            alarms = f"\nHealthy runs called unlike: {found:.0f} of {runs:.0f}.\n"
        elif fault == ALL:
            lines.append([which, *_scores(of)])
        else:
            for what, count, most in (
                ("Missed", runs - found, runs),
                ("Placed wrongly", _count(of, "found, with a place") - _count(of, "place right"), found),
            ):
                if count:
                    listed[what].append(f"{which}: {fault} ({count:.0f} of {most:.0f})")
    header = [f"{WHEN[1]}: set", "runs found", "recall", "precision", "F1", "delay", "place right"]
    text = "".join(f"\n{what}: {'; '.join(faults)}.\n" for what, faults in listed.items() if faults)
    return tables.grid(header, lines) + alarms + text


def faults(rows: Sequence[Row], when: str) -> str:
    """For every harmful fault: how often the monitor and other tools find it. Other faults are listed below."""
    lines, others = [], {}
    for case, by in _values(rows, group_of(when)).items():
        which, fault = case.split(" | ", 1)
        if fault == ALL:
            continue
        of, about = by.get(MONITOR), by[FAULT]
        if of is None:
            for status in ("no effect", "harmless", "raises"):
                if status in about:
                    others.setdefault((which, status), []).append(fault)
                    break
            continue
        runs, found, later = (_count(of, metric) for metric in ("runs", "found", "found later"))
        rules = sorted((m for m in of if m.startswith("first: ")), key=lambda m: -of[m].value)
        known = [tool for tool in by if tool not in (FAULT, MONITOR) and 2 * _count(by[tool], "found") >= runs]
        lines.append(
            [
                f"{which}: {fault}",
                f"{_harm(about['harm'].value)}",
                f"{found:.0f} of {runs:.0f}" + (f" (+{later:.0f})" if later else ""),
                f"{of['delay'].value:.0f}" if "delay" in of else "-",
                ", ".join(f"`{rule.removeprefix('first: ')}`" for rule in rules[:2]) or "-",
                f"{_count(of, 'place right'):.0f}" if _count(of, "found, with a place") else "-",
                ", ".join(name.split(",")[0] for name in known) or "-",
            ]
        )
    header = [f"{when}: fault", "harm", "found", "delay", "by", "place right", "also found by"]
    text = tables.grid(header, lines, text_columns=1)
    for (which, status), names in others.items():
        text += f"\n{which}, {status}: {'; '.join(names)}.\n"
    return text


def _harm(ratio: float) -> str:
    return "beyond all" if ratio >= 1e6 else f"{ratio:.3g}"


def healthy(rows: Sequence[Row]) -> str:
    """Findings of every tool in healthy trainings, and the cost of its step. Runs that diverged are listed below."""
    of_time = _values(rows, TIME)
    lines, diverged = [], []
    for case, by in _values(rows, HEALTHY).items():
        for tool, of in by.items():
            steps, found = of["steps"].value, of["findings"].value
            times = [of_tool[tool] for of_tool in of_time.values() if tool in of_tool]
            slower = [f"{each['time ratio'].value:.2f}" for each in times]
            lines.append(
                [
                    f"{tool}, {case}",
                    f"{found:.0f}",
                    f"{steps:,.0f}",
                    f"{1e4 * found / steps:.2f}",
                    ", ".join(slower) or "-",
                ]
            )
            names = [metric.removeprefix(DIVERGED) for metric in of if metric.startswith(DIVERGED)]
            diverged += [
                f"{name} (findings in {_count(of, FOUND_IN + name):.0f} of {of[DIVERGED + name].value:.0f})"
                for name in names
            ]
    header = ["tool, healthy", "findings", "steps", "per 10,000", ", ".join(["step to that without", *of_time])]
    text = f"\nDiverged and not counted: {'; '.join(diverged)}.\n" if diverged else ""
    return tables.grid(header, lines) + text


def in_a_sentence(rows: Sequence[Row]) -> str:
    """How many published faults and ordinary mistakes are found, and how much is found in healthy trainings."""

    def total(when: str, *metrics: str) -> float:
        by_case = _values(rows, group_of(when))
        every = [
            by_case[case_of(which)] for which in ("mistakes", "operators", "silent errors") if case_of(which) in by_case
        ]
        return sum(
            _count(next(iter(by.values())), metric) for by in every for metric in metrics
        )  # the monitor is first

    middle, start = ((total(when, "found"), total(when, "runs")) for when in WHEN)
    later = total(WHEN[1], "found", "found later")
    healthy = [by[MONITOR] for by in _values(rows, HEALTHY).values()]
    steps, alarms = (sum(_count(of, metric) for of in healthy) for metric in ("steps", "findings"))
    with_golden = f"{total(GOLDEN, 'found'):.0f} of {total(GOLDEN, 'runs'):.0f}"
    return (
        "In small trainings with [faults that others published and ordinary mistakes](docs/detection.md), a monitor "
        f"without options finds {middle[0]:.0f} of {middle[1]:.0f} harmful faults that begin mid-run within 60 steps. "
        f"Of {start[1]:.0f} faults that exist from the first step it finds {start[0]:.0f} within 60 steps and "
        f"{later:.0f} by step 300, and a comparison with [golden runs](docs/golden.md) calls {with_golden} unlike. In "
        f"{steps:,.0f} healthy steps there are {alarms:.0f} findings.\n"
    )


def every_fault(rows: Sequence[Row]) -> str:
    """The tables of faults."""
    return "\n".join(faults(rows, when) for when in WHEN)


def everything(rows: Sequence[Row], per_fault: bool = True) -> str:
    """All tables."""
    parts = [*(tools(rows, when) for when in WHEN), healthy(rows)]
    return "\n".join([*parts, golden(rows), every_fault(rows)] if per_fault else parts)
