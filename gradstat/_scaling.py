"""torch's loss scaler from inside: the state it keeps for each optimizer between ``unscale_`` and ``update``.

torch offers no other way to take part in a scaled step; ``torch/amp/grad_scaler.py`` is the source.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer


def state_of(scaler: GradScaler, optimizer: Optimizer) -> dict[str, Any]:
    """``{"stage", "found_inf_per_device"}``; made new if there is none."""
    state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    return state


def require_scale(scaler: GradScaler, caller: str) -> Tensor:
    """The loss scale, 0-d float32. Raises AssertionError, as torch does, before the first ``scaler.scale()``."""
    scale, _ = scaler._check_scale_growth_tracker(caller)
    return scale


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether the gradients have lost their scale already.

    Raises:
        RuntimeError: The optimizer has stepped since the last ``update()``.
    """
    stage = state_of(scaler, optimizer)["stage"]
    if stage is OptState.STEPPED:
        raise RuntimeError("step() has already been called since the last update().")
    return stage is OptState.UNSCALED


def found_by(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """What ``unscale_`` found, one 0-d float32 for each device: above 0 where something is not finite."""
    return list(state_of(scaler, optimizer)["found_inf_per_device"].values())


def record_step(scaler: GradScaler, optimizer: Optimizer, found_inf: Tensor) -> None:
    """Leaves behind what ``scaler.step`` leaves, so that ``update`` works and a second step is refused."""
    state = state_of(scaler, optimizer)
    state["found_inf_per_device"] = {found_inf.device: found_inf}
    state["stage"] = OptState.STEPPED
