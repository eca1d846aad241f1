"""StepStateKeeper, StepState and what find_culprit restores: the same step runs again and leaves no trace."""

import math
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from helpers.recordings import bits
from torch import Tensor, nn

from gradstat import SpikeGuard, amp, guarded_step, step_counters
from gradstat.monitor import Schedule, find_culprit
from gradstat.replay import StepStateKeeper


class Net(nn.Module):
    """A model in which a step changes everything: batch norm, dropout, a counter, a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("latest", None)
        self.register_buffer("table", torch.arange(70_000.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = x.detach()
        self.table[0] += 1
        return self.last(self.drop(self.norm(self.first(x))))


class Training:
    """A model some steps into its training, with a partly accumulated gradient, and everything that a step changes."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for _ in range(3):
            self.step(torch.randn(8, 4))
        self.model(torch.randn(8, 4)).sum().backward()

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(x + torch.rand(())).square().mean() + random.random() + np.random.rand()  # noqa: NPY002
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def state(self, versions: bool) -> dict[str, Any]:
        """The bits of everything; ``versions``: also how often parameters have been written to."""
        things = {
            "model": self.model.state_dict(),
            "training": [module.training for module in self.model.modules()],
            "gradients": [p.grad for p in self.model.parameters()],
            "versions": [p._version * versions for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()),  # noqa: NPY002
        }
        return {key: bits(thing) for key, thing in things.items()}

    def identities(self) -> list[int]:
        objects = [*self.model.parameters(), *(p.grad for p in self.model.parameters())]
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        objects += [*self.model.buffers(), *states, self.scaler._scale, vars(self.optimizer)["step"]]
        return list(map(id, objects))


def raises(training: Training, x: Tensor) -> None:
    training.step(x)
    raise KeyError("after all")


def writes_before(training: Training, x: Tensor) -> None:
    for p in training.model.parameters():
        p.data.mul_(2)
    training.step(x)


def writes_parameters(training: Training, x: Tensor) -> None:
    writes_before(training, x)
    training.model.first.weight.data = torch.zeros(6, 4)
    training.model.eval()
    training.model.first.bias.requires_grad_(False)
    training.model.register_buffer("new", torch.ones(3))
    training.optimizer.param_groups[0]["lr"] = 5.0
    x.fill_(math.nan)


def reshapes_a_parameter(training: Training, x: Tensor) -> None:
    training.step(x)
    training.model.first.weight.data = torch.zeros(2, 2)


STEPS: dict[str, Callable[[Training, Tensor], None]] = {
    "a whole step": Training.step,
    "one of an optimizer that is not named": Training.step,
    "one that raises": raises,
    "one that writes before the step of an optimizer that is not named": writes_before,
    "one that writes what it should not": writes_parameters,
    "one that gives a parameter another shape": reshapes_a_parameter,
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("poison", [False, True])
def test_everything_is_as_before_bit_for_bit(kind: str, poison: bool) -> None:
    training = Training()
    keeper = StepStateKeeper(training.model)
    x, buffers = torch.randn(8, 4), bits(dict(training.model.named_buffers()))
    training.model(x)
    if poison:
        training.model.first.weight.data[0, 0] = math.nan
    batch, versions = bits(x), kind == "a whole step"
    before, identities = training.state(versions), training.identities()
    named: dict[str, Any] = {} if "not named" in kind else {"optimizer": training.optimizer}

    def step(x: Tensor) -> None:
        assert all(p.grad is None for p in training.model.parameters())
        assert bits(dict(training.model.named_buffers())) == buffers  # as before the forward pass of the step
        STEPS[kind](training, x)

    with pytest.raises(KeyError, match="after all") if "raises" in kind and not poison else nullcontext():
        culprit = find_culprit(training.model, step, batch=x, scaler=training.scaler, state=keeper.states, **named)
        assert (culprit is not None) == poison
    assert training.state(versions) == before
    assert bits(x) == batch
    assert training.identities() == identities


@pytest.mark.parametrize("change", ["grown", "freed", "grown and trained"])
def test_a_buffer_whose_memory_changes_hides_neither_the_culprit_nor_the_rest(change: str) -> None:
    """What cannot be restored is told."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("cache", torch.arange(3.0))

    def step() -> None:
        loss = (model(torch.randn(8, 4)).mean() * 0).log()
        loss.backward()
        with torch.no_grad():
            model[1].weight += 1.0
        if change == "freed":
            model.cache.untyped_storage().resize_(0)
        else:
            model.cache.resize_(6).fill_(1.0).requires_grad_(change != "grown")

    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = pytest.warns(RuntimeWarning, match=r"not everything could be restored as it was before: buffer cache \(Runt")
    with told if change == "grown and trained" else nullcontext():
        assert find_culprit(model, step).op == "log"
    after = model.state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == ["cache"] * (
        change == "grown and trained"
    )


def test_another_thread_trains_on_during_a_replay() -> None:
    other = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def train() -> None:
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()

    def step() -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    before = other.bias.item()
    assert find_culprit(nn.Linear(2, 1), step) is None
    assert other.bias.item() == before - 1.0
    assert schedule.get_last_lr() == [pytest.approx(0.1)]


def test_a_closure_is_run_once() -> None:
    model, calls = nn.Linear(2, 1), []
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        calls.append(1)
        loss = (model(torch.zeros(1, 2)) * 0).sum().log()
        loss.backward()
        return loss

    assert find_culprit(model, lambda: optimizer.step(closure), optimizer=optimizer).op == "log"
    assert calls == [1]


def test_a_guarded_step_is_not_counted_and_a_scaler_of_gradstat_is_put_back() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    guard = SpikeGuard()

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        scaler.scale(loss).backward()
        guarded_step(optimizer, max_norm=1.0, scaler=scaler, loss=loss, guard=guard)
        scaler.update()

    def state() -> Any:
        things = [model.state_dict(), optimizer.state_dict(), scaler.state_dict(), guard.state_dict()]
        return bits(things), scaler.read(), step_counters(optimizer).read(wait=True)

    assert find_culprit(model, step, optimizer=optimizer, scaler=scaler) is None
    with pytest.raises(KeyError, match="has not been stepped"):
        step_counters(optimizer)
    assert guard.read(wait=True).steps == 0
    step()
    before = state()
    assert find_culprit(model, step, optimizer=optimizer, scaler=scaler) is None
    assert state() == before


class Unlucky(nn.Module):
    """Bad only if dropout drops a whole row, with a probability of one in eight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.weight * x, 0.5).sum().log()


def test_a_fault_that_depends_on_dropout_comes_again_and_one_of_the_backward_pass_is_seen(device: str) -> None:
    model, x = Unlucky().to(device), torch.ones(3, device=device)
    keeper = StepStateKeeper(model)
    generator: Any = torch.cuda if device == "cuda" else torch
    outcomes = set()
    for _ in range(60):
        keeper.begin_step()
        bad = not math.isfinite(model(x).item())
        torch.rand(5, device=device)  # later random numbers must not matter
        before = generator.get_rng_state()
        culprit = find_culprit(model, lambda: model(x).backward(), state=keeper.states)
        assert torch.equal(generator.get_rng_state(), before)
        assert (culprit is not None) == bad
        outcomes.add(bad)
    assert outcomes == {True, False}
    model.weight.data.zero_()
    culprit = find_culprit(model, lambda: model.weight.sqrt().sum().backward())
    assert (culprit.phase, culprit.kind, culprit.op) == ("backward", "inf", "sqrt")
    assert "sqrt().sum()" in culprit.line


def test_every_forward_pass_of_a_step_begins_with_its_own_random_state() -> None:
    model = Unlucky()
    keeper = StepStateKeeper(model)

    def step(draws: int) -> list[float]:
        losses = []
        for _ in range(4):
            torch.rand(draws)
            loss = model(torch.ones(3))
            loss.backward()
            losses.append(loss.item())
        return losses

    for _ in range(5):
        keeper.begin_step()
        happened = step(1)
        assert len(keeper.states) == 4
        again: list[list[float]] = []
        find_culprit(model, lambda: again.append(step(7)), state=keeper.states)  # noqa: B023
        assert len(keeper.states) == 4  # those of the replay are not recorded
        assert again == [happened]


def test_an_evaluation_between_steps_is_no_part_of_one() -> None:
    masks: list[Any] = []

    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            masks.append(nn.functional.dropout(torch.ones(64), 0.5).tolist())
            return super().forward(x).sum() * math.inf

    def step(x: Tensor) -> None:
        model(x).backward()
        with torch.no_grad():  # in training mode it belongs to the step
            model(x)

    model, x = Dropping(4, 4), torch.randn(2, 4)
    keeper = StepStateKeeper(model)
    keeper.end_step()
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(x)
            torch.rand(7)
    model.train()
    masks.clear()
    step(x)
    assert len(keeper.states) == 2
    assert find_culprit(model, step, state=keeper.states, batch=x) is not None
    assert masks[:2] == masks[2:]


def test_a_recorder_copies_large_buffers_only_when_they_changed() -> None:
    model = nn.Identity()
    model.register_buffer("mask", torch.zeros(70_000))
    keeper = StepStateKeeper(model)
    model(None)
    model(None)
    model.mask[5] = 1.0
    model(None)
    a, b, c = (state._buffers["mask"].copy for state in keeper.states)
    assert a is b
    assert c is not a
    assert c[5] == 1.0
    version = model.mask._version
    keeper.states[0].restore(model)
    assert (model.mask[5], model.mask._version) == (0.0, version)


def test_a_recorder_starts_over_and_goes_away() -> None:
    before, model = torch.cuda.is_initialized(), nn.Linear(2, 2)
    keeper = StepStateKeeper(model)
    x = torch.ones(1, 2)
    model(x)
    model(input=x)
    assert len(keeper.states) == 2
    keeper.begin_step()
    assert keeper.states == []
    model(x)
    keeper.remove()
    model(x)
    assert (keeper.states, list(model._forward_pre_hooks)) == ([], [])
    assert torch.cuda.is_initialized() == before
    gone = weakref.ref(model)
    del model
    assert gone() is None


# Schedule: in which steps anomaly mode is on, and that it restores the mode --------------------------------------


def run(schedule: Schedule, steps: int, triggers: bool = False) -> str:
    """Which steps ran in anomaly mode, as a string of ``x`` and ``.``; it may trigger before each."""
    shown = ""
    for _ in range(steps):
        if triggers:
            schedule.trigger()
        expected = schedule.active
        with schedule:
            assert torch.is_anomaly_enabled() == schedule.active == expected
            shown += "x" if expected else "."
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
    assert run(schedule, 21, triggers=True) == "xx..xx....xx........x"
    assert schedule.triggers == 21
    assert run(schedule, 101) == "x" + "." * 100
    assert run(schedule, 6, triggers=True) == "xx..xx"  # the pause is as short as at the beginning
    assert not schedule.trigger()


def test_a_catch_ends_the_burst_and_the_backing_off() -> None:
    schedule, weight = Schedule(after_trigger=3), nn.Parameter(torch.zeros(2))
    schedule.trigger()
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


def test_nonsense_is_no_schedule() -> None:
    for arguments in ({"every": 0}, {"after_trigger": None}, {"backoff": math.nan}, {"backoff": "2"}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(arguments))}.*expected a"):
            Schedule(**arguments)  # type: ignore[arg-type]
