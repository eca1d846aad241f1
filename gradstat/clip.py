"""Gradient clipping with torch's contract, one read when nothing is clipped, and no host sync."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module

from gradstat import _norms
from gradstat._backends import Kernels
from gradstat._native import DeviceModule
from gradstat._plan import Gradients, gradients_of
from gradstat._tensors import NameOf, changeable, check_writable, is_dense, readable, refuse_distributed
from gradstat.stats import by_device, direct_for, resolve_for

_INF = math.inf


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Clips the gradients of ``parameters``, taken together, to a norm of at most ``max_norm``, in place.

    A drop-in for ``torch.nn.utils.clip_grad_norm_``: signature, arguments, return value, errors and formula,
    ``min(1, max_norm / (norm + 1e-6))``, are the same. Gradients are read once; only if they have to be
    clipped are they read and written once more, decided on the device. No host sync, unless
    ``error_if_nonfinite`` asks for a decision.

    It differs from torch's on purpose in three ways. Norms that torch overflows or underflows (float32 beyond
    about 1e19 or below 1e-19) come out right, and gradients of such size are clipped properly.
    ``max_norm=inf`` only measures and never changes a gradient, where torch turns all of them into NaN once
    the norm is infinite. Sparse COO gradients work.

    Args:
        parameters: Parameters, or one; those without a gradient are passed over.
        max_norm: Upper limit of the norm. Infinity only measures.
        norm_type: Order p of the norm: the p-norm of the p-norms of the gradients. Any real number or
            ``"inf"``. Orders other than 2 and infinity cost torch's own passes over the gradients.
        error_if_nonfinite: Raise if the norm is NaN or Inf, before anything is changed. Costs a host sync.
        foreach: Accepted for torch's sake; True raises where torch has no foreach kernels.
        backend: ``"native"``, ``"triton"`` or ``"reference"``; None chooses.

    Returns:
        The norm before clipping: 0-d, on the first gradient's device, of the gradients' promoted real
        dtype. Zero, float32, on the CPU when there are no gradients.

    Raises:
        TypeError: ``parameters`` is a module, or a gradient's dtype has no norm.
        AttributeError: Something in ``parameters`` is not a tensor.
        ValueError: ``max_norm`` is NaN, or a gradient cannot be measured.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set, or a gradient is expanded
            memory, which cannot be scaled in place.
        NotImplementedError: A gradient is a distributed tensor.
    """
    listed = listed_parameters(parameters, warn_from=3)
    gradients = _gradients(listed)
    max_norm, norm_type = float(max_norm), float(norm_type)
    if max_norm != max_norm:  # NaN, asked in a way that torch.compile can trace
        raise ValueError("max_norm is NaN, which would turn every gradient into NaN; pass a number or inf")
    if not gradients:
        return torch.tensor(0.0)
    if foreach:
        _require_foreach(gradients)
    if torch.compiler.is_compiling():
        return _compiled_clip(gradients, max_norm, norm_type, error_if_nonfinite, backend)
    norm = _clip(gradients, max_norm, norm_type, error_if_nonfinite, backend)
    if max_norm != _INF:
        # As torch's in-place operation would: graphs that saved a gradient notice that it was changed.
        torch.autograd.graph.increment_version(gradients)
    return norm


def listed_parameters(parameters: Tensor | Iterable[Tensor], warn_from: int) -> list[Tensor]:
    """One parameter, or several, as a list.

    Raises:
        TypeError: It is anything else, a module in particular.

    Warns:
        UserWarning: It is an empty generator, as in torch; ``warn_from`` is the stack level.
    """
    if isinstance(parameters, Module) or not isinstance(parameters, Iterable):
        raise TypeError(f"expected parameters, got {type(parameters).__name__}; pass module.parameters()")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", UserWarning, stacklevel=warn_from
        )
    return listed


def collect(parameters: list[Tensor]) -> Gradients:
    """`gradients_of`, whose error says which item is not a parameter."""
    try:
        return gradients_of(parameters)
    except AttributeError:
        position, item = next((i, p) for i, p in enumerate(parameters) if not hasattr(p, "grad"))
        raise AttributeError(
            f"item {position} of `parameters` has no .grad: it is of type {type(item).__name__}, not a parameter; "
            "pass module.parameters()"
        ) from None


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    if torch.compiler.is_compiling():  # which traces no assignment expression inside a comprehension
        found = [parameter.grad for parameter in parameters]
        return [gradient for gradient in found if gradient is not None]
    return collect(parameters).tensors


def _clip(
    gradients: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, backend: str | None
) -> Tensor:
    fused = norm_type == 2.0 or (norm_type == _INF and not any(g.is_complex() or not g.numel() for g in gradients))
    direct = direct_for(gradients[0], _name, backend) if fused else None
    if direct is not None:
        norm = _clip_directly(direct, gradients, max_norm, norm_type, error_if_nonfinite)
        if norm is not None:
            return norm
    with torch.no_grad():
        return _clip_general(gradients, max_norm, norm_type, fused, error_if_nonfinite, backend)


def _clip_directly(
    direct: DeviceModule, gradients: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor | None:
    """Ordinary gradients on one device: the kernels do everything. None, and nothing done, if they are not."""
    if not error_if_nonfinite:
        return direct.clip_(gradients, max_norm, norm_type)
    measured = direct.measure(gradients, max_norm, norm_type)
    if measured is None:
        return None
    norm, coefficient = measured
    _raise_if_nonfinite(norm, norm_type)
    return norm if max_norm == _INF or direct.scale_(gradients, coefficient) else None


def _compiled_clip(
    gradients: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, backend: str | None
) -> Tensor:
    """Inside torch.compile, where only the operator runs when the graph does."""
    if error_if_nonfinite or backend is not None or norm_type not in (2.0, _INF):
        raise NotImplementedError(
            "inside torch.compile, clip_grad_norm_ takes norm_type 2 or inf and neither error_if_nonfinite nor "
            "backend; call it outside of the compiled function"
        )
    norm: Tensor = torch.ops.gradstat.clip_.default(gradients, max_norm, norm_type)
    return norm


def _clip_general(
    gradients: list[Tensor],
    max_norm: float,
    norm_type: float,
    fused: bool,
    error_if_nonfinite: bool,
    backend: str | None,
) -> Tensor:
    """Any gradients: several devices, sparse, strided, every order of norm, every backend."""
    refuse_distributed(gradients, _name)
    plain = readable(gradients, _name)
    targets = check_writable(gradients, _name) if max_norm != _INF else []
    groups = by_device(plain)
    kernels = {device: resolve_for(backend, device.type, _name, at[0]) for device, at in groups.items()}
    first = plain[0].device

    if fused:
        tables = [kernels[device].check([plain[i] for i in at])[0] for device, at in groups.items()]
        total = _norms.total_norm(torch.cat([t.to(first, non_blocking=True) for t in tables]), norm_type)
    else:
        total = _norm_of_norms(plain, norm_type, first)
    norm = total.to(_norms.norm_dtype(plain))
    if error_if_nonfinite:
        _raise_if_nonfinite(norm, norm_type)
    if max_norm != _INF:
        scale_everywhere_(targets, _norms.clip_coefficient(total, max_norm), _name, backend)
    return norm


def scale_everywhere_(targets: list[Tensor], coefficient: Tensor, name_of: NameOf, backend: str | None) -> None:
    """Scales tensors as `check_writable` returns them, on whatever devices, by one coefficient."""
    for device, at in by_device(targets).items():
        kernels = resolve_for(backend, device.type, name_of, at[0])
        scale_any_(kernels, [targets[i] for i in at], coefficient.to(device, non_blocking=True))


def scale_any_(kernels: Kernels, targets: list[Tensor], coefficient: Tensor) -> None:
    """Scales tensors as `check_writable` returns them, strided views through a dense copy."""
    with changeable(targets, is_dense) as dense:
        kernels.scale_(dense, coefficient)


def _norm_of_norms(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The p-norm of the tensors' p-norms in float64, for orders the kernels do not measure."""
    norms = []
    for tensor in tensors:
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        norms.append(torch.linalg.vector_norm(tensor.to(wide), norm_type).to(device, non_blocking=True))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _raise_if_nonfinite(norm: Tensor, norm_type: float) -> None:
    if not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def _require_foreach(gradients: list[Tensor]) -> None:
    from torch.utils._foreach_utils import _device_has_foreach_support

    for gradient in gradients:
        if not _device_has_foreach_support(gradient.device):
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {gradient.device.type} tensors"
            )


def _name(position: int) -> str:
    return f"the gradient of parameters[{position}]"
