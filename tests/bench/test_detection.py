"""The benchmark of detection: what counts as harm, as a hit and as the right place, and one fault from end to end."""

import math

import detection
import pytest
from detection import HARM, ONSET, WITHIN, Arm, Case, Flag, Verdict


def number_of(what: str, subject: str, when: str) -> int:
    (number,) = [
        number
        for number, case in enumerate(detection.all_cases())
        if (case.what, case.subject, case.when) == (what, subject, when)
    ]
    return number


def arm(*flags: Flag, loss: float = 1.0, steps: int = 300) -> Arm:
    return Arm([loss] * steps, [1.0] * steps, flags={"gradstat": list(flags)}, held_out=loss)


@pytest.fixture
def case() -> Case:
    return detection.all_cases()[number_of("NaN in one batch", "MLP", "mid-run")]


def test_a_fault_is_run_with_its_twin_and_found() -> None:
    number = number_of("NaN in one batch", "MLP", "from step 0")
    (verdict,) = detection.measure([number], [0], 1, steps=12)
    assert verdict.status == "harmful"
    assert math.isinf(verdict.harms[0])
    ((first, *_),) = verdict.hits("gradstat")
    assert (first.noticed, first.step) == (0, 0)
    assert "hit 1/1  delay 0" in detection.line(verdict, "gradstat")
    ((broken, twin),) = verdict.arms
    assert len(broken.losses) == len(twin.losses) == 12
    assert not twin.flags["gradstat"]


def test_arms_are_equal_until_the_fault(case: Case) -> None:
    steps = ONSET + 2
    broken, twin = (detection.run(case, 1, is_broken, steps) for is_broken in (True, False))
    assert broken.losses[:ONSET] == twin.losses[:ONSET]
    assert math.isnan(broken.losses[ONSET])
    assert not math.isnan(twin.losses[ONSET])


def test_a_hit_is_new_and_follows_the_fault_soon(case: Case) -> None:
    def found(*flags: Flag, twin: tuple[Flag, ...] = ()) -> list[Flag]:
        return detection.hits(case, arm(*flags), arm(*twin), "gradstat")

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


def test_noise_of_losses_near_zero_is_no_harm(case: Case) -> None:
    solved, noisy = arm(loss=0.0010), arm(loss=0.0015)
    solved.losses[0] = noisy.losses[0] = 1.4
    assert detection.harm(case, noisy, solved) < HARM


def test_every_mistake_is_made_with_a_model_of_either_half() -> None:
    cases = [case for case in detection.all_cases() if case.set == "mistakes"]
    by_half = {half: {case.what for case in cases if case.half == half} for half in ("tuning", "figures")}
    assert by_half["tuning"] == by_half["figures"]
    assert not {case.subject for case in cases if case.half == "tuning"} & {
        case.subject for case in cases if case.half == "figures"
    }
