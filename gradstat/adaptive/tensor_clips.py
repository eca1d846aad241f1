"""Clips tensor by tensor, by the running norm of each, or unit by unit, by the norm of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradstat._core.measure import kernels_for, resolve_for
from gradstat._core.measurement import Measurement
from gradstat._core.multiply import scale_
from gradstat._core.tensors import by_device, readable, to_device, writable
from gradstat.adaptive import _history
from gradstat.adaptive._base import DEFAULT_WINDOW, Step, TensorClip, ToClip, decide, limited, number, whole_number


class AdaGC(TensorClip):
    """Clips each tensor by the running mean of its own norm.

    G. Wang et al., AdaGC: Improving Training Stability for Large Language Model Pretraining, 2025, arXiv 2502.11034.
    With n_i the norm of tensor i and c_i the running mean of its norms after clipping, the multiplier is
    ``h_i = min(1, relative * c_i / n_i)``, and then ``c_i' = beta c_i + (1 - beta) h_i n_i``. In the first ``warmup``
    steps all tensors are clipped together, by ``h = min(1, absolute / norm)`` of the total norm, and c_i becomes the
    smallest ``h n_i``.

    Two details are added. If a tensor had no norm during warm-up, its first norm is not clipped and starts its mean. A
    norm of exactly zero is ignored: with the paper's minimum it would hold such a tensor at zero forever, for example
    parameters that are idle, or that start behind a zero-initialised weight.

    The means are kept by position among the parameters that have a gradient. These must be the same on every step.
    ``zero_grad(set_to_none=False)`` gives idle parameters a gradient of zeros.

    Args:
        relative: Limit of a tensor's norm, relative to its running mean; at least 0.
        beta: Weight of the old mean in the update, from 0 to 1.
        warmup: Number of steps with a finite norm in which all tensors are clipped together.
        absolute: Limit of the total norm in these steps.
        window: Number of total norms kept for the summary.
    """

    _decides_on = "tensor"
    _method = 3
    _method_names = ("means",)
    _method_initial = math.inf
    _is_per_tensor = True
    _if_often = (
        "the means start at the first norms as clipped by absolute, and grow slowly; raise absolute to a usual total "
        "norm, or raise relative to clip only outliers"
    )
    _if_never = "no tensor's norm was an outlier; lower relative to clip smaller spikes"

    def __init__(
        self,
        relative: float = 1.05,
        beta: float = 0.98,
        warmup: int = 100,
        absolute: float = 1.0,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        self._relative = number("relative", relative, 0.0)
        self._beta = number("beta", beta, 0.0, 1.0)
        self._warmup = whole_number("warmup", warmup, 0)
        self._absolute = number("absolute", absolute, 0.0)
        self._parameter_ids: tuple[int, ...] | None = None
        self._method_options = (self._relative, self._beta, float(self._warmup), self._absolute)
        super().__init__(window, relative=relative, beta=beta, warmup=warmup, absolute=absolute)

    def _multipliers(self, step: Step) -> tuple[Tensor, Tensor]:
        means, recorded = step.state["means"], step.state["totals"][_history.RECORDED]
        warming_up = recorded - step.is_recorded.to(torch.float64) < self._warmup
        # While all tensors are clipped together, a norm counts only if all of them are finite.
        counts = step.counts & (step.norms > 0) & (step.is_recorded | ~warming_up)
        by_mean = limited(step.norms, self._relative * means)
        decided = torch.where(warming_up, limited(step.norm, self._absolute), by_mean)
        after = decided * step.norms
        running = torch.where(means.isinf(), after, self._beta * means + (1 - self._beta) * after)
        means.copy_(torch.where(counts, torch.where(warming_up, torch.minimum(means, after), running), means))
        return decided, counts

    def _refuse(self, given: ToClip) -> None:
        super()._refuse(given)
        count = 0 if self._state_tensor is None else len(_history.views(self._state_tensor, self._window)[1])
        ids = tuple(map(id, given.parameters))
        if count not in (0, len(ids)) or self._parameter_ids not in (None, ids):
            raise ValueError(
                f"AdaGC keeps a mean for each of {count} parameters, by position, and this is a different list, of "
                f"{len(ids)}. The parameters with a gradient must be the same on every step: use "
                "zero_grad(set_to_none=False), or make a new clip for a new list"
            )

    @torch.no_grad()
    def scale_(
        self, given: ToClip, rows: Callable[[], Tensor], unscale_by: Tensor | None = None, skip: Tensor | None = None
    ) -> Tensor:
        tensors, parameters, name_of, backend = given
        kernels = resolve_for(backend, tensors[0].device.type, name_of, 0)
        decided = decide(self, kernels, rows(), unscale_by=unscale_by, skip=skip)
        scale_(tensors, decided[:-1], name_of, backend, each=True)
        self._parameter_ids = tuple(map(id, parameters))
        return decided[-1]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._parameter_ids = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy is used with copies of the parameters, which are different objects.
        return {**self.__dict__, "_parameter_ids": None}


class AGC(TensorClip):
    """Clips each unit of a gradient by the norm of its weights. The only state is that of the summary.

    A. Brock, S. De, S. L. Smith, K. Simonyan, High-Performance Large-Scale Image Recognition Without Normalization,
    2021, arXiv 2102.06171: with gradient norm g_i and weight norm w_i of unit i the multiplier is
    ``min(1, clipping * max(w_i, eps) / g_i)``. A unit is a slice along dimension 0, the weights of one output of a
    linear layer or a convolution. A tensor of fewer than two dimensions is one unit. The paper clips all parameters
    except those of the final linear layer: do not pass these.

    Gradients that are not row-major (channels-last, strided views) are copied, and sparse gradients are rejected.

    Args:
        clipping: Limit of a unit's gradient norm, relative to its weight norm; at least 0. 0.01 is for large batches;
            smaller batches take larger values.
        eps: Lower bound of the weight norm in the formula, so that zero weights can change.
        window: Number of total norms kept for the summary.
    """

    _decides_on = "unit"
    _method = 4
    _if_often = "the clip then sets the size of the steps; raise clipping, or lower the learning rate"
    _if_never = "no gradient was large relative to its weights; lower clipping to clip smaller ones"

    def __init__(self, clipping: float = 0.01, eps: float = 1e-3, window: int = DEFAULT_WINDOW) -> None:
        self._clipping = number("clipping", clipping, 0.0)
        self._eps = number("eps", eps, 0.0)
        self._method_options = (self._clipping, self._eps)
        super().__init__(window, clipping=clipping, eps=eps)

    def _multipliers(self, step: Step) -> tuple[Tensor, Tensor]:
        assert step.weights is not None
        return limited(step.norms, self._clipping * step.weights.clamp(min=self._eps)), step.counts

    def _refuse(self, given: ToClip) -> None:
        super()._refuse(given)
        for i, gradient in enumerate(given.tensors):
            if gradient.is_sparse:
                raise NotImplementedError(f"{given.name_of(i)!r} is sparse, and AGC clips slices of dense tensors only")

    @torch.no_grad()
    def scale_(
        self, given: ToClip, rows: Callable[[], Tensor], unscale_by: Tensor | None = None, skip: Tensor | None = None
    ) -> Tensor:
        gradients, parameters, name_of, backend = given
        targets = writable(gradients, name_of)
        weights = readable(parameters, lambda i: f"the parameter of {name_of(i)}")
        groups = by_device(targets)
        kernels = kernels_for(groups, backend, name_of)
        units, of_weights = (
            Measurement([kernels[device].unit_stats([those[i] for i in at]) for device, at in groups.items()], None, ())
            for those in (targets, weights)
        )
        home = kernels[targets[0].device]
        decided = decide(self, home, units.summands(), of_weights.summands(), unscale_by, skip)
        multipliers = decided[:-1].split([len(table) for table in units.tables])
        for (device, at), of_device in zip(groups.items(), multipliers, strict=True):
            kernels[device].scale_units_([targets[i] for i in at], to_device(of_device, device))
        return decided[-1]
