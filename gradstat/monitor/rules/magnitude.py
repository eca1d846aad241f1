"""Rules about how large gradients, parameters and updates are: exploding, vanishing, dead, out of proportion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from gradstat.monitor.findings import Finding
from gradstat.monitor.rows import Floats, Rows, Window
from gradstat.monitor.rules.base import Band, Episodes, PerName, Rule, runs
from gradstat.monitor.rules.leaping import LeapingRule


class ExplodingGradient(LeapingRule):
    """A total norm that is too large by itself, or beside the steps before.

    Args:
        limit: Of the total norm of one step.
        mean_limit: Of the mean of ten steps.
        sigmas, log_sigmas, factor, back, times, within, beyond, window: As for `LeapingRule`. Norms have heavy tails,
            so three standard deviations alone are exceeded by healthy steps every day.
    """

    name = "exploding-gradient"
    causes = (
        "a learning rate too high for this stage, or raised too soon: the steps before made things worse",
        "an unusual batch, or a loss summed over a batch instead of averaged",
        "a recurrent or very deep model without normalisation or clipping",
    )
    advice = (
        "clip: gradstat.clip_grad_norm_, or gradstat.AutoClip if no limit is known",
        "lower the learning rate or lengthen the warm-up",
        "look at the batch of that step",
    )

    def __init__(
        self,
        limit: float = 1e3,
        mean_limit: float = 5e2,
        sigmas: float = 3.0,
        log_sigmas: float = 3.0,
        factor: float = 10.0,
        back: float = 0.25,
        times: int = 4,
        within: int = 5,
        beyond: float = 3.0,
        window: int = 100,
    ) -> None:
        super().__init__(sigmas, log_sigmas, factor, back, 0.0, times, within, beyond, window, quiet=20)
        self.limit, self.mean_limit = limit, mean_limit

    def bands(self) -> Mapping[str, Band]:
        return {"norm": (-math.inf, min(self._high, self.limit))}

    def review(self, window: Window) -> Iterable[Finding]:
        norms = window.scalars.get("norm")
        if norms is None:
            return
        for look, norm in enumerate(norms.tolist()):
            if not math.isfinite(norm):
                continue
            step = int(window.steps[look])
            limit = min(self._high, self.limit)
            median = self.median() if norm > limit else math.nan
            began = self.leapt(step, norm)
            if began is None and norm > self.limit and self._episodes.begins("leap", step):
                began = step
            last = self._values[-10:]
            if began is not None:
                yield self._finding(window, look, norm, began, median, limit)
            elif len(last) == 10 and sum(last) > 10 * self.mean_limit and self._episodes.begins("leap", step):
                mean = sum(last) / 10
                yield self.found(
                    step, "norm", f"the gradient norm is {mean:.3g} on average of 10 steps", mean=mean,
                    limit=self.mean_limit,
                )  # fmt: skip
        self.close()

    def _finding(self, window: Window, look: int, norm: float, began: int, median: float, limit: float) -> Finding:
        rows = window.tables.get("gradient")
        name, share = "norm", math.nan
        if rows is not None:
            at = np.flatnonzero(rows.steps == window.steps[look])
            if len(at) and len(rows.names):
                squares = np.nan_to_num(rows.l2_norm[at[0]]) ** 2
                largest = int(squares.argmax())
                name, share = rows.names[largest], float(squares[largest] / max(squares.sum(), 1e-300))
        beside = f", {norm / median:.3g} times the median of {self.window} steps" if median > 0 else ""
        return self.found(
            began,
            name,
            f"the gradient norm is {norm:.4g}{beside}; most of it in {name}",
            about="gradient" if name != "norm" else "series",
            norm=norm,
            median=None if math.isnan(median) else median,
            limit=limit,
            share=None if math.isnan(share) else share,
        )


class VanishingGradient(Rule):
    """Gradients that are next to nothing, all together or ever less from layer to layer.

    Args:
        limit: A total norm below it is vanishing.
        ratio: Of the root mean squares of weight gradients along the backward pass, smallest to largest: below it, and
            falling in nearly straight line on a logarithmic scale, they vanish layer by layer.
        correlation: How nearly (the size of Pearson's correlation of depth and logarithm).
        layers: At least so many weights of two dimensions and more.
        in_a_row: For so many steps.
    """

    name = "vanishing-gradient"
    causes = (
        "saturating activations (sigmoid, tanh) in a deep model, or weights initialised too small",
        "a loss that hardly depends on the parameters: saturated outputs, a scale or mask that is nearly zero",
        "training has converged",
    )
    advice = (
        "residual connections, normalisation, ReLU-like activations, initialisation to match",
        "look at what the loss is multiplied by",
    )

    def __init__(
        self,
        limit: float = 1e-8,
        ratio: float = 1e-5,
        correlation: float = 0.9,
        layers: int = 5,
        in_a_row: int = 5,
    ) -> None:
        self.limit, self.ratio, self.correlation = limit, ratio, correlation
        self.layers, self.in_a_row = layers, in_a_row
        self._low = 0
        self._decaying = 0
        self._episodes = Episodes()

    def review(self, window: Window) -> Iterable[Finding]:
        norms = window.scalars.get("norm")  # what is left beside NaN may well be small
        if norms is not None:
            yield from self._small(window, norms)
        rows = window.rows("gradient")
        if rows is not None:
            yield from self._layer_by_layer(rows)

    def _small(self, window: Window, norms: Floats) -> Iterable[Finding]:
        if not (norms < self.limit).any():
            self._low = 0
            return
        for look, norm in enumerate(norms.tolist()):
            self._low = self._low + 1 if norm < self.limit else 0
            step = int(window.steps[look])
            if self._low >= self.in_a_row and self._episodes.begins("norm", step):
                yield self.found(
                    step - self.in_a_row + 1,
                    "norm",
                    f"the gradient norm is {norm:.3g}, for {self.in_a_row} steps",
                    norm=norm,
                    limit=self.limit,
                )

    def _layer_by_layer(self, rows: Rows) -> Iterable[Finding]:
        weights = [i for i, shape in enumerate(rows.layout.shapes) if shape is not None and len(shape) >= 2]
        if len(weights) < self.layers:
            return
        # Once for all of these steps: it does not come and go.
        sizes = rows.rms[-1, weights]
        there = np.isfinite(sizes) & (sizes > 0)
        if there.sum() < self.layers:
            return
        logs, depth = np.log(sizes[there]), np.flatnonzero(there)
        smallest, largest = int(logs.argmin()), int(logs.argmax())
        if logs[smallest] - logs[largest] > math.log(self.ratio):
            self._decaying = 0
            return
        correlation = abs(float(np.corrcoef(depth, logs)[0, 1]))
        self._decaying = self._decaying + len(rows) if correlation >= self.correlation else 0
        step = int(rows.steps[-1])
        if self._decaying >= self.in_a_row and self._episodes.begins("layers", step):
            name = rows.names[weights[int(depth[smallest])]]
            other = rows.names[weights[int(depth[largest])]]
            ratio = math.exp(logs[smallest] - logs[largest])
            yield self.found(
                max(0, step - self._decaying + 1),
                name,
                f"gradients vanish layer by layer: those of {name} are {ratio:.2g} of those of {other}",
                about="gradient",
                ratio=ratio,
                correlation=correlation,
                largest=other,
            )


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


class DeadGradient(Rule):
    """Gradients that are zero throughout, step after step.

    Args:
        in_a_row: For so many steps; some models begin with a factor of zero, which the first steps change.
    """

    name = "dead-gradient"
    causes = (
        "ReLU units that are never positive, so that nothing passes",
        "a product with zero on the way to the loss: a mask, a gate, a weight initialised to zero",
        "a parameter whose result is not used, or only inside a branch that is not taken",
    )
    advice = (
        "look at the outputs of the module: gradstat.Monitor(model, watch={'activations': 10})",
        "a smaller learning rate, another initialisation, LeakyReLU or GELU",
    )

    def __init__(self, in_a_row: int = 20) -> None:
        self.in_a_row = in_a_row
        self._zero_for = PerName(0.0)
        self._episodes = Episodes(quiet=1000)

    def review(self, window: Window) -> Iterable[Finding]:
        rows = window.rows("gradient")
        if rows is None:
            return
        dead = (rows.field("zero_count") == rows.layout.numel) & (rows.layout.numel > 0)
        for look, lengths in runs(dead, self._zero_for.of(rows.names)):
            due = [rows.names[i] for i in np.flatnonzero(lengths == self.in_a_row)]
            step = int(rows.steps[look])
            fresh = [name for name in due if self._episodes.begins(name, step)]
            if fresh:
                every = [rows.names[i] for i in np.flatnonzero(lengths >= self.in_a_row)]
                # What is nearest to the loss is the cause, and the others are behind it. But where the bias beside a
                # weight lives, the weight has a zero for its input, and the cause is what makes that.
                alive = {_module(rows.names[i]) for i in np.flatnonzero((lengths == 0) & rows.present[look])}
                name = window.facts.first_in_backward([n for n in fresh if _module(n) not in alive] or fresh)
                yield self.found(
                    step - self.in_a_row + 1,
                    name,
                    f"the gradient of {name} has been zero throughout for {self.in_a_row} steps"
                    + f", as have {len(every) - 1} others" * (len(every) > 1),
                    about="gradient",
                    parameters=every[:20],
                    in_a_row=self.in_a_row,
                )


class MissingGradient(Rule):
    """Parameters that require a gradient and never get one.

    Args:
        in_a_row: For so many steps.
    """

    name = "missing-gradient"
    causes = (
        "the parameter is not used in the forward pass",
        "its result was cut off from the loss: detach(), .data, .item(), numpy, torch.no_grad(), an argmax",
    )
    advice = (
        "follow the module's output to the loss and look for what cuts the graph",
        "if it is meant to rest, requires_grad_(False) says so and saves its memory",
    )

    def __init__(self, in_a_row: int = 5) -> None:
        self.in_a_row = in_a_row
        self._missing_for = PerName(0.0)
        self._episodes = Episodes(quiet=1000)

    def review(self, window: Window) -> Iterable[Finding]:
        rows = window.rows("gradient")
        if rows is None:
            return
        missing = np.zeros(rows.present.shape, dtype=bool)
        for seen in window.observations:  # rows do not tell which parameters are frozen
            if seen.kind == "missing":
                missing[np.ix_(rows.steps == seen.step, seen.value)] = True
        for look, lengths in runs(missing, self._missing_for.of(rows.names)):
            due = [rows.names[i] for i in np.flatnonzero(lengths == self.in_a_row)]
            step = int(rows.steps[look])
            fresh = [name for name in due if self._episodes.begins(name, step)]
            if fresh:
                every = [rows.names[i] for i in np.flatnonzero(lengths >= self.in_a_row)]
                name = fresh[-1]  # the one nearest to the loss: those before it are cut off with it
                yield self.found(
                    step - self.in_a_row + 1,
                    name,
                    f"{name} has had no gradient for {self.in_a_row} steps: it is detached from the loss"
                    + f", with {len(every) - 1} others" * (len(every) > 1),
                    about="gradient",
                    parameters=every[:20],
                    in_a_row=self.in_a_row,
                )


class GradientWeightRatio(Rule):
    """Gradients out of proportion to their weights.

    Only weights of two dimensions and more are judged: biases and gains begin at 0 or 1 by convention.

    Args:
        std_ratio: Standard deviation of the gradient over that of the weight; above it the next updates destroy what
            the weight holds.
        norm_ratio: Norm over norm; below it for ``long`` steps the weight does not learn.
        in_a_row, long: For so many steps.
    """

    name = "gradient-weight-ratio"
    causes = (
        "weights initialised far too small or too large for the loss at hand",
        "a loss that is summed instead of averaged, or scaled",
    )
    advice = ("look at the initialisation of that weight", "clip gradients, or give the weight its own learning rate")

    def __init__(self, std_ratio: float = 100.0, norm_ratio: float = 1e-5, in_a_row: int = 5, long: int = 500) -> None:
        self.std_ratio, self.norm_ratio, self.in_a_row, self.long = std_ratio, norm_ratio, in_a_row, long
        self._high_for, self._low_for = PerName(0.0), PerName(0.0)
        self._episodes = Episodes(quiet=1000)

    def review(self, window: Window) -> Iterable[Finding]:
        gradients, parameters = window.rows("gradient"), window.latest.get("parameter")
        if gradients is None or parameters is None or parameters.names != gradients.names:
            return
        judged = np.array([shape is not None and len(shape) >= 2 for shape in parameters.layout.shapes])
        spread, size = parameters.std[-1], parameters.l2_norm[-1]
        # Weights that are all zero have begun there on purpose, and constants have no spread.
        spreads = np.where(judged & (spread > 1e-4 * parameters.rms[-1]), spread, np.inf)
        smallest = np.where(judged, self.norm_ratio * size, 0.0)
        norms = gradients.l2_norm
        with np.errstate(invalid="ignore", divide="ignore"):
            # The root mean square is never below the standard deviation, and cheaper.
            high = norms > self.std_ratio * spreads * np.sqrt(gradients.layout.values)
            if high.any():
                high &= gradients.std > self.std_ratio * spreads
            low = norms < smallest
            if low.any():
                low &= norms > 0
        for condition, state, needed, words in (
            (high, self._high_for, self.in_a_row, "as large as the weight's own spread"),
            (low, self._low_for, self.long, "of the weight's norm"),
        ):
            for look, lengths in runs(condition, state.of(gradients.names)):
                for i in np.flatnonzero(lengths == needed):
                    step, name = int(gradients.steps[look]), gradients.names[i]
                    if not self._episodes.begins(name, step):
                        continue
                    is_high = condition is high
                    value = gradients.std[look, i] / spread[i] if is_high else gradients.l2_norm[look, i] / size[i]
                    yield self.found(
                        step - needed + 1,
                        name,
                        f"the gradient of {name} is {value:.3g}{' times' * is_high} {words}, for {needed} steps",
                        about="gradient",
                        ratio=value,
                        in_a_row=needed,
                    )


class UpdateWeightRatio(Rule):
    """Updates out of proportion to their weights; looks at ``watch={"updates": n}``.

    Around 1e-3 is what practitioners aim at (A. Karpathy, lecture notes of Stanford's CS231n, "Babysitting the learning
    process").

    Args:
        high, low: Of ``|update| / |weight|``.
        looks: For so many looks in a row.
    """

    name = "update-weight-ratio"
    causes = ("a learning rate too high (or too low) for this weight", "an optimizer state that was restored wrongly")
    advice = ("change the learning rate by the factor that the ratio is off from 1e-3",)

    def __init__(self, high: float = 0.3, low: float = 1e-7, looks: int = 2) -> None:
        self.high, self.low, self.looks = high, low, looks
        self._off_for, self._since = PerName(0.0), PerName(0.0)
        self._episodes = Episodes(quiet=1000)

    def review(self, window: Window) -> Iterable[Finding]:
        updates, parameters = window.rows("update"), window.latest.get("parameter")
        if updates is None or parameters is None or parameters.names != updates.names:
            return
        judged = np.array([shape is not None and len(shape) >= 2 for shape in parameters.layout.shapes])
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = updates.l2_norm / parameters.l2_norm[-1]
            off = judged & np.isfinite(ratio) & (ratio > 0) & ((ratio > self.high) | (ratio < self.low))
        since = self._since.of(updates.names)
        for look, lengths in runs(off, self._off_for.of(updates.names)):
            step = int(updates.steps[look])
            since[lengths == 1] = step
            due = np.flatnonzero(lengths == self.looks)
            fresh = [i for i in due if self._episodes.begins(updates.names[i], step)]
            if fresh:
                worst = max(fresh, key=lambda i: abs(math.log(ratio[look, i])))
                yield self.found(
                    int(since[worst]),
                    updates.names[worst],
                    f"one step changes {updates.names[worst]} by {ratio[look, worst]:.3g} of its norm",
                    about="update",
                    ratio=ratio[look, worst],
                    high=self.high,
                    low=self.low,
                    parameters=len(fresh),
                )


class ParameterJump(Rule):
    """A parameter whose largest magnitude has leapt since the last look: overwritten, or hit by a wild update.

    Args:
        factor: By how much.
    """

    name = "parameter-jump"
    causes = (
        "memory that was overwritten: a bit flip in an exponent multiplies by a power of two",
        "an update that was far too large: learning rate, or a state of the optimizer that is wrong",
    )
    advice = (
        "compare with the last checkpoint; if a single element leapt, suspect the hardware",
        "go back to the checkpoint: on_anomaly='rollback'",
    )

    def __init__(self, factor: float = 100.0) -> None:
        self.factor = factor
        self._largest = PerName(math.nan)
        self._episodes = Episodes()

    def review(self, window: Window) -> Iterable[Finding]:
        rows = window.rows("parameter")
        if rows is None:
            return
        known = self._largest.of(rows.names)
        judged = np.array([shape is not None and len(shape) >= 2 for shape in rows.layout.shapes])
        for look, step in enumerate(rows.steps.tolist()):
            largest = rows.max_abs[look]
            with np.errstate(invalid="ignore"):
                leapt = judged & (known > 0) & (largest > self.factor * known)
            if leapt.any():
                with np.errstate(invalid="ignore", divide="ignore"):
                    i = int(np.nanargmax(np.where(leapt, largest / known, np.nan)))
                if self._episodes.begins(rows.names[i], step):
                    yield self.found(
                        step,
                        rows.names[i],
                        f"the largest element of {rows.names[i]} has leapt from {known[i]:.3g} to {largest[i]:.3g}",
                        about="parameter",
                        severity="error",
                        before=known[i],
                        now=largest[i],
                        parameters=int(leapt.sum()),
                    )
            np.copyto(known, largest, where=np.isfinite(largest))


class UnchangedParameter(Rule):
    """A parameter with gradients that stays exactly as it is.

    Args:
        looks: At least so many looks at parameters in a row without any change.
        steps: And for at least so many steps: after something odd, looks are close together.
    """

    name = "unchanged-parameter"
    causes = (
        "it is not in the optimizer, which was made before the parameter was replaced, tied, moved or cast",
        "the learning rate of its group is 0",
        "updates below the precision of the weight: bfloat16 weights keep 8 bits",
    )
    advice = (
        "make the optimizer after everything that replaces parameters",
        "keep float32 master weights, or use stochastic rounding, if weights are bfloat16",
    )

    def __init__(self, looks: int = 2, steps: int = 50) -> None:
        self.looks, self.steps = looks, steps
        self._same_for = PerName(0.0)
        self._sums: dict[str, list[float]] = {}
        self._episodes = Episodes(quiet=1000)
        self._since: dict[str, int] = {}

    def review(self, window: Window) -> Iterable[Finding]:
        rows, gradients = window.rows("parameter"), window.latest.get("gradient")
        if rows is None or gradients is None or gradients.names != rows.names:
            return
        moved = np.nan_to_num(gradients.max_abs[-1]) > 0
        counts = self._same_for.of(rows.names)
        for look, step in enumerate(rows.steps.tolist()):
            sums = rows.raw[look][:, 3:9].tolist()
            for i, name in enumerate(rows.names):  # once in many steps, so a loop may be one
                same = self._sums.get(name) == sums[i] and moved[i]
                counts[i] = counts[i] + 1 if same else 0
                if not same:
                    self._since[name] = int(step)
                self._sums[name] = sums[i]
            still = [rows.names[i] for i in np.flatnonzero(counts >= self.looks)]
            still = [name for name in still if step - self._since.get(name, 0) >= self.steps]
            fresh = [name for name in still if self._episodes.begins(name, step)]
            if fresh:
                yield self.found(
                    self._since.get(fresh[0], 0),
                    fresh[0],
                    f"{fresh[0]} has gradients and has not changed since step {self._since.get(fresh[0], 0)}"
                    + f"; nor have {len(fresh) - 1} others" * (len(fresh) > 1),
                    about="parameter",
                    parameters=fresh[:20],
                )
