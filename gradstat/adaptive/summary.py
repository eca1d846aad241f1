"""`ClipSummary`: what a clip did during a run, in numbers and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gradstat.adaptive import _history
from gradstat.adaptive._history import State

PERCENTILES = (5, 25, 50, 75, 95, 99)

# The suggested limit leaves nine recent steps in ten unclipped. That share is a convention of gradstat, not a result:
# choosing the limit as a percentile of the norms seen comes from AutoClip (arXiv 2007.14469), whose authors choose the
# 10th, which clips nine steps in ten instead.
SUGGESTED_PERCENTILE = 90

# Below this number of finite steps no advice is given. This is a convention of gradstat.
ENOUGH_STEPS = 100


@dataclass(frozen=True, slots=True)
class ClipSummary:
    """What a clip has done so far. Returned by a clip's ``summary``; can be printed.

    Attributes:
        clip: The clip's ``repr``.
        steps: Steps seen, except those that the caller excluded.
        nonfinite: Steps among them whose total norm was NaN or Inf; these norms are not in the percentiles.
        decides_on: What a multiplier is decided for: ``"step"``, ``"tensor"`` or ``"unit"``.
        decided: Number of multipliers decided, over all steps.
        clipped: Number of these that were below 1.
        mean_multiplier: Mean of those below 1; NaN when there is none.
        smallest_multiplier: Smallest of them; NaN when there is none.
        recent: Number of norms that the percentiles are computed from.
        norm_percentiles: Total norms of recent steps before clipping, by percentile (5, 25, 50, 75, 95 and 99),
            with linear interpolation; NaN when there is none.
        suggested_max_norm: A limit for `FixedClip` or `clip_grad_norm_`: the 90th percentile of those norms.
        suggestion: The reason for that limit.
        advice: What to change about this clip, in words; empty if nothing.
    """

    clip: str
    steps: int
    nonfinite: int
    decides_on: str
    decided: int
    clipped: int
    mean_multiplier: float
    smallest_multiplier: float
    recent: int
    norm_percentiles: dict[int, float]
    suggested_max_norm: float
    suggestion: str
    advice: str

    @property
    def clipped_fraction(self) -> float:
        """Fraction of the decided multipliers that were below 1; NaN before the first one."""
        return self.clipped / self.decided if self.decided else math.nan

    def __str__(self) -> str:
        lines = [f"{self.clip}: {self.steps:,} steps, {self.nonfinite:,} of them with a norm that is not finite"]
        if self.decided:
            lines.append(
                f"clipped: {self.clipped:,} of {self.decided:,} {self.decides_on}s ({self.clipped_fraction:.1%})"
            )
        if self.clipped:
            lines[-1] += f"; mean multiplier {self.mean_multiplier:.3g}, smallest {self.smallest_multiplier:.3g}"
        if self.recent:
            values = ", ".join(f"{norm:.3g} ({p} %)" for p, norm in self.norm_percentiles.items())
            lines.append(f"norms of the last {self.recent:,} steps, by percentile: {values}")
            lines.append(f"suggested max_norm: {self.suggested_max_norm:.3g}, {self.suggestion}")
        if self.advice:
            lines.append(f"advice: {self.advice}")
        return "\n".join(lines)


def summarize(clip: str, decides_on: str, state: State, if_often: str, if_never: str) -> ClipSummary:
    """The summary of ``state``; one host sync."""
    numbers = torch.cat([state["norms"], state["totals"], state["smallest"].view(1)]).cpu().numpy()
    norms, totals, smallest = np.split(numbers, [len(state["norms"]), len(numbers) - 1])
    recorded, nonfinite, decided, clipped = (int(count) for count in totals[: _history.MULTIPLIER_SUM])
    norms = norms[np.isfinite(norms)]
    wanted = [*PERCENTILES, SUGGESTED_PERCENTILE]
    percentiles = np.percentile(norms, wanted) if len(norms) else [math.nan] * len(wanted)
    *shown, suggested = (float(value) for value in percentiles)

    advice = ""
    if recorded >= ENOUGH_STEPS and clipped > decided / 2:
        advice = f"more than half of the {decides_on}s are clipped: {if_often}"
    elif recorded >= ENOUGH_STEPS and not clipped:
        advice = f"nothing was ever clipped: {if_never}"
    return ClipSummary(
        clip=clip,
        steps=recorded + nonfinite,
        nonfinite=nonfinite,
        decides_on=decides_on,
        decided=decided,
        clipped=clipped,
        mean_multiplier=float(totals[_history.MULTIPLIER_SUM]) / clipped if clipped else math.nan,
        smallest_multiplier=float(smallest[0]) if clipped else math.nan,
        recent=len(norms),
        norm_percentiles=dict(zip(PERCENTILES, shown, strict=True)),
        suggested_max_norm=suggested,
        suggestion=f"the {SUGGESTED_PERCENTILE}th percentile: it would have clipped about "
        f"{100 - SUGGESTED_PERCENTILE} % of the last {len(norms):,} steps",
        advice=advice,
    )
