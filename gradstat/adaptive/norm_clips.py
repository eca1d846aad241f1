"""Clips by the total norm: a fixed limit, a percentile of previous norms, a z-score among them."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from gradstat._core import norms
from gradstat._core.warn import warn_user
from gradstat.adaptive._base import DEFAULT_WINDOW, NormClip, Step, limited, number, positive, whole_number

Target = Literal["reciprocal", "threshold", "mean"]
_MOST_OUTLIERS = 25  # kMostOutliers in csrc/decide.h


class FixedClip(NormClip):
    """torch's clip to a norm of at most ``max_norm``, with a summary of what it clipped.

    The multiplier is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch/nn/utils/clip_grad.py``. Unlike
    `clip_grad_norm_` it leaves gradients unchanged if their norm is NaN or Inf.

    Args:
        max_norm: Upper limit of the total norm, above 0; infinity only records norms.
        window: Number of norms kept for the summary.
    """

    _method = 0
    _if_often = (
        "max_norm then sets the size of the step instead of removing outliers; raise it to the suggested one, or "
        "lower the learning rate"
    )
    _if_never = "max_norm is above all norms so far; lower it to the suggested one to remove outliers"

    def __init__(self, max_norm: float, window: int = DEFAULT_WINDOW) -> None:
        self._max_norm = positive("max_norm", max_norm, "inf for no limit")
        self._method_options = (self._max_norm,)
        super().__init__(window, max_norm=max_norm)

    def _multipliers(self, step: Step) -> tuple[Tensor, Tensor]:
        return norms.clip_multiplier(step.norm, self._max_norm), step.is_recorded


class AutoClip(NormClip):
    """Clips the total norm to a percentile of the norms seen, including the current step's.

    P. Seetharaman, G. Wichern, B. Pardo, J. Le Roux, AutoClip: Adaptive Gradient Clipping for Source Separation
    Networks, MLSP 2020, arXiv 2007.14469: the limit is the p-th percentile of the history of norms, interpolated
    linearly as by ``numpy.percentile``, and the multiplier ``min(1, limit / norm)``. The paper keeps all norms. This
    class keeps the last ``window``, which is equivalent for that many steps, and leaves norms of zero out: a limit of
    zero would hold all gradients at zero.

    Args:
        percentile: From 0 to 100. A share such as 0.95 causes a warning. The paper's 10 clips about nine steps in ten,
            so most steps get the same length. To clip only outliers, use 90 or more.
        window: Number of norms kept.
    """

    _method = 1
    _leaves_zeros_out = True
    _if_never = "all norms so far are equal"

    def __init__(self, percentile: float = 10.0, window: int = DEFAULT_WINDOW) -> None:
        self._percentile = number("percentile", percentile, 0.0, 100.0)
        if 0 < self._percentile < 1:
            warn_user(
                f"AutoClip(percentile={self._percentile:g}) clips nearly every step: percentiles go from 0 to 100; did "
                f"you mean {100 * self._percentile:g}?"
            )
        self._if_often = (
            f"percentile={self._percentile:g} is meant to clip about {100 - self._percentile:g} %; raise it to "
            "clip only outliers"
        )
        self._method_options = (self._percentile,)
        super().__init__(window, percentile=percentile)

    def _multipliers(self, step: Step) -> tuple[Tensor, Tensor]:
        limit = torch.nanquantile(step.state["norms"], self._percentile / 100)  # unused places are NaN
        return limited(step.norm, limit), step.is_recorded


class ZClip(NormClip):
    """Clips a total norm that is an outlier by its z-score, relative to running mean and deviation.

    A. Kumar, L. Owen, N. Roy Chowdhury, F. Güra, ZClip: Adaptive Spike Mitigation for LLM Pre-Training, 2025,
    arXiv 2504.02507, and the authors' code (github.com/bluorion-com/ZClip) where the paper leaves something open.
    With mean m and standard deviation s of the norms so far, a norm g is an outlier if ``z = (g - m) / s`` exceeds
    ``z_threshold``. It is then clipped to

    ================  ====================================
    ``to``            norm after clipping
    ================  ====================================
    ``"reciprocal"``  ``m + z_threshold**2 / z * s``
    ``"threshold"``   ``m + z_threshold * s``
    ``"mean"``        ``m``
    ================  ====================================

    and the clipped norm g' updates the statistics: ``m' = alpha m + (1 - alpha) g'``, then
    ``s'**2 = alpha s**2 + (1 - alpha) (g' - m')**2``. They start as mean and (population) variance of the first
    ``warmup`` norms, none of which is an outlier. The authors' code adds 1e-6 to s in z; this does not, so that the
    method does not depend on the scale of the gradients. Two details are added, as quiet steps (masked losses, an idle
    warm-up) would otherwise limit all others for ever: norms of zero are left out, and after 25 outliers in a row the
    statistics begin anew with the next.

    Args:
        z_threshold: The z-score above which a norm is an outlier, at least 0.
        alpha: Weight of the old statistics in the update, from 0 to 1.
        warmup: Number of norms that the statistics start with, at least 1.
        to: What an outlier is clipped to.
        max_norm: Upper limit of the norm on every step, including warm-up, above 0; it does not affect the statistics.
        window: Number of norms kept for the summary.
    """

    _method = 2
    # The last: of norms in the warm-up, and of outliers in a row since.
    _method_names = ("mean", "deviation", "count")
    _leaves_zeros_out = True
    _if_often = "the norms rise faster than their running mean; raise z_threshold or lower alpha, or the learning rate"
    _if_never = "no norm was an outlier; lower z_threshold to clip smaller spikes"

    def __init__(
        self,
        z_threshold: float = 2.5,
        alpha: float = 0.97,
        warmup: int = 25,
        to: Target = "reciprocal",
        max_norm: float = math.inf,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        if to not in get_args(Target):
            raise ValueError(f"to is {to!r}; expected one of {', '.join(get_args(Target))}")
        self._z_threshold = number("z_threshold", z_threshold, 0.0)
        self._alpha = number("alpha", alpha, 0.0, 1.0)
        self._warmup = whole_number("warmup", warmup, 1)
        self._to = to
        self._max_norm = positive("max_norm", max_norm, "inf for no limit")
        to_number = float(get_args(Target).index(to))
        self._method_options = (self._z_threshold, self._alpha, float(self._warmup), to_number, self._max_norm)
        super().__init__(window, z_threshold=z_threshold, alpha=alpha, warmup=warmup, to=to, max_norm=max_norm)

    def _multipliers(self, step: Step) -> tuple[Tensor, Tensor]:
        norm, is_recorded = step.norm, step.is_recorded
        mean, deviation, count = (step.state[name] for name in self._method_names)
        excess, ordinary = norm - mean, self._z_threshold * deviation
        is_outlier = (count >= self._warmup) & (excess > ordinary)
        is_new_level = is_outlier & (count >= self._warmup + _MOST_OUTLIERS)
        is_outlier = is_outlier & ~is_new_level
        old_mean = torch.where(is_new_level, norm, mean)
        old_deviation, old_count = (torch.where(is_new_level, 0.0, number) for number in (deviation, count))
        warming_up = old_count < self._warmup
        if self._to == "reciprocal":
            allowed = mean + ordinary * (ordinary / excess)
        else:
            allowed = mean + ordinary if self._to == "threshold" else mean
        after = torch.where(is_outlier, allowed, norm)

        # One update for both phases: during warm-up the weight of each norm is one over their number, which gives their
        # mean and, by Welford's update, their variance. hypot adds variances without squaring, so that no finite norm
        # makes them overflow.
        weight = torch.where(warming_up, 1 / (old_count + 1), 1 - self._alpha)
        move = after - old_mean
        distance = move.abs() * torch.where(warming_up, (1 - weight).sqrt(), 1 - weight)
        spread = torch.hypot((1 - weight).sqrt() * old_deviation, weight.sqrt() * distance)
        new_count = torch.where(warming_up | is_outlier, old_count + 1, self._warmup)
        for kept, new in ((mean, old_mean + weight * move), (deviation, spread), (count, new_count)):
            kept.copy_(torch.where(is_recorded, new, kept))
        return limited(norm, after.clamp(max=self._max_norm)), is_recorded
