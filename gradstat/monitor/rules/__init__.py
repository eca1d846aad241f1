"""The built-in rules. Each is a small class whose thresholds are arguments."""

from gradstat.monitor.rules.base import Rule, rule
from gradstat.monitor.rules.data import (
    BatchRange,
    ConstantFeature,
    LabelRange,
    NonfiniteRank,
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
from gradstat.monitor.rules.learning import NoLearning
from gradstat.monitor.rules.optimizer import GradientsNotZeroed, MomentumDrift, SecondMomentDrop, SmallSecondMoment
from gradstat.monitor.rules.precision import LossScale, Underflow
from gradstat.monitor.rules.training import (
    ClipActivity,
    LearningRateJump,
    LossSpike,
    OptimizerCoverage,
    RefusedStep,
    SaturatedOutput,
)
from gradstat.monitor.rules.weights import (
    GradientWeightRatio,
    OverwrittenParameter,
    ParameterJump,
    UnchangedParameter,
    UpdateWeightRatio,
)

RULES: tuple[type[Rule], ...] = (
    # The inputs of a step.
    NonfiniteBatch,
    BatchRange,
    LabelRange,
    ConstantFeature,
    RepeatedBatch,
    LearningRateJump,
    # The state it begins with. The optimizer's comes first, since it produced the parameters by its last update.
    OptimizerCoverage,
    GradientsNotZeroed,
    ReplicaMismatch,
    NonfiniteOptimizerState,
    SecondMomentDrop,
    MomentumDrift,
    UpdateWeightRatio,
    NonfiniteParameter,
    ParameterJump,
    OverwrittenParameter,
    NonfiniteBuffer,
    # Its forward pass, and the rule that explains sporadic NaN anywhere.
    SporadicNonfinite,
    NonfiniteActivation,
    NonfiniteLoss,
    LostLoss,
    SaturatedOutput,
    # Its backward pass.
    NonfiniteRank,
    LossScale,
    NonfiniteGradient,
    MissingGradient,
    DeadGradient,
    Underflow,
    VanishingGradient,
    LossSpike,  # it names no place, unlike what stopped a part of the model
    ExplodingGradient,
    GradientWeightRatio,
    # Its results.
    UnchangedParameter,
    NoLearning,
    SmallSecondMoment,
    RefusedStep,
    ClipActivity,
)
"""All built-in rules, in the order in which they run: causes before effects, if both show in one step."""


def default_rules() -> list[Rule]:
    """A new instance of every rule, with default thresholds."""
    return [kind() for kind in RULES]


__all__ = ["RULES", "Rule", "default_rules", "rule", *(kind.__name__ for kind in RULES)]
