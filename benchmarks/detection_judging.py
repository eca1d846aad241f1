"""Cases of the benchmark of detection, what counts there as harm and as a hit, and the rows about it."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import detection_tables
from detection_tools import GOLDEN, NAMES, Gradstat
from helpers.training import Training
from rows import Row
from runner import rows_of_values

from gradstat.bench.timing import Quartiles, quartiles
from gradstat.monitor import Golden, Recording

STEPS = 300  # of a run
ONSET = 150  # the step in which faults in the middle of a run begin
WITHIN = 60  # steps after the onset in which a finding is a hit
HARM = 1.15  # a harmful fault raises the loss by at least this factor, with every seed
WINDOW = 20  # steps over which losses are averaged
FLOOR = 0.01  # of the first loss; added to the healthy loss, so that noise of losses near zero is no harm


@dataclass(frozen=True)
class Case:
    """A fault in a training, which begins in step ``onset``."""

    set: str
    half: str  # "tuning", "figures" or "both"
    subject: str
    what: str
    twin: Callable[[int], Training]  # the healthy training, from a seed
    breaks: Callable[[Training], object]
    place: str  # regular expression for names in findings about the right place; empty if the fault is everywhere
    onset: int
    broken: Callable[[int], Training] | None = None  # the training that ``breaks`` gets, if it is not the twin
    is_everywhere: bool = False  # a comparison that says so names the place
    is_held_out: bool = False  # judged by the healthy loss of unseen batches
    ranks: int = 1
    broken_ranks: tuple[int, ...] = (0,)

    @property
    def when(self) -> str:
        return "mid-run" if self.onset else "from step 0"


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
    flags: dict[str, list[Flag]] = field(default_factory=dict)
    held_out: float = math.nan  # the healthy loss of unseen batches at the end
    raised: str = ""
    recording: Recording | None = None  # until it is compared with golden runs


def harm(case: Case, broken: Arm, twin: Arm) -> float:
    """The factor by which the fault raises the loss: the larger one of the next steps and of the last steps."""
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


def has_diverged(first: float, last: float) -> bool:
    """Whether a healthy program went wrong: what must fall as it learns ends as far above its beginning as harm is."""
    return not last - first <= (HARM - 1) * abs(first)


def within_of(tool: str) -> int:
    """The number of steps after the onset in which a flag is a hit: all steps if whole runs are compared."""
    return STEPS if tool == GOLDEN else WITHIN


def hits(case: Case, broken: Arm, twin: Arm, tool: str, within: int | None = None) -> list[Flag]:
    """The flags of the broken arm soon after the onset that its twin does not have, in the order of a diagnosis."""
    end = case.onset + (within_of(tool) if within is None else within)
    known = {(flag.rule, flag.name) for flag in twin.flags[tool] if case.onset <= flag.noticed <= end}
    found = [
        flag for flag in broken.flags[tool] if case.onset <= flag.noticed <= end and (flag.rule, flag.name) not in known
    ]
    return sorted(found, key=lambda flag: flag.step)


# Names that places of cases match, for what a comparison says about a whole run.
_AS_NAMES = {"the learning rate": "lr", "the loss": "loss", "the batch": "batch", "everywhere": "batch[1]\nloss"}


def compare(arm: Arm, golden: Golden) -> None:
    """Adds flags where an arm is unlike golden runs, and drops its recording."""
    recording, arm.recording = arm.recording, None
    if recording is None or not len(recording.steps):  # it raised in its first step
        return
    compared = golden.compare(recording)
    if compared.findings:
        first = compared.findings[0]
        parts = re.split(r", first in | and | to ", compared.where)
        names = [_AS_NAMES.get(part, part) for part in parts] + ["optimizer"] * ("optimizer" in compared.what)
        told = re.sub(r" \(.*", "", f"{compared.where}: {compared.what}")
        arm.flags[GOLDEN] = [Flag(first.last, first.step, told, "\n".join(names))]


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

    def hits(self, tool: str, within: int | None = None) -> list[list[Flag]]:
        """The hits with every seed."""
        return [hits(self.case, *pair, tool, within) for pair in self.arms]


def line(verdict: Verdict, tool: str) -> str:
    """The outcome of a case, in a line."""
    case, found = verdict.case, verdict.hits(tool)
    hit = [flags for flags in found if flags]
    late = [flags for flags in verdict.hits(tool, STEPS) if flags]
    ratio = f"{min(verdict.harms):8.3g}"
    text = f"{case.set:10} {case.subject[:20]:20} {case.what[:48]:48} {case.when:11} {verdict.status:9} {ratio}"
    text += f"  hit {len(hit)}/{len(found)}"
    if hit:
        delay = statistics.median(min(flag.noticed for flag in flags) - case.onset for flags in hit)
        first = replace(hit[0][0], name=" ".join(hit[0][0].name.split()))
        right = sum(is_right(case, flags[0]) for flags in hit)
        text += f"  delay {delay:<4g} {first.rule} ({first.name})  place right {right}/{len(hit)}"
    elif late:
        first = late[0][0]
        text += f"  late: step {first.noticed} {first.rule} ({first.name})"
    if verdict.status == "raises":
        text += "  " + verdict.arms[0][0].raised
    return text


def rows_of(verdicts: Sequence[Verdict]) -> list[Row]:
    """The rows of faults, each over its models and seeds, and of whole sets."""
    made = []
    for when in detection_tables.WHEN:
        group, those = detection_tables.group_of(when), [verdict for verdict in verdicts if verdict.case.when == when]
        for which in dict.fromkeys(verdict.case.set for verdict in those):
            of_set = [verdict for verdict in those if verdict.case.set == which]
            for tool in NAMES:
                made += _rows_of_tool(when, which, detection_tables.ALL, of_set, tool)
            for what in dict.fromkeys(verdict.case.what for verdict in of_set):
                of_fault = [verdict for verdict in of_set if verdict.case.what == what]
                statuses = Counter(verdict.status for verdict in of_fault)
                case = detection_tables.case_of(which, what)
                made += rows_of_values(group, case, detection_tables.FAULT, statuses)
                if statuses["harmful"]:
                    made += _rows_of_tool(when, which, what, of_fault, Gradstat.name)
    return made + golden_rows(verdicts)


def _rows_of_tool(when: str, which: str, what: str, verdicts: Sequence[Verdict], tool: str) -> list[Row]:
    """The harmful runs and those found; of gradstat also later ones and, of a whole set, when and where."""
    harmful = [verdict for verdict in verdicts if verdict.status == "harmful"]
    runs = [(verdict, flags) for verdict in harmful for flags in verdict.hits(tool)]
    hit = [(verdict.case, flags) for verdict, flags in runs if flags]
    values: dict[str, float | Quartiles] = {"runs": len(runs), "found": len(hit)}
    if tool == Gradstat.name:
        later = [flags for verdict in harmful for flags in verdict.hits(tool, STEPS)]
        values["found later"] = sum(bool(flags) and not soon for (_, soon), flags in zip(runs, later, strict=True))
    if tool in (Gradstat.name, GOLDEN) and what == detection_tables.ALL:
        values["twins flagged"] = sum(has_alarm(v.case, twin, tool) for v in harmful for _, twin in v.arms)
        if hit:
            values["delay"] = quartiles([min(flag.noticed for flag in flags) - case.onset for case, flags in hit])
        # Those of the repository are what a rule names first, though the fault may be everywhere.
        placed = [(c, flags) for c, flags in hit if c.place and (tool, c.set) != (GOLDEN, "repository")]
        values["found, with a place"] = len(placed)
        values["place right"] = sum(is_right(case, flags[0]) for case, flags in placed)
    return rows_of_values(detection_tables.group_of(when), detection_tables.case_of(which, what), tool, values)


def golden_rows(verdicts: Sequence[Verdict]) -> list[Row]:
    """Rows about comparisons of faults from step 0 with golden runs. DEForm's models also have rows of their own."""
    those = [verdict for verdict in verdicts if not verdict.case.onset]
    harmful = [verdict for verdict in those if verdict.status == "harmful"]
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in harmful:
        case, every = verdict.case, detection_tables.ALL
        one_by_one = [(f"{case.set}, {case.subject}", every)] * (case.set == "operators")
        for key in ((case.set, every), *one_by_one, (case.set, case.what)):
            groups.setdefault(key, []).append(verdict)
    made = []
    for (which, what), of_group in groups.items():
        made += _rows_of_tool(detection_tables.GOLDEN, which, what, of_group, GOLDEN)
    twins = {id(twin): has_alarm(verdict.case, twin, GOLDEN) for verdict in those for _, twin in verdict.arms}
    group, values = (
        detection_tables.group_of(detection_tables.GOLDEN),
        {"runs": len(twins), "found": sum(twins.values())},
    )
    return made + rows_of_values(group, detection_tables.HEALTHY_RUNS, GOLDEN, values)


def is_right(case: Case, flag: Flag) -> bool:
    """Whether a flag names the place of the fault, in any of its lines."""
    is_everywhere = case.is_everywhere and flag.name.startswith(_AS_NAMES["everywhere"])
    return is_everywhere or re.search(case.place, flag.name, re.MULTILINE) is not None


def has_alarm(case: Case, twin: Arm, tool: str) -> bool:
    """Whether a tool flags the healthy twin in the steps in which it should flag the fault."""
    return any(case.onset <= flag.noticed <= case.onset + within_of(tool) for flag in twin.flags[tool])


def episodes(flags: Sequence[Flag]) -> int:
    """The number of findings. Flags of the same name that follow each other closely count as one."""
    last: dict[tuple[str, str], int] = {}
    count = 0
    for flag in flags:
        earlier = last.get((flag.rule, flag.name))
        count += earlier is None or flag.noticed - earlier > WITHIN
        last[flag.rule, flag.name] = flag.noticed
    return count


def healthy_rows(arms: Sequence[Arm]) -> list[Row]:
    """The rows about findings in healthy arms."""
    steps, made = sum(len(arm.losses) for arm in arms), []
    for tool in NAMES:
        values = {"steps": steps, "findings": sum(episodes(arm.flags[tool]) for arm in arms)}
        made += rows_of_values(detection_tables.HEALTHY, "trainings of the tests, and twins", tool, values)
    return made
