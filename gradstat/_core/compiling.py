"""Calls that torch.compile leaves the graph for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch.compiler import is_compiling

_Function = TypeVar("_Function", bound=Callable[..., object])


def never_traced(function: _Function) -> _Function:
    """Decorator: torch.compile calls it as it is: one break of the graph, and no guards on what it does.

    For what reads numbers on the host, or computes with numpy, which torch would imitate. Under ``fullgraph=True``
    torch refuses it, and shows where it was called. A call costs 0.2 us more.
    """

    @functools.wraps(function)
    def called(*args: object, **options: object) -> object:
        if is_compiling():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return cast(_Function, called)
