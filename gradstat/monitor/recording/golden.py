"""`Golden`: the statistics of a few healthy runs, and how another run deviates from them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstat._core.saved import COUNT, NUMBER, TEXT, require, whole
from gradstat._core.text import steps_in_words
from gradstat.monitor.kinds import STATE, kind_of, place_of, place_of_series, plural_of
from gradstat.monitor.recording import archive
from gradstat.monitor.recording import golden_statistics as statistics
from gradstat.monitor.recording.alignment import differing_sizes, one_sided, unwrapped
from gradstat.monitor.recording.explanation import Residuals, explained
from gradstat.monitor.recording.file import opened, write
from gradstat.monitor.recording.golden_comparison import Deviation, GoldenComparison
from gradstat.monitor.recording.golden_statistics import Floats, Group, Key, Sizes
from gradstat.monitor.recording.recording import Recording, extent_of

FEWEST = 3
FORMAT = "gradstat golden"
VERSION = 1
LIMIT = 64 << 20
_NORMS = ("gradient", "norm")
_HEADER = {
    "runs": whole(FEWEST),
    "starts": [COUNT],
    "left_out": [TEXT],
    "sizes": {str: {str: COUNT}},
    "groups": [{"kind": TEXT, "feature": TEXT, "freedom": NUMBER, "limit": NUMBER}],
}

# How averages of features are told: those of logarithms are geometric means.
_TOLD: dict[str, Callable[[float], float]] = {
    "norm": statistics.exponential,
    "log": statistics.exponential,
    "peak": lambda value: 1 / max(-value, 1e-6),
}


class Golden:
    """What a comparison needs to know about golden runs, without the runs themselves. Made by `of` or `load`.

    Attributes:
        runs: Number of golden runs.
        steps: Number of steps that are compared.
        left_out: Parameters that are never compared, because their gradients are rounding noise.
    """

    def __init__(
        self,
        runs: int,
        starts: npt.NDArray[np.int64],
        sizes: Sizes,
        groups: Mapping[Key, Group],
        left_out: tuple[str, ...],
    ) -> None:
        self.runs, self.left_out = runs, left_out
        self._starts, self._sizes, self._groups = starts, sizes, groups

    @property
    def steps(self) -> int:
        return int(self._starts[-1])

    @classmethod
    def of(cls, recordings: Iterable[Recording]) -> Golden:
        """What at least three healthy runs have in common, and how much they differ; five are advised.

        Args:
            recordings: Recordings of runs that differ only in the seed. What all have is compared.

        Raises:
            ValueError: There are fewer than three runs, or they have no window of steps in common.
        """
        golden = list(map(unwrapped, recordings))
        if len(golden) < FEWEST:
            raise ValueError(f"recordings: expected at least {FEWEST} golden runs (5 are advised), got {len(golden)}")
        starts = statistics.window_starts(min(int(run.steps[-1]) + 1 if len(run.steps) else 0 for run in golden))
        sizes = {kind: series.sizes for kind, series in golden[0].tables.items() if statistics.features_of(kind)}
        runs = [statistics.averages(run, starts, sizes) for run in golden]
        of_gradients = (run[_NORMS] for run in runs if _NORMS in run)
        noise = [name for norms in of_gradients for name in statistics.noise_in(tuple(sizes["gradient"]), norms)]
        left_out = tuple(dict.fromkeys(noise))
        for run in runs:
            statistics.leave_out(run, sizes, left_out)
        # The logarithm of a loss that is never negative is compared, else the loss.
        is_signed = any((np.asarray(run.scalars.get("loss", 1)) <= 0).any() for run in golden)
        unused = ("loss", "log" if is_signed else "value")
        shared = [key for key in runs[0] if key != unused and all(key in run for run in runs)]
        groups = statistics.fitted({key: np.stack([run[key] for run in runs]) for key in shared}, sizes)
        if not groups:
            raise ValueError("recordings: the golden runs have no steps in common; record all from the same step on")
        return cls(len(golden), starts, sizes, groups, left_out)

    def compare(self, recording: Recording) -> GoldenComparison:
        """Where a run is unlike the golden runs, in the steps and tensors that both have.

        At most one healthy run in 20 is called unlike. Tensors are matched as by `gradstat.monitor.recording.compare`,
        and named without the prefixes of wrappers.

        Args:
            recording: The run.

        Raises:
            ValueError: The run has all steps of no window of the golden runs.
        """
        run = unwrapped(recording)
        covered = np.flatnonzero(statistics.covered_windows(run.steps, self._starts))
        if not len(covered):
            raise ValueError(
                f"recording: it has {steps_in_words(extent_of(run))}, which hold no window of the golden runs as a "
                f"whole; record the run from step 0 on, as they were, for at most {self.steps:,} steps"
            )
        values = statistics.averages(run, self._starts, self._sizes)
        values = {key: value for key, value in values.items() if key in self._groups}
        left_out = self._without_noise(values, covered) if _NORMS in values else ()
        excess = {key: self._groups[key].excess(value) for key, value in values.items()}
        kinds = dict.fromkeys(kind for kind, _ in values)
        residuals = {kind: self._residuals(kind, values, excess) for kind in kinds}
        findings = sorted(
            (
                self._deviation(kind, j, int(np.argmax(of_kind.excess[:, j] > 1)), values, excess)
                for kind, of_kind in residuals.items()
                for j in np.flatnonzero((of_kind.excess > 1).any(0)).tolist()
            ),
            key=_order,
        )
        where, what = "", ""
        if findings:
            where, what = explained(residuals, int(np.searchsorted(self._starts, findings[0].step)))
        return GoldenComparison(
            self.runs,
            (int(self._starts[covered[0]]), int(self._starts[covered[-1] + 1]) - 1),
            tuple(findings),
            where,
            what,
            tuple(self._structure(run)),
            (*self.left_out, *left_out),
        )

    def _without_noise(self, values: Mapping[Key, Floats], covered: npt.NDArray[np.int64]) -> tuple[str, ...]:
        """Makes gradients of ``values`` NaN that are rounding noise; returns the names of those that always are.

        Rounding noise in this run alone means that its precision is higher, if the golden values are small as well.
        """
        names, expected = tuple(self._sizes["gradient"]), self._groups[_NORMS].mean
        small = statistics.noise_in(names, expected[covered], statistics.NOISE_OF_HALF)
        left_out = tuple(name for name in statistics.noise_in(names, values[_NORMS]) if name in small)
        statistics.leave_out(values, self._sizes, left_out)
        cells = statistics.noise_cells(expected, values[_NORMS])
        for (kind, _), value in values.items():
            if kind == "gradient":
                value[cells] = np.nan
        return left_out

    def _names(self, kind: str) -> tuple[str, ...]:
        return tuple(self._sizes.get(kind, (kind,)))

    def _residuals(self, kind: str, values: Mapping[Key, Floats], excess: Mapping[Key, Floats]) -> Residuals:
        """How the tensors of a kind deviate."""
        keys = [key for key in values if key[0] == kind]
        change = values[keys[0]] - self._groups[keys[0]].mean
        change = np.where(np.isinf(change), np.nan, change)
        return Residuals(self._names(kind), functools.reduce(np.fmax, (excess[key] for key in keys)), change)

    def _deviation(
        self, kind: str, j: int, window: int, values: Mapping[Key, Floats], excess: Mapping[Key, Floats]
    ) -> Deviation:
        """The deviation of tensor ``j`` of a kind: of the feature that deviates most in ``window``."""
        cell = window, j
        key = max((key for key in values if key[0] == kind), key=lambda key: np.nan_to_num(excess[key][cell]))
        group, told, is_tensor = self._groups[key], _TOLD.get(key[1], float), kind in self._sizes
        value, expected = float(values[key][cell]), float(group.mean[cell])
        half = float(group.scale[cell]) * group.reach
        return Deviation(
            kind if is_tensor else "series",
            self._names(kind)[j],
            "absent" if math.isinf(value) else key[1] if is_tensor else "value",
            int(self._starts[window]),
            int(self._starts[window + 1]) - 1,
            told(value),
            told(expected),
            told(expected - half),
            told(expected + half),
            math.copysign(float(excess[key][cell]) * group.limit, value - expected),
        )

    def _structure(self, run: Recording) -> Iterator[str]:
        """Sentences about tensors that only one side has, or that have another size."""
        for kind, expected in self._sizes.items():
            if kind in run.tables:
                sizes = run.tables[kind].sizes
                yield from one_sided(plural_of(kind), expected, sizes, ("golden runs", "run"))
                yield from differing_sizes(kind, expected, sizes)

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
            "sizes": self._sizes,
            "groups": [
                {"kind": kind, "feature": feature, "freedom": group.freedom, "limit": group.limit}
                for (kind, feature), group in self._groups.items()
            ],
        }
        arrays = {}
        for i, group in enumerate(self._groups.values()):
            for name, values in (("mean", group.mean), ("scale", group.scale)):  # windows in sequence compress better
                arrays[f"{i}/{name}"] = np.ascontiguousarray(values.T, "<f8")
        return write(path, FORMAT, VERSION, header, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Golden:
        """Reads what `save` wrote. The file may be untrusted, as that of a recording.

        Args:
            path: The file.

        Raises:
            RecordingFileError: The file holds no golden runs, is damaged, or has another version.
            OSError: The file cannot be opened.
        """
        return opened(path, FORMAT, VERSION, LIMIT, cls._read)

    @classmethod
    def _read(cls, reader: archive.Reader, header: dict[str, Any]) -> Golden:
        require(header, _HEADER, archive.HEADER)
        starts = np.array(header["starts"], np.int64)
        if len(starts) < 2 or starts[0] != 0 or (np.diff(starts) <= 0).any():
            raise ValueError("the steps in which its windows begin are not 0 and rising")
        sizes, groups = header["sizes"], {}
        for i, entry in enumerate(header["groups"]):
            kind, freedom, limit = entry["kind"], entry["freedom"], entry["limit"]
            mean, scale = (reader.array(f"{i}/{name}", "<f8").T for name in ("mean", "scale"))
            windows, count = len(starts) - 1, len(sizes.get(kind, [kind]))
            if not mean.shape == scale.shape == (windows, count):
                raise ValueError(f"its groups have other shapes than {windows} windows of {count} tensors")
            if not (freedom >= 1 and limit > 0) or (scale <= 0).any():
                raise ValueError(f"a group has {freedom} degrees of freedom, a limit of {limit} or a scale of 0")
            groups[kind, entry["feature"]] = Group(mean, scale, freedom, limit)
        return cls(header["runs"], starts, sizes, groups, tuple(header["left_out"]))


def _order(found: Deviation) -> tuple[int, float, float]:
    """Findings by step; within a step causes before effects, then what deviates most."""
    if found.kind == "series":
        place = place_of_series(found.name)
    elif found.step and kind_of(found.kind).name in ("update", "parameter", "buffer"):
        place = place_of(STATE.name) + 1.0  # what a parameter is after the first step is an effect of gradients
    else:
        place = float(place_of(found.kind))
    return found.step, place, -abs(found.z)
