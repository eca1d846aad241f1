"""The norm of many tensors taken together, with torch's contract: one read and no host sync."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstat import _norms
from gradstat._arguments import listed, require_foreach
from gradstat._native import operators
from gradstat._tensors import NameOf, is_distributed, moved, readable
from gradstat.stats import by_device, direct_for, measure_parts, resolve_for

if TYPE_CHECKING:
    from gradstat._reduction import ExtraGroups
    from gradstat._spread import Measure, Spread


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

    A drop-in for ``torch.nn.utils.get_total_norm`` that reads the tensors once. No host sync, unless
    ``error_if_nonfinite`` asks for a decision. As in `clip_grad_norm_`, norms that torch overflows or underflows
    come out right, as far as the dtype that is returned can hold them, and sparse COO tensors work.

    Args:
        tensors: Tensors, or one. For the norm of gradients, the gradients and not their parameters.
        norm_type: As in `clip_grad_norm_`.
        error_if_nonfinite: Raise if the norm is NaN or Inf. Costs a host sync.
        foreach: Accepted for torch's sake; True raises where torch has no foreach kernels.
        backend: ``"native"``, ``"triton"`` or ``"reference"``; None chooses.
        extra_groups: As in `check`: for what distributed tensors do not tell by themselves.

    Returns:
        The norm, of whole tensors if they are distributed: 0-d, on the first tensor's device, of the tensors'
        promoted real dtype. Zero, float32, on the CPU when there are none.

    Raises:
        TypeError: ``tensors`` is a module, something in it is not a tensor, or a dtype has no norm.
        ValueError: A tensor cannot be measured.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
        NotImplementedError: A tensor is distributed, and ``norm_type`` neither 2 nor infinity.
    """
    given = listed(tensors, "tensors", "[p.grad for p in module.parameters() if p.grad is not None]")
    norm_type = float(norm_type)
    if not given and extra_groups is None:
        return torch.tensor(0.0, device="cpu")
    if foreach:
        require_foreach(given)
    if torch.compiler.is_compiling():
        refuse_in_compiled("get_total_norm", norm_type, error_if_nonfinite, backend)
        compiled: Tensor = operators(given[0].device).measure.default(given, math.inf, norm_type)[1]
        return compiled
    direct = None
    if extra_groups is None and is_fused(given, norm_type):
        direct = direct_for(given[0], _name, backend)
    measured = direct.measure(given, math.inf, norm_type) if direct is not None else None
    if measured is not None:
        norm = measured[0]
    else:
        with torch.no_grad():
            if extra_groups is not None or is_distributed(given):
                from gradstat._spread import Spread

                spread = Spread(given, given, extra_groups)
                norm = spread_norm(spread, norm_type, lambda local: measure_parts(local, _name, backend))
            else:
                norm = measure(readable(given, _name), norm_type, _name, backend)
            norm = norm.to(_norms.norm_dtype(given))
    if error_if_nonfinite:
        raise_if_nonfinite(norm, norm_type)
    return norm


def is_fused(tensors: list[Tensor], norm_type: float) -> bool:
    """Whether a table is all that a norm of that order needs."""
    return norm_type == 2.0 or (norm_type == math.inf and not any(t.is_complex() or not t.numel() for t in tensors))


def measure(plain: list[Tensor], norm_type: float, name_of: NameOf, backend: str | None) -> Tensor:
    """The norm of tensors as `readable` returns them, on any devices: 0-d float64 on the first one's."""
    groups = by_device(plain)
    kernels = {device: resolve_for(backend, device.type, name_of, at[0]) for device, at in groups.items()}
    first = plain[0].device
    if not is_fused(plain, norm_type):
        return _norm_of_norms(plain, norm_type, first)
    tables = [kernels[device].check([plain[i] for i in at])[0] for device, at in groups.items()]
    return _norms.total_norm(torch.cat([moved(table, first) for table in tables]), norm_type)


def spread_norm(spread: Spread, norm_type: float, measure_local: Measure) -> Tensor:
    """The norm of tensors that are spread over ranks, 0-d float64, the same on all of them.

    NaN if another rank could not measure its part, which is all that can be said without a sync.

    Raises:
        NotImplementedError: The order is neither 2 nor infinity.
    """
    if norm_type not in (2.0, math.inf):
        raise NotImplementedError(
            f"over several ranks gradstat has norms of order 2 and inf only, not {norm_type}; use "
            "torch.nn.utils.clip_grad_norm_"
        )
    total, failed = spread.total(measure_local, norm_type == math.inf)
    return torch.where(failed > 0, math.nan, _norms.total_norm(total, norm_type))


def _norm_of_norms(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The p-norm of the tensors' p-norms in float64, for orders the kernels do not measure."""
    norms = []
    for tensor in tensors:
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        norms.append(moved(torch.linalg.vector_norm(tensor.to(wide), norm_type), device))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def raise_if_nonfinite(norm: Tensor, norm_type: float) -> None:
    """Waits for ``norm`` and raises RuntimeError, in torch's words, if it is NaN or Inf."""
    if not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def refuse_in_compiled(function: str, norm_type: float, error_if_nonfinite: bool, backend: str | None) -> None:
    """Raises NotImplementedError for what is not possible inside torch.compile, where only operators run."""
    if error_if_nonfinite or backend is not None or norm_type not in (2.0, math.inf):
        raise NotImplementedError(
            f"inside torch.compile, {function} takes norm_type 2 or inf and neither error_if_nonfinite nor backend; "
            "call it outside of the compiled function"
        )


def _name(position: int) -> str:
    return f"tensors[{position}]"
