"""Hooks that are removed with their owner, and are neither copied, saved nor scripted with the module they are on."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gradstat.monitor.reporting import warn_of_failure


class Hook:
    """Calls a method with ``first`` and the hook's arguments while its object lives; in no graph and no copy of it."""

    def __init__(self, method: Callable[..., Any] | None = None, *first: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return None
        method = None if self._method is None else self._method()
        if method is None:
            return None
        try:
            return method(*self._first, *arguments)
        except Exception:  # watching must not end what is watched
            self._method = None
            where = f" of {self._first[0]!r}" if self._first else ""
            warn_of_failure(f"the hook {method.__qualname__}{where} failed and is not called again")
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


class _ModuleHooks(OrderedDict[int, Callable[..., Any]]):
    """The hooks of a module as a module keeps them; a pickle or a copy is what there would be without `Hook`."""

    def __reduce__(self) -> tuple[Any, ...]:
        others = [(number, hook) for number, hook in self.items() if not isinstance(hook, Hook)]
        return OrderedDict, (), None, None, iter(others)

    def values(self) -> Any:
        """What ``torch.jit.script`` compiles; a call of the module goes through `items`."""
        return [hook for hook in super().values() if not isinstance(hook, Hook)]


def hook_forward(module: nn.Module, hook: Callable[..., Any], *, before: bool = False, **options: Any) -> Any:
    """``register_forward_hook``, or ``register_forward_pre_hook``, for a `Hook` that stays out of what is saved."""
    place = "_forward_pre_hooks" if before else "_forward_hooks"
    if not getattr(module, place):  # else somebody's handles belong to what is there
        setattr(module, place, _ModuleHooks())
    return (module.register_forward_pre_hook if before else module.register_forward_hook)(hook, **options)


def removed_with(owner: object, handles: Iterable[Any]) -> Callable[[], None]:
    """Takes hooks away when it is called, or else when ``owner`` is gone."""
    remove = weakref.finalize(owner, _remove, list(handles))
    remove.atexit = False
    return remove


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
