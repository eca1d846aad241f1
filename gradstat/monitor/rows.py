"""What rules look at: rows of new steps as arrays, with everything derived from them computed when first read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradstat import _fields
from gradstat._core.tensors import TensorInfo
from gradstat.monitor.recording.recording import COLUMNS, Series
from gradstat.tensor_stats import TensorStats, l2_norm_of

__all__ = ["Facts", "Observation", "Rows", "Window"]

_EXTREMES = slice(_fields.INDEX["sq_sum_large"], _fields.INDEX["sq_sum_small"] + 1)
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Layout(NamedTuple):
    """Which tensors the rows of a kind belong to."""

    names: tuple[str, ...]  # in the order of the model
    infos: tuple[TensorInfo | None, ...]  # None where it was never seen
    numel: npt.NDArray[np.int64]
    values: Floats  # how many numbers: complex elements are two
    matrices: Bools  # those of two dimensions and more

    @classmethod
    def of(cls, names: Sequence[str], infos: Sequence[TensorInfo | None]) -> Layout:
        numel = np.array([0 if info is None else info.shape.numel() for info in infos], dtype=np.int64)
        parts = np.array([2.0 if info is not None and info.dtype.is_complex else 1.0 for info in infos])
        matrices = np.array([info is not None and len(info.shape) >= 2 for info in infos], dtype=bool)
        return cls(tuple(names), tuple(infos), numel, numel * parts, matrices)


class Rows:
    """The rows of one kind of tensors over some steps.

    Attributes:
        layout: Which tensors.
        steps: ``[m]`` int64, rising.
        raw: ``[m, n, len(FIELDS)]`` float64; NaN throughout where a tensor was not there.

    All values below are ``[m, n]`` float64 over finite elements, as in `gradstat.TensorStats`, NaN where there is none.
    """

    def __init__(self, layout: Layout, steps: npt.NDArray[np.int64], raw: Floats) -> None:
        self.layout = layout
        self.steps = steps
        self.raw = raw

    @property
    def names(self) -> tuple[str, ...]:
        """``[n]`` names."""
        return self.layout.names

    def __len__(self) -> int:
        return len(self.steps)

    def of(self, names: tuple[str, ...]) -> Rows:
        """The rows of tensors of these ``names``, in their order; of one that has none as if it was not there."""
        if names == self.names:
            return self
        place = {name: i for i, name in enumerate(self.names)}
        here = [i for i, name in enumerate(names) if name in place]
        at = [place[names[i]] for i in here]
        raw = np.full((len(self), len(names), self.raw.shape[2]), math.nan)
        raw[:, here] = self.raw[:, at]
        infos = [self.layout.infos[place[name]] if name in place else None for name in names]
        return Rows(Layout.of(names, infos), self.steps, raw)

    def first_nonfinite(self, look: int, position: int) -> list[int] | None:
        """Index of the first NaN or Inf of one tensor, as `gradstat.TensorStats` has it; None if all are finite.

        Args:
            look: Position in `steps`.
            position: Position in `names`.
        """
        info = self.layout.infos[position]
        row = None if info is None else TensorStats(self.names[position], self.raw[look, position], info)
        return None if row is None or row.first_nonfinite is None else list(row.first_nonfinite)

    def field(self, name: str) -> Floats:
        """A column as it was measured: ``name`` is one of `gradstat.FIELDS`."""
        column: Floats = self.raw[:, :, _fields.INDEX[name]]
        return column

    @functools.cached_property
    def present(self) -> Bools:
        """Which were there at all."""
        there: Bools = ~np.isnan(self.raw[:, :, 0])
        return there

    @functools.cached_property
    def nonfinite(self) -> Floats:
        """NaN and Inf elements together; 0 where the tensor was not there."""
        if self.all_finite:
            return np.zeros(self.raw.shape[:2])
        counts: Floats = np.nan_to_num(self.raw[:, :, _fields.NONFINITE].sum(2))
        return counts

    @functools.cached_property
    def _finite_values(self) -> Floats:
        if self.all_finite:
            return self.layout.values
        parts = self.layout.values / np.maximum(self.layout.numel, 1)
        values: Floats = (self.layout.numel - self.nonfinite) * parts
        return values

    @functools.cached_property
    def l2_norm(self) -> Floats:
        """Norm."""
        if not np.any(self.raw[:, :, _EXTREMES]):
            return np.sqrt(self.field("sq_sum"))  # the other two are for elements at the ends of float64
        return l2_norm_of(self.raw)

    @functools.cached_property
    def rms(self) -> Floats:
        """Root mean square."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.l2_norm / np.sqrt(self._finite_values)

    @functools.cached_property
    def mean(self) -> Floats:
        """Mean."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.field("sum") / self._finite_values

    @functools.cached_property
    def std(self) -> Floats:
        """Population standard deviation; how good it is says `gradstat.TensorStats.std`."""
        with np.errstate(invalid="ignore"):
            deviation: Floats = _fields.std(np, self.rms, self.mean)
        return deviation

    @functools.cached_property
    def max_abs(self) -> Floats:
        """Largest magnitude."""
        largest = np.maximum(np.abs(self.field("min")), np.abs(self.field("max")))
        return np.where(np.isfinite(largest), largest, np.nan)

    @functools.cached_property
    def zero_fraction(self) -> Floats:
        """Share of elements that are zero."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.field("zero_count") / self.layout.numel

    @functools.cached_property
    def all_finite(self) -> bool:
        """Whether all tensors were there, with elements, and all of these finite: the ordinary case, in one look."""
        return bool((self.raw[:, :, _fields.NONFINITE] == 0).all()) and bool((self.layout.numel > 0).all())

    def series(self) -> Series:
        """What is kept for long."""
        values = np.empty((*self.raw.shape[:2], len(COLUMNS)), dtype=np.float32)
        with np.errstate(over="ignore"):
            for i, name in enumerate(COLUMNS):
                column = self.field(name) if name in _fields.INDEX else getattr(self, name)
                if name in ("min", "max") and not self.all_finite:
                    column = np.where(np.isfinite(column), column, np.nan)
                values[:, :, i] = column
        # Beyond float32 the largest float32 stands for what is larger: infinity would say something else.
        if np.isinf(values).any():
            limit = np.finfo(np.float32).max
            np.clip(values, -limit, limit, out=values)
        return Series(self.names, self.layout.numel, self.steps, values)


@dataclass(frozen=True)
class Observation:
    """Something seen that is not a row.

    Attributes:
        kind: What of, ``"replicas"`` for example.
        step: When.
        value: What.
    """

    kind: str
    step: int
    value: Any


@dataclass(frozen=True)
class Facts:
    """What is known about the run besides numbers.

    Attributes:
        backward_order: Parameters in the order in which their gradients were complete; empty if not known.
        is_scaled: Whether there is a loss scaler, so that overflows now and then are how it works.
        max_norm: What the total norm is clipped to, if the monitor was told.
        optimizer_eps: What the optimizer adds to the root of its second moment, 0 if nothing.
        second_moment_decay: How much of its second moment the optimizer keeps from step to step; 0 if not known.
        initial_lr: The learning rate that a scheduler began with or warms up to, 0 if there is none.
        classes: Into how many classes labels fall, if the monitor was told.
        is_called_by_hand: Whether the program says when gradients are complete, and not gradstat itself.
        origin_is_unknown: Whether gradients are reduced over ranks, and nobody watches which rank brought what.
    """

    backward_order: tuple[str, ...] = ()
    is_scaled: bool = False
    max_norm: float | None = None
    optimizer_eps: float = 0.0
    second_moment_decay: float = 0.0
    initial_lr: float = 0.0
    classes: int | None = None
    is_called_by_hand: bool = True
    origin_is_unknown: bool = False

    def first_in_backward(self, names: Sequence[str]) -> str:
        """Of parameters, ``names`` in the order of the model, the one whose gradient was complete first."""
        return next((name for name in self.backward_order if name in names), names[-1])


@dataclass(frozen=True)
class Window:
    """New steps, as rules get them.

    Attributes:
        steps: ``[k]`` int64.
        scalars: By name ``[k]`` float64, as in `gradstat.monitor.Recording.scalars`.
        tables: By kind, the rows of those of these steps in which they were measured; likewise named.
        facts: What else is known.
        observations: What was seen besides, in order.
        latest: By kind, the newest rows before or in these steps, one step; a kind that was never seen is not there.
    """

    steps: npt.NDArray[np.int64]
    scalars: Mapping[str, Floats]
    tables: Mapping[str, Rows]
    facts: Facts = field(default_factory=Facts)
    observations: Sequence[Observation] = ()
    latest: Mapping[str, Rows] = field(default_factory=dict)

    def scalar(self, name: str) -> Floats | None:
        """The values of the scalar ``name`` in these steps, or None if it has none in them."""
        values = self.scalars.get(name)
        return None if values is None or (np.isnan(values).all() and name != "loss") else values

    def observed(self, kind: str) -> list[Observation]:
        """What was seen of a kind besides rows."""
        return [seen for seen in self.observations if seen.kind == kind]

    def rows(self, kind: str) -> Rows | None:
        """The rows of a kind, or None if it was not measured in these steps."""
        rows = self.tables.get(kind)
        return rows if rows is not None and len(rows) and rows.names else None
