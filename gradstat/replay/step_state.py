"""The state that a forward pass depends on besides parameters and batch, kept so that a step can be run again."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from gradstat._core.hooks import Hook, hook_forward, removed_with
from gradstat._core.host_copy import is_capturing

# Running statistics change without a new version, so buffers up to this size are always copied. Larger ones are masks
# and tables.
ALWAYS_COPIED = 1 << 16


class RngState(NamedTuple):
    """The states of the global random generators.

    Attributes:
        cpu: torch's, for the CPU.
        cuda: torch's, one for each CUDA device; empty if CUDA is not in use.
        python: The state of ``random``.
        numpy: The state of ``numpy.random``.
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> RngState:
        """The current states. Never initialises CUDA; leaves out those of CUDA while a CUDA graph is captured."""
        cuda: tuple[Tensor, ...] = ()
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            cuda = tuple(torch.cuda.get_rng_state_all())
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())  # noqa: NPY002

    def restore(self) -> None:
        """Restores the generators."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


class _Buffer(NamedTuple):
    """A copy of a buffer, and what tells whether it is still valid."""

    original: weakref.ref[Tensor]
    version: int
    copy: Tensor

    def is_valid_for(self, buffer: Tensor) -> bool:
        """Whether ``buffer`` certainly has the values of the copy."""
        unchanged = self.original() is buffer and self.version == _version(buffer) >= 0
        return unchanged and buffer.numel() > ALWAYS_COPIED


@dataclass(frozen=True, eq=False, repr=False)
class StepState:
    """Random states and buffers of a model as they were when a forward pass began. Made by `capture`."""

    rng: RngState
    _buffers: dict[str, _Buffer]

    @classmethod
    def capture(cls, model: Module, previous: StepState | None = None) -> StepState:
        """The state of ``model`` now. Copies of large buffers not changed since ``previous`` are shared with it."""
        buffers = {}
        for name, buffer in model.named_buffers():
            saved = None if previous is None else previous._buffers.get(name)
            if saved is None or not saved.is_valid_for(buffer):
                saved = _Buffer(weakref.ref(buffer), _version(buffer), buffer.detach().clone())
            buffers[name] = saved
        return cls(RngState.capture(), buffers)

    def restore(self, model: Module, before_write: Callable[[Tensor], None] = lambda buffer: None) -> None:
        """Restores random states and the buffers of ``model``, the latter in place and without new versions.

        ``before_write`` is called with each buffer before it is written. Buffers that were added, removed or resized
        are left alone.
        """
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                saved = self._buffers.get(name)
                if saved is None or saved.copy.shape != buffer.shape or saved.is_valid_for(buffer):
                    continue
                before_write(buffer)
                # Graphs of earlier forward passes may have saved it, with the values that are restored here.
                with same_version(buffer):
                    buffer.copy_(saved.copy)
        self.rng.restore()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def same_version(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Writes to ``tensor`` inside do not increment its version."""
    if tensor.is_inference():
        return contextlib.nullcontext()
    keeps: contextlib.AbstractContextManager[object] = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    return keeps


class StepStateKeeper:
    """Keeps the `StepState` of each forward pass of the current step, so that the step can be run again.

    A step with gradient accumulation has several. Recomputations of checkpoints, replays and evaluations between steps
    are not kept.

    Example:
        >>> keeper = StepStateKeeper(model)
        >>> for batch in loader:
        ...     keeper.begin_step()
        ...     loss = train_step(batch)
        ...     if not math.isfinite(loss):
        ...         print(find_culprit(model, train_step, state=keeper.states, batch=batch))

    Attributes:
        states: The `StepState` of each forward pass since `begin_step`, in order.
    """

    def __init__(self, model: Module) -> None:
        """Registers a hook on ``model``: the outermost module that is called, or what ``torch.compile`` returned."""
        self.begin_step()
        self._last: StepState | None = None
        hook: Any = Hook(self._before_forward)
        if getattr(model, "_compiled_call_impl", None) is not None:
            hook = torch.compiler.disable(hook)  # ``model.compile()`` compiles hooks, too
        self._remove = removed_with(self, [hook_forward(model, hook, before=True, prepend=True)])

    def _before_forward(self, model: Module, _inputs: Any) -> None:
        if in_backward() or is_replaying() or is_evaluation(model):
            return
        if is_capturing():
            return  # copies would become part of the graph
        if self._ended:
            self.begin_step()
        self._last = StepState.capture(model, self._last)
        self.states.append(self._last)

    def begin_step(self) -> None:
        """Forgets the forward passes so far: a new step begins."""
        self.states: list[StepState] = []
        self._ended = False

    def end_step(self) -> None:
        """Lets the next forward pass begin a new step; until then this one can be run again."""
        self._ended = True

    def remove(self) -> None:
        """Removes the hook from the model and drops everything kept."""
        self._remove()
        self.begin_step()
        self._last = None


replays: list[None] = []  # an entry for each running replay, during which no `StepStateKeeper` records


def is_replaying() -> bool:
    return bool(replays)


def is_evaluation(model: Module) -> bool:
    """Whether a forward pass now is no part of a training step: in eval mode, without gradients."""
    return not model.training and not torch.is_grad_enabled()


def in_backward() -> bool:
    """Whether this runs inside of a backward pass, as the recomputation of a checkpoint does."""
    return torch._C._current_autograd_node() is not None
