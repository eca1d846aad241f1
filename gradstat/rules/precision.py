"""Rules about half precision and loss scales."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from gradstat.recording.findings import Finding, Severity
from gradstat.rules.advice import replay
from gradstat.rules.base import Episodes, LastingRule, Rule
from gradstat.rules.rows import Window

# The smallest normal numbers of the dtypes in which gradients underflow.
_FLOORS = {dtype: torch.finfo(dtype).smallest_normal for dtype in (torch.float16, torch.bfloat16)}


class Underflow(LastingRule):
    """Half-precision gradients that underflow to zeros and subnormals.

    Distinguished from meaningful zeros by size: the root mean square of the nonzero elements is a few times the
    smallest normal number of their dtype (6.1e-5 for float16), so their neighbours must be below it. With a loss scale
    the gradients are judged as they were computed, with the scale, and as float16 whatever their dtype.

    Args:
        share: Fraction of elements that are zero.
        normals: Limit of the root mean square of the others, in units of the smallest normal number.
        in_a_row: Number of steps in a row.
    """

    name = "underflow"
    causes = ("gradients too small for float16, without a loss scale or with one that is too small",)
    advice = (
        "scale the loss: gradstat.amp.GradScaler",
        "use bfloat16, which has the range of float32, or keep this part in float32",
    )

    def __init__(self, share: float = 0.3, normals: float = 8.0, in_a_row: int = 10) -> None:
        super().__init__()
        self.share, self.normals, self.in_a_row = share, normals, in_a_row

    def review(self, window: Window) -> Iterable[Finding]:
        rows = window.rows("gradient")
        if rows is None:
            return
        floors = [0.0 if info is None else _FLOORS.get(info.dtype, 0.0) for info in rows.tensors.infos]
        floor, scale = np.array(floors), np.ones((1, 1))
        scales = window.scalars.get("loss_scale")
        if window.run.is_scaled and scales is not None:
            at = np.searchsorted(window.steps, rows.steps)
            floor, scale = np.full(len(floors), _FLOORS[torch.float16]), np.nan_to_num(scales[at], nan=1.0)[:, None]
        if not floor.any():
            return
        left = rows.rms * scale / np.sqrt(1 - rows.zero_fraction)
        low = (floor > 0) & (rows.zero_fraction > self.share) & (left < self.normals * floor)
        for row, fresh, _, since in self.lasting(rows, low, self.in_a_row):
            worst = max(fresh, key=lambda i: rows.zero_fraction[row, i])
            zeros = rows.zero_fraction[row, worst]
            name, rest = rows.names[worst], left[row, worst]
            text = f"{zeros:.0%} of the gradient of {name} is zero, and the rest is near the smallest normal number"
            evidence = {"zero_fraction": zeros, "rms_of_the_rest": rest, "parameters": len(fresh)}
            yield self.found(since[worst], name, f"{text} (rms {rest:.2g})", about="gradient", **evidence)


_NOT_NEEDED = ("nothing is computed in float16, so no scale is needed", "the loss does not depend on the parameters")
_LEAVE_OUT = ("leave out the scaler, or check that autocast is on",)


class LossScale(Rule):
    """A loss scale that does not stop falling, or that is not needed.

    Args:
        in_a_row: Number of skipped steps in a row; finding a first scale takes a few.
        runaway: A scale above it that caused no overflow is reported: float16 ends at 2**16, so at 2**32 nothing is
            computed in float16, or the loss does not depend on the parameters.
    """

    name = "loss-scale"
    causes = (
        "something is not finite whatever the scale: NaN in the forward pass, activations beyond 65,504",
        "a learning rate so high that parameters diverged",
    )
    advice = (
        "look for NaN: lowering the scale does not help",
        replay("names the operation"),
        "train in bfloat16, which needs no scale, or keep the part that overflows in float32",
    )

    def __init__(self, in_a_row: int = 5, runaway: float = 2.0**32) -> None:
        self.in_a_row, self.runaway = in_a_row, runaway
        self._run, self._settled = 0, False
        self._episodes = Episodes(quiet=1)

    def review(self, window: Window) -> Iterable[Finding]:
        scales = window.scalars.get("loss_scale")
        if scales is None or not window.run.is_scaled:
            return
        nonfinite = window.scalars.get("nonfinite", np.zeros(len(scales)))  # only a window made by hand lacks it
        for step, scale, count in zip(window.steps.tolist(), scales.tolist(), nonfinite.tolist(), strict=True):
            if math.isnan(scale):
                continue
            self._run = self._run + 1 if count > 0 else 0
            if self._run >= self.in_a_row and self._episodes.record("", step):
                text = f"{self.in_a_row} steps in a row were skipped; the loss scale is down to {scale:g}"
                severity: Severity = "error" if self._settled else self.severity
                evidence = {"in_a_row": self.in_a_row, "loss_scale": scale}
                yield self.found(step - self.in_a_row + 1, "loss_scale", text, severity=severity, **evidence)
            self._settled = self._settled or self._run == 0
            if scale > self.runaway and self._episodes.record("runaway", step):
                text = f"the loss scale has grown to {scale:g} without an overflow"
                yield self.found(step, "loss_scale", text, causes=_NOT_NEEDED, advice=_LEAVE_OUT, loss_scale=scale)
