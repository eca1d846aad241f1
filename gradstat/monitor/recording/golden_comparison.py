"""`GoldenComparison`: how a run compares with golden runs, as text and as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from gradstat._core.text import lines_of, listed, printable, steps_in_words


@dataclass(frozen=True, slots=True)
class Deviation:
    """Where one tensor or series is first unlike the golden runs.

    Attributes:
        kind: As in `Recording.tables`, or ``"series"``.
        name: Name of the tensor or series, without the prefixes of wrappers.
        feature: What is unlike: ``"norm"``, ``"peak"`` (the largest magnitude over the root mean square), ``"mean"``
            (over the root mean square), ``"value"`` of a series, or ``"absent"``: only the golden runs have it.
        step, last: The first and last step of the window over which it is averaged.
        value: The average of the feature over that window; infinite if absent.
        expected, low, high: The average of the golden runs, and the interval outside of which it is unlike.
        excess: The distance of the value from the middle of the interval over half of its width; infinite if absent.
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
        what += f", {self.feature}" if self.feature not in ("value", "absent") else ""
        if self.feature == "absent":
            return printable(f"{what}: absent, and present in all golden runs")
        numbers = f"{self.value:.4g} instead of {self.expected:.4g} ({self.low:.4g} to {self.high:.4g})"
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
    """

    runs: int
    steps: tuple[int, int]
    findings: tuple[Deviation, ...]
    where: str
    what: str
    structure: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the run is like the golden ones in all that both have."""
        return not self.findings

    def __str__(self) -> str:
        lines = [printable(f"Structure: {line}") for line in self.structure]
        if self.ok:
            lines.append(f"Like the {self.runs} golden runs in {steps_in_words(self.steps)}")
        else:
            at = self.findings[0]
            when = steps_in_words((at.step, at.last))
            lines.append(printable(f"Unlike the {self.runs} golden runs since {when}, {self.where}: {self.what}"))
            first = [deviation for deviation in self.findings if deviation.step == at.step]
            later = [f"  later, in step {deviation.step}: {deviation}" for deviation in self.findings[len(first) :]]
            lines += lines_of(first, 8, "  {}".format, "  ... and {} more in these steps")
            lines += lines_of(later, 3, str, "  ... and {} more later")
        if self.left_out:
            lines.append(f"Left out as rounding noise: {listed(self.left_out, 5)}")
        return "\n".join(lines)
