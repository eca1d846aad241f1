"""What rules learn about a model's outputs, and about what the loss makes of them: facts, no statistics of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple


class Activation(IntEnum):
    """What a loss that takes the softmax of outputs gets in place of logits."""

    NONE = 0  # logits; also if the loss takes no softmax
    PROBABILITIES = 1  # they sum to 1 over the classes
    SIGMOID = 2  # autograd says that a sigmoid made them
    RELU = 3  # that a ReLU did


class ActivatedLogits(NamedTuple):
    """A loss that takes logits gets what an activation has made of them, as its graph says.

    Attributes:
        function: What takes logits, for example ``"log_softmax"``.
        activation: For example ``"softmax"``.
        classes: The number of classes of probabilities, of which the loss takes the logarithm of one for each sample; 0
            if it does something else.
    """

    function: str
    activation: str
    classes: int


class Fit(NamedTuple):
    """Sums that tell whether outputs follow their targets. A residual is an output less its target.

    Attributes:
        outputs, cross, residuals: Around the means over samples, of squared outputs, of products of outputs and
            residuals, and of squared residuals.
        squares: Of squared gradients, of which residuals are then an unknown multiple; 0 if residuals are exact.
        elements: The number of outputs.
        samples: The number of samples.
        evenness: The mean of squared residuals over the largest, of a few. It is 1 for absolute errors.
        crossing: The share of pairs of samples of which the one with the larger output has the smaller residual. There
            are none if a convex loss has the same target for all.
        facing: The share of pairs of samples with opposite residuals.
        are_errors: Whether the target of all may be 0, as if outputs were residuals themselves.
    """

    outputs: float
    cross: float
    residuals: float
    squares: float
    elements: float
    samples: float
    evenness: float = 0.0
    crossing: float = 1.0
    facing: float = 0.0
    are_errors: float = 0.0

    def targets(self, scale: float) -> float:
        """The sum of squared targets around their means, if residuals are to be multiplied by ``scale``."""
        return self.outputs - 2 * scale * self.cross + scale**2 * self.residuals


class OutputFacts(NamedTuple):
    """What is known about the outputs of one forward pass, of the rows that were read.

    A field is 0 or False if it is not known. So are ``activation`` to ``spread``, unless the loss takes the softmax of
    the outputs, or one logarithm of a probability for each sample.

    Attributes:
        certain: The share of predictions whose largest logit exceeds the next by more than 10.
        is_over_samples: Whether outputs are a softmax over the samples or over places in a sequence, or its logarithm.
        takes_over_samples: Whether the loss takes such a softmax.
        takes_one: Whether the loss takes one output of each row, not the same in all and no logarithm of a
            probability, as Q-learning takes that of the action.
        activation: What the outputs went through before the softmax.
        classes: The number of classes.
        labels: The number of labels.
        least, most: The smallest and the largest label.
        right: The share of labels whose logit is the largest.
        middle, spread: The mean of the labels as numbers, and their variance.
        fit: Whether outputs follow their targets; None if nothing is known about these.
    """

    certain: float = 0.0
    is_over_samples: bool = False
    takes_over_samples: bool = False
    takes_one: bool = False
    activation: Activation = Activation.NONE
    classes: int = 0
    labels: int = 0
    least: int = 0
    most: int = 0
    right: float = 0.0
    middle: float = 0.0
    spread: float = 0.0
    fit: Fit | None = None

    @classmethod
    def of(cls, numbers: Sequence[float]) -> OutputFacts:
        """The facts in ``numbers``, in the order of the fields: those of a fit come last."""
        kinds: Any = (float, bool, bool, bool, Activation, int, int, int, int, float, float, float)
        facts = cls(*(kind(number) for kind, number in zip(kinds, numbers, strict=False)))
        sums = numbers[len(kinds) :]
        return facts._replace(fit=Fit(*sums)) if sums else facts
