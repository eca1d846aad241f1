"""The tensors in nested mappings, lists, tuples and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def leaves_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The non-container leaves of ``value`` in order, each with the expression that reaches it from ``path``."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_in(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves_in(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_in(getattr(value, field.name, None), f"{path}.{field.name}")
    else:
        yield path, value


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors among `leaves_in`."""
    for place, leaf in leaves_in(value, path):
        if isinstance(leaf, Tensor):
            yield place, leaf
