"""Rules on a model's outputs: what the loss makes of them, and whether they follow their targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import Records, carried
from gradstat.rules.course import LOOK, RISES, LearningRule
from gradstat.rules.output_facts import Activation, OutputFacts
from gradstat.rules.rows import Window

# The last batches looked at, which tell whether outputs follow their targets, and what squares are multiplied by.
_BATCHES = 8


def looks(window: Window) -> Iterator[tuple[int, OutputFacts, float]]:
    """The steps in which outputs were looked at, what was seen, and the loss."""
    for seen in window.seen.get("outputs", []):
        yield seen.step, seen.value, window.value("loss", int(np.searchsorted(window.steps, seen.step)))


_IN_WORDS = {
    Activation.PROBABILITIES: "are probabilities already",
    Activation.SIGMOID: "are those of a sigmoid",
    Activation.RELU: "are those of a ReLU",
}


class ActivatedOutputs(LearningRule):
    """A loss that takes logits gets what an activation has made of them.

    The graph of the first loss tells it. Where it does not, as for compiled models, the gradient of the model's outputs
    tells whether the loss takes their softmax.
    """

    name = "activation-before-softmax"
    explains = ("no-learning", "unrelated-outputs", "vanishing-gradient")
    causes = ("a softmax, sigmoid or ReLU before a loss that takes logits and has one of its own",)
    advice = ("remove it: give the loss what the last layer returns",)

    # The gradient of a squared error of probabilities sums to 0 as well, but its first loss is far from chance.
    _CHANCE = 0.9, 1.1

    _were_logits = carried(False)  # whether the loss has taken the softmax of outputs without activation

    def judge(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("activated"):
            text = f"{seen.value.function} takes logits, and gets the output of a {seen.value.activation}"
            if seen.value.classes > 1:
                # The likeliest of C classes has a probability of at most e / (e + C - 1), since logits are in [0, 1].
                least = math.log1p((seen.value.classes - 1) / math.e)
                text += f": the cross-entropy of a sample cannot fall below {least:.4g}"
            yield from self._told(seen.step, "logits", text, "output")
        for step, facts, _ in looks(window):
            if self._count < 2:
                self._take(window, step)
            activation, classes = facts.activation, facts.classes
            is_told = activation > Activation.PROBABILITIES
            if activation == Activation.PROBABILITIES:
                low, high = self._CHANCE
                is_chance = self._count == 1 and low < self._first[0] / math.log(classes) < high
                is_told = is_chance or self._were_logits
            self._were_logits |= activation == Activation.NONE and classes > 0
            if is_told:
                text = f"the outputs of the model {_IN_WORDS[activation]}, and the loss takes their softmax"
                yield from self._told(step, "logits", text, "output", classes=classes)
        if self._count < 2:
            self._take(window)


class SoftmaxDimension(LearningRule):
    """A softmax is one over the samples, or over places in a sequence, in two looks in a row."""

    name = "softmax-dimension"
    explains = ("no-learning", "unrelated-outputs")
    causes = ("a softmax or log_softmax whose dim= is that of the samples, or is not given",)
    advice = ("give dim= the dimension of the classes: -1 if it is the last",)

    _times = carried(0)

    def judge(self, window: Window) -> Iterable[Finding]:
        for step, facts, _ in looks(window):
            self._times = self._times + 1 if facts.takes_over_samples or facts.is_over_samples else 0
            if self._times == 2:
                made = "outputs of the model are a softmax"
                what = made if facts.is_over_samples else "loss takes the softmax of the outputs"
                text = f"the {what} over samples or places in a sequence, not over the classes"
                yield from self._told(step, "logits", text, "output")


class Targets(NamedTuple):
    """What the gradient of the outputs tells about the targets of a batch."""

    squares: str  # "yes" if the loss is a number times the sum or mean of their squares, "minus", or "no"
    is_known: bool  # whether residuals are
    are_equal: bool | None  # None if that is not known
    spread: float  # standard deviation of the targets; 0 if they are equal
    outputs: float  # that of outputs
    related: float  # correlation of both


class TargetsRule(LearningRule):
    """Base of rules on what the gradients of the outputs tell about the targets."""

    _ratios = carried(Records(3))  # of the last batches: squared gradients, also over the loss, per sum and mean

    def looks(self, window: Window) -> Iterator[tuple[int, OutputFacts, float, Targets | None]]:
        """As `looks` of the ``window``, with what is known about the targets; None if nothing is."""
        for step, facts, loss in looks(window):
            yield step, facts, loss, self._targets_of(facts, loss)

    def _targets_of(self, facts: OutputFacts, loss: float) -> Targets | None:
        """What is known about the targets.

        If residuals are not exact, they are known where the loss is a number times the sum of their squares. Then its
        ratio to the sum of squared gradients, or to their mean, is the same in all batches, though they are not.
        """
        fit = facts.fit
        if fit is None or not all(map(math.isfinite, (*fit, loss))):
            return None
        scale, squares = 1.0, "no"
        if fit.squares > 0 and loss:
            scale, ratio = 2 * loss / fit.squares, fit.squares / loss
            ratios = self._ratios
            ratios[:] = [*ratios, [fit.squares, ratio, ratio * fit.elements]][-_BATCHES:]
            changes, *differ = (max(of) - min(of) > 0.01 * min(map(abs, of)) for of in zip(*ratios, strict=True))
            # A loss that is linear in the outputs has a ratio, too, while it stays the same.
            if len(ratios) > 2 and changes and not all(differ):
                squares = "yes" if ratio > 0 else "minus"
        is_known = fit.squares == 0 or squares == "yes"
        variance = fit.outputs - 2 * scale * fit.cross + scale**2 * fit.residuals
        # Targets that are equal have a deviation by rounding alone.
        varies = variance > 1e-5 * scale**2 * fit.residuals
        covariance = fit.outputs - scale * fit.cross
        related = covariance / math.sqrt(fit.outputs * variance) if varies and fit.outputs else 0.0
        return Targets(
            squares,
            is_known,
            not varies if is_known and fit.residuals > 0 else None,
            math.sqrt(variance / fit.elements) if varies else 0.0,
            math.sqrt(fit.outputs / fit.elements),
            min(related, 1.0),
        )


class EqualTargets(TargetsRule):
    """In each batch looked at, all labels are of one class, or all targets are equal."""

    name = "equal-targets"
    explains = ("no-learning", "unrelated-outputs", "loss-spike", "vanishing-gradient")
    causes = (
        "data sorted by class, and not shuffled",
        "labels that were lost, or read from the wrong column",
        "one class far more frequent than all others",
    )
    advice = ("shuffle the data", LOOK)

    # From the start in at least so many looks, over so many steps.
    _LOOKS, _STEPS = 3, 32
    # By chance, so many labels are all of a class that has 95 % of them in 1 of 100 trainings; and batches of one
    # class, not all of the same, have so many labels beside the first of each in 1 of 2 ** 16. That after others
    # batches have one label each is as unlikely by the share of those that had, which counts as 2 ** -4 if it is less.
    _ALIKE, _BITS, _MOST_BITS = 90, 16, 4

    _labels = carried(Records(3))  # of the last batches with one label: step, label, how often
    _alike, _differ = carried(0), carried(0)  # batches before these: with one label, with several

    def judge(self, window: Window) -> Iterable[Finding]:
        if not self._count:
            next(self._follow(window), None)  # tells the number of classes
        # A discriminator may get real and made samples in passes of their own.
        for step, facts, _, targets in () if window.run.has_rival else self.looks(window):
            are_equal = None if targets is None else targets.are_equal
            is_policy = False
            if facts.labels:
                is_one, label, count = facts.label is not None, facts.label or 0, facts.labels
                # A policy, which weighs actions by returns, may settle on one.
                is_exact = facts.fit is not None and (not facts.fit.squares or count > facts.fit.samples)
                is_policy = are_equal is None and not is_exact
            elif are_equal is not None and facts.fit is not None:
                is_one, label, count = are_equal, 0, int(facts.fit.samples)
            else:
                continue
            if is_one:
                self._labels.append([step, label, count])
                yield from self._judge_alike(facts.classes > 0, is_policy)
            else:
                self._alike, self._differ = self._alike + len(self._labels), self._differ + 1
                self._labels.clear()

    def _judge_alike(self, are_classes: bool, is_policy: bool) -> Iterator[Finding]:
        """Judges the last batches, each with one label."""
        steps, each, counts = zip(*self._labels, strict=True)
        is_same, before = len({*each}) == 1, self._alike + self._differ
        what = f"labels are of {'the same' if is_same else 'one'} class" if are_classes else "targets are equal"
        text = f"in each of {len(each)} batches looked at, all {what}"
        if before:
            text += f"; of {before} before, {self._differ} had several"
            bits = min(math.log2((before + 2) / (self._alike + 1)), self._MOST_BITS) * len(each)
            is_odd = bits >= self._BITS and not is_policy
        else:
            is_enough = self._classes and len(each) >= self._LOOKS and steps[-1] - steps[0] >= self._STEPS
            least = self._ALIKE if is_same else min(self._ALIKE, self._BITS + len(counts))
            is_odd = bool(is_enough) and sum(counts) >= least
        if is_odd:
            yield from self._told(int(steps[0]), "logits", text, "output", labels=sum(counts))


class RawTargets(TargetsRule):
    """Targets of a squared error have a spread above 20, and 50 times that of the first outputs."""

    name = "raw-targets"
    explained_by = ("negative-loss", "no-learning", "unrelated-outputs")
    causes = ("targets that are not normalised, or in another unit than the model was made for",)
    advice = ("normalise targets in the data loader, and scale predictions back",)

    # Standard deviations, conventions: outputs of a fresh model have one of about 1.
    _SPREAD, _APART = 20.0, 50.0

    _outputs = carried(math.nan)  # the deviation of the first outputs, 0 if that of targets is not large

    def judge(self, window: Window) -> Iterable[Finding]:
        for _, _, _, targets in () if window.run.has_rival else self.looks(window):
            if targets is None or not targets.spread or not targets.outputs:
                continue
            if math.isnan(self._outputs):
                self._is_over = targets.spread <= self._SPREAD
                self._outputs = 0.0 if self._is_over else targets.outputs
            if targets.squares == "yes" and 0 < self._outputs < targets.spread / self._APART:
                text = f"targets have a standard deviation of {targets.spread:.3g}, and the first outputs one of "
                text += f"{self._outputs:.3g}"
                yield from self._told(0, "loss", text, targets=targets.spread, outputs=self._outputs)


class UnrelatedOutputs(TargetsRule):
    """Outputs and their targets have no correlation after 240 steps.

    Targets are known from the gradient of the outputs, for cross-entropies of one prediction per sample and for squared
    errors. The last 8 batches looked at are judged, unless the learning rate still rises.
    """

    name = "unrelated-outputs"
    explained_by = ("negative-loss", "no-learning")
    causes = (
        "labels that do not belong to the inputs, or that are random",
        "inputs without information: zero, constant, or in a scale that the model was not made for",
        "a learning rate far too low or too high for this model",
    )
    advice = (
        "train on a single batch: a loss that does not fall to nearly 0 means that the program is wrong, not the data",
        LOOK,
    )

    # Healthy models of the tests are related by then. A correlation is small below this, and below so many standard
    # errors; above it and above more of them it is known.
    _STEPS, _RELATED, _FEW, _MANY = 240, 0.1, 2, 3

    _related = carried(list[float]())  # the last correlations, since targets are known
    _since, _lr = carried(0), carried(math.nan)  # the last step in which outputs followed; the rate in the last look

    def judge(self, window: Window) -> Iterable[Finding]:
        for step, _, loss, targets in () if window.run.has_rival else self.looks(window):
            if targets is not None and targets.spread and targets.outputs and not self._is_over:
                self._related = [*self._related, targets.related][-_BATCHES:] if targets.is_known else []
                rate = window.value("lr", int(window.steps.searchsorted(step)))
                is_warm_up, self._lr = rate > RISES * self._lr, rate
                if len(self._related) == _BATCHES and not is_warm_up:
                    yield from self._judge_related(step, loss)

    def _judge_related(self, step: int, loss: float) -> Iterator[Finding]:
        related = float(np.mean(self._related))
        error = float(np.std(self._related, ddof=1)) / math.sqrt(_BATCHES)
        if related > max(self._RELATED, self._MANY * error):
            self._is_over = step >= self._STEPS
            self._since = step
        elif step >= self._STEPS and related < min(self._RELATED, self._FEW * error):
            text = f"outputs of the model and their targets have a correlation of {related:.2g} after {step} steps, "
            yield from self._told(self._since, "loss", f"{text}as by chance", correlation=related, loss=loss)
