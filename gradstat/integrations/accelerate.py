"""Watches training loops written with Hugging Face Accelerate: `install`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gradstat._step.optimizers import unwrapped
from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._accelerator import AcceleratorBase
from gradstat.integrations._framework import require
from gradstat.integrations._options import Options
from gradstat.monitor.policies import Policies

require("accelerate", (1, 0))

from accelerate import Accelerator  # noqa: E402

__all__ = ["AccelerateHandle", "install"]


def install(
    accelerator: Any,
    *,
    on_anomaly: Policies = None,
    max_norm: float | AdaptiveClip | None = None,
    watch: Mapping[str, int] | Sequence[str] | None = None,
    micro_batches: bool = True,
    healthy_checkpoints: bool = False,
    **monitor_options: Any,
) -> AccelerateHandle:
    """Attaches a `gradstat.Monitor` to every model that ``accelerator`` has prepared. ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = gradstat.integrations.accelerate.install(accelerator, on_anomaly="skip")

    The loop stays as it is, and its weights keep their bits, unless a policy or ``max_norm`` changes a step. Gradients
    are measured as by `gradstat.auto`: when they are complete, before Accelerate unscales or clips them or the
    optimizer steps. ``accelerator.backward`` notes the loss. No host sync on a GPU besides those of `gradstat.Monitor`.

    Args:
        accelerator: An ``accelerate.Accelerator``, after ``prepare``.
        on_anomaly, watch, monitor_options: As for `gradstat.Monitor`.
        max_norm: A number or an adaptive clip, applied before each step of the optimizer. For loops that do not clip
            themselves or clip to infinity: another limit is refused.
        micro_batches: Under gradient accumulation, whether to check gradients after each micro-batch as well, to name
            the one that brought NaN or Inf. This costs one more pass over the gradients for each.
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
    options = Options(arguments, "accelerator", max_norm, healthy_checkpoints=healthy_checkpoints, caller=install)
    if isinstance(max_norm, AdaptiveClip) and len(models) > 1:
        raise ValueError(
            f"expected a number as max_norm for {len(models)} models, got {type(max_norm).__name__}, which "
            "keeps a single history; use a separate clip for each model"
        )
    pairs = [(model, _optimizer_of(model, optimizers, options)) for model in models]
    of_models = [wrapper for _, wrapper in pairs if wrapper is not None]
    distinct = len({id(wrapper) for wrapper in of_models})
    if distinct < len(of_models) and (asked := _changing(options)):
        raise ValueError(
            f"{asked} needs a separate optimizer for each of {len(of_models)} models, got one for several; put the "
            f"models into one torch.nn.ModuleList and prepare that, or leave {asked} out"
        )
    if not len(pairs) == distinct == len(optimizers):
        # Models and optimizers are not paired one to one, so this rule's findings about one model would be wrong.
        rules = options.arguments["rules"]
        options.arguments["rules"] = [rule for rule in rules if rule.name != "optimizer-coverage"]
    return AccelerateHandle(accelerator, options, pairs, micro_batches)


class AccelerateHandle(AcceleratorBase):
    """What `install` returns. A context manager; leaving it calls `remove`."""

    def __init__(
        self, accelerator: Any, options: Options, pairs: Sequence[tuple[nn.Module, Any]], micro_batches: bool
    ) -> None:
        """Made by `install`."""
        super().__init__(accelerator, options, lambda: accelerator.gradient_accumulation_steps if micro_batches else 1)
        for model, wrapper in pairs:
            attachment = self._attach(model, None if wrapper is None else unwrapped(wrapper), accelerator.scaler)
            # With several optimizers, no other one takes the step for that of a model.
            attachment._steps_itself = len(accelerator._optimizers) > 1
        self._patch_framework()
        if options.healthy_checkpoints:
            self._patch(accelerator, "save_state", self._in_save_state)

    def _in_save_state(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        is_withheld = any(attachment.withholds_checkpoint() for attachment in self.attachments)
        return None if is_withheld else original(*args, **kwargs)


def _changing(options: Options) -> str:
    """The option that changes steps, and so needs an optimizer for each model; empty if none does."""
    return "'skip'" if "skip" in options.policies else "max_norm" if options.max_norm is not None else ""


def _optimizer_of(model: nn.Module, optimizers: Sequence[Any], options: Options) -> Any:
    """The prepared optimizer of a model, if any; ValueError if there are several and an option changes steps."""
    ids = {id(parameter) for parameter in model.parameters()}
    those = [
        wrapper
        for wrapper in optimizers
        if any(id(p) in ids for group in unwrapped(wrapper).param_groups for p in group["params"])
    ]
    if len(those) > 1 and (asked := _changing(options)):
        raise ValueError(
            f"{asked} needs a single optimizer for {type(model).__name__}, got {len(those)}; leave it out, or use "
            "gradstat.guarded_step on each"
        )
    return those[0] if those else None
