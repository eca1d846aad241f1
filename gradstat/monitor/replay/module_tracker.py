"""Which module runs, and which one made an autograd node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from gradstat.monitor.hooks import removed_with

# The number that the next autograd node of this thread will get.
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_NO_NUMBER = 1 << 63  # leaves and the engine's own nodes lie above


class ModuleTracker:
    """Follows a model's forward passes, on every thread: whose innermost range of numbers a node has, has made it."""

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
        while stack:  # an exception may have passed by hooks further in
            innermost, begin = stack.pop()
            self._ranges.append((begin, _next_node(), threading.get_ident(), self.names[innermost]))
            if innermost is module:
                break

    def current(self) -> str | None:
        """The innermost module that runs on this thread; None outside of the model."""
        return self.names[self._stack[-1][0]] if self._stack else None

    def maker_of(self, node: Any) -> str | None:
        """The innermost module that made ``node``; None if it was made outside of the model."""
        number = node._sequence_nr()
        if number >= _NO_NUMBER:
            return None
        # A thread of the engine numbers on its own; what it has recomputed, it derives itself.
        here = threading.get_ident()
        found = [r for r in self._ranges if r[0] <= number < r[1]]
        narrowest = min(found, key=lambda r: (r[2] != here, r[1] - r[0]), default=None)
        return None if narrowest is None else narrowest[3]
