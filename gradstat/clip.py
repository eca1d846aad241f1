"""Gradient norm clipping with torch's contract, in one pass if nothing is clipped, and without a host sync."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from gradstat._core import announce, norms
from gradstat._core.measure import Spread, is_fused, measure_norm
from gradstat._core.multiply import clip_, scale_
from gradstat._core.native import operators
from gradstat._core.parameters import as_list, gradients_to_clip, require_foreach
from gradstat._core.tensors import ExtraGroups, is_distributed, name_by_position, to_device
from gradstat._core.text import as_number


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    backend: str | None = None,
    extra_groups: ExtraGroups | None = None,
) -> Tensor:
    """Clips the gradients of ``parameters``, taken together, to a norm of at most ``max_norm``, in place.

    A drop-in for ``torch.nn.utils.clip_grad_norm_``: signature, arguments, return value, errors and the formula
    ``min(1, max_norm / (norm + 1e-6))`` are the same. One pass reads the gradients. The device decides whether they
    have to be clipped, and only then a second pass reads and writes them. There is no host sync, unless
    ``error_if_nonfinite`` is set.

    It differs from torch's on purpose in four ways. Norms that overflow or underflow in torch (float32 beyond about
    1e19 or below 1e-19) are correct, and gradients of such size are clipped properly. ``max_norm=inf`` only measures
    and never changes a gradient, whereas torch turns all of them into NaN once the norm is infinite. A negative limit
    is refused. Sparse COO gradients are supported.

    Args:
        parameters: Parameters, or one; those without a gradient are skipped.
        max_norm: Upper limit of the norm. Infinity only measures.
        norm_type: Order p of the norm: the p-norm of the p-norms of the gradients. Any real number or
            ``"inf"``. Orders other than 2 and infinity cost torch's own passes over the gradients.
        error_if_nonfinite: Raise if the norm is NaN or Inf, before anything is changed. Costs a host sync.
        foreach: Accepted for compatibility with torch; True raises where torch has no foreach kernels.
        backend, extra_groups: As for `check`.

    Returns:
        The norm before clipping: 0-d, on the first gradient's device, of the gradients' promoted real
        dtype. Zero, float32, on the CPU when there are no gradients. NaN if another rank could not measure its part.

    Raises:
        TypeError: ``parameters`` is a module, or a gradient's dtype has no norm.
        AttributeError: An item of ``parameters`` is not a tensor.
        ValueError: ``max_norm`` is negative or NaN, or a gradient cannot be measured.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set; a gradient is expanded memory, which
            cannot be scaled in place; or gradients are distributed, and another rank has different gradients.
        NotImplementedError: A gradient is a distributed tensor, and ``norm_type`` is neither 2 nor infinity.
    """
    listed, collected = gradients_to_clip(parameters, foreach)
    gradients, name_of = collected.tensors, collected.name_of
    max_norm, norm_type = _limit(max_norm), as_number("norm_type", norm_type)
    if not gradients and extra_groups is None and not is_distributed(listed):
        return torch.tensor(0.0, device="cpu")
    if torch.compiler.is_compiling():
        is_plain = not error_if_nonfinite and backend is None and extra_groups is None
        require_in_compiled("clip_grad_norm_", is_plain and is_fused(gradients, norm_type))
        compiled: Tensor = operators(gradients[0].device).clip_.default(gradients, max_norm, norm_type)
        return compiled
    accept = functools.partial(raise_if_nonfinite, norm_type=norm_type) if error_if_nonfinite else None
    spread = Spread(listed, extra_groups=extra_groups)
    with announce.change(listed if max_norm != math.inf else (), limit=max_norm):
        norm = clip_(gradients, max_norm, norm_type, name_of, backend, spread, accept=accept)
        if max_norm != math.inf:
            # Like an in-place operation of torch, this lets graphs that saved a gradient detect the change.
            torch.autograd.graph.increment_version(gradients)
        return norm


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    backend: str | None = None,
    extra_groups: ExtraGroups | None = None,
) -> Tensor:
    """The norm of ``tensors``, taken together: the first half of `clip_grad_norm_`, for any tensors.

    A drop-in for ``torch.nn.utils.get_total_norm`` that reads the tensors once. Norms, syncs and arguments are as
    documented for `clip_grad_norm_`.

    Args:
        tensors: Tensors, or one. For the norm of gradients pass the gradients, not their parameters.
        norm_type, error_if_nonfinite, foreach, backend, extra_groups: As for `clip_grad_norm_`.

    Returns:
        The norm as from `clip_grad_norm_`. For distributed tensors it is the norm of the whole tensors.

    Raises:
        TypeError: An item of ``tensors`` is not a tensor. Other errors are as for `clip_grad_norm_`.
    """
    listed = as_list(tensors, "tensors")
    norm_type = as_number("norm_type", norm_type)
    if not listed and extra_groups is None:
        return torch.tensor(0.0, device="cpu")
    if foreach:
        require_foreach(listed)
    if torch.compiler.is_compiling():
        is_plain = not error_if_nonfinite and backend is None and extra_groups is None
        require_in_compiled("get_total_norm", is_plain and is_fused(listed, norm_type))
        compiled: Tensor = operators(listed[0].device).measure_norm.default(listed, math.inf, norm_type)[0]
        return compiled
    spread = Spread(extra_groups=extra_groups)
    norm, _ = measure_norm(listed, math.inf, norm_type, name_by_position, backend, spread)
    if error_if_nonfinite:
        raise_if_nonfinite(norm, norm_type)
    return norm


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor | float,
    foreach: bool | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Multiplies the gradients of ``parameters`` in place by ``min(1, max_norm / (total_norm + 1e-6))``.

    A drop-in for ``torch.nn.utils.clip_grads_with_norm_``: the second half of `clip_grad_norm_`, for a norm that was
    computed before. The device computes the multiplier in float64. If it is 1, gradients are neither read nor written.
    There is no host sync, unless ``total_norm`` has to move from a GPU to the CPU.

    Args:
        total_norm: The norm before clipping: a number, or a real 0-d tensor on any device. NaN turns every
            gradient into NaN, Inf into zero, as in torch.
        parameters, max_norm, foreach, backend: As for `clip_grad_norm_`, including its differences from torch.

    Raises:
        ValueError: ``total_norm`` is not a single real number. Other errors are as for `clip_grad_norm_`.
    """
    listed, collected = gradients_to_clip(parameters, foreach)
    gradients, name_of = collected.tensors, collected.name_of
    max_norm, norm = _limit(max_norm), _given_norm(total_norm)
    if not gradients or max_norm == math.inf:
        return
    with announce.change(listed, limit=max_norm), torch.no_grad():
        multiplier = norms.clip_multiplier(norm, max_norm)
        if torch.compiler.is_compiling():
            if backend is not None:
                raise NotImplementedError("inside torch.compile, clip_grads_with_norm_ takes no backend")
            device = gradients[0].device
            operators(device).scale_.default(gradients, to_device(multiplier, device))
            return
        scale_(gradients, multiplier, name_of, backend)
        torch.autograd.graph.increment_version(gradients)


def raise_if_nonfinite(norm: Tensor, norm_type: float) -> None:
    """Waits for ``norm`` and raises RuntimeError, in torch's words, if it is NaN or Inf."""
    if not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def require_in_compiled(function: str, is_supported: bool) -> None:
    """Raises NotImplementedError for options that are unsupported inside torch.compile, where only operators run."""
    if not is_supported:
        raise NotImplementedError(
            f"inside torch.compile, {function} takes norm_type 2, or inf for real tensors with elements, and none of "
            "error_if_nonfinite, backend and extra_groups; call it outside of the compiled function"
        )


def _limit(max_norm: float) -> float:
    number = as_number("max_norm", max_norm)
    if not number >= 0:  # or NaN; unlike math.isnan, torch.compile can trace this
        effect = "around" if number < 0 else "into NaN"
        raise ValueError(f"max_norm is {number}, which would turn every gradient {effect}; expected one from 0")
    return number


def _given_norm(total_norm: Tensor | float) -> Tensor:
    if not isinstance(total_norm, Tensor):
        return torch.tensor(as_number("total_norm", total_norm), dtype=torch.float64, device="cpu")
    if is_distributed([total_norm]):  # as returned by torch's clip
        total_norm = cast(Tensor, total_norm.full_tensor())  # type: ignore[attr-defined]
    if total_norm.dim() or total_norm.is_complex():
        raise ValueError(
            f"expected a real number or 0-d tensor for total_norm, got shape {tuple(total_norm.shape)} and dtype "
            f"{total_norm.dtype}"
        )
    return total_norm.detach().double()
