"""Rules about batches, and about differences between ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gradstat.recording.findings import Finding, Severity
from gradstat.recording.kinds import INPUT_KINDS
from gradstat.rules.base import LastingRule, RowsRule, Rule, bounded, carried, median
from gradstat.rules.rows import Floats, Rows, RunSettings, Window

_STATISTICS = ("number of elements of ", "mean of ", "standard deviation of ", "largest magnitude of ")
_COUNT, _, _SPREAD, _LARGEST = _STATISTICS
# So many measurements tell the range of a statistic. What lies beyond it by its width, and by this part of its larger
# end, in so many measurements in a row is another input. A largest magnitude so many times that before is told at once,
# and a number of elements if it falls to this part of the smallest.
_KNOWN, _MARGIN, _LASTS, _FACTOR, _FEWER = 20, 0.01, 16, 100.0, 0.25
_SAMPLES, _LOOKS = "number of samples of ", 4
# No initialisation expects inputs that are all smaller than these: a largest magnitude, and a standard deviation. Of
# some input of 44 public programs the latter is 0.2 or more.
_TINY, _NARROW = 0.05, 0.005
# Inputs of 85 public programs have 70 at most: pixels from 0 to 255.
_RAW = 75.0
# Before a norm that begins a model, the square is far below its eps of 1e-5. And a mean that is so many standard
# deviations away from 0.
_BELOW_EPS, _OFF_CENTRE = 3e-4, 100.0
_FIRST_INPUT = "input[0]"
_TARGETS = ("label", "target", "batch[1]")  # in their names
_FLAT = (
    "inputs that are zero: never filled, masked out entirely, or multiplied by 0",
    "inputs that are normalised twice, or by a standard deviation that is far too large",
)
SMALL_BATCH = ("a batch size that has become far smaller: a single sample, for example", "inputs that are cut off")
_SMALL = (_FLAT[1], "inputs in a unit in which all values are tiny, or that are divided by 255 twice")


class BatchRange(RowsRule):
    """Inputs that leave their previous range, are all zero or tiny, or were never normalised.

    Their mean or standard deviation lies far beyond its earlier values for 16 steps, or their number falls to a quarter
    of these, or their largest magnitude once exceeds a hundred times these. The last two concern the first steps: all
    inputs have no other values, or have a standard deviation below 0.005 and no magnitude of 0.05, or one has a mean of
    a hundred standard deviations, or of these more than 75, unless a model begins with a norm.
    """

    name = "batch-range"
    kinds = INPUT_KINDS
    causes = ("inputs that are normalised twice or not at all", "other data, units or masks", "a damaged file")
    advice = ("inspect the samples with the extreme values", "normalise and clip the inputs in the data loader")

    # By statistic and input: the range so far, and steps in a row beyond it, and how often it was measured.
    _lowest, _highest = carried(dict[str, float]()), carried(dict[str, float]())
    _beyond, _seen = carried(dict[str, int]()), carried(dict[str, int]())

    def review(self, window: Window) -> Iterable[Finding]:
        # Of tokens, samples are counted where they are inspected.
        for seen in window.observed("samples"):
            for name, _, numbers in seen.value:
                count, key = float(len(numbers)), _SAMPLES + name
                low = self._lowest.get(key, count)
                self._beyond[key] = self._beyond.get(key, 0) + 1 if count <= _FEWER * low else 0
                self._lowest[key] = min(low, count) if self._beyond[key] == 0 else low
                if self._beyond[key] == _LOOKS and self.begins("samples", seen.step):
                    text = f"the {key} has been {count:.0f} in {_LOOKS} batches that were inspected; before, it was "
                    yield self.found(seen.step, name, f"{text}{low:.0f} or more", name[:5], causes=SMALL_BATCH)
        yield from super().review(window)

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        counts = np.broadcast_to(rows.numel, rows.mean.shape)
        values = np.stack([counts, rows.mean, rows.std, rows.max_abs], -1).tolist()
        for row, (step, of_step) in enumerate(zip(rows.steps.tolist(), values, strict=True)):
            for name, numbers in zip(rows.names, of_step, strict=True):
                if math.isfinite(numbers[1]) and tuple(numbers[1:3]) != (1, 0):  # a mask may hide nothing
                    for what, value in zip(_STATISTICS, numbers, strict=True):
                        yield from self._compare(what, name, step, kind, value)
            self._seen[kind] = self._seen.get(kind, 0) + 1
            if self._seen[kind] == _KNOWN:
                yield from self._judge_first(window, rows, row, kind)

    def _compare(self, what: str, name: str, step: int, kind: str, value: float) -> Iterator[Finding]:
        """Compares a statistic of an input with its values in earlier steps."""
        key = what + name
        low, high = self._lowest.get(key, value), self._highest.get(key, value)
        margin = max(high - low, _MARGIN * max(-low, high))
        known = self._seen[key] = self._seen.get(key, 0) + 1
        is_far = known > _KNOWN and what == _LARGEST and value > _FACTOR * high > 0
        is_inside = value >= _FEWER * low if what == _COUNT else low - margin <= value <= high + margin
        is_beyond = known > _KNOWN and what != _LARGEST and not is_inside
        count = self._beyond[key] = self._beyond.get(key, 0) + 1 if is_beyond else 0
        lasts = count == _LASTS
        if not is_far and (lasts or not is_beyond):
            self._lowest[key], self._highest[key] = min(low, value), max(high, value)
        if (is_far or lasts) and self.begins(name, step):
            now = f"is {value:.3g}" if is_far else f"has been about {value:.3g} for {count} steps"
            text = f"the {what}{name} {now}; before, it was between {low:.3g} and {high:.3g}"
            causes: tuple[str, ...] = (*_FLAT * (what == _SPREAD and value * _FACTOR < low), *self.causes)
            causes = SMALL_BATCH if what == _COUNT else causes
            yield self.found(
                step - (count - 1) * lasts, name, text, kind, causes=causes, value=value, low=low, high=high
            )

    def _judge_first(self, window: Window, rows: Rows, row: int, kind: str) -> Iterator[Finding]:
        """Judges all inputs, once their largest magnitudes in the first steps are known."""
        gradients, name, begins_with_norm = window.latest.get("gradient"), rows.names[0], False
        if gradients is not None and gradients.names:
            begins_with_norm = gradients.names[0].endswith("weight") and not gradients.tensors.matrices[0]
        is_no_input = (rows.field("min")[row] >= 0) & (rows.field("sum")[row] == rows.field("sq_sum")[row])  # a mask
        is_no_input |= [any(word in one for word in _TARGETS) for one in rows.names]
        highest = np.array([self._highest.get(_LARGEST + one, 0.0) for one in rows.names])
        most, spread = (float(np.fmax.reduce(of[~is_no_input], initial=0.0)) for of in (highest, rows.std[row]))
        is_main = kind == "batch" or (name == _FIRST_INPUT and most == 0)  # a batch has labels, too
        if is_main and rows.tensors.matrices[0] and highest[0] == rows.max_abs[row, 0] == 0:
            text = f"the model's input {name} has been 0 everywhere since the first step"
            yield self.found(0, name, text, kind, causes=_FLAT)
        if 0 < most < _TINY and spread < (_BELOW_EPS if begins_with_norm else _NARROW):
            text = f"the model's inputs have a standard deviation of {spread:.2g} and no magnitude above {most:.2g}, "
            text += "and have been as small since the first step: usual weights make hardly more than 0 of them"
            yield self.found(0, name, text, kind, causes=_SMALL, std=spread, largest=most)
        means, spreads = rows.mean[row], rows.std[row]
        i = 0 if kind == "batch" else int(np.nan_to_num(spreads).argmax())
        if spreads[i] > _RAW and rows.tensors.matrices[i] and not begins_with_norm:
            text = f"{rows.names[i]} has had a standard deviation of {spreads[i]:.3g} since the first step, where "
            text += "usual weights expect about 1"
            yield self.found(0, rows.names[i], text, kind, std=spreads[i])
        centres = np.where(rows.tensors.matrices & (spreads > 0), np.abs(means), 0.0)
        i = int((centres / np.fmax(spreads, 1e-300)).argmax())
        if centres[i] > _OFF_CENTRE * spreads[i] and not begins_with_norm:
            text = f"{rows.names[i]} has a mean of {means[i]:.4g} and a standard deviation of only {spreads[i]:.3g}, "
            text += "since the first step: what differs between samples is lost beside the mean"
            yield self.found(0, rows.names[i], text, kind, mean=means[i], std=spreads[i])


class ConstantFeature(LastingRule):
    """An input that is the same in every sample of a batch.

    A tensor of a single value is never reported: it is a mask or the like. Nor is an input, or an entry of a dict,
    whose samples are all the same while another varies: it may hold the positions of a grid, or units. Integers, such
    as tokens, are reported only if the samples are the same in all inputs, since positions and masks may be.
    """

    name = "constant-feature"
    kinds = ("constant",)
    causes = ("one sample repeated many times", "inputs filled with a default value, or lost in preprocessing")
    advice = ("print the samples of a batch from the data loader",)

    _MEASUREMENTS = 2  # in a row

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        together = np.array([_dict_of(name) for name in rows.names])
        is_beside = ((rows.mean < 1)[:, None] & (together == together[:, None])).any(2)
        is_constant = (rows.mean == 1) & ~is_beside
        for row, i in zip(*is_constant.nonzero(), strict=True):
            is_constant[row, i] = not _has_one_value(window, int(rows.steps[row]), rows.names[i])
        for _, fresh, _, since in self.lasting(rows, is_constant, self._MEASUREMENTS):
            for i in fresh:
                name = rows.names[i]
                yield self.found(since[i], name, f"all samples of a batch are the same in {name}", name[:5])


def _dict_of(name: str) -> str:
    """The dict that an entry of a batch is in; what a model is called with is one. Else the name."""
    return "input" if name.startswith("input") else name.rpartition("[")[0] if name.endswith("']") else name


def _has_one_value(window: Window, step: int, name: str) -> bool:
    """Whether all elements of a floating input are equal, as those of a mask."""
    for rows in map(window.measured.get, INPUT_KINDS):
        if rows is not None and name in rows.names and step in rows.steps:
            row, i = int(np.searchsorted(rows.steps, step)), rows.names.index(name)
            return bool(rows.field("min")[row, i] == rows.field("max")[row, i])
    return False


class LabelRange(Rule):
    """Integer labels outside of the range of the classes."""

    name = "label-out-of-range"
    severity = "error"
    causes = (
        "labels that count from 1, or a number of classes that is too small",
        "a padding label other than the loss's ignore_index",
    )
    advice = (
        "compare labels.min() and labels.max() with the number of outputs",
        "pass the padding label to the loss as ignore_index=",
    )

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("label"):
            for name, low, high, classes in seen.value:
                if self.begins(name, seen.step):
                    text = f"the labels {name} run from {low} to {high}; expected 0 to {classes - 1}"
                    yield self.found(seen.step, name, text, about="batch", low=low, high=high, classes=classes)


class _RankRule(Rule):
    """Base of rules about a comparison of ranks."""

    severity = "error"
    quiet = 1000

    def _failed(self, window: Window, kind: str) -> Iterator[tuple[int, Any]]:
        """The steps in which a comparison of a ``kind`` failed anew, and the reports."""
        for seen in window.observed(kind):
            if not seen.value.ok and self.begins("", seen.step):
                yield seen.step, seen.value


# The share of steps that brought a change before, weighted over the last 32 or so. If changes come by chance, the
# chance of 20 steps without one is then 0.4 ** 20. Sums of the same batch in another order differ by rounding, up to
# this share of the sum of magnitudes.
_CHANGING, _ROUNDED = 0.6, 1e-6
# So many samples are few: a debugging subset, or one batch. Each was met so often on average from the start, or after
# so many others so often, in so many samples over so many steps: not by chance, nor in several passes over a batch, as
# PPO makes.
_FEW, _OFTEN, _OTHERS, _AGAIN, _INSPECTED, _STEPS = 32, 3, 24, 2, 16, 40
# From the start over so many steps. What differs by fewer bits is a place in a grid, an arm of a bandit or the like: it
# has to be half of the samples before that were different, else a quarter, as of a data set of 100. The loss has fallen
# to this share if the few are known by heart. Conventions.
_LONG, _BITS, _MANY, _FALLEN = 96, 8.0, (0.5, 0.25), 0.5


class RepeatedBatch(_RankRule):
    """The same batch or few samples in all steps; or on several ranks, which needs ``watch={"rank_batches": n}``.

    An input is the same if its sum is, whatever else a model is called with, as hidden states and noise. Samples, also
    of tokens, are compared in some steps: 32 different ones or less, each met three times or more, are reported if most
    were different before. If they are few from the start, the loss has to halve, and their order has to change, since
    all data may be in one batch, unless a framework tells of more. It may also tell of 32 samples or less in all.

    Args:
        in_a_row: The number of steps with the same batch after which it is reported.
    """

    name = "repeated-batch"
    causes = ("data that is not divided among the ranks: no DistributedSampler, or one made with the wrong rank",)
    advice = (
        "pass DistributedSampler(dataset) to the DataLoader",
        "seed the generators of random data differently on each rank",
    )

    # By name the last sum, the share of steps with a change, and steps since the last.
    _last, _share, _same_for = carried(dict[str, float]()), carried(dict[str, float]()), carried(dict[str, float]())
    # The last samples, each once for a step: position in `INPUT_KINDS`, step, number rounded to 32 bits, loss, and by
    # how many bits those of the step differ. One list of numbers, since a list each is work for the garbage collector.
    _WIDTH = 5
    _met, _MOST = carried(list[float]()), 1024 * _WIDTH

    def __init__(self, in_a_row: int = 20) -> None:
        super().__init__()
        self.in_a_row = in_a_row

    def review(self, window: Window) -> Iterable[Finding]:
        for step, report in self._failed(window, "rank_batches"):
            repeated = [list(ranks) for ranks in report.repeated]
            yield self.found(step, "batch", str(report), about="batch", ranks=repeated)
        for kind in INPUT_KINDS:
            rows = window.measured.get(kind)
            if rows is None:
                continue
            last = int(rows.steps[-1])
            for name in self._stuck(rows):
                steps = int(self._same_for[name])
                if self.begins("repeats", last):
                    text = f"{name} has had the same samples for {steps} steps; before, they changed from step to step"
                    yield self.found(max(0, last - steps), name, text, kind, "warning", _STUCK, _LOOK, steps=steps)
        for seen in window.observed("samples"):
            loss = window.value("loss", int(np.searchsorted(window.steps, seen.step)))
            for name, bits, numbers in seen.value:
                place, rounded = float(INPUT_KINDS.index(name[:5])), np.array(numbers, np.float32).tolist()
                for number in dict.fromkeys(rounded):
                    self._met += place, float(seen.step), *bounded([number, loss, bits])
                del self._met[: -self._MOST]
                # A state may hold any numbers.
                met = np.reshape(self._met[len(self._met) % self._WIDTH :], (-1, self._WIDTH))
                yield from self._judge_samples(met[met[:, 0] == place], name, window.run)

    def _judge_samples(self, met: Floats, name: str, run: RunSettings) -> Iterator[Finding]:
        """Judges the last samples of a kind, a row each."""
        _, steps, numbers, losses, bits = met.T
        starts = np.flatnonzero(np.diff(steps, prepend=-1))  # of each step
        _, newest, ids = np.unique(numbers[::-1], True, True)
        counts = len(met) - starts  # from each of these steps on, of which so many are different
        different = np.sort(newest).searchsorted(counts)
        often = counts / different * (different <= _FEW)
        at = 0 if often[0] >= _OFTEN else int(often.argmax())
        since, last, count, few = int(steps[starts[at]]), int(steps[-1]), int(counts[at]), int(different[at])
        fallen, is_late = losses[0] - median(losses[starts[-4:]]), last >= steps[0] + _LONG
        has_fallen = fallen > (1 - _FALLEN) * abs(losses[0])
        if 0 < run.samples <= _FEW and is_late and has_fallen and self.begins("repeats", last):
            text = f"the training set has {run.samples} samples; the loss has fallen from {losses[0]:.4g} to "
            text += f"{losses[-1]:.4g}"
            yield self.found(0, name, text, name[:5], "warning", _SUBSET, _LENGTH, different=run.samples)
        if often[at] < (_OFTEN if at == 0 else _AGAIN) or count < _INSPECTED or last - since < _STEPS:
            return
        every = np.split(ids[::-1], starts[1:])
        is_ordered = all(np.array_equal(of_step, every[at]) for of_step in every[at:])
        text = f"the {len(every) - at} batches of {name} that were inspected from step {since} to {last} have "
        text += f"only {few} different samples"
        if at:
            before = np.concatenate(every[:at])
            others = len({*before.tolist()})
            share = _MANY[bool(bits.max() >= _BITS)]
            is_told = others >= max(share * len(before), 2 * few, _OTHERS)
            text += f"; the {at} before them had {others}"
        else:
            is_told = is_late and has_fallen and bits.max() >= _BITS and (run.batches > 1 or not is_ordered)
            text += f"; the loss has fallen from {losses[0]:.4g} to {losses[-1]:.4g}"
        if is_told and self.begins("repeats", last):
            causes, more = _STUCK if is_ordered else _SUBSET, {"different": few, "inspected": count}
            yield self.found(since, name, text, name[:5], "warning", causes, _LENGTH, **more)

    def _stuck(self, rows: Rows) -> list[str]:
        """Notes which of ``rows`` change; returns the names of those that no longer do."""
        sums, kept = np.nan_to_num(rows.field("sum")), 1 - 1 / 32
        sizes = np.nan_to_num(rows.l2_norm * np.sqrt(rows.numel))
        before = np.vstack([[self._last.get(name, math.nan) for name in rows.names], sums[:-1]])
        share, same_for = (np.array([of.get(name, 0.0) for name in rows.names]) for of in (self._share, self._same_for))
        for is_same in np.abs(sums - before) <= _ROUNDED * sizes:
            same_for = np.where(is_same, same_for + 1, 0.0)
            share = kept * share + ~is_same / 32
        for of, values in ((self._last, sums[-1]), (self._share, share), (self._same_for, same_for)):
            of |= dict(zip(rows.names, values.tolist(), strict=True))
        low, high = rows.field("min")[-1], rows.field("max")[-1]
        # Inputs of a single value are no batch; `BatchRange` tells about them.
        is_stuck = (low != high) & (same_for >= self.in_a_row) & (share > _CHANGING * kept**same_for)
        if (same_for < self.in_a_row).any():
            is_stuck &= (low != 0) | (high != 1)  # a mask may stay the same while batches change
        return [rows.names[i] for i in np.flatnonzero(is_stuck).tolist()]


_STUCK = (
    "the same batch in every step: next(iter(loader)), an iterator or cache that no longer advances, or a fixed index",
    "inputs that are replaced by constants",
)
_SUBSET = (
    "a debugging subset or a max_samples limit that was left in the data set",
    "an iterator or cache that returns the same samples again",
    "a replay buffer that holds only a few",
)
_LOOK = ("print the inputs of two steps, right before the model, and compare them",)
_LENGTH = ("print len(train_loader.dataset), and the samples of two steps right before the model",)


# Steps without a reduction.
_UNREDUCED = 16
_NO_SYNC = "every backward pass runs under DistributedDataParallel.no_sync(), or require_backward_grad_sync is False"


class UnreducedGradients(Rule):
    """Steps under DDP without the all-reduce of gradients, since DDP's reducer never ran."""

    name = "unreduced-gradients"
    severity = "error"
    causes = (
        "the program calls the module inside of DistributedDataParallel, so the wrapper's forward pass does not run",
        _NO_SYNC,
        "gradients computed by torch.autograd.grad, which does not trigger DDP's reducer",
        "gradients that the program averages over ranks itself: then leave this rule out of rules=",
    )
    advice = ("call the DDP model itself, then loss.backward()", "broadcast the parameters of one rank to the others")

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("unreduced"):
            since, is_no_sync = seen.value
            steps = seen.step - since
            if steps >= _UNREDUCED and self.begins("", seen.step):
                causes = self.led_by(_NO_SYNC) if is_no_sync else None
                text = f"DDP has not all-reduced any gradient for {steps} steps, so each rank trains a model of its own"
                yield self.found(since, "gradients", text, causes=causes, steps=steps)


class ReplicaMismatch(_RankRule):
    """Parameters that differ between replicas; needs ``watch={"replicas": n}``."""

    name = "replica-mismatch"
    explained_by = ("unreduced-gradients",)
    causes = (
        "a rank that skipped a step which the others took, or took one that they skipped",
        "parameters changed outside of the optimizer, or a checkpoint loaded on some ranks only",
        "memory that was overwritten on one rank",
    )
    advice = (
        "broadcast the parameters of a correct rank, or load a checkpoint on all ranks",
        "decide whether to skip a step by values that were all-reduced",
    )

    def review(self, window: Window) -> Iterable[Finding]:
        for step, report in self._failed(window, "replicas"):
            yield self.found(step, report.drifted[0].name, str(report).removeprefix("gradstat: "), about="parameter")


class NonfiniteRank(_RankRule):
    """The rank whose NaN or Inf the all-reduce spread to all gradients; needs ``watch={"origin": 1}``."""

    name = "nonfinite-rank"
    quiet = 1
    causes = (
        "a damaged batch or faulty memory on that rank: gradients of the others were finite before the all-reduce",
    )
    advice = ("inspect that rank's batch and log", "if it is always the same rank, suspect its hardware")

    def review(self, window: Window) -> Iterable[Finding]:
        run = window.run
        as_watched = {name.removeprefix("module."): name for name in run.backward_order}
        for step, report in self._failed(window, "origin"):
            names = list(report.nonfinite)  # without the prefix of DDP
            name = run.first_in_backward([as_watched.get(name, name) for name in names])
            severity: Severity = "info" if run.is_scaled else self.severity  # occasional overflows are normal
            ranks = sorted({report.rank_of(name) for name in names})
            yield self.found(step, name, str(report).removeprefix("gradstat: "), "gradient", severity, ranks=ranks)
