"""`guarded_step`: one pass over the gradients, then clips, steps or skips as decided on the device."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from gradstat._core import announce, norms
from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import streams_of
from gradstat._core.parameters import Gradients, NamedParameters, gradients_of, named_by, named_parameters_of
from gradstat._core.tensors import ExtraGroups, is_distributed, to_device
from gradstat._core.text import expect
from gradstat._step import decision, optimizers
from gradstat._step import loss_scale as _scaling
from gradstat._step.loss_scale import inner_scaler
from gradstat._step.record import StepRecord, to_clip
from gradstat.adaptive import AdaptiveClip, TensorClip
from gradstat.adaptive._base import Limit, checked_limit, refuse
from gradstat.check import PendingReport
from gradstat.counters import StepCounters, counters_on
from gradstat.guard import SpikeGuard, begin, checked_value, leave


class StepResult:
    """The result of `guarded_step`. Its tensors are on the device. Reading them on the host waits for the device.

    For use on another stream than the step's, the rules of `gradstat.stats` apply. A pickle waits for the device and
    holds the report and tensors on the CPU.

    Attributes:
        total_norm: L2 norm of all gradients before clipping and without their loss scale: 0-d, on the first
            gradient's device, of the gradients' promoted real dtype.
        counters: This optimizer's `StepCounters`.
        loss: The ``loss`` argument; without one the closure's result, else the result of the optimizer's step, which is
            None if it was skipped.
    """

    def __init__(self, record: StepRecord, counters: StepCounters, skips: bool, loss: Any) -> None:
        self._record, self._skips = record, skips
        self.counters: StepCounters = counters
        self.loss: Any = loss

    @property
    def total_norm(self) -> Tensor:
        return self._record.norm

    @property
    def skipped(self) -> Tensor:
        """Whether the step was skipped, 0-d bool on the device."""
        return self._record.skipped(self._skips)

    @property
    def refused(self) -> Tensor:
        """Whether a guard refused the step as an outlier, by skipping or scaling it down: 0-d bool on the device."""
        verdict = self._record.verdict
        if len(verdict) > norms.REASON:
            return verdict[norms.REASON] > 1
        return torch.zeros_like(verdict[norms.SKIP], dtype=torch.bool)

    @functools.cached_property
    def report(self) -> PendingReport:
        """The report on the gradients before clipping, without their loss scale.

        The first access starts the copy to the host, behind the step and all later work on the step's stream, whatever
        stream is current then. ``.result()`` waits for it, and raises RuntimeError if another rank could not measure.
        """
        return self._record.report()

    def __getstate__(self) -> dict[str, Any]:
        verdict, loss = self._record.verdict.cpu(), self.loss
        return {
            "_record": dataclasses.replace(StepRecord.nothing(), norm=self.total_norm.cpu(), verdict=verdict),
            "_skips": self._skips,
            "report": self.report,
            "counters": StepCounters.on(torch.device("cpu"), self.counters, "a copy of the counters"),
            "loss": loss.detach().cpu() if isinstance(loss, Tensor) else loss,
        }

    def __repr__(self) -> str:
        return f"StepResult(total_norm={self.total_norm}, skipped={self.skipped})"


@never_traced  # like the steps of torch's optimizers, which break the graph, too
def guarded_step(
    optimizer: Optimizer,
    max_norm: float | AdaptiveClip | None = None,
    skip_nonfinite: bool = True,
    scaler: GradScaler | None = None,
    *,
    loss: Tensor | None = None,
    guard: SpikeGuard | None = None,
    closure: Callable[[], Any] | None = None,
    model: Module | None = None,
    backend: str | None = None,
    extra_groups: ExtraGroups | None = None,
) -> StepResult:
    """Steps ``optimizer`` with clipped gradients, or leaves everything unchanged if a gradient is not finite.

    Replaces ``scaler.unscale_``, ``clip_grad_norm_`` and ``optimizer.step`` (or ``scaler.step``). One pass measures the
    gradients. A fused Adam, AdamW, Adagrad or SGD then clips, unscales or skips by itself, using numbers that never
    leave the device: no host sync, and no pass over the gradients except the optimizer's own. For any other optimizer,
    gradients are clipped and unscaled in place, only if necessary, and one host sync decides whether ``step`` is called
    at all (none if ``skip_nonfinite`` is False). A skipped step changes no parameter, no state and no step count;
    stepping schedulers is left to the caller.

    Args:
        optimizer: Any optimizer with gradients from ``backward()``.
        max_norm: Upper limit, above 0, of the L2 norm of all its gradients together, as for `clip_grad_norm_`; None or
            infinity only measures. Or an adaptive clip: `gradstat.AutoClip`, `ZClip` and `FixedClip` are handled like
            a number, `AdaGC` and `AGC` always write the gradients, whatever the optimizer.
        skip_nonfinite: Skip the step if a gradient is not finite. If False, the step is taken regardless.
        scaler: The loss scaler whose scale the gradients carry, or carried before ``scaler.unscale_(optimizer)``.
            Calling ``scaler.update()`` is left to the caller.
        loss: The loss of the step, a single number, for the guard: the mean if gradients were accumulated, without
            the loss scale.
        guard: Refuses the step if ``loss`` or the norm before clipping is an outlier. An adaptive clip does not see
            refused steps, and a loss scaler counts them as good ones.
        closure: Computes the gradients and returns the loss, or None. It is called once, before anything else. LBFGS,
            and optimizers other than torch's, call it several times. Gradients are then checked and clipped each time,
            and copies of parameters and state are restored if a gradient is not finite.
        model: The module whose parameter names the report uses. It is not needed if the optimizer was made from
            ``named_parameters()``. Without names the report has groups and positions.
        backend, extra_groups: As for `check`.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, ``max_norm`` none of the above, ``loss`` not a tensor, or
            a gradient has no norm.
        ValueError: ``max_norm`` is not above 0; a gradient cannot be measured; ``skip_nonfinite`` is False with a loss
            scaler or a guard, which cannot work without skipping; ``loss`` is not one number, or there is no guard;
            a guard that scales is combined with `AdaGC` or `AGC`, or a guard with LBFGS; a gradient that is to be
            unscaled in place is float16.
        RuntimeError: Other code has set ``grad_scale`` or ``found_inf`` on the optimizer; it has stepped since the
            last ``scaler.update()``; none of its parameters has a gradient although there is a scaler; a gradient
            was added after ``scaler.unscale_`` or unscaled with another optimizer's (by `gradstat.amp.GradScaler`
            or another guarded step); a closure is combined with a scaler; during CUDA graph capture, it is this
            optimizer's first guarded step, or skipping would need the host; a gradient is laid out in memory unlike
            its parameter, which torch's fused optimizers do not notice.
        NotImplementedError: A gradient is a distributed tensor, and ``max_norm`` is `AdaGC` or `AGC`; or a gradient is
            sparse, and ``max_norm`` is `AGC`.
    """
    optimizers.require_steppable(optimizer)
    traits = optimizers.traits_of(type(optimizer))
    if model is not None:
        expect("model", model, torch.nn.Module, "a torch.nn.Module or None")
    limit = checked_limit(max_norm)
    if scaler is not None and not inner_scaler(scaler).is_enabled():
        scaler = None
    loss_scale = None if scaler is None else _loss_scale(scaler, optimizer, skip_nonfinite, closure)
    if guard is not None or loss is not None:
        _check_guard(guard, loss, optimizer, closure, skip_nonfinite, limit)
    step = _Step(optimizer, limit, skip_nonfinite, scaler, loss_scale, guard, loss, model, backend, extra_groups)
    if closure is None:
        if traits.needs_closure:
            raise ValueError(f"{type(optimizer).__name__} evaluates the loss several times in a step; pass closure=")
        return step.take(loss)
    expect("closure", closure, Callable, "a function")
    if traits.repeats_closure:
        if isinstance(limit, AdaptiveClip):
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss several times in a step, and an adaptive clip would "
                "count each evaluation as a step; pass a number as max_norm"
            )
        return step.take_repeating(closure)
    with torch.enable_grad():
        returned = closure()
    if guard is not None and returned is not None:
        step = step._replace(loss=checked_value("the closure's loss", returned))
    return step.take(returned)


def _loss_scale(scaler: GradScaler, optimizer: Optimizer, skips: bool, closure: object) -> Tensor | None:
    """The scale that the gradients carry, 0-d float32; None if they are already unscaled."""
    if not skips:
        raise ValueError("a loss scaler finds its scale by skipping steps; leave skip_nonfinite=True")
    if closure is not None:
        raise RuntimeError(
            "a closure cannot be combined with a loss scaler, as in torch; call scaler.scale(loss).backward() "
            "before the step"
        )
    loss_scale = _scaling.require_scale(scaler, "guarded_step")
    return None if _scaling.is_unscaled(scaler, optimizer) else loss_scale


def _check_guard(
    guard: object, loss: Any, optimizer: Optimizer, closure: object, skips: bool, clip: Limit | None
) -> None:
    """Raises as `guarded_step` if the guard and the loss for it do not go together with the other arguments."""
    if guard is None:
        raise ValueError("loss is used only with a guard; pass guard=gradstat.SpikeGuard() with it, or leave it out")
    if not isinstance(guard, SpikeGuard):
        raise TypeError(f"guard: expected a gradstat.SpikeGuard, got {type(guard).__name__}")
    if not skips:
        raise ValueError("a guard refuses steps by skipping them; leave skip_nonfinite=True")
    if loss is not None:
        checked_value("loss", loss)
        if closure is not None:
            raise ValueError("the closure already returns the loss; leave loss= out")
    if closure is not None and optimizers.traits_of(type(optimizer)).repeats_closure:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, and a guard would count each "
            "evaluation as a step; leave guard= out"
        )
    if guard.scales and isinstance(clip, TensorClip):
        raise ValueError(
            f"{type(clip).__name__} changes gradients before the guard decides how far to scale them down; make the "
            "guard without scale=, so that it skips"
        )


class _NotFiniteError(Exception):
    """A closure evaluation in the middle of a step produced a gradient that is not finite."""


class _Step(NamedTuple):
    """A guarded step: its arguments, checked, and how it is taken."""

    optimizer: Optimizer
    limit: Limit | None
    skips: bool
    scaler: GradScaler | None
    loss_scale: Tensor | None  # that the gradients carry
    guard: SpikeGuard | None
    loss: Tensor | None  # for the guard
    model: Module | None
    backend: str | None
    extra_groups: ExtraGroups | None

    def take(self, loss: Any) -> StepResult:
        """Steps with the gradients that are there; ``loss`` is for the result."""
        optimizer, named = self.optimizer, named_parameters_of(self.optimizer)
        honors, clip = optimizers.honors_found_inf(optimizer), self.limit
        rewrites = self.loss_scale is not None or (self.guard is not None and self.guard.scales)
        rewrites = rewrites or clip not in (None, math.inf)
        in_place = isinstance(clip, TensorClip) or (rewrites and not honors)
        try:
            with announce.change(named.parameters, self.scaler, loss):
                collected = gradients_of(named.parameters)
                gradients = collected.tensors
                record, counters = self._measured(named, collected, in_place)
                if counters is None:
                    counters = counters_on(optimizer, record.home)
                if honors:
                    self._require_fused_layout(named.parameters, collected, record, counters)
                if not record.is_counted:
                    self._judge(record, counters.tensor)
                if isinstance(clip, AdaptiveClip) and gradients:
                    # Clipped before the decision to skip, so that a clip sees the same steps with every optimizer.
                    rewrites = not record.limit_(clip, gradients, collected.owners(named.parameters))
                try:
                    stepped, returned = record.step_optimizer(optimizer, honors, gradients, rewrites, self.skips)
                except BaseException:
                    self._uncount(record, counters)
                    raise
        finally:
            announce.step_ended(optimizer)  # also if it was skipped
        if not stepped:
            # torch's schedulers warn if no optimizer step came before them; a skipped step counts as one.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        if self.scaler is not None:
            _scaling.record_step(self.scaler, optimizer, record.found_inf)
        counters.streams = record.streams if record.rows.tables else streams_of([counters.tensor])
        return StepResult(record, counters, self.skips, returned if loss is None else loss)

    def take_repeating(self, closure: Callable[[], Any]) -> StepResult:
        """Steps an optimizer that evaluates the closure itself, between changes to the parameters."""
        optimizer = self.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        values_before = [parameter.detach().clone() for parameter in parameters]
        state_before = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
        record = StepRecord.nothing()

        def checked_closure() -> Any:
            nonlocal record
            with torch.enable_grad():
                loss = closure()
            if loss is None and optimizers.traits_of(type(optimizer)).needs_closure:
                raise ValueError(f"{type(optimizer).__name__} needs the loss, but the closure returned None")
            named = named_parameters_of(optimizer)
            with announce.change(named.parameters, None, loss):
                gradients = gradients_of(named.parameters)
                in_place = self.limit not in (None, math.inf)
                record, _ = self._measured(named, gradients, in_place, counts=False)
                skip, divisor = record.on_host() if self.skips else (False, math.nan)
                if skip:
                    raise _NotFiniteError
                if in_place and divisor != 1.0 and gradients.tensors:
                    record.rewrite_(gradients.tensors)
            return loss

        loss = None
        try:
            with decision.taking(optimizer) if self.skips else contextlib.nullcontext():
                loss = optimizer.step(checked_closure)
        except _NotFiniteError:
            with torch.no_grad():
                for parameter, value in zip(parameters, values_before, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()
            optimizer.state.update(state_before)
        finally:
            announce.step_ended(optimizer)
        counters = counters_on(optimizer, record.home)
        norms.count_step(counters.tensor, record.skipped(self.skips))
        counters.streams = record.streams if record.rows.tables else streams_of([counters.tensor])
        return StepResult(record, counters, self.skips, loss)

    def _measured(
        self, named: NamedParameters, gradients: Gradients, in_place: bool, counts: bool = True
    ) -> tuple[StepRecord, StepCounters | None]:
        """The gradients of ``named``, measured. The verdict skips what a loss scaler or monitors have found, too.

        If ``counts``, also the counters, unless there are no gradients: the step is counted in them already if nothing
        else decides about it.
        """
        wish = decision.take(self.optimizer, self.guard) if self.skips else None
        if self.model is not None:
            named = named_by(self.model, named)
        if not gradients.tensors and not self._is_awaited(named):
            return StepRecord.nothing(), None
        if isinstance(self.limit, AdaptiveClip) and gradients.tensors:
            refuse(self.limit, to_clip(named, gradients))
        flags: list[Tensor] = []
        if self.scaler is not None and self.loss_scale is not None:
            _scaling.refuse_shared_gradients(self.scaler, self.optimizer, named)
        elif self.scaler is not None:  # the gradients were unscaled
            _scaling.refuse_added_gradients(self.scaler, self.optimizer, named, gradients)
            flags = _scaling.found_by(self.scaler, self.optimizer)
        if wish is not None and wish.guard is None:
            flags.append(wish.flag)
        counters = None
        if counts and gradients.tensors:
            counters = counters_on(self.optimizer, gradients.tensors[0].device)
        is_alone = self.skips and self.guard is None and wish is None and not flags
        counted_in = counters.tensor if counters is not None and is_alone else None
        limit = self.limit if isinstance(self.limit, float) else math.inf
        request = norms.StepRequest(limit, self.loss_scale, counted_in)
        try:
            record = StepRecord.of(named, gradients, request, self.backend, self.extra_groups, in_place=in_place)
        except Exception as error:
            if self.guard is not None:
                leave(self.guard, self.loss, error)
            raise
        if flags:
            skip = record.verdict[norms.SKIP]
            for flag in flags:
                skip.add_(to_device(flag, skip.device))
            skip.clamp_(max=1.0)
        if wish is not None and wish.guard is not None and wish.reason is not None:
            record.take_over(wish.flag, wish.reason)
        return record, counters

    def _require_fused_layout(
        self, parameters: list[Tensor], gradients: Gradients, record: StepRecord, counters: StepCounters
    ) -> None:
        try:
            infos, name_of = record.rows.infos, record.labels.of
            optimizers.require_fused_layout(self.optimizer, parameters, gradients, infos, name_of)
        except RuntimeError:
            if record.is_counted:
                self._uncount(record, counters)
            raise

    def _uncount(self, record: StepRecord, counters: StepCounters) -> None:
        """Takes back that a step, which raised, was counted as taken."""
        counters.steps.sub_((~record.skipped(self.skips)).to(torch.int64))

    def _is_awaited(self, named: NamedParameters) -> bool:
        """Whether other ranks may wait for this one, which has no gradients. RuntimeError if a scaler needs some."""
        if self.extra_groups is not None:
            return True
        if self.scaler is not None:
            raise RuntimeError(
                "none of the optimizer's parameters has a gradient; call scaler.scale(loss).backward() before the "
                "step, and zero_grad() after it"
            )
        return is_distributed(named.parameters)

    def _judge(self, record: StepRecord, counters: Tensor) -> None:
        """Lets the guard decide, if there is one that has not; counts the step."""
        if self.guard is not None and record.home is not None and record.before_guard is None:
            begin(self.guard, self.optimizer)
            record.judge(self.guard, self.loss, counters)
        else:
            norms.count_step(counters, record.skipped(self.skips))
