"""The limits that a clip may be given: a number, or an adaptive clip."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradstat.adaptive._base import AdaptiveClip

Limit = float | AdaptiveClip


def checked_limit(max_norm: Any) -> Limit | None:
    """``max_norm`` as a positive number, an adaptive clip or None; raises TypeError or ValueError if it is neither."""
    if max_norm is None or isinstance(max_norm, AdaptiveClip):
        return max_norm
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float | Tensor):
        raise TypeError(f"max_norm: expected a number, an adaptive clip or None, got {type(max_norm).__name__}")
    number = float(max_norm)
    if not number > 0:
        raise ValueError(f"max_norm is {number}; expected a number above 0, or None for no limit")
    return number
