"""torch's loss scaler, with gradient statistics computed in the pass that unscales."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer

from gradstat._core import announce, norms
from gradstat._core.host_copy import streams_of
from gradstat._core.parameters import gradients_of, labels_of, named_parameters_of
from gradstat._core.tensors import ExtraGroups, to_device
from gradstat._step import loss_scale, optimizers
from gradstat._step.record import StepRecord, Unscaled, refuse_float16, to_clip
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import checked_limit, refuse
from gradstat.check import PendingReport
from gradstat.clip import clip_grad_norm_
from gradstat.counters import StepCounters

__all__ = ["GradScaler", "ScalerStatus"]


@dataclass(frozen=True, slots=True)
class ScalerStatus:
    """The state of a loss scaler.

    Attributes:
        scale: The loss scale.
        steps, skipped, consecutive_skipped: Updates so far, counted as `StepCounts` counts steps.
        trend: ``"ok"``, ``"collapsing"`` or ``"running away"``.
    """

    scale: float
    steps: int
    skipped: int
    consecutive_skipped: int
    trend: str

    def __str__(self) -> str:
        share = f" ({self.skipped / self.steps:.1%})" if self.steps else ""
        text = f"loss scale {self.scale:g}: {self.steps:,} steps, {self.skipped:,} skipped{share}, {self.trend}"
        if self.trend == "collapsing":
            text += (
                f"; {self.consecutive_skipped} skipped in a row. Lowering the scale does not help: look for NaN in "
                "scaler.report(optimizer); if there is none, lower the learning rate or train in bfloat16"
            )
        elif self.trend == "running away":
            text += (
                "; no gradient overflowed while it grew. Either nothing is computed in float16 and no loss scale is "
                "needed, or the loss does not depend on the parameters"
            )
        return text


class GradScaler(TorchGradScaler):
    """A drop-in for ``torch.amp.GradScaler``: same scale, growth, backoff and skips, plus gradient statistics.

    Arguments (``device``, ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``enabled``) and
    state are torch's, so checkpoints are interchangeable. Differences:

    - ``unscale_`` computes every gradient's statistics in the pass that unscales. ``report(optimizer)`` returns them in
      unscaled units, and distinguishes an overflow, which is part of loss scaling, from NaN, which is not.
    - ``step`` of a fused optimizer without ``unscale_`` takes one pass over the gradients and does not write them.
    - ``unscale_and_clip_`` needs no further pass for the norm. ``read()`` shows a scale that collapses or runs away.
    - A gradient that was added after ``unscale_``, or unscaled twice because two optimizers share it, raises an error
      instead of causing a wrong step.

    Attributes:
        collapse_after: Consecutive skips from which `read` says ``"collapsing"``. Finding a first scale needs a few.
        runaway_above: Scale above which `read` says ``"running away"``. float16 overflows at 2**16. A scale of 2**32
            means that no gradient of a growth interval exceeded 2**-16, so probably nothing is computed in float16.
        extra_groups: As for `gradstat.check`. All ranks of these process groups then skip if one of them overflows.
            The optimizer of every rank must have a gradient.
    """

    collapse_after = 5
    runaway_above: float = 2.0**32

    extra_groups: ExtraGroups | None = None

    _counters: StepCounters | None = None
    _reports: weakref.WeakKeyDictionary[Optimizer, Callable[[], PendingReport]] | None = None

    def report(self, optimizer: Optimizer) -> PendingReport:
        """The pending report on ``optimizer``'s gradients as ``unscale_`` or `step` last measured them.

        KeyError if neither was called for this optimizer. A step by `gradstat.guarded_step` has its own report.
        """
        try:
            make = (self._reports or {})[optimizer]  # type: ignore[index]
        except KeyError:
            raise KeyError("neither unscale_() nor step() has been called for this optimizer yet") from None
        return make()

    def unscale_and_clip_(self, optimizer: Optimizer, max_norm: float | AdaptiveClip | None) -> Tensor:
        """``unscale_`` followed by `gradstat.clip_grad_norm_`, with the norm from the same pass.

        There is no host sync. If a gradient is not finite, no gradient is clipped and `step` skips. `gradstat.AdaGC`
        and `gradstat.AGC` still clip the tensors and units that are finite. ``optimizer`` is as for ``unscale_``, and
        ``max_norm`` as for `gradstat.guarded_step`. Nothing has been changed when one of the errors below, or one of
        ``unscale_``, is raised.

        Returns:
            The norm before clipping, without the loss scale, as from `gradstat.clip_grad_norm_`.

        Raises:
            TypeError: ``max_norm`` is neither a number, nor a clip, nor None.
            ValueError: ``max_norm`` is not above 0, or a `gradstat.AdaGC` that was used for another list of parameters.
            NotImplementedError: A gradient is a distributed tensor, and the clip is `gradstat.AdaGC` or `gradstat.AGC`;
                or it is sparse, and the clip is `gradstat.AGC`.
        """
        checked = checked_limit(max_norm)
        limit = math.inf if checked is None else checked
        named = named_parameters_of(optimizer)
        if not self._enabled:
            if isinstance(limit, AdaptiveClip):
                return limit.clip_(named.parameters)
            return clip_grad_norm_(named.parameters, limit)
        collected = gradients_of(named.parameters)
        given = to_clip(named, collected)
        if isinstance(limit, AdaptiveClip) and given.tensors:
            refuse(limit, given)
        with announce.change(named.parameters, self):
            self.unscale_(optimizer)
            unscaled: Unscaled | None = loss_scale.state_of(self, optimizer).get("unscaled")
            if unscaled is None:
                return torch.tensor(0.0, device="cpu")
            return unscaled.clip_(given, limit)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps ``optimizer`` with unscaled gradients, or not at all if one is not finite.

        Like torch's ``step``, it unscales if ``unscale_`` has not been called. A fused optimizer unscales by itself,
        without a host sync. Any other optimizer needs one sync. Further arguments go to the optimizer's step.

        Returns:
            What the optimizer's step returns; None if it was skipped on the host.

        Raises:
            RuntimeError: There is a closure; ``step`` was called twice without ``update``; a gradient was added after
                ``unscale_``, or unscaled with another optimizer's. Nothing has been changed in these cases.
            AssertionError: None of its parameters had a gradient when it was unscaled.
        """
        if not self._enabled or optimizers.traits_of(type(optimizer)).accepts_scaler:
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale = loss_scale.require_scale(self, "step")
        is_unscaled = loss_scale.is_unscaled(self, optimizer)
        named = named_parameters_of(optimizer)
        gradients = gradients_of(named.parameters)
        honors = optimizers.honors_found_inf(optimizer)
        if not is_unscaled and not honors:
            self.unscale_(optimizer)
        elif is_unscaled:
            loss_scale.refuse_added_gradients(self, optimizer, named, gradients)
        divisor: Tensor | None = getattr(optimizer, "grad_scale", None)  # set by the program; torch applies it as well
        if is_unscaled or not honors:
            flags = loss_scale.found_by(self, optimizer)
            if not flags:
                raise AssertionError("No inf checks were recorded for this optimizer.")
            found_inf = flags[0] if len(flags) == 1 else self._any_flag(flags)
        else:
            loss_scale.refuse_shared_gradients(self, optimizer, named)
            if not gradients.tensors:  # as in torch, the step changes nothing and finds nothing
                loss_scale.record_step(self, optimizer, None)
                nothing: float | None = optimizer.step(*args, **kwargs)
                return nothing
            step = norms.StepRequest(math.inf, scale, None)
            record = StepRecord.of(named, gradients, step, extra_groups=self.extra_groups)
            self._keep(optimizer, record.report)
            found_inf, own_divisor, _ = record.verdict.unbind()
            divisor = own_divisor if divisor is None else own_divisor * divisor
        returned: float | None = None
        decides_itself = honors and not optimizers.first_momentum_is_at_risk(optimizer)
        if decides_itself or not found_inf.item():
            with optimizers.with_verdict(optimizer, found_inf, divisor) if honors else contextlib.nullcontext():
                returned = optimizer.step(*args, **kwargs)
        loss_scale.record_step(self, optimizer, found_inf)
        return returned

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Sets the scale for the next step, like torch's, and counts the step for `read`. No host sync.

        ``new_scale`` and errors are those of torch. In addition, a first update during CUDA graph capture raises
        RuntimeError.
        """
        if self._enabled and new_scale is None:
            found = [state["found_inf_per_device"] for state in self._per_optimizer_states.values()]
            flags = [flag for by_device in found for flag in by_device.values()]
            if flags:
                skipped = self._any_flag(flags)
                counters = StepCounters.on(skipped.device, self._counters, "the step counters of a loss scaler")
                norms.count_step(counters.tensor, skipped)
                counters.streams = streams_of([counters.tensor])
                self._counters = counters
        super().update(new_scale)

    def read(self, wait: bool = False) -> ScalerStatus:
        """The state of the scale, from the newest numbers that have arrived.

        With ``wait`` it returns the current numbers. Without ``wait`` only the first call waits for a GPU, and later
        calls may return numbers that are a few calls old.
        """
        if not self._enabled or self._scale is None or self._counters is None:
            return ScalerStatus(self.get_scale(), 0, 0, 0, "ok")
        of_device, counters = self._scale, self._counters

        def numbers() -> Tensor:
            counts = counters.tensor.to(torch.float64)
            return torch.cat([of_device.to(counts).reshape(1), counts])

        scale, steps, skipped, in_a_row = counters.newest(wait, numbers).tolist()
        is_rising = scale > self.runaway_above
        trend = "collapsing" if in_a_row >= self.collapse_after else "running away" if is_rising else "ok"
        return ScalerStatus(scale, int(steps), int(skipped), int(in_a_row), trend)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """The part of torch's ``unscale_`` that unscales gradients and looks for NaN and Inf."""
        named = named_parameters_of(optimizer)
        if allow_fp16:
            for parameter in named.parameters:
                gradient = parameter.grad
                # As in torch: sums of duplicate entries may overflow while they carry the scale.
                if gradient is not None and gradient.is_sparse and gradient.dtype is torch.float16:
                    parameter.grad = gradient.coalesce()
        gradients = gradients_of(named.parameters)
        if not gradients.tensors:
            return {}
        labels = labels_of(named, gradients)
        if not allow_fp16:
            refuse_float16(gradients.tensors, labels.of)
        loss_scale.refuse_shared_gradients(self, optimizer, named)
        unscaled = Unscaled.of_(gradients.tensors, labels, inv_scale, named, self.extra_groups)
        loss_scale.record_unscaling(self, optimizer, gradients.positions, unscaled)
        self._keep(optimizer, unscaled.report)
        return unscaled.found_inf()

    def _keep(self, optimizer: Optimizer, report: Callable[[], PendingReport]) -> None:
        if self._reports is None:
            self._reports = weakref.WeakKeyDictionary()
        self._reports[optimizer] = report

    def _any_flag(self, flags: list[Tensor]) -> Tensor:
        """1 if any flag is above 0, else 0. Not the sum of the flags: optimizers step at 2."""
        device = flags[0].device
        return torch.stack([to_device(flag, device) for flag in flags]).amax().clamp(max=1.0)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_reports": None, "_counters": None}
