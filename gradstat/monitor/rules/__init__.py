"""The rules that come with gradstat. Each is a small class whose thresholds are arguments."""

from gradstat.monitor.rules.base import Rule, rule
from gradstat.monitor.rules.data import (
    BadRank,
    BatchRange,
    ConstantFeature,
    LabelRange,
    RepeatedBatch,
    ReplicaMismatch,
)
from gradstat.monitor.rules.finite import (
    LostLoss,
    NonfiniteActivation,
    NonfiniteBatch,
    NonfiniteBuffer,
    NonfiniteGradient,
    NonfiniteLoss,
    NonfiniteOptimizerState,
    NonfiniteParameter,
    SporadicNonfinite,
)
from gradstat.monitor.rules.gradients import DeadGradient, ExplodingGradient, MissingGradient, VanishingGradient
from gradstat.monitor.rules.optimizer import MomentumDrift, SecondMomentDrop, SmallSecondMoment
from gradstat.monitor.rules.precision import LossScale, Underflow
from gradstat.monitor.rules.training import (
    ClipActivity,
    LearningRateJump,
    LossSpike,
    OptimizerCoverage,
    RefusedStep,
    SaturatedOutput,
)
from gradstat.monitor.rules.weights import GradientWeightRatio, ParameterJump, UnchangedParameter, UpdateWeightRatio

RULES: tuple[type[Rule], ...] = (
    # What goes into a step.
    NonfiniteBatch,
    BatchRange,
    LabelRange,
    ConstantFeature,
    RepeatedBatch,
    LearningRateJump,
    # The state it begins with: the optimizer's made the parameters what they are.
    OptimizerCoverage,
    ReplicaMismatch,
    NonfiniteOptimizerState,
    SecondMomentDrop,
    MomentumDrift,
    NonfiniteParameter,
    ParameterJump,
    NonfiniteBuffer,
    # Its forward pass, and what explains all that is not finite in it.
    SporadicNonfinite,
    NonfiniteActivation,
    NonfiniteLoss,
    LostLoss,
    LossSpike,
    SaturatedOutput,
    # Its backward pass.
    BadRank,
    LossScale,
    NonfiniteGradient,
    MissingGradient,
    DeadGradient,
    Underflow,
    VanishingGradient,
    ExplodingGradient,
    GradientWeightRatio,
    # What comes of it.
    UpdateWeightRatio,
    UnchangedParameter,
    SmallSecondMoment,
    RefusedStep,
    ClipActivity,
)
"""All of them, in the order in which they are asked: causes go before effects, as far as both show in one step."""


def default_rules() -> list[Rule]:
    """A new instance of every rule, with default thresholds."""
    return [kind() for kind in RULES]


__all__ = ["RULES", "Rule", "default_rules", "rule", *(kind.__name__ for kind in RULES)]
