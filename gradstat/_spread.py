"""Tensors over many ranks: each measures its shards, then rows are merged. One that fails leaves no other waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradstat import _fields
from gradstat._collectives import device_of
from gradstat._parts import Part, assemble
from gradstat._plan import gradients_of
from gradstat._reduction import ExtraGroups, Reduction, identity_rows, index_bits
from gradstat._tensors import TensorInfo

_FIRST = _fields.INDEX["first_nonfinite"]
Measure = Callable[[list[Tensor]], list[Part]]


class SpreadRows(NamedTuple):
    """What is true of the whole tensors, on the device.

    Attributes:
        part: A row for each tensor this rank has a part of, with a column more than `Reduction.merge` explains.
        total: ``[1, len(FIELDS)]`` float64: all tensors of all ranks.
        failed: 0-d float64: other ranks that could not measure theirs.
    """

    part: Part
    total: Tensor
    failed: Tensor


class Spread:
    """Gradients, or other tensors, that are spread over ranks.

    Every rank of a mesh has a row for every owner, so that all ranks reduce the same number of them, whether there
    is a gradient on each or not.

    Args:
        tensors: One for each owner, or None where it has none here.
        owners: What they belong to: parameters, or the tensors themselves.
        extra: As for `Reduction`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        owners: Sequence[Tensor],
        extra: ExtraGroups | None = None,
    ) -> None:
        self._owners = owners
        self._tensors = [tensor for tensor in tensors if tensor is not None]
        self._here: Sequence[int] = range(len(tensors))
        stand_ins: Sequence[Tensor] = self._tensors
        if len(self._tensors) < len(tensors):
            self._here = [i for i, tensor in enumerate(tensors) if tensor is not None]
            stand_ins = [t if t is not None else o for t, o in zip(tensors, owners, strict=True)]
        self._reduction = Reduction(stand_ins, extra, owners)

    @classmethod
    def of_gradients(cls, parameters: list[Tensor], extra: ExtraGroups | None = None) -> Spread:
        """The gradients of the parameters that take part in training."""
        found = gradients_of(parameters)
        if found.positions is None:
            return cls(found.tensors, parameters, extra)
        owners = [p for p in parameters if p.requires_grad or p.grad is not None]
        return cls([owner.grad for owner in owners], owners, extra)

    @property
    def has_partial(self) -> bool:
        """Whether a tensor is a pending sum, so that what is measured is not its own memory."""
        return self._reduction.has_partial

    def local(self) -> list[Tensor]:
        """What this rank holds, in the order of the tensors given."""
        return self._reduction.local(self._tensors, self._here)

    def rows(self, measure: Measure) -> SpreadRows:
        """Measures this rank's shards with ``measure``, merges them over the ranks.

        Raises:
            What ``measure`` raised, after the reductions: other ranks find it in ``failed``.
        """
        table, infos, error = self._measured(measure)
        merged = self._reduction.merge(table, error is not None)
        if error is not None:
            raise error
        rows = merged.rows if len(self._here) == len(self._owners) else merged.rows[list(self._here)]
        part = Part(rows, None, self._reduction.infos(self._tensors, self._here, infos))
        return SpreadRows(part, merged.total, merged.failed)

    def total(self, measure: Measure, extremes: bool) -> tuple[Tensor, Tensor]:
        """`SpreadRows.total` and `SpreadRows.failed` alone, for less; see `Reduction.total`. Raises as `rows`."""
        table, _, error = self._measured(measure)
        total, failed = self._reduction.total(table, error is not None, extremes)
        if error is not None:
            raise error
        return total, failed

    def _measured(self, measure: Measure) -> tuple[Tensor, Sequence[TensorInfo], Exception | None]:
        """A row for every owner, those of tensors that are not here the identity."""
        parts: list[Part] = []
        error = None
        try:
            parts = measure(self.local()) if self._tensors else []
        except Exception as raised:
            error = raised
        if error is not None or not parts:
            like = torch.empty(0, dtype=torch.float64, device=self._device())
            return identity_rows(len(self._owners), like), [], error
        table = assemble(parts)
        infos = _in_order(parts)
        if len(self._here) < len(self._owners):
            every = identity_rows(len(self._owners), table)
            every[self._here] = table
            table = every
        return table, infos, None

    def _device(self) -> torch.device:
        for tensor in (*self._tensors, *self._owners):
            if not tensor.is_meta:
                return tensor.device
        return device_of(dist.group.WORLD)  # type: ignore[arg-type]


def _in_order(parts: list[Part]) -> list[TensorInfo]:
    infos = [info for part in parts for info in part.infos]
    if len(parts) == 1:
        return infos
    positions = [position for part in parts for position in part.positions or ()]
    return [info for _, info in sorted(zip(positions, infos, strict=True), key=lambda pair: pair[0])]


def whole_rows(tensors: list[Tensor], measure: Measure) -> Tensor:
    """The rows of the whole tensors, ``[n, len(FIELDS)]``; all NaN if another rank could not measure its part."""
    rows = Spread(tensors, tensors).rows(measure)
    table = rows.part.table[:, : len(_fields.FIELDS)].clone()
    first = table[:, _FIRST]
    table[:, _FIRST] = torch.where(first.isfinite(), first % 2.0 ** index_bits(), first)
    return torch.where(rows.failed > 0, math.nan, table)


def raise_if_others_failed(failed: float) -> None:
    """Raises RuntimeError if ``failed``, as `SpreadRows` has it, is not zero."""
    if failed:
        raise RuntimeError(
            f"{int(failed)} other rank{'s' * (failed != 1)} could not measure what they hold, so nothing is known "
            "about the whole; their own errors say why"
        )
