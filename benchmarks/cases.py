"""The inputs of the benchmarks, by name, and the calls that are compared on them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradstat
from gradstat.bench.steps import naive_loop

SHAPES: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "300 tensors of 8x8": lambda: [(8, 8)] * 300,
    "17 M parameters, transformer": lambda: transformer_shapes(layers=6, width=384, vocabulary=16384),
    "one tensor of 16 M": lambda: [(1 << 24,)],
}


def transformer_shapes(layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """The parameters of a GPT: embeddings, then attention, perceptron and norms of each layer."""
    w = width
    layer: list[tuple[int, ...]] = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,)]
    layer += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    return [(vocabulary, w), (128, w), *(layer * layers), (w,), (w,)]


def parameters_of(case: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    """Parameters with random gradients."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES[case]():
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        parameter.grad = torch.randn(shape, generator=generator).to(dtype).to(device)
        made.append(parameter)
    return made


def small_transformer() -> nn.Module:
    """144 small parameters in 85 modules, with gradients: little to read, so that the host's part shows."""

    def layer(width: int) -> nn.Module:
        linear = [nn.Linear(width, width) for _ in range(4)]
        return nn.Sequential(nn.LayerNorm(width), *linear, nn.LayerNorm(width))

    model = nn.Sequential(*(layer(32) for _ in range(12)))
    model(torch.randn(2, 32)).sum().backward()
    return model


def plain_read(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The least anyone can do: read every byte once."""
    return [parameter.grad.sum() for parameter in parameters if parameter.grad is not None]


# Each gets the parameters and the norm of their gradients. Clipping to that very norm multiplies every gradient
# by a number so close to one that it stays what it is, round after round.
PROVIDERS: dict[str, Callable[[list[nn.Parameter], float], object]] = {
    "gradstat.check": lambda ps, norm: gradstat.check(ps).ok,
    "gradstat clip, unclipped": lambda ps, norm: gradstat.clip_grad_norm_(ps, 2 * norm),
    "torch clip, unclipped": lambda ps, norm: nn.utils.clip_grad_norm_(ps, 2 * norm),
    "gradstat clip, clipped": lambda ps, norm: gradstat.clip_grad_norm_(ps, norm),
    "torch clip, clipped": lambda ps, norm: nn.utils.clip_grad_norm_(ps, norm),
    "naive .item() loop": lambda ps, norm: naive_loop(ps),
    "plain read (sum)": lambda ps, norm: plain_read(ps),
}


def checked_norm(parameters: list[nn.Parameter]) -> float:
    """The norm of the gradients, held against float64, so that no wrong answer is ever called fast."""
    squares = sum(p.grad.double().square().sum() for p in parameters if p.grad is not None)
    exact, norm = math.sqrt(float(squares)), gradstat.check(parameters).total_norm
    if not math.isclose(norm, exact, rel_tol=1e-7):
        raise AssertionError(f"wrong norm: {norm}, not {exact}")
    return norm
