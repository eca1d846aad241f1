"""The arguments of torch's clipping functions, taken as torch takes them."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from gradstat._core.parameters import Gradients, gradients_of
from gradstat._core.tensors import NameOf


def listed(
    tensors: Tensor | Iterable[Tensor], what: str = "parameters", remedy: str = "module.parameters()"
) -> list[Tensor]:
    """One tensor, or several, as a list.

    Raises:
        TypeError: It is neither, a module in particular; ``what`` was expected, ``remedy`` is to be passed.
    """
    if isinstance(tensors, Module) or not isinstance(tensors, Iterable):
        raise TypeError(f"expected {what}, got {type(tensors).__name__}; pass {remedy}")
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def listed_parameters(parameters: Tensor | Iterable[Tensor], stacklevel: int) -> list[Tensor]:
    """`listed`, with torch's warning about a generator that gives nothing, often one that was used up before."""
    found = listed(parameters)
    if not found and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", UserWarning, stacklevel=stacklevel
        )
    return found


def gradients_to_clip(parameters: list[Tensor]) -> tuple[list[Tensor], NameOf]:
    """The gradients there are, and what errors call the i-th of them.

    Raises:
        AttributeError: As `collect`.
    """
    if torch.compiler.is_compiling():  # which traces no assignment expression inside a comprehension
        found = [parameter.grad for parameter in parameters]
        return [gradient for gradient in found if gradient is not None], lambda i: f"gradient {i}"
    gradients = collect(parameters)
    positions = gradients.positions
    return gradients.tensors, lambda i: f"the gradient of parameters[{i if positions is None else positions[i]}]"


def collect(parameters: list[Tensor]) -> Gradients:
    """`gradients_of`, whose error says which item is not a parameter.

    Raises:
        AttributeError: Something among ``parameters`` has no ``.grad``; the message names its position.
    """
    try:
        return gradients_of(parameters)
    except AttributeError:
        position, item = next((i, p) for i, p in enumerate(parameters) if not hasattr(p, "grad"))
        raise AttributeError(
            f"item {position} of `parameters` has no .grad: it is of type {type(item).__name__}, not a parameter; "
            "pass module.parameters()"
        ) from None


def require_foreach(tensors: Sequence[Tensor]) -> None:
    """Raises RuntimeError, as torch does, if torch has no foreach kernels for some of ``tensors``."""
    for tensor in tensors:
        if not has_foreach(tensor.device):
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {tensor.device.type} tensors"
            )


def has_foreach(device: torch.device) -> bool:
    """Whether torch has foreach kernels for ``device``."""
    from torch.utils._foreach_utils import _device_has_foreach_support

    return bool(_device_has_foreach_support(device))


def refuse_distributed(tensors: Sequence[Tensor], name_of: NameOf) -> None:
    """Raises NotImplementedError if one of ``tensors`` is a DTensor, which an adaptive clip does not clip by itself."""
    for i, tensor in enumerate(tensors):
        if hasattr(tensor, "_local_tensor"):
            raise NotImplementedError(
                f"{name_of(i)!r} is a distributed tensor, whose norm needs a reduction over its mesh that an adaptive "
                "clip does not do by itself; use gradstat.clip_grad_norm_"
            )
