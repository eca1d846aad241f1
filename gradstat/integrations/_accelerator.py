"""What the adapters of Accelerate and of the Trainer share: losses, micro-batches, and DeepSpeed's own step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from gradstat._core.parameters import as_list
from gradstat._core.wrappers import without_ddp
from gradstat.integrations._attachment import Attachment
from gradstat.integrations._engines import engine_name_of
from gradstat.integrations._handle import Handle
from gradstat.integrations._options import Options
from gradstat.monitor.reporting import warn

_MARK = "_gradstat_handle"  # the attribute of an accelerator that holds its handle


class AcceleratorBase(Handle):
    """The handle of an integration that watches what an accelerator has prepared.

    ``micro_batches`` returns the number of micro-batches of the current step. Raises what `engine_clips` raises.
    """

    def __init__(self, accelerator: Any, options: Options, micro_batches: Callable[[], int]) -> None:
        super().__init__(options)
        self._micro_batches = micro_batches
        self._warned: set[str] = set()
        self._aside: list[Attachment] = []  # the clip that runs is not that of their models
        self._check(accelerator)

    def _check(self, accelerator: Any) -> None:
        """Raises what `engine_clips` raises; afterwards attachments can be made."""
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        is_fsdp2 = kind == "FSDP" and getattr(accelerator, "is_fsdp2", False)
        setting = "set its clip in its configuration, or pass a number to clip_grad_norm_"
        self._prepare(
            None if is_fsdp2 else engine_name_of(kind), accelerator.num_processes, accelerator.device, setting
        )
        self._accelerator, self._engine = accelerator, None
        self._is_replicated = kind.startswith("MULTI_")  # by DDP, one of Accelerate's names for each kind of device

    def _patch_framework(self) -> None:
        """Patches the accelerator, once the attachments have been made.

        A handle that it already has is removed, as of a notebook cell that runs again.
        """
        accelerator = self._accelerator
        earlier = getattr(accelerator, _MARK, None)
        if earlier is not None:
            earlier.remove()
        setattr(accelerator, _MARK, self)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._patch(accelerator, name, functools.partial(self._in_clip, name))
        self._patch(accelerator, "backward", self._in_backward)
        self._patch(accelerator, "join_uneven_inputs", self._in_join)

    def _detach(self) -> None:
        super()._detach()
        if getattr(self._accelerator, _MARK, None) is self:
            delattr(self._accelerator, _MARK)

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

    def _in_join(self, original: Any, joinables: Any, *args: Any, **kwargs: Any) -> Any:
        """Tells the monitors which DDP modules take part; the accelerator holds only the models inside of them."""
        joinables = list(joinables)
        for attachment in self.attachments:
            for wrapper in joinables:
                if without_ddp(wrapper) is attachment.model:
                    attachment.monitor._collector.wrapper = wrapper
        return original(joinables, *args, **kwargs)

    def _in_engine_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        for attachment in self.attachments:
            attachment.measure()
        return original(*args, **kwargs)

    def _attach(self, *args: Any, **kwargs: Any) -> Attachment:
        attachment = super()._attach(*args, **kwargs)
        attachment._is_complete = lambda: bool(self._accelerator.sync_gradients) and attachment not in self._aside
        attachment.divisor = lambda: int(self._accelerator.gradient_accumulation_steps)
        return attachment

    def _in_clip(
        self, name: str, original: Any, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Clips as the accelerator does; it unscales all optimizers, also those of models that it does not clip."""
        listed = as_list(parameters)
        if name == "clip_grad_norm_":
            self._refuse_another_limit(args[0] if args else kwargs.get("max_norm"), name)
        those = [attachment for attachment in self.attachments if attachment._holds(listed)]
        if not self._accelerator.sync_gradients:
            self._warn_once(
                "partial",
                f"{name} was called while gradients are still being accumulated: the partial gradients are "
                "not measured. Call it under `if accelerator.sync_gradients:`",
            )
        elif not those and listed and self.attachments and not self._engine_clips:
            self._warn_once(
                "unknown",
                f"{name} was called with parameters that belong to no watched model; they are clipped but not "
                "measured. Prepare all models before gradstat's install()",
            )
        self._aside = [attachment for attachment in self.attachments if attachment not in those]
        try:
            if self._engine_clips and self._accelerator.sync_gradients:
                for attachment in those:
                    if attachment.engine is None:  # FSDP 1 announces nothing
                        attachment.measure()
            return original(listed, *args, **kwargs)
        finally:
            self._aside = []

    def _refuse_another_limit(self, asked: Any, caller: str) -> None:
        """ValueError if ``caller``, the accelerator's clip, clips to another limit than ``max_norm``."""
        max_norm = self._options.max_norm
        if max_norm is not None and asked is not None and float(asked) not in (max_norm, math.inf):
            raise ValueError(
                f"clip configured twice: install(..., max_norm={max_norm!r}), and {caller} is called with "
                f"{float(asked)!r}. Leave max_norm out of install(), or pass float('inf') to {caller}"
            )

    def _warn_once(self, key: str, text: str, category: type[UserWarning] = UserWarning) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text, category)
