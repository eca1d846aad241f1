"""Tables in parts, one for each device, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradstat._fields import NAMES
from gradstat._tensors import TensorInfo, moved


class Part(NamedTuple):
    """The rows of the tensors of one device.

    Attributes:
        table: ``[n, len(FIELDS)]`` float64 on that device.
        positions: Which of the tensors given the rows belong to; None for all of them, in order.
        infos: Shape, dtype and device of each row's tensor.
    """

    table: Tensor
    positions: list[int] | None
    infos: Sequence[TensorInfo]


def assemble(tables: list[Tensor], positions: list[list[int] | None]) -> Tensor:
    """One table from the parts of a call, in the order of its tensors, on the first part's device."""
    if not tables:
        return torch.empty(0, len(NAMES), dtype=torch.float64)
    if len(tables) == 1:
        return tables[0]
    device = tables[0].device
    joined = torch.cat([moved(table, device) for table in tables])
    order = torch.tensor([p for part in positions for p in part or ()])
    return joined[order.argsort().to(device, non_blocking=True)]
