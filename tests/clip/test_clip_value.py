"""clip_grad_value_ against torch's, and where it deliberately differs."""

import math
from typing import Any

import pytest
import torch
from helpers.gradients import parameters_with
from test_clip import clones
from torch import nn
from torch.nn.utils import clip_grad_value_ as torch_clip_value

import gradstat

SPECIAL = [math.nan, -math.inf, math.inf, 0.0, -0.0, 0.5, -0.5, 1e-40, -7.0]


@pytest.mark.parametrize("limit", [3.0, "0.5", True], ids=str)
def test_gradients_are_clamped_where_they_lie_by_whatever_is_a_number(limit: Any, device: str) -> None:
    """helpers.fuzz_operations tests elements of every type and layout."""
    gradients = [torch.tensor(SPECIAL, device=device), None, torch.randn(5, 4, device=device).t()]
    theirs, ours = parameters_with(clones(gradients)), parameters_with(clones(gradients))
    identities = [id(p.grad) for p in ours]
    torch_clip_value(theirs, limit)
    assert gradstat.clip_grad_value_(ours, limit) is None  # type: ignore[func-returns-value]
    assert [id(p.grad) for p in ours] == identities
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs], rtol=0, atol=0, equal_nan=True)


def test_gradients_with_a_graph_are_clamped_and_their_version_moves() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    (gradient,) = torch.autograd.grad((parameter**3).sum(), [parameter], create_graph=True)
    parameter.grad = gradient
    version = gradient._version
    gradstat.clip_grad_value_([parameter], 5.0)
    assert gradient.tolist() == [3.0, 5.0]
    assert gradient._version > version
    parameter.grad = None  # breaks the cycle of parameter and graph


REFUSED: dict[str, tuple[torch.Tensor, float, str]] = {
    "integers": (torch.ones(2, dtype=torch.int64), 0.5, r"dtype torch\.int64, whose elements cannot be clamped"),
    "float8": (torch.ones(2, dtype=torch.float8_e5m2), 0.5, r"dtype torch\.float8_e5m2, which torch does not clamp"),
    "complex": (torch.ones(3, dtype=torch.complex64), 0.1, r"complex.*clip_grad_norm_"),
    "too large": (
        torch.ones(2, dtype=torch.float16),
        1e6,
        r"float16, whose largest number is 65504, but clip_value is",
    ),
    "expanded": (torch.ones(1).expand(3), 0.5, r"is expanded: several of its elements share memory"),
    "lazy zeros": (torch._efficientzerotensor((3,)), 0.5, r"one of torch's lazy zero tensors, which have no memory"),
}


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_cannot_clamp_is_refused_by_name_before_anything_changes(case: str, foreach: bool | None) -> None:
    gradient, limit, words = REFUSED[case]
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros_like(gradient), requires_grad=False)]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 9e9), gradient
    with pytest.raises((RuntimeError, NotImplementedError)) as theirs:
        torch_clip_value(parameters[1:], limit, foreach)
    with pytest.raises((RuntimeError, NotImplementedError), match=rf"the gradient of parameters\[1\].*{words}") as ours:
        gradstat.clip_grad_value_(parameters, limit, foreach)
    assert case == "complex" or ours.type is theirs.type
    assert (parameters[0].grad == 9e9).all()


@pytest.mark.parametrize("limit", [-1.0, -1e-30, math.nan, -math.inf], ids=str)
def test_a_negative_or_nan_limit_is_refused_before_anything_changes(limit: float) -> None:
    parameters = parameters_with([torch.ones(3)])
    with pytest.raises(ValueError, match=r"clip_value is .*; pass a number of at least 0"):
        gradstat.clip_grad_value_(parameters, limit)
    assert torch.equal(parameters[0].grad, torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip_value"):
        gradstat.clip_grad_value_([], limit)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_elements_of_a_sparse_gradient_are_clamped_and_not_its_terms(foreach: bool | None, device: str) -> None:
    values = torch.tensor([0.75, 0.75, math.nan, -9.0, 0.25])
    sparse = torch.sparse_coo_tensor([[1, 1, 2, 3, 5]], values, (6,), device=device, check_invariants=True)
    expected = sparse.to_dense().clamp(-1.0, 1.0)
    for gradient in (sparse, sparse.coalesce()):
        parameters = parameters_with([gradient.clone()])
        identity = id(parameters[0].grad)
        gradstat.clip_grad_value_(parameters, 1.0, foreach)
        assert id(parameters[0].grad) == identity
        torch.testing.assert_close(parameters[0].grad.to_dense(), expected, equal_nan=True)  # type: ignore[union-attr]
