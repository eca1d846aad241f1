"""Measures how often golden runs call healthy runs unlike, and which mistakes and harmless changes they notice.

Small models are trained with many seeds. For each model, held-out healthy runs are compared with golden sets of 3, 5
and 8 runs, drawn at random. Then runs with one mistake of refactoring, or one harmless change, are compared with sets
of five. ::

    python benchmarks/golden.py --keep /tmp/runs      # recordings are kept there, and made only once
    python benchmarks/golden.py --keep /tmp/runs --record

With ``--python`` of an environment that has another torch, runs under that one are compared as well.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
import tables  # noqa: E402
from helpers.training import (  # noqa: E402
    CLASSES,
    RECORD,
    TOKENS,
    Clusters,
    Recurrent,
    Sentences,
    Training,
    cnn,
    factory,
)
from helpers.training import train as train_model  # noqa: E402
from rows import Row, add_arguments, append, microseconds, row  # noqa: E402

from gradstat.monitor import Golden, Monitor, Recording, Series  # noqa: E402
from gradstat.monitor.recording import GoldenComparison, load, save  # noqa: E402

STEPS = 160
CPU = torch.device("cpu")
HEALTHY_GROUP, MISTAKE_GROUP, HARMLESS_GROUP, COST_GROUP = (
    f"golden, {what}" for what in ("healthy", "mistakes", "harmless", "cost")
)
POOL = 40  # seeds from which golden runs are drawn; the next ones are held out
SEEDS = (900, 901)  # of runs with a mistake
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
    ranks: str = ""  # "ddp" or "fsdp": on two ranks, each with half of every batch
    trainer: bool = False  # the Trainer of transformers instead of the loop
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
    drop = nn.Dropout(settings.dropout)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), drop,
        nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), drop, nn.Linear(32, CLASSES),
    )  # fmt: skip


HEALTHY = {
    "transformer": Settings(),
    "MLP": Settings("mlp", size=32, lr=2e-3, warmup=0, max_norm=math.inf, weight_decay=0.01),
}


def _watched(made: Training, seed: int) -> Recording:
    """The recording of a training of the tests' models."""
    monitor = made.monitor()
    made.batch.random = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]
    for _ in made.steps(monitor, 0, STEPS):
        pass
    monitor.detach()
    return monitor.recording()


def cnn_run(seed: int) -> Recording:
    """A CNN with batch norm, with SGD and momentum."""
    optimize = factory(torch.optim.SGD, 0.05, momentum=0.9, weight_decay=5e-4)
    return _watched(train_model(seed, cnn, optimize, Clusters(0, 1, 8, 8, size=16, noise=2.0)), seed)


def lstm_run(seed: int) -> Recording:
    """An LSTM, with Adam and clipping."""
    optimize = factory(torch.optim.Adam, 5e-3)
    return _watched(train_model(seed, lambda: Recurrent(nn.LSTM), optimize, Sentences(0), max_norm=1.0), seed)


# Nothing was tuned on these models. They are used for healthy runs only.
OTHERS: dict[str, Callable[[int], Recording]] = {"CNN": cnn_run, "LSTM": lstm_run}


def run(settings: Settings, seed: int, **options: Any) -> Recording:
    """The recording of one training. The task is always the same; weights and samples depend on the seed."""
    if settings.ranks:
        import golden  # by this name, which other processes can import
        from helpers.ranks import Ranks

        ranks = Ranks()
        try:
            made: Recording = ranks.run(2, golden.on_a_rank, settings, seed, timeout=270.0)[0]
        finally:
            ranks.stop()
        return made
    torch.set_num_threads(settings.threads)
    model = initialised(settings, seed)
    if settings.trainer:
        return by_trainer(settings, seed, model)
    made = train(settings, seed, model if settings.wrap is None else settings.wrap(model), **options)
    torch.set_num_threads(1)
    return made


def run_elsewhere(python: Path, seed: int) -> Recording:
    """As `run` of the transformer, in the environment of another Python, which needs torch and numpy."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.gradstat"
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        subprocess.run(
            [str(python), "-W", "ignore", __file__, "--one", str(seed), str(file)],
            env={**os.environ, "PYTHONPATH": paths},
            check=True,
        )
        return load(file)


def initialised(settings: Settings, seed: int) -> nn.Module:
    """The model before the first step."""
    torch.manual_seed(1000 + seed)
    model: nn.Module = Transformer(settings) if settings.model == "transformer" else perceptron(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= settings.init
        if settings.change_model is not None:
            settings.change_model(model)
    return model


def optimizer_of(settings: Settings, model: nn.Module) -> Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1 or settings.decays_all]},
        {"params": [p for p in trained if p.dim() <= 1 and not settings.decays_all], "weight_decay": 0.0},
    ]
    return settings.optimizer(
        [group for group in groups if group["params"]],
        **{"lr": settings.lr, "weight_decay": settings.weight_decay, **settings.optimizer_options},
    )


def on_a_rank(settings: Settings, seed: int) -> Recording:
    """As `run`, on one of several ranks."""
    torch.set_num_threads(1)
    model: Any = initialised(settings, seed)
    if settings.ranks == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    return train(settings, seed, model)


def by_trainer(settings: Settings, seed: int, model: nn.Module) -> Recording:
    """As `train`, with the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    from gradstat.integrations.transformers import install

    class Samples(torch.utils.data.IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            draw = batches(settings, seed)
            while True:
                inputs, labels = draw()
                yield from ({"tokens": x, "labels": y} for x, y in zip(inputs, labels, strict=True))

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.model(tokens).flatten(0, -2), labels.flatten())}

    optimizer = optimizer_of(settings, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warmup))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=settings.steps, per_device_train_batch_size=settings.size, use_cpu=True,
            max_grad_norm=settings.max_norm, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(WithLoss(), arguments, train_dataset=Samples(), optimizers=(optimizer, schedule))
        handle = install(trainer, on_anomaly="record", log=False)
        trainer.train()
        made: Recording = handle.monitor.recording()
        handle.remove()
    without = {
        kind: Series(tuple(name.removeprefix("model.") for name in one.names), one.numel, one.steps, one.values)
        for kind, one in made.tables.items()
    }
    return replace(made, tables=without)


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


def train(settings: Settings, seed: int, model: Any, **options: Any) -> Recording:
    """Trains ``model`` and returns the recording."""
    optimizer = optimizer_of(settings, model)
    scaler = torch.amp.GradScaler("cpu") if settings.autocast == torch.float16 else None
    monitor = Monitor(model, optimizer, scaler, on_anomaly=RECORD, **options)
    draw, samples = batches(settings, seed), torch.Generator().manual_seed(seed)
    rank, world = (dist.get_rank(), dist.get_world_size()) if settings.ranks else (0, 1)
    micro_batches: list[Batch] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / max(1, settings.warmup))
        if step % settings.repeats == 0:
            micro_batches = [draw() for _ in range(settings.accumulate)]
            if settings.change_batch is not None:
                micro_batches = [settings.change_batch(batch, samples) for batch in micro_batches]
        total = torch.zeros(())
        for inputs, labels in micro_batches:
            inputs, labels = inputs[rank::world], labels[rank::world].flatten()
            with torch.autocast("cpu", settings.autocast or torch.bfloat16, enabled=settings.autocast is not None):
                logits = model(inputs).flatten(0, -2)
            if settings.loss is not None:
                loss = settings.loss(logits.float(), labels)
            else:
                loss = F.cross_entropy(
                    logits.float(), labels, label_smoothing=settings.smoothing, reduction=settings.reduction
                )
            if settings.divided:
                loss = loss / settings.accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
        if settings.ranks:
            dist.all_reduce(total)
            total /= world
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
    monitor.detach()
    return monitor.recording()


# Mistakes and harmless changes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A change of a healthy training.

    Attributes:
        what: What is changed, in words.
        changes: Fields of `Settings`.
        model: The training it is made in.
        names: A part that `GoldenComparison.where` or ``what`` has to contain; empty if there is no right answer.
        python: The interpreter of another environment in which it runs.
    """

    what: str
    changes: dict[str, Any]
    model: str = "transformer"
    names: str = ""
    python: Path | None = None


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
    Case("half a batch", {"size": 8}, names="everywhere"),
    Case("one matrix frozen", {"change_model": _frozen("blocks.1.up.weight")}, names="blocks.1.up"),
    Case("dropout 0.2 added", {"dropout": 0.2}),
    Case("not causal", {"causal": False}, names="everywhere"),
    Case("SGD for AdamW", SGD, names="everywhere"),
    Case("post-norm for pre-norm", {"pre_norm": False}, names="everywhere"),
    Case("scores not scaled", {"scaled": False}, names="attention"),
    Case("learning rate times 1.5", {"lr": 1.5e-2}, names="learning rate"),
    Case("learning rate times 1.1", {"lr": 1.1e-2}, names="learning rate"),
    Case("no warm-up", {"warmup": 0}, names="learning rate"),
    Case("β1 = 0", _options(betas=(0.0, 0.999)), names="optimizer"),
    Case("β2 = 0.95", _options(betas=(0.9, 0.95)), names="optimizer"),
    Case("eps 1e-3", _options(eps=1e-3), names="optimizer"),
    Case("eps 1e-5", _options(eps=1e-5), names="optimizer"),
    Case("weight decay 0", {"weight_decay": 0.0}, names="optimizer"),
    Case("decay on norms and biases", {"decays_all": True}, names="optimizer"),
    Case("label smoothing 0.1", {"smoothing": 0.1}, names="the loss"),
    Case("initial weights times 0.5", {"init": 0.5}, names="initial parameters"),
    Case("initial weights times 1.2", {"init": 1.2}, names="initial parameters"),
    Case("each batch four times", {"repeats": 4}, names="batches"),
    Case("one batch for ever", {"repeats": STEPS}, names="everywhere"),
    Case("ReLU for GELU", {"activation": F.relu}),
    Case("labels shuffled", {"change_batch": _shuffled}, names="everywhere"),
    Case("labels not shifted", {"change_batch": _unshifted}, names="everywhere"),
    Case("sequences reversed", {"change_batch": _reversed_tokens}, names="everywhere"),
    Case("one sample in all places of a batch", {"change_batch": _constant_sample}, names="everywhere"),
    Case("no residual connections", {"residual": False}, names="everywhere"),
    Case("no final norm", {"final_norm": False}, names="norm"),
    Case("no positions", {"positions": False}, names="places"),
    Case("heads mixed by view()", {"mixes_heads": True}, names="attention"),
    Case("loss summed", {"reduction": "sum"}, names="everywhere"),
    Case("softmax before the cross-entropy", {"loss": _softmax_twice}, names="everywhere"),
    Case("clip at 0.1", {"max_norm": 0.1}, names="optimizer"),
    Case("gradients not cleared", {"clears": False}, names="everywhere"),
    Case("head of zeros", {"change_model": _zero_head}, names="head"),
    Case("half of the head zeros", {"change_model": _half_zero_head}, names="head"),
    Case("head tied to the embedding", {"change_model": _tied}, names="tokens|head"),
    Case("first block detached", {"change_model": _detached}, names="tokens|blocks.0"),
    Case("second block skipped", {"change_model": _skipped_block}, names="blocks.1"),
    Case("gradient of the head halved", {"change_model": _noisy_gradient}, names="head"),
    Case("inputs not normalised", {"change_batch": _unnormalised}, "MLP", "buffers"),
    Case("one input feature missing", {"change_batch": _missing_feature}, "MLP", "0"),
    Case("labels shuffled, MLP", {"change_batch": _shuffled}, "MLP", "everywhere"),
    Case("batch norm in evaluation mode", {"change_model": _evaluates}, "MLP", "buffers"),
    Case("dropout 0.5 added, MLP", {"dropout": 0.5}, "MLP"),
    Case("half a batch, MLP", {"size": 16}, "MLP", "everywhere"),
    Case("learning rate times 1.5, MLP", {"lr": 3e-3}, "MLP", "learning rate"),
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
    Case("DDP on two ranks", {"ranks": "ddp"}),
    Case("FSDP2 on two ranks", {"ranks": "fsdp"}),
    Case("the Trainer of transformers for a loop", {"trainer": True}),
    Case("fused AdamW, MLP", _options(fused=True), "MLP"),
    Case("bf16 autocast, MLP", {"autocast": torch.bfloat16}, "MLP"),
    Case("fp16 autocast, MLP", {"autocast": torch.float16}, "MLP"),
)


# What is measured --------------------------------------------------------------------------------------------------


class Runs:
    """Makes recordings, and keeps them in a folder if there is one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._made: dict[str, Recording] = {}

    def of(self, name: str, make: Callable[[int], Recording], seed: int) -> Recording:
        key = f"{name.replace('/', ' ')}-{seed}"
        if key not in self._made:
            file = None if self._folder is None else self._folder / f"{key}.gradstat"
            if file is not None and file.exists():
                self._made[key] = load(file)
            else:
                self._made[key] = make(seed)
                if file is not None:
                    save(self._made[key], file)
        return self._made[key]


def healthy_rows(runs: Runs, held_out: int, sets: int) -> Iterator[Row]:
    """How many held-out healthy runs are called unlike."""
    for name, make in ({name: partial(run, settings) for name, settings in HEALTHY.items()} | OTHERS).items():
        pool = [runs.of(name, make, seed) for seed in range(POOL)]
        others = [runs.of(name, make, seed) for seed in range(POOL, POOL + held_out)]
        chosen = random.Random(0)
        for count in (3, 5, 8):
            golden = [Golden.of(chosen.sample(pool, count)) for _ in range(sets)]
            shares = [statistics.fmean(not one.compare(other).ok for other in others) for one in golden]
            case = f"{name}, {held_out} held-out runs"
            yield row(
                HEALTHY_GROUP, case, f"{count} golden runs", "called unlike", "%", 100 * statistics.fmean(shares), CPU
            )
            yield row(
                HEALTHY_GROUP, case, f"{count} golden runs", "called unlike, worst set", "%", 100 * max(shares), CPU
            )
            yield row(HEALTHY_GROUP, case, f"{count} golden runs", "golden sets", "", sets, CPU)


def case_rows(runs: Runs, group: str, cases: Sequence[Case], sets: int) -> Iterator[Row]:
    """How many runs with a change are called unlike, from which step on, and which places are named."""
    golden = {
        name: [
            Golden.of(runs.of(name, partial(run, settings), seed) for seed in range(5 * i, 5 * i + 5))
            for i in range(min(sets, POOL // 5))
        ]
        for name, settings in HEALTHY.items()
    }
    for case in cases:
        make: Callable[[int], Recording] = partial(run, replace(HEALTHY[case.model], **case.changes))
        if case.python is not None:
            make = partial(run_elsewhere, case.python)
        made = [runs.of(case.what, make, seed) for seed in SEEDS]
        compared = [one.compare(recording) for one in golden[case.model] for recording in made]
        unlike = [comparison for comparison in compared if not comparison.ok]
        told = Counter(re.sub(r" \(.*\)$", "", f"{one.where}: {one.what}") for one in unlike)
        provider = told.most_common(1)[0][0] if told else ""
        yield row(group, case.what, provider, "called unlike", "%", 100 * len(unlike) / len(compared), CPU)
        if unlike:
            first = statistics.median(comparison.findings[0].step for comparison in unlike)
            yield row(group, case.what, provider, "first step", "", first, CPU)
        if unlike and case.names:
            right = statistics.fmean(is_right(case, comparison) for comparison in unlike)
            yield row(group, case.what, provider, "right place", "%", 100 * right, CPU)


def is_right(case: Case, comparison: GoldenComparison) -> bool:
    """Whether the comparison names what is changed."""
    return any(name in f"{comparison.where}: {comparison.what}" for name in case.names.split("|"))


def cost_rows() -> Iterator[Row]:
    """The time of a comparison, and the size of a file."""
    runs = [_long(seed) for seed in range(6)]
    golden = Golden.of(runs[:5])
    case = "2,000 steps, 300 tensors"
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        golden.compare(runs[5])
        seconds.append(time.perf_counter() - start)
    yield row(COST_GROUP, case, "Golden.compare", "wall time", "us", microseconds(seconds), CPU, tensors=300)
    with tempfile.TemporaryDirectory() as folder:
        size = golden.save(Path(folder) / "golden.gradstat").stat().st_size
    yield row(COST_GROUP, case, "golden.gradstat", "size", "B", size, CPU, tensors=300)


def _long(seed: int) -> Recording:
    """A long made-up run with all that a monitor watches by default."""
    level, noise, steps = np.random.default_rng(0), np.random.default_rng(seed), np.arange(2000)
    run_to_run = level.normal(size=(300, 8)) + 0.05 * noise.normal(size=(1, 300, 8))
    values = np.exp(run_to_run + 0.2 * noise.normal(size=(2000, 300, 8))).astype(np.float32)
    names, numel = tuple(f"blocks.{i}.weight" for i in range(300)), np.full(300, 4096)
    made = {"gradient": Series(names, numel, steps, values)}
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        made[kind] = Series(names, numel, steps[::50], values[::50])
    return Recording(steps, {"loss": np.exp(noise.normal(size=2000)), "lr": np.full(2000, 1e-3)}, made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", type=int, default=100, help="healthy runs of each model (default %(default)s)")
    parser.add_argument("--sets", type=int, default=30, help="golden sets of each size (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="a folder for recordings, which are then made only once")
    parser.add_argument("--python", type=Path, help="the interpreter of an environment with another torch")
    parser.add_argument("--one", nargs=2, metavar=("SEED", "FILE"), help="only record one healthy run")
    add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        save(run(HEALTHY["transformer"], int(options.one[0])), options.one[1])
        return 0
    harmless = list(HARMLESS)
    if options.python is not None:
        asked = [str(options.python), "-c", "import torch; print(torch.__version__.partition('+')[0])"]
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        harmless.append(Case(f"torch {version}", {}, python=options.python))
    runs = Runs(options.keep)
    rows = [
        *healthy_rows(runs, options.held_out, options.sets),
        *case_rows(runs, MISTAKE_GROUP, MISTAKES, 4),
        *case_rows(runs, HARMLESS_GROUP, harmless, 4),
        *cost_rows(),
    ]
    print(tables.golden(rows))
    if options.record:
        append(rows, "golden", options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
