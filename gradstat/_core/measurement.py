"""`Measurement`: the rows of a list of tensors, as kernels and reductions leave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradstat import _fields
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


def without_scale(rows: Any, loss_scale: float | None) -> Any:
    """Rows divided by the loss scale, each field by its degree; additional columns are unchanged."""
    if rows is None or loss_scale is None:
        return rows
    degrees = np.zeros(rows.shape[-1])
    degrees[: len(_DEGREES)] = _DEGREES
    with np.errstate(all="ignore"):
        return rows * np.power(loss_scale, -degrees)
