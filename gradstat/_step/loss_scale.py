"""The state that torch's loss scaler (torch/amp/grad_scaler.py) keeps per optimizer; gradstat joins its steps by it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from gradstat._core.parameters import Gradients, NamedParameters


def state_of(scaler: GradScaler, optimizer: Optimizer) -> dict[str, Any]:
    """``{"stage", "found_inf_per_device"}``, created if missing."""
    state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    return state


def require_scale(scaler: GradScaler, caller: str) -> Tensor:
    """The loss scale, 0-d float32. Raises AssertionError, as torch does, before the first ``scaler.scale()``."""
    scale, _ = scaler._check_scale_growth_tracker(caller)
    return scale


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether the gradients were unscaled. RuntimeError if the optimizer has stepped since ``update()``."""
    stage = state_of(scaler, optimizer)["stage"]
    if stage is OptState.STEPPED:
        raise RuntimeError("step() has already been called since the last update().")
    return stage is OptState.UNSCALED


def is_still_scaled(scaler: object, optimizer: Optimizer | None) -> bool:
    """Whether gradients carry the loss scale, as far as can be known; for read-only observers."""
    if optimizer is None or not isinstance(scaler, GradScaler):
        return True
    state = scaler._per_optimizer_states.get(id(optimizer))  # not [], which would add an entry
    return state is None or state["stage"] is OptState.READY


def inner_scaler(scaler: Any) -> Any:
    """The loss scaler that ``scaler`` is or wraps, as timm's ``NativeScaler`` wraps torch's. TypeError if neither."""
    wrapped = getattr(scaler, "_scaler", None)
    scaler = wrapped if isinstance(wrapped, GradScaler) else scaler
    if scaler is not None and not (hasattr(scaler, "get_scale") and hasattr(scaler, "is_enabled")):
        kind = f"{type(scaler).__module__}.{type(scaler).__qualname__}"
        raise TypeError(f"scaler: expected a torch.amp.GradScaler or None, got {kind}")
    return scaler


def found_by(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """The results of ``unscale_``, one 0-d float32 per device: above 0 if something is not finite."""
    return list(state_of(scaler, optimizer)["found_inf_per_device"].values())


def record_unscaling(scaler: GradScaler, optimizer: Optimizer, positions: list[int] | None, unscaled: object) -> None:
    """Stores until ``update`` what ``unscale_`` measured, and which parameters had a gradient (None: all)."""
    state = state_of(scaler, optimizer)
    state["optimizer"], state["positions"], state["unscaled"] = optimizer, positions, unscaled


def refuse_added_gradients(
    scaler: GradScaler, optimizer: Optimizer, named: NamedParameters, gradients: Gradients
) -> None:
    """Raises RuntimeError, by name, for a gradient that was added after ``unscale_`` and so still carries the scale."""
    state = state_of(scaler, optimizer)
    if state.get("positions") is None:  # every parameter had a gradient, or nothing was recorded
        return
    unscaled = set(state["positions"])
    present = gradients.positions if gradients.positions is not None else range(len(named.parameters))
    added = [position for position in present if position not in unscaled]
    if added:
        raise RuntimeError(
            f"the gradient of {named.names()[added[0]]!r} (and of {len(added) - 1} more) appeared after unscale_() "
            "and still carries the loss scale; call unscale_() after the last backward()"
        )


def refuse_shared_gradients(scaler: GradScaler, optimizer: Optimizer, named: NamedParameters) -> None:
    """Raises RuntimeError, by name, for a parameter whose gradient was unscaled with another optimizer's."""
    states = scaler._per_optimizer_states
    others = [s["optimizer"] for key, s in states.items() if key != id(optimizer) and s.get("optimizer") is not None]
    taken = {id(parameter) for other in others for group in other.param_groups for parameter in group["params"]}
    if not taken:
        return
    for position, parameter in enumerate(named.parameters):
        if id(parameter) in taken and parameter.grad is not None:
            raise RuntimeError(
                f"{named.names()[position]!r} is also in another optimizer that this scaler has unscaled since the "
                "last update(), so its gradient would be unscaled twice; give every parameter to one optimizer only"
            )


def record_step(scaler: GradScaler, optimizer: Optimizer, found_inf: Tensor | None) -> None:
    """Leaves the same state as ``scaler.step``, so that ``update`` works and a second step is rejected."""
    state = state_of(scaler, optimizer)
    state["found_inf_per_device"] = {} if found_inf is None else {found_inf.device: found_inf}
    state["stage"] = OptState.STEPPED
    state["optimizer"] = optimizer
