"""Rules about batches, and about differences between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gradstat.monitor.findings import Finding, Severity
from gradstat.monitor.rows import Rows, RunSettings, Window
from gradstat.monitor.rules.base import Episodes, Rule


class BatchRange(Rule):
    """Inputs far outside of their previous range: not normalised, in another unit, or damaged.

    Args:
        factor: Largest magnitude over the largest one before.
        measurements: Minimum number of earlier measurements.
    """

    name = "batch-range"
    causes = ("inputs normalised twice or not at all", "another data set, unit or encoding", "a damaged file")
    advice = ("look at the samples with the extreme values", "normalise and clip inputs in the data loader")

    def __init__(self, factor: float = 100.0, measurements: int = 20) -> None:
        self.factor, self.measurements = factor, measurements
        self._largest: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._episodes = Episodes()

    def review(self, window: Window) -> Iterable[Finding]:
        rows = window.rows("batch")
        if rows is None:
            return
        for row, step in enumerate(rows.steps.tolist()):
            for i, name in enumerate(rows.names):
                value = float(rows.max_abs[row, i])
                if not np.isfinite(value):
                    continue
                most, seen = self._largest.get(name, 0.0), self._seen.get(name, 0)
                if seen >= self.measurements and 0 < most * self.factor < value and self._episodes.record(name, step):
                    text = f"the largest magnitude in {name} is {value:.3g}; before it was at most {most:.3g}"
                    yield self.found(step, name, text, about="batch", largest=value, before=most)
                else:
                    self._largest[name] = max(most, value)
                self._seen[name] = seen + 1


class ConstantFeature(Rule):
    """Features that are the same in every sample of a batch.

    Most features of sparse inputs are constant, so a tensor that is mostly zeros only counts if all of its features
    are. A tensor of a single value never counts: it is a mask or the like.

    Args:
        share: Fraction of features.
        measurements: Number of measurements in a row.
    """

    name = "constant-feature"
    causes = ("columns that were filled with a default, or lost in preprocessing", "one sample repeated many times")
    advice = ("look at these features in the data loader's output", "leave constant columns out")

    def __init__(self, share: float = 0.9, measurements: int = 3) -> None:
        self.share, self.measurements = share, measurements
        self._run: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._episodes = Episodes(quiet=1000)

    def review(self, window: Window) -> Iterable[Finding]:
        rows = window.rows("constant")
        if rows is None:
            return
        for row, step in enumerate(rows.steps.tolist()):
            for i, name in enumerate(rows.names):
                share = float(rows.mean[row, i])
                is_constant = share > self.share and not _is_naturally_constant(window.rows("batch"), step, name, share)
                self._run[name] = self._run.get(name, 0) + 1 if is_constant else 0
                if self._run[name] == 1:
                    self._since[name] = step
                if self._run[name] == self.measurements and self._episodes.record(name, step):
                    text = f"{share:.0%} of the features of {name} are the same in every sample of a batch"
                    yield self.found(self._since.get(name, step), name, text, about="batch", share=share)


def _is_naturally_constant(batches: Rows | None, step: int, name: str, share: float) -> bool:
    if batches is None or name not in batches.names or step not in batches.steps:
        return False
    row, i = int(np.searchsorted(batches.steps, step)), batches.names.index(name)
    has_one_value = bool(batches.field("min")[row, i] == batches.field("max")[row, i])
    return has_one_value or (share < 1 and bool(batches.zero_fraction[row, i] > 0.5))


class LabelRange(Rule):
    """Integer labels that are not among the classes."""

    name = "label-out-of-range"
    severity = "error"
    causes = (
        "labels that count from 1, or a number of classes that is too small",
        "a padding value other than the loss's ignore_index",
    )
    advice = ("compare labels with the number of outputs before training", "pass the right ignore_index to the loss")

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("label"):
            name, low, high, classes = (seen.value[key] for key in ("name", "low", "high", "classes"))
            if self._episodes.record(name, seen.step):
                text = f"the labels {name} run from {low} to {high}; expected 0 to {classes - 1}"
                yield self.found(seen.step, name, text, about="batch", low=low, high=high, classes=classes)


class _RankRule(Rule):
    """Base of rules about a comparison of ranks; ``observed`` is the kind of its observations."""

    severity = "error"
    quiet = 1000
    observed = ""

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed(self.observed):
            if not seen.value.ok and self._episodes.record("", seen.step):
                yield self._finding(seen.step, seen.value, window.run)

    def _finding(self, step: int, report: Any, run: RunSettings) -> Finding:
        raise NotImplementedError


class RepeatedBatch(_RankRule):
    """Ranks that train on the same batch; needs ``watch={"batches": n}``."""

    name = "repeated-batch"
    observed = "batches"
    causes = ("data that is not divided among the ranks: no DistributedSampler, or one made with the wrong rank",)
    advice = ("use DistributedSampler(dataset)", "seed generators of random data differently on each rank")

    def _finding(self, step: int, report: Any, run: RunSettings) -> Finding:
        repeated = [list(ranks) for ranks in report.repeated]
        return self.found(step, "batch", str(report), about="batch", ranks=repeated)


class ReplicaMismatch(_RankRule):
    """Replicas whose parameters differ; needs ``watch={"replicas": n}``."""

    name = "replica-mismatch"
    observed = "replicas"
    causes = (
        "a rank that skipped or took a step alone, by a decision on the host that the other ranks did not make",
        "parameters changed outside of the optimizer, or a checkpoint loaded on some ranks",
        "memory that was overwritten on one rank",
    )
    advice = ("broadcast parameters from a good rank, or load a checkpoint", "decide on skips with all-reduced values")

    def _finding(self, step: int, report: Any, run: RunSettings) -> Finding:
        return self.found(step, report.drifted[0].name, str(report).removeprefix("gradstat: "), about="parameter")


class BadRank(_RankRule):
    """The rank that brought NaN or Inf into reduced gradients; needs ``watch={"origin": 1}``."""

    name = "bad-rank"
    observed = "origin"
    quiet = 1
    causes = ("a bad batch or bad memory on that rank: gradients of the other ranks were finite before the reduction",)
    advice = ("look at that rank's batch and log", "if it is always the same rank, suspect its hardware")

    def _finding(self, step: int, report: Any, run: RunSettings) -> Finding:
        names = list(report.nonfinite)  # without the prefix of DDP
        as_watched = {name.removeprefix("module."): name for name in run.backward_order}
        name = run.first_in_backward([as_watched.get(name, name) for name in names])
        severity: Severity = "info" if run.is_scaled else self.severity  # occasional overflows are normal
        ranks = sorted({report.rank_of(name) for name in names})
        return self.found(step, name, str(report).removeprefix("gradstat: "), "gradient", severity, ranks=ranks)
