"""Golden runs: how often healthy runs are called unlike, and which mistakes and harmless changes are noticed.

Two small models are trained with many seeds. Of each, golden sets of 3, 5 and 8 runs are drawn at random and held-out
healthy runs are compared with them; then runs with one mistake of refactoring, and with one harmless change each, are
compared with five golden runs. ::

    python benchmarks/golden.py
    python benchmarks/golden.py --held-out 120 --record
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
from small_training import CLASSES, RECORD, TOKENS, Clusters, Sentences  # noqa: E402

from gradstat.monitor import Monitor, Recording  # noqa: E402

STEPS = 160
Batch = tuple[Tensor, Tensor]


# A training with everything that a mistake may change ---------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How a model is made and trained; every field is something that a refactoring may get wrong."""

    model: str = "transformer"  # or "mlp"
    steps: int = STEPS
    size: int = 16  # samples per step
    accumulate: int = 1
    divided: bool = True  # whether accumulated losses are divided by their number
    optimizer: type[Optimizer] = torch.optim.AdamW
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-2
    warmup: int = 10
    weight_decay: float = 0.1
    decays_all: bool = False  # whether biases and norms decay as well
    max_norm: float = 1.0
    clears: bool = True  # zero_grad() after a step
    smoothing: float = 0.0
    reduction: str = "mean"
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    autocast: torch.dtype | None = None
    change_batch: Callable[[Batch, torch.Generator], Batch] | None = None
    repeats: int = 1  # steps per batch
    change_model: Callable[[nn.Module], object] | None = None
    wrap: Callable[[nn.Module], Any] | None = None
    kernel: SDPBackend | None = None
    threads: int = 1
    # Of the transformer.
    causal: bool = True
    scaled: bool = True
    pre_norm: bool = True
    residual: bool = True
    final_norm: bool = True
    positions: bool = True
    eager: bool = False  # attention in plain operations
    mixes_heads: bool = False  # view() instead of transpose()
    recomputes: bool = False  # activation checkpointing
    activation: Callable[[Tensor], Tensor] = F.gelu
    dropout: float = 0.0
    init: float = 1.0  # factor of all initial matrices


class Attention(nn.Module):
    """Two heads; its projections are separate, so that the key's bias has no effect."""

    def __init__(self, width: int, settings: Settings) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        of = self.settings

        def heads(y: Tensor) -> Tensor:
            if of.mixes_heads:
                return y.view(n, 2, length, width // 2)
            return y.view(n, length, 2, width // 2).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scale = (width // 2) ** -0.5 if of.scaled else 1.0
        if of.eager:
            scores = q @ k.transpose(-1, -2) * scale
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = scores.masked_fill(mask, -math.inf).softmax(-1) @ v
        elif of.kernel is not None:
            with sdpa_kernel(of.kernel):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=of.causal, scale=scale)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=of.causal, scale=scale)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, settings: Settings) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, settings)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(settings.dropout)
        self.settings = settings

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.settings.activation(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.settings.pre_norm:
            x = self.norm1(x + self.drop(self.attention(x)))
            return self.norm2(x + self.drop(self.mlp(x)))
        kept = 1.0 if self.settings.residual else 0.0
        x = kept * x + self.drop(self.attention(self.norm1(x)))
        return kept * x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Two blocks over 32 tokens."""

    def __init__(self, settings: Settings, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(32, width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(width, settings) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.settings = settings

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.settings.positions:
            x = x + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.settings.recomputes else block(x)
        return self.head(self.norm(x) if self.settings.final_norm else x)


def perceptron(settings: Settings) -> nn.Sequential:
    """Two hidden layers with batch norm, so that the biases before it have no effect."""
    drop = [nn.Dropout(settings.dropout)] if settings.dropout else []
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), *drop,
        nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), *drop, nn.Linear(32, CLASSES),
    )  # fmt: skip


HEALTHY = {
    "transformer": Settings(),
    "MLP": Settings("mlp", size=32, lr=2e-3, warmup=0, max_norm=math.inf, weight_decay=0.01),
}


def run(settings: Settings, seed: int, **options: Any) -> Recording:
    """The recording of one training. The task is always the same; weights and samples depend on the seed."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(1000 + seed)
    model: nn.Module = Transformer(settings) if settings.model == "transformer" else perceptron(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= settings.init
        if settings.change_model is not None:
            settings.change_model(model)
    called = model if settings.wrap is None else settings.wrap(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1 or settings.decays_all]},
        {"params": [p for p in trained if p.dim() <= 1 and not settings.decays_all], "weight_decay": 0.0},
    ]
    optimizer = settings.optimizer(
        [group for group in groups if group["params"]],
        **{"lr": settings.lr, "weight_decay": settings.weight_decay, **settings.optimizer_options},
    )
    scaler = torch.amp.GradScaler("cpu") if settings.autocast == torch.float16 else None
    monitor = Monitor(called, optimizer, scaler, on_anomaly=RECORD, **options)
    train(settings, seed, called, optimizer, scaler, monitor)
    monitor.detach()
    torch.set_num_threads(1)
    return monitor.recording()


class Phrases:
    """Token sequences in which half of the tokens follow from the one before, the others from the one before that."""

    def __init__(self, size: int, length: int = 16) -> None:
        task = torch.Generator().manual_seed(0)
        self.follows = torch.stack([torch.randperm(TOKENS, generator=task) for _ in range(2)])
        self.shares = 1 / torch.arange(1.0, TOKENS + 1)
        self.random = task
        self.size, self.length = size, length

    def __call__(self) -> Batch:
        shape = self.size, self.length + 2
        drawn = torch.multinomial(self.shares, shape[0] * shape[1], True, generator=self.random).view(shape)
        back = torch.arange(shape[1]) % 2
        surprise = torch.rand(shape, generator=self.random) < 0.2
        for i in range(2, shape[1]):
            known = self.follows[back[i], drawn[:, i - 1 - int(back[i])]]
            drawn[:, i] = torch.where(surprise[:, i], drawn[:, i], known)
        return drawn[:, 1:-1], drawn[:, 2:]


def batches(settings: Settings, seed: int) -> Callable[[], Batch]:
    """Draws micro-batches of the task."""
    size = settings.size // settings.accumulate
    make: Any = Phrases(size) if settings.model == "transformer" else Clusters(0, 16, size=size, noise=2.0)
    make.random = torch.Generator().manual_seed(seed)
    return make


def train(
    settings: Settings, seed: int, model: Any, optimizer: Optimizer, scaler: Any, monitor: Monitor
) -> None:
    """Trains ``model``."""
    draw, random = batches(settings, seed), torch.Generator().manual_seed(seed)
    held: list[Batch] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / max(1, settings.warmup))
        total = 0.0
        if step % settings.repeats == 0:
            held = [draw() for _ in range(settings.accumulate)]
            if settings.change_batch is not None:
                held = [settings.change_batch(batch, random) for batch in held]
        for batch in held:
            with torch.autocast("cpu", settings.autocast or torch.bfloat16, enabled=settings.autocast is not None):
                logits = model(batch[0]).flatten(0, -2)
            if settings.loss is not None:
                loss = settings.loss(logits.float(), batch[1].flatten())
            else:
                loss = F.cross_entropy(
                    logits.float(), batch[1].flatten(), label_smoothing=settings.smoothing, reduction=settings.reduction
                )
            if settings.divided:
                loss = loss / settings.accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += float(loss.detach())
        monitor.step(total)
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if settings.clears:
            optimizer.zero_grad()


# Mistakes and harmless changes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A change of a healthy training.

    Attributes:
        what: What is changed, in words.
        changes: Fields of `Settings`.
        model: The training it is made in.
        names: What has to be named: a part of `GoldenComparison.where` or ``what``; empty if there is no right answer.
    """

    what: str
    changes: dict[str, Any]
    model: str = "transformer"
    names: str = ""


def _shuffled(batch: Batch, random: torch.Generator) -> Batch:
    return batch[0], batch[1].flatten()[torch.randperm(batch[1].numel(), generator=random)].view_as(batch[1])


def _unshifted(batch: Batch, random: torch.Generator) -> Batch:
    return batch[0], batch[0]


def _renamed(batch: Batch, random: torch.Generator) -> Batch:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(9))
    return order[batch[0]], order[batch[1]]


def _reversed_tokens(batch: Batch, random: torch.Generator) -> Batch:
    return batch[0].flip(1), batch[1].flip(1)


def _constant_sample(batch: Batch, random: torch.Generator) -> Batch:
    return batch[0][:1].expand_as(batch[0]).clone(), batch[1][:1].expand_as(batch[1]).clone()


def _unnormalised(batch: Batch, random: torch.Generator) -> Batch:
    return 3 * batch[0] + 2, batch[1]


def _missing_feature(batch: Batch, random: torch.Generator) -> Batch:
    inputs = batch[0].clone()
    inputs[:, 3] = 0
    return inputs, batch[1]


def _frozen(name: str) -> Callable[[nn.Module], object]:
    return lambda model: model.get_parameter(name).requires_grad_(False)


def _zero_head(model: Any) -> None:
    model.head.weight.zero_()


def _half_zero_head(model: Any) -> None:
    model.head.weight[: TOKENS // 2] = 0


def _tied(model: Any) -> None:
    model.head.weight = model.tokens.weight


def _detached(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda module, inputs, output: output.detach())


def _evaluates(model: Any) -> None:
    model.eval()


def _shared_block(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def _skipped_block(model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda module, inputs, output: inputs[0])


def _noisy_gradient(model: Any) -> None:
    model.head.weight.register_hook(lambda gradient: 0.5 * gradient)


def _by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(1, labels[:, None]).mean()


def _softmax_twice(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.softmax(-1), labels)


def _options(**options: Any) -> dict[str, Any]:
    return {"optimizer_options": options}


SGD = {"optimizer": torch.optim.SGD, "optimizer_options": {"momentum": 0.9}}

MISTAKES = (
    Case("loss not divided under accumulation", {"accumulate": 2, "divided": False}, names="everywhere"),
    Case("half a batch", {"size": 8}),
    Case("one matrix frozen", {"change_model": _frozen("blocks.1.up.weight")}, names="blocks.1.up"),
    Case("dropout 0.2 added", {"dropout": 0.2}),
    Case("not causal", {"causal": False}, names="everywhere"),
    Case("SGD for AdamW", SGD),
    Case("post-norm for pre-norm", {"pre_norm": False}, names="everywhere"),
    Case("scores not scaled", {"scaled": False}, names="attention"),
    Case("learning rate × 1.5", {"lr": 1.5e-2}, names="learning rate"),
    Case("learning rate × 1.1", {"lr": 1.1e-2}, names="learning rate"),
    Case("no warm-up", {"warmup": 0}, names="learning rate"),
    Case("β1 = 0", _options(betas=(0.0, 0.999)), names="optimizer"),
    Case("β2 = 0.95", _options(betas=(0.9, 0.95)), names="optimizer"),
    Case("eps 1e-3", _options(eps=1e-3)),
    Case("eps 1e-5", _options(eps=1e-5)),
    Case("weight decay 0", {"weight_decay": 0.0}),
    Case("decay on norms and biases", {"decays_all": True}),
    Case("label smoothing 0.1", {"smoothing": 0.1}),
    Case("initial weights × 0.5", {"init": 0.5}, names="initial parameters"),
    Case("initial weights × 1.2", {"init": 1.2}, names="initial parameters"),
    Case("each batch four times", {"repeats": 4}),
    Case("one batch for ever", {"repeats": STEPS}),
    Case("ReLU for GELU", {"activation": F.relu}),
    Case("labels shuffled", {"change_batch": _shuffled}, names="everywhere"),
    Case("labels not shifted", {"change_batch": _unshifted}, names="everywhere"),
    Case("sequences reversed", {"change_batch": _reversed_tokens}, names="everywhere"),
    Case("one sample in all places of a batch", {"change_batch": _constant_sample}, names="everywhere"),
    Case("no residual connections", {"residual": False}, names="everywhere"),
    Case("no final norm", {"final_norm": False}, names="everywhere"),
    Case("no positions", {"positions": False}, names="places"),
    Case("heads mixed by view()", {"mixes_heads": True}, names="attention"),
    Case("loss summed", {"reduction": "sum"}, names="everywhere"),
    Case("softmax before the cross-entropy", {"loss": _softmax_twice}, names="everywhere"),
    Case("clip at 0.1", {"max_norm": 0.1}),
    Case("gradients not cleared", {"clears": False}, names="everywhere"),
    Case("head of zeros", {"change_model": _zero_head}, names="head"),
    Case("half of the head zeros", {"change_model": _half_zero_head}, names="head"),
    Case("head tied to the embedding", {"change_model": _tied}, names="head"),
    Case("first block detached", {"change_model": _detached}, names="blocks.0"),
    Case("second block skipped", {"change_model": _skipped_block}, names="blocks.1"),
    Case("gradient of the head halved", {"change_model": _noisy_gradient}, names="head"),
    Case("inputs not normalised", {"change_batch": _unnormalised}, "MLP", "0"),
    Case("one input feature missing", {"change_batch": _missing_feature}, "MLP", "0"),
    Case("labels shuffled, MLP", {"change_batch": _shuffled}, "MLP", "everywhere"),
    Case("batch norm in evaluation mode", {"change_model": _evaluates}, "MLP"),
    Case("dropout 0.5 added, MLP", {"dropout": 0.5}, "MLP"),
    Case("half a batch, MLP", {"size": 16}, "MLP"),
    Case("learning rate × 1.5, MLP", {"lr": 3e-3}, "MLP", "learning rate"),
)

HARMLESS = (
    Case("another seed", {}),
    Case("fused AdamW", _options(fused=True)),
    Case("foreach AdamW", _options(foreach=True)),
    Case("AdamW one by one", _options(foreach=False)),
    Case("tanh GELU", {"activation": lambda x: F.gelu(x, approximate="tanh")}),
    Case("torch.compile, aot_eager", {"wrap": lambda model: torch.compile(model, backend="aot_eager")}),
    Case("torch.compile, inductor", {"wrap": torch.compile}),
    Case("activation checkpointing", {"recomputes": True}),
    Case("two threads", {"threads": 2}),
    Case("math SDPA", {"kernel": SDPBackend.MATH}),
    Case("flash SDPA", {"kernel": SDPBackend.FLASH_ATTENTION}),
    Case("attention in plain operations", {"eager": True}),
    Case("bf16 autocast", {"autocast": torch.bfloat16}),
    Case("fp16 autocast with a scaler", {"autocast": torch.float16}),
    Case("two micro-batches, divided", {"accumulate": 2}),
    Case("cross-entropy by hand", {"loss": _by_hand}),
    Case("tokens renamed", {"change_batch": _renamed}),
    Case("fused AdamW, MLP", _options(fused=True), "MLP"),
    Case("bf16 autocast, MLP", {"autocast": torch.bfloat16}, "MLP"),
    Case("fp16 autocast, MLP", {"autocast": torch.float16}, "MLP"),
)
