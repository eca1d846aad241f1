"""Small models that really train, in milliseconds, for tests of the monitor: healthy runs and runs with faults.

A `Training` is one such run. Everything in it can be replaced while it runs, which is how faults are injected. The
monitor must be silent in those of `HEALTHY`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat.monitor import Finding, Monitor

CLASSES = 4
TOKENS = 32
# Findings are only recorded, and checked afterwards.
RECORD = {"error": "record", "warning": "record"}


@dataclass
class Training:
    """A model, its training data, and how it is trained."""

    model: nn.Module
    optimizer: Optimizer
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    scaler: torch.amp.GradScaler | None = None
    autocast: torch.dtype | None = None  # dtype of the forward pass
    schedule: Callable[[int], float] | None = None  # factor of the learning rate for each step
    accumulate: int = 1  # micro-batches per step
    max_norm: float | None = None
    unscales: bool = True  # before the clip
    shown: bool = True  # the monitor is shown the batches, or the part that ``show`` returns
    show: Callable[[tuple[Tensor, Tensor]], Any] = tuple

    def monitor(self, **options: Any) -> Monitor:
        """A monitor for this training, which only records its findings unless told otherwise."""
        return Monitor(self.model, self.optimizer, self.scaler, **{"on_anomaly": RECORD, **options})

    def steps(self, monitor: Monitor, first: int, end: int) -> Iterator[tuple[int, bool]]:
        """Trains steps ``first`` to ``end`` and yields each twice: with True when it begins, and with False at its end.

        A step whose forward pass fails is the last one.
        """
        base = [group.setdefault("base_lr", group["lr"]) for group in self.optimizer.param_groups]
        for step in range(first, end):
            yield step, True
            if self.schedule is not None:
                for group, lr in zip(self.optimizer.param_groups, base, strict=True):
                    group["lr"] = lr * self.schedule(step)
            losses = list[Tensor]()
            self.optimizer.zero_grad()
            for _ in range(self.accumulate):
                batch = self.batch()
                if self.shown:
                    monitor.check_batch(self.show(batch))
                try:
                    loss = self._loss(batch) / self.accumulate
                except (IndexError, RuntimeError):
                    yield step, False
                    return
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                losses.append(loss)
            # With the graph, which the monitor looks at once.
            monitor.step(losses[0] if self.accumulate == 1 else torch.stack(losses).float().sum())
            self.update()
            yield step, False

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", self.autocast) if self.autocast is not None else nullcontext():
            return self.loss(self.model, batch)

    def update(self) -> None:
        if self.scaler is not None and self.unscales:
            self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def backpropagated(optimizer: Optimizer, loss: Tensor) -> Tensor:
    """Gives the optimizer's parameters the gradients of a loss, in place of earlier ones; returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    return loss


def fill(model: nn.Module, value: float = 1.0) -> None:
    """Sets every element of every gradient."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def serious(monitor: Monitor) -> list[Finding]:
    """The findings above severity info."""
    return [finding for finding in monitor.findings if finding.severity != "info"]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of logits ``[batch, ..., classes]`` and labels."""
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten())


# Data ----------------------------------------------------------------------------------------------------------


class Clusters:
    """Points around one center per class, in inputs of any shape."""

    def __init__(self, seed: int, *shape: int, size: int = 32, noise: float = 1.0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(CLASSES, *shape, generator=self.random)
        self.size, self.noise = size, noise

    def __call__(self) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (self.size,), generator=self.random)
        points = self.centres[labels]
        return points + self.noise * torch.randn(points.shape, generator=self.random), labels


class Sentences:
    """Token sequences in which most tokens determine the next one; token frequencies are like those of words."""

    def __init__(self, seed: int, length: int = 12, size: int = 8) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.follows = torch.randperm(TOKENS, generator=self.random)
        self.shares = 1 / torch.arange(1.0, TOKENS + 1)
        self.length, self.size = length, size

    def __call__(self) -> tuple[Tensor, Tensor]:
        drawn = torch.multinomial(self.shares, self.size * (self.length + 1), True, generator=self.random)
        tokens = drawn.view(self.size, self.length + 1)
        surprise = torch.rand(tokens.shape, generator=self.random) < 0.3
        for i in range(1, self.length + 1):
            tokens[:, i] = torch.where(surprise[:, i], tokens[:, i], self.follows[tokens[:, i - 1]])
        return tokens[:, :-1], tokens[:, 1:]


class Bags:
    """Bags of tokens, most of them rare; the class is that of the majority of tokens."""

    def __init__(self, seed: int, vocabulary: int = 400, length: int = 6, size: int = 16) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.shares = 1 / torch.arange(1.0, vocabulary + 1)
        self.length, self.size = length, size

    def __call__(self) -> tuple[Tensor, Tensor]:
        drawn = torch.multinomial(self.shares, self.size * self.length, True, generator=self.random)
        tokens = drawn.view(self.size, self.length)
        return tokens, F.one_hot(tokens % CLASSES, CLASSES).sum(1).argmax(1)


# Models --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm causal attention with one head, and an MLP."""

    def __init__(self, width: int, dropout: float, masked: bool) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((32, 32), -torch.inf).triu(1) if masked else None)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        mask = None if self.mask is None else self.mask[: x.shape[1], : x.shape[1]]
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A GPT with few parameters; if it is ``masked``, its causal mask is a buffer."""

    def __init__(
        self, layers: int = 2, width: int = 16, dropout: float = 0.0, tied: bool = False, masked: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(32, width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(width, dropout, masked) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """An embedding, an LSTM or a plain RNN, and a head."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 16, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.cells = kind(width, width, batch_first=True, **options)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.tokens(tokens))[0])


def mlp(dropout: float = 0.0) -> nn.Sequential:
    """Two hidden layers, for 16 inputs."""
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), *drop, nn.Linear(32, 32), nn.ReLU(), *drop, nn.Linear(32, CLASSES)
    )


def cnn() -> nn.Sequential:
    """Two convolutions with batch norm, for images of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


class Scaled(nn.Module):
    """A residual branch whose result is multiplied by factors that begin at 1e-6 (LayerScale)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.factors = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factors * self.down(F.gelu(self.up(x)))


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank correction, one factor of which starts at zero (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


# Trainings -----------------------------------------------------------------------------------------------------


Optimize = Callable[[Iterable[Tensor]], Optimizer]


def factory(kind: type[Optimizer], lr: float, **settings: Any) -> Optimize:
    """A factory for an optimizer that still needs its parameters."""
    return lambda parameters: kind(parameters, lr=lr, **settings)  # type: ignore[call-arg]


def train(
    seed: int,
    model: Callable[[], nn.Module],
    optimize: Optimize,
    batch: Callable[[], tuple[Tensor, Tensor]],
    **options: Any,
) -> Training:
    """A training of ``model`` on ``batch``, with an optimizer for the parameters that are not frozen."""
    torch.manual_seed(seed)
    made = model()
    optimizer = optimize([parameter for parameter in made.parameters() if parameter.requires_grad])
    return Training(made, optimizer, batch, **{"loss": cross_entropy, **options})


def train_mlp(
    seed: int = 0,
    lr: float = 1e-3,
    model: Callable[[], nn.Module] = mlp,
    optimize: Optimize | None = None,
    batch: Callable[[], tuple[Tensor, Tensor]] | None = None,
    **options: Any,
) -> Training:
    """An MLP on clusters, with AdamW."""
    return train(seed, model, optimize or factory(torch.optim.AdamW, lr), batch or Clusters(seed, 16), **options)


def train_scaled(seed: int, scale: float, **options: Any) -> Training:
    """An MLP in float16 autocast, with a loss scaler that begins at ``scale``."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
    return train_mlp(seed, scaler=scaler, autocast=torch.float16, **options)


def train_cnn(seed: int = 0, **options: Any) -> Training:
    """A CNN with batch norm on clusters of images, with SGD and momentum."""
    optimize = factory(torch.optim.SGD, 0.05, momentum=0.9, weight_decay=5e-4)
    return train(seed, cnn, optimize, Clusters(seed, 1, 8, 8, size=16, noise=2.0), **options)


def train_gpt(seed: int = 0, lr: float = 3e-3, model: Callable[[], nn.Module] = GPT, **options: Any) -> Training:
    """A small GPT, with AdamW."""
    return train(
        seed, model, factory(torch.optim.AdamW, lr, betas=(0.9, 0.95), weight_decay=0.1), Sentences(seed), **options
    )


def train_recurrent(
    seed: int = 0, kind: type[nn.RNNBase] = nn.LSTM, settings: dict[str, Any] | None = None, **options: Any
) -> Training:
    """An LSTM or a plain RNN, with Adam and clipping."""
    options = {"max_norm": 1.0, **options}
    optimize = factory(torch.optim.Adam, 5e-3)
    return train(seed, lambda: Recurrent(kind, **(settings or {})), optimize, Sentences(seed), **options)


def train_bag(seed: int = 0) -> Training:
    """The mean of embeddings of rare tokens and a linear layer, with Adam: most rows have no gradient in a step."""
    return train(
        seed,
        lambda: nn.Sequential(nn.EmbeddingBag(400, 16, mode="mean"), nn.Linear(16, CLASSES)),
        factory(torch.optim.Adam, 0.01),
        Bags(seed),
        show=lambda batch: batch[1],
    )


# Healthy trainings ---------------------------------------------------------------------------------------------


def warmup_and_cosine(total: int) -> Callable[[int], float]:
    """A linear warm-up of 50 steps, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < 50:
            return (step + 1) / 50
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 50) / max(1, total - 50))))

    return factor


def low_rank() -> nn.Module:
    model = mlp()
    model[0], model[2] = LowRank(model[0]), LowRank(model[2])
    return model


def initialised(model: nn.Module, weight: str, size: float) -> nn.Module:
    """``model``, with one ``weight`` that begins within ±``size``."""
    nn.init.uniform_(model.get_parameter(weight), -size, size)
    return model


def _regression(seed: int, steps: int) -> Training:
    made, target = train_mlp(seed), nn.Linear(16, CLASSES)
    made.loss = lambda model, batch: (model(batch[0]) - target(batch[0]).detach()).square().mean()
    return made


def _one_hot(seed: int, steps: int) -> Training:
    random = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        word = torch.randint(200, (16,), generator=random)
        return F.one_hot(word, 200).float(), word % CLASSES

    return train_mlp(seed, model=lambda: nn.Sequential(nn.Linear(200, 32), *mlp()[1:]), batch=batch)


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
    Healthy("MLP, float16 autocast and a loss scaler", lambda seed, _: train_scaled(seed, 2.0**16)),
    Healthy("MLP, gradients of 3 micro-batches", _of(train_mlp, accumulate=3)),
    Healthy("MLP, low-rank corrections that begin at zero (LoRA)", _of(train_mlp, lr=5e-3, model=low_rank)),
    Healthy("MLP, branch that begins at 1e-6 (LayerScale)",
            _of(train_mlp, model=lambda: nn.Sequential(Scaled(), *mlp()), lr=1e-3)),
    Healthy("MLP, head that begins at zero, Adagrad",
            _of(train_mlp, model=lambda: initialised(mlp(), "4.weight", 0.0),
                optimize=factory(torch.optim.Adagrad, 0.05))),
    Healthy("MLP, loss below zero", _of(train_mlp, loss=lambda model, batch: cross_entropy(model, batch) - 5.0)),
    Healthy("MLP, batches of one sample, SGD",
            lambda seed, _: train_mlp(seed, optimize=factory(torch.optim.SGD, 0.01), batch=Clusters(seed, 16, size=1))),
    Healthy("MLP, summed loss",
            _of(train_mlp, loss=lambda model, batch: cross_entropy(model, batch) * len(batch[0]))),
    Healthy("MLP, one-hot inputs", _one_hot),
    Healthy("MLP, bias before a batch norm",
            _of(train_mlp, lr=3e-3, model=lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), *mlp()[3:]))),
    Healthy("CNN with batch norm, SGD with momentum", _of(train_cnn)),
    Healthy("CNN, learning rate divided by 10 twice",
            _of(train_cnn, schedule=lambda step: 1.0 if step < 300 else 0.1 if step < 400 else 0.01)),
    Healthy("GPT, warm-up and cosine",
            lambda seed, steps: train_gpt(seed, schedule=warmup_and_cosine(steps), max_norm=1.0)),
    Healthy("GPT, tied embedding, dropout", _of(train_gpt, model=lambda: GPT(layers=1, tied=True, dropout=0.1))),
    Healthy("GPT, mask buffer of -Inf", _of(train_gpt, model=lambda: GPT(layers=1, masked=True))),
    Healthy("GPT, embedding that begins at 1e-4",
            _of(train_gpt, model=lambda: initialised(GPT(layers=1), "tokens.weight", 1e-4))),
    Healthy("LSTM, clipped", _of(train_recurrent)),
    Healthy("RNN, warm restarts",  # a cosine down to nearly zero
            _of(train_recurrent, kind=nn.RNN,
                schedule=lambda step: 1e-3 + 0.5 * (1 + math.cos(math.pi * (step % 150) / 150)))),
    Healthy("embeddings of rare tokens", _of(train_bag)),
    Healthy("GPT, updates and activations watched", _of(train_gpt, model=lambda: GPT(layers=1)),
            {"updates": 50, "activations": 50}),
)  # fmt: skip


def serious_findings(healthy: Healthy, seed: int, steps: int) -> tuple[list[Finding], Monitor]:
    """Trains; returns the findings above severity info, and the monitor."""
    training = healthy.training(seed, steps)
    monitor = training.monitor(watch=healthy.watch, num_classes=TOKENS, max_norm=training.max_norm)
    for _ in training.steps(monitor, 0, steps):
        pass
    monitor.remove()
    return serious(monitor), monitor
