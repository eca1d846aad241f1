"""A rule on parameters of which only positive values make sense, as a standard deviation that is trained itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import PerName, RowsRule, carried
from gradstat.rules.rows import Rows, Window


class NonpositiveParameter(RowsRule):
    """A parameter whose logarithm, root or reciprocal the loss takes has fallen below 0, or close to 0.

    Which parameters these are is read from the graph of the first loss; all their elements were positive when first
    measured. They are measured once more when the monitor is detached or the program ends.
    """

    name = "nonpositive-parameter"
    judges_end = True
    kinds = ("parameter",)
    explains = ("nonfinite-loss", "nonfinite-gradient", "loss-spike", "exploding-gradient")
    quiet = 1000
    causes = (
        "a standard deviation, rate or temperature that is trained directly, so that nothing keeps it positive",
        "a learning rate that is too high for this parameter",
    )
    advice = (
        "train its logarithm and use exp() of it; or use softplus() of it plus a small number",
        "clamp it from below after each step",
    )

    # Of the smallest element at first. A convention of gradstat: a fit to nearly noiseless data may go far down, too.
    _NEAR = 1e-3

    _at_first = carried(PerName(math.nan))

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        at_first, least = self._at_first.values_for(rows.names), rows.field("min")
        np.copyto(at_first, least[0], where=np.isnan(at_first))
        for i, name in enumerate(rows.names):
            words, first = window.run.positive.get(name), float(at_first[i])
            if words is None or not 0 < first < math.inf:
                continue
            for row in np.flatnonzero(least[:, i] < self._NEAR * first).tolist():
                if self.begins(name, rows.steps[row]):
                    now = float(least[row, i])
                    what = "" if rows.tensors.numel[i] == 1 else "the smallest element of "
                    text = f"{what}{name} is {now:.3g}, down from {first:.3g} at the start; the loss takes {words}"
                    yield self.found(rows.steps[row], name, text, "parameter", before=first, now=now)
