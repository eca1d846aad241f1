"""The monitor finds nothing in healthy trainings, and every injected fault.

``GRADSTAT_LONG=1`` trains longer, with more seeds.
"""

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import Ranks
from helpers.training import HEALTHY, Clusters, Healthy, Training, factory, mlp, serious, serious_findings, train_mlp
from helpers.training_faults import FAULTS, Fault, inject
from torch import Tensor, nn
from training_programs import PROGRAMS, Program, run

from gradstat.monitor import Diagnosis, Finding, Recording
from gradstat.recording.findings import Severity

LONG = os.environ.get("GRADSTAT_LONG") == "1"
SEEDS, STEPS = (10, 2000) if LONG else (1, 500)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda healthy: healthy.name)
def test_the_monitor_is_silent(healthy: Healthy, seed: int) -> None:
    found, monitor = serious_findings(healthy, seed, STEPS)
    assert found == []
    loss = monitor.recording().scalars["loss"]
    assert len(loss) == min(STEPS, 1000)
    # A training that learns nothing would not be a healthy one.
    if not LONG:
        assert loss[-20:].mean() < 0.7 * loss[:20].mean()
    assert all(map(math.isfinite, loss))


@pytest.mark.parametrize("seed", range(5 if LONG else 1))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_of_others_are_neither_accused_nor_changed(program: Program, seed: int) -> None:
    steps = program.steps if LONG else program.short
    watched, found, monitors = run(program, seed, steps)
    drawn = torch.get_rng_state().tolist(), random.getstate()
    assert found == []
    assert monitors
    assert all(monitor.steps for monitor in monitors)
    assert all(map(math.isfinite, watched.curve))
    first, last = watched.ends()
    assert program.falls is None or last < program.falls * first
    alone, _, nobody = run(program, seed, steps, on=False)
    assert nobody == []
    assert watched.curve == alone.curve
    assert watched.bits() == alone.bits()
    assert drawn == (torch.get_rng_state().tolist(), random.getstate())


def rules_in(
    training: Training, steps: int, each: Callable[[int], object] = lambda step: None, removed: int = 0
) -> list[str]:
    """The rules of serious findings; ``each`` is called before every step, and the first gradients may be removed."""
    monitor = training.monitor()
    for step in range(steps):
        each(step)
        training.model.zero_grad()
        loss = training.loss(training.model, training.batch())
        loss.backward()
        if step < removed:
            training.model[4].zero_grad()
        monitor.step(loss)
        training.optimizer.step()
    monitor.remove()
    return [finding.rule for finding in serious(monitor)]


RATES = {
    "a cycle": lambda step: 1e-4 + 0.0999 * (1 - abs(step % 40 - 20) / 20),
    "a warm-up by epochs": lambda step: 1e-5 + 0.04 * min(step // 30, 5),
    "a warm-up by longer epochs": lambda step: 1e-5 + 0.04 * min(step // 50, 5),
}


@pytest.mark.parametrize("rate", RATES)
def test_a_schedule_is_no_jump(rate: str) -> None:
    training = train_mlp(0, optimize=factory(torch.optim.SGD, 0.1, momentum=0.9))
    assert rules_in(training, 300, lambda step: training.optimizer.param_groups[0].update(lr=RATES[rate](step))) == []


def test_a_group_that_rests_a_bias_that_is_frozen_and_gradients_that_are_removed_are_no_faults() -> None:
    training = train_mlp(0)
    first, *others = training.model.parameters()
    training.optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.0}, {"params": others, "lr": 1e-3}])
    assert rules_in(training, 200) == []
    training = train_mlp(0)
    assert rules_in(training, 300, lambda step: training.model[0].bias.requires_grad_(step < 100)) == []
    assert rules_in(train_mlp(0), 150, removed=60) == []


def test_a_layer_that_is_frozen_later_is_told() -> None:
    training = train_mlp(0)
    freeze = lambda step: training.model[0].requires_grad_(step < 100)  # noqa: E731
    assert rules_in(training, 300, freeze) == ["optimizer-coverage"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: p.mul_(p.abs() > p.abs().quantile(0.5)), []),  # pruning
        (lambda p: p.clamp_(-p.abs().quantile(0.9), p.abs().quantile(0.9)), []),
        (lambda p: p.lerp_(torch.zeros_like(p), 0.3), []),  # an average with an earlier state
        (lambda p: p.mul_(2.2), ["overwritten-parameter"]),
    ],
)
def test_a_callback_may_make_weights_smaller_but_not_far_larger(
    change: Callable[[Tensor], object], told: list[str]
) -> None:
    training = train_mlp(0)
    write = torch.no_grad()(lambda step: step == 160 and change(training.model[2].weight))
    assert rules_in(training, 300, write) == told


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_range_test_is_told_once_it_diverges(kind: type[torch.optim.Optimizer]) -> None:
    for steps, told in ((200, []), (300, ["loss-spike"])):
        training = train_mlp(0, optimize=factory(kind, 1e-6))
        rates = training.optimizer.param_groups[0]
        found = rules_in(training, steps, lambda step: rates.update(lr=1e-6 * 10 ** (step * 8 / 300)))  # noqa: B023
        assert found[:1] == told


class Averaged(nn.Module):
    """A model beside an average of its weights, which are frozen parameters or, by names without dots, buffers."""

    def __init__(self, dtype: torch.dtype, in_buffers: bool) -> None:
        super().__init__()
        self.online = mlp()
        for name, weight in self.online.named_parameters():
            copy = weight.detach().to(dtype, copy=True)
            if in_buffers:
                self.register_buffer("mean" + name.replace(".", ""), copy)
            else:
                self.register_parameter("mean_" + name.replace(".", "_"), nn.Parameter(copy, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x)

    @torch.no_grad()
    def average(self, update: Callable[[Tensor, Tensor], object]) -> None:
        kept = (t for name, t in [*self.named_parameters(), *self.named_buffers()] if name.startswith("mean"))
        for mean, weight in zip(kept, self.online.parameters(), strict=True):
            update(mean, weight.to(mean.dtype))


def _set(mean: Tensor, weight: Tensor) -> None:
    mean.data = 0.999 * mean.data + 0.001 * weight


@pytest.mark.parametrize(
    ("dtype", "update", "told"),
    [
        (torch.bfloat16, lambda mean, weight: mean.mul_(0.999).add_(weight, alpha=0.001), True),
        (torch.bfloat16, lambda mean, weight: mean.lerp_(weight, 1e-4), True),
        (torch.bfloat16, _set, True),
        (torch.float16, lambda mean, weight: mean.lerp_(weight, 1e-4), True),
        (torch.float16, lambda mean, weight: mean.lerp_(weight, 0.01), False),
        (torch.bfloat16, lambda mean, weight: mean.lerp_(weight, 0.1), False),
        (torch.bfloat16, lambda mean, weight: mean.copy_(weight), False),
        (torch.bfloat16, lambda mean, weight: None, False),  # as of a model that is to stay
        (torch.float32, lambda mean, weight: mean.lerp_(weight, 1e-4), False),
    ],
)
@pytest.mark.parametrize("in_buffers", [False, True])
def test_an_average_in_16_bits_must_follow(dtype: torch.dtype, in_buffers: bool, update: Any, told: bool) -> None:
    training = train_mlp(0, 3e-3, model=lambda: Averaged(dtype, in_buffers))
    assert rules_in(training, 120, lambda step: training.model.average(update)) == ["unchanged-parameter"] * told


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_an_average_may_stay_where_its_weights_do_and_frozen_layers_where_they_are(rate: float) -> None:
    training = train_mlp(0, rate, model=lambda: Averaged(torch.bfloat16, False))
    means = [p for name, p in training.model.named_parameters() if name.startswith("mean")]
    for mean in means if rate == 1e-3 else ():
        nn.init.normal_(mean)  # other layers of the same shape, which something clamps in each step
    update = lambda mean, weight: mean.clamp_(-9, 9) if rate == 1e-3 else mean.lerp_(weight, 0.001)  # noqa: E731
    assert "unchanged-parameter" not in rules_in(training, 120, lambda step: training.model.average(update))


class Shift(nn.Module):
    """Its first parameter is shaped for broadcasting, and no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(1e-4 * torch.randn(1, 4, 1, 1))
        self.out = nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.shift)


def test_a_shift_is_no_weight() -> None:
    loss = lambda model, batch: (model(batch[0]) - batch[0]).square().sum()  # noqa: E731
    optimize = factory(torch.optim.Adam, 1e-7)
    assert rules_in(train_mlp(model=Shift, optimize=optimize, batch=Clusters(0, 4, 8, 8), loss=loss), 60) == []


class Tasks(nn.Module):
    """Returns the outputs of several heads, each of which gets the same, or that of a layer of its own."""

    def __init__(self, heads: int, is_deep: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(heads)])
        self.heads = nn.ModuleList([nn.Linear(16, 4) for _ in range(heads)])
        self.is_deep = is_deep

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]).relu())
        return [head(hidden[i + 1 if self.is_deep else -1]) for i, head in enumerate(self.heads)]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("heads", "is_deep", "used", "told"),
    [
        (2, False, "01", False),
        (2, False, "0", True),
        (3, False, "02", True),
        (4, False, "0", False),  # the program chooses one
        (4, False, "013", True),
        (2, True, "1", False),  # that of an earlier layer has another purpose
    ],
)
def test_the_loss_must_depend_on_all_heads_of_a_kind(
    heads: int, is_deep: bool, used: str, told: bool, mixed: bool
) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            outputs = model(batch[0])
        every = [nn.functional.cross_entropy(outputs[int(i)].float(), (batch[1] + int(i)) % 4) for i in used]
        return torch.stack(every).mean()

    training = train_mlp(model=lambda: Tasks(heads, is_deep), loss=loss)
    assert ("missing-gradient" in rules_in(training, 40)) == told


def test_each_parameter_may_have_an_optimizer() -> None:
    training = train_mlp(0)
    training.optimizer, *others = [torch.optim.SGD([parameter], 0.1) for parameter in training.model.parameters()]
    training.optimizer.register_step_post_hook(lambda *_: [optimizer.step() for optimizer in others])
    assert rules_in(training, 150) == []


# Every injected fault is found: the right rule first, with the right name and step ---------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_first_finding_is_the_fault(fault: Fault, request: pytest.FixtureRequest) -> None:
    ranks: Ranks | None = request.getfixturevalue("ranks") if fault.ranks > 1 else None
    outcome = inject(fault, ranks)
    told = "\n".join(map(str, outcome.recording.findings))
    assert not outcome.diagnosis.ok, "nothing was found"
    first = outcome.diagnosis.findings[0]
    assert (first.rule, first.name) == (fault.rule, fault.name), told
    assert 0 <= first.step - fault.step <= fault.late, told
    assert {finding.rule for finding in outcome.recording.findings} >= set(fault.also), told
    assert all((first.text, first.causes, first.advice))
    assert Finding.from_dict(first.to_dict()) == first


def _findings(*told: tuple[str, Severity, int]) -> list[Finding]:
    return [Finding(rule, severity, step, "", {}) for rule, severity, step in told]


def test_of_findings_in_one_step_the_cause_is_the_first() -> None:
    batch, loss, parameter, info = _findings(
        ("nonfinite-batch", "error", 7),
        ("nonfinite-loss", "error", 7),
        ("nonfinite-parameter", "error", 8),
        ("growing-weights", "info", 1),
    )
    recording = Recording(np.arange(9), {}, {}, [info, parameter, loss, batch])
    assert [*Diagnosis.of(recording).findings] == [batch, loss, parameter, info]


@pytest.mark.parametrize(
    ("told", "numbered", "below"),
    [
        # What is inferred is a line below the event that explains it, whatever was told first.
        ([("loss-spike", "warning", 9), ("learning-rate-jump", "warning", 8)], [1], "loss-spike by step 9"),
        ([("parameter-jump", "error", 60), ("learning-rate-jump", "warning", 8)], [1], "parameter-jump by step 60"),
        # Not if it began before, long after, or is none of its effects; or if the event is harmless.
        ([("loss-spike", "warning", 7), ("learning-rate-jump", "warning", 8)], [1, 0], ""),
        ([("loss-spike", "warning", 120), ("learning-rate-jump", "warning", 8)], [1, 0], ""),
        ([("unrelated-outputs", "warning", 9), ("learning-rate-jump", "warning", 8)], [1, 0], ""),
        ([("loss-spike", "warning", 9), ("learning-rate-jump", "info", 8)], [0], ""),
        (
            [("growing-weights", "warning", 0), ("unrelated-outputs", "warning", 3), ("equal-targets", "warning", 5)],
            [2, 0, 1],
            "",
        ),
    ],
)
def test_an_event_that_was_seen_comes_before_what_is_inferred(
    told: list[tuple[str, Severity, int]], numbered: list[int], below: str
) -> None:
    findings = _findings(*told)
    diagnosis = Diagnosis.of(Recording(np.arange(200), {}, {}, findings))
    shown = [finding for incident in diagnosis.incidents for finding in incident.findings]
    assert shown == [findings[at] for at in numbered]
    assert [*diagnosis.findings[: len(shown)]] == shown
    assert (f"followed by: {below}" in str(diagnosis)) == ("followed by" in str(diagnosis)) == bool(below)
    errors, warnings = (sum(one.severity == severity for one in shown) for severity in ("error", "warning"))
    assert f"{warnings} warning" in diagnosis.headline()
    assert not errors


def test_the_document_counts_these_faults() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "monitor.md").read_text()
    assert f"injects {len(FAULTS)} faults" in text
    assert f"all within {max(fault.further for fault in FAULTS)} steps" in text
