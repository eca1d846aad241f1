"""Takes in the numbers of a step when they have arrived: into the history, and whether they are out of the ordinary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradstat import _fields
from gradstat.monitor.collecting import Pending
from gradstat.monitor.history import History
from gradstat.monitor.measuring import Arrived
from gradstat.monitor.rows import Layout, Observation
from gradstat.tensor_stats import l2_norm_of

_SUM, _SQ = _fields.INDEX["sum"], _fields.INDEX["sq_sum"]
_LARGE, _SMALL = _fields.INDEX["sq_sum_large"], _fields.INDEX["sq_sum_small"]
_MIN, _MAX = _fields.INDEX["min"], _fields.INDEX["max"]
_DEGREES = np.array(_fields.DEGREES, dtype=np.float64)

JudgeLabel = Callable[[int, str, float, float], list[Observation]]


class Intake:
    """Puts what arrives where it belongs.

    Args:
        history: Where rows and scalars go.
        make_room: Called when the tensors of a kind are others than before: has to close the history.
        judge_label: Makes observations of the range of labels.

    Attributes:
        observations: What was seen besides rows since somebody took them away.
    """

    def __init__(self, history: History, make_room: Callable[[], None], judge_label: JudgeLabel) -> None:
        self._history, self._make_room, self._judge_label = history, make_room, judge_label
        self._layouts: dict[str, tuple[Any, Any, Layout]] = {}
        self.observations: list[Observation] = []

    def take(self, pending: Pending) -> bool:
        """Takes in a step; whether a gradient or the loss is not finite. Waits for the numbers."""
        step, scalars = pending.step, pending.scalars
        gradients, *others = [arrived for numbers in pending.numbers for arrived in numbers.wait()]
        if others and others[0].segment.kind == "scalars":
            _take_scalars(others.pop(0), scalars)
        loss = scalars.get("loss")
        if loss is not None and not math.isfinite(loss):
            scalars["loss_nonfinite"] = 1.0 if math.isnan(loss) else 2.0
        rows, total = gradients.rows, gradients.total
        if pending.is_scaled:
            unit = scalars["loss_scale"] ** _DEGREES
            rows, total = rows / unit, None if total is None else total / unit
        # A product with ones is the quickest sum over few rows.
        sums = (np.ones(len(rows)) @ rows if total is None else total).tolist()
        _totals(sums, scalars)
        layout = self._layout_of(gradients)
        if not self._history.fits("gradient", layout):
            self._make_room()
            self._history.drop_block()
        self._history.add_rows("gradient", step, layout, rows, gradients.segment.positions)
        self._history.add_step(step, scalars)
        if pending.seen_at_once:
            self.observations += pending.seen_at_once
        for arrived in others:
            self.take_rows(step, arrived)
        nonfinite = "nonfinite" in scalars
        if nonfinite and pending.origin is not None:
            self.observations.append(Observation("origin", step, pending.origin()))
        return nonfinite or "loss_nonfinite" in scalars

    def take_rows(self, step: int, arrived: Arrived) -> None:
        """Takes in rows of another kind than gradients; nothing if there are some of that kind and step already."""
        kind = arrived.segment.kind
        if kind == "label":
            for name, row in zip(arrived.segment.names, arrived.rows, strict=True):
                self.observations += self._judge_label(step, name, float(row[_MIN]), float(row[_MAX]))
            return
        layout = self._layout_of(arrived)
        if not self._history.fits(kind, layout):
            self._make_room()
        if not self._history.has_rows(kind, step):
            self._history.add_rows(kind, step, layout, arrived.rows, arrived.segment.positions)

    def _layout_of(self, arrived: Arrived) -> Layout:
        """The layout of the tensors of a segment, remembered from step to step."""
        segment = arrived.segment
        known = self._layouts.get(segment.kind)
        if known is not None and known[0] is arrived.every and known[1] == segment.positions:
            layout = known[2]
            if layout.names is segment.names or layout.names == segment.names:
                return layout
        infos: list[Any] = list(arrived.infos)
        if segment.positions is not None:
            infos = [None] * len(segment.names)
            for position, info in zip(segment.positions, arrived.infos, strict=True):
                infos[position] = info
            if known is not None and known[2].names == segment.names:  # what was there before has its shape still
                infos = [known[2].info(i) if info is None else info for i, info in enumerate(infos)]
        layout = Layout.of(segment.names, infos)
        self._layouts[segment.kind] = (arrived.every, segment.positions, layout)
        return layout


def _take_scalars(arrived: Arrived, scalars: dict[str, float]) -> None:
    # Of one element the sum is the element, and the counts say what it is if it is not finite.
    for name, row in zip(arrived.segment.names, arrived.rows[:, : _SUM + 1].tolist(), strict=True):
        scalars[name] = row[_SUM] if not row[0] and not row[1] else math.nan if row[0] else math.inf


def _totals(sums: Sequence[float], scalars: dict[str, float]) -> None:
    """The norms of a step's gradients from the sums over all of them, and the elements that are not finite, if any."""
    extreme = sums[_LARGE] or sums[_SMALL]
    norm = float(l2_norm_of(np.array(sums))) if extreme else math.sqrt(sums[_SQ])
    nan, inf = sums[0], sums[1]
    scalars["finite_norm"] = scalars["norm"] = norm
    if nan or inf:
        scalars["norm"] = math.nan if nan else math.inf
        scalars["nonfinite"] = nan + inf
