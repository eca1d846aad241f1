"""Snapshots of a run, for the policy that rolls back to them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from gradstat._core.parameters import Trained


class Snapshots:
    """State of the trained modules, optimizer and scaler at the last step known to be healthy, in host memory."""

    def __init__(self, trained: Trained, optimizer: Optimizer | None, scaler: Any) -> None:
        self._modules = {"model": trained.model, "besides": trained.besides}
        self._optimizer, self.scaler = optimizer, scaler
        self._good: tuple[int, dict[str, Any]] | None = None
        self._next: tuple[int, dict[str, Any]] | None = None

    def take(self, step: int) -> None:
        """Copies the state in ``step``, before ``optimizer.step()``; it is used once the step is confirmed healthy.

        Does nothing while an earlier copy is still to be confirmed.
        """
        if self._next is not None:
            return
        state = {name: _copied(module.state_dict()) for name, module in self._modules.items()}
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
        self._good = self._next = None

    def restore(self) -> int | None:
        """Restores the last good state; returns its step, or None if there is none that fits the model."""
        self._next = None
        if self._good is None or not self._fits(self._good[1]):
            self._good = None
            return None
        step, state = self._good
        for name, module in self._modules.items():
            module.load_state_dict(state[name], strict=name == "model")  # torch calls names with dots unexpected
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
        if any(_shapes(state[name]) != _shapes(module.state_dict()) for name, module in self._modules.items()):
            return False
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        saved_groups = state["optimizer"]["param_groups"] if groups else []
        return [len(group["params"]) for group in groups] == [len(group["params"]) for group in saved_groups]


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def _copied(state: Any) -> Any:
    return tree_map(lambda v: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v), state)
