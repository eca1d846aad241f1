"""Parameters with given gradients, and how kernels unscale these."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradstat._core import backends
from gradstat._core.backends import Kernels


def parameter_with(gradient: Tensor | None) -> nn.Parameter:
    """A parameter of zeros with this gradient."""
    like = torch.zeros(3, 4) if gradient is None else gradient
    zeros = torch.zeros_like(like.to_dense() if like.is_sparse else like)
    parameter = nn.Parameter(zeros, requires_grad=like.is_floating_point() or like.is_complex())
    parameter.grad = gradient
    return parameter


def parameters_with(gradients: Iterable[Tensor | None]) -> list[nn.Parameter]:
    return [parameter_with(gradient) for gradient in gradients]


def unscale_(kernels: Kernels, tensors: list[Tensor], factor: Tensor) -> Tensor:
    """The operator: multiplies by the 0-d float32 ``factor``, in one pass where there is one; returns the table."""
    if isinstance(kernels, backends.NativeKernels):
        return torch.ops.gradstat.unscale_.default(tensors, factor)[0]
    if hasattr(kernels, "unscale_"):  # emulated
        return kernels.unscale_(tensors, factor)
    kernels.scale_(tensors, factor.reshape(()).double())
    return kernels.check(tensors)[0]
