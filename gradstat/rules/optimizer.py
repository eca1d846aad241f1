"""Rules about optimizer states, as measured by ``watch={"optimizer": n}``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from gradstat.recording.findings import Finding, Severity
from gradstat.rules.base import Band, RowsRule, Rule, carried, same_for, series
from gradstat.rules.course import LARGE_EPS, SCALED, USUAL_EPS
from gradstat.rules.rows import Rows, Window

_EFFECTS = (  # of steps that follow other gradients than the last ones
    "parameter-jump", "exploding-gradient", "loss-spike", "growing-weights", "unrelated-outputs",
)  # fmt: skip


class GradientsNotZeroed(Rule):
    """Optimizer steps whose gradients still contain those of the step before, since nothing has zeroed them.

    It is known exactly, from the version counter of a gradient. Gradient accumulation between two steps is not
    reported, nor gradients that the program changes before it adds to them, such as ``p.grad.mul_(0.9)``. It is not
    known under FSDP 2, which adds to gradients itself, with ``create_graph=True``, and for gradients that are clipped
    where the monitor has no optimizer.
    """

    name = "gradients-not-zeroed"
    explains = _EFFECTS
    causes = (
        "optimizer.zero_grad() is not called between steps, or is called on another optimizer only",
        "gradients that the program keeps on purpose, as its own momentum: then leave this rule out of rules=",
    )
    advice = ("call optimizer.zero_grad() once per step, after optimizer.step()",)

    _LEAST = 2  # such steps in a row

    _run = carried(0)

    def bands(self) -> Mapping[str, Band]:
        return {} if self._run >= self._LEAST else {"not_zeroed": (-math.inf, 0.0)}

    def review(self, window: Window) -> Iterable[Finding]:
        self._run *= "not_zeroed" in window.scalars
        for step, is_kept in series(window, "not_zeroed"):
            self._run = self._run + 1 if is_kept > 0 else 0
            if self._run == self._LEAST:
                text = f"the gradients of the last {self._run} optimizer steps still contained those of the step "
                text += "before: they are not zeroed between steps"
                # It is known of a step when the next one is measured.
                yield self.found(step - self._run, "gradients", text, in_a_row=self._run)


_NO_STEP = ("optimizer.step() is not reached, or gradstat.auto was given another optimizer than the one that steps",)
_STEP = ("call optimizer.step() once for each zero_grad(), after backward()",)


class UnusedGradients(Rule):
    """Backward passes whose gradients are zeroed before a step uses them.

    It is known exactly, but not under FSDP. With `gradstat.auto` or an integration, it is reported at the third step in
    a row whose backward passes all come from the same lines of the program, with parameters that do not change between
    them, and which uses the gradients of the last pass only: a program that reads gradients in between has another use
    for them. It is also reported if gradients were zeroed fifty times without an optimizer step, and twice as often as
    between earlier steps. In a loop that calls `Monitor.step` after each pass, it is reported if at least 16 of fifty
    passes were zeroed unused, and more than there were steps. It is not reported where networks train in turn, as in a
    GAN.
    """

    name = "unused-gradients"
    explains = ("unchanged-parameter", "unrelated-outputs")
    causes = (
        "gradients are zeroed before each micro-batch instead of once per step, or optimizer.step() is left out",
        "gradients that the program reads and then zeroes on purpose: then leave this rule out of rules=",
    )
    advice = ("call optimizer.zero_grad() once per step, after optimizer.step()",)

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.observed("unused"):
            unused, of = seen.value.unused, seen.value.of
            if not self.begins("", seen.step):
                continue
            if not of:
                text = f"gradients were computed and zeroed {unused} times without a call of optimizer.step()"
                yield self.found(seen.step, "optimizer", text, causes=_NO_STEP, advice=_STEP)
            elif not window.run.has_other_optimizer:
                text = f"the gradients of {unused} of {of} backward passes are zeroed before optimizer.step() uses "
                text += f"them, in the last {seen.value.steps} optimizer steps"
                yield self.found(seen.step, "gradients", text, unused=unused, passes=of)


# A momentum that averages more than the last 1,000 gradients (milesial's U-Net has 0.999 and learns), or 500 of Adam's
# or after a smaller one; a second moment that averages fewer than two. A state is cleared after so many steps at least.
_MAX_MOMENTUM, _MAX_BETA, _LEAST_DECAY, _TAKEN = 0.999, 0.998, 0.5, 20
_INTERCHANGED = ("momentum (or beta1) and beta2 in the wrong order, or a digit too many or too few",)


class OptimizerMemory(Rule):
    """A momentum or beta2 that averages over far too many or too few steps, or a state that is cleared.

    It is known exactly, from the optimizer's settings and from the step counters in its state, where these are on the
    host. SGD's has none, but keeps its momentum in one tensor, which tells whether it is cleared in every step.
    """

    name = "optimizer-memory"
    explains = _EFFECTS
    causes = ("the program clears optimizer.state, or loads an old state into the optimizer",)
    advice = (
        "make the optimizer and load its state once, before the loop, from the same checkpoint as the model",
        "if the state was cleared on purpose, warm up the learning rate again",
    )

    _cleared = carried(0)  # looks in a row
    _usual_until = carried(-1)  # the last step whose momentum was not large
    _age, _looked_at = carried(math.nan), carried(0)  # the steps that the state counted at the last look, and its step

    def review(self, window: Window) -> Iterable[Finding]:
        run = window.run
        most = _MAX_BETA if run.step_size == "rate" or self._usual_until >= 0 else _MAX_MOMENTUM
        for now in window.steps[-1:].tolist():
            if run.momentum <= _MAX_BETA:
                self._usual_until = now
            elif run.momentum > most and self.begins("momentum", now):
                what, usual = "momentum (or beta1)", "a momentum from 0.9 to 0.99"
                yield self._averages(self._usual_until + 1, what, run.momentum, "gradients", usual)
            if run.least_decay < _LEAST_DECAY and self.begins("decay", now):
                what, usual = "decay of the second moment (beta2)", "a beta2 from 0.95 to 0.999"
                yield self._averages(now, what, run.least_decay, "squared gradients", usual)
            yield from self._lost(now, run.settings.get("step counter in the optimizer's state", math.nan))
        for seen in window.observed("coverage"):
            is_cleared = seen.value.age <= 1 and seen.value.all_steps >= _TAKEN
            self._cleared = self._cleared + 1 if is_cleared else 0
            if self._cleared == 2 and self.begins("cleared", seen.step):
                text = f"the optimizer has taken {seen.value.all_steps} steps, but its state has seen "
                text += f"{seen.value.age:.0f}: it is cleared in every step"
                yield self.found(seen.step, "optimizer", text, steps=seen.value.all_steps)

    def _lost(self, step: int, age: float) -> Iterator[Finding]:
        """Finds that a state counts ``age`` steps, though it had more, as one that began anew since the last look."""
        if age == self._age:  # it may be that of the last look
            return
        if _TAKEN <= self._age > age <= step - self._looked_at and self.begins("lost", step):
            text = "the optimizer's state was lost or replaced: its step counter fell from "
            text += f"{self._age:.0f} to {age:.0f}"
            yield self.found(step - int(age), "optimizer", text, before=self._age, now=age)
        self._age, self._looked_at = age, step

    def _averages(self, step: int, what: str, value: float, averaged: str, usual: str) -> Finding:
        span = f"the last {1 / (1 - value):,.0f} steps" if 0 < value < 1 else "all steps" if value else "one step"
        text = f"the {what} of the optimizer is {value:g}: it averages the {averaged} of {span}"
        return self.found(step, "optimizer", text, causes=_INTERCHANGED, advice=(f"use {usual}",), value=value)


# The root of the mean is below eps, or this if that is less, which is the eps that torch's optimizers have if none is
# given; a larger one is chosen to dominate, as in PPO. One of Adam's from the second number on dominates roots that are
# ten times smaller. Conventions of gradstat.
_SMALL, _LARGE, _DOMINATES = 1e-8, 0.01, 0.1


class SmallSecondMoment(RowsRule):
    """A second moment so small that eps dominates the optimizer's denominator.

    Then updates shrink with the gradients, and the parameter stops learning (M. Wortsman and others, Small-scale
    proxies for large-scale Transformer training instabilities, arXiv 2309.14322). Only weights of two dimensions and
    more are reviewed: the gradient of a bias before a batch norm is rounding error, and harmless. It is an info if
    less than half of the weights are affected, such as those of a branch that begins with a factor near 0.
    """

    name = "small-second-moment"
    quiet = 10_000
    kinds = ("exp_avg_sq", "square_avg")
    causes = (SCALED, "tiny gradients of this parameter: a deep or wide model, or vanishing gradients")
    advice = (
        "use a smaller eps in the optimizer, 1e-15 for example",
        "find out why its gradients are so small, as for vanishing-gradient",
    )

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        eps = window.run.optimizer_eps
        is_large = kind == "exp_avg_sq" and eps >= _LARGE
        limit = (_DOMINATES * eps if is_large else min(eps, _SMALL)) ** 2
        # All zero means no gradient yet, which other rules report. The first averages are far below what they average.
        low = rows.tensors.matrices & (rows.mean < limit) & (rows.mean > 0) & (rows.steps >= _TAKEN)[:, None]
        for row in np.flatnonzero(low.any(1)).tolist():
            fresh = [i for i in np.flatnonzero(low[row]).tolist() if self.begins(rows.names[i], rows.steps[row])]
            if not fresh:
                continue
            i = fresh[0]
            name, value = rows.names[i], rows.mean[row, i]
            text = f"the mean of {kind} of {name} is {value:.3g}: eps ({eps:g}) dominates its updates"
            text += same_for(len(fresh))
            evidence = {"mean": value, "limit": limit, "eps": eps, "parameters": len(fresh)}
            severity: Severity = self.severity if 2 * low[row].sum() >= rows.tensors.matrices.sum() else "info"
            causes, advice = ((LARGE_EPS, *self.causes), (USUAL_EPS, *self.advice)) if is_large else (None, None)
            yield self.found(rows.steps[row], name, text, kind, severity, causes, advice, **evidence)
