"""Engines that clip and step by themselves: the options that each one rules out, and what cannot be measured there."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from gradstat._core.warn import warn
from gradstat.adaptive._base import Limit

# The class names of their Lightning strategies, and their Accelerate distributed types.
_NAMES = {
    "DeepSpeed": ("DeepSpeedStrategy", "DEEPSPEED"),
    "FSDP 1": ("FSDPStrategy", "FSDP"),
    "XLA": ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy", "XLA"),
    "Megatron-LM": ("MEGATRON_LM",),
}

_REFUSED = {
    "Megatron-LM": "expected gradients visible to torch, got Megatron-LM, whose engine runs backward and step itself "
    "and exposes none. Use gradstat.Monitor inside the engine's training loop",
    "XLA": "expected gradients on a CPU or a CUDA device, got XLA, for which gradstat has no kernels. Use torch's own "
    "clip_grad_norm_, and gradstat on another device",
}

_FSDP_1 = (
    "FSDP version 1 gives each rank a shard of flattened parameters, so statistics are those of this rank's shard, "
    "under flattened names; the total norm is FSDP's own. Use FSDP version 2 (fully_shard) for whole parameters"
)

_POLICIES = {
    "DeepSpeed": ({"skip", "rollback", "replay"}, "whose engine runs the optimizer step itself"),
    "FSDP 1": ({"skip", "rollback"}, "where each rank sees only its shard, so ranks would decide differently"),
}


def engine_name_of(strategy: object) -> str | None:
    """The engine behind a strategy or a distributed type; None if gradients are left to torch."""
    kinds = [strategy] if isinstance(strategy, str) else [kind.__name__ for kind in type(strategy).__mro__]
    return next((engine for kind in kinds for engine, names in _NAMES.items() if kind in names), None)


def engine_clips(
    engine: str | None, asked: AbstractSet[str], max_norm: Limit | None, world_size: int, setting: str
) -> bool:
    """Whether the engine clips gradients itself; warns of what cannot be measured under it.

    ``setting``, a part of the error message, says how its clip is set. Raises NotImplementedError if no gradients are
    visible, or if one of the policies ``asked`` for or ``max_norm`` cannot be carried out.
    """
    if engine in _REFUSED:
        raise NotImplementedError(_REFUSED[engine])
    if world_size > 1 and "rollback" in asked:
        raise NotImplementedError(
            f"on_anomaly='rollback' on {world_size} ranks: ranks do not coordinate a rollback; use 'skip' or 'stop', "
            "which they do"
        )
    if engine is None:
        return False
    policies, why = _POLICIES[engine]
    for policy in sorted(policies & asked):
        raise NotImplementedError(
            f"on_anomaly={policy!r} cannot be done under {engine}, {why}; use 'warn', 'raise', 'stop' or 'snapshot'"
        )
    if max_norm is not None:
        raise NotImplementedError(f"max_norm={max_norm!r}: expected None under {engine}, which clips itself; {setting}")
    if engine == "FSDP 1":
        warn(_FSDP_1, UserWarning)
    return True
