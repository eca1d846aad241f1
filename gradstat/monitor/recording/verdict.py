"""The headline of a recording: its worst finding in a sentence, escaped, and the step to look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradstat.monitor.kinds import in_order
from gradstat.monitor.recording.recording import COLUMNS, Recording, Series

_NAN, _INF = COLUMNS.index("nan_count"), COLUMNS.index("inf_count")


def bad_cells(series: Series) -> npt.NDArray[np.bool_]:
    """``[m, n]``: in which steps which tensors had NaN or Inf."""
    bad: npt.NDArray[np.bool_] = (series.values[:, :, _NAN] > 0) | (series.values[:, :, _INF] > 0)
    return bad


def first_incident(recording: Recording) -> int | None:
    """The step to look at first: of the first error found, else of the first NaN or Inf, else of the first warning."""
    for severity in ("error", "warning"):
        steps = [finding.step for finding in recording.findings if finding.severity == severity]
        if steps:
            return min(steps)
        if severity == "error":
            bad = _first_bad(recording)
            if bad is not None:
                return bad[0]
    return None


def verdict(recording: Recording) -> tuple[str, str]:
    """The severity of the worst that is known, ``"ok"`` if nothing is, and a sentence about it."""
    for severity in ("error", "warning"):
        found = [finding for finding in recording.findings if finding.severity == severity]
        if found:
            first = min(found, key=lambda finding: finding.step)
            return severity, f"Step {first.step}: {first.text or f'{first.rule}, {first.name}'}"
        if severity == "error":
            bad = _first_bad(recording)
            if bad is not None:
                step, kind, names = bad
                more = f" and {len(names) - 1} more" * (len(names) > 1)
                return "warning", f"Step {step}: NaN or Inf in the {kind} of {names[0]}{more}"
    measured = len(recording.steps)
    if not measured:
        return "ok", "No step was recorded"
    return "ok", f"Nothing was found in {measured:,} step{'s' * (measured != 1)}"


def one_line(text: str) -> str:
    """``text`` without line breaks and what would drive a terminal: names from files that come from anywhere."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _first_bad(recording: Recording) -> tuple[int, str, list[str]] | None:
    """The first step with NaN or Inf, of which kind, and in which tensors, in model order."""
    found: tuple[int, str, list[str]] | None = None
    for kind in in_order(recording.tables):  # of what is bad in one step, the cause
        series = recording.tables[kind]
        bad = bad_cells(series)
        rows = np.flatnonzero(bad.any(axis=1))
        if len(rows) and (found is None or series.steps[rows[0]] < found[0]):
            names = [series.names[j] for j in np.flatnonzero(bad[rows[0]])]
            found = (int(series.steps[rows[0]]), kind, names)
    return found
