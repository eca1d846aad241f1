"""A loss scaler that knows what it found: torch's, with statistics from the pass that unscales."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer

from gradstat._arrival import Mirror
from gradstat._plan import gradients_of, source_of
from gradstat.check import PendingReport


@dataclass(frozen=True, slots=True)
class ScalerStatus:
    """How a loss scaler is doing.

    Attributes:
        scale: The loss scale.
        steps: Updates so far.
        skipped: Those in which a step was skipped.
        consecutive_skipped: Those skipped since the last that was not.
        verdict: ``"ok"``, ``"collapsing"`` or ``"running away"``.
    """

    scale: float
    steps: int
    skipped: int
    consecutive_skipped: int
    verdict: str

    def __str__(self) -> str:
        share = f" ({self.skipped / self.steps:.1%})" if self.steps else ""
        text = f"loss scale {self.scale:g}: {self.steps:,} steps, {self.skipped:,} skipped{share}, {self.verdict}"
        if self.verdict == "collapsing":
            text += (
                f"; {self.consecutive_skipped} skipped in a row. No scale is small enough: look at scaler.report() for "
                "NaN, which lowering the scale does not cure; else lower the learning rate or train in bfloat16"
            )
        elif self.verdict == "running away":
            text += (
                "; nothing has overflowed on the way here. Either nothing is computed in float16 and no loss scale is "
                "needed, or the loss does not depend on the parameters"
            )
        return text


class GradScaler(TorchGradScaler):
    """In place of ``torch.amp.GradScaler``: the same scale, growth, backoff and skips, and nothing in the dark.

    Arguments and state are torch's, so checkpoints go either way. What is different:

    - ``unscale_`` computes every gradient's statistics in the pass that unscales; ``report(optimizer)`` has them,
      in unscaled units, and tells an overflow, which is how loss scaling works, from NaN, which is not.
    - ``step`` of a fused optimizer without ``unscale_`` reads the gradients once and writes nothing: torch's
      checks by reading and writing them all.
    - ``unscale_and_clip_`` needs no further pass for the norm.
    - ``status()`` shows a scale that collapses or runs away.
    - A gradient that came after ``unscale_``, or lost its scale twice because two optimizers share it, raises
      instead of making a wrong step; and no attribute stays on an optimizer whose step failed.

    Attributes:
        collapse_after: Skips in a row from which `status` says ``"collapsing"``. Finding a first scale takes a few.
        runaway_above: Scale above which `status` says ``"running away"``. float16 ends at 2**16, so at 2**32 no
            gradient of a growth interval has exceeded 2**-16: most likely nothing is computed in float16.
    """

    collapse_after = 5
    runaway_above = 2.0**32

    _counters: Tensor | None = None
    _status: Mirror | None = None
    _reports: weakref.WeakKeyDictionary[Optimizer, Callable[[], PendingReport]] | None = None

    def report(self, optimizer: Optimizer) -> PendingReport:
        """The report about ``optimizer``'s gradients as `unscale_` or `step` last met them.

        Its numbers start on their way to the host now. A step by `gradstat.guarded_step` has its own report.

        Raises:
            KeyError: Neither has been called for it.
        """
        try:
            make = (self._reports or {})[optimizer]  # type: ignore[index]
        except KeyError:
            raise KeyError("neither unscale_() nor step() has been called for this optimizer yet") from None
        return make()

    def unscale_and_clip_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """`unscale_`, then what `gradstat.clip_grad_norm_` does, with the norm from the same pass.

        No host sync. If a gradient is not finite none is clipped, so that `report` and the gradients still
        show which; `step` skips.

        Args:
            optimizer: As for ``unscale_``.
            max_norm: Upper limit of the L2 norm of all its gradients together; infinity only measures.

        Returns:
            The norm before clipping, without the loss scale: 0-d, on the first gradient's device, of the gradients'
            promoted dtype. Zero, float32, on the CPU when there are no gradients.

        Raises:
            ValueError: ``max_norm`` is NaN. Besides as ``unscale_``.
        """
        limit = float(max_norm)
        if limit != limit:
            raise ValueError("max_norm is NaN, which would turn every gradient into NaN; pass a number or inf")
        gradients = gradients_of(source_of(optimizer).parameters).tensors
        self.unscale_(optimizer)
        if not gradients:
            return torch.tensor(0.0)
        if not self._enabled:
            from gradstat.clip import clip_grad_norm_

            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            return clip_grad_norm_(parameters, limit)
        return self._unscaled.clip_(gradients, limit)
