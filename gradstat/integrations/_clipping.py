"""Clipping for frameworks that clip per optimizer: to a number or by an adaptive clip, also under a loss scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradstat._core.measure import norm_of
from gradstat._core.parameters import gradients_to_clip
from gradstat._step import optimizers
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import Limit
from gradstat.clip import clip_grad_norm_, clip_grads_with_norm_


def clip_with_norm(parameters: list[Tensor], limit: Limit, norm: Tensor) -> Tensor:
    """Clips gradients to ``limit``, given their ``norm``; since that was computed, skipping may have dropped them."""
    if isinstance(limit, AdaptiveClip):
        limit.clip_(parameters)
    elif limit != math.inf:
        clip_grads_with_norm_(parameters, limit, norm)
    return norm


class OptimizerClip:
    """Clips the gradients of an optimizer, before it steps.

    A fused optimizer unscales inside ``step``, so its gradients still carry the loss scale. Its ``grad_scale`` is set
    to a larger divisor: no pass over the gradients except the one for the norm, and no host sync.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._with_divisor: list[Optimizer] = []

    def leaves_scaled(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer itself unscales the gradients in its step."""
        return self._scaler is not None and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def clip(self, optimizer: Optimizer, limit: Limit) -> Tensor:
        """Clips to ``limit``; returns the unscaled norm before clipping."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scaled = self._scaler if self.leaves_scaled(optimizer) else None
        if isinstance(limit, AdaptiveClip):
            if scaled is not None:
                scaled.unscale_(optimizer)
            return limit.clip_(parameters)
        if scaled is None:
            return clip_grad_norm_(parameters, limit)
        _, found = gradients_to_clip(parameters)
        if not found.tensors:
            return torch.zeros(())
        optimizers.refuse_foreign_verdict(optimizer)
        optimizers.first_momentum_is_at_risk(optimizer)
        with torch.no_grad():
            # Not get_total_norm: the scaled norm may overflow the gradients' dtype.
            norm: Tensor = norm_of(found.tensors, 2.0, found.name_of, None, owners=parameters)
            norm = norm / scaled._scale.to(norm.device)
            divisor = ((norm + 1e-6) / limit).clamp(min=1.0)
            # A step with a nonfinite gradient is skipped, so its divisor does not matter.
            divisor = torch.where(norm.isfinite(), divisor, 1.0).to(torch.float32)
        if limit == math.inf:
            return norm
        # torch's scaler multiplies this by its scale, and the optimizer divides by the product in its step.
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self._with_divisor.append(optimizer)
        return norm

    def forget(self) -> None:
        """Removes the divisor from optimizers that did not step and so have not consumed it."""
        while self._with_divisor:
            self._with_divisor.pop().__dict__.pop("grad_scale", None)
