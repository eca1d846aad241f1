"""What policies do to a run: steps skipped on the device, and states kept to go back to."""

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

    A fused optimizer is told on the device, as a loss scaler does it, without a sync. Every other one loses its
    gradients for the step, which one host sync decides.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        if optimizer is None:
            raise TypeError("on_anomaly='skip' needs the optimizer: gradstat.Monitor(model, optimizer, ...)")
        self._optimizer = optimizer
        self._flags: list[Tensor] = []  # the one that the optimizer has, if it has one
        handle = optimizer.register_step_post_hook(Hook(self.disarm))
        self.remove = weakref.finalize(self, _let_go, weakref.ref(optimizer), self._flags, handle)
        self.remove.atexit = False

    def arm(self, flag: Tensor | None, scaler: Any) -> None:
        """Prepares the coming step by a ``flag``, as `PendingRows` has it. A ``scaler`` that is on skips by itself."""
        self.disarm()
        if flag is None or (scaler is not None and scaler.is_enabled()):
            return
        obeys = optimizers.obeys_verdict(self._optimizer)
        if obeys and not optimizers.first_momentum_is_at_risk(self._optimizer):
            optimizers.refuse_foreign_verdict(self._optimizer)
            self._optimizer.found_inf = flag  # type: ignore[attr-defined]
            self._flags.append(flag)
        elif flag.item():
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def disarm(self, *_: object) -> None:
        """Takes the verdict away, if it is still there."""
        _take_back(self._optimizer, self._flags)


def _take_back(optimizer: Optimizer, flags: list[Tensor]) -> None:
    if flags:
        optimizer.__dict__.pop("found_inf", None)
        flags.clear()


def _let_go(known: weakref.ref[Optimizer], flags: list[Tensor], handle: Any) -> None:
    optimizer = known()
    if optimizer is not None:
        _take_back(optimizer, flags)
    handle.remove()


class Snapshots:
    """The state of model, optimizer and scaler at the last step known to be healthy, in the host's memory."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, scaler: Any) -> None:
        self._model, self._optimizer, self.scaler = model, optimizer, scaler
        self._good: tuple[int, dict[str, Any]] | None = None
        self._next: tuple[int, dict[str, Any]] | None = None

    def take(self, step: int) -> None:
        """Copies the state as it is in ``step``, before the optimizer's; it counts once the step proves healthy."""
        state = {"model": _copied(self._model.state_dict())}
        if self._optimizer is not None:
            state["optimizer"] = _copied(self._optimizer.state_dict())
        if self.scaler is not None:
            state["scaler"] = dict(self.scaler.state_dict())
        self._next = (step, state)

    def confirm(self, step: int) -> None:
        """Says that ``step`` was healthy."""
        if self._next is not None and self._next[0] <= step:
            self._good, self._next = self._next, None

    def clear(self) -> None:
        """Lets go of all states."""
        self._good = self._next = None

    def go_back(self) -> int | None:
        """Restores the last good state; returns its step, or None if there is none of the model as it is now."""
        self._next = None
        if self._good is None or not self._fits(self._good[1]):
            self._good = None
            return None
        step, state = self._good
        self._model.load_state_dict(state["model"])
        if self._optimizer is not None:
            # Loading moves states to their parameters; copies, so that this snapshot may serve again.
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        return step

    def _fits(self, state: Mapping[str, Any]) -> bool:
        """Whether nothing was added, removed or given another shape since; torch would load one half and raise."""
        if _shapes(state["model"]) != _shapes(self._model.state_dict()):
            return False
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        held = state["optimizer"]["param_groups"] if groups else []
        return [len(group["params"]) for group in groups] == [len(group["params"]) for group in held]


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def _copied(state: Any) -> Any:
    return tree_map(lambda v: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v), state)
