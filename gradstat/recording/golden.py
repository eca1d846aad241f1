"""`Golden`: the statistics of a few healthy runs. `GoldenComparison`: how another run deviates from them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstat._core.saved import COUNT, TEXT, require, whole
from gradstat._core.text import expect, lines_of, listed, printable, steps_in_words
from gradstat.recording import archive
from gradstat.recording import golden_statistics as statistics
from gradstat.recording.alignment import differing_sizes, one_sided, unwrapped
from gradstat.recording.explanation import Residuals, explained
from gradstat.recording.file import opened, write
from gradstat.recording.golden_statistics import Interval, Key, Sizes
from gradstat.recording.kinds import place_of, place_of_series, plural_of
from gradstat.recording.recording import Recording, extent_of

FEWEST = 3
FORMAT = "gradstat golden"
_HEADER = {
    "runs": whole(FEWEST),
    "starts": [COUNT],
    "left_out": [TEXT],
    "sizes": {str: {str: COUNT}},
    "intervals": [[TEXT]],
}


@dataclass(frozen=True, slots=True)
class Deviation:
    """Where one tensor or series is first unlike the golden runs.

    Attributes:
        kind: As in `Recording.tables`, or ``"series"``.
        name: Name of the tensor or series, without the prefixes of wrappers.
        feature: What is unlike: ``"norm"``, ``"peak"`` (the largest magnitude over the root mean square), ``"mean"``
            (over the root mean square), ``"zeros"`` (the share of elements that are 0), ``"value"`` of a series,
            ``"absent"``: only the golden runs have it, or ``"nonfinite"``: it is NaN or infinite.
        step, last: The first and last step of the window over which it is averaged.
        value: The average of the feature over that window; infinite if absent or not finite.
        expected, low, high: The average of the golden runs, and the interval outside of which it is unlike.
        excess: The distance of the value from the middle of the interval over half of its width; infinite as ``value``.
    """

    kind: str
    name: str
    feature: str
    step: int
    last: int
    value: float
    expected: float
    low: float
    high: float
    excess: float

    def __str__(self) -> str:
        what = self.name if self.kind == "series" else f"{self.kind} of {self.name}"
        if math.isinf(self.value):
            problem = "absent, but present" if self.feature == "absent" else "not finite, but finite"
            return printable(f"{what}: {problem} in all golden runs")
        what += f", {self.feature}" if self.feature != "value" else ""
        average = " on average" * (self.last > self.step)
        numbers = f"{self.value:.4g}{average} instead of {self.expected:.4g} ({self.low:.4g} to {self.high:.4g})"
        return printable(f"{what}: {numbers}")


@dataclass(frozen=True)
class GoldenComparison:
    """How a run compares with golden runs.

    Attributes:
        runs: Number of golden runs.
        steps: First and last step that were compared.
        findings: What is unlike: the earliest first, then what is nearest to the cause.
        where: The place in words: ``"everywhere"``, a module, or a kind of modules.
        what: What kind of change it is, in words; empty if not known.
        structure: Sentences about tensors that only the run or only the golden runs have; these are not compared.
        left_out: Parameters that are not compared, because their gradients are rounding noise.
        comparable: Whether anything was compared, and if the golden runs have tensors, some of them; or it is unlike.
    """

    runs: int
    steps: tuple[int, int]
    findings: tuple[Deviation, ...]
    where: str
    what: str
    structure: tuple[str, ...]
    left_out: tuple[str, ...]
    comparable: bool

    @property
    def ok(self) -> bool:
        """Whether the run is like the golden ones in all that both have, of which there is something."""
        return self.comparable and not self.findings

    def __str__(self) -> str:
        lines = [printable(f"Structure: {line}") for line in self.structure]
        if not self.comparable:
            lines.append(
                "Cannot tell: the run and the golden runs have no tensor name in common, or the run has only scalars"
            )
        elif self.ok:
            lines.append(f"Like the {self.runs} golden runs in {steps_in_words(self.steps)}")
        else:
            at = self.findings[0]
            when = f"step {at.step}" if at.step == at.last else f"a step between {at.step} and {at.last}"
            lines.append(printable(f"Unlike the {self.runs} golden runs since {when}, {self.where}: {self.what}"))
            first = [deviation for deviation in self.findings if deviation.step == at.step]
            later = [f"  later, in step {deviation.step}: {deviation}" for deviation in self.findings[len(first) :]]
            lines += lines_of(first, 8, "  {}".format, "  ... and {} more in these steps")
            lines += lines_of(later, 3, str, "  ... and {} more later")
        if self.left_out:
            lines.append(f"Left out as rounding noise: {listed(self.left_out, 5)}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False, eq=False)
class Golden:
    """What a comparison needs to know about golden runs, without the runs themselves. Made by `of` or `load`.

    Attributes:
        runs: Number of golden runs.
        left_out: Parameters that are never compared, because their gradients are rounding noise.
        steps: Number of steps that are compared.
    """

    runs: int
    left_out: tuple[str, ...]
    _starts: npt.NDArray[np.int64]
    _sizes: Sizes
    _intervals: Mapping[Key, Interval]

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
        expect("recordings", recordings, Iterable, "several recordings")
        golden = [unwrapped(recording, "recordings") for recording in recordings]
        if len(golden) < FEWEST:
            raise ValueError(f"recordings: expected at least {FEWEST} golden runs (5 are advised), got {len(golden)}")
        starts = statistics.window_starts(min(int(run.steps[-1]) + 1 if len(run.steps) else 0 for run in golden))
        sizes = {kind: series.sizes for kind, series in golden[0].tables.items() if statistics.features_of(kind)}
        rates = statistics.rates_of_groups(name for run in golden for name in run.scalars)
        runs = [statistics.averages(run, starts, sizes, rates) for run in golden]
        of_gradients = (run["gradient", "norm"] for run in runs if ("gradient", "norm") in run)
        noise = [name for norms in of_gradients for name in statistics.noise_in(tuple(sizes["gradient"]), norms)]
        left_out = tuple(dict.fromkeys(noise))
        for run in runs:
            for (kind, _), value in run.items():
                value[:, [name in left_out for name in sizes.get(kind, (kind,))]] = np.nan
        # The logarithm of a loss that is never negative is compared, else the loss.
        is_signed = any((np.asarray(run.scalars.get("loss", 1)) <= 0).any() for run in golden)
        unused = ("loss", "log" if is_signed else "value")
        shared = [key for key in runs[0] if key != unused and all(key in run for run in runs)]
        intervals = statistics.intervals({key: np.stack([run[key] for run in runs]) for key in shared}, sizes)
        if not intervals:
            raise ValueError("recordings: the golden runs have no steps in common; record all from the same step on")
        return cls(len(golden), left_out, starts, sizes, intervals)

    def compare(self, recording: Recording) -> GoldenComparison:
        """Where a run is unlike the golden runs, in the steps and tensors that both have.

        At most one healthy run in 20 is called unlike. Tensors are matched as by `gradstat.recording.compare`,
        and named without the prefixes of wrappers.

        Args:
            recording: The run.

        Raises:
            ValueError: The run has all steps of no window of the golden runs.
        """
        run = unwrapped(recording, "recording")
        covered = np.flatnonzero(statistics.covered_windows(run.steps, self._starts))
        if not len(covered):
            raise ValueError(
                f"recording: it has {steps_in_words(extent_of(run))}, which hold no window of the golden runs as a "
                f"whole; record the run from step 0 on, as they were, for at most {self.steps:,} steps"
            )
        rates = statistics.rates_of_groups(name for name, _ in self._intervals)
        values = statistics.averages(run, self._starts, self._sizes, rates)
        intervals = dict(self._intervals)
        if ("lr", "log") in intervals:  # groups with other rates, which the golden runs have not
            intervals |= {
                (name, "log"): intervals["lr", "log"] for name in statistics.rates_of_groups(run.scalars) - rates
            }
        excess = {key: np.abs(values[key] - mean) / half for key, (mean, half) in intervals.items() if key in values}
        residuals, findings = {}, []
        for kind in dict.fromkeys(kind for kind, _ in excess):
            keys = [key for key in excess if key[0] == kind]
            each, names = np.stack([excess[key] for key in keys]), tuple(self._sizes.get(kind, (kind,)))
            change = values[keys[0]] - intervals[keys[0]].mean
            residuals[kind] = Residuals(names, np.fmax.reduce(each, 0), change)
            for j in np.flatnonzero((each > 1).any((0, 1))).tolist():
                window = int(np.argmax((each[:, :, j] > 1).any(0)))
                key = keys[int(np.nanargmax(each[:, window, j]))]
                findings.append(
                    self._deviation(key, intervals[key], names[j], window, j, float(values[key][window, j]))
                )
        findings.sort(key=_order)
        compared = {kind for (kind, _), of_key in excess.items() if not np.isnan(of_key).all()}
        structure: list[str] = []
        for kind, expected in self._sizes.items():
            if kind in run.tables:
                sizes = run.tables[kind].sizes
                structure += one_sided(plural_of(kind), expected, sizes, ("golden runs", "run"))
                structure += differing_sizes(kind, expected, sizes)
        where, what = "", ""
        if findings:
            where, what = explained(residuals, int(np.searchsorted(self._starts, findings[0].step)))
        return GoldenComparison(
            self.runs,
            (int(self._starts[covered[0]]), int(self._starts[covered[-1] + 1]) - 1),
            tuple(findings),
            where,
            what,
            tuple(structure),
            self.left_out,
            bool(findings or compared & (self._sizes.keys() & {kind for kind, _ in intervals} or compared)),
        )

    def _deviation(self, key: Key, interval: Interval, name: str, window: int, j: int, value: float) -> Deviation:
        (kind, feature), is_tensor = key, key[0] in self._sizes
        middle, half = (float(of_cells[window, j]) for of_cells in interval)
        return Deviation(
            kind if is_tensor else "series",
            name,
            {math.inf: "absent", -math.inf: "nonfinite"}.get(value, feature if is_tensor else "value"),
            int(self._starts[window]),
            int(self._starts[window + 1]) - 1,
            math.inf if math.isinf(value) else statistics.as_printed(feature, value),
            statistics.as_printed(feature, middle),
            statistics.as_printed(feature, middle - half),
            statistics.as_printed(feature, middle + half),
            abs(value - middle) / half,
        )

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
            "intervals": list(self._intervals),
        }
        arrays = {
            str(i): np.array([interval.mean.T, interval.half.T], "<f8")  # windows in sequence compress better
            for i, interval in enumerate(self._intervals.values())
        }
        return write(path, FORMAT, header, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Golden:
        """Reads what `gradstat.recording.save` wrote. The file may be untrusted, as that of a recording.

        Args:
            path: The file.

        Raises:
            RecordingFileError: The file holds no golden runs, is damaged, or has another version.
            OSError: The file cannot be opened.
        """
        return opened(path, FORMAT, cls._read)

    @classmethod
    def _read(cls, reader: archive.Reader, header: dict[str, Any]) -> Golden:
        require(header, _HEADER, archive.HEADER)
        starts = np.array(header["starts"], np.int64)
        if len(starts) < 2 or starts[0] != 0 or (np.diff(starts) <= 0).any():
            raise ValueError("the steps in which its windows begin are not 0 and rising")
        sizes, intervals = header["sizes"], {}
        for i, (kind, feature) in enumerate(header["intervals"]):
            values = reader.array(str(i), "<f8")
            windows, count = len(starts) - 1, len(sizes.get(kind, [kind]))
            if values.shape != (2, count, windows) or (values[1] <= 0).any():
                raise ValueError(f"its intervals are not positive and those of {windows} windows of {count} tensors")
            intervals[kind, feature] = Interval(values[0].T, values[1].T)
        return cls(header["runs"], tuple(header["left_out"]), starts, sizes, intervals)


def _order(found: Deviation) -> tuple[int, float, float]:
    """Findings by step; within a step causes before effects, then what deviates most."""
    place = place_of_series(found.name) if found.kind == "series" else float(place_of(found.kind))
    if found.step and found.kind in ("parameter", "buffer"):
        place = place_of("update") + 1.0  # what a parameter is after the first step is an effect of gradients
    return found.step, place, -found.excess
