"""What adaptive clips have in common: stand-alone use, state that stays on the device, and the summary."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradstat._core import norms
from gradstat._core.backends import Kernels
from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import refuse_capture
from gradstat._core.measure import measure, resolve_for
from gradstat._core.parameters import gradients_to_clip
from gradstat._core.tensors import NameOf, check_writable, refuse_distributed
from gradstat.adaptive import _history
from gradstat.adaptive._history import State
from gradstat.adaptive.summary import ClipSummary, summarize
from gradstat.clip import scale_gradients_

DEFAULT_WINDOW = 1000


class AdaptiveClip(ABC):
    """A clip that decides by what it has seen of earlier steps, or of the weights, on the device.

    In place of ``clip_grad_norm_``::

        clip = gradstat.ZClip()
        ...
        norm = clip.clip_(model.parameters())

    Its state is a few float64 tensors, made on the gradients' device at first use and from then on only changed
    in place there: no step waits for the device, and a step can be captured into a CUDA graph once one has run
    outside of it. A norm that is NaN or Inf changes nothing, neither gradients nor what is remembered. Use one
    clip for one list of parameters. An option that is out of range raises ValueError.
    """

    _decides_on: str
    # For the summary: what to do about a clip that clips more than half of the time, or never.
    _if_often: str
    _if_never: str

    def __init__(self, window: int, **options: object) -> None:
        self._window = whole_number("window", window, 1)
        self._options = {**options, "window": window}
        self._state: State = {}

    @never_traced
    def clip_(self, parameters: Tensor | Iterable[Tensor], *, backend: str | None = None) -> Tensor:
        """Clips the gradients of ``parameters`` in place by this clip's rule. No host sync.

        ``parameters``, ``backend``, what is returned, and errors, before anything is changed, are as of
        `clip_grad_norm_`. Besides:

        Raises:
            ValueError: The list is not the one this clip has a state for.
            NotImplementedError: A gradient is a distributed tensor, or of a kind that this rule cannot clip.
        """
        listed, found = gradients_to_clip(parameters)
        gradients, positions, _ = found
        if not gradients:
            return torch.tensor(0.0, device="cpu")
        if positions is not None:
            listed = [listed[i] for i in positions]
        with torch.no_grad():
            norm = self._clip_(listed, gradients, found.name_of, backend)
        # As torch's in-place operation would: graphs that saved a gradient notice that it was changed.
        torch.autograd.graph.increment_version(gradients)
        return norm.to(norms.norm_dtype(gradients))

    @abstractmethod
    def _clip_(self, parameters: list[Tensor], gradients: list[Tensor], name_of: NameOf, backend: str | None) -> Tensor:
        """Clips ``gradients``, which are those of ``parameters``; their total norm before, 0-d float64."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: ``"rule"``, its name, and ``"tensors"``, by name, on their device. No host sync."""
        tensors = self._state or self._new_state(torch.device("cpu"))
        return {"rule": type(self).__name__, "tensors": {name: tensor.clone() for name, tensor in tensors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, of `state_dict`, with own options; ValueError if of another rule or window.

        The tensors may be on any device; at the next step they are moved to the gradients'. Where this clip has a
        tensor of that shape already it is copied into, so that captured graphs see the values. No host sync, unless
        values have to move from a GPU to the CPU.
        """
        own = type(self).__name__
        if state["rule"] != own:
            raise ValueError(f"this is the state of {state['rule']}, which {own} cannot continue from")
        tensors: State = state["tensors"]
        if len(tensors["norms"]) != self._window:
            raise ValueError(
                f"this state keeps the last {len(tensors['norms'])} norms, this clip {self._window}; make it with "
                f"window={len(tensors['norms'])}"
            )
        before, self._state = self._state, {}
        for name, tensor in tensors.items():
            if name in before and before[name].shape == tensor.shape:
                self._state[name] = before[name].copy_(tensor)
            else:
                self._state[name] = tensor.clone()

    def summary(self) -> ClipSummary:
        """What this clip has done so far, in numbers and in words. One host sync."""
        state = self._state or self._new_state(torch.device("cpu"))
        return summarize(repr(self), self._decides_on, state, self._if_often, self._if_never)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._options.items())})"

    def _new_state(self, device: torch.device) -> State:
        """The state before the first step."""
        return _history.new(self._window, device)

    def _state_on(self, device: torch.device) -> State:
        if not self._state:
            refuse_capture(device, f"the state of {type(self).__name__}")
            self._state = self._new_state(device)
        if any(tensor.device != device for tensor in self._state.values()):
            refuse_capture(device, f"the state of {type(self).__name__}")
            self._state = {name: tensor.to(device) for name, tensor in self._state.items()}
        return self._state


class NormClip(AdaptiveClip):
    """A clip that decides one coefficient for all gradients, from their total norm."""

    _decides_on = "step"

    @torch.no_grad()
    def coefficient(self, norm: Tensor, *, keep: Tensor | None = None) -> Tensor:
        """What to multiply the gradients of a step by, 0-d float64 from 0 to 1; remembers the step. No host sync.

        Args:
            norm: Total L2 norm of the gradients as the optimizer is to see them, without a loss scale: 0-d float64,
                on the device where the state is to be. For NaN or Inf the coefficient is 1, and nothing but the
                number of such norms is remembered: such a step is for the caller to leave out.
            keep: 0-d bool on that device. Where False the step is treated likewise. None keeps every step.
        """
        state = self._state_on(norm.device)
        kept = norm.isfinite() if keep is None else norm.isfinite() & keep
        _history.add_norm_(state, norm, kept)
        coefficient = torch.where(kept, self._decide(state, norm, kept), 1.0)
        _history.add_coefficients_(state, coefficient, kept)
        return coefficient

    @abstractmethod
    def _decide(self, state: State, norm: Tensor, kept: Tensor) -> Tensor:
        """The coefficient for ``norm``, which is in the history already; ignored where ``kept`` is False.

        Changes the rule's own tensors of ``state``, in place and only where ``kept`` is True.
        """

    def _clip_(self, parameters: list[Tensor], gradients: list[Tensor], name_of: NameOf, backend: str | None) -> Tensor:
        norm = norms.total_norm(_table_of(gradients, name_of, backend), 2.0)
        coefficient = self.coefficient(norm)
        scale_gradients_(gradients, coefficient, name_of, backend)
        return norm


class TensorClip(AdaptiveClip):
    """A clip that decides a coefficient for each tensor, or for each unit of it."""

    @abstractmethod
    def scale_(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        rows: Callable[[], Tensor],
        kernels: Kernels,
        inverse_scale: Tensor | None,
        name_of: NameOf,
    ) -> Tensor:
        """Decides the coefficients of a step, scales ``gradients`` in place, and remembers the step. No host sync.

        None of them is distributed. ``parameters`` are theirs in the same order, ``rows`` gives their table, on the
        first one's device, ``kernels`` are those for their type of device, and ``name_of`` is what errors, those of
        `AdaptiveClip.clip_`, call the i-th. ``inverse_scale`` is the reciprocal, 0-d float32, of the loss scale that
        they still carry, by which they are multiplied, too. Returned is the norm before, without it: 0-d float64.
        """

    def _clip_(self, parameters: list[Tensor], gradients: list[Tensor], name_of: NameOf, backend: str | None) -> Tensor:
        refuse_distributed(gradients, name_of)
        kernels = resolve_for(backend, gradients[0].device.type, name_of, 0)
        return self.scale_(
            parameters, gradients, lambda: _table_of(gradients, name_of, backend), kernels, None, name_of
        )


def _table_of(gradients: list[Tensor], name_of: NameOf, backend: str | None) -> Tensor:
    """The table of gradients, on the first one's device. What cannot be clipped raises, before anything changes."""

    def prepare() -> None:
        refuse_distributed(gradients, name_of)
        check_writable(gradients, name_of)

    return measure(gradients, name_of, backend, over_ranks=False, prepare=prepare).table()


def limited(norm: Tensor, limit: Tensor | float) -> Tensor:
    """What brings ``norm`` down to ``limit``: their ratio, or 1 if it is not above; NaN limits nothing."""
    return torch.where(norm > limit, limit / norm, 1.0)


def number(name: str, value: float, low: float, high: float = math.inf) -> float:
    """The option ``name`` as a float from ``low`` to ``high``, both included, or a ValueError."""
    value = float(value)
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected a number from {low} to {high}")
    return value


def whole_number(name: str, value: int, low: int) -> int:
    """The option ``name`` as an int of at least ``low``, or a ValueError; TypeError if it is not an integer."""
    value = operator.index(value)
    if value < low:
        raise ValueError(f"{name} is {value}; expected a whole number from {low}")
    return value
