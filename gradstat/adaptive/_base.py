"""What adaptive clips have in common: stand-alone use, state that stays on the device, and the summary."""

from __future__ import annotations

import copy
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradstat._core import norms
from gradstat._core.backends import Kernels, resolve
from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import refuse_capture
from gradstat._core.measure import measure, resolve_for
from gradstat._core.measurement import Measurement
from gradstat._core.parameters import gradients_to_clip
from gradstat._core.tensors import NameOf, check_writable, refuse_distributed
from gradstat.adaptive import _history
from gradstat.adaptive._history import State
from gradstat.adaptive.summary import ClipSummary, summarize
from gradstat.clip import scale_gradients_

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_WINDOW = 1000


class Step(NamedTuple):
    """What a rule in plain torch decides by."""

    state: State  # with the norm in it
    norm: Tensor  # of all gradients, 0-d float64
    norms: Tensor  # of what gets a coefficient each, float64
    weights: Tensor | None  # of units, their norms
    kept: Tensor  # 0-d bool: whether the norm was recorded
    counts: Tensor  # bool, as ``norms``: finite ones of a step that is one


class AdaptiveClip(ABC):
    """A clip that decides by what it has seen of earlier steps, or of the weights, on the device.

    In place of ``clip_grad_norm_``::

        clip = gradstat.ZClip()
        ...
        norm = clip.clip_(model.parameters())

    Its state is one float64 tensor, made on the gradients' device at first use and from then on only changed
    in place there: no step waits for the device, and a step can be captured into a CUDA graph once one has run
    outside of it. A norm that is NaN or Inf changes nothing, neither gradients nor what is remembered. Use one
    clip for one list of parameters. An option that is out of range raises ValueError.
    """

    _decides_on: str
    # For the summary: what to do about a clip that clips more than half of the time, or never.
    _if_often: str
    _if_never: str
    _rule: int  # of ClipRule in csrc/decide.h
    _numbers: tuple[float, ...]  # the options that the rule takes there

    def __init__(self, window: int, **options: object) -> None:
        self._window = whole_number("window", window, 1)
        self._options = {**options, "window": window}
        self._memory: Tensor | None = None

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

    @abstractmethod
    def _coefficients(self, step: Step) -> tuple[Tensor, Tensor]:
        """The rule in plain torch: a coefficient for each of ``step.norms``, and which of them it decided about.

        Remembers in place what `_own_named` names. The rule is written in csrc/decide.h as well.
        """

    def _own_start(self, count: int) -> tuple[int, float]:
        """How many numbers the rule itself remembers of ``count`` tensors, and what each is before the first step."""
        return 0, 0.0

    def _own_named(self, own: Tensor) -> State:
        """Views of them by name."""
        return {}

    @property
    def _state(self) -> State:
        """Views of what is remembered, by name."""
        memory = self._memory
        if memory is None:
            memory = _history.extended(None, self._window, self._own_start(0), torch.device("cpu"))
        state, own = _history.views(memory, self._window)
        return {**state, **self._own_named(own)}

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: ``"rule"``, its name, and ``"tensors"``, by name, on their device. No host sync."""
        return {"rule": type(self).__name__, "tensors": {name: tensor.clone() for name, tensor in self._state.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, of `state_dict`, with own options; ValueError if of another rule or window.

        The tensors may be on any device; at the next step they are moved to the gradients'. A state of that size which
        this clip has already is copied into, so that captured graphs see the values. No host sync, unless values have
        to move from a GPU to the CPU.
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
        memory = _history.joined(tensors)
        if self._memory is not None and len(self._memory) == len(memory):
            self._memory.copy_(memory)
        else:
            self._memory = memory

    def summary(self) -> ClipSummary:
        """What this clip has done so far, in numbers and in words. One host sync."""
        return summarize(repr(self), self._decides_on, self._state, self._if_often, self._if_never)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._options.items())})"

    def _decide(
        self,
        kernels: Kernels,
        measured: Tensor,
        weights: Tensor | None = None,
        factor: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Decides about a step and remembers it: coefficients and then the norm, 1-d float64. No host sync.

        ``measured`` is the norm, 0-d float64, or a table of the gradients, for units with ``weights``, that of theirs.
        Norms, and coefficients, are multiplied by ``factor``, 0-d float32. If ``skip``, 0-d float32, is not zero, the
        coefficients are 1 and nothing is remembered but a norm that is not finite.
        """
        memory, device = self._memory, measured.device
        own = self._own_start(len(measured) if measured.dim() else 0)
        if memory is None or memory.device != device or len(memory) != _history.size(self._window, own):
            refuse_capture(device, f"the state of {type(self).__name__}")
            self._memory = memory = _history.extended(memory, self._window, own, device)
        if kernels.decide_clip_ is not None:
            return kernels.decide_clip_(
                self._rule, self._numbers, memory, self._window, measured, weights, factor, skip
            )
        state, scale = self._state, 1.0 if factor is None else factor.to(torch.float64)
        norm = norms.total_norm(measured, 2.0) * scale if measured.dim() else measured
        each = norms.l2_norms(measured) * scale if measured.dim() else measured
        is_step = torch.ones_like(norm, dtype=torch.bool) if skip is None else skip == 0
        kept = norm.isfinite() & is_step
        _history.add_norm_(state, norm, kept)
        of_weights = None if weights is None else norms.l2_norms(weights)
        step = Step(state, norm, each, of_weights, kept, each.isfinite() & is_step)
        decided, counts = self._coefficients(step)
        coefficients = torch.where(counts, decided, 1.0)
        _history.add_coefficients_(state, coefficients, counts)
        return torch.cat([(coefficients * scale).view(-1), norm.view(1)])


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
        skip = None if keep is None else (~keep).to(torch.float32)
        return self._decide(resolve(None, norm.device.type), norm, skip=skip)[0]

    def _clip_(self, parameters: list[Tensor], gradients: list[Tensor], name_of: NameOf, backend: str | None) -> Tensor:
        measured = _measured(gradients, name_of, backend, norms.StepRequest(math.inf, None, None))
        assert measured.decision is not None
        norm = measured.decision.numbers[1]
        kernels = resolve_for(backend, norm.device.type, name_of, 0)
        scale_gradients_(gradients, self._decide(kernels, norm), name_of, backend)
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
        skip: Tensor | None = None,
    ) -> Tensor:
        """Decides the coefficients of a step, scales ``gradients`` in place, and remembers the step. No host sync.

        None of them is distributed. ``parameters`` are theirs in the same order, ``rows`` gives their table, on the
        first one's device, ``kernels`` are those for their type of device, and ``name_of`` is what errors, those of
        `AdaptiveClip.clip_`, call the i-th. ``inverse_scale`` is the reciprocal, 0-d float32, of the loss scale that
        they still carry, by which they are multiplied, too. If ``skip``, 0-d float32, is not zero nothing is clipped or
        remembered. Returned is the norm before, without the loss scale: 0-d float64.
        """

    def _alone(self) -> Self:
        """A copy for one tensor, with a row of ``_spread`` as memory. ValueError if the rule looks at others."""
        clip = copy.copy(self)
        clip._window = 1
        return clip

    def _spread(self, count: int, device: torch.device) -> Tensor:
        """What clips that are ``_alone`` with one of ``count`` tensors each begin a step with, a row for each."""
        rows = _history.extended(None, 1, self._own_start(1), device).repeat(count, 1)
        if self._memory is not None and self._own_start(1)[0]:
            own = _history.views(self._memory, self._window)[1]
            if len(own) not in (0, count):
                raise ValueError(
                    f"the state of this {type(self).__name__} is of {len(own)} tensors, and there are {count}; make a "
                    "new clip for a new list"
                )
            if len(own):
                rows[:, -1] = own.to(device)
        return rows

    def _gather_(self, rows: Tensor, norm: Tensor) -> None:
        """Remembers a step that clips which are ``_alone`` have decided; ``norm`` is that of all, 0-d float64."""
        own = self._own_start(len(rows))
        memory, device = self._memory, rows.device
        if memory is None or memory.device != device or len(memory) != _history.size(self._window, own):
            self._memory = memory = _history.extended(memory, self._window, own, device)
        state, own_numbers = _history.views(memory, self._window)
        _history.add_norm_(state, norm, norm.isfinite())
        _history.add_totals_(state, rows)
        if own[0]:
            own_numbers.copy_(rows[:, -1])

    def _clip_(self, parameters: list[Tensor], gradients: list[Tensor], name_of: NameOf, backend: str | None) -> Tensor:
        refuse_distributed(gradients, name_of)
        kernels = resolve_for(backend, gradients[0].device.type, name_of, 0)
        return self.scale_(
            parameters, gradients, lambda: _measured(gradients, name_of, backend).table(), kernels, None, name_of
        )


def _measured(
    gradients: list[Tensor], name_of: NameOf, backend: str | None, step: norms.StepRequest | None = None
) -> Measurement:
    """What `measure` gives for gradients that are to be clipped; what cannot be raises, before anything changes."""

    def prepare() -> None:
        refuse_distributed(gradients, name_of)
        check_writable(gradients, name_of)

    return measure(gradients, name_of, backend, step=step, over_ranks=False, prepare=prepare)


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
