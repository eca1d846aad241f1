"""How policies act on a run: skipping steps on the device, and snapshots to roll back to."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from gradstat._step import optimizers
from gradstat.monitor.hooks import Hook


class Skipping:
    """Keeps an optimizer from stepping on gradients that are not finite.

    A fused optimizer gets the flag on the device (``found_inf``, as from a loss scaler), without a sync. For any other
    optimizer the flag is read, one host sync, and gradients are set to None if the step is to be skipped.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._flags: list[Tensor] = []  # the flag set on the optimizer, if any
        handle = optimizer.register_step_post_hook(Hook(self.disarm))
        self.remove = weakref.finalize(self, _release, weakref.ref(optimizer), self._flags, handle)
        self.remove.atexit = False

    def arm(self, flag: Tensor | None, scaler: Any) -> None:
        """Applies the ``flag`` of `PendingRows` to the coming step. An enabled ``scaler`` skips by itself."""
        self.disarm()
        if flag is None or (scaler is not None and scaler.is_enabled()):
            return
        obeys = optimizers.honors_found_inf(self._optimizer)
        if obeys and not optimizers.first_momentum_is_at_risk(self._optimizer):
            optimizers.refuse_foreign_verdict(self._optimizer)
            self._optimizer.found_inf = flag  # type: ignore[attr-defined]
            self._flags.append(flag)
        elif flag.item():
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def disarm(self, *_: object) -> None:
        """Removes the flag from the optimizer, if it is still there."""
        _remove_flag(self._optimizer, self._flags)


def _remove_flag(optimizer: Optimizer, flags: list[Tensor]) -> None:
    if flags:
        optimizer.__dict__.pop("found_inf", None)
        flags.clear()


def _release(known: weakref.ref[Optimizer], flags: list[Tensor], handle: Any) -> None:
    optimizer = known()
    if optimizer is not None:
        _remove_flag(optimizer, flags)
    handle.remove()


class Snapshots:
    """The state of model, optimizer and scaler at the last step known to be healthy, in host memory."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, scaler: Any) -> None:
        self._model, self._optimizer, self.scaler = model, optimizer, scaler
        self._good: tuple[int, dict[str, Any]] | None = None
        self._next: tuple[int, dict[str, Any]] | None = None

    def take(self, step: int) -> None:
        """Copies the state in ``step``, before ``optimizer.step()``; it is used once the step is confirmed healthy.

        Does nothing while an earlier copy is still to be confirmed.
        """
        if self._next is not None:
            return
        state = {"model": _copied(self._model.state_dict())}
        if self._optimizer is not None:
            state["optimizer"] = _copied(self._optimizer.state_dict())
        if self.scaler is not None:
            state["scaler"] = dict(self.scaler.state_dict())
        self._next = (step, state)

    def confirm(self, step: int) -> None:
        """Marks ``step`` as healthy."""
        if self._next is not None and self._next[0] <= step:
            self._good, self._next = self._next, None

    def clear(self) -> None:
        """Drops all snapshots."""
        self._good = self._next = None

    def restore(self) -> int | None:
        """Restores the last good state; returns its step, or None if there is none that fits the model."""
        self._next = None
        if self._good is None or not self._fits(self._good[1]):
            self._good = None
            return None
        step, state = self._good
        self._model.load_state_dict(state["model"])
        if self._optimizer is not None:
            # A copy, since the optimizer keeps the tensors it loads, and this snapshot may be used again.
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        return step

    def _fits(self, state: Mapping[str, Any]) -> bool:
        """Whether names and shapes are unchanged; otherwise torch would load part of the state and raise."""
        if _shapes(state["model"]) != _shapes(self._model.state_dict()):
            return False
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        held = state["optimizer"]["param_groups"] if groups else []
        return [len(group["params"]) for group in groups] == [len(group["params"]) for group in held]


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def _copied(state: Any) -> Any:
    return tree_map(lambda v: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v), state)
