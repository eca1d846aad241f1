"""Hooks that are removed with their owner, and are neither copied nor pickled with the module they are on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any


class Hook:
    """Calls a method with ``first`` before the hook's own arguments, as long as the method's object lives.

    A copy or a pickle of it calls nothing, so a model that is watched can be copied and saved whole.
    """

    def __init__(self, method: Callable[..., Any] | None = None, *first: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *arguments: Any) -> Any:
        method = None if self._method is None else self._method()
        return None if method is None else method(*self._first, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def removed_with(owner: object, handles: Iterable[Any]) -> Callable[[], None]:
    """Takes hooks away when it is called, or else when ``owner`` is gone."""
    remove = weakref.finalize(owner, _remove, list(handles))
    remove.atexit = False
    return remove


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
