"""The built-in rules. Each is a small class; its thresholds are constants beside it, with where they come from."""

from gradstat.rules.base import Rule
from gradstat.rules.beginnings import (
    ConstantWeights,
    EvalMode,
    FarBeginning,
    HeavyDropout,
    TinyWeights,
)
from gradstat.rules.clips import ScaledClip, TinyClip
from gradstat.rules.data import (
    BatchRange,
    ConstantFeature,
    LabelRange,
    NonfiniteRank,
    RepeatedBatch,
    ReplicaMismatch,
    UnreducedGradients,
)
from gradstat.rules.finite import (
    NonfiniteActivation,
    NonfiniteBatch,
    NonfiniteBuffer,
    NonfiniteGradient,
    NonfiniteLoss,
    NonfiniteOptimizerState,
    NonfiniteParameter,
)
from gradstat.rules.gradients import DeadGradient, ExplodingGradient, MissingGradient, Underflow, VanishingGradient
from gradstat.rules.learning import GrowingWeights, LossDrop, NegativeLoss, TinySteps
from gradstat.rules.learning_rate import HeavyDecay, LearningRateJump, LongWarmUp
from gradstat.rules.optimizer import (
    GradientsNotZeroed,
    OptimizerMemory,
    SmallSecondMoment,
    UnusedGradients,
)
from gradstat.rules.outputs import ActivatedOutputs, EqualTargets, SoftmaxDimension, UnrelatedOutputs
from gradstat.rules.resumption import NotRestored
from gradstat.rules.training import LossSpike, OptimizerCoverage
from gradstat.rules.weights import NonpositiveParameter, OverwrittenParameter, ParameterJump, UnchangedParameter

RULES: tuple[type[Rule], ...] = (
    # The inputs of a step.
    NonfiniteBatch,
    BatchRange,
    LabelRange,
    ConstantFeature,
    RepeatedBatch,
    LearningRateJump,
    LongWarmUp,
    # The state it begins with. The optimizer's comes first, since it produced the parameters by its last update.
    NotRestored,
    OptimizerCoverage,
    GradientsNotZeroed,
    UnusedGradients,
    ScaledClip,
    TinyClip,
    UnreducedGradients,
    ReplicaMismatch,
    NonfiniteOptimizerState,
    HeavyDecay,
    OptimizerMemory,
    NonfiniteParameter,
    ParameterJump,
    OverwrittenParameter,
    NonpositiveParameter,
    NonfiniteBuffer,
    # Its forward pass.
    NonfiniteActivation,
    NonfiniteLoss,
    # Its backward pass.
    NonfiniteRank,
    NonfiniteGradient,
    MissingGradient,
    DeadGradient,
    Underflow,
    VanishingGradient,
    LossSpike,  # it names no place, unlike what stopped a part of the model
    ExplodingGradient,
    # Its results.
    UnchangedParameter,
    HeavyDropout,
    EvalMode,
    ConstantWeights,
    TinyWeights,
    FarBeginning,
    ActivatedOutputs,
    SoftmaxDimension,
    EqualTargets,
    NegativeLoss,
    LossDrop,
    GrowingWeights,
    TinySteps,
    UnrelatedOutputs,
    SmallSecondMoment,
)
"""All built-in rules, in the order in which they run: causes before effects, if both show in one step."""


def default_rules() -> list[Rule]:
    """A new instance of every rule."""
    return [kind() for kind in RULES]


__all__ = [kind.__name__ for kind in RULES]
