"""Which gradients are nothing but rounding errors, by how small they are beside those of all other weights."""

from __future__ import annotations

import math

import numpy as np
import torch

from gradstat.rules.base import median
from gradstat.rules.rows import Bools, Floats, Rows

# A gradient is rounding noise below so many machine epsilons of its dtype, relative to the median root mean square of
# the gradients of all weights: a gate that is normalised over one element has up to 1.7. Those of 16 bits, 0.004 and
# more, would be as large as true gradients: in healthy programs of the tests the smallest is 0.009, over 20 steps. So
# there the epsilon of float32 counts. And the gradient of each other weight is so many times as large, unlike where
# gradients vanish layer by layer.
_NOISE, _APART = 4, 1e3


def are_noise(rows: Rows, weights: Bools) -> Bools:
    """``[m, n]``: which gradients of ``weights`` are nothing but the rounding errors of sums that are zero."""
    sizes = np.where(weights & (rows.rms > 0), rows.rms, math.nan)
    largest = torch.finfo(torch.float32).eps
    noise: Bools = sizes < _NOISE * largest * np.fmax.reduce(sizes, 1, keepdims=True)  # nearly always none
    if noise.any():
        dtypes = [torch.float32 if info is None else info.dtype.to_real() for info in rows.tensors.infos]
        limits = _NOISE * np.array([min(torch.finfo(dtype).eps, largest) for dtype in dtypes])
        for row, of_row in enumerate(sizes):
            below = of_row < limits * usual_size(of_row)
            others = np.fmin.reduce(of_row, where=~below, initial=math.inf)
            noise[row] = below & (_APART * np.fmax.reduce(of_row, where=below, initial=0.0) < others)
    return noise


def usual_size(sizes: Floats) -> float:
    """The median of the sizes that are not 0; NaN if there are none."""
    known = sizes[sizes > 0]
    return median(known) if len(known) else math.nan
