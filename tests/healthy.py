"""Healthy trainings in which the monitor has to be silent: small models, as they are commonly trained.

``python tests/healthy.py --seeds 10 --steps 2000`` runs more and longer than the tests do.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from small_training import (
    CLASSES,
    TOKENS,
    Clusters,
    LowRank,
    Training,
    cross_entropy,
    mlp,
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
    """A cosine down to nearly zero that begins anew, each time after as many steps."""
    return lambda step: 1e-3 + 0.5 * (1 + math.cos(math.pi * (step % period) / period))


def by_steps(step: int) -> float:
    """A tenth from step 300 on, a hundredth from step 400 on."""
    return 1.0 if step < 300 else 0.1 if step < 400 else 0.01


def _half_precision(seed: int, steps: int) -> Training:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
    return train_mlp(seed, scaler=scaler, autocast=torch.float16)


def _low_rank(seed: int, steps: int) -> Training:
    torch.manual_seed(seed)
    model = mlp()
    for i in (0, 2):
        model[i] = LowRank(model[i])  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 5e-3)
    return Training(model, optimizer, Clusters(seed, 16), cross_entropy)


def _plain_sgd(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    made.optimizer = torch.optim.SGD(made.model.parameters(), 0.1, momentum=0.9, nesterov=True)
    return made


def _rmsprop(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    made.optimizer = torch.optim.RMSprop(made.model.parameters(), 1e-3)
    return made


def _dropout(seed: int, steps: int) -> Training:
    torch.manual_seed(seed)
    model = mlp(dropout=0.2)
    return Training(model, torch.optim.AdamW(model.parameters(), 1e-3), Clusters(seed, 16), cross_entropy)


def _regression(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    target = nn.Linear(16, CLASSES)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]) - target(batch[0]).detach()).square().mean()

    made.loss = loss
    return made


def _head_of_zeros(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    nn.init.zeros_(made.model[4].weight)  # type: ignore[index]
    made.optimizer = torch.optim.Adagrad(made.model.parameters(), 0.05)
    return made


def _negative_loss(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    made.loss = lambda model, batch: cross_entropy(model, batch) - 5.0
    return made


def _single_samples(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    made.batch = Clusters(seed, 16, size=1)
    made.optimizer = torch.optim.SGD(made.model.parameters(), 0.01)
    return made


def _summed_loss(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    made.loss = lambda model, batch: cross_entropy(model, batch) * len(batch[0])
    return made


def _one_hot(seed: int, steps: int) -> Training:
    made = train_mlp(seed)
    made.model[0] = nn.Linear(200, 32)  # type: ignore[index]
    made.optimizer = torch.optim.AdamW(made.model.parameters(), 1e-3)
    random = torch.Generator().manual_seed(seed)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        word = torch.randint(200, (16,), generator=random)
        return nn.functional.one_hot(word, 200).float(), word % CLASSES

    made.batch = batch
    return made


def _bias_before_batch_norm(seed: int, steps: int) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))
    return Training(model, torch.optim.AdamW(model.parameters(), 3e-3), Clusters(seed, 16), cross_entropy)


def _tiny_embedding(seed: int, steps: int) -> Training:
    made = train_gpt(seed, layers=1)
    nn.init.uniform_(made.model.tokens.weight, -1e-4, 1e-4)  # type: ignore[arg-type, union-attr]
    return made


@dataclass(frozen=True)
class Healthy:
    """A way to train that is healthy.

    Attributes:
        name: In the table.
        training: Makes it, of a seed and the number of steps.
        watch: What the monitor looks at besides the default.
    """

    name: str
    training: Callable[[int, int], Training]
    watch: dict[str, int] | None = None


def _of(make: Callable[..., Training], **options: object) -> Callable[[int, int], Training]:
    return lambda seed, steps: make(seed=seed, **options)


HEALTHY: tuple[Healthy, ...] = (
    Healthy("MLP, AdamW", _of(train_mlp)),
    Healthy("MLP, SGD with Nesterov momentum", _plain_sgd),
    Healthy("MLP, RMSprop", _rmsprop),
    Healthy("MLP with dropout, AdamW", _dropout),
    Healthy("MLP, regression to nearly no error", _regression),
    Healthy("MLP, bfloat16 autocast", _of(train_mlp, autocast=torch.bfloat16)),
    Healthy("MLP, float16 autocast and a loss scaler", _half_precision),
    Healthy("MLP, gradients of 3 micro-batches", _of(train_mlp, accumulate=3)),
    Healthy("MLP, low-rank corrections that begin at zero (LoRA)", _low_rank),
    Healthy("MLP, head that begins at zero, Adagrad", _head_of_zeros),
    Healthy("MLP, loss below zero", _negative_loss),
    Healthy("MLP, batches of one sample, SGD", _single_samples),
    Healthy("MLP, summed loss", _summed_loss),
    Healthy("MLP, one-hot inputs", _one_hot),
    Healthy("MLP, bias before a batch norm", _bias_before_batch_norm),
    Healthy("CNN with batch norm, SGD with momentum", _of(train_cnn)),
    Healthy("CNN, learning rate divided by 10 twice", _of(train_cnn, schedule=by_steps)),
    Healthy(
        "GPT, warm-up and cosine", lambda seed, steps: train_gpt(seed, schedule=warmup_and_cosine(steps), max_norm=1.0)
    ),
    Healthy("GPT, tied embedding, dropout", _of(train_gpt, layers=1, tied=True, dropout=0.1)),
    Healthy("GPT, embedding that begins at 1e-4", _tiny_embedding),
    Healthy("LSTM, clipped", _of(functools.partial(train_recurrent, nn.LSTM))),
    Healthy("RNN, warm restarts", _of(functools.partial(train_recurrent, nn.RNN), schedule=warm_restarts(150))),
    Healthy("embeddings of rare tokens", _of(train_bag)),
    Healthy("GPT, updates and activations watched", _of(train_gpt, layers=1), {"updates": 50, "activations": 50}),
)


def silence(healthy: Healthy, seed: int, steps: int) -> tuple[list[Finding], Monitor]:
    """Trains; what was found that is no mere info, and the monitor."""
    training = healthy.training(seed, steps)
    monitor = Monitor(
        training.model,
        training.optimizer,
        training.scaler,
        on_anomaly={"error": "record", "warning": "record", "lost-loss": "record"},
        watch=healthy.watch,
        classes=TOKENS,
        max_norm=training.max_norm,
    )
    for _ in training.steps(monitor, 0, steps):
        pass
    monitor.detach()
    return [finding for finding in monitor.findings if finding.severity != "info"], monitor


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", default="", help="part of a name")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failures = 0
    for healthy in HEALTHY:
        if chosen.only not in healthy.name:
            continue
        started = time.perf_counter()
        for seed in range(chosen.seeds):
            found, monitor = silence(healthy, seed, chosen.steps)
            failures += bool(found)
            loss = monitor.recording().scalars["loss"]
            print(f"{healthy.name}, seed {seed}: loss {loss[:20].mean():.3g} to {loss[-20:].mean():.3g}, "
                  f"{len(found)} findings", *found, sep="\n    ")  # fmt: skip
        print(f"  {(time.perf_counter() - started) / chosen.seeds:.2f} s a run")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
