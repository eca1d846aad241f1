"""The input of rules: rows of new steps as arrays, with derived statistics computed lazily."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradstat._core.tensors import TensorInfo
from gradstat.recording.recording import COLUMNS, Series
from gradstat.rules.output_facts import OutputFacts
from gradstat.tensor_stats import RowValues, TensorStats

__all__ = ["Observation", "Rows", "RunSettings", "Window"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class TensorSet(NamedTuple):
    """Which tensors the rows of a kind belong to."""

    names: tuple[str, ...]  # in the order of the model
    infos: tuple[TensorInfo | None, ...]  # None for a tensor that was never measured
    numel: npt.NDArray[np.int64]
    values: Floats  # count of real numbers: a complex element is two
    shapes: tuple[tuple[int, ...], ...]
    matrices: Bools  # which tensors have two or more dimensions, and are no vectors shaped for broadcasting
    of_layers: Bools  # which of these have a bias beside them; embeddings, gains and centres of classes have none

    @classmethod
    def of(cls, names: Sequence[str], infos: Sequence[TensorInfo | None]) -> TensorSet:
        numel = np.array([0 if info is None else info.numel for info in infos], dtype=np.int64)
        parts = np.array([2.0 if info is not None and info.dtype.is_complex else 1.0 for info in infos])
        shapes = tuple(() if info is None else tuple(info.shape) for info in infos)
        # A bias or gain may have a shape such as (1, 64, 1, 1).
        is_matrix = [len(shape) == 2 or sum(size != 1 for size in shape) > 1 for shape in shapes]
        matrices = np.array(is_matrix, dtype=bool)
        # Not those of a norm over several dimensions, whose bias has as many.
        vectors = (name for name, is_one in zip(names, is_matrix, strict=True) if not is_one)
        layers = {name.rpartition(".bias")[0] for name in vectors if ".bias" in name}
        of_layers = matrices & np.array([name.rpartition(".")[0] in layers for name in names], dtype=bool)
        return cls(tuple(names), tuple(infos), numel, numel * parts, shapes, matrices, of_layers)


class Rows(RowValues):
    """The rows of one kind of tensors over some steps.

    Attributes:
        tensors: Which tensors the rows belong to; the newest, if some changed their size.
        names: Their ``[n]`` names.
        steps: ``[m]`` int64, rising.
        raw: ``[m, n, len(FIELDS)]`` float64; all NaN where a tensor was absent.
        numel: Number of elements, ``[n]``, or ``[m, n]`` if it varies.
        values: Count of real numbers, of the shape of ``numel``: a complex element is two.
        by_row: Which tensors each row belongs to, of the same names; None if ``tensors`` is true of all.

    All values below are ``[m, n]`` float64 over finite elements, as in `gradstat.TensorStats`, NaN where there is none.
    """

    def __init__(
        self, tensors: TensorSet, steps: npt.NDArray[np.int64], raw: Floats, by_row: Sequence[TensorSet] | None = None
    ) -> None:
        numel, values = tensors.numel, tensors.values
        if by_row is not None:
            numel, values = np.stack([row.numel for row in by_row]), np.stack([row.values for row in by_row])
        super().__init__(raw, numel, values)
        self.tensors, self.names, self.steps, self.by_row = tensors, tensors.names, steps, by_row

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

        def renamed(tensors: TensorSet) -> TensorSet:
            return TensorSet.of(names, [tensors.infos[place[name]] if name in place else None for name in names])

        by_row = None if self.by_row is None else list(map(renamed, self.by_row))
        return Rows(renamed(self.tensors), self.steps, raw, by_row)

    def first_nonfinite(self, row: int, position: int) -> list[int] | None:
        """Index of the first NaN or Inf of one tensor, as in `gradstat.TensorStats`; None if all are finite.

        Args:
            row: Position in `Rows.steps`.
            position: Position in `names`.
        """
        info = (self.tensors if self.by_row is None else self.by_row[row]).infos[position]
        stats = None if info is None else TensorStats(self.names[position], info, self, (row, position))
        return None if stats is None or stats.first_nonfinite is None else list(stats.first_nonfinite)

    @functools.cached_property
    def newest(self) -> Rows:
        """The rows of the newest step, a copy if there are others, which it would keep alive."""
        return self if len(self.steps) == 1 else Rows(self.tensors, self.steps[-1:], self.raw[-1:].copy())

    @functools.cached_property
    def present(self) -> Bools:
        """Which tensors were present."""
        present: Bools = ~np.isnan(self.raw[:, :, 0])
        return present

    @functools.cached_property
    def l2_norm(self) -> Floats:
        """L2 norm, of the finite elements like all other values."""
        return self.finite_norm

    @functools.cached_property
    def norm_of_matrices(self) -> list[float]:
        """The L2 norm of all matrices together, by step. They are the weights, if these are rows of parameters.

        Others may begin at zero, or be statistics that are kept as parameters.
        """
        norms: list[float] = np.linalg.norm(np.nan_to_num(self.l2_norm[:, self.tensors.matrices]), axis=1).tolist()
        return norms

    def series(self) -> Series:
        """The rows in the float32 form that the history keeps."""
        values = np.empty((*self.raw.shape[:2], len(COLUMNS)), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for i, name in enumerate(COLUMNS):
                values[:, :, i] = self.column(name)
        # Values beyond float32 are clamped to its largest number, since infinity has another meaning here.
        if np.isinf(values).any():
            limit = np.finfo(np.float32).max
            np.clip(values, -limit, limit, out=values)
        return Series(self.names, self.tensors.numel, self.steps, values)


def rate_name(group: int) -> str:
    """The name of the scalar with a group's learning rate.

    Other groups than the first have this scalar only in steps in which their rate differs from the first group's.
    """
    return f"lr[{group}]" if group else "lr"


@dataclass(frozen=True)
class Observation:
    """An observation that is not a row of statistics.

    Attributes:
        kind: What was observed, ``"replicas"`` or ``"outputs"`` for example.
        step: The step.
        value: The result; its type depends on ``kind``.
    """

    kind: str
    step: int
    value: Any


@dataclass(frozen=True)
class RunSettings:
    """Settings and properties of the run.

    Attributes:
        backward_order: Parameters in the order in which their gradients were complete; empty if not known.
        in_float16: Names of parameters of another dtype whose gradients are computed in float16, by autocast.
        positive: By name, parameters of which only positive values make sense, and what the loss takes of them.
        loss_is_sum: Whether the loss has several terms, of which some may be detached.
        loss_has_no_sign: Whether it is, up to a factor, of numbers that are never negative, as squares are.
        is_scaled: Whether there is a loss scaler, so that occasional overflows are expected.
        optimizer_eps: What the optimizer adds to the square root of its second moment, 0 if nothing.
        momentum: The largest momentum (or beta1) of the optimizer's groups; 0 if there is none.
        second_moment_decay: The decay of the optimizer's second moment per step (beta2); 0 if not known.
        least_decay: The smallest of its groups, as they say it, also 0; 1 if there is none.
        step_size: What bounds a step of the optimizer: ``"rate"``, each element by the learning rate, as Adam's, or
            ``"gradient"``, times the rate, as SGD's; empty if not known.
        added_decay: The largest weight decay of its groups, if times the weight it is added to the gradient that such
            an optimizer normalises, as Adam does; 0 if not.
        maximizes: Whether the optimizer maximizes.
        has_other_optimizer: Whether another optimizer trains something else in turn, as in a GAN.
        settings: Settings of the optimizer's groups and of modules in the newest step, by name, such as
            ``"eps of group 0"``.
        initial_lrs: By group, the learning rate that a scheduler began with or warms up to, 0 if there is none.
        planned_steps: How many steps the framework will take in all; 0 if not known.
        batches, samples: How many of them the framework has in an epoch; 0 if not known.
        is_stepped_by_user: Whether the user's program calls ``Monitor.step``, rather than gradstat itself.
        origin_is_unknown: Whether gradients are reduced over ranks without recording which rank produced NaN.
        is_unfinished: Whether an exception has ended the last step before its gradients were measured.
        skipped_by: What skips steps with gradients that are not finite; empty if nothing is known to.
    """

    backward_order: tuple[str, ...] = ()
    in_float16: tuple[str, ...] = ()
    positive: Mapping[str, str] = field(default_factory=dict)
    loss_is_sum: bool = False
    loss_has_no_sign: bool = False
    is_scaled: bool = False
    optimizer_eps: float = 0.0
    momentum: float = 0.0
    second_moment_decay: float = 0.0
    least_decay: float = 1.0
    step_size: str = ""
    added_decay: float = 0.0
    maximizes: bool = False
    has_other_optimizer: bool = False
    settings: Mapping[str, float] = field(default_factory=dict)
    initial_lrs: tuple[float, ...] = ()
    planned_steps: int = 0
    batches: int = 0
    samples: int = 0
    is_stepped_by_user: bool = True
    origin_is_unknown: bool = False
    is_unfinished: bool = False
    skipped_by: str = ""

    def first_in_backward(self, names: Sequence[str]) -> str:
        """The parameter among ``names``, given in model order, whose gradient was complete first."""
        return next((name for name in self.backward_order if name in names), names[-1])


class Losses(NamedTuple):
    """The finite losses of a window."""

    steps: list[int]
    rows: list[int]  # positions in `Window.steps`
    values: list[float]


@dataclass(frozen=True)
class Window:
    """New steps, as rules get them.

    Attributes:
        steps: ``[k]`` int64.
        scalars: By name ``[k]`` float64, as in `gradstat.monitor.Recording.scalars`.
        tables: By kind, as in `gradstat.monitor.Recording.tables`, the rows of the steps in which it was measured.
        run: What else is known about the run.
        observations: Other observations, in order.
        latest: By kind, the newest rows before or in these steps, of one step; without kinds that were never measured.
        outputs: The newest facts about the model's outputs before or in these steps; those of each step in which they
            were looked at are the observations ``"outputs"``.
    """

    steps: npt.NDArray[np.int64]
    scalars: Mapping[str, Floats]
    tables: Mapping[str, Rows]
    run: RunSettings = field(default_factory=RunSettings)
    observations: Sequence[Observation] = ()
    latest: Mapping[str, Rows] = field(default_factory=dict)
    outputs: OutputFacts = field(default_factory=OutputFacts)

    @functools.cached_property
    def losses(self) -> Losses:
        """The finite losses of these steps."""
        losses = self.scalars.get("loss", np.empty(0))
        (rows,) = np.isfinite(losses).nonzero()
        return Losses(self.steps[rows].tolist(), rows.tolist(), losses[rows].tolist())

    def scalar(self, name: str) -> Floats | None:
        """The values of the scalar ``name`` in these steps, or None if there are none."""
        values = self.scalars.get(name)
        return None if values is None or (np.isnan(values).all() and name != "loss") else values

    def value(self, name: str, row: int) -> float:
        """The value of the scalar ``name`` in one of these steps, NaN if there is none.

        Args:
            name: As in ``scalars``.
            row: The position of the step in ``steps``.
        """
        return float(self.scalars[name][row]) if name in self.scalars else math.nan

    @functools.cached_property
    def seen(self) -> dict[str, list[Observation]]:
        """The observations by kind, without kinds that were not observed."""
        seen: dict[str, list[Observation]] = {}
        for one in self.observations:
            seen.setdefault(one.kind, []).append(one)
        return seen

    def observed(self, kind: str) -> list[Observation]:
        """The observations of a kind."""
        return self.seen.get(kind, [])

    @functools.cached_property
    def measured(self) -> dict[str, Rows]:
        """The ``tables`` that have rows and tensors."""
        return {kind: rows for kind, rows in self.tables.items() if len(rows.steps) and rows.names}

    def rows(self, kind: str) -> Rows | None:
        """The rows of a kind, or None if it was not measured in these steps."""
        return self.measured.get(kind)
