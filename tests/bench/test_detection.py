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
    wanted = (what, subject, when)
    return [(case.what, case.subject, case.when) for case in all_cases()].index(wanted)


def arm(*flags: Flag, loss: float = 1.0, steps: int = 300) -> Arm:
    return Arm([loss] * steps, [1.0] * steps, flags={"gradstat": list(flags)}, held_out=loss)


@pytest.fixture
def case() -> Case:
    return all_cases()[number_of("NaN in one batch", "MLP", "mid-run")]


def test_a_fault_is_run_with_its_twin_and_found_also_by_golden_runs() -> None:
    numbers = [number_of(what, "MLP", "from step 0") for what in ("NaN in one batch", "learning rate 1")]
    nan, rate = detection.measure(numbers, [0], 1, steps=12)
    assert nan.status == "harmful"
    assert math.isinf(nan.harms[0])
    ((first, *_),) = nan.hits("gradstat")
    assert (first.noticed, first.step) == (0, 0)
    assert "hit 1/1  delay 0" in line(nan, "gradstat")
    ((flag,),) = rate.hits(GOLDEN)
    assert (flag.name, flag.noticed) == ("lr", 0)
    assert is_right(rate.case, flag)
    for broken, twin in (*nan.arms, *rate.arms):
        assert len(broken.losses) == len(twin.losses) == 12
        assert twin.flags["gradstat"] == twin.flags[GOLDEN] == []
        assert broken.recording is twin.recording is None


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


RISING, SWINGING = [0.5 + step / 250 for step in range(100)], [0.75 + 0.1 * (step // 10 % 2) for step in range(100)]
NOISY = [1.0 + 0.01 * (number % 3) for number in range(140)]


@pytest.mark.parametrize(
    ("tool", "losses", "others", "expected"),
    [
        (SixSigma, [*NOISY[:127], 9.0], {}, []),  # it needs 128 steps
        (SixSigma, [*NOISY[:128], 9.0], {}, [(128, "six-sigma", "loss")]),
        (SixSigma, NOISY, {"norm": [*NOISY[:130], 9.0, *NOISY[131:]]}, [(130, "six-sigma", "norm")]),
        (TenTimes, [1.0, math.nan], {}, [(1, "not-finite", "loss")]),
        (TenTimes, [*[1.0] * 99, 10.0, 99.0], {}, []),  # 10 is the largest of the first 100
        (TenTimes, [*[1.0] * 100, 10.0], {}, [(100, "ten-times", "loss")]),
        (Lightning, [*[1.0] * 12, 3.1], {}, [(12, "spike", "loss")]),
        (Lightning, [*[1.0] * 12, 2.9], {}, []),
        (Lightning, [*[1.0] * 12, math.inf], {}, [(12, "not-finite", "loss")]),
        (AutoTrainer, [1.0] * 100, {"accuracy": RISING}, []),
        (AutoTrainer, [1.0] * 90, {}, [(89, "not-converging", "accuracy")]),
        (AutoTrainer, [1.0] * 90, {"accuracy": SWINGING}, [(89, "unstable", "accuracy")]),
        (AutoTrainer, [1.0] * 90, {"gradient": 0.0}, [(89, "relu", "gradients")]),
        (AutoTrainer, [math.nan] * 10, {}, [(9, "explode", "loss")]),
    ],
)
def test_other_tools_find_what_they_are_described_to_find(
    tool: type[Tool], losses: list[float], others: dict[str, Any], expected: list[tuple[int, str, str]]
) -> None:
    model, watching = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), tool()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, others.get("gradient", 1.0))
    training: Any = SimpleNamespace(model=model)
    norms, accuracies = others.get("norm", [1.0] * len(losses)), others.get("accuracy", [0.5] * len(losses))
    given = enumerate(zip(losses, norms, accuracies, strict=False))
    steps = [Step(i, training, loss, torch.tensor(loss), norm, share) for i, (loss, norm, share) in given]
    assert [found for step in steps for found in watching.step(step)] == expected


@pytest.mark.parametrize(
    ("first", "last", "diverged"),
    [(2.0, 2.2, False), (2.0, 2.4, True), (2.0, math.nan, True), (-20.0, -18.0, False), (-20.0, -16.0, True)],
)
def test_a_program_diverges_if_it_ends_well_above_its_beginning(first: float, last: float, diverged: bool) -> None:
    assert has_diverged(first, last) == diverged
