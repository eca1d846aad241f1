"""What cannot be watched, or not all of it, and arguments that make no sense: said before training."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._watched import Options
from gradstat.monitor.policies import find_stack_level

MARK = "_gradstat_watch"
"""The attribute of an accelerator that is watched."""


def refuse_second(accelerator: Any) -> None:
    """Raises RuntimeError if the accelerator is watched already."""
    if getattr(accelerator, MARK, None) is not None:
        raise RuntimeError(
            "gradstat is installed on this accelerator already, and a second time would measure and clip twice; call "
            "remove() of the first handle before"
        )


def engine_clips(accelerator: Any) -> bool:
    """Whether gradients are an engine's, which clips them itself; says what is visible then.

    Raises:
        NotImplementedError: Nothing at all would be visible, or there are no kernels.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "MEGATRON_LM":
        raise NotImplementedError(
            "expected gradients that torch sees, got Megatron-LM, whose engine runs backward and step itself and shows "
            "none. Use gradstat.Monitor inside of the engine's training loop"
        )
    if kind == "XLA":
        raise NotImplementedError(
            "expected gradients on a CPU or a CUDA device, got XLA, for which gradstat has no kernels. Use torch's own "
            "clip_grad_norm_, and gradstat on another device"
        )
    if kind == "DEEPSPEED":
        warnings.warn(
            "gradstat: under DeepSpeed the engine keeps gradients to itself (`.grad` is None), clips and steps by "
            "itself. Visible are losses, parameters and its gradient norm; not visible are gradients of parameters, so "
            "nothing can be named, skipped or clipped here",
            UserWarning,
            stacklevel=find_stack_level(),
        )
        return True
    if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        warnings.warn(
            "gradstat: FSDP version 1 shows every rank its piece of flattened parameters. Statistics are those of this "
            "rank's piece, under flattened names; the total norm is FSDP's own. With fsdp_version=2 all are whole",
            UserWarning,
            stacklevel=find_stack_level(),
        )
        return True
    return False


def checked_limit(max_norm: Any) -> float | AdaptiveClip | None:
    """``max_norm`` as a positive number, an adaptive clip or None.

    Raises:
        TypeError, ValueError: It is none of these.
    """
    if max_norm is None or isinstance(max_norm, AdaptiveClip):
        return max_norm
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float | torch.Tensor):
        raise TypeError(f"max_norm: expected a number, an adaptive clip or None, got {type(max_norm).__name__}")
    number = float(max_norm)
    if not number > 0:
        raise ValueError(f"max_norm is {number}; expected a number above 0, or None to leave clipping as it is")
    return number


def refuse_impossible(accelerator: Any, options: Options, max_norm: Any) -> None:
    """Raises ValueError for what cannot be done to gradients that are an engine's; `engine_clips` says the rest."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "DEEPSPEED":
        # None of them is missing, or 0: they are somewhere else.
        blind = {"missing-gradient", "vanishing-gradient"}
        options.rules = [rule for rule in options.rules if rule.name not in blind]
        for policy in ("skip", "rollback", "replay"):
            if options.policies.uses(policy):
                raise ValueError(
                    f"on_anomaly={policy!r} cannot be done under DeepSpeed, whose engine steps by itself; use 'warn', "
                    "'raise', 'stop' or 'snapshot'"
                )
    if kind in ("DEEPSPEED", "FSDP") and max_norm is not None and (kind == "DEEPSPEED" or not accelerator.is_fsdp2):
        raise ValueError(
            f"max_norm={max_norm!r}: expected None under {kind}, which clips by itself; set gradient_clipping in its "
            "configuration, or pass a number to clip_grad_norm_"
        )
