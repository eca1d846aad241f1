"""Watches training loops written with Hugging Face Accelerate: `install`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradstat._core.parameters import as_list
from gradstat._core.warn import warn
from gradstat._core.wrappers import without_ddp
from gradstat._step.optimizers import unwrapped
from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._engines import engine_name_of
from gradstat.integrations._handle import Handle, Watched, require_framework
from gradstat.monitor.policies import Policies

require_framework("accelerate", (1, 0))

from accelerate import Accelerator  # noqa: E402

__all__ = ["AccelerateHandle", "install"]

_MARK = "_gradstat_handle"  # the attribute of an accelerator that holds its handle


def install(
    accelerator: Any,
    *,
    on_anomaly: Policies = None,
    max_norm: float | AdaptiveClip | None = None,
    watch: Mapping[str, int] | Sequence[str] | None = None,
    healthy_checkpoints: bool = False,
    **monitor_options: Any,
) -> AccelerateHandle:
    """Attaches a `gradstat.Monitor` to every model that ``accelerator`` has prepared. ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = gradstat.integrations.accelerate.install(accelerator, on_anomaly="skip")

    The loop stays as it is, and its weights keep their bits, unless a policy or ``max_norm`` changes a step. Gradients
    are measured as by `gradstat.auto`: when they are complete, before Accelerate unscales or clips them or the
    optimizer steps. ``accelerator.backward`` notes the loss. No host sync on a GPU except those of `gradstat.Monitor`.

    Args:
        accelerator: An ``accelerate.Accelerator``, after ``prepare``.
        on_anomaly, watch, monitor_options: As for `gradstat.Monitor`.
        max_norm: A number or an adaptive clip, applied before each step of the optimizer. For loops that do not clip
            themselves or clip to infinity: another limit is refused.
        healthy_checkpoints: Whether ``accelerator.save_state`` saves nothing and returns None while
            `gradstat.Monitor.is_healthy` is False, so that no such state replaces a healthy one.

    Returns:
        A handle with the monitors. A second call removes the handle of the first.

    Raises:
        TypeError: ``accelerator`` is not an Accelerator, or an option must not be given.
        RuntimeError: Nothing has been prepared yet.
        ValueError: An option is invalid.
        NotImplementedError: The engine's gradients cannot be measured (Megatron-LM, XLA), or it does not allow what an
            option asks for.
    """
    if not isinstance(accelerator, Accelerator):
        what = f"the class {accelerator.__name__}" if isinstance(accelerator, type) else type(accelerator).__name__
        hint = "; pass an instance, not the class" if isinstance(accelerator, type) else ""
        raise TypeError(f"expected an accelerate.Accelerator, got {what}{hint}")
    models, optimizers = accelerator._models, accelerator._optimizers
    if not models or not optimizers:
        lacking = "model" if not models else "optimizer"
        raise RuntimeError(
            f"expected an accelerator that has prepared model and optimizer, got one without {lacking}; call install() "
            "after accelerator.prepare(model, optimizer, ...)"
        )
    arguments = {"on_anomaly": on_anomaly, "watch": watch, **monitor_options}
    return AccelerateHandle(accelerator, arguments, max_norm, install, healthy_checkpoints)


class AccelerateHandle(Handle):
    """What ``install()`` returns. A context manager; leaving it calls ``remove()``."""

    source = "accelerator"

    def __init__(self, accelerator: Any, *arguments: Any) -> None:
        """Made by `install`."""
        super().__init__(*arguments)
        self._warned: set[str] = set()
        self._aside: list[Watched] = []  # the clip that runs is not that of their models
        self._check(accelerator)
        self._attach_models()
        self._patch_framework()

    def _check(self, accelerator: Any) -> None:
        """Raises what `engine_clips` raises; afterwards models can be watched."""
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        is_fsdp2 = kind == "FSDP" and getattr(accelerator, "is_fsdp2", False)
        engine = None if is_fsdp2 else engine_name_of(kind)
        setting = "set its clip in its configuration, or pass a number to clip_grad_norm_"
        self._prepare(engine, accelerator.num_processes, accelerator.device, setting)
        self._accelerator, self._engine = accelerator, None
        self.is_replicated: bool = kind.startswith("MULTI_")  # by DDP; Accelerate has a name for each kind of device

    def _attach_models(self) -> None:
        """Pairs models and optimizers, and watches them; ValueError if an option does not allow the pairs."""
        models, optimizers = self._accelerator._models, self._accelerator._optimizers
        if isinstance(self.max_norm, AdaptiveClip) and len(models) > 1:
            raise ValueError(
                f"expected a number as max_norm for {len(models)} models, got {type(self.max_norm).__name__}, which "
                "keeps a single history; use a separate clip for each model"
            )
        # The option that changes steps, and so needs an optimizer for each model.
        changing = "'skip'" if "skip" in self.policies else "max_norm" if self.max_norm is not None else ""
        pairs = [(model, _optimizer_of(model, optimizers, changing)) for model in models]
        of_models = [optimizer for _, optimizer in pairs if optimizer is not None]
        distinct = len(set(map(id, of_models)))
        if distinct < len(of_models) and changing:
            raise ValueError(
                f"{changing} needs a separate optimizer for each of {len(of_models)} models, got one for several; put "
                f"the models into one torch.nn.ModuleList and prepare that, or leave {changing} out"
            )
        if not len(pairs) == distinct == len(optimizers):
            # Models and optimizers are not paired one to one, so this rule's findings about one model would be wrong.
            self.arguments["rules"] = [r for r in self.arguments["rules"] if r.name != "optimizer-coverage"]
        for model, optimizer in pairs:
            # With several optimizers, no other one takes the step for that of a model.
            self._attach(model, optimizer, self._accelerator.scaler, steps_itself=len(optimizers) > 1)

    def _patch_framework(self) -> None:
        """Patches the accelerator, once the models are watched.

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
        if self.healthy_checkpoints:
            self._patch(accelerator, "save_state", self._in_save_state)

    def _remove(self) -> None:
        super()._remove()
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
            self._saw_backward(loss.detach() * steps if is_divided else loss)
            return original(loss, **options)
        result = original(loss, **options)
        self._saw_backward(loss)
        return result

    def _in_save_state(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self._withholds_checkpoint() else original(*args, **kwargs)

    def _in_join(self, original: Any, joinables: Any, *args: Any, **kwargs: Any) -> Any:
        """Gives the monitors the DDP modules; the accelerator holds only the models inside of them."""
        joinables = list(joinables)
        for one in self.watched:
            for wrapper in joinables:
                if without_ddp(wrapper) is one.model:
                    one.wrapper = wrapper
        return original(joinables, *args, **kwargs)

    def _in_engine_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        for one in self.watched:
            one.measure()
        return original(*args, **kwargs)

    def is_complete(self, watched: Watched) -> bool:
        """Whether the accelerator synchronizes gradients, and clips none or those of ``watched``."""
        return bool(self._accelerator.sync_gradients) and watched not in self._aside

    def divisor(self) -> int:
        """The number of micro-batches."""
        return int(self._accelerator.gradient_accumulation_steps)

    def _in_clip(
        self, name: str, original: Any, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Clips as the accelerator does; it unscales all optimizers, also those of models that it does not clip."""
        listed = as_list(parameters)
        if name == "clip_grad_norm_":
            asked = args[0] if args else kwargs.get("max_norm")
            if self.max_norm is not None and asked is not None and float(asked) not in (self.max_norm, math.inf):
                raise ValueError(
                    f"clip configured twice: install(..., max_norm={self.max_norm!r}), and {name} is called with "
                    f"{float(asked)!r}. Leave max_norm out of install(), or pass float('inf') to {name}"
                )
        those = [one for one in self.watched if one.listener.holds(listed)]
        if not self._accelerator.sync_gradients:
            self._warn_once(
                "partial",
                f"{name} was called while gradients are still being accumulated: the partial gradients are "
                "not measured. Call it under `if accelerator.sync_gradients:`",
            )
        elif not those and listed and self.watched and not self._engine_clips:
            self._warn_once(
                "unknown",
                f"{name} was called with parameters that belong to no watched model; they are clipped but not "
                "measured. Prepare all models before gradstat's install()",
            )
        self._aside = [one for one in self.watched if one not in those]
        try:
            if self._engine_clips and self._accelerator.sync_gradients:
                for one in those:
                    if not one.has_engine:  # FSDP 1 announces nothing
                        one.measure()
            return original(listed, *args, **kwargs)
        finally:
            self._aside = []

    def _warn_once(self, key: str, text: str, category: type[UserWarning] = UserWarning) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text, category)


def _optimizer_of(model: nn.Module, optimizers: Sequence[Any], changing: str) -> Any:
    """A model's optimizer, if any; ValueError if there are several and the option ``changing`` changes steps."""
    ids = {id(parameter) for parameter in model.parameters()}
    those = [
        optimizer
        for optimizer in map(unwrapped, optimizers)
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
    ]
    if len(those) > 1 and changing:
        raise ValueError(
            f"{changing} needs a single optimizer for {type(model).__name__}, got {len(those)}; leave it out, or use "
            "gradstat.guarded_step on each"
        )
    return those[0] if those else None
