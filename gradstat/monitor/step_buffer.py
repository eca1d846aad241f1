"""Reads the numbers of measured steps, holds them until the rules review them, and keeps the newest step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradstat import _fields
from gradstat._core.measurement import without_scale
from gradstat._core.tensors import TensorInfo
from gradstat.monitor.collector import Pending
from gradstat.monitor.rows import Facts, Floats, Layout, Observation, Rows, Window
from gradstat.monitor.segments import Segment
from gradstat.report import Report
from gradstat.tensor_stats import l2_norm_of

_NAN, _INF = _fields.INDEX["nan_count"], _fields.INDEX["inf_count"]
_SUM, _SQ = _fields.INDEX["sum"], _fields.INDEX["sq_sum"]
_LARGE, _SMALL = _fields.INDEX["sq_sum_large"], _fields.INDEX["sq_sum_small"]
_MIN, _MAX = _fields.INDEX["min"], _fields.INDEX["max"]

# Scalars that are 0 in steps that do not have them.
_COUNTS = ("nonfinite", "missing")

_UNKNOWN: tuple[Any, Any, Layout | None] = (None, None, None)

CheckLabels = Callable[[int, str, float, float], list[Observation]]


class LatestStep(NamedTuple):
    """A step of a monitor, on the host.

    Attributes:
        step: Its number, counted from 0.
        report: The report on its gradients, unscaled.
        scalars: Its scalars: ``"loss"``, ``"lr"``, ``"loss_scale"``, ``"norm"`` and so on.
    """

    step: int
    report: Report
    scalars: dict[str, float]

    @classmethod
    def of(cls, pending: Pending) -> LatestStep:
        """Makes one from a ``pending`` step whose numbers have been read."""
        numbers = pending.numbers[0]
        names, positions = numbers.segments[0].names, numbers.segments[0].positions
        count = numbers.segments[0].measured
        rows, total = numbers.table()[:count], numbers.rows.total()
        scale = pending.scalars.get("loss_scale")
        if pending.is_scaled and scale:
            rows, total = without_scale(rows, scale), without_scale(total, scale)
        missing = [position for seen in pending.observations if seen.kind == "missing" for position in seen.value]
        report = Report(
            lambda: names if positions is None else [names[position] for position in positions],
            rows,
            numbers.rows.infos[:count],
            lambda: [names[position] for position in missing],
            loss_scale=scale,
            total=total,
        )
        return cls(pending.step, report, dict(pending.scalars))


class StepBuffer:
    """Holds steps until they are reviewed, and the newest; until `close` only the totals of a healthy one are used."""

    def __init__(self, check_labels: CheckLabels) -> None:
        self._check_labels = check_labels
        self._steps: list[tuple[int, dict[str, float], Layout]] = []
        self._others: dict[str, list[tuple[int, Layout, Floats]]] = {}
        self._layouts: dict[str, tuple[Any, Any, Layout | None]] = {}
        self._ones = np.ones(0)
        self._names: tuple[str, ...] = ()
        # Rows of gradients by step. Each field is contiguous, since rules read one field at a time.
        self._memory = np.empty((_fields.COUNT, 0, 0)).transpose(1, 2, 0)
        self.observations: list[Observation] = []
        self.newest: Pending | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since the last `close`."""
        return not self._steps and not self.observations

    def read(self, pending: Pending) -> bool:
        """Waits for a step's numbers and adds scalars to it; returns whether a gradient or the loss is not finite."""
        numbers, scalars = pending.numbers[0], pending.scalars
        table, total = numbers.table(), numbers.rows.total()
        count = numbers.segments[0].measured
        if total is None:
            if len(self._ones) != count:
                self._ones = np.ones(count)
            total = self._ones @ table[:count]  # the fastest sum of few rows
        else:
            numbers.rows.raise_if_others_failed()
        sums = total.tolist()
        norm = float(l2_norm_of(total)) if sums[_LARGE] or sums[_SMALL] else math.sqrt(sums[_SQ])
        bad = sums[_NAN] or sums[_INF]
        if pending.on_device:
            # If gradients are distributed, every segment has a table of its own.
            rows, first = (table, count) if len(numbers.segments) > 1 else (pending.numbers[1].table(), 0)
            for i, name in enumerate(pending.on_device, first):
                scalars[name] = _value(rows[i].tolist())
        if pending.is_scaled:
            # A scale of 0 made every gradient 0, whatever it was.
            norm = norm / scalars["loss_scale"] if scalars["loss_scale"] else math.nan
        scalars["finite_norm"] = scalars["norm"] = norm
        if bad:
            scalars["norm"] = math.nan if sums[_NAN] else math.inf
            scalars["nonfinite"] = sums[_NAN] + sums[_INF]
        loss = scalars.get("loss", 0.0)
        if not math.isfinite(loss):
            scalars["loss_nonfinite"] = 1.0 if math.isnan(loss) else 2.0
            bad = True
        return bool(bad)

    def take(self, pending: Pending, review: Callable[[], None]) -> None:
        """Adds a step that was read. If its tensors are not those held, ``review`` is called first, to `close` them."""
        names = pending.numbers[0].segments[0].names
        is_other = names is not self._names and names != self._names
        others: list[tuple[Segment, Floats, Layout]] = []
        if len(pending.numbers[0].segments) + len(pending.numbers) > 2 + bool(pending.on_device):
            for numbers, (segment, start) in ((n, split) for n in pending.numbers for split in n.split()):
                if segment.kind not in ("gradient", "scalars"):
                    rows = numbers.table()[start : start + segment.measured]
                    others.append((segment, rows, self._layout_of(segment, numbers.rows.infos, start)))
                    held = self._others.get(segment.kind)
                    is_other = is_other or (held is not None and held[-1][1].names != segment.names)
        if is_other:
            review()
        self._names = names
        self.newest = pending
        self._steps.append((pending.step, pending.scalars, self._keep_gradients(pending)))
        if pending.observations:
            self.observations += pending.observations
        for segment, rows, layout in others:
            kind = segment.kind
            if kind == "label":
                for name, row in zip(segment.names, rows, strict=True):
                    self.observations += self._check_labels(pending.step, name, float(row[_MIN]), float(row[_MAX]))
            elif kind in self._others:
                self._others[kind].append((pending.step, layout, rows))
            else:  # one assignment, so that an interrupt cannot leave an empty list
                self._others[kind] = [(pending.step, layout, rows)]
        if pending.origin is not None and "nonfinite" in pending.scalars:
            self.observations.append(Observation("origin", pending.step, pending.origin()))

    def clear(self) -> None:
        """Drops the steps that were not closed, because their numbers will be used again."""
        self._steps, self._others, self.observations, self.newest = [], {}, [], None

    def close(self, facts: Facts, latest: Mapping[str, Rows]) -> Window:
        """Everything since the last call, as a window for the rules; its memory is reused by the next steps."""
        closed, others, seen = self._steps, self._others, self.observations
        self._steps, self._others, self.observations = [], {}, []
        steps = np.array([step for step, _, _ in closed], dtype=np.int64)
        scalars = _columns([one for _, one, _ in closed])
        tables: dict[str, Rows] = {}
        if closed:
            tables["gradient"] = _rows(steps, self._memory[: len(closed)], [layout for _, _, layout in closed])
        known = set(steps.tolist())
        for kind, rows in others.items():
            of_these = [row for row in rows if row[0] in known]  # an interrupt may leave rows without their step
            if of_these:
                at = np.array([step for step, _, _ in of_these], dtype=np.int64)
                raw = np.stack([raw for _, _, raw in of_these])
                tables[kind] = _rows(at, raw, [layout for _, layout, _ in of_these])
        return Window(steps, scalars, tables, facts, seen, latest)

    def _keep_gradients(self, pending: Pending) -> Layout:
        """Appends the rows of gradients to those of earlier steps, while they are in the cache."""
        numbers, at = pending.numbers[0], len(self._steps)
        segment = numbers.segments[0]
        if at >= self._memory.shape[0] or self._memory.shape[1] != len(segment.names):
            longer = np.empty((_fields.COUNT, 2 * at or 1, len(segment.names))).transpose(1, 2, 0)
            if at:
                longer[:at] = self._memory
            self._memory = longer
        rows, table = self._memory[at], numbers.table()[: segment.measured]
        if pending.is_scaled:
            table = without_scale(table, pending.scalars["loss_scale"])
        if segment.positions is None:
            rows[:] = table
        else:
            rows.fill(math.nan)
            rows[segment.positions] = table
        return self._layout_of(segment, numbers.rows.infos, 0)

    def _layout_of(self, segment: Segment, every: Sequence[TensorInfo], start: int) -> Layout:
        """The cached layout of a segment, whose tensors begin at ``start`` in ``every``, the infos of all tensors."""
        known, positions, layout = self._layouts.get(segment.kind, _UNKNOWN)
        if layout is not None and layout.names is not segment.names and layout.names != segment.names:
            layout = None
        # ``every`` stays the same object while shapes, dtypes and devices do not change.
        if layout is not None and known is every and positions == segment.positions:
            return layout
        measured = every[start : start + segment.measured]
        infos: list[Any] = list(measured)
        if segment.positions is not None:
            # Absent tensors keep the info of earlier steps.
            infos = list(layout.infos) if layout is not None else [None] * len(segment.names)
            for position, info in zip(segment.positions, measured, strict=True):
                infos[position] = info
        if layout is None or list(layout.infos) != infos:  # else only other tensors have changed
            layout = Layout.of(segment.names, infos)
        self._layouts[segment.kind] = (every, segment.positions, layout)
        return layout


def _rows(steps: npt.NDArray[np.int64], raw: Floats, layouts: list[Layout]) -> Rows:
    newest = layouts[-1]
    return Rows(newest, steps, raw, None if all(layout is newest for layout in layouts) else layouts)


def _columns(steps: list[dict[str, float]]) -> dict[str, Floats]:
    """The scalars of some steps, each as an array; missing values are NaN, or 0 for counts."""
    if not steps:
        return {}
    absent = dict.fromkeys(_COUNTS, 0.0)
    for one in steps:
        if not absent.keys() >= one.keys():
            absent |= {name: math.nan for name in one if name not in absent}
    values = np.array([[one.get(name, value) for name, value in absent.items()] for one in steps], dtype=np.float64)
    return dict(zip(absent, values.T.copy(), strict=True))


def _value(row: list[float]) -> float:
    # The sum of one element is the element; the counts tell whether it is NaN or Inf.
    if row[_NAN] or row[_INF]:
        return math.nan if row[_NAN] else math.inf
    return row[_SUM]
