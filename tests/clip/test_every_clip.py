"""Behaviour common to all clips: which parameters they take, what they refuse, what they leave unchanged."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.devices import parameter_with
from torch import Tensor, nn

import gradstat

# Norms of 13 are clipped to 1.3; AGC, whose limit depends on the weights, clips all gradients.
CLIPS: dict[str, Callable[..., Tensor | None]] = {
    "clip_grad_norm_": partial(gradstat.clip_grad_norm_, max_norm=1.3),
    "clip_grad_norm_ that raises": partial(gradstat.clip_grad_norm_, max_norm=1.3, error_if_nonfinite=True),
    "clip_grads_with_norm_": partial(gradstat.clip_grads_with_norm_, max_norm=1.3, total_norm=13.0),
    "FixedClip": lambda parameters, **options: gradstat.FixedClip(1.3).clip_(parameters, **options),
    "AutoClip": lambda parameters, **options: gradstat.AutoClip().clip_(parameters, **options),
    "ZClip": lambda parameters, **options: gradstat.ZClip(max_norm=1.3).clip_(parameters, **options),
    "AdaGC": lambda parameters, **options: gradstat.AdaGC(absolute=1.3).clip_(parameters, **options),
    "AGC": lambda parameters, **options: gradstat.AGC(0.1, eps=13.0).clip_(parameters, **options),
}
MEASURING = [name for name in CLIPS if name != "clip_grads_with_norm_"]
WRITING = {
    **CLIPS,
    "guarded_step": lambda parameters, **options: (
        gradstat.guarded_step(torch.optim.SGD(parameters, lr=0.0), 1.3, **options).total_norm
    ),
}
BY_NORM = [name for name in WRITING if name not in ("AutoClip", "ZClip", "AGC")]
every_clip = pytest.mark.parametrize("clip", CLIPS)


def uncoalesced(device: str) -> Tensor:
    """A sparse tensor of shape (6, 2) and norm 13."""
    indices, values = torch.tensor([[1, 1, 4]]), torch.tensor([[1.0, 2.0], [2.0, 2.0], [0.0, 12.0]])
    return torch.sparse_coo_tensor(indices, values, (6, 2), device=device, check_invariants=True)


@every_clip
def test_what_is_no_parameter_is_refused(clip: str) -> None:
    model = nn.Linear(2, 2)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (model, TypeError, r"expected parameters, got Linear; pass module\.parameters\(\)"),
        (None, TypeError, "expected parameters, got NoneType"),
        (model.named_parameters(), AttributeError, r"item 0.*tuple"),
        ([model.weight, None], AttributeError, r"item 1.*NoneType"),
    ]
    for given, error, message in wrong:
        with pytest.raises(error, match=message):
            CLIPS[clip](given)
    with_gradient = [parameter_with(torch.ones(3, 4))]
    with pytest.raises(ValueError, match="unknown backend 'fast'; known: native, triton, reference"):
        CLIPS[clip](with_gradient, backend="fast")


@every_clip
def test_any_iterable_is_consumed_once_and_what_has_no_gradient_is_passed_over(clip: str) -> None:
    gradient = torch.full((3, 4), 13 / math.sqrt(12))
    ways: list[Callable[[nn.Parameter], Iterable[Tensor] | Tensor]] = [
        lambda parameter: iter([parameter_with(None), parameter, parameter_with(None)]),
        lambda parameter: (parameter,),
        lambda parameter: parameter,
    ]
    clipped = []
    for way in ways:
        parameter = parameter_with(gradient.clone())
        CLIPS[clip](way(parameter))
        clipped.append(parameter.grad)
        assert clip == "AutoClip" or parameter.grad.norm() < 12.5
    assert all(torch.equal(each, clipped[0]) for each in clipped)


@every_clip
def test_without_gradients_the_norm_is_zero_and_an_empty_generator_warns(clip: str) -> None:
    """As in torch, measuring functions warn of an empty generator (only), with the caller's location."""
    for parameters in ([], (), [nn.Parameter(torch.zeros(3))]):
        norm = CLIPS[clip](parameters)
        assert clip not in MEASURING or (norm.item(), norm.dtype, norm.device.type) == (0.0, torch.float32, "cpu")  # type: ignore[union-attr]
    expected = "^`parameters` is an empty generator, no gradient clipping will occur.$"
    with pytest.warns(UserWarning, match=expected) as caught:
        CLIPS[clip](parameter for parameter in ())
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("clip", WRITING)
def test_gradients_are_clipped_where_they_lie(clip: str, where: tuple[str, str]) -> None:
    """Also with gaps between elements: object and strides stay, and the version shows the in-place change."""
    backend, device = where
    memory = torch.full((3, 8), 13 / math.sqrt(12), device=device)
    before = memory.clone()
    parameter, plain = (parameter_with(g) for g in (memory[:, ::2], before[:, ::2].clone()))
    for each in (parameter, plain):
        gradient = each.grad
        version, stride = gradient._version, gradient.stride()
        norm = WRITING[clip]([each], backend=backend)
        if clip in (*MEASURING, "guarded_step"):
            assert norm.item() == pytest.approx(13.0)  # type: ignore[union-attr]
            assert (norm.dtype, norm.shape, norm.device) == (gradient.dtype, (), gradient.device)  # type: ignore[union-attr]
            assert not norm.requires_grad  # type: ignore[union-attr]
        assert each.grad is gradient
        assert gradient.stride() == stride
        assert clip == "AutoClip" or gradient._version > version
    torch.testing.assert_close(parameter.grad, plain.grad)
    assert torch.equal(memory[:, 1::2], before[:, 1::2])


@pytest.mark.parametrize("clip", BY_NORM)
def test_sparse_gradients_are_clipped(clip: str, where: tuple[str, str]) -> None:
    backend, device = where
    sparse = uncoalesced(device)
    parameters = [parameter_with(sparse.clone()), parameter_with(torch.zeros(3, device=device))]
    WRITING[clip](parameters, backend=backend)
    torch.testing.assert_close(parameters[0].grad.to_dense(), sparse.to_dense() / 10)  # type: ignore[union-attr]


@pytest.mark.parametrize("clip", WRITING)
def test_what_cannot_be_written_is_refused_by_name_before_anything_changes(clip: str, where: tuple[str, str]) -> None:
    backend, device = where
    spoiled = [(torch.ones(3, 1, device=device).expand(3, 4), RuntimeError, "expanded.*clone")]
    if clip == "AGC":
        spoiled.append((torch.ones(3, 4, device=device).to_sparse(), NotImplementedError, "is sparse"))
    for gradient, error, message in spoiled:
        first = torch.ones(3, 4, device=device)
        parameters = [parameter_with(g) for g in (first, None, gradient)]
        with pytest.raises(error, match=rf"(parameters\[2\]|group0\.2).*{message}"):
            WRITING[clip](parameters, backend=backend)
        assert torch.equal(first, torch.ones_like(first))


def steps_a_model(call: Callable[[torch.optim.Optimizer, float], object]) -> Callable[[float], object]:
    """A function that calls with an optimizer and a limit, and checks that an error comes before anything changes."""

    def limited(limit: float) -> None:
        model = nn.Linear(2, 2)
        model(torch.ones(2)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [(parameter.detach().clone(), parameter.grad.clone()) for parameter in model.parameters()]  # type: ignore[union-attr]
        try:
            call(optimizer, limit)
        finally:
            for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter, value)
                assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]

    return limited


LIMITED: dict[str, Callable[[Any], object]] = {
    "FixedClip": gradstat.FixedClip,
    "ZClip": lambda limit: gradstat.ZClip(max_norm=limit),
    "SpikeGuard": lambda limit: gradstat.SpikeGuard(max_norm=limit),
    "SpikeGuard.sigma": lambda limit: gradstat.SpikeGuard.sigma(max_norm=limit),
    "guarded_step": steps_a_model(gradstat.guarded_step),
    "guarded_step, a tensor": steps_a_model(lambda o, limit: gradstat.guarded_step(o, torch.tensor(limit))),
    "guarded_step, of numpy": steps_a_model(lambda o, limit: gradstat.guarded_step(o, np.float32(limit))),  # type: ignore[arg-type]
    "unscale_and_clip_": steps_a_model(gradstat.amp.GradScaler("cpu").unscale_and_clip_),
    "unscale_and_clip_, disabled": steps_a_model(gradstat.amp.GradScaler("cpu", enabled=False).unscale_and_clip_),
    "Monitor": lambda limit: gradstat.Monitor(nn.Linear(2, 2), max_norm=limit),
    "auto": steps_a_model(lambda optimizer, limit: gradstat.auto(optimizer, max_norm=limit)),
}


@pytest.mark.parametrize("limit", [0.0, -1.0, -math.inf, math.nan])
@pytest.mark.parametrize("what", LIMITED)
def test_a_limit_that_would_stop_or_reverse_the_training_is_refused(what: str, limit: float) -> None:
    """0 or -1 for "no limit" is a common habit. `clip_grad_norm_` takes 0, as torch's."""
    with pytest.raises(ValueError, match=rf"is {limit}; expected a number above 0, or (None|inf) for no limit"):
        LIMITED[what](limit)


def test_no_limit_is_none_or_infinity() -> None:
    for limit in (None, math.inf):
        parameter = parameter_with(torch.full((4,), 1e30))
        scaler = gradstat.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        assert scaler.unscale_and_clip_(torch.optim.SGD([parameter]), limit) == 1e30
        assert torch.equal(parameter.grad, torch.full((4,), 0.5e30))  # type: ignore[arg-type]


def test_a_share_for_a_percentile_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"percentile=0\.95\) .*percentiles go from 0 to 100; did you mean 95\?"):
        gradstat.AutoClip(0.95)
    for percentile in (0, 1, 1.0, 10, 99.5, 100):
        gradstat.AutoClip(percentile)
