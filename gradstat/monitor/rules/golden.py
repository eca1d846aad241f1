"""The rule on a run that is unlike golden ones, while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradstat.monitor.findings import Finding
from gradstat.monitor.recording.golden import Golden
from gradstat.monitor.recording.golden_comparison import RULE
from gradstat.monitor.recording.golden_statistics import features_of
from gradstat.monitor.recording.recording import Recording, joined
from gradstat.monitor.rows import Window
from gradstat.monitor.rules.base import Rule


class UnlikeGolden(Rule):
    """A run that deviates from a few healthy ones by more than they differ, in any tensor or series.

    Judged when a window of steps is complete; windows grow from one step to a sixteenth of the golden runs. The steps
    of a window in which a run is resumed are not judged.

    Args:
        golden: The healthy runs.
    """

    name = RULE
    quiet = 1000
    causes = ("a change of the code, the settings, the data, a library or the hardware since the golden runs",)
    advice = (
        "look at what is named first: it is nearest to the cause",
        "if the change is intended, make new golden runs: python -m gradstat golden make",
    )

    def __init__(self, golden: Golden) -> None:
        super().__init__()
        self.golden = golden
        self._unjudged: list[Recording] = []

    def review(self, window: Window) -> Iterator[Finding]:
        if not len(window.steps) or window.steps[0] >= self.golden.steps:
            return
        tables = {kind: rows.series() for kind, rows in window.tables.items() if features_of(kind)}
        self._unjudged.append(Recording(window.steps, dict(window.scalars), tables))
        end = self.golden.last_complete(int(window.steps[-1]) + 1)
        if end <= self._unjudged[0].steps[0]:
            return
        run = joined(self._unjudged, 0)
        self._unjudged = [joined([run], end)] if window.steps[-1] >= end else []
        if not self.golden.covers(run):
            return
        comparison = self.golden.compare(run)
        if comparison.structure and self._episodes.record("structure", end):
            text = f"the model is not that of the golden runs: {'; '.join(comparison.structure)}"
            yield self.found(end - 1, "model", text, severity="info", causes=(), advice=())
        if comparison.ok or not self._episodes.record("run", end):
            return
        first = comparison.findings[0]
        yield self.found(
            first.step,
            first.name,
            f"{comparison.headline}: {first}",
            first.kind,
            z=first.z,
            value=first.value,
            expected=first.expected,
            low=first.low,
            high=first.high,
            unlike=[found.name for found in comparison.findings[:10]],
        )

    def state_dict(self) -> dict[str, Any]:
        return {"_episodes": dict(self._episodes)}  # a window that is not complete is not judged after a resumption

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key == "_episodes"})
        self._unjudged = []
