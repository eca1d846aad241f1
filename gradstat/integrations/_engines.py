"""Engines under a framework: DeepSpeed's, which clips and steps by itself, and those that show no whole gradients."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from gradstat.adaptive._base import Limit

# By the class names of Lightning's strategies, and by Accelerate's distributed types.
_DEEPSPEED = ("DeepSpeedStrategy", "DEEPSPEED")
_REFUSED = {
    ("FSDPStrategy", "FSDP"): "expected whole parameters, got FSDP version 1, which gives each rank a shard of "
    "flattened ones. Use FSDP version 2: Lightning's ModelParallelStrategy, or fsdp_version=2",
    ("MEGATRON_LM",): "expected gradients visible to torch, got Megatron-LM, whose engine runs backward and step "
    "itself and exposes none. Use gradstat.Monitor inside the engine's training loop",
    ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy", "XLA"): "expected gradients on a CPU or a CUDA "
    "device, got XLA, for which gradstat has no kernels. Use torch's own clip_grad_norm_, and gradstat on another "
    "device",
}


def engine_clips(strategy: object, asked: AbstractSet[str], max_norm: Limit | None, setting: str) -> bool:
    """Whether an engine, DeepSpeed's, clips gradients itself, given Lightning's strategy or Accelerate's type.

    ``setting``, a part of the error message, says how its clip is set. Raises NotImplementedError if no gradients are
    visible, or if one of the policies ``asked`` for or ``max_norm`` cannot be carried out.
    """
    kinds = [strategy] if isinstance(strategy, str) else [kind.__name__ for kind in type(strategy).__mro__]
    for names, why in _REFUSED.items():
        if not set(names).isdisjoint(kinds):
            raise NotImplementedError(why)
    if set(_DEEPSPEED).isdisjoint(kinds):
        return False
    for policy in sorted({"skip", "replay"} & asked):
        raise NotImplementedError(
            f"on_anomaly={policy!r} cannot be done under DeepSpeed, whose engine runs the optimizer step itself; use "
            "'warn', 'raise' or 'stop'"
        )
    if max_norm is not None:
        raise NotImplementedError(
            f"max_norm={max_norm!r}: expected None under DeepSpeed, which clips itself; {setting}"
        )
    return True
