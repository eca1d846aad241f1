"""Finds which module is running, and which one created an autograd node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from gradstat._core.hooks import removed_with

# The sequence number that the next autograd node of this thread will get.
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_NO_NUMBER = 1 << 63  # leaves and the engine's own nodes have larger ones


class ModuleTracker:
    """Tracks forward passes on every thread: the innermost module whose range has a node's number created it."""

    def __init__(self, model: Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self._local = threading.local()
        self._ranges: list[tuple[int, int, int, str]] = []
        handles: list[Any] = []
        for module in self.names:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        self.detach = removed_with(self, handles)

    @property
    def _stack(self) -> list[tuple[Module, int]]:
        stack: list[tuple[Module, int]] = self._local.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: Module, args: Any) -> None:
        self._stack.append((module, _next_node()))

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        stack = self._stack
        while stack:  # an exception may have skipped hooks of inner modules
            innermost, begin = stack.pop()
            self._ranges.append((begin, _next_node(), threading.get_ident(), self.names[innermost]))
            if innermost is module:
                break

    def current(self) -> str | None:
        """The innermost module running on this thread; None outside of the model."""
        return self.names[self._stack[-1][0]] if self._stack else None

    def creator_of(self, node: Any) -> str | None:
        """The innermost module that created ``node``; None if it was created outside of the model."""
        number = node._sequence_nr()
        if number >= _NO_NUMBER:
            return None
        # Each thread numbers its nodes separately; one that recomputes a checkpoint also runs its backward pass.
        here = threading.get_ident()
        around = [r for r in self._ranges if r[0] <= number < r[1]]
        narrowest = min(around, key=lambda r: (r[2] != here, r[1] - r[0]), default=None)
        return None if narrowest is None else narrowest[3]
