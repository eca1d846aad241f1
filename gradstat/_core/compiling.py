"""Calls for which torch.compile breaks the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch.compiler import is_compiling

_Function = TypeVar("_Function", bound=Callable[..., object])


def never_traced(function: _Function) -> _Function:
    """Decorator: torch.compile runs the function eagerly, with one graph break and no guards on its internals.

    For functions that read numbers on the host or compute with numpy, which torch would otherwise trace. Under
    ``fullgraph=True`` torch raises an error that shows the call. Costs 0.2 us per call.
    """

    @functools.wraps(function)
    def called(*args: object, **options: object) -> object:
        if is_compiling():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return cast(_Function, called)
