"""Entries of a state given to ``load_state_dict``. The state comes from a file, so it may contain anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

A_COUNT = "a whole number from 0 to 2**53"


def is_count(numbers: Tensor) -> Tensor:
    """Which float64 ``numbers`` are counts: whole, and not beyond those that float64 holds exactly."""
    return (numbers >= 0) & (numbers <= 2.0**53) & (numbers == numbers.floor())


@dataclass(frozen=True, slots=True)
class Saved:
    """An entry and its place in the state, which errors name. An unexpected entry raises ValueError."""

    value: Any
    place: str = "state"

    def __getitem__(self, name: str) -> Saved:
        if not isinstance(self.value, Mapping):
            self.refuse("a mapping")
        if name not in self.value:
            raise ValueError(f"{self.place} has no {name!r}; expected what state_dict() returns")
        return Saved(self.value[name], f"{self.place}[{name!r}]")

    def __contains__(self, name: str) -> bool:
        return isinstance(self.value, Mapping) and name in self.value

    def numbers(self, *shape: int | None) -> Tensor:
        """The float64 tensor of this shape, in which None is any size."""
        value: Tensor = self.value
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        if (
            type(value) not in (Tensor, torch.nn.Parameter)
            or (value.dtype, value.layout) != (torch.float64, torch.strided)
            or value.is_meta
            or value.dim() != len(shape)
            or any(size not in (None, actual) for size, actual in zip(shape, value.shape, strict=True))
        ):
            self.refuse(f"a float64 tensor of shape ({sizes})")
        return value.detach()

    def require(self, numbers: Tensor, fine: Tensor, expected: str) -> None:
        """Refuses the first of ``numbers``, from `numbers`, for which ``fine`` is False. Waits for the device."""
        wrong = (~fine).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            place = f"{self.place}[{', '.join(map(str, at))}]" if at else self.place
            Saved(numbers[at].item(), place).refuse(expected)

    def refuse(self, expected: str) -> NoReturn:
        value = self.value
        if isinstance(value, Tensor):
            shown = f"a tensor of {value.dtype}, {value.layout} and shape {tuple(value.shape)} on {value.device}"
        elif value is None or isinstance(value, bool | int | float):
            shown = repr(value)
        else:
            shown = f"of type {type(value).__name__}"
        raise ValueError(f"{self.place} is {shown}; expected {expected}")
