"""Checks of a state, or of the header of a file. It may come from anywhere, so that it may contain anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstat._core.text import printable
from gradstat._version import __version__

_MOST = 1 << 53  # beyond it float64 does not hold all whole numbers


class Kind(NamedTuple):
    """A kind of values: what errors call it, and whether a value is one."""

    expected: str
    fits: Callable[[Any], bool]


def whole(low: int, high: int = _MOST) -> Kind:
    return Kind(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def exactly(expected: object) -> Kind:
    return Kind(repr(expected), lambda value: type(value) is type(expected) and value == expected)


def numbers(shape: tuple[int, ...] | None, expected: str, fit: Callable[[Tensor], Tensor]) -> Kind:
    """Float64 tensors of this shape (None: 1-d) in which all numbers ``fit``. To find out waits for their device."""

    def fits(value: Any) -> bool:
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta
        has_shape = is_plain and (value.dim() == 1 if shape is None else value.shape == shape)
        return has_shape and value.dtype == torch.float64 and bool(fit(value).all())

    return Kind(f"a {'1-d' if shape is None else shape} float64 tensor of {expected}", fits)


COUNT, WHOLE = whole(0), whole(-_MOST)
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
MAPPING = Kind("a mapping", lambda value: isinstance(value, Mapping))
NUMBER = Kind("a number", lambda value: isinstance(value, float) or WHOLE.fits(value))
FINITE = Kind("a finite number", lambda value: NUMBER.fits(value) and math.isfinite(value))
TEXT = Kind("text", lambda value: isinstance(value, str))
_LIST = Kind("a list", lambda value: isinstance(value, list | tuple))


def are_counts(numbers: Tensor) -> Tensor:
    """Which float64 ``numbers`` are counts."""
    return (numbers >= 0) & (numbers <= _MOST) & (numbers == numbers.floor())


def require(value: Any, kind: Any, place: str = "state") -> None:
    """Raises ValueError, which names the ``place``, unless ``value`` is of the ``kind``.

    A kind is a `Kind`, ``[kind]`` for a list, ``{str: kind}`` for a mapping from texts, or ``{"name": kind, ...}`` for
    a mapping that has these names.
    """
    if isinstance(kind, Kind):
        if not kind.fits(value):
            raise ValueError(printable(f"{place}: expected {kind.expected}, got {value!r:.80}"))
    elif isinstance(kind, dict):
        require(value, MAPPING, place)
        for name in value if str in kind else kind:
            require(name, TEXT, f"{place}, a name")
            if name not in value:
                raise ValueError(f"{place} has no {name!r}")
            require(value[name], kind.get(name, kind.get(str)), f"{place}[{name!r}]")
    else:
        require(value, _LIST, place)
        if isinstance(kind[0], Kind) and all(map(kind[0].fits, value)):
            return  # without a name for each place of a long list
        for i, item in enumerate(value):
            require(item, kind[0], f"{place}[{i}]")


def require_version(held: Any, version: int, place: str = "state") -> None:
    """Raises ValueError unless ``held``, a state or the header of a file, is of this version of its format."""
    require(held, {"version": WHOLE, "gradstat": TEXT}, place)
    if held["version"] != version:
        raise ValueError(
            f"{place}['version']: expected {version}, got {held['version']}, written by gradstat "
            f"{printable(held['gradstat']):.40}; this is gradstat {__version__}. Use the gradstat that wrote it"
        )


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Turns any exception inside into a ValueError that names the ``place``."""
    try:
        yield
    except Exception as error:
        reason = printable(str(error) or type(error).__name__)
        raise ValueError(reason if reason.startswith(place) else f"{place}: {reason}") from error
