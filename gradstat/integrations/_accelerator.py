"""Patches an accelerator so that ``clip_grad_norm_`` measures the complete, unscaled, unclipped gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradstat._step import loss_scale
from gradstat.integrations._clipping import clip_with_norm
from gradstat.integrations._engines import engine_clips, engine_name_of
from gradstat.integrations._framework import unwrapped
from gradstat.integrations._handle import Handle
from gradstat.integrations._options import Options
from gradstat.integrations._watch import Watch
from gradstat.monitor.reporting import warn


class AcceleratorBase(Handle):
    """The handle of an integration that measures in the accelerator's ``clip_grad_norm_``.

    ``micro_batches`` returns the number of micro-batches of the current step. Raises what `engine_clips` raises.
    """

    def __init__(self, accelerator: Any, options: Options, micro_batches: Callable[[], int]) -> None:
        super().__init__(options)
        self._micro_batches = micro_batches
        self._warned: set[str] = set()
        self._check(accelerator)

    def _check(self, accelerator: Any) -> None:
        """Raises what `engine_clips` raises; afterwards watches can be made."""
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        self._engine_clips = engine_clips(
            None if kind == "FSDP" and getattr(accelerator, "is_fsdp2", False) else engine_name_of(kind),
            self._options,
            self._options.max_norm,
            accelerator.num_processes,
            "set its clip in its configuration, or pass a number to clip_grad_norm_",
        )
        self._accelerator, self._engine = accelerator, None
        self._device = accelerator.device if accelerator.num_processes > 1 else None
        self._end_origin_watch(accelerator)

    def _attach(self) -> None:
        """Patches the accelerator, once the watches have been made: a handle that it already has is removed."""
        accelerator = self._accelerator
        self._mark_watched(accelerator)
        self._patch(accelerator, "clip_grad_norm_", self._in_clip)
        self._patch(accelerator, "backward", self._in_backward)

    def _in_backward(self, original: Any, loss: Any, **options: Any) -> Any:
        engine = getattr(getattr(self._accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        if engine is not None:  # DeepSpeed: Accelerate's backward() also calls the engine's step()
            if engine is not self._engine:
                self._engine = engine
                self._patch(engine, "step", self._in_engine_step)
            # The Trainer has divided the loss by the number of micro-batches.
            is_divided = isinstance(loss, Tensor) and options.get("scale_wrt_gas") is False
            steps = self._accelerator.gradient_accumulation_steps
            self._saw_backward(loss.detach() * steps if is_divided else loss, False)
            return original(loss, **options)
        result = original(loss, **options)
        self._saw_backward(loss, self._micro_batches() > 1 and not self._engine_clips)
        return result

    def _in_engine_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._measure(self.watches, self._accelerator.gradient_accumulation_steps)
        return original(*args, **kwargs)

    def _in_clip(
        self, original: Any, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        limit = self._limit(max_norm, "clip_grad_norm_")
        norm = None
        if not self._engine_clips:
            self._unscale(listed)
            norm = self._norm_of(listed, norm_type)
        is_complete = self._engine_clips or self._accelerator.sync_gradients
        if is_complete:
            self._measure(self._watches_of(listed), self._accelerator.gradient_accumulation_steps)
        else:
            how = "clipped but not" if isinstance(limit, float) else "neither clipped nor"
            self._warn_once(
                "partial",
                "clip_grad_norm_ was called while gradients are still being accumulated: the partial gradients are "
                f"{how} measured. Call it under `if accelerator.sync_gradients:`",
            )
        if self._engine_clips:
            return original(listed, max_norm, norm_type)
        if norm is None:
            return self._torch_clip(listed, max_norm, norm_type)
        if is_complete or isinstance(limit, float):
            clip_with_norm(listed, limit, norm)
        return norm

    def _watches_of(self, parameters: Sequence[Tensor]) -> list[Watch]:
        ids = [id(parameter) for parameter in parameters]
        those = [watch for watch in self.watches if watch.holds(ids)]
        if not those and ids and self.watches and not self._engine_clips:
            self._warn_once(
                "unknown",
                "clip_grad_norm_ was called with parameters that belong to no watched model; they are clipped but not "
                "measured. Prepare all models before gradstat's install()",
            )
        return those

    def _unscale(self, parameters: Sequence[Tensor]) -> None:
        """Unscales the gradients of the optimizers that hold these parameters, unless already done.

        The accelerator's own method unscales all optimizers on every call, so clipping a second model would raise.
        """
        scaler = self._accelerator.scaler
        if scaler is None or not isinstance(scaler, torch.amp.GradScaler):
            self._accelerator.unscale_gradients()
            return
        ids = {id(parameter) for parameter in parameters}
        chosen = []
        for optimizer in self._accelerator._optimizers:
            inner = unwrapped(optimizer)
            held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
            if not ids.isdisjoint(held) and loss_scale.state_of(scaler, inner)["stage"] is OptState.READY:
                chosen.append(optimizer)
        if chosen:
            self._accelerator.unscale_gradients(optimizer=chosen)

    def _warn_once(self, key: str, text: str, category: type[UserWarning] = UserWarning) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text, category)
