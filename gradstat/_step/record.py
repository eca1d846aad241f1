"""What is measured and decided about a step of an optimizer, in one record; and gradients that a scaler unscaled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradstat import guard as guards
from gradstat._core import norms
from gradstat._core.host_copy import HostRows, Streams, on_streams, streams_of
from gradstat._core.measure import Spread, measure_step, resolve_for
from gradstat._core.measurement import Measurement
from gradstat._core.multiply import scale_, unscale_
from gradstat._core.norms import DIVISOR, LOSS_SCALE, MULTIPLIER, NORM, REASON, SKIP, Decision, StepRequest
from gradstat._core.parameters import Gradients, Labels, NamedParameters, gradients_of, labels_of, named_parameters_of
from gradstat._core.tensors import ExtraGroups, NameOf, to_device
from gradstat._step import optimizers
from gradstat.adaptive import AdaptiveClip, NormClip, TensorClip
from gradstat.adaptive._base import Limit, ToClip, decide, refuse
from gradstat.check import PendingReport, report_of
from gradstat.clip import clip_grad_norm_
from gradstat.report import Report


@dataclass(slots=True)
class StepRecord:
    """What is known about a step from its measurement on; a guard and a clip change it. Keeps no gradient alive.

    All tensors are on the first gradient's device.
    """

    rows: Measurement  # with the loss scale, if ``is_scaled``
    labels: Labels
    norm: Tensor  # this and the next two begin as in `gradstat._core.norms.Decision`
    scaling: Tensor
    verdict: Tensor
    is_scaled: bool = False
    backend: str | None = None
    streams: Streams = ()
    is_counted: bool = False  # by the launch that measured
    before_guard: Tensor | None = None  # the verdict before a guard changed it, if there is a guard

    @classmethod
    def nothing(cls) -> StepRecord:
        """No gradients: the norm is 0 and nothing needs to be skipped."""
        zero = torch.zeros((), device="cpu")
        return cls(Measurement([], None, ()), Labels(tuple, tuple), *Decision.unclipped(zero, zero))

    @classmethod
    def of(
        cls,
        named: NamedParameters,
        gradients: Gradients,
        step: StepRequest,
        backend: str | None = None,
        extra_groups: ExtraGroups | None = None,
        *,
        in_place: bool = False,
    ) -> StepRecord:
        """Reads the gradients of ``named`` once; can count the step. No host sync; all ranks decide alike.

        With ``in_place``, raises beforehand if the gradients cannot be scaled in place, or cannot be unscaled there.
        """
        tensors, labels, is_scaled = gradients.tensors, labels_of(named, gradients), step.loss_scale is not None
        if step.loss_scale is not None:
            home = tensors[0].device if tensors else torch.device("cpu")
            step = step._replace(loss_scale=to_device(step.loss_scale, home))
            if in_place:
                refuse_float16(tensors, labels.of)
        spread = Spread(named.parameters, named.names, extra_groups)
        rows, decided = measure_step(tensors, labels.of, backend, step, spread, in_place=in_place)
        streams = streams_of([decided.verdict, *rows.tables])
        return cls(rows, labels, *decided, is_scaled, backend, streams, step.counters is not None)

    @property
    def home(self) -> torch.device | None:
        """The device of the decision; None if no rank has gradients."""
        return None if not self.rows.tables and self.rows.total is None else self.verdict.device

    @property
    def found_inf(self) -> Tensor:
        """Whether something is not finite, 0-d float32, for a loss scaler."""
        return (self.verdict if self.before_guard is None else self.before_guard)[SKIP]

    def skipped(self, skips: bool) -> Tensor:
        """Whether the step is skipped, 0-d bool; False unless steps may be skipped at all."""
        skip = self.verdict[SKIP] != 0
        return skip if skips else torch.zeros_like(skip)

    def judge(self, guard: guards.SpikeGuard, loss: Tensor | None, counters: Tensor | None) -> None:
        """Lets a guard change the verdict and count the step. One that scales down changes the multiplier."""
        kernels = resolve_for(self.backend, self.verdict.device.type, self.labels.of, 0)
        self.before_guard = self.verdict
        self.verdict = guards.decide(guard, kernels, self.scaling, self.verdict, loss, counters, self.streams)

    def take_over(self, skip: Tensor, reason: Tensor) -> None:
        """Takes over what a guard has decided before, for a monitor, about these gradients."""
        self.before_guard, device = self.verdict, self.verdict.device
        self.verdict = torch.cat([self.verdict, to_device(reason, device).to(torch.float32).view(1)])
        self.verdict[SKIP] = torch.maximum(self.verdict[SKIP], to_device(skip, device))

    def limit_(self, clip: AdaptiveClip, gradients: list[Tensor], parameters: list[Tensor]) -> bool:
        """Applies the decision of a clip; returns whether it wrote the gradients, which are then unscaled as well.

        ``parameters`` are those that have the ``gradients``.
        """
        if isinstance(clip, TensorClip):
            unscale_by = self.verdict[LOSS_SCALE].reciprocal() if self.is_scaled else None
            skip = None if self.before_guard is None else self.verdict[SKIP]
            given = ToClip(gradients, parameters, self.labels.of, self.backend)
            clip.scale_(given, self.rows.table, unscale_by, skip)
            torch.autograd.graph.increment_version(gradients)
            return True
        norm = self.scaling[NORM]
        kernels = resolve_for(self.backend, norm.device.type, self.labels.of, 0)
        multiplier = decide(clip, kernels, norm, skip=self.verdict[SKIP])[0]
        self.scaling[MULTIPLIER].mul_(multiplier)
        self.verdict[DIVISOR].div_(multiplier)
        return False

    def step_optimizer(
        self, optimizer: Optimizer, honors: bool, gradients: list[Tensor], rewrites: bool, skips: bool
    ) -> tuple[bool, Any]:
        """Steps ``optimizer`` unless the host skips it; returns whether it was called, and its result.

        ``honors`` says whether it obeys a verdict on the device, ``rewrites`` whether the gradients may have to be
        clipped or unscaled, ``skips`` whether a step may be skipped at all: then optimizers that do not obey a verdict
        cost one host sync.
        """
        if skips and (not honors or optimizers.first_momentum_is_at_risk(optimizer)):
            skip, divisor = self.on_host()
            if skip:
                return False, None
            rewrites = rewrites and divisor != 1.0
        if honors:
            found_inf, by, *_ = self.verdict.unbind()
            # Given a divisor, an optimizer writes the gradients back even if the divisor is 1.
            rewrites = rewrites and not self.is_known_noop
            with optimizers.with_verdict(optimizer, found_inf if skips else None, by if rewrites else None):
                return True, optimizer.step()
        if rewrites and gradients:
            self.rewrite_(gradients)
        return True, optimizer.step()

    def report(self) -> PendingReport:
        """The pending report on the gradients, without their loss scale; starts the copy to the host."""
        labels, is_scaled = self.labels, self.is_scaled

        def make(rows: HostRows, verdict: Any) -> Report:
            scale = float(verdict[LOSS_SCALE]) if is_scaled else None
            refused = guards.reasons_of(int(verdict[REASON])) if len(verdict) > REASON else ()
            return report_of(labels, scale, rows, refused)

        with on_streams(self.streams):
            return PendingReport(self.rows, make, self.verdict)

    def rewrite_(self, gradients: list[Tensor]) -> None:
        """Clips and unscales the measured gradients in place, unless the multiplier is 1."""
        scale_(gradients, self.scaling, self.labels.of, self.backend)
        torch.autograd.graph.increment_version(gradients)

    @property
    def is_known_noop(self) -> bool:
        """Whether clipping and unscaling change nothing; False where finding out would wait for a device."""
        return self.verdict.is_cpu and self.verdict.tolist()[DIVISOR] == 1.0

    def on_host(self) -> tuple[bool, float]:
        """Whether to skip the step, and the divisor of the gradients: one host sync, refused during graph capture."""
        if self.verdict.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "whether this optimizer steps is decided on the host, which cannot be captured into a CUDA graph; use "
                "a fused Adam, AdamW, Adagrad or SGD (fused=True, capturable=True), or skip_nonfinite=False"
            )
        skip, divisor = self.verdict.tolist()[:2]
        return skip != 0.0, divisor


class Unscaled(NamedTuple):
    """The measurement of gradients from the pass that unscaled them. Keeps no gradient alive."""

    rows: Measurement  # without the scale
    labels: Labels
    multiplier: Tensor  # that the gradients were multiplied by, 0-d float32
    streams: Streams = ()

    @classmethod
    def of_(
        cls, gradients: list[Tensor], labels: Labels, factor: Tensor, named: NamedParameters, extra: ExtraGroups | None
    ) -> Unscaled:
        """Unscales the gradients, at least one, in place. No host sync. Raises beforehand, as `clip_grad_norm_`."""
        multiplier = to_device(factor, gradients[0].device).reshape(())  # torch takes one element of any shape
        rows = unscale_(gradients, multiplier, labels.of, Spread(named.parameters, named.names, extra))
        torch.autograd.graph.increment_version(gradients)
        return cls(rows, labels, multiplier, streams_of([multiplier, *rows.tables]))

    def found_inf(self) -> dict[torch.device, Tensor]:
        """Whether something is not finite, per device: 0-d float32, 1 or 0."""
        tables = self.rows.tables if self.rows.total is None else [self.rows.summands()]
        return {table.device: norms.any_nonfinite(table).to(torch.float32) for table in tables}

    def clip_(self, given: ToClip, max_norm: Limit) -> Tensor:
        """Clips gradients, unless one is not finite: `AdaGC` and `AGC` then clip only finite tensors or units.

        Returns their norm before, 0-d, in their promoted dtype.
        """
        with torch.no_grad():
            total = norms.total_norm(self.rows.summands(), 2.0)
            if isinstance(max_norm, TensorClip):
                max_norm.scale_(given, self.rows.table)
            else:
                if isinstance(max_norm, NormClip):
                    multiplier = max_norm.multiplier(total)
                else:
                    assert not isinstance(max_norm, AdaptiveClip)
                    multiplier = norms.clip_multiplier(total, float(max_norm))
                    multiplier = torch.where(total.isfinite(), multiplier, 1.0)
                scale_(given.tensors, multiplier, given.name_of, None)
            torch.autograd.graph.increment_version(given.tensors)
            return total.to(norms.norm_dtype(given.tensors))

    def report(self) -> PendingReport:
        """The pending report; starts the copy to the host."""
        labels = self.labels

        def make(rows: HostRows, multiplier: Any) -> Report:
            scale, total = 1.0 / float(multiplier) if multiplier else math.inf, rows.total()
            return Report(labels.names, rows.table(), rows.infos, labels.missing_names, loss_scale=scale, total=total)

        with on_streams(self.streams):
            return PendingReport(self.rows, make, self.multiplier)


def clip_before_step(optimizer: Optimizer, limit: Limit) -> None:
    """Clips the gradients of ``optimizer``, whose step begins, to ``limit``. No host sync; raises before it clips.

    A loss scaler leaves the division by its scale to the step of a fused optimizer. Then the clip becomes part of that
    division, and gradients are only read. A `TensorClip` rewrites gradients, and unscales them in the same pass.
    """
    named = named_parameters_of(optimizer)
    loss_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if loss_scale is None:
        if isinstance(limit, AdaptiveClip):
            limit.clip_(named.parameters)
        elif limit != math.inf:
            clip_grad_norm_(named.parameters, limit)
        return
    gradients = gradients_of(named.parameters)
    if not gradients.tensors or limit == math.inf:
        return
    given = to_clip(named, gradients)
    clip, max_norm = (limit, math.inf) if isinstance(limit, AdaptiveClip) else (None, limit)
    if clip is not None:
        refuse(clip, given)
    step = StepRequest(max_norm, loss_scale, None)
    with torch.no_grad():
        record = StepRecord.of(named, gradients, step, in_place=isinstance(clip, TensorClip))
        infos = record.rows.infos
        optimizers.require_fused_layout(optimizer, named.parameters, gradients, infos, given.name_of)
        is_unscaled = clip is not None and record.limit_(clip, given.tensors, given.parameters)
        divisor = torch.ones_like(loss_scale) if is_unscaled else record.verdict[DIVISOR]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]


def to_clip(named: NamedParameters, gradients: Gradients) -> ToClip:
    """The gradients of ``named`` for a clip."""
    return ToClip(gradients.tensors, gradients.owners(named.parameters), labels_of(named, gradients).of)


def refuse_float16(gradients: Sequence[Tensor], name_of: NameOf) -> None:
    """Raises ValueError, by name, for a float16 gradient, as torch's ``unscale_`` does."""
    for i, gradient in enumerate(gradients):
        if gradient.dtype is torch.float16:
            raise ValueError(
                f"Attempting to unscale FP16 gradients. {name_of(i)!r} is float16, in which unscaled values "
                "underflow; keep the parameters in float32 and run the forward pass under autocast, or use "
                "a fused optimizer"
            )
