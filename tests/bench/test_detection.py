"""The benchmark of detection: what counts as harm, as a hit and as the right place, and one fault from end to end."""

import math
from types import SimpleNamespace
from typing import Any

import detection
import pytest
import torch
from detection import all_cases
from detection_judging import HARM, ONSET, WITHIN, Arm, Case, Flag, Verdict, has_diverged, hits, is_right, line
from detection_tools import GOLDEN, AutoTrainer, Lightning, SixSigma, Step, TenTimes, Tool


def number_of(what: str, subject: str, when: str) -> int:
    (number,) = [
        number
        for number, case in enumerate(all_cases())
        if (case.what, case.subject, case.when) == (what, subject, when)
    ]
    return number


def arm(*flags: Flag, loss: float = 1.0, steps: int = 300) -> Arm:
    return Arm([loss] * steps, [1.0] * steps, flags={"gradstat": list(flags)}, held_out=loss)


@pytest.fixture
def case() -> Case:
    return all_cases()[number_of("NaN in one batch", "MLP", "mid-run")]


def test_a_fault_is_run_with_its_twin_and_found() -> None:
    number = number_of("NaN in one batch", "MLP", "from step 0")
    (verdict,) = detection.measure([number], [0], 1, steps=12)
    assert verdict.status == "harmful"
    assert math.isinf(verdict.harms[0])
    ((first, *_),) = verdict.hits("gradstat")
    assert (first.noticed, first.step) == (0, 0)
    assert "hit 1/1  delay 0" in line(verdict, "gradstat")
    ((broken, twin),) = verdict.arms
    assert len(broken.losses) == len(twin.losses) == 12
    assert not twin.flags["gradstat"]


def test_faults_from_step_0_are_compared_with_golden_runs() -> None:
    numbers = [number_of(what, "MLP", "from step 0") for what in ("learning rate 1", "logits times 1,000")]
    verdicts = list(detection.measure(numbers, [0], 1, steps=12))
    for verdict, place in zip(verdicts, ("lr", "batch[1]\nloss"), strict=True):
        ((flag,),) = verdict.hits(GOLDEN)
        assert (flag.name, flag.noticed) == (place, 0)
        assert is_right(verdict.case, flag)
        ((broken, twin),) = verdict.arms
        assert broken.recording is twin.recording is None
        assert twin.flags[GOLDEN] == []


def test_a_hit_is_new_and_follows_the_fault_soon(case: Case) -> None:
    def found(*flags: Flag, twin: tuple[Flag, ...] = ()) -> list[Flag]:
        return hits(case, arm(*flags), arm(*twin), "gradstat")

    soon = Flag(ONSET + WITHIN, ONSET + 3, "loss-spike", "loss")
    sooner = Flag(ONSET + WITHIN, ONSET, "lr", "lr")
    assert found(soon, sooner) == [sooner, soon]  # as a diagnosis lists them
    assert not found(Flag(ONSET + WITHIN + 1, ONSET, "loss-spike", "loss"))
    assert not found(Flag(ONSET - 1, ONSET - 1, "loss-spike", "loss"))
    assert not found(soon, twin=(Flag(ONSET, ONSET, "loss-spike", "loss"),))
    assert found(soon, twin=(Flag(ONSET - 1, ONSET - 1, "loss-spike", "loss"),)) == [soon]


def test_a_case_counts_if_it_does_harm_with_every_seed(case: Case) -> None:
    def status(*pairs: tuple[Arm, Arm]) -> str:
        return Verdict(case, list(pairs)).status

    worse, healthy = arm(loss=HARM + 0.02), arm()
    assert status((worse, healthy), (worse, healthy)) == "harmful"
    assert status((worse, healthy), (arm(loss=1.1), healthy)) == "harmless"
    assert status((arm(), healthy)) == "no effect"
    assert status((arm(loss=math.nan), healthy)) == "harmful"
    assert status((Arm(raised="IndexError"), healthy)) == "raises"


def steps_of(
    losses: list[float], norms: list[float] | None = None, accuracies: list[float] | None = None
) -> list[Step]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training: Any = SimpleNamespace(model=model)
    norms, accuracies = norms or [1.0] * len(losses), accuracies or [0.5] * len(losses)
    return [
        Step(number, training, loss, torch.tensor(loss), norms[number], accuracies[number])
        for number, loss in enumerate(losses)
    ]


def flagged(tool: Tool, steps: list[Step]) -> list[tuple[int, str, str]]:
    return [found for step in steps for found in tool.step(step)]


def test_six_sigma_needs_128_steps_and_takes_loss_or_norm() -> None:
    noisy = [1.0 + 0.01 * (number % 3) for number in range(140)]
    assert not flagged(SixSigma(), steps_of([*noisy[:127], 9.0]))
    assert flagged(SixSigma(), steps_of([*noisy[:128], 9.0])) == [(128, "six-sigma", "loss")]
    norms = [*noisy[:130], 9.0, *noisy[131:]]
    assert flagged(SixSigma(), steps_of(noisy, norms)) == [(130, "six-sigma", "norm")]


def test_ten_times_compares_with_the_largest_of_the_first_100() -> None:
    assert flagged(TenTimes(), steps_of([1.0, math.nan])) == [(1, "not-finite", "loss")]
    assert not flagged(TenTimes(), steps_of([1.0] * 99 + [10.0, 99.0]))
    assert flagged(TenTimes(), steps_of([1.0] * 100 + [10.0])) == [(100, "ten-times", "loss")]


def test_lightning_compares_with_the_mean_of_ten_steps() -> None:
    losses = [1.0] * 12
    assert flagged(Lightning(), steps_of([*losses, 3.1])) == [(12, "spike", "loss")]
    assert not flagged(Lightning(), steps_of([*losses, 2.9]))
    assert flagged(Lightning(), steps_of([*losses, math.inf])) == [(12, "not-finite", "loss")]


def test_autotrainer_sees_slow_convergence_zeros_and_swings() -> None:
    def rules(steps: list[Step]) -> set[str]:
        return {rule for _, rule, _ in flagged(AutoTrainer(), steps)}

    losses = [1.0] * 100
    rising = [0.5 + step / 250 for step in range(100)]
    assert rules(steps_of(losses)) == {"not-converging"}
    assert not rules(steps_of(losses, accuracies=rising))
    swinging = [0.75 + 0.1 * (step // 10 % 2) for step in range(100)]
    assert rules(steps_of(losses, accuracies=swinging)) == {"unstable"}
    dead = steps_of(losses)
    for parameter in dead[0].training.model.parameters():
        parameter.grad.zero_()
    assert rules(dead) == {"relu"}
    assert rules(steps_of([*losses, *[math.nan] * 10])) >= {"explode"}


@pytest.mark.parametrize(
    ("first", "last", "diverged"),
    [(2.0, 0.1, False), (2.0, 2.2, False), (2.0, 2.4, True), (2.0, math.inf, True), (2.0, math.nan, True),
     (-20.0, -190.0, False), (-20.0, -18.0, False), (-20.0, -16.0, True), (0.0, 0.0, False)],
)  # fmt: skip
def test_a_program_diverges_if_it_ends_well_above_its_beginning(first: float, last: float, diverged: bool) -> None:
    assert has_diverged(first, last) == diverged


def test_silent_errors_run_on_two_ranks() -> None:
    number = number_of("every other step through the unwrapped module", "MLP, DDP on 2 ranks", "from step 0")
    (verdict,) = detection.measure([number], [0], 1, steps=6)
    ((broken, twin),) = verdict.arms
    assert broken.losses[:1] == twin.losses[:1]
    assert broken.norms[1] != twin.norms[1]
