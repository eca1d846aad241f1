"""Life with a program: changes to modules, parameters and gradients between steps, and unusual places of calls."""

import copy
import gc
import io
import math
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from helpers.devices import parameter_with
from helpers.training import fill
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrize import is_parametrized, register_parametrization, remove_parametrizations

import gradstat
from gradstat.monitor import AnomalyWarning


def test_a_module_with_its_own_parameter_list_is_asked_each_time() -> None:
    class Trainable(nn.Sequential):
        def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
            return ((n, p) for n, p in super().named_parameters(*arguments, **named) if p.requires_grad)

    model = Trainable(nn.Linear(2, 2), nn.Linear(2, 2))
    fill(model)
    model[0].requires_grad_(False)
    assert gradstat.check(model).names == ("1.weight", "1.bias")
    model[0].requires_grad_(True)
    assert gradstat.check(model).names == ("0.weight", "0.bias", "1.weight", "1.bias")


ENTRIES: dict[str, Callable[[Tensor], object]] = {
    "check": lambda t: gradstat.check([("w", parameter_with(t))]),
    "check_tensors": lambda t: gradstat.check_tensors({"w": t}),
    "stats": lambda t: gradstat.stats([t]),
    "clip_grad_norm_": lambda t: gradstat.clip_grad_norm_([parameter_with(t)], 1.0),
    "clip_grad_norm_ that raises": lambda t: gradstat.clip_grad_norm_([parameter_with(t)], 1, error_if_nonfinite=True),
    "clip_grads_with_norm_": lambda t: gradstat.clip_grads_with_norm_([parameter_with(t)], 1.0, 5.0),
    "get_total_norm": lambda t: gradstat.get_total_norm([t]),
    "guarded_step": lambda t: gradstat.guarded_step(torch.optim.SGD([parameter_with(t)], lr=0.1), max_norm=1.0),
}


def freed(t: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(t)
    parameter.grad = torch.ones(t.shape, dtype=t.dtype)
    return parameter


BELOW: dict[str, Callable[[Tensor], object]] = {
    "stats by the reference": lambda t: gradstat.stats([t], backend="reference"),
    "check_async": lambda t: gradstat.check_async([parameter_with(t)]),
    "AGC": lambda t: gradstat.AGC().clip_([parameter_with(t)]),
    "AdaGC": lambda t: gradstat.AdaGC().clip_([parameter_with(t)]),
    "ZClip": lambda t: gradstat.ZClip().clip_([parameter_with(t)]),
    "a fused step": lambda t: gradstat.guarded_step(torch.optim.Adam([parameter_with(t)], fused=True), max_norm=1.0),
    "a parameter": lambda t: gradstat.AGC().clip_([freed(t)]),
    "the operator": lambda t: torch.ops.gradstat.stats([torch.ones(1), t]),
    "the operator that scales": lambda t: torch.ops.gradstat.scale_([t], torch.ones((), dtype=torch.float64)),
}


@pytest.mark.parametrize("entry", [*ENTRIES, *BELOW])
@pytest.mark.parametrize("left", [0, 24])
def test_storage_that_was_freed_or_shrunk_is_refused(entry: str, left: int) -> None:
    gradstat.stats([torch.ones(1)])  # loads the operators
    wide = {"dtype": torch.float64}
    # Views at any offset, one so far inside that its address looks like one of memory; not dense; complex.
    wholes = [torch.ones(size, **kind) for size, kind in ((8, {}), (24, wide), (1 << 18, {}), (1 << 22, {}))]
    parts = [whole[-8:] for whole in wholes]
    parts += [torch.ones(16)[1::2], torch.ones(8, dtype=torch.complex64), torch.ones(2, 3, 4, 5, 6, 7).transpose(0, 5)]
    message = "(has no storage.*resized to 0|storage, which was shrunk to 24).*p.grad = None"
    for part in parts:
        part.untyped_storage().resize_(left)
        refused = r"tensor [01] (has no memory|is not dense)" if "operator" in entry else message
        with pytest.raises((ValueError, RuntimeError), match=refused):
            {**ENTRIES, **BELOW}[entry](part)


@pytest.mark.filterwarnings("ignore:.*data pointer of FakeTensor")
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "clip_grads_with_norm_"])
def test_inside_of_fake_mode_nothing_is_measured(entry: str) -> None:
    real = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(3)
        for tensor in (fake, real):
            with pytest.raises(RuntimeError, match="hold no data inside FakeTensorMode"):
                ENTRIES[entry](tensor)
    with pytest.raises(ValueError, match="is a FakeTensor, which holds no data"):
        ENTRIES[entry](fake)
    assert gradstat.check_tensors([real])[0].sum == 3.0


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "grad": lambda f: torch.func.grad(f)(torch.ones(3)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)),
    "vmap": lambda f: torch.vmap(f)(torch.ones(2, 3)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f))(torch.ones(2, 3)),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(3)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # as torch's jvp does
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_a_transform_works_on_is_refused_with_the_remedy(transform: str) -> None:
    calls, left_behind = 0, []

    def inside(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        left_behind.append(x)
        with pytest.raises((RuntimeError, ValueError), match=r"torch\.(func transform|vmap).*what .* returns"):
            gradstat.check_tensors({"x": x})
        return (x * x).sum()

    TRANSFORMS[transform](inside)
    assert calls == 1
    if transform == "grad":  # its tensors are not wrapped outside
        assert gradstat.check_tensors(left_behind)[0].sum == 3.0


def test_a_default_device_of_the_program_is_not_where_numbers_go() -> None:
    # "meta" stands for a GPU: tensors made there by mistake have no data, and cannot be pinned.
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True), torch.optim.RMSprop(model.parameters())]
    monitor = gradstat.Monitor(model, optimizers[0])
    scaler = gradstat.amp.GradScaler("cpu")
    micro_batches = gradstat.MicroBatches(model)
    clips = [gradstat.AutoClip(), gradstat.ZClip(), gradstat.AdaGC(), gradstat.AGC()]

    def backward() -> list[nn.Parameter]:
        fill(model)
        return list(model.parameters())

    with torch.device("meta"):
        for backend in ("native", "reference"):
            backward()
            assert gradstat.check(model, backend=backend).total_norm == pytest.approx(math.sqrt(8))
            assert gradstat.clip_grad_norm_(backward(), 1.0, backend=backend).item() == pytest.approx(math.sqrt(8))
        gradstat.clip_grads_with_norm_(backward(), 1.0, 4.0)
        assert gradstat.check(model)["bias"].max == pytest.approx(0.25)
        assert gradstat.clip_grad_norm_([], 1.0).item() == 0.0
        assert gradstat.get_total_norm([]).item() == 0.0
        assert gradstat.stats([]).device.type == "cpu"
        for clip in clips:
            for _ in range(3):
                assert clip.clip_(backward()).item() == pytest.approx(math.sqrt(8))
            clip.summary()
        for optimizer in optimizers:
            backward()
            assert gradstat.guarded_step(optimizer, max_norm=1.0).report.result().ok
        monitor.step(1.0)
        for _ in range(2):
            micro_batches.check()
        assert micro_batches.result().final.ok
        scaler.scale(torch.ones((), device="cpu"))
        backward()
        scaler.step(optimizers[1])
        scaler.update()
        assert monitor.flush() == []


MONITORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "activations": {"watch": {"activations": 1, "outputs": 1}},
    "replay": {"replay": True},
    "skip": {"on_anomaly": "skip"},
    "rollback": {"on_anomaly": "rollback"},
}


def hooks_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return modules + parameters + steps


def net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: gradstat.Monitor, steps: int = 1) -> None:
    for _ in range(steps):
        loss = model(torch.randn(4, 3)).sum()
        loss.backward()
        monitor.step(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", MONITORS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_deleted_monitor_leaves_no_hook(kind: str, steps: int) -> None:
    model, optimizer = net()
    for detached in (True, False):
        monitor = gradstat.Monitor(model, optimizer, **MONITORS[kind])
        assert hooks_on(model, optimizer)
        train(model, optimizer, monitor, steps)
        if detached:
            monitor.remove()
            assert hooks_on(model, optimizer) == 0
            with pytest.warns(AnomalyWarning, match="was removed"):
                assert (monitor.step(), monitor.steps) == ([], steps)
        alive = weakref.ref(monitor)
        del monitor
        assert alive() is None  # at once, without a reference cycle that needs the garbage collector
        assert hooks_on(model, optimizer) == 0
    model(torch.randn(4, 3))


def test_a_monitor_deleted_before_the_step_removes_its_verdict() -> None:
    model, optimizer = net()
    monitor = gradstat.Monitor(model, optimizer, on_anomaly={"error": ("skip", "record")})
    model(torch.full((4, 3), math.nan)).sum().backward()
    monitor.step()
    del monitor
    optimizer.step()
    assert not all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", MONITORS)
def test_copies_of_a_watched_model_are_not_watched(kind: str) -> None:
    model, optimizer = net()
    monitor = gradstat.Monitor(model, optimizer, **MONITORS[kind])
    train(model, optimizer, monitor, 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    gc.freeze()  # collections skip existing objects
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        objects = len(gc.get_objects())
        for _ in range(20):
            other(torch.randn(4, 3)).sum().backward()
        gc.collect()
        assert len(gc.get_objects()) - objects < 20  # a watched copy would keep objects of each forward pass
        own = gradstat.Monitor(other, torch.optim.SGD(other.parameters(), lr=0.1), **MONITORS[kind])
        other(torch.randn(4, 3))
        own.step(1.0)
    gc.unfreeze()
    train(model, optimizer, monitor, 2)
    assert monitor.steps == 4
    assert monitor.recording().tables["gradient"].steps.tolist() == [0, 1, 2, 3]


def test_a_monitor_says_why_it_cannot_be_copied() -> None:
    model, optimizer = net()
    monitor = gradstat.Monitor(model, optimizer)
    train(model, optimizer, monitor)
    copies: list[Callable[[object], object]] = [copy.copy, copy.deepcopy, pickle.dumps]
    for copied in copies:
        with pytest.raises(TypeError, match=r"has hooks on its model.*monitor\.state_dict\(\)"):
            copied(monitor)
    model.monitor = monitor  # type: ignore[assignment]
    with pytest.raises(TypeError, match="nor a module that has it"):
        copy.deepcopy(model)
    del model.monitor
    other = copy.deepcopy(model)
    again = gradstat.Monitor(other)
    again.load_state_dict(copy.deepcopy(monitor.state_dict()))
    assert again.steps == 1


def test_other_parameters_of_the_same_names_are_noticed_by_the_monitor_wherever_they_lie() -> None:
    model, optimizer = net()
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    train(model, optimizer, monitor)
    for _ in range(20):  # a new parameter often gets the address of the last one
        del model[2]
        model.append(nn.Linear(4, 2))
        model(torch.randn(4, 3)).sum().backward()
        monitor.step()
        assert monitor.latest().report.total_norm == gradstat.check(model).total_norm
    # In the first step it is not known yet what other optimizers have.
    assert ("optimizer-coverage", 0, "2.weight") in {(f.rule, f.step, f.name) for f in monitor.findings}


@pytest.mark.parametrize("way", ["model", "optimizer", "parameters", "pairs", "one", "step"])
def test_a_report_keeps_nothing_of_the_model(way: str) -> None:
    ways: dict[str, Callable[[nn.Sequential, torch.optim.Optimizer], gradstat.Report]] = {
        "model": lambda m, _: gradstat.check(m),
        "optimizer": lambda _, o: gradstat.check(o),
        "parameters": lambda m, _: gradstat.check(m.parameters()),
        "pairs": lambda m, _: gradstat.check(m.named_parameters()),
        "one": lambda m, _: gradstat.check(m[0].weight),
        "step": lambda m, o: gradstat.guarded_step(o, model=m).report.result(),
    }
    model, optimizer = net()
    model(torch.randn(4, 3)).sum().backward()
    report = ways[way](model, optimizer)
    count = len(report)
    gone = [weakref.ref(kept) for kept in (model, optimizer, model[0], model[0].weight, model[0].weight.grad)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 5
    assert len(report.names) == count
    assert report.names[0] in str(report)


def some_linear(model: nn.Module, rng: random.Random) -> nn.Linear:
    """A linear layer that is not parametrized."""
    found = [module for module in model.modules() if type(module) is nn.Linear]
    if not found:
        found = [nn.Linear(3, 3)]
        model.layers.append(found[0])  # type: ignore[operator, union-attr]
    return rng.choice(found)


def parametrized(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_parametrized(module)]


def twice(gradient: Tensor) -> Tensor:
    return gradient * 2


def each(model: nn.Module, change: Callable[[nn.Parameter], object]) -> None:
    for parameter in model.parameters():
        change(parameter)


def in_one_bucket(model: nn.Module, _: random.Random) -> None:
    for dtype in {p.dtype for p in model.parameters()}:
        parameters = [p for p in model.parameters() if p.dtype is dtype]
        bucket = torch.randn(sum(p.numel() for p in parameters)).to(dtype)
        for parameter, part in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)


def assigned(model: nn.Module, _: random.Random) -> None:
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


CHANGES_BETWEEN_STEPS: dict[str, Callable[[nn.Module, random.Random], object]] = {
    "frozen": lambda m, r: some_linear(m, r).requires_grad_(False),
    "thawed": lambda m, r: m.requires_grad_(True),
    "cast": lambda m, r: some_linear(m, r).to(r.choice([torch.float64, torch.bfloat16, torch.float32])),
    "moved": lambda m, r: m.to("cpu", non_blocking=True),
    "replaced": lambda m, r: setattr(some_linear(m, r), "weight", nn.Parameter(torch.randn(3, 3))),
    "data swapped": lambda m, r: setattr(some_linear(m, r).weight, "data", torch.randn(3, 3)),
    "removed": lambda m, r: some_linear(m, r).register_parameter("bias", None),
    "added": lambda m, r: some_linear(m, r).register_parameter("bias", nn.Parameter(torch.randn(3))),
    "an odd one added": lambda m, r: setattr(m, f"extra{r.randrange(3)}", nn.Parameter(torch.randn(2, 1, 2))),
    "an odd one removed": lambda m, r: m._parameters.pop(f"extra{r.randrange(3)}", None),
    "an odd one renamed": lambda m, r: m._parameters.update({"extra3": m._parameters.pop("extra0", None)}),
    "order changed": lambda m, r: m._parameters.update({"extra1": m._parameters.pop("extra1", None)}),
    "tied": lambda m, r: setattr(some_linear(m, r), "weight", some_linear(m, r).weight),
    "tied biases": lambda m, r: setattr(some_linear(m, r), "bias", some_linear(m, r).bias),
    "layer replaced behind torch's back": lambda m, r: m.layers._modules.update({"0": nn.Linear(3, 3, bias=False)}),
    "layer added": lambda m, r: m.layers.append(nn.Linear(3, 3)),
    "layer removed": lambda m, r: m.layers.__delitem__(-1) if len(m.layers) > 2 else None,
    "layers swapped": lambda m, r: m.layers.insert(0, m.layers.pop(-1)),
    "set to none": lambda m, r: m.zero_grad(set_to_none=True),
    "set to zero": lambda m, r: m.zero_grad(set_to_none=False),
    "gradient taken": lambda m, r: setattr(some_linear(m, r).weight, "grad", None),
    "gradient of other layout": lambda m, r: each(
        m, lambda p: setattr(p, "grad", torch.randn(p.shape[::-1]).to(p.dtype).permute(*range(p.dim())[::-1]))
    ),
    "expanded gradient": lambda m, r: each(m, lambda p: setattr(p, "grad", p.new_ones(()).expand(p.shape))),
    "one bucket": in_one_bucket,
    "copied": lambda m, r: copy.deepcopy(m),
    "pickled": lambda m, r: None if parametrized(m) else pickle.loads(pickle.dumps(m)),
    "assigned": assigned,
    "dictionaries replaced": lambda m, r: setattr(m.layers[0], "_parameters", dict(m.layers[0]._parameters)),
    "hooked": lambda m, r: [p.register_hook(twice) for p in m.parameters() if p.requires_grad],
    "parametrized": lambda m, r: register_parametrization(some_linear(m, r), "weight", nn.Tanh()),
    "no more parametrized": lambda m, r: [remove_parametrizations(x, "weight") for x in parametrized(m)],
    "garbage collected": lambda m, r: gc.collect(),
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            bias = None if layer.bias is None else layer.bias.float()
            x = nn.functional.linear(x, layer.weight.float(), bias)
            x = x + sum(p.sum().to(x.dtype) for p in self._parameters.values() if p is not None)
        return x


def hold_against_torch(model: nn.Module, report: gradstat.Report) -> None:
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert report.names == tuple(expected)
    assert report.missing == tuple(n for n, p in model.named_parameters() if p.grad is None and p.requires_grad)
    for name, gradient in expected.items():
        wide = gradient.detach().double()
        stats = report[name]
        assert (stats.shape, stats.dtype, stats.numel) == (gradient.shape, gradient.dtype, gradient.numel())
        finite = wide[wide.isfinite()]
        assert stats.nan_count == wide.isnan().sum()
        assert stats.inf_count == wide.isinf().sum()
        assert stats.finite_norm == pytest.approx(finite.norm().item(), rel=1e-6, abs=1e-12)
        assert not finite.numel() or (stats.min, stats.max) == (finite.min(), finite.max())


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("seed", range(2))
def test_a_program_that_changes_everything_between_steps_gets_right_answers(seed: int) -> None:
    rng, model = random.Random(seed), cast(nn.Module, Layers())
    names = sorted(CHANGES_BETWEEN_STEPS)
    for step in range(120):
        model(torch.randn(2, 3)).sum().backward()
        if step % 7 == 0:
            spoilt = some_linear(model, rng).weight
            spoilt.grad = torch.full_like(spoilt, math.nan)
        for name in rng.choices(names, k=rng.randrange(3)):
            other = CHANGES_BETWEEN_STEPS[name](model, rng)
            if isinstance(other, Layers) and other is not model:
                model = other
        if not any(p.requires_grad for p in model.parameters()):
            model.requires_grad_(True)
        hold_against_torch(model, gradstat.check(model))
        for parameter in model.parameters():
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        total = gradstat.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(total) and total > 1.0:
            assert gradstat.check(model).total_norm == pytest.approx(1.0, rel=2e-2)  # bfloat16 rounds
        if rng.random() < 0.5 or not torch.isfinite(total):
            model.zero_grad(set_to_none=rng.random() < 0.5)
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
                parameter.grad = None  # torch refuses to accumulate into it


def test_a_hook_that_raises_leaves_nothing_behind() -> None:
    model, optimizer = net()
    monitor = gradstat.Monitor(model, optimizer, watch={"activations": 1}, replay=True)
    train(model, optimizer, monitor, 2)
    fail = Mock(side_effect=KeyError("on purpose"))
    for register in (model[0].weight.register_hook, model[2].register_forward_hook, model[0].register_forward_pre_hook):
        handle = register(fail)
        with pytest.raises(KeyError, match="on purpose"):
            model(torch.randn(4, 3)).sum().backward()
        handle.remove()
        optimizer.zero_grad()
        train(model, optimizer, monitor, 1)
        hold_against_torch(model, gradstat.check(model))
    assert monitor.recording().tables["gradient"].steps.tolist() == [0, 1, 2, 3, 4]
    assert not monitor.findings


# Several threads, and several streams, at once ---------------------------------------------------------------


SECONDS = 120


def together(works: list[Callable[[], None]]) -> None:
    """Runs each function in a thread, all started at the same time; fails if one fails or does not end."""
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        begin.wait(SECONDS)
        work()

    with ThreadPool(len(works)) as pool:
        pool.map_async(run, works, chunksize=1).get(SECONDS)


def train_alone(number: int, width: int, device: str) -> None:
    """Trains a model in a thread of its own, with known numbers, using all kinds of calls."""
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1)).to(device)
    value, count = float(number), sum(parameter.numel() for parameter in model.parameters())
    norm = value * count**0.5
    monitor = gradstat.Monitor(model, on_anomaly="record")
    for step in range(30):
        if step % 10 == 9:
            model[0] = nn.Linear(width, width).to(device)  # the others must not notice
        fill(model, value)
        report = gradstat.check(model)
        pending = gradstat.check_async(model)
        monitor.step(1.0)
        assert report.total_norm == pytest.approx(norm, rel=1e-6)
        assert [(stats.min, stats.max) for stats in report] == [(value, value)] * 4
        assert gradstat.clip_grad_norm_(model.parameters(), norm / 2).item() == pytest.approx(norm, rel=1e-5)
        assert gradstat.check(model).total_norm == pytest.approx(norm / 2, rel=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        assert gradstat.guarded_step(optimizer, max_norm=1.0).total_norm.item() == pytest.approx(norm / 2, rel=1e-4)
        assert pending.result().total_norm == report.total_norm
    monitor.remove()
    assert monitor.recording().scalars["norm"].tolist() == pytest.approx([norm] * 30, rel=1e-6)


def test_threads_train_models_of_their_own(device: str) -> None:
    """From small models to those whose kernels use several threads; on a GPU, on streams of their own."""

    def work(number: int, width: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            train_alone(number, width, device)

    together([partial(work, number, width) for number, width in enumerate((4, 4, 30, 600), 1)])


def test_threads_ask_about_one_model_while_it_changes() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    stop = threading.Event()

    fill(model, 3.0)

    def change() -> None:
        try:
            for _ in range(200):
                model[3].register_parameter("extra", parameter_with(torch.full((5,), 3.0)))
                del model[3].extra
        finally:
            stop.set()

    def ask() -> None:
        while not stop.is_set():
            try:
                report = gradstat.check(model)
            except RuntimeError as error:  # as torch itself raises if a module changes while it is traversed
                if "changed" not in str(error):
                    raise
                continue
            assert len(report) in (16, 17)
            assert {stats.max for stats in report} == {3.0}

    together([change, ask, ask, ask])
    assert len(gradstat.check(model)) == 16
