"""Announces that gradients are about to be changed or an optimizer is about to step, to whoever watches.

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
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Callable[[], Any]


class ElementLimit(float):
    """A limit of each element of the gradients, not of their norm."""


class Listener(Protocol):
    """What a watcher implements. Errors it raises reach the user before anything is changed."""

    def before_change(self, parameters: Sequence[Tensor], scaler: Any, loss: Any, limit: Any) -> None:
        """The gradients of ``parameters`` are about to be changed: by ``scaler``, or if that is None by a clip.

        ``loss`` is the step's, if whoever announces it knows, and ``limit`` the clip's, if it has one.
        """

    def after_change(self, parameters: Sequence[Tensor]) -> None:
        """The change is done, or has failed."""

    def after_backward(self, losses: Sequence[Tensor]) -> None:
        """A backward pass is done that has reached the listener, as it has noted itself in `running_pass`.

        ``losses`` are its roots, if all are single numbers that no gradient was given for.
        """

    def backward_failed(self, error: BaseException) -> None:
        """A backward pass has raised that has reached the listener, or that is the only one."""

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        """``optimizer.step`` begins; returns the closure to call in place of ``closure``, which may be None."""

    def after_step(self, optimizer: Optimizer) -> None:
        """A step of ``optimizer`` has ended, or was skipped."""


class BackwardPass:
    """A running backward pass.

    Attributes:
        thread: The one that called it.
        reached: The listeners that hear of its end.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.reached: list[Listener] = []


_listeners: list[weakref.ref[Any]] = []
_passes: list[BackwardPass] = []  # that are running, in all threads
_pass: ContextVar[BackwardPass | None] = ContextVar("_pass", default=None)  # that this thread has called
_NOBODY = contextlib.nullcontext()
# A clip may be made of others: torch's of its two halves, for example. Only the outermost is announced.
_within = threading.local()


def add(listener: Listener) -> None:
    """Announces to ``listener``, which is held weakly, until `discard`."""
    _listeners.append(weakref.ref(listener, _listeners.remove))


def discard(listener: Listener) -> None:
    """The inverse of `add`; does nothing for one that does not listen."""
    for reference in tuple(_listeners):  # removed one by one, since another thread may add one
        if reference() in (listener, None):
            with contextlib.suppress(ValueError):
                _listeners.remove(reference)


def listeners() -> list[Any]:
    """All listeners, in the order of their `add`."""
    return [listener for reference in tuple(_listeners) if (listener := reference()) is not None]


def change(
    parameters: Sequence[Tensor], scaler: Any = None, loss: Any = None, limit: Any = None
) -> AbstractContextManager[None]:
    """A context in which the gradients of ``parameters`` are changed; the arguments are as for `Listener`."""
    if not _listeners or not parameters or torch.compiler.is_compiling() or getattr(_within, "change", False):
        return _NOBODY
    return _announced(parameters, scaler, loss, limit)


@contextlib.contextmanager
def _announced(parameters: Sequence[Tensor], scaler: Any, loss: Any, limit: Any) -> Iterator[None]:
    _within.change = True
    listening = listeners()
    try:
        for listener in listening:
            listener.before_change(parameters, scaler, loss, limit)
        try:
            yield
        finally:
            for listener in listening:
                listener.after_change(parameters)
    finally:
        _within.change = False


@contextlib.contextmanager
def backward(losses: Sequence[Tensor]) -> Iterator[None]:
    """A context in which a backward pass from ``losses`` runs, as in `Listener.after_backward`.

    What it reaches is its own. One inside of it, as of reentrant checkpointing, is a part of it.
    """
    outer = running_pass()
    running = outer or BackwardPass()
    token = _pass.set(running)
    if outer is None:
        _passes.append(running)
    try:
        yield
    except BaseException as error:
        listening = listeners()
        for listener in listening if outer is None else ():
            if listener in running.reached or len(listening) == 1:
                listener.backward_failed(error)
        raise
    finally:
        _pass.reset(token)
        if outer is None:
            _passes.remove(running)
    if outer is None:
        for listener in running.reached:
            listener.after_backward(losses)


def running_pass(on_cpu: bool = False) -> BackwardPass | None:
    """The announced backward pass that the caller, a hook for example, is called in; None if there is none.

    ``on_cpu``: the caller is certainly in the thread that has called the pass, as for a tensor on the CPU.
    """
    known = _pass.get()
    if known is not None or on_cpu or torch._C._current_graph_task_id() < 0:
        return known
    # A thread of autograd's engine, which has one for each device: newer torchs take the caller's context there.
    if torch._C._is_key_in_tls("context"):
        of_caller: BackwardPass | None = torch._C._get_obj_in_tls("context").get(_pass)
        return of_caller
    return _passes[0] if len(_passes) == 1 else None


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
