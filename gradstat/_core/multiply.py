"""Multiplies any list of tensors in place, by numbers that stay on the device: scaling, clipping, unscaling."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradstat._core.measure import ANY, Spread, compiled_for, infos_of, is_fused, kernels_for, measure, measure_norm
from gradstat._core.measurement import Measurement
from gradstat._core.tensors import NameOf, by_device, contiguous_for_update, is_dense, to_device, writable


def scale_(
    tensors: list[Tensor], multipliers: Tensor, name_of: NameOf, backend: str | None, *, each: bool = False
) -> None:
    """Multiplies tensors, at least one, by the first of the float64 ``multipliers``, unless it is 1. No host sync.

    With ``each``, every tensor is multiplied by its own. Views that are not dense are copied, multiplied and copied
    back. RuntimeError or NotImplementedError, before anything is changed, if a tensor cannot be changed in place.
    """
    compiled = compiled_for(tensors, backend)
    directly = compiled.scale_each_ if each else compiled.scale_
    on_device = to_device(multipliers, tensors[0].device)
    if directly(tensors, on_device):
        return
    with torch.no_grad():
        targets = writable(tensors, name_of)
        if directly(targets, on_device):
            return
        groups = by_device(targets)
        kernels = kernels_for(groups, backend, name_of)
        for device, at in groups.items():
            by = multipliers if each else multipliers.reshape(-1)[0]
            if each and len(groups) > 1:
                by = by[to_device(torch.tensor(at, device="cpu"), by.device)]
            with contiguous_for_update([targets[i] for i in at], is_dense) as dense:
                multiply_ = kernels[device].scale_each_ if each else kernels[device].scale_
                multiply_(dense, to_device(by, device))


def clip_(
    gradients: list[Tensor],
    max_norm: float,
    norm_type: float,
    name_of: NameOf,
    backend: str | None = None,
    spread: Spread = ANY,
    *,
    accept: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Clips gradients, taken together, to a norm; returns their norm before as from `measure_norm`. No host sync.

    ``accept`` is called with this norm before anything is changed.
    """
    if accept is None and gradients and spread.extra_groups is None and is_fused(gradients, norm_type):
        # The kernels do everything, or nothing if not all gradients are ordinary.
        clipped = compiled_for(gradients, backend).clip_(gradients, max_norm, norm_type)
        if clipped is not None:
            return clipped
    changes = max_norm != math.inf
    norm, multiplier = measure_norm(gradients, max_norm, norm_type, name_of, backend, spread, in_place=changes)
    if accept is not None:
        accept(norm)
    if gradients and changes:
        scale_(gradients, multiplier, name_of, backend)
    return norm


def unscale_(gradients: list[Tensor], factor: Tensor, name_of: NameOf, spread: Spread) -> Measurement:
    """Multiplies gradients, at least one, by a float32 ``factor`` on their device, and measures them. No host sync."""
    if spread.extra_groups is None:
        unscaled = compiled_for(gradients, None).unscale_(gradients, factor)
        if unscaled is not None:
            table, signature = unscaled
            return Measurement([table], None, infos_of(gradients, signature))
    scale_(gradients, factor.to(torch.float64), name_of, None)
    return measure(gradients, name_of, None, spread)
