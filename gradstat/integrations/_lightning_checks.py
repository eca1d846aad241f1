"""What is refused, or told, before a training with the Lightning callback begins."""

from __future__ import annotations

import re
import warnings
from typing import Any

from gradstat.integrations._lightning_clip import is_norm
from gradstat.monitor.rules import Rule, default_rules

OLDEST = (2, 4)
"""The oldest Lightning that the callback is written for."""

# What these rules say of gradients that a strategy hides would be wrong.
_OF_VISIBLE_GRADIENTS = ("missing-gradient", "dead-gradient", "vanishing-gradient", "optimizer-coverage")


def require_version(package: str, version: str) -> None:
    """Raises ImportError if a framework is too old."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"gradstat.integrations.lightning expects {package} >= {oldest}, found {version}; "
            f"pip install -U '{package}>={oldest}'"
        )


def is_kind_of(strategy: object, name: str) -> bool:
    """Whether a strategy is of a class of that name, without importing what it needs."""
    return any(kind.__name__ == name for kind in type(strategy).__mro__)


def check(trainer: Any, module: Any, max_norm: object, policies: set[Any], same: list[Any]) -> None:
    """Raises, before training starts, for settings that do not go together.

    Args:
        trainer, module: As given to ``setup``.
        max_norm: The callback's.
        policies: The names of those in use.
        same: The callbacks of this kind that the trainer has.

    Raises:
        RuntimeError: The callback is there twice.
        ValueError: The clip is configured twice, or a policy cannot be carried out.
        NotImplementedError: The strategy keeps gradients where they cannot be clipped.
    """
    if len(same) > 1:
        raise RuntimeError(
            f"expected one GradStatCallback in Trainer(callbacks=...), found {len(same)}; each would measure, clip and "
            "log. Remove all but one (configure_callbacks() of the module may add one, too)"
        )
    if max_norm is not None and trainer.gradient_clip_val:
        how = "norm" if is_norm(trainer.gradient_clip_algorithm) else "value"
        raise ValueError(
            f"clipping is configured twice: GradStatCallback(max_norm={max_norm!r}) and "
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val!r}), by {how}. Expected one of them; remove the "
            "other (the callback takes over a gradient_clip_val by norm by itself)"
        )
    clips = max_norm is not None or (trainer.gradient_clip_val and is_norm(trainer.gradient_clip_algorithm))
    strategy = trainer.strategy
    if is_kind_of(strategy, "DeepSpeedStrategy") and max_norm is not None:
        raise NotImplementedError(
            f"GradStatCallback(max_norm={max_norm!r}) with DeepSpeedStrategy: DeepSpeed keeps the gradients in its "
            "engine, where only it can clip them. Remove max_norm and set Trainer(gradient_clip_val=...), which "
            "Lightning hands to DeepSpeed"
        )
    if is_kind_of(strategy, "FSDPStrategy"):
        if clips:
            raise NotImplementedError(
                "clipping by norm with FSDPStrategy (FSDP 1): each rank sees only its shards as plain tensors, so no "
                "norm of the whole can be taken of them. Use ModelParallelStrategy with fully_shard (FSDP 2), whose "
                "gradients gradstat clips as a whole; or remove max_norm (gradient_clip_val) and clip by value"
            )
        if policies & {"skip", "rollback"}:
            raise NotImplementedError(
                f"on_anomaly={sorted(policies & {'skip', 'rollback'})} with FSDPStrategy (FSDP 1): a rank sees only "
                "its shards, so ranks would decide differently. Use ModelParallelStrategy with fully_shard (FSDP 2), "
                "or the policies 'stop', 'checkpoint' and 'raise', on which ranks agree"
            )
    if "rollback" in policies and trainer.world_size > 1:
        raise NotImplementedError(
            f"on_anomaly='rollback' on {trainer.world_size} ranks: going back is not agreed upon between ranks. Use "
            "'skip', or 'checkpoint' and 'stop'"
        )
    if "replay" in policies and not module.automatic_optimization:
        raise ValueError(
            "on_anomaly='replay' with manual optimization: only you know which part of training_step may run again. "
            "Make the callback with 'record' or 'warn' and call gradstat.monitor.find_culprit(module, your_function)"
        )


def warn_of_hidden_gradients(strategy: object, rules: list[Rule] | None) -> list[Rule] | None:
    """Says what cannot be seen under a strategy; returns the rules that make sense under it."""
    name = type(strategy).__name__
    if is_kind_of(strategy, "DeepSpeedStrategy"):
        warnings.warn(
            f"gradstat: {name} keeps gradients in DeepSpeed's engine. Seen are the loss, the learning rate and those "
            "parameters and gradients that are ordinary tensors on this rank; norms and counts of gradients, clipping, "
            "skipping and micro-batches are not",
            UserWarning,
            stacklevel=3,
        )
        chosen = default_rules() if rules is None else rules
        return [rule for rule in chosen if rule.name not in _OF_VISIBLE_GRADIENTS]
    if is_kind_of(strategy, "FSDPStrategy"):
        warnings.warn(
            f"gradstat: under {name} (FSDP 1) each rank sees its own shards as plain tensors: norms and counts are "
            "those of this rank's shards, not of whole gradients. ModelParallelStrategy (FSDP 2) shows whole gradients",
            UserWarning,
            stacklevel=3,
        )
    return rules
