"""One call of an operation below autograd: its input tensors, which of them are written, and its name."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradstat._core.nested import tensors_in
from gradstat.replay.taint import finite

# Operations that do not read the previous values of their first argument.
_RANDOM = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
_OVERWRITE = {"copy_", "fill_", "zero_"} | _RANDOM
_UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
_ALSO_POINTWISE = {"_to_copy", "clone", "copy_"}
_SELECTIONS = {"embedding", "gather", "index", "index_select", "masked_select", "take"}
_KNOWN_AS = {"to_copy": "to", "lift_fresh": "tensor"}


class Argument(NamedTuple):
    name: str
    tensor: Tensor
    written: bool
    read: bool


@functools.cache
def _accesses(func: Any) -> dict[str, tuple[bool, bool]]:
    """For each argument of an operation, by name: whether it is written, and whether it is read."""
    overwrites = func.overloadpacket.__name__ in _OVERWRITE
    accesses = {}
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        accesses[argument.name] = written, not (written and (argument.is_out or overwrites))
    return accesses


class Call:
    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name: str = func.overloadpacket.__name__
        self._func = func
        self._values = {**dict(zip(_accesses(func), args, strict=False)), **kwargs}  # of the arguments, by name
        self.is_unwritten = self.name in _UNWRITTEN  # returns uninitialised memory
        self.is_constant = self.name == "lift_fresh"  # makes a tensor of Python numbers
        self.arguments = [
            Argument(name + suffix, tensor, *_accesses(func)[name])
            for name, value in self._values.items()
            for suffix, tensor in tensors_in(value, "")
        ]

    @property
    def is_view(self) -> bool:
        """Whether it only returns views."""
        if self.is_constant or any(argument.written for argument in self.arguments):
            return False
        return any(returned.alias_info is not None for returned in self._func._schema.returns)

    @property
    def has_infinite_number(self) -> bool:
        """Whether an argument is an infinite number, as in ``masked_fill(mask, -inf)``."""
        return any(isinstance(value, float) and math.isinf(value) for value in self._values.values())

    @property
    def lengths(self) -> list[str]:
        """Lists of lengths among the arguments, as of a CTC loss, in words."""
        named = self._values.items()
        return [f"{name}: {value}" for name, value in named if name.endswith("lengths") and isinstance(value, list)]

    def reduces(self, tensors: Iterable[Tensor], result: Tensor) -> bool:
        """Whether the elements of ``result`` are computed from several of one of ``tensors``, as by a mean or a sum."""
        return self.name not in _SELECTIONS and any(tensor.numel() > result.numel() for tensor in tensors)

    @property
    def readable_name(self) -> str:
        namespace = self._func.namespace
        return readable(self.name) if namespace == "aten" else f"{namespace}::{self.name}"

    def results(self, result: Any) -> list[tuple[Tensor, bool]]:
        """The tensors it returned or wrote, each once, and whether each is a main result rather than a by-product."""
        by_id = {id(a.tensor): (a.tensor, True) for a in self.arguments if a.written}
        # The log-sum-exp of attention is padded, or infinite for a row that is masked out completely.
        by_products = "attention" in self.name and "backward" not in self.name
        for i, (_, tensor) in enumerate(tensors_in(result, "")):
            by_id.setdefault(id(tensor), (tensor, i == 0 or not by_products))
        return list(by_id.values())

    def nonfinite_elements_from(self, name: str, values: Tensor, result: Tensor) -> Tensor:
        """Which nonfinite elements of ``result`` may result from those in ``values``, the argument ``name``."""
        anywhere = torch.ones((), dtype=torch.bool, device=result.device)
        if torch.Tag.pointwise not in self._func.tags and self.name not in _ALSO_POINTWISE:
            return anywhere
        selectors = {a.name: a.tensor for a in self.arguments if a.name in ("condition", "mask")}
        try:
            at = ~finite(values) & ~finite(result)
            if self.name == "where" and name in ("self", "other"):
                condition = selectors["condition"].bool()
                return at & (condition if name == "self" else ~condition)
            if self.name in ("masked_fill", "masked_fill_") and name == "self":
                return at & ~selectors["mask"].bool()
        except RuntimeError:  # shapes that do not broadcast, or two devices
            return anywhere
        return at


def readable(name: str) -> str:
    """The name by which users know an operation."""
    name = name.lstrip("_")
    if name.startswith("scaled_dot_product"):
        return "scaled_dot_product_attention"
    return _KNOWN_AS.get(name, name.removeprefix("native_").removesuffix("_forward"))


def node_name(node: Any) -> str:
    """The operation whose derivative an autograd node is."""
    if isinstance(node, BackwardCFunction):
        return type(node).__name__.removesuffix("Backward")
    name = re.sub(r"Backward\d*$", "", node.name().rsplit("::", 1)[-1])
    return readable(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def is_leaf_node(node: Any) -> bool:
    """Whether an autograd node accumulates into a leaf, which is its ``variable``."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")
