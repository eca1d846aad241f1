"""Rules on losses that fall at once or without end, and on weights that run away or hardly move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import CHANGED, WRONG_SIGN, PerName, bounded, carried, directions, median, sizes_of_weights
from gradstat.rules.course import FLAT, HALF, LARGE_EPS, SCALED, SOON, SPAN, USUAL_EPS, LearningRule, look_fresh
from gradstat.rules.rows import Rows, Window

# The norm of all weights over the first one, from which on they have grown by far. In healthy programs of the tests it
# comes to 49 where the loss falls.
_GROWN = 3.0


class NegativeLoss(LearningRule):
    """A loss that is minus a mean or sum of squares or magnitudes, or that falls far below zero, and ever faster."""

    name = "negative-loss"
    explains = ("equal-targets", "exploding-gradient", "vanishing-gradient")
    causes = (*WRONG_SIGN, "a term of the loss with the wrong sign")
    advice = ("change the sign of the loss, unless a lower loss means a better model",)

    # Below zero by so many times its first value, or by so much, where that is less. Logarithms of densities fall less
    # and less, and to no such values per sample.
    _FAR = 10.0

    def judge(self, window: Window) -> Iterable[Finding]:
        steps, _, losses = window.losses
        negative = [at for at, loss in enumerate(losses) if loss < 0]
        if negative and window.run.loss_has_no_sign and not window.run.has_other_optimizer:
            loss = losses[negative[0]]
            text = f"the loss is {loss:.4g}: a mean or sum of numbers that are never negative, with a minus sign"
            yield from self._found_once(steps[negative[0]], "loss", text, loss=loss)
        yield from self._take(window)

    def _judge_losses(self, window: Window, row: int) -> Iterable[Finding]:
        if self._count < SOON + HALF or window.run.has_other_optimizer:
            return
        first, (before, middle, now) = median(self._first[:SOON]), map(median, np.reshape(self._recent[-48:], (3, -1)))
        if now < -self._FAR * max(abs(first), 1.0) and middle - now > before - middle > 0:
            text = f"the loss has fallen from about {first:.4g} to about {now:.4g}, ever faster"
            yield from self._found_once(int(window.steps[row]), "loss", text, loss=now)


_EASY = (
    "labels or targets that are all the same, or that the inputs contain",
    "the same batch or a few samples in all steps, which are known by heart",
    "a mask that hides nearly everything from the loss, or a term of the loss that is left out",
    "a task without noise, such as a known function",
)
_LOOK = ("inspect a batch and its targets right before they enter the model, and evaluate it on other data",)


class LossDrop(LearningRule):
    """A loss that falls at once and stays there: 16 lie below all of the 32 before, by 0.4 of what these vary over.

    A learning rate that changes 2.5 times explains that, and with another optimizer nothing is reported. Also one that
    is a 2,000th of its first value after 160 steps, by its median of 64: in 190 healthy runs of public programs it is
    a 550th at least.
    """

    name = "loss-drop"
    explains = ("vanishing-gradient", "exploding-gradient", "equal-targets", "unrelated-outputs")
    causes = CHANGED
    advice = ("print each term of the loss before and after this step, and inspect a batch of each",)

    # In healthy programs it falls by 0.27 of what it varied over, or more where a flat one begins to fall: by 3 % of
    # itself, or over more than four steps. One that comes below zero need not come to rest there.
    _FAR, _LEAST, _AT_ONCE, _OTHER = 0.4, 0.1, 0.5, 2.5
    _EARLY, _NOTHING = 160, 5e-4

    _rates = carried(list[float]())  # of the last looks

    def _judge_losses(self, window: Window, row: int) -> Iterable[Finding]:
        if window.run.has_other_optimizer:
            return
        first = self._first[0]
        if self._count == self._EARLY and 0 <= (now := median(self._recent)) < self._NOTHING * first:
            text = f"the loss is {now:.3g} after {self._count} steps, {now / first:.2g} times its first value: no real "
            yield from self._found_once(0, "loss", text + "task is as easy", causes=_EASY, advice=_LOOK)
            return
        self._rates = [*self._rates, *bounded([self._rate])][-SPAN // SOON :]
        if max(self._rates) > self._OTHER * min(self._rates):
            return
        for at in range(HALF + 1, len(self._recent) - SOON + 1):
            before, after = self._recent[at - HALF : at], self._recent[at : at + SOON]
            low, high = min(before), max(after)
            if low - high <= self._FAR * (max(before) - low):  # nearly always
                continue
            level, now, is_negative = median(before), median(after), low > 0 > high
            is_at_once = is_negative or min(before[-4:]) - max(after[:4]) > self._AT_ONCE * (level - now)
            if is_at_once and level - now > self._LEAST * abs(level):
                text = f"the loss falls from about {level:.4g} to about {now:.4g} at once"
                causes = (*WRONG_SIGN * is_negative, *CHANGED)
                yield from self._found_once(self._until - len(self._recent) + at + 1, "loss", text, causes=causes)
                return


class GrowingWeights(LearningRule):
    """Weights that grow to three times their norm, and far above usual initial sizes, while the loss stays high.

    Nothing is reported after 256 losses.
    """

    name = "growing-weights"
    explained_by = ("negative-loss", "unrelated-outputs")
    causes = (
        "a learning rate far too high",
        "no warm-up and no gradient clipping, so that early updates were too large",
    )
    advice = ("lower the learning rate, by a factor of ten at first, and warm it up",)

    # The median size from which on they are large; the share of chance that suffices for classifiers in the first
    # steps, and if they are huge. Of public programs one has large weights then, at a share of 0.66: an LSTM with a
    # learning rate of 20.
    _LARGE, _HUGE, _EARLY, _EARLY_SHARE, _HALF = 2.0, 6.0, 128, 0.75, 0.5
    _STEPS, _FAR = 256, 30.0

    _norm, _size = carried(math.nan), carried(math.nan)  # of all weights, and of the median one, at first

    def _judge_weights(self, window: Window, rows: Rows, row: int) -> Iterable[Finding]:
        step, norm, sizes = int(rows.steps[row]), rows.norm_of_matrices[row], sizes_of_weights(rows, row)[1]
        size = median(sizes) if len(sizes) else 0.0
        if math.isnan(self._norm):
            self._norm, self._size = norm, size
        grown, self._is_over = norm / max(self._norm, 1e-300), self._count > self._STEPS
        if self._is_over or self._count < SOON + HALF or grown <= 1 or window.run.has_other_optimizer:
            return
        share = self._share(max(grown, size / max(self._size, 1e-300)), size)
        loss, chance = median(self._recent[-HALF:]), self._chance
        # Weights that began small have to grow. A loss may also begin at 0, and rise, as weights grow less.
        if share and loss > share * chance > (0 if grown > self._FAR else 0.01 * loss):
            text = f"the norm of all weights has grown to {grown:.3g} times its first value after {self._count} steps; "
            text += f"the loss is {loss:.4g}, and {'guessing gives' if self._classes else 'it began at'} {chance:.4g}"
            yield from self._found_once(step, "lr", text, grown=grown, loss=loss)

    def _share(self, grown: float, size: float) -> float:
        """The share of chance from which on weights may not have ``grown`` so, to a median ``size``; 0 if they may."""
        if grown < _GROWN or size <= self._LARGE:
            return 0.0
        is_early = self._classes and self._count <= self._EARLY
        return (self._HALF if size > self._HUGE else self._EARLY_SHARE) if is_early else FLAT


class TinySteps(LearningRule):
    """Weights that have hardly moved, by the median of estimates, while the loss has not fallen.

    It is reviewed once, after 192 losses and any warm-up of the learning rate. Weights that have been trained before
    may move far less than newly initialised ones.
    """

    name = "tiny-steps"
    explains = ("unrelated-outputs", "unchanged-parameter")
    causes = ("a learning rate far too low for this optimizer",)
    advice = ("raise the learning rate, by a factor of ten at first",)

    _STEPS = 192
    # How far weights may have come, over their norm, and the share of the first losses that the last ones then are.
    # Fresh weights come to 0.08 or more in 52 public programs, and to 0.02 at a rate a thousand times too low.
    _FRESH, _TRAINED = (0.03, FLAT), (5e-4, 0.99)
    _STILL = 1e-3, 0.5  # fresh weights, and losses that vary as much as they could have fallen
    _RATE = 1e-3  # from which on one of SGD is usual, so that gradients are blamed first

    _sums, _ranges = carried(PerName(math.nan)), carried(PerName(math.nan))  # of weights, over their norms, at first
    _began, _are_fresh = carried(-1), carried(False)
    _lowest = carried(math.inf)  # level of the loss: it may have risen since

    def _judge_losses(self, window: Window, row: int) -> Iterable[Finding]:
        self._lowest = min(self._lowest, median(self._recent[-HALF:]))
        return ()

    def _judge_weights(self, window: Window, rows: Rows, row: int) -> Iterable[Finding]:
        gradients = window.latest.get("gradient")
        if gradients is None:
            return
        is_trained, now = gradients.of(rows.names).max_abs[-1] > 0, directions(rows, row)
        before = self._sums.values_for(rows.names), self._ranges.values_for(rows.names)
        if self._began < 0:
            self._began, self._are_fresh = self._count, look_fresh(rows, row, is_trained)
            before[0][:], before[1][:] = now
        elif self._count - self._began >= self._STEPS and not self._is_warm_up:
            self._is_over, is_trained = True, is_trained & rows.tensors.matrices
            # Those that began at zero, as the last of a branch, have no norm to compare with.
            moves = np.maximum(*np.abs(np.subtract(now, before)))[is_trained & (before[1] > 0)]
            moves = moves[np.isfinite(moves)]
            moved = median(moves) if len(moves) else 0.0
            # Of two networks that train in turn the losses say little, but fresh weights come farther.
            if not window.run.has_other_optimizer or (self._are_fresh and moved < self._STILL[0]):
                at, numel = int(window.steps.searchsorted(rows.steps[row])), int(rows.tensors.numel[is_trained].sum())
                yield from self._judge_moves(window, at, moved, numel)

    def _judge_moves(self, window: Window, row: int, moved: float, numel: int) -> Iterator[Finding]:
        rate, first, now = window.value("lr", row), median(self._first), median(self._recent)
        fresh = self._STILL if moved < self._STILL[0] else self._FRESH
        least, share = fresh if self._are_fresh else self._TRAINED
        is_flat = first - min(now, self._lowest) < (1 - share) * abs(first) and (first > 0 or self._are_fresh)
        if not (0 < moved < least and is_flat):
            return
        causes, advice, run = [*self.causes], [*self.advice], window.run
        text = f"the median weight has moved by {moved:.1g} of its norm in {self._count} steps, at a learning rate of "
        text += f"{rate:.3g}"
        if window.value("finite_norm", row) < run.optimizer_eps * math.sqrt(numel):
            text += f" and an eps of {run.optimizer_eps:g}, far larger than the gradients"
            causes, advice = [LARGE_EPS, *causes], [USUAL_EPS, *advice]
        elif run.step_size != "rate":
            causes.insert(int(rate < self._RATE), SCALED)
        text += f"; the loss began at {first:.4g} and is {now:.4g}"
        yield from self._found_once(0, "lr", text, causes=causes, advice=advice, moved=moved, lr=rate)
