"""Sketches: a few random projections of a tensor, whose distance tells how far apart two tensors are.

A checksum says whether bits are equal. Replicas of a gradient may differ by rounding, if ranks added in another order,
and parts of a tensor are as far apart as independent numbers. A sketch tells both from each other, however large the
tensors are: for signs that are drawn at random, the mean square of the projections of a difference is its squared norm,
with a relative standard deviation of ``sqrt(2 / WIDTH)`` (D. Achlioptas, Database-friendly random projections, J.
Computer and System Sciences 66(4), 2003). The signs belong to positions: the order of the elements matters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WIDTH = 16
Sketch = npt.NDArray[np.float64]
_ROW, _LEVELS = 4096, 4  # each level divides the number of elements by 4096
_AT_ONCE = 1 << 22  # elements, which are converted to float64: 32 MB


def sketches(tensors: Sequence[Tensor]) -> Sketch:
    """``[n, WIDTH]``: the projections of each tensor, in row-major order of its elements. One read; waits."""
    if not tensors:
        return np.empty((0, WIDTH))
    with torch.no_grad():
        made = [_sketch(tensor.detach()) for tensor in tensors]
        return torch.stack([one.to(made[0].device) for one in made]).cpu().numpy()


def distance(one: Sketch, other: Sketch) -> float:
    """The norm of the difference of two tensors over that of the larger, estimated from their sketches."""
    scale = max(np.abs(one).max(), np.abs(other).max())
    if not scale > 0:
        return 0.0
    one, other = one / scale, other / scale  # squares of huge projections would overflow
    return float(np.linalg.norm(one - other) / max(np.linalg.norm(one), np.linalg.norm(other)))


def _sketch(tensor: Tensor) -> Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    signs = _signs(flat.device)
    parts = [_rows(part.double()) @ signs[0] for part in flat.split(_AT_ONCE)] if flat.numel() else []
    sums = torch.cat(parts) if parts else flat.new_zeros(1, WIDTH, dtype=torch.float64)
    for level in signs[1:]:
        if len(sums) > 1:
            sums = (_rows(sums.T.contiguous()).view(WIDTH, -1, _ROW) * level.T[:, None]).sum(2).T
    return sums[0]


def _rows(flat: Tensor) -> Tensor:
    """``[..., n]`` as ``[..., ceil(n / row), row]``, with zeros at the end."""
    count = math.ceil(flat.shape[-1] / _ROW)
    padded = torch.nn.functional.pad(flat, (0, count * _ROW - flat.shape[-1]))
    return padded.view(*flat.shape[:-1], count, _ROW)


@functools.lru_cache(maxsize=16)
def _signs(device: torch.device) -> list[Tensor]:
    # PCG64's raw output is the same in every version of numpy and on every machine.
    bits = np.random.PCG64(1).random_raw(_LEVELS * _ROW * WIDTH // 64).astype(np.uint64)
    signs = np.unpackbits(bits.view(np.uint8)).astype(np.float64) * 2 - 1
    return list(torch.from_numpy(signs).view(_LEVELS, _ROW, WIDTH).to(device).unbind())
