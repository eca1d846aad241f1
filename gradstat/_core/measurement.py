"""`Measurement`: the rows of a list of tensors, as kernels and reductions leave them, and their copy to the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core.host_copy import HostCopy
from gradstat._core.native import Receive
from gradstat._core.tensors import TensorInfo, by_device, to_device

_NAN_COUNT = _fields.INDEX["nan_count"]
_DEGREES = np.array(_fields.DEGREES, dtype=np.float64)


class Measurement(NamedTuple):
    """The rows of a list of tensors. Holds no reference to the tensors."""

    # One table per device, [n, len(FIELDS)] float64; with distributed tensors there is one more column (`Sharded`).
    tables: list[Tensor]
    # The tensor that each row of the concatenated tables belongs to; None if they are in order.
    order: list[int] | None
    infos: Sequence[TensorInfo]
    # [1, len(FIELDS)] float64: the total over all tensors and ranks, if some tensors are distributed.
    total: Tensor | None = None
    # 0-d float64: ranks that could not measure, Inf if ranks have other tensors; None if no tensor is distributed.
    failed: Tensor | None = None
    receive: Receive | None = None  # of a copy of the only table to the host, if its launch began it

    @classmethod
    def joined(cls, rows: Sequence[Tensor], infos: Sequence[TensorInfo]) -> Measurement:
        """The rows, ``[1, fields]`` each, of tensors that were measured one by one, in one table per device."""
        groups = by_device(rows).values()
        order = [i for at in groups for i in at] if len(groups) > 1 else None
        return cls([torch.cat([rows[i] for i in at]) for at in groups], order, infos)

    def table(self) -> Tensor:
        """One table in the order of the tensors, on the first one's device."""
        joined = self.tables[0] if len(self.tables) == 1 else self.summands()
        if self.order is None:
            return joined
        return joined[torch.tensor(self.order, device="cpu").argsort().to(joined.device, non_blocking=True)]

    def summands(self) -> Tensor:
        """Rows that merge into the total row, on the first tensor's device. They count a NaN if another rank failed."""
        if self.total is not None and self.failed is not None:
            whole = self.total.clone()
            whole[:, _NAN_COUNT] += self.failed
            return whole
        if not self.tables:
            return torch.empty(0, _fields.COUNT, dtype=torch.float64, device="cpu")
        if len(self.tables) == 1:
            return self.tables[0]
        return torch.cat([to_device(table, self.tables[0].device) for table in self.tables])

    def nan_if_failed(self) -> Measurement:
        """This measurement, with NaN in every column if another rank could not measure its part."""
        if self.failed is None or self.total is None:
            return self
        failed = self.failed > 0
        tables = [torch.where(failed, torch.nan, table) for table in self.tables]
        return self._replace(tables=tables, total=torch.where(failed, torch.nan, self.total))


class HostRows:
    """A `Measurement` being copied to the host, with one copy per device. Holds no device memory."""

    __slots__ = ("_copies", "_failed", "_order", "_total", "infos")

    def __init__(self, measurement: Measurement) -> None:
        self._copies = list(map(HostCopy, measurement.tables, itertools.repeat(measurement.receive)))
        self._order = measurement.order
        self._total = None if measurement.total is None else HostCopy(measurement.total)
        self._failed = None if measurement.failed is None else HostCopy(measurement.failed)
        self.infos = measurement.infos

    @property
    def needs_copy(self) -> bool:
        """Whether anything has to be copied: False if everything is on the CPU."""
        for copy in self._copies:  # noqa: SIM110 - a generator takes longer, in every step
            if copy.needs_copy:
                return True
        return False

    def done(self) -> bool:
        """Whether everything has arrived. Never waits."""
        others = (copy for copy in (self._total, self._failed) if copy is not None)
        return all(copy.done() for copy in (*self._copies, *others))

    def table(self) -> Any:
        """The rows in the order of the tensors; waits for the copies, once per device."""
        if self._order is None and len(self._copies) == 1:
            return self._copies[0].wait()
        if not self._copies:
            return np.empty((0, _fields.COUNT))
        joined = np.concatenate([copy.wait() for copy in self._copies])
        return joined if self._order is None else joined[np.argsort(self._order)]

    def total(self) -> Any:
        """The total row over all tensors and ranks, or None if no tensor is distributed; waits for it.

        Raises RuntimeError if another rank could not measure its part.
        """
        if self._total is None:
            return None
        failed = 0.0 if self._failed is None else float(self._failed.wait())
        if math.isinf(failed):
            raise RuntimeError(
                "other ranks have other tensors, so the result is unknown; see the errors on those ranks. All ranks "
                "have to pass the same tensors in the same order"
            )
        if failed:
            raise RuntimeError(
                f"{failed:.0f} other rank{'s' * (failed != 1)} failed to measure their shards, so the result is "
                "unknown; see the errors on those ranks"
            )
        return self._total.wait()[0]


def without_scale(rows: Any, loss_scale: float | None) -> Any:
    """Rows divided by the loss scale, each field by its degree; additional columns are unchanged."""
    if rows is None or loss_scale is None:
        return rows
    degrees = np.zeros(rows.shape[-1])
    degrees[: len(_DEGREES)] = _DEGREES
    with np.errstate(all="ignore"):
        return rows * np.power(loss_scale, -degrees)
