"""Measures how well gradstat's monitor, with default options, and other tools detect faults put into trainings.

``python benchmarks/detection.py --set mistakes --seeds 0 1`` runs one set and prints a line per fault. The sets, what
counts as a hit, and the halves for tuning and for figures are explained in docs/detection.md. ``--record`` runs the
half for figures, healthy trainings and a clock, and appends rows to ``benchmarks/results/<device>/detection.jsonl``.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import detection_mistakes
import detection_published
import detection_tables
import runner
import torch
import torch.distributed
import training_programs
from detection_judging import ONSET, STEPS, Arm, Case, Flag, Verdict, compare, has_diverged, healthy_rows, line, rows_of
from detection_mistakes import SUBJECTS
from detection_tools import DETECT_ANOMALY, GOLDEN, NAMES, RIVALS, Gradstat, Watcher, anomaly_mode
from helpers.training import HEALTHY, Healthy, Training
from helpers.training_faults import FAULTS
from rows import Row, record, step_rows
from runner import CPU, Job, on_two_ranks, results_of, rows_of_values
from torch.nn.parallel import DistributedDataParallel
from training_programs import PROGRAMS

from gradstat.bench.timing import interleaved
from gradstat.monitor import Golden

SETS = ("mistakes", "operators", "silent errors", "repository")
SEEDS = {"tuning": range(5), "figures": range(5, 10)}
GOLDEN_SEEDS = range(100, 105)
HEALTHY_STEPS = 1000  # of a healthy training of the tests


def _repository() -> Iterator[Case]:
    """The faults of the tests, and their healthy trainings, which have none."""
    for fault in FAULTS:
        yield Case(
            "repository", "both", fault.model, fault.what, fault.twin or fault.training, fault.breaks,
            f"^{re.escape(fault.name)}", ONSET if fault.step else 0, fault.training,
            is_held_out="loss" in fault.what or fault.twin is not None,
            ranks=fault.ranks, broken_ranks=fault.broken_ranks,
        )  # fmt: skip
    for each in HEALTHY:

        def training(seed: int, each: Healthy = each) -> Training:
            return each.training(seed, HEALTHY_STEPS)

        yield Case("healthy", "both", each.name, "none", training, lambda training: None, "", 0)


@cache
def all_cases() -> tuple[Case, ...]:
    """The cases of all sets, and the healthy trainings."""
    return (*detection_mistakes.cases(), *detection_published.cases(), *_repository())


def run(case: Case, seed: int, is_broken: bool, steps: int = STEPS, *, redrawn: int | None = None) -> Arm:
    """Runs a case or its twin. If something was not finite, runs it again under torch's anomaly mode, which raises.

    Weights and samples are those of the seed ``redrawn``, if there is one, for the same task.
    """
    if redrawn is not None:
        case = replace(case, twin=partial(_redrawn, case.twin, redrawn))
    arm = _run(case, seed, is_broken, steps)
    arm.flags |= {DETECT_ANOMALY: [], GOLDEN: []}
    is_nonfinite = torch.tensor(not all(map(math.isfinite, [*arm.losses, *arm.norms])), dtype=torch.float32)
    if case.ranks > 1:
        torch.distributed.all_reduce(is_nonfinite, torch.distributed.ReduceOp.MAX)
    if is_nonfinite:
        raised = _run(case, seed, is_broken, steps, in_anomaly_mode=True)
        if "returned nan values" in raised.raised:
            last = len(raised.losses)
            arm.flags[DETECT_ANOMALY] = [Flag(last, last, "nan", raised.raised.split("'")[1])]
    return arm


def _run(case: Case, seed: int, is_broken: bool, steps: int, in_anomaly_mode: bool = False) -> Arm:
    torch.set_num_threads(1)
    loss_of = case.twin(seed).loss
    make = case.broken if is_broken and case.broken is not None else case.twin
    training, arm = make(seed), Arm()
    if case.ranks > 1:
        training.model = DistributedDataParallel(training.model)
        is_broken = is_broken and torch.distributed.get_rank() in case.broken_ranks
    held = [training.batch() for _ in range(8)]
    if is_broken and case.onset == 0:
        try:
            case.breaks(training)
        except Exception as error:
            return Arm(raised=_told(error), flags={name: [] for name in (*NAMES, GOLDEN)})
    gradstat = None if in_anomaly_mode else Gradstat(training)
    tools: list[Any] = [] if gradstat is None else [gradstat, *(rival() for rival in RIVALS)]
    watcher = Watcher(training, tools)
    training.shown = True  # to the rules; the monitor gets no batches
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", ".*is switched off")  # a rule that raises is a mistake of its own
        try:
            with anomaly_mode(in_anomaly_mode):
                for step, begins in training.steps(watcher, 0, steps):  # type: ignore[arg-type]
                    if begins and is_broken and step == case.onset > 0:
                        case.breaks(training)
            if len(watcher.losses) < steps:
                arm.raised = "the forward pass raised"
        except Exception as error:  # of any kind: an error reveals the fault
            arm.raised = _told(error)
        watcher.end()
    if gradstat is not None and not (is_broken and case.onset):
        arm.recording = gradstat.monitor.recording()
    arm.losses, arm.norms = watcher.losses, watcher.norms
    arm.flags = {name: [Flag(noticed, *found) for noticed, found in flags] for name, flags in watcher.found.items()}
    if not arm.raised:
        training.model.eval()
        # Gradients stay on, as some faults are hooks on gradients.
        with torch.autocast("cpu", training.autocast) if training.autocast else nullcontext():
            arm.held_out = statistics.fmean(loss_of(training.model, batch).item() for batch in held)
    return arm


def _redrawn(make: Callable[[int], Training], redrawn: int, seed: int) -> Training:
    training, task = make(redrawn), cast(Any, make(seed).batch)
    task.random.manual_seed(redrawn)
    training.batch = task
    return training


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:100]


def run_job(job: Job) -> Arm:
    """Runs an arm: a case's number, a seed, whether it is broken, steps, and another seed for weights and samples."""
    number, seed, is_broken, steps, redrawn = job
    case = all_cases()[number]
    if case.ranks > 1 and not torch.distributed.is_initialized():
        return on_two_ranks(run_job, job)
    return run(case, seed, is_broken, steps, redrawn=redrawn)


class ProgramRun(NamedTuple):
    """A run of a healthy program of another project under gradstat."""

    name: str
    steps: int
    ends: tuple[float, float]  # of what must fall as it learns
    findings: Sequence[str]


def run_program(job: Job) -> ProgramRun:
    """Runs a program, by its number and a seed."""
    number, seed = job
    program = PROGRAMS[number]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome, findings, monitors = training_programs.run(program, seed, program.steps)
    steps = max(monitor.steps for monitor in monitors)
    return ProgramRun(program.name, steps, outcome.ends(), [f"seed {seed}: {found}" for found in findings])


def program_rows(runs: Sequence[ProgramRun]) -> list[Row]:
    """The rows about findings in healthy programs of other projects. Those that diverged are counted on their own."""
    diverged = [run for run in runs if has_diverged(*run.ends)]
    healthy = [run for run in runs if run not in diverged]
    for what, some in (("healthy", healthy), ("diverged", diverged)):
        print(*(f"{what}: {run.name}, {found}\n" for run in some for found in run.findings), sep="", end="")
    values = {"steps": sum(run.steps for run in healthy), "findings": sum(len(run.findings) for run in healthy)}
    for run in diverged:
        for metric, is_counted in ((detection_tables.DIVERGED, 1), (detection_tables.FOUND_IN, bool(run.findings))):
            values[metric + run.name] = values.get(metric + run.name, 0) + is_counted
    return rows_of_values(detection_tables.HEALTHY, "public programs", Gradstat.name, values)


def time_rows(rounds: int = 300) -> list[Row]:
    """Rows about the time of a step alone and with each tool, measured in turns."""
    made = []
    for subject in (subject for subject in SUBJECTS if subject.half == "figures"):
        steppers = {name: _stepper(subject.training, name) for name in ("no tool", *NAMES)}
        seconds = interleaved(steppers, rounds, warmup=20)
        for name, taken in seconds.items():
            made += step_rows(detection_tables.TIME, subject.name, name, taken, seconds["no tool"], CPU)
    return made


def _stepper(make: Callable[[int], Training], name: str) -> Callable[[], object]:
    training = make(SEEDS["figures"][0])
    tools: list[Any] = [Gradstat(training)] if name == Gradstat.name else []
    tools += [rival() for rival in RIVALS if rival.name == name]
    watcher = Watcher(training, tools) if tools else SimpleNamespace(batch=lambda batch: None, step=lambda loss: None)
    steps = training.steps(watcher, 0, 1 << 30)  # type: ignore[arg-type]

    def step() -> None:
        with anomaly_mode(name == DETECT_ANOMALY):
            next(steps)
            next(steps)

    return step


def measure(
    numbers: Sequence[int], seeds: Sequence[int], processes: int, steps: int = STEPS, *, keep: Path | None = None
) -> Iterator[Verdict]:
    """Runs cases with their twins and, for faults from step 0, golden runs; yields each case's verdict."""
    cases = all_cases()
    twin_of: dict[Any, int] = {}  # cases that share a healthy training share its runs
    wanted: list[list[tuple[Job, ...]]] = []  # the broken arm, its twin, and golden runs of the twin
    for number in numbers:
        twin = twin_of.setdefault((cases[number].twin, cases[number].ranks), number)
        draws = (None,) if cases[number].onset else (None, *GOLDEN_SEEDS)
        of_twin = [[(twin, seed, False, steps, redrawn) for redrawn in draws] for seed in seeds]
        wanted.append([((number, seed, True, steps, None), *of) for seed, of in zip(seeds, of_twin, strict=True)])
    jobs = list(dict.fromkeys(itertools.chain(*itertools.chain(*wanted))))
    coming, done = zip(jobs, results_of(run_job, jobs, processes, keep), strict=True), dict[Job, Arm]()
    golden = cache(lambda *jobs: Golden.of(filter(None, (done[job].recording for job in jobs))))
    for number, of_case in zip(numbers, wanted, strict=True):
        while any(job not in done for job in itertools.chain(*of_case)):
            done.update([next(coming)])
        arms = [(done[broken], done[twin]) for broken, twin, *_ in of_case]
        for pair, (_, _, *healthy) in zip(arms, of_case, strict=True):
            for arm in pair if healthy else ():
                compare(arm, golden(*healthy))
        yield Verdict(cases[number], arms)


def main() -> int:
    parser = runner.parser_of(__doc__)
    parser.add_argument("--set", nargs="+", choices=SETS, default=SETS, help="sets of faults (default: all)")
    parser.add_argument("--half", choices=SEEDS, default="tuning", help="models and seeds (default: tuning)")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds (default: the five of the half)")
    parser.add_argument("--only", default="", help="only faults and subjects that match this regular expression")
    parser.add_argument("--healthy", action="store_true", help="also run the healthy trainings of the tests")
    arguments = parser.parse_args()
    if "operators" in arguments.set and not detection_published.HAS_OPERATORS:
        parser.error(
            "the operators need the packages defaultplusplus and transformers: install them with "
            "pip install --no-deps defaultplusplus==0.4.1 and pip install transformers, or choose other sets with --set"
        )
    half = "figures" if arguments.record else arguments.half
    chosen = [
        number
        for number, case in enumerate(all_cases())
        if case.set in arguments.set
        and case.half in (half, "both")
        and re.search(arguments.only, f"{case.subject}: {case.what}, {case.when}")
    ]
    seeds, verdicts = arguments.seeds or SEEDS[half], []
    for verdict in measure(chosen, seeds, arguments.jobs, keep=arguments.keep):
        verdicts.append(verdict)
        for tool in (Gradstat.name, GOLDEN)[: 1 if verdict.case.onset else 2]:
            print(line(verdict, tool), flush=True)
    made = rows_of(verdicts)
    arms = list({id(twin): twin for verdict in verdicts for _, twin in verdict.arms}.values())
    if arguments.record or arguments.healthy:
        numbers = [number for number, case in enumerate(all_cases()) if case.set == "healthy"]
        jobs = [(number, seed, False, HEALTHY_STEPS, None) for number in numbers for seed in seeds]
        arms += results_of(run_job, jobs, arguments.jobs)
        programs = [(number, seed) for number in range(len(PROGRAMS)) for seed in seeds]
        made += program_rows(list(results_of(run_program, programs, arguments.jobs)))
    made += healthy_rows(arms)
    for arm in arms:
        for flag in arm.flags[Gradstat.name]:
            print(f"healthy: {flag}")
    if arguments.record:
        made += time_rows()
    print("\n" + detection_tables.everything(made))
    record(made, "detection", arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
