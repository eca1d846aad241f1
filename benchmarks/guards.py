"""How guards handle finite faults: when each refuses a step, and how soon a small training recovers.

Every fault is put into the training of every model at the same step, once for each guard, with the same seeds. A guard
flags a fault in time if it refuses a step before or when the loss of the unguarded training stands out by six standard
deviations, which is OLMo's rule for the loss. A training has recovered when the loss on held-out clean data stays at
its level before the fault. ``--record`` appends rows to ``benchmarks/results/<device>/guards.jsonl``.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import runner
import tables
import torch
from helpers.training import CLASSES, GPT, HEALTHY, TOKENS, Clusters, Sentences, Training, cnn, factory, mlp, train
from rows import Row, record
from runner import rows_of_values
from torch import Tensor
from torch.optim import Optimizer

import gradstat

GROUP, HEALTHY_GROUP = "guards", "guards, healthy"
FAULT, END = 300, 420  # the step of the fault, and the number of steps
QUIET = 200  # length of a quiet phase before the fault: more steps than any guard remembers
HEALTHY_STEPS = 2000
SETTLED = 20  # steps before the fault whose clean loss a training has to return to
Batch = tuple[Tensor, Tensor]


def _adam(lr: float) -> Any:
    return factory(torch.optim.AdamW, lr, betas=(0.9, 0.95))


MODELS: dict[str, Callable[[int], Training]] = {
    "GPT": lambda seed: train(seed, lambda: GPT(layers=1), _adam(3e-3), Sentences(seed)),
    "CNN": lambda seed: train(seed, cnn, _adam(3e-3), Clusters(seed, 1, 8, 8, size=16, noise=2.0)),
    "MLP": lambda seed: train(seed, mlp, _adam(3e-3), Clusters(seed, 16, noise=2.0)),
}


def _garbage(batch: Batch, random: torch.Generator) -> Batch:
    inputs, labels = _noise(batch, random)
    if inputs.is_floating_point():
        return 10 * torch.randn(inputs.shape, generator=random), labels
    return torch.randint(TOKENS, inputs.shape, generator=random), labels


def _noise(batch: Batch, random: torch.Generator) -> Batch:
    inputs, labels = batch
    classes = CLASSES if inputs.is_floating_point() else TOKENS
    return inputs, torch.randint(classes, labels.shape, generator=random)


def _quiet(batch: Batch, random: torch.Generator) -> Batch:
    """The same easy example everywhere."""
    return torch.zeros_like(batch[0]), torch.zeros_like(batch[1])


@dataclass(frozen=True)
class Fault:
    """Changes to a step, as functions of the steps since the fault began (negative before)."""

    batch: Callable[[int, Batch, torch.Generator], Batch] = lambda since, batch, random: batch
    lr: Callable[[int], float] = lambda since: 1.0
    weight: Callable[[int], float] = lambda since: 1.0  # of the loss
    level: int = 0  # step, relative to the fault, before which the loss has its normal level


FAULTS = {
    "stale second moment": Fault(lambda s, b, r: _quiet(b, r) if -QUIET <= s < 0 else b, level=-QUIET),
    "learning-rate jump": Fault(lr=lambda s: 30.0 if 0 <= s < 3 else 1.0),
    "garbage batch": Fault(lambda s, b, r: _garbage(b, r) if s == 0 else b),
    "label noise": Fault(lambda s, b, r: _noise(b, r) if 0 <= s < 5 else b),
    "norm drift": Fault(weight=lambda s: 1.05 ** min(max(s, 0), 80)),
}


NONE, ZCLIP, SIGMA, GUARD = "no guard", "ZClip", "SpikeGuard.sigma", "SpikeGuard"
GUARDS = (NONE, ZCLIP, SIGMA, GUARD)
GUARDS_ON_HEALTHY = (SIGMA, GUARD)  # also tried on healthy trainings


class Stepper:
    """Takes steps under one of `GUARDS`, and holds its state."""

    def __init__(self, name: str) -> None:
        self._clip = gradstat.ZClip() if name == ZCLIP else None
        self._clipped = 0
        guards = {SIGMA: gradstat.SpikeGuard.sigma, GUARD: gradstat.SpikeGuard}
        self._guard = guards[name]() if name in guards else None

    def step(self, optimizer: Optimizer, loss: Tensor) -> bool:
        """Takes or refuses a step; returns whether it was refused, or, for a clip, clipped."""
        options: dict[str, Any] = {} if self._guard is None else {"loss": loss, "guard": self._guard}
        gradstat.guarded_step(optimizer, self._clip, **options)
        if self._clip is None:
            return self._guard is not None and bool(self._guard.read(wait=True).reasons)
        before, self._clipped = self._clipped, self._clip.summary().clipped
        return self._clipped > before

    def train(self, training: Training, steps: int) -> Iterator[tuple[int, float, bool]]:
        """Trains, and yields after each step its number, its loss, and the result of `step`."""
        losses: list[Tensor] = []
        refused: list[bool] = []
        training._update = lambda: refused.append(self.step(training.optimizer, losses[-1]))  # type: ignore[method-assign]
        watch: Any = SimpleNamespace(batch=lambda batch: None, step=losses.append)
        for step, begins in training.steps(watch, 0, steps):
            if not begins:
                yield step, losses[-1].item(), refused[-1]


@dataclass(frozen=True)
class Outcome:
    """A training with a fault: its losses, those on clean data, and the steps that were refused."""

    losses: list[float]
    clean: list[float]
    refused: list[int]


def run(model: str, fault: str, guard: str, seed: int, steps: int = END) -> Outcome:
    """Runs one training."""
    torch.set_num_threads(1)
    training, broken = MODELS[model](seed), FAULTS[fault]
    random = torch.Generator().manual_seed(1000 + seed)
    batch, loss_of = training.batch, training.loss
    held = [batch() for _ in range(4)]
    clean = (torch.cat([x for x, _ in held]), torch.cat([y for _, y in held]))
    outcome = Outcome([], [], [])
    # The number of finished steps minus FAULT is the number of steps since the fault began.
    training.batch = lambda: broken.batch(len(outcome.losses) - FAULT, batch(), random)
    training.loss = lambda model, batch: broken.weight(len(outcome.losses) - FAULT) * loss_of(model, batch)
    training.schedule = lambda step: broken.lr(step - FAULT)
    for step, loss, is_refused in Stepper(guard).train(training, steps):
        outcome.losses.append(loss)
        outcome.refused.extend([step] * is_refused)
        outcome.clean.append(math.nan)
        if -SETTLED <= step - FAULT - broken.level < 0 or step >= FAULT:  # the steps that `recovery` reads
            training.model.eval()
            with torch.no_grad():
                outcome.clean[step] = loss_of(training.model, clean).item()
            training.model.train()
    return outcome


def first_outlier(losses: Sequence[float], since: int, window: int = 128, sigmas: float = 6.0) -> int | None:
    """The first step from ``since`` whose loss exceeds the mean of the last ``window`` by ``sigmas`` deviations."""
    for step in range(since, len(losses)):
        last = losses[max(0, step - window) : step]
        if losses[step] > statistics.fmean(last) + sigmas * statistics.stdev(last):
            return step
    return None


def recovery(outcome: Outcome, fault: Fault) -> int:
    """Steps from the fault until the clean loss stays at its earlier level, within its variation; at most all steps."""
    before = outcome.clean[FAULT + fault.level - SETTLED : FAULT + fault.level]
    limit = max(before) + 0.05 * statistics.fmean(before)
    above = [step for step in range(FAULT, len(outcome.clean)) if not outcome.clean[step] <= limit]
    return above[-1] + 1 - FAULT if above else 0


def compare(case: tuple[str, str, int]) -> dict[str, tuple[float, int]]:
    """For a model, fault and seed, by guard: flagged in time, and steps until recovery.

    The first is NaN if no loss stands out and nothing is flagged, so that there is no time to compare with.
    """
    model, fault, seed = case
    plain = run(model, fault, NONE, seed)
    due = first_outlier(plain.losses, FAULT)
    found = {}
    for guard in GUARDS:
        outcome = plain if guard == NONE else run(model, fault, guard, seed)
        first = next((step for step in outcome.refused if step >= FAULT), None)
        is_in_time = math.nan if due is None and first is None else float(first is not None and first <= (due or END))
        found[guard] = is_in_time, recovery(outcome, FAULTS[fault])
    return found


def run_healthy(case: tuple[int, int]) -> dict[str, tuple[int, int, float]]:
    """For a healthy training, by guard: steps, refused steps, and the final loss minus that without a guard."""
    number, seed = case
    torch.set_num_threads(1)
    taken = {
        guard: list(Stepper(guard).train(HEALTHY[number].training(seed, HEALTHY_STEPS), HEALTHY_STEPS))
        for guard in (NONE, *GUARDS_ON_HEALTHY)
    }
    ends = {guard: statistics.fmean(loss for _, loss, _ in of[-HEALTHY_STEPS // 10 :]) for guard, of in taken.items()}
    return {
        guard: (HEALTHY_STEPS, sum(is_refused for _, _, is_refused in taken[guard]), ends[guard] - ends[NONE])
        for guard in GUARDS_ON_HEALTHY
    }


def measure(seeds: int, processes: int, keep: Path | None = None) -> list[Row]:
    """Runs all trainings; returns the rows."""
    made = []
    cases = [(model, fault, seed) for model in MODELS for fault in FAULTS for seed in range(seeds)]
    unscaled = [number for number, each in enumerate(HEALTHY) if each.training(0, 1).scaler is None]
    healthy = [(number, seed) for number in unscaled for seed in range(max(1, seeds // 20))]
    compared = list(runner.results_of(compare, cases, processes, keep))
    on_healthy = list(runner.results_of(run_healthy, healthy, processes, keep))
    for model, fault in dict.fromkeys(case[:2] for case in cases):
        those = [found for case, found in zip(cases, compared, strict=True) if case[:2] == (model, fault)]
        for guard in GUARDS:
            in_time = [found[guard][0] for found in those if not math.isnan(found[guard][0])]
            changes = [found[guard][1] - found[NONE][1] for found in those]
            values = {
                "steps until back": statistics.median(found[guard][1] for found in those),
                "sooner": sum(change < 0 for change in changes),
                "later": sum(change > 0 for change in changes),
            }
            if in_time:
                values["flagged in time"] = statistics.fmean(in_time)
            made += rows_of_values(GROUP, f"{model}, {fault}", guard, values)
    for guard in GUARDS_ON_HEALTHY:
        steps, refused, above = zip(*(each[guard] for each in on_healthy), strict=True)
        values = {"steps": sum(steps), "refused": sum(refused), "last loss above": max(above)}
        made += rows_of_values(HEALTHY_GROUP, "healthy trainings", guard, values)
    return made


def main() -> int:
    parser = runner.parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="seeds of each model and fault (default 20)")
    arguments = parser.parse_args()
    made = measure(arguments.seeds, arguments.jobs, arguments.keep)
    print(tables.guards(made))
    record(made, "guards", arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
