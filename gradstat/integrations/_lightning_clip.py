"""gradstat's clip in the place of Lightning's, for the time of a fit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from gradstat import _optimizers
from gradstat.adaptive import AdaptiveClip
from gradstat.clip import clip_grad_norm_
from gradstat.total_norm import get_total_norm


class Clip:
    """Clips where Lightning does, after ``on_before_optimizer_step``, and as it is told to.

    With automatic optimization ``trainer.gradient_clip_val`` is what it always was, or the callback's ``max_norm``;
    the precision plugin's ``clip_gradients`` is gradstat's. So an override of ``configure_gradient_clipping`` is
    honoured. With manual optimization, where Lightning does not clip by itself, the callback calls `now`.

    Args:
        trainer: Whose settings are taken over, until `remove`.
        max_norm: The callback's; None to take the trainer's ``gradient_clip_val``, if it is meant as a norm.
    """

    def __init__(self, trainer: Any, max_norm: float | AdaptiveClip | None) -> None:
        self._trainer, self._max_norm = trainer, max_norm
        self._plugin = trainer.precision_plugin
        self._before = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        self._original = self._plugin.clip_gradients
        self._told: list[Optimizer] = []
        self._plugin.clip_gradients = self._clip_gradients
        if max_norm is not None:
            trainer.gradient_clip_val = math.inf if isinstance(max_norm, AdaptiveClip) else float(max_norm)
            trainer.gradient_clip_algorithm = None  # the norm

    @property
    def limit(self) -> float | AdaptiveClip | None:
        """What is clipped to; None if there is no clip by norm."""
        if self._max_norm is not None:
            return self._max_norm
        value, algorithm = self._before
        return float(value) if value and is_norm(algorithm) else None

    def now(self, optimizer: Optimizer) -> None:
        """Clips the gradients of ``optimizer``."""
        if self.limit is not None:
            self._clip(optimizer, self.limit)

    def _clip_gradients(
        self, optimizer: Optimizer, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """In the place of the plugin's function of that name, whose arguments these are."""
        if not clip_val or clip_val <= 0:
            return
        if not is_norm(gradient_clip_algorithm):
            self._original(optimizer, clip_val, gradient_clip_algorithm)
        else:
            self._clip(optimizer, self._max_norm if isinstance(self._max_norm, AdaptiveClip) else float(clip_val))

    def _clip(self, optimizer: Optimizer, limit: float | AdaptiveClip) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scaler = getattr(self._plugin, "scaler", None)
        if scaler is None or not scaler.is_enabled() or not getattr(optimizer, "_step_supports_amp_scaling", False):
            if isinstance(limit, AdaptiveClip):
                limit.clip_(parameters)
            else:
                clip_grad_norm_(parameters, limit)
            return
        # A fused optimizer unscales by itself, so its gradients still carry the scale: Lightning refuses to clip them.
        if isinstance(limit, AdaptiveClip):
            scaler.unscale_(optimizer)
            limit.clip_(parameters)
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients or limit == math.inf:
            return
        _optimizers.refuse_foreign_verdict(optimizer)
        _optimizers.first_momentum_is_at_risk(optimizer)
        with torch.no_grad():
            norm = get_total_norm(gradients).to(torch.float64) / scaler._scale.to(gradients[0].device)
            divisor = ((norm + 1e-6) / limit).clamp(min=1.0)
            # A step with a gradient that is not finite is skipped, whatever it would be divided by.
            divisor = torch.where(norm.isfinite(), divisor, 1.0).to(torch.float32)
        # torch's scaler multiplies this with its scale, and the optimizer divides by the product as it steps.
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self._told.append(optimizer)

    def forget(self) -> None:
        """Takes back what an optimizer was told and, as it did not step, did not use."""
        while self._told:
            self._told.pop().__dict__.pop("grad_scale", None)

    def remove(self) -> None:
        """Gives Lightning its clip and its settings back. May be called twice."""
        self.forget()
        if self._plugin.__dict__.get("clip_gradients") == self._clip_gradients:
            del self._plugin.clip_gradients
            self._trainer.gradient_clip_val, self._trainer.gradient_clip_algorithm = self._before


def is_norm(algorithm: Any) -> bool:
    """Whether a trainer's ``gradient_clip_algorithm`` is the norm, as it is by default."""
    return algorithm is None or getattr(algorithm, "value", algorithm) == "norm"
