"""Rules about NaN and Inf: in batches, gradients, losses, parameters, buffers, optimizer states and activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradstat._core.text import nan_and_inf
from gradstat.recording.findings import Finding, Severity
from gradstat.recording.kinds import INPUT_KINDS, kind_of
from gradstat.rules.advice import FIRST_MODULE, SKIP, Remedy, replay
from gradstat.rules.base import PerName, Rule, carried, series
from gradstat.rules.rows import Rows, Window


def _nonfinite_rows(
    window: Window, kind: str, counts: Callable[[Rows], npt.NDArray[Any]] = attrgetter("nonfinite")
) -> Iterator[tuple[Rows, int, int, list[str]]]:
    """Yields measurements with NaN or Inf: the rows, the index in them, the step, and the names of the tensors.

    ``counts``: which tensors of some rows have any, ``[m, n]``.
    """
    rows = window.measured.get(kind)
    if rows is not None:
        nonfinite = counts(rows)
        for row in np.flatnonzero(nonfinite.any(1)).tolist():
            yield rows, row, int(rows.steps[row]), [rows.names[i] for i in np.flatnonzero(nonfinite[row])]


def _described(rows: Rows, row: int, name: str) -> tuple[str, dict[str, Any]]:
    """What a tensor has in a row, in words and as evidence."""
    at = rows.names.index(name)
    nan, inf = (int(rows.field(count)[row, at]) for count in ("nan_count", "inf_count"))
    numel = int(np.broadcast_to(rows.numel, rows.nonfinite.shape)[row, at])
    text, counted = f"{nan_and_inf(nan, inf)} in {numel:,} elements", {"nan_count": nan, "inf_count": inf}
    first = rows.first_nonfinite(row, at)
    if first is None:
        return text, {**counted, "numel": numel}
    return f"{text}, the first at {first}", {**counted, "numel": numel, "first": first}


def _nonfinite_before_loss(window: Window, step: int) -> list[str]:
    """Inputs with NaN in ``step``, where Inf may be a mask, and parameters that were not finite up to it."""
    inputs = [_nonfinite_rows(window, kind, lambda rows: rows.field("nan_count") > 0) for kind in INPUT_KINDS]
    found = [one for of_kind in inputs for one in of_kind if one[2] == step]
    found += [one for one in _nonfinite_rows(window, "parameter") if one[2] <= step]
    return [names[0] for *_, names in found]


class NonfiniteBatch(Rule):
    """NaN or Inf in a batch that was passed to ``monitor.check_batch``, or in what the model was called with.

    Masks may hold -Inf, and a program may mark missing labels with NaN. So it is an error only if the loss or the
    gradients of the step are not finite either, or if an exception ended the step. Otherwise NaN is reported once, as
    an info.
    """

    name = "nonfinite-batch"
    severity = "error"
    quiet = 1
    judges_end = True
    causes = ("missing values in the data, or a division by a standard deviation of 0", "a damaged file")
    advice = (
        "find the sample: the finding gives the index of the first NaN or Inf in the batch",
        "drop or repair such samples in the data loader",
    )
    advice_without_index = ("find the micro-batch with gradstat.MicroBatches", advice[1])

    _handled = carried(dict[str, int]())  # inputs that were not finite in healthy steps, and when first

    def review(self, window: Window) -> Iterable[Finding]:
        for kind in INPUT_KINDS:
            for rows, row, step, nonfinite in _nonfinite_rows(window, kind):
                at = int(np.searchsorted(window.steps, step))
                is_harmless = not any(window.value(name, at) > 0 for name in ("loss_nonfinite", "nonfinite"))
                is_harmless &= not window.run.is_unfinished
                for name in (name for name in nonfinite if name not in self._handled):
                    has, counted = _described(rows, row, name)
                    text = f"{name} has {has}"
                    if is_harmless:
                        self._handled[name] = step
                        text += "; the loss and the gradients of this step are finite, so the program handles it"
                        if not counted["nan_count"]:
                            continue
                    if self.begins(name, step):
                        severity: Severity = "info" if is_harmless else self.severity
                        advice = self.advice if "first" in counted else self.advice_without_index
                        yield self.found(step, name, text, kind, severity, advice=advice, **counted)


_LOSS = "a loss that was NaN: call monitor.step(loss), which reports one"
_CLIP = "a clip before gradients were measured, which spreads one NaN to all: call monitor.step() before it"
_ORIGIN = ('watch={"origin": 1} names the rank that produced it; DDP\'s all-reduce spreads it to every rank',)
# So many steps in a row are no occasional overflows: a scale of 2**24 that is halved each time is 1 after 24.
_OVERFLOWS = 50


class NonfiniteGradient(Rule):
    """NaN or Inf in a gradient; the finding names the first such gradient in the order of the backward pass.

    With a loss scaler, occasional overflows are expected, so such a step is only an info.
    """

    name = "nonfinite-gradient"
    severity = "error"
    quiet = 1
    causes = (
        "an operation whose derivative is not finite: sqrt or norm at 0, log or division near 0, pow",
        "an overflow in the forward pass: exp of a large number, or float16 beyond 65,504",
        "NaN or Inf in the batch, in a weight or in an activation saved for the backward pass",
        "a learning rate so high that the last updates were far too large",
    )
    advice = (
        replay("names the operation and its source line", otherwise=FIRST_MODULE),
        "guard the operation: add eps inside sqrt and log, clamp before exp, divide by x.norm().clamp_min(eps)",
        SKIP,
    )

    _in_a_row = carried(0)  # steps that are not finite

    def review(self, window: Window) -> Iterable[Finding]:
        for rows, row, step, nonfinite in _nonfinite_rows(window, "gradient"):
            if not self.begins("", step):
                self._in_a_row += 1
                if self._in_a_row == _OVERFLOWS and window.run.is_scaled:
                    text = f"gradients had NaN or Inf in {_OVERFLOWS} steps in a row; the loss scaler skipped them all"
                    why = ("a loss scale that is fixed, or that falls too slowly", *self.causes)
                    remedy = ("use gradstat.amp.GradScaler with its defaults, and call update() in every step",)
                    yield self.found(step + 1 - _OVERFLOWS, "gradients", text, causes=why, advice=remedy)
                continue
            self._in_a_row = 1
            name = window.run.first_in_backward(nonfinite)
            has, counted = _described(rows, row, name)
            text = f"the gradient of {name} has {has}; {len(nonfinite)} of {len(rows.names)} gradients "
            text += "are not finite" if len(nonfinite) > 1 else "is not finite"
            text += " (with a loss scaler, occasional overflows are normal)" * window.run.is_scaled
            text += f"; {window.run.skipped_by} skips this step" * bool(window.run.skipped_by)
            severity: Severity = "info" if window.run.is_scaled else self.severity
            evidence = {"parameters": nonfinite[:20], "nonfinite_tensors": len(nonfinite), **counted}
            causes: tuple[str, ...] = self.causes
            advice = (*_ORIGIN, *self.advice) if window.run.origin_is_unknown else self.advice
            is_whole = len(nonfinite) == len(rows.names) > 1
            if is_whole and (rows.field("nan_count") == rows.numel)[row].all():
                words, causes = self._all_nan(window, step)
                text += words
            yield self.found(step, name, text, "gradient", severity, causes, advice, **evidence)

    def _all_nan(self, window: Window, step: int) -> tuple[str, tuple[str, ...]]:
        """An addition to the text, and causes, where every element is NaN: a loss, weight, input or clip's norm was."""
        at = int(np.searchsorted(window.steps, step))
        if window.value("loss_nonfinite", at) > 0:
            return "", ("a loss or a parameter that is not finite, which has a finding of its own", *self.causes)
        if known := _nonfinite_before_loss(window, step):
            return "", (f"{known[0]} is not finite", *self.causes)
        causes: tuple[str, ...] = (*self.causes, _CLIP)  # it comes last where gradstat runs before the clips it knows
        like = ""
        if window.run.is_stepped_by_user:
            causes, like = (_CLIP, *self.causes), ", as after a clip by a NaN norm"
        if not math.isfinite(window.value("loss", at)):
            causes, like = (_LOSS, *causes), ", as after the backward pass of a NaN loss"
        return f"; every element is NaN{like}", causes


class NonfiniteLoss(Rule):
    """A loss that is NaN or Inf."""

    name = "nonfinite-loss"
    severity = "error"
    quiet = 1
    causes = (
        "log of 0, division by 0 or an overflow, in the loss or in the model",
        "a batch with NaN or Inf, or one in which everything is masked out, so that a mean is 0 / 0",
        "parameters that have not been finite since an earlier step",
    )
    advice = (
        replay("names the operation that produced it", otherwise=FIRST_MODULE),
        "replace a log of softmax or sigmoid by cross_entropy or binary_cross_entropy_with_logits, on the logits",
        SKIP,
    )

    def review(self, window: Window) -> Iterable[Finding]:
        for step, value in series(window, "loss_nonfinite"):
            if value > 0 and self.begins("", step):
                kind = "NaN" if value == 1 else "infinite"
                yield self.found(step, "loss", f"the loss is {kind}", value=kind, causes=self._causes(window, step))

    def _causes(self, window: Window, step: int) -> tuple[str, ...]:
        """The causes that are left after what was measured of ``step``."""
        if known := _nonfinite_before_loss(window, step):
            return (f"{known[0]} is not finite",)
        measured = {kind for kind, rows in window.measured.items() if step in rows.steps}
        operation, batch, parameters = self.causes
        if not measured.isdisjoint(INPUT_KINDS):
            batch = "a batch in which everything is masked out, so that a mean is 0 / 0"
        return (operation, batch) if "parameter" in measured else (operation, batch, parameters)


class _NonfiniteTensor(Rule):
    """NaN or Inf in tensors of one kind, of `gradstat.recording.kinds.KINDS`."""

    severity = "error"
    kind = what = ""
    causes_at_first: tuple[str, ...] = ()  # only in the first step, before any update
    advice_of_statistics: tuple[str, ...] = ()  # for running statistics of a normalisation
    is_updated: bool = False  # by the optimizer

    _finite_at = carried(dict[str, int]())  # by kind, when its tensors were last measured and finite
    _last_bad = carried(-1)  # the last step that was taken with gradients that were not finite

    def _nonfinite(self, rows: Rows) -> npt.NDArray[Any]:
        """Which tensors are reported, ``[m, n]``."""
        return rows.nonfinite

    def review(self, window: Window) -> Iterable[Finding]:
        bad = [self._last_bad, *(step for step, count in series(window, "nonfinite") if count > 0)]
        bad = bad[:1] if window.run.skipped_by else bad
        self._last_bad = bad[-1]
        for kind in (name for name in window.tables if kind_of(name).name == self.kind):
            every = window.tables[kind]
            finite = [self._finite_at.get(kind, -1), *every.steps[~every.nonfinite.any(1)].tolist()]
            self._finite_at[kind] = finite[-1]
            for rows, row, step, nonfinite in _nonfinite_rows(window, kind, self._nonfinite):
                if not self.begins(kind, step):
                    continue
                name = nonfinite[0]
                has, counted = _described(rows, row, name)
                more = f"; {len(nonfinite)} of {len(rows.names)} are not finite" if len(nonfinite) > 1 else ""
                text = f"the {self.what.format(kind=kind)} {name} has {has}{more}"
                causes = (*(self.causes_at_first if step == 0 else ()), *self.causes)
                evidence = {"all": nonfinite[:20], "nonfinite_tensors": len(nonfinite), **counted}
                is_statistic = bool(self.advice_of_statistics) and ".running_" in f".{name}"
                advice = self.advice_of_statistics if is_statistic else self.advice
                since = max(at for at in finite if at < step)
                if since >= 0:
                    evidence["last_finite"] = since
                if self.is_updated and since >= 0 and not any(since <= at < step for at in bad):
                    text += f"; it was finite at step {since}, and all gradients have been finite since"
                    info = rows.tensors.infos[rows.names.index(name)]
                    causes, advice = _of_optimizer(window.run.optimizer_eps, info and info.dtype), _OF_OPTIMIZER
                yield self.found(step, name, text, kind, causes=causes, advice=advice, **evidence)


_OF_OPTIMIZER = (
    "use a larger eps (1e-4 for float16), or keep parameters in float32 and use torch.autocast",
    "load a checkpoint from before this step",
)


def _of_optimizer(eps: float, dtype: torch.dtype | None) -> tuple[str, ...]:
    """The causes of a tensor that is not finite after updates by gradients that were."""
    arithmetic = "the optimizer's own arithmetic: 0 / 0 for a zero gradient, or a square or product that overflows"
    if eps and dtype is not None and not torch.tensor(eps, dtype=dtype):
        arithmetic = f"the optimizer's own arithmetic: its eps of {eps:g} is 0 in {dtype}, so a zero gradient is 0 / 0"
    return arithmetic, "other code that wrote to it, or memory that was overwritten"


class NonfiniteParameter(_NonfiniteTensor):
    """NaN or Inf in a parameter.

    If it was finite before, and all gradients were finite since then, the finding blames the optimizer's arithmetic.
    """

    name = "nonfinite-parameter"
    kind = what = "parameter"
    judges_end = is_updated = True
    causes_at_first = ("memory that was never initialised: to_empty() or torch.empty without reset_parameters()",)
    causes = (
        "an optimizer step with gradients that were not finite",
        "memory that was overwritten, or a checkpoint that already had NaN or Inf",
    )
    advice = (
        "load a checkpoint from before this step",
        Remedy("on_anomaly='rollback' restores a step before it", "rollback"),
        SKIP,
    )


class NonfiniteBuffer(_NonfiniteTensor):
    """NaN in a buffer, such as the running variance of a batch norm, or more Inf than at first.

    A mask may have Inf on purpose. Training may look healthy while every evaluation is NaN.
    """

    name = "nonfinite-buffer"
    kind = what = "buffer"
    causes = (
        "a forward pass with NaN or Inf, from which the module updated its buffer",
        "memory that was overwritten",
    )
    advice = ("load a checkpoint from before this step, or reset the buffer to its initial value",)
    advice_of_statistics = (
        "call module.reset_running_stats() and run some batches in train mode, or load a checkpoint",
    )

    _inf_at_first, _numel = carried(PerName(0.0)), carried(PerName(-1.0))

    def _nonfinite(self, rows: Rows) -> npt.NDArray[Any]:
        at_first, last_numel = self._inf_at_first.values_for(rows.names), self._numel.values_for(rows.names)
        nonfinite = rows.field("nan_count") > 0
        for row, inf in enumerate(rows.field("inf_count")):
            numel = np.broadcast_to(rows.numel, nonfinite.shape)[row]
            np.copyto(at_first, inf, where=last_numel != numel)  # new, or of another size
            last_numel[:] = numel
            nonfinite[row] |= inf > at_first
        return nonfinite


class NonfiniteActivation(_NonfiniteTensor):
    """NaN or Inf in the output of a module: the finding names the first such module from the input on."""

    name = "nonfinite-activation"
    kind = "activation"
    what = "output of module"
    causes = ("an overflow, a log or a division in this module's forward pass", "an input with NaN or Inf")
    advice = (
        "check this module's inputs and weights for NaN, Inf and huge values",
        replay("names the operation"),
        "if the module runs in float16, run it in float32, under torch.autocast(..., enabled=False)",
    )


class NonfiniteOptimizerState(_NonfiniteTensor):
    """NaN or Inf in an optimizer's state, from which every later update of that parameter is NaN."""

    name = "nonfinite-optimizer-state"
    kind = "optimizer state"
    is_updated = True
    what = "optimizer's {kind} of"
    causes = (
        "an optimizer step with gradients that were not finite",
        "memory that was overwritten, or an optimizer checkpoint that already had NaN or Inf",
    )
    advice = ("clear the parameter's state (del optimizer.state[parameter]), or load a checkpoint", SKIP)


KEPT = {kind.name for kind in (NonfiniteParameter, NonfiniteBuffer, NonfiniteOptimizerState)}
"""Rules on what outlives a step."""
CONSEQUENCES = KEPT | {kind.name for kind in (NonfiniteActivation, NonfiniteLoss, NonfiniteGradient)}
"""Rules whose findings may follow from an earlier one of `ROOTS`."""
ROOTS = CONSEQUENCES | {NonfiniteBatch.name, "nonfinite-rank"}
