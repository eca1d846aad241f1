"""`gradstat.auto`: a monitor attached to a program's existing optimizer."""

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.training import backpropagated, fill
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradstat
from gradstat.monitor import AnomalyWarning


def program(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    steps: int,
    bad: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    before: Callable[[int, Tensor], object] = lambda step, batch: None,
    behind: Callable[[int, Tensor], object] = lambda step, loss: None,
    max_norm: float | None = None,
) -> Iterator[int]:
    """A loop without gradstat. Faults are injected ``before`` the forward pass and ``behind`` the backward pass."""
    for step in range(steps):
        batch = torch.randn(8, 4)
        with torch.no_grad():
            before(step, batch)
        optimizer.zero_grad()
        loss = mse_loss(model(batch), torch.zeros(8, 2))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == bad:
            model[0].weight.grad[1, 2] = math.inf  # type: ignore[index]
        behind(step, loss)
        if max_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        yield step


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), **options)


@pytest.mark.parametrize("policy", ["record", "skip", "rollback"])
def test_an_optimizer_is_not_kept_alive(policy: str) -> None:
    def train() -> weakref.ref[torch.optim.Optimizer]:
        model, optimizer = made()
        gradstat.auto(optimizer, model, on_anomaly={"error": policy})
        list(program(optimizer, model, 2))
        return weakref.ref(optimizer)

    known = train()
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("left", ["removed", "dropped", "in a cycle"])
def test_torchs_functions_are_back_after_the_last_optimizer(left: str, steps: int) -> None:
    def functions() -> tuple[object, ...]:
        return torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_, torch.amp.GradScaler.scale

    own = functions()
    optimizers = [made() for _ in range(3)]
    for model, optimizer in optimizers:
        handle = gradstat.auto(model, optimizer, on_anomaly="record")
        list(program(optimizer, model, steps, max_norm=1.0))
    assert set(functions()).isdisjoint(own)
    if left == "removed":
        handle.remove()
    if left == "in a cycle":
        for model, optimizer in optimizers:
            optimizer.itself = (model, optimizer)  # type: ignore[attr-defined]
    del handle, model, optimizer
    optimizers[1:] = []
    gc.collect()
    assert set(functions()).isdisjoint(own)  # one is left
    optimizers.clear()
    gc.collect()
    assert functions() == own


def test_one_line_is_enough_and_the_handle_need_not_be_kept() -> None:
    model, optimizer = made()
    gradstat.auto(optimizer)
    gc.collect()
    with pytest.warns(
        AnomalyWarning, match=r"step 3.*group0\.0 \[8, 4\] has 1 Inf in 32 elements, the first at \[1, 2\]"
    ):
        list(program(optimizer, model, 4, bad=3))


@pytest.mark.parametrize("where", ["in a hook", "in a hook after a clip", "inside"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raised_does_not_hide_the_next(where: str, fused: bool) -> None:
    def fail(*_: object) -> None:
        if step == 2:
            raise KeyboardInterrupt if where == "inside" else MemoryError

    model, optimizer = made(fused=fused)
    handle = gradstat.auto(model, optimizer, on_anomaly={"nonfinite-gradient": "skip"})
    if where == "inside":  # below torch's hooks
        inner = optimizer._init_group
        optimizer._init_group = lambda *given: fail() or inner(*given)
    else:
        optimizer.register_step_pre_hook(fail)
    raised = []
    for step in range(6):
        backpropagated(optimizer, mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2)))
        if step in (1, 3):
            model[0].weight.grad[0, 0] = math.nan
        if "clip" in where:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        try:
            optimizer.step()
        except (MemoryError, KeyboardInterrupt):
            raised.append(step)
        assert all(parameter.isfinite().all() for parameter in model.parameters()), step
    handle.monitor.flush()
    assert (raised, handle.monitor.steps, handle.monitor.nonfinite_steps) == ([2], 6, 2)


def test_every_bad_step_raises_in_a_loop_that_goes_on() -> None:
    model, optimizer = made()
    handle = gradstat.auto(model, optimizer, on_anomaly="raise")
    raised = []
    for step in range(8):
        backpropagated(optimizer, mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2)))
        if step in (2, 3, 4, 6):
            model[0].weight.grad[0, 0] = math.nan  # type: ignore[index]
        try:
            optimizer.step()
        except gradstat.monitor.AnomalyError as error:
            raised.append((step, error.finding.rule))  # type: ignore[union-attr]
    assert raised == [(step, "nonfinite-gradient") for step in (2, 3, 4, 6)]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert handle.monitor.steps == 8


def test_names_are_those_of_a_model_given_before_or_after_the_optimizer_or_of_the_optimizer() -> None:
    model, optimizer = made()
    named = torch.optim.AdamW(model.named_parameters())
    for arguments, expected in (
        *(((model, optimizer), "0.weight"), ((optimizer, model), "0.weight"), ((named,), "0.weight")),
        *(((None, optimizer), "group0.0"), ((optimizer, None), "group0.0")),
    ):
        handle = gradstat.auto(*arguments)
        list(program(handle.optimizer, model, 2))
        assert handle.monitor.latest().report.names[0] == expected


def test_clips_after_the_check_and_counts_a_step_once_also_without_gradients() -> None:
    model, optimizer = made()
    with gradstat.auto(optimizer, max_norm=1e-3, on_anomaly="record") as handle:
        list(program(optimizer, model, 3))
    assert gradstat.check(model).total_norm == pytest.approx(1e-3, rel=1e-2)
    assert (handle.monitor.recording().scalars["norm"] > 1e-3).tolist() == [True] * 3
    optimizer.zero_grad()
    with gradstat.auto(optimizer, on_anomaly="record") as handle:
        for _ in range(3):
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
            optimizer.step()
    assert handle.monitor.steps == 3


def test_a_program_that_catches_an_error_at_its_clip_takes_the_step_once() -> None:
    model, optimizer = made()
    with gradstat.auto(optimizer, on_anomaly="raise") as handle:
        fill(model, math.nan)
        with pytest.raises(gradstat.monitor.AnomalyError):
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        assert all(parameter.grad.isnan().all() for parameter in model.parameters())  # type: ignore[union-attr]
        optimizer.step()
        assert handle.monitor.steps == 1


@pytest.mark.parametrize(
    "clip",
    [0.1, 10.0, lambda: gradstat.FixedClip(0.1), gradstat.AutoClip, gradstat.ZClip, gradstat.AdaGC, gradstat.AGC],
    ids=["0.1", "10.0", "FixedClip", "AutoClip", "ZClip", "AdaGC", "AGC"],
)
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, gradstat.amp.GradScaler])
def test_a_clip_decides_alike_for_scaled_gradients(clip: Any, kind: Any) -> None:
    stepped = []
    for scaler, fused in ((None, False), (kind("cpu", init_scale=128.0), True), (kind("cpu", init_scale=128.0), False)):
        model, _ = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        chosen = clip() if callable(clip) else clip
        with gradstat.auto(optimizer, max_norm=chosen, on_anomaly={"error": ("skip", "record")}) as handle:
            list(program(optimizer, model, 12, 8, scaler))
        assert handle.monitor.steps == 12
        if callable(clip):
            summary = chosen.summary()
            assert summary.steps - summary.nonfinite == 11
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
    handle = gradstat.auto(optimizer, on_anomaly="record")
    evaluations: list[list[tuple[float, float]]] = []  # of each step: loss and norm

    def closure() -> Tensor:
        loss = backpropagated(optimizer, mse_loss(model(torch.ones(8, 4)), torch.zeros(8, 2)))
        evaluations[-1].append((loss.item(), gradstat.check(model).total_norm))
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    for _ in range(3):
        evaluations.append([])
        optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    losses, norms = zip(*(firsts for firsts, *_ in evaluations), strict=True)
    assert handle.monitor.steps == 3
    scalars = handle.monitor.recording().scalars
    assert scalars["norm"].tolist() == pytest.approx(norms)
    if not clips:  # a clip runs before the loss is known
        assert scalars["loss"].tolist() == pytest.approx(losses)


@pytest.mark.parametrize("fault", ["weight", "batch"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["plain", "clipped", "gradstat's"])
def test_no_loss_scaler_hides_a_step(kind: str, fused: bool, fault: str) -> None:
    """The scaler does not even call an optimizer that is not fused in nonfinite steps."""
    model, optimizer = made(fused=fused)
    scaler = (gradstat.amp.GradScaler if kind == "gradstat's" else torch.amp.GradScaler)("cpu")

    def before(step: int, batch: Tensor) -> None:
        if step == 5:
            (model[0].weight if fault == "weight" else batch)[0, 0] = math.nan  # type: ignore[index]

    with gradstat.auto(optimizer, model, on_anomaly="record") as handle:
        list(program(optimizer, model, 12, None, scaler, before, max_norm=1.0 if kind == "clipped" else None))
    monitor = handle.monitor
    assert monitor.steps == 12
    assert monitor.scaler is scaler
    errors = [finding for finding in monitor.findings if finding.severity == "error"]
    assert errors[0].step == 5
    assert (errors[0].rule, errors[0].name) == {
        "weight": ("nonfinite-parameter", "0.weight"),
        "batch": ("nonfinite-batch", "input[0]"),
    }[fault]
    assert monitor.nonfinite_steps == (7 if fault == "weight" else 1)
    assert monitor.recording().scalars["norm"][:5].max() < 100  # without the scale of 65,536


def test_an_overflow_does_not_hide_what_comes_soon_after() -> None:
    """Parameters are measured once per incident; a loss that is not finite is another incident."""
    model, optimizer = made()

    def before(step: int, batch: Tensor) -> None:
        if step == 7:
            model[2].bias[1] = math.nan  # type: ignore[index]

    with gradstat.auto(optimizer, model, on_anomaly="record") as handle:
        list(program(optimizer, model, 9, 3, torch.amp.GradScaler("cpu"), before))
    found = [(finding.rule, finding.step) for finding in handle.monitor.findings]
    assert found[:2] == [("nonfinite-gradient", 3), ("nonfinite-parameter", 7)]


def test_an_overflow_is_no_error() -> None:
    model, optimizer = made()
    spoilt = program(
        *(optimizer, model, 3, None, torch.amp.GradScaler("cpu")),
        behind=lambda *_: model[0].weight.grad.fill_(math.inf),  # type: ignore[index]
    )
    with gradstat.auto(optimizer, model) as handle:
        list(spoilt)
    assert handle.monitor.nonfinite_steps == 3
    assert {finding.severity for finding in handle.monitor.findings} == {"info"}
    assert "also noted:" in str(handle.monitor.diagnose())


def test_gradients_are_measured_before_the_programs_own_clips_of_some_of_them() -> None:
    model, optimizer = made()
    with gradstat.auto(optimizer, model, on_anomaly="record") as handle:
        for step in range(6):
            backpropagated(optimizer, model(torch.randn(8, 4)).square().mean())
            if step == 3:
                model[0].bias.grad[2] = math.nan  # type: ignore[index]
            for layer in (model[0], model[2]) if step != 4 else ():  # type: ignore[index]
                torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
            if step != 2:  # the program itself skips this step
                optimizer.step()
    assert handle.monitor.steps == 6
    assert (handle.monitor.recording().scalars["norm"][:3] > 2e-3).all()
    found = handle.monitor.findings[0]
    assert (found.step, found.name, found.evidence["nonfinite_tensors"]) == (3, "0.bias", 1)


def unnoticed_clip(parameters: Iterable[Any]) -> None:
    """A program's own clip, which announces nothing."""
    gradients = [parameter.grad for parameter in parameters]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((1 / (norm + 1e-6)).clamp(max=1.0))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("knows_loss", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fault", ["batch", "weight", "gradient"])
def test_the_cause_of_nan_gradients_is_named_first(fault: str, clips: bool, knows_loss: bool, by_hand: bool) -> None:
    """A clip comes first only if the loss is known to be finite, and gradstat may not have measured before the clip."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if knows_loss and not by_hand else None
    if by_hand:
        monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    else:
        monitor = gradstat.auto(optimizer, model, scaler=scaler, on_anomaly="record").monitor

    def before(step: int, batch: Tensor) -> None:
        if step == 2 and fault != "gradient":
            (batch if fault == "batch" else model[0].weight)[1, 2] = math.nan  # type: ignore[index]

    def behind(step: int, loss: Tensor) -> None:
        if step == 2 and fault == "gradient":
            model[0].bias.grad[2] = math.nan  # type: ignore[index]
        if clips:
            unnoticed_clip(model.parameters())
        if by_hand:
            monitor.step(loss if knows_loss else None)

    list(program(optimizer, model, 4, None, scaler, before, behind))
    monitor.flush()
    found = [finding for finding in monitor.diagnose().findings if finding.step == 2]
    rules = [finding.rule for finding in found]
    gradient = found[rules.index("nonfinite-gradient")]
    names_clip = [i for i, cause in enumerate(gradient.causes) if cause.startswith("clipping before")]
    if fault == "weight":
        assert (rules[0], found[0].name) == ("nonfinite-parameter", "0.weight")
    elif fault == "batch":
        assert (rules[0], found[0].name) == ("nonfinite-batch", "input[0]")
    elif not clips:
        assert (gradient.name, gradient.evidence["nonfinite_tensors"]) == ("0.bias", 1)
    is_known = fault != "gradient" or not clips
    knows_loss = knows_loss or not by_hand
    place = (0 if knows_loss else 1) if by_hand else len(gradient.causes) - 1
    assert names_clip == [place] * (not is_known)
    assert ("as after clipping" in gradient.text) == (by_hand and knows_loss and not is_known)
    if not is_known and not knows_loss:
        assert "as after the backward pass of a NaN loss" in gradient.text
        assert gradient.causes[0].startswith("a loss that was NaN")


@pytest.mark.parametrize("memory", [0.0, math.nan])
def test_layers_left_uninitialized_by_to_empty_are_reported(memory: float) -> None:
    """As in PyTorch's FSDP2 example, whose blocks are never reset; new GPU memory is often zero."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in (*model[1].parameters(), *model[3].parameters()):
            parameter.fill_(memory)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with gradstat.auto(optimizer, model, on_anomaly="record") as handle:
        list(program(optimizer, model, 30))
        found = handle.monitor.diagnose().findings[0]
    expected = ("nonfinite-parameter", 0, "1.weight") if memory else ("dead-gradient", 0, "3.weight")
    assert (found.rule, found.step, found.name) == expected
    assert "memory that was never initialised" in found.causes[0]


@pytest.mark.parametrize("given", [False, True])
def test_a_disabled_scaler_hides_no_finding(given: bool) -> None:
    """Programs often make a scaler in any case, and enable it for float16 only."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with gradstat.auto(optimizer, model, scaler=scaler if given else None, on_anomaly="record") as handle:
        list(program(optimizer, model, 1, 0, scaler, max_norm=1.0))
    found = next(finding for finding in handle.monitor.findings if finding.rule == "nonfinite-gradient")
    assert (found.name, found.severity) == ("0.weight", "error")


def test_optimizers_that_share_a_scaler_are_distinguished() -> None:
    (first, one), (second, two) = made(), made()
    handles = [gradstat.auto(one, first, on_anomaly="record"), gradstat.auto(two, second, on_anomaly="record")]
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        for number, (model, optimizer) in enumerate([(first, one), (second, two)]):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * (math.nan if (number, step) == (1, 2) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()
    healthy, bad = (handle.monitor for handle in handles)
    assert healthy.steps == bad.steps == 4
    assert not healthy.findings
    assert (bad.findings[0].rule, bad.findings[0].step) == ("nonfinite-loss", 2)


def test_a_clip_of_scaled_gradients_is_reported() -> None:
    model, optimizer = made()
    clipped = program(
        *(optimizer, model, 4, None, torch.amp.GradScaler("cpu")),
        behind=lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),  # before unscale_
    )
    with (
        gradstat.auto(optimizer, model) as handle,
        pytest.warns(AnomalyWarning, match="carry the loss scale") as caught,
    ):
        list(clipped)
    assert len(caught) == 1
    assert handle.monitor.steps == 4
    assert not handle.monitor.findings
    assert caught[0].filename == __file__


@pytest.mark.parametrize("way", ["step", "closure", "clip", "value", "scaler", "unscale", "schedule"])
def test_warnings_point_at_the_users_line(way: str) -> None:
    model, optimizer = made()
    gradstat.auto(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", enabled=way in ("scaler", "unscale"))
    if way == "schedule":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps the step

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(1, 4)).square().sum() * math.nan
        scaler.scale(loss).backward()
        return loss

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
def test_a_clip_that_changes_nothing_is_told_once(module: Any, name: str, set_to_none: bool, when: str) -> None:
    (model, optimizer), (other, unwatched) = made(), made()
    handle = gradstat.auto(optimizer, model, on_anomaly="record")
    clip = getattr(module, name)
    for _ in range(4):
        for one in (optimizer, unwatched):
            one.zero_grad(set_to_none)
        if when == "early":
            clip(model.parameters(), 1.0)
        (model(torch.randn(8, 4)).sum() + other(torch.randn(8, 4)).sum()).backward()
        if when == "in time":
            clip(model.parameters(), 1.0)
        optimizer.step()
        if when == "late":
            clip(model.parameters(), 1.0)
        if when == "joint":
            clip([*model.parameters(), *other.parameters()], 1.0)
            unwatched.step()
    zeros = 3 * (when == "early" and not set_to_none)  # gradients of zeros are measured, too
    assert handle.monitor.steps == 4 + zeros
    text = "gradients were clipped between a step and the next backward pass, which changes nothing"
    assert [(one.step, one.text) for one in handle.monitor.findings] == [(0, text)] * (when in ("late", "early"))


def broken(*_: object, **__: object) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("way", ["is_still_scaled", "torch_calls.has_losses", "torch_calls.losses_scaled_by"])
def test_internal_errors_are_reported_once_and_do_not_end_training(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for watched in (False, True):
        torch.manual_seed(1)
        model, optimizer = made()
        training = program(optimizer, model, 12, None, torch.amp.GradScaler("cpu"), max_norm=1.0)
        if not watched:
            list(training)
        else:
            handle = gradstat.auto(optimizer, model)
            monkeypatch.setattr(f"gradstat.monitor.listener.{way}", broken)
            with pytest.warns(RuntimeWarning) as caught:
                list(training)
            (message,) = (str(one.message) for one in caught if "gradstat" in str(one.message))
            assert "calls of clips and loss scalers could not be tracked; training goes on:\nTraceback" in message
            assert [finding.rule for finding in handle.monitor.findings][:1] == ["not-watched"]
        trained.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("way", ["one", "micro-batches", "scaled", "GAN", "other", "elements", "given", "edge", "two"])
def test_the_loss_is_the_root_of_the_backward_pass(way: str, set_to_none: bool) -> None:
    (model, optimizer), (other, _) = made(), made()
    handle = gradstat.auto(model, optimizer, on_anomaly="record")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=way == "scaled")
    expected = []
    for _ in range(4):
        losses = [model(torch.randn(8, 4)).square().mean() for _ in range(2)]
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
            scaler.scale(losses[0]).backward()
            if way == "other":
                other(torch.randn(8, 4)).square().mean().backward()
            if way in ("micro-batches", "scaled"):
                scaler.scale(losses[1]).backward()
        scaler.step(optimizer)
        scaler.update()
        used = 2 if way in ("micro-batches", "scaled", "two") else 1
        expected.append(sum(loss.item() for loss in losses[:used]))
    seen = handle.monitor.recording().scalars.get("loss")
    assert (seen is None) == (way in no_losses)
    assert seen is None or seen.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_closure_need_not_return_a_loss() -> None:
    model, optimizer = made()
    with gradstat.auto(optimizer, model) as handle:
        optimizer.step(lambda: ("not", "a loss"))  # type: ignore[arg-type,return-value]
    assert handle.monitor.steps == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, o: gradstat.auto(o, maxnorm=1.0), r"auto\(\) has no argument 'maxnorm'; did you mean 'max_norm'\?"),
        (lambda m, o: gradstat.auto(o, max_norm="1"), "max_norm: expected a number"),
        (lambda m, o: gradstat.auto(o, m, scaler=m), r"scaler: expected a torch\.amp\.GradScaler or None, got .*Seq"),
        (lambda m, o: gradstat.auto(m), r"expected a torch\.optim\.Optimizer, got .*; for a wrapped optimizer pass"),
        (lambda m, o: gradstat.auto(o, o), r"one torch\.nn\.Module, got AdamW"),
    ],
)
def test_wrong_types_are_refused(call: Callable[[nn.Module, torch.optim.Optimizer], object], message: str) -> None:
    model, optimizer = made()
    with pytest.raises(TypeError, match=message):
        call(model, optimizer)
    assert "_gradstat_auto" not in vars(optimizer)


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

    def before(step: int, batch: Tensor) -> None:
        if step == 3:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": body.parameters(), "lr": 1e-4})

    with gradstat.auto(optimizer, model if given else None, on_anomaly="record") as handle:
        list(program(optimizer, model, 8, bad=6, before=before))
    found = next(finding for finding in handle.monitor.findings if finding.severity == "error")
    assert (found.rule, found.step) == ("nonfinite-gradient", 6)
    assert found.name == ("0.weight" if given else "group1.0")
    assert {finding.rule for finding in handle.monitor.findings if finding.step < 6} == set()


def test_a_parameter_replaced_in_the_optimizer_is_followed() -> None:
    """As in the densification of Gaussian splats: a longer tensor takes the place of another, with its state."""
    torch.manual_seed(0)
    points, colours = nn.Parameter(torch.randn(16, 3)), nn.Parameter(torch.rand(16, 3))
    optimizer = torch.optim.Adam([{"params": [points], "name": "points"}, {"params": [colours], "name": "colours"}])
    handle = gradstat.auto(optimizer, on_anomaly="record")
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
        optimizer.zero_grad()
        points, colours = (group["params"][0] for group in optimizer.param_groups)
        (points.square().mean() + (colours - 0.5).square().mean()).backward()
        if step == 10:
            colours.grad[20, 1] = math.inf  # type: ignore[index]
        optimizer.step()
    monitor = handle.monitor
    monitor.flush()
    assert monitor.steps == 12
    (found,) = (finding for finding in monitor.findings if finding.severity != "info")
    assert (found.rule, found.step, found.name) == ("nonfinite-gradient", 10, "group1.0")
    assert "the first at [20, 1]" in found.text
    assert [stats.numel for stats in monitor.latest().report] == [72, 72]


def test_what_the_optimizer_trains_besides_the_model_is_watched_too() -> None:
    """Two critics in one optimizer, of which the monitor is given one."""
    model, _ = made()
    besides, _, first = model.children()
    optimizer = torch.optim.AdamW(first.parameters())
    optimizer.add_param_group({"params": list(besides.parameters())})
    with gradstat.auto(optimizer, first, on_anomaly="record") as handle:
        list(program(optimizer, model, 5, bad=3))
    infos = [finding for finding in handle.monitor.findings if finding.severity == "info"]
    (told,) = (finding for finding in infos if finding.evidence.get("what") == "besides")
    assert told.evidence["parameters"] == ["group1.0", "group1.1"]
    error = next(finding for finding in handle.monitor.findings if finding.severity == "error")
    assert (error.step, error.name) == (3, "group1.0")


def test_the_learning_rates_of_all_groups_are_watched() -> None:
    model, _ = made()
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]  # type: ignore[index]
    optimizer = torch.optim.SGD(groups, lr=1e-4)

    def before(step: int, batch: Tensor) -> None:
        if step == 5:
            optimizer.param_groups[1]["lr"] *= 100_000

    with gradstat.auto(optimizer, on_anomaly="record") as handle:
        list(program(optimizer, model, 12, before=before))
    found = handle.monitor.diagnose().findings[0]
    assert (found.rule, found.step, found.name) == ("learning-rate-jump", 5, "lr[1]")
    assert "the learning rate of group 1 jumps from 0.0001 to 10" in found.text
    assert handle.monitor.recording().scalars["lr[1]"][5:].tolist() == [10] * 7


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
    with gradstat.auto(outer_of(inner), model, on_anomaly="record") as handle:
        list(program(inner, model, 6, bad=3))
    found = handle.monitor.findings[0]
    assert (handle.monitor.steps, found.step, found.name) == (6, 3, "0.weight")


def test_a_diagnosis_of_no_step_is_not_ok_and_says_why() -> None:
    model, optimizer = made()
    other_model, other = made()
    with gradstat.auto(optimizer, model) as handle:
        list(program(other, other_model, 3))
        diagnosis = handle.monitor.diagnose()
    assert not diagnosis.ok
    told = diagnosis.headline()
    assert "step() of the watched AdamW has not been called; steps of AdamW, with other parameters" in told


WASTING = ("none", "other layer", "evaluation", "not zeroed", "another", "by hand", "skipped")


@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("way", WASTING)
def test_gradients_that_no_step_uses_are_told_once(way: str, steps: int) -> None:
    set_to_none = (WASTING.index(way) + steps) % 2 == 0  # each value with every way and number of steps
    model, optimizer = made(lr=1e-3)
    another, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=1.0)
    handle = gradstat.auto(model, optimizer, on_anomaly="record")
    enough = 50 if steps else 200
    for step in range(steps + enough + 70):
        model.train(way != "evaluation" or step < steps)
        if way != "not zeroed" or step < steps:
            optimizer.zero_grad(set_to_none)
        loss = model[2:](torch.randn(8, 8)) if way == "other layer" and step >= steps else model(torch.randn(8, 4))
        scaler.scale(loss.square().mean()).backward()
        if way == "skipped":
            model[2].weight.grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update(1.0)
        elif step < steps:
            optimizer.step()
        elif way == "another":
            another.step()
        elif way == "by hand":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(1e-3 * parameter)
    found = [(one.step, one.text) for one in handle.monitor.findings if one.name == "optimizer"]
    text = f"gradients were computed and zeroed {enough} times, and step() of the optimizer was not called"
    assert found == [(steps, text)] * (way in ("none", "other layer"))


@pytest.mark.parametrize(("samples", "is_told"), [(190, False), (210, True)])
def test_gradients_may_be_taken_of_each_sample(samples: int, is_told: bool) -> None:
    model, optimizer = made(lr=1e-3)
    handle = gradstat.auto(model, optimizer, on_anomaly="record")
    for _ in range(2):
        for _ in range(samples):
            optimizer.zero_grad()
            model(torch.randn(1, 4)).square().mean().backward()
        optimizer.step()
    assert [one.step for one in handle.monitor.findings if one.name == "optimizer"] == [0] * is_told


def test_a_scaler_of_a_class_defined_later_is_watched() -> None:
    model, optimizer = made()
    handle = gradstat.auto(optimizer, model, on_anomaly="record")

    class Late(torch.amp.GradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
            self.unscale_(optimizer)
            found = self._found_inf_per_device(optimizer)
            return None if any(float(flag) for flag in found.values()) else optimizer.step(*args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            self._per_optimizer_states.clear()

    list(program(optimizer, model, 6, 3, Late("cpu")))
    assert handle.monitor.steps == 6
    assert handle.monitor.nonfinite_steps == 1


@pytest.mark.parametrize("given", ["nothing", "model", "model.module"])
@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.05}, {"clip_val": 1e-3}], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_under_fabric(scaled: bool, clip: dict[str, float], given: str) -> None:
    """Its wrappers of model and optimizer may be given; the training keeps its bits, and hooks their calls."""
    runs = []
    for watched in (False, True):
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        fabric = Fabric(accelerator="cpu", plugins=[precision] if scaled else [])
        torch.manual_seed(0)
        net, optimizer = made()
        calls: list[object] = []
        net.register_forward_hook(lambda *_, calls=calls: calls.append(_))
        model, optimizer = fabric.setup(net, optimizer)
        arguments = {"nothing": (), "model": (model,), "model.module": (model.module,)}[given]
        handle = gradstat.auto(*arguments, optimizer, on_anomaly="record") if watched else None
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
        runs.append([parameter.detach() for parameter in net.parameters()])
    assert all(map(torch.equal, *runs))
    scalars = handle.monitor.recording().scalars
    assert scalars["norm"].tolist() == pytest.approx(norms, rel=1e-6, nan_ok=True)
    assert scalars["loss"].tolist() == pytest.approx(losses, rel=1e-6, nan_ok=True)
    if scaled:
        assert scalars["loss_scale"].tolist() == [1024, 1024, 1024, 512, 512]
    handle.remove()


def test_a_step_of_fabric_is_skipped_or_clipped() -> None:
    for clip in (False, True):
        fabric = Fabric(accelerator="cpu")
        model, optimizer = fabric.setup(*made())
        policies, max_norm = {"error": ("skip", "record")}, None if clip else 0.05
        with gradstat.auto(model.module, optimizer, on_anomaly=policies, max_norm=max_norm) as handle:
            for step in range(5):
                fabric.backward(mse_loss(model(torch.randn(8, 4)), torch.full((8, 2), math.nan if step == 2 else 9.0)))
                if clip:  # by default it raises
                    fabric.clip_gradients(model, optimizer, max_norm=0.05, error_if_nonfinite=False)
                optimizer.step()
                if step != 2:
                    assert gradstat.check(model).total_norm == pytest.approx(0.05, rel=1e-3)
                optimizer.zero_grad()
        assert {finding.step for finding in handle.monitor.findings} == {2}
        assert all(parameter.isfinite().all() for parameter in model.parameters())
