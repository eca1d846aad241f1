"""Rules about the states of optimizers; they look at ``watch={"optimizer": n}``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gradstat.monitor.findings import Finding
from gradstat.monitor.rows import Rows, Window
from gradstat.monitor.rules.base import Episodes, LastingRule, PerName, Rule

_MOMENTA = ("exp_avg", "momentum_buffer")
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg")


def _states(window: Window, kinds: tuple[str, ...]) -> Iterator[tuple[str, Rows, tuple[str, ...]]]:
    """Of each kind there is: its name, its rows, and names of its tensors that no other kind has."""
    for kind in kinds:
        rows = window.rows(kind)
        if rows is not None:
            yield kind, rows, tuple(f"{kind} {name}" for name in rows.names)


class MomentumDrift(Rule):
    """Momentum that grows and grows.

    Args:
        growth: By more than this share from look to look, for so many ``looks`` in a row.
        factor: And in the end above so many times the largest norm before that. Norms of gradients' averages are noisy,
            and five rises in a row happen.
        settled_after: Looks it takes to settle.
        jump: So many times the settled norm is too much at once, without growing, from the third look on.
    """

    name = "momentum-drift"
    causes = (
        "gradients that point the same way and grow: the run is about to diverge",
        "a momentum or beta1 too close to 1 for this learning rate",
        "a state that was overwritten or restored wrongly",
    )
    advice = ("lower the learning rate now; clip gradients", "compare the state with that of the last checkpoint")

    def __init__(
        self, factor: float = 2.0, growth: float = 0.15, looks: int = 5, settled_after: int = 5, jump: float = 100.0
    ) -> None:
        self.factor, self.growth, self.looks, self.settled_after = factor, growth, looks, settled_after
        self.jump = jump
        self._norms: dict[str, list[Any]] = {}
        self._names: dict[str, list[str]] = {}
        self._growing = PerName(0.0)
        self._episodes = Episodes(quiet=1000)

    def review(self, window: Window) -> Iterable[Finding]:
        for kind, rows, names in _states(window, _MOMENTA):
            if self._names.get(kind) != list(names):
                self._names[kind], self._norms[kind] = list(names), []
            before = self._norms[kind]
            growing = self._growing.of(names)
            for look, step in enumerate(rows.steps.tolist()):
                norms = np.nan_to_num(rows.l2_norm[look], posinf=np.finfo(np.float64).max)
                if len(before) >= 2:
                    growing[:] = np.where(norms > (1 + self.growth) * np.asarray(before[-1]), growing + 1, 0)
                    past = np.array(before)
                    drifts = growing >= self.looks
                    fresh: list[int] = []
                    # The median is above the smallest, and much dearer.
                    if drifts.any() or (norms > self.jump * past.min(0)).any():
                        settled = np.median(past, axis=0)
                        largest = (past[: -self.looks] if len(past) > self.looks else past).max(0)
                        drifts &= (largest > 0) & (norms > self.factor * largest)
                        leaps = norms > self.jump * settled
                        due = (drifts & (len(before) >= self.settled_after) | leaps) & (settled > 0)
                        fresh = [i for i in np.flatnonzero(due).tolist() if self._episodes.begins(names[i], step)]
                    if fresh:
                        worst = max(fresh, key=lambda i: norms[i] / settled[i])
                        name, norm, usual = rows.names[worst], norms[worst], settled[worst]
                        grown = f"has grown to {norm / usual:.3g} times its settled norm of {usual:.3g}"
                        yield self.found(
                            step, name, f"the optimizer's {kind} of {name} {grown}", about=kind,
                            norm=norm, settled=usual, growing_for=growing[worst], parameters=len(fresh),
                        )  # fmt: skip
                before.append(norms)
            del before[:-50]


class SecondMomentDrop(Rule):
    """A second moment that is smaller than it can be: overwritten, cleared, or restored wrongly.

    It is an average of squares with weights that fall by a factor of beta2 with each step, so of what it was, at least
    ``beta2 ** steps`` are left.

    Args:
        factor: Below so much of what must be left: optimizers may step several times in a step of the monitor.
        decay: The beta2 that is reckoned with where the optimizer's is not known.
    """

    name = "second-moment-drop"
    causes = (
        "a state of the optimizer that was cleared or restored wrongly; the next updates are far too large",
        "memory that was overwritten",
    )
    advice = (
        "restore the optimizer together with the model, from the same checkpoint",
        "after clearing states on purpose, warm up anew",
    )

    def __init__(self, factor: float = 0.5, decay: float = 0.95) -> None:
        self.factor, self.decay = factor, decay
        self._norms, self._when = PerName(0.0), PerName(0.0)
        self._episodes = Episodes(quiet=1000)

    def review(self, window: Window) -> Iterable[Finding]:
        decay = window.facts.second_moment_decay or self.decay
        for kind, rows, names in _states(window, _SECOND_MOMENTS):
            before, when = self._norms.of(names), self._when.of(names)
            for look, step in enumerate(rows.steps.tolist()):
                norms = rows.l2_norm[look]
                dropped = norms < self.factor * decay ** (step - when) * before
                due = [i for i in np.flatnonzero(dropped).tolist() if rows.nonfinite[look, i] == 0]
                fresh = [i for i in due if self._episodes.begins(names[i], step)]
                if fresh:
                    i = min(fresh, key=lambda i: norms[i] / before[i])
                    name, steps = rows.names[i], step - int(when[i])
                    fallen = f"has fallen to {norms[i] / before[i]:.2g} of what it was {steps} steps before"
                    evidence = {"before": before[i], "now": norms[i], "steps": steps, "parameters": len(fresh)}
                    text = f"the optimizer's {kind} of {name} {fallen}, faster than it can"
                    yield self.found(step, name, text, about=kind, **evidence)
                there = np.isfinite(norms)
                before[there], when[there] = norms[there], step


class SmallSecondMoment(LastingRule):
    """A second moment so small that the optimizer divides by its eps rather than by it.

    Then updates shrink with the gradients, and the parameter ceases to learn (M. Wortsman and others, Small-scale
    proxies for large-scale Transformer training instabilities, arXiv 2309.14322). Only weights of two dimensions and
    more are judged: a bias before a batch norm has no gradient but for rounding, and none is missed.

    Args:
        beside_eps: The root of no element is larger than so many times eps. If the largest of thousands is, most are
            below eps.
        limit: Of the elements where the optimizer has no eps.
        looks: For so many looks in a row.
    """

    name = "small-second-moment"
    quiet = 10_000
    causes = ("gradients that are tiny for this parameter: a deep or wide model, or ones that have vanished",)
    advice = (
        "a smaller eps of the optimizer, 1e-15 for example",
        "look why its gradients are so small: see vanishing-gradient",
    )

    def __init__(self, beside_eps: float = 10.0, limit: float = 1e-10, looks: int = 3) -> None:
        super().__init__()
        self.beside_eps, self.limit, self.looks = beside_eps, limit, looks

    def review(self, window: Window) -> Iterable[Finding]:
        eps = window.facts.optimizer_eps
        limit = (self.beside_eps * eps) ** 2 if eps else self.limit
        for kind, rows, names in _states(window, _SECOND_MOMENTS):
            largest = rows.field("max")
            # All zero means no gradient yet, which is another rule's business.
            low = rows.layout.matrices & (largest < limit) & (largest > 0)
            for look, fresh, _, since in self.lasting(rows, low, self.looks, names):
                i = fresh[0]
                name, value = rows.names[i], largest[look, i]
                text = f"no element of {kind} of {name} is above {value:.3g}"
                text += f", nor in {len(fresh) - 1} other parameters" * (len(fresh) > 1)
                evidence = {"largest": value, "limit": limit, "eps": eps, "parameters": len(fresh)}
                yield self.found(since[i], name, text, about=kind, **evidence)
