"""Rules about weights: out of place, overwritten, unchanged, no longer positive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from gradstat.recording.findings import Finding, Severity
from gradstat.rules.advice import Remedy
from gradstat.rules.base import HUGE, PerName, Rule, around, bounded, carried, directions, reaches, risen, same_for
from gradstat.rules.beginnings import far_off
from gradstat.rules.rows import Floats, Rows, Window

_FACTOR = 100.0  # by which the largest magnitude grew; its square if the loss has not risen
# Factor by which the norm grew, if it has changed before, by its cube root at most. Of the weights in the healthy
# trainings of the tests, one that grew by 1.07 before grew by 1.6.
_GROWN, _USUAL = 5.0, 3
# Factor by which the norm fell. In those trainings it falls to no less than half between two measurements, except to
# 1/11 where a WGAN first cuts off its weights.
_SHRUNK_BY = 30.0
# The loss has risen if the median of the last four of so many is above that of the first four, or if that of the next
# four is above the sixteen before.
_LATELY, _FOUR, _BEFORE = 60, 4, 16
# What steps can have changed, times this, explains a change: those of Adam and of Nesterov's momentum may be larger.
_SPARE = 3.0
_TOO_FAR = "steps that are far too large: a learning rate far too high, or a loss or gradients far too large"
_SHRUNK = (
    "weights that were overwritten with zeros, or multiplied by a small number",
    "a weight decay that is far too large",
)


class ParameterJump(Rule):
    """A parameter whose size jumps from one measurement to the next: overwritten, or hit by a wrong update.

    If its largest magnitude grew, it must also exceed 1 and all earlier weights, since one that begins near zero may
    grow by any factor. An info if the loss, where it is known, is no higher than 50 steps before, but for growth by a
    factor of 10,000: some weights are normalised where they are used, or drawn to centres of classes. What learning
    rate and gradients can have changed tells a wrong update from memory that was overwritten. If a norm fell
    and the loss rises in the next four steps, that is reported as well. So is a weight with a gradient that is far too
    large when it is first measured.
    """

    name = "parameter-jump"
    severity = "error"
    causes = (
        "memory that was overwritten: a bit flip in an exponent multiplies by a power of two",
        "an update that was far too large: a learning rate or an optimizer state that is wrong",
    )
    advice = (
        "compare the parameter with the last checkpoint",
        "if a single element jumped, suspect the hardware",
        Remedy("on_anomaly='rollback' restores a step before it", "rollback"),
    )

    _largest, _norms = carried(PerName(math.nan)), carried(PerName(math.nan))
    _usual = carried(PerName(math.nan))  # the largest change of the logarithm of a norm
    _losses = carried(list[float]())  # the last ones
    _reach = carried(0.0)  # how far steps can have moved an element, or all of them, since the last measurement
    _infos = carried(dict[str, int]())  # falls that were an info, since the loss had not risen yet, and their steps

    def review(self, window: Window) -> Iterable[Finding]:
        rows, kept = window.measured.get("parameter"), len(self._losses)
        losses = self._losses + bounded(window.scalars.get("loss", np.empty(0)))
        self._losses = losses[-_LATELY:]
        reach, begins = reaches(window), 0
        if rows is not None:
            is_new = np.isnan(self._largest.values_for(rows.names))
            for name, text, more in far_off(window, rows, is_new):
                if self.begins(name, rows.steps[0]):
                    yield self.found(rows.steps[0], name, text, "parameter", **more)
            for row, step in enumerate(rows.steps.tolist()):
                at = int(window.steps.searchsorted(step))
                self._reach, begins = self._reach + reach[begins:at].sum(), at
                known = losses[: kept + at + 1][-_LATELY:]
                is_known = len(known) > 0 and max(known[:_FOUR] + known[-_FOUR:]) < HUGE
                has_risen = not is_known or risen([median(known[:_FOUR])], known[-_FOUR:], _FOUR) is not None
                yield from self._jumps(rows, row, has_risen)
                self._reach = 0.0
        self._reach += float(reach[begins:].sum())
        if len(window.steps):
            yield from self._harmful(losses, int(window.steps[-1]))

    def _jumps(self, rows: Rows, row: int, has_risen: bool) -> Iterable[Finding]:
        """Compares a row with earlier ones; ``has_risen`` says whether the loss has, or is not known."""
        step, judged, largest = int(rows.steps[row]), rows.tensors.matrices, rows.max_abs[row]
        now = np.where(rows.nonfinite[row] > 0, math.nan, rows.l2_norm[row])
        kept = self._largest, self._norms, self._usual
        earlier, norms, usual = (state.values_for(rows.names) for state in kept)
        move, is_of_steps = np.log(now / norms), largest - earlier < _SPARE * self._reach
        jumped = judged & (earlier > 0) & (largest > _FACTOR * earlier)
        jumped &= largest > np.fmax.reduce(earlier, where=judged, initial=1.0)
        grown = judged & (move > np.maximum(math.log(_GROWN), _USUAL * usual)) & ~jumped  # not if NaN, at first
        fallen = judged & (_SHRUNK_BY * now < norms)
        for what, changed, old, new, by in (
            ("the largest magnitude in {} jumps", jumped, earlier, largest, largest / earlier),
            ("the norm of {} grows", grown, norms, now, now + norms),
            ("the norm of {} falls", fallen, norms, now, now + norms),
        ):
            i, count, is_fall = int(np.argmax(np.where(changed, by, 0))), int(changed.sum()), changed is fallen
            if count and self.begins(rows.names[i], step):
                text = f"{what.format(rows.names[i])} from {old[i]:.3g} to {new[i]:.3g}"
                text += same_for(count) * (changed is not jumped)
                is_info = not has_risen and new[i] < _FACTOR**2 * old[i]
                if is_info and is_fall:
                    self._infos[rows.names[i]] = step
                causes = _SHRUNK if is_fall else self.led_by(_TOO_FAR) if is_of_steps[i] else self.causes
                evidence = {"before": old[i], "now": new[i], "parameters": count}
                severity = "info" if is_info else self.severity
                yield self.found(step, rows.names[i], text, "parameter", severity, causes, **evidence)
        np.fmax(usual, np.abs(move), out=usual, where=np.isfinite(move))
        for state, values in ((earlier, largest), (norms, now)):
            np.copyto(state, values, where=np.isfinite(values))

    def _harmful(self, losses: list[float], last: int) -> Iterable[Finding]:
        """Reports falls after which the loss has risen, by ``losses`` up to that of the step ``last``."""
        for name, step in [*self._infos.items()]:
            before, after = around(losses, len(losses) - 1 - (last - step), _BEFORE, 1 + _FOUR)
            if len(after) > _FOUR:
                del self._infos[name]
                rise = risen(before, after[1:], _FOUR)
                if rise is not None:
                    text = f"the norm of {name} has fallen far, and then the loss rises to {rise:.4g}, from at most "
                    text += f"{max(before):.4g} before"
                    yield self.found(step, name, text, "parameter", None, _SHRUNK, loss=rise)


# Its gradient has elements above this fraction of the largest in the model, and above this size. Smaller ones may be
# the rounding error of sums that are zero, as for a bias before a batch norm.
_ROUNDING, _LEAST = 1e-5, 1e-8
# No weight has moved by this fraction of its norm between two measurements, which are the first two, or `_STOPS` holds.
_MOVES = 1e-5
# That is this fraction of the farthest move so far, per step and learning rate, while the norm of the gradients is no
# less than this share of what it was then.
_STOPS, _AS_STRONG = 1e-3, 0.1
_SET_BACK = "code that sets back or rounds the weights after each step: a restored copy, quantization to few values"
# Significant bits, those of bfloat16, and the share of weights that have no more; one has by chance in 1 of 2 ** 32.
_COARSE, _SOME = 8, 0.25
# Not under Adam, whose steps do not depend on the size of gradients.
_TINY = "gradients that are clipped to a tiny norm, or a loss that is multiplied by almost 0"
_HARDLY = (_SET_BACK, "a learning rate that is far too low")
_ROUNDED = "updates below the precision of the weight: bfloat16 weights keep 8 bits"
_ROUNDED_AVERAGE = ("an average in 16 bits with a decay near 1: each update is below the precision of the average",)
_IN_FLOAT32 = ("keep averages of weights in float32, even if the weights are in 16 bits",)
# Of its elements at least the first share is far from the weights, and of these more than the second have not changed.
# In trainings with averages the second is 0.08 at most with decays of which nothing rounds away (0.9 in bfloat16, 0.99
# in float16), and 0.5 to 1 with a decay of 0.999 and more.
_ARE_FAR, _STAND_STILL = 0.2, 0.5
_LARGER = ("compare the clipping limit with the gradient norm", "print the learning rate of every parameter group")


class Average(NamedTuple):
    """What two looks say of an average of weights that is kept in 16 bits."""

    name: str  # in the model
    steps: int  # between both looks
    is_written: bool  # whether it was written to in each of them, or has changed
    far: float  # the share of its elements that are far from the weight
    still: float  # the share of these that have not changed


class UnchangedParameter(Rule):
    """A parameter that has gradients and does not change, or weights that change by next to nothing or are rounded.

    It is an info if some parameter groups have a learning rate of 0. How far a weight has moved is estimated from its
    sum and its range. It is also reported if a frozen parameter or buffer in 16 bits, which is an average of a weight
    by its name and shape, does not follow the weight.

    Args:
        steps: The minimum number of steps without any change: after an incident, measurements are close together.
    """

    name = "unchanged-parameter"
    quiet = 1000
    causes = (
        "it is not in the optimizer, which was made before the parameter was replaced, tied, moved or cast",
        "a learning rate of 0 for its parameter group",
        _ROUNDED,
        _SET_BACK,
    )
    advice = (
        "make the optimizer after all code that replaces parameters",
        "if the weights are bfloat16, keep float32 master weights or use stochastic rounding",
    )

    _had_bits = carried(False)  # whether weights had more significant bits than `_COARSE` once
    _measured, _since = carried(0), carried(PerName(0))  # the last look, and the first at which each was the same
    _norms = carried(PerName(math.nan))
    _means, _ranges = carried(PerName(math.nan)), carried(PerName(math.nan))  # sums and ranges over norms
    # The farthest that a weight has moved per step and learning rate, and the norm of the gradients then.
    _usual, _strength = carried(math.nan), carried(math.nan)

    def __init__(self, steps: int = 50) -> None:
        super().__init__()
        self.steps = steps

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("averages"):
            written = (one for one in seen.value if one.is_written and one.steps >= self.steps)
            still = [one for one in written if one.far >= _ARE_FAR and one.still > _STAND_STILL]
            if still and self.begins("averages", seen.step):
                name, steps, _, _, share = still[0]
                text = f"{name}, an average of weights in 16 bits, does not follow them: of its elements that are far "
                text += f"from the weights, {share:.0%} have not changed in {steps} steps" + same_for(len(still))
                more: dict[str, Any] = {"parameters": [one.name for one in still], "share": share}
                began = seen.step - steps
                yield self.found(began, name, text, "parameter", None, _ROUNDED_AVERAGE, _IN_FLOAT32, **more)
        rows, gradients = window.measured.get("parameter"), window.measured.get("gradient")
        if rows is None or gradients is None:
            return
        for step, share in zip(rows.steps.tolist(), _coarse(rows).tolist(), strict=True):
            if share > _SOME and self._had_bits and self.begins("bits", step):
                text = f"the smallest and the largest element of {share:.0%} of all weights have {_COARSE} significant "
                text += "bits or fewer, and had more before: weights are rounded after each step"
                yield self.found(step, "weights", text, "parameter", None, (_SET_BACK,), share=share)
            self._had_bits |= share <= _SOME
        names, gradients = rows.names, gradients.of(rows.names)
        since, norms = self._since.values_for(names), self._norms.values_for(names)
        for row, step in enumerate(rows.steps.tolist()):
            largest = np.nan_to_num(gradients.max_abs[min(np.searchsorted(gradients.steps, step), len(gradients) - 1)])
            moves, before = np.zeros(len(names)), self._measured
            for kept, now in zip((self._means, self._ranges), directions(rows, row), strict=True):
                last = kept.values_for(names)
                moves = np.maximum(moves, np.abs(now - last))
                last[:] = now
            # All three stay the same only by chance if any element changes.
            same = (moves == 0) & (rows.l2_norm[row] == norms)
            norms[:], self._measured, others_change = rows.l2_norm[row], step, not same.all()
            # Not those that began at zero a while ago, such as biases.
            moves[~(rows.tensors.matrices & (largest > 0))] = math.nan
            yield from self._hardly(window, rows, step - before, step, moves)
            # It has a gradient by which its optimizer could change it.
            same &= largest > max(_ROUNDING * largest.max(initial=0.0), _LEAST)
            same &= rows.rms[row] < (1 - 1e-6) * rows.max_abs[row]  # otherwise all may be clamped to a bound
            since[:] = np.where(same, since, step)
            # If others change, it must have stayed the same in two looks.
            lasts = (step - since >= self.steps) & ((since < before) | (not others_change))
            fresh = [names[i] for i in np.flatnonzero(lasts) if self.begins(names[i], step)]
            if fresh:
                began = int(since[names.index(fresh[0])])
                text = f"{fresh[0]} has gradients and has not changed since step {began}" + same_for(len(fresh))
                rates = [values[-1] for name, values in window.scalars.items() if name.partition("[")[0] == "lr"]
                rests = 0 in rates and any(rate > 0 for rate in rates)  # as a group that is not to be trained
                severity: Severity = "info" if rests else self.severity
                causes = self.led_by(_ROUNDED) if _is_half(rows.tensors.infos[names.index(fresh[0])]) else None
                yield self.found(began, fresh[0], text, "parameter", severity, causes, parameters=fresh[:20])

    def _hardly(self, window: Window, rows: Rows, steps: int, step: int, moves: Floats) -> Iterable[Finding]:
        """Finds that no weight moves by more than next to nothing in so many ``steps``, up to this ``step``."""
        moved = float(np.fmax.reduce(moves))
        if steps < self.steps or not moved > 1e-12:  # which rounding alone does not exceed
            return
        at = int(window.steps.searchsorted(step))
        rate, strength = window.value("lr", at), window.value("finite_norm", at)
        usual = self._usual * steps * rate
        has_stopped = strength > _AS_STRONG * self._strength and moved < _STOPS * usual
        if moved < _MOVES and (math.isnan(usual) or has_stopped) and self.begins("hardly", step):
            text = f"no weight has moved by more than {moved:.2g} of its norm in {steps} steps"
            text += f"; before, it was up to {usual:.2g}" * (usual > 0)
            name = rows.names[int((moves == moved).argmax())]
            more = {"moved": moved, "steps": steps}
            causes = _HARDLY if window.run.second_moment_decay else (_TINY, *_HARDLY[::-1])
            causes = (_ROUNDED, *causes) if _is_half(rows.tensors.infos[rows.names.index(name)]) else causes
            yield self.found(step - steps, name, text, "parameter", None, causes, _LARGER, **more)
        if rate > 0 and not moved < usual:
            self._usual, self._strength = moved / steps / rate, strength


def _coarse(rows: Rows) -> Floats:
    """``[m]``: the share of weights in 32 bits or more whose extremes have few significant bits, and are no bounds."""
    kept = [i for i, info in enumerate(rows.tensors.infos) if rows.tensors.matrices[i] and not _is_half(info)]
    extremes = np.stack([rows.field("min"), rows.field("max")])[:, :, kept]
    bits = np.frexp(extremes)[0] * 2.0**_COARSE
    are_coarse = ((bits == np.rint(bits)) & (extremes != 0)).all(0) & (extremes[0] != -extremes[1])
    return np.asarray(are_coarse.mean(1) if kept else np.zeros(len(rows)))


def _is_half(info: Any) -> bool:
    return info is not None and info.dtype.itemsize <= 2


class Moves(NamedTuple):
    """How far parameters have moved since they were last compared."""

    steps: int  # since then; 0 the first time
    changes: Mapping[str, int]  # by name, how often each was changed in place, as autograd counts it
    cosines: Mapping[str, float]  # by name of a weight, the cosine of some of its elements with what they were
    distances: Mapping[str, float]  # by name of a weight, the root mean square by which these elements have moved


# A weight is another one if its cosine with what it was is below the one number, and so many times as far from 1 as
# that of others. In healthy programs, of 300 steps each, it falls to 0.32 in the first looks, and is up to 4.3 times as
# far from 1 as the median. Of one that is drawn anew it is 0.23 at most.
_ANOTHER, _TIMES = 0.8, 5.0
# Or the norm of the parameter has grown by the one factor or shrunk by the other, and `_USUAL` times as far as ever
# between two measurements, on a logarithmic scale. Conventions of gradstat.
_FAR_UP, _FAR_DOWN = 2.0, 30.0
_BY_NORM = "norm went from {before:.3g} to {now:.3g}"
_BY_COSINE = "cosine similarity with its value then is {cosine:.2g}, against {others:.3g} for the median weight"


class OverwrittenParameter(Rule):
    """A parameter that other code than the optimizer has overwritten: a layer that is re-initialised, for example.

    Autograd counts the in-place changes of a tensor, and each optimizer step makes equally many. So a tensor with more
    changes between two measurements, and no whole number per step, was written to. So was a weight whose elements have
    moved further than the learning rate allows. It is reported if it points elsewhere than before, or if its norm is
    far from what it was. Programs may prune, clamp or average weights: that leaves most of a weight as it was, and
    makes it smaller.
    """

    name = "overwritten-parameter"
    quiet = 1000
    explained_by = ("optimizer-memory",)
    causes = (
        "a layer that is re-initialised, or loaded again, in the middle of the training",
        "a callback that writes to weights: pruning, clamping, averaging, a restored copy",
    )
    advice = ("find the code that changes this parameter outside of optimizer.step()",)

    _norms, _usual = carried(PerName(math.nan)), carried(PerName(0.0))  # and the largest change of its logarithm
    _rate = carried(0.0)  # the largest learning rate since the last look

    def review(self, window: Window) -> Iterable[Finding]:
        known = reaches(window) if window.run.step_size == "rate" else np.zeros(len(window.steps))
        rates, begins = known.tolist(), 0
        for seen in window.observed("moves"):
            at = int(window.steps.searchsorted(seen.step)) + 1
            foreign = _foreign(seen.value, max([self._rate, *rates[begins:at]]))
            cosines, began = seen.value.cosines, seen.step - seen.value.steps
            of_others = (cosine for name, cosine in cosines.items() if name not in foreign and math.isfinite(cosine))
            others = median([*of_others] or [1.0])
            moved = self._moved(window, seen.step)
            turned = [name for name in foreign if cosines.get(name, 1.0) < min(_ANOTHER, 1 - _TIMES * (1 - others))]
            those = [name for name in foreign if name in moved or name in turned]
            those = [name for name in those if self.begins(name, seen.step)]
            if those:
                first = next((name for name in those if name in moved), those[0])
                text = f"{first} was changed in place by other code than the optimizer, after step {began}"
                numbers: dict[str, Any] = moved.get(first) or {"cosine": cosines[first], "others": others}
                text += f"{same_for(len(those))}; its " + (_BY_NORM if first in moved else _BY_COSINE).format(**numbers)
                yield self.found(began + 1, first, text, "parameter", parameters=those[:20], **numbers)
            self._rate, begins = 0.0, at
        self._rate = max([self._rate, *rates[begins:]])

    def _moved(self, window: Window, step: int) -> dict[str, dict[str, float]]:
        """The parameters whose norm has gone far since they were last measured, before ``step``, and both norms."""
        rows = window.measured.get("parameter")
        if rows is None or step not in rows.steps:
            return {}
        norms, usual = self._norms.values_for(rows.names), self._usual.values_for(rows.names)
        now = rows.l2_norm[np.searchsorted(rows.steps, step)]
        move = np.log(now / norms)
        is_known = np.isfinite(move)
        least = np.maximum(np.log(np.where(move > 0, _FAR_UP, _FAR_DOWN)), _USUAL * usual)
        far = np.flatnonzero(is_known & (np.abs(move) > least))
        found = {rows.names[i]: {"before": norms[i], "now": now[i]} for i in far if now[i] < _FACTOR * norms[i]}
        np.maximum(usual, np.abs(move), out=usual, where=is_known)
        np.copyto(norms, now, where=np.isfinite(now))
        return found


def _foreign(moves: Moves, rate: float) -> list[str]:
    """Which parameters were changed by something else than steps, at learning rates up to ``rate``, 0 if not known."""
    of_weights = [count for name, count in moves.changes.items() if name in moves.cosines]
    usual, steps = median(of_weights or moves.changes.values() or [0]), max(moves.steps, 1)

    def is_foreign(name: str, count: int) -> bool:
        # As many changes in each step may normalise it. Experts of a mixture, which rest in some or all steps, have no
        # whole number of changes per step, or none.
        is_written = count > usual and usual % steps == 0 and count % steps != 0
        return is_written or moves.distances.get(name, 0.0) > _SPARE * rate * moves.steps > 0

    return [name for name, count in moves.changes.items() if is_foreign(name, count)]


class NonpositiveParameter(Rule):
    """A parameter whose logarithm or root, for example, the loss takes has fallen below 0, or close to 0.

    Which parameters these are is read from the graph of the first loss; all their elements were positive when first
    measured. They are measured once more when the monitor is detached or the program ends.
    """

    name = "nonpositive-parameter"
    judges_end = True
    explains = ("nonfinite-loss", "nonfinite-gradient", "loss-spike", "exploding-gradient")
    quiet = 1000
    causes = (
        "a standard deviation, rate or temperature that is trained directly, so that nothing keeps it positive",
        "a learning rate that is too high for this parameter",
    )
    advice = (
        "train its logarithm and use exp() of it; or use softplus() of it plus a small number",
        "clamp it from below after each step",
    )

    # Of the smallest element at first. A convention of gradstat: a fit to nearly noiseless data may go far down, too.
    _NEAR = 1e-3

    _at_first = carried(PerName(math.nan))

    def review(self, window: Window) -> Iterable[Finding]:
        rows = window.measured.get("parameter")
        if rows is None:
            return
        at_first, least = self._at_first.values_for(rows.names), rows.field("min")
        np.copyto(at_first, least[0], where=np.isnan(at_first))
        low = (at_first > 0) & np.isfinite(at_first) & (least < self._NEAR * at_first)
        for row, i in zip(*(low & np.isin(rows.names, list(window.run.positive))).nonzero(), strict=True):
            name, first, now = rows.names[i], float(at_first[i]), float(least[row, i])
            if self.begins(name, rows.steps[row]):
                text = f"the smallest element of {name} is {now:.3g}, down from {first:.3g} at first; the loss takes "
                text += window.run.positive[name]
                yield self.found(rows.steps[row], name, text, "parameter", before=first, now=now)
