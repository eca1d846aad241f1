"""Devices to test on, their backends, and parameters with gradients. Imported modules are never called conftest.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from gradstat._core.backends import Kernels

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads this when the kernels are first imported, so it is set before any test module is imported.
    os.environ["TRITON_INTERPRET"] = "1"
# With shared cores, threads would wait for each other longer than they work. Set here and for child processes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

DEVICES = ["cpu", *(["cuda"] if HAS_CUDA else [])]
# Triton's interpreter: about 30 ms per tensor, and bfloat16 is truncated.
INTERPRETED = ("triton", "cpu")
# Every way to compute the statistics on this machine, as (backend, device). None of them may be missing.
BACKENDS = [("reference", "cpu"), ("native", "cpu"), ("emulated", "cpu")] + (
    [("reference", "cuda"), ("native", "cuda"), ("triton", "cuda")] if HAS_CUDA else [INTERPRETED]
)


# Every way to decide about clips and guards, also the native one through torch's dispatcher only. Triton decides as the
# reference, in plain torch.
DECIDING = [*(where for where in BACKENDS if where[0] != "triton"), ("dispatched", "cpu")]


def thinned(items: Sequence[Any], where: tuple[str, str], most: int) -> Any:
    """All items, or about ``most`` of them for Triton's interpreter."""
    return items[:: max(len(items) // most, 1)] if where == INTERPRETED else items


def unscale_(kernels: Kernels, tensors: list[Tensor], factor: Tensor) -> Tensor:
    """Multiplies by a 0-d float32 and returns the table, in one pass where the backend has one."""
    from gradstat._core.backends import NativeKernels

    fused = torch.ops.gradstat.unscale_ if isinstance(kernels, NativeKernels) else getattr(kernels, "unscale_", None)
    if fused is not None:
        return fused(tensors, factor)[0]
    kernels.scale_(tensors, factor.double())
    return kernels.check(tensors)[0]


def skip_unless_fused(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: str) -> None:
    """Skips optimizers that torch itself refuses to fuse on a device, as torch 2.11 does Adagrad on a GPU."""
    parameter = nn.Parameter(torch.zeros(2, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        make([parameter]).step()
    except RuntimeError as error:
        if "`fused=True` requires all the params" not in str(error):
            raise
        pytest.skip(f"torch: {error}")


def parameter_with(gradient: Tensor | None) -> nn.Parameter:
    """A parameter of zeros with this gradient."""
    like = torch.zeros(3, 4) if gradient is None else gradient
    zeros = torch.zeros_like(like.to_dense() if like.is_sparse else like)
    parameter = nn.Parameter(zeros, requires_grad=like.is_floating_point() or like.is_complex())
    parameter.grad = gradient
    return parameter


def parameters_with(gradients: Iterable[Tensor | None]) -> list[nn.Parameter]:
    return [parameter_with(gradient) for gradient in gradients]
