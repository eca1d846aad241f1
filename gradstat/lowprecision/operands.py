"""What is measured of one layer in a sampled step: the operands of its matrix products, on their device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradstat._core.backends import resolve
from gradstat._core.host_copy import HostCopy
from gradstat._core.norms import l2_norms
from gradstat._core.tensors import is_uninitialized, name_by_position, readable, shard_of
from gradstat.lowprecision.formats import Format
from gradstat.lowprecision.stats import DTYPES, QUANTIZATION_FIELDS, table_of
from gradstat.lowprecision.verdicts import Means

_PARTS = [QUANTIZATION_FIELDS.index(name) for name in ("flushed", "saturated", "sq_error")]
_WHOLES = [QUANTIZATION_FIELDS.index(name) for name in ("nonzero", "nonzero", "sq_sum")]


def is_operand(tensor: object) -> bool:
    """Whether formats are defined for the elements of ``tensor``, and it has some."""
    return isinstance(tensor, Tensor) and tensor.dtype in DTYPES and tensor.dim() > 0 and tensor.numel() > 0


def weight_of(module: nn.Module) -> Tensor | None:
    """The weight of a linear layer; None for other modules, and for weights that are packed or computed.

    Reading a weight that a parametrization computes may change it, as with spectral norm.
    """
    if not (isinstance(module, nn.Linear) or _is_transposed(module)):
        return None
    weight = module._parameters.get("weight", vars(module).get("weight"))
    is_known = weight is not None and not is_uninitialized(weight) and is_operand(weight) and weight.dim() == 2
    return weight if is_known else None


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' ``Conv1D``, a linear layer with a weight of ``[inputs, outputs]``."""
    return type(module).__name__ == "Conv1D"


class Layer:
    """Statistics of input ``[tokens, inputs]``, weight ``[outputs, inputs]`` and gradient of the output, in ``values``.

    Of distributed tensors they are this rank's shards.
    """

    def __init__(self, formats: Sequence[Format]) -> None:
        self.values: dict[Any, Tensor] = {}
        self._formats = formats

    def take_forward(self, module: nn.Module, given: Tensor, weight: Tensor) -> None:
        """Measures input and weight, as the product takes them."""
        tokens, matrix = _matrix_of(given, cast=True), _matrix_of(weight, cast=True)
        matrix = matrix.T.contiguous() if _is_transposed(module) else matrix
        self._to_input, self._to_weight = given.requires_grad, weight.requires_grad
        self._squares = _squares(tokens, by_row=True)
        self._weight_square = _squares(matrix)[0] / matrix.numel()
        self._measure("input", tokens, True, self._to_weight)
        self._measure("weight", matrix, True, self._to_input, is_weight=True)

    def take_gradient(self, gradient: Tensor) -> None:
        """Measures the gradient of the output, in the first backward pass."""
        if "coupling" not in self.values:
            with torch.no_grad():
                matrix = _matrix_of(gradient)
                self._measure("output gradient", matrix, self._to_input, self._to_weight)
                self.values["coupling"] = self._squares.dot(_squares(matrix, by_row=True))
                self.values["sensitivity"] = self.values["coupling"] * self._weight_square

    def take_weight_gradient(self, gradient: Tensor) -> None:
        """Measures the norm of the weight's gradient, before it is reduced or added to that of other passes."""
        if "coupling" in self.values and "gain" not in self.values and gradient.layout is torch.strided:
            self.values["gain"] = self.values["coupling"] / _squares(gradient.detach())[0]

    def send(self) -> None:
        """Begins the copy of the values to the host, when the step has ended."""
        self._shapes = {name: value.shape for name, value in self.values.items()}
        self._copy = HostCopy(torch.cat([value.flatten() for value in self.values.values()]))

    def has_arrived(self) -> bool:
        """Whether `means` returns without waiting."""
        return self._copy.done()

    def means(self) -> Means:
        """What was measured; waits for the copy."""
        ends = np.cumsum([shape.numel() for shape in self._shapes.values()])[:-1]
        parts = zip(self._shapes.items(), np.split(self._copy.wait(), ends), strict=True)
        return {name: part.reshape(shape) for (name, shape), part in parts}

    def _measure(self, name: str, matrix: Tensor, along: bool, across: bool, is_weight: bool = False) -> None:
        """Measures an operand with blocks ``along`` and ``across`` the rows: `Means`, NaN where not finite."""
        dense = readable([matrix], name_by_position)
        measured = functools.cache(lambda format, dim: table_of(dense, format, dim, is_weight))
        for direction in [0] * along + [1] * across:
            # Blocks that are squares or the whole matrix are the same in both directions.
            dims = [
                -1 - direction if each.block and not (is_weight and each.weight_block) else -1 for each in self._formats
            ]
            table = torch.cat(list(map(measured, self._formats, dims)))
            shares = table[:, _PARTS] / table[:, _WHOLES].clamp(min=1e-300)
            is_finite = table[:, QUANTIZATION_FIELDS.index("nonfinite"), None] == 0
            self.values[name, direction] = torch.where(is_finite, shares, torch.nan)


def _matrix_of(tensor: Tensor, cast: bool = False) -> Tensor:
    """This rank's rows of an operand, with ``cast`` in the type in which autocast gives it to the product."""
    local, device = shard_of(tensor.detach()), tensor.device.type
    if cast and torch.is_autocast_enabled(device) and local.dtype is not torch.float64:
        local = local.to(torch.get_autocast_dtype(device))
    return local.reshape(-1, local.shape[-1])


def _squares(tensor: Tensor, by_row: bool = False) -> Tensor:
    """The square of the norm, or of the norms of the rows of a matrix."""
    kernels, dense = resolve(None, tensor.device.type), readable([tensor], name_by_position)
    return l2_norms(kernels.unit_stats(dense) if by_row else kernels.check(dense)[0]).square()
