"""`Golden`: the statistics of a few healthy runs, and how another run deviates from them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstat._core.text import steps_in_words
from gradstat.monitor.kinds import STATE, kind_of, place_of, place_of_series, plural_of
from gradstat.monitor.recording import archive
from gradstat.monitor.recording.alignment import differing_sizes, one_sided, unwrapped
from gradstat.monitor.recording.explanation import Unlike, explained
from gradstat.monitor.recording.file import load, opened, write
from gradstat.monitor.recording.golden_comparison import Deviation, GoldenComparison
from gradstat.monitor.recording.golden_statistics import (
    NOISE_OF_HALF,
    Averages,
    Floats,
    Group,
    Key,
    averages,
    covered_windows,
    exponential,
    features_of,
    fitted,
    inflation_of,
    noise_cells,
    noise_in,
    places,
    rounded,
    taken,
    window_starts,
)
from gradstat.monitor.recording.page_data import GoldenBands
from gradstat.monitor.recording.recording import Recording, extent_of

FEWEST = 3
FORMAT = "gradstat golden"
VERSION = (1, 0)
LIMIT = 64 << 20


# How the averages of features are told: those of logarithms are geometric means.
_TOLD: dict[str, Callable[[float], float]] = {
    "norm": exponential,
    "log": exponential,
    "peak": lambda value: 1 / max(-value, 1e-6),
}


class Golden:
    """What a comparison needs to know about golden runs, without the runs themselves. Made by `of` or `load`.

    Attributes:
        runs: Number of golden runs.
        steps: Number of steps that are compared.
        left_out: Parameters that are never compared, because their gradients are rounding noise.
        meta: The ``meta`` of the first golden run.
    """

    def __init__(
        self,
        runs: int,
        starts: npt.NDArray[np.int64],
        sizes: Mapping[str, dict[str, int]],
        groups: Mapping[Key, Group],
        left_out: tuple[str, ...],
        meta: Mapping[str, Any],
    ) -> None:
        self.runs, self.left_out, self.meta = runs, left_out, dict(meta)
        self._starts, self._groups = starts, dict(groups)
        self._sizes = dict(sizes)  # by kind and name, numbers of elements
        self._names = {kind: tuple(of_kind) for kind, of_kind in self._sizes.items()}
        self._names |= {kind: (kind,) for kind, _ in self._groups if kind not in self._names}

    @property
    def steps(self) -> int:
        return int(self._starts[-1])

    @classmethod
    def of(cls, recordings: Iterable[Recording | str | os.PathLike[str]]) -> Golden:
        """What at least three healthy runs have in common, and how much they differ; five are advised.

        Args:
            recordings: Recordings of runs that differ only in the seed, or their files. What all have is compared.

        Raises:
            ValueError: There are fewer than three runs, or they have no window of steps in common.
            RecordingFileError, OSError: A file cannot be read.
        """
        golden = [unwrapped(_loaded(recording)) for recording in recordings]
        if len(golden) < FEWEST:
            raise ValueError(f"recordings: expected at least {FEWEST} golden runs (5 are advised), got {len(golden)}")
        starts = window_starts(min(int(run.steps[-1]) + 1 if len(run.steps) else 0 for run in golden))
        sizes: dict[str, dict[str, int]] = {}
        for kind, series in golden[0].tables.items():
            if features_of(kind) and all(kind in run.tables for run in golden):
                common = set.intersection(*(set(run.tables[kind].names) for run in golden))
                sizes[kind] = {name: size for name, size in series.sizes.items() if name in common}
        of_runs = [averages(run, starts) for run in golden]
        scalars = {kind: (kind,) for kind in of_runs[0].names if kind not in golden[0].tables}
        names = scalars | {kind: tuple(of_kind) for kind, of_kind in sizes.items()}
        of_runs = [run.of(names) for run in of_runs]
        left_out = tuple(dict.fromkeys(name for run in of_runs for name in run.rounding_noise()))
        values = [run.without(left_out).values for run in of_runs]
        for name in scalars:  # the logarithm of a loss that is never negative, else the loss
            is_signed = name == "loss" and any((np.asarray(run.scalars.get(name, 1)) <= 0).any() for run in golden)
            for of_run in values:
                of_run.pop((name, "log" if is_signed else "value"), None)
        values = [{key: of_run[key] for key in of_run if all(key in other for other in values)} for of_run in values]
        numels = {kind: np.array(list(of_kind.values()), np.float64) for kind, of_kind in sizes.items()}
        groups = fitted(values, numels)
        if not groups:
            raise ValueError("recordings: the golden runs have no steps in common; record all from the same step on")
        inflation = inflation_of(values, numels)
        for group in groups.values():
            group.scale *= inflation
        groups = {key: rounded(group) for key, group in groups.items()}
        return cls(len(golden), starts, sizes, groups, left_out, golden[0].meta)

    def last_complete(self, steps: int) -> int:
        """The end of the last window that is complete after so many steps."""
        return int(self._starts[np.searchsorted(self._starts, steps, "right") - 1])

    def covers(self, recording: Recording) -> bool:
        """Whether the recording has all steps of any window."""
        return bool(covered_windows(recording.steps, self._starts).any())

    def compare(self, recording: Recording | str | os.PathLike[str]) -> GoldenComparison:
        """Where a run is unlike the golden runs, in the steps and tensors that both have.

        At most one healthy run in 20 is called unlike. Tensors are matched as by `gradstat.monitor.recording.compare`.

        Args:
            recording: The run, or its file.

        Raises:
            ValueError: The run has all steps of no window of the golden runs.
            RecordingFileError, OSError: The file cannot be read.
        """
        recording = _loaded(recording)
        bare = unwrapped(recording)
        run = averages(bare, self._starts).of({kind: self._comparable(kind, bare) for kind in self._names})
        covered = np.flatnonzero(run.covered)
        if not len(covered):
            raise ValueError(
                f"recording: it has {steps_in_words(extent_of(recording))}, which hold no window of the golden runs as "
                f"a whole; record the run from step 0 on, as they were, for at most {self.steps:,} steps"
            )
        # Rounding noise in this run alone means that its precision is higher, if the golden values are small as well.
        left_out: tuple[str, ...] = ()
        if ("gradient", "norm") in self._groups:
            expected = self._groups["gradient", "norm"].mean[run.covered]
            small = noise_in(self._names["gradient"], expected, NOISE_OF_HALF)
            left_out = tuple(name for name in run.rounding_noise() if name in small)
            run = run.without(left_out)
            if ("gradient", "norm") in run.values:
                cells = noise_cells(self._groups["gradient", "norm"].mean, run.values["gradient", "norm"])
                for key in self._keys("gradient", run):
                    run.values[key][cells] = np.nan
        unlike = {kind: of_kind for kind in self._names if (of_kind := self._unlike(kind, run)) is not None}
        findings = [
            self._deviation(kind, j, int(np.argmax(of_kind.excess[:, j] > 1)), run)
            for kind, of_kind in unlike.items()
            for j in np.flatnonzero((of_kind.excess > 1).any(0)).tolist()
        ]
        findings.sort(key=_order)
        where, what = "", ""
        if findings:
            where, what = explained(unlike, int(np.searchsorted(self._starts, findings[0].step)))
        compared = sum(int((~np.isnan(of_kind.excess)).any(0).sum()) for of_kind in unlike.values())
        # Findings have the names of the run, with those of its wrappers.
        wrapped = {
            (kind, name): original
            for kind, series in recording.tables.items()
            for name, original in zip(bare.tables[kind].names, series.names, strict=True)
        }
        return GoldenComparison(
            self.runs,
            (int(self._starts[covered[0]]), int(self._starts[covered[-1] + 1]) - 1),
            tuple(replace(found, name=wrapped.get((found.kind, found.name), found.name)) for found in findings),
            where,
            what,
            len(findings) / max(1, compared),
            tuple(self._structure(bare)),
            (*self.left_out, *left_out),
            recording,
            self._bands(bare, unlike),
        )

    def _keys(self, kind: str, run: Averages) -> list[Key]:
        return [key for key in self._groups if key[0] == kind and key in run.values]

    def _unlike(self, kind: str, run: Averages) -> Unlike | None:
        """How the tensors of a kind deviate; None if it is not known."""
        keys = self._keys(kind, run)
        if not keys:
            return None
        expected = self._groups[keys[0]].mean
        excess = functools.reduce(np.fmax, (self._groups[key].excess(run.values[key]) for key in keys))
        excess = np.where(run.absent[kind] & np.isfinite(expected), np.inf, excess)
        return Unlike(self._names[kind], excess, run.values[keys[0]] - expected)

    def _deviation(self, kind: str, j: int, window: int, run: Averages) -> Deviation:
        """The deviation of tensor ``j`` of a kind: of the feature that deviates most in ``window``."""

        def column(values: Floats) -> Floats:
            return values[window : window + 1, j]

        def excess(key: Key) -> float:
            group, value = self._groups[key], column(run.values[key])
            part = replace(group, mean=column(group.mean), scale=column(group.scale))
            return float(np.nan_to_num(part.excess(value))[0])

        key = max(self._keys(kind, run), key=excess)
        group, told = self._groups[key], _TOLD.get(key[1], float)
        value, expected, half = (float(column(x)[0]) for x in (run.values[key], group.mean, group.scale * group.reach))
        is_absent, is_tensor = bool(run.absent[kind][window, j]), kind in self._sizes
        return Deviation(
            kind if is_tensor else "series",
            self._names[kind][j],
            "absent" if is_absent else key[1] if is_tensor else "value",
            int(self._starts[window]),
            int(self._starts[window + 1]) - 1,
            told(value),
            told(expected),
            told(expected - half),
            told(expected + half),
            math.inf if is_absent else math.copysign(excess(key) * group.limit, value - expected),
        )

    def _structure(self, run: Recording) -> Iterator[str]:
        """Sentences about tensors that only one side has, or that have another size."""
        for kind, expected in self._sizes.items():
            if kind in run.tables:
                sizes = run.tables[kind].sizes
                yield from one_sided(plural_of(kind), expected, sizes, ("golden runs", "run"))
                yield from differing_sizes(kind, expected, sizes)

    def _comparable(self, kind: str, run: Recording) -> tuple[str, ...]:
        """The names of a kind, without those of tensors that have another size in the run."""
        expected, series = self._sizes.get(kind), run.tables.get(kind)
        if expected is None or series is None or kind_of(kind).sizes_vary:
            return self._names[kind]
        sizes = series.sizes
        return tuple(name if sizes.get(name, 0) in (0, size) else "" for name, size in expected.items())

    def _bands(self, bare: Recording, unlike: Mapping[str, Unlike]) -> GoldenBands:
        bands = {}
        for (kind, feature), group in self._groups.items():
            if kind not in self._sizes:
                half = group.scale * group.reach
                ends = np.concatenate([group.mean - half, group.mean + half], 1)
                bands[kind] = np.vectorize(_TOLD.get(feature, float))(ends)
        deviation = {
            kind: taken(of_kind.excess, places(of_kind.names, bare.tables[kind].names), np.nan)
            for kind, of_kind in unlike.items()
            if kind in bare.tables
        }
        return GoldenBands(self._starts, bands, deviation)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes what a comparison needs as one file; replaces an existing file atomically.

        Args:
            path: The file, by convention ``golden.gradstat``. Missing folders are made.

        Returns:
            ``path``.

        Raises:
            OSError: The file cannot be written; nothing is left behind.
        """
        header = {
            "runs": self.runs,
            "starts": self._starts.tolist(),
            "left_out": list(self.left_out),
            "tensors": [{"kind": kind, "names": list(of_kind)} for kind, of_kind in self._sizes.items()],
            "groups": [
                {"kind": kind, "feature": feature, "freedom": group.freedom, "limit": group.limit}
                for (kind, feature), group in self._groups.items()
            ],
            "meta": self.meta,
        }
        arrays: dict[str, npt.NDArray[Any]] = {}
        for i, of_kind in enumerate(self._sizes.values()):
            arrays[f"tensors/{i}/numel"] = np.array(list(of_kind.values()), "<i8")
        for i, group in enumerate(self._groups.values()):
            for name, values in (("mean", group.mean), ("scale", group.scale)):  # windows in sequence compress better
                arrays[f"groups/{i}/{name}"] = np.ascontiguousarray(values.T, "<f8")
        return write(path, FORMAT, VERSION, header, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Golden:
        """Reads what `save` wrote. The file may be untrusted, as that of a recording.

        Args:
            path: The file.

        Raises:
            RecordingFileError: The file holds no golden runs, is damaged, or a newer gradstat wrote it.
            OSError: The file cannot be opened.
        """
        return opened(path, FORMAT, "gradstat.monitor.Golden.save", VERSION, LIMIT, cls._read)

    @classmethod
    def _read(cls, reader: archive.Reader, header: dict[str, Any]) -> Golden:
        starts = np.array(header["starts"], np.int64)
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or (np.diff(starts) <= 0).any():
            raise ValueError("the steps in which its windows begin are not 0 and rising")
        runs = int(header["runs"])
        if runs < FEWEST:
            raise ValueError(f"it is of {runs} runs")
        sizes, groups = {}, {}
        for i, entry in enumerate(header["tensors"]):
            kind, names = *archive.texts([entry["kind"]]), archive.texts(entry["names"])
            numel = reader.array(f"tensors/{i}/numel", "<i8")
            if numel.shape != (len(names),):
                raise ValueError(f"the sizes of its {kind} are not one for each name")
            sizes[kind] = dict(zip(names, numel.tolist(), strict=True))
        for i, entry in enumerate(header["groups"]):
            kind, feature = archive.texts([entry["kind"], entry["feature"]])
            mean, scale = (reader.array(f"groups/{i}/{name}", "<f8").T for name in ("mean", "scale"))
            windows, count = len(starts) - 1, len(sizes.get(kind, [kind]))
            if not mean.shape == scale.shape == (windows, count):
                raise ValueError(f"its groups have other shapes than {windows} windows of {count} tensors")
            freedom, limit = float(entry["freedom"]), float(entry["limit"])
            if not (freedom >= 1 and limit > 0) or (scale <= 0).any():
                raise ValueError(f"a group has {freedom} degrees of freedom, a limit of {limit} or a scale of 0")
            groups[kind, feature] = Group(mean, scale, freedom, limit)
        return cls(runs, starts, sizes, groups, archive.texts(header["left_out"]), dict(header["meta"]))

    def __repr__(self) -> str:
        return f"Golden({self.runs} runs, {self.steps} steps)"


def _loaded(recording: Recording | str | os.PathLike[str]) -> Recording:
    return recording if isinstance(recording, Recording) else load(recording)


def _order(found: Deviation) -> tuple[int, float, float]:
    """Findings by step; within a step causes before effects, then what deviates most."""
    if found.kind == "series":
        place = place_of_series(found.name)
    elif found.step and kind_of(found.kind).name in ("update", "parameter", "buffer"):
        place = place_of(STATE.name) + 1.0  # what a parameter is after the first step is an effect of gradients
    else:
        place = float(place_of(found.kind))
    return found.step, place, -abs(found.z)
