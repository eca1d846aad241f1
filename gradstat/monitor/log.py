"""The step log: reads the numbers of measured steps, hands new steps to the rules, and keeps the last ones."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradstat import _fields
from gradstat._core import native
from gradstat._core.measurement import without_scale
from gradstat._core.tensors import TensorInfo
from gradstat.monitor.collector import Pending
from gradstat.monitor.recording.recording import Recording, Series, joined
from gradstat.monitor.rows import Floats, Observation, Rows, RunSettings, TensorSet, Window
from gradstat.monitor.segments import PendingRows, Segment
from gradstat.report import Report
from gradstat.tensor_stats import l2_norm_of

_NAN, _INF = _fields.INDEX["nan_count"], _fields.INDEX["inf_count"]
_SUM, _SQ = _fields.INDEX["sum"], _fields.INDEX["sq_sum"]
_LARGE, _SMALL = _fields.INDEX["sq_sum_large"], _fields.INDEX["sq_sum_small"]
# Fields that are neither 0 nor infinite in plain rows.
_VARIED = [_fields.INDEX[name] for name in ("zero_count", "sum", "sq_sum", "min", "max")]
_MIN, _MAX = _fields.INDEX["min"], _fields.INDEX["max"]

# Scalars that are 0 in steps without them: counts, and scalars that only steps with NaN or Inf have.
_COUNTS = {"nonfinite": 0.0, "missing": 0.0}
_ABSENT = {**_COUNTS, "loss_nonfinite": 0.0}

# Up to this many bytes, rows are kept unconverted: most are dropped before anyone asks for a series.
_MAX_RAW_BYTES = 16 * 2**20

_UNKNOWN: tuple[Any, Any, TensorSet | None] = (None, None, None)


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
        rows, total = numbers.table()[:count], numbers.total()
        scale = pending.scalars.get("loss_scale")
        if pending.is_scaled and scale:
            rows, total = without_scale(rows, scale), without_scale(total, scale)
        missing = [position for seen in pending.observations if seen.kind == "missing" for position in seen.value]
        report = Report(
            lambda: names if positions is None else [names[position] for position in positions],
            rows,
            numbers.infos[:count],
            lambda: [names[position] for position in missing],
            loss_scale=scale,
            total=total,
        )
        return cls(pending.step, report, dict(pending.scalars))


class _KeptRows(NamedTuple):
    """Rows that may be asked for as a series; of plain rows only the fields that differ."""

    rows: tuple[TensorSet, npt.NDArray[np.int64], Sequence[TensorSet] | None]
    fields: Floats  # [fields, steps, tensors]

    @classmethod
    def of(cls, rows: Rows) -> _KeptRows:
        fields = rows.raw.transpose(2, 0, 1)
        return cls((rows.tensors, rows.steps, rows.by_row), fields[_VARIED] if rows.is_plain else fields.copy())

    def series(self) -> Series:
        """The series of the rows."""
        tensors, steps, by_row = self.rows
        fields = self.fields
        if is_plain := len(fields) < _fields.COUNT:
            fields = np.zeros((_fields.COUNT, *fields.shape[1:]))
            fields[_VARIED] = self.fields
            fields[_fields.INDEX["first_nonfinite"]] = math.inf
        return Rows(tensors, steps, fields.transpose(1, 2, 0), by_row, is_plain or None).series()


class StepLog:
    """The steps of a run: those that the rules have not seen, and the last ``length``, in roughly ``max_bytes``.

    Attributes:
        observations: The observations that the rules have not seen.
        newest: The newest step that was read.
        latest: By kind, the newest rows, of one step.
    """

    def __init__(
        self, length: int, max_bytes: int, check_labels: Callable[[int, str, float, float], list[Observation]]
    ) -> None:
        self._length, self._max_bytes, self._check_labels = length, max_bytes, check_labels
        self._last_tensors: dict[str, tuple[Any, Any, TensorSet | None]] = {}
        self._names: tuple[str, ...] = ()
        # Segments that were measured together last and the infos of their tensors, and from both, for each that has
        # rows of its own: where they are, and of which tensors.
        self._split: tuple[list[Segment], Sequence[TensorInfo], list[tuple[Segment, slice, TensorSet]]] = ([], (), [])
        self._reads_plain = True  # as `Rows.is_plain`, of the step that was read, as far as its total tells
        self._reserve(1, 0)
        self.clear()
        self.load(None)

    def clear(self) -> None:
        """Drops the steps that the rules have not seen, because their numbers will be used again."""
        self._steps: list[tuple[int, dict[str, float], TensorSet]] = []
        self._others: dict[str, list[tuple[int, TensorSet, PendingRows, slice]]] = {}
        self.observations: list[Observation] = []
        self.newest: Pending | None = None
        self._is_plain = True  # as `_reads_plain`, of all these steps

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since the last `close`."""
        return not self._steps and not self.observations

    # New steps -------------------------------------------------------------------------------------------

    def read(self, pending: Pending) -> bool:
        """Waits for a step's numbers and adds scalars to it; returns whether a gradient or the loss is not finite."""
        numbers, scalars = pending.numbers[0], pending.scalars
        sums = numbers.total_of_first()
        norm = float(l2_norm_of(np.array(sums))) if sums[_LARGE] or sums[_SMALL] else math.sqrt(sums[_SQ])
        is_nonfinite = sums[_NAN] != 0 or sums[_INF] != 0
        self._reads_plain = not (is_nonfinite or sums[_LARGE] or sums[_SMALL]) and numbers.segments[0].positions is None
        if pending.on_device:
            # If gradients are distributed, every segment has a table of its own.
            rows, first = numbers.table(), numbers.segments[0].measured
            if len(numbers.segments) == 1:
                rows, first = pending.numbers[1].table(), 0
            for i, name in enumerate(pending.on_device, first):
                scalars[name] = _value(rows[i].tolist())
        if pending.is_scaled:
            # A scale of 0 made every gradient 0, whatever it was.
            norm = norm / scalars["loss_scale"] if scalars["loss_scale"] else math.nan
        scalars["finite_norm"] = scalars["norm"] = norm
        if is_nonfinite:
            scalars["norm"] = math.nan if sums[_NAN] else math.inf
            scalars["nonfinite"] = sums[_NAN] + sums[_INF]
        loss = scalars.get("loss", 0.0)
        if not -math.inf < loss < math.inf:
            scalars["loss_nonfinite"] = 1.0 if math.isnan(loss) else 2.0
            is_nonfinite = True
        return is_nonfinite

    def take(self, pending: Pending, review: Callable[[], None]) -> None:
        """Adds a step that was read. If its tensors are not those held, ``review`` is called first, to `close` them."""
        split, is_other, others = self._split, False, []
        gradients: Any = None
        for numbers in pending.numbers:
            if numbers.segments is not split[0] or numbers.infos is not split[1]:
                parts = [
                    (segment, slice(start, start + segment.measured), self._tensors_of(segment, numbers.infos, start))
                    for segment, start in numbers.split()
                    if segment.kind != "scalars"  # they become numbers by name
                ]
                split = numbers.segments, numbers.infos, parts
                is_other = is_other or any(self._is_other(segment) for segment, _, _ in parts)
            for segment, at, tensors in split[2]:
                if segment.kind == "gradient":
                    gradients = tensors
                else:
                    others.append((segment, tensors, numbers, at))
        if is_other:
            review()
        self._split, self._names = split, gradients.names
        self._is_plain = self._is_plain and self._reads_plain
        self.newest = pending
        self._add_gradients(pending)
        self._steps.append((pending.step, pending.scalars, gradients))
        if pending.observations:
            self.observations += pending.observations
        for segment, tensors, numbers, at in others:
            kind = segment.kind
            if kind == "label":
                for name, row in zip(segment.names, numbers.table()[at], strict=True):
                    self.observations += self._check_labels(pending.step, name, float(row[_MIN]), float(row[_MAX]))
            elif kind in self._others:
                self._others[kind].append((pending.step, tensors, numbers, at))
            else:  # one assignment, so that an interrupt cannot leave an empty list
                self._others[kind] = [(pending.step, tensors, numbers, at)]
        if pending.origin is not None and "nonfinite" in pending.scalars:
            self.observations.append(Observation("origin", pending.step, pending.origin()))

    def _is_other(self, segment: Segment) -> bool:
        """Whether the tensors of a segment are not those of its kind that are held."""
        if segment.kind == "gradient":
            return segment.names is not self._names and segment.names != self._names
        earlier = self._others.get(segment.kind)
        return earlier is not None and earlier[-1][1].names != segment.names

    def _reserve(self, steps: int, tensors: int) -> None:
        """Makes memory for the rows of gradients. Each field is contiguous, since rules read one at a time."""
        self._block = torch.empty(_fields.COUNT, steps, tensors, dtype=torch.float64, device="cpu")
        self._gradient_rows: Floats = self._block.numpy().transpose(1, 2, 0)  # [steps, tensors, fields]

    def _add_gradients(self, pending: Pending) -> None:
        """Adds the rows of gradients to those of earlier steps, while they are in the cache."""
        numbers, at = pending.numbers[0], len(self._steps)
        segment = numbers.segments[0]
        capacity, count, _ = self._gradient_rows.shape
        if at >= capacity or count != len(segment.names):
            earlier = self._gradient_rows[:at]
            self._reserve(2 * at or 1, len(segment.names))
            if at:
                self._gradient_rows[:at] = earlier
        helpers = native.helpers() if self._reads_plain and not pending.is_scaled else None
        table = None if helpers is None else numbers.tensor()
        if helpers is None or table is None or not helpers.by_field(table, self._block, at):
            _write(pending, self._gradient_rows[at])

    def _tensors_of(self, segment: Segment, every: Sequence[TensorInfo], start: int) -> TensorSet:
        """The cached tensors of a segment, whose tensors begin at ``start`` in ``every``, the infos of all tensors."""
        same, known, tensors = self._last_tensors.get(segment.kind, _UNKNOWN)
        # ``every`` stays the same object while shapes, dtypes and devices do not change.
        if tensors is not None and same is segment and known is every:
            return tensors
        if tensors is not None and tensors.names is not segment.names and tensors.names != segment.names:
            tensors = None
        measured = every[start : start + segment.measured]
        infos: list[Any] = list(measured)
        if segment.positions is not None:
            # Absent tensors keep the info of earlier steps.
            infos = list(tensors.infos) if tensors is not None else [None] * len(segment.names)
            for position, info in zip(segment.positions, measured, strict=True):
                infos[position] = info
        if tensors is None or list(tensors.infos) != infos:  # else only other tensors have changed
            tensors = TensorSet.of(segment.names, infos)
        self._last_tensors[segment.kind] = (segment, every, tensors)
        return tensors

    # From new steps to kept ones -------------------------------------------------------------------------

    def close(self, run: RunSettings) -> Window:
        """The steps since the last call, as a window for the rules; from now on they are kept."""
        closed, others, seen = self._steps, self._others, self.observations
        self._steps, self._others, self.observations = [], {}, []
        which, each, by_row = zip(*closed, strict=True) if closed else ((), (), ())
        steps, scalars = np.array(which, dtype=np.int64), _columns(each)
        tables: dict[str, Rows] = {}
        if closed:
            raw = self._gradient_rows[: len(closed)]
            is_plain = self._is_plain and bool(by_row[-1].numel.all())
            tables["gradient"] = _rows(steps, raw, by_row, is_plain or None)
            self._is_plain = True
        numbers = set(which)
        for kind, rows in others.items():
            of_these = [row for row in rows if row[0] in numbers]  # an interrupt may leave rows without their step
            if of_these:
                at = np.array([row[0] for row in of_these], dtype=np.int64)
                # Steps that are measured alike share the place of these rows.
                alike = itertools.groupby(of_these, lambda row: id(row[3]))
                raw = np.concatenate([_stacked(list(some)) for _, some in alike])
                tables[kind] = _rows(at, raw, [row[1] for row in of_these])
        self._keep(steps, scalars, tables)
        return Window(steps, scalars, tables, run, seen, self.latest)

    def _keep(self, steps: npt.NDArray[np.int64], scalars: dict[str, Floats], tables: dict[str, Rows]) -> None:
        self.latest |= {kind: rows.newest for kind, rows in tables.items()}
        if not self._length or not len(steps):  # none if a batch was reviewed before the first step
            return
        while self._blocks and steps[-1] - self._blocks[0][0][-1] >= self._length:
            self._drop_oldest()
        parts: dict[str, Any] = {}
        for kind, rows in tables.items():
            is_small = self._bytes + rows.raw.nbytes <= _MAX_RAW_BYTES
            # A copy, while it is in the cache, is no dearer than new memory for the coming steps.
            parts[kind] = _KeptRows.of(rows) if is_small else rows.series()
            self._bytes += _bytes_of(parts[kind])
        self._blocks.append((steps, scalars, parts))
        if self._bytes > self._max_bytes:
            self._condense()
        while self._bytes > self._max_bytes and len(self._blocks) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._bytes -= sum(map(_bytes_of, self._blocks.popleft()[2].values()))

    def _condense(self) -> None:
        """Converts all kept rows to series."""
        for _, _, tables in self._blocks:
            tables |= {kind: rows.series() for kind, rows in tables.items() if isinstance(rows, _KeptRows)}
        self._bytes = sum(_bytes_of(chunk) for _, _, tables in self._blocks for chunk in tables.values())

    # Kept steps ------------------------------------------------------------------------------------------

    def recording(self) -> Recording:
        """Everything that is kept, without findings."""
        self._condense()
        parts = [Recording(steps, dict(columns), tables) for steps, columns, tables in self._blocks]
        last = int(parts[-1].steps[-1]) if parts else 0
        return joined(parts, max(0, last - self._length + 1), _ABSENT)

    def load(self, recording: Recording | None) -> None:
        """Replaces what is kept by the history of another run."""
        # Of a review each: steps, scalars, and by kind a `Series`, or rows to be converted when needed.
        self._blocks: deque[tuple[npt.NDArray[np.int64], Mapping[str, Floats], dict[str, Any]]] = deque()
        self._bytes = 0  # bytes of the tables
        self.latest: dict[str, Rows] = {}
        if recording is not None and len(recording.steps):
            tables = {kind: series for kind, series in recording.tables.items() if len(series.steps)}
            self._blocks.append((recording.steps, dict(recording.scalars), tables))
            self._bytes = sum(map(_bytes_of, tables.values()))


def _rows(steps: npt.NDArray[np.int64], raw: Floats, by_row: Sequence[TensorSet], is_plain: bool | None = None) -> Rows:
    newest = by_row[-1]
    if len({*map(id, by_row)}) == 1:
        return Rows(newest, steps, raw, is_plain=is_plain)
    return Rows(newest, steps, raw, by_row)


def _stacked(rows: list[tuple[int, TensorSet, PendingRows, slice]]) -> Floats:
    """The rows of steps that were measured alike; their tables become one array, not one each, which takes longer."""
    tables = [table for _, _, numbers, _ in rows if (table := numbers.tensor()) is not None]
    place = rows[0][3]
    if len(rows) == 1:
        return rows[0][2].table()[None, place]
    if len(tables) < len(rows):
        return np.array([numbers.table()[place] for _, _, numbers, _ in rows])
    stacked: Floats = torch.stack(tables).numpy()
    return stacked[:, place, : _fields.COUNT]


def _write(pending: Pending, rows: Floats) -> None:
    """Writes the rows of a step's gradients into ``rows``, ``[n, fields]``."""
    positions = pending.numbers[0].segments[0].positions
    table = pending.numbers[0].table()[: len(rows) if positions is None else len(positions)]
    if pending.is_scaled:
        table = without_scale(table, pending.scalars["loss_scale"])
    if positions is None:
        rows[:] = table
    else:
        rows.fill(math.nan)
        rows[positions] = table


def _columns(steps: Sequence[dict[str, float]]) -> dict[str, Floats]:
    """The scalars of some steps, each as an array; missing values are NaN, or those of `_ABSENT`."""
    if not steps:
        return {}
    count = len(steps)
    try:
        columns = {name: np.fromiter(map(operator.itemgetter(name), steps), np.float64, count) for name in steps[0]}
        have_same_names = sum(map(len, steps)) == count * len(columns)
    except KeyError:
        have_same_names = False
    if not have_same_names:
        names = dict.fromkeys(itertools.chain.from_iterable(steps))
        columns = {name: np.array([one.get(name, _ABSENT.get(name, math.nan)) for one in steps]) for name in names}
    return columns | {name: np.zeros(count) for name in _COUNTS if name not in columns}


def _value(row: list[float]) -> float:
    # The sum of one element is the element; the counts tell whether it is NaN or Inf.
    if row[_NAN] or row[_INF]:
        return math.nan if row[_NAN] else math.inf
    return row[_SUM]


def _bytes_of(chunk: Series | _KeptRows) -> int:
    return chunk.fields.nbytes if isinstance(chunk, _KeptRows) else chunk.values.nbytes
