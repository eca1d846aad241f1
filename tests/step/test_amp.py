"""gradstat.amp.GradScaler against torch's, over random sequences with injected overflow, and what it adds."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.devices import parameter_with, skip_unless_fused
from test_step import OPTIMIZERS, assert_same_parameters, assert_same_state, is_as_before, network
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchScaler

import gradstat
from gradstat._core import native
from gradstat.amp import GradScaler

KINDS = ("SGD", "SGD fused momentum", "SGD fused dampened", "AdamW", "AdamW fused", "AdamW fused amsgrad")
KINDS += ("Adagrad fused", "RMSprop")


def backward(model: nn.Module, scaler: TorchScaler, x: Tensor, bad: float | None) -> None:
    scaler.scale(model(x).square().sum()).backward()
    if bad is not None:
        list(model.parameters())[1].grad[2] = bad  # type: ignore[index]


Scaled = tuple[nn.Module, torch.optim.Optimizer, Any]


def scaled(kind: str = "SGD", bad: float | None = None, make: type[TorchScaler] = GradScaler, **options: Any) -> Scaled:
    """A model with scaled gradients, its optimizer, and the scaler."""
    model, scaler = network(), make("cpu", **options)
    optimizer = OPTIMIZERS[kind][0](model.named_parameters())
    backward(model, scaler, torch.randn(4, 6), bad)
    return model, optimizer, scaler


CALLS: dict[str, Callable[[Any, torch.optim.Optimizer], object]] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip": lambda scaler, optimizer: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5),
    "unscale and clip": lambda scaler, optimizer: scaler.unscale_and_clip_(optimizer, 0.5),
    "guarded step": lambda scaler, optimizer: gradstat.guarded_step(optimizer, 0.5, scaler=scaler).total_norm,
    "look": lambda scaler, optimizer: torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]),
}
CLIPPED = ("unscale", "clip", "step")
# The calls of a step, and torch's equivalents.
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "step": (("step",), ("step",)),
    "accumulate": (("step",), ("step",)),
    "unscale": (("unscale", "look", "step"), ("unscale", "look", "step")),
    "unscale and clip": (("unscale and clip", "step"), CLIPPED),
    "guarded step": (("guarded step",), CLIPPED),
    "unscale, guarded step": (("unscale", "guarded step"), CLIPPED),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("way", "our_scaler"),
    [*((way, GradScaler) for way in WAYS), *((way, TorchScaler) for way in WAYS if "guarded" in way)],
)
def test_a_random_sequence_ends_where_torchs_ends(kind: str, way: str, our_scaler: Any, device: str) -> None:
    if "fused" in kind:
        skip_unless_fused(OPTIMIZERS[kind][0], device)
    generator = torch.Generator().manual_seed(len(kind) * 7 + len(way))
    model = network(device)
    models = [model, copy.deepcopy(model)]
    optimizers = [OPTIMIZERS[kind][0](m.parameters()) for m in models]
    arguments = {"init_scale": 2.0**10, "growth_interval": 3}
    scalers = [our_scaler(device, **arguments), TorchScaler(device, **arguments)]
    # torch's own fused SGD cannot skip its first step: see test_step.py.
    first = 2 if "SGD fused" in kind else 0
    skipped = 0
    for number in range(14):
        bad = [None, math.inf, math.nan][int(torch.randint(0, 6, (), generator=generator)) % 4 % 3]
        bad = bad if number >= first else None
        skipped += bad is not None
        batches = [torch.randn(4, 6, generator=generator).to(device) for _ in range(2 if way == "accumulate" else 1)]
        returned = []
        for calls, model, optimizer, scaler in zip(WAYS[way], models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            for batch in batches:
                backward(model, scaler, batch, bad)
            told = [CALLS[call](scaler, optimizer) for call in calls]
            returned.append([each for each in told if isinstance(each, Tensor)])
            scaler.update()
        exactly = {"rtol": 0.0, "atol": 0.0} if way == "unscale" else {}
        torch.testing.assert_close(*returned, equal_nan=True, **exactly)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_same_parameters(*models, rtol=2e-5, atol=1e-6)
    assert 0 < skipped < 14
    assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict())
    if isinstance(scalers[0], GradScaler):
        status = scalers[0].read(wait=True)
        assert (status.steps, status.skipped) == (14, skipped)
        assert status.scale == scalers[1].get_scale()


@pytest.mark.parametrize("fused", [True, False])
def test_one_scaler_serves_several_optimizers(fused: bool, device: str) -> None:
    ends = []
    for make in (GradScaler, TorchScaler):
        torch.manual_seed(3)
        models, scaler = [network(device), network(device)], make(device, growth_interval=2)
        optimizers = [torch.optim.AdamW(model.parameters(), fused=fused) for model in models]
        for step in range(6):
            x = torch.randn(4, 6, device=device)
            for i, model in enumerate(models):
                model.zero_grad()
                backward(model, scaler, x, math.inf if step == 2 and i == 1 else None)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        ends.append((scaler.state_dict(), [parameter.detach() for m in models for parameter in m.parameters()]))
    assert ends[0][0] == ends[1][0]
    torch.testing.assert_close(ends[0][1], ends[1][1])


@pytest.mark.parametrize(("kind", "passes"), [("AdamW fused", ["measure_step"]), ("RMSprop", ["unscale_"])])
def test_a_fused_step_reads_once_and_writes_nothing(kind: str, passes: list[str], monkeypatch: Any) -> None:
    _, optimizer, scaler = scaled(kind)
    library, spy = native.load_cpu(), Mock()
    for name in ("check", "clip_", "measure_norm", "measure_step", "scale_", "unscale_"):
        spy.attach_mock(Mock(wraps=getattr(library, name)), name)
        monkeypatch.setattr(library, name, getattr(spy, name))
    scaler.step(optimizer)
    assert [name for name, *_ in spy.mock_calls] == passes


@pytest.mark.parametrize("way", ["step", "unscale"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_report_is_in_unscaled_units(way: str, fused: bool, device: str) -> None:
    model, scaler = network(device), GradScaler(device, init_scale=1000.0)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.0, fused=fused)
    x = torch.randn(4, 6, device=device)
    backward(model, scaler, x, None)
    if way == "unscale":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(4.0)  # the report uses the loss scale of its step
    report = scaler.report(optimizer).result()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert report.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert report.loss_scale == pytest.approx(1000.0)
    for stats, gradient in zip(report, expected, strict=True):
        assert stats.l2_norm == pytest.approx(gradient.norm().item(), rel=1e-5)
        assert stats.min == pytest.approx(gradient.min().item(), rel=1e-5)
        assert stats.sum == pytest.approx(gradient.sum().item(), rel=1e-4, abs=1e-5)
    assert report.ok
    assert not report.overflowed


def test_an_overflow_is_told_from_nan_and_an_infinite_scale_is_reported() -> None:
    texts = {}
    for bad in (math.inf, math.nan):
        _, optimizer, scaler = scaled(bad=bad, init_scale=2.0**16)
        scaler.step(optimizer)
        report = scaler.report(optimizer).result()
        assert report.overflowed is report.to_dict()["overflowed"] is (bad == math.inf)
        again = pickle.loads(pickle.dumps(report))
        assert (again.overflowed, again.loss_scale) == (report.overflowed, 65536)
        texts[bad] = str(report)
    assert "OVERFLOWED: 0 NaN and 1 Inf in 83 elements at loss scale 65536" in texts[math.inf]
    assert "the loss scale was too large" in texts[math.inf]
    assert "1 of 4 gradients NOT FINITE: 1 NaN and 0 Inf in 83 elements at loss scale 65536" in texts[math.nan]
    with pytest.raises(gradstat.NonFiniteGradientError, match=r"1 NaN, 0 Inf\) at loss scale 65536:\n  0\.bias: 1 NaN"):
        report.raise_if_nonfinite()
    _, optimizer, scaler = scaled()
    scaler._scale.fill_(math.inf)
    scaler.unscale_(optimizer)
    assert scaler.report(optimizer).result().loss_scale == math.inf


TROUBLE = [
    (4.0, math.nan, ["ok"] * 5 + ["collapsing"], "6 skipped in a row. Lowering the scale does not help"),
    (2.0**31, None, ["ok", "ok", "running away"], "no gradient overflowed while it grew"),
]


@pytest.mark.parametrize(("scale", "bad", "trends", "words"), TROUBLE, ids=["collapsing", "running away"])
def test_a_scale_in_trouble_shows(scale: float, bad: float | None, trends: list[str], words: str) -> None:
    model, scaler = network(), GradScaler("cpu", init_scale=scale, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for trend in trends:
        assert scaler.read().trend == trend
        optimizer.zero_grad()
        backward(model, scaler, torch.randn(4, 6), bad)
        scaler.step(optimizer)
        scaler.update()
    status, count = scaler.read(wait=True), len(trends)
    skipped = 0 if bad is None else count
    assert (status.steps, status.skipped, status.consecutive_skipped) == (count, skipped, skipped)
    assert status.scale == scale * 2.0 ** (count if bad is None else -count)
    assert words in str(status)


def test_checkpoints_go_both_ways_and_the_scaler_pickles() -> None:
    _, optimizer, mine = scaled(bad=math.inf, init_scale=512.0)
    mine.step(optimizer)
    mine.update()
    torchs = TorchScaler("cpu")
    torchs.load_state_dict(mine.state_dict())
    assert torchs.get_scale() == 256.0
    mine.load_state_dict(torchs.state_dict())
    for copied in (mine, pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
        assert copied.get_scale() == 256.0


def test_a_disabled_scaler_is_transparent() -> None:
    model, scaler = network(), GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(4, 6)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    assert scaler.unscale_and_clip_(optimizer, 0.01) > 0.01
    assert gradstat.check(model).total_norm == pytest.approx(0.01, rel=1e-3)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.read().steps == 0
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not GradScaler().is_enabled()


@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
@pytest.mark.parametrize("make", [GradScaler, TorchScaler])
def test_torchs_errors_stay_torchs(kind: str, make: type[TorchScaler]) -> None:
    _, optimizer, scaler = scaled(kind, make=make)

    def refused(error: type[Exception], message: str, call: Callable[..., object], **options: Any) -> None:
        with pytest.raises(error, match=message):
            call(optimizer, **options)

    refused(AssertionError, "Attempted .* but _scale is None", make("cpu").step)
    scaler.unscale_(optimizer)
    refused(RuntimeError, r"unscale_\(\) has already been called on this optimizer", scaler.unscale_)
    refused(RuntimeError, "Closure use is not currently supported", scaler.step, closure=lambda: 0.0)
    scaler.step(optimizer)
    refused(RuntimeError, r"step\(\) has already been called since the last update\(\)", scaler.step)
    refused(RuntimeError, r"unscale_\(\) is being called after step\(\)", scaler.unscale_)
    scaler.update()
    optimizer.zero_grad()
    if kind == "SGD":
        refused(AssertionError, "No inf checks were recorded for this optimizer", scaler.step)
    else:
        scaler.step(optimizer)
    refused(AssertionError, "No inf checks were recorded prior to update", lambda _: scaler.update())


STEPS = ("step", "unscale", "guarded step")


@pytest.mark.parametrize("way", STEPS)
def test_half_gradients_are_refused_before_any_is_touched(way: str) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).half())]
    optimizer, scaler = torch.optim.SGD(parameters), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\. 'group0\.1' is float16"):
        CALLS[way](scaler, optimizer)
    assert torch.equal(parameters[0].grad, torch.ones(3))  # type: ignore[arg-type]
    if way == "guarded step":
        assert gradstat.step_counters(optimizer).read().steps == 0
        parameters[0].grad[0] = math.inf  # type: ignore[index]
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):  # also of a step to be skipped
            gradstat.guarded_step(optimizer, scaler=scaler)
        parameters[0].grad[0] = 1.0  # type: ignore[index]
        # A fused optimizer unscales in its step
        gradstat.guarded_step(torch.optim.SGD(parameters, lr=65536.0, fused=True), scaler=scaler)
        assert not any(parameter.any() for parameter in parameters)


@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
def test_a_guarded_step_takes_a_scaler_that_has_found_something_and_not_stepped(kind: str) -> None:
    _, optimizer, scaler = scaled(kind)
    disabled = gradstat.guarded_step(optimizer, scaler=GradScaler("cpu", enabled=False), skip_nonfinite=False)
    assert disabled.report.result().loss_scale is None
    gradstat.guarded_step(optimizer, scaler=scaler)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)"):
        gradstat.guarded_step(optimizer, scaler=scaler)
    scaler.update()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="none of the optimizer's parameters has a gradient"):
        gradstat.guarded_step(optimizer, scaler=scaler)


@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
@pytest.mark.parametrize("way", STEPS)
def test_no_gradient_is_unscaled_twice_or_not_at_all(kind: str, way: str) -> None:
    """A parameter in two optimizers is refused, and a gradient that comes after unscaling."""
    model, optimizer, scaler = scaled(kind)
    other = OPTIMIZERS[kind][0](list(model.parameters())[1:])
    CALLS["step" if way == "unscale" else way](scaler, optimizer)
    with pytest.raises(RuntimeError, match=r"'group0\.0' is also in another optimizer"):
        CALLS[way](scaler, other)
    if way == "unscale":
        return
    model, optimizer, scaler = scaled(kind)
    late = list(model.parameters())[2]
    gradient, late.grad = late.grad, None
    scaler.unscale_(optimizer)
    late.grad = gradient
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"'2\.weight' .*appeared after unscale_\(\) and still carries the loss sc"):
        CALLS[way](scaler, optimizer)
    assert is_as_before(model, before)


def test_a_grad_scale_set_by_the_user_multiplies_as_in_torch() -> None:
    results = []
    for make in (GradScaler, TorchScaler):
        torch.manual_seed(3)
        model, optimizer, scaler = scaled("SGD fused momentum", make=make)
        optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
        scaler.step(optimizer)
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results)


def test_clipping_leaves_bad_gradients_to_be_looked_at() -> None:
    model, optimizer, scaler = scaled()
    with pytest.raises(KeyError, match=r"neither unscale_\(\) nor step\(\)"):
        scaler.report(optimizer)
    next(iter(model.parameters())).grad[1, 1] = math.nan  # type: ignore[index]
    assert scaler.unscale_and_clip_(optimizer, 1.0).isnan()
    assert gradstat.check(model).nan_count == 1
    scaler.step(optimizer)
    scaler.update()


def test_what_a_clip_refuses_is_still_scaled() -> None:
    adagc, other = gradstat.AdaGC(), scaled()[0]  # held, since a new parameter may get the id of one that is gone
    adagc.clip_(other.parameters())
    clips: Any = (
        ("1", TypeError, "max_norm: expected a number, an adaptive clip or None, got str"),
        (adagc, ValueError, "AdaGC keeps a mean for each of 4 parameters, by position, and this is a different list"),
        (gradstat.AGC(), NotImplementedError, r"'0\.bias' is sparse, and AGC clips slices"),
    )
    for clip, error, message in clips:
        _, optimizer, scaler = scaled()
        bias = optimizer.param_groups[0]["params"][1]
        bias.grad = bias.grad.to_sparse() if isinstance(clip, gradstat.AGC) else bias.grad
        before = [p.grad.clone().to_dense() for p in optimizer.param_groups[0]["params"]]
        with pytest.raises(error, match=message):
            scaler.unscale_and_clip_(optimizer, clip)
        after = [p.grad.to_dense() for p in optimizer.param_groups[0]["params"]]
        assert all(map(torch.equal, before, after))


def test_sparse_gradients_are_unscaled() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer, scaler = torch.optim.SGD(embedding.parameters(), lr=0.5), GradScaler("cpu", init_scale=64.0)
    before = embedding.weight.detach().clone()
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    expected = before.clone()
    expected[1] -= 1.0
    expected[3] -= 0.5
    torch.testing.assert_close(embedding.weight.detach(), expected)
    assert scaler.report(optimizer).result().finite_norm == pytest.approx(math.sqrt(4 * 4 + 4))


@pytest.mark.parametrize("value", [3e4, 6e4])
def test_sums_of_sparse_half_values_overflow_as_torchs(value: float) -> None:
    ends = []
    for kind in (TorchScaler, GradScaler):
        values = torch.tensor([value, value, 1.0], dtype=torch.float16)
        parameter = parameter_with(torch.sparse_coo_tensor([[1, 1, 3]], values, (4,), check_invariants=True))
        scaler = kind("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))
        given = torch.optim.SGD([parameter]), torch.tensor(1 / 64), torch.zeros(()), True
        (found,) = scaler._unscale_grads_(*given).values()
        ends.append((found.item(), parameter.grad.to_dense().tolist()))
    assert ends[0] == ends[1]
    assert ends[0][0] == (value > 4e4)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("kind", ["dense", "sparse", "strided", "two"])
def test_the_inverse_of_the_scale_may_have_any_shape_of_one_element(kind: str, shape: tuple[int, ...]) -> None:
    """As in torch, whose own test calls it so."""
    parameter, values = nn.Parameter(torch.zeros(4, 3)), torch.arange(24.0).view(4, 6)
    strided, dense = values[:, ::2], values[:, :3].clone()
    parameter.grad = {"dense": dense, "sparse": dense.to_sparse()}.get(kind, strided)
    others = [parameter_with(dense.clone())] * (kind == "two")
    expected = parameter.grad.to_dense() / 4
    scaler, optimizer = GradScaler("cpu", init_scale=4.0), torch.optim.SGD([parameter, *others])
    scaler.scale(torch.ones(()))
    (found,) = scaler._unscale_grads_(optimizer, torch.full(shape, 0.25), torch.zeros(shape), allow_fp16=False).values()
    assert found.item() == 0
    assert torch.equal(parameter.grad.to_dense(), expected)
    gradients = [expected, *(other.grad for other in others)]
    assert scaler.report(optimizer).result().total_norm == pytest.approx(
        torch.nn.utils.get_total_norm(gradients).item()
    )


def test_an_optimizer_that_takes_the_scaler_itself_still_gets_it() -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: object = None, *, grad_scaler: object = None) -> None:  # type: ignore[override]
            self.seen = grad_scaler

    model, _, scaler = scaled()
    optimizer = Old(model.parameters(), lr=0.1)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(optimizer)
    assert optimizer.seen is scaler
