"""Rules about optimizer states, as measured by ``watch={"optimizer": n}``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from gradstat.recording.findings import Finding, Severity
from gradstat.rules.base import Band, LastingRule, PerName, RowsRule, Rule, carried, same_for, series
from gradstat.rules.rows import Floats, Rows, Window

_SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
_EFFECTS = (  # of steps that follow other gradients than the last ones
    "parameter-jump", "exploding-gradient", "loss-spike", "momentum-drift", "second-moment-drop", "growing-weights",
    "no-learning", "unrelated-outputs",
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
    explains = ("unchanged-parameter", "no-learning", "unrelated-outputs")
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
# or where the last four losses are 1.5 times the first; a second moment that averages fewer than two.
# States that count as many steps were cleared, if so many were taken, in two looks in a row.
_MAX_MOMENTUM, _MAX_BETA, _LEAST_DECAY, _TAKEN, _LAST, _RISEN = 0.999, 0.998, 0.5, 20, 4, 1.5
_INTERCHANGED = ("momentum (or beta1) and beta2 in the wrong order, or a digit too many or too few",)


class OptimizerMemory(Rule):
    """A momentum or beta2 that averages over far too many or too few steps, or a state that is cleared in every step.

    It is known exactly, from the optimizer's settings and from the step counters in its state, where these are on the
    host. SGD's has none, but keeps its momentum in one tensor.
    """

    name = "optimizer-memory"
    explains = _EFFECTS
    causes = ("the program clears optimizer.state, or loads an old state into the optimizer, in every step",)
    advice = ("make the optimizer and load its state once, before the loop",)

    _cleared = carried(0)  # looks in a row
    _began, _recent = carried(math.nan), carried(list[float]())  # the first loss, and the last ones
    _usual_until = carried(-1)  # the last step whose momentum was not large

    def review(self, window: Window) -> Iterable[Finding]:
        losses, run = [*self._recent, *window.losses.values], window.run
        self._began, self._recent = losses[0] if losses and math.isnan(self._began) else self._began, losses[-_LAST:]
        has_risen = min(self._recent, default=0.0) > _RISEN * self._began > 0
        most = _MAX_BETA if has_risen or run.step_size == "rate" else _MAX_MOMENTUM
        for now in window.steps[-1:].tolist():
            if run.momentum <= _MAX_BETA:
                self._usual_until = now
            elif run.momentum > most and self.begins("momentum", now):
                what, usual = "momentum (or beta1)", "a momentum from 0.9 to 0.99"
                yield self._averages(self._usual_until + 1, what, run.momentum, "gradients", usual)
            if run.least_decay < _LEAST_DECAY and self.begins("decay", now):
                what, usual = "decay of the second moment (beta2)", "a beta2 from 0.95 to 0.999"
                yield self._averages(now, what, run.least_decay, "squared gradients", usual)
        for seen in window.observed("coverage"):
            is_cleared = seen.value.age <= 1 and seen.value.all_steps >= _TAKEN
            self._cleared = self._cleared + 1 if is_cleared else 0
            if self._cleared == 2 and self.begins("cleared", seen.step):
                text = f"the optimizer has taken {seen.value.all_steps} steps, but its state has seen "
                text += f"{seen.value.age:.0f}: it is cleared in every step"
                yield self.found(seen.step, "optimizer", text, steps=seen.value.all_steps)

    def _averages(self, step: int, what: str, value: float, averaged: str, usual: str) -> Finding:
        span = f"the last {1 / (1 - value):,.0f} steps" if 0 < value < 1 else "all steps" if value else "one step"
        text = f"the {what} of the optimizer is {value:g}: it averages the {averaged} of {span}"
        return self.found(step, "optimizer", text, causes=_INTERCHANGED, advice=(f"use {usual}",), value=value)


# Norm of a momentum over the largest total norm of gradients so far, so that weight decay does not matter. A momentum
# of 0.99 without dampening reaches 100 times a constant gradient.
_FACTOR = 100.0
# The norm of all momenta over the lowest norm of gradients since they were measured before, in at least so many steps,
# if all parameters with a gradient have one.
_LEAST, _ENOUGH = 1e-4, 16
# That norm is also below this. Gradients of any size may be clipped to a norm of 1, and 0.01 is rare. Only of
# optimizers of torch, since others keep other things under the same names.
_TINY = 1e-3
# Or the ratio falls below this fraction of the smallest so far, and the norm of the momenta below `_NORM_FALLS` times
# this fraction. A momentum of 0.9 keeps 0.005 of itself in 50 steps; in healthy trainings of the tests and in public
# programs the ratio falls to no less than 0.16. Below `_SUM_FALLS` times this fraction if it never was below 1: a
# ``momentum_buffer`` that is a sum, in which weight decay remains. Alternating signs leave half.
_FALLS, _NORM_FALLS, _SUM_FALLS = 0.02, 10, 5
_SMALLER = (
    "gradients that are clipped to a tiny norm, or divided, between backward() and optimizer.step()",
    "gradients that are set to zero before optimizer.step()",
)


class MomentumDrift(Rule):
    """A momentum buffer (or first moment) far larger or smaller than the gradients so far allow."""

    name = "momentum-drift"
    quiet = 1000
    causes = (
        "an optimizer state that was overwritten or restored wrongly",
        "a momentum so close to 1 that gradients accumulate",
    )
    advice = ("compare the optimizer's state with the last checkpoint", "lower the momentum (or beta1)")

    _largest = carried(0.0)
    _ratio, _norm = carried(0.0), carried(0.0)  # the smallest so far, as for `_LEAST`, the ratio at most 1; 0 if none
    _lowest, _count = carried(math.inf), carried(0)  # since the momenta were measured: the lowest norm, and steps

    def review(self, window: Window) -> Iterable[Finding]:
        norms, at = np.nan_to_num(window.scalars.get("finite_norm", np.empty(0)), posinf=0.0).tolist(), 0
        # RMSprop's momentum averages gradients over their size.
        kinds = () if "square_avg" in window.measured else ("exp_avg", "momentum_buffer")
        for kind, rows in ((kind, window.measured[kind]) for kind in kinds if kind in window.measured):
            for row, step in enumerate(rows.steps.tolist()):
                stop = int(np.searchsorted(window.steps, step))
                self._take(norms[at:stop])  # those of earlier steps, which produced the state
                at = max(at, stop)
                sizes = np.nan_to_num(rows.l2_norm[row], posinf=np.finfo(np.float64).max)
                yield from self._large(step, kind, rows.names, sizes)
                yield from self._small(step, kind, rows.names, sizes, window)
        self._take(norms[at:])

    def _take(self, norms: list[float]) -> None:
        """Takes the ``norms`` of the gradients of further steps."""
        self._largest, self._lowest = max([self._largest, *norms]), min([self._lowest, *norms])
        self._count += len(norms)

    def _large(self, step: int, kind: str, names: tuple[str, ...], sizes: Floats) -> Iterator[Finding]:
        """Finds momenta whose ``sizes`` the gradients so far do not allow."""
        due = np.flatnonzero(sizes > _FACTOR * self._largest).tolist() if self._largest > 0 else ()
        fresh = [i for i in due if self.begins(f"{kind} {names[i]}", step)]
        if fresh:
            i = max(fresh, key=lambda i: sizes[i])
            text = f"the optimizer's {kind} of {names[i]} has a norm of {sizes[i]:.3g}, but the total gradient norm "
            text += f"has never exceeded {self._largest:.3g}"
            evidence = {"norm": sizes[i], "largest_gradient": self._largest, "parameters": len(fresh)}
            yield self.found(step, names[i], text, about=kind, **evidence)

    def _small(self, step: int, kind: str, names: tuple[str, ...], sizes: Floats, window: Window) -> Iterator[Finding]:
        """Finds that the optimizer averages far smaller gradients than were measured since the last look."""
        norm, lowest, count = math.hypot(*sizes.tolist()), self._lowest, self._count
        self._lowest, self._count = math.inf, 0
        if count < _ENOUGH or not (norm and 0 < lowest < math.inf and _are_of_all(names, window)):
            return
        ratio = norm / lowest
        is_tiny = ratio < _LEAST and norm < _TINY and window.run.is_torchs
        falls = _FALLS * _SUM_FALLS if kind == "momentum_buffer" and self._ratio == 1 else _FALLS
        has_fallen = ratio < falls * self._ratio and norm < _NORM_FALLS * _FALLS * self._norm
        if (is_tiny or has_fallen) and self.begins("small", step):
            text = f"the optimizer's {kind} has a total norm of {norm:.3g}, but the gradient norm was at least "
            text += f"{lowest:.3g} in the last {count} steps: optimizer.step() gets smaller gradients than those that "
            text += "were measured"
            yield self.found(step - count, "optimizer", text, kind, None, _SMALLER, (), norm=norm, gradients=lowest)
        self._ratio, self._norm = min(self._ratio or 1.0, ratio), min(self._norm or norm, norm)


def _are_of_all(names: tuple[str, ...], window: Window) -> bool:
    """Whether all parameters with a gradient are among ``names``: there may be several optimizers."""
    gradients = window.latest.get("gradient")
    if gradients is None or gradients.names == names:
        return True
    return {gradients.names[i] for i in np.flatnonzero(gradients.present[-1])} <= {*names}


_REMAINS = 0.5  # of what must remain: optimizers may step several times per monitored step


class SecondMomentDrop(RowsRule):
    """A second moment that has shrunk faster than beta2 allows: overwritten, cleared, or restored wrongly.

    It is a moving average of squares, so at least the fraction ``beta2 ** steps`` of it remains. Nothing is reported
    if beta2 is not known, as for optimizers that are not torch's.
    """

    name = "second-moment-drop"
    quiet = 1000
    kinds = _SECOND_MOMENTS
    causes = (
        "an optimizer state that was cleared or restored wrongly; the next updates will be far too large",
        "memory that was overwritten",
    )
    advice = (
        "load the optimizer together with the model, from the same checkpoint",
        "if the state was cleared on purpose, warm up the learning rate again",
    )

    _norms, _when = carried(PerName(0.0)), carried(PerName(0))

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        decay = window.run.second_moment_decay
        last_norms, when = self._norms.values_for(rows.names), self._when.values_for(rows.names)
        for row, step in enumerate(rows.steps.tolist() if decay else ()):
            norms = rows.l2_norm[row]
            dropped = (norms < _REMAINS * decay ** (step - when) * last_norms) & (rows.nonfinite[row] == 0)
            fresh = [i for i in np.flatnonzero(dropped).tolist() if self.begins(rows.names[i], step)]
            if fresh:
                i = min(fresh, key=lambda i: norms[i] / last_norms[i])
                name, steps = rows.names[i], step - int(when[i])
                fallen = f"has fallen to {norms[i] / last_norms[i]:.2g} times its value of {steps} steps before"
                evidence = {"before": last_norms[i], "now": norms[i], "steps": steps, "parameters": len(fresh)}
                text = f"the norm of the optimizer's {kind} of {name} {fallen}, faster than beta2 allows"
                yield self.found(step, name, text, about=kind, **evidence)
            known = np.isfinite(norms)
            last_norms[known], when[known] = norms[known], step


# The square roots of all elements are below eps, or this if that is less, which is the eps that torch's optimizers have
# if none is given; a larger one is chosen to dominate, as in PPO. For so many measurements in a row, unless all are.
_USUAL_EPS, _MEASUREMENTS = 1e-8, 2


class SmallSecondMoment(LastingRule):
    """A second moment so small that eps dominates the optimizer's denominator.

    Then updates shrink with the gradients, and the parameter stops learning (M. Wortsman and others, Small-scale
    proxies for large-scale Transformer training instabilities, arXiv 2309.14322). Only weights of two dimensions and
    more are reviewed: the gradient of a bias before a batch norm is rounding error, and harmless. It is an info if
    less than half of the weights are affected, such as those of a branch that begins with a factor near 0.
    """

    name = "small-second-moment"
    quiet = 10_000
    kinds = _SECOND_MOMENTS
    causes = ("tiny gradients of this parameter: a deep or wide model, or vanishing gradients",)
    advice = (
        "use a smaller eps in the optimizer, 1e-15 for example",
        "find out why its gradients are so small, as for vanishing-gradient",
    )

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        eps = window.run.optimizer_eps
        limit, largest = min(eps, _USUAL_EPS) ** 2, rows.field("max")
        # All zero means no gradient yet, which other rules report.
        low = rows.tensors.matrices & (largest < limit) & (largest > 0)
        needed = np.where((low.sum(1) == rows.tensors.matrices.sum())[:, None], 1, _MEASUREMENTS)
        for row, fresh, _, since in self.lasting(rows, low, needed):
            i = fresh[0]
            name, value = rows.names[i], largest[row, i]
            text = f"no element of {kind} of {name} exceeds {value:.3g}: eps ({eps:g}) dominates its updates"
            text += same_for(len(fresh))
            evidence = {"largest": value, "limit": limit, "eps": eps, "parameters": len(fresh)}
            severity: Severity = self.severity if 2 * low[row].sum() >= rows.tensors.matrices.sum() else "info"
            yield self.found(since[i], name, text, kind, severity, **evidence)
