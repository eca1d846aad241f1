"""The step log: reads the numbers of measured steps, hands new steps to the rules, and keeps the last ones."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradstat import _fields
from gradstat._core.measurement import without_scale
from gradstat._core.tensors import TensorInfo
from gradstat.monitor.probes.base import Pending
from gradstat.monitor.segments import PendingRows, Segment
from gradstat.recording.kinds import GRADIENT
from gradstat.recording.recording import Recording, joined
from gradstat.report import Report
from gradstat.rules.output_facts import OutputFacts
from gradstat.rules.rows import Floats, Observation, Rows, RunSettings, TensorSet, Window
from gradstat.tensor_stats import l2_norm_of

_NAN, _INF = _fields.INDEX["nan_count"], _fields.INDEX["inf_count"]
_SUM, _SQ = _fields.INDEX["sum"], _fields.INDEX["sq_sum"]
_LARGE, _SMALL = _fields.INDEX["sq_sum_large"], _fields.INDEX["sq_sum_small"]

# Scalars that are 0 in steps without them: counts, and scalars that only steps with NaN or Inf have.
_COUNTS = {"nonfinite": 0.0, "missing": 0.0}
_ABSENT = {**_COUNTS, "loss_nonfinite": 0.0}


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
        rows, total = numbers.rows.table()[:count], numbers.rows.total()
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


class StepLog:
    """The steps of a run: those that the rules have not seen, and the last ``length``, in roughly ``max_bytes``."""

    def __init__(self, length: int, max_bytes: int) -> None:
        self._length, self._max_bytes = length, max_bytes
        self._last_tensors: dict[str, TensorSet] = {}
        self.clear()
        self.load(None)

    def clear(self) -> None:
        """Drops the steps that the rules have not seen, because their numbers will be used again."""
        self.newest: Pending | None = None  # that was read
        self._begin()

    def _begin(self) -> None:
        self._steps: list[Pending] = []
        self.observations: list[Observation] = []
        self._names: dict[str, tuple[str, ...]] = {}  # by kind, of the tensors in these steps
        self._segments: list[Segment] = []  # of the last table

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since the last `close`."""
        return not self._steps and not self.observations

    # New steps -------------------------------------------------------------------------------------------

    def read(self, pending: Pending) -> bool:
        """Waits for a step's numbers and adds scalars to it; returns whether a gradient or the loss is not finite."""
        self.newest = pending
        (segments, rows, *_), scalars = pending.numbers[0], pending.scalars
        table, first = rows.table(), segments[0]
        count = len(first.names if first.positions is None else first.positions)
        with np.errstate(over="ignore"):  # of elements near the largest float64
            summands = rows.total()[None] if rows.has_total else table[:count]  # the total is that of all ranks
            sums: list[float] = summands[:, _fields.SUMMED].sum(0).tolist()
        norm = float(l2_norm_of(np.array(sums))) if sums[_LARGE] or sums[_SMALL] else math.sqrt(sums[_SQ])
        is_nonfinite = sums[_NAN] != 0 or sums[_INF] != 0
        if pending.on_device:
            # If gradients are distributed, every segment has a table of its own.
            of_scalars = table[count:] if len(segments) > 1 else pending.numbers[1].rows.table()
            for name, row in zip(pending.on_device, of_scalars.tolist(), strict=False):
                # The sum of one element is the element; the counts tell whether it is NaN or Inf.
                scalars[name] = math.nan if row[_NAN] else math.inf if row[_INF] else row[_SUM]
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
        segments = self._segments
        names: dict[str, tuple[str, ...]] = {}
        for numbers in pending.numbers:
            if numbers.segments is not segments:  # mostly it is the same list
                segments = numbers.segments
                names |= {segment.kind: segment.names for segment in segments if segment.kind != "scalars"}
        if self._names | names != names | self._names:  # a kind has other tensors
            review()
        self._segments, self._names = segments, self._names | names
        self._steps.append(pending)
        for kind, read in pending.late.items():
            if kind != "origin" or "nonfinite" in pending.scalars:  # which asks the other ranks
                value = read()
                pending.observe(kind, value)
                if kind == "outputs":
                    self._outputs = value
        if pending.observations:
            self.observations += pending.observations

    def _parts_of(self, numbers: PendingRows) -> list[tuple[Segment, slice, TensorSet]]:
        """The segments of a table that have rows of their own: where they are, and of which tensors."""
        parts, start = [], 0
        for segment in numbers.segments:
            at = slice(start, start + segment.measured)
            start = at.stop
            if segment.kind != "scalars":  # they become numbers by name
                parts.append((segment, at, self._tensors_of(segment, numbers.rows.infos[at])))
        return parts

    def _tensors_of(self, segment: Segment, measured: Sequence[TensorInfo]) -> TensorSet:
        """The tensors of a segment, those of the last one of its kind if they are the same."""
        last = self._last_tensors.get(segment.kind)
        if last is not None and last.names != segment.names:
            last = None
        infos: list[Any] = list(measured)
        if segment.positions is not None:
            # Absent tensors keep the info of earlier steps.
            infos = list(last.infos) if last is not None else [None] * len(segment.names)
            for position, info in zip(segment.positions, measured, strict=True):
                infos[position] = info
        if last is None or list(last.infos) != infos:
            last = self._last_tensors[segment.kind] = TensorSet.of(segment.names, infos)
        return last

    # From new steps to kept ones -------------------------------------------------------------------------

    def close(self, run: RunSettings, keeps: bool = True) -> Window:
        """The steps since the last call, as a window for the rules; if it ``keeps`` them, they are in recordings."""
        closed, seen = self._steps, self.observations
        self._begin()
        rows: dict[str, list[tuple[int, TensorSet, Floats]]] = {}
        last: PendingRows | None = None
        for one in closed:
            for numbers in one.numbers:
                if last is None or numbers.segments is not last.segments or numbers.rows.infos is not last.rows.infos:
                    last, parts = numbers, self._parts_of(numbers)
                table = numbers.rows.table()
                for segment, at, tensors in parts:
                    kind, measured = segment.kind, table[at, : _fields.COUNT]  # distributed tensors have one more
                    if one.is_scaled and kind == GRADIENT.name:
                        measured = without_scale(measured, one.scalars["loss_scale"])
                    if segment.positions is not None:
                        present, measured = measured, np.full((len(segment.names), _fields.COUNT), math.nan)
                        measured[segment.positions] = present
                    rows.setdefault(kind, []).append((one.step, tensors, measured))
        steps = np.array([one.step for one in closed], dtype=np.int64)
        columns = {}
        for name in dict.fromkeys(itertools.chain(*(one.scalars for one in closed), _COUNTS if closed else ())):
            fill = _ABSENT.get(name, math.nan)
            columns[name] = np.array([one.scalars.get(name, fill) for one in closed])
        stacked = {kind: _stacked(*zip(*of_kind, strict=True)) for kind, of_kind in rows.items()}
        if keeps:
            self._keep(steps, columns, stacked)
        return Window(steps, columns, stacked, run, seen, self.latest, self._outputs)

    def _keep(self, steps: npt.NDArray[np.int64], scalars: dict[str, Floats], tables: dict[str, Rows]) -> None:
        self.latest |= {kind: rows.newest for kind, rows in tables.items()}
        if not self._length or not len(steps):  # none if a batch was reviewed before the first step
            return
        while self._blocks and steps[-1] - self._blocks[0][0][-1] >= self._length:
            self._blocks.popleft()
        # Without the objects of the rules, which keep what they compute.
        kept = {kind: (rows.tensors, rows.steps, rows.raw, rows.by_row) for kind, rows in tables.items()}
        self._blocks.append((steps, scalars, kept))
        if self._bytes() > self._max_bytes:
            self._condense()
        while len(self._blocks) > 1 and self._bytes() > self._max_bytes:
            self._blocks.popleft()

    def _bytes(self) -> int:
        every = (one for _, _, tables in self._blocks for one in tables.values())
        return sum((one[2] if isinstance(one, tuple) else one.values).nbytes for one in every)

    def _condense(self) -> None:
        """Converts all kept rows to series, which take less memory."""
        for _, _, tables in self._blocks:
            tables |= {kind: Rows(*one).series() for kind, one in tables.items() if isinstance(one, tuple)}

    # Kept steps ------------------------------------------------------------------------------------------

    def recording(self) -> Recording:
        """Everything that is kept, without findings."""
        self._condense()
        parts = [Recording(steps, scalars, tables) for steps, scalars, tables in self._blocks]
        last = int(parts[-1].steps[-1]) if parts else 0
        return joined(parts, max(0, last - self._length + 1), _ABSENT)

    def load(self, recording: Recording | None) -> None:
        """Replaces what is kept by the history of another run."""
        # Of a review each: steps, scalars, and by kind what makes `Rows`, or a `Series` of them.
        self._blocks: deque[tuple[npt.NDArray[np.int64], dict[str, Floats], dict[str, Any]]] = deque()
        self.latest: dict[str, Rows] = {}  # by kind, the newest rows, of one step
        self._outputs = OutputFacts()  # the newest
        if recording is not None and len(recording.steps):
            self._blocks.append((recording.steps, recording.scalars, {**recording.tables}))


def _stacked(steps: Sequence[int], by_row: Sequence[TensorSet], tables: Sequence[Floats]) -> Rows:
    """The rows of a kind in some steps. Each field is contiguous, since rules read one at a time."""
    newest = by_row[-1]
    fields = np.empty((_fields.COUNT, len(steps), len(newest.names)))
    np.concatenate([table.T for table in tables], 1, out=fields.reshape(_fields.COUNT, -1))
    is_same = all(tensors is newest for tensors in by_row)
    return Rows(newest, np.array(steps, dtype=np.int64), fields.transpose(1, 2, 0), None if is_same else by_row)
