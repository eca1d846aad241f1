"""Engines that clip and step by themselves: which options each one rules out, and what cannot be measured under it."""

from __future__ import annotations

from typing import Any

from gradstat.integrations._options import Options
from gradstat.monitor.reporting import warn

# Keyed by the class name of a Lightning or Fabric strategy, or by an Accelerate distributed type.
_NAMES = {
    "DeepSpeedStrategy": "DeepSpeed",
    "FSDPStrategy": "FSDP 1",
    "XLAStrategy": "XLA",
    "SingleDeviceXLAStrategy": "XLA",
    "XLAFSDPStrategy": "XLA",
    "DEEPSPEED": "DeepSpeed",
    "FSDP": "FSDP 1",
    "XLA": "XLA",
    "MEGATRON_LM": "Megatron-LM",
}

_REFUSED = {
    "Megatron-LM": "expected gradients that torch sees, got Megatron-LM, whose engine runs backward and step itself "
    "and shows none. Use gradstat.Monitor inside of the engine's training loop",
    "XLA": "expected gradients on a CPU or a CUDA device, got XLA, for which gradstat has no kernels. Use torch's own "
    "clip_grad_norm_, and gradstat on another device",
}

_OUT_OF_SIGHT = {
    "FSDP 1": "FSDP version 1 shows every rank its piece of flattened parameters. Statistics are those of this rank's "
    "piece, under flattened names; the total norm is FSDP's own. With FSDP version 2 (fully_shard) all are whole",
}

_POLICIES = {
    "DeepSpeed": ({"skip", "rollback", "replay"}, "whose engine steps by itself"),
    "FSDP 1": ({"skip", "rollback"}, "where each rank sees only its piece, so that ranks would decide differently"),
}


def engine_of(strategy: object) -> str | None:
    """The engine behind a strategy or a distributed type; None if gradients are left to torch."""
    kinds = [strategy] if isinstance(strategy, str) else [kind.__name__ for kind in type(strategy).__mro__]
    return next((_NAMES[kind] for kind in kinds if kind in _NAMES), None)


def engine_clips(engine: str | None, options: Options, max_norm: Any, world_size: int, setting: str) -> bool:
    """Whether the engine clips gradients itself; warns of what cannot be measured under it.

    ``setting``, a part of the error message, says how its clip is set. Raises NotImplementedError if no gradients are
    visible, or if a policy or ``max_norm`` cannot be carried out.
    """
    if engine in _REFUSED:
        raise NotImplementedError(_REFUSED[engine])
    if world_size > 1 and "rollback" in options.policies:
        raise NotImplementedError(
            f"on_anomaly='rollback' on {world_size} ranks: going back is not agreed upon between ranks. Use 'skip', or "
            "'stop', on which they agree"
        )
    if engine is None:
        return False
    policies, why = _POLICIES[engine]
    for policy in sorted(policies & options.policies):
        raise NotImplementedError(
            f"on_anomaly={policy!r} cannot be done under {engine}, {why}; use 'warn', 'raise', 'stop' or 'snapshot'"
        )
    if max_norm is not None:
        raise NotImplementedError(f"max_norm={max_norm!r}: expected None under {engine}, which clips itself; {setting}")
    if engine in _OUT_OF_SIGHT:
        warn(_OUT_OF_SIGHT[engine], UserWarning)
    return True
