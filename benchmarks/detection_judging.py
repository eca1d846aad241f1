"""What counts as harm and as a hit in the benchmark of detection, and the rows about it."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import detection_tables
import torch
from detection_cases import Case
from detection_tools import NAMES, Gradstat
from rows import Row, row

from gradstat.bench.timing import Quartiles, quartiles

STEPS = 300  # of a run
WITHIN = 60  # steps after the onset in which a finding is a hit
HARM = 1.15  # at least by this factor a harmful fault raises the loss, with every seed
WINDOW = 20  # steps over which losses are averaged
FLOOR = 0.01  # of the first loss; added to the healthy loss, so that noise of losses near zero is no harm


@dataclass(frozen=True)
class Flag:
    """What a tool said in step ``noticed`` about step ``step``."""

    noticed: int
    step: int
    rule: str
    name: str


@dataclass
class Arm:
    """One run of a training: its losses and norms, what each tool flagged, and how it ended."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    flags: dict[str, list[Flag]] = field(default_factory=dict)
    held_out: float = math.nan  # the healthy loss of unseen batches at the end
    raised: str = ""


# Judging ----------------------------------------------------------------------------------------------------------


def harm(case: Case, broken: Arm, twin: Arm) -> float:
    """By how much the fault raises the loss of the steps that follow or of the last ones, whichever is more."""
    if broken.raised:
        return math.inf
    if case.is_held_out:
        return _ratio(broken.held_out, twin.held_out, twin)
    parts = (slice(case.onset, case.onset + WINDOW), slice(-WINDOW, None))
    return max(_ratio(_mean(broken.losses[part]), _mean(twin.losses[part]), twin) for part in parts)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _ratio(loss: float, healthy: float, twin: Arm) -> float:
    floor = FLOOR * abs(twin.losses[0])
    # Losses below zero have no ratio; their difference is compared with the healthy loss's size.
    if not math.isfinite(loss):
        return math.inf
    return 1 + (loss - healthy) / (abs(healthy) + floor)


def hits(case: Case, broken: Arm, twin: Arm, tool: str, within: int = WITHIN) -> list[Flag]:
    """The flags of the broken arm soon after the onset that its twin has not; the first in a diagnosis first."""
    end = case.onset + within
    known = {(flag.rule, flag.name) for flag in twin.flags[tool] if case.onset <= flag.noticed <= end}
    found = [
        flag for flag in broken.flags[tool] if case.onset <= flag.noticed <= end and (flag.rule, flag.name) not in known
    ]
    return sorted(found, key=lambda flag: flag.step)


@dataclass(frozen=True)
class Verdict:
    """A case, judged over its seeds."""

    case: Case
    arms: list[tuple[Arm, Arm]]  # broken and healthy, by seed

    @property
    def harms(self) -> list[float]:
        return [harm(self.case, *pair) for pair in self.arms]

    @property
    def status(self) -> str:
        """Whether it counts: ``"harmful"``, or why not."""
        if any(broken.raised for broken, _ in self.arms):
            return "raises"
        if all(broken.losses == twin.losses and broken.norms == twin.norms for broken, twin in self.arms):
            return "no effect"
        return "harmful" if min(self.harms) >= HARM else "harmless"

    def hits(self, tool: str, within: int = WITHIN) -> list[list[Flag]]:
        """The hits with every seed."""
        return [hits(self.case, *pair, tool, within) for pair in self.arms]


def line(verdict: Verdict, tool: str) -> str:
    """What became of a case, in a line."""
    case, found = verdict.case, verdict.hits(tool)
    hit = [flags for flags in found if flags]
    late = [flags for flags in verdict.hits(tool, STEPS) if flags]
    ratio = f"{min(verdict.harms):8.3g}"
    text = f"{case.set:10} {case.subject[:20]:20} {case.what[:48]:48} {case.when:11} {verdict.status:9} {ratio}"
    text += f"  hit {len(hit)}/{len(found)}"
    if hit:
        delay = statistics.median(min(flag.noticed for flag in flags) - case.onset for flags in hit)
        first = hit[0][0]
        right = sum(is_right(case, flags[0]) for flags in hit)
        text += f"  delay {delay:<4g} {first.rule} ({first.name})  place right {right}/{len(hit)}"
    elif late:
        first = late[0][0]
        text += f"  late: step {first.noticed} {first.rule} ({first.name})"
    if verdict.status == "raises":
        text += "  " + verdict.arms[0][0].raised
    return text


def course(verdict: Verdict) -> str:
    """What the rows of a case show: losses, norms and weights before and after, beside those of its twin."""
    case, parts = verdict.case, []
    for name, arm in zip(("broken", "twin"), verdict.arms[0], strict=True):
        windows = {"next 20": slice(case.onset, case.onset + WINDOW), "last 20": slice(-WINDOW, None)}
        if case.onset:
            windows = {"20 before": slice(case.onset - WINDOW, case.onset), **windows}
        shown = [
            f"{window}: loss {_mean(arm.losses[part]):.4g}±{_spread(arm.losses[part]):.2g} "
            f"norm {_mean(arm.norms[part]):.4g}±{_spread(arm.norms[part]):.2g}"
            for window, part in windows.items()
        ]
        if arm.weights:
            shown.append(f"|w| {arm.weights[0]:.4g} to {arm.weights[-1]:.4g}")
        parts.append(f"    {name:7} " + "; ".join(shown))
    return "\n".join(parts)


def _spread(values: Sequence[float]) -> float:
    return statistics.pstdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


# Rows -------------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
MOST = 1e6  # what is recorded of a harm that has no limit


def rows_of(verdicts: Sequence[Verdict]) -> list[Row]:
    """The rows of faults, each over its models and seeds, and of whole sets."""
    made = []
    for when in detection_tables.WHEN:
        those = [verdict for verdict in verdicts if verdict.case.when == when]
        for which in dict.fromkeys(verdict.case.set for verdict in those):
            of_set = [verdict for verdict in those if verdict.case.set == which]
            made += _rows_of_tools(when, which, detection_tables.ALL, of_set, NAMES)
            for what in dict.fromkeys(verdict.case.what for verdict in of_set):
                of_fault = [verdict for verdict in of_set if verdict.case.what == what]
                made += _rows_of_fault(when, which, what, of_fault)
    return made


def _rows_of_fault(when: str, which: str, what: str, verdicts: Sequence[Verdict]) -> list[Row]:
    group, case = detection_tables.group_of(when), detection_tables.case_of(which, what)
    made = [
        row(group, case, detection_tables.FAULT, status, "", float(number), CPU)
        for status, number in Counter(verdict.status for verdict in verdicts).items()
    ]
    harmful = [verdict for verdict in verdicts if verdict.status == "harmful"]
    if not harmful:
        return made
    harm = min(MOST, statistics.median(harm for verdict in harmful for harm in verdict.harms))
    made.append(row(group, case, detection_tables.FAULT, "harm", "", harm, CPU))
    finders = [tool for tool in NAMES if tool == Gradstat.name or any(any(v.hits(tool)) for v in harmful)]
    return made + _rows_of_tools(when, which, what, harmful, finders)


def _rows_of_tools(when: str, which: str, what: str, verdicts: Sequence[Verdict], tools: Sequence[str]) -> list[Row]:
    harmful = [verdict for verdict in verdicts if verdict.status == "harmful"]
    made = []
    for tool in tools:
        runs = [(verdict, flags) for verdict in harmful for flags in verdict.hits(tool)]
        hit = [(verdict.case, flags) for verdict, flags in runs if flags]
        later = [
            flags
            for verdict in harmful
            for soon, flags in zip(verdict.hits(tool), verdict.hits(tool, STEPS), strict=True)
            if flags and not soon
        ]
        values: dict[str, float | Quartiles] = {
            "runs": float(len(runs)),
            "found": float(len(hit)),
            "found later": float(len(later)),
            "twins flagged": float(sum(has_alarm(v.case, twin, tool) for v in harmful for _, twin in v.arms)),
        }
        if hit:
            values["delay"] = quartiles([min(flag.noticed for flag in flags) - case.onset for case, flags in hit])
        if tool == Gradstat.name:
            placed = [(case, flags) for case, flags in hit if case.place]
            values["found, with a place"] = float(len(placed))
            values["place right"] = float(sum(is_right(case, flags[0]) for case, flags in placed))
            if what != detection_tables.ALL:
                rules = Counter(flags[0].rule for _, flags in hit)
                values |= {f"first: {rule}": float(count) for rule, count in rules.items()}
        made += [
            row(detection_tables.group_of(when), detection_tables.case_of(which, what), tool, metric, "", value, CPU)
            for metric, value in values.items()
        ]
    return made


def is_right(case: Case, flag: Flag) -> bool:
    """Whether a flag names the place of the fault."""
    return re.search(case.place, flag.name) is not None


def has_alarm(case: Case, twin: Arm, tool: str) -> bool:
    """Whether a tool flags the healthy twin in the steps in which it should flag the fault."""
    return any(case.onset <= flag.noticed <= case.onset + WITHIN for flag in twin.flags[tool])


def episodes(flags: Sequence[Flag]) -> int:
    """The number of findings, where flags with the same name that follow one another soon are one."""
    last: dict[tuple[str, str], int] = {}
    count = 0
    for flag in flags:
        earlier = last.get((flag.rule, flag.name))
        count += earlier is None or flag.noticed - earlier > WITHIN
        last[flag.rule, flag.name] = flag.noticed
    return count


def healthy_rows(arms: Sequence[Arm]) -> list[Row]:
    """The rows about findings in healthy arms."""
    steps = float(sum(len(arm.losses) for arm in arms))
    made = []
    for tool in NAMES:
        found = float(sum(episodes(arm.flags[tool]) for arm in arms))
        for metric, value in (("steps", steps), ("findings", found)):
            made.append(
                row(detection_tables.HEALTHY, "trainings of the tests, and twins", tool, metric, "", value, CPU)
            )
    return made
