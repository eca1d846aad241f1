"""`Golden`: what is kept of a few healthy runs for comparisons, and how another run deviates from them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradstat._core.files import replacing
from gradstat._version import __version__
from gradstat.monitor.kinds import kind_of, place_of, plural_of
from gradstat.monitor.recording import archive
from gradstat.monitor.recording.alignment import one_sided, sizes, unwrapped
from gradstat.monitor.recording.explanation import Unlike, explained
from gradstat.monitor.recording.file import load, opened
from gradstat.monitor.recording.golden_comparison import Deviation, GoldenComparison
from gradstat.monitor.recording.golden_statistics import (
    PACKED,
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
    packed,
    places,
    rounded,
    taken,
    unpacked,
    window_starts,
)
from gradstat.monitor.recording.page_data import GoldenBands
from gradstat.monitor.recording.recording import Recording

FEWEST = 3
FORMAT = "gradstat golden"
VERSION = (1, 0)
LIMIT = 64 << 20


def _as_it_is(value: float) -> float:
    return value


# How the averages of features are told: those of logarithms are geometric means.
_TOLD: dict[str, Callable[[float], float]] = {
    "norm": exponential,
    "log": exponential,
    "peak": lambda value: 1 / max(-value, 1e-6),
}


class Tensors(NamedTuple):
    """The tensors of one kind: ``[n]`` names and numbers of elements."""

    names: tuple[str, ...]
    numel: npt.NDArray[np.int64]


class Golden:
    """What a comparison with golden runs needs: no run is kept. Made by `of` or `load`.

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
        tensors: Mapping[str, Tensors],
        groups: Mapping[Key, Group],
        left_out: tuple[str, ...],
        meta: Mapping[str, Any],
    ) -> None:
        self.runs, self.left_out, self.meta = runs, left_out, dict(meta)
        self._starts, self._tensors, self._groups = starts, dict(tensors), dict(groups)
        self._names = {kind: one.names for kind, one in self._tensors.items()}
        self._names |= {kind: (kind,) for kind, _ in self._groups if kind not in self._names}

    @property
    def steps(self) -> int:
        return int(self._starts[-1])

    @classmethod
    def of(cls, recordings: Iterable[Recording | str | os.PathLike[str]]) -> Golden:
        """What at least three healthy runs have in common, and how much they differ; five are advised.

        Args:
            recordings: Of runs that differ in nothing but the seed, or their files. What all have is compared.

        Raises:
            ValueError: There are fewer than three, or they have no window of steps in common.
            RecordingFileError, OSError: A file cannot be read.
        """
        given = [unwrapped(_recording(one)) for one in recordings]
        if len(given) < FEWEST:
            raise ValueError(f"recordings: expected at least {FEWEST} golden runs (5 are advised), got {len(given)}")
        starts = window_starts(min(int(one.steps[-1]) + 1 if len(one.steps) else 0 for one in given))
        tensors: dict[str, Tensors] = {}
        for kind, series in given[0].tables.items():
            if features_of(kind) and all(kind in one.tables for one in given):
                common = set.intersection(*(set(one.tables[kind].names) for one in given))
                at = [i for i, name in enumerate(series.names) if name in common]
                tensors[kind] = Tensors(tuple(series.names[i] for i in at), series.numel[at])
        made = [averages(one, starts) for one in given]
        names = {kind: (kind,) for kind in made[0].names if kind not in given[0].tables}
        runs = [one.of(names | {kind: one.names for kind, one in tensors.items()}) for one in made]
        left_out = tuple(dict.fromkeys(name for run in runs for name in run.rounding_noise()[0]))
        values = [run.without(left_out).values for run in runs]
        for name in names:  # the logarithm of a loss that is never negative, else the loss
            is_signed = name == "loss" and any((np.asarray(one.scalars.get(name, 1)) <= 0).any() for one in given)
            for value in values:
                value.pop((name, "log" if is_signed else "value"), None)
        values = [{key: value[key] for key in value if all(key in other for other in values)} for value in values]
        numels = {kind: one.numel.astype(np.float64) for kind, one in tensors.items()}
        groups = fitted(values, numels)
        if not groups:
            raise ValueError("recordings: the golden runs have no steps in common; record all from the same step on")
        inflation = inflation_of(values, numels)
        groups = {key: rounded(replace(group, scale=group.scale * inflation)) for key, group in groups.items()}
        return cls(len(runs), starts, tensors, groups, left_out, given[0].meta)

    def last_complete(self, steps: int) -> int:
        """The end of the last window that is complete after so many steps."""
        return int(self._starts[np.searchsorted(self._starts, steps, "right") - 1])

    def covers(self, recording: Recording) -> bool:
        """Whether the recording has any window of steps as a whole."""
        return bool(covered_windows(recording.steps, self._starts).any())

    def compare(self, recording: Recording | str | os.PathLike[str]) -> GoldenComparison:
        """Where a run is unlike the golden runs, in the steps and tensors that both have.

        At most one healthy run in 20 is called unlike. Tensors are matched as by `gradstat.monitor.recording.compare`.

        Args:
            recording: The run, or its file.

        Raises:
            ValueError: It has no window of steps of the golden runs as a whole.
            RecordingFileError, OSError: The file cannot be read.
        """
        given = _recording(recording)
        bare = unwrapped(given)
        run = averages(bare, self._starts).of({kind: self._comparable(kind, bare) for kind in self._names})
        seen = np.flatnonzero(run.covered)
        if not len(seen):
            raise ValueError(
                f"recording: {_extent(given)}, which holds no window of the golden runs as a whole; record the run "
                f"from step 0 on, as they were, for at most {self.steps:,} steps"
            )
        # What is rounding noise only in this run is in a higher precision, if it is small in the golden runs as well.
        left_out: tuple[str, ...] = ()
        if ("gradient", "norm") in self._groups:
            expected = self._groups["gradient", "norm"].mean[run.covered]
            small = noise_in(self._names["gradient"], expected)[1]
            left_out = tuple(name for name in run.rounding_noise()[0] if name in small)
            run = run.without(left_out)
            if ("gradient", "norm") in run.values:
                cells = noise_cells(self._groups["gradient", "norm"].mean, run.values["gradient", "norm"])
                for key in self._keys("gradient", run):
                    run.values[key][cells] = np.nan
        unlike = {kind: one for kind in self._names if (one := self._unlike(kind, run)) is not None}
        findings = [
            self._deviation(kind, j, int(np.argmax(one.excess[:, j] > 1)), run)
            for kind, one in unlike.items()
            for j in np.flatnonzero((one.excess > 1).any(0)).tolist()
        ]
        findings.sort(key=_order)
        own = {kind: dict(zip(bare.tables[kind].names, one.names, strict=True)) for kind, one in given.tables.items()}
        named = tuple(replace(one, name=own.get(one.kind, {}).get(one.name, one.name)) for one in findings)
        where, what = "", ""
        if findings:
            where, what = explained(unlike, int(np.searchsorted(self._starts, findings[0].step)))
        compared = sum(int((~np.isnan(one.excess)).any(0).sum()) for one in unlike.values())
        return GoldenComparison(
            self.runs,
            (int(self._starts[seen[0]]), int(self._starts[seen[-1] + 1]) - 1),
            named,
            where,
            what,
            len(findings) / max(1, compared),
            tuple(self._structure(bare)),
            (*self.left_out, *left_out),
            given,
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
        """What is told of tensor ``j`` of a kind: the feature that deviates most in ``window``."""

        def column(values: Floats) -> Floats:
            return values[window : window + 1, j]

        def excess(key: Key) -> float:
            group, value = self._groups[key], column(run.values[key])
            part = replace(group, mean=column(group.mean), scale=column(group.scale))
            return float(np.nan_to_num(part.excess(value))[0])

        key = max(self._keys(kind, run), key=excess)
        group, told = self._groups[key], _TOLD.get(key[1], _as_it_is)
        value, expected, half = (float(column(x)[0]) for x in (run.values[key], group.mean, group.scale * group.reach))
        is_absent, is_tensor = bool(run.absent[kind][window, j]), kind in self._tensors
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
        for kind, one in self._tensors.items():
            if kind in run.tables:
                series, plural = run.tables[kind], plural_of(kind)
                yield from one_sided(plural, one.names, series.names, ("golden runs", "run"))
                yield from sizes(kind, one, series)

    def _comparable(self, kind: str, run: Recording) -> tuple[str, ...]:
        """The names of a kind, without those of tensors that have another size in the run."""
        names, series = self._names[kind], run.tables.get(kind)
        if series is None or kind not in self._tensors or kind_of(kind).sizes_vary:
            return names
        expected = self._tensors[kind].numel
        if series.names == names and np.array_equal(series.numel, expected):
            return names
        numel = dict(zip(series.names, series.numel.tolist(), strict=True))
        pairs = zip(names, expected.tolist(), strict=True)
        return tuple(name if numel.get(name, 0) in (0, n) else "" for name, n in pairs)

    def _bands(self, bare: Recording, unlike: Mapping[str, Unlike]) -> GoldenBands:
        bands = {}
        for (kind, feature), group in self._groups.items():
            if kind not in self._tensors:
                half = group.scale * group.reach
                ends = np.concatenate([group.mean - half, group.mean + half], 1)
                bands[kind] = np.vectorize(_TOLD.get(feature, _as_it_is))(ends)
        deviation = {}
        for kind, one in unlike.items():
            if kind in bare.tables:
                deviation[kind] = taken(one.excess, places(one.names, bare.tables[kind].names), np.nan)
        return GoldenBands(self._starts, bands, deviation)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes what a comparison needs as one file; replaces an existing file atomically.

        Args:
            path: Where, by convention ``golden.gradstat``. Missing folders are made.

        Returns:
            ``path``.

        Raises:
            OSError: The file cannot be written; nothing is left behind.
        """
        header = {
            "format": FORMAT,
            "version": list(VERSION),
            "gradstat": __version__,
            "runs": self.runs,
            "starts": self._starts.tolist(),
            "left_out": list(self.left_out),
            "tensors": [{"kind": kind, "names": list(one.names)} for kind, one in self._tensors.items()],
            "groups": [
                {"kind": kind, "feature": feature, "freedom": group.freedom, "limit": group.limit}
                for (kind, feature), group in self._groups.items()
            ],
            "meta": self.meta,
        }
        arrays: dict[str, npt.NDArray[Any]] = {}
        for i, one in enumerate(self._tensors.values()):
            arrays[f"tensors/{i}/numel"] = np.asarray(one.numel, "<i8")
        for i, group in enumerate(self._groups.values()):
            arrays |= {f"groups/{i}/{name}": array for name, array in packed(group).items()}
        target = Path(path)
        with replacing(target) as file:
            archive.write(file, header, arrays)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Golden:
        """Reads what `save` wrote. The file may be untrusted, as that of a recording.

        Args:
            path: The file.

        Raises:
            RecordingFileError: It holds no golden runs, is damaged, or a newer gradstat wrote it.
            OSError: It cannot be opened.
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
        tensors, groups = {}, {}
        for i, one in enumerate(header["tensors"]):
            kind, names = *archive.texts([one["kind"]]), archive.texts(one["names"])
            tensors[kind] = Tensors(names, reader.array(f"tensors/{i}/numel", "<i8"))
            if tensors[kind].numel.shape != (len(names),):
                raise ValueError(f"the sizes of its {kind} are not one for each name")
        for i, one in enumerate(header["groups"]):
            kind, feature = archive.texts([one["kind"], one["feature"]])
            shape = len(starts) - 1, len(tensors[kind].names) if kind in tensors else 1
            read = {name: reader.array(f"groups/{i}/{name}", dtype) for name, dtype in PACKED.items()}
            groups[kind, feature] = unpacked(read, shape, float(one["freedom"]), float(one["limit"]))
        return cls(runs, starts, tensors, groups, archive.texts(header["left_out"]), dict(header["meta"]))

    def __repr__(self) -> str:
        return f"Golden({self.runs} runs, {self.steps} steps)"


def _recording(given: Recording | str | os.PathLike[str]) -> Recording:
    return given if isinstance(given, Recording) else load(given)


def _extent(recording: Recording) -> str:
    steps = recording.steps
    return f"it has steps {steps[0]} to {steps[-1]}" if len(steps) else "it has no steps"


def _order(found: Deviation) -> tuple[int, float, float]:
    """Findings by step; within a step causes before effects, then what deviates most."""
    if found.kind == "series":
        place = place_of("gradient") - 0.5 if found.name == "loss" else -1.0
    elif found.step and kind_of(found.kind).name in ("parameter", "buffer"):
        place = place_of("update") + 1.0  # what a parameter is after the first step is an effect of gradients
    else:
        place = float(place_of(found.kind))
    return found.step, place, -abs(found.z)
