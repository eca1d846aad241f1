"""Gradient value clipping with torch's contract, in one pass over large gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gradstat._core import announce
from gradstat._core.parameters import gradients_to_clip, has_foreach
from gradstat._core.tensors import require_own_memory, shard_of
from gradstat._core.text import as_number

# Size in bytes from which a second pass over a gradient costs more than a separate operation. The value for CPUs was
# measured. The value for asynchronous devices is an estimate from bandwidth and launch time.
_LARGE_ON_CPU = 1 << 16
_LARGE_ELSEWHERE = 1 << 24


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Clamps every element of the gradients of ``parameters`` to [-clip_value, clip_value], in place.

    A drop-in for ``torch.nn.utils.clip_grad_value_``: NaN stays NaN. torch's foreach kernels read and write every
    gradient twice, once per bound. This function clamps large gradients individually, in one pass. There is no host
    sync.

    It differs from torch's on purpose. It rejects a negative or NaN ``clip_value``, to which torch sets every element.
    It supports sparse COO gradients, and coalesces them. It does nothing if no parameter has a gradient.

    Args:
        parameters: As for `clip_grad_norm_`.
        clip_value: Largest magnitude that stays, at least 0. Infinity changes nothing.
        foreach: True clamps all gradients but sparse ones with torch's foreach kernels, in two passes, and raises
            where torch has none; False clamps individually; None uses whichever is faster for each gradient.

    Raises:
        TypeError, AttributeError: As `clip_grad_norm_`.
        ValueError: ``clip_value`` is negative or NaN.
        NotImplementedError: A gradient is complex or float8, which torch does not clamp.
        RuntimeError: A gradient is of an integer dtype, or expanded memory, or its dtype cannot hold ``clip_value``.
    """
    listed, found = gradients_to_clip(parameters, foreach)
    gradients = found.tensors
    limit = as_number("clip_value", clip_value)
    if not limit >= 0:
        raise ValueError(f"clip_value is {limit}; pass a number of at least 0")
    if not gradients:
        return
    groups = _by_device_and_dtype(gradients)
    for group in groups:
        refusal = _refusal(group[0].dtype, limit)
        if refusal is not None:
            error, words = refusal
            name = found.name_of(next(i for i, gradient in enumerate(gradients) if gradient.dtype is group[0].dtype))
            raise error(f"{name!r} is {words}")
    if not torch.compiler.is_compiling():
        for i, gradient in enumerate(gradients):
            if not gradient.is_sparse and (not gradient.is_contiguous() or gradient._is_zerotensor()):
                require_own_memory(shard_of(gradient), found.name_of, i)
    with announce.change(listed), torch.no_grad():
        for group in groups:
            _clamp_(group, limit, foreach)


def _refusal(dtype: torch.dtype, limit: float) -> tuple[type[Exception], str] | None:
    """The error, of torch's type, for gradients that torch does not clamp to ``limit``; None for others."""
    if dtype.is_complex:
        return NotImplementedError, (
            "complex, and complex numbers have no order by which to clamp them; clip them by norm, with clip_grad_norm_"
        )
    if not dtype.is_floating_point:
        return RuntimeError, f"of dtype {dtype}, whose elements cannot be clamped to a float; leave it out"
    if dtype.itemsize == 1:
        words = f"of dtype {dtype}, which torch does not clamp; clip it by norm, with clip_grad_norm_"
        return NotImplementedError, words
    largest = torch.finfo(dtype).max
    if largest < limit < math.inf:
        return RuntimeError, f"of dtype {dtype}, whose largest number is {largest:g}, but clip_value is {limit:g}"
    return None


def _by_device_and_dtype(gradients: list[Tensor]) -> list[list[Tensor]]:
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    if torch.compiler.is_compiling():
        return [[gradient] for gradient in gradients]
    optional: list[Tensor | None] = [*gradients]
    groups = _group_tensors_by_device_and_dtype([optional])
    return [[tensor for tensor in group if tensor is not None] for (group,), _ in groups.values()]


def _clamp_(gradients: list[Tensor], limit: float, foreach: bool | None) -> None:
    """Clamps gradients of one device and one dtype."""
    device = gradients[0].device
    large_from = math.inf if foreach else 0  # the number of elements from which gradients are clamped individually
    if foreach is None and not torch.compiler.is_compiling() and has_foreach(device):
        large_from = (_LARGE_ON_CPU if device.type == "cpu" else _LARGE_ELSEWHERE) // gradients[0].itemsize
    together = []
    for gradient in gradients:
        if gradient.is_sparse:
            coalesced = gradient.coalesce()  # uncoalesced values are addends; their sums have to be clamped
            coalesced._values().clamp_(-limit, limit)
            if coalesced is not gradient:
                gradient.copy_(coalesced)
        elif gradient.numel() < large_from:
            together.append(gradient)
        else:
            gradient.clamp_(-limit, limit)
    if together:
        torch._foreach_clamp_min_(together, -limit)
        torch._foreach_clamp_max_(together, limit)
