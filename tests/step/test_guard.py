"""`SpikeGuard`: its rules against plain Python, in every backend and in a CUDA block; guarded steps with it."""

import copy
import math
import pickle
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.devices import DECIDING
from helpers.layouts import batch, make_layout
from helpers.ranks import on_ranks
from test_step import OPTIMIZERS, network
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradstat
from gradstat import AdaGC, AutoClip, SpikeGuard
from gradstat import guard as guards
from gradstat._core import backends
from gradstat.integrations import loggers as log

deciding = pytest.mark.parametrize("where", DECIDING, indirect=True, ids="-".join)


@dataclass
class Rule:
    """Judges steps of several values, each None or a number; returns why each was refused.

    With ``sigmas`` like OLMo's SkipStepOptimizer.get_step_factor, whose mean and deviation exclude the step itself.
    """

    threshold: float
    window: int
    warmup: int
    most: float = math.inf
    sigmas: bool = False
    in_a_row: int = 0

    def __post_init__(self) -> None:
        self.kept: list[list[float]] = [[], []]

    def _stands_out(self, series: int, value: float) -> bool:
        kept = self.kept[series]
        newest = 0 if self.sigmas else self.window // 8
        if len(kept) < max(self.warmup, newest + 2):
            return False
        last = kept[-self.window : len(kept) - newest]
        if self.sigmas:
            return not value - statistics.mean(last) <= self.threshold * statistics.stdev(last)
        centre = float(np.median(last))
        spread = 1.482602218505602 * float(np.median(np.abs(np.array(last) - centre)))
        spread = max(spread, 0.5 * (max(last) - centre), 0.01 * abs(centre))
        return not value - centre <= self.threshold * spread

    def judge(self, values: list[float | None]) -> tuple[str, ...]:
        given = [(i, value) for i, value in enumerate(values) if value is not None]
        if not all(math.isfinite(value) for _, value in given):
            return ("nonfinite",)
        why = [i for i, value in given if self._stands_out(i, value)]
        if why and self.in_a_row >= self.most:
            self.kept, why = [[], []], []
        self.in_a_row = self.in_a_row + 1 if why else 0
        for i, value in given:
            if self.sigmas or not why:
                self.kept[i].append(value)
        return tuple(("loss", "norm")[i] for i in why)


def series(steps: int, seed: int) -> list[list[float | None]]:
    """Losses that fall below zero, and norms, with spikes, repetitions, a change of level, NaN and None."""
    random = np.random.default_rng(seed)
    loss = np.linspace(1.0, -1.0, steps) + random.normal(0, 0.05, steps)
    norm = np.exp(random.normal(0, 0.2, steps))
    loss[random.random(steps) < 0.04] += 5
    norm[random.random(steps) < 0.04] *= 50
    norm[random.random(steps) < 0.3] = 1.0
    norm[steps // 2 :] *= 8
    loss[random.random(steps) < 0.03] = math.nan
    norm[random.random(steps) < 0.03] = math.inf
    values = np.stack([loss, norm], 1).astype(np.float32).astype(np.float64).tolist()
    return [[loss if seed % 2 or step % 3 else None, norm] for step, (loss, norm) in enumerate(values)]


GUARDS: list[tuple[Any, Any]] = [
    (lambda: SpikeGuard(window=20), lambda: Rule(6.0, 20, 10, 10)),
    (lambda: SpikeGuard(3.0, 33, 5, max_consecutive=2), lambda: Rule(3.0, 33, 5, 2)),
    (lambda: SpikeGuard(3.0, 150, 20, max_consecutive=None), lambda: Rule(3.0, 150, 20)),
    (lambda: SpikeGuard.sigma(16, 3.0), lambda: Rule(3.0, 16, 7, sigmas=True)),
    (lambda: SpikeGuard.sigma(), lambda: Rule(6.0, 128, 63, sigmas=True)),
]


def judge(
    guard: SpikeGuard, where: tuple[str, str], values: Sequence[float | Tensor | None], bad: bool = False
) -> tuple[Tensor, Tensor]:
    """Decides about a step; returns the decision and the step's numbers."""
    device = where[1]
    loss, norm = (None if value is None else torch.as_tensor(value, device=device) for value in values)
    numbers = torch.tensor([0.5, norm.item()], dtype=torch.float64, device=device)
    verdict = torch.tensor([float(bad), 2.0, 8.0], device=device)
    return guards.decide(guard, backends.resolve(*where), numbers, verdict, loss, None, ()), numbers


@deciding
@pytest.mark.parametrize(
    ("make", "rule", "seed"),
    [(make, rule, i % 2) for i, (make, rule) in enumerate(GUARDS)],  # both series for both methods
    ids=[repr(make()) for make, _ in GUARDS],
)
def test_what_stands_out_is_refused_and_why_is_counted(make: Any, rule: Any, seed: int, where: tuple[str, str]) -> None:
    guard, expected = make(), rule()
    reasons = []
    for step, values in enumerate(series(160, seed)):
        bad = step % 50 == 7
        decided, numbers = judge(guard, where, values, bad)
        reasons.append(("nonfinite",) if bad else expected.judge(values))
        bits = sum(2 ** ("nonfinite", "loss", "norm").index(reason) for reason in reasons[-1])
        assert decided.tolist() == [float(bool(reasons[-1])), 2.0, 8.0, float(bits)], step
        assert numbers.tolist() == [0.5, np.float32(values[1])]
        counts = guard.read(wait=True)
        assert counts.reasons == reasons[-1]
        assert counts.consecutive_refused == expected.in_a_row
    flat = [reason for each in reasons for reason in each]
    assert (counts.by_loss, counts.by_norm) == tuple(map(flat.count, ("loss", "norm")))
    assert counts.nonfinite == flat.count("nonfinite") > 0
    assert counts.refused == sum(bool(each) for each in reasons) - counts.nonfinite > 0
    assert counts.steps == 160


@deciding
def test_limits_hold_from_the_first_step_and_in_a_row(where: tuple[str, str]) -> None:
    guard = SpikeGuard(max_norm=2.0, max_loss=-1.0, max_consecutive=1)
    for loss, norm, why in ((-2.0, 2.0, 0), (-2.0, 2.1, 4), (-0.5, 2.1, 6), (-0.5, 1.0, 2), (-2.0, 1.0, 0)):
        assert judge(guard, where, [loss, norm])[0][3] == why
    scaling = SpikeGuard(scale=0.25, max_norm=2.0, max_loss=1.0)
    for values, why in (([None, 3.0], 4), ([2.0, 3.0], 6), ([2.0, 1.0], 2), ([1.0, 1.0], 0)):
        found, numbers = judge(scaling, where, values)  # type: ignore[arg-type]
        assert found.tolist() == [0.0, 8.0 if why else 2.0, 8.0, why]
        assert numbers.tolist() == [0.125 if why else 0.5, values[1]]
    assert judge(scaling, where, [math.nan, 1.0])[0].tolist() == [1.0, 2.0, 8.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", [pair for pair in DECIDING if pair[0] != "emulated"], indirect=True, ids="-".join)
def test_losses_of_any_type_are_read(dtype: torch.dtype, where: tuple[str, str]) -> None:
    guard = SpikeGuard(max_loss=1.5)
    for loss, skip in ((1.5, 0), (1.625, 1), (-3.0, 0)):
        assert judge(guard, where, [torch.full((1,), loss, dtype=dtype), 1.0])[0][0] == skip


STEPPED = ("AdamW fused", "AdamW", "SGD fused dampened")


class Training:
    """A small model trained with guarded steps."""

    def __init__(self, kind: str = "AdamW fused", device: str = "cpu") -> None:
        torch.manual_seed(1)
        self.model, self.device = network(device), device
        self.optimizer = OPTIMIZERS[kind][0](self.model.parameters())

    def loss(self, step: int, factor: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(16, 6, generator=generator).to(self.device)
        return cast(Tensor, self.model(data).sub(1).square().mean() * factor)

    def step(
        self, step: int, guard: SpikeGuard | None, factor: float = 1.0, **options: Any
    ) -> gradstat.step.StepResult:
        self.optimizer.zero_grad()
        loss = self.loss(step, factor)
        scaler = options.get("scaler")
        (loss if scaler is None else scaler.scale(loss)).backward()
        given = {} if guard is None else {"loss": loss, "guard": guard}
        return gradstat.guarded_step(self.optimizer, **{"max_norm": 1.0, **given, **options})

    def held(self) -> list[Tensor]:
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        return [each.detach().clone() for each in (*self.model.parameters(), *state) if isinstance(each, Tensor)]


@pytest.mark.parametrize("kind", STEPPED)
def test_neither_a_spike_nor_a_nan_loss_leaves_a_trace(kind: str, device: str) -> None:
    training, guard = Training(kind, device), SpikeGuard(window=16)
    for step in range(20):
        spike = step in (13, 14, 17)
        before = training.held()
        result = training.step(step, guard, 300.0 if spike else 1.0)
        assert bool(result.skipped) is bool(result.refused) is spike
        assert result.report.result().refused == (("loss", "norm") if spike else ())
        assert all(map(torch.equal, before, training.held())) is spike
        assert result.loss is not None
    assert guard.read(wait=True) == gradstat.GuardCounts(20, 3, 3, 3, 0, 0, ())
    assert result.counters.read(wait=True) == gradstat.StepCounts(20, 3, 0)
    before = training.held()
    training.loss(20).backward()
    result = gradstat.guarded_step(training.optimizer, loss=torch.tensor(math.nan, device=device), guard=guard)
    assert result.skipped
    assert not result.refused
    assert all(map(torch.equal, before, training.held()))
    assert result.report.result().ok
    assert result.report.result().refused == guard.read(wait=True).reasons == ("nonfinite",)


@pytest.mark.parametrize("kind", ["SGD fused dampened", "SGD"])
def test_scaling_down_multiplies_the_step(kind: str) -> None:
    for factor, expected in ((1.0, 0.05), (1e4, 0.0125)):
        training, guard = Training(kind), SpikeGuard(scale=0.25, max_loss=100.0)
        before = nn.utils.parameters_to_vector(training.model.parameters()).detach()
        result = training.step(0, guard, factor, max_norm=0.5)
        assert bool(result.refused) is (factor > 1)
        assert not result.skipped
        after = nn.utils.parameters_to_vector(training.model.parameters()).detach()
        assert (after - before).norm().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", STEPPED)
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_loss_scaler_takes_a_refused_step_for_a_good_one(kind: str, unscaled: bool) -> None:
    """Only an overflow may change the loss scale."""
    training, guard = Training(kind), SpikeGuard(window=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    scales, skipped = [], []
    for step in range(13):
        training.optimizer.zero_grad()
        loss = training.loss(step, 1e3 if step == 6 else 1.0)
        scaler.scale(loss).backward()
        if step == 9:
            training.model[0].bias.grad[1] = math.inf
        if unscaled:
            scaler.unscale_(training.optimizer)
        result = gradstat.guarded_step(training.optimizer, 1.0, scaler=scaler, loss=loss, guard=guard)
        scaler.update()
        scales.append(scaler.get_scale())
        skipped.append(bool(result.skipped))
    assert [i for i, each in enumerate(skipped) if each] == [6, 9]
    assert scales == [64.0] * 3 + [128.0] * 4 + [256.0] * 2 + [128.0] * 4
    assert guard.read() == gradstat.GuardCounts(13, 1, 1, 1, 1, 0, ())
    assert gradstat.step_counters(training.optimizer).read() == gradstat.StepCounts(13, 2, 0)


@pytest.mark.parametrize(
    "make", [lambda: AutoClip(50, window=8), lambda: gradstat.ZClip(warmup=3), lambda: AdaGC(warmup=3)]
)
@pytest.mark.parametrize("kind", STEPPED)
def test_an_adaptive_clip_does_not_see_what_was_refused(make: Any, kind: str) -> None:
    spiked, plain = Training(kind), Training(kind)
    clip, without, guard = make(), make(), SpikeGuard(window=8)
    for step in range(14):
        if step in (9, 12):
            assert spiked.step(step, guard, 1e4, max_norm=clip).skipped
            continue
        spiked.step(step, guard, max_norm=clip)
        plain.step(step, None, max_norm=without)
        torch.testing.assert_close(spiked.model.state_dict(), plain.model.state_dict())
    torch.testing.assert_close(clip.state_dict()["tensors"], without.state_dict()["tensors"], equal_nan=True)


def test_a_closure_gives_the_loss_and_gradients_may_be_accumulated() -> None:
    training, guard = Training(), SpikeGuard(max_loss=50.0)

    def closure(factor: float) -> Tensor:
        training.optimizer.zero_grad()
        parts = [training.loss(part, factor) / 2 for part in range(2)]
        for part in parts:
            part.backward()
        return parts[0] + parts[1]

    for factor in (1.0, 1e3):
        result = gradstat.guarded_step(training.optimizer, 1.0, guard=guard, closure=partial(closure, factor))
        assert bool(result.refused) is (factor > 1)
    assert guard.read().reasons == ("loss",)


@pytest.mark.parametrize("make", [SpikeGuard, SpikeGuard.sigma])
def test_a_saved_guard_continues_identically(make: Any, tmp_path: Any) -> None:
    first, where = make(window=12), ("native", "cpu")
    values = series(60, 1)
    for each in values[:30]:
        judge(first, where, each)
    address = first.reason.data_ptr()
    torch.save(first.state_dict(), tmp_path / "guard.pt")
    state = torch.load(tmp_path / "guard.pt", weights_only=True)
    second, copied, pickled = make(window=12), copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    second.load_state_dict(state)
    expected = [judge(first, where, each)[0] for each in values[30:]]
    for guard in (second, copied, pickled):
        assert all(map(torch.equal, [judge(guard, where, each)[0] for each in values[30:]], expected))
        assert guard.read(wait=True) == first.read(wait=True)
    first.load_state_dict(state)
    assert first.reason.data_ptr() == address, "a captured graph writes to the memory it was captured with"
    assert first.read(wait=True).steps == 30
    assert make().read().steps == 0


def test_counts_are_those_of_the_copy_or_of_the_loaded_state() -> None:
    training, guard = Training(), SpikeGuard()
    training.step(0, guard)
    counters = training.step(1, guard).counters
    # As on a GPU: streams, which cannot be copied, and a transfer that has not arrived.
    guard.state.streams = counters.streams = (threading.Lock(),)  # type: ignore[assignment]
    copied, pickled, counted = copy.deepcopy(guard), pickle.loads(pickle.dumps(guard)), copy.deepcopy(counters)
    guard.state.streams = counters.streams = ()
    saved = guard.state_dict()
    result = training.step(2, guard)
    assert guard.read().steps == result.counters.read().steps == 3
    assert copied.read().steps == pickled.read().steps == counted.read().steps == 2
    guard.state._copy = SimpleNamespace(needs_copy=True, done=lambda: False)  # type: ignore[assignment]
    guard.load_state_dict(saved)
    assert guard.read().steps == 2


def test_misuse_is_told_before_anything_changes() -> None:
    training, guard = Training(), SpikeGuard()
    training.step(0, guard)
    training.loss(1).backward()
    before, counts = training.held(), guard.read()
    lbfgs = torch.optim.LBFGS(training.model.parameters())
    loss = torch.tensor(1.0)
    for error, message, options in (
        (TypeError, r"expected a tensor with one element, got float.*loss\.item\(\)", {"loss": 1.0, "guard": guard}),
        (ValueError, r"loss is a tensor of shape \(2,\).*loss\.mean\(\)", {"loss": loss.expand(2), "guard": guard}),
        (ValueError, r"loss is a tensor of shape \(\) and torch\.int64", {"loss": loss.long(), "guard": guard}),
        (ValueError, r"loss is used only with a guard; pass guard=gradstat\.SpikeGuard\(\)", {"loss": loss}),
        (TypeError, r"guard: expected a gradstat\.SpikeGuard, got float", {"guard": 6.0}),
        (ValueError, "leave skip_nonfinite=True", {"guard": guard, "skip_nonfinite": False}),
        (ValueError, "the closure already returns the loss", {"guard": guard, "loss": loss, "closure": lambda: loss}),
        (ValueError, "LBFGS evaluates the loss", {"guard": guard, "closure": lambda: loss, "optimizer": lbfgs}),
        (ValueError, "AdaGC changes gradients", {"guard": SpikeGuard(scale=0.5), "max_norm": AdaGC()}),
    ):
        with pytest.raises(error, match=message):
            gradstat.guarded_step(**{"optimizer": training.optimizer, **options})
    assert all(map(torch.equal, before, training.held()))
    assert guard.read() == counts
    for error, message, options in (
        (ValueError, "threshold is -1.0; expected a number from 0.0", {"threshold": -1}),
        (ValueError, "threshold is nan", {"threshold": math.nan}),
        (ValueError, "window is 1; expected a whole number from 2", {"window": 1}),
        (ValueError, "warmup is 1; expected a whole number from 2", {"warmup": 1}),
        (ValueError, "max_consecutive is -1; expected a whole number from 0", {"max_consecutive": -1}),
        (ValueError, "scale is 1; expected a number between 0 and 1", {"scale": 1}),
        (ValueError, "max_loss is nan; expected a number, or inf for no limit", {"max_loss": math.nan}),
        (ValueError, "max_loss is -inf; expected a number, or inf", {"max_loss": -math.inf}),
        (TypeError, "float", {"window": 2.5}),
    ):
        with pytest.raises(error, match=message):
            SpikeGuard(**options)


@pytest.mark.parametrize("after", [True, False])
def test_a_monitor_and_loggers_are_told(after: bool) -> None:
    """About the same step if the monitor is called after the guarded step, else about the step before."""
    training, guard = Training(), SpikeGuard(window=8)
    monitor = gradstat.Monitor(training.model, optimizer=training.optimizer, on_anomaly="record")
    logged = {}
    for step in range(12):
        training.optimizer.zero_grad()
        loss = training.loss(step, 300.0 if step == 8 else 1.0)
        loss.backward()
        calls = [monitor.step, partial(gradstat.guarded_step, training.optimizer, 1.0, loss=loss, guard=guard)]
        for call in reversed(calls) if after else calls:
            call()
        logged.update({monitor.latest().step: log.scalars_of(monitor).get("grad/refused")} if monitor.latest() else {})
    monitor.flush()
    (refused,) = (monitor.recording().scalars["refused"] > 1).nonzero()[0]
    assert refused == (8 if after else 9)
    assert {step for step, value in logged.items() if value} == {refused}
    assert logged[refused] == 6.0
    # Its state is not to replace a good checkpoint, also after the run was resumed.
    resumed = gradstat.Monitor(training.model, optimizer=training.optimizer)
    resumed.load_state_dict(monitor.state_dict())
    for one in (monitor, resumed):
        assert [one.is_healthy(), one.is_healthy(12 - refused), one.is_healthy(11 - refused)] == [False, False, True]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "tp"])
@on_ranks(4)
def test_all_ranks_decide_alike_about_a_loss_of_one_of_them(layout: str) -> None:
    spread, batches = make_layout(layout)
    optimizer = torch.optim.AdamW(spread.model.parameters(), lr=0.01)
    guard = SpikeGuard(window=4, warmup=2)
    for step in range(7):
        optimizer.zero_grad()
        loss = spread.model(batch(batches[dist.get_rank()])).square().mean()
        loss.backward()
        told = loss.detach()
        if step >= 5 and dist.get_rank() == 2:
            told = told + (100.0 if step == 5 else math.nan)
        assert bool(gradstat.guarded_step(optimizer, 0.1, loss=told, guard=guard).skipped) is (step >= 5)
        assert guard.read().reasons == {5: ("loss",), 6: ("nonfinite",)}.get(step, ())
    held = guard.state_dict()["tensors"]["values"]
    everywhere = [torch.empty_like(held) for _ in range(4)]
    dist.all_gather(everywhere, held)
    assert all(torch.equal(held, other) for other in everywhere)


def _uneven(way: str) -> tuple[int, SpikeGuard]:
    torch.manual_seed(0)
    model, guard = DistributedDataParallel(nn.Linear(8, 2)), SpikeGuard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    taken, watch = 0, {"on_anomaly": "record", "guard": guard}
    monitor = gradstat.Monitor(model, optimizer, **watch) if way == "Monitor" else None
    if way == "auto":
        gradstat.auto(model, optimizer, **watch)
    with model.join():
        for _ in range(4 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            if way == "guarded_step":
                gradstat.guarded_step(optimizer, guard=guard, loss=loss)
            else:
                if monitor is not None:
                    monitor.step(loss)
                optimizer.step()
            taken += 1
    return taken, guard


@pytest.mark.parametrize("way", ["guarded_step", "Monitor", "auto"])
@on_ranks(3)
def test_ranks_may_end_at_different_steps_with_ddps_join(way: str) -> None:
    """The mean of the loss would wait for a rank that has ended; the norm is the same on those that go on."""
    taken, guard = _uneven(way)
    assert taken == guard.read(wait=True).steps == 4 + 3 * dist.get_rank()
    assert not guard.state_dict()["tensors"]["values"][0].any()


@pytest.mark.parametrize("kind", ["guard", "sigma", "used", "ZClip", "AutoClip", "AdaGC", "clip_"])
@pytest.mark.parametrize("loads", ["all", "none", "rank 0", "rank 1", "others"])
@on_ranks(2)
def test_a_state_that_not_all_ranks_have_loaded_is_refused_on_all(loads: str, kind: str) -> None:
    """As in a program that loads a checkpoint on one rank, since DDP broadcasts the parameters."""
    model, rank = DistributedDataParallel(nn.Linear(8, 2)), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    make: Any = {
        **{"guard": SpikeGuard, "used": SpikeGuard, "sigma": SpikeGuard.sigma},
        **{"ZClip": gradstat.ZClip, "AutoClip": AutoClip, "AdaGC": AdaGC, "clip_": gradstat.ZClip},
    }[kind]

    def step(judge: Any, value: float) -> None:
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), value)).square().mean()
        loss.backward()
        if kind == "clip_":
            judge.clip_(model.parameters())
        elif isinstance(judge, SpikeGuard):
            gradstat.guarded_step(optimizer, guard=judge, loss=loss)
        else:
            gradstat.guarded_step(optimizer, judge)

    first, states = make(), []
    for i in range(3):
        step(first, 1.0 + i)
        states.append(first.state_dict())
    state, judge = states[1 if loads == "others" and rank else 2], first if kind == "used" else make()
    if loads in ("all", "others", f"rank {rank}"):
        judge.load_state_dict(state)
    if loads in ("all", "none"):
        step(judge, 1.0)
        return
    with pytest.raises(RuntimeError, match=r"is not the same on all of ranks 0, 1.*load one state on all ranks"):
        step(judge, 1.0)
