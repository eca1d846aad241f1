"""The rules that come with gradstat. Each is a small class whose thresholds are arguments."""

from gradstat.monitor.rules.base import Rule, rule
from gradstat.monitor.rules.data import (
    BadRank,
    BatchRange,
    ConstantFeature,
    LabelRange,
    NonfiniteBatch,
    RepeatedBatch,
    ReplicaMismatch,
)
from gradstat.monitor.rules.finite import (
    LostLoss,
    NonfiniteActivation,
    NonfiniteBuffer,
    NonfiniteGradient,
    NonfiniteLoss,
    NonfiniteOptimizerState,
    NonfiniteParameter,
    SporadicNonfinite,
)
from gradstat.monitor.rules.magnitude import (
    DeadGradient,
    ExplodingGradient,
    GradientWeightRatio,
    MissingGradient,
    ParameterJump,
    UnchangedParameter,
    UpdateWeightRatio,
    VanishingGradient,
)
from gradstat.monitor.rules.optimizer import MomentumDrift, SmallSecondMoment
from gradstat.monitor.rules.precision import LossScale, Underflow
from gradstat.monitor.rules.training import (
    ClipActivity,
    LearningRateJump,
    LossSpike,
    OptimizerCoverage,
    SaturatedOutput,
)

RULES: tuple[type[Rule], ...] = (
    NonfiniteBatch,
    NonfiniteParameter,
    NonfiniteBuffer,
    NonfiniteOptimizerState,
    NonfiniteActivation,
    NonfiniteLoss,
    LostLoss,
    NonfiniteGradient,
    BadRank,
    SporadicNonfinite,
    ExplodingGradient,
    VanishingGradient,
    DeadGradient,
    MissingGradient,
    GradientWeightRatio,
    UpdateWeightRatio,
    ParameterJump,
    UnchangedParameter,
    LossSpike,
    LearningRateJump,
    ClipActivity,
    SaturatedOutput,
    OptimizerCoverage,
    Underflow,
    LossScale,
    MomentumDrift,
    SmallSecondMoment,
    BatchRange,
    ConstantFeature,
    LabelRange,
    RepeatedBatch,
    ReplicaMismatch,
)
"""All of them, in the order in which they are asked."""


def default_rules() -> list[Rule]:
    """A new instance of every rule, with default thresholds."""
    return [kind() for kind in RULES]


__all__ = ["RULES", "Rule", "default_rules", "rule", *(kind.__name__ for kind in RULES)]
