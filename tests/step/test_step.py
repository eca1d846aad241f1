"""guarded_step: every optimizer of torch against clip and step, skips that leave no trace, and misuse."""

import copy
import gc
import inspect
import math
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cuda_counts import NoSync
from helpers.devices import DEVICES, skip_unless_fused
from torch import Tensor, nn
from torch.optim import Optimizer

import gradstat
from gradstat import counters
from gradstat._core import native, norms
from gradstat._step import optimizers, record
from gradstat.amp import GradScaler


class OwnStep(torch.optim.AdamW):
    """Not to be trusted to skip, as its step is not torch's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(0.1 * parameter.grad)


class OwnFused(torch.optim.SGD):
    """An optimizer of others that keeps torch's contract."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        divisor, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", 0)
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad if divisor is None else parameter.grad / divisor
            parameter.data.sub_(0.1 * torch.nan_to_num(gradient) * (1 - skip))


def in_groups(parameters: Any) -> Optimizer:
    """A group says otherwise than the defaults."""
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others, "fused": False, "lr": 0.05}], fused=True)


# Every optimizer of torch and some of others, and whether their steps can be skipped on the device.
OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "Adam fused": (lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True), True),
    "AdamW fused": (lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True), True),
    "AdamW fused, a subclass": (lambda ps: type("Sub", (torch.optim.AdamW,), {})(ps, lr=0.01, fused=True), True),
    "AdamW fused amsgrad": (lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True, fused=True), True),
    "Adagrad fused": (lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True), True),
    "SGD fused": (lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1, fused=True), True),
    "SGD fused momentum": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True), True),
    "SGD fused dampened": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, fused=True), True),
    "SGD fused by others": (OwnFused, True),
    "ASGD": (lambda ps: torch.optim.ASGD(ps, lr=0.1), False),
    "Adadelta": (lambda ps: torch.optim.Adadelta(ps), False),
    "Adafactor": (lambda ps: torch.optim.Adafactor(ps), False),
    "Adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=0.1), False),
    "Adam": (lambda ps: torch.optim.Adam(ps, lr=0.01), False),
    "Adam foreach": (lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True), False),
    "Adam for-loop": (lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=False), False),
    "AdamW in groups": (in_groups, False),
    "AdamW with a step of its own": (OwnStep, False),
    "AdamW": (lambda ps: torch.optim.AdamW(ps, lr=0.01), False),
    "Adamax": (lambda ps: torch.optim.Adamax(ps, lr=0.01), False),
    "LBFGS": (lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3), False),
    "Muon": (lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.01), False),
    "NAdam": (lambda ps: torch.optim.NAdam(ps, lr=0.01), False),
    "RAdam": (lambda ps: torch.optim.RAdam(ps, lr=0.01), False),
    "RMSprop": (lambda ps: torch.optim.RMSprop(ps, lr=0.01), False),
    "Rprop": (lambda ps: torch.optim.Rprop(ps, lr=0.01), False),
    "SGD": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), False),
    "SparseAdam": (lambda ps: torch.optim.SparseAdam(ps, lr=0.01), False),
}


def network(device: str = "cpu") -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator, is_embedding = torch.Generator().manual_seed(seed), isinstance(model, nn.Embedding)
    data = torch.randint(0, 10, (5,), generator=generator) if is_embedding else torch.randn(4, 6, generator=generator)
    parameter = next(model.parameters())
    return model(data.to(parameter.device if is_embedding else parameter)).square().sum()  # type: ignore[no-any-return]


def spoil(optimizer: Optimizer, bad: float) -> None:
    gradient = optimizer.param_groups[0]["params"][-1].grad
    (gradient._values() if gradient.is_sparse else gradient).view(-1)[1] = bad


def backward(
    model: nn.Module, optimizer: Optimizer, seed: int = 0, bad: Any = None, scaler: Any = None, factor: float = 1.0
) -> Tensor:
    """New gradients, of which one element is ``bad``; returns the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, seed) * factor
    (loss if scaler is None else scaler.scale(loss)).backward()
    if bad is not None:
        spoil(optimizer, bad)
    return loss


def trained(kind: str, bad: float | None = None, scaler: Any = None) -> tuple[nn.Module, Optimizer]:
    """A network with gradients and its optimizer."""
    model = network()
    optimizer = OPTIMIZERS[kind][0](model.parameters())
    backward(model, optimizer, 0, bad, scaler)
    return model, optimizer


def snapshot(model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def assert_same_parameters(ours: nn.Module, theirs: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), **tolerance)


def is_as_before(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Compares state dicts of optimizers; ours may also have state prepared for a first step."""
    for index, state in theirs["state"].items():
        for name, value in state.items():
            if isinstance(value, (Tensor, float, int)):
                torch.testing.assert_close(ours["state"][index][name], value, rtol=1e-4, atol=1e-7)


def test_the_table_names_every_optimizer_of_torch() -> None:
    named = {name.split()[0] for name in OPTIMIZERS}
    kinds = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)}
    assert named == kinds - {"Optimizer"}


@pytest.mark.usefixtures("_poisoned")  # a skipped first step leaves no garbage in the momentum of a fused SGD
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [0.3, None], ids=["clipped", "unclipped"])
def test_every_optimizer_clips_steps_and_skips(kind: str, max_norm: float | None, device: str) -> None:
    make, honors = OPTIMIZERS[kind]
    if "fused" in kind:
        skip_unless_fused(make, device)
    model = nn.Embedding(10, 4, sparse=True).to(device) if kind == "SparseAdam" else network(device)
    if kind == "LBFGS":  # its estimate of curvature amplifies roundings
        model = model.double()
    twin = copy.deepcopy(model)
    ours, theirs = make(model.parameters()), make(twin.parameters())
    assert optimizers.honors_found_inf(ours) is honors
    outcomes = []

    def evaluate(module: nn.Module, optimizer: Optimizer, step: int, bad: float | None) -> Tensor:
        loss = backward(module, optimizer, step, bad)
        if optimizer is theirs and max_norm is not None:
            clip_ = gradstat.clip_grad_norm_ if kind == "SparseAdam" else nn.utils.clip_grad_norm_
            clip_([p for group in theirs.param_groups for p in group["params"]], max_norm)
        return loss

    for step, bad in enumerate([math.nan, None, None, math.inf, -math.inf, None, None, None]):
        before = snapshot(model, ours)
        closure, plain = partial(evaluate, model, ours, step, bad), partial(evaluate, twin, theirs, step, bad)
        if kind == "LBFGS":
            result = gradstat.guarded_step(ours, max_norm, closure=closure)
        else:
            closure()
            result = gradstat.guarded_step(ours, max_norm)
        outcomes.append(bool(result.skipped))
        assert bool(result.total_norm.isfinite()) is (bad is None)
        if bad is not None:
            assert is_as_before(model, before[0])
            assert_same_state(ours.state_dict(), before[1])
        elif kind == "LBFGS":
            theirs.step(plain)
        else:
            plain()
            theirs.step()
        assert_same_parameters(model, twin, rtol=2e-5, atol=1e-6)
        assert_same_state(ours.state_dict(), theirs.state_dict())
    assert outcomes == [True, False, False, True, True, False, False, False]
    assert result.counters.read(wait=True) == gradstat.StepCounts(steps=8, skipped=3, consecutive_skipped=0)
    assert gradstat.step_counters(ours) is result.counters
    assert not {"found_inf", "grad_scale"} & set(vars(ours))


FUSED = [name for name, (_, honors) in OPTIMIZERS.items() if honors and "dampened" not in name]


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_optimizers_cost_no_sync(kind: str, scaling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.StepRecord, "on_host", lambda self: pytest.fail("a host sync"))
    monkeypatch.setattr(record.StepRecord, "is_known_noop", False)
    scaler, guard = GradScaler("cpu") if scaling else None, gradstat.SpikeGuard(window=4)
    model, optimizer = trained(kind, scaler=scaler)
    for max_norm in (0.1, gradstat.AutoClip(), *[1.0] * 6):
        loss = backward(model, optimizer, scaler=scaler)
        guarded: dict[str, Any] = {"loss": loss, "guard": guard} if max_norm == 1.0 else {}
        with NoSync():
            result = gradstat.guarded_step(optimizer, max_norm, scaler=scaler, **guarded)
            state = guard.state_dict()
            if scaler is not None:
                scaler.update()
        guard.load_state_dict(state)
        assert not result.skipped
    assert guard.read().steps == 6


def test_taking_steps_as_they_come_costs_no_sync_with_any_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.StepRecord, "on_host", lambda self: pytest.fail("a host sync"))
    model, optimizer = trained("RMSprop", bad=math.nan)
    result = gradstat.guarded_step(optimizer, 1.0, skip_nonfinite=False)
    assert not result.skipped
    assert result.counters.read() == gradstat.StepCounts(1, 0, 0)
    assert all(parameter.isnan().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["AdamW fused", "SGD"])
def test_a_closure_is_evaluated_once_and_its_loss_returned(kind: str) -> None:
    model, optimizer = trained(kind)
    seen = []

    def closure() -> Tensor:
        seen.append(backward(model, optimizer))
        return seen[-1]

    with torch.no_grad():
        result = gradstat.guarded_step(optimizer, 1.0, closure=closure)
    assert seen == [result.loss]
    assert gradstat.guarded_step(optimizer, closure=lambda: closure() and None).loss is None


def test_lbfgs_goes_back_if_a_later_evaluation_is_not_finite() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return backward(model, optimizer, bad=math.nan if evaluations in (7, 8) else None)

    assert not gradstat.guarded_step(optimizer, closure=closure).skipped
    before = snapshot(model, optimizer)
    result = gradstat.guarded_step(optimizer, closure=closure)
    assert evaluations == 7, "in the middle of the second step"
    assert result.skipped
    assert is_as_before(model, before[0])
    assert str(optimizer.state_dict()) == str(before[1])
    assert gradstat.guarded_step(optimizer, closure=closure).skipped
    assert not gradstat.guarded_step(optimizer, closure=closure).skipped
    assert result.counters.read() == gradstat.StepCounts(4, 2, 0)


def test_differentiable_optimizers_step_as_after_torchs_clip() -> None:
    results = []
    for guarded in (True, False):
        start = torch.ones(3, requires_grad=True)
        parameter = start.clone()
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, differentiable=True)
        optimizer.param_groups[0]["params"] = [parameter]
        parameter.grad = torch.full((3,), 2.0)
        if guarded:
            gradstat.guarded_step(optimizer, 1.0)
        else:
            nn.utils.clip_grad_norm_([parameter], 1.0)
            optimizer.step()
        parameter.sum().backward()
        results.append((parameter.detach(), start.grad))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("kind", ["AdamW fused", "SGD"])
def test_schedulers_advance_as_told_and_do_not_complain(kind: str) -> None:
    model, optimizer = trained(kind)
    rate = optimizer.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        backward(model, optimizer, step, bad=math.nan)
        assert gradstat.guarded_step(optimizer, 1.0).skipped
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 8)


def test_a_pickled_optimizer_is_trusted_still() -> None:
    again = pickle.loads(pickle.dumps(torch.optim.AdamW(network().parameters(), fused=True)))
    assert not hasattr(again, "_step_supports_amp_scaling")
    assert optimizers.honors_found_inf(again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fused", [True, False])
def test_every_dtype_and_backend(dtype: torch.dtype, fused: bool, where: tuple[str, str]) -> None:
    backend, device = where
    parameters = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in [(40, 3), (7,), (0,)]]
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    ours, theirs = (torch.optim.SGD(each, lr=0.5, fused=fused) for each in (parameters, twins))
    # The divisor of a fused optimizer is a float32 number.
    slack = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if fused else 0.0)
    for step in range(3):
        for parameter, twin in zip(parameters, twins, strict=True):
            parameter.grad = torch.randn(parameter.shape, device=device).to(dtype)
            twin.grad = parameter.grad.clone()
        if step == 1:
            parameters[0].grad[3, 1] = math.nan  # type: ignore[index]
        result = gradstat.guarded_step(ours, 1.0, backend=backend)
        assert result.total_norm.dtype == dtype
        assert result.skipped.dtype == torch.bool
        assert bool(result.skipped) is (step == 1)
        if step != 1:
            norm = nn.utils.clip_grad_norm_(twins, 1.0)
            torch.testing.assert_close(result.total_norm, norm, rtol=4 * torch.finfo(dtype).eps, atol=0)
            theirs.step()
        torch.testing.assert_close(parameters, twins, rtol=slack, atol=slack)
    assert result.counters.read(wait=True) == gradstat.StepCounts(3, 1, 0)


def test_the_report_has_the_gradients_as_they_were_under_the_models_names() -> None:
    model, optimizer = trained("AdamW fused", bad=math.inf)
    expected = gradstat.check(model)
    report = gradstat.guarded_step(optimizer, 1e-3, model=model).report.result()
    assert str(report) == str(expected)
    assert report.names == tuple(name for name, _ in model.named_parameters())
    assert report.loss_scale is None
    next(iter(model.parameters())).grad = None
    report = gradstat.guarded_step(optimizer, 1e-3).report.result()
    assert (report.names[0], report.missing) == ("group0.1", ("group0.0",))


def test_a_result_keeps_no_gradient_and_nothing_the_counters_alive() -> None:
    model, optimizer = trained("AdamW fused")
    with pytest.raises(KeyError, match=r"has not been stepped by gradstat\.guarded_step yet"):
        gradstat.step_counters(optimizer)
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    result = gradstat.guarded_step(optimizer, 1.0, model=model)
    report = result.report
    optimizer.zero_grad()
    gc.collect()
    assert not any(gradient() for gradient in gradients)
    assert report.result().ok
    counters = weakref.ref(result.counters)
    del optimizer, result
    gc.collect()
    assert counters() is None


def test_without_gradients_nothing_happens_and_the_counters_stay_where_they_are() -> None:
    """On torch's "meta" device, as after steps on a GPU; also if a result or a captured graph holds them."""
    empty, optimizer = torch.optim.SGD([{"params": []}]), torch.optim.SGD(network().parameters())
    for each in (empty, optimizer):
        result = gradstat.guarded_step(each, 1.0)
        assert (result.total_norm, bool(result.skipped), len(result.report.result())) == (0.0, False, 0)
        assert pickle.loads(pickle.dumps(result)).total_norm == 0
    lbfgs = torch.optim.LBFGS(network().parameters())
    for stepped, options in (
        (optimizer, {}),
        (optimizer, {"skip_nonfinite": False}),
        (optimizer, {"guard": gradstat.SpikeGuard()}),
        (lbfgs, {"closure": lambda: torch.zeros(())}),
    ):
        made = counters._counters[stepped] = counters.StepCounters(torch.device("meta"))
        assert gradstat.guarded_step(stepped, **options).counters is made  # type: ignore[arg-type]


CLIPS: dict[str, Callable[[], gradstat.adaptive.AdaptiveClip]] = {
    "FixedClip": lambda: gradstat.FixedClip(0.5),
    "AutoClip": lambda: gradstat.AutoClip(50),
    "ZClip": lambda: gradstat.ZClip(z_threshold=0.5, warmup=2),
    "AdaGC": lambda: gradstat.AdaGC(warmup=2),
    "AGC": lambda: gradstat.AGC(0.1),
}
STEPPED_BY_CLIPS = [
    (kind, rule, ("none", "step", "unscale and clip")[(i + j) % 3])
    for i, kind in enumerate(("AdamW fused", "SGD", "SGD fused momentum", "SGD fused dampened"))
    for j, rule in enumerate(CLIPS)
]


@pytest.mark.usefixtures("_poisoned")  # a skipped first step leaves no garbage in the momentum of a fused SGD
@pytest.mark.parametrize(("kind", "rule", "scaling"), STEPPED_BY_CLIPS)
def test_adaptive_clips_step_as_they_clip_alone(kind: str, rule: str, scaling: str, device: str) -> None:
    model = network(device)
    twin = copy.deepcopy(model)
    make, _ = OPTIMIZERS[kind]
    ours, theirs = make(model.parameters()), make(twin.parameters())
    mine, other = CLIPS[rule](), CLIPS[rule]()
    scaler = None if scaling == "none" else GradScaler(device, init_scale=2.0**12, growth_interval=3)
    for step in range(9):
        bad = math.nan if step in (0, 5) else None
        for module, optimizer, by in ((model, ours, scaler), (twin, theirs, None)):
            backward(module, optimizer, step, bad, by, 10.0 if step == 7 else 1.0)
        if scaling == "unscale and clip":
            norm = scaler.unscale_and_clip_(ours, mine)
            scaler.step(ours)
        else:
            norm = gradstat.guarded_step(ours, mine, scaler=scaler).total_norm
        if scaler is not None:
            scaler.update()
        torch.testing.assert_close(norm, other.clip_(twin.parameters()), equal_nan=True)
        if bad is None:
            theirs.step()
        assert_same_parameters(model, twin, rtol=2e-5, atol=1e-6)
    summary, alone = mine.summary(), other.summary()
    assert (summary.steps, summary.clipped, summary.nonfinite) == (alone.steps, alone.clipped, alone.nonfinite)
    assert summary.clipped


@pytest.mark.parametrize("guarded", [False, True])
def test_what_a_clip_refuses_is_no_step(guarded: bool) -> None:
    adagc, weight = gradstat.AdaGC(), nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.ones(3, 4)
    adagc.clip_([weight])
    expanded, sparse = torch.ones(3, 1).expand(3, 4), torch.ones(3, 4).to_sparse()
    for clip, error, message, gradient in (
        (gradstat.AGC(), NotImplementedError, "'group0.0' is sparse", sparse),
        (gradstat.AGC(), RuntimeError, "expanded", expanded),
        (gradstat.AdaGC(), RuntimeError, "expanded", expanded),
        (adagc, ValueError, "a different list, of 1", torch.ones(3, 4)),
        (gradstat.ZClip(), RuntimeError, "expanded", expanded),
        (1.0, RuntimeError, "expanded", expanded),
    ):
        parameter, guard = nn.Parameter(torch.ones(3, 4)), gradstat.SpikeGuard() if guarded else None
        optimizer = torch.optim.SGD([parameter])
        parameter.grad = torch.ones(3, 4)
        gradstat.guarded_step(optimizer, guard=guard)
        parameter.grad = gradient
        before = None if isinstance(clip, float) else str(clip.state_dict())
        with pytest.raises(error, match=message):
            gradstat.guarded_step(optimizer, clip, guard=guard)
        assert gradstat.step_counters(optimizer).read().steps == 1
        assert guard is None or guard.read().steps == 1
        assert before is None or str(clip.state_dict()) == before


def test_what_unscaling_found_counts_though_it_was_mended_since() -> None:
    scaler = torch.amp.GradScaler("cpu")
    model, optimizer = trained("AdamW fused", math.nan, scaler)
    scaler.unscale_(optimizer)
    spoil(optimizer, 0.0)
    before = copy.deepcopy(model.state_dict())
    result = gradstat.guarded_step(optimizer, scaler=scaler)
    assert result.skipped
    assert result.counters.read() == gradstat.StepCounts(1, 1, 1)
    assert is_as_before(model, before)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("kind", ["AdamW fused", "SGD"])
def test_a_useless_scale_skips(scale: float, kind: str) -> None:
    scaler = torch.amp.GradScaler("cpu")
    _, optimizer = trained(kind, scaler=scaler)
    scaler._scale.fill_(scale)  # type: ignore[union-attr]
    assert gradstat.guarded_step(optimizer, 1.0, scaler=scaler).skipped


Decided = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(params=[*DEVICES, "emulated"])
def decide(request: pytest.FixtureRequest) -> tuple[Callable[..., Decided], str]:
    """The operator that measures for a step, or the CUDA kernels on the CPU, which use another number of blocks."""
    if request.param != "emulated":
        return native.operators(torch.device(request.param)).measure_step, request.param
    kernels = request.getfixturevalue("emulated")

    def measure(gradients: list[Tensor], max_norm: float, order: float, *step: Tensor | None) -> Decided:
        verdict, norm, numbers = torch.full((3,), 5.0), torch.tensor(7.0), torch.full((2,), 7.0, dtype=torch.float64)
        table = kernels.measured(gradients, None, norm, max_norm, False, numbers, (step[0], verdict, step[1]))
        return table, norm, numbers, verdict

    return measure, "cpu"


SCALES = (None, 1.0, 1024.0, 3e38, 1e-30, 0.0, -2.0, math.inf, math.nan)
LIMITS = (1.0, 0.0, -1.0, 1e-30, 1e30, math.inf)
VALUES = (0.0, 1e-20, 3.0, 1e30, math.inf, math.nan)
# Every pair of a scale, a limit and a value; and divisors that are infinite or 0 only by all three.
DECISIONS = [(scale, limit, VALUES[(i + j) % 6]) for i, scale in enumerate(SCALES) for j, limit in enumerate(LIMITS)]
DECISIONS += [(3e38, limit, value) for limit in (1.0, 0.0, 1e-30) for value in (3.0, 1e30)]
DECISIONS += [(1e-30, limit, value) for limit in (1e-30, 1e30) for value in (1e-20, 3.0)]


@pytest.mark.parametrize(("scale", "max_norm", "value"), DECISIONS)
def test_kernel_and_specification_decide_alike(scale: float | None, max_norm: float, value: float, decide: Any) -> None:
    """Whichever block finishes last; every launch counts once."""
    measure, device = decide
    gradients = [torch.tensor([value, 1e-3 * (value if math.isfinite(value) else 1.0)], device=device)]
    gradients += [torch.zeros(count, device=device) for count in (30_001, 7, 20_000)]
    loss_scale = None if scale is None else torch.tensor(scale, device=device)
    counters = [torch.tensor([5, 2, 1], device=device) for _ in range(2)]
    table, *_, norm, numbers, verdict = measure(gradients, max_norm, 2.0, loss_scale, counters[0])
    expected = norms.decide(table, norms.StepRequest(max_norm, loss_scale, counters[1]))
    torch.testing.assert_close(verdict, expected.verdict, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(numbers, expected.scaling, rtol=1e-15, atol=0, equal_nan=True)
    torch.testing.assert_close(norm, expected.norm.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*counters)
    assert verdict[0] in (0.0, 1.0)
    assert counters[0].tolist() == ([6, 3, 2] if verdict[0] else [6, 2, 0])


@pytest.mark.cuda
def test_a_captured_step_follows_its_gradients() -> None:
    model = network("cuda")
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 0.1, fused=True, capturable=True) for m in (model, twin))
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    gradstat.guarded_step(ours, 0.5)
    theirs.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gradstat.guarded_step(ours, 0.5)
    for step in range(4):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad.copy_(torch.randn_like(parameter))  # type: ignore[union-attr]
            other.grad.copy_(parameter.grad)  # type: ignore[union-attr, arg-type]
        if step == 2:
            spoil(ours, math.nan)
        graph.replay()
        assert bool(result.skipped) is (step == 2)
        if step != 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            theirs.step()
        assert_same_parameters(model, twin)
    assert gradstat.step_counters(ours).read(wait=True) == gradstat.StepCounts(5, 1, 0)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_decided_on_the_host_cannot_be_captured_and_says_so() -> None:
    model = network("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    loss_of(model, 0).backward()
    gradstat.guarded_step(optimizer)
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph; use a fused")
    with refused, torch.cuda.graph(graph):
        gradstat.guarded_step(optimizer)


@pytest.mark.cuda
def test_fused_steps_do_not_wait_for_the_gpu() -> None:
    model, scaler = network("cuda"), GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        backward(model, optimizer, scaler=scaler)
        gradstat.guarded_step(optimizer, 1.0, scaler=scaler)
        scaler.update()
    backward(model, optimizer, scaler=scaler)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = gradstat.guarded_step(optimizer, 1.0, scaler=scaler)
        scaler.update()
        report = result.report
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.result().ok


def test_bad_arguments_are_refused_before_anything_changes() -> None:
    model, optimizer = trained("AdamW fused")
    lbfgs = torch.optim.LBFGS(model.parameters())
    before = snapshot(model, optimizer)
    for name in ("found_inf", "grad_scale"):
        setattr(optimizer, name, torch.tensor(1.0))
        with pytest.raises(RuntimeError, match=rf"already has the attribute '{name}'.*`del optimizer\.{name}`"):
            gradstat.guarded_step(optimizer)
        delattr(optimizer, name)
    wrapper = SimpleNamespace(optimizer=optimizer)
    adaptive: dict[str, Any] = {"max_norm": gradstat.AutoClip(), "optimizer": lbfgs, "closure": lambda: None}
    scaled = {"scaler": torch.amp.GradScaler("cpu")}
    scaled["scaler"].scale(torch.ones(()))
    for error, message, options in (
        (TypeError, r"expected a torch\.optim\.Optimizer, got Sequential$", {"optimizer": model}),
        (TypeError, "got SimpleNamespace; pass the optimizer that it wraps", {"optimizer": wrapper}),
        (TypeError, "max_norm: expected a number, an adaptive clip or None, got bool", {"max_norm": True}),
        (AssertionError, "Attempted guarded_step but _scale is None", {"scaler": torch.amp.GradScaler("cpu")}),
        (ValueError, "leave skip_nonfinite=True", {**scaled, "skip_nonfinite": False}),
        (RuntimeError, "a closure cannot be combined with a loss scaler", {**scaled, "closure": lambda: None}),
        (ValueError, "LBFGS evaluates the loss several times in a step; pass closure=", {"optimizer": lbfgs}),
        (ValueError, "LBFGS needs the loss, but the closure returned None", {**adaptive, "max_norm": None}),
        (ValueError, "an adaptive clip would count each evaluation as a step", adaptive),
    ):
        with pytest.raises(error, match=message):
            gradstat.guarded_step(**{"optimizer": optimizer, **options})
    assert str(before) == str(snapshot(model, optimizer))


@pytest.mark.parametrize("fused", [False, True])
def test_a_result_can_be_sent_to_another_process(fused: bool) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.named_parameters(), fused=fused)
    for bad in (None, math.nan):
        loss = backward(model, optimizer, bad=bad)
        result = gradstat.guarded_step(optimizer, 1.0, loss=loss, guard=gradstat.SpikeGuard())
        sent = pickle.loads(pickle.dumps(result))
        assert type(sent) is gradstat.StepResult
        assert repr(sent) == repr(result)
        assert bool(sent.skipped) is (bad is not None)
        assert bool(sent.refused) == bool(result.refused)
        assert sent.loss == loss.detach()
        assert sent.counters.read() == result.counters.read()
        assert sent.report.result().to_dict() == result.report.result().to_dict()


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_whose_hook_raised_is_not_counted(fused: bool, skips: bool, guarded: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    guard = gradstat.SpikeGuard() if guarded and skips else None

    def step() -> gradstat.StepCounts:
        parameter.grad = torch.ones(3)
        gradstat.guarded_step(optimizer, 1e9, skips, guard=guard)
        return gradstat.step_counters(optimizer).read(wait=True)

    def fail(*_: object) -> None:
        raise KeyError("hook")

    assert step().steps == 1
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        hook = register(fail)
        with pytest.raises(KeyError):
            step()
        assert gradstat.step_counters(optimizer).read(wait=True) == gradstat.StepCounts(1, 0, 0)
        assert not {"found_inf", "grad_scale"} & set(vars(optimizer))
        hook.remove()
    assert step() == gradstat.StepCounts(2, 0, 0)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.ones(1).expand(4, 6, 5),
    "expanded in one dimension": lambda: torch.randn(4, 1, 5).expand(4, 6, 5),
    "strided": lambda: torch.randn(4, 6, 10)[..., ::2],
    "transposed": lambda: torch.randn(5, 4, 6).permute(1, 2, 0),
}


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if "fused" in kind and kind != "SGD fused by others"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_fused_step_refuses_gradients_in_another_layout(kind: str, layout: str, max_norm: float | None) -> None:
    first, second = nn.Parameter(torch.ones(4, 6, 5)), nn.Parameter(torch.ones(4, 1, 5))
    optimizer = OPTIMIZERS[kind][0]([first, second])
    # Strides of a dimension of one element do not matter.
    first.grad, second.grad = torch.randn(4, 6, 5), torch.randn(4, 1, 5).as_strided((4, 1, 5), (5, 77, 1))
    gradstat.guarded_step(optimizer, max_norm)
    before, first.grad = first.detach().clone(), LAYOUTS[layout]()
    with pytest.raises(RuntimeError, match=r"group0\.0.*(assign .*copy_\(p\.grad\)|\.clone\(\))"):
        gradstat.guarded_step(optimizer, max_norm)
    assert torch.equal(first, before)
    assert gradstat.step_counters(optimizer).read(wait=True).steps == 1
    first.grad = torch.empty_like(first).copy_(first.grad)
    assert not gradstat.guarded_step(optimizer, max_norm).skipped
