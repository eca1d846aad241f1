"""A recording as the JSON that the page decodes (page/data.js): rounded to visible digits, packed, limited in size."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstat._version import __version__
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.recording import archive
from gradstat.recording.findings import SEVERITIES, in_words
from gradstat.recording.kinds import GRADIENT, in_order
from gradstat.recording.recording import COLUMNS, Recording, Series, nonfinite_cells, scalar_rows

CELLS = 2_000_000
"""Limit of tensors times steps in a page, over all kinds; about 8 bytes each."""
# 13 bits of the mantissa are kept: four digits are shown, and dropped bits take no space when deflated.
_DROPPED_BITS = 10
_MOST_FINDINGS = 1000
_COUNTS = ("nan_count", "inf_count")


def page_data(recording: Recording, cells: int = CELLS) -> dict[str, Any]:
    """Everything the page shows, JSON-able; numbers are `packed`. Findings are in the order of the diagnosis.

    Args:
        recording: What to show.
        cells: Above this number, steps are left out evenly. Steps with NaN, Inf or a finding, and the last steps, are
            left out only if there are too many of them.
    """
    every = [recording.steps, *(series.steps for series in recording.tables.values())]
    steps = np.unique(np.concatenate(every)).astype(np.int64)
    count = len(steps)
    steps = _steps_to_show(recording, steps, cells)
    is_shown = np.isin(recording.steps, steps)
    diagnosis, rules = Diagnosis.of(recording), recording.meta.get("rules")
    findings = diagnosis.findings
    worst = max((SEVERITIES.index(finding.severity) for finding in findings), default=0)
    kept = sorted(range(len(findings)), key=lambda i: findings[i].severity != "error")[:_MOST_FINDINGS]
    # Gradients first, which the page opens with, then the others in the order of computation.
    kinds = sorted(in_order(recording.tables), key=lambda kind: kind != GRADIENT.name)
    return {
        "level": SEVERITIES[worst] if worst else "ok" * (diagnosis.ok and not diagnosis.notes),
        "headline": diagnosis.headline(),
        "culprit": diagnosis.culprit,
        "notes": diagnosis.notes,
        "steps": steps.tolist(),
        "leftOut": count - len(steps),
        # For an incident before the kept steps, the oldest kept step.
        "incident": _place(steps, diagnosis.incidents[0].first) if diagnosis.incidents and len(steps) else -1,
        "scalars": {
            "names": list(recording.scalars),
            "at": np.searchsorted(steps, recording.steps[is_shown]).tolist(),
            "data": _packed(scalar_rows(recording, recording.scalars)[:, is_shown].astype("<f8")),
        },
        "tables": [_table(kind, recording.tables[kind], steps) for kind in kinds],
        "columns": list(COLUMNS),
        "findings": [
            {
                **findings[i].to_dict(),
                "at": _place(steps, findings[i].step) if len(steps) else -1,
                "evidence": [[key, _formatted(value)] for key, value in in_words(findings[i].evidence)],
            }
            for i in sorted(kept)
        ],
        "findingsLeftOut": len(findings) - len(kept),
        "backwardOrder": list(recording.backward_order),
        "rules": len(rules) if isinstance(rules, list) else 0,
        "meta": [[key, _formatted(value)] for key, value in recording.meta.items() if value not in ("", None)],
        "gradstat": __version__,
    }


def _place(steps: npt.NDArray[np.int64], step: int) -> int:
    return min(int(np.searchsorted(steps, step)), len(steps) - 1)


def _steps_to_show(recording: Recording, steps: npt.NDArray[np.int64], cells: int) -> npt.NDArray[np.int64]:
    width = max(1, sum(len(s.names) for s in recording.tables.values()))
    room = max(100, cells // width)
    if len(steps) <= room:
        return steps
    important = [steps[-room // 4 :], np.array([f.step for f in recording.findings], np.int64)]
    important += [series.steps[nonfinite_cells(series).any(1)] for series in recording.tables.values()]
    chosen = np.concatenate(important)
    # In a run that is never finite there are too many: they are thinned, except the first one.
    if len(chosen) > room:
        chosen = np.concatenate([chosen.min(keepdims=True), chosen[:: len(chosen) // (room // 2) + 1]])
    evenly = steps[np.linspace(0, len(steps) - 1, room // 2).astype(int)]
    return np.intersect1d(steps, np.concatenate([chosen, evenly]))


def _table(kind: str, series: Series, steps: npt.NDArray[np.int64]) -> dict[str, Any]:
    is_shown = np.isin(series.steps, steps)
    values = series.values[is_shown].astype("<f4").transpose(2, 1, 0).copy()
    for c, column in enumerate(COLUMNS):
        if column not in _COUNTS:
            values[c] = _rounded(values[c])
    return {
        "kind": kind,
        "names": list(series.names),
        "numel": series.numel.tolist(),
        "at": np.searchsorted(steps, series.steps[is_shown]).tolist(),
        "data": _packed(values),
    }


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    bits = values.view(np.uint32).astype(np.uint64) + (1 << (_DROPPED_BITS - 1))
    result = (bits >> _DROPPED_BITS << _DROPPED_BITS).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values) & np.isfinite(result), result, values)


def _packed(values: npt.NDArray[Any]) -> str:
    """`packed` numbers: the first bytes of all, then the second ones and so on, to compress better."""
    planes = np.ascontiguousarray(values.reshape(-1).view(np.uint8).reshape(-1, values.dtype.itemsize).T)
    return packed(planes.tobytes())


def packed(content: bytes) -> str:
    """Deflated bytes as base64."""
    return base64.b64encode(zlib.compress(content)).decode("ascii")


def _formatted(value: Any) -> str:
    """A value of ``meta`` or of evidence as it is displayed."""
    if isinstance(value, (float, np.floating)):
        return {"nan": "NaN", "inf": "Inf", "-inf": "\N{MINUS SIGN}Inf"}.get(str(float(value)), f"{value:.4g}")
    if isinstance(value, (bool, int, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_formatted, value))
    return json.dumps(archive.encoded(value, strict=True))
