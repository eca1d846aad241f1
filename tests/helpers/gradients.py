"""Parameters with given gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def parameter_with(gradient: Tensor | None) -> nn.Parameter:
    """A parameter of zeros with this gradient."""
    like = torch.zeros(3, 4) if gradient is None else gradient
    zeros = torch.zeros_like(like.to_dense() if like.is_sparse else like)
    parameter = nn.Parameter(zeros, requires_grad=like.is_floating_point() or like.is_complex())
    parameter.grad = gradient
    return parameter


def parameters_with(gradients: Iterable[Tensor | None]) -> list[nn.Parameter]:
    return [parameter_with(gradient) for gradient in gradients]
