"""Rules about learning rates that jump, fade, rise too slowly, or make no sense, and about weight decay."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from gradstat.recording.findings import Finding
from gradstat.rules.base import HUGE, Band, Records, RowsRule, Rule, around, bounded, carried, median, risen
from gradstat.rules.changes import NO_DECAY
from gradstat.rules.course import SCALED, LearningRule
from gradstat.rules.rows import Rows, Window, rate_name

# Conventions of gradstat. A rate jumps if it grows or falls by more than these factors in one step; step schedules
# divide by 10. Growth is above all earlier rates and above the ``initial_lr`` of its scheduler, which a warm-up that is
# stepped per epoch may reach at once.
_UP, _DOWN = 3.0, 20.0
_RAMP = 1.5  # a change by no more than so many times the last one is no jump either way
# If losses or norms are known, something must follow a growth within so many steps: a loss or norm that is not finite,
# or four losses in a row above all of as many steps before, or norms above three times those, since norms also rise
# where a model begins to learn.
_FOLLOWS, _IN_A_ROW, _NORMS = 16, 4, 3
_ZEROS = 20  # steps of 0 after another rate; schedules touch 0 at their end
# It is below this fraction of its largest value for so many steps in a row and for this share of all; cosine, linear
# and quadratic schedules are for a hundredth of theirs at most.
_FADES, _LASTS, _SHARE = 2e-4, 16, 0.08


class LearningRateJump(Rule):
    """A learning rate that jumps, stays at 0, or is negative or NaN.

    The rate of step 0 is not compared with later ones: a program may set it between the backward pass and the step.
    """

    name = "learning-rate-jump"
    quiet = 10
    explains = ("loss-spike", "exploding-gradient", "parameter-jump", "growing-weights")
    causes = (
        "a scheduler that is stepped twice, or per batch though it counts epochs (or the reverse)",
        "warm-up and decay that do not meet: the decay does not begin at the learning rate where the warm-up ends",
        "a scheduler or an optimizer that was made anew without loading its state",
    )
    advice = (
        "print scheduler.get_last_lr() for every step of the schedule",
        "load scheduler and optimizer from the same checkpoint",
    )

    # The last steps with their losses and norms; of jumps that wait: group, step, before, after.
    _signals, _jumps = carried(Records(3)), carried(Records(4))
    _peak, _low_for = carried(0.0), carried(0)  # of the first group, and steps in a row in which it is nearly nothing
    # By series, as `rate_name` calls them.
    _before, _largest, _change = carried(dict[str, float]()), carried(dict[str, float]()), carried(dict[str, float]())
    _scheduled, _zero_for = carried(dict[str, float]()), carried(dict[str, int]())

    def bands(self) -> Mapping[str, Band]:
        bands = {"lr": (0.0, math.inf)}
        if self._jumps:
            (losses, _), (norms, _) = self._around(int(self._jumps[0][1]))
            if len(losses) >= _IN_A_ROW:
                bands |= {"loss": (-math.inf, max(losses)), "norm": (-math.inf, _NORMS * max(norms))}
        for name, last in self._before.items():
            if last > 0:
                most = max(self._largest.get(name, 0.0), self._scheduled.get(name, 0.0), _UP * last)
                bands[name] = (last / _DOWN, most)
        return bands

    def review(self, window: Window) -> Iterable[Finding]:
        losses, norms = (bounded(window.scalars.get(name, np.zeros(len(window.steps)))) for name in ("loss", "norm"))
        new = zip(window.steps.tolist(), losses, norms, strict=True)
        self._signals = Records(3, [*self._signals[-3 * _FOLLOWS :], *new])
        self._scheduled = {rate_name(i): rate for i, rate in enumerate(window.run.initial_lrs)}
        first, before_first = window.scalars.get("lr"), self._before.get("lr", math.nan)
        if first is None:
            return
        for name in dict.fromkeys(["lr", *self._before, *(name for name in window.scalars if name.startswith("lr["))]):
            rates = window.scalars.get(name, first)
            rates = np.where(np.isnan(rates), first, rates)  # a group that is not there has the rate of the first
            listed = [self._before.get(name, before_first), *rates.tolist()]
            self._before[name] = listed[-1]
            yield from self._review_one(name, window.steps.tolist(), listed)
        for step, rate in zip(window.steps.tolist(), first.tolist(), strict=True):
            self._peak = max(self._peak, rate if step > 0 else 0.0)
            self._low_for = self._low_for + 1 if 0 < rate < _FADES * self._peak else 0
            if self._low_for >= max(_LASTS, _SHARE * step) and self.begins("faded", step):
                text = f"the learning rate has come from {self._peak:.4g} to {rate:.4g}, nearly nothing, and stays so"
                yield self.found(step - self._low_for + 1, "lr", text, before=self._peak, lr=rate)
        for group, step, before, rate in self._followed(window):
            name = rate_name(int(group))
            if self.begins(f"jump {name}", int(step)):
                text = f"{_in_words(name)} jumps from {before:.4g} to {rate:.4g}"
                yield self.found(int(step), name, text, lr=rate, before=before, factor=rate / before)

    def _around(self, step: int) -> list[tuple[Sequence[float], Sequence[float]]]:
        """Losses up to ``step`` and after it, and norms."""
        steps, *signals = np.reshape(self._signals, (-1, 3)).T.tolist()
        return [around(signal, bisect_right(steps, step), _FOLLOWS, _FOLLOWS) for signal in signals]

    def _followed(self, window: Window) -> Iterator[list[float]]:
        """The jumps that nothing has to follow, and those that something has."""
        is_known = any(window.scalar(signal) is not None for signal in ("loss", "norm"))
        is_scaled = window.scalar("loss_scale") is not None  # gradients overflow now and then
        waiting, self._jumps = self._jumps, Records(4)
        for jump in waiting:
            (losses, later_losses), (norms, later_norms) = self._around(int(jump[1]))
            ends = max([*later_losses, *([] if is_scaled else later_norms)], default=0.0) >= HUGE
            signals = ((losses, later_losses), ([_NORMS * norm for norm in norms], later_norms))
            rises = (risen(old, new, _IN_A_ROW, min) for old, new in signals if len(old) >= _IN_A_ROW)
            if jump[3] < jump[2] or not is_known or ends or any(rise is not None for rise in rises):
                yield jump
            elif len(later_losses) < _FOLLOWS:
                self._jumps.append(jump)

    def _review_one(self, name: str, steps: Sequence[int], rates: Sequence[float]) -> Iterator[Finding]:
        """Judges the ``rates`` of a group, of which the first is that before ``steps``; notes where they jump."""
        largest, change = self._largest.get(name, 0.0), self._change.get(name, 0.0)
        scheduled = self._scheduled.get(name, 0.0) * (1 + 1e-9)
        for step, (previous, rate) in zip(steps, itertools.pairwise(rates), strict=True):
            if rate < 0 or (math.isnan(rate) and not math.isnan(previous)):
                if self.begins(f"invalid {name}", step):
                    text = f"{_in_words(name)} is {rate}"
                    yield self.found(step, name, text, severity="error", lr=str(rate), before=previous)
                continue
            self._zero_for[name] = self._zero_for.get(name, 0) + 1 if rate == 0 and largest > 0 else 0
            if self._zero_for[name] == _ZEROS:
                yield self.found(step - _ZEROS + 1, name, f"{_in_words(name)} has been 0 for {_ZEROS} steps", lr=0.0)
            # A warm-up may begin at 0, or far below earlier rates.
            previous = previous if step > 1 else rate
            has_grown = rate > max(_UP * previous, largest, scheduled)
            last, change = change, rate - previous if math.isfinite(rate - previous) else 0.0
            is_ramp = change * last > 0 and abs(change) <= _RAMP * abs(last)
            if previous > 0 and (has_grown or (0 < rate < previous / _DOWN and not is_ramp)):
                self._jumps.append([float(name[3:-1] or 0), float(step), previous, rate])
            largest = self._largest[name] = max(largest, rate)
        self._change[name] = change


def _in_words(name: str) -> str:
    """The series ``name`` of rates in words."""
    return "the learning rate" + (name != "lr") * f" of group {name[3:-1]}"


class LongWarmUp(LearningRule):
    """A warm-up of the learning rate that lasts longer than the run.

    Where a framework knows the number of steps, it is told after 49 of them if the rate rises evenly; else when the
    run has ended, if the rate has not come a fortieth of the way to the one that its scheduler warms up to. If
    that is not known, the rate has to rise evenly to the end, while the loss hardly falls.
    """

    name = "long-warm-up"
    explained_by = ("tiny-steps",)
    explains = ("tiny-steps", "unrelated-outputs", "unchanged-parameter")
    causes = ("a learning rate warm-up over far too many steps, or one that is stepped per epoch instead of per step",)
    advice = ("warm up over a tenth of all steps or less, and call scheduler.step() once per step",)
    judges_end = True

    # Rates that show how it rises, by how much its halves may differ, steps that are more than an attempt, and how many
    # times those it would take; the share of the first losses from which on the last ones have hardly fallen.
    _KNOWN, _UNEVEN, _ENOUGH, _SHARE, _FLAT = 49, 0.1, 96, 40, 0.8
    # Of Adam and its like, from this on it is a factor, as in the schedule of Vaswani and others, and never reached.
    _FACTOR = 0.1

    _rates, _highest = carried(list[float]()), carried(0.0)  # the first rates, and the highest of all

    def review(self, window: Window) -> Iterable[Finding]:
        rates, run, known = window.scalars.get("lr"), window.run, len(self._rates)
        peak = max(run.initial_lrs[:1], default=0.0)
        if self._is_over or not len(window.steps) or (peak >= self._FACTOR and run.step_size != "gradient"):
            return
        if rates is not None:
            yield from self._take(window)
            self._rates = [*self._rates, *bounded(rates)][: self._KNOWN]
            self._highest = max(self._highest, *bounded(rates))
            if known < self._KNOWN == len(self._rates) and run.planned_steps:
                yield from self._judge_rise(peak, run.planned_steps, False)
        elif known == self._KNOWN and window.steps[-1] > self._ENOUGH:
            yield from self._judge_rise(peak, int(window.steps[-1]), True)

    def _judge_rise(self, peak: float, total: int, is_end: bool) -> Iterator[Finding]:
        """Judges the first rates, or, if it ``is_end``, all of a run that has a ``total`` of steps."""
        half = self._KNOWN // 2
        first, count, now = self._rates[0], 2 * half, self._rates[-1]
        if is_end:
            count, now = total - 1, self._highest
        rise = (now - first) / count
        is_even = abs(self._rates[half] - first - half * rise) <= self._UNEVEN * half * rise
        takes = (peak - first) / rise if rise > 0 else 0.0
        began, loss = (median(some) if some else 0.0 for some in (self._first, self._recent))
        is_flat = 0 < self._FLAT * began < loss < began / self._FLAT
        text = f"the learning rate has risen to {now:.3g} in {count:,} steps"
        if takes > (self._SHARE * total if is_end else total) and (is_end or is_even):
            text += f", and would come to the {peak:.3g} that its scheduler warms up to after {takes:,.0f}, but the "
            text += f"run has {total:,}"
        elif is_end and is_even and rise > 0 and is_flat and peak <= first:
            text += f", up to the end of the run; the loss began at {began:.4g} and is {loss:.4g}"
        else:
            return
        yield from self._found_once(0, "lr", text, lr=now, peak=peak, takes=takes)


class HeavyDecay(RowsRule):
    """A weight decay that outweighs the gradients of Adam and its like from the start, and shrinks the weights.

    It is added to the gradient before that is normalised, so that steps follow the decay instead of the loss. One that
    is not, as AdamW's and SGD's, is too large if it takes more than 1/200 of each weight in 48 steps in a row.
    """

    name = "heavy-decay"
    kinds = ("parameter",)
    explains = ("dead-gradient", "unrelated-outputs")
    causes = ("a weight decay that is far too large",)
    advice = ("lower the optimizer's weight_decay, or use one that decouples it from the gradients, as AdamW",)

    # Decay over gradient of the median weight in the first step, at most 0.09 in public programs, and the share of the
    # norm from which on weights have shrunk.
    _OUTWEIGHS, _SHRUNK = 0.5, 0.9

    # The share of weights that a decay may take in a step, at most 6e-4 in 52 public programs; at this one, half of
    # what was learned is forgotten in 140 steps, whatever the loss. For how many steps in a row it takes too much.
    _FORGETS, _STEPS = 5e-3, 48
    _JUMPS = 50.0  # a decay that is set to more times its value; schedules change it slowly

    _decay, _since_decay = carried(0.0), carried(0)  # the decay that was added last, and since which step
    _norm, _times = carried(math.nan), carried(0.0)  # then
    _since = carried(dict[str, int]())  # by setting, the step since which its decay takes more

    def review(self, window: Window) -> Iterable[Finding]:
        yield from self._forgets(window)
        yield from super().review(window)

    def _forgets(self, window: Window) -> Iterator[Finding]:
        """Finds groups of which the decay, as the settings say, takes too much of the weights in each step."""
        first, run = window.scalars.get("lr"), window.run
        if first is None or not run.step_size or run.added_decay:
            return
        for name, decay in run.settings.items():
            what, _, group = name.partition(" of group ")
            rates = window.scalars.get(rate_name(int(group)), first) if what == "weight_decay" and decay > 0 else None
            if rates is None or not (np.fmax(rates, first) * decay > self._FORGETS).any():  # nearly always
                self._since.pop(name, None)
                continue
            shares = np.where(np.isnan(rates), first, rates) * decay
            since = np.where(shares > self._FORGETS, self._since.get(name, window.steps[0]), window.steps + 1)
            since = np.maximum.accumulate(since)
            self._since[name] = int(since[-1])
            for row in np.flatnonzero(window.steps - since == self._STEPS - 1).tolist():
                if self.begins(name, window.steps[row]):
                    share = float(shares[row])
                    half = math.log(0.5) / math.log1p(-min(share, 1 - 1e-9))
                    text = f"the weight decay of {decay:g} takes {share:.2g} of each weight in a step, at a learning "
                    text += f"rate of {share / decay:.3g}: half of it in {half:,.0f} steps"
                    yield self.found(since[row], "weight_decay", text, decay=decay, share=share)

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        gradients, decay = window.measured.get("gradient"), window.run.added_decay
        if decay > self._JUMPS * self._decay > 0 and self.begins("jump", int(rows.steps[0])):
            text = f"the weight decay jumps from {self._decay:g} to {decay:g}"
            yield self.found(int(window.steps[0]), "weight_decay", text, decay=decay, before=self._decay)
        if decay != self._decay and gradients is not None:
            self._decay, self._since_decay = decay, int(rows.steps[0])
            pulls, self._norm = gradients.of(rows.names).l2_norm[0], rows.norm_of_matrices[0]
            judged = rows.tensors.matrices & (pulls > 0)
            self._times = decay * median(rows.l2_norm[0, judged] / pulls[judged]) if judged.any() else 0.0
        for step, norm in zip(rows.steps.tolist(), rows.norm_of_matrices, strict=True):
            is_heavy = self._times > self._OUTWEIGHS and norm < self._SHRUNK * self._norm
            if is_heavy and self.begins("added", step):
                text = f"the weight decay of {decay:g} added {self._times:.2g} times its gradient to that of the "
                text += "median weight, and the norm of all weights has shrunk to "
                text += f"{norm / self._norm:.2g} times its first value"
                causes = self.led_by(SCALED) if decay < NO_DECAY else self.causes
                yield self.found(self._since_decay, "weight_decay", text, causes=causes, decay=decay, times=self._times)
