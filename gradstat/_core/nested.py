"""The tensors in nested mappings, lists, tuples, dataclasses, and attributes of other objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from torch import Tensor
from torch.nn import Module


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
    """The tensors among `leaves_in`, and those that other objects have as attributes, as DETR's ``NestedTensor``."""
    for place, leaf in leaves_in(value, path):
        if isinstance(leaf, Tensor):
            yield place, leaf
        elif not isinstance(leaf, (str, int, float, NoneType, type, Module)):
            for name, attribute in getattr(leaf, "__dict__", {}).items():
                if isinstance(attribute, Tensor):
                    yield f"{place}.{name}", attribute
