"""Rules about the order of calls around a clip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from gradstat.recording.findings import Finding
from gradstat.rules.base import Band, Rule, series
from gradstat.rules.rows import Window


class ScaledClip(Rule):
    """Gradients that are clipped while they still carry the loss scale, so that the limit is far too low.

    It is known exactly, from the order of the program's calls in the first steps, if the monitor has the optimizer. A
    limit above the square root of the scale is taken for one that the program has multiplied by the scale. Adaptive
    clips, which have no limit, are not reported. It is reported once.
    """

    name = "scaled-clip"
    explains = ("momentum-drift", "small-second-moment", "unchanged-parameter", "no-learning", "unrelated-outputs")
    causes = ("a clip that is called before scaler.unscale_(optimizer)",)
    advice = ("call scaler.unscale_(optimizer) after the last backward() and before the clip",)

    def bands(self) -> Mapping[str, Band]:
        return {} if self._episodes else {"scaled_clip": (math.inf, math.inf)}

    def review(self, window: Window) -> Iterable[Finding]:
        for row, (step, limit) in enumerate(series(window, "scaled_clip")):
            scale = window.value("loss_scale", row)
            if limit**2 < scale and not self._episodes:
                self.begins("", step)
                text = f"gradients are clipped to {limit:g} while they still carry the loss scale of {scale:g}, which "
                text += f"clips the true gradients to {limit / scale:.3g}"
                yield self.found(max(step - 1, 0), "norm", text, limit=limit, loss_scale=scale)


class LateClip(Rule):
    """Gradients that are clipped after the step, which has no effect; needs `gradstat.auto` or an integration.

    It is reported once.
    """

    name = "late-clip"
    causes = ("a clip that is called after optimizer.step()",)
    advice = ("clip between backward() and optimizer.step()",)

    def bands(self) -> Mapping[str, Band]:
        return {} if self._episodes else {"late_clip": (0.0, 0.0)}

    def review(self, window: Window) -> Iterable[Finding]:
        for step, is_late in series(window, "late_clip"):
            if is_late > 0 and not self._episodes:
                self.begins("", step)
                text = "gradients were clipped after optimizer.step() and before the next backward pass, which has no "
                text += "effect on the training"
                yield self.found(max(step - 1, 0), "norm", text)
