"""Base classes of adaptive clips: stand-alone use, state that stays on the device, and the summary."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstat._core import announce, norms
from gradstat._core.backends import Kernels, resolve
from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import refuse_capture
from gradstat._core.measure import measure, measure_step, resolve_for
from gradstat._core.multiply import scale_
from gradstat._core.parameters import gradients_to_clip
from gradstat._core.tensors import NameOf, refuse_distributed
from gradstat._core.text import as_number
from gradstat.adaptive import _history
from gradstat.adaptive._history import MethodState, State
from gradstat.adaptive.summary import ClipSummary, summarize

DEFAULT_WINDOW = 1000


class Step(NamedTuple):
    """The inputs of a method in plain torch."""

    state: State  # already includes this step's norm
    norm: Tensor  # of all gradients, 0-d float64
    norms: Tensor  # float64, one for each multiplier to decide
    weights: Tensor | None  # for units, the norms of their weights
    is_recorded: Tensor  # 0-d bool: whether the norm was recorded
    counts: Tensor  # bool, as ``norms``: whether each is finite, and the step is not skipped


class ToClip(NamedTuple):
    """Gradients that a clip is to scale, at least one."""

    tensors: list[Tensor]
    parameters: list[Tensor]  # in the same order
    name_of: NameOf  # names the i-th gradient in errors
    backend: str | None = None  # as for `AdaptiveClip.clip_`


class AdaptiveClip(ABC):
    """A clip that decides on the device, from earlier steps or from the weights.

    Used in place of ``clip_grad_norm_``::

        clip = gradstat.ZClip()
        ...
        norm = clip.clip_(model.parameters())

    Its state is one float64 tensor, made on the gradients' device at first use and then changed in place: no step waits
    for the device, and a step can be captured into a CUDA graph once one has run outside of it. A norm that is NaN or
    Inf changes neither gradients nor state, apart from being counted. Use one clip for one list of parameters. An
    option that is out of range raises ValueError.

    With replicas of DDP a state has to be loaded on all ranks or on none, since they would clip differently: it is
    compared before the clip is used for the first time, which otherwise raises RuntimeError.
    """

    _decides_on: str
    # For the summary: advice about a clip that clips more than half of the time, or never.
    _if_often: str
    _if_never: str
    _method: int  # value of ClipMethod in csrc/decide.h
    _method_options: tuple[float, ...]  # as csrc/decide.h reads them
    # The numbers that the method itself keeps, in the order of the state tensor, or one number for each tensor.
    _method_names: tuple[str, ...] = ()
    _method_initial = 0.0
    _is_per_tensor = False
    _leaves_zeros_out = False  # norms of zero, since a limit made of them would hold gradients at zero for ever

    def __init__(self, window: int, **options: object) -> None:
        self._window = whole_number("window", window, 1)
        self._options = {**options, "window": window}
        self._state_tensor: Tensor | None = None
        self._is_compared = False  # over ranks, before its first step

    def __float__(self) -> float:
        # Clips of gradstat and torch call this if they got an adaptive clip in place of ``max_norm``.
        raise TypeError(f"expected a number, got {self!r}, which clips by itself: call its clip_(parameters)")

    @never_traced
    def clip_(self, parameters: Tensor | Iterable[Tensor], *, backend: str | None = None) -> Tensor:
        """Clips the gradients of ``parameters`` in place by this clip's method. No host sync.

        ``parameters``, ``backend``, the returned value, and the errors, raised before anything is changed, are as in
        `clip_grad_norm_`. Additionally:

        Raises:
            ValueError: The clip has a state for another list.
            NotImplementedError: A gradient is a distributed tensor, or of a kind that this method cannot clip.
        """
        listed, collected = gradients_to_clip(parameters)
        gradients = collected.tensors
        if not gradients:
            return torch.tensor(0.0, device="cpu")
        given = ToClip(gradients, collected.owners(listed), collected.name_of, backend)
        self._compare(given)
        limit = self._options.get("max_norm", self._options.get("clipping"))  # others follow the size of gradients
        with announce.change(given.parameters, limit=limit), torch.no_grad():
            norm = self._clip_(given)
            # Like an in-place operation of torch, this lets graphs that saved a gradient detect the change.
            torch.autograd.graph.increment_version(gradients)
        return norm.to(norms.norm_dtype(gradients))

    def _compare(self, given: ToClip) -> None:
        """Before the first step of this clip: RuntimeError if replicas of ``given`` have clips with other states."""
        dist, is_first = torch.distributed, not self._is_compared
        self._is_compared = True
        if is_first and dist.is_available() and dist.is_initialized():
            from gradstat._core.collectives import require_same_state

            require_same_state(self, given.parameters)

    def _refuse(self, given: ToClip) -> None:  # noqa: B027 - a clip of the total norm can clip all gradients
        """Raises, before anything is changed, if this clip cannot clip ``given``: of another list or another kind."""

    @abstractmethod
    def _clip_(self, given: ToClip) -> Tensor:
        """Clips gradients; returns their total norm before, 0-d float64."""

    @abstractmethod
    def _multipliers(self, step: Step) -> tuple[Tensor, Tensor]:
        """The method in plain torch: a multiplier for each of ``step.norms``, and which of them count as decided.

        Updates those of ``step.state`` that are named in `_method_names`. csrc/decide.h implements the same method.
        """

    def _method_state(self, count: int) -> MethodState:
        return MethodState(count if self._is_per_tensor else len(self._method_names), self._method_initial)

    @property
    def _state(self) -> State:
        """Views of the whole state, by name."""
        memory = self._state_tensor
        if memory is None:
            memory = _history.extended(None, self._window, self._method_state(0), torch.device("cpu"))
        state, of_method = _history.views(memory, self._window)
        if self._is_per_tensor:
            return {**state, self._method_names[0]: of_method}
        return {**state, **dict(zip(self._method_names, of_method.unbind(), strict=False))}

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: ``"rule"``, its name, and ``"tensors"``, by name, on their device. No host sync."""
        return {"rule": type(self).__name__, "tensors": {name: tensor.clone() for name, tensor in self._state.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, made by `state_dict`, keeping its options.

        The tensors may be on any device; at the next step they are moved to the gradients'. An existing state of that
        size is overwritten in place, so that captured graphs see the values. Waits for the device.

        Raises:
            ValueError: The state is of another method or window, or not what `state_dict` returns; the entry is named.
                Nothing has been changed then.
        """
        memory = state_tensor_of(self, state)
        if self._state_tensor is not None and len(self._state_tensor) == len(memory):
            self._state_tensor.copy_(memory)
        else:
            self._state_tensor = memory

    def summary(self) -> ClipSummary:
        """A summary of this clip so far, in numbers and in words. One host sync."""
        return summarize(repr(self), self._decides_on, self._state, self._if_often, self._if_never)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._options.items())})"


class NormClip(AdaptiveClip):
    """A clip that decides a single multiplier for all gradients, from their total norm."""

    _decides_on = "step"

    @torch.no_grad()
    def multiplier(self, norm: Tensor, *, keep: Tensor | None = None) -> Tensor:
        """The multiplier for the gradients of a step, 0-d float64 from 0 to 1; updates the state. No host sync.

        Args:
            norm: Total L2 norm of the gradients that the optimizer will see, without a loss scale: 0-d float64, on the
                device where the state is to be. For NaN or Inf the multiplier is 1 and the state only counts the norm:
                the caller has to skip the step.
            keep: 0-d bool on that device. False gives the multiplier 1 and records no finite norm. None means True.
        """
        skip = None if keep is None else (~keep).to(torch.float32)
        return decide(self, resolve(None, norm.device.type), norm, skip=skip)[0]

    def _clip_(self, given: ToClip) -> Tensor:
        tensors, _, name_of, backend = given
        only_measured = norms.StepRequest(math.inf, None, None)
        _, measured = measure_step(tensors, name_of, backend, only_measured, None, in_place=True)
        norm = measured.scaling[norms.NORM]
        kernels = resolve_for(backend, norm.device.type, name_of, 0)
        scale_(tensors, decide(self, kernels, norm), name_of, backend)
        return norm


class TensorClip(AdaptiveClip):
    """A clip that decides one multiplier for each tensor, or for each unit."""

    def _refuse(self, given: ToClip) -> None:
        refuse_distributed(given.tensors, given.name_of)

    @abstractmethod
    def scale_(
        self, given: ToClip, rows: Callable[[], Tensor], unscale_by: Tensor | None = None, skip: Tensor | None = None
    ) -> Tensor:
        """Decides the multipliers of a step, scales ``given`` in place, and updates the state. No host sync.

        `refuse` has accepted them. ``rows`` returns their table, on the first one's device. Errors are as in
        `AdaptiveClip.clip_`. ``unscale_by``, 0-d float32, is the reciprocal of the loss scale that they still carry;
        they are multiplied by it as well. If ``skip``, 0-d float32, is not zero, nothing is clipped and the state does
        not change. Returns the norm before, without the loss scale: 0-d float64.
        """

    def _clip_(self, given: ToClip) -> Tensor:
        self._refuse(given)
        return self.scale_(given, measure(given.tensors, given.name_of, given.backend, None, in_place=True).table)


def refuse(clip: AdaptiveClip, given: ToClip) -> None:
    """Raises, before anything is changed, if ``clip`` cannot clip ``given``: of another list or another kind."""
    clip._refuse(given)
    clip._compare(given)


def state_tensor_of(clip: AdaptiveClip, state: Any, place: str = "state") -> Tensor:
    """The state tensor that ``clip.load_state_dict`` takes from the ``state`` at this place; ValueError as there."""
    name, of_method = type(clip).__name__, clip._method_state(0)
    return _history.loaded(state, place, name, clip._window, clip._method_names, of_method)


def decide(
    clip: AdaptiveClip,
    kernels: Kernels,
    measured: Tensor,
    weights: Tensor | None = None,
    unscale_by: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """Decides about a step and updates the state of ``clip``: multipliers, then the norm, 1-d float64. No host sync.

    ``kernels`` are a backend's. ``measured`` is the norm, 0-d float64, or the table of the gradients; for units,
    with ``weights``, the table of their weights. Norms and multipliers are multiplied by ``unscale_by``, 0-d
    float32. If ``skip``, 0-d float32, is not zero, the multipliers are 1 and the state does not change, except to
    count a norm that is not finite.
    """
    memory, device = clip._state_tensor, measured.device
    of_method = clip._method_state(len(measured) if measured.dim() else 0)
    if memory is None or memory.device != device or len(memory) != _history.size(clip._window, of_method):
        refuse_capture(device, f"the state of {type(clip).__name__}")
        clip._state_tensor = memory = _history.extended(memory, clip._window, of_method, device)
    if kernels.decide_clip_ is not None:
        return kernels.decide_clip_(
            clip._method, clip._method_options, memory, clip._window, measured, weights, unscale_by, skip
        )
    state, scale = clip._state, 1.0 if unscale_by is None else unscale_by.to(torch.float64)
    norm = norms.total_norm(measured, 2.0) * scale if measured.dim() else measured
    each = norms.l2_norms(measured) * scale if measured.dim() else measured
    is_step = torch.ones_like(norm, dtype=torch.bool) if skip is None else skip == 0
    is_recorded = norm.isfinite() & is_step & ((norm > 0) | (not clip._leaves_zeros_out))
    _history.add_norm_(state, norm, is_recorded)
    of_weights = None if weights is None else norms.l2_norms(weights)
    step = Step(state, norm, each, of_weights, is_recorded, each.isfinite() & is_step)
    decided, counts = clip._multipliers(step)
    multipliers = torch.where(counts, decided, 1.0)
    _history.add_multipliers_(state, multipliers, counts)
    return torch.cat([(multipliers * scale).view(-1), norm.view(1)])


def limited(norm: Tensor, limit: Tensor | float) -> Tensor:
    """The multiplier that reduces ``norm`` to ``limit``, or 1 if it is not above or either is NaN."""
    return torch.where(norm > limit, limit / norm, 1.0)


def number(name: str, value: float, low: float, high: float = math.inf) -> float:
    """The option ``name`` as a float. TypeError for what is no number, ValueError outside of ``low`` to ``high``."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    value = float(value)
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected a number from {low} to {high}")
    return value


def positive(name: str, value: Any, unlimited: str) -> float:
    """The limit ``name`` as a float; ValueError unless it is above 0, naming what is ``unlimited``.

    Gradients clipped to 0 take no step, and to a negative number they point uphill; both are used to mean no limit.
    """
    limit = as_number(name, value)
    if not limit > 0:
        raise ValueError(f"{name} is {limit}; expected a number above 0, or {unlimited}")
    return limit


def whole_number(name: str, value: int, low: int) -> int:
    """The option ``name`` as an int; ValueError if it is below ``low``, TypeError if it is not an integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, got {type(value).__name__}")
    value = operator.index(value)
    if value < low:
        raise ValueError(f"{name} is {value}; expected a whole number from {low}")
    return value


Limit = float | AdaptiveClip


def checked_limit(max_norm: Any) -> Limit | None:
    """``max_norm`` as a positive number, an adaptive clip or None; raises TypeError or ValueError for others."""
    if max_norm is None or isinstance(max_norm, AdaptiveClip):
        return max_norm
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real | Tensor):
        raise TypeError(f"max_norm: expected a number, an adaptive clip or None, got {type(max_norm).__name__}")
    return positive("max_norm", max_norm, "None for no limit")
