"""Behaviour common to all integrations, in a small training with each, compared with a plain loop."""

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from helpers import frameworks
from helpers.frameworks import OF_FRAMEWORKS, QUIET, Net, forget_accelerators, samples
from helpers.ranks import on_ranks
from helpers.ranks_of_frameworks import accelerate_on_ranks, assert_alike, lightning_on_ranks
from test_transformers import InOrder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradstat
from gradstat.integrations import accelerate, transformers
from gradstat.integrations._engines import engine_clips, engine_name_of
from gradstat.integrations.lightning import GradstatCallback
from gradstat.integrations.loggers import scalars_of
from gradstat.monitor import AnomalyError, AnomalyWarning

pytestmark = [*OF_FRAMEWORKS, QUIET]
STEPS, SIZE = 5, 4
NAMES = ("first.weight", "first.bias", "last.weight", "last.bias")


class Case(NamedTuple):
    """A training, and options for watching it."""

    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)
    clip: float | None = None  # by the program's own means
    accumulate: int = 1  # micro-batches of a step
    bad_at: frozenset[int] = frozenset()  # forward passes that break
    watch: dict[str, Any] | None = {}  # noqa: RUF012 -- options of the integration; None if nobody watches
    before: Callable[[Any], object] = lambda handle: None  # called before the training
    scaler: Callable[..., torch.amp.GradScaler] | None = None  # the class, for float16
    kind: Callable[[], Net] = Net
    steps: int = STEPS  # of all ranks together

    def net(self) -> Net:
        net = self.kind()
        net.bad_at = set(self.bad_at)
        return net

    def data(self) -> TensorDataset:
        return samples(self.steps * self.accumulate * SIZE)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.data(), batch_size=SIZE)

    def precision(self, plugin: Any) -> dict[str, Any]:
        """The scaler as a precision plugin, in arguments for Lightning."""
        if self.scaler is None:
            return {}
        return {"plugins": [plugin("16-mixed", "cpu", self.scaler("cpu", init_scale=1024.0))]}


class Run(NamedTuple):
    """The result of a training; ``handle`` is None if nobody watched it."""

    handle: Any
    net: Net
    optimizer: torch.optim.Optimizer
    norms: list[float]


def plain(case: Case, skip: int | None = None, by: Any = None) -> Run:
    """The same training in plain torch; the gradients of the step ``skip`` are dropped. ``by`` clips instead."""
    net = case.net()
    optimizer, norms = case.optimizer(net.parameters()), []
    for i, (x, y) in enumerate(case.loader()):
        (net(x, y)["loss"] / case.accumulate).backward()
        if (i + 1) % case.accumulate:
            continue
        limit = math.inf if case.clip is None else case.clip
        norms.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])))
        if len(norms) - 1 == skip:
            optimizer.zero_grad()
        elif by is not None:
            copy.copy(by).clip_(net.parameters())
        elif limit != math.inf:
            nn.utils.clip_grad_norm_(net.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    return Run(None, net, optimizer, norms)


def under_lightning(case: Case) -> Run:
    net = case.net()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return case.optimizer(self.parameters())

    callback = None if case.watch is None else GradstatCallback(**case.watch)
    trainer = frameworks.lightning_trainer(
        callback,
        **settings_of_ranks(),
        **case.precision(pl.plugins.MixedPrecision),
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
    )
    if callback is not None:
        case.before(callback)
    trainer.fit(Module(), case.loader())
    return Run(callback, net, trainer.optimizers[0], [])


def under_trainer(case: Case) -> Run:
    net = case.net()
    settings = frameworks.training_arguments(
        "never-made",
        gradient_accumulation_steps=case.accumulate,
        max_grad_norm=case.clip or 0,
        lr_scheduler_type="constant",
        max_steps=max(STEPS, case.steps // 2),
        logging_steps=case.steps,
    )
    data = [{"x": x, "labels": y} for x, y in case.data()]
    optimizer = case.optimizer(net.parameters())
    trainer = InOrder(net, settings, train_dataset=data, optimizers=(optimizer, None))
    handle = None if case.watch is None else transformers.install(trainer, **case.watch)
    with handle or nullcontext():
        case.before(handle)
        trainer.train()
    return Run(handle, net, optimizer, [])


def under_accelerate(case: Case) -> Run:
    precision = "no" if case.scaler is None else "fp16"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate, mixed_precision=precision)
    if case.scaler is not None:  # Accelerate makes one on a GPU only, but uses any that is set
        accelerator.scaler, accelerator.native_amp = case.scaler("cpu", init_scale=1024.0), True
    net = case.net()
    inner = case.optimizer(net.parameters())
    net, optimizer, loader = accelerator.prepare(net, inner, case.loader())
    before = set(vars(accelerator)), set(vars(optimizer))
    batches: list[Any] = []

    def again() -> None:
        for batch in batches[-case.accumulate :]:
            accelerator.backward(net(*batch)["loss"])

    replay = {"replay": again} if case.watch and "replay" in str(case.watch.get("on_anomaly")) else {}
    norms = []
    handle = None if case.watch is None else accelerate.install(accelerator, **case.watch, **replay)
    with handle or nullcontext():
        case.before(handle)
        for batch in loader:
            batches.append(batch)
            with accelerator.accumulate(net):
                accelerator.backward(net(*batch)["loss"])
                if accelerator.sync_gradients and case.clip is not None:
                    norms.append(float(accelerator.clip_grad_norm_(net.parameters(), case.clip)))
                optimizer.step()
                optimizer.zero_grad()
            if handle is not None and handle.should_stop:
                break
    assert (set(vars(accelerator)), set(vars(optimizer))) == before
    return Run(handle, net, inner, norms)


def settings_of_ranks() -> dict[str, Any]:
    """Arguments that let Lightning use the existing process group."""
    if not dist.is_initialized():
        return {}
    return {"devices": dist.get_world_size(), "strategy": "ddp", "plugins": [lightning_on_ranks()]}


UNDER = {"lightning": under_lightning, "trainer": under_trainer, "accelerate": under_accelerate}
SCALED = ["lightning", "accelerate"]  # the Trainer scales on GPUs only


@pytest.fixture(params=UNDER)
def under(request: pytest.FixtureRequest) -> Callable[[Case], Run]:
    return UNDER[request.param]


def weights(run: Run) -> list[Tensor]:
    return [p.detach() for p in run.net.parameters()]


@pytest.mark.parametrize(("accumulate", "clip"), [(3, 0.5), (1, None)])
def test_a_training_is_that_of_a_plain_loop(under: Any, accumulate: int, clip: float | None) -> None:
    """And every step is measured."""
    case = Case(accumulate=accumulate, clip=clip)
    expected, run = plain(case), under(case)
    torch.testing.assert_close(weights(run), weights(expected), rtol=1e-4, atol=1e-6)
    recording = run.handle.monitor.recording()
    assert recording.steps.tolist() == list(range(STEPS))
    assert [name.removeprefix("net.") for name in recording.tables["gradient"].names] == list(NAMES)
    assert recording.scalars["norm"].tolist() == pytest.approx(expected.norms, rel=1e-4)  # complete and unclipped
    assert run.norms in ([], pytest.approx(expected.norms, rel=1e-4))
    losses = [case.net()(x, y)["loss"].item() for x, y in list(case.loader())[:accumulate]]  # of the first step
    assert recording.scalars["loss"][0] == pytest.approx(np.mean(losses), rel=1e-4)
    handle = run.handle  # all integrations log the same names
    assert handle.scalars() == scalars_of(handle.monitor)
    assert {name.removeprefix("grad/") for name in handle.scalars()} == {
        *("total_norm", "max_abs", "nan_count", "inf_count", "zero_fraction"),
        *("loss", "lr", "missing", "findings", "nonfinite_steps"),
    }
    shown = handle.scalars(prefix="x/", per_tensor=("l2_norm",))
    assert {"x/l2_norm/" + name for name in recording.tables["gradient"].names} <= set(shown)


OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),  # sensitive to the norm of gradients
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, fused=False),
    "other": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


STEPPED = [Case(OPTIMIZERS["fused SGD"]), Case(OPTIMIZERS["fused"], accumulate=3), Case(OPTIMIZERS["foreach"])]
OVERFLOWING = Case(OPTIMIZERS["foreach"], bad_at=frozenset({2}), scaler=torch.amp.GradScaler)
BITS = [
    *((name, case._replace(clip=clip)) for name in UNDER for case in STEPPED for clip in (None, 0.5)),
    *((name, OVERFLOWING._replace(clip=clip)) for name in SCALED for clip in (None, 0.5)),
    *((name, OVERFLOWING._replace(optimizer=OPTIMIZERS["fused SGD"])) for name in SCALED),
    *((name, Case(bad_at=frozenset(range(1, STEPS)))) for name in UNDER),
]


@pytest.mark.parametrize(("name", "case"), BITS)
def test_watching_changes_no_bit(name: str, case: Case) -> None:
    """Also of a step that overflows, which a scaler skips, and of a loss that stays NaN, which ends no training."""
    unwatched = UNDER[name](case._replace(watch=None))
    forget_accelerators()
    run = UNDER[name](case)
    torch.testing.assert_close(weights(run), weights(unwatched), rtol=0, atol=0, equal_nan=True)
    assert run.norms == pytest.approx(unwatched.norms, abs=0, rel=0, nan_ok=True)
    assert run.net.passes == STEPS * case.accumulate
    assert run.handle.monitor.steps == STEPS
    assert not run.handle.should_stop
    found = {finding.rule for finding in run.handle.monitor.findings}
    assert len(case.bad_at) < 2 or {"nonfinite-loss", "nonfinite-gradient"} <= found


@pytest.mark.parametrize("limit", [0.5, gradstat.FixedClip(0.5)], ids=["number", "adaptive"])
def test_max_norm_clips_where_the_program_does_not(under: Any, limit: Any) -> None:
    """SGD is sensitive to the limit, unlike Adam."""
    options = {"on_anomaly": ["skip", "warn"], "max_norm": limit, "watch": {"updates": 1, "activations": 1}}
    case = Case(lambda p: torch.optim.SGD(p, lr=0.1))
    run = under(case._replace(watch=options))
    torch.testing.assert_close(weights(run), weights(plain(case._replace(clip=0.5))), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "clip"), [("fused", 0.5), ("fused", None), ("foreach", 0.5), ("other", None)])
def test_a_bad_step_is_skipped_and_told(
    under: Any, kind: str, clip: float | None, recwarn: pytest.WarningsRecorder
) -> None:
    """With advice that fits the framework, at the user's line."""
    case = Case(OPTIMIZERS[kind], clip, bad_at=frozenset({2}), watch={"on_anomaly": ["skip", "warn"]})
    run = under(case)
    torch.testing.assert_close(weights(run), weights(plain(case, skip=2)), rtol=1e-4, atol=1e-6)
    assert "found_inf" not in run.optimizer.__dict__
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {STEPS - 1}
    findings = run.handle.monitor.findings
    assert [finding.step for finding in findings if finding.rule == "nonfinite-gradient"] == [2]
    assert run.handle.monitor.nonfinite_steps == run.handle.scalars()["grad/nonfinite_steps"] == 1
    assert {one.filename for one in recwarn if "gradstat" in str(one.message)} == {__file__}
    advice = [one for finding in findings for one in finding.advice if "replay" in one]
    assert len(advice) == 2
    has_step = under in (under_lightning, under_trainer)  # their training step can be called again
    assert ["replay=step_fn" in one for one in advice] == [not has_step] * 2
    assert all("on_anomaly='replay'" in one for one in advice)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(
    ("kind", "accumulate", "limit", "scaler"),
    [
        ("fused", 3, 0.5, torch.amp.GradScaler),
        ("fused SGD", 1, 0.5, torch.amp.GradScaler),
        ("foreach", 1, gradstat.FixedClip(0.5), gradstat.amp.GradScaler),
        ("fused", 1, gradstat.FixedClip(0.5), gradstat.amp.GradScaler),
        ("fused SGD", 1, gradstat.AGC(clipping=1e-3), torch.amp.GradScaler),
        ("foreach", 1, None, torch.amp.GradScaler),  # the framework's own clip
    ],
)
def test_statistics_and_clips_exclude_the_loss_scale(
    name: str, kind: str, accumulate: int, limit: Any, scaler: Any
) -> None:
    case = Case(OPTIMIZERS[kind], accumulate=accumulate, clip=0.5, scaler=scaler)
    expected = plain(case, by=limit if isinstance(limit, gradstat.AGC) else None)
    run = UNDER[name](case if limit is None else case._replace(clip=None, watch={"max_norm": limit}))
    assert run.norms in ([], pytest.approx(expected.norms, rel=0.05))
    assert not {"found_inf", "grad_scale"} & set(run.optimizer.__dict__)
    torch.testing.assert_close(weights(run), weights(expected), rtol=0.02, atol=2e-3)  # half precision
    recording = run.handle.monitor.recording()
    assert recording.scalars["norm"].tolist() == pytest.approx(expected.norms, rel=0.05)
    losses = [case.net()(x, y)["loss"].item() for x, y in list(case.loader())[:accumulate]]
    assert recording.scalars["loss"][0] == pytest.approx(np.mean(losses), rel=0.02)
    assert set(recording.scalars["loss_scale"]) == {1024.0}
    assert run.handle.scalars()["grad/total_norm"] == pytest.approx(expected.norms[-1], rel=0.05)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_an_overflow_under_a_loss_scale_is_the_scalers_to_skip(name: str, kind: str) -> None:
    watch = {"on_anomaly": "skip", "max_norm": 0.5}
    case = Case(OPTIMIZERS[kind], bad_at=frozenset({2}), watch=watch, scaler=torch.amp.GradScaler)
    run = UNDER[name](case)
    skipped = weights(plain(case._replace(clip=0.5), skip=2))
    torch.testing.assert_close(weights(run), skipped, rtol=0.02, atol=2e-3)
    assert not {"found_inf", "grad_scale"} & set(run.optimizer.__dict__)
    assert run.handle.monitor.recording().scalars["loss_scale"].tolist() == [1024, 1024, 1024, 512, 512]
    assert run.handle.monitor.nonfinite_steps == 1


def test_a_guard_is_one_argument(under: Any) -> None:
    guard = gradstat.SpikeGuard(window=4, max_loss=1e-9)
    case = Case(OPTIMIZERS["fused"], None, watch={"guard": guard, "on_anomaly": "record"})
    run = under(case)
    assert guard.read(wait=True).by_loss == STEPS
    torch.testing.assert_close(weights(run), [p.detach() for p in case.net().parameters()], rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_step_is_replayed(under: Any, accumulate: int) -> None:
    bad = frozenset({3 * accumulate - 1, 3 * accumulate + accumulate - 1})  # a pass of step 2, and its replay
    case = Case(accumulate=accumulate, bad_at=bad, watch={"on_anomaly": ["warn", "skip", "replay"]})
    with pytest.warns(AnomalyWarning, match="step 2: NaN was first produced in the forward pass, by log"):
        run = under(case)
    culprit = run.handle.monitor.culprit
    assert (culprit.op, culprit.phase) == ("log", "forward")
    assert "torch.log(-hidden.abs())" in str(culprit)
    assert run.handle.monitor.steps == STEPS
    assert run.net.passes == (STEPS + 1) * accumulate
    assert all(value.isfinite().all() for value in weights(run))


def test_raising_comes_before_the_step(under: Any, tmp_path: Path) -> None:
    watch = {"on_anomaly": "raise", "save_to": tmp_path / "run.gradstat"}
    net = Net()
    case = Case(accumulate=2, bad_at=frozenset({1}), watch=watch, kind=lambda: net)
    with pytest.raises(AnomalyError, match=r"(?s)step 0, nonfinite.*what to try") as caught:
        under(case)
    why = gradstat.recording.load(tmp_path / "run.gradstat").meta["why"]
    assert why.startswith("AnomalyError" if under is under_lightning else "the run ended")  # it reports errors
    assert caught.value.finding.step == 0
    assert all(map(torch.equal, net.parameters(), Net().parameters()))


def test_stopping_and_resuming(under: Any, tmp_path: Path) -> None:
    """The state of a stopped training, saved to a file and loaded, does not stop the next training."""
    case = Case(bad_at=frozenset({2}), watch={"on_anomaly": ["skip", "stop"]})
    first = under(case).handle
    assert first.should_stop
    assert first.monitor.steps == 3
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    forget_accelerators()
    second = under(
        case._replace(bad_at=frozenset(), before=lambda handle: handle.load_state_dict(state, expect_restored=False))
    ).handle
    assert second.monitor.steps == 3 + STEPS
    assert not second.should_stop
    assert second.monitor.findings == first.monitor.findings
    assert second.scalars()["grad/nonfinite_steps"] == 1
    if under is not under_lightning:  # which loads it when training begins
        with pytest.raises(ValueError, match="expected the state of 1 monitors, got 0"):
            second.load_state_dict({**state, "monitors": []})
    with pytest.raises(ValueError, match=r"^state\['version'\]: expected 1, got 2"):
        second.load_state_dict({**state, "version": 2})


OWN_ERRORS = [
    ("lightning", "lightning.GradstatCallback.on_findings", "findings could not be shown"),
    ("trainer", "transformers.GradstatCallback.on_findings", "findings could not be shown"),
    ("trainer", "_handle.scalars_of", "statistics could not be logged"),
    ("lightning", "lightning.StepReplay.note", "a batch could not be kept for a replay"),
]


@pytest.mark.parametrize(("name", "broken", "words"), OWN_ERRORS)
def test_internal_errors_end_no_training(name: str, broken: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are reported once."""

    def break_it(handle: Any) -> None:
        monkeypatch.setattr(f"gradstat.integrations.{broken}", Mock(side_effect=ZeroDivisionError))

    watch = {"on_anomaly": ["skip", "replay"] if "StepReplay" in broken else "skip"}
    case = Case(clip=0.5, accumulate=2, bad_at=frozenset({2}), watch=watch, before=break_it)
    expected = plain(case, skip=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = UNDER[name](case)
    torch.testing.assert_close(weights(run), weights(expected), rtol=1e-4, atol=1e-6)
    (message,) = (str(one.message) for one in caught if "training goes on" in str(one.message))
    assert message.startswith(f"gradstat: {words}; training goes on:\nTraceback")


def test_lightning_refuses_to_clip_whether_or_not_it_is_watched() -> None:
    for watch in (None, {}):
        case = Case(OPTIMIZERS["fused"], 0.5, watch=watch, scaler=torch.amp.GradScaler)
        with pytest.raises(RuntimeError, match="unscaling"):
            under_lightning(case)


@pytest.mark.parametrize(("name", "accumulate"), [*((name, 1) for name in UNDER), ("lightning", 2), ("accelerate", 2)])
@on_ranks(2)
def test_ranks_decide_alike(name: str, accumulate: int) -> None:
    origin = (name, accumulate) == ("lightning", 2)  # which has names of the DDP module
    policies = ["skip", "stop", *["replay"] * (name != "accelerate")]
    # On one rank, a pass of step 1 and its replay.
    bad = frozenset({accumulate, 2 * accumulate} if dist.get_rank() == 1 else ())
    watch = {"on_anomaly": policies, "watch": {"origin": int(origin)}}
    with accelerate_on_ranks():
        run = UNDER[name](Case(clip=0.05, accumulate=accumulate, bad_at=bad, watch=watch))
    monitor = run.handle.monitor
    norms = monitor.recording().scalars["norm"].tolist()
    assert run.norms in ([], [pytest.approx(n, nan_ok=True) for n in norms])
    errors = [finding for finding in monitor.findings if finding.severity == "error"]
    found = [(f.rule, f.step, f.name.removeprefix("module." * origin).removeprefix("net.")) for f in errors]
    assert_alike([found, weights(run), norms])
    assert ("nonfinite-loss", 1, "loss") in found
    assert {name for _, _, name in found} <= {"loss", *NAMES}  # without DDP's "module."
    assert all(value.isfinite().all() for value in weights(run))
    assert [math.isfinite(norm) for norm in norms] == [True, False]  # both stopped, at the same step
    assert run.handle.should_stop
    origins = [(f.step, "rank 1" in f.text) for f in monitor.findings if f.rule == "nonfinite-rank"]
    assert origins == [(1, True)] * origin
    replays = name != "accelerate" and dist.get_rank() == 1  # each rank replays its own step
    assert (monitor.culprit and monitor.culprit.op) == ("log" if replays else None)


@pytest.mark.parametrize("by_class", [True, False])
def test_engines_refuse_and_hide_the_same_everywhere(by_class: bool) -> None:
    strategies = [type(name, (), {})() for name in ("DeepSpeedStrategy", "FSDPStrategy", "XLAStrategy")]
    deepspeed, fsdp, xla = strategies if by_class else ("DEEPSPEED", "FSDP", "XLA")

    def ask(strategy: Any, *policies: str, ranks: int = 1, max_norm: Any = None) -> bool:
        return engine_clips(engine_name_of(strategy), set(policies), max_norm, ranks, "set it there")

    for policy in ("skip", "rollback", "replay"):
        with pytest.raises(NotImplementedError, match=f"on_anomaly='{policy}' cannot be done under DeepSpeed"):
            ask(deepspeed, policy)
    for policy in ("skip", "rollback"):
        with pytest.raises(NotImplementedError, match=f"on_anomaly='{policy}' cannot be done under FSDP 1"):
            ask(fsdp, "warn", policy)
    for engine, name in ((deepspeed, "DeepSpeed"), (fsdp, "FSDP 1")):
        with pytest.raises(NotImplementedError, match=rf"max_norm=1.0: expected None under {name}.*; set it there"):
            ask(engine, max_norm=1.0)
    assert ask(deepspeed)
    with pytest.warns(UserWarning, match="this rank's shard"):
        assert ask(fsdp)
    with pytest.raises(NotImplementedError, match="'rollback' on 2 ranks: ranks do not coordinate a rollback"):
        ask("MULTI_CPU", "rollback", ranks=2)
    assert not ask("MULTI_CPU", "skip", ranks=2, max_norm=1.0)
    for engine, words in (("MEGATRON_LM", "got Megatron-LM"), (xla, "got XLA")):
        with pytest.raises(NotImplementedError, match=words):
            ask(engine)


EXAMPLES = {
    "accelerate_example.py --steps 20": (
        *("step 10: Inf was first produced in the forward pass, by exp in module '3'",),
        "1. nonfinite-loss (error), since step 10",
    ),
    "auto_example.py --steps 30 --output run.gradstat": (
        *("first in step 15: the gradient of 2.weight", "the first at [17, 42]", "all parameters are finite: True"),
    ),
    "lightning_example.py --steps 64 --folder .": (
        *("replay of step 60", "NaN was first produced in the forward pass, by div in module 'body.2'"),
        "return x / x.square().mean(-1, keepdim=True).sqrt()",
    ),
    "transformers_example.py --steps 20": (
        *("step 10: NaN was first produced in the forward pass, by div in module 'transformer.h.1.mlp'",),
        "1. nonfinite-loss (error), since step 10",
    ),
}


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_runs_and_names_the_fault(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = frameworks.run_example(*command.split())
    assert [words for words in EXAMPLES[command] if words not in shown] == [], shown
    assert ("--output" in command) == (tmp_path / "run.gradstat").exists()
    headers = [path.read_text().splitlines()[0] for path in tmp_path.rglob("metrics.csv")]
    assert ["grad/l2_norm/body.1.weight" in header for header in headers] == [True] * ("--folder" in command)


class Drifting(Net):
    """On rank 1, changes a weight by itself in step 50."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.passes == 50 and dist.get_rank() == 1:
            self.first.weight.detach()[0, 1] += 1e-3
        return super().forward(x, labels)


@pytest.mark.parametrize("name", UNDER)
@on_ranks(2)
def test_replicas_are_compared_every_hundred_steps(name: str) -> None:
    """Adapters run on every rank, so they can."""
    for watch, expected in (({}, [(100, "first.weight")]), ({"replicas": 0}, [])):
        options = {"on_anomaly": "record", "watch": watch}
        case = Case(lambda p: torch.optim.SGD(p, lr=0.01), watch=options, kind=Drifting, steps=204)
        with accelerate_on_ranks():
            findings = UNDER[name](case).handle.monitor.findings
        found = [(f.step, f.name.removeprefix("net.")) for f in findings if f.rule == "replica-mismatch"]
        assert found == expected
        assert_alike(found)
