"""Watches training loops written with Lightning Fabric: `install`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._clipping import OptimizerClip, clip_with_norm
from gradstat.integrations._engines import engine_clips, engine_name_of
from gradstat.integrations._framework import require, unwrapped
from gradstat.integrations._handle import Handle
from gradstat.integrations._options import Options
from gradstat.integrations._watch import Watch
from gradstat.monitor.policies import Policies

require("lightning", (2, 4))

from lightning.fabric import Fabric  # noqa: E402

__all__ = ["FabricHandle", "install"]


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

    The loop stays as it is. ``fabric.backward`` notes the loss, ``fabric.clip_gradients`` measures the gradients before
    it clips them, and ``optimizer.step`` measures them if the loop does not clip.

    Args:
        fabric: A ``lightning.Fabric``.
        model, optimizer: As ``fabric.setup`` returned them. For several models call `install` for each, and
            pass ``model=`` to ``fabric.backward`` unless each model steps right after its own loss.
        on_anomaly, watch, monitor_options: As for `gradstat.Monitor`.
        max_norm: What to clip to, a number or an adaptive clip, if the loop does not clip.
        micro_batches: How many times ``fabric.backward`` is called per step. If more than once, the micro-batch that
            brought NaN or Inf is named, at one more read of the gradients for each.

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
    options = Options({"on_anomaly": on_anomaly, "watch": watch, **monitor_options}, "fabric", max_norm)
    return FabricHandle(fabric, model, optimizer, options, micro_batches)


class FabricHandle(Handle):
    """What `install` returns. A context manager; leaving it calls `remove`."""

    def __init__(self, fabric: Any, model: Any, optimizer: Any, options: Options, micro_batches: int) -> None:
        """Made by `install`."""
        super().__init__(options, fabric)
        self._fabric, self._micro_batches, strategy, ranks = fabric, micro_batches, fabric.strategy, fabric.world_size
        self._engine_clips = engine_clips(
            engine_name_of(strategy), options, options.max_norm, ranks, "set its clip in its strategy's configuration"
        )
        scaler = getattr(strategy.precision, "scaler", None)
        self._clip = OptimizerClip(scaler)
        device, inner = fabric.device if ranks > 1 else None, unwrapped(optimizer)
        self._end_origin_watch(optimizer)
        self.watches = [Watch(model._forward_module, inner, scaler, options, options.max_norm, device=device)]
        self._mark_watched(optimizer)
        self._patch(fabric, "backward", self._in_backward)
        self._patch(fabric, "clip_gradients", self._in_clip)
        self._patch(optimizer, "step", self._in_step)

    def _in_backward(self, original: Any, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        original(tensor, *args, model=model, **kwargs)
        if model is None or model._forward_module is self.watches[0].model:
            self._saw_backward(tensor, self._micro_batches > 1 and not self._engine_clips)

    def _in_clip(
        self,
        original: Any,
        module: Any,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        inner = unwrapped(optimizer)
        is_watched = inner is self.watches[0].optimizer
        if not is_watched or self._engine_clips or max_norm is None or clip_val is not None or norm_type != 2:
            self._measure(self.watches if is_watched else ())
            return original(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
        limit = self._limit(max_norm, "clip_gradients")
        if self._clip.leaves_scaled(inner):
            self._measure(self.watches)
            return self._clip.clip(inner, limit)
        is_error = error_if_nonfinite and "skip" not in self._options.policies
        parameters = [p for group in inner.param_groups for p in group["params"]]
        self._fabric.strategy.precision.unscale_gradients(inner)
        norm = self._norm_of(parameters)
        self._measure(self.watches)
        if norm is None:
            return self._torch_clip(parameters, max_norm, error=is_error)
        if is_error and not norm.isfinite():
            remedy = "pass error_if_nonfinite=False, or on_anomaly='skip' to install()"
            raise RuntimeError(f"cannot clip, as the norm of the gradients is non-finite ({norm.item()}); {remedy}")
        return clip_with_norm(parameters, limit, norm)

    def _in_step(self, original: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Measures and clips the gradients before the step if the loop has not."""
        watch, max_norm = self.watches[0], self._options.max_norm

        def evaluated() -> Any:  # the closure computes the gradients
            loss = closure() if closure is not None else None
            if not watch.measured:
                self._measure([watch])
                if max_norm is not None and watch.optimizer is not None:
                    self._clip.clip(watch.optimizer, max_norm)
            return loss

        try:
            if closure is not None:
                return original(evaluated)
            evaluated()
            return original()
        finally:
            watch.measured = False
            self._clip.forget()
