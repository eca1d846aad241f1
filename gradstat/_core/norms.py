"""Norms, clip multipliers and decisions from a table, in plain torch without a sync, where no kernel computed them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradstat import _fields


def total_norm(table: Tensor, norm_type: float) -> Tensor:
    """The norm of all tensors together, 0-d float64: NaN if any element is NaN, else Inf if any is.

    ``table`` has at least one row; ``norm_type`` is 2 or infinity (the largest magnitude; real tensors only).
    """
    sums = table.sum(0)
    if norm_type == math.inf:
        # Rows without finite elements give -inf on both sides, hence the clamp.
        largest = torch.maximum(_column(table, "max").amax(), -_column(table, "min").amin()).clamp(min=0.0)
        return _unless_nonfinite(largest, sums)
    return l2_norms(sums)


def l2_norms(rows: Tensor) -> Tensor:
    """The L2 norm of each row, float64: NaN if any of its elements is NaN, else Inf if any is."""
    return _unless_nonfinite(_fields.l2_norm(torch, rows), rows)


def clip_multiplier(norm: Tensor, max_norm: float) -> Tensor:
    """The multiplier that clips gradients: ``min(1, max_norm / (norm + 1e-6))``, in ``norm``'s dtype.

    Formula and constant are those of ``torch/nn/utils/clip_grad.py``. NaN propagates. An infinite ``max_norm`` gives 1
    whatever the norm, as the caller then wants a measurement only.
    """
    if max_norm == math.inf:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class StepRequest(NamedTuple):
    """Inputs of the decision about an optimizer step, besides the table of its gradients."""

    max_norm: float  # without the loss scale
    loss_scale: Tensor | None  # that the gradients carry, one float32 number; None for 1
    counters: Tensor | None  # [3] int64: steps, skipped steps, consecutive skipped steps; changed in place


class Decision(NamedTuple):
    """The decision about an optimizer step, derived from a table; all on the table's device."""

    norm: Tensor  # without the loss scale, 0-d: float64, or the gradients' promoted dtype
    # [2] float64: what to multiply the gradients by, which removes their loss scale, too; and the norm.
    scaling: Tensor
    # [3] float32: 1 to skip the step, else 0; the number to divide the gradients by; the loss scale.
    verdict: Tensor

    @classmethod
    def unclipped(cls, norm: Tensor, skip: Tensor) -> Decision:
        """The decision to skip or not, 0-d ``skip``, and to leave gradients without a loss scale as they are."""
        skip = skip.to(torch.float32)
        scaling = torch.stack([torch.ones_like(norm), norm]).to(torch.float64)
        return cls(norm, scaling, torch.stack([skip, torch.ones_like(skip), torch.ones_like(skip)]))


# Indices into ``scaling``, and into a verdict; that of a guard also has a reason.
MULTIPLIER, NORM = range(2)
SKIP, DIVISOR, LOSS_SCALE, REASON = range(4)


def decide(table: Tensor, step: StepRequest) -> Decision:
    """Same as ``decide`` in csrc/entry.h, which explains it. ``table`` (at least one row) carries the loss scale."""
    max_norm, loss_scale, counters = step
    scale = table.new_ones(()) if loss_scale is None else loss_scale.to(table.device, torch.float64).reshape(())
    norm = total_norm(table, 2.0) / scale
    clip = clip_multiplier(norm, max_norm)
    divisor = (scale / clip).to(torch.float32)
    nonfinite = any_nonfinite(table)
    usable = (scale > 0) & scale.isfinite() & ((clip == 0) | ~divisor.isinf())
    skip = nonfinite | ~usable
    if counters is not None:
        count_step(counters, skip)
    verdict = torch.stack([skip.to(torch.float32), divisor, scale.to(torch.float32)])
    return Decision(norm, torch.stack([clip / scale, norm]), verdict)


def any_nonfinite(table: Tensor) -> Tensor:
    """Whether any element of any tensor is NaN or Inf, 0-d bool."""
    return table[:, _fields.NONFINITE].any()


def count_step(counters: Tensor, skipped: Tensor) -> None:
    """Counts one step in ``counters``, ``[3]`` int64, as skipped if the 0-d ``skipped`` is not zero."""
    steps, every, in_a_row = counters.unbind()
    skip = skipped.to(torch.int64)
    steps.add_(1)
    every.add_(skip)
    in_a_row.add_(1).mul_(skip)


def norm_dtype(tensors: list[Tensor]) -> torch.dtype:
    """The dtype of a norm over ``tensors``: torch's promotion over their real dtypes; float32 if there are none."""
    # torch does not promote two different float8 types, and neither would be a useful dtype for a norm.
    dtypes = {tensor.dtype for tensor in tensors} or {torch.float32}
    return functools.reduce(
        torch.promote_types, {torch.float32 if dtype.itemsize == 1 else dtype.to_real() for dtype in dtypes}
    )


def _column(rows: Tensor, name: str) -> Tensor:
    return rows[..., _fields.INDEX[name]]


def _unless_nonfinite(norm: Tensor, rows: Tensor) -> Tensor:
    norm = torch.where(_column(rows, "inf_count") > 0, math.inf, norm)
    return torch.where(_column(rows, "nan_count") > 0, math.nan, norm)
