"""What checks cost: one training step in several variants, interleaved, medians of wall time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import gradstat
from gradstat.demo.model import GPT
from gradstat.demo.train import MAX_NORM


def naive_loop(parameters: Iterable[Tensor]) -> int:
    """What people write by hand: five reductions per gradient, each brought to the host at once."""
    bad = 0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            bad += bool(gradient.isnan().any().item()) or bool(gradient.isinf().any().item())
            gradient.norm().item()
            gradient.min().item()
            gradient.max().item()
    return bad


VARIANTS: dict[str, Callable[[GPT], object]] = {
    "plain step": lambda model: None,
    "+ gradstat.check": lambda model: gradstat.check(model).ok,
    "+ gradstat.clip_grad_norm_": lambda model: gradstat.clip_grad_norm_(model.parameters(), MAX_NORM),
    "+ torch clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    "+ naive .item() loop": lambda model: naive_loop(model.parameters()),
    "detect_anomaly": lambda model: None,
}


def measure(model: GPT, tokens: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant's steps, ``rounds`` each after two that are not counted.

    In every round all variants take their turn, so that a slow moment of the machine meets all of them.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def synchronize() -> None:
        if tokens.is_cuda:
            torch.cuda.synchronize()

    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 2):
        for name, extra in VARIANTS.items():
            synchronize()
            start = time.perf_counter()
            with torch.autograd.set_detect_anomaly(name == "detect_anomaly"):
                optimizer.zero_grad()
                model.loss(tokens).backward()
                extra(model)
                optimizer.step()
            synchronize()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(seconds: dict[str, list[float]], where: str) -> str:
    """The medians as text, each with its ratio to the plain step in the same rounds."""
    plain = seconds["plain step"]
    lines = [f"What a step costs ({where}, median of {len(plain)} interleaved rounds):"]
    for name, values in seconds.items():
        ratio = statistics.median(value / base for value, base in zip(values, plain, strict=True))
        lines.append(f"  {name:<28} {statistics.median(values) * 1e3:8.2f} ms   {ratio:5.2f} x")
    return "\n".join(lines)
