"""Hostile use of a monitor: what a program does, and what must hold. What is done to files: test_hostile_files.py."""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.processes import Forks
from helpers.training import backpropagated, fill
from helpers.travelling import numbers_travel
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from typing_extensions import Self

import gradstat
from gradstat.monitor import AnomalyWarning, Finding, Monitor, Rule, rule
from gradstat.recording import load

EVERYTHING = dict.fromkeys(("parameters", "buffers", "optimizer", "updates", "activations", "outputs"), 1)
WAYS = ("Monitor", "auto")
SECONDS = 60


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


class Adam8bit(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.dim() > 1:
                self.state[p]["exp_avg"] = Quantised.of(p.grad)
        return super().step(closure)


class Adapted(nn.Module):
    """A frozen base of any kind, and an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def watched(way: str, model: nn.Module, optimizer: Any, **options: Any) -> tuple[Monitor, Callable[..., object]]:
    """A monitor by either way, and what the user has to call in each step."""
    if way == "Monitor":
        monitor = Monitor(model, optimizer, **options)
        return monitor, monitor.step
    models = [] if way == "auto by optimizer" else [model]
    return gradstat.auto(optimizer, *models, **options).monitor, lambda loss: None


class Program:
    """A training of six steps, which a hostile use changes before it begins."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Adapted()
        self.optimizer_of: Any = partial(torch.optim.Adam, lr=1e-3)
        self.batch: Callable[[], Any] = lambda: {"x": torch.ones(2)}
        self.breaks = ""  # what raises in the first three steps, if there is a monitor

    def run(self, way: str, patch: pytest.MonkeyPatch) -> Monitor | None:
        self.optimizer = self.optimizer_of([p for p in self.model.parameters() if p.requires_grad])
        with patch.context() as patched:
            if way == "nobody":
                monitor, step = None, lambda loss: None
            else:
                if self.breaks:
                    patched.setattr(self.breaks, out_of_memory)
                monitor, step = watched(way, self.model, self.optimizer, watch=EVERYTHING, num_classes=9)
            self._train(monitor, step)
        self._train(monitor, step)
        return monitor

    def _train(self, monitor: Monitor | None, step: Callable[..., object]) -> None:
        for _ in range(3):
            if monitor is not None:
                monitor.check_batch(self.batch())
            step(backpropagated(self.optimizer, self.model(torch.randn(8, 6)).square().mean()))
            self.optimizer.step()


def out_of_memory(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError("no memory left")


class Use(NamedTuple):
    """What a program does, and what must hold besides that it trains as if nobody watched it."""

    does: Callable[[Program], object]
    says: str = ""  # in the one warning of gradstat; there is none otherwise
    holds: Callable[[Program, Monitor], object] = lambda program, monitor: None


def freezes(make: Callable[[], Tensor], says: str = "", rows: tuple[str, ...] = ()) -> Use:
    def holds(program: Program, monitor: Monitor) -> None:
        assert [(f.rule, f.severity) for f in monitor.findings] == [("not-watched", "info")] * bool(says)
        assert monitor.diagnose().ok
        tables, rest = monitor.recording().tables, ("down.weight", "down.bias", "up.weight", "up.bias")
        assert {"parameter", "buffer", "update", "exp_avg", "activation"} <= set(tables)
        assert tables["parameter"].names == (*rows, *rest)
        assert tables["update"].names[-len(rest) :] == rest

    return Use(lambda program: setattr(program.model, "base", nn.Parameter(make(), requires_grad=False)), says, holds)


def shows(make: Callable[[], Tensor]) -> Use:
    def holds(program: Program, monitor: Monitor) -> None:
        assert "batch['x']" in monitor.recording().tables["batch"].names
        assert monitor.findings == []

    return Use(lambda program: setattr(program, "batch", lambda: {"odd": make(), "x": torch.ones(4, 6)}), "", holds)


def fails_in(what: str, says: str, loses: frozenset[int] = frozenset()) -> Use:
    """An internal error of the first three steps. Later steps are watched again, unless the monitor ``loses`` them."""

    def holds(program: Program, monitor: Monitor) -> None:
        assert {4, 5} - loses <= set(monitor.recording().steps.tolist())

    return Use(lambda program: setattr(program, "breaks", f"gradstat.monitor.{what}"), says, holds)


def has_quantised_states(program: Program) -> None:
    program.optimizer_of = partial(Adam8bit, lr=1e-3)


def watches_their_scales(program: Program, monitor: Monitor) -> None:
    names = "down.weight", "up.weight"
    assert monitor.recording().tables["exp_avg.scale"].names == names
    program.optimizer.state[program.model.up.weight]["exp_avg"].scale[1] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program.model.down.weight.grad[0] = math.nan
        monitor.step()
        monitor.flush()
    found = [(f.name, f.about) for f in monitor.findings if f.rule == "nonfinite-optimizer-state"]
    assert found == [("up.weight", "exp_avg.scale")]
    assert monitor.recording().tables["exp_avg.scale"].steps.tolist()[-2:] == [5, 6]  # not twice in the bad step
    assert not monitor.is_healthy(within=0)


STATES = "buffers or optimizer states could not be measured"
NO_STEP = "a step could not be measured"
USES: dict[str, Use] = {
    "freezes uint8": freezes(lambda: torch.randint(255, (9, 1), dtype=torch.uint8), "'base' (dtype torch.uint8"),
    "freezes int8": freezes(lambda: torch.randint(99, (5, 4), dtype=torch.int8), "'base' (dtype torch.int8"),
    "freezes bool": freezes(lambda: torch.ones(4, 4, dtype=torch.bool), "'base' (dtype torch.bool"),
    "freezes meta": freezes(lambda: torch.empty(4, 4, device="meta"), "device meta) holds no data"),
    "freezes quint8": freezes(lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.quint8), "quantized"),
    "freezes CSR": freezes(lambda: torch.eye(4).to_sparse_csr(), "layout torch.sparse_csr"),
    "freezes mkldnn": freezes(lambda: torch.eye(4).to_mkldnn(), "layout torch._mkldnn"),
    "freezes a subclass": freezes(
        lambda: Quantised.of(torch.randn(6, 6)), "'base.codes' (dtype torch.int8", ("base.scale",)
    ),
    "freezes float8": freezes(lambda: torch.randn(4, 4).to(torch.float8_e4m3fn), rows=("base",)),
    "freezes complex": freezes(lambda: torch.randn(4, 4, dtype=torch.complex64), rows=("base",)),
    "freezes COO": freezes(lambda: torch.eye(4).to_sparse(), rows=("base",)),
    "shows a sparse batch": shows(lambda: torch.eye(4).to_sparse()),
    "shows sparse integers": shows(lambda: torch.eye(4).long().to_sparse()),
    "shows a nested batch": shows(
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    ),
    "shows a quantised batch": shows(lambda: Quantised.of(torch.ones(4, 4))),
    "shows a complex batch": shows(lambda: torch.zeros(3, 3, dtype=torch.complex64)),
    "has quantised states": Use(
        has_quantised_states, "the exp_avg 'down.weight.codes' (dtype torch.int8", watches_their_scales
    ),
    "has a module without a shape": Use(
        lambda program: program.model.add_module("lazy", nn.LazyLinear(3)), "'lazy.weight'"
    ),
    "fails to see changes": fails_in("recorder.Recorder._begin", NO_STEP),
    "fails to measure": fails_in("recorder.measure_segments", NO_STEP),
    "fails to list states": fails_in("probes.state.states_of", STATES),
    "fails to list buffers": fails_in("probes.state.Buffers.state", STATES),
    "fails to subtract": Use(
        lambda program: setattr(program, "breaks", "torch._foreach_sub"), "the last update could not be measured"
    ),
    "fails to read": fails_in("log.StepLog.read", "could not be read"),
    "fails to review": fails_in("log.StepLog.close", "could not review the last steps", loses=frozenset({4, 5})),
    "fails to look at a batch": fails_in("recorder.Recorder.inspect_batch", "a batch could not be inspected"),
    "fails in a hook": fails_in("probes.passes.stats", "the hook Activations.measure of 'down'"),
    "fails to measure outputs": fails_in("probes.outputs.Outputs.measure", "no memory left"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:(Sparse CSR|torch.quantize_per_tensor|.*lazy)")
@pytest.mark.parametrize("what", USES)
@pytest.mark.parametrize("way", WAYS)
def test_a_program_trains_as_if_nobody_watched_it_and_is_told_once(
    way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, use = [], USES[what]
    for each in ("nobody", way):
        program = Program()
        use.does(program)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor = program.run(each, monkeypatch)
        trained.append([p.detach() for p in program.model.parameters() if p.requires_grad and type(p) is nn.Parameter])
    assert all(map(torch.equal, *trained))
    assert monitor.steps == 6
    told = [str(one.message) for one in caught if "gradstat" in str(one.message)]
    about = [text for text in told if use.says in text]
    assert len(about) == bool(use.says), told
    assert not program.breaks or "Traceback (most recent call last)" in about[0]
    use.holds(program, monitor)
    monitor.remove()


def test_a_gradient_that_cannot_be_measured_leaves_the_others_watched() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    monitor = Monitor(model, on_anomaly="record")

    def step() -> list[Finding]:
        model[0].bias.grad = TwoTensor(torch.randn(8), torch.randn(8))
        return monitor.step()

    fill(model)
    with pytest.warns(UserWarning, match="the gradient '0.bias' is of .*TwoTensor, which stores its data elsewhere"):
        step()
    step()
    model[1].bias.grad[2] = math.nan
    assert [(f.rule, f.name) for f in step()] == [("nonfinite-gradient", "1.bias")]
    report = monitor.latest().report
    assert (report.names, report.missing) == (("0.weight", "1.weight", "1.bias"), ())


def test_a_learning_rate_of_numpy_or_none_at_all_is_no_error() -> None:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float32(0.5))
    monitor = Monitor(model, optimizer)
    monitor.step()
    del optimizer.param_groups[0]["lr"]
    monitor.step(np.float32(2.0))
    assert monitor.recording().scalars["lr"][0] == 0.5
    assert monitor.recording().scalars["loss"][1] == 2.0


BESIDE = {
    "recorder.Recorder.measure_state": "parameters, buffers or states could not be measured",
    "actions.Snapshots.take": "the state of a step could not be copied",
}


@pytest.mark.parametrize("what", BESIDE)
def test_an_error_beside_a_step_does_not_lose_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"gradstat.monitor.{what}", out_of_memory)
    monitor = Monitor(nn.Linear(6, 6), on_anomaly={"error": "record", "info": "rollback"})
    with pytest.warns(Warning, match=BESIDE[what]):
        _ = [monitor.step(loss) for loss in (1.0, math.nan, 1.0)]
    assert monitor.recording().steps.tolist() == [0, 1, 2]
    assert "nonfinite-loss" in {finding.rule for finding in monitor.findings}


def test_what_the_user_raises_or_asks_for_wrongly_still_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise gradstat.BackendUnavailableError("not here")

    model = nn.Linear(6, 6)
    with pytest.raises(ZeroDivisionError):
        Monitor(model, on_anomaly=lambda monitor, finding: 1 // 0).step(math.nan)
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        Monitor(model, options={"backend": "cuda"})
    fill(model)
    for target in ("gradstat.monitor.recorder.measure_segments", "gradstat.monitor.log.StepLog.take"):
        with monkeypatch.context() as patch:
            patch.setattr(target, unavailable)
            with pytest.raises(gradstat.BackendUnavailableError):
                Monitor(model).step()


@pytest.mark.parametrize("way", [*WAYS, "auto by optimizer"])
def test_a_model_with_lazy_modules_is_watched_once_it_has_shapes(way: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"on_anomaly": "record", "watch": ["parameters", "buffers"]}
    monitor, step = watched(way, model, optimizer, **options)
    assert monitor.recording().meta["parameters"] == 10
    for _ in range(3):
        step(backpropagated(optimizer, model(torch.randn(8, 3)).square().sum()))
        optimizer.step()
    recording = monitor.recording()
    assert recording.steps.tolist() == recording.tables["parameter"].steps.tolist() == [0, 1, 2]
    assert len(recording.backward_order) == 6
    assert recording.tables["parameter"].numel.sum() == recording.meta["parameters"]
    monitor.remove() if way == "Monitor" else optimizer._gradstat_auto.remove()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_parameter_that_refuses_a_hook_leaves_no_other_hook() -> None:
    class Refusing(nn.Parameter):
        def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
            raise NotImplementedError("no hooks here")

    model = nn.Linear(2, 2)
    model.bias = Refusing(torch.ones(2))
    with pytest.raises(NotImplementedError) as caught:
        Monitor(model)
    assert caught.value.__traceback__ is not None  # holds what the constructor made
    assert not model.weight._post_accumulate_grad_hooks


# What is said ------------------------------------------------------------------------------------------------


SILENCES: list[tuple[dict[str, Any], bool]] = [
    ({"action": "ignore"}, True),
    ({"action": "ignore", "category": UserWarning}, True),
    ({"action": "ignore", "message": "gradstat"}, True),
    ({"action": "ignore", "message": "something else"}, False),
    ({"action": "ignore", "category": AnomalyWarning}, False),
    ({"action": "default"}, False),
]


@pytest.mark.parametrize(("silence", "logged"), SILENCES)
def test_errors_are_logged_where_warnings_are_silenced(
    silence: dict[str, Any], logged: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(logging.getLogger("gradstat"), "propagate", False)  # pytest sets logging up; most loops do not
    monitor = Monitor(nn.Linear(6, 6))
    with warnings.catch_warnings(record=True):
        warnings.resetwarnings()
        warnings.filterwarnings(**silence)
        monitor.step(math.nan)
    assert ("the loss is NaN" in capsys.readouterr().err) == logged


def test_findings_are_logged_where_logging_is_set_up(caplog: Any) -> None:
    model = nn.Linear(6, 6)
    monitor = Monitor(model)
    caplog.set_level(logging.INFO, "gradstat")
    (model(torch.ones(6)).sum() * math.nan).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AnomalyWarning)
        monitor.step(math.nan)
        monitor.remove()
    seen = [(record.name, record.levelname, record.message.partition(", ")[2][:14]) for record in caplog.records]
    assert seen == [("gradstat", "ERROR", "nonfinite-loss"), ("gradstat", "INFO", "nonfinite-grad")]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("way", ["before backward", "after zero_grad", "auto"])
def test_no_gradient_at_all_is_one_finding_that_says_where_the_call_belongs(way: str, to_none: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kind, given = ("auto", optimizer) if way == "auto" else ("Monitor", None)
    monitor, step = watched(kind, model, given, on_anomaly={"warning": "record"})
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


class Engine(nn.Module):
    """Imitates DeepSpeed's engine without ZeRO, as far as a monitor reads it; it cannot run a step again."""

    zero_optimization_stage = 0

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.optimizer = module, torch.optim.SGD(module.parameters())

    def fp16_enabled(self) -> bool:
        return False


def test_under_an_engine_a_guard_is_refused_and_advice_is_what_can_be_done_there() -> None:
    engine = Engine(nn.Sequential(nn.Linear(6, 2)))
    with pytest.raises(NotImplementedError, match="'guard' is not supported with DeepSpeed"):
        Monitor(engine, guard=gradstat.SpikeGuard())
    monitor = Monitor(engine, on_anomaly="record", watch=["activations"])
    loss = engine.module(torch.full((4, 6), math.nan)).sum()
    loss.backward()
    found = {finding.rule: finding.advice for finding in monitor.step(loss)}
    assert not [advice for every in found.values() for advice in every if "replay" in advice]
    for name in ("nonfinite-gradient", "nonfinite-loss"):
        assert "watch={'activations': 1} names the first module whose output is not finite" in found[name]
    assert found["nonfinite-activation"][0].startswith("check this module's inputs and weights")


# Places that cannot be written to ----------------------------------------------------------------------------


@rule("late", severity="error")
def late(self: Rule, window: Any) -> list[Finding]:
    """Finds something in step 5, but has no bands, so that the step waits for the next review."""
    return [self.found(5, "loss", "there it was")] if 5 in window.steps else []


def stepped(steps: int = 7, **options: Any) -> Monitor:
    """A monitor after some steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fill(model)
    monitor = Monitor(model, **{"on_anomaly": "record", **options})
    for _ in range(steps):
        monitor.step(1.0)
    return monitor


def obstructed(folder: Path) -> None:
    """Replaces an empty folder by a file, so that nothing can be made below it."""
    folder.rmdir()
    folder.touch()


PLACES = {
    "/proc/nope/run.gradstat": "No such file",
    "": "Is a directory",
    "folder": "Is a directory",
    "file/run.gradstat": "Not a directory|File exists",
    "n" * 300: "File name too long",
    "a\0b": "null",
}


@pytest.mark.parametrize("way", WAYS)
def test_an_impossible_place_is_refused_before_anything_is_watched(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    model = nn.Linear(2, 2)
    for place, reason in PLACES.items():
        with pytest.raises(ValueError, match=rf"save_to: no file can be made at .*({reason}).*Choose a file"):
            watched(way, model, torch.optim.SGD(model.parameters()), save_to=place, watch=["outputs"])
    assert not model._forward_hooks
    assert not model.weight._post_accumulate_grad_hooks
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_a_full_disk_and_a_recording_that_cannot_be_made_cost_a_warning_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("gradstat.monitor.flight_file.try_replacing", full)
        with pytest.warns(RuntimeWarning, match=r"save_to: no file can be made at .*No space left"):
            monitor = stepped(save_to=tmp_path / "run.gradstat")
    monitor.remove()
    assert len(load(tmp_path / "run.gradstat").steps) == 7
    monitor = stepped(save_to=tmp_path / "run.gradstat")
    monkeypatch.setattr("gradstat.monitor.log.StepLog.recording", out_of_memory)
    with pytest.warns(RuntimeWarning, match=r"could not be saved: OutOfMemoryError: no memory left"):
        monitor.remove()


ENDS: list[Callable[[Any], object]] = [
    lambda handle: handle.monitor.remove(),
    lambda handle: handle.monitor.__exit__(None, None, None),
    lambda handle: handle.remove(),
    lambda handle: handle.__exit__(None, None, None),
]


@pytest.mark.parametrize("end", ENDS)
def test_a_place_that_is_gone_costs_a_warning_and_is_used_again_when_it_is_back(
    end: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written anywhere else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, path = nn.Linear(3, 2), tmp_path / "gone" / "deep" / "run.gradstat"
    handle = gradstat.auto(torch.optim.SGD(model.parameters()), model, save_to=path, on_anomaly="record")
    assert list(path.parent.iterdir()) == []  # it was tried
    obstructed(path.parent)
    with pytest.warns(RuntimeWarning, match=r"deep/run\.gradstat could not be saved: .*(Not a dir|exists)") as told:
        handle.monitor.step(math.nan)
    assert len(told) == 1
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["deep"]
    path.parent.unlink()
    end(handle)
    assert load(path).steps.tolist() == [0]
    assert load(path).meta["why"] == "the run ended"
    handle.remove()


@pytest.mark.parametrize("policy", ["raise", lambda _monitor, _finding: [][1]])
@pytest.mark.parametrize("way", WAYS)
def test_the_exception_that_ends_a_block_is_not_replaced(way: str, policy: Any, tmp_path: Path) -> None:
    model, path = nn.Linear(3, 2), tmp_path / "gone" / "run.gradstat"
    optimizer, options = torch.optim.SGD(model.parameters()), {"rules": [late()], "on_anomaly": policy, "save_to": path}
    block: Any = {"Monitor": Monitor, "auto": gradstat.auto}[way](model, optimizer, **options)
    for _ in range(6):
        getattr(block, "monitor", block).step(1.0)
    obstructed(path.parent)

    def fails() -> None:
        with block:
            _ = 1 // 0

    told = pytest.warns(AnomalyWarning, match="there it was|list index")
    with pytest.warns(RuntimeWarning, match="could not be saved"), told, pytest.raises(ZeroDivisionError):
        fails()


# The last steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_monitor_that_goes_out_of_scope_warns_of_its_last_steps_and_writes_its_file(
    in_a_cycle: bool, tmp_path: Path
) -> None:
    gc.collect()
    path, model = tmp_path / "run.gradstat", nn.Linear(3, 2)
    monitor = Monitor(model, rules=[late()], on_anomaly={"error": ("raise", "rollback")}, save_to=path)
    _ = [monitor.step(1.0) for _ in range(7)]
    if in_a_cycle:
        model.watched_by = [monitor]  # type: ignore[assignment]
    assert monitor.findings == []
    held, alive = [monitor, model], weakref.ref(model)
    del monitor, model
    with pytest.warns(AnomalyWarning, match="step 5, late: there it was"):
        (held.clear(), gc.collect())
    assert alive() is None
    recording = load(path)
    assert (len(recording.steps), recording.findings[0].step) == (7, 5)
    assert recording.meta["why"] == "nothing referred to the monitor any more"
    stepped(0, save_to=path)  # one without steps overwrites nothing
    gc.collect()
    assert len(load(path).steps) == 7


def test_steps_whose_numbers_are_still_in_transit_are_read_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers_travel(monkeypatch)
    monitor = stepped(save_to=tmp_path / "run.gradstat", options={"lag": 3})
    assert monitor.step(math.nan) == []
    del monitor
    recording = load(tmp_path / "run.gradstat")
    assert recording.steps.tolist() == list(range(8))
    assert recording.findings[0].rule == "nonfinite-loss"


def test_a_removed_monitor_ends_once_and_says_once_that_it_watches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.gradstat"
    monitor = stepped(save_to=path)
    monitor.remove()
    path.unlink()
    said = r"step\(\) of a monitor that was removed at step 7 watches nothing"
    with pytest.warns(AnomalyWarning, match=said) as told:
        assert monitor.step(1.0) == []
    assert [warning.filename for warning in told] == [__file__]
    assert monitor.check_batch(torch.ones(2)) == []
    assert monitor.steps == 7
    monitor.remove()
    del monitor
    assert not path.exists()


ENDING = """
import os, sys, threading, warnings
import torch
import gradstat

def late(self, window):
    return [self.found(5, "loss", "there it was")] if 5 in window.steps else []

def waits(self, window):
    inside.set()
    threading.Event().wait()

def watched(name, policy):
    rule = gradstat.monitor.rule(name, severity="error")(late)
    monitor = gradstat.Monitor(torch.nn.Linear(2, 2), rules=[rule()], on_anomaly=policy)
    for _ in range(7):
        monitor.step(1.0)
    return monitor

if sys.argv[1] == "default":  # the end does not wait for ever for a thread
    gradstat.monitor.endings.PATIENCE = 0.1
    inside = threading.Event()
    held = gradstat.Monitor(torch.nn.Linear(2, 2), rules=[gradstat.monitor.rule("waits")(waits)()])
    threading.Thread(target=held.step, daemon=True).start()
    inside.wait()
kept = [watched(policy, policy) for policy in ("warn", "raise", "record")]
kept.append(watched("calling", lambda monitor, finding: print("called", finding.step)))
kept.append(watched("failing", lambda monitor, finding: 1 // 0))
if sys.argv[1] == "fork":
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)  # only the child ends as programs do
elif sys.argv[1] != "default":
    warnings.simplefilter(sys.argv[1])
"""


@pytest.mark.parametrize("way", ["default", "ignore", "error", "fork"])
def test_the_errors_of_the_last_steps_are_shown_when_a_program_ends(way: str, forks: Forks) -> None:
    """If warnings are ignored, they are logged; if they are errors, all monitors end nevertheless."""
    ended = forks.run(ENDING, way, warnings="default")
    assert ended.returncode == 0
    shown = {name for name in ("warn", "raise", "record") if f"step 5, {name}: there it was" in ended.stderr}
    assert shown == (set() if way == "fork" else {"warn", "raise"}), ended.stderr
    assert way != "fork" or not ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == (way in ("default", "error"))
    assert ("another thread is inside of the monitor" in ended.stderr) == (way == "default")
    assert ended.stdout == ("" if way == "fork" else "called 5\n")


# Threads -----------------------------------------------------------------------------------------------------


def within_time(work: Callable[[], Any]) -> Any:
    """The result of ``work``, run in a thread of its own; fails if it does not end."""
    with ThreadPool(1) as pool:
        return pool.apply_async(work).get(SECONDS)


def test_a_lock_keeps_the_steps_of_several_threads_apart(tmp_path: Path) -> None:
    threads, steps = 4, 60
    seen: list[int] = []
    policy = {"error": lambda m, finding: seen.append(finding.step), "warning": "record"}
    monitor = stepped(0, on_anomaly=policy, watch={"parameters": 3}, options={"review_every": 5})
    begin = threading.Barrier(threads)

    def work(number: int) -> None:
        begin.wait(SECONDS)
        for step in range(steps):
            monitor.check_batch(torch.full((2, 3), float(number)))
            monitor.step(math.nan if number == 0 and step == 30 else float(number))
            if step % 20 == number:
                monitor.save(tmp_path / f"{number}.gradstat")
                monitor.state_dict()
                monitor.diagnose()

    with ThreadPool(threads) as pool:
        pool.map_async(work, range(threads), chunksize=1).get(SECONDS)
    recording = load(monitor.save(tmp_path / "run.gradstat"))
    assert recording.steps.tolist() == list(range(threads * steps))
    losses = recording.scalars["loss"].tolist()
    assert [losses.count(float(number)) for number in range(threads)] == [steps - 1, steps, steps, steps]
    errors = [finding.step for finding in monitor.findings if finding.severity == "error"]
    assert seen == errors == [losses.index(next(loss for loss in losses if math.isnan(loss)))]
    measured = set(recording.tables["parameter"].steps.tolist())  # also after an error
    assert measured - {*seen} == {*range(0, threads * steps, 3)} - {*seen}


@pytest.mark.filterwarnings("ignore::gradstat.monitor.AnomalyWarning")
@pytest.mark.parametrize("way", ["policy", "replay", "replay on request"])
def test_what_a_monitor_calls_may_use_it_in_any_thread(way: str) -> None:
    """It runs outside of the lock: a policy, and hooks in a replay, which on a GPU run in threads of the device."""
    model = nn.Linear(3, 2)
    seen: list[Any] = []

    def uses(*_: object) -> None:
        if len(seen) < 2:
            seen.append(
                within_time(lambda: (monitor.step(1.0), monitor.check_batch(torch.ones(1)), monitor.diagnose()))
            )

    def step() -> None:
        (model(torch.ones(2, 3)) * math.inf).sum().backward()

    policy = {"policy": uses, "replay": "replay", "replay on request": "record"}[way]
    monitor = Monitor(model, on_anomaly=policy, replay=step)
    if way != "policy":
        model.weight.register_post_accumulate_grad_hook(uses)
    fill(model, math.nan)
    within_time(lambda: (monitor.step(), "request" in way and monitor.replay()))
    assert seen
    assert (monitor.culprit is None) == (way == "policy")
    assert monitor.recording().steps.tolist() == ([0] if way != "policy" else list(range(monitor.steps)))
