"""Averages of weights that are kept in 16 bits, and stand still since what is added to them rounds away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradstat.rules.base import same_for

ROUNDED_AVERAGE = "an average in 16 bits with a decay near 1: each update is below the precision of the average"
IN_FLOAT32 = "keep averages of weights in float32, even if the weights are in 16 bits"
# Of its elements at least the first share is far from the weights, and of these more than the second have not changed.
# In trainings with averages the second is 0.08 at most with decays of which nothing rounds away (0.9 in bfloat16, 0.99
# in float16), and 0.5 to 1 with a decay of 0.999 and more.
_ARE_FAR, _STAND_STILL = 0.2, 0.5


class Average(NamedTuple):
    """What two looks, so many ``steps`` apart, say of an average of weights that is kept in 16 bits.

    Attributes:
        name: Its name in the model.
        steps: Steps between both looks.
        is_written: Whether it was written to in each of them, or has changed.
        far: The share of its elements that are far from the weight.
        still: The share of these that have not changed.
    """

    name: str
    steps: int
    is_written: bool
    far: float
    still: float


def standing_still(looks: Sequence[Average], steps: int) -> list[Average]:
    """Those of averages that are written in each step, and do not follow their weights over at least so many steps."""
    written = [one for one in looks if one.is_written and one.steps >= steps]
    return [one for one in written if one.far >= _ARE_FAR and one.still > _STAND_STILL]


def in_words(still: Sequence[Average]) -> str:
    """What is said of averages that stand still."""
    name, steps, _, _, share = still[0]
    text = f"{name}, an average of weights in 16 bits, does not follow them: of its elements that are far from the "
    text += f"weights, {share:.0%} have not changed in {steps} steps"
    return text + same_for(len(still))
