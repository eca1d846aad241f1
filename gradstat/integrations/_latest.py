"""The newest numbers of a monitor, for the logs of a framework."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from gradstat.monitor import Finding, Rule
from gradstat.monitor.rows import Window


class Latest(Rule):
    """Finds nothing, and keeps what was measured last. A rule, because rules are what is shown every step once.

    Attributes:
        scalars: Of the newest step that has a number on the host: by name.
        by_parameter: Norm of each gradient in that step; NaN where there was none.
    """

    name = "latest-numbers"
    severity = "info"

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.by_parameter: dict[str, float] = {}
        # With underscores, so that they are saved.
        self._nonfinite_steps = 0

    def review(self, window: Window) -> Iterable[Finding]:
        """Keeps the newest numbers."""
        if not len(window.steps):
            return ()
        scalars = {name: float(values[-1]) for name, values in window.scalars.items() if not np.isnan(values[-1])}
        for name in ("norm", "loss"):  # of these a NaN says something
            if name in window.scalars:
                scalars[name] = float(window.scalars[name][-1])
        self._nonfinite_steps += int((window.scalars["nonfinite"] > 0).sum())
        rows = window.rows("gradient")
        if rows is not None:
            there = rows.present[-1]
            if there.any():
                counts = rows.layout.numel[there]
                scalars["max_abs"] = _largest(rows.max_abs[-1][there].tolist())
                scalars["zero_fraction"] = float(rows.field("zero_count")[-1][there].sum() / max(counts.sum(), 1))
            self.by_parameter = dict(zip(rows.names, rows.l2_norm[-1].tolist(), strict=True))
        self.scalars = scalars
        return ()

    @property
    def nonfinite_steps(self) -> int:
        """In how many steps of the run a gradient was not finite."""
        return self._nonfinite_steps

    def summary(self, prefix: str, parameters: bool) -> dict[str, float]:
        """What goes into logs.

        Args:
            prefix: Of every name.
            parameters: Whether to add the norm of each gradient.
        """
        out = {
            f"{prefix}{name}": self.scalars[name]
            for name in ("norm", "max_abs", "zero_fraction", "nonfinite", "missing", "loss", "loss_scale")
            if name in self.scalars
        }
        out[f"{prefix}nonfinite_steps"] = float(self.nonfinite_steps)
        if parameters:
            out |= {f"{prefix}norm/{name}": norm for name, norm in self.by_parameter.items() if not math.isnan(norm)}
        return out


def _largest(values: list[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)
