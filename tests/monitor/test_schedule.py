"""Schedule: in which steps anomaly mode is on, and that it restores the mode."""

import pytest
import torch
from torch import nn

from gradstat.replay import Schedule


def run(schedule: Schedule, steps: int) -> str:
    """Which steps ran in anomaly mode, as a string of ``x`` and ``.``."""
    shown = ""
    for _ in range(steps):
        expected = schedule.active
        with schedule:
            assert torch.is_anomaly_enabled() == schedule.active == expected
            shown += "x" if torch.is_anomaly_enabled() else "."
        assert not torch.is_anomaly_enabled()
    return shown


@pytest.mark.parametrize(("every", "shown"), [(3, "x..x..x."), (None, "........")])
def test_every_nth_step_is_sampled_and_those_after_a_trigger(every: int | None, shown: str) -> None:
    schedule = Schedule(every, after_trigger=2)
    assert run(schedule, 8) == shown
    assert schedule.trigger()
    assert run(schedule, 4) == "xx.."
    assert (schedule.steps, schedule.active_steps) == (12, shown.count("x") + 2)


def test_triggers_without_a_catch_back_off() -> None:
    schedule = Schedule(after_trigger=2, backoff=2)
    shown = ""
    for _ in range(22):
        schedule.trigger()
        shown += run(schedule, 1)
    assert shown == "xx..xx....xx........xx"
    assert schedule.triggers == 22
    assert run(schedule, 100) == "." * 100
    schedule.trigger()
    run(schedule, 2)
    assert [schedule.trigger(), run(schedule, 1), schedule.trigger(), run(schedule, 1)] == [False, ".", False, "."]
    assert schedule.trigger()  # the pause is as short as at the beginning


def test_a_catch_ends_the_burst_and_the_backing_off() -> None:
    schedule = Schedule(after_trigger=3)
    schedule.trigger()
    weight = nn.Parameter(torch.zeros(2))
    with pytest.warns(UserWarning, match="Error detected in SqrtBackward0"):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="returned nan values"), schedule:
            torch.where(weight > 0, weight.sqrt(), 0.0).sum().backward()
    assert schedule.catches == 1
    assert not torch.is_anomaly_enabled()
    assert run(schedule, 2) == ".."
    assert schedule.trigger()
    assert run(schedule, 4) == "xxx."


@pytest.mark.parametrize("check_nan", [True, False])
def test_the_mode_before_is_restored_exactly(check_nan: bool) -> None:
    schedule = Schedule(every=2)
    with torch.autograd.set_detect_anomaly(True, check_nan=check_nan):
        for _ in range(4):
            with schedule:
                assert torch.is_anomaly_enabled()
                assert torch.is_anomaly_check_nan_enabled() == (check_nan or schedule.active)
            assert torch.is_anomaly_enabled()
            assert torch.is_anomaly_check_nan_enabled() == check_nan
    assert not torch.is_anomaly_enabled()


def test_a_trigger_inside_of_a_step_is_for_the_next_and_steps_do_not_nest() -> None:
    schedule = Schedule(after_trigger=1)
    with schedule:
        schedule.trigger()
        assert not schedule.active
        assert not torch.is_anomaly_enabled()
        with pytest.raises(RuntimeError, match="already active"):
            schedule.__enter__()
    assert run(schedule, 2) == "x."


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"every": 0}, ValueError, "every is 0; expected a whole number from 1"),
        ({"every": 2.5}, TypeError, "every: expected a whole number, got float"),
        ({"every": True}, TypeError, "every: .* got bool"),
        ({"after_trigger": -1}, ValueError, "after_trigger is -1; expected a whole number from 1"),
        ({"after_trigger": None}, TypeError, "after_trigger: .* got NoneType"),
        ({"backoff": 0.5}, ValueError, "backoff is 0.5; expected a number from 1"),
        ({"backoff": float("nan")}, ValueError, "backoff is nan; expected a number from 1"),
        ({"backoff": "2"}, TypeError, "backoff: expected a number, got str"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Schedule(**arguments)  # type: ignore[arg-type]
