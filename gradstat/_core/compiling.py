"""Calls that torch.compile leaves the graph for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def outside_of_the_graph(function: _Function) -> _Function:
    """``function``, called as it is where it would be traced: one break of the graph, and no guards on what it does.

    For what reads numbers on the host. Under ``fullgraph=True`` torch refuses it, and shows where it was called.
    """
    found: _Function = torch.compiler.disable(function)
    return found


def never_traced(method: _Function) -> _Function:
    """Decorator: calls are `outside_of_the_graph`; computing with numpy, too, which torch would imitate.

    It costs 0.2 us a call. What runs in every step asks by itself, for half of that.
    """

    @functools.wraps(method)
    def called(*args: object, **options: object) -> object:
        if torch.compiler.is_compiling():
            return outside_of_the_graph(method)(*args, **options)
        return method(*args, **options)

    return cast(_Function, called)
