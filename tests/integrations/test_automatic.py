"""`gradstat.auto`: a monitor attached to a program's existing optimizer."""

import contextlib
import gc
import math
import threading
from collections.abc import Callable, Container, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from helpers.training import backpropagated, fill, serious
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import gradstat
from gradstat._core import announce
from gradstat.monitor import AnomalyError, AnomalyWarning, Monitor

SKIP = {"error": ("skip", "record")}


def made(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), **options)


Change = Callable[[int, Tensor], object]


def at(step: int, change: Callable[[Tensor], object]) -> Change:
    """A change that is made in one step only."""
    return lambda now, given: change(given) if now == step else None


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    bad: Container[int] = (),
    scaler: torch.amp.GradScaler | None = None,
    before: Change = lambda step, batch: None,
    behind: Change = lambda step, loss: None,
    max_norm: float | None = None,
    catches: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> list[tuple[int, Any]]:
    """A loop without gradstat; returns the steps that raised, and the errors.

    Faults are injected ``before`` the forward and ``behind`` the backward pass; in ``bad`` steps a gradient is Inf.
    """
    raised = []
    for step in range(steps):
        batch = torch.randn(8, 4)
        with torch.no_grad():
            before(step, batch)
        loss = mse_loss(model(batch), torch.zeros(8, 2))
        backpropagated(optimizer, loss if scaler is None else scaler.scale(loss))
        if step in bad:
            model[0].weight.grad[1, 2] = math.inf
        behind(step, loss)
        try:
            if max_norm is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        except catches as error:
            raised.append((step, error))
    return raised


def watched(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, given: Any = None, **how: Any) -> Monitor:
    """The monitor of a program that is watched by ``auto(*given)``, by default of model and optimizer."""
    with gradstat.auto(*(given or (model, optimizer)), on_anomaly="record") as handle:
        train(model, optimizer, steps, **how)
    return handle.monitor


def made_and_watched(**options: Any) -> tuple[Any, Any, Monitor]:
    model, optimizer = made(**options)
    return model, optimizer, gradstat.auto(model, optimizer, on_anomaly="record").monitor


def is_finite(model: nn.Module) -> bool:
    return all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("left", "policy", "steps"),
    [
        *(("removed", "record", 0), ("removed", "skip", 2), ("dropped", "rollback", 2), ("dropped", "record", 0)),
        *(("dropped", "skip", 2), ("in a cycle", "rollback", 0), ("in a cycle", "record", 2)),
    ],
)
def test_an_optimizer_is_not_kept_alive_and_torchs_functions_are_back_after_the_last(
    left: str, policy: str, steps: int
) -> None:
    def functions() -> tuple[object, ...]:
        return torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_, torch.amp.GradScaler.scale

    own = functions()
    optimizers = [made() for _ in range(3)]
    for model, optimizer in optimizers:
        handle = gradstat.auto(model, optimizer, on_anomaly={"error": policy})
        train(model, optimizer, steps, max_norm=1.0)
    assert set(functions()).isdisjoint(own)
    if left == "removed":
        handle.remove()
    if left == "in a cycle":
        for model, optimizer in optimizers:
            optimizer.itself = (model, optimizer)
    del handle, model, optimizer
    optimizers[1:] = []
    gc.collect()
    assert set(functions()).isdisjoint(own)  # one is left
    optimizers.clear()
    gc.collect()
    assert functions() == own


@pytest.mark.parametrize("where", ["in a hook", "in a hook after a clip", "inside"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raised_does_not_hide_the_next(where: str, fused: bool) -> None:
    def fail(*_: object) -> None:
        if passed[-1] == 2:
            raise KeyboardInterrupt if where == "inside" else MemoryError

    passed: list[int] = []
    model, optimizer = made(fused=fused)
    handle = gradstat.auto(model, optimizer, on_anomaly={"nonfinite-gradient": "skip"})
    if where == "inside":  # below torch's hooks
        inner = optimizer._init_group
        optimizer._init_group = lambda *given: fail() or inner(*given)
    else:
        optimizer.register_step_pre_hook(fail)
    raised = train(
        *(model, optimizer, 6),
        bad={1, 3},
        behind=lambda step, _: passed.append(step),
        max_norm=1e9 if "clip" in where else None,
        catches=(MemoryError, KeyboardInterrupt),
    )
    handle.monitor.flush()
    assert ([step for step, _ in raised], handle.monitor.steps, handle.monitor.nonfinite_steps) == ([2], 6, 2)
    assert is_finite(model)


def test_every_bad_step_raises_in_a_loop_that_goes_on() -> None:
    model, optimizer = made()
    handle = gradstat.auto(model, optimizer, on_anomaly="raise")
    raised = train(model, optimizer, 8, bad={2, 3, 4, 6}, catches=AnomalyError)
    assert [(step, error.finding.rule) for step, error in raised] == [(i, "nonfinite-gradient") for i in (2, 3, 4, 6)]
    assert is_finite(model)
    assert handle.monitor.steps == 8


def test_names_are_those_of_a_model_given_before_or_after_the_optimizer_or_of_the_optimizer() -> None:
    model, optimizer = made()
    named = torch.optim.AdamW(model.named_parameters())
    for arguments, expected in (
        *(((model, optimizer), "0.weight"), ((optimizer, model), "0.weight"), ((named,), "0.weight")),
        *(((None, optimizer), "group0.0"), ((optimizer, None), "group0.0")),
    ):
        monitor = watched(model, named if named in arguments else optimizer, 2, arguments)
        assert monitor.latest().report.names[0] == expected


def test_clips_after_the_check_and_counts_a_step_once_also_without_gradients() -> None:
    model, optimizer = made()
    with gradstat.auto(optimizer, max_norm=1e-3, on_anomaly="record") as handle:
        train(model, optimizer, 3)
    assert gradstat.check(model).total_norm == pytest.approx(1e-3, rel=1e-2)
    assert (handle.monitor.recording().scalars["norm"] > 1e-3).tolist() == [True] * 3
    optimizer.zero_grad()
    with gradstat.auto(optimizer, on_anomaly="record") as handle:
        for _ in range(3):
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
            optimizer.step()
        optimizer.step(lambda: ("not", "a loss"))
    assert handle.monitor.steps == 4


def test_a_program_that_catches_an_error_at_its_clip_takes_the_step_once() -> None:
    model, optimizer = made()
    with gradstat.auto(optimizer, on_anomaly="raise") as handle:
        fill(model, math.nan)
        with pytest.raises(AnomalyError):
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        assert all(parameter.grad.isnan().all() for parameter in model.parameters())
        optimizer.step()
        assert handle.monitor.steps == 1


CLIPS = {kind.__name__: kind for kind in (gradstat.AutoClip, gradstat.ZClip, gradstat.AdaGC, gradstat.AGC)}
CLIPS |= {"0.1": lambda: 0.1, "10.0": lambda: 10.0, "FixedClip": lambda: gradstat.FixedClip(0.1)}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, gradstat.amp.GradScaler])
def test_a_clip_decides_alike_for_scaled_gradients(name: str, kind: Any) -> None:
    stepped = []
    for scaler, fused in ((None, False), (kind("cpu", init_scale=128.0), True), (kind("cpu", init_scale=128.0), False)):
        model, _ = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        clip: Any = CLIPS[name]()
        with gradstat.auto(optimizer, max_norm=clip, on_anomaly=SKIP) as handle:
            train(model, optimizer, 12, bad={8}, scaler=scaler)
        assert handle.monitor.steps == 12
        if not isinstance(clip, float):
            assert clip.summary().steps - clip.summary().nonfinite == 11
        assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
        stepped.append(list(model.parameters()))
    torch.testing.assert_close(stepped[1:], [stepped[0]] * 2)


def test_a_norm_that_overflows_the_dtype_of_scaled_gradients_is_clipped_in_the_divisor() -> None:
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0, fused=True), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.full_like(parameter, 40_000.0)
    with gradstat.auto(optimizer, max_norm=1.0, on_anomaly="record") as handle:
        scaler.step(optimizer)
    assert handle.monitor.recording().scalars["norm"].tolist() == pytest.approx([320_000 / 1024], rel=1e-3)
    assert parameter.grad.tolist() == pytest.approx([1 / 8] * 64, rel=1e-3)  # where the step leaves what it divided


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_a_closure_is_measured_once_per_step(kind: Any, by_keyword: bool, clips: bool) -> None:
    model, _ = made()
    optimizer = kind(model.parameters(), lr=0.1)
    evaluations: list[list[tuple[float, float]]] = []  # of each step: loss and norm

    def closure() -> Tensor:
        loss = backpropagated(optimizer, mse_loss(model(torch.ones(8, 4)), torch.zeros(8, 2)))
        evaluations[-1].append((loss.item(), gradstat.check(model).total_norm))
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    with gradstat.auto(optimizer, on_anomaly="record") as handle:
        for _ in range(3):
            evaluations.append([])
            optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    losses, norms = zip(*(firsts for firsts, *_ in evaluations), strict=True)
    assert handle.monitor.steps == 3
    scalars = handle.monitor.recording().scalars
    assert scalars["norm"].tolist() == pytest.approx(norms)
    if not clips:  # a clip runs before the loss is known
        assert scalars["loss"].tolist() == pytest.approx(losses)


# The rule and the name of the first finding, by what is made NaN.
FIRST = {"weight": ("nonfinite-parameter", "0.weight"), "batch": ("nonfinite-batch", "input[0]")}


@pytest.mark.parametrize("fault", FIRST)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["plain", "clipped", "gradstat's"])
def test_no_loss_scaler_hides_a_step(kind: str, fused: bool, fault: str) -> None:
    """The scaler does not even call an optimizer that is not fused in nonfinite steps."""
    model, optimizer = made(fused=fused)
    scaler = (gradstat.amp.GradScaler if kind == "gradstat's" else torch.amp.GradScaler)("cpu")
    spoilt = at(5, lambda batch: (model[0].weight if fault == "weight" else batch)[0, 0].fill_(math.nan))
    max_norm = 1.0 if kind == "clipped" else None
    monitor = watched(model, optimizer, 12, scaler=scaler, before=spoilt, max_norm=max_norm)
    assert monitor.steps == 12
    assert monitor.scaler is scaler
    error = next(finding for finding in monitor.findings if finding.severity == "error")
    assert (error.step, error.rule, error.name) == (5, *FIRST[fault])
    assert monitor.nonfinite_steps == (7 if fault == "weight" else 1)
    assert monitor.recording().scalars["norm"][:5].max() < 100  # without the scale of 65,536


def test_an_overflow_does_not_hide_what_comes_soon_after() -> None:
    """Parameters are measured once per incident; a loss that is not finite is another incident."""
    model, optimizer = made()
    spoilt = at(7, lambda _: model[2].bias[1].fill_(math.nan))
    monitor = watched(model, optimizer, 9, bad={3}, scaler=torch.amp.GradScaler("cpu"), before=spoilt)
    found = [(finding.rule, finding.step) for finding in monitor.findings]
    assert found[:2] == [("nonfinite-gradient", 3), ("nonfinite-parameter", 7)]


@pytest.mark.parametrize(("enabled", "given"), [(True, False), (False, False), (False, True)])
def test_an_overflow_is_no_error_unless_the_scaler_is_disabled(enabled: bool, given: bool) -> None:
    """Programs often make a scaler in any case, and enable it for float16 only."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    with gradstat.auto(optimizer, model, scaler=scaler if given else None, on_anomaly="record") as handle:
        train(model, optimizer, 3, bad=range(3), scaler=scaler, max_norm=1.0)
    assert handle.monitor.nonfinite_steps == 3
    found = next(finding for finding in handle.monitor.findings if finding.rule == "nonfinite-gradient")
    assert (found.name, found.severity) == ("0.weight", "info" if enabled else "error")
    assert not enabled or "also noted:" in str(handle.monitor.diagnose())


def test_gradients_are_measured_before_the_programs_own_clips_of_some_of_them() -> None:
    model, optimizer, monitor = made_and_watched()
    for step in range(6):
        backpropagated(optimizer, model(torch.randn(8, 4)).square().mean())
        if step == 3:
            model[0].bias.grad[2] = math.nan
        for layer in (model[0], model[2]) if step != 4 else ():
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
        if step != 2:  # the program itself skips this step
            optimizer.step()
    assert monitor.steps == 6
    assert (monitor.recording().scalars["norm"][:3] > 2e-3).all()
    found = monitor.findings[0]
    assert (found.step, found.name, found.evidence["nonfinite_tensors"]) == (3, "0.bias", 1)


def unnoticed_clip(parameters: Iterable[Any]) -> None:
    """A program's own clip, which announces nothing."""
    gradients = [parameter.grad for parameter in parameters]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((1 / (norm + 1e-6)).clamp(max=1.0))


@pytest.mark.parametrize("way", ["auto", "auto, scaled", "Monitor", "Monitor, without loss"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fault", [*FIRST, "gradient"])
def test_the_cause_of_nan_gradients_is_named_first(fault: str, clips: bool, way: str) -> None:
    """A clip comes first only if the loss is known to be finite, and gradstat may not have measured before the clip."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if way == "auto, scaled" else None
    is_loop = way.startswith("Monitor")
    watching: Any = gradstat.Monitor if is_loop else gradstat.auto
    handle = watching(model, optimizer, scaler=scaler, on_anomaly="record")
    monitor = handle if is_loop else handle.monitor

    def behind(step: int, loss: Tensor) -> None:
        if step == 2 and fault == "gradient":
            model[0].bias.grad[2] = math.nan
        if clips:
            unnoticed_clip(model.parameters())
        if is_loop:
            monitor.step(loss if way == "Monitor" else None)

    places = {"weight": lambda _: model[0].weight, "batch": lambda batch: batch, "gradient": lambda _: torch.ones(2, 3)}
    spoilt = at(2, lambda batch: places[fault](batch)[1, 2].fill_(math.nan))
    train(model, optimizer, 4, scaler=scaler, before=spoilt, behind=behind)
    monitor.flush()
    found = [finding for finding in monitor.diagnose().findings if finding.step == 2]
    gradient = next(finding for finding in found if finding.rule == "nonfinite-gradient")
    if fault in FIRST:
        assert (found[0].rule, found[0].name) == FIRST[fault]
    elif not clips:
        assert (gradient.name, gradient.evidence["nonfinite_tensors"]) == ("0.bias", 1)
    is_hidden = fault == "gradient" and clips
    place = {"Monitor": 0, "Monitor, without loss": 1}.get(way, len(gradient.causes) - 1)
    names_clip = [i for i, cause in enumerate(gradient.causes) if cause.startswith("a clip before")]
    assert names_clip == [place] * is_hidden
    assert ("as after a clip" in gradient.text) == (is_hidden and way == "Monitor")
    if is_hidden and way == "Monitor, without loss":
        assert "as after the backward pass of a NaN loss" in gradient.text
        assert gradient.causes[0].startswith("a loss that was NaN")


@pytest.mark.parametrize("memory", [0.0, math.nan])
def test_layers_left_uninitialized_by_to_empty_are_reported(memory: float) -> None:
    """As in PyTorch's FSDP2 example, whose blocks are never reset; new GPU memory is often zero."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    for parameter in (*model[1].parameters(), *model[3].parameters()):
        nn.init.constant_(parameter, memory)
    found = watched(model, torch.optim.Adam(model.parameters(), lr=1e-2), 30).diagnose().findings[0]
    expected = ("nonfinite-parameter", 0, "1.weight") if memory else ("dead-gradient", 0, "3.weight")
    assert (found.rule, found.step, found.name) == expected
    assert "memory that was never initialised" in found.causes[0]


def test_optimizers_that_share_a_scaler_are_distinguished() -> None:
    pairs = [made(), made()]
    healthy, bad = (gradstat.auto(*pair, on_anomaly="record").monitor for pair in pairs)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        for number, (model, optimizer) in enumerate(pairs):
            loss = model(torch.randn(8, 4)).square().mean() * (math.nan if (number, step) == (1, 2) else 1)
            backpropagated(optimizer, scaler.scale(loss))
            scaler.step(optimizer)
        scaler.update()
    assert healthy.steps == bad.steps == 4
    assert not healthy.findings
    assert (bad.findings[0].rule, bad.findings[0].step) == ("nonfinite-loss", 2)


ONE = torch.ones(1)
Clip = Callable[[list[nn.Parameter], torch.amp.GradScaler, torch.optim.Optimizer], object]

# Clips between backward() and the step, and whether they clip what carries the loss scale.
SCALED_CLIPS: dict[str, tuple[Clip, bool]] = {
    "norm": (lambda p, *_: nn.utils.clip_grad_norm_(p, 1.0), True),
    "value": (lambda p, *_: nn.utils.clip_grad_value_(p, clip_value=1.0), True),
    "known norm": (lambda p, *_: nn.utils.clip_grads_with_norm_(p, 1.0, torch.tensor(9.0)), True),
    "gradstat's": (lambda p, *_: gradstat.clip_grad_norm_(p, 1.0), True),
    "FixedClip": (lambda p, *_: gradstat.FixedClip(1.0).clip_(p), True),
    "two models": (lambda p, *_: [nn.utils.clip_grad_norm_(each, 1.0) for each in (p, [nn.Parameter(ONE)])], True),
    "after unscale_": (lambda p, s, o: [s.unscale_(o), nn.utils.clip_grad_norm_(p, 1.0)], False),
    "in one call": (lambda p, s, o: s.unscale_and_clip_(o, 1.0), False),
    "of another model": (lambda *_: nn.utils.clip_grad_norm_([nn.Parameter(ONE)], 1.0), False),
    "limit times scale": (lambda p, s, _: nn.utils.clip_grad_norm_(p, s.get_scale()), False),
    "no limit": (lambda p, *_: nn.utils.clip_grad_norm_(p, math.inf), False),
    "AutoClip": (lambda p, *_: gradstat.AutoClip().clip_(p), False),
    "between two steps": (lambda p, s, o: [s.step(o), s.update(), nn.utils.clip_grad_norm_(p, 1.0)], False),
}


@pytest.mark.parametrize("way", ["auto", "Monitor", "Monitor without a scaler"])
@pytest.mark.parametrize("how", SCALED_CLIPS)
def test_a_clip_of_scaled_gradients_is_told_once(how: str, way: str) -> None:
    (model, optimizer), scaler = made(lr=1e-3), gradstat.amp.GradScaler("cpu", init_scale=1024.0)
    clip, is_told = SCALED_CLIPS[how]
    is_loop = way != "auto"
    watching: Any = gradstat.Monitor if is_loop else gradstat.auto
    handle = watching(model, optimizer, scaler=scaler if way == "Monitor" else None, on_anomaly={"warning": "record"})
    for _ in range(20):
        backpropagated(optimizer, scaler.scale(model(torch.randn(8, 4)).square().mean()))
        if is_loop:
            handle.step()
        clip([*model.parameters()], scaler, optimizer)
        if how != "between two steps":
            scaler.step(optimizer)
            scaler.update()
    monitor = handle if is_loop else handle.monitor
    monitor.flush()
    found = [(one.step, one.evidence) for one in monitor.findings if one.rule == "scaled-clip"]
    assert found == [(0, {"limit": 1.0, "loss_scale": 1024.0})] * is_told


TINY_CLIPS: dict[str, tuple[Clip, float]] = {  # and the norm that gradients are clipped to, 0 if nothing is told
    "norm": (lambda p, *_: nn.utils.clip_grad_norm_(p, 1e-4), 1e-4),
    "value": (lambda p, *_: nn.utils.clip_grad_value_(p, 1e-5), 1e-5 * 58**0.5),
    "gradstat's": (lambda p, *_: gradstat.clip_grad_norm_(p, 1e-4), 1e-4),
    "after unscale_": (lambda p, s, o: [s.unscale_(o), nn.utils.clip_grad_norm_(p, 1e-4)], 1e-4),
    "usual": (lambda p, *_: nn.utils.clip_grad_norm_(p, 0.1), 0.0),
    "some parameters": (lambda p, *_: nn.utils.clip_grad_norm_(p[:1], 1e-4), 0.0),
    "of another model": (lambda *_: nn.utils.clip_grad_norm_([nn.Parameter(ONE)], 1e-4), 0.0),
}


@pytest.mark.parametrize("is_loop", [False, True], ids=["auto", "Monitor"])
@pytest.mark.parametrize("how", TINY_CLIPS)
def test_a_clip_to_next_to_nothing_is_told(how: str, is_loop: bool) -> None:
    """Also if it begins in the middle of a run."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", enabled=how == "after unscale_", growth_interval=1000)
    watching: Any = gradstat.Monitor if is_loop else gradstat.auto
    handle = watching(model, optimizer, scaler=scaler, on_anomaly={"warning": "record"})
    clip, limit = TINY_CLIPS[how]
    for step in range(60):
        backpropagated(optimizer, scaler.scale((model(torch.randn(8, 4)) - 9).square().mean()))
        if is_loop:
            handle.step()
        if step >= 20:
            clip([*model.parameters()], scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
    monitor = handle if is_loop else handle.monitor
    monitor.flush()
    found = [(one.step, one.evidence["limit"]) for one in monitor.findings if one.rule == "tiny-clip"]
    assert found == [(20, pytest.approx(limit))] * (limit > 0)


def test_gradients_that_are_unscaled_by_hand_may_be_clipped() -> None:
    """The finding waits for ``unscale_``, which then is not called."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = gradstat.Monitor(model, optimizer, scaler, on_anomaly="record")
    for _ in range(6):
        backpropagated(optimizer, scaler.scale(model(torch.randn(8, 4)).square().mean()))
        monitor.step()
        for parameter in model.parameters():
            parameter.grad /= 1024.0
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    monitor.remove()
    assert "scaled-clip" not in {one.rule for one in monitor.findings}
    assert not announce.listeners()


def test_a_clip_of_scaled_gradients_points_at_the_users_line() -> None:
    model, optimizer = made()
    clip = lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731 - before unscale_
    with (
        gradstat.auto(optimizer, model) as handle,
        pytest.warns(AnomalyWarning, match="carry the loss scale") as caught,
    ):
        train(model, optimizer, 4, scaler=torch.amp.GradScaler("cpu"), behind=clip)
    assert [warning.filename for warning in caught] == [__file__]
    assert [one.rule for one in handle.monitor.findings] == ["scaled-clip"]


@pytest.mark.parametrize("way", ["step", "closure", "clip", "value", "scaler", "unscale", "schedule"])
def test_warnings_point_at_the_users_line(way: str) -> None:
    model, optimizer = made()
    gradstat.auto(optimizer)
    gc.collect()  # the handle need not be kept
    scaler = torch.amp.GradScaler("cpu", enabled=way in ("scaler", "unscale"))
    if way == "schedule":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps the step

    def closure() -> Tensor:
        return backpropagated(optimizer, scaler.scale(model(torch.ones(1, 4)).square().sum() * math.nan))

    measuring: dict[str, Callable[[], object]] = {
        "closure": lambda: optimizer.step(closure),
        "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "value": lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "scaler": lambda: scaler.step(optimizer),
        "unscale": lambda: scaler.unscale_(optimizer),
    }
    closure()
    with pytest.warns(AnomalyWarning) as caught:
        measuring.get(way, lambda: optimizer.step())()
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("module", "name", "when"),
    [
        (nn.utils, "clip_grad_norm_", "early"),  # torch's clip by value fails without gradients
        *((nn.utils, "clip_grad_norm_", when) for when in ("late", "in time", "joint")),
        *((nn.utils, "clip_grad_value_", when) for when in ("late", "in time", "joint")),
        *((gradstat, "clip_grad_norm_", when) for when in ("late", "in time", "joint")),
    ],
)
def test_a_clip_that_changes_nothing_is_no_step(module: Any, name: str, set_to_none: bool, when: str) -> None:
    (model, optimizer, monitor), (other, unwatched) = made_and_watched(), made()

    def clip(here: str, *besides: nn.Parameter) -> None:
        if when == here:
            getattr(module, name)([*model.parameters(), *besides], 1.0)

    for _ in range(4):
        for one in (optimizer, unwatched):
            one.zero_grad(set_to_none)
        clip("early")
        (model(torch.randn(8, 4)).sum() + other(torch.randn(8, 4)).sum()).backward()
        clip("in time")
        optimizer.step()
        clip("late")
        clip("joint", *other.parameters())
        unwatched.step()
    zeros = 3 * (when == "early" and not set_to_none)  # gradients of zeros are measured, too
    assert monitor.steps == 4 + zeros
    assert monitor.findings == []


@pytest.mark.parametrize("clips", [("D",), ("G", "D"), ("late",)])
@pytest.mark.parametrize("turns", ["DG", "DDG"])
@pytest.mark.parametrize("watched", ["G", "D"])
def test_networks_of_one_model_that_take_turns_are_told_apart(watched: str, turns: str, clips: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    gan = nn.ModuleDict({"G": nn.Linear(3, 2), "D": nn.Linear(2, 1)})
    optimizers = {name: torch.optim.Adam(part.parameters(), 1e-3) for name, part in gan.items()}
    with gradstat.auto(gan, optimizers[watched], on_anomaly="record") as handle:
        for name in 20 * turns:
            optimizers[name].zero_grad()
            made = gan["G"](torch.randn(8, 3))
            of_made = gan["D"](made if name == "G" else made.detach()).mean()
            (of_made if name == "G" else gan["D"](torch.randn(8, 2)).mean() - of_made).backward()
            if name in clips:
                nn.utils.clip_grad_norm_(gan[name].parameters(), 1.0)
            optimizers[name].step()
            if "late" in clips:
                nn.utils.clip_grad_norm_(gan[name].parameters(), 1.0)
    assert handle.monitor.steps == 20 * turns.count(watched)
    assert serious(handle.monitor) == []


@pytest.mark.parametrize(
    "way",
    ["clips.is_still_scaled", "listener.torch_calls.has_losses", "listener.torch_calls.losses_scaled_by"],
)
def test_internal_errors_are_reported_once_and_do_not_end_training(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone, own), (model, optimizer) = made(), made()
    torch.manual_seed(1)
    train(alone, own, 12, scaler=torch.amp.GradScaler("cpu"), max_norm=1.0)
    handle = gradstat.auto(optimizer, model)
    monkeypatch.setattr(f"gradstat.monitor.{way}", Mock(side_effect=ZeroDivisionError))
    torch.manual_seed(1)
    with pytest.warns(RuntimeWarning) as caught:
        train(model, optimizer, 12, scaler=torch.amp.GradScaler("cpu"), max_norm=1.0)
    (message,) = (str(one.message) for one in caught if "gradstat" in str(one.message))
    assert "of clips and loss scalers could not be tracked; training goes on:\nTraceback" in message
    assert [finding.rule for finding in handle.monitor.findings][:1] == ["not-watched"]
    assert all(map(torch.equal, alone.parameters(), model.parameters()))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("way", [
    *("one", "micro-batches", "scaled", "GAN", "other", "elements", "given", "edge", "two"),
    *("reentrant", "micro-batches with graphs", "halves", "thawed"),
])  # fmt: skip
def test_the_loss_is_the_root_of_the_backward_pass(way: str, set_to_none: bool) -> None:
    (model, optimizer, monitor), (other, _) = made_and_watched(), made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=way == "scaled")
    expected = []
    for step in range(4):
        run: Any = partial(checkpoint, model, use_reentrant=True) if way == "reentrant" else model
        losses = [run(torch.randn(8, 4, requires_grad=True)).square().mean() for _ in range(2)]
        if way == "halves":  # take turns in training
            losses = [sum(p.square().sum() for p in model[2 * (step % 2)].parameters()) for _ in range(2)]
        elif way == "thawed":
            model[0].requires_grad_(step > 1)
        if way == "GAN":  # a generator's loss, which also reaches the discriminator
            (model(other(torch.randn(8, 4)) @ torch.ones(2, 4)).mean()).backward()
        optimizer.zero_grad(set_to_none)
        edge = torch.autograd.graph.get_gradient_edge(losses[0])
        no_losses: dict[str, Any] = {"elements": torch.stack(losses), "given": losses[0], "edge": edge}
        if way in no_losses:
            torch.autograd.backward(no_losses[way], torch.ones([2] * (way == "elements")))
        elif way == "two":
            torch.autograd.backward(losses)
        else:
            with_graph = way.endswith("graphs")
            scaler.scale(losses[0]).backward(create_graph=with_graph)
            if way == "other":
                other(torch.randn(8, 4)).square().mean().backward()
            if way.startswith("micro-batches") or way == "scaled":
                scaler.scale(losses[1]).backward(create_graph=with_graph)
        scaler.step(optimizer)
        scaler.update()
        used = 2 if way.startswith("micro-batches") or way in ("scaled", "two") else 1
        expected.append(sum(loss.item() for loss in losses[:used]))
    seen = monitor.recording().scalars.get("loss")
    assert (seen is None) == (way in no_losses)
    assert seen is None or seen.tolist() == pytest.approx(expected, rel=1e-6)


class Spied(nn.Parameter):
    """A parameter that notes in which threads its gradient is read."""

    readers: ClassVar[set[int]] = set()

    @property
    def grad(self) -> Any:
        self.readers.add(threading.get_ident())
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, value: Any) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("watched", [False, True])
def test_what_another_thread_trains_is_not_heard(watched: bool, steps: int) -> None:
    """There autograd may be writing this model's gradients: to read one could end the process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for layer in (model[0], model[2]):
        layer.weight, layer.bias = Spied(layer.weight.detach()), Spied(layer.bias.detach())
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    handle = gradstat.auto(model, optimizer, on_anomaly="record")

    def loss_of() -> Tensor:
        loss = model(torch.randn(8, 4)).square().mean()
        expected.append(loss.item())
        return loss

    def train_another() -> None:
        other, of_other = made(fused=True)
        if watched:
            gradstat.auto(other, of_other, on_anomaly="record")
        scaler = torch.amp.GradScaler("cpu")
        train(other, of_other, 2, max_norm=1.0)
        train(other, of_other, 2, scaler=scaler, max_norm=1.0)
        torch.nn.utils.clip_grad_value_(other.parameters(), 1.0)
        gradstat.clip_grad_norm_(other.parameters(), 1.0)
        gradstat.guarded_step(of_other, max_norm=1.0)
        scaler.scale(other(torch.randn(8, 4)).sum())  # not used yet

    for _ in range(steps):
        backpropagated(optimizer, loss_of())
        optimizer.step()
    backpropagated(optimizer, loss_of())
    Spied.readers.clear()
    thread = threading.Thread(target=train_another)
    thread.start()
    thread.join()
    assert thread.ident not in Spied.readers
    optimizer.step()
    assert handle.monitor.recording().scalars["loss"].tolist() == pytest.approx(expected)
    assert handle.monitor.scaler is None


def test_steps_of_one_training_may_be_taken_in_any_thread() -> None:
    """And a clip is heard in whatever thread it is called."""
    model, optimizer = made()
    expected, norms = [], []
    with gradstat.auto(model, optimizer, on_anomaly="record") as handle:

        def run_in_a_thread(work: Callable[[], object]) -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        def backward() -> None:
            expected.append(backpropagated(optimizer, model(torch.randn(8, 4)).square().mean()).item())
            norms.append(gradstat.check(model).total_norm)

        for _ in range(4):
            run_in_a_thread(backward)
            run_in_a_thread(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            run_in_a_thread(optimizer.step)
        scalars = handle.monitor.recording().scalars
    assert scalars["loss"].tolist() == pytest.approx(expected)
    assert scalars["norm"].tolist() == pytest.approx(norms)


@pytest.mark.parametrize("frozen", ["all", "last layer", "once"])
@pytest.mark.parametrize("automatic", [False, True])
def test_parameters_may_be_frozen_between_their_gradients_and_the_step(automatic: bool, frozen: str) -> None:
    """As where two adapters of a model take turns."""
    model, optimizer = made()
    handle = gradstat.auto(model, optimizer, on_anomaly="record") if automatic else None
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record") if handle is None else handle.monitor
    for step in range(6):
        model.requires_grad_(True)
        loss = backpropagated(optimizer, model(torch.randn(8, 4)).square().mean())
        if frozen != "once" or not step:
            (model[2] if frozen == "last layer" else model).requires_grad_(False)  # type: ignore[index]
        if handle is None:
            monitor.step(loss)
        optimizer.step()
    monitor.flush()
    assert not [finding for finding in monitor.findings if "internal error" in finding.text]
    assert len(monitor.recording().scalars["norm"]) == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, o: gradstat.auto(o, maxnorm=1.0), r"auto\(\) has no argument 'maxnorm'; did you mean 'max_norm'\?"),
        (lambda m, o: gradstat.auto(o, max_norm="1"), "max_norm: expected a number"),
        (lambda m, o: gradstat.auto(o, m, scaler=m), r"scaler: expected a torch\.amp\.GradScaler or None, got .*Seq"),
        (lambda m, o: gradstat.auto(m), r"expected a torch\.optim\.Optimizer, got .*Sequential, which holds none"),
        (
            lambda m, o: gradstat.auto(m, object()),
            r"builtins.object, which holds none; make gradstat\.Monitor",
        ),
        (lambda m, o: gradstat.auto(m, SimpleNamespace(a=o, b=fresh(m))), r"SimpleNamespace, which holds none"),
        (lambda m, o: gradstat.auto(o, o), r"one torch\.nn\.Module, got AdamW"),
    ],
)
def test_wrong_types_are_refused(call: Callable[[nn.Module, torch.optim.Optimizer], object], message: str) -> None:
    model, optimizer = made()
    with pytest.raises(TypeError, match=message):
        call(model, optimizer)
    assert "_gradstat_auto" not in vars(optimizer)


def fresh(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("order", [1, -1])
def test_the_optimizer_that_another_object_holds_is_watched(order: int) -> None:
    """As fastai's OptimWrapper does. A module that keeps its optimizer is no such object."""
    model, optimizer = made()
    model.optimizer = fresh(model)
    handle = gradstat.auto(*(model, SimpleNamespace(opt=optimizer, name="Adam"))[::order])
    assert handle.optimizer is optimizer
    assert handle.monitor.recorder.inner is model
    handle.remove()


def test_a_scaler_inside_of_a_trainers_is_found() -> None:
    native = SimpleNamespace(_scaler=torch.amp.GradScaler("cpu"))
    assert gradstat.Monitor(*made(), native).scaler is native._scaler


# What is watched is what is trained ----------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
def test_a_group_added_later_is_watched(given: bool) -> None:
    """Gradual unfreezing."""
    model, _ = made()
    body, _, head = model.children()
    body.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters())

    def unfreeze(_: Tensor) -> None:
        optimizer.add_param_group({"params": body.requires_grad_(True).parameters(), "lr": 1e-4})

    monitor = watched(model, optimizer, 8, (optimizer, model if given else None), bad={6}, before=at(3, unfreeze))
    assert {finding.rule for finding in monitor.findings if finding.step < 6} == set()
    found = next(finding for finding in monitor.findings if finding.severity == "error")
    name = "0.weight" if given else "group1.0"
    assert (found.rule, found.step, found.name) == ("nonfinite-gradient", 6, name)


def test_a_parameter_replaced_in_the_optimizer_is_followed() -> None:
    """As in the densification of Gaussian splats: a longer tensor takes the place of another, with its state."""
    torch.manual_seed(0)
    points, colours = nn.Parameter(torch.randn(16, 3)), nn.Parameter(torch.rand(16, 3))
    optimizer = torch.optim.Adam([{"params": [points], "name": "points"}, {"params": [colours], "name": "colours"}])
    monitor = gradstat.auto(optimizer, on_anomaly="record").monitor
    for step in range(12):
        if step in (4, 8):
            for group in optimizer.param_groups:
                (old,) = group["params"]
                state = optimizer.state.pop(old)
                longer = nn.Parameter(torch.cat([old.detach(), old.detach()[:4]]))
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.cat([state[key], torch.zeros(4, 3)])
                group["params"][0] = longer
                optimizer.state[longer] = state
        points, colours = (group["params"][0] for group in optimizer.param_groups)
        backpropagated(optimizer, points.square().mean() + (colours - 0.5).square().mean())
        if step == 10:
            colours.grad[20, 1] = math.inf
        optimizer.step()
    monitor.flush()
    assert monitor.steps == 12
    (found,) = serious(monitor)
    assert (found.rule, found.step, found.name) == ("nonfinite-gradient", 10, "group1.0")
    assert "the first at [20, 1]" in found.text
    assert [stats.numel for stats in monitor.latest().report] == [72, 72]


@pytest.mark.parametrize("steps", [16, 120])
def test_an_optimizer_that_replaces_the_watched_one_is_told(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with gradstat.auto(model, optimizer, on_anomaly="record") as handle:
        train(model, optimizer, 50)
        train(model, torch.optim.SGD(model.parameters(), 0.01), steps)
        monitor = handle.monitor
    assert monitor.steps == 50 + max(0, steps - 16)
    told = [found.text for found in monitor.findings if found.rule == "optimizer-coverage"]
    assert any("another optimizer (SGD) steps the same parameters" in text for text in told) == (steps > 16)


def test_what_the_optimizer_trains_besides_the_model_is_watched_too() -> None:
    """Two critics in one optimizer, of which the monitor is given one."""
    model, _ = made()
    besides, _, first = model.children()
    optimizer = torch.optim.AdamW(first.parameters())
    optimizer.add_param_group({"params": list(besides.parameters())})
    monitor = watched(model, optimizer, 5, (optimizer, first), bad={3})
    (told,) = (finding for finding in monitor.findings if finding.evidence.get("what") == "besides")
    assert (told.severity, told.evidence["parameters"]) == ("info", ["group1.0", "group1.1"])
    error = next(finding for finding in monitor.findings if finding.severity == "error")
    assert (error.step, error.name) == (3, "group1.0")


def test_the_learning_rates_of_all_groups_are_watched() -> None:
    model, _ = made()
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]
    optimizer = torch.optim.SGD(groups, lr=1e-4)
    jump = at(5, lambda _: optimizer.param_groups[1].update(lr=10.0))
    monitor = watched(model, optimizer, 12, (optimizer,), before=jump)
    found = monitor.diagnose().findings[0]
    assert (found.rule, found.step, found.name) == ("learning-rate-jump", 5, "lr[1]")
    assert "the learning rate of group 1 jumps from 0.0001 to 10" in found.text
    assert monitor.recording().scalars["lr[1]"][5:].tolist() == [10] * 7


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's and Opacus' optimizers, which never call ``Optimizer.__init__``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("outer_of", [Wrapper, lambda inner: torch.optim.SGD(inner.param_groups[0]["params"])])
def test_an_optimizer_that_leaves_the_step_to_another_is_watched(outer_of: Any) -> None:
    """Whether it only wraps the other, or is one whose own ``step`` nobody calls, as SAM."""
    model, inner = made()
    monitor = watched(model, inner, 6, (outer_of(inner), model), bad={3})
    assert (monitor.steps, monitor.findings[0].step, monitor.findings[0].name) == (6, 3, "0.weight")


def test_a_diagnosis_of_no_step_is_not_ok_and_says_why() -> None:
    diagnosis = watched(*made(), 3, made()).diagnose()
    assert not diagnosis.ok
    told = "step() of the watched AdamW has not been called; steps of AdamW, with other parameters"
    assert told in diagnosis.headline()


WASTING = ("none", "other layer", "evaluation", "not zeroed", "another", "by hand", "skipped")


@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("way", WASTING)
def test_gradients_that_no_step_uses_are_told_once(way: str, steps: int) -> None:
    set_to_none = (WASTING.index(way) + steps) % 2 == 0  # each value with every way and number of steps
    model, optimizer, monitor = made_and_watched(lr=1e-3)
    another, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=1.0)
    enough = 50 if steps else 200
    for step in range(steps + enough + 70):
        is_over = step >= steps
        model.train(way != "evaluation" or not is_over)
        if way != "not zeroed" or not is_over:
            optimizer.zero_grad(set_to_none)
        output = model[2:](torch.randn(8, 8)) if way == "other layer" and is_over else model(torch.randn(8, 4))
        scaler.scale(output.square().mean()).backward()
        if way == "skipped":
            model[2].weight.grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update(1.0)
        elif not is_over:
            optimizer.step()
        elif way == "another":
            another.step()
        elif way == "by hand":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(1e-3 * parameter)
    found = [(one.step, one.text) for one in monitor.findings if one.rule == "unused-gradients"]
    text = f"gradients were computed and zeroed {enough} times without a call of optimizer.step()"
    assert found == [(steps, text)] * (way in ("none", "other layer"))


@pytest.mark.parametrize(("samples", "is_told"), [(190, False), (210, True)])
def test_gradients_may_be_taken_of_each_sample(samples: int, is_told: bool) -> None:
    model, optimizer, monitor = made_and_watched(lr=1e-3)
    for _ in range(2):
        for _ in range(samples):
            backpropagated(optimizer, model(torch.randn(1, 4)).square().mean())
        optimizer.step()
    assert [one.step for one in monitor.findings if one.name == "optimizer"] == [0] * is_told


def test_a_scaler_of_a_class_defined_later_is_watched() -> None:
    model, optimizer, monitor = made_and_watched()

    class Late(torch.amp.GradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
            self.unscale_(optimizer)
            found = self._found_inf_per_device(optimizer)
            return None if any(float(flag) for flag in found.values()) else optimizer.step(*args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            self._per_optimizer_states.clear()

    train(model, optimizer, 6, bad={3}, scaler=Late("cpu"))
    assert (monitor.steps, monitor.nonfinite_steps) == (6, 1)


@pytest.mark.parametrize("given", ["nothing", "model", "model.module"])
@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.05}, {"clip_val": 1e-3}], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_under_fabric(scaled: bool, clip: dict[str, float], given: str) -> None:
    """Its wrappers of model and optimizer may be given; the training keeps its bits, and hooks their calls."""
    runs = []
    for is_watched in (False, True):
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        fabric = Fabric(accelerator="cpu", plugins=[precision] if scaled else [])
        net, optimizer = made()
        calls: list[object] = []
        net.register_forward_hook(lambda *_, calls=calls: calls.append(_))
        model, optimizer = fabric.setup(net, optimizer)
        arguments = {"nothing": (), "model": (model,), "model.module": (model.module,)}[given]
        handle = gradstat.auto(*arguments, optimizer, on_anomaly="record") if is_watched else None
        norms, losses = [], []
        for step in range(5):
            factor = math.nan if step == 2 and scaled else 1.0  # the scaler skips this step
            loss = mse_loss(model(torch.randn(8, 4)).float(), torch.zeros(8, 2)) * factor
            losses.append(loss.item())
            fabric.backward(loss)
            norms.append(gradstat.check(net).total_norm / (precision.scaler.get_scale() if scaled else 1.0))
            if clip:
                fabric.clip_gradients(model, optimizer, error_if_nonfinite=False, **clip)
            optimizer.step()
            optimizer.zero_grad()
        assert len(calls) == 5
        runs.append(list(net.parameters()))
    assert all(map(torch.equal, *runs))
    scalars = handle.monitor.recording().scalars
    assert scalars["norm"].tolist() == pytest.approx(norms, rel=1e-6, nan_ok=True)
    assert scalars["loss"].tolist() == pytest.approx(losses, rel=1e-6, nan_ok=True)
    assert not scaled or scalars["loss_scale"].tolist() == [1024, 1024, 1024, 512, 512]


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_of_fabric_is_skipped_or_clipped(clips: bool) -> None:
    fabric = Fabric(accelerator="cpu")
    model, optimizer = fabric.setup(*made())
    with gradstat.auto(model.module, optimizer, on_anomaly=SKIP, max_norm=None if clips else 0.05) as handle:
        for step in range(5):
            fabric.backward(mse_loss(model(torch.randn(8, 4)), torch.full((8, 2), math.nan if step == 2 else 9.0)))
            if clips:  # by default it raises
                fabric.clip_gradients(model, optimizer, max_norm=0.05, error_if_nonfinite=False)
            optimizer.step()
            if step != 2:
                assert gradstat.check(model).total_norm == pytest.approx(0.05, rel=1e-3)
            optimizer.zero_grad()
    assert {finding.step for finding in handle.monitor.findings} == {2}
    assert is_finite(model)


@pytest.mark.parametrize("how", ["a backward pass", "a program", "a user", "nobody"])
def test_a_run_that_ended_with_an_exception_says_so(how: str) -> None:
    model, optimizer = made()
    error = {"a program": ValueError("lost\nits way"), "a user": KeyboardInterrupt()}.get(how)
    handle = gradstat.auto(model, optimizer, on_anomaly="record")
    with contextlib.suppress(ValueError, RuntimeError, KeyboardInterrupt), handle:
        for step in range(5):
            loss = model(torch.randn(8, 4)).square().mean()
            if step == 3 and how == "a backward pass":
                loss.register_hook(lambda gradient: gradient.view(7))
                with contextlib.suppress(RuntimeError):
                    loss.backward()
                assert "RuntimeError: shape '[7]'" in str(handle.monitor.diagnose())
                continue
            if step == 4 and error is not None:
                raise error
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    told = handle.monitor.diagnose().ended_by  # a run that goes on has not ended
    assert told == ("ValueError: lost" if how == "a program" else "")
