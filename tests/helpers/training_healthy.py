"""Healthy trainings for which the monitor must be silent: small models, trained in common ways.

``python tools/diagnosis.py --only healthy --seeds 10 --steps 2000`` runs more and longer trainings than the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from helpers.training import (
    CLASSES,
    GPT,
    TOKENS,
    Clusters,
    LowRank,
    Training,
    cross_entropy,
    factory,
    mlp,
    serious,
    train_bag,
    train_cnn,
    train_gpt,
    train_mlp,
    train_recurrent,
)
from torch import nn

from gradstat.monitor import Finding, Monitor


def warmup_and_cosine(total: int) -> Callable[[int], float]:
    """A linear warm-up of 50 steps, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < 50:
            return (step + 1) / 50
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 50) / max(1, total - 50))))

    return factor


def warm_restarts(period: int) -> Callable[[int], float]:
    """A cosine down to nearly zero that restarts every ``period`` steps."""
    return lambda step: 1e-3 + 0.5 * (1 + math.cos(math.pi * (step % period) / period))


def by_steps(step: int) -> float:
    """A tenth from step 300 on, a hundredth from step 400 on."""
    return 1.0 if step < 300 else 0.1 if step < 400 else 0.01


def low_rank() -> nn.Module:
    model = mlp()
    model[0], model[2] = LowRank(model[0]), LowRank(model[2])
    return model


def head_of_zeros() -> nn.Module:
    model = mlp()
    nn.init.zeros_(model[4].weight)  # type: ignore[arg-type]
    return model


def bias_before_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))


def tiny_embedding() -> nn.Module:
    model = GPT(layers=1)
    nn.init.uniform_(model.tokens.weight, -1e-4, 1e-4)
    return model


def _regression(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    target = nn.Linear(16, CLASSES)
    made.loss = lambda model, batch: (model(batch[0]) - target(batch[0]).detach()).square().mean()
    return made


def _one_hot(seed: int, steps: int) -> Training:
    random = torch.Generator().manual_seed(seed)

    def model() -> nn.Module:
        made = mlp()
        made[0] = nn.Linear(200, 32)
        return made

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        word = torch.randint(200, (16,), generator=random)
        return nn.functional.one_hot(word, 200).float(), word % CLASSES

    return train_mlp(seed, model=model, batch=batch)


def _half_precision(seed: int, steps: int) -> Training:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
    return train_mlp(seed, scaler=scaler, autocast=torch.float16)


@dataclass(frozen=True)
class Healthy:
    """A healthy way to train, from a seed and the number of steps, and what else the monitor watches."""

    name: str
    training: Callable[[int, int], Training]
    watch: dict[str, int] | None = None


def _of(make: Callable[..., Training], **options: object) -> Callable[[int, int], Training]:
    return lambda seed, steps: make(seed=seed, **options)


HEALTHY: tuple[Healthy, ...] = (
    Healthy("MLP, AdamW", _of(train_mlp)),
    Healthy("MLP, SGD with Nesterov momentum",
            _of(train_mlp, optimize=factory(torch.optim.SGD, 0.1, momentum=0.9, nesterov=True))),
    Healthy("MLP, RMSprop", _of(train_mlp, optimize=factory(torch.optim.RMSprop, 1e-3))),
    Healthy("MLP with dropout, AdamW", _of(train_mlp, model=lambda: mlp(dropout=0.2))),
    Healthy("MLP, regression to nearly no error", _regression),
    Healthy("MLP, bfloat16 autocast", _of(train_mlp, autocast=torch.bfloat16)),
    Healthy("MLP, float16 autocast and a loss scaler", _half_precision),
    Healthy("MLP, gradients of 3 micro-batches", _of(train_mlp, accumulate=3)),
    Healthy("MLP, low-rank corrections that begin at zero (LoRA)", _of(train_mlp, lr=5e-3, model=low_rank)),
    Healthy("MLP, head that begins at zero, Adagrad",
            _of(train_mlp, model=head_of_zeros, optimize=factory(torch.optim.Adagrad, 0.05))),
    Healthy("MLP, loss below zero", _of(train_mlp, loss=lambda model, batch: cross_entropy(model, batch) - 5.0)),
    Healthy("MLP, batches of one sample, SGD",
            lambda seed, _: train_mlp(seed, optimize=factory(torch.optim.SGD, 0.01), batch=Clusters(seed, 16, size=1))),
    Healthy("MLP, summed loss",
            _of(train_mlp, loss=lambda model, batch: cross_entropy(model, batch) * len(batch[0]))),
    Healthy("MLP, one-hot inputs", _one_hot),
    Healthy("MLP, bias before a batch norm", _of(train_mlp, lr=3e-3, model=bias_before_batch_norm)),
    Healthy("CNN with batch norm, SGD with momentum", _of(train_cnn)),
    Healthy("CNN, learning rate divided by 10 twice", _of(train_cnn, schedule=by_steps)),
    Healthy("GPT, warm-up and cosine",
            lambda seed, steps: train_gpt(seed, schedule=warmup_and_cosine(steps), max_norm=1.0)),
    Healthy("GPT, tied embedding, dropout", _of(train_gpt, model=lambda: GPT(layers=1, tied=True, dropout=0.1))),
    Healthy("GPT, mask buffer of -Inf", _of(train_gpt, model=lambda: GPT(layers=1, masked=True))),
    Healthy("GPT, embedding that begins at 1e-4", _of(train_gpt, model=tiny_embedding)),
    Healthy("LSTM, clipped", _of(train_recurrent)),
    Healthy("RNN, warm restarts", _of(train_recurrent, kind=nn.RNN, schedule=warm_restarts(150))),
    Healthy("embeddings of rare tokens", _of(train_bag)),
    Healthy("GPT, updates and activations watched", _of(train_gpt, model=lambda: GPT(layers=1)),
            {"updates": 50, "activations": 50}),
)  # fmt: skip


def serious_findings(healthy: Healthy, seed: int, steps: int) -> tuple[list[Finding], Monitor]:
    """Trains; returns the findings above severity info, and the monitor."""
    training = healthy.training(seed, steps)
    monitor = training.monitor(watch=healthy.watch, classes=TOKENS, max_norm=training.max_norm)
    for _ in training.steps(monitor, 0, steps):
        pass
    monitor.detach()
    return serious(monitor), monitor
