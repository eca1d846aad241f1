"""Ordinary mistakes for the benchmark of detection: functions that break a small training the way people do.

A `Subject` is a small model with its task; those of one half are for tuning rules, those of the other for figures.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from helpers.training import (
    CLASSES,
    Bags,
    Clusters,
    Training,
    cnn,
    factory,
    train,
    train_gpt,
    train_mlp,
    train_recurrent,
)
from helpers.training_faults import every_batch, learning_rate, loss, next_batch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
ANYTHING = ""  # a fault that is everywhere has no place
DATA = r"^(batch|input)"
LABELS = r"^(batch\[1\]|loss|logits|output)"
RATE = r"^(lr|param_groups|update|optimizer)"


@dataclass(frozen=True)
class Subject:
    """A small model with its task, and the names of its parts that mistakes are made in."""

    name: str
    half: str
    training: Callable[[int], Training]
    first: str  # the first module that the input goes through
    hidden: str  # a module in the middle; only what follows it learns if it is detached
    dead: tuple[str, ...]  # biases; very negative ones kill everything that goes through them
    head: str


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _residual() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 24), _Residual(24), _Residual(24), nn.LayerNorm(24), nn.Linear(24, CLASSES))


def _group_normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.GroupNorm(3, 12),
        nn.SiLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(432, CLASSES),
    )


class _Encoder(nn.Module):
    """Words to classes: an embedding, an encoder layer of torch, a mean and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.words(words)).mean(1))


SUBJECTS = (
    Subject("MLP", "tuning", lambda seed: train_mlp(seed, batch=Clusters(seed, 16, noise=2.5)), "0", "2",
            ("2.bias",), "4"),
    Subject("CNN", "tuning",
            lambda seed: train(seed, cnn, factory(torch.optim.SGD, 0.02, momentum=0.9, weight_decay=5e-4),
                               Clusters(seed, 1, 8, 8, size=16, noise=5.0)), "0", "3", ("4.bias",), "7"),
    Subject("GPT", "tuning", train_gpt, "tokens", "blocks.0", ("blocks.0.up.bias", "blocks.1.up.bias"), "head"),
    Subject("residual MLP", "figures",
            lambda seed: train(seed, _residual, factory(torch.optim.SGD, 0.05, momentum=0.9),
                               Clusters(seed, 24, noise=3.0)), "0", "1", ("1.up.bias", "2.up.bias"), "4"),
    Subject("CNN with group norm", "figures",
            lambda seed: train(seed, _group_normed, factory(torch.optim.Adam, 2e-3),
                               Clusters(seed, 3, 6, 6, size=16, noise=6.0)), "0", "3", ("3.bias",), "6"),
    Subject("LSTM", "figures", train_recurrent, "tokens", "cells", ("cells.bias_ih_l0",), "head"),
    Subject("encoder", "figures",
            lambda seed: train(seed, _Encoder, factory(torch.optim.AdamW, 3e-3, weight_decay=0.05),
                               Bags(seed, 60, size=32)), "words", "layer", ("layer.linear1.bias",), "head"),
)  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """A mistake, and a regular expression, made from the subject, for the names that a finding has to contain."""

    what: str
    breaks: Callable[[Training, Subject], object]
    place: Callable[[Subject], str]
    inputs: str = "any"  # "float" or "tokens": only for such inputs
    onsets: tuple[str, ...] = ("mid-run", "start")
    is_held_out: bool = False  # judged by the healthy loss of unseen healthy batches, as the loss means something else


def _of(breaks: Callable[[Training], object]) -> Callable[[Training, Subject], object]:
    return lambda training, subject: breaks(training)


def _at(*parts: str) -> Callable[[Subject], str]:
    """The place is one of these modules of the subject, or a part of it."""

    def place(subject: Subject) -> str:
        names = [name for part in parts for name in _modules(getattr(subject, part))]
        return "|".join(f"^{name}".replace(".", r"\.") for name in names)

    return place


def _modules(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(name.rpartition(".")[0] for name in value)


def at_outputs(subject: Subject) -> str:
    """The place is the last module, through which all gradients flow, or the model's output."""
    return f"{_at('head')(subject)}|^logits$"


def _is(place: str) -> Callable[[Subject], str]:
    return lambda subject: place


def _wrapped(change: Callable[[Tensor], Tensor], part: str = "head") -> Callable[[Training, Subject], None]:
    """Changes what a module returns, from now on."""

    def hook(module: nn.Module, inputs: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return lambda training, subject: training.model.get_submodule(getattr(subject, part)).register_forward_hook(hook)


# Data -------------------------------------------------------------------------------------------------------------


def _shuffled(share: float) -> Callable[[Training], None]:
    random = torch.Generator().manual_seed(1)

    def spoil(batch: Batch) -> Batch:
        labels = batch[1].flatten().clone()
        some = torch.randperm(len(labels), generator=random)[: round(share * len(labels))]
        labels[some] = labels[some[torch.randperm(len(some), generator=random)]]
        return batch[0], labels.view_as(batch[1])

    return every_batch(spoil)


def _random_labels(training: Training) -> None:
    random = torch.Generator().manual_seed(1)
    most = 1 + max(int(training.batch()[1].max()) for _ in range(4))
    every_batch(lambda batch: (batch[0], torch.randint(most, batch[1].shape, generator=random)))(training)


def _repeated(training: Training) -> None:
    batch = training.batch()
    training.batch = lambda: batch


def _one_class(training: Training) -> None:
    """The data is sorted: twenty batches of one class, then twenty of the next."""
    healthy, numbers = training.batch, itertools.count()

    def batch() -> Batch:
        inputs, labels = healthy()
        wanted = torch.nonzero(labels == next(numbers) // 20 % CLASSES)[:, 0]
        return (inputs[wanted], labels[wanted]) if len(wanted) else (inputs, labels)

    training.batch = batch


def _with_nan(batch: Batch) -> Batch:
    inputs = batch[0].clone()
    inputs[0].view(-1)[3] = math.nan
    return inputs, batch[1]


def _misplaced(training: Training) -> None:
    every_batch(lambda batch: (batch[0].roll(1, 0), batch[1]))(training)


# Loss -------------------------------------------------------------------------------------------------------------


def _times(factor: float) -> Callable[[Training], None]:
    def breaks(training: Training) -> None:
        healthy = training.loss
        training.loss = lambda model, batch: factor * healthy(model, batch)

    return breaks


def _over_batch(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0]).flatten(0, -2)
    return F.nll_loss(F.log_softmax(logits, 0), batch[1].flatten())


# Weights ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _every_weight(training: Training, change: Callable[[Tensor], object]) -> None:
    for parameter in training.model.parameters():
        if parameter.dim() > 1:
            change(parameter)


@torch.no_grad()
def _dead(training: Training, subject: Subject) -> None:
    for name in subject.dead:
        training.model.get_parameter(name).fill_(-1e3)


@torch.no_grad()
def _filled(training: Training, subject: Subject, part: str, change: Callable[[Tensor], object]) -> None:
    for parameter in training.model.get_submodule(getattr(subject, part)).parameters():
        change(parameter)


@torch.no_grad()
def _half_of_rows(training: Training, subject: Subject) -> None:
    training.model.get_parameter(f"{subject.first}.weight")[::2] = 0


def _anew(training: Training, subject: Subject) -> None:
    for module in training.model.get_submodule(subject.hidden).modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


# Optimizer --------------------------------------------------------------------------------------------------------


def _groups(**values: Any) -> Callable[[Training], None]:
    def breaks(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group.update({key: value for key, value in values.items() if key in group})

    return breaks


def _of_a_copy(training: Training) -> None:
    made = type(training.optimizer)(copy.deepcopy(training.model).parameters(), lr=1e-3)
    training.optimizer = made


def _last_layer_only(training: Training, subject: Subject) -> None:
    head = list(training.model.get_submodule(subject.head).parameters())
    training.optimizer = type(training.optimizer)(head, lr=training.optimizer.param_groups[0]["lr"])


def _frozen(training: Training, subject: Subject) -> None:
    head = set(training.model.get_submodule(subject.head).parameters())
    for parameter in training.model.parameters():
        parameter.requires_grad_(parameter in head)


def _never_zeroed(training: Training) -> None:
    training.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def _zeroed_too_late(training: Training) -> None:
    update = training._update
    training._update = lambda: (training.optimizer.zero_grad(), update())  # type: ignore[method-assign]


def _never_stepped(training: Training) -> None:
    training._update = lambda: None  # type: ignore[method-assign]


def _made_anew(training: Training) -> None:
    """A new optimizer for every step."""
    update, kind = training._update, type(training.optimizer)

    def anew() -> None:
        update()
        training.optimizer = kind(training.model.parameters(), lr=training.optimizer.param_groups[0]["lr"])

    training._update = anew  # type: ignore[method-assign]


def _halved(training: Training) -> None:
    """A scheduler meant for epochs that is stepped every step."""
    update = training._update
    training._update = lambda: (update(), learning_rate(lambda lr: 0.8 * lr)(training))  # type: ignore[method-assign]


def _forgets_state(training: Training) -> None:
    for kept in training.optimizer.state.values():
        for tensor in kept.values():
            if isinstance(tensor, Tensor):
                tensor.zero_()


def _heavy(training: Training) -> None:
    _groups(momentum=0.9999)(training)
    for group in training.optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.9999, group["betas"][1])


MISTAKES = (
    # The output and the loss
    Mistake("softmax before cross-entropy", _wrapped(lambda out: out.softmax(-1)), at_outputs),
    Mistake("sigmoid before cross-entropy", _wrapped(torch.sigmoid), at_outputs),
    Mistake("ReLU on the logits", _wrapped(torch.relu), at_outputs),
    Mistake("log-softmax over the batch", _of(loss(_over_batch)), _is(LABELS), is_held_out=True),
    Mistake("the loss is maximised", _of(_times(-1.0)), _is("^loss"), is_held_out=True),
    Mistake("loss times 1e-6", _of(_times(1e-6)), _is(ANYTHING), is_held_out=True),
    Mistake("loss times 1e6", _of(_times(1e6)), _is(ANYTHING), is_held_out=True),
    Mistake("logits times 1,000", _wrapped(lambda out: 1e3 * out), at_outputs),
    Mistake("a branch is detached", _wrapped(Tensor.detach, "hidden"), _at("first", "hidden")),
    Mistake("a layer's output is zero", _wrapped(torch.zeros_like, "hidden"), _at("hidden")),
    Mistake("dropout of 0.95", _wrapped(lambda out: F.dropout(out, 0.95), "hidden"), _at("hidden")),
    # Data
    Mistake("shuffled labels", _of(_shuffled(1.0)), _is(LABELS), is_held_out=True),
    Mistake("half of the labels shuffled", _of(_shuffled(0.5)), _is(LABELS)),
    Mistake("random labels", _of(_random_labels), _is(LABELS)),
    Mistake("inputs and labels of different samples", _of(_misplaced), _is(f"{DATA}|{LABELS}")),
    Mistake("all labels equal", _of(every_batch(lambda b: (b[0], torch.zeros_like(b[1])))), _is(LABELS),
            is_held_out=True),
    Mistake("the same batch for ever", _of(_repeated), _is(DATA), is_held_out=True),
    Mistake("sorted data: batches of one class", _of(_one_class), _is(LABELS), "float", is_held_out=True),
    Mistake("inputs times 255", _of(every_batch(lambda b: (255 * b[0], b[1]))), _is(DATA), "float"),
    Mistake("inputs plus 1,000", _of(every_batch(lambda b: (b[0] + 1e3, b[1]))), _is(DATA), "float"),
    Mistake("inputs divided by 255 twice", _of(every_batch(lambda b: (b[0] / 255, b[1]))), _is(DATA), "float"),
    Mistake("inputs are zero", _of(every_batch(lambda b: (torch.zeros_like(b[0]), b[1]))), _is(DATA)),
    Mistake("every batch repeats one sample",
            _of(every_batch(lambda b: (b[0][:1].expand_as(b[0]).clone(), b[1][:1].expand_as(b[1]).clone()))),
            _is(DATA), is_held_out=True),
    Mistake("NaN in one batch", _of(next_batch(_with_nan)), _is(DATA), "float"),
    Mistake("one batch times 1e4", _of(next_batch(lambda b: (1e4 * b[0], b[1]))), _is(DATA), "float", ("mid-run",)),
    # Optimizer
    Mistake("weight decay 50", _of(_groups(weight_decay=50.0)), _is(ANYTHING)),
    Mistake("learning rate 1", _of(learning_rate(lambda lr: 1.0)), _is(RATE)),
    Mistake("learning rate 1e-9", _of(learning_rate(lambda lr: 1e-9)), _is(RATE)),
    Mistake("learning rate times 100", _of(learning_rate(lambda lr: 100 * lr)), _is(RATE)),
    Mistake("the scheduler of epochs runs every step", _of(_halved), _is(RATE)),
    Mistake("momentum 0.9999", _of(_heavy), _is(ANYTHING)),
    Mistake("optimizer of a copy of the model", _of(_of_a_copy), _is(ANYTHING)),
    Mistake("optimizer of the last layer only", _last_layer_only, _is(ANYTHING)),
    Mistake("all layers but the last are frozen", _frozen, _is(ANYTHING)),
    Mistake("zero_grad is missing", _of(_never_zeroed), _is(ANYTHING)),
    Mistake("zero_grad between backward and step", _of(_zeroed_too_late), _is(ANYTHING)),
    Mistake("optimizer.step is missing", _of(_never_stepped), _is(ANYTHING)),
    Mistake("a new optimizer for every step", _of(_made_anew), _is(ANYTHING)),
    Mistake("gradients clipped to 1e-6", lambda t, s: setattr(t, "max_norm", 1e-6), _is(ANYTHING)),
    Mistake("optimizer state is lost", _of(_forgets_state), _is(ANYTHING), onsets=("mid-run",)),
    # Weights
    Mistake("dead units", _dead, _at("dead")),
    Mistake("constant weights", lambda t, s: _every_weight(t, lambda w: w.fill_(0.05)), _is(ANYTHING)),
    Mistake("zero weights", lambda t, s: _every_weight(t, Tensor.zero_), _is(ANYTHING)),
    Mistake("weights times 20", lambda t, s: _every_weight(t, lambda w: w.mul_(20)), _is(ANYTHING)),
    Mistake("weights times 0.01", lambda t, s: _every_weight(t, lambda w: w.mul_(0.01)), _is(ANYTHING)),
    Mistake("a layer is initialised anew", _anew, _at("hidden"), onsets=("mid-run",)),
    Mistake("half of the embeddings are zeroed", _half_of_rows, _at("first"), "tokens", ("mid-run",)),
    Mistake("one layer times 30", lambda t, s: _filled(t, s, "hidden", lambda w: w.mul_(30)), _at("hidden")),
    Mistake("noise on one layer",
            lambda t, s: _filled(t, s, "hidden", lambda w: w.add_(torch.randn(w.shape, generator=_noise()))),
            _at("hidden")),
)  # fmt: skip


def _noise() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def applies(mistake: Mistake, subject: Subject) -> bool:
    """Whether a mistake can be made with a subject's inputs."""
    return mistake.inputs in ("any", _inputs_of(subject))


@cache
def _inputs_of(subject: Subject) -> str:
    return "float" if subject.training(0).batch()[0].is_floating_point() else "tokens"
