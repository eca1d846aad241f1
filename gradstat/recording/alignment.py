"""Aligns two recordings: the steps and tensors that both have, and the scales that differences are relative to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstat._core.text import expect, listed
from gradstat.recording.kinds import in_order, kind_of, place_of, place_of_series, plural_of
from gradstat.recording.recording import COLUMNS, Recording, Series, scalar_rows

# Float32 has 24 bits: below this fraction of the total norm, elements may be rounding errors of larger ones.
_ROUNDING = 1e-7
_MOST_NAMES = 5
# What torch.compile, FSDP and activation checkpointing insert into names.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_DDP = "module."  # the prefix that DDP adds to all names


@dataclass(frozen=True)
class Measured:
    """The numbers of one kind that both recordings have; ``[m, n, columns]`` for steps, names and columns."""

    kind: str  # as in `Recording.tables`, or "series"
    names: tuple[str, ...]
    steps: npt.NDArray[np.int64]
    columns: tuple[str, ...]
    a: npt.NDArray[np.float64]
    b: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]  # what a difference is divided by
    beyond_rounding: npt.NDArray[np.bool_]  # whether a difference may be more than rounding


def unwrapped(recording: Recording, argument: str) -> Recording:
    """The recording with tensor names freed of wrappers, except in tables where two names would become equal.

    An error calls it the ``argument``.
    """
    expect(argument, recording, Recording, "a Recording, such as gradstat.recording.load returns")
    bare = _bare_names(recording)
    tables = {}
    for kind, series in recording.tables.items():
        names = series.names if kind_of(kind).names == "batch" else tuple(map(bare, series.names))
        tables[kind] = replace(series, names=names) if len(set(names)) == len(names) else series
    findings = tuple(
        finding
        if finding.about == "series" or kind_of(finding.about).names == "batch"
        else replace(finding, name=bare(finding.name))
        for finding in recording.findings
    )
    order = tuple(map(bare, recording.backward_order))
    return replace(recording, tables=tables, findings=findings, backward_order=order)


def _bare_names(recording: Recording) -> Callable[[str], str]:
    def bare(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    of_parameters = [s.names for kind, s in recording.tables.items() if kind_of(kind).names == "parameter"]
    parameters = [bare(name) for names in of_parameters for name in names]
    if parameters and all(name.startswith(_DDP) for name in parameters):
        return lambda name: bare(name).removeprefix(_DDP)
    return bare


def measured_of(a: Recording, b: Recording) -> tuple[list[Measured], tuple[str, ...]]:
    """The numbers of both recordings, in the order of computation, and sentences about what only one of them has."""
    structure = one_sided("series", a.scalars, b.scalars) + one_sided("tables", a.tables, b.tables)
    series = sorted((name for name in a.scalars if name in b.scalars), key=place_of_series)
    by_place = [(place, _scalars(a, b, list(names))) for place, names in itertools.groupby(series, place_of_series)]
    for kind in in_order(kind for kind in a.tables if kind in b.tables):
        by_place.append((place_of(kind), _tables(kind, a.tables[kind], b.tables[kind])))
        structure += one_sided(plural_of(kind), a.tables[kind].names, b.tables[kind].names)
        structure += differing_sizes(kind, a.tables[kind].sizes, b.tables[kind].sizes)
    by_place.sort(key=lambda pair: pair[0])
    return [measured for _, measured in by_place if measured.names], tuple(structure)


def _scalars(a: Recording, b: Recording, names: list[str]) -> Measured:
    steps, at, bt = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    x, y = scalar_rows(a, names)[:, at].T[:, :, None], scalar_rows(b, names)[:, bt].T[:, :, None]
    scale = np.maximum(np.abs(x), np.abs(y))
    return Measured("series", tuple(names), steps, ("",), x, y, scale, np.ones(x.shape, bool))


def _tables(kind: str, a: Series, b: Series) -> Measured:
    steps, at, bt = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    place = {name: j for j, name in enumerate(b.names)}
    pairs = [(i, place[name]) for i, name in enumerate(a.names) if name in place]
    aj, bj = np.array(pairs, np.int64).reshape(-1, 2).T
    x = a.values[np.ix_(at, aj)].astype(np.float64)
    y = b.values[np.ix_(bt, bj)].astype(np.float64)

    def larger(column: str) -> npt.NDArray[np.float64]:
        c = COLUMNS.index(column)
        values: npt.NDArray[np.float64] = np.fmax(np.abs(x[..., c]), np.abs(y[..., c]))
        return values

    norm = larger("l2_norm")
    root = np.sqrt(np.maximum(a.numel[aj], 1))
    rms = norm / root
    largest = np.fmax(larger("min"), larger("max"))
    # By column: what a difference is relative to, and by how many times it can change the tensor's norm.
    measures: dict[str, tuple[Any, Any]] = {
        "l2_norm": (norm, 1),
        "mean": (np.fmax(rms, larger("mean")), root),
        "std": (np.fmax(rms, larger("std")), root),
        "min": (largest, 1),
        "max": (largest, 1),
        "zero_fraction": (1, np.inf),
        "nan_count": (0, np.inf),  # any difference matters
        "inf_count": (0, np.inf),
    }
    scale, size = np.empty_like(x), np.empty_like(x)
    with np.errstate(invalid="ignore"):  # 0 * inf, where there is no difference
        for c, column in enumerate(COLUMNS):
            scale[..., c], weight = measures[column]
            size[..., c] = np.abs(x[..., c] - y[..., c]) * weight
    whole = np.sqrt(np.nansum(norm**2, 1))[:, None, None]
    beyond = ~(size <= _ROUNDING * whole)  # NaN, if one side is NaN, counts as beyond
    return Measured(kind, tuple(a.names[i] for i, _ in pairs), steps, COLUMNS, x, y, scale, beyond)


def one_sided(what: str, a: Iterable[str], b: Iterable[str], which: tuple[str, str] = ("first", "second")) -> list[str]:
    """Sentences about names that only one of two runs has."""
    a, b = dict.fromkeys(a), dict.fromkeys(b)
    only = zip(which, ([name for name in a if name not in b], [name for name in b if name not in a]), strict=True)
    return [f"{what} only in the {run}: {listed(names, _MOST_NAMES)}" for run, names in only if names]


def differing_sizes(kind: str, a: Mapping[str, int], b: Mapping[str, int]) -> list[str]:
    """A sentence about tensors of one kind that have different sizes in two runs; these are by name."""
    if kind_of(kind).sizes_vary:
        return []
    differing = [f"{name} ({size:,} and {b[name]:,})" for name, size in a.items() if b.get(name, size) != size]
    return [f"{plural_of(kind)} of different sizes: {listed(differing, _MOST_NAMES)}"] if differing else []
