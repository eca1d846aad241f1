"""Rules about limits of clips that are far too low."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from gradstat.recording.findings import Finding
from gradstat.rules.base import Band, Rule, carried, series
from gradstat.rules.rows import Window

# What smaller gradients cause.
_EFFECTS = ("small-second-moment", "unchanged-parameter", "tiny-steps", "unrelated-outputs")


class ScaledClip(Rule):
    """Gradients that are clipped while they still carry the loss scale, so that the limit is far too low.

    It is known exactly, from the order of the program's calls in the first steps, if the monitor has the optimizer. A
    limit above the square root of the scale is taken for one that the program has multiplied by the scale. Adaptive
    clips, which have no limit, are not reported. It is reported once.
    """

    name = "scaled-clip"
    explains = _EFFECTS
    causes = ("a clip that is called before scaler.unscale_(optimizer)",)
    advice = ("call scaler.unscale_(optimizer) after the last backward() and before the clip",)

    def bands(self) -> Mapping[str, Band]:
        return {} if self._episodes else {"scaled_clip": (math.inf, math.inf)}

    def review(self, window: Window) -> Iterable[Finding]:
        for row, (step, limit) in enumerate(series(window, "scaled_clip")):
            scale = window.value("loss_scale", row)
            if limit**2 < scale and not self._episodes and self.begins("", step):
                text = f"gradients are clipped to {limit:g} while they still carry the loss scale of {scale:g}, which "
                text += f"clips the true gradients to {limit / scale:.3g}"
                yield self.found(max(step - 1, 0), "norm", text, limit=limit, loss_scale=scale)


class TinyClip(Rule):
    """Gradients that are clipped to 0.001 or less, a hundred times below their norm in each of 32 steps.

    Steps of SGD whose learning rate makes up for it are not reported: they follow normalised gradients on purpose.
    """

    name = "tiny-clip"
    explains = _EFFECTS
    causes = ("a clipping limit with a wrong exponent, or in another unit than the gradient norm",)
    advice = ("clip to about the usual gradient norm, or to 1",)

    # Conventions of gradstat: programs clip to 0.01 or more. A step of SGD is the rate times the limit at most.
    _TIMES, _STEPS, _REACH = 100.0, 32, 1e-3

    _norm, _least = carried(math.nan), carried(math.inf)  # of the last step, and the lowest of those in a row
    _in_a_row = carried(0)

    def review(self, window: Window) -> Iterable[Finding]:
        self._in_a_row *= "tiny_clip" in window.scalars
        for row, (step, limit) in enumerate(series(window, "tiny_clip")):
            # It is known of a step when the next one is measured.
            norm = window.value("finite_norm", row - 1) if row else self._norm
            makes_up = window.run.step_size == "gradient" and window.value("lr", row) * limit > self._REACH
            self._in_a_row = self._in_a_row + 1 if self._TIMES * limit < norm and not makes_up else 0
            self._least = min(norm, self._least) if self._in_a_row > 1 else norm
            if self._in_a_row == self._STEPS and self.begins("", step):
                text = f"gradients are clipped to a norm of {limit:g} in every step, but their norm was at least "
                text += f"{self._least:.3g} in {self._STEPS} steps: {self._least / limit:,.0f} times the limit or more"
                yield self.found(step - self._STEPS, "norm", text, limit=limit, least=self._least)
        self._norm = window.value("finite_norm", -1) if len(window.steps) else self._norm
