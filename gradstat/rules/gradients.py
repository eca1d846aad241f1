"""Rules about how large gradients are: exploding, vanishing, dead, missing, below what 16 bits can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gradstat.recording.findings import Finding, Severity
from gradstat.rules.advice import Remedy
from gradstat.rules.base import HUGE, Band, LastingRule, PerName, Records, carried, median, numbered, same_for, series
from gradstat.rules.rows import Bools, Floats, Rows, TensorSet, Window
from gradstat.rules.spikes import WINDOW, LevelRule, Shift, SpikeRule

# Causes and advice for a parameter whose memory was never initialised, for the rules on weights and gradients.
NEVER_INITIALISED: dict[str, Any] = {
    "causes": ("memory that was never initialised: to_empty() without reset_parameters() of that module afterwards",),
    "advice": (
        "initialise this parameter, or load a checkpoint that contains it",
        "check whether other modules were not initialised either",
    ),
}
TOO_SMALL = ("gradients that are too small for float16: there is no loss scale, or it is too small",)
_HARMFUL = 100.0  # the factor over the median from which on gradients that stay large count beside a loss


class ExplodingGradient(SpikeRule):
    """A total gradient norm that is far larger than in the steps before.

    It is an info if it is large in a single step only. If the loss is known, which shows whether it does harm, it is
    also an info if the norm is less than a hundred times as large.

    Args:
        factor: How many times the median of the last steps a norm must be at least.
    """

    name = "exploding-gradient"
    quiet = 20
    causes = (
        "a learning rate that is too high for this stage, or was raised too soon",
        "an unusual batch, or a loss that is summed over the batch instead of averaged",
        "a recurrent or very deep model without normalisation or clipping",
    )
    advice = (
        Remedy("clip: gradstat.clip_grad_norm_, or gradstat.AutoClip if no limit is known", "clip"),
        "lower the learning rate or lengthen the warm-up",
        "inspect the batch of that step",
    )

    # Norms have heavy tails, so healthy steps often exceed three standard deviations.
    sigmas, log_sigmas, single_factor, warmup_factor = 3.0, 5.0, 10.0, 1e3

    def __init__(self, factor: float = 10.0) -> None:
        super().__init__()
        self.factor = factor

    def bands(self) -> Mapping[str, Band]:
        return {"norm": (-math.inf, min(self._high, self._beyond))}

    def review(self, window: Window) -> Iterable[Finding]:
        rows = window.measured.get("gradient")
        for row, (step, norm) in enumerate(series(window, "norm")):
            jump = self.detect_jump(step, norm) if math.isfinite(norm) else None
            if jump is None:
                continue
            began, norm, _, usual, limit, lasts = jump
            name, about, share = "norm", "series", None
            if rows is not None and window.steps[row] in rows.steps:
                squares = np.nan_to_num(rows.l2_norm[np.searchsorted(rows.steps, window.steps[row])]) ** 2
                largest = int(squares.argmax())
                name, about = rows.names[largest], "gradient"
                share = float(squares[largest] / max(squares.sum(), 1e-300))
            text = f"the gradient norm is {norm:.4g}"
            text += f", {norm / usual:.3g} times the median of the last {WINDOW} steps" if usual > 0 else ""
            text += f"; {name} contributes most" * (share is not None)
            is_harmless = window.scalar("loss") is not None and norm <= _HARMFUL * usual
            severity: Severity = "info" if is_harmless or not lasts else self.severity
            evidence: dict[str, Any] = {"norm": norm, "median": usual or None, "limit": limit, "share": share}
            yield self.found(began, name, text, about, severity, **evidence)


# Causes of a norm that falls at once.
_FALLEN = (
    "a softmax or sigmoid before a loss that applies its own, or a smaller factor on the loss or the inputs",
    "a part of the model that was detached or overwritten, or whose weights decay to zero",
    "the same batches again and again, or a few samples that are known by heart",
)


# Gradients vanish layer by layer if, in so many steps in a row, of at least so many weights the smallest root mean
# square is below this fraction of the largest, and its logarithm decays over depth nearly linearly: by the absolute
# Pearson correlation.
_IN_A_ROW, _LAYERS, _RATIO, _CORRELATION = 5, 5, 1e-5, 0.9
_LEVEL_FACTOR = 2.5  # by which a level moved at least; batches and progress move it less
# That does not count for so many steps after the number of gradients has changed, as when layers are frozen, or the
# learning rate by more than this factor, as in a warm-up by epochs.
_SETTLING, _OTHER_RATE = 64, 1.5
_NO_RATE = 100.0  # a fall by more has another reason than a rate that changed before


class VanishingGradient(LevelRule):
    """Gradients that drop suddenly and stay low, or shrink from layer to layer.

    A drop is an info where networks train in turn, as in a GAN.
    """

    name = "vanishing-gradient"
    causes = ("saturating activations (sigmoid, tanh) in a deep model, or weights initialised too small",)
    advice = (
        "add residual connections or normalisation",
        "use ReLU-like activations, and initialise their weights with nn.init.kaiming_normal_",
    )

    _decaying = carried(0)
    _present, _rate = carried(0), carried(math.nan)  # gradients in the last step, and its learning rate
    _explaining = carried(Records(2))  # the last steps in which these changed, and up to which fall that explains one

    def review(self, window: Window) -> Iterable[Finding]:
        for shift in self._falls(window):
            if self.begins("level", shift.step):
                before, after = math.exp(shift.before), math.exp(shift.after)
                text = f"the gradient norm falls from about {before:.4g} to about {after:.4g}, and stays there"
                severity: Severity | None = "info" if window.run.has_other_optimizer else None
                yield self.found(shift.began, "norm", text, "series", severity, _FALLEN, norm=after, before=before)
        rows = window.measured.get("gradient")
        if rows is not None:
            yield from self._layer_by_layer(rows)

    def _falls(self, window: Window) -> Iterator[Shift]:
        """As `shifts`, of the logarithms of norms; but what else explains, and the first ones, which vary."""
        rows, norms = window.measured.get("gradient"), window.scalars.get("norm", np.empty(0))
        if rows is not None:
            counts = [self._present, *rows.present.sum(1).tolist()]
            self._present = counts[-1]
            self._explaining += [[step, HUGE] for step in _changed(counts, 1.0, rows.steps)]
        rates = [self._rate, *window.scalars.get("lr", np.empty(0)).tolist()]
        self._rate = rates[-1]
        self._explaining += [[step, math.log(_NO_RATE)] for step in _changed(rates, _OTHER_RATE, window.steps)]
        for shift in self.shifts(window.steps, np.log(norms), -1):
            fall, since = shift.before - shift.after, shift.began - _SETTLING
            is_explained = any(since < step <= shift.step and fall <= most for step, most in self._explaining)
            if shift.began >= WINDOW and shift.least > math.log(_LEVEL_FACTOR) and not is_explained:
                yield shift
        last = int(window.steps[-1]) if len(window.steps) else 0
        self._explaining[:] = [change for change in self._explaining if last - change[0] < 2 * _SETTLING]

    def _layer_by_layer(self, rows: Rows) -> Iterable[Finding]:
        # Only the last of these steps is examined, since the decay does not come and go.
        sizes, weights = rows.newest.rms[0], rows.tensors.matrices
        at = np.flatnonzero(weights & (sizes > 0))
        if len(at) < _LAYERS:
            return
        logs, depth = np.log(sizes[at]), np.cumsum(weights)[at]
        ratio = math.exp(logs.min() - logs.max())
        correlation = abs(float(np.corrcoef(depth, logs)[0, 1])) if ratio <= _RATIO else 0.0
        self._decaying = self._decaying + len(rows) if correlation >= _CORRELATION else 0
        step = int(rows.steps[-1])
        if self._decaying >= _IN_A_ROW and self.begins("layers", step):
            name, other = rows.names[at[logs.argmin()]], rows.names[at[logs.argmax()]]
            text = f"gradients vanish layer by layer: the gradient of {name} is {ratio:.2g} times that of {other}"
            began = max(0, step - self._decaying + 1)
            yield self.found(began, name, text, "gradient", ratio=ratio, correlation=correlation, largest=other)


def _changed(values: list[float], factor: float, steps: Iterable[int]) -> list[int]:
    """Those of ``steps`` in which the value differs by more than a ``factor`` from that before, the first of which."""
    pairs = zip(steps, values, values[1:], strict=False)
    return [int(step) for step, old, new in pairs if max(old, new) > factor * min(old, new)]


_SOON = 5  # steps before reporting that there are no gradients at all
# By whether the user calls monitor.step(), rather than gradstat before the optimizer's step: where the call belongs,
# causes, advice.
_CALLED_TOO_EARLY_OR_LATE = {
    True: (
        "monitor.step() belongs between backward() and optimizer.step(), with no zero_grad() in between",
        ("monitor.step() is called before backward(), or after optimizer.zero_grad()", "backward() is never called"),
        ("use this order: backward(), monitor.step(loss), the clip, optimizer.step(), optimizer.zero_grad()",),
    ),
    False: (
        "optimizer.step() finds no gradients",
        (
            "optimizer.zero_grad() is called between backward() and optimizer.step()",
            "backward() runs on another copy of the model, not on the parameters in the optimizer",
        ),
        (
            "use this order: backward(), the clip, optimizer.step(), optimizer.zero_grad()",
            "make the optimizer after all code that copies, wraps or replaces the model",
        ),
    ),
}


class _AbsentGradientRule(LastingRule):
    """Base of rules about gradients that are zero or missing for ``in_a_row`` steps.

    An info if gradients come and go, as for experts chosen by a router.
    """

    def __init__(self, in_a_row: int = 20) -> None:
        super().__init__()
        self.in_a_row = in_a_row

    def _finding(
        self, rows: Rows, at: int, lengths: Floats, since: Floats, text: str, is_serious: bool = True, **more: Any
    ) -> Finding:
        """A finding on the parameter at this position, and on all that have been without a gradient for as long."""
        every = [rows.names[i] for i in np.flatnonzero(lengths >= lengths[at])]
        severity: Severity = "info" if not is_serious or self.is_intermittent(rows.names) else self.severity
        more |= {"parameters": every[:20], "in_a_row": int(lengths[at])}
        return self.found(since[at], rows.names[at], text + same_for(len(every)), "gradient", severity, **more)


_CONSECUTIVE = ("consecutive layers whose weights were all initialised to zero, so that no gradient reaches them",)
_NO_INPUT = (
    "an input of this layer that is zero: a hidden state that is reset in each step, a mask, dead ReLU units before it",
    "a multiplication by zero on the way to the loss",
)
_OF_ONE = "a normalisation over a single element: the softmax, share or norm of one value is constant"
_MORE = 2  # a gradient was more than noise once, or it began at zero, as behind a factor of zero, and may grow
_MEANT = "normalise over all candidates: before the top-k; or use a sigmoid, which needs no normalisation"


class DeadGradient(_AbsentGradientRule):
    """Gradients that are zero in every step, or no more than rounding noise compared with those of other weights.

    Gradients are reported as noise only if they have never been larger.

    Args:
        in_a_row: The number of steps in a row after which it is reported. Some models begin with a factor of zero,
            which the first steps change.
    """

    name = "dead-gradient"
    causes = (
        "dead ReLU units, which are never positive and pass no gradient",
        "a step function on the way to the loss, whose derivative is zero: round, sign, floor",
        "a multiplication by zero on the way to the loss: a mask, a gate, a weight initialised to zero",
        "a parameter that the loss does not depend on, or only in a branch that is not taken",
        "inputs that are all zero, or all padding",
        _OF_ONE,
    )
    advice = (
        Remedy("record the module's outputs: gradstat.Monitor(model, watch={'activations': 10})", "activations"),
        "for dead ReLU units, use a smaller learning rate, another initialisation, LeakyReLU or GELU",
        "replace a step function by a smooth one or a straight-through estimator: x + (x.round() - x).detach()",
    )

    _known = carried(PerName(0))  # of each gradient so far: 0 nothing, 1 that it was noise, or `_MORE`

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        zero = (rows.field("zero_count") == rows.numel) & (rows.numel > 0)
        noise = self._noise(rows, zero)
        for row, fresh, lengths, since in self.lasting(rows, zero | noise, self.in_a_row):
            if (lengths >= self.in_a_row).sum() == rows.present[row].sum():
                text = f"all gradients have been zero for {self.in_a_row} steps: the loss passes no gradient back, or "
                text += "gradients are zeroed before they are measured"
                _, causes, advice = _CALLED_TOO_EARLY_OR_LATE[window.run.is_stepped_by_user]
                first = TOO_SMALL * bool(window.run.in_float16 and not window.run.is_scaled)
                more: dict[str, Any] = {"causes": (*first, *self.causes, *causes), "advice": (*advice, *self.advice)}
                yield self.found(since[fresh[0]], "gradients", text, in_a_row=self.in_a_row, **more)
                continue
            of_noise = [rows.names[i] for i in fresh if noise[row, i]]
            if of_noise:
                yield self._of_noise(of_noise, window, rows, row, since)
            fresh = [i for i in fresh if not noise[row, i]]
            if fresh:
                alive = rows.present[row] & (lengths == 0)
                yield self._of_zeros(fresh, window, rows, alive, np.where(noise[row], 0.0, lengths), since)

    def _of_zeros(
        self, fresh: list[int], window: Window, rows: Rows, alive: Bools, lengths: Floats, since: Floats
    ) -> Finding:
        """A finding on those at ``fresh`` positions, while others are ``alive``; ``lengths`` are of zeros alone."""
        # The parameter nearest to the loss is the cause, and cuts off the others. But if the bias beside a weight has a
        # gradient, the weight's input is zero, and the cause is whatever produces that input.
        modules = {rows.names[i].rpartition(".")[0] for i in np.flatnonzero(alive)}
        names = [rows.names[i] for i in fresh]
        whole = [name for name in names if name.rpartition(".")[0] not in modules]
        weights, parameters = _weights_of(rows.tensors), window.latest.get("parameter")
        zeros = 0 if parameters is None else parameters.of(rows.names).field("zero_count")[-1]
        is_blank = weights & (zeros == rows.tensors.numel) & (since == 0)
        blank = [rows.names[i] for i in fresh if is_blank[i]]
        name = window.run.first_in_backward(blank or whole or names)
        text = f"all elements of the gradient of {name} have been zero for {self.in_a_row} steps"
        text += ", and its own elements are zero as well, so it cannot change" * bool(blank)
        more: dict[str, Any] = {} if whole else {"causes": _NO_INPUT}
        if blank:
            more = {**NEVER_INITIALISED, "causes": (*NEVER_INITIALISED["causes"], *_CONSECUTIVE)}
        # The loss may not depend on a bias, for example that of a critic of which only differences count, nor on a
        # slope for negative inputs.
        is_serious = bool(weights[fresh].any())
        return self._finding(rows, rows.names.index(name), lengths, since, text, is_serious, **more)

    def _noise(self, rows: Rows, zero: Bools) -> Bools:
        """``[m, n]``: gradients that are noise, or zero, and never were anything else; and were not zero at first."""
        known = self._known.values_for(rows.names)
        if (known[rows.tensors.matrices & rows.present.any(0)] == _MORE).all():  # mostly
            return np.zeros_like(zero)
        finite = rows.present & (rows.nonfinite == 0)
        is_more = np.logical_or.accumulate(finite & ~zero & ~_are_noise(rows, _weights_of(rows.tensors)))
        is_more |= (known == _MORE) | ((known == 0) & zero[finite.argmax(0), np.arange(len(known))])
        known[:] = np.where(is_more[-1], _MORE, np.maximum(known, finite.any(0)))
        noise: Bools = finite & ~is_more
        return noise

    def _of_noise(self, names: list[str], window: Window, rows: Rows, row: int, since: Floats) -> Finding:
        name = window.run.first_in_backward(names)
        at = rows.names.index(name)
        sizes = rows.rms[row, rows.tensors.matrices & (rows.rms[row] > 0)]
        ratio = rows.rms[row, at] / (median(sizes) if len(sizes) else math.nan)
        text = f"the gradient of {name} has been no larger than rounding noise for {self.in_a_row} steps: {ratio:.1g} "
        text += "times that of the median weight" + same_for(len(names))
        more = {"parameters": names[:20], "in_a_row": self.in_a_row, "ratio": ratio}
        return self.found(since[at], name, text, "gradient", None, self.led_by(_OF_ONE), (_MEANT,), **more)


def _weights_of(tensors: TensorSet) -> Bools:
    """Which are weights: one number per user or item is a bias, though an embedding keeps it."""
    several: Bools = np.array([math.prod(shape[1:]) > 1 for shape in tensors.shapes], dtype=bool)
    return several & tensors.matrices


# A gradient is rounding noise below so many machine epsilons of its dtype, relative to the median root mean square of
# the gradients of all weights: a gate that is normalised over one element has up to 1.7. Those of 16 bits, 0.004 and
# more, would be as large as true gradients: in healthy programs of the tests the smallest is 0.009, over 20 steps. So
# there the epsilon of float32 counts. And the gradient of each other weight is so many times as large, unlike where
# gradients vanish layer by layer.
_NOISE, _APART = 4, 1e3


def _are_noise(rows: Rows, weights: Bools) -> Bools:
    """``[m, n]``: which gradients of ``weights`` are nothing but the rounding errors of sums that are zero."""
    sizes = np.where(weights & (rows.rms > 0), rows.rms, math.nan)
    largest = torch.finfo(torch.float32).eps
    noise: Bools = sizes < _NOISE * largest * np.fmax.reduce(sizes, 1, keepdims=True)  # nearly always none
    if noise.any():
        dtypes = [torch.float32 if info is None else info.dtype.to_real() for info in rows.tensors.infos]
        limits = _NOISE * np.array([min(torch.finfo(dtype).eps, largest) for dtype in dtypes])
        for row in np.flatnonzero(noise.any(1)):
            below = sizes[row] < limits * median(sizes[row, sizes[row] > 0])
            others = np.fmin.reduce(sizes[row], where=~below, initial=math.inf)
            noise[row] = below & (_APART * np.fmax.reduce(sizes[row], where=below, initial=0.0) < others)
    return noise


# Steps in a row if each missing parameter has a twin with a gradient: one of the same shape whose name differs only in
# digits. A router may leave out some of its experts for long.
_EXPERT_STEPS = 300
# An info if all that never had a gradient have less than this share of all elements. Of 61 public programs, four have
# parameters that they never use, up to 0.033 of the elements.
_SMALL = 0.05
_LEFT_OUT = "a term of the loss that was left out, that of one of several outputs"


class MissingGradient(_AbsentGradientRule):
    """Parameters in the optimizer that require a gradient and get none.

    It is an info if they never had one, and either the program removes it, they are a small part of the model, or
    another optimizer may train them, as in a GAN. It is a warning for those of an output that the loss does not depend
    on, though it depends on an output of the same kind, as that of another task.

    Args:
        in_a_row: The number of steps in a row after which it is reported.
    """

    name = "missing-gradient"
    causes = (
        "a parameter that the forward pass does not use",
        "an operation that detaches it from the loss: detach(), .data, .item(), torch.no_grad(), argmax, a comparison",
        "a reentrant checkpoint around it, none of whose inputs requires a gradient: pass use_reentrant=False",
    )
    advice = (
        "follow the module's output to the loss and find the operation that detaches it",
        "if the parameter should not train, call requires_grad_(False), which also saves memory",
    )

    # As `Coverage.unused`, which `OptimizerCoverage` reports, and of heads that the loss leaves out; and when seen.
    _resting, _idle = carried(dict[str, int]()), carried(dict[str, int]())

    def __init__(self, in_a_row: int = 30) -> None:
        super().__init__(in_a_row)

    def is_intermittent(self, names: tuple[str, ...]) -> bool:
        # One gradient that came back is enough. Zeros are different: they also end where a factor begins at 0 (LoRA).
        came_back = (self._times.values_for(names) > 0) & (self._lasts_for.values_for(names) == 0)
        return super().is_intermittent(names) or bool(came_back.any())

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        for seen in window.observed("coverage"):
            self._resting = dict.fromkeys(seen.value.unused, seen.step)
        for seen in window.observed("idle"):
            self._idle = dict.fromkeys(seen.value, seen.step)
        missing = np.zeros(rows.present.shape, dtype=bool)
        for seen in window.observed("missing"):  # rows cannot tell which parameters are frozen
            missing[np.ix_(rows.steps == seen.step, seen.value)] = True
        if self._resting:
            missing &= ~np.isin(rows.names, list(self._resting))
        needed = np.where(rows.present.any(1, keepdims=True), self.in_a_row, _SOON)
        parameters = window.latest.get("parameter")
        tensors = None if parameters is None else parameters.of(rows.names).tensors
        if missing.any() and tensors is not None:
            may_rest = _have_twins(rows, tensors, missing) & ~np.isin(rows.names, list(self._idle))
            needed = np.where(may_rest, max(_EXPERT_STEPS, self.in_a_row), needed)
        for row, fresh, lengths, since in self.lasting(rows, missing, needed):
            if not rows.present[row].any():
                # That is due to where the monitor is called, not to a parameter.
                where, causes, advice = _CALLED_TOO_EARLY_OR_LATE[window.run.is_stepped_by_user]
                text = f"no parameter has had a gradient for {_SOON} steps: {where}"
                more: dict[str, Any] = {"causes": (*causes, *self.causes), "advice": (*advice, *self.advice)}
                yield self.found(since[fresh[0]], "gradients", text, in_a_row=_SOON, **more)
                continue
            idle = [i for i in fresh if rows.names[i] in self._idle]
            at = [*fresh, *idle][-1]  # the one nearest to the loss: earlier ones are cut off with it
            name = rows.names[at]
            text = f"{name} has had no gradient for {lengths[at]:.0f} steps: unused or detached from the loss"
            text += ", which depends on another output of the model of this kind" * bool(idle)
            never = lengths > rows.steps[row]
            is_small = tensors is not None and tensors.numel[never].sum() < _SMALL * tensors.numel.sum()
            # A backward pass computed it, so the program has removed it, as one that lets a layer rest at first. Or
            # nothing needs the last of several layers.
            rests = name in window.run.backward_order or (is_small and not idle) or window.run.has_other_optimizer
            more = {"causes": self.led_by(_LEFT_OUT)} if idle else {}
            yield self._finding(rows, at, lengths, since, text, not (never[at] and rests), **more)


def _have_twins(rows: Rows, tensors: TensorSet, missing: Bools) -> Bools:
    """``[m, 1]``: in which steps all ``missing`` parameters have twins with a gradient."""
    pairs = zip(rows.names, tensors.shapes, strict=True)
    _, kinds = np.unique([f"{numbered(name)[0]} {shape}" for name, shape in pairs], return_inverse=True)
    alive = np.zeros((len(rows), len(kinds)), dtype=bool)
    at, which = rows.present.nonzero()
    alive[at, kinds[which]] = True
    every: Bools = np.logical_and.reduce(alive[:, kinds] | ~missing, axis=1, keepdims=True)
    return every


# The smallest normal numbers of the dtypes in which gradients underflow.
_FLOORS: dict[torch.dtype | None, float] = {
    dtype: torch.finfo(dtype).smallest_normal for dtype in (torch.float16, torch.bfloat16)
}


class Underflow(LastingRule):
    """Half-precision gradients that underflow to zeros and subnormals.

    They differ from meaningful zeros by the size of the other elements: the root mean square of these is a few times
    the smallest normal number of their dtype (6.1e-5 for float16), so smaller ones must be below it. The dtype is the
    one in which autocast computed them. With a loss scale, gradients are reviewed as they were computed, with the
    scale, and as float16 whatever their dtype.
    """

    name = "underflow"
    explains = ("dead-gradient", "vanishing-gradient", "small-second-moment", "unchanged-parameter")
    causes = TOO_SMALL
    advice = (
        "scale the loss: gradstat.amp.GradScaler",
        "use bfloat16, which has the range of float32, or run this part of the model in float32",
    )

    # Of a gradient's elements this share is zero, and the root mean square of the others is below so many times the
    # smallest normal number, for so many steps in a row. Conventions of gradstat.
    _ZEROS, _NORMALS, _STEPS = 0.3, 8.0, 10

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        half, infos = {*window.run.in_float16}, zip(rows.names, rows.tensors.infos, strict=True)
        dtypes = [torch.float16 if name in half else None if info is None else info.dtype for name, info in infos]
        floor, scale = np.array([_FLOORS.get(dtype, 0.0) for dtype in dtypes]), np.ones((1, 1))
        scales = window.scalars.get("loss_scale")
        if window.run.is_scaled and scales is not None:
            at = np.searchsorted(window.steps, rows.steps)
            floor, scale = np.full(len(dtypes), _FLOORS[torch.float16]), np.nan_to_num(scales[at], nan=1.0)[:, None]
        if not floor.any():
            return
        left = rows.rms * scale / np.sqrt(1 - rows.zero_fraction)
        low = (floor > 0) & (rows.zero_fraction > self._ZEROS) & (left < self._NORMALS * floor)
        for row, fresh, _, since in self.lasting(rows, low, self._STEPS):
            worst = max(fresh, key=lambda i: rows.zero_fraction[row, i])
            name, zeros, rest = rows.names[worst], rows.zero_fraction[row, worst], left[row, worst]
            text = f"{zeros:.0%} of the gradient of {name} is zero, and the rest near the dtype's smallest normal "
            more = {"zero_fraction": zeros, "rms_of_the_rest": rest, "parameters": len(fresh)}
            yield self.found(since[worst], name, text + f"number (rms {rest:.2g})", "gradient", **more)
