"""The norm of many tensors taken together, with torch's contract: one read and no host sync."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradstat._core import norms as _norms
from gradstat._core.arguments import listed, require_foreach
from gradstat._core.measure import by_device, direct_for, measure, resolve_for
from gradstat._core.native import operators
from gradstat._core.tensors import NameOf, is_distributed, moved, readable

if TYPE_CHECKING:
    from gradstat._core.sharded import ExtraGroups


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
        norm = norm_of(given, norm_type, _name, backend, extra_groups=extra_groups).to(_norms.norm_dtype(given))
    if error_if_nonfinite:
        raise_if_nonfinite(norm, norm_type)
    return norm


def is_fused(tensors: list[Tensor], norm_type: float) -> bool:
    """Whether a table is all that a norm of that order needs."""
    return norm_type == 2.0 or (norm_type == math.inf and not any(t.is_complex() or not t.numel() for t in tensors))


@torch.no_grad()
def norm_of(
    tensors: list[Tensor],
    norm_type: float,
    name_of: NameOf,
    backend: str | None,
    *,
    owners: list[Tensor] | None = None,
    extra_groups: ExtraGroups | None = None,
    prepare: Callable[[], object] | None = None,
) -> Tensor:
    """The norm of any tensors, 0-d float64 on the first one's device; arguments and errors as `measure`.

    NaN if another rank could not measure its part, which is all that can be said without a sync.

    Raises:
        NotImplementedError: Tensors are distributed, and the order is neither 2 nor infinity.
    """
    is_over_ranks = extra_groups is not None or is_distributed(tensors)
    if is_over_ranks and norm_type not in (2.0, math.inf):
        raise NotImplementedError(
            f"over several ranks gradstat has norms of order 2 and inf only, not {norm_type}; use "
            "torch.nn.utils.clip_grad_norm_"
        )
    if not is_over_ranks and not is_fused(tensors, norm_type):
        if prepare is not None:
            prepare()
        plain = readable(tensors, name_of)
        for device, at in by_device(plain).items():
            resolve_for(backend, device.type, name_of, at[0])  # a backend that is not there is refused all the same
        return _norm_of_norms(plain, norm_type)
    measured = measure(
        tensors,
        name_of,
        backend,
        owners=owners,
        extra_groups=extra_groups,
        prepare=prepare,
        wants="sums" if norm_type == 2.0 else "total",
    )
    return _norms.total_norm(measured.summands(), norm_type)


def _norm_of_norms(tensors: list[Tensor], norm_type: float) -> Tensor:
    """The p-norm of the tensors' p-norms in float64, for orders the kernels do not measure."""
    device = tensors[0].device
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
