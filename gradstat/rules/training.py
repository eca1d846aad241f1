"""Rules about the course of training: loss, learning rate, clipping, outputs, parameters of the optimizer."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradstat._core.text import count_of
from gradstat.guard import OF_MEDIAN, THRESHOLD, reasons_of
from gradstat.recording.findings import Finding, Severity
from gradstat.rules.advice import CLIP
from gradstat.rules.base import CHANGED, WRONG_SIGN, Band, Rule, series
from gradstat.rules.rows import Floats, Observation, Window, rate_name
from gradstat.rules.spikes import LevelRule, Shift, SpikeRule

_MAXIMIZES = ("an optimizer made with maximize=True",)
# So many losses on each side show that the sign has changed.
_SIGNS = 16


@dataclass(kw_only=True, eq=False, repr=False)
class LossSpike(SpikeRule, LevelRule):
    """A loss that jumps and stays high, jumps beyond all earlier values, or has climbed well above its lowest level.

    Or whose sign changes at once: 16 positive losses are followed by 16 negative ones, and of four on either side the
    median magnitude is at least half of the median of the 16 before. An info if a single value jumps, beside another
    optimizer that trains something else in turn, which may catch up, or if the loss is one of Q-learning, whose targets
    jump with the network that makes them (the runner of the rules sees to both).

    Args:
        series: The scalar that is judged: the loss, or one that `gradstat.Monitor.step` was given.
        sigmas, log_sigmas, lost_progress, min_count, within_steps, single_factor, warmup_factor, factor, errors, moves,
            window: As for `SpikeRule`. A value is far outside of the usual ones where a `gradstat.SpikeGuard` refuses.
        climb, climb_lost_progress, fallen, above: The mean of 20 steps has climbed if it exceeds the lowest window mean
            so far by the factor ``climb``, as the initial loss must, and by the usual scatter of values; and also by
            the fraction ``climb_lost_progress`` of the way back to it, and by five standard errors. The initial loss
            need only exceed the lowest by ``1 / fallen`` if the median of the 20 exceeds it by ``above`` as well, and
            their mean twice that of the first 20 of the last ``window``: errors of values that grow rise slowly.
    """

    name = "loss-spike"
    quiet = 50
    fresh, before, kept = 4, 8, 26
    causes = (
        f"if it stays there, {CHANGED[0]}",
        "if it comes down again, an unusual or damaged batch",
        "a learning rate too high: a step overshot the minimum",
    )
    advice = (
        "look at that batch and its labels, and at the learning rate at that step",
        CLIP,
        "lower the learning rate",
        "if it does not come down again, go back to a checkpoint from before and skip those batches",
    )

    series: str = "loss"
    sigmas: float = THRESHOLD
    log_sigmas: float = 4.0
    single_factor: float = 4.0
    climb: float = 3.0
    climb_lost_progress: float = 0.4
    fallen: float = 0.8
    above: float = 4.0
    errors: float = THRESHOLD
    moves: float = 3.0

    def __post_init__(self) -> None:
        LevelRule.__post_init__(self)
        super().__post_init__()
        self._lowest, self._error = math.inf, 0.0

    def set_limits(self) -> None:
        super().set_limits()
        if self.beginning() < self._median / 10:  # it began at 0, such as a divergence: single values mean little
            self._beyond = math.inf
        count = len(self._values)
        if 2 * count >= self.window:
            mean = sum(self._values) / count
            if mean < self._lowest:
                self._lowest = mean
                # The standard error of a mean of 20 values. A square of 1e200 would raise.
                self._error = math.hypot(*(value - mean for value in self._values)) / math.sqrt(20 * count)

    def bands(self) -> Mapping[str, Band]:
        return {self.series: (-math.inf, min(self._high, self._beyond))}

    def review(self, window: Window) -> Iterable[Finding]:
        losses = window.scalars.get(self.series, np.empty(0))
        if (losses < 0).any():
            yield from self._signs([*self._recent_steps, *window.steps.tolist()], [*self._recent, *losses.tolist()])
        values = ((step, loss, None) for step, loss in series(window, self.series))
        shifts = ((shift.step, 0.0, shift) for shift in self.shifts(window.steps, losses, 1))
        # A shift comes behind the value in which it showed.
        for step, loss, shift in heapq.merge(values, shifts, key=operator.itemgetter(0)):
            if shift is not None:
                yield from self._of_shift(shift)
                continue
            if not math.isfinite(loss):
                continue
            limit, median = min(self._high, self._beyond), self._median
            began = self.detect_jump(step, loss)
            if began is not None:
                text = f"the {self.series} jumps to {loss:.4g} from about {median:.4g}"
                severity: Severity = self.severity if self._lasts else "info"
                yield self.found(began, self.series, text, "series", severity, loss=loss, median=median, limit=limit)
            if not 0 < self._lowest < math.inf:
                continue
            recent = self._values[-20:]
            mean = sum(recent) / len(recent)
            if mean <= self.climb * self._lowest:
                continue
            # Skip a loss that never fell far below its initial level, such as an error of values that grow, unless it
            # fell at first and is far above that level now.
            start = self.beginning()
            is_above = sorted(recent)[len(recent) // 2] > self.above * start and mean > sum(self._values[:20]) / 10
            is_above = is_above and (self._lowest < self.fallen * start or window.run.maximizes)
            if not is_above and (mean <= self._scatter * self._lowest or start < self.climb * self._lowest):
                continue
            least = max(self.climb_lost_progress * (start - self._lowest), 5 * self._error)
            if mean > self._lowest + least and self._episodes.record("climb", step):
                text = f"the mean {self.series} of 20 steps has climbed to {mean:.4g}; the lowest was "
                text += f"{self._lowest:.4g}" + f", and it began at {start:.4g}" * is_above
                causes = (*(_MAXIMIZES if window.run.maximizes else WRONG_SIGN[:1] * is_above), *self.causes)
                yield self.found(step, self.series, text, causes=causes, mean=mean, lowest=self._lowest)

    def _signs(self, steps: list[int], losses: list[float]) -> Iterable[Finding]:
        """Finds where ``losses``, of which some may have been looked at before, change their sign at once."""
        for at in range(_SIGNS, len(losses) - _SIGNS + 1):
            old, new = losses[at - 1], losses[at]
            if new < 0 < old:
                before, after = losses[at - _SIGNS : at], losses[at : at + _SIGNS]
                level = sorted(before)[_SIGNS // 2] / 2
                # A loss that falls through 0 is near it on both sides.
                is_at_once = min(before) > 0 > max(after) and sorted(before[-4:])[2] > level < -sorted(after[:4])[1]
                if is_at_once and self._episodes.record("sign", steps[at]):
                    text = f"the {self.series} changes its sign, from {old:.4g} to {new:.4g}, and stays negative"
                    yield self.found(steps[at], self.series, text, causes=WRONG_SIGN, loss=new, before=old)

    def _of_shift(self, shift: Shift) -> Iterable[Finding]:
        before, after = shift.before, shift.after
        beginning = self.beginning()
        progress = beginning - before
        # The first values may be far above all others. A hundredth of them is nothing to one that has converged.
        least = min(self.lost_progress * progress, self.sigmas * shift.deviation + abs(beginning) / 100)
        least = max(least, self.sigmas * OF_MEDIAN * abs(before))
        # A loss that has grown since the beginning, such as an error of values that grow, may go on growing.
        is_grown = progress < -self.sigmas * OF_MEDIAN * abs(before)
        if after - before > least and not is_grown and self._episodes.record("leap", shift.step):
            text = f"the {self.series} rises to a level of {after:.4g} from {before:.4g}, and stays there"
            causes = (*CHANGED, self.causes[-1])
            yield self.found(shift.began, self.series, text, causes=causes, loss=after, median=before)


_SIGNALS = ("loss", "norm")
_HUGE = 1e308


def _of_group(name: str) -> str:
    return (name != "lr") * f" of group {name[3:-1]}"


_NO_DECAY = 0.05  # of a setting that was 0; a weight decay of 0.5 is far above usual ones
_SETTINGS = ("a schedule that sets it in place of lr", "an optimizer that was restored, or edited, wrongly")


@dataclass(kw_only=True, eq=False, repr=False)
class LearningRateJump(Rule):
    """A learning rate that jumps, stays 0, or is negative or NaN; or a weight decay or an eps that jumps.

    The rate of step 0 is compared with none: a program may set it between the backward pass and the step.

    Args:
        up: It grows by more than this factor in one step, above all earlier rates and above the ``initial_lr`` of its
            scheduler, which a warm-up that is stepped per epoch may reach at once. If losses or norms are known,
            something must follow: within ``follows`` steps a loss or norm that is not finite, or four losses in a row
            above those of the 16 steps before, or norms above three times those.
        down: It falls by more than this factor in one step; step schedules divide by 10.
        follows: As for ``up``. A change by no more than 1.5 times the last one, as on a ramp, is no jump either way.
        setting: Weight decay or eps of a group grows by more than this factor between two looks. 0 counts as 0.05.
        zeros: It is 0 for this many steps after it was not. Schedules touch 0 at their end.
        fades, within, lasts: It is, for ``lasts`` steps in a row, below this fraction of its largest value in the
            ``within`` steps before; cosine, linear and polynomial schedules come that low in the last two steps.
    """

    name = "learning-rate-jump"
    quiet = 10
    causes = (
        "a scheduler stepped twice, or per batch where it counts epochs (or the reverse)",
        "warm-up and decay that do not meet: decay does not begin where warm-up ends",
        "a scheduler or optimizer restored without its state",
    )
    advice = (
        "print the schedule beforehand: [scheduler.get_last_lr() for each step]",
        "restore scheduler and optimizer from the same checkpoint",
    )

    up: float = 3.0
    down: float = 20.0
    zeros: int = 20
    follows: int = 16
    setting: float = 10.0
    fades: float = 1e-3
    within: int = 50
    lasts: int = 5

    def __post_init__(self) -> None:
        super().__init__()
        self._course: list[float] = []  # the last rates of the first group
        # By series, as `rate_name` calls them.
        self._before: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._zero_for: dict[str, int] = {}
        self._scheduled: dict[str, float] = {}
        self._change: dict[str, float] = {}
        self._settings: dict[str, float] = {}  # when last looked at
        self._looked = 0
        # Of the last steps: step, loss and norm, one after the other; of growths that wait: group, step, before, rate.
        self._signals: list[float] = []
        self._waiting: list[float] = []

    def bands(self) -> Mapping[str, Band]:
        bands = {"lr": (0.0, math.inf)}
        if self._waiting:
            bands |= {name: (-math.inf, most) for name, most in self._usual(self._waiting[1]).items()}
        for name, last in self._before.items():
            if last > 0:
                most = max(self._largest.get(name, 0.0), self._scheduled.get(name, 0.0), self.up * last)
                bands[name] = (last / self.down, most)
        return bands

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("coverage"):
            for name, new in seen.value.settings.items():
                what, old = name.partition(" ")[0], self._settings.get(name, new)
                if new > self.setting * (old or _NO_DECAY) and self._episodes.record(name, seen.step):
                    text = f"{name} has gone from {old:.4g} to {new:.4g}, after step {self._looked}"
                    yield self.found(self._looked + 1, what, text, causes=_SETTINGS, before=old, now=new)
            self._settings, self._looked = {**seen.value.settings}, seen.step
        self._scheduled = {rate_name(i): rate for i, rate in enumerate(window.run.initial_lrs)}
        first, before_first = window.scalars.get("lr"), self._before.get("lr", math.nan)
        if first is None:
            return
        yield from self._faded(window.steps, first)
        is_known = any(window.scalar(signal) is not None for signal in _SIGNALS)
        for name in dict.fromkeys(["lr", *self._before, *(name for name in window.scalars if name.startswith("lr["))]):
            rates = window.scalars.get(name, first)
            if name != "lr":
                rates = np.where(np.isnan(rates), first, rates)  # a group that is not there has the rate of the first
            listed = rates.tolist()
            before = self._before.get(name, before_first)
            self._largest.setdefault(name, 0.0)
            self._before[name] = listed[-1]
            rates_of = zip(window.steps.tolist(), [before, *listed[:-1]], listed, strict=True)
            yield from self._review_one(name, rates_of, is_known)
            change = listed[-1] - (listed[-2] if len(listed) > 1 else before)
            self._change[name] = change if math.isfinite(change) else 0.0
        yield from self._followed(window)

    def _faded(self, steps: npt.NDArray[np.int64], rates: Floats) -> Iterable[Finding]:
        """Reports a rate that falls to nearly nothing in a few steps."""
        every = [*self._course, *np.where(steps > 0, rates, math.nan).tolist()]
        self._course = list(filter(math.isfinite, every[-(self.within + self.lasts - 1) :]))
        course = np.array(every)
        padded = np.concatenate([np.zeros(self.within), np.nan_to_num(course)])
        highest = np.lib.stride_tricks.sliding_window_view(padded, self.within + 1).max(1)
        ends = slice(-(len(rates) + self.lasts - 1), None)  # so that the last of each run is one of the new rates
        now, before = course[ends], highest[ends]
        is_low = (now > 0) & (now < self.fades * before)
        if len(is_low) >= self.lasts:
            lasting = np.lib.stride_tricks.sliding_window_view(is_low, self.lasts).all(1)
            for row in np.flatnonzero(lasting)[:1].tolist():
                step, old, new = int(steps[row + self.lasts - 1 - len(now)]), before[row], now[row]
                if self._episodes.record("faded", step):
                    text = f"the learning rate falls from {old:.4g} to {new:.4g} within {self.within} steps"
                    yield self.found(step, "lr", text, before=old, lr=new)

    def _usual(self, step: float) -> dict[str, float]:
        """The largest loss and three times the largest norm of the 16 steps up to ``step``."""
        signals = np.array(self._signals).reshape(-1, 3)
        before = signals[signals[:, 0] <= step][-16:, 1:]
        if len(before) <= 3:
            return {}
        loss, norm = before.max(0).tolist()
        return {"loss": loss, "norm": 3 * norm}  # norms also rise where a model begins to learn

    def _followed(self, window: Window) -> Iterable[Finding]:
        """Reports growths that something followed."""
        columns = [window.scalars.get(name, np.zeros(len(window.steps))) for name in _SIGNALS]
        # What is not finite is above everything, and a state may not hold it.
        huge = [np.fmax(np.fmin(column, _HUGE), -_HUGE).tolist() for column in columns]
        self._signals += itertools.chain.from_iterable(zip(window.steps.tolist(), *huge, strict=True))
        del self._signals[: -3 * (2 * 16 + self.follows + 64)]
        if not self._waiting:
            return
        waiting, self._waiting = np.array(self._waiting).reshape(-1, 4), []
        signals = np.array(self._signals).reshape(-1, 3)
        for group, step, before, rate in waiting.tolist():
            after, usual = signals[signals[:, 0] > step][: self.follows, 1:], self._usual(step)
            above = after > [usual[name] for name in _SIGNALS] if usual else np.zeros((0, 2), dtype=bool)
            rows = np.lib.stride_tricks.sliding_window_view(above, 4, axis=0) if len(above) > 3 else np.zeros((0, 2, 4))
            name = rate_name(int(group))
            # Under a loss scaler gradients overflow now and then.
            ends = (after[:, :1] if window.scalar("loss_scale") is not None else after) >= _HUGE
            if rows.all(2).any() or ends.any():
                if self._episodes.record(f"jump {name}", int(step)):
                    yield self._jump(int(step), name, before, rate)
            elif len(after) < self.follows:
                self._waiting += [group, step, before, rate]

    def _jump(self, step: int, name: str, previous: float, rate: float) -> Finding:
        text = f"the learning rate{_of_group(name)} jumps from {previous:.4g} to {rate:.4g}"
        return self.found(step, name, text, before=previous, lr=rate, factor=rate / previous)

    def _review_one(self, name: str, rates: Iterable[tuple[int, float, float]], is_known: bool) -> Iterable[Finding]:
        which, last = f"the learning rate{_of_group(name)}", self._change.get(name, 0.0)
        scheduled = self._scheduled.get(name, 0.0)
        for step, previous, rate in rates:
            if rate < 0 or (math.isnan(rate) and not math.isnan(previous)):
                if self._episodes.record(f"invalid {name}", step):
                    text = f"{which} is {rate}"
                    yield self.found(step, name, text, severity="error", lr=str(rate), before=previous)
                continue
            self._zero_for[name] = self._zero_for.get(name, 0) + 1 if rate == 0 and self._largest[name] > 0 else 0
            if self._zero_for[name] == self.zeros:
                since = step - self.zeros + 1
                yield self.found(since, name, f"{which} has been 0 for {self.zeros} steps", lr=0.0)
            # A warm-up may begin at 0, or far below earlier rates.
            previous = previous if step > 1 else rate
            grown = previous > 0 and rate > self.up * previous
            grown = grown and rate > max(self._largest[name], scheduled * (1 + 1e-9))
            fallen = previous > 0 and rate < previous / self.down and rate > 0
            change = rate - previous if math.isfinite(rate - previous) else 0.0
            is_ramp = change * last > 0 and abs(change) <= 1.5 * abs(last)
            last = change
            if grown and is_known:
                self._waiting += [float(name[3:-1] or 0) if name != "lr" else 0.0, float(step), previous, rate]
            elif (grown or fallen) and not is_ramp and self._episodes.record(f"jump {name}", step):
                yield self._jump(step, name, previous, rate)
            self._largest[name] = max(self._largest[name], rate)


class LateClip(Rule):
    """Gradients that are clipped after a step, before the next backward pass; needs `gradstat.auto` or an integration.

    It is reported once.
    """

    name = "late-clip"
    causes = ("a clip that is called after optimizer.step()",)
    advice = ("clip between backward() and optimizer.step()",)

    def bands(self) -> Mapping[str, Band]:
        return {} if self._episodes else {"late_clip": (0.0, 0.0)}

    def review(self, window: Window) -> Iterable[Finding]:
        for step, is_late in series(window, "late_clip"):
            if is_late > 0 and not self._episodes:
                self._episodes.record("", step)
                text = "gradients were clipped between a step and the next backward pass, which changes nothing"
                yield self.found(max(step - 1, 0), "norm", text)


class RefusedStep(Rule):
    """A `gradstat.SpikeGuard` refused the last guarded step before this one; a warning if it refuses one after another.

    Args:
        lasting: From this many refusals in a row the level has changed, rather than a value.
    """

    name = "refused-step"
    severity = "info"
    causes = ("an unusual or damaged batch", "a learning rate too high, or a lasting change of the loss")
    advice = ("look at the batches of refused steps", "guard.read() counts them, by loss and norm")

    def __init__(self, lasting: int = 5) -> None:
        super().__init__()
        self.lasting = lasting
        self._in_a_row = 0

    def bands(self) -> Mapping[str, Band]:
        return {"refused": (0.0, 1.0)}

    def review(self, window: Window) -> Iterable[Finding]:
        for step, bits in series(window, "refused"):
            self._in_a_row = self._in_a_row + 1 if bits > 1 else 0
            reasons = reasons_of(int(bits)) if bits > 1 else ()
            if reasons and self._episodes.record("refused", step):
                text = f"the guard has refused a step because of its {' and '.join(reasons)}"
                yield self.found(step, "refused", text, reasons=reasons)
            if self._in_a_row == self.lasting:
                text = f"the guard has refused {self.lasting} steps in a row, the last because of its"
                text += f" {' and '.join(reasons)}: not an outlier, but another level"
                first = step - self.lasting + 1
                yield self.found(first, "refused", text, severity="warning", reasons=reasons, steps=self.lasting)


_UNTRAINED = (
    "layers in a Python list or dict",
    "a network that is not trained, but whose parameters require gradients",
)
_REGISTER = (
    "put layers into nn.ModuleList or nn.ModuleDict, and make the optimizer afterwards",
    "call requires_grad_(False) on what is not trained: its gradients are computed and never zeroed",
)
_REPLACED = ("another optimizer has taken its place, or one is made in each step",)
_KEEP = (
    "make one optimizer before the loop, and keep it: momentum and second moments of a new one begin at zero",
    "give the monitor the optimizer that steps",
)


class OptimizerCoverage(Rule):
    """Parameters that the optimizer lacks, has though they are frozen or not the model's, or that another one trains.

    Also those in the graph of the first loss or output that are neither the model's nor an optimizer's, if nothing has
    changed them 16 steps later.

    An info for missing parameters without gradients, such as those of a target network, and for those that are frozen,
    unless they are most of the model and were trained before, or not the model's but trained.

    Args:
        rests: An optimizer that has stepped before is not the one that trains, if its parameters are changed in every
            step, and it takes fewer than one in so many.
    """

    name = "optimizer-coverage"
    causes = (
        "the optimizer was made before layers were added, replaced, tied or moved",
        "layers were frozen after the optimizer was made",
    )
    advice = (
        "make the optimizer after the model is complete",
        "pass it only what is to be trained: [p for p in model.parameters() if p.requires_grad]",
    )

    def __init__(self, rests: int = 20) -> None:
        self.rests = rests
        self._reported: dict[str, int] = {}  # what was found of which parameter, and when
        self._first_look = -1
        self._before: dict[str, float] = {}  # sums of parameters that an optimizer of one lacks
        self._last_look, self._has_stepped = 0, False

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("untrained"):
            if seen.value:
                text = f"the loss depends on {count_of(len(seen.value), 'parameter')} that neither the model nor an "
                text += f"optimizer has, so that nothing trains them; one has the shape {list(seen.value[0])}"
                yield self.found(0, "optimizer", text, causes=_UNTRAINED, advice=_REGISTER, parameters=len(seen.value))
        for seen in window.observed("coverage"):
            yield from self._replaced(seen)
            rows, left_out = window.rows("gradient"), seen.value.left_out
            parameters = window.latest.get("parameter")
            sums = {} if parameters is None else dict(zip(parameters.names, parameters.field("sum")[-1], strict=True))
            # It may be one of many that have a parameter each, as for steps in the backward pass: the next look tells.
            self._first_look = seen.step if self._first_look < 0 else self._first_look
            if seen.step == self._first_look and rows is not None and len(rows.names) - len(left_out) == 1:
                self._before = {name: sums[name] for name in left_out if name in sums}
                left_out = [name for name in left_out if name not in sums]
            elif self._before:
                left_out = [name for name in left_out if sums.get(name) == self._before.get(name, sums.get(name))]
            severity: Severity
            # The first word is what states and findings have.
            for key, parameters, severity, words in (
                ("absent", left_out, self.severity, "has a gradient and is not in the optimizer"),
                ("resting", seen.value.unused, "info", "has no gradient and is not in the optimizer"),
                ("frozen", seen.value.frozen, "info", "is frozen (requires_grad is False) and still in the optimizer"),
                ("foreign", seen.value.unknown, self.severity, "is not a parameter of the model, and has no gradient"),
                ("besides", seen.value.besides, "info",
                 "is trained by the optimizer but is not a parameter of the model; it is watched"),
            ):  # fmt: skip
                names = [name for name in parameters if f"{key} {name}" not in self._reported]
                if names:
                    if key == "frozen" and seen.step > self._first_look and _are_most(names, window):
                        severity = self.severity
                    self._reported |= {f"{key} {name}": seen.step for name in names}
                    more = f"; the same holds for {len(names) - 1} more" * (len(names) > 1)
                    text = f"{names[0]} {words}{more}"
                    yield self.found(seen.step, names[0], text, "parameter", severity, what=key, parameters=names[:20])

    def _replaced(self, seen: Observation) -> Iterable[Finding]:
        """Reports an optimizer that has taken steps, and takes none any more while its parameters change."""
        rests, self._last_look = seen.step - self._last_look, seen.step
        taken = seen.value.steps
        self._has_stepped |= taken > 0
        is_replaced = self._has_stepped and seen.value.changes >= rests >= self.rests * max(taken, 1)
        if is_replaced and "replaced" not in self._reported:
            self._reported["replaced"] = seen.step
            text = f"the optimizer took {taken or 'none'} of the last {rests} steps, but its parameters change in each"
            yield self.found(seen.step - rests, "optimizer", text, causes=_REPLACED, advice=_KEEP, steps=rests)


def _are_most(names: list[str], window: Window) -> bool:
    """Whether the parameters ``names`` have more than half of all elements."""
    parameters = window.latest.get("parameter")
    if parameters is None:
        return False
    count = parameters.tensors.numel[np.isin(parameters.names, names)].sum()
    return bool(2 * count > parameters.tensors.numel.sum())
