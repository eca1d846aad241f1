"""The headline of a recording: its worst finding in a sentence, escaped, and the step to look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradstat.monitor.kinds import in_order
from gradstat.monitor.recording.recording import Recording, Series


def bad_cells(series: Series) -> npt.NDArray[np.bool_]:
    """``[m, n]``: in which steps which tensors had NaN or Inf."""
    bad: npt.NDArray[np.bool_] = (series.column("nan_count") > 0) | (series.column("inf_count") > 0)
    return bad


def verdict(recording: Recording) -> tuple[str, str, int | None]:
    """The severity of the worst that is known, ``"ok"`` if nothing is; a sentence about it; the step to look at."""
    for severity in ("error", "warning"):
        found = [finding for finding in recording.findings if finding.severity == severity]
        if found:
            first = min(found, key=lambda finding: finding.step)
            return severity, f"Step {first.step}: {first.text or f'{first.rule}, {first.name}'}", first.step
        bad = _first_bad(recording) if severity == "error" else None
        if bad is not None:
            step, kind, names = bad
            more = f" and {len(names) - 1} more" * (len(names) > 1)
            return "warning", f"Step {step}: NaN or Inf in the {kind} of {names[0]}{more}", step
    measured = len(recording.steps)
    if not measured:
        return "ok", "No step was recorded", None
    return "ok", f"Nothing was found in {measured:,} step{'s' * (measured != 1)}", None


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
