"""Rules on trainings that do not learn: a loss that stays at chance or falls without end, and weights that run away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import WRONG_SIGN, PerName, carried, directions, median, sizes_of_weights
from gradstat.rules.beginnings import FarBeginning
from gradstat.rules.course import CHANCE, FLAT, HALF, LARGE_EPS, SCALED, SOON, SPAN, USUAL_EPS, LearningRule, look_fresh
from gradstat.rules.output_facts import OutputFacts
from gradstat.rules.outputs import UnrelatedOutputs
from gradstat.rules.rows import Rows, Window

# Norms of all weights, as shares of the first, beyond which they have shrunk or grown by far. In healthy programs of
# the tests they shrink to 0.97 at most, but for a critic's in a GAN, and grow to 49 where the loss falls.
_SHRUNK, _GROWN = 0.3, 3.0

_DECAYS = ("a weight decay that is far too large",)
_LESS_DECAY = "lower the optimizer's weight_decay, by a factor of ten at first"
_HARD = "inputs that say little about the labels, or terms of the loss that work against each other"


def _change_in_words(grown: float) -> str:
    """How far weights have come whose norm is ``grown`` times the first one; empty if not by far, or if it is NaN."""
    if grown < _SHRUNK:
        return f"the norm of all weights has shrunk to {grown:.2g} times its first value"
    return f"the norm of all weights has grown to {grown:.3g} times its first value" if grown > _GROWN else ""


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


class GrowingWeights(LearningRule):
    """Weights that grow to three times their norm, and far above usual initial sizes, while the loss stays high.

    Nothing is reported after 256 losses.
    """

    name = "growing-weights"
    explained_by = ("negative-loss", "no-learning", "unrelated-outputs")
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
            words = _change_in_words(grown) or f"the norm of all weights is {grown:.2g} times its first value"
            text = f"{words} after {self._count} steps; the loss is {loss:.4g}, and "
            text += f"{'guessing gives' if self._classes else 'it began at'} {chance:.4g}"
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
    explains = ("no-learning", "unrelated-outputs", "unchanged-parameter")
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


class NoLearning(LearningRule):
    """A loss that stays at that of guessing: among the classes, among the samples of a batch, or between two classes.

    Guessing among C classes gives a loss of ln C. The slowest healthy classifiers of gradstat's tests leave it between
    steps 130 and 230. A model has learned once the median of the last 64 losses is below 0.9 times that, or once more
    than half of the predictions above chance are right, as where the loss has other terms. Nothing is reported if no
    outputs were seen, as in a program that calls only parts of the model, or if the loss has several terms and neither
    predictions nor labels were seen: guessing is no measure for their sum.

    Args:
        steps: The number of steps after which, and then every 64 steps, the last losses are reviewed, unless the
            learning rate still rises.
    """

    name = "no-learning"
    explained_by = ("negative-loss", "growing-weights", "unrelated-outputs")
    causes, advice = UnrelatedOutputs.causes, UnrelatedOutputs.advice

    # What the loss may not have fallen by, and the classes from which on that counts: fewer are learned at once.
    _FALLEN, _MANY = 0.05, 8
    # Of the first loss: one with other terms may end above chance, though it has learned.
    _OF_FIRST = 0.7
    # A share of certain predictions that tells the cause.
    _CERTAIN = 0.3
    # How near to guessing among the samples a loss stays, and from which shares of it it may begin.
    _NEAR, _BEGAN = 0.005, (CHANCE, 1.25)

    _has_learned = carried(False)
    _norm, _grown = carried(math.nan), carried(math.nan)  # of weights, first and since

    def __init__(self, steps: int = 256) -> None:
        super().__init__()
        self.steps = steps

    def _judge_weights(self, window: Window, rows: Rows, row: int) -> Iterable[Finding]:
        norm = rows.norm_of_matrices[row]
        self._norm = norm if math.isnan(self._norm) else self._norm
        self._grown = norm / max(self._norm, 1e-300)
        return ()

    def _judge_losses(self, window: Window, row: int) -> Iterable[Finding]:
        if self._count < SOON + HALF:
            return
        fit, is_due = window.outputs.fit, self._count % SPAN == 0 and self._count >= self.steps and not self._is_warm_up
        has_one_term = fit is not None and not (window.run.loss_is_sum and fit.squares > 0)
        is_due &= window.outputs.classes > 0 or has_one_term
        if is_due and not window.run.has_other_optimizer:
            yield from self._judge_samples(0.0 if fit is None else fit.samples)
        if self._classes > 1 and not self._has_learned:
            yield from self._judge_classes(window.outputs, is_due)

    def _judge_samples(self, samples: float) -> Iterator[Finding]:
        """Judges the last losses without knowing what the model is: as that of two classes, or a contrastive one."""
        if min(self._recent) <= 0:
            return
        now, began = median(self._recent), median(self._first[:SOON])
        scatter, (low, high) = median(np.abs(np.array(self._recent) - now)), self._BEGAN
        for count in (2.0, samples, samples - 1, 2 * samples, 2 * samples - 1, 2 * samples - 2):
            usual = math.log(max(count, 1.0))  # the number of samples may be unknown, and 0
            is_near = abs(now - usual) < self._NEAR * usual > scatter / 2
            if is_near and low * usual < began < high * usual:
                text = f"the loss is {now:.4g} after {self._count} steps; guessing among {count:.0f} gives {usual:.4g}"
                yield from self._found_once(0, "loss", text, loss=now)

    def _judge_classes(self, outputs: OutputFacts, is_due: bool) -> Iterator[Finding]:
        """Judges the last losses of a classifier with such ``outputs``."""
        now, chance = median(self._recent), self._chance
        if now < FLAT * chance or outputs.right > (1 + 1 / self._classes) / 2:
            self._has_learned = True
            return
        is_flat = self._classes >= self._MANY and median(self._first) - now < self._FALLEN * now
        is_stuck = (now >= CHANCE * chance or is_flat) and now > self._OF_FIRST * abs(self._first[0])
        if is_due and is_stuck and not (now < chance and self._is_falling()):
            text = f"the loss is {now:.4g} after {self._count} steps; guessing among {self._classes} classes gives "
            name, causes, advice, more = self._likely(outputs.certain)
            yield from self._found_once(
                0, name, f"{text}{chance:.4g}{more}", causes=causes, advice=advice, loss=now, chance=chance
            )

    def _is_falling(self) -> bool:
        """Whether the mean of the last losses is lower than that of those before by four standard errors."""
        halves = np.reshape(self._recent, (2, -1))
        before, now = halves.mean(1).tolist()
        return bool(before - now > 4 * math.sqrt(halves.var(1).sum() / HALF))

    def _likely(self, certain: float) -> tuple[str, tuple[str, ...], tuple[str, ...], str]:
        """The series that is to blame, causes and advice, and an addition to the text, by what the rows show."""
        change = _change_in_words(self._grown)
        if change and self._grown > 1:
            return "lr", GrowingWeights.causes, GrowingWeights.advice, f"; {change}"
        if change:
            return "weight_decay", _DECAYS, (_LESS_DECAY,), f"; {change}"
        if certain > self._CERTAIN:
            return "loss", FarBeginning.causes, FarBeginning.advice, f"; {certain:.0%} of the predictions are saturated"
        text = "; predictions are not saturated, and weights keep their norm"
        return "loss", (*self.causes, _HARD), self.advice, text
