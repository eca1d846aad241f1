"""`Recording`: the last steps of a run as arrays, and its parts, for files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstat._core.saved import MAPPING, TEXT, exactly, require
from gradstat._core.text import expect
from gradstat.recording.archive import encoded
from gradstat.recording.findings import Finding
from gradstat.recording.kinds import in_order

COLUMNS: tuple[str, ...] = ("l2_norm", "mean", "std", "min", "max", "zero_fraction", "nan_count", "inf_count")
"""The statistics kept for a tensor in a step; all but the last three are over its finite elements."""


@dataclass
class Series:
    """Tensors of one kind, over the steps in which they were measured.

    Attributes:
        names: ``[n]`` parameters or modules, in the order of the model.
        numel: ``[n]`` int64, number of elements of each; if it varies, that of the last measurement.
        steps: ``[m]`` int64, rising: in which steps they were measured; some kinds are not measured in every step.
        values: ``[m, n, len(COLUMNS)]`` float32; all NaN where a tensor was absent (a gradient that is None).
    """

    names: tuple[str, ...]
    numel: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements by name."""
        return dict(zip(self.names, self.numel.tolist(), strict=True))

    def column(self, name: str) -> npt.NDArray[np.float32]:
        """The values of one column, ``[m, n]`` float32; NaN where a tensor was absent.

        Args:
            name: One of `COLUMNS`, or ``"max_abs"``, the largest magnitude of a finite element.

        Raises:
            ValueError: There is no such column.
        """
        if name == "max_abs":
            largest: npt.NDArray[np.float32] = np.maximum(np.abs(self.column("min")), np.abs(self.column("max")))
            return largest
        if name not in COLUMNS:
            raise ValueError(f"no column {name!r}; known: {', '.join(COLUMNS)}, max_abs")
        column: npt.NDArray[np.float32] = self.values[:, :, COLUMNS.index(name)]
        return column


@dataclass
class Recording:
    """The last steps of a run.

    Attributes:
        steps: ``[k]`` int64, rising, counted from 0 at the start of the run.
        scalars: By name, ``[k]`` float64, NaN where there was none: ``"norm"`` (total norm of the gradients, NaN or Inf
            if an element is), ``"finite_norm"``, ``"nonfinite"`` (elements), ``"missing"`` (gradients that are None),
            and if given ``"loss"``, ``"loss_nonfinite"`` (1: it is NaN, 2: Inf, else 0 or NaN), ``"lr"``,
            ``"loss_scale"``, and ``"refused"`` (of a `gradstat.SpikeGuard`: above 1 if it refused the last guarded step
            before).
        tables: By kind, as in ``gradstat.recording.kinds.KINDS``; optimizer states by their keys in the optimizer,
            ``"exp_avg"`` and so on.
        findings: Findings of the rules, in the order in which they were found.
        backward_order: Parameters in the order in which their gradients were complete; empty if not known.
        meta: JSON-able information about the run: versions, device, model, rules, when and why it was saved.
    """

    steps: npt.NDArray[np.int64]
    scalars: dict[str, npt.NDArray[np.float64]]
    tables: dict[str, Series]
    findings: tuple[Finding, ...] = ()
    backward_order: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)


def check(recording: Recording) -> None:
    """Raises ValueError unless shapes agree and steps rise, TypeError for anything else than a recording."""
    expect("recording", recording, Recording, "a Recording")
    _check_steps("steps", recording.steps)
    for name, values in recording.scalars.items():
        _check_shape(f"scalars[{name!r}]", values, len(recording.steps))
    for kind, series in recording.tables.items():
        n, place = len(series.names), f"tables[{kind!r}]"
        _check_steps(f"{place}.steps", series.steps)
        _check_shape(f"{place}.numel", series.numel, n)
        _check_shape(f"{place}.values", series.values, len(series.steps), n, len(COLUMNS))
        if n and np.min(series.numel) < 0:
            raise ValueError(f"{place}.numel must be counts")


def _check_shape(place: str, values: npt.NDArray[Any], *shape: int) -> None:
    if np.shape(values) != shape:
        raise ValueError(f"{place} has shape {np.shape(values)}; expected {shape}")


def _check_steps(place: str, steps: npt.NDArray[np.int64]) -> None:
    values = np.asarray(steps)
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise ValueError(f"{place} must be a list of integers, not {values.dtype} of shape {values.shape}")
    if values.size and (values[0] < 0 or np.any(values[1:] <= values[:-1])):
        raise ValueError(f"{place} must be at least 0 and strictly increasing")


# What the header of a saved recording has.
_HEADER = {
    "columns": exactly(list(COLUMNS)),
    "scalars": [TEXT],
    "tables": [{"kind": TEXT, "names": [TEXT]}],
    "findings": [MAPPING],
    "backward_order": [TEXT],
    "meta": MAPPING,
}


def parts_of(recording: Recording) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """A header of plain values, and arrays by name. ValueError if the arrays do not fit together."""
    check(recording)
    header = {
        "columns": list(COLUMNS),
        "scalars": list(recording.scalars),
        "tables": [{"kind": kind, "names": list(series.names)} for kind, series in recording.tables.items()],
        "findings": [finding.to_dict() for finding in recording.findings],
        "backward_order": list(recording.backward_order),
        "meta": recording.meta,
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        "steps": np.asarray(recording.steps, np.int64),
        "scalars": scalar_rows(recording, recording.scalars),
    }
    for i, series in enumerate(recording.tables.values()):
        arrays[f"tables/{i}/numel"] = np.asarray(series.numel, np.int64)
        arrays[f"tables/{i}/steps"] = np.asarray(series.steps, np.int64)
        # A tensor's field is contiguous over the steps: consecutive values are similar, and compress well.
        arrays[f"tables/{i}/values"] = np.ascontiguousarray(series.values.transpose(2, 1, 0), np.float32)
    return header, arrays


def from_parts(header: Any, array_of: Callable[[str, str], npt.NDArray[Any]], place: str) -> Recording:
    """The inverse of `parts_of`. ``array_of`` returns a new array, given its name and dtype.

    Names and places in ``header`` are checked, and the arrays must fit together, but it may raise any exception.
    """
    require(header, _HEADER, place)
    findings = tuple(Finding.from_dict(one, f"{place}['findings'][{i}]") for i, one in enumerate(header["findings"]))
    json.dumps(encoded([[one.evidence for one in findings], header["meta"]]))  # otherwise it could not be saved again
    steps, rows = array_of("steps", "<i8"), array_of("scalars", "<f8")
    tables = {}
    for i, table in enumerate(header["tables"]):
        numel, when = array_of(f"tables/{i}/numel", "<i8"), array_of(f"tables/{i}/steps", "<i8")
        values = np.ascontiguousarray(array_of(f"tables/{i}/values", "<f4").transpose(2, 1, 0))
        tables[table["kind"]] = Series(tuple(table["names"]), numel, when, values)
    recording = Recording(
        steps,
        # Copies: a view of a row would keep the whole array alive, and share changes with it.
        {name: row.copy() for name, row in zip(header["scalars"], rows, strict=True)},
        tables,
        findings,
        tuple(header["backward_order"]),
        dict(header["meta"]),
    )
    if len(recording.scalars) != len(rows) or len(tables) != len(header["tables"]):
        raise ValueError(f"{place}: two of its series or tables have the same name")
    check(recording)
    return recording


def joined(parts: Sequence[Recording], first: int, absent: Mapping[str, float] | None = None) -> Recording:
    """Consecutive parts of a run as one recording, from step ``first`` on.

    Every tensor that is in any part gets a column. ``absent`` has the values of scalars in parts without them, if these
    are not NaN.
    """
    steps = np.concatenate([np.empty(0, np.int64), *(part.steps for part in parts)])
    recent = steps >= first
    scalars = {}
    for name in dict.fromkeys(name for part in parts for name in part.scalars):
        fill = (absent or {}).get(name, np.nan)
        columns = [part.scalars.get(name, np.full(len(part.steps), fill)) for part in parts]
        scalars[name] = np.concatenate(columns)[recent]
    kinds = in_order(dict.fromkeys(kind for part in parts for kind in part.tables))
    tables = {kind: _joined([part.tables[kind] for part in parts if kind in part.tables], first) for kind in kinds}
    return Recording(steps[recent], scalars, {kind: series for kind, series in tables.items() if len(series.steps)})


def _joined(chunks: Sequence[Series], first: int) -> Series:
    orders = dict.fromkeys(chunk.names for chunk in reversed(chunks))
    names = tuple(dict.fromkeys(itertools.chain.from_iterable(orders)))
    column = {name: i for i, name in enumerate(names)}
    numel = np.zeros(len(names), dtype=np.int64)
    steps = np.concatenate([chunk.steps for chunk in chunks])
    values = np.full((len(steps), len(names), len(COLUMNS)), np.nan, dtype=np.float32)
    row = 0
    for chunk in chunks:
        at = np.array([column[name] for name in chunk.names], dtype=np.int64)
        values[row : row + len(chunk.steps), at] = chunk.values
        seen = chunk.numel > 0
        numel[at[seen]] = chunk.numel[seen]
        row += len(chunk.steps)
    recent = steps >= first
    return Series(names, numel, steps[recent], values[recent])


def scalar_rows(recording: Recording, names: Collection[str]) -> npt.NDArray[np.float64]:
    """``[len(names), k]``: the scalars ``names``, as rows."""
    rows = [recording.scalars[name] for name in names]
    return np.array(rows, np.float64).reshape(len(names), len(recording.steps))


def extent_of(recording: Recording) -> tuple[int, int] | None:
    """The first and the last step; None if there are none."""
    return (int(recording.steps[0]), int(recording.steps[-1])) if len(recording.steps) else None


def nonfinite_cells(series: Series) -> npt.NDArray[np.bool_]:
    """``[m, n]``: whether a tensor had NaN or Inf in a step."""
    nonfinite: npt.NDArray[np.bool_] = (series.column("nan_count") > 0) | (series.column("inf_count") > 0)
    return nonfinite


def first_nonfinite(recording: Recording) -> tuple[int, str, list[str]] | None:
    """The first step with NaN or Inf, the kind of the tensors, and their names in model order.

    Leaves out kinds that a rule has judged, for instance gradients that a loss scaler made overflow.
    """
    first: tuple[int, str, list[str]] | None = None
    judged = {finding.about for finding in recording.findings if finding.rule.startswith("nonfinite-")}
    for kind in in_order(recording.tables.keys() - judged):  # causes before effects in one step
        series = recording.tables[kind]
        nonfinite = nonfinite_cells(series)
        if kind == "buffer":  # a mask may have Inf from the start
            infinite = series.column("inf_count")
            nonfinite = (series.column("nan_count") > 0) | (infinite > infinite[:1])
        rows = np.flatnonzero(nonfinite.any(axis=1))
        if len(rows) and (first is None or series.steps[rows[0]] < first[0]):
            names = [series.names[j] for j in np.flatnonzero(nonfinite[rows[0]])]
            first = (int(series.steps[rows[0]]), kind, names)
    return first
