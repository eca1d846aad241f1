"""Rules on a model's outputs: what the loss makes of them, and whether they follow their targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import HUGE, Records, carried, median
from gradstat.rules.course import SOON, SPAN, LearningRule
from gradstat.rules.data import SMALL_BATCH
from gradstat.rules.output_facts import Activation, Fit, OutputFacts
from gradstat.rules.rows import Window

_LOOK = "inspect a batch and its labels right before they enter the model"

_IN_WORDS = {
    Activation.PROBABILITIES: "are probabilities already",
    Activation.SIGMOID: "come from a sigmoid",
    Activation.RELU: "come from a ReLU",
}


class ActivatedOutputs(LearningRule):
    """A loss that expects logits gets the output of a softmax, sigmoid or ReLU.

    The graph of the first loss shows it. Where it does not, as for compiled models, the gradient of the model's outputs
    shows whether the loss takes their softmax.
    """

    name = "activation-before-softmax"
    explains = ("unrelated-outputs", "vanishing-gradient")
    causes = ("a softmax, sigmoid or ReLU before a loss that expects logits and applies its own",)
    advice = ("remove the activation: pass the loss what the last layer returns",)

    # The gradient of a squared error of probabilities sums to 0 as well, but its first loss is far from chance.
    _CHANCE = 0.9, 1.1

    _were_logits = carried(False)  # whether the loss has taken the softmax of outputs without activation

    def judge(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("activated"):
            text = f"{seen.value.function} expects logits but gets the output of a {seen.value.activation}"
            if seen.value.classes > 1:
                # The likeliest of C classes has a probability of at most e / (e + C - 1), since logits are in [0, 1].
                least = math.log1p((seen.value.classes - 1) / math.e)
                text += f": the cross-entropy of a sample cannot fall below {least:.4g}"
            yield from self._found_once(seen.step, "logits", text, "output")
        for seen in window.observed("outputs"):
            step, activation, classes = seen.step, seen.value.activation, seen.value.classes
            yield from self._take(window, step)
            is_told = activation > Activation.PROBABILITIES
            if activation == Activation.PROBABILITIES:
                low, high = self._CHANCE
                is_chance = self._count == 1 and low < self._first[0] / math.log(classes) < high
                is_told = is_chance or self._were_logits
            self._were_logits |= activation == Activation.NONE and classes > 0
            if is_told:
                text = f"the model's outputs {_IN_WORDS[activation]}, but the loss applies a softmax to them"
                yield from self._found_once(step, "logits", text, "output", classes=classes)
        yield from self._take(window)


class SoftmaxDimension(LearningRule):
    """A softmax over the samples or the positions of a sequence, instead of the classes."""

    name = "softmax-dimension"
    explains = ("unrelated-outputs",)
    causes = ("a softmax or log_softmax without dim=, or with the dimension of the samples as dim=",)
    advice = ("pass the dimension of the classes as dim=: -1 if it is the last",)

    _times = carried(0)

    def judge(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("outputs"):
            is_made = seen.value.is_over_samples
            self._times = self._times + 1 if seen.value.takes_over_samples or is_made else 0
            if self._times == 2:
                what = "model's outputs are a softmax" if is_made else "loss applies a softmax to the outputs"
                text = f"the {what}{',' * (not is_made)} over samples or positions in a sequence, not over the classes"
                yield from self._found_once(seen.step, "logits", text, "output")


class EqualTargets(LearningRule):
    """Batches whose labels are all of one class or of few, each of others, or whose targets are all equal."""

    name = "equal-targets"
    explains = ("unrelated-outputs", "loss-spike", "vanishing-gradient")
    causes = (
        "data that is sorted by class and not shuffled",
        "labels or targets that are constant: never filled, or read from the wrong column",
        "one class that is far more frequent than all others",
    )
    advice = ("shuffle the data: DataLoader(..., shuffle=True)", _LOOK)

    # From the start in at least so many looks, over so many steps. By chance, so many labels are all of a class that
    # has 95 % of them in 1 of 100 trainings.
    _LOOKS, _STEPS, _ALIKE = 3, 32, 90
    # That after others batches have one label each is by chance as unlikely as 2 ** -16 by the share of those that had,
    # which counts as 2 ** -4 if it is less.
    _BITS, _MOST_BITS = 16, 4
    _MOST = 100  # batches that are kept, which is more than any of these needs
    # From the start, targets that are no labels count only if samples have few, since a centre that all samples are
    # drawn to has many, or if the loss falls to this share of the first one.
    _FEW, _COLLAPSED = 4, 1e-3

    # Labels differ more between the first batches than within them, as an analysis of variance says. The limit of F is
    # higher where the variance may be that of fewer than `_USUAL` rare labels, which one batch may have by chance. Of
    # 10 ** 6 trainings with shuffled labels one reaches it if batches have about five, three at worst, and none if they
    # have many. More than `_SAMPLES` are no samples.
    _FIRST, _F, _EACH, _RARE, _USUAL, _SAMPLES = (7, 9), 20.0, 5, 7, 10, 512

    _spreads = carried(Records(5))  # of the labels of the first batches: how many, mean, variance, least, largest
    _labels = carried(Records(3))  # of the last batches with one label: step, label, how often
    _alike, _differ = carried(0), carried(0)  # batches before these: with one label, with several
    _has_labels = carried(False)  # whether labels were seen

    def judge(self, window: Window) -> Iterable[Finding]:
        # A discriminator may get real and made samples in passes of their own.
        for seen in () if window.run.has_other_optimizer else window.observed("outputs"):
            step, facts, fit, is_policy = seen.step, seen.value, seen.value.fit, False
            yield from self._take(window, step)
            loss = window.value("loss", int(window.steps.searchsorted(step)))
            are_equal = None if fit is None else _are_equal(fit, loss)
            if loss < 0:
                continue  # gradients of a wrong sign tell nothing about targets
            if facts.labels:
                is_one, label, count = facts.least == facts.most, facts.least, facts.labels
                self._has_labels = True
                # A policy, which weighs actions by returns, may settle on one.
                is_policy = fit is None or (fit.squares > 0 and count <= fit.samples)
                may_begin = _is_head(window, facts.classes)
                if may_begin and fit is not None and count <= min(fit.samples, self._SAMPLES):
                    yield from self._judge_spread(facts)
            elif are_equal is not None and fit is not None and not self._has_labels:  # else none of them has a gradient
                is_one, label, count = are_equal, 0, int(fit.samples)
                is_few = fit.elements <= self._FEW * fit.samples
                may_begin = fit.squares > 0 and is_few and not fit.are_errors
            else:
                continue
            if is_one:
                self._labels.append([step, label, count])
                del self._labels[: -self._MOST]
                yield from self._judge_alike(facts.classes > 0, is_policy, may_begin)
            else:
                self._alike, self._differ = self._alike + len(self._labels), self._differ + 1
                self._labels.clear()
        yield from self._take(window)

    def _has_collapsed(self) -> bool:
        """Whether the loss has fallen as that of a constant does, which a bias alone can learn."""
        return self._count > SPAN and median(self._recent) < self._COLLAPSED * median(self._first[:SOON])

    def _judge_spread(self, facts: OutputFacts) -> Iterator[Finding]:
        """Judges how labels differ between the first batches."""
        if len(self._spreads) == self._FIRST[1]:
            return
        self._spreads.append([facts.labels, facts.middle, facts.spread, facts.least, facts.most])
        counts, means, spreads, least, most = np.transpose(self._spreads)
        batches, labels, middle = len(counts), counts.sum(), np.average(means, weights=counts)
        within, between = counts @ spreads, counts @ (means - middle) ** 2
        farthest = max(middle - least.min(), most.max() - middle)
        # Two labels are one apart at least, and their middle half of that.
        rare = (within + between) / max(farthest, 0.5) ** 2
        if batches < self._FIRST[0] or labels < self._EACH * batches or rare < self._RARE:
            return
        limit = self._F * max(1.0, self._USUAL / rare) ** 4 * (batches - 1) / (labels - batches)
        if between > within * max(1.0, limit):
            share = float(between / (within + between))
            text = f"each batch has labels of its own: of the variance of labels in the first {batches} batches that "
            text += f"were inspected, {share:.0%} is between batches, where shuffled data has next to nothing"
            yield from self._found_once(0, "logits", text, "output", share=share)

    def _judge_alike(self, are_classes: bool, is_policy: bool, may_begin: bool) -> Iterator[Finding]:
        """Judges the last batches, each with one label."""
        steps, each, counts = zip(*self._labels, strict=True)
        is_same, before = len({*each}) == 1, self._alike + self._differ
        what = "targets are equal"
        if are_classes:
            what = "labels are of one class" + ", the same in all of them" * is_same
        text = f"in each of {len(each)} batches that were inspected, all {what}"
        if before:
            text += f"; of {before} before them, {self._differ} had several"
            bits = min(math.log2((before + 2) / (self._alike + 1)), self._MOST_BITS) * len(each)
            is_odd = bits >= self._BITS and not is_policy
        else:
            is_long = len(each) >= self._LOOKS and steps[-1] - steps[0] >= self._STEPS
            are_many = may_begin and sum(counts) >= self._ALIKE
            is_odd = is_same and is_long and (are_many or (not are_classes and self._has_collapsed()))
        if is_odd:
            causes = SMALL_BATCH * (before > 0 and max(counts) == 1) + self.causes
            since = int(steps[0]) if before else 0
            yield from self._found_once(since, "logits", text, "output", causes=causes, labels=sum(counts))


# The share of pairs with opposite residuals from which on it tells something that none of all pairs cross. For targets
# that vary 16 % to 78 % of them do, in 200 small programs with 25 losses.
_FACING = 0.25
# The share of the variance of residuals up to which that of outputs, or of targets, is rounding.
_ROUNDING = 1e-5


def _are_equal(fit: Fit, loss: float) -> bool | None:
    """Whether all targets of a batch are equal; None if that is not known."""
    if fit.squares == 0:
        return fit.targets(1.0) <= _ROUNDING * fit.residuals if fit.residuals > 0 else None
    # If targets are equal, outputs and residuals vary alike. Outputs of a dead layer do not vary at all.
    is_dead = fit.outputs < _ROUNDING * (2 * loss / fit.squares) ** 2 * fit.residuals
    tells = fit.crossing > 0 or (fit.facing > _FACING and not is_dead)
    return fit.crossing == 0 if tells else None


def _is_head(window: Window, classes: int) -> bool:
    """Whether some weight has a row for each of the ``classes``.

    None has where a loss compares samples, of which the right one comes first by construction.
    """
    gradients = window.latest.get("gradient")
    shapes = () if gradients is None else gradients.tensors.shapes
    return any(len(shape) > 1 and shape[0] == classes for shape in shapes)


_RAW = ("targets in a raw unit, such as dollars or pixels, where outputs are of the order of 1",)
_STANDARDISE = ("standardise the targets: subtract their mean and divide by their standard deviation",)


class UnrelatedOutputs(LearningRule):
    """Outputs that are not correlated with their targets after 240 steps, or vary far less than these after 96.

    Targets are derived from the gradient of the outputs: exactly for cross-entropies of one prediction per sample and
    for squared errors, and approximately for classes and for other losses of one term, while these are flat. The last 8
    batches that were inspected count, and nothing is reported while the learning rate still rises.
    """

    name = "unrelated-outputs"
    explained_by = ("negative-loss",)
    causes = (
        "labels or targets that do not belong to the inputs, are random, or all the same",
        "inputs without information: zero, constant, masked, or of a scale that the model does not expect",
        "a learning rate far too low or too high for this model",
    )
    advice = (
        "train on a single batch: if the loss does not fall to nearly 0, the program is wrong, not the data",
        _LOOK,
    )

    # Healthy models of the tests are related by then. A correlation is small below this, and below so many standard
    # errors; above it and above more of them it is known. One of this size in one batch is none by chance.
    _STEPS, _RELATED, _FEW, _MANY, _SURE = 240, 0.1, 2, 3, 0.4
    # A loss of another kind is flat from this share of the first 64 losses on, or of those 64 steps before. Gradients
    # tell its residuals unless some samples weigh far more than others: errors relative to targets near 0 have an
    # evenness up to 0.055.
    _FLAT, _STILL, _LEVELS, _EVEN = 0.7, 0.97, 5, 0.06
    # Outputs are alike if their variance has come to this share of the first one; in healthy programs, to 0.06.
    _ALIKE = 0.01

    # Targets that vary so many times as much as outputs after so many steps, and a correlation that is none by chance,
    # if the loss is flat. Conventions.
    _FAR, _GROW, _FOLLOWS = 10.0, 96, 0.25
    # Of more classes, logits of a trained model have a small correlation with labels, too: each is mostly that of other
    # classes. The share of the loss of guessing from which on a loss is that of classes.
    _CLASSES, _LEAST = 64, 0.5

    # The last batches that tell what squares are multiplied by, and whether outputs follow their targets.
    _BATCHES = 8
    # What stands for the residuals of any loss, over those of squares: larger ones make outputs that follow weakly, as
    # of noisy targets, look like unrelated ones, and smaller ones the other way round.
    _OF_SQUARES = 0.625

    _ratios = carried(Records(3))  # of the last batches: squared gradients, also over the loss, per sum and mean
    _levels = carried(list[float]())  # medians of losses, the last one and those up to 64 steps before
    _spreads = carried(list[float]())  # variances of outputs over samples: three first ones, and the last five
    _related = carried(list[float]())  # the last correlations, since targets are known
    _since = carried(-1)  # the last step in which outputs followed, or the loss had fallen

    def judge(self, window: Window) -> Iterable[Finding]:
        for seen in () if window.run.has_other_optimizer else window.observed("outputs"):
            step, facts, fit = seen.step, seen.value, seen.value.fit
            yield from self._take(window, step)
            loss = window.value("loss", int(window.steps.searchsorted(step)))
            if fit is None or not self._count or self._is_over or not all(map(math.isfinite, (*fit, loss))):
                continue
            if fit.samples > 1 and not _are_equal(fit, loss):
                self._spreads = [*self._spreads[:3], *[*self._spreads[3:], fit.outputs / fit.elements][-5:]]
            first, last = median(self._spreads[:3] or [0.0]), median(self._spreads[3:] or [HUGE])
            if step >= self._STEPS and last < self._ALIKE * first and not self._is_warm_up:
                text = f"outputs of different samples have become alike: after {step} steps they vary "
                text += f"{math.sqrt(last / first):.2g} times as much as in the first steps"
                yield from self._found_once(step, "loss", text, loss=loss)
            scale, is_known = self._scale_of(fit, loss)
            targets = fit.targets(scale)
            # Equal targets have a deviation by rounding alone.
            if not fit.outputs or targets <= _ROUNDING * scale**2 * fit.residuals:
                continue
            is_flat = median(self._recent) > self._FLAT * median(self._first)
            is_flat |= len(self._levels) == self._LEVELS and self._levels[-1] > self._STILL * self._levels[0] > 0
            has_one_term = not (window.run.loss_is_sum or facts.classes or facts.takes_one)
            is_like_squares = loss > 0 and has_one_term and fit.evenness > self._EVEN
            # Of several labels for each sample, whose correlation is hardly larger at another scale if there is none.
            # The loss of a policy, which weighs labels by returns, is far from that of guessing.
            is_of_few = facts.classes <= self._CLASSES and loss > self._LEAST * math.log(max(facts.classes, 1))
            are_several = facts.labels > fit.samples and is_of_few
            are_squares, is_known = is_known, is_known or (is_flat and (is_like_squares or are_several))
            related = min((fit.outputs - scale * fit.cross) / math.sqrt(fit.outputs * targets), 1.0)
            self._related = [*self._related, related][-self._BATCHES :] if is_known else []
            self._since = step if related > self._SURE or not (is_known or is_flat) else self._since
            is_far = are_squares and fit.squares > 0 and is_flat and targets > self._FAR**2 * fit.outputs
            does_follow = is_far and np.mean(self._related[-3:]) > self._FOLLOWS
            if does_follow and self._GROW <= step < 2 * self._GROW:
                times = math.sqrt(targets / fit.outputs)
                text = f"outputs follow their targets, but after {step} steps these still vary {times:,.0f} times as "
                yield from self._found_once(0, "loss", text + "much", causes=_RAW, advice=_STANDARDISE, times=times)
            elif len(self._related) == self._BATCHES and not self._is_warm_up:
                yield from self._judge_related(step, loss, are_several or not are_squares)
        yield from self._take(window)

    def _judge_losses(self, window: Window, row: int) -> Iterable[Finding]:
        self._levels = [*self._levels, median(self._recent)][-self._LEVELS :]
        return ()

    def _scale_of(self, fit: Fit, loss: float) -> tuple[float, bool]:
        """What the residuals of ``fit`` are to be multiplied by, and whether that is known.

        If they are not exact, it is where the loss is a number times the sum of their squares. Then its ratio to the
        sum of squared gradients, or to their mean, is the same in all batches, though they are not.
        """
        if fit.squares == 0 or loss <= 0:
            return 1.0, fit.squares == 0
        ratio, ratios = fit.squares / loss, self._ratios
        ratios[:] = [*ratios, [fit.squares, ratio, ratio * fit.elements]][-self._BATCHES :]
        changes, *differ = (max(of) - min(of) > 0.01 * min(of) for of in zip(*ratios, strict=True))
        # A loss that is linear in the outputs has a ratio, too, while it stays the same.
        is_known = len(ratios) > 2 and changes and not all(differ)
        return 2 / ratio * (1.0 if is_known else self._OF_SQUARES), is_known

    def _judge_related(self, step: int, loss: float, is_estimate: bool) -> Iterator[Finding]:
        related = float(np.mean(self._related))
        error = float(np.std(self._related, ddof=1)) / math.sqrt(self._BATCHES)
        if related > max(self._RELATED, self._MANY * error):
            self._is_over = step >= self._STEPS
        elif step >= self._STEPS and related < min(self._RELATED, is_estimate + self._FEW * error):
            text = f"the correlation of outputs and targets is {related:.2g} after {step} steps, no more than by chance"
            yield from self._found_once(self._since + 1, "loss", text, correlation=related, loss=loss)
