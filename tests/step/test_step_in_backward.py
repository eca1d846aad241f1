"""step_in_backward: equal to clipping and stepping after backward, with one gradient in memory at a time; misuse."""

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import layouts
from helpers.layouts import batch, make_layout
from helpers.ranks import Ranks, collectives_of, on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import gradstat
from gradstat.bench.memory import peak_bytes

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.01}),
    "AdamW not fused": (AdamW, {"lr": 0.01, "fused": False}),
    "Adam foreach": (Adam, {"lr": 0.01, "foreach": True}),
    "Adam": (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampened": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
}
CLIPS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "each norm": lambda: 0.3,
    "AGC": gradstat.AGC,
    "AdaGC": partial(gradstat.AdaGC, warmup=0),
    "last norm": partial(gradstat.LastNormClip, 0.5),
}


class Net(nn.Module):
    """A model with a weight that is used twice, one that is frozen and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.idle, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.c(self.b(self.b(self.a(inputs).tanh()).tanh())) * self.frozen  # type: ignore[no-any-return]


def net(device: str = "cpu") -> Net:
    torch.manual_seed(1)
    return Net().to(device)


def backward(model: nn.Module, seed: int, bad: str | None = None) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).device)
    hook = (
        model.get_parameter(bad).register_hook(lambda g: g.index_fill(0, torch.tensor([1]), torch.nan)) if bad else None
    )
    model(inputs).square().sum().backward()
    if hook is not None:
        hook.remove()


def clip_after(parameters: list[nn.Parameter], clip: Any, before: float | None) -> None:
    if isinstance(clip, float):
        for parameter in parameters:
            clip_grad_norm_([parameter], clip)
    elif isinstance(clip, gradstat.LastNormClip):
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= 1.0 if before is None else min(1.0, 0.5 / (before + 1e-6))
    elif clip is not None:
        clip.clip_(parameters)


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.usefixtures("_poisoned")  # a refused first step leaves no garbage in a momentum
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip_by", CLIPS)
def test_it_is_the_same_clip_and_step_as_after_backward(kind: str, clip_by: str, device: str) -> None:
    (optimizer_class, options), clip, twins = OPTIMIZERS[kind], CLIPS[clip_by](), CLIPS[clip_by]()
    model, twin = net(device), net(device)
    handle = gradstat.step_in_backward(optimizer_class, model, clip, **options)
    plain = optimizer_class(twin.parameters(), **options)
    before = None
    for step in range(6):
        bad = {0: "c.weight", 3: "a.bias"}.get(step)
        backward(model, step, bad)
        assert all(parameter.grad is None for parameter in model.parameters())
        backward(twin, step, bad)
        report = gradstat.check(twin)
        clip_after([parameter for parameter in twin.parameters() if parameter.grad is not None], twins, before)
        before = before if bad else report.total_norm
        for name, parameter in twin.named_parameters():
            parameter.grad = None if name == bad else parameter.grad
        plain.step()
        plain.zero_grad()
        found = handle.report.result()
        assert [stats.name for stats in found.nonfinite] == ([bad] if bad else [])
        assert_same(dict(model.named_parameters()), dict(twin.named_parameters()))
        # Exactly: the same parameters give the same bits.
        assert found.names == report.names and found.missing == report.missing == ("idle",)  # noqa: PT018
        if clip is None and not bad:
            np.testing.assert_array_equal(found.to_numpy(), report.to_numpy())
            assert float(handle.total_norm) == pytest.approx(report.total_norm, rel=1e-14)
        twin.load_state_dict(model.state_dict())
    assert gradstat.step_counters(handle.optimizer).read(wait=True) == gradstat.StepCounts(6, 2, 0)
    for position, state in plain.state_dict()["state"].items():
        assert_same(handle.state_dict()["state"][position], state)
    if isinstance(clip, gradstat.AGC):
        assert_same(clip.state_dict()["tensors"], twins.state_dict()["tensors"])
    elif isinstance(clip, gradstat.AdaGC):  # it has a mean for parameters without gradients, too
        means = clip.state_dict()["tensors"]["means"]
        assert_same(means[means.isfinite()], twins.state_dict()["tensors"]["means"])


@pytest.mark.parametrize("optimizer_class", [SGD, partial])
def test_one_gradient_exists_at_a_time(optimizer_class: Any) -> None:
    """The largest of eight is 1 MiB. `partial` means stepping after backward, which the measurement has to detect."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1 << 18 - i % 2)) for i in range(8)])
    if optimizer_class is SGD:
        gradstat.step_in_backward(SGD, model, 1.0, lr=0.1)
    losses: list[Tensor] = []

    def forward() -> None:
        model.zero_grad()
        losses[:] = [torch.stack([(parameter * torch.tensor(2.0)).sum() for parameter in model]).sum()]

    forward()
    losses.pop().backward()
    peak = peak_bytes(lambda: losses.pop().backward(), torch.device("cpu"), forward)
    assert peak <= 1.1 * (1 << 20) if optimizer_class is SGD else peak > 5 << 20


def test_states_go_to_and_from_an_ordinary_optimizer_and_removing_ends_it() -> None:
    model, twin = net(), net()
    clip = gradstat.AdaGC(warmup=0)
    handle = gradstat.step_in_backward(AdamW, model, clip, lr=0.01)
    plain = AdamW(twin.parameters(), lr=0.01, fused=True)
    backward(model, 0)
    assert handle.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    twin.load_state_dict(model.state_dict())
    plain.load_state_dict(handle.state_dict())
    # torch's distributed checkpoints create missing state by a step with gradients of zeros.
    into = gradstat.step_in_backward(AdamW, third := net(), lr=0.01)
    saved = get_optimizer_state_dict(model, handle.optimizer)
    loosely = StateDictOptions(strict=False)  # one parameter has no gradient
    set_optimizer_state_dict(third, into.optimizer, copy.deepcopy(saved), options=loosely)
    assert_same(into.state_dict()["state"], handle.state_dict()["state"])
    handle.load_state_dict(copy.deepcopy(plain.state_dict()))  # replaces the param groups
    restored = gradstat.AdaGC(warmup=0)
    restored.load_state_dict(clip.state_dict())
    again = gradstat.step_in_backward(AdamW, twin, restored, lr=0.01)
    again.load_state_dict(plain.state_dict())
    for step in (1, 2):
        backward(model, step)
        backward(twin, step)
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()), rtol=0, atol=0)
    assert_same(clip.state_dict()["tensors"], restored.state_dict()["tensors"])
    handle.remove()
    before = copy.deepcopy(model.state_dict())
    backward(model, 3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    handle.optimizer.step()
    assert not torch.equal(before["a.weight"], model.a.weight)


def test_a_monitor_sees_every_step_and_names_the_parameter() -> None:
    model, twin = net(), net()
    groups = [{"params": [(n, p) for n, p in model.named_parameters() if (p.dim() > 1) is d]} for d in (True, False)]
    handle = gradstat.step_in_backward(SGD, groups, lr=0.0)  # in another order than the module's
    handle.optimizer.param_groups[0]["lr"] = 1e-3
    monitors = [
        gradstat.Monitor(m, o, on_anomaly="record", watch={"updates": 1, "parameters": 1})
        for m, o in ((model, handle.optimizer), (twin, None))
    ]
    for step in range(4):
        bad = "b.weight" if step == 2 else None
        for m, monitor in zip((model, twin), monitors, strict=True):
            m.load_state_dict(twin.state_dict())
            backward(m, step, bad)
            monitor.step(float(step))
            m.zero_grad()
        assert handle.report.result()["a.bias"].l2_norm > 0
        ours, theirs = (monitor.latest() for monitor in monitors)
        assert ours is not None and theirs is not None  # noqa: PT018
        assert ours.report.to_dict() == theirs.report.to_dict()
        assert ours.report.missing == theirs.report.missing
    assert any("b.weight" in finding.text and finding.step == 2 for finding in monitors[0].findings)
    assert monitors[0].nonfinite_steps == 1
    for arguments in ({"on_anomaly": "skip"}, {"replay": True}, {"guard": gradstat.SpikeGuard()}):
        with pytest.raises(ValueError, match="the optimizer steps during backward"):
            gradstat.Monitor(model, handle.optimizer, **arguments)


def test_a_model_keeps_its_handle_and_both_go_when_it_goes() -> None:
    model = net()
    made = [weakref.ref(gradstat.step_in_backward(AdamW, model, lr=0.1)), *map(weakref.ref, model.parameters())]
    gc.collect()
    before = copy.deepcopy(model)
    backward(model, 0)
    assert not torch.equal(before.a.weight, model.a.weight)
    with pytest.raises(RuntimeError, match=r"'idle' is already stepped in backward.*call remove\(\)"):
        gradstat.step_in_backward(AdamW, model, lr=0.1)
    for twin in (before, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # these are not stepped in backward
        backward(twin, 1)
        assert twin.a.weight.grad is not None
        twin.zero_grad()
        gradstat.step_in_backward(SGD, twin, lr=0.1)
    model.zero_grad()
    assert made[0]() is not None
    del model
    gc.collect()
    assert [reference() for reference in made] == [None] * len(made)


def test_an_exception_in_backward_leaves_groups_whole_and_the_next_pass_is_right() -> None:
    model = net()
    handle = gradstat.step_in_backward(SGD, model, lr=0.1)
    with pytest.raises(RuntimeError, match="no backward pass of this model has finished"):
        _ = handle.report
    fail = Mock(side_effect=ZeroDivisionError)
    in_step = model.a.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        backward(model, 0)
    in_step.remove()
    groups = handle.optimizer.param_groups
    own, handle._step = handle._step, fail
    with pytest.raises(ZeroDivisionError):
        backward(model, 0)
    assert handle.optimizer.param_groups is groups
    assert len(groups[0]["params"]) == len(list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"'c\.bias' has a gradient that was not stepped"):
        handle.optimizer.step()
    handle._step = own
    model.zero_grad()
    model.frozen.requires_grad_(True)  # trained from now on
    backward(model, 1)
    assert set(handle.report.result().names) == {n for n, _ in model.named_parameters()} - {"idle"}
    assert model.frozen.grad is None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(handle.optimizer, 0.5)
    backward(model, 2)
    handle.optimizer.step()  # as in a loop that still calls it
    scheduler.step()  # torch would warn if no optimizer had stepped before its scheduler
    assert handle.optimizer.param_groups[0]["lr"] == 0.05


class CountsGroups(SGD):
    """Counts steps in its param groups, as some optimizers outside of torch do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


def with_gradient() -> Net:
    model = net()
    backward(model, 0)
    return model


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((SGD(net().parameters()), net()), TypeError, "expected a class such as"),
        ((torch.optim.LBFGS, net()), ValueError, "LBFGS evaluates the loss several times"),
        ((SGD, net(), gradstat.ZClip()), ValueError, r"norm of all gradients.*LastNormClip\(ZClip"),
        ((SGD, net(), gradstat.AdaGC()), ValueError, "warmup=100 .*make it with warmup=0"),
        ((SGD, net(), "norm"), TypeError, "clip: expected a number, gradstat.AGC"),
        ((SGD, 3), TypeError, "expected a torch.nn.Module"),
        ((SGD, with_gradient()), RuntimeError, "'a.weight' already has a gradient"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_hooked(arguments: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        gradstat.step_in_backward(*arguments)


def test_what_goes_wrong_in_backward_says_so_by_name() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    gradstat.step_in_backward(SGD, embedding, lr=0.1)
    with pytest.raises(RuntimeError, match=r"'weight' is sparse.*fused=False"):
        embedding(torch.tensor([1])).sum().backward()
    model = net()
    handle = gradstat.step_in_backward(AdamW, model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    with pytest.raises(RuntimeError, match="does not unscale"):
        scaler.step(handle.optimizer)
    handle.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match="has 8 parameters and had 7"):
        backward(model, 0)
    model = net()
    gradstat.step_in_backward(SGD, model)
    inputs = torch.ones(1, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        checkpoint(model, inputs, use_reentrant=True).sum().backward()
    gradstat.step_in_backward(CountsGroups, model := net())
    with pytest.raises(RuntimeError, match=r"changed 'k' of its group in the step of 'c\.bias' alone"):
        backward(model, 0)


# On ranks -----------------------------------------------------------------------------------------------------


def spoil_the_last(parameter: Tensor) -> None:
    """A hook that sets the last element of the gradient to NaN, on the ranks that have it."""
    gradient: Any = parameter.grad
    mesh = gradient.device_mesh
    places = zip(mesh.get_coordinate(), mesh.shape, gradient.placements, strict=True)
    if all(at == size - 1 or placement.is_replicate() for at, size, placement in places):
        gradient._local_tensor.view(-1)[-1] = math.nan


def steps_as_in_one_process(layout: str, kind: str, clip_by: str) -> None:
    """Compares four steps, with a monitor; in the second step one rank's gradient is bad."""
    (optimizer_class, options), clip, twins = OPTIMIZERS[kind], CLIPS[clip_by](), CLIPS[clip_by]()
    (laid_out, batches), twin = make_layout(layout), layouts.model()
    parameters, bad = laid_out.named_parameters(), "blocks.0.up.weight"
    steps = iter(range(4))
    parameters[bad].register_post_accumulate_grad_hook(lambda p: spoil_the_last(p) if next(steps) == 1 else None)
    handle = gradstat.step_in_backward(optimizer_class, laid_out.model, clip, **options)
    plain = optimizer_class(twin.parameters(), **options)
    monitor = gradstat.Monitor(laid_out.model, handle.optimizer, on_anomaly="record")
    before = None
    for step in range(4):
        laid_out.model(batch(batches[dist.get_rank()]) + step).square().mean().backward()
        layouts.backward(twin, set(batches), shift=step)
        monitor.step(float(step))
        report, expected = handle.report.result(), gradstat.check(twin)
        assert all(parameter.grad is None for parameter in parameters.values())
        assert [stats.name for stats in report.nonfinite] == ([bad] if step == 1 else [])
        if step != 1:
            assert report.total_norm == pytest.approx(expected.total_norm, rel=1e-5)
            assert [s.l2_norm for s in report] == pytest.approx([s.l2_norm for s in expected], rel=1e-4, abs=1e-6)
        refused = twin.get_parameter(bad)
        if step == 1:
            refused.grad[-1, -1] = math.nan
        clip_after(list(twin.parameters()), twins, before)
        refused.grad = None if step == 1 else refused.grad
        before = before if step == 1 else expected.total_norm
        plain.step()
        plain.zero_grad()
        for name, parameter in twin.named_parameters():
            ours: Any = parameters[name].detach()
            ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
            torch.testing.assert_close(ours, parameter.detach(), rtol=1e-4, atol=1e-5, msg=f"{name} in step {step}")
    latest = monitor.latest()
    assert latest is not None
    assert latest.report.total_norm == report.total_norm
    assert [(finding.rule, finding.step) for finding in monitor.findings][:1] == [("nonfinite-gradient", 1)]
    assert bad in monitor.findings[0].text
    assert gradstat.step_counters(handle.optimizer).read(wait=True) == gradstat.StepCounts(4, 1, 0)


@pytest.mark.parametrize(
    ("layout", "world", "kind", "clip_by"),
    [
        *(("fsdp2", 2, "AdamW", clip_by) for clip_by in CLIPS if clip_by != "AGC"),
        ("fsdp2", 4, "AdamW not fused", "each norm"),  # some ranks have nothing of the last layer
        ("hsdp", 4, "SGD", "AdaGC"),
        ("tp", 2, "AdamW", "last norm"),
        ("sp", 2, "SGD", "each norm"),
        ("fsdp2+tp", 4, "AdamW not fused", "AdaGC"),
    ],
)
def test_ranks_step_as_one_process(ranks: Ranks, layout: str, world: int, kind: str, clip_by: str) -> None:
    ranks.run(world, steps_as_in_one_process, layout, kind, clip_by)


@on_ranks(2)
def test_a_tensor_takes_one_reduction_and_the_end_two() -> None:
    layout, _ = make_layout("fsdp2")
    gradstat.step_in_backward(SGD, layout.model, 1.0, lr=0.1)
    layout.model(batch(dist.get_rank())).square().mean().backward()  # the first time, tensors are announced as well
    loss = layout.model(batch(dist.get_rank())).square().mean()
    reductions = [call for call in collectives_of(loss.backward) if call.startswith("all_reduce")]
    assert len(reductions) == len(list(layout.model.parameters())) + 2


@on_ranks(2)
def test_passes_that_do_not_reduce_accumulate() -> None:
    laid_out, twin = make_layout("fsdp2")[0], layouts.model()
    spread: Any = laid_out.model
    handle = gradstat.step_in_backward(SGD, spread, lr=0.1)
    plain = SGD(twin.parameters(), lr=0.1)
    for micro_batch in range(2):
        spread.set_requires_gradient_sync(micro_batch == 1)
        spread(batch(2 * dist.get_rank() + micro_batch)).square().mean().backward()
        layouts.backward(twin, {micro_batch, 2 + micro_batch})
    plain.step()
    assert gradstat.step_counters(handle.optimizer).read(wait=True).steps == 1
    for name, parameter in twin.named_parameters():
        ours: Any = laid_out.named_parameters()[name].detach()
        torch.testing.assert_close(ours.full_tensor(), parameter.detach(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_gradients_that_are_complete_when_backward_is_over_belong_to_its_step() -> None:
    """FSDP2 completes gradients of a module whose inputs need none in a callback, one for each root module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    for module in model:
        fully_shard(module)
    handle = gradstat.step_in_backward(SGD, model, lr=0.1)
    for step in range(2):
        model(torch.ones(2, 5)).square().sum().backward()
        assert len(handle.report.result()) == 4
        assert gradstat.step_counters(handle.optimizer).read(wait=True).steps == step + 1


@pytest.mark.parametrize("wrapped", ["DDP's parameters", "DDP later", "FSDP1's parameters"])
@on_ranks(2)
def test_what_reduces_gradients_later_is_refused_before_a_step(wrapped: str) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    if wrapped == "DDP later":
        gradstat.step_in_backward(SGD, model.parameters(), lr=0.1)
    around: nn.Module = (
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        if "FSDP" in wrapped
        else DistributedDataParallel(model, find_unused_parameters=True)
    )
    steps = around(torch.ones(2, 6)).sum().backward
    if wrapped != "DDP later":
        steps = partial(gradstat.step_in_backward, SGD, around.named_parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match=r"is in a \w+DataParallel, which reduces its gradient .*fully_shard"):
        steps()
    assert "DDP" not in wrapped or all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@on_ranks(2)
def test_slices_of_distributed_tensors_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"'first\.weight' is a distributed tensor, and AGC"):
        gradstat.step_in_backward(SGD, make_layout("fsdp2")[0].model, gradstat.AGC(), lr=0.1)
