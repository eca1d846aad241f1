"""`compare`: where two recordings diverge, bitwise and beyond a tolerance, and what diverges first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstat._core.text import as_number, lines_of, printable, steps_in_words
from gradstat.recording.alignment import Measured, measured_of, unwrapped
from gradstat.recording.archive import encoded
from gradstat.recording.findings import Finding
from gradstat.recording.recording import Recording, extent_of

TOLERANCE = 1e-3
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where one tensor or scalar diverges.

    Attributes:
        kind: As in `Recording.tables`, or ``"series"``.
        name: Name of the tensor or scalar.
        exact_step: The first step in which any bit of it differs.
        step: The first step in which it differs by more than the tolerance; None if it never does.
        column: The most telling column in that step (in ``exact_step`` if ``step`` is None), ``"l2_norm"`` for
            example; empty for a scalar.
        a, b: The values of ``column`` in that step.
    """

    kind: str
    name: str
    exact_step: int
    step: int | None
    column: str
    a: float
    b: float

    def __str__(self) -> str:
        what = self.name if self.kind == "series" else f"{self.kind} of {self.name}, {self.column}"
        return printable(f"{what}: {self.a:.6g} and {self.b:.6g}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `gradstat.recording.compare`.

    Attributes:
        tolerance: Relative differences up to it do not matter.
        steps_a, steps_b: First and last step of each recording; None if it is empty.
        common_steps: How many steps both have.
        exact_step: The first common step in which any bit differs; None if none does.
        step: The first common step in which anything differs by more than ``tolerance``; None if none does.
        divergences: Everything that differs in any bit, by step, with differences beyond the tolerance first; within a
            step in the order of computation (learning rate, then ``gradstat.recording.kinds.KINDS`` in order, the loss
            before the gradients and norms after them), tensors in the order of the model.
        structure: Sentences about kinds, names or sizes that only one recording has, which cannot be compared.
        findings_a, findings_b: Findings in the common steps that only this recording has.
        backward_first: Of the gradients that diverge in ``step``, the one that was complete first; None if not known.
    """

    tolerance: float
    steps_a: tuple[int, int] | None
    steps_b: tuple[int, int] | None
    common_steps: int
    exact_step: int | None
    step: int | None
    divergences: tuple[Divergence, ...]
    structure: tuple[str, ...]
    findings_a: tuple[Finding, ...]
    findings_b: tuple[Finding, ...]
    backward_first: str | None

    @property
    def comparable(self) -> bool:
        """Whether the recordings have a step in common."""
        return self.common_steps > 0

    @property
    def same(self) -> bool:
        """Whether the recordings have the same structure, and no number differs beyond the tolerance."""
        return self.comparable and self.step is None and not self.structure

    @property
    def first(self) -> tuple[Divergence, ...]:
        """What diverges in `step`, in the order of computation."""
        return tuple(d for d in self.divergences if self.step is not None and d.step == self.step)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values; NaN and Inf as text."""
        return dict(encoded({"same": self.same, "comparable": self.comparable, **asdict(self)}, strict=True))

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.comparable:
            at = self.first or tuple(p for p in self.divergences if p.exact_step == self.exact_step)
            lines += lines_of(at, _SHOWN, "  {}".format, "  ... and {} more in this step")
            if self.backward_first is not None:
                lines.append(f"  the first of these gradients in the backward pass: {printable(self.backward_first)}")
            later = [p for p in self.divergences if self.step is not None and p.step not in (None, self.step)]
            lines += [f"  later, in step {divergence.step}: {divergence}" for divergence in later[:3]]
        lines += [printable(f"Structure: {line}") for line in self.structure]
        for which, findings in (("first", self.findings_a), ("second", self.findings_b)):
            rest = f"... and {{}} more findings only in the {which}"
            lines += lines_of(findings, _SHOWN, f"Found only in the {which}: {{}}".format, rest)
        return "\n".join(lines)

    def _headline(self) -> str:
        if not self.comparable:
            return (
                f"The recordings cannot be compared: the first has {steps_in_words(self.steps_a)}, the second "
                f"{steps_in_words(self.steps_b)}, and no step is in both. Record the same steps of both runs"
            )
        steps = f"{self.common_steps:,} steps" if self.common_steps > 1 else "step"
        if self.step is not None:
            if self.steps_a and self.steps_b and self.step == max(self.steps_a[0], self.steps_b[0]):
                before = "the first common step, so they diverged in it, before it or in their initial state"
            elif self.exact_step == self.step:
                before = "bitwise equal before"
            else:
                before = f"bitwise different since step {self.exact_step}"
            return f"The runs diverge in step {self.step} by more than {self.tolerance:g} ({before}):"
        if self.exact_step is not None:
            return (
                f"The runs are bitwise different since step {self.exact_step}, but nowhere by more than "
                f"{self.tolerance:g}, in the {steps} that both have:"
            )
        end = "" if self.structure else "."
        return f"The runs do not diverge: bitwise equal in the {steps} that both have{end}"


def compare(a: Recording, b: Recording, tolerance: float = TOLERANCE) -> Comparison:
    """Finds where two runs diverge.

    NaN equals NaN; it always matters if only one value is finite, or if counts of NaN or Inf differ. Differences of
    norms are relative to the larger norm, of means and standard deviations to the tensor's root mean square, of
    extremes to the largest magnitude; those of fractions are absolute. A difference that could change the norm of all
    tensors of its kind by less than a ten-millionth is rounding. Tensors are matched by their names without what
    ``torch.compile``, DDP, FSDP and activation checkpointing add to them.

    Args:
        a, b: The recordings; the steps that both have are compared.
        tolerance: Relative differences above it matter. With 0, any bit does.

    Raises:
        ValueError: ``tolerance`` is negative or NaN.
    """
    if not as_number("tolerance", tolerance) >= 0:
        raise ValueError(f"tolerance must be a number of at least 0, not {tolerance}")
    a, b = unwrapped(a, "a"), unwrapped(b, "b")
    both, structure = measured_of(a, b)
    divergences = [divergence for measured in both for divergence in _divergences(measured, tolerance)]
    # The sort is stable: within a step they stay in the order of computation.
    divergences.sort(key=lambda p: (p.step is None, p.exact_step if p.step is None else p.step))
    step = min((p.step for p in divergences if p.step is not None), default=None)
    common = np.intersect1d(a.steps, b.steps)
    tensors = [p for p in divergences if step is not None and p.step == step and p.kind != "series"]
    # Only where several tensors, gradients first, diverge does the order of the backward pass matter.
    is_backward = len(tensors) > 1 and tensors[0].kind == "gradient"
    gradients = {p.name for p in tensors if is_backward and p.kind == "gradient"}
    return Comparison(
        tolerance,
        extent_of(a),
        extent_of(b),
        len(common),
        min((p.exact_step for p in divergences), default=None),
        step,
        tuple(divergences),
        structure,
        _only_in(a, b, common),
        _only_in(b, a, common),
        next((name for name in a.backward_order or b.backward_order if name in gradients), None),
    )


def _divergences(measured: Measured, tolerance: float) -> list[Divergence]:
    """The differences in one kind, in the order of the model."""
    if not len(measured.steps):
        return []
    differs = (measured.a != measured.b) & ~(np.isnan(measured.a) & np.isnan(measured.b))  # [m, n, columns]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        excess = np.abs(measured.a - measured.b) / measured.scale
    # One of the two is NaN or infinite, or the scale is 0.
    excess[differs & ~np.isfinite(excess)] = np.inf
    excess[~differs] = 0
    # Differences due to rounding do not matter, unless the tolerance is 0.
    matters = differs & ((excess > tolerance) if tolerance else True) & (measured.beyond_rounding | (tolerance == 0))
    divergences = []
    any_bit, any_matter = differs.any(2), matters.any(2)
    for j in np.flatnonzero(any_bit.any(0)):
        exact = int(np.argmax(any_bit[:, j]))
        at = int(np.argmax(any_matter[:, j])) if any_matter[:, j].any() else None
        i = exact if at is None else at
        # The column to name: one with an infinite difference, else the norm if it differs, else what differs most.
        of = (differs if at is None else matters)[i, j]
        c = int(np.argmax(np.where(of, excess[i, j], -1)))
        norm = measured.columns.index("l2_norm") if "l2_norm" in measured.columns else c
        c = norm if of[norm] and np.isfinite(excess[i, j, c]) else c
        divergences.append(
            Divergence(
                measured.kind,
                measured.names[j],
                int(measured.steps[exact]),
                None if at is None else int(measured.steps[at]),
                measured.columns[c],
                float(measured.a[i, j, c]),
                float(measured.b[i, j, c]),
            )
        )
    return divergences


def _only_in(one: Recording, other: Recording, common: npt.NDArray[np.int64]) -> tuple[Finding, ...]:
    """Findings in the common steps that the other recording lacks; evidence is not compared."""
    shared = set(common.tolist())
    others = {(finding.rule, finding.step, finding.name, finding.about) for finding in other.findings}
    return tuple(f for f in one.findings if f.step in shared and (f.rule, f.step, f.name, f.about) not in others)
