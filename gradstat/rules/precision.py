"""Rules about half precision."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from gradstat.recording.findings import Finding
from gradstat.rules.base import LastingRule
from gradstat.rules.rows import Rows, Window

# The smallest normal numbers of the dtypes in which gradients underflow.
_FLOORS: dict[torch.dtype | None, float] = {
    dtype: torch.finfo(dtype).smallest_normal for dtype in (torch.float16, torch.bfloat16)
}

# Of a gradient's elements this share is zero, and the root mean square of the others is below so many times the
# smallest normal number, for so many steps in a row. Conventions of gradstat.
_ZEROS, _NORMALS, _IN_A_ROW = 0.3, 8.0, 10


TOO_SMALL = ("gradients that are too small for float16: there is no loss scale, or it is too small",)


class Underflow(LastingRule):
    """Half-precision gradients that underflow to zeros and subnormals.

    They differ from meaningful zeros by the size of the other elements: the root mean square of these is a few times
    the smallest normal number of their dtype (6.1e-5 for float16), so smaller ones must be below it. The dtype is the
    one in which autocast computed them. With a loss scale, gradients are reviewed as they were computed, with the
    scale, and as float16 whatever their dtype.
    """

    name = "underflow"
    explains = ("dead-gradient", "vanishing-gradient", "small-second-moment", "unchanged-parameter", "no-learning")
    causes = TOO_SMALL
    advice = (
        "scale the loss: gradstat.amp.GradScaler",
        "use bfloat16, which has the range of float32, or run this part of the model in float32",
    )

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        half, infos = {*window.run.in_float16}, zip(rows.names, rows.tensors.infos, strict=True)
        dtypes = [torch.float16 if name in half else None if info is None else info.dtype for name, info in infos]
        floor, scale = np.array([_FLOORS.get(dtype, 0.0) for dtype in dtypes]), np.ones((1, 1))
        scales = window.scalars.get("loss_scale")
        if window.run.is_scaled and scales is not None:
            at = np.searchsorted(window.steps, rows.steps)
            floor, scale = np.full(len(dtypes), _FLOORS[torch.float16]), np.nan_to_num(scales[at], nan=1.0)[:, None]
        if not floor.any():
            return
        left = rows.rms * scale / np.sqrt(1 - rows.zero_fraction)
        low = (floor > 0) & (rows.zero_fraction > _ZEROS) & (left < _NORMALS * floor)
        for row, fresh, _, since in self.lasting(rows, low, _IN_A_ROW):
            worst = max(fresh, key=lambda i: rows.zero_fraction[row, i])
            zeros = rows.zero_fraction[row, worst]
            name, rest = rows.names[worst], left[row, worst]
            text = (
                f"{zeros:.0%} of the gradient of {name} is zero, and the rest near the dtype's smallest normal number"
            )
            evidence = {"zero_fraction": zeros, "rms_of_the_rest": rest, "parameters": len(fresh)}
            yield self.found(since[worst], name, f"{text} (rms {rest:.2g})", about="gradient", **evidence)
