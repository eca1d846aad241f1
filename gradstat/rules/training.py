"""Rules about the course of training: loss, clipping, parameters of the optimizer."""

from __future__ import annotations

import heapq
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gradstat._core.text import count_of
from gradstat.guard import THRESHOLD
from gradstat.recording.findings import Finding, Severity
from gradstat.rules.advice import CLIP
from gradstat.rules.base import CHANGED, WRONG_SIGN, Band, Records, Rule, carried, numbered, same_for, series
from gradstat.rules.course import look_fresh
from gradstat.rules.rows import Observation, Window
from gradstat.rules.spikes import LOST_PROGRESS, WINDOW, LevelRule, Shift, SpikeRule

_MAXIMIZES = ("an optimizer with maximize=True",)
# The mean of so many losses has climbed if it exceeds the lowest mean of a window so far by the factor `_CLIMB`, as the
# initial loss must, and by the usual scatter of values; and also by the fraction `_CLIMB_LOST` of the way back to it,
# and by so many standard errors, as of losses of which few are far larger than all others.
_RECENT, _CLIMB, _CLIMB_LOST, _ERRORS = 20, 3.0, 0.4, 5
# The initial loss need only exceed the lowest by 1 / `_FALLEN` if the median of these losses exceeds it by `_ABOVE` as
# well, and their mean twice that of the first `_RECENT` of the window: errors of values that grow rise slowly.
_FALLEN, _ABOVE, _TWICE = 0.8, 4.0, 2
# A level that stays has risen by the first share of itself, or by `LOST_PROGRESS` of a way of the second share of the
# beginning; by the third share of that, which is nothing to one that has converged; and further than ever as clearly.
_RISEN, _PROGRESS, _OF_FIRST, _MORE = 0.4, 0.23, 0.05, 1.5
_FROM_ZERO = 0.1  # of the median: where the losses of a divergence begin


class LossSpike(SpikeRule, LevelRule):
    """A loss that jumps and stays high, exceeds all earlier values, or climbs far above its lowest mean.

    It is an info if only a single value jumps, if another optimizer trains another network in turn, as in a GAN, and
    for Q-learning, whose targets change with the target network. It is also an info if the loss has had both signs
    from the start, as log-probabilities times normalised returns: its size says little.

    Args:
        series: The scalar to review: ``"loss"``, or one of ``scalars`` of `gradstat.Monitor.step`.
        sigmas: How far a loss must be above the median, in spreads as `gradstat.SpikeGuard` defines them. By default
            the guard's own threshold.
    """

    name = "loss-spike"
    quiet = 50
    log_sigmas, single_factor = 4.0, 4.0
    climbed = 0.25  # in climbs of healthy losses (VQ-VAEs) the share is 0.4 and more, in jumps under noise 0.1 at most
    causes = (
        *CHANGED,
        "an unusual or damaged batch, if the loss comes down again",
        "a learning rate that is too high, so that a step overshot the minimum",
    )
    advice = (
        "inspect the batch and the labels of that step, and its learning rate",
        CLIP,
        "lower the learning rate",
        "if the loss stays high, load a checkpoint from before that step and skip its batches",
    )

    _lowest, _error = carried(math.inf), carried(0.0)  # the lowest mean of a window, and its standard error
    _least = carried(math.inf)  # the lowest mean of `_RECENT` values
    _rises_so_far = carried(Records(2))  # where levels rose, and by which share of themselves

    def __init__(self, series: str = "loss", sigmas: float = THRESHOLD) -> None:
        super().__init__()
        self.series, self.sigmas = series, sigmas

    def set_limits(self) -> None:
        super().set_limits()
        if self.beginning() < _FROM_ZERO * self._median:  # single values mean little
            self._beyond = math.inf
        count = len(self._values)
        mean = sum(self._values) / count
        if 2 * count >= WINDOW and mean < self._lowest:
            self._lowest = mean
            # The standard error of a mean of so many values. A square of 1e200 would raise.
            self._error = math.hypot(*(value - mean for value in self._values)) / math.sqrt(_RECENT * count)

    def bands(self) -> Mapping[str, Band]:
        return {self.series: (-math.inf, min(self._high, self._beyond))}

    def review(self, window: Window) -> Iterable[Finding]:
        # Errors of one output in each row are of Q-learning.
        seen = window.outputs
        moves = seen.takes_one and seen.fit is not None and seen.fit.squares > 0
        for finding in self._rises(window):
            is_usual = moves or _has_both_signs(self._first, self._values)
            is_info = window.run.has_other_optimizer or (is_usual and finding.causes != WRONG_SIGN)
            yield replace(finding, severity="info") if is_info else finding

    def _rises(self, window: Window) -> Iterator[Finding]:
        """Looks at each loss, and behind the one in which it showed at a shift."""
        losses = window.scalars.get(self.series, np.empty(0))
        values = ((step, loss, None) for step, loss in series(window, self.series))
        shifts = ((shift.step, 0.0, shift) for shift in self.shifts(window.steps, losses, 1))
        for step, loss, shift in heapq.merge(values, shifts, key=operator.itemgetter(0)):
            if shift is not None:
                yield from self._of_shift(shift)
            elif math.isfinite(loss):
                jump = self.detect_jump(step, loss)
                if jump is not None:
                    text = f"the {self.series} jumps to {jump.value:.4g} from about {jump.before:.4g}"
                    severity: Severity = self.severity if jump.lasts else "info"
                    evidence: dict[str, Any] = {"loss": jump.value, "median": jump.median, "limit": jump.limit}
                    yield self.found(jump.step, self.series, text, "series", severity, **evidence)
                if len(self._values) >= _RECENT:
                    yield from self._climb(step, window.run.maximizes)

    def _climb(self, step: int, maximizes: bool) -> Iterable[Finding]:
        """Judges the last losses, up to that of ``step``, by the lowest level and by the beginning."""
        recent, lowest = self._values[-_RECENT:], self._lowest
        mean = sum(recent) / _RECENT
        self._least = min(self._least, mean)
        if not 0 < lowest < math.inf or mean <= _CLIMB * lowest:
            return
        # Skip a loss that never fell far below its initial level, such as an error of values that grow, unless it fell
        # at first and is far above that level now.
        start = self.beginning()
        is_above = sorted(recent)[_RECENT // 2] > _ABOVE * start and (lowest < _FALLEN * start or maximizes)
        is_above = is_above and mean > _TWICE * sum(self._values[:_RECENT]) / _RECENT
        if not is_above and (mean <= self._scatter * lowest or start < _CLIMB * lowest):
            return
        least = max(_CLIMB_LOST * (start - lowest), _ERRORS * self._error)
        if mean > lowest + least and self.begins("climb", step):
            lowest = min(self._least, lowest)  # a state of before may have no mean of so few
            text = f"the mean {self.series} of {_RECENT} steps is {mean:.4g}, up from {lowest:.4g} at its lowest"
            text += f"; it began at {start:.4g}" * is_above
            causes = (*(_MAXIMIZES if maximizes else WRONG_SIGN[:1] * is_above), *self.causes)
            yield self.found(step, self.series, text, causes=causes, mean=mean, lowest=lowest)

    def _of_shift(self, shift: Shift) -> Iterable[Finding]:
        beginning = self.beginning()
        progress = beginning - shift.before
        # The level of a loss that may be negative says nothing about its size.
        scale = max(abs(shift.before), progress * (min(self._values, default=0.0) <= 0))
        lost = LOST_PROGRESS * progress if progress > _PROGRESS * abs(beginning) else math.inf
        usual = max((rise for step, rise in self._rises_so_far if step < shift.began - _RECENT), default=0.0)
        self._rises_so_far[:] = [*self._rises_so_far[-WINDOW:], [shift.began, shift.least / max(scale, 1e-300)]]
        least = max(min(_RISEN * scale, lost), _OF_FIRST * abs(beginning), _MORE * usual * scale)
        if shift.least > least and len(self._values) >= WINDOW and self.begins("leap", shift.step):
            text = f"the {self.series} rises from about {shift.before:.4g} to about {shift.after:.4g}, and stays there"
            yield self.found(shift.began, self.series, text, loss=shift.after, median=shift.before)


def _has_both_signs(*series: list[float]) -> bool:
    """Whether in each of the ``series`` at least a fifth of the values is positive, and a fifth negative."""
    return all(5 * min(sum(value < 0 for value in of), sum(value > 0 for value in of)) >= len(of) for of in series)


_UNTRAINED = (
    "layers in a Python list or dict, which nn.Module does not register",
    "a frozen network, such as a teacher, whose parameters still require gradients",
)
_REGISTER = (
    "put the layers into nn.ModuleList or nn.ModuleDict, and make the optimizer afterwards",
    "call requires_grad_(False) on a network that is not trained: its gradients are computed and never zeroed",
)
_REPLACED = ("another optimizer has replaced it, or the program makes a new optimizer in every step",)
_KEEP = (
    "make one optimizer before the loop and keep it: a new one begins with momentum and second moments of zero",
    "pass the monitor the optimizer that steps",
)


_BESIDE = 16  # steps of another optimizer that are no chance
_TWO = ("two optimizers that were made of the same parameters, of which both step",)
_KEEP_ONE = ("give each parameter to one optimizer, and remove the step() of the other",)
_NOT_LOADED = "a checkpoint that was not loaded before its layers were frozen, or more frozen layers than were meant"
_NOT_THAWED = ("a network that was frozen while another one trains, and not unfrozen for its own steps",)
_THAW = ("call requires_grad_(True) on the network before its own steps",)
# What was trained and is frozen later has this share of all elements.
_FROZEN = 0.1
# Copies, such as target networks, have half of the weights, and adapters of a small random model have many.
_NEARLY = 0.8
# Frozen on purpose for so many steps of its optimizer is rare in programs whose networks take turns.
_FROZEN_FOR = 100
# An optimizer that has stepped before is not the one that trains, if its parameters are changed in every step, and it
# takes fewer than one in so many.
_RESTS = 20


class OptimizerCoverage(Rule):
    """An optimizer that does not hold exactly the parameters that should train.

    It warns about parameters with gradients that are not in the optimizer, about parameters in the optimizer that are
    not the model's and have no gradient, about an optimizer that another one replaces or that steps beside it, and
    about parameters that the first loss depends on, are neither in the model nor in an optimizer, and have not changed
    16 steps later.

    It is an info for parameters without gradients that are not in the optimizer, such as a target network, for those
    that are trained though they are not the model's, and for frozen ones. Frozen parameters are a warning if they are
    a tenth of the model and were trained before, if they are half of its weights and look newly initialised, or if they
    are between layers of the same kind that train. Where networks train in turn, as in a GAN, they are one if they
    could train at first and stay frozen for a hundred steps.
    """

    name = "optimizer-coverage"
    quiet = sys.maxsize
    explains = ("unchanged-parameter", "unrelated-outputs")
    causes = (
        "the optimizer was made before layers were added, replaced, tied or moved",
        "layers were frozen after the optimizer was made",
    )
    advice = (
        "make the optimizer after the model is complete",
        "pass the optimizer only what trains: [p for p in model.parameters() if p.requires_grad]",
    )

    _first_look = carried(-1)
    _last_look, _has_stepped = carried(0), carried(False)
    _frozen = carried(dict[str, int]())  # the look since which it is frozen, of what was trainable

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("untrained"):
            if seen.value:
                text = f"the loss depends on {count_of(len(seen.value), 'parameter')} in neither the model nor an "
                text += f"optimizer, so nothing trains them; the shape of one is {list(seen.value[0])}"
                yield self.found(0, "optimizer", text, causes=_UNTRAINED, advice=_REGISTER, parameters=len(seen.value))
        for seen in window.observed("coverage"):
            self._first_look = seen.step if self._first_look < 0 else self._first_look
            yield from self._replaced(seen)
            yield from self._not_thawed(seen, window)
            # What the optimizer lacks is told after its first step, when it is known what others have.
            began = self._first_look if 0 < seen.value.steps == seen.value.all_steps else seen.step
            severity: Severity | None
            # The first word is what states and findings have.
            is_asleep = not window.run.has_other_optimizer and _look_new([*seen.value.asleep], window, _NEARLY)
            for key, lacking, severity, words in (
                ("asleep", seen.value.asleep if is_asleep else [], None,
                 "is frozen (requires_grad is False), as nearly all weights, and looks newly initialised"),
                ("absent", seen.value.left_out, None, "has a gradient and is not in the optimizer"),
                ("resting", seen.value.unused, "info", "has no gradient and is not in the optimizer"),
                ("frozen", seen.value.frozen, "info", "is frozen (requires_grad is False) and still in the optimizer"),
                ("foreign", seen.value.unknown, None, "is not a parameter of the model, and has no gradient"),
                ("besides", seen.value.besides, "info",
                 "is trained by the optimizer but is not a parameter of the model; gradstat watches it too"),
            ):  # fmt: skip
                names = [name for name in lacking if self.begins(f"{key} {name}", seen.step)]
                causes: tuple[str, ...] = self.led_by(_NOT_LOADED) if key == "asleep" else self.causes
                if names and key == "frozen" and (inner := _inner(names, window)):
                    names, severity = [*inner, *(name for name in names if name not in inner)], None
                    words += ", between layers that train"
                elif names and key == "frozen" and seen.step > self._first_look and _share_of(names, window) > _FROZEN:
                    severity = None
                elif names and key == "frozen" and _look_new(names, window):
                    severity, causes = None, self.led_by(_NOT_LOADED)
                    words += ", and looks newly initialised: nothing has trained it"
                if names:
                    evidence: dict[str, Any] = {"what": key, "parameters": names[:20]}
                    text = f"{names[0]} {words}{same_for(len(names))}"
                    yield self.found(began, names[0], text, "parameter", severity, causes, **evidence)

    def _replaced(self, seen: Observation) -> Iterable[Finding]:
        """Reports that another optimizer steps the parameters, instead of the one that did before or beside it."""
        rests, self._last_look = seen.step - self._last_look, seen.step
        taken, beside = seen.value.steps, seen.value.steps_beside
        self._has_stepped |= taken > 0
        is_replaced = self._has_stepped and seen.value.changes >= rests >= _RESTS * max(taken, 1)
        if is_replaced and self.begins("replaced", seen.step):
            text = f"step() of the optimizer was called in {taken or 'none'} of the last {rests} steps, though its "
            text += "parameters changed in all of them"
            yield self.found(seen.step - rests, "optimizer", text, causes=_REPLACED, advice=_KEEP, steps=rests)
        elif beside >= max(_BESIDE, rests / 2) and self.begins("beside", seen.step):
            text = f"another optimizer ({seen.value.beside}) steps the same parameters: it took {beside} steps in the "
            text += f"last {rests}, beside {taken} of the optimizer that is watched"
            causes, advice = (_TWO, _KEEP_ONE) if taken else (_REPLACED, _KEEP)
            yield self.found(seen.step - rests, "optimizer", text, causes=causes, advice=advice, steps=beside)

    def _not_thawed(self, seen: Observation, window: Window) -> Iterable[Finding]:
        """Reports a network that was trainable and is frozen in all steps of its optimizer, where networks take turns.

        Nothing else tells it from layers that are frozen at first and thawed later, to be trained gradually.
        """
        self._frozen = {name: self._frozen.get(name, seen.step) for name in seen.value.frozen_since}
        names = [name for name, since in self._frozen.items() if since == self._first_look]
        is_long = seen.step >= self._first_look + _FROZEN_FOR and window.run.has_other_optimizer
        if names and is_long and _share_of(names, window) > 0.5 and self.begins("thaw", seen.step):
            text = f"{names[0]} is frozen (requires_grad is False) whenever its optimizer steps, though it could train "
            text += f"when the monitor was made; another optimizer trains another network in turn{same_for(len(names))}"
            began, told = self._first_look, names[:20]
            yield self.found(began, names[0], text, "parameter", None, _NOT_THAWED, _THAW, parameters=told)


def _inner(frozen: list[str], window: Window) -> list[str]:
    """The weights among ``frozen`` that have twins with gradients on both sides, by the numbers in their names.

    To train some layers only, one freezes the first ones, or all but the last, or gives adapters other names.
    """
    gradients, parameters = window.latest.get("gradient"), window.latest.get("parameter")
    if gradients is None or parameters is None:
        return []
    trained: dict[str, list[list[int]]] = {}
    for i in np.flatnonzero(gradients.present[-1]).tolist():
        kind, numbers = numbered(gradients.names[i])
        trained.setdefault(kind, []).append(numbers)
    weights, inner = {*np.array(parameters.names)[parameters.tensors.matrices].tolist()}, []
    for name in frozen:
        kind, numbers = numbered(name)
        twins = trained.get(kind, [numbers])
        if name in weights and min(twins) < numbers < max(twins):
            inner.append(name)
    return inner


def _look_new(names: list[str], window: Window, share: float = 0.5) -> bool:
    """Whether the parameters ``names`` have this ``share`` of all weights, or more, and look newly initialised."""
    rows = window.latest.get("parameter")
    if rows is None:
        return False
    which, are_weights = np.isin(rows.names, names), rows.tensors.matrices
    return bool((which & are_weights).sum() >= share * are_weights.sum()) and look_fresh(rows, -1, which)


def _share_of(names: list[str], window: Window) -> float:
    """The share of all elements that the parameters ``names`` have; 0 if it is not known."""
    parameters = window.latest.get("parameter")
    if parameters is None:
        return 0.0
    numel = parameters.tensors.numel
    return float(numel[np.isin(parameters.names, names)].sum() / max(numel.sum(), 1))
