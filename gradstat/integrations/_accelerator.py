"""An accelerator whose ``clip_grad_norm_`` measures: complete, unscaled and unclipped gradients of every step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradstat import _scaling
from gradstat.adaptive import AdaptiveClip
from gradstat.clip import clip_grad_norm_, clip_grads_with_norm_
from gradstat.integrations._refusals import MARK, engine_clips, refuse_second
from gradstat.integrations._replaced import Replaced
from gradstat.integrations._watched import Watched, unwrapped
from gradstat.monitor.policies import find_stack_level
from gradstat.monitor.replay.step_state import is_replaying


class AcceleratorWatch:
    """Stands between an accelerator and those who call it.

    Args:
        accelerator: A ``accelerate.Accelerator``.
        watched: The models and their monitors; given later by assignment if they do not exist yet.
        max_norm: What to clip to; None leaves that to the caller.
        micro_batches: Into how many micro-batches a step is divided, asked before each.

    Raises:
        RuntimeError: The accelerator is watched already.
    """

    def __init__(
        self,
        accelerator: Any,
        watched: Sequence[Watched],
        max_norm: float | AdaptiveClip | None,
        micro_batches: Callable[[], int],
    ) -> None:
        refuse_second(accelerator)
        self.accelerator = accelerator
        self.watched = list(watched)
        self.max_norm = max_norm
        self._micro_batches = micro_batches
        self._told: set[str] = set()
        self._is_over = False  # whether something was measured since the last backward pass
        self.clips_itself = engine_clips(accelerator)
        self._replaced = [
            Replaced(accelerator, "clip_grad_norm_", lambda below: self._made_clip(below)),
            Replaced(accelerator, "backward", lambda below: self._made_backward(below)),
        ]
        setattr(accelerator, MARK, self)

    def _made_backward(self, below: Any) -> Callable[..., Any]:
        def backward(loss: Any, **options: Any) -> Any:
            result = below(loss, **options)
            if not is_replaying():
                if self._is_over:  # models that take turns are not to be told each other's losses
                    self._is_over = False
                    for one in self.watched:
                        one.forget()
                several = self._micro_batches() > 1 and not self.clips_itself
                for one in self.watched:
                    one.saw_backward(loss, several)
            return result

        return backward

    def _made_clip(self, below: Any) -> Callable[..., Any]:
        def clip(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
            if is_replaying():
                return below(parameters, max_norm, norm_type)
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            limit = self.limit(max_norm)
            if self.clips_itself:
                self.measure(self._those_with(listed))
                return below(listed, max_norm, norm_type)
            self._unscale(listed)
            norm = clip_grad_norm_(listed, math.inf, norm_type)  # only measures
            if self.accelerator.sync_gradients:
                self.measure(self._those_with(listed))
            else:
                self._tell_once(
                    "clip_grad_norm_ was called while gradients are still being accumulated: an unfinished gradient is "
                    "clipped, and not measured. Call it under `if accelerator.sync_gradients:`"
                )
            if isinstance(limit, AdaptiveClip):
                if self.accelerator.sync_gradients:
                    limit.clip_(listed)
            elif limit != math.inf:
                clip_grads_with_norm_(listed, limit, norm)
            return norm

        return clip

    def limit(self, asked: float) -> float | AdaptiveClip:
        """What to clip to if a caller asks for ``asked``.

        Raises:
            ValueError: The user has said something else.
        """
        own = self.max_norm
        asked = float(asked)
        if own is None or own == asked:
            return asked
        if asked == math.inf:
            return own
        raise ValueError(
            f"clip configured twice: install(..., max_norm={own!r}), and clip_grad_norm_ is called with {asked!r}. "
            "Leave max_norm out of install(), or pass float('inf') to clip_grad_norm_"
        )

    def measure(self, watched: Iterable[Watched]) -> None:
        """Lets monitors look at the gradients as they are, each once in a step."""
        for one in watched:
            if not one.measured:
                self._is_over = True
                one.step(self.accelerator.gradient_accumulation_steps)

    def _those_with(self, parameters: Sequence[Tensor]) -> list[Watched]:
        ids = [id(parameter) for parameter in parameters]
        those = [one for one in self.watched if one.holds(ids)]
        if not those and ids and self.watched and not self.clips_itself:
            self._tell_once(
                "clip_grad_norm_ was called with parameters of no model that is watched; they are clipped, and not "
                "measured. Prepare all models before gradstat's install()"
            )
        return those

    def _unscale(self, parameters: Sequence[Tensor]) -> None:
        """Unscales the gradients of the optimizers that hold these parameters, unless that was done.

        The accelerator's own way unscales all optimizers at every call, so that a second model's clip raises.
        """
        scaler = self.accelerator.scaler
        if scaler is None or not isinstance(scaler, torch.amp.GradScaler):
            self.accelerator.unscale_gradients()
            return
        ids = {id(parameter) for parameter in parameters}
        chosen = []
        for optimizer in self.accelerator._optimizers:
            inner = unwrapped(optimizer)
            held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
            if ids.isdisjoint(held):
                continue
            state = _scaling.state_of(scaler, inner)
            if state["stage"].name == "READY":
                chosen.append(optimizer)
        if chosen:
            self.accelerator.unscale_gradients(optimizer=chosen)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(f"gradstat: {text}", UserWarning, stacklevel=find_stack_level())

    def remove(self) -> None:
        """Gives the accelerator its own methods back."""
        for replaced in reversed(self._replaced):
            replaced.remove()
        if getattr(self.accelerator, MARK, None) is self:
            delattr(self.accelerator, MARK)
