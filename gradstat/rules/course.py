"""What rules on learning have in common: the losses so far, what guessing has, and how far the weights have come."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from gradstat.recording.findings import Finding
from gradstat.rules.base import Rule, carried, median
from gradstat.rules.rows import Bools, Rows, Window

# Thresholds of the rules on learning are conventions of gradstat, where nothing else is said.

# Losses are judged after every so many; values of which medians are taken, of the last losses and of the first ones.
SOON, HALF, SPAN = 16, 32, 64
# From this share of the loss of guessing on, or of the first one, hardly anything was learned.
FLAT = 0.9
# A learning rate still rises if it is more than so many times that of the last look: less is rounding.
RISES = 1.001
# A gradient's elements cancel up to |sum| / (norm * sqrt(count)), even if it was computed in 16 bits.
_CANCELS = 3e-4

LARGE_EPS = "an optimizer eps that is far too large, or a loss that is multiplied by almost 0"
USUAL_EPS = "use the optimizer's usual eps: 1e-8 for Adam"
SCALED = "a loss or gradients that are multiplied by almost 0, or gradients that are clipped to a tiny norm"


class LearningRule(Rule):
    """Base of rules that report once why the model does not learn. They look at windows that have a finite loss.

    The gradients of the last layer tell whether the model is a classifier: their elements cancel, since the gradient of
    a softmax is a difference of distributions. The size C of that layer is the number of classes, and guessing has a
    loss of ln C. If the first loss is more than twice that, the loss may be a sum, and the first one counts as chance.
    If it is less than half of that, the model has learned before and is not judged. Neither is a model whose last layer
    has other gradients as well, as a tied embedding has, or whose gradients are in bfloat16.
    """

    quiet = sys.maxsize

    _is_over = carried(False)  # whether nothing is left to judge
    _count = carried(0)  # of finite losses
    _classes = carried(0)  # of the softmax that the loss ends with, 0 if there is none
    _first, _recent = carried(list[float]()), carried(list[float]())
    _until = carried(-1)  # the last step of which `_take` has taken the loss
    _rate, _is_warm_up = carried(math.nan), carried(False)  # whether it has risen in the last `SOON` steps

    def review(self, window: Window) -> Iterable[Finding]:
        return () if self._is_over or not window.losses.steps else self.judge(window)

    def judge(self, window: Window) -> Iterable[Finding]:
        """Finds problems in a window with a finite loss, step by step."""
        rows = window.measured.get("parameter")
        for row, step in enumerate([] if rows is None else rows.steps.tolist()):
            yield from self._take(window, step)
            if rows is not None and not self._is_over:
                yield from self._judge_weights(window, rows, row)
        yield from self._take(window)

    def _judge_weights(self, window: Window, rows: Rows, row: int) -> Iterable[Finding]:
        """Finds problems in a ``row`` of parameters, once the losses up to its step are taken."""
        return ()

    def _judge_losses(self, window: Window, row: int) -> Iterable[Finding]:
        """Finds problems in the losses that are taken, the last of them in a ``row`` of the ``window``."""
        return ()

    def _found_once(self, step: int, name: str, text: str, about: str = "series", **more: Any) -> list[Finding]:
        """A finding as `found` makes it, unless the rule has reported one before; it is over then."""
        self._is_over = True
        return [self.found(step, name, text, about, **more)] if self.begins(self.name, step) else []

    def _take(self, window: Window, until: float = math.inf) -> Iterator[Finding]:
        """Takes the losses that are left up to the step ``until``; judges them after each `SOON`-th of all."""
        steps, rows, values = window.losses
        at, end = bisect_right(steps, self._until), bisect_right(steps, until)
        if at < end and not self._count:
            self._classes = _classes_of(window, abs(values[0]))
        while at < end:
            more = values[at : min(at + SOON - self._count % SOON, end)]
            at += len(more)
            self._count += len(more)
            self._recent = [*self._recent, *more][-SPAN:]
            self._first += more[: SPAN - len(self._first)]
            self._until, row = steps[at - 1], rows[at - 1]
            if self._count % SOON == 0:
                rate = window.value("lr", row)
                self._is_warm_up, self._rate = rate > RISES * self._rate, rate
                yield from () if self._is_over else self._judge_losses(window, row)

    @property
    def _chance(self) -> float:
        """The loss of guessing, or what stands for it: the first one, or later ones if that was of an easy batch."""
        usual, first = math.log(max(self._classes, 1)), abs(self._first[0])
        if first <= 2 * usual:
            return usual
        return first if self._count < SPAN else max(first, median(self._first))


# Fresh tensors have no element beyond so many times their root mean square. That of a uniform distribution is 1.73;
# trained ones exceed 2.5. Of a few elements that may be chance.
_EVEN, _ENOUGH = 1.9, 16


def look_fresh(rows: Rows, row: int, judged: Bools) -> bool:
    """Whether half of the weights ``judged`` are uniform, or half of other parameters constant, as fresh ones are."""
    judged, is_matrix = judged & (rows.tensors.numel >= _ENOUGH), rows.tensors.matrices
    is_even = rows.max_abs[row] <= _EVEN * rows.rms[row]
    is_constant = rows.field("min")[row] == rows.field("max")[row]
    groups = is_even[judged & is_matrix], is_constant[judged & ~is_matrix]
    return any(len(group) and group.mean() >= 0.5 for group in groups)


def _classes_of(window: Window, loss: float) -> int:
    """The number of classes of the softmax that the first ``loss`` ends with; 0 if there is none, or it is small."""
    gradients = window.measured.get("gradient")
    order = () if gradients is None else window.run.backward_order or gradients.names[::-1]
    last = order[0].rpartition(".")[0] if order else ""  # which may have more than a weight and a bias
    for name in [*order[:2], *(name for name in order[2:6] if last and name.rpartition(".")[0] == last)]:
        if gradients is None or name not in gradients.names:
            continue
        at = gradients.names.index(name)
        shape, norm = gradients.tensors.shapes[at], float(gradients.l2_norm[0, at])
        # Absolute errors of both signs may be equally many, so that the bias beside a weight cancels by chance.
        is_beside = len(shape) == 1 and f"{name.rpartition('.')[0]}.weight" in gradients.names
        if not shape or shape[0] < 2 or not norm > 0 or is_beside:
            continue
        if abs(float(gradients.field("sum")[0, at])) <= _CANCELS * norm * math.sqrt(math.prod(shape)):
            return shape[0] if loss >= math.log(shape[0]) / 2 else 0
    return 0
