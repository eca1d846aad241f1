"""What checks cost in the demo's own training step."""

from __future__ import annotations

import torch
from torch import Tensor

from gradstat.bench import steps
from gradstat.demo.model import GPT


def step_of(model: GPT, tokens: Tensor) -> steps.Step:
    """A step of ``model`` on the same batch again and again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=steps.LEARNING_RATE)
    return steps.Step(model, lambda: model.loss(tokens), optimizer, tokens.device)


def report(model: GPT, tokens: Tensor, rounds: int, where: str) -> str:
    """Measures every variant of the step; returns the table."""
    measured = steps.costs(step_of(model, tokens), rounds)
    return f"What a step costs ({where}, median of {rounds} interleaved rounds):\n{steps.table(measured)}"
