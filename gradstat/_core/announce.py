"""Announces that gradients are about to be changed or an optimizer is about to step, to whoever watches a training.

Every function of gradstat that changes gradients or takes a step says so here; `gradstat._step.torch_calls` makes
torch's own functions say the same while somebody listens. So a clip is measured before it clips, whoever wrote it, and
no watcher has to patch anything itself. Without a listener an announcement costs a look at an empty list.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Any]


class Listener(Protocol):
    """What a watcher implements. Errors it raises reach the user before anything is changed."""

    def before_change(self, parameters: Sequence[Tensor], scaler: Any, loss: Any) -> None:
        """The gradients of ``parameters`` are about to be changed: by ``scaler``, or if that is None by a clip.

        ``loss`` is the step's, if whoever announces it knows.
        """

    def after_change(self, parameters: Sequence[Tensor]) -> None:
        """The change is done, or has failed."""

    def before_backward(self) -> None:
        """A backward pass begins that adds to the gradients of leaves."""

    def after_backward(self, losses: Sequence[Tensor]) -> None:
        """It is done; ``losses`` are its roots, if all are single numbers that no gradient was given for."""

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        """``optimizer.step`` begins; returns the closure to call in place of ``closure``, which may be None."""

    def after_step(self, optimizer: Optimizer) -> None:
        """A step of ``optimizer`` has ended, or was skipped."""


_listeners: list[weakref.ref[Any]] = []
_NOBODY = contextlib.nullcontext()
# A clip may be made of others: torch's of its two halves, for example. Only the outermost is announced.
_within = threading.local()


def add(listener: Listener) -> None:
    """Announces to ``listener``, which is held weakly, until `discard`."""
    _listeners.append(weakref.ref(listener, _listeners.remove))


def discard(listener: Listener) -> None:
    """The inverse of `add`; does nothing for one that does not listen."""
    _listeners[:] = [reference for reference in _listeners if reference() not in (listener, None)]


def listeners() -> list[Any]:
    """All listeners, in the order of their `add`."""
    return [listener for reference in tuple(_listeners) if (listener := reference()) is not None]


def change(parameters: Sequence[Tensor], scaler: Any = None, loss: Any = None) -> AbstractContextManager[None]:
    """A context in which the gradients of ``parameters`` are changed; the arguments are as for `Listener`."""
    if not _listeners or not parameters or torch.compiler.is_compiling() or getattr(_within, "change", False):
        return _NOBODY
    return _announced(parameters, scaler, loss)


@contextlib.contextmanager
def _announced(parameters: Sequence[Tensor], scaler: Any, loss: Any) -> Iterator[None]:
    _within.change = True
    listening = listeners()
    try:
        for listener in listening:
            listener.before_change(parameters, scaler, loss)
        try:
            yield
        finally:
            for listener in listening:
                listener.after_change(parameters)
    finally:
        _within.change = False


@contextlib.contextmanager
def backward(losses: Sequence[Tensor]) -> Iterator[None]:
    """A context in which a backward pass from ``losses`` runs, as in `Listener.after_backward`."""
    listening = listeners()
    for listener in listening:
        listener.before_backward()
    yield
    for listener in listening:
        listener.after_backward(losses)


def step_begins(optimizer: Optimizer, closure: Closure | None) -> Closure | None:
    """Announces ``optimizer.step``; returns the closure to call, as `Listener.before_step`."""
    for reference in tuple(_listeners):  # one that is collected meanwhile leaves the list
        if (listener := reference()) is not None:
            closure = listener.before_step(optimizer, closure)
    return closure


def step_ended(optimizer: Optimizer) -> None:
    """Announces the end of a step, also of one that was skipped and so never called ``optimizer.step``."""
    for reference in tuple(_listeners):
        if (listener := reference()) is not None:
            listener.after_step(optimizer)
