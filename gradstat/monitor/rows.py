"""The input of rules: rows of new steps as arrays, with derived statistics computed lazily."""

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
    infos: tuple[TensorInfo | None, ...]  # None for a tensor that was never measured
    numel: npt.NDArray[np.int64]
    values: Floats  # count of real numbers: a complex element is two
    matrices: Bools  # which tensors have two or more dimensions

    @classmethod
    def of(cls, names: Sequence[str], infos: Sequence[TensorInfo | None]) -> Layout:
        numel = np.array([0 if info is None else info.numel for info in infos], dtype=np.int64)
        parts = np.array([2.0 if info is not None and info.dtype.is_complex else 1.0 for info in infos])
        matrices = np.array([info is not None and len(info.shape) >= 2 for info in infos], dtype=bool)
        return cls(tuple(names), tuple(infos), numel, numel * parts, matrices)


class Rows:
    """The rows of one kind of tensors over some steps.

    Attributes:
        layout: Which tensors the rows belong to; the newest, if some changed their size.
        steps: ``[m]`` int64, rising.
        raw: ``[m, n, len(FIELDS)]`` float64; all NaN where a tensor was absent.
        layouts: The layout of each row, with the same names; None if all have ``layout``.

    All values below are ``[m, n]`` float64 over finite elements, as in `gradstat.TensorStats`, NaN where there is none.
    """

    def __init__(
        self, layout: Layout, steps: npt.NDArray[np.int64], raw: Floats, layouts: Sequence[Layout] | None = None
    ) -> None:
        self.layout = layout
        self.steps = steps
        self.raw = raw
        self.layouts = layouts

    @property
    def names(self) -> tuple[str, ...]:
        """``[n]`` names."""
        return self.layout.names

    def __len__(self) -> int:
        return len(self.steps)

    def of(self, names: tuple[str, ...]) -> Rows:
        """The rows of the tensors ``names``, in this order; tensors that have no rows count as absent."""
        if names == self.names:
            return self
        place = {name: i for i, name in enumerate(self.names)}
        here = [i for i, name in enumerate(names) if name in place]
        at = [place[names[i]] for i in here]
        raw = np.full((len(self), len(names), self.raw.shape[2]), math.nan)
        raw[:, here] = self.raw[:, at]

        def renamed(layout: Layout) -> Layout:
            return Layout.of(names, [layout.infos[place[name]] if name in place else None for name in names])

        layouts = None if self.layouts is None else list(map(renamed, self.layouts))
        return Rows(renamed(self.layout), self.steps, raw, layouts)

    def first_nonfinite(self, row: int, position: int) -> list[int] | None:
        """Index of the first NaN or Inf of one tensor, as in `gradstat.TensorStats`; None if all are finite.

        Args:
            row: Position in `steps`.
            position: Position in `names`.
        """
        info = (self.layout if self.layouts is None else self.layouts[row]).infos[position]
        stats = None if info is None else TensorStats(self.names[position], self.raw[row, position], info)
        return None if stats is None or stats.first_nonfinite is None else list(stats.first_nonfinite)

    def field(self, name: str) -> Floats:
        """A measured column: ``name`` is one of `gradstat.FIELDS`."""
        column: Floats = self.raw[:, :, _fields.INDEX[name]]
        return column

    @functools.cached_property
    def numel(self) -> npt.NDArray[np.int64]:
        """Number of elements, ``[n]``, or ``[m, n]`` if it varies."""
        return self.layout.numel if self.layouts is None else np.stack([layout.numel for layout in self.layouts])

    @functools.cached_property
    def values(self) -> Floats:
        """Count of real numbers, of the shape of `numel`: a complex element is two."""
        return self.layout.values if self.layouts is None else np.stack([layout.values for layout in self.layouts])

    @functools.cached_property
    def present(self) -> Bools:
        """Which tensors were present."""
        there: Bools = ~np.isnan(self.raw[:, :, 0])
        return there

    @functools.cached_property
    def nonfinite(self) -> Floats:
        """Number of NaN and Inf elements; 0 where the tensor was absent."""
        if self.all_finite:
            return np.zeros(self.raw.shape[:2])
        counts: Floats = np.nan_to_num(self.raw[:, :, _fields.NONFINITE].sum(2))
        return counts

    @functools.cached_property
    def _finite_values(self) -> Floats:
        if self.all_finite:
            return self.values
        parts = self.values / np.maximum(self.numel, 1)
        values: Floats = (self.numel - self.nonfinite) * parts
        return values

    @functools.cached_property
    def l2_norm(self) -> Floats:
        """L2 norm."""
        if not np.any(self.raw[:, :, _EXTREMES]):
            return np.sqrt(self.field("sq_sum"))  # the other two are only used at the ends of float64's range
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
        """Population standard deviation; see `gradstat.TensorStats.std` for its accuracy."""
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
        """Fraction of elements that are zero."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.field("zero_count") / self.numel

    @functools.cached_property
    def all_finite(self) -> bool:
        """Whether all tensors were present, not empty and finite: the usual case, in one pass."""
        return bool((self.raw[:, :, _fields.NONFINITE] == 0).all()) and bool((self.numel > 0).all())

    def series(self) -> Series:
        """The rows in the float32 form that the history keeps."""
        values = np.empty((*self.raw.shape[:2], len(COLUMNS)), dtype=np.float32)
        with np.errstate(over="ignore"):
            for i, name in enumerate(COLUMNS):
                column = self.field(name) if name in _fields.INDEX else getattr(self, name)
                if name in ("min", "max") and not self.all_finite:
                    column = np.where(np.isfinite(column), column, np.nan)
                values[:, :, i] = column
        # Values beyond float32 are clamped to its largest number, since infinity has another meaning here.
        if np.isinf(values).any():
            limit = np.finfo(np.float32).max
            np.clip(values, -limit, limit, out=values)
        return Series(self.names, self.layout.numel, self.steps, values)


def rate_name(group: int) -> str:
    """The name of the scalar with a group's learning rate; only the first group's is always there.

    That of another is there in steps in which it differs from the first group's.
    """
    return f"lr[{group}]" if group else "lr"


@dataclass(frozen=True)
class Observation:
    """An observation that is not a row of statistics.

    Attributes:
        kind: What was observed, ``"replicas"`` for example.
        step: The step.
        value: The result; its type depends on ``kind``.
    """

    kind: str
    step: int
    value: Any


@dataclass(frozen=True)
class Facts:
    """Settings and properties of the run.

    Attributes:
        backward_order: Parameters in the order in which their gradients were complete; empty if not known.
        is_scaled: Whether there is a loss scaler, so that occasional overflows are expected.
        max_norm: The norm that gradients are clipped to, if the monitor was told.
        optimizer_eps: What the optimizer adds to the square root of its second moment, 0 if nothing.
        second_moment_decay: The decay of the optimizer's second moment per step (beta2); 0 if not known.
        initial_lrs: By group, the learning rate that a scheduler began with or warms up to, 0 if there is none.
        classes: Number of classes of labels, if the monitor was told.
        is_user_called: Whether the user's program calls ``Monitor.step``, rather than gradstat itself.
        origin_is_unknown: Whether gradients are reduced over ranks without recording which rank produced NaN.
    """

    backward_order: tuple[str, ...] = ()
    is_scaled: bool = False
    max_norm: float | None = None
    optimizer_eps: float = 0.0
    second_moment_decay: float = 0.0
    initial_lrs: tuple[float, ...] = ()
    classes: int | None = None
    is_user_called: bool = True
    origin_is_unknown: bool = False

    def first_in_backward(self, names: Sequence[str]) -> str:
        """The parameter among ``names``, given in model order, whose gradient was complete first."""
        return next((name for name in self.backward_order if name in names), names[-1])


@dataclass(frozen=True)
class Window:
    """New steps, as rules get them.

    Attributes:
        steps: ``[k]`` int64.
        scalars: By name ``[k]`` float64, as in `gradstat.monitor.Recording.scalars`.
        tables: By kind, as in `gradstat.monitor.Recording.tables`, the rows of the steps in which it was measured.
        facts: What else is known about the run.
        observations: Other observations, in order.
        latest: By kind, the newest rows before or in these steps, of one step; without kinds that were never measured.
    """

    steps: npt.NDArray[np.int64]
    scalars: Mapping[str, Floats]
    tables: Mapping[str, Rows]
    facts: Facts = field(default_factory=Facts)
    observations: Sequence[Observation] = ()
    latest: Mapping[str, Rows] = field(default_factory=dict)

    def scalar(self, name: str) -> Floats | None:
        """The values of the scalar ``name`` in these steps, or None if there are none."""
        values = self.scalars.get(name)
        return None if values is None or (np.isnan(values).all() and name != "loss") else values

    def observed(self, kind: str) -> list[Observation]:
        """The observations of a kind."""
        return [seen for seen in self.observations if seen.kind == kind]

    def rows(self, kind: str) -> Rows | None:
        """The rows of a kind, or None if it was not measured in these steps."""
        rows = self.tables.get(kind)
        return rows if rows is not None and len(rows) and rows.names else None
