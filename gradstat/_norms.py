"""What clipping derives from a table, with torch operations on the table's device and no sync.

For the backends whose kernels only fill tables, and for gradients spread over several devices. The
compiled backend does the same inside its kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradstat import _fields


def total_norm(table: Tensor, norm_type: float) -> Tensor:
    """The norm of all tensors together, 0-d float64: NaN if any element is NaN, else Inf if any is.

    Args:
        table: ``[n, len(FIELDS)]`` float64, n at least 1.
        norm_type: 2 or infinity (the largest magnitude; real tensors only).
    """
    sums = table.sum(0)
    if norm_type == math.inf:
        # The identities of empty rows are -inf on both sides, hence the clamp.
        largest = torch.maximum(_column(table, "max").amax(), -_column(table, "min").amin()).clamp(min=0.0)
        return _unless_nonfinite(largest, sums)
    return l2_norms(sums)


def l2_norms(rows: Tensor) -> Tensor:
    """The L2 norm of each row, float64: NaN if any of its elements is NaN, else Inf if any is.

    Args:
        rows: ``[..., len(FIELDS)]`` float64.

    Returns:
        ``[...]``.
    """
    squares = (_column(rows, name) for name in ("sq_sum", "sq_sum_large", "sq_sum_small"))
    return _unless_nonfinite(_fields.l2_norm(torch, *squares), rows)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by: ``min(1, max_norm / (norm + 1e-6))``, in ``norm``'s dtype.

    The formula and its constant are those of ``torch/nn/utils/clip_grad.py``. NaN propagates. An infinite
    ``max_norm`` gives 1, whatever the norm: it asks for a measurement only.
    """
    if max_norm == math.inf:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def norm_dtype(tensors: list[Tensor]) -> torch.dtype:
    """The dtype of a norm over ``tensors``: torch's promotion over their real dtypes."""
    dtypes = {_real(dtype) for dtype in {tensor.dtype for tensor in tensors}}
    promoted = dtypes.pop()
    for dtype in dtypes:
        promoted = torch.promote_types(promoted, dtype)
    return promoted


def _column(rows: Tensor, name: str) -> Tensor:
    return rows[..., _fields.INDEX[name]]


def _unless_nonfinite(norm: Tensor, rows: Tensor) -> Tensor:
    norm = torch.where(_column(rows, "inf_count") > 0, math.inf, norm)
    return torch.where(_column(rows, "nan_count") > 0, math.nan, norm)


def _real(dtype: torch.dtype) -> torch.dtype:
    # torch promotes no two float8 types with each other, nor is either a useful type for a norm.
    return torch.float32 if dtype.itemsize == 1 else dtype.to_real()
