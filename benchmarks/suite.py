"""Compares gradstat with torch: ``make bench`` runs the quick set, ``make bench-full`` everything.

Results are verified before anything is timed. Calls take turns in one process; times are medians with quartiles. The
output is tables; ``--record`` also appends rows to ``benchmarks/results/<device>/``, the source of every figure and
chart in the documents.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import cases
import step_providers
import tables
import torch
from cases import CASES, Case, Dtypes, Input, Provider, Shape, bytes_of, input_of, providers_for, verify
from device_timing import Flush, interleaved
from models import TRAININGS, Training
from rows import Row, append, dtype_name, microseconds, parser_of, row
from step_providers import SETTINGS, Setting, StepInput
from torch import nn

import gradstat
from gradstat.bench import machine, steps, timing
from gradstat.bench.steps import WrongAnswerError
from gradstat.bench.timing import Quartiles, progress_bar


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how long.

    Attributes:
        device: The device to measure on.
        full: Everything, or the quick set.
        seconds: Time for the rounds of one comparison, which determines their number.
        min_rounds, max_rounds: Bounds on the number of rounds.
    """

    device: torch.device
    full: bool
    seconds: float
    min_rounds: int = 7
    max_rounds: int = 40

    def rounds(self, once: float) -> int:
        """The number of rounds, if one takes ``once`` seconds."""
        return max(self.min_rounds, min(self.max_rounds, int(self.seconds / max(once, 1e-6))))

    def holds(self, case: Case) -> bool:
        """Whether the case is part of the plan."""
        return self.device.type in case.devices and (case.full if self.full else case.quick)


Work = Iterator[tuple[str, Callable[[], list[Row]]]]


def compare(
    plan: Plan,
    before: Callable[[], object],
    group: str,
    case: str,
    shapes: list[Shape],
    dtype: Dtypes,
    choose: Callable[[Input], list[Provider]],
) -> list[Row]:
    """Verifies every chosen provider, then times them interleaved, with ``before`` called ahead of each call.

    If a provider of another project is wrong, that is printed and it is not timed; a wrong provider of gradstat ends
    the benchmark.
    """
    given = input_of(shapes, dtype, str(plan.device))
    about = {"bytes": given.bytes, "tensors": len(given.gradients), "dtype": given.dtype}
    made, providers = [], []
    for provider in choose(given):
        try:
            error = verify(provider, given)
        except WrongAnswerError as wrong:
            if provider.name.startswith("gradstat"):
                raise
            print(f"{case}: {wrong}, so it is not timed", file=sys.stderr, flush=True)
            continue
        providers.append(provider)
        if error is not None and group == "lists":
            made.append(row(group, case, provider.name, "norm error", "", error, plan.device, **about))
    changing = {provider.name for provider in providers if provider.changes}

    calls = {provider.name: (lambda p=provider: p.run(given)) for provider in providers}

    def ready(name: str) -> None:
        if name in changing:
            given.restore()
        before()

    return made + _timed(plan, calls, ready, partial(row, group, case, device=plan.device, **about))


def _timed(
    plan: Plan, calls: Mapping[str, Callable[[], object]], ready: Callable[[str], object], row_of: Callable[..., Row]
) -> list[Row]:
    """Times calls interleaved; ``ready`` is called with its name ahead of each."""
    start = time.perf_counter()
    interleaved(calls, 1, 0, device=plan.device, before=ready)
    rounds = plan.rounds(time.perf_counter() - start)
    samples = interleaved(calls, rounds, 1, device=plan.device, before=ready)
    made = []
    for name, sample in samples.items():
        made.append(row_of(name, "wall time", "us", microseconds(sample.wall)))
        if sample.device:
            made.append(row_of(name, "device time", "us", microseconds(sample.device)))
    return made


def _fits(plan: Plan, size: int) -> bool:
    """Whether gradients of ``size`` bytes, their contiguous copy, and a naive loop's flags fit into memory."""
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
        return 2.5 * size < torch.cuda.mem_get_info(plan.device)[0]
    return 2.5 * size < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lists(plan: Plan) -> Work:
    """Every provider but the naive loop on every list of gradients; a single tensor in every dtype."""

    def choose(given: Input) -> list[Provider]:
        return [provider for provider in providers_for(given) if provider.name != cases.NAIVE]

    flush = Flush(plan.device)
    for case in CASES:
        if not plan.holds(case):
            continue
        shapes = case.shapes()
        for dtype in case.dtypes:
            if not _fits(plan, bytes_of(shapes, dtype)):
                continue
            what = f"{case.name}, {dtype_name(dtype)}"
            yield what, partial(compare, plan, flush, "lists", case.name, shapes, dtype, choose)


GROWING = (cases.CHECK, cases.CLIP, cases.TORCH_CLIP, cases.FOREACH_NORM, cases.NAIVE)
BYTES = tuple(1 << power for power in range(20, 35))  # to 16 GB, the last two on a GPU only
BYTES_ON_CPU = 1 << 32
TENSORS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 20_000)


def _growth(plan: Plan, group: str, lists: dict[str, list[Shape]]) -> Work:
    def choose(given: Input) -> list[Provider]:
        return [p for p in providers_for(given) if p.name in GROWING or p.name.startswith(cases.LIMIT)]

    flush = Flush(plan.device)
    for what, shapes in lists.items():
        yield what, partial(compare, plan, flush, group, what, shapes, torch.float32, choose)


def growth_in_bytes(plan: Plan) -> Work:
    """One float32 tensor, from 1 MB to 4 GB on a CPU and to 16 GB on a GPU."""
    sizes = [size for size in BYTES if _fits(plan, size) and (plan.device.type == "cuda" or size <= BYTES_ON_CPU)]
    return _growth(plan, "growth in bytes", {f"{size:,} bytes": [(size // 4,)] for size in sizes})


def growth_in_tensors(plan: Plan) -> Work:
    """Tensors of 64 float32 elements, from one to 20,000, with flushed caches, as after a backward pass.

    The flush also evicts the tensor objects themselves, which dominates the times.
    """
    return _growth(plan, "growth in tensors", {f"{count:,} tensors": [(64,)] * count for count in TENSORS})


def host(plan: Plan) -> Work:
    """Calls whose time is that of the host, as there is little to read, with warm caches."""
    yield "144 small parameters", partial(_host, plan)


# Number of monitor steps timed together, since some of them measure parameters or review earlier steps.
_MONITORED = 64


def _host(plan: Plan) -> list[Row]:
    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), *(nn.Linear(32, 32) for _ in range(4)), nn.LayerNorm(32))

    model = nn.Sequential(*(layer() for _ in range(12))).to(plan.device)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    monitor = gradstat.Monitor(model, torch.optim.AdamW(parameters, lr=0.0), on_anomaly="record")
    loss = torch.zeros((), device=plan.device)
    monitored = f"gradstat.Monitor.step(loss), mean of {_MONITORED}"
    calls: dict[str, Callable[[], object]] = {
        "gradstat.check(model).ok": lambda: gradstat.check(model).ok,
        "gradstat.check_async(model)": lambda: gradstat.check_async(model),
        monitored: lambda: [monitor.step(loss) for _ in range(_MONITORED)],
        cases.CLIP: lambda: gradstat.clip_grad_norm_(parameters, 1e9),
        cases.TORCH_CLIP: lambda: nn.utils.clip_grad_norm_(parameters, 1e9),
    }
    rounds = 2 * plan.rounds(1e-3)
    samples = timing.interleaved(calls, rounds, 20, device=plan.device, before=lambda name: calls[name]())
    case = "144 small parameters in 85 modules, warm"

    samples[monitored] = [seconds / _MONITORED for seconds in samples[monitored]]
    return [
        row("host path", case, name, "wall time", "us", microseconds(sample), plan.device)
        for name, sample in samples.items()
    ]


def training_steps(plan: Plan) -> Work:
    """Training steps, plain and in all variants: time ratio and extra peak memory.

    On a GPU the rows are of the group `tables.STEADY`: a sync ends each block of steps, and none of the steps alone.
    """
    for training in TRAININGS:
        if plan.device.type not in training.devices or not (plan.full or training.quick):
            continue
        yield training.name, partial(_training, plan, training)


def _training(plan: Plan, training: Training) -> list[Row]:
    step, watched = training.make(plan.device), training.make(plan.device)
    steps.verify(step)
    # Attached to a step of its own, as its hooks would be in the way of the others.
    handle = gradstat.auto(watched.model, watched.optimizer, on_anomaly="record")
    variants = [*steps.variants(plan.device), steps.Variant(tables.AUTO, own=watched)]
    start = time.perf_counter()
    for variant in variants:
        variant.run(step)
    machine.synchronize(plan.device)
    once = time.perf_counter() - start
    tensors = sum(1 for p in step.model.parameters() if p.requires_grad)
    group = "steps" if plan.device.type == "cpu" else tables.STEADY
    made = []
    # Steps vary more than calls, and these results matter most, so they get three times as many seconds.
    rounds = plan.rounds(steps.BLOCK[plan.device.type] * once / 3)
    for cost in steps.costs(step, rounds, compared=variants):
        inside = cost.inside and Quartiles(*(1e6 * s for s in cost.inside))
        for metric, unit, value in (
            ("wall time", "us", Quartiles(*(1e6 * s for s in cost.seconds))),
            *([("time inside", "us", inside)] if inside else []),
            ("time ratio", "", cost.ratio),
            ("extra memory", "B", cost.extra_bytes.median),
        ):
            made.append(row(group, training.name, cost.name, metric, unit, value, plan.device, tensors=tensors))
    handle.remove()
    return made


def steps_of_optimizers(plan: Plan) -> Work:
    """Steps from scaled gradients to updated parameters in every setting."""
    flush, case = Flush(plan.device), step_providers.FULL_CASE if plan.full else step_providers.QUICK_CASE
    for setting in SETTINGS:
        what = step_providers.case_name(case.name, setting)
        yield what, partial(_steps_of_optimizer, plan, flush, what, case.shapes(), setting)


def _steps_of_optimizer(
    plan: Plan, flush: Callable[[], object], case: str, shapes: list[Shape], setting: Setting
) -> list[Row]:
    given = StepInput(shapes, setting, str(plan.device))
    providers = step_providers.providers_for(given)
    about = {"bytes": given.bytes, "tensors": len(given.gradients), "dtype": torch.float32}
    row_of = partial(row, step_providers.GROUP, case, device=plan.device, **about)
    made = []
    for provider in providers:
        step_providers.verify(provider, given)
        made.append(row_of(provider.name, "bytes moved", "B", float(provider.passes(given) * given.bytes)))
    given.renew()

    def ready(name: str) -> None:
        given.restore()
        flush()

    return made + _timed(plan, {p.name: (lambda p=p: p.run(given)) for p in providers}, ready, row_of)


GROUPS: dict[str, Callable[[Plan], Work]] = {
    "steps": training_steps,
    "lists": lists,
    step_providers.GROUP: steps_of_optimizers,
    "host path": host,
    "growth in bytes": growth_in_bytes,
    "growth in tensors": growth_in_tensors,
}
QUICK = ("steps", "lists", step_providers.GROUP, "host path")


def measure(plan: Plan, groups: Iterable[str]) -> Iterator[list[Row]]:
    """Runs groups with a progress bar; yields the rows of each piece as it is done."""
    work = [item for group in groups for item in GROUPS[group](plan)]
    with progress_bar(len(work), "measuring") as progress:
        for what, call in work:
            progress.set_description(what, refresh=False)
            yield call()
            progress.update(1)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--full", action="store_true", help="run everything; takes about twenty minutes")
    parser.add_argument("--only", nargs="*", choices=list(GROUPS), help="only these groups")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="time for the rounds of one comparison (default 3, full 4)")
    options = parser.parse_args()
    seconds = options.seconds or (4.0 if options.full else 3.0)
    plan = Plan(torch.device(options.device), options.full, seconds)
    groups = options.only or (GROUPS if options.full else QUICK)
    details = machine.driver_or_threads(machine.driver_version(plan.device), torch.get_num_threads())
    print(f"{machine.device_name(plan.device)}, {details}; {machine.versions()}", flush=True)
    rows: list[Row] = []
    recorded = None
    for made in measure(plan, groups):
        rows += made
        if options.record and made:
            recorded = append(made, "full" if options.full else "quick", options.results)
    print(tables.everything(rows))
    if recorded is not None:
        print(f"recorded in {recorded}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
