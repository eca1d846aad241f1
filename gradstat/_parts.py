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


def assemble(parts: Sequence[Part]) -> Tensor:
    """One table from the parts of a call, in the order of its tensors, on the first part's device."""
    if not parts:
        return torch.empty(0, len(NAMES), dtype=torch.float64, device="cpu")
    if len(parts) == 1:
        return parts[0].table
    device = parts[0].table.device
    joined = torch.cat([moved(part.table, device) for part in parts])
    order = torch.tensor([position for part in parts for position in part.positions or ()], device="cpu")
    return joined[order.argsort().to(device, non_blocking=True)]
