"""`guarded_step`: one pass over the gradients, then clips, steps or skips as decided on the device."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradstat._core import announce, norms
from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import streams_of
from gradstat._core.parameters import Gradients, NamedParameters, gradients_of, named_parameters_of
from gradstat._core.tensors import ExtraGroups, is_distributed, to_device
from gradstat._step import decision, optimizers
from gradstat._step import loss_scale as _scaling
from gradstat._step.loss_scale import inner_scaler
from gradstat._step.record import StepRecord, to_clip
from gradstat.adaptive import AdaptiveClip, TensorClip
from gradstat.adaptive._base import Limit, checked_limit, refuse
from gradstat.check import PendingReport
from gradstat.counters import StepCounters, counters_on
from gradstat.guard import SpikeGuard, checked_value, last_guards, leave


class StepResult:
    """The result of `guarded_step`. Its tensors are on the device. Reading them on the host waits for the device.

    For use on another stream than the step's, the rules of `gradstat.stats` apply.

    Attributes:
        total_norm: L2 norm of all gradients before clipping and without their loss scale: 0-d, on the first
            gradient's device, of the gradients' promoted real dtype.
        counters: This optimizer's `StepCounters`.
    """

    def __init__(self, record: StepRecord, counters: StepCounters) -> None:
        self._record, self.counters = record, counters

    @property
    def total_norm(self) -> Tensor:
        return self._record.norm

    @property
    def skipped(self) -> Tensor:
        """Whether the step was skipped, 0-d bool on the device."""
        return self._record.skipped

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

    def __repr__(self) -> str:
        return f"StepResult(total_norm={self.total_norm}, skipped={self.skipped})"


@never_traced  # like the steps of torch's optimizers, which break the graph, too
def guarded_step(
    optimizer: Optimizer,
    max_norm: float | AdaptiveClip | None = None,
    scaler: GradScaler | None = None,
    *,
    loss: Tensor | None = None,
    guard: SpikeGuard | None = None,
    backend: str | None = None,
    extra_groups: ExtraGroups | None = None,
) -> StepResult:
    """Steps ``optimizer`` with clipped gradients, or leaves everything unchanged if a gradient is not finite.

    Replaces ``scaler.unscale_``, ``clip_grad_norm_`` and ``optimizer.step`` (or ``scaler.step``). One pass measures the
    gradients. A fused Adam, AdamW, Adagrad or SGD then clips, unscales or skips by itself, using numbers that never
    leave the device: no host sync, and no pass over the gradients besides the optimizer's own. For any other optimizer,
    gradients are clipped and unscaled in place, only if necessary, and one host sync decides whether ``step`` is called
    at all. A skipped step changes no parameter, no state and no step count; stepping schedulers is left to the caller.

    Args:
        optimizer: Any optimizer with gradients from ``backward()``, except LBFGS, which needs a closure. The report has
            parameter names if it was made from ``named_parameters()``, else groups and positions.
        max_norm: Upper limit, above 0, of the L2 norm of all its gradients together, as for `clip_grad_norm_`; None or
            infinity only measures. Or an adaptive clip: `gradstat.AutoClip`, `ZClip` and `FixedClip` are handled like
            a number, `AdaGC` and `AGC` always write the gradients, whatever the optimizer.
        scaler: The loss scaler whose scale the gradients carry, or carried before ``scaler.unscale_(optimizer)``.
            Calling ``scaler.update()`` is left to the caller.
        loss: The loss of the step, a single number, for the guard: the mean if gradients were accumulated, without
            the loss scale.
        guard: Refuses the step if ``loss`` or the norm before clipping is an outlier. An adaptive clip does not see
            refused steps, and a loss scaler counts them as good ones.
        backend, extra_groups: As for `check`.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, ``max_norm`` none of the above, ``loss`` not a tensor, or
            a gradient has no norm.
        ValueError: ``max_norm`` is not above 0; a gradient cannot be measured; ``loss`` is not one number, or there is
            no guard; a guard that scales is combined with `AdaGC` or `AGC`; the optimizer is LBFGS; a gradient that is
            to be unscaled in place is float16.
        RuntimeError: Other code has set ``grad_scale`` or ``found_inf`` on the optimizer; it has stepped since the
            last ``scaler.update()``; none of its parameters has a gradient although there is a scaler; a gradient
            was added after ``scaler.unscale_`` or unscaled with another optimizer's (by `gradstat.amp.GradScaler`
            or another guarded step); during CUDA graph capture, it is this optimizer's first guarded step, or skipping
            would need the host; a gradient is laid out in memory unlike its parameter, which torch's fused optimizers
            do not notice.
        NotImplementedError: A gradient is a distributed tensor, and ``max_norm`` is `AdaGC` or `AGC`; or a gradient is
            sparse, and ``max_norm`` is `AGC`.
    """
    optimizers.require_steppable(optimizer)
    if optimizers.traits_of(type(optimizer)).needs_closure:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, each of which would have to be "
            "guarded; call optimizer.step(closure) instead"
        )
    limit = checked_limit(max_norm)
    loss_scale = None
    if scaler is not None and not inner_scaler(scaler).is_enabled():
        scaler = None
    if scaler is not None:
        scale = _scaling.require_scale(scaler, "guarded_step")
        loss_scale = None if _scaling.is_unscaled(scaler, optimizer) else scale
    if guard is not None or loss is not None:
        _check_guard(guard, loss, limit)
    return _Step(optimizer, limit, scaler, loss_scale, guard, loss, backend, extra_groups).take()


def _check_guard(guard: object, loss: object, clip: Limit | None) -> None:
    """Raises as `guarded_step` if the guard and the loss for it do not go together with the other arguments."""
    if guard is None:
        raise ValueError("loss is used only with a guard; pass guard=gradstat.SpikeGuard() with it, or leave it out")
    if not isinstance(guard, SpikeGuard):
        raise TypeError(f"guard: expected a gradstat.SpikeGuard, got {type(guard).__name__}")
    if loss is not None:
        checked_value("loss", loss)
    if guard.scales and isinstance(clip, TensorClip):
        raise ValueError(
            f"{type(clip).__name__} changes gradients before the guard decides how far to scale them down; make the "
            "guard without scale=, so that it skips"
        )


class _Step(NamedTuple):
    """A guarded step: its arguments, checked, and how it is taken."""

    optimizer: Optimizer
    limit: Limit | None
    scaler: GradScaler | None
    loss_scale: Tensor | None  # that the gradients carry
    guard: SpikeGuard | None
    loss: Tensor | None  # for the guard
    backend: str | None
    extra_groups: ExtraGroups | None

    def take(self) -> StepResult:
        """Steps with the gradients that are there."""
        optimizer, named = self.optimizer, named_parameters_of(self.optimizer)
        honors, clip = optimizers.honors_found_inf(optimizer), self.limit
        rewrites = self.loss_scale is not None or (self.guard is not None and self.guard.scales)
        rewrites = rewrites or clip not in (None, math.inf)
        in_place = isinstance(clip, TensorClip) or (rewrites and not honors)
        try:
            with announce.change(named.parameters, self.scaler, self.loss):
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
                    stepped = record.step_optimizer(optimizer, honors, gradients, rewrites)
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
        return StepResult(record, counters)

    def _measured(
        self, named: NamedParameters, gradients: Gradients, in_place: bool
    ) -> tuple[StepRecord, StepCounters | None]:
        """The gradients of ``named``, measured. The verdict skips what a loss scaler or monitors have found, too.

        Also the counters, unless there are no gradients: the step is counted in them already if nothing else decides
        about it.
        """
        wish = decision.take(self.optimizer, self.guard)
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
        if gradients.tensors:
            counters = counters_on(self.optimizer, gradients.tensors[0].device)
        is_alone = self.guard is None and wish is None and not flags
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
        counters.steps.sub_((~record.skipped).to(torch.int64))

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
            last_guards[self.optimizer] = self.guard
            record.judge(self.guard, self.loss, counters)
        else:
            norms.count_step(counters, record.skipped)
