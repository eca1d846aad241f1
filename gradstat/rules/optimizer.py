"""Rules about optimizer states, as measured by ``watch={"optimizer": n}``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from gradstat.recording.findings import Finding, Severity
from gradstat.rules.base import Band, LastingRule, PerName, RowsRule, Rule, carried, series
from gradstat.rules.rows import Floats, Rows, Window

_SECOND_MOMENTS = ("exp_avg_sq", "square_avg")


def _unique(kind: str, rows: Rows) -> tuple[str, ...]:
    """Names of the tensors of a kind that are unique among kinds."""
    return tuple(f"{kind} {name}" for name in rows.names)


_KEPT_FOR = 2  # such steps in a row


class GradientsNotZeroed(Rule):
    """Steps with gradients that still contain those of the step before, since nobody has zeroed them.

    Known exactly, from versions of a gradient. Gradients that are added up between two steps are not meant, nor those
    that a program changes before it adds to them, such as ``p.grad.mul_(0.9)``. Not known under FSDP 2, which adds to
    gradients itself, if gradients are added with ``create_graph=True``, or clipped where no optimizer is known.
    """

    name = "gradients-not-zeroed"
    explains = (
        "exploding-gradient", "loss-spike", "momentum-drift", "parameter-jump", "diverging-start", "growing-weights",
        "no-learning", "unrelated-outputs",
    )  # fmt: skip
    causes = (
        "optimizer.zero_grad() is not called between steps, or only that of another optimizer",
        "gradients that are kept on purpose, as momentum by hand: then leave this rule out of rules=",
    )
    advice = ("call optimizer.zero_grad() once per step, after optimizer.step()",)

    _run = carried(0)
    _reported = carried(False)

    def bands(self) -> Mapping[str, Band]:
        return {} if self._reported else {"not_zeroed": (-math.inf, 0.0)}

    def review(self, window: Window) -> Iterable[Finding]:
        for step, is_kept in series(window, "not_zeroed"):
            self._run = self._run + 1 if is_kept > 0 else 0
            self._reported = self._reported and self._run > 0
            if self._run >= _KEPT_FOR and not self._reported:
                self._reported = True
                text = f"the last {self._run} steps of the optimizer used gradients that still contained those of the "
                text += "step before: nobody zeroes them"
                # It is known of a step when the next one is measured.
                yield self.found(step - self._run, "gradients", text, in_a_row=self._run)
        if "not_zeroed" not in window.scalars and len(window.steps):
            self._run, self._reported = 0, False


_NO_STEP = ("optimizer.step() is not reached, or gradstat.auto was given another optimizer than the one that steps",)
_STEP = ("call optimizer.step() once for each zero_grad(), after backward()",)


class UnusedGradients(Rule):
    """Backward passes whose gradients are zeroed before a step uses them.

    Known exactly. With `gradstat.auto` or an integration, told from the third step in a row on in which all passes come
    from the same places of the program, nothing has moved the parameters in between, and the step uses what the last of
    them has left: a program that reads gradients in between has another use for them. Not known under FSDP. Or
    gradients were zeroed fifty times, and twice as often as between earlier steps, without a step. In a loop that calls
    `Monitor.step` after each pass, told if that holds for at least 16 of fifty, and more than there were steps. Not
    beside an optimizer that trains something else in turn.
    """

    name = "unused-gradients"
    explains = ("unchanged-parameter", "no-learning", "unrelated-outputs")
    causes = (
        "gradients are zeroed before each micro-batch instead of once per step, or optimizer.step() is left out",
        "gradients that are read before they are zeroed, on purpose: then leave this rule out of rules=",
    )
    advice = ("call optimizer.zero_grad() once per step, after optimizer.step()",)

    def review(self, window: Window) -> Iterable[Finding]:
        for seen in window.seen.get("unused", []):
            unused, of = seen.value.unused, seen.value.of
            if not self.begins("", seen.step):
                continue
            if not of:
                text = f"gradients were computed and zeroed {unused} times, and step() of the optimizer was not called"
                yield self.found(seen.step, "optimizer", text, causes=_NO_STEP, advice=_STEP)
            elif not window.run.has_rival:
                text = f"{unused} of {of} backward passes are zeroed unused: each of the last {seen.value.steps} steps "
                text += "used only what was computed after gradients had been zeroed for the last time"
                yield self.found(seen.step, "gradients", text, unused=unused, passes=of)


# A momentum that averages more than the last 1,000 gradients (milesial's U-Net has 0.999 and learns), and a second
# moment that averages fewer than two.
# States that count as many steps were cleared, if so many were taken, in two looks in a row.
_MAX_MOMENTUM, _LEAST_DECAY, _TAKEN = 0.999, 0.5, 20
_INTERCHANGED = ("momentum and the decay of the second moment (beta2) interchanged, or a digit too many or too few",)


class OptimizerMemory(Rule):
    """An optimizer whose averages forget too little or too much, or whose states are cleared in each step.

    Known exactly: from its settings, and from the steps that its states count, where they do so on the host.
    """

    name = "optimizer-memory"
    explains = (
        "parameter-jump", "exploding-gradient", "loss-spike", "momentum-drift", "second-moment-drop", "growing-weights",
        "diverging-start", "no-learning", "unrelated-outputs",
    )  # fmt: skip
    causes = ("optimizer.state that is cleared, or load_state_dict() of an old state, in each step",)
    advice = ("keep the optimizer's state from step to step",)

    _cleared = carried(0)  # looks in a row

    def review(self, window: Window) -> Iterable[Finding]:
        momentum, decay = window.run.momentum, window.run.least_decay
        settings = (
            (momentum > _MAX_MOMENTUM, "momentum", momentum, "momentum (or beta1)", "a momentum from 0.9 to 0.99"),
            (decay < _LEAST_DECAY, "decay", decay, "decay of the second moment (beta2)", "a beta2 from 0.95 to 0.999"),
        )
        for is_wrong, key, value, what, usual in settings if len(window.steps) else ():
            if is_wrong and self.begins(key, window.steps[-1]):
                span = (
                    f"the last {1 / (1 - value):,.0f} steps" if 0 < value < 1 else "all steps" if value else "one step"
                )
                follows = "a step follows the gradients of" if key == "momentum" else "it averages"
                text = f"the {what} of the optimizer is {value:g}: {follows} {span}"
                advice = (f"use {usual}",)
                yield self.found(window.steps[-1], "optimizer", text, causes=_INTERCHANGED, advice=advice, value=value)
        for seen in window.seen.get("coverage", []):
            is_cleared = seen.value.age <= 1 and seen.value.all_steps >= _TAKEN
            self._cleared = self._cleared + 1 if is_cleared else 0
            if self._cleared == 2 and self.begins("cleared", seen.step):
                text = f"the optimizer has taken {seen.value.all_steps} steps, and its state counts "
                text += f"{seen.value.age:.0f}: something clears it in each step"
                yield self.found(seen.step, "optimizer", text, steps=seen.value.all_steps)


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
    "gradients that are clipped to a tiny norm, or divided, between backward() and the step",
    "gradients that are set to zero before the step",
)


class MomentumDrift(Rule):
    """Momentum far larger or smaller than the gradients can make it."""

    name = "momentum-drift"
    quiet = 1000
    causes = (
        "a state of the optimizer that was overwritten or restored wrongly",
        "a momentum so close to 1 that gradients accumulate",
    )
    advice = ("compare the state with that of the last checkpoint", "lower the momentum (or beta1)")

    _largest = carried(0.0)
    _ratio, _norm = carried(0.0), carried(0.0)  # the smallest so far, as for `_LEAST`, the ratio at most 1; 0 if none
    _lowest, _count = carried(math.inf), carried(0)  # since the momenta were measured: the lowest norm, and steps

    def review(self, window: Window) -> Iterable[Finding]:
        yield from self._small(window, window.scalars.get("finite_norm", np.empty(0)))
        norms = np.concatenate([[self._largest], window.scalars.get("finite_norm", ())])
        norms[~np.isfinite(norms)] = 0.0
        np.maximum.accumulate(norms, out=norms)
        self._largest = float(norms[-1])
        for kind, rows in _momenta(window):
            for row, step in enumerate(rows.steps.tolist()):
                largest = norms[np.searchsorted(window.steps, step)]  # of earlier steps, which produced the state
                if not largest > 0:
                    continue
                sizes = np.nan_to_num(rows.l2_norm[row], posinf=np.finfo(np.float64).max)
                due = np.flatnonzero(sizes > _FACTOR * largest).tolist()
                fresh = [i for i in due if self.begins(f"{kind} {rows.names[i]}", step)]
                if fresh:
                    i = max(fresh, key=lambda i: sizes[i])
                    text = f"the optimizer's {kind} of {rows.names[i]} has a norm of {sizes[i]:.3g}; the norm of "
                    text += f"all gradients together never exceeded {largest:.3g}"
                    evidence = {"norm": sizes[i], "largest_gradient": largest, "parameters": len(fresh)}
                    yield self.found(step, rows.names[i], text, about=kind, **evidence)

    def _small(self, window: Window, norms: Floats) -> Iterator[Finding]:
        """Finds that the optimizer averages far smaller gradients than were measured, which had these ``norms``."""
        at = 0
        for kind, rows in _momenta(window)[:1]:
            for row, step in enumerate(rows.steps.tolist()):
                stop = int(np.searchsorted(window.steps, step))
                lowest, count = min([self._lowest, *norms[at:stop].tolist()]), self._count + stop - at
                at, self._lowest, self._count = stop, math.inf, 0
                norm = math.hypot(*np.nan_to_num(rows.l2_norm[row]).tolist())
                if count < _ENOUGH or not (norm and 0 < lowest < math.inf and _are_of_all(rows.names, window)):
                    continue
                ratio = norm / lowest
                is_sum = kind == "momentum_buffer" and self._ratio == 1
                falls = (_SUM_FALLS if is_sum else 1) * _FALLS
                has_fallen = ratio < falls * self._ratio and norm < _NORM_FALLS * _FALLS * self._norm
                is_small = has_fallen or (window.run.is_torchs and ratio < _LEAST and norm < _TINY)
                if is_small and self.begins("small", step):
                    text = f"the optimizer's {kind} has a norm of {norm:.3g} over all parameters, and the gradients of "
                    text += f"the last {count} steps had at least {lowest:.3g}: it gets smaller ones than are measured"
                    evidence = {"norm": norm, "gradients": lowest}
                    yield self.found(step - count, "optimizer", text, kind, None, _SMALLER, (), **evidence)
                self._ratio, self._norm = min(self._ratio or 1.0, ratio), min(self._norm or norm, norm)
        self._lowest, self._count = min([self._lowest, *norms[at:].tolist()]), self._count + len(norms) - at


def _momenta(window: Window) -> list[tuple[str, Rows]]:
    """The averages of gradients, by kind; RMSprop's ``momentum_buffer`` is one of gradients over their size."""
    kinds = ("exp_avg", "momentum_buffer") if window.measured.get("square_avg") is None else ()
    return [(kind, rows) for kind in kinds if (rows := window.measured.get(kind)) is not None]


def _are_of_all(names: tuple[str, ...], window: Window) -> bool:
    """Whether all parameters with a gradient are among ``names``: there may be several optimizers."""
    gradients = window.latest.get("gradient")
    if gradients is None or gradients.names == names:
        return True
    return {gradients.names[i] for i in np.flatnonzero(gradients.present[-1])} <= {*names}


_REMAINS = 0.5  # of what must remain: optimizers may step several times per monitored step


class SecondMomentDrop(RowsRule):
    """A second moment that has shrunk faster than beta2 allows: overwritten, cleared, or restored wrongly.

    It is an average of squares whose weights decay by beta2 per step, so a fraction of at least ``beta2 ** steps``
    remains of it. Nothing is reported if beta2 is not known, as of optimizers that are not torch's.
    """

    name = "second-moment-drop"
    quiet = 1000
    kinds = _SECOND_MOMENTS
    causes = (
        "a state of the optimizer that was cleared or restored wrongly; the next updates are far too large",
        "memory that was overwritten",
    )
    advice = (
        "restore the optimizer together with the model, from the same checkpoint",
        "if states were cleared on purpose, warm up the learning rate again",
    )

    _norms, _when = carried(PerName(0.0)), carried(PerName(0))

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        decay, names = window.run.second_moment_decay, _unique(kind, rows)
        last_norms, when = self._norms.values_for(names), self._when.values_for(names)
        for row, step in enumerate(rows.steps.tolist() if decay else ()):
            norms = rows.l2_norm[row]
            dropped = norms < _REMAINS * decay ** (step - when) * last_norms
            due = [i for i in np.flatnonzero(dropped).tolist() if rows.nonfinite[row, i] == 0]
            fresh = [i for i in due if self.begins(names[i], step)]
            if fresh:
                i = min(fresh, key=lambda i: norms[i] / last_norms[i])
                name, steps = rows.names[i], step - int(when[i])
                fallen = f"has fallen to {norms[i] / last_norms[i]:.2g} of what it was {steps} steps before"
                evidence = {"before": last_norms[i], "now": norms[i], "steps": steps, "parameters": len(fresh)}
                text = f"the optimizer's {kind} of {name} {fallen}, faster than beta2 allows"
                yield self.found(step, name, text, about=kind, **evidence)
            is_finite = np.isfinite(norms)
            np.copyto(last_norms, norms, where=is_finite)
            np.copyto(when, step, where=is_finite)


# The square roots of all elements are below eps, or this if that is less, which is the eps that torch's optimizers have
# if none is given; a larger one is chosen to dominate, as in PPO. For so many measurements in a row, unless all are.
_USUAL_EPS, _MEASUREMENTS = 1e-8, 2


class SmallSecondMoment(LastingRule):
    """A second moment so small that eps dominates the optimizer's denominator.

    Then updates shrink with the gradients, and the parameter stops learning (M. Wortsman and others, Small-scale
    proxies for large-scale Transformer training instabilities, arXiv 2309.14322). Only weights of two dimensions and
    more are judged: the gradient of a bias before a batch norm is rounding error, and no problem. An info if they are
    less than half of these, such as those of a branch that begins with a factor near 0.
    """

    name = "small-second-moment"
    quiet = 10_000
    kinds = _SECOND_MOMENTS
    causes = ("gradients that are tiny for this parameter: a deep or wide model, or vanishing gradients",)
    advice = (
        "use a smaller eps in the optimizer, 1e-15 for example",
        "find out why its gradients are so small: see vanishing-gradient",
    )

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        eps = window.run.optimizer_eps
        limit, largest = min(eps, _USUAL_EPS) ** 2, rows.field("max")
        # All zero means no gradient yet, which other rules report.
        low = rows.tensors.matrices & (largest < limit) & (largest > 0)
        needed = np.where((low.sum(1) == rows.tensors.matrices.sum())[:, None], 1, _MEASUREMENTS)
        for row, fresh, _, since in self.lasting(rows, low, needed, _unique(kind, rows)):
            i = fresh[0]
            name, value = rows.names[i], largest[row, i]
            text = f"all elements of {kind} of {name} are at most {value:.3g}: eps ({eps:g}) dominates its updates"
            text += f"; the same holds for {len(fresh) - 1} more" * (len(fresh) > 1)
            evidence = {"largest": value, "limit": limit, "eps": eps, "parameters": len(fresh)}
            severity: Severity = self.severity if 2 * low[row].sum() >= rows.tensors.matrices.sum() else "info"
            yield self.found(since[i], name, text, kind, severity, **evidence)
