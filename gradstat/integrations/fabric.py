"""Watches training loops written with Lightning Fabric: `install`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradstat._step.optimizers import unwrapped
from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._engines import engine_name_of
from gradstat.integrations._framework import require
from gradstat.integrations._handle import Handle
from gradstat.integrations._options import Options
from gradstat.monitor.policies import Policies

require("lightning", (2, 4))

from lightning.fabric import Fabric  # noqa: E402

__all__ = ["FabricHandle", "install"]

_TURNS: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # of each fabric, whose backward all its handles see


def install(
    fabric: Any,
    model: Any,
    optimizer: Any,
    *,
    on_anomaly: Policies = None,
    max_norm: float | AdaptiveClip | None = None,
    watch: Mapping[str, int] | Sequence[str] | None = None,
    micro_batches: int = 1,
    **monitor_options: Any,
) -> FabricHandle:
    """Attaches a `gradstat.Monitor` to the model and optimizer that ``fabric.setup`` returned. ::

        model, optimizer = fabric.setup(model, optimizer)
        handle = gradstat.integrations.fabric.install(fabric, model, optimizer, on_anomaly="skip")

    The loop stays as it is, and its weights keep their bits, unless a policy or ``max_norm`` changes a step. Gradients
    are measured as by `gradstat.auto`, before Fabric unscales or clips them or the optimizer steps. ``fabric.backward``
    notes the loss.

    Args:
        fabric: A ``lightning.Fabric``.
        model, optimizer: As ``fabric.setup`` returned them. For several models call `install` for each, and
            pass ``model=`` to ``fabric.backward`` unless each model steps right after its own loss.
        on_anomaly, watch, monitor_options: As for `gradstat.Monitor`.
        max_norm: A number or an adaptive clip, applied before each step of the optimizer, if the loop does not clip by
            norm. Works for fused optimizers under a loss scaler, too, for which Fabric refuses to clip.
        micro_batches: How many times ``fabric.backward`` is called per step. If more than once, the micro-batch that
            brought NaN or Inf is named. This costs one more pass over the gradients for each micro-batch.

    Returns:
        A handle with the monitor; a second call removes the first handle. ``fabric.save(path, {"gradstat": handle})``
        saves its state.

    Raises:
        TypeError: ``fabric``, model or optimizer is of the wrong type, or an option must not be given.
        ValueError: An option is invalid.
        NotImplementedError: The strategy's gradients cannot be measured, or it does not allow what an option asks for.
    """
    if not isinstance(fabric, Fabric):
        raise TypeError(f"expected a lightning.Fabric, got {type(fabric).__name__}")
    for what, thing, mark in (("model", model, "_forward_module"), ("optimizer", optimizer, "optimizer")):
        if not hasattr(thing, mark):
            raise TypeError(f"{what}: expected what fabric.setup() returned, got {type(thing).__name__}")
    if type(micro_batches) is not int or micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches!r}; expected the number of fabric.backward calls per step")
    options = Options({"on_anomaly": on_anomaly, "watch": watch, **monitor_options}, "fabric", max_norm, caller=install)
    return FabricHandle(fabric, model, optimizer, options, micro_batches)


class FabricHandle(Handle):
    """What `install` returns. A context manager; leaving it calls `remove`."""

    def __init__(self, fabric: Any, model: Any, optimizer: Any, options: Options, micro_batches: int) -> None:
        """Made by `install`."""
        super().__init__(options)
        self._turns = _TURNS.setdefault(fabric, [0])
        self._micro_batches = micro_batches
        engine, setting = engine_name_of(fabric.strategy), "set its clip in its strategy's configuration"
        self._prepare(engine, fabric.world_size, fabric.device, setting)
        self._is_replicated = isinstance(model._forward_module, DistributedDataParallel)
        self._end_origin_tracking(optimizer)
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        attachment = self._attach(model._forward_module, unwrapped(optimizer), scaler)
        self._mark_watched(optimizer)
        self._patch(fabric, "backward", self._in_backward)
        self._patch(fabric, "clip_gradients", self._in_clip)
        if attachment.engine is not None:
            self._patch(optimizer, "step", self._in_engine_step)

    def _in_backward(self, original: Any, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        original(tensor, *args, model=model, **kwargs)
        if model is None or model._forward_module is self.attachments[0].model:
            self._saw_backward(tensor, self._micro_batches > 1 and not self._engine_clips)

    def _in_clip(self, original: Any, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if unwrapped(optimizer) is self._single.optimizer:
            self._refuse_another_limit(args[1] if len(args) > 1 else kwargs.get("max_norm"), "clip_gradients")
            if self._engine_clips and self._single.engine is None:  # FSDP 1 announces nothing
                self._single.measure()
            if "skip" in self._options.policies and len(args) < 4:  # else NaN and Inf raise by default
                kwargs.setdefault("error_if_nonfinite", False)
        return original(module, optimizer, *args, **kwargs)
