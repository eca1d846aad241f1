"""Rules on beginnings that allow no learning: weights, first losses, and what is left of activations."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import RowsRule, Rule, carried, median, same_for, series, sizes_of_weights
from gradstat.rules.course import SOON, LearningRule
from gradstat.rules.rows import Floats, Rows, Window


class HeavyDropout(Rule):
    """A dropout that keeps at most a tenth of its input: a layer, or a function in the model's first forward pass."""

    name = "heavy-dropout"
    explains = ("loss-spike", "exploding-gradient", "no-learning", "unrelated-outputs")
    causes = ("the probability of keeping an element, passed as p=, which is the probability of dropping it",)
    advice = ("pass Dropout(p=) the share of elements that become zero: 0.1 keeps 90 %",)

    _DROPS = 0.9

    def review(self, window: Window) -> Iterable[Finding]:
        if self._episodes or not len(window.steps):
            return
        settings = (name.partition("dropout of ")[2] for name, p in window.run.settings.items() if p >= self._DROPS)
        if modules := list(filter(None, settings)):
            step = 0 if window.steps[-1] <= SOON else int(window.steps[0])
            self.begins(modules[0], step)
            text = f"the dropout of {modules[0]} keeps a tenth of its input or less" + same_for(len(modules))
            yield self.found(step, modules[0], text, "module", modules=modules[:20])
        for step, share in series(window, "dropped"):
            if share > self._DROPS - 1e-6 and not self._episodes:  # it was computed from what is left, in 32 bits
                self.begins("dropped", step)
                text = f"a dropout of the forward pass sets {share:.3g} of its input to zero"
                yield self.found(step, "dropped", text, share=share)


class IdleBatchNorm(RowsRule):
    """Batch norms that are trained in eval mode: their running statistics are still 0 and 1 after fifty steps.

    They then normalise by these initial values, not by the batch.
    """

    name = "idle-batch-norm"
    kinds = ("buffer",)
    explains = ("no-learning", "unrelated-outputs")
    causes = ("model.eval() was called, and model.train() was not called after it", "a batch norm with momentum=0")
    advice = ("call model.train() before training, and after each evaluation",)

    _LOOK = 50  # the first step in which buffers are measured again

    _is_over = carried(False)

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        gradients, step = window.latest.get("gradient"), int(rows.steps[-1])
        if self._is_over or gradients is None or step < self._LOOK:
            return
        self._is_over = True
        is_one = (rows.field("min")[-1] == 1) & (rows.field("max")[-1] == 1)
        is_zero = rows.field("zero_count")[-1] == rows.numel
        of_one, of_zero = ({rows.names[i] for i in np.flatnonzero(which)} for which in (is_one, is_zero))
        layers = [name.rpartition(".")[0] for name in rows.names if name.endswith("running_var") and name in of_one]
        named = {f"{layer}.weight": layer for layer in layers if f"{layer}.running_mean" in of_zero}
        has_gradient = gradients.of((*named,)).l2_norm[-1] > 0
        idle = [layer for layer, is_trained in zip(named.values(), has_gradient, strict=True) if is_trained]
        if idle:
            text = f"the batch norm {idle[0]} is trained in eval mode: its running mean and variance are still 0 and 1 "
            text += f"after {step} steps" + same_for(len(idle))
            yield self.found(0, idle[0], text, "module", modules=idle[:20])


def _first_sizes(window: Window) -> tuple[tuple[str, ...], Floats] | None:
    """The names of weights that vary, and the size of each in the first step; None if they were not measured.

    A weight keeps the size of signals if its own is about 1. There are none if fewer than two weights vary.
    """
    parameters = window.measured.get("parameter")
    if parameters is None:
        return None
    judged, sizes = sizes_of_weights(parameters, 0)
    varies = (parameters.field("min") != parameters.field("max"))[0, judged]  # gains may have two dimensions, too
    if len(judged) < 2:
        return (), np.empty(0)
    return tuple(parameters.names[i] for i in np.array(judged)[varies]), sizes[varies]


_ROUNDED = 0.01  # as far as such a number may be rounded, in 16 bits


class ConstantWeights(LearningRule):
    """Weights with equal elements in the first step, so that the units of a layer are copies of each other.

    It is not reported if only some weights are zero, as the last of a branch may be, or one, as a gain is; nor for the
    reciprocal of the number of inputs, of which a layer makes a mean; nor for a last layer, whose units have other
    targets each: the next weight has as many inputs as a layer has units.
    """

    name = "constant-weights"
    explains = ("dead-gradient", "no-learning", "unrelated-outputs")
    causes = ("an initialisation that fills weights with a constant or zero, or was never called",)
    advice = ("initialise weights at random, as reset_parameters() of torch's modules does",)

    def judge(self, window: Window) -> Iterable[Finding]:
        parameters = window.measured.get("parameter")
        if parameters is None:
            return
        self._is_over, judged, tensors = True, sizes_of_weights(parameters, 0)[0], parameters.tensors
        values = parameters.field("min")[0]
        are_constant = values == parameters.field("max")[0]
        inputs = np.array([math.prod(shape[1:]) for shape in tensors.shapes])
        are_constant &= np.abs(values * inputs - 1) > _ROUNDED
        # Also those of one column, which may be gains: then matrices are left that vary.
        if len(judged) > 1 and are_constant[judged].all() and are_constant[tensors.matrices].all():
            name = parameters.names[judged[0]]
            text = f"all elements of {name} are equal at the start, and the same holds for every other weight: the "
            text += "units of a layer stay copies of each other"
            yield from self._found_once(int(parameters.steps[0]), name, text, "parameter", weights=len(judged))
        elif "gradient" in window.latest:
            are_constant &= window.latest["gradient"].of(parameters.names).present[-1] & (values != 0)
            shapes = [tensors.shapes[i] for i in judged]
            feeds = {i for i, of, after in zip(judged, shapes, shapes[1:], strict=False) if of[0] == after[1]}
            is_layer = tensors.of_layers | ((values != 1) & [name.endswith(".weight") for name in parameters.names])
            alone = [parameters.names[i] for i in sorted(feeds) if are_constant[i] and is_layer[i]]
            if alone:
                text = f"all elements of {alone[0]} are equal at the start: the units of this layer begin as copies of "
                text += f"each other{same_for(len(alone))}"
                yield from self._found_once(int(parameters.steps[0]), alone[0], text, "parameter", weights=len(alone))


class TinyWeights(LearningRule):
    """Most weights of three or more are initialised far too small."""

    name = "tiny-weights"
    explains = ("no-learning", "unrelated-outputs", "small-second-moment")
    causes = ("an initialisation with a factor or a standard deviation far too small",)
    advice = ("initialise each weight with a standard deviation of about 1 / sqrt(number of inputs)",)

    # Of the median size; that of healthy programs, of the tests and of others, is 0.05 or more. Two still learn.
    _SMALL, _SHALLOW = 0.02, 2

    def judge(self, window: Window) -> Iterable[Finding]:
        first = _first_sizes(window)
        if first is None:
            return
        self._is_over = True
        if len(first[0]) > self._SHALLOW and (size := median(first[1])) < self._SMALL:
            text = f"half of the weights begin with at most {size:.2g} times the standard deviation that preserves the "
            text += "scale of activations"
            yield from self._found_once(0, first[0][0], text, "parameter", size=size)


_MARGIN = 10.0  # by which the logit of a certain prediction exceeds others


class FarBeginning(LearningRule):
    """A classifier whose first loss is far above that of guessing, with outputs or weights that are too large."""

    name = "far-beginning"
    causes = (
        "inputs that are not normalised, or logits that are multiplied by a large factor",
        "weights initialised far too large",
    )
    advice = (
        "normalise the inputs, and remove factors on logits and weights",
        "initialise each weight with a standard deviation of about 1 / sqrt(number of inputs)",
    )

    # Times the loss of guessing: healthy classifiers of the tests begin between 0.9 and 1.8, but for other terms.
    _FAR = 2.5
    # The share of predictions that are certain; the median size of weights, up to 2.7 in healthy programs.
    _CERTAIN, _LARGE = 0.3, 5.0

    # Of the first outputs: the share of certain predictions, the number of labels, and the share of certain mistakes.
    _certain, _labels, _wrong = carried(math.nan), carried(1), carried(0.0)
    _size = carried(math.nan)

    def judge(self, window: Window) -> Iterable[Finding]:
        sizes = _first_sizes(window) if math.isnan(self._size) else None
        if sizes is not None:
            self._size = median(sizes[1]) if sizes[0] else 0.0
        looks = window.observed("outputs")
        if looks and math.isnan(self._certain):
            facts = looks[0].value
            self._certain, self._labels, self._wrong = facts.certain, facts.labels, facts.certain - facts.right
        yield from self._take(window)

    def _judge_losses(self, window: Window, row: int) -> Iterable[Finding]:
        self._is_over = True
        usual, first = math.log(max(self._classes, 1)), abs(self._first[0])
        share = 0.0 if math.isnan(self._certain) else self._certain
        # It may be a sum over samples, but not of less than such mistakes cost.
        each = first / max(self._labels, 1)
        each = each if each > max(usual / 2, _MARGIN * self._wrong) else first
        if self._classes and each > self._FAR * usual and (share > self._CERTAIN or self._size > self._LARGE):
            text = f"the loss begins at {first:.4g}; guessing among {self._classes} classes gives {usual:.4g}"
            text += f"; {share:.0%} of the predictions are saturated" * (share > self._CERTAIN)
            yield from self._found_once(0, "loss", text, loss=first, chance=usual, share=share)
