"""The cost of `gradstat.update_stats`, compared with torch's ``_foreach`` operations and with reading the operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from cases import Shape
from torch import Tensor

import gradstat
from gradstat.bench.steps import WrongAnswerError

GROUP = "updates to come"
OURS, FOREACH, READING = "gradstat.update_stats", "torch._foreach", "gradstat.stats of the same operands"
CASES = ("transformer of 17 M", "GPT-2 small, 148 tensors", "one tensor of 256 M")
Norms = Callable[[list[Tensor]], Sequence[Tensor]]
LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8


class State(NamedTuple):
    """An optimizer that has taken a step, with new gradients, and the tensors that its next step reads."""

    optimizer: torch.optim.Optimizer
    gradients: list[Tensor]
    weights: list[Tensor]
    states: list[list[Tensor]]  # the momentum of all parameters; for AdamW then their second moments

    @classmethod
    def made(cls, name: str, shapes: list[Shape], dtype: torch.dtype, device: torch.device) -> State:
        parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer: torch.optim.Optimizer
        if name == "AdamW":
            optimizer = torch.optim.AdamW(parameters, LR, (BETA1, BETA2), EPS)
        else:
            optimizer = torch.optim.SGD(parameters, LR, momentum=BETA1)
        optimizer.step()
        keys = ("exp_avg", "exp_avg_sq") if name == "AdamW" else ("momentum_buffer",)
        states = [[optimizer.state[parameter][key] for parameter in parameters] for key in keys]
        return cls(
            optimizer, [p.grad for p in parameters if p.grad is not None], [p.detach() for p in parameters], states
        )

    @property
    def operands(self) -> list[Tensor]:
        """All tensors that the next step reads."""
        return [*self.gradients, *self.weights, *(tensor for states in self.states for tensor in states)]


def exact_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms summed in float64; ``_foreach_norm`` on a CPU is 4 % too small for 256 M elements of float32."""
    return [torch.stack([part.to(torch.float64).norm() for part in t.flatten().split(2**20)]).norm() for t in tensors]


def foreach(state: State, norms: Norms = torch._foreach_norm) -> Tensor:
    """The columns of `gradstat.UPDATE_FIELDS`, written in torch operations: ``[n, 4]``."""
    gradients, weights, momenta = state.gradients, state.weights, state.states[0]
    size = torch.tensor([weight.numel() for weight in weights], device=weights[0].device).sqrt()
    scaled = [torch.full_like(size[0], torch.nan)] * len(weights)
    if len(state.states) > 1:
        update = torch._foreach_lerp(momenta, gradients, 1 - BETA1)
        divisor = torch._foreach_mul(state.states[1], BETA2)
        torch._foreach_addcmul_(divisor, gradients, gradients, 1 - BETA2)
        torch._foreach_sqrt_(divisor)
        torch._foreach_div_(divisor, (1 - BETA2**2) ** 0.5)
        torch._foreach_add_(divisor, EPS)
        torch._foreach_div_(update, divisor)
        torch._foreach_mul_(update, LR / (1 - BETA1**2))
        scaled = list(norms(torch._foreach_div(gradients, divisor)))
    else:
        update = torch._foreach_mul(momenta, BETA1)
        torch._foreach_add_(update, gradients)
        torch._foreach_mul_(update, LR)
    updates, sizes, gradient_norms, momentum_norms = (
        torch.stack(list(norms(tensors))) for tensors in (update, weights, gradients, momenta)
    )
    products = torch.stack([product.sum() for product in torch._foreach_mul(gradients, momenta)])
    cosine = products / gradient_norms / momentum_norms
    return torch.stack([updates / size, updates / sizes, torch.stack(scaled) / size, cosine], 1)


def calls_for(
    name: str, shapes: list[Shape], dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], object]]:
    """The calls to time, after checking that both implementations agree."""
    state = State.made(name, shapes, dtype, device)
    ours, theirs = gradstat.update_stats(state.optimizer).table, foreach(state, exact_norms).to(torch.float64)
    tolerance = 1e-3 if dtype is torch.float32 else 0.1
    if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise WrongAnswerError(f"{name}: update_stats and _foreach disagree by {(ours - theirs).abs().max():.2g}")
    return {
        OURS: lambda: gradstat.update_stats(state.optimizer).table,
        FOREACH: partial(foreach, state),
        READING: lambda: gradstat.stats(state.operands),
    }
