"""How well faults are detected: by gradstat's monitor at its defaults and by others, in trainings broken on purpose.

``python benchmarks/detection.py --set mistakes --seeds 0 1`` runs one set and prints a line per fault. The sets, what
counts as a hit, and the halves for tuning and for figures are explained in docs/detection.md. ``--record`` appends
rows to ``benchmarks/results/<device>/detection.jsonl``.
"""

from __future__ import annotations

import argparse
import atexit
import math
import re
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
import detection_tables  # noqa: E402
import faults  # noqa: E402
import public_programs  # noqa: E402
import rows as rows_module  # noqa: E402
from detection_mistakes import MISTAKES, SUBJECTS, applies  # noqa: E402
from detection_published import HAS_OPERATORS, SILENT_ERRORS, TRANSFORMERS, operators, silent_training  # noqa: E402
from detection_tools import DETECT_ANOMALY, NAMES, RIVALS, Gradstat, Unwatched, Watcher, anomaly_mode  # noqa: E402
from healthy import HEALTHY, Healthy  # noqa: E402
from public_programs import PROGRAMS  # noqa: E402
from rows import Row, row, step_rows  # noqa: E402
from small_training import RECORD, Training  # noqa: E402

from gradstat.bench.timing import Quartiles, interleaved, progress_bar, quartiles  # noqa: E402
from gradstat.distributed._ranks import Ranks  # noqa: E402

STEPS, ONSET = 300, 150  # of a run, and the step in which faults in the middle of a run begin
HEALTHY_STEPS = 1000  # of a healthy training of the tests
WITHIN = 60  # steps after the onset in which a finding is a hit
HARM = 1.15  # at least by this factor a harmful fault raises the loss, with every seed
WINDOW = 20  # steps over which losses are averaged
FLOOR = 0.01  # of the first loss; added to both losses, so that noise of losses near zero is no harm
SETS = ("mistakes", "operators", "silent errors", "repository")
SEEDS = {"tuning": range(5), "figures": range(5, 10)}


@dataclass(frozen=True)
class Case:
    """A fault in a training, which begins in step ``onset``."""

    set: str
    half: str  # "tuning", "figures" or "both"
    subject: str
    what: str
    twin: Callable[[int], Training]  # the healthy training, from a seed
    breaks: Callable[[Training], object]
    place: str  # regular expression for names in findings about the right place
    onset: int
    broken: Callable[[int], Training] | None = None  # the training that ``breaks`` gets, if it is not the twin
    is_held_out: bool = False  # judged by the healthy loss of unseen batches
    ranks: int = 1
    bad_ranks: tuple[int, ...] = (0,)
    policy: Any = field(default_factory=lambda: RECORD)

    @property
    def when(self) -> str:
        return "mid-run" if self.onset else "from step 0"


def _mistakes() -> Iterator[Case]:
    for subject in SUBJECTS:
        for mistake in MISTAKES:
            if not applies(mistake, subject):
                continue
            for when in mistake.onsets:
                yield Case(
                    "mistakes",
                    subject.half,
                    subject.name,
                    mistake.what,
                    subject.training,
                    lambda training, mistake=mistake, subject=subject: mistake.breaks(training, subject),
                    mistake.place(subject),
                    ONSET if when == "mid-run" else 0,
                    is_held_out=mistake.is_held_out,
                )


def _repository() -> Iterator[Case]:
    for fault in faults.FAULTS:
        yield Case(
            "repository",
            "both",
            fault.model,
            fault.what,
            fault.twin or fault.training,
            fault.breaks,
            f"^{re.escape(fault.name)}",
            ONSET if fault.step else 0,
            fault.training,
            is_held_out="loss" in fault.what,
            ranks=fault.ranks,
            bad_ranks=fault.bad_ranks,
            policy=fault.policy,
        )


def _operators() -> Iterator[Case]:
    for model in TRANSFORMERS if HAS_OPERATORS else ():
        for operator in operators(model.scope):
            for onset in (ONSET, 0):
                yield Case(
                    "operators",
                    model.half,
                    model.name,
                    operator.what,
                    model.training,
                    operator.breaks,
                    operator.place,
                    onset,
                )


def _silent_errors() -> Iterator[Case]:
    for error in SILENT_ERRORS:
        for onset in (ONSET, 0):
            yield Case(
                "silent errors",
                "both",
                "MLP" if error.ranks == 1 else f"MLP, DDP on {error.ranks} ranks",
                error.what,
                silent_training(error),
                error.breaks,
                "",
                onset,
                ranks=error.ranks,
                bad_ranks=tuple(range(error.ranks)),
            )


def _healthy() -> Iterator[Case]:
    """The healthy trainings of the tests, which have no fault."""
    for each in HEALTHY:

        def training(seed: int, each: Healthy = each) -> Training:
            return each.training(seed, HEALTHY_STEPS)

        yield Case("healthy", "both", each.name, "none", training, lambda training: None, "", 0)


@cache
def all_cases() -> tuple[Case, ...]:
    """The cases of all sets, and the healthy trainings."""
    return (*_mistakes(), *_operators(), *_silent_errors(), *_repository(), *_healthy())


# One run ----------------------------------------------------------------------------------------------------------


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


def run(case: Case, seed: int, is_broken: bool, steps: int = STEPS) -> Arm:
    """Runs a case or its twin; again under torch's anomaly mode if something was not finite, as that mode raises."""
    arm = _run(case, seed, is_broken, steps)
    arm.flags[DETECT_ANOMALY] = []
    if not all(map(math.isfinite, [*arm.losses, *arm.norms])):
        raised = _run(case, seed, is_broken, steps, in_anomaly_mode=True)
        if "returned nan values" in raised.raised:
            last = len(raised.losses)
            arm.flags[DETECT_ANOMALY] = [Flag(last, last, "nan", raised.raised.split("'")[1])]
    return arm


def _run(case: Case, seed: int, is_broken: bool, steps: int, in_anomaly_mode: bool = False) -> Arm:
    torch.set_num_threads(1)
    make = case.broken if is_broken and case.broken is not None else case.twin
    training, arm = make(seed), Arm()
    if case.ranks > 1:
        training.model = DistributedDataParallel(training.model)
        is_broken = is_broken and torch.distributed.get_rank() in case.bad_ranks
    loss_of = training.loss
    held = [training.batch() for _ in range(8)]
    if is_broken and case.onset == 0:
        try:
            case.breaks(training)
        except Exception as error:
            return Arm(raised=_told(error), flags={name: [] for name in NAMES})
    tools = [] if in_anomaly_mode else [Gradstat(training, case.policy), *(rival() for rival in RIVALS)]
    watcher = Watcher(training, tools)
    training.shown = True  # to the rules; the monitor gets no batches
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with anomaly_mode(in_anomaly_mode):
                for step, begins in training.steps(watcher, 0, steps):  # type: ignore[arg-type]
                    if begins and is_broken and step == case.onset > 0:
                        case.breaks(training)
                    if not begins and step % WINDOW == 0:
                        arm.weights.append(_norm_of_weights(training))
            if len(watcher.losses) < steps:
                arm.raised = "the forward pass raised"
        except Exception as error:  # whatever it is, it tells about itself
            arm.raised = _told(error)
        watcher.end()
    arm.losses, arm.norms = watcher.losses, watcher.norms
    arm.flags = {name: [Flag(noticed, *found) for noticed, found in flags] for name, flags in watcher.found.items()}
    if not arm.raised:
        training.model.eval()
        # Gradients stay on, as some faults are hooks on gradients.
        with torch.autocast("cpu", training.autocast) if training.autocast else nullcontext():
            arm.held_out = statistics.fmean(loss_of(training.model, batch).item() for batch in held)
    return arm


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:100]


def _norm_of_weights(training: Training) -> float:
    return float(torch.nn.utils.get_total_norm([p.detach() for p in training.model.parameters()]))


def _run_on_rank(number: int, seed: int, is_broken: bool, steps: int) -> Arm:
    return run(all_cases()[number], seed, is_broken, steps)


@cache
def _ranks() -> Ranks:
    pool = Ranks(2)
    atexit.register(pool.stop)
    return pool


Result = TypeVar("Result")
Job = tuple[int, int, bool, int]  # a case's number, a seed, whether it is broken, and steps


def run_job(job: Job) -> Arm:
    """Runs an arm."""
    number, seed, is_broken, steps = job
    case = all_cases()[number]
    if case.ranks > 1:
        arm: Arm = _ranks().run(case.ranks, _run_on_rank, *job, timeout=60.0, limit=120.0)[0]
        return arm
    return run(case, seed, is_broken, steps)


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
            values["place right"] = float(sum(is_right(case, flags[0]) for case, flags in hit))
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


# All of it --------------------------------------------------------------------------------------------------------


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


def run_program(job: tuple[int, int]) -> tuple[int, list[str]]:
    """Runs a healthy program of other projects under gradstat; returns its steps, and what was found."""
    number, seed = job
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, findings, monitors = public_programs.run(PROGRAMS[number], seed, PROGRAMS[number].steps)
    return max(monitor.steps for monitor in monitors), [f"{PROGRAMS[number].name}: {found}" for found in findings]


def program_rows(results: Sequence[tuple[int, list[str]]]) -> list[Row]:
    """The rows about findings in healthy programs of other projects."""
    for _, told in results:
        print(*(f"healthy: {found}" for found in told), sep="\n", end="\n" * bool(told))
    values = {"steps": sum(steps for steps, _ in results), "findings": sum(len(told) for _, told in results)}
    return [
        row(detection_tables.HEALTHY, "public programs", Gradstat.name, metric, "", float(value), CPU)
        for metric, value in values.items()
    ]


def time_rows(rounds: int) -> list[Row]:
    """What a step costs alone and with each tool, in turns."""
    made = []
    for subject in (subject for subject in SUBJECTS if subject.half == "figures"):
        steppers = {name: _stepper(subject.training, name) for name in ("no tool", *NAMES)}
        seconds = interleaved(steppers, rounds, warmup=20)
        for name, taken in seconds.items():
            made += step_rows(detection_tables.TIME, subject.name, name, taken, seconds["no tool"], CPU)
    return made


def _stepper(make: Callable[[int], Training], name: str) -> Callable[[], object]:
    training = make(SEEDS["figures"][0])
    tools: list[Any] = [Gradstat(training, RECORD)] if name == Gradstat.name else []
    tools += [rival() for rival in RIVALS if rival.name == name]
    watcher = Watcher(training, tools) if tools else Unwatched()
    steps = training.steps(watcher, 0, 1 << 30)  # type: ignore[arg-type]

    def step() -> None:
        with anomaly_mode(name == DETECT_ANOMALY):
            next(steps)
            next(steps)

    return step


def results_of(function: Callable[[Any], Result], jobs: Sequence[Any], processes: int) -> Iterator[Result]:
    """What a function returns for each job, in their order; reports progress on stderr."""
    pool = ProcessPoolExecutor(processes) if processes > 1 else None
    with pool or nullcontext(), progress_bar(len(jobs), "trainings") as bar:
        for result in map(function, jobs) if pool is None else pool.map(function, jobs):
            bar.update()
            yield result


def measure(numbers: Sequence[int], seeds: Sequence[int], processes: int, steps: int = STEPS) -> Iterator[Verdict]:
    """Runs cases with their twins, and yields each case's verdict."""
    cases = all_cases()
    twin_of: dict[Any, int] = {}  # cases that share a healthy training share its runs
    wanted: list[list[tuple[Job, Job]]] = []
    for number in numbers:
        twin = twin_of.setdefault((cases[number].twin, cases[number].ranks), number)
        wanted.append([((number, seed, True, steps), (twin, seed, False, steps)) for seed in seeds])
    jobs = list(dict.fromkeys(job for pairs in wanted for pair in pairs for job in pair))
    coming, done = zip(jobs, results_of(run_job, jobs, processes), strict=True), dict[Job, Arm]()
    for number, pairs in zip(numbers, wanted, strict=True):
        while any(job not in done for pair in pairs for job in pair):
            done.update([next(coming)])
        yield Verdict(cases[number], [(done[broken], done[twin]) for broken, twin in pairs])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", choices=SETS, default=SETS, help="sets of faults (default: all)")
    parser.add_argument("--half", choices=SEEDS, default="tuning", help="models and seeds (default: tuning)")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds (default: the five of the half)")
    parser.add_argument("--only", default="", help="only faults and subjects that match this regular expression")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--course", action="store_true", help="also print losses and norms of harmful faults not found")
    parser.add_argument("--healthy", action="store_true", help="also run the healthy trainings of the tests")
    parser.add_argument("--time", type=int, default=0, metavar="STEPS", help="also time so many steps with each tool")
    rows_module.add_arguments(parser)
    arguments = parser.parse_args()
    if "operators" in arguments.set and not HAS_OPERATORS:
        parser.error(
            "the operators need the packages defaultplusplus and transformers: install them with "
            "pip install --no-deps defaultplusplus==0.4.1 and pip install transformers, or choose other sets with --set"
        )
    if arguments.record and arguments.half != "figures":
        parser.error("only the half for figures is recorded: add --half figures")
    chosen = [
        number
        for number, case in enumerate(all_cases())
        if case.set in arguments.set
        and case.half in (arguments.half, "both")
        and re.search(arguments.only, f"{case.subject}: {case.what}, {case.when}")
    ]
    seeds, verdicts = arguments.seeds or SEEDS[arguments.half], []
    for verdict in measure(chosen, seeds, arguments.jobs):
        verdicts.append(verdict)
        print(line(verdict, Gradstat.name), flush=True)
        if arguments.course and verdict.status == "harmful" and not all(verdict.hits(Gradstat.name)):
            print(course(verdict), flush=True)
    made = rows_of(verdicts)
    arms = list({id(twin): twin for verdict in verdicts for _, twin in verdict.arms}.values())
    if arguments.healthy:
        numbers = [number for number, case in enumerate(all_cases()) if case.set == "healthy"]
        jobs = [(number, seed, False, HEALTHY_STEPS) for number in numbers for seed in seeds]
        arms += results_of(run_job, jobs, arguments.jobs)
        programs = [(number, seed) for number in range(len(PROGRAMS)) for seed in seeds]
        made += program_rows(list(results_of(run_program, programs, arguments.jobs)))
    made += healthy_rows(arms)
    for arm in arms:
        for flag in arm.flags[Gradstat.name]:
            print(f"healthy: {flag}")
    if arguments.time:
        made += time_rows(arguments.time)
    print("\n" + detection_tables.everything(made))
    if arguments.record:
        print(rows_module.append(made, "detection", arguments.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
