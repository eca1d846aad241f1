"""Rules on beginnings that allow no learning: weights and biases, first losses, and what is left of activations."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from typing import Any

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import Rule, carried, median, same_for, series, sizes_of_weights
from gradstat.rules.course import SOON, LearningRule
from gradstat.rules.gradients import NEVER_INITIALISED
from gradstat.rules.rows import Bools, Rows, Window


class HeavyDropout(Rule):
    """A dropout that keeps at most a tenth of its input: a layer, or a function in the model's first forward pass."""

    name = "heavy-dropout"
    explains = ("loss-spike", "exploding-gradient", "unrelated-outputs")
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


class EvalMode(Rule):
    """A model with dropouts or batch norms that is trained in eval mode for 16 steps in a row.

    It is not reported if some module is in training mode, as where only batch norms are frozen on purpose.
    """

    name = "eval-mode"
    explains = ("loss-spike", "unrelated-outputs")
    causes = (
        "model.eval() was called, and model.train() was not called after it",
        "a model that from_pretrained() has loaded, which is in eval mode",
    )
    advice = ("call model.train() before training, and after each evaluation",)

    _STEPS = 16

    _since = carried(-1)  # the step since which it is

    def review(self, window: Window) -> Iterable[Finding]:
        idle = window.run.settings.get("number of idle modules", 0)
        for step in window.steps[-1:].tolist():
            began = int(window.steps[0]) if self._since < 0 else self._since
            self._since = began if idle else -1
            if idle and step - began >= self._STEPS and self.begins("", step):
                text = "the model is trained in eval mode: dropouts do nothing, and batch norms use running statistics"
                yield self.found(began, "model", text, "module", modules=idle)


class FarBeginning(LearningRule):
    """A classifier whose first loss is far above that of guessing, with outputs that are too large."""

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
    _CERTAIN, _RIGHT = 0.3, 0.75  # of all predictions; as many are right only if the model was trained before

    _certain = carried(math.nan)  # the share of the first predictions that are certain, 0 if most are right

    def judge(self, window: Window) -> Iterable[Finding]:
        looks = window.observed("outputs")
        if looks and math.isnan(self._certain):
            facts = looks[0].value
            self._certain = 0.0 if facts.right > self._RIGHT else facts.certain
        yield from self._take(window)

    def _judge_losses(self, window: Window, row: int) -> Iterable[Finding]:
        self._is_over = True
        usual, first = math.log(max(self._classes, 1)), abs(self._first[0])
        if self._classes and first > self._FAR * usual and self._certain > self._CERTAIN:
            text = f"the loss begins at {first:.4g}; guessing among {self._classes} classes gives {usual:.4g}; "
            text += f"{self._certain:.0%} of the predictions are saturated"
            yield from self._found_once(0, "loss", text, loss=first, chance=usual, share=self._certain)


class ConstantWeights(LearningRule):
    """Equal elements in each weight that trains, at first, so that the units of a layer are copies of each other.

    Also in most of them, but for zeros, as the last of a branch may be zero; not the reciprocal of the number of
    inputs, of which a layer makes a mean.
    """

    name = "constant-weights"
    explains = ("dead-gradient", "unrelated-outputs")
    causes = ("an initialisation that fills weights with a constant or zero, or was never called",)
    advice = ("initialise weights at random, as reset_parameters() of torch's modules does",)

    _ROUNDED = 0.01  # as far as such a reciprocal may be rounded, in 16 bits

    def judge(self, window: Window) -> Iterable[Finding]:
        parameters = window.measured.get("parameter")
        if parameters is None:
            return
        self._is_over, tensors, gradients = True, parameters.tensors, window.latest.get("gradient")
        trains = gradients.of(parameters.names).present[-1] if gradients is not None else tensors.matrices
        judged = [i for i in sizes_of_weights(parameters, 0)[0] if trains[i]]
        values = parameters.field("min")[0]
        inputs = np.array([math.prod(shape[1:]) for shape in tensors.shapes])
        are_constant = (values == parameters.field("max")[0]) & (np.abs(values * inputs - 1) > self._ROUNDED)
        # All, also those of one column, which may be gains: then matrices are left that vary. Or most, but for zeros.
        are_all = are_constant[judged].all() and are_constant[tensors.matrices & trains].all()
        most = are_constant[judged] & (values[judged] != 0) & (inputs[judged] > 1)
        if len(judged) > 1 and (are_all or 2 * most.sum() > (tensors.matrices & trains).sum()):
            name = parameters.names[judged[0] if are_all else judged[int(most.argmax())]]
            others = "every other weight" if are_all else "most weights"
            text = f"all elements of {name} are equal at the start, and the same holds for {others}: units of a layer "
            text += "stay copies of each other"
            yield from self._found_once(int(parameters.steps[0]), name, text, "parameter", weights=len(judged))


class TinyWeights(LearningRule):
    """Most weights of three or more are initialised far too small."""

    name = "tiny-weights"
    explains = ("unrelated-outputs", "small-second-moment")
    causes = ("an initialisation with a factor or a standard deviation far too small",)
    advice = ("initialise each weight with a standard deviation of about 1 / sqrt(number of inputs)",)

    # Of the median size; that of healthy programs, of the tests and of others, is 0.05 or more. Two still learn.
    _SMALL, _SHALLOW = 0.02, 2

    def judge(self, window: Window) -> Iterable[Finding]:
        parameters = window.measured.get("parameter")
        if parameters is None:
            return
        self._is_over, (judged, sizes) = True, sizes_of_weights(parameters, 0)
        varies = (parameters.field("min") != parameters.field("max"))[0, judged]  # gains may have two dimensions, too
        if varies.sum() > self._SHALLOW and (size := median(sizes[varies])) < self._SMALL:
            text = f"half of the weights begin with at most {size:.2g} times the standard deviation that preserves the "
            text += "scale of activations"
            name = parameters.names[judged[int(varies.argmax())]]
            yield from self._found_once(0, name, text, "parameter", size=size)


_INITIAL = 1e8  # the magnitude above which no initialised parameter begins
# The size of a layer's weight, as `sizes_of_weights` defines it: up to 2.1 in 44 public programs, if no normal
# distribution of standard deviation 1.
_LARGE, _ENOUGH = 5.0, 16
# The number of inputs up to which a layer may make waves of coordinates, as far as a standard deviation of 1 may be off
# by chance, and the largest element over it, which is 1.73 in uniform distributions.
_COORDINATES, _NORMAL, _TAILS = 4, 0.05, 2.5
_OF_LAYER = ("an initialisation of this layer that differs from the others, or was applied twice",)


def far_off(window: Window, rows: Rows, is_new: Bools) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Judges the first of ``rows``, for weights with a gradient that were not measured before.

    Yields a weight, what is wrong with it, and what else its finding has.
    """
    fresh = rows.tensors.matrices & is_new
    if "gradient" not in window.latest or not fresh.any():
        return
    fresh &= window.latest["gradient"].of(rows.names).present[-1]
    for i in np.flatnonzero(fresh & (rows.max_abs[0] > _INITIAL)).tolist():
        text = f"{rows.names[i]} has an element of magnitude {rows.max_abs[0, i]:.3g} at the start"
        yield rows.names[i], text, {**NEVER_INITIALISED, "now": rows.max_abs[0, i]}
    layers = {name for seen in window.observed("layers") for name in seen.value}
    sizes, shapes = [*zip(*sizes_of_weights(rows, 0), strict=True)], rows.tensors.shapes
    # Also of a single output.
    ones = [i for i, shape in enumerate(shapes) if len(shape) > 1 and shape[0] == 1 and math.prod(shape) >= _ENOUGH]
    sizes += [(i, rows.std[0, i] * math.sqrt(math.prod(shapes[i]))) for i in ones]
    size, i = max(((size, i) for i, size in sizes if fresh[i] and _is_of_layer(rows, i, layers)), default=(0.0, -1))
    if size > _LARGE:
        text = f"{rows.names[i]} begins with {size:.3g} times the standard deviation that preserves activations' scale"
        yield rows.names[i], text, {"severity": "warning", "causes": _OF_LAYER, "ratio": size}


def _is_of_layer(rows: Rows, i: int, layers: Container[str]) -> bool:
    """Whether a weight is of one of the ``layers`` or has a bias, and may not be large on purpose.

    As those are that make waves of a few coordinates, and those drawn from the standard normal distribution.
    """
    is_normal = abs(rows.std[0, i] - 1) < _NORMAL and rows.max_abs[0, i] > _TAILS * rows.std[0, i]
    is_wide = math.prod(rows.tensors.shapes[i][1:]) > _COORDINATES
    return is_wide and not is_normal and bool(rows.tensors.of_layers[i] or rows.names[i] in layers)
