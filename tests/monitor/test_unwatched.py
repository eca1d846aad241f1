"""Tensors that a monitor cannot measure are left out and named once; its own errors never reach the training."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training import backpropagated
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from typing_extensions import Self

import gradstat
from gradstat.monitor import AnomalyWarning

EVERYTHING = dict.fromkeys(("parameters", "buffers", "optimizer", "updates", "activations", "outputs"), 1)


class Quantised(Tensor):
    """Integer codes and scales that look like one float tensor, as quantised weights and optimizer states do.

    It implements only the few operations that an optimizer needs, via a float tensor.
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, tensor: Tensor) -> Quantised:
        scale = tensor.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> Quantised:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].codes, args[0].scale))
        raise NotImplementedError(f"{cls.__name__} does not implement {func}")


class Adapted(nn.Module):
    """A frozen base of any kind, and an adapter that is trained."""

    def __init__(self, base: Tensor) -> None:
        super().__init__()
        self.base = nn.Parameter(base, requires_grad=False)
        self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, step: Callable[[Tensor], object]) -> None:
    for _ in range(steps):
        step(backpropagated(optimizer, model(torch.randn(8, 6)).square().mean()))
        optimizer.step()


def watched(way: str, model: nn.Module, optimizer: Any, **options: Any) -> tuple[gradstat.Monitor, Any]:
    """A monitor by either way, and what the user has to call in each step."""
    if way == "auto":
        return gradstat.auto(optimizer, model, **options).monitor, lambda loss: None
    monitor = gradstat.Monitor(model, optimizer, **options)
    return monitor, monitor.step


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@pytest.mark.filterwarnings("ignore:(Sparse CSR|torch.quantize_per_tensor)")
@pytest.mark.parametrize(
    ("base", "named"),
    [
        (lambda: torch.randint(255, (9, 1), dtype=torch.uint8), "'base' (dtype torch.uint8"),
        (lambda: torch.randint(99, (5, 4), dtype=torch.int8), "'base' (dtype torch.int8"),
        (lambda: torch.ones(4, 4, dtype=torch.bool), "'base' (dtype torch.bool"),
        (lambda: torch.empty(4, 4, device="meta"), "device meta) holds no data"),
        (lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.quint8), "is quantized"),
        (lambda: torch.eye(4).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.eye(4).to_mkldnn(), "layout torch._mkldnn"),
        (lambda: Quantised.of(torch.randn(6, 6)), "'base.codes' (dtype torch.int8"),
        (lambda: torch.randn(4, 4).to(torch.float8_e4m3fn), None),
        (lambda: torch.randn(4, 4, dtype=torch.complex64), None),
        (lambda: torch.eye(4).to_sparse(), None),
    ],
)
@pytest.mark.parametrize("way", ["Monitor", "auto"])
def test_a_frozen_parameter_of_any_kind_is_watched_or_named_once(
    way: str, base: Callable[[], Tensor], named: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    model = Adapted(base())
    optimizer = adam(model)
    monitor, step = watched(way, model, optimizer, watch=EVERYTHING)
    trained(model, optimizer, 6, step)
    texts = [str(warning.message) for warning in recwarn if "gradstat" in str(warning.message)]
    assert len(texts) == (named is not None), texts
    assert all(named is not None and named in text for text in texts)
    assert [(f.rule, f.severity) for f in monitor.findings] == [("not-watched", "info")] * (named is not None)
    assert monitor.diagnose().ok
    tables = monitor.recording().tables
    assert {"parameter", "buffer", "update", "exp_avg", "activation"} <= set(tables)
    base_seen = ("base.scale",) if isinstance(model.base.data, Quantised) else ("base",) * (named is None)
    rest = "down.weight", "down.bias", "up.weight", "up.bias"
    assert tables["parameter"].names == (*base_seen, *rest)
    assert tables["update"].names[-len(rest) :] == rest


def test_states_of_a_quantised_optimizer_are_watched_as_far_as_they_can_be() -> None:
    class Adam8bit(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if p.dim() > 1:
                    self.state[p]["exp_avg"] = Quantised.of(p.grad)
            return super().step(closure)

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    optimizer = Adam8bit(model.parameters(), lr=1e-3)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record", watch={"optimizer": 1})
    with pytest.warns(UserWarning, match=r"the exp_avg '0.weight.codes' \(dtype torch.int8.* \(and 1 more\)$"):
        trained(model, optimizer, 3, monitor.step)
    assert monitor.recording().tables["exp_avg.scale"].names == ("0.weight", "2.weight")
    optimizer.state[model[2].weight]["exp_avg"].scale[1] = math.nan
    monitor.step()
    monitor.flush()
    found = [(f.name, f.about) for f in monitor.findings if f.rule == "nonfinite-optimizer-state"]
    assert found == [("2.weight", "exp_avg.scale")]
    model[0].weight.grad[0] = math.nan
    monitor.step()
    steps = monitor.recording().tables["exp_avg.scale"].steps.tolist()
    assert steps == [1, 2, 3, 4]  # not twice in the bad step
    assert not monitor.is_healthy(within=0)


def test_a_gradient_that_cannot_be_measured_leaves_the_others_watched() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    monitor = gradstat.Monitor(model, on_anomaly="record")

    def step() -> None:
        model.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        model[0].bias.grad = TwoTensor(torch.randn(8), torch.randn(8))
        monitor.step()

    with pytest.warns(UserWarning, match="the gradient '0.bias' is of .*TwoTensor, which stores its data elsewhere"):
        step()
    for _ in range(3):
        step()
    model[1].bias.grad[2] = math.nan
    assert [(f.rule, f.name) for f in monitor.step()] == [("nonfinite-gradient", "1.bias")]
    report = monitor.latest().report
    assert (report.names, report.missing) == (("0.weight", "1.weight", "1.bias"), ())


def test_a_learning_rate_of_numpy_or_none_at_all_is_no_error() -> None:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float32(0.5))
    monitor = gradstat.Monitor(model, optimizer)
    monitor.step()
    del optimizer.param_groups[0]["lr"]
    monitor.step(np.float32(2.0))
    assert monitor.recording().scalars["lr"][0] == 0.5
    assert monitor.recording().scalars["loss"][1] == 2.0


@pytest.mark.parametrize(
    "batch",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).long().to_sparse(),
        lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
        lambda: Quantised.of(torch.randn(4, 4)),
        lambda: torch.zeros(3, 3, dtype=torch.complex64),
    ],
)
def test_any_batch_can_be_shown(batch: Callable[[], Tensor]) -> None:
    model = nn.Linear(6, 6)
    monitor = gradstat.Monitor(model, classes=9, watch={"parameters": 1})
    monitor.batch({"odd": batch(), "x": torch.randn(4, 6)})
    model(torch.randn(4, 6)).sum().backward()
    monitor.step()
    assert "batch['x']" in monitor.recording().tables["batch"].names
    assert monitor.findings == []


def out_of_memory(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError("no memory left")


@pytest.mark.parametrize(
    ("target", "name", "lost"),
    [
        ("gradstat.monitor.collector.Collector", "_notice_change", "a step could not be measured"),
        ("gradstat.monitor.collector", "measure_segments", "a step could not be measured"),
        ("gradstat.monitor.observers", "states_of", "buffers or optimizer states could not be measured"),
        ("gradstat.monitor.observers", "buffers_of", "buffers or optimizer states could not be measured"),
        ("torch", "_foreach_sub", "the last update could not be measured"),
        ("gradstat.monitor.log.StepLog", "read", "could not be read"),
        ("gradstat.monitor.log.StepLog", "close", "the rules could not review the last steps"),
        ("gradstat.monitor.collector.Collector", "inspect_batch", "a batch could not be inspected"),
        ("gradstat.monitor.observers", "stats", "the hook Activations.measure of '0'"),
        ("gradstat.monitor.outputs.Outputs", "measure", None),
    ],
)
@pytest.mark.parametrize("way", ["Monitor", "auto"])
def test_an_internal_error_is_reported_once_and_ends_no_training(
    way: str, target: str, name: str, lost: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(fails: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        optimizer = adam(model)
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if fails:
                patch.setattr(f"{target}.{name}", out_of_memory)
            monitor, step = watched(way, model, optimizer, watch=EVERYTHING)
            look = lambda loss: (monitor.batch({"x": loss.detach()}), step(loss))  # noqa: E731
            trained(model, optimizer, 3, look)
        trained(model, optimizer, 3, look)
        assert monitor.steps == 6
        monitor.detach()
        texts = [str(w.message) for w in told if "no memory left" in str(w.message)]
        about = [text for text in texts if lost is None or lost in text]
        assert len(about) == fails, texts
        assert not fails or "Traceback (most recent call last)" in about[0]
        # Steps after the error are watched again.
        assert {4, 5} <= set(monitor.recording().steps.tolist()) or name == "close"
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("gradstat.monitor.collector.Collector.measure_state", "parameters, buffers or states could not be measured"),
        ("gradstat.monitor.actions.Snapshots.take", "the state of a step could not be copied"),
    ],
)
def test_an_error_beside_a_step_does_not_lose_it(target: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, out_of_memory)
    monitor = gradstat.Monitor(nn.Linear(6, 6), on_anomaly={"error": "record", "info": "rollback"})
    with pytest.warns(Warning, match=told):
        _ = [monitor.step(loss) for loss in (1.0, math.nan, 1.0)]
    assert monitor.recording().steps.tolist() == [0, 1, 2]
    assert "nonfinite-loss" in {finding.rule for finding in monitor.findings}


def test_what_the_user_raises_or_asks_for_wrongly_still_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise gradstat.BackendUnavailableError("not here")

    model = nn.Linear(6, 6)
    monitor = gradstat.Monitor(model, on_anomaly=lambda monitor, finding: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        monitor.step(math.nan)
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        gradstat.Monitor(model, options={"backend": "cuda"})
    model.weight.grad = torch.ones(6, 6)
    for target in ("gradstat.monitor.collector.measure_segments", "gradstat.monitor.log.StepLog.take"):
        with monkeypatch.context() as patch:
            patch.setattr(target, unavailable)
            with pytest.raises(gradstat.BackendUnavailableError):
                gradstat.Monitor(model).step()


@pytest.mark.parametrize(
    ("silence", "logged"),
    [
        (lambda: warnings.simplefilter("ignore"), True),
        (lambda: warnings.filterwarnings("ignore", category=UserWarning), True),
        (lambda: warnings.filterwarnings("ignore", message="gradstat"), True),
        (lambda: warnings.filterwarnings("ignore", message="something else"), False),
        (lambda: warnings.simplefilter("ignore", AnomalyWarning), False),
        (lambda: warnings.simplefilter("default"), False),
    ],
)
def test_errors_are_logged_where_warnings_are_silenced(
    silence: Callable[[], None], logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = gradstat.Monitor(nn.Linear(6, 6))
    with warnings.catch_warnings(record=True), caplog.at_level(logging.ERROR, "gradstat"):
        warnings.resetwarnings()
        silence()
        monitor.step(math.nan)
    assert [(r.name, r.levelname) for r in caplog.records] == [("gradstat", "ERROR")] * logged
    assert not logged or "the loss is NaN" in caplog.text


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("way", ["before backward", "after zero_grad", "auto"])
def test_no_gradient_at_all_is_one_finding_that_says_where_the_call_belongs(way: str, to_none: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor, step = watched(way, model, optimizer if way == "auto" else None, on_anomaly={"warning": "record"})
    for _ in range(40):
        loss = model(torch.randn(8, 6)).square().mean()
        if way == "before backward":
            step(loss)
        loss.backward()
        if way == "auto":
            optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        if way == "after zero_grad":
            step(loss)
    (finding,) = [f for f in monitor.diagnose().findings if f.rule != "unchanged-parameter"]
    assert finding.rule == ("missing-gradient" if to_none else "dead-gradient")
    told = "monitor.step() belongs between backward() and optimizer.step()" in finding.text
    assert told == (to_none and way != "auto")
    assert any("monitor.step() is called before" in cause for cause in finding.causes) == (way != "auto")
    assert any("optimizer.zero_grad() is called between" in c for c in finding.causes) == (way == "auto")


def test_a_replay_without_saved_state_uses_the_current_one() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 6))
    x = torch.zeros(4, 6)
    monitor = gradstat.Monitor(model, on_anomaly="record")

    def step() -> None:
        (model(x) * 0).sum().sqrt().backward()

    step()
    (finding,) = monitor.step()
    assert any("replay=step_fn" in advice for advice in finding.advice)
    with pytest.warns(RuntimeWarning, match=r"no state of the step was saved.*Monitor\(..., replay=True\)"):
        culprit = monitor.replay(step)
    assert (culprit.phase, culprit.op) == ("backward", "sqrt")
    assert "no state of the step was saved" in str(monitor.diagnose())
    with pytest.warns(RuntimeWarning):
        assert monitor.replay(lambda: model(x).sum().backward()) is None
    with pytest.raises(TypeError, match="no function to run"):
        monitor.replay()


class Engine(nn.Module):
    """Imitates DeepSpeed's engine without ZeRO, as far as a monitor reads it; it cannot run a step again."""

    zero_optimization_stage = 0

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.optimizer = module, torch.optim.SGD(module.parameters())

    def fp16_enabled(self) -> bool:
        return False


def test_a_guard_beside_an_engine_is_refused_with_the_reason() -> None:
    with pytest.raises(NotImplementedError, match="'guard' is not supported with DeepSpeed"):
        gradstat.Monitor(Engine(nn.Linear(6, 2)), guard=gradstat.SpikeGuard())


def test_advice_under_an_engine_is_what_can_be_done_there() -> None:
    engine = Engine(nn.Sequential(nn.Linear(6, 2)))
    monitor = gradstat.Monitor(engine, on_anomaly="record", watch=["activations"])
    loss = engine.module(torch.full((4, 6), math.nan)).sum()
    loss.backward()
    found = {finding.rule: finding.advice for finding in monitor.step(loss)}
    assert not [advice for every in found.values() for advice in every if "replay" in advice]
    for rule in ("nonfinite-gradient", "nonfinite-loss"):
        assert "watch={'activations': 1} names the first module whose output is not finite" in found[rule]
    assert found["nonfinite-activation"][0] == "look at this module's inputs and weights"
