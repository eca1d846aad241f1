"""The rule on trainings that do not learn: a loss that stays at chance, and beginnings that allow no learning."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import WRONG_SIGN, Rule, median, sizes_of_weights
from gradstat.rules.output_facts import Activation, Fit
from gradstat.rules.rows import Observation, Rows, Window

# Losses of the first steps that are compared with chance, and values per median of later ones.
_SOON, _HALF, _SPAN = 16, 32, 64
# Weights have grown large if the median of their sizes, as in `NoLearning`, exceeds this; the first steps.
_GROWN, _EARLY = 2.0, 128
# A loss is that of guessing, up to its sign, between these shares of it.
_CLOSE = 0.75, 1.25
# By |sum| / (norm * sqrt(count)), up to which a gradient's elements cancel, even if it was computed in 16 bits.
_CANCELS = 3e-4

# By chance, so many labels are all of a class that has 95 % of them in 1 of 100 trainings; and batches of one class,
# not all of the same, have so many labels beside the first of each in 1 of 2 ** 16. That after others batches have one
# label each is as unlikely by the share of those that had, which is taken for 2 ** -4 if it is less.
_ALIKE, _BITS, _MOST_BITS = 90, 16, 4

_SCALES = (
    "inputs that are not normalised, or logits or weights with a factor too many",
    "weights initialised far too large",
)
_SMALL = ("an initialisation with a factor or a standard deviation far too small",)
_RATES = ("a learning rate far too high", "updates that were never scaled down: no warm-up, no clipping")
_LOWER = ("lower the learning rate, by a factor of ten at first, and warm it up",)
_ACTIVATIONS = {
    Activation.PROBABILITIES: "are probabilities already",
    Activation.UNIT: "are all between 0 and 1",
    Activation.NEVER_NEGATIVE: "are never negative, but often 0",
    Activation.SOFTMAX: "pass through a softmax",
}
_ACTIVATED = (
    "a softmax, sigmoid or ReLU at the end of the model, and a loss that takes logits, as cross_entropy does",
)
_DIM = ("a softmax or log_softmax whose dim= is that of the samples, or is not given",)
# The fit of outputs is judged after so many steps. What stands in place of a correlation that is not known.
_FITS, _UNKNOWN = 240, 2.0
_UNSCALED = (
    ("targets that are not normalised, or in another unit than the model was made for",),
    ("normalise targets in the data loader, and scale predictions back",),
)
_DROPPED = (
    ("the probability to keep an element, given as that to drop it",),
    ("make p= of Dropout the share of elements that become zero",),
)
_ONE_LABEL = (
    "data sorted by class, and not shuffled",
    "labels that were lost, or read from the wrong column",
    "one class far more frequent than all others",
)


class NoLearning(Rule):
    """A model that learns nothing: its loss stays at chance or falls below 0 without end, or it begins badly.

    Of what is no classifier, the loss may stay at that of guessing among the samples of a batch, or of two classes; or
    it has not fallen while the weights have grown or shrunk, or where they began far too small. A dropout that leaves
    less than a tenth is told as well.

    The gradients of the last layer tell whether the model is a classifier: their elements cancel, since the gradient of
    a softmax is a difference of distributions. The size C of that layer is the number of classes, and guessing has a
    loss of ln C. If the first loss is more than twice that, the loss may be a sum, and the first one counts as chance.
    If it is less than half of that, the model has learned before and is not judged. Neither is a model whose last layer
    has other gradients as well, as a tied embedding has, or whose gradients are in bfloat16.

    Thresholds are conventions of gradstat. The slowest healthy classifiers of its tests leave chance between steps 130
    and 230, hence 256.

    Args:
        steps: After so many, and then every 64 until it has learned, the median of the last 64 losses is judged, unless
            the learning rate still rises, more than half of the predictions above chance are right, or the losses,
            below chance, fall by four standard errors.
        share: From this share of chance on nothing was learned; guessing the more frequent classes reaches less.
        fallen: Unless it is below this share of the first loss, which has other terms, then.
        flat, flat_share: If there are 8 classes or more, ``flat_share`` suffices if the loss has fallen by no more than
            the fraction ``flat`` since the first 64 steps; and before ``steps`` if weights have grown to three times
            their norm and a median of more than 2, as ``large``, or shrunk to 0.3 of it.
        early_share: This share suffices in the first 128 steps if they have grown so. Of public programs one has such
            weights then, at a share of 0.66: an LSTM with a learning rate of 20.
        far: Losses of this many times chance in the first steps are wrong if outputs or weights are too large as well,
            all of the latter, or one with a bias by ten times the median. Embeddings and centres of classes have none,
            and may begin in a scale of their own.
        small, large: Limits of the median over the weights of a weight's standard deviation times the root of its
            number of inputs, which is about 1 if they keep the size of signals.
        batches, related: In so many batches, the last ones looked at after 240 steps, outputs and their targets have a
            correlation of less than ``related``, and of less than two standard errors. Targets are known from the
            gradient of the outputs, for cross-entropies of one prediction per sample and for squared errors.
        spread, apart: The standard deviation of targets above which, and its ratio to that of the first outputs from
            which on, they are in a raw scale.
        measurements, soon: In at least so many measurements, the first ones, over ``soon`` steps, all labels are of one
            class; or in four and more later, if those of earlier batches were not, or all targets are equal then.
            Outputs after an activation, of which the loss takes the softmax, are told at once: if autograd names it, or
            if they are probabilities in the first step, or after outputs that were none.
    """

    name = "no-learning"
    causes = (
        "labels that do not belong to the inputs, or that are random",
        "inputs without information: zero, constant, or in a scale that the model was not made for",
        "a learning rate far too low or too high for this model",
    )
    advice = (
        "train on a single batch: a loss that does not fall to nearly 0 means that the program is wrong, not the data",
        "look at a batch, and at its labels, right before the model",
    )

    def __init__(
        self,
        steps: int = 256,
        share: float = 0.97,
        fallen: float = 0.7,
        flat: float = 0.05,
        flat_share: float = 0.9,
        early_share: float = 0.75,
        far: float = 2.5,
        small: float = 0.02,
        large: float = 5.0,
        measurements: int = 3,
        soon: int = 32,
        batches: int = 8,
        related: float = 0.1,
        spread: float = 20.0,
        apart: float = 50.0,
    ) -> None:
        self.steps, self.share, self.fallen = steps, share, fallen
        self.flat, self.flat_share = flat, flat_share
        self.early_share, self.far, self.small, self.large = early_share, far, small, large
        self.measurements, self.soon = measurements, soon
        self.batches, self.related, self.spread, self.apart = batches, related, spread, apart
        # Of outputs measured: squared gradients, also over the loss, per sum and mean; the last correlations; samples.
        self._ratios: list[float] = []
        self._related: list[float] = []
        self._samples = 0.0
        self._apart = math.nan  # the deviation of the first outputs, 0 if that of targets is not large
        self._reported: dict[str, int] = {}  # what was found, and when
        self._odd = self._tiny = ""  # a weight that begins far larger than others; the first, if most begin too small
        self._classes = self._count = 0  # 0 classes if it is no classifier; the number of losses
        self._askew_for = 0  # measurements in a row
        self._were_logits = False  # whether the loss has taken the softmax of outputs without activation
        self._labels: list[float] = []  # of the last batches with one label: step, label, how often
        self._alike = self._differ = 0  # batches before these: with one label, with several
        self._chance = self._gradient = math.nan  # the gradient norm of the first step
        # The share of certain predictions and the number of labels when first measured.
        self._first_certain, self._labelled = math.nan, 1.0
        self._first: list[float] = []
        self._recent: list[float] = []
        # Of the first parameters: norm, and size as in `small`; then how far the former has come.
        self._rate, self._is_warm_up = math.nan, False
        self._norm = self._scale = self._grown = math.nan

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("dropped"):
            if seen.value and "dropped" not in self._reported:
                name, step = seen.value[0] or "model", 0 if seen.step <= _SOON else seen.step
                text = f"the dropout of {seen.value[0] or 'the model'} leaves less than a tenth"
                text += f", and so do {len(seen.value) - 1} more" * (len(seen.value) > 1)
                yield self._once("dropped", step, name, text, "module", *_DROPPED, modules=seen.value[:20])
        losses = window.scalars.get("loss", np.empty(0))
        is_finite = np.isfinite(losses)
        if not is_finite.any():
            return
        if not self._count:
            self._begin(window, float(losses[is_finite][0]))
        values, steps, at = losses[is_finite].tolist(), window.steps[: len(losses)][is_finite].tolist(), 0
        looks: list[tuple[int, Callable[..., Iterable[Finding]], Any]] = []
        looks += [(seen.step, self._outputs, seen) for seen in window.observed("outputs")]
        parameters = window.rows("parameter")
        if parameters is not None:
            looks += [(step, self._weights, (parameters, row)) for row, step in enumerate(parameters.steps.tolist())]
        for step, look, seen in sorted(looks, key=operator.itemgetter(0)):
            stop = bisect.bisect_right(steps, step)
            yield from self._add(window, values[at:stop], steps[at:stop])
            yield from look(window, seen)
            at = stop
        yield from self._add(window, values[at:], steps[at:])

    def _add(self, window: Window, values: list[float], steps: list[int]) -> Iterator[Finding]:
        """Judges the losses ``values``."""
        at = 0
        while at < len(values):
            stop = (self._count // _SOON + 1) * _SOON
            more = values[at : at + stop - self._count]
            at += len(more)
            self._count += len(more)
            self._recent = [*self._recent, *more][-_SPAN:]
            if len(self._first) < _SPAN:
                self._first += more[: _SPAN - len(self._first)]
            if self._count == _SPAN and self._chance != math.log(max(self._classes, 1)):
                self._chance = max(self._chance, median(self._first))  # the first one may be that of an easy batch
            if self._count == _SOON and self._classes:
                yield from self._beginning(window)
            elif self._count == stop and stop >= _SOON + _HALF:
                row = int(np.searchsorted(window.steps, steps[at - 1]))
                rate = window.value("lr", row)
                self._is_warm_up, self._rate = rate > 1.001 * self._rate, rate
                is_small = self._tiny and self._count == _SOON + _HALF and not window.run.has_rival
                now = median(self._recent[-_HALF:]) if is_small else 0.0
                if now > self.share * self._chance > 0.01 * now:
                    text = f"the median weight begins {self._scale:.2g} times as large as keeps signals their size"
                    text += f", and the loss is {now:.4g} after {self._count} steps; it began at {self._first[0]:.4g}"
                    yield self._once("weights", 0, self._tiny, text, "parameter", _SMALL, size=self._scale)
                is_due = self._count % _SPAN == 0 and self._count >= self.steps and not self._is_warm_up
                if is_due:
                    yield from self._stalls(window, row)
                if self._classes:
                    yield from self._later(window, row, is_due)

    def _begin(self, window: Window, loss: float) -> None:
        gradients = window.rows("gradient")
        self._classes = 0 if gradients is None else _classes_of(window, gradients)
        self._chance, self._gradient = abs(loss), window.value("norm", 0)
        if self._classes:
            usual = math.log(self._classes)
            if abs(loss) < usual / 2:
                self._classes = 0  # it has learned before
            elif abs(loss) <= 2 * usual:
                self._chance = usual

    def _outputs(self, window: Window, seen: Observation) -> Iterator[Finding]:
        """Looks for an activation before the softmax of the loss, and for batches with labels of one class."""
        step, first = seen.step, self._first[0] if self._count == 1 else math.nan
        facts, activation, classes = seen.value, seen.value.activation, seen.value.classes
        count, label = facts.labels, 0 if facts.label is None else facts.label + 1
        if math.isnan(self._first_certain):
            self._first_certain, self._labelled = facts.certain, max(1.0, count)
        at = int(np.searchsorted(window.steps, step))
        equal = math.nan
        if facts.fit is not None and all(map(math.isfinite, (*facts.fit, window.value("loss", at)))):
            equal = yield from self._fit(window, at, facts.fit, window.value("loss", at))
        is_over = facts.is_over_samples
        self._askew_for = self._askew_for + 1 if facts.takes_over_samples or is_over else 0
        # The gradient of a squared error of probabilities sums to 0 as well, but its first loss is far from chance.
        is_one = activation == Activation.PROBABILITIES
        is_one = is_one and (self._were_logits or 0.9 < first / math.log(classes) < 1.1)
        self._were_logits |= activation == Activation.NONE and classes > 0
        is_one |= facts.is_named and activation > Activation.PROBABILITIES
        if is_one and "activation" not in self._reported:
            least = math.log1p((classes - 1) / math.e)
            text = f"the outputs of the model {_ACTIVATIONS[activation]}, and the loss takes their softmax"
            text += f": it cannot fall below {least:.4g}" * (activation != Activation.NEVER_NEGATIVE)
            yield self._once("activation", step, "logits", text, "output", _ACTIVATED, classes=classes)
        if self._askew_for == 2 and "askew" not in self._reported:
            what = "outputs of the model are a softmax" if is_over else "loss takes the softmax of the outputs"
            text = f"the {what} over samples or places in a sequence, not over the classes"
            yield self._once("askew", step, "logits", text, "output", _DIM)
        if not count > 0 and equal >= 0:
            label, count = equal, self._samples
        # A discriminator may get real and made samples in passes of their own.
        if window.run.has_rival or "label" in self._reported or not count > 0:
            return
        if not label:
            self._alike, self._differ, self._labels = self._alike + len(self._labels) // 3, self._differ + 1, []
            return
        self._labels += [step, label, count]
        since, each, counts = self._labels[0], self._labels[1::3], self._labels[2::3]
        is_same, before = len({*each}) == 1, self._alike + self._differ
        what = f"labels are of {'the same' if is_same else 'one'} class" if classes > 0 else "targets are equal"
        text = f"in each of {len(each)} batches looked at, all {what}"
        if before:
            text += f"; of {before} before, {self._differ} had several"
            bits = min(math.log2((before + 2) / (self._alike + 1)), _MOST_BITS) * len(each)
            # A policy, which weighs actions by returns, may settle on one.
            is_told = facts.fit is not None and (not facts.fit.squares or count > facts.fit.samples)
            is_odd = bits >= _BITS and (is_told or equal >= 0)
        else:
            is_enough = self._classes and len(each) >= self.measurements and step - since >= self.soon
            is_odd = is_enough and sum(counts) >= (_ALIKE if is_same else min(_ALIKE, _BITS + len(counts)))
        if is_odd:
            yield self._once("label", int(since), "logits", text, "output", _ONE_LABEL, labels=sum(counts))

    def _fit(self, window: Window, row: int, fit: Fit, loss: float) -> Generator[Finding, None, float]:
        """Judges whether outputs follow their targets, by the ``fit`` in the step of a row.

        If residuals are not exact, they are known where the loss is a number times the sum of their squares. Then its
        ratio to the sum of squared gradients, or to their mean, is the same in all batches, though they are not.

        Returns:
            1 if all targets are equal, 0 if not, NaN if that is not known.
        """
        outputs, cross, residuals, squares, count, self._samples = fit
        step, scale, is_known = int(window.steps[row]), 1.0, squares == 0
        if squares > 0 and loss:
            scale, ratio = 2 * loss / squares, squares / loss
            self._ratios = [*self._ratios, squares, ratio, ratio * count][-3 * self.batches :]
            changes, *differ = (np.ptp(of) > 0.01 * abs(of).min() for of in np.reshape(self._ratios, (-1, 3)).T)
            # A loss that is linear in the outputs has a ratio, too, while it stays the same.
            is_one = len(self._ratios) > 6 and changes and not all(differ)
            is_known = is_one and ratio > 0
            if is_one and ratio < 0 and "negative" not in self._reported:
                self._reported["chance"] = step
                text = f"the loss is {loss:.4g}, and minus a sum of squares of residuals"
                yield self._once("negative", step, "loss", text, "series", WRONG_SIGN, loss=loss)
        targets = outputs - 2 * scale * cross + scale**2 * residuals
        # Targets that are equal have a deviation by rounding alone.
        varies = targets > 1e-5 * scale**2 * residuals
        equal = float(not varies) if is_known and residuals > 0 else math.nan
        if not (varies and outputs > 0) or {"chance", "follows"} & {*self._reported} or window.run.has_rival:
            return equal
        spread = math.sqrt(targets / count)
        if math.isnan(self._apart):
            self._apart = math.sqrt(outputs / count) if spread > self.spread else 0.0
        if is_known and squares and 0 < self._apart < spread / self.apart and "spread" not in self._reported:
            text = f"targets have a standard deviation of {spread:.3g}, and the first outputs one of {self._apart:.3g}"
            yield self._once("spread", 0, "loss", text, "series", *_UNSCALED, targets=spread, outputs=self._apart)
        related = (outputs - scale * cross) / math.sqrt(outputs * targets)
        self._related.append(min(related, 1.0) if is_known else _UNKNOWN)
        del self._related[: -self.batches]
        if len(self._related) < self.batches or _UNKNOWN in self._related or self._is_warm_up:
            return equal
        related = float(np.mean(self._related))
        error = float(np.std(self._related, ddof=1)) / math.sqrt(self.batches)
        if related > max(self.related, 3 * error):
            self._reported["followed" if step < _FITS else "follows"] = step
        elif step >= _FITS and related < min(self.related, 2 * error):
            text = f"outputs of the model and their targets have a correlation of {related:.2g} after {step} steps, "
            text += "as by chance"
            since = self._reported.get("followed", 0)
            yield self._once("chance", since, "loss", text, "series", self.causes, correlation=related, loss=loss)
        return equal

    def _weights(self, window: Window, seen: tuple[Rows, int]) -> Iterator[Finding]:
        """Looks at the weights of the first step, and at how far they have come; ``seen`` are rows, and which."""
        parameters, row = seen
        step = int(parameters.steps[row])
        weights = parameters.tensors.matrices  # others may begin at zero, or be statistics that are kept as parameters
        norm = float(np.linalg.norm(np.nan_to_num(parameters.l2_norm[row, weights])))
        if not math.isnan(self._norm):
            self._grown = norm / self._norm
            change, is_soon = self._change(), _SOON + _HALF <= self._count <= self.steps
            is_judged = is_soon and not {"rate", "chance"} & {*self._reported} and not window.run.has_rival
            if change is not None and is_judged:
                loss, sizes = median(self._recent[-_HALF:]), sizes_of_weights(parameters, row)[1]
                is_large = self._grown > 1 and len(sizes) > 0 and median(sizes) > _GROWN
                share = self.early_share if is_large and self._classes and self._count <= _EARLY else self.flat_share
                # Weights that began small have to grow. A loss may also begin at 0, and rise.
                if (is_large or self._grown < 1) and loss > share * self._chance > 0.01 * loss:
                    name, causes, text = change
                    text += f" in {self._count} steps, the loss is {loss:.4g}, and "
                    text += f"{'guessing has' if self._classes else 'it began at'} {self._chance:.4g}"
                    yield self._once("rate", step, name, text, "series", causes, grown=self._grown, loss=loss)
            return
        self._norm, self._grown = max(norm, 1e-300), 1.0
        judged, scales = sizes_of_weights(parameters, row)
        equal = (parameters.field("min") == parameters.field("max"))[row]
        if len(judged) < 2 or (equal[judged].all() and not equal[weights].all()):
            return
        name, equal = parameters.names[judged[0]], equal[judged]
        if equal.all():
            text = f"all elements of {name} are equal at the start, and so are those of each other weight: units that "
            text += "begin alike stay alike"
            causes = ("an initialisation that is constant or zero, or was never called",)
            yield self._once("weights", step, name, text, "parameter", causes, weights=len(judged))
            return
        judged, scales = np.array(judged)[~equal].tolist(), scales[~equal]  # gains may have two dimensions, too
        self._scale = median(scales)
        largest = parameters.names[judged[int(scales.argmax())]]
        has_bias = f"{largest.rpartition('.')[0]}.bias" in parameters.names
        if has_bias and scales.max() > max(self.large, 10 * np.sort(scales)[(len(scales) - 1) // 2]):
            self._odd = largest
        self._tiny = parameters.names[judged[0]] if self._scale < self.small else ""

    def _once(
        self, what: str, step: int, name: str, text: str, about: str, causes: Any, advice: Any = None, **more: Any
    ) -> Finding:
        self._reported[what] = step
        advice = (*_LOWER, *self.advice) if causes is _RATES else advice
        return self.found(step, name, text, about, causes=causes, advice=advice, **more)

    def _beginning(self, window: Window) -> Iterator[Finding]:
        """Judges the losses of the first steps."""
        usual, first, soon = math.log(self._classes), abs(self._first[0]), median(np.abs(self._first))
        begins = first / self._labelled if first > self._labelled * usual / 2 else first  # or it is a sum over samples
        share = 0.0 if math.isnan(self._first_certain) else self._first_certain
        if begins > self.far * usual and (share > 0.3 or self._scale > self.large or self._odd):
            text = f"the loss begins at {first:.4g}, guessing among {self._classes} classes gives {usual:.4g}"
            text += f"; {share:.0%} of the predictions are certain" * (share > 0.3)
            text += f"; {self._odd} begins far larger than other weights" * bool(self._odd)
            where = (self._odd, text, "parameter") if self._odd else ("loss", text, "series")
            yield self._once("far", 0, *where, _SCALES, loss=first, chance=usual, share=share)
        elif begins < 2 * usual and soon > 2 * self.far * max(first, self._chance):  # others may have other terms
            text = f"within {_SOON} steps the loss went from {first:.4g} to {soon:.4g}, by the median"
            yield self._once("rate", 0, "lr", text, "series", _RATES, loss=soon, first=first)

    def _later(self, window: Window, row: int, is_due: bool) -> Iterator[Finding]:
        """Judges the last losses, up to that of ``row``; whether they are those of guessing if it ``is_due``."""
        step = int(window.steps[row])
        # A loss that has become negative, though that of a classifier has a lowest value, usually 0.
        usual, last, soon = math.log(self._classes), self._recent[-_SOON:], self._first[:_SOON]
        least = usual + 2 * max(0.0, -median(soon))
        if _CLOSE[0] * usual < -median(soon) < _CLOSE[1] * usual:
            least = _CLOSE[1] * usual  # minus the loss of guessing, and worse than that
        if "negative" not in self._reported and max(last) < min(0.0, *soon) and -median(last) > least:
            text = f"the loss has fallen to {last[-1]:.4g}; that of a classifier has a lowest value, usually 0"
            self._reported["chance"] = step
            yield self._once("negative", step, "loss", text, "series", WRONG_SIGN, loss=self._recent[-1])
        if {"chance", "rate", "learned"} & {*self._reported}:
            return
        now, chance = median(self._recent), self._chance
        if now < self.flat_share * chance or window.outputs.right > (1 + 1 / self._classes) / 2:
            self._reported["learned"] = step  # in the latter case its loss has other terms as well
            return
        is_flat = self._classes >= 8 and median(self._first) - now < self.flat * now
        # A loss with other terms may end above chance, though it has learned.
        is_stuck = (now >= self.share * chance or is_flat) and now > self.fallen * abs(self._first[0])
        if is_due and is_stuck and not (now < chance and self._is_falling()):
            text = f"the loss is {now:.4g} after {self._count} steps; guessing among {self._classes} classes has "
            name, causes, more = self._likely(window, row)
            text += f"{chance:.4g}{more}"
            yield self._once("chance", 0, name, text, "series", causes, loss=now, chance=chance)

    def _is_falling(self) -> bool:
        """Whether the mean of the last losses is lower than that of those before by four standard errors."""
        halves = np.reshape(self._recent, (2, -1))
        before, now = halves.mean(1).tolist()
        return bool(before - now > 4 * math.sqrt(halves.var(1).sum() / _HALF))

    def _stalls(self, window: Window, row: int) -> Iterator[Finding]:
        """Judges the last losses, up to that of ``row``, without knowing what the model is."""
        if {"chance", "rate"} & {*self._reported} or window.run.has_rival or min(self._recent) <= 0:
            return
        now, began, samples = median(self._recent), median(self._first[:_SOON]), self._samples
        scatter = median(np.abs(np.array(self._recent) - now))
        for count in (2.0, samples, samples - 1, 2 * samples, 2 * samples - 1, 2 * samples - 2):
            usual = math.log(max(count, 1.5))
            if abs(now - usual) < 0.005 * usual > scatter / 2 and self.share * usual < began < _CLOSE[1] * usual:
                text = f"the loss is {now:.4g} after {self._count} steps; guessing among {count:.0f} has {usual:.4g}"
                yield self._once("chance", 0, "loss", text, "series", self.causes, loss=now)
                break

    def _change(self) -> tuple[str, tuple[str, ...], str] | None:
        """If the norm of all weights has changed by far, what is to blame, causes, and how it has."""
        if self._grown < 0.3:
            causes = ("a weight decay that is far too large",)
            return "weight_decay", causes, f"the weights have shrunk to {self._grown:.2g} of their norm"
        if self._grown > 3:
            return "lr", _RATES, f"the weights have grown to {self._grown:.3g} times their norm"
        return None

    def _likely(self, window: Window, row: int) -> tuple[str, tuple[str, ...], str]:
        """The series that is to blame, causes, and an addition to the text, by what the rows show."""
        share, norm, change = window.outputs.certain, window.value("norm", row), self._change()
        if change is not None:
            return change[0], change[1], f"; {change[2]}"
        if share > 0.3:
            return "loss", _SCALES, f"; {share:.0%} of the predictions are certain"
        if norm < 0.01 * self._gradient:
            causes = ("outputs that are saturated, or equal for all inputs", "a loss or inputs multiplied by almost 0")
            return "norm", causes, f"; the gradient norm has fallen from {self._gradient:.3g} to {norm:.3g}"
        return "loss", self.causes, ""


def _classes_of(window: Window, gradients: Rows) -> int:
    """The number of classes of the softmax that the loss ends with; 0 if there is none."""
    order = window.run.backward_order or gradients.names[::-1]
    last = order[0].rpartition(".")[0] if order else ""  # which may have more than a weight and a bias
    for name in [*order[:2], *(name for name in order[2:6] if last and name.rpartition(".")[0] == last)]:
        if name not in gradients.names:
            continue
        at = gradients.names.index(name)
        info, norm = gradients.tensors.infos[at], float(gradients.l2_norm[0, at])
        if info is None or not info.shape or info.shape[0] < 2 or not norm > 0:
            continue
        if abs(float(gradients.field("sum")[0, at])) <= _CANCELS * norm * math.sqrt(info.numel):
            return int(info.shape[0])
    return 0
