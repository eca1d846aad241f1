"""get_total_norm and clip_grads_with_norm_, beyond their use as halves of clip_grad_norm_ (test_clip.py)."""

import math
from typing import Any

import pytest
import torch
from helpers.gradients import parameters_with
from test_clip import assert_same_gradients, clones, tolerance
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_ as torch_clip_with_norm
from torch.nn.utils import get_total_norm as torch_total_norm

import gradstat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("total", [3.0, 0.2, 0.0, -3.0, math.inf, math.nan], ids=str)
def test_every_dtype_and_norm_given(dtype: torch.dtype, total: float, where: tuple[str, str]) -> None:
    backend, device = where
    gradients: list[Tensor] = [torch.randn(n, device=device).to(dtype) for n in (5, 300)]
    for norm_dtype in (torch.float32, torch.float64):
        norm = torch.tensor(total, dtype=norm_dtype, device=device)
        theirs, ours = parameters_with(clones(gradients)), parameters_with(clones(gradients))
        identities = [id(p.grad) for p in ours]
        torch_clip_with_norm(theirs, 1.0, norm)
        assert gradstat.clip_grads_with_norm_(ours, 1.0, norm, backend=backend) is None  # type: ignore[func-returns-value]
        assert [id(p.grad) for p in ours] == identities
        # torch computes the multiplier in the norm's dtype, and multiplies in the gradient's.
        assert_same_gradients(ours, theirs, tolerance(norm_dtype))


def test_parameters_themselves_have_a_norm_without_a_graph() -> None:
    model = nn.Linear(4, 2)
    norm = gradstat.get_total_norm(model.parameters())
    torch.testing.assert_close(norm, torch_total_norm(model.parameters()).detach())
    assert norm.grad_fn is None
    assert gradstat.get_total_norm(model.weight, foreach=True) <= norm
    for nothing in ([], (x for x in ())):
        assert gradstat.get_total_norm(nothing).item() == 0.0


def test_the_norm_may_be_a_number(where: tuple[str, str]) -> None:
    backend, device = where
    for total in (5.0, 5, torch.tensor(5), torch.tensor(5.0, requires_grad=True)):
        (parameter,) = parameters_with([torch.tensor([3.0, 4.0], device=device)])
        gradstat.clip_grads_with_norm_([parameter], "1.0", total, foreach=True, backend=backend)  # type: ignore[arg-type]
        torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8], device=device))


@pytest.mark.cuda
def test_the_norm_may_be_on_another_device() -> None:
    for gradient_device, norm_device in (("cpu", "cuda"), ("cuda", "cpu")):
        (parameter,) = parameters_with([torch.tensor([3.0, 4.0], device=gradient_device)])
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # delays the norm
        gradstat.clip_grads_with_norm_([parameter], 1.0, torch.tensor(5.0, device=norm_device) * 1.0)
        torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8], device=gradient_device))


@pytest.mark.cuda
def test_tensors_on_several_devices_have_one_norm() -> None:
    late = torch.zeros(1 << 24, device="cuda")
    torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # delays the GPU's table
    late.fill_(1.0)
    assert gradstat.get_total_norm([torch.full((1,), 3 * 2.0**12), late]).item() == pytest.approx(
        2.0**12 * math.sqrt(10)
    )
    assert gradstat.stats([torch.zeros(1), late])[1, gradstat.FIELDS.index("sum")] == 1 << 24


def test_lazily_conjugated_gradients_are_scaled(where: tuple[str, str]) -> None:
    """backward() leaves such gradients if the parameter was used conjugated."""
    backend, device = where
    parameter = nn.Parameter(torch.tensor([1 + 1j, 2j], device=device))
    (parameter.conj() * torch.tensor([3 + 4j, 12j], device=device)).sum().real.backward()
    assert parameter.grad is not None
    assert parameter.grad.is_conj()
    expected = parameter.grad.resolve_conj() / 10
    assert gradstat.clip_grad_norm_([parameter], 1.3, backend=backend).item() == pytest.approx(13.0)
    torch.testing.assert_close(parameter.grad.resolve_conj(), expected)
    gradstat.clip_grads_with_norm_([parameter], 1.0, 2.0, backend=backend)
    torch.testing.assert_close(parameter.grad.resolve_conj(), expected / 2)


def test_what_is_not_a_list_of_tensors_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"expected tensors, got Linear; pass \[p\.grad for p in module\.parameters"):
        gradstat.get_total_norm(model)  # type: ignore[arg-type]
    for order in (2.0, 3.0, math.inf):
        for foreach in (None, True):
            with pytest.raises(TypeError, match=r"'tensors\[1\]', got None"):
                gradstat.get_total_norm([torch.ones(1), None], order, foreach=foreach)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"tensors\[0\].*int64"):
        gradstat.get_total_norm([torch.ones(1, dtype=torch.int64)])
    for backend in ("native", "fast"):
        with pytest.raises(ValueError, match="unknown backend" if backend == "fast" else "meta"):
            gradstat.get_total_norm(
                [torch.ones(1, device="meta" if backend == "native" else "cpu")], 3, backend=backend
            )


@pytest.mark.parametrize(
    ("max_norm", "total_norm", "message"),
    [
        (math.nan, 1.0, "max_norm is NaN"),
        (1.0, torch.ones(1), r"0-d tensor for total_norm, got shape \(1,\)"),
        (1.0, torch.tensor(1j), "complex64"),
        (1.0, "large", "could not convert"),
    ],
    ids=["nan", "one dimension", "complex", "text"],
)
def test_bad_norms_are_refused_before_anything_changes(max_norm: float, total_norm: Any, message: str) -> None:
    parameters = parameters_with([torch.ones(3)])
    with pytest.raises(ValueError, match=message):
        gradstat.clip_grads_with_norm_(parameters, max_norm, total_norm)
    assert torch.equal(parameters[0].grad, torch.ones(3))  # type: ignore[arg-type]
