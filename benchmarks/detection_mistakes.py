"""Ordinary mistakes for the benchmark of detection: functions that break a small training the way people do.

A `Subject` is a small model with its task; those of one half are for tuning rules, those of the other for figures.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from detection_judging import ONSET, Case
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
        nn.Conv2d(3, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.SiLU(), nn.Conv2d(12, 12, 3, padding=1), nn.SiLU(),
        nn.Flatten(), nn.Linear(432, CLASSES),
    )  # fmt: skip


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
    """A mistake, and a regular expression for the names that a finding has to contain."""

    what: str
    breaks: Callable[[Training], object]
    place: str
    inputs: str = "any"  # "float" or "tokens": only for such inputs
    onsets: tuple[int, ...] = (ONSET, 0)
    is_held_out: bool = False  # judged by the healthy loss of unseen healthy batches, as the loss means something else


def _at(*modules: str) -> str:
    """The place is one of these modules, or a part of it."""
    return "|".join(f"^{re.escape(name)}" for name in modules)


def _wrapped(change: Callable[[Tensor], Tensor], name: str) -> Callable[[Training], object]:
    """Changes what a module returns, from now on."""

    def hook(module: nn.Module, inputs: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return lambda training: training.model.get_submodule(name).register_forward_hook(hook)


def shuffled(share: float) -> Callable[[Training], None]:
    def breaks(training: Training) -> None:
        random = torch.Generator().manual_seed(1)

        def spoil(batch: Batch) -> Batch:
            labels = batch[1].flatten().clone()
            some = torch.randperm(len(labels), generator=random)[: round(share * len(labels))]
            labels[some] = labels[some[torch.randperm(len(some), generator=random)]]
            return batch[0], labels.view_as(batch[1])

        every_batch(spoil)(training)

    return breaks


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


def constant_sample(batch: Batch) -> Batch:
    """One sample in all places."""
    return batch[0][:1].expand_as(batch[0]).clone(), batch[1][:1].expand_as(batch[1]).clone()


def times(factor: float) -> Callable[[Training], None]:
    def breaks(training: Training) -> None:
        healthy = training.loss
        training.loss = lambda model, batch: factor * healthy(model, batch)

    return breaks


def _over_batch(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0]).flatten(0, -2)
    return F.nll_loss(F.log_softmax(logits, 0), batch[1].flatten())


def changed(change: Callable[[Tensor], object], names: str | Sequence[str] = "") -> Callable[[Training], None]:
    """Changes the parameters ``names``, those of a module, or the weights of all."""

    @torch.no_grad()
    def breaks(training: Training) -> None:
        if not isinstance(names, str):
            parameters = map(training.model.get_parameter, names)
        else:
            parameters = training.model.get_submodule(names).parameters()
        for parameter in parameters:
            if names or parameter.dim() > 1:
                change(parameter)

    return breaks


def _anew(name: str) -> Callable[[Training], None]:
    def breaks(training: Training) -> None:
        for module in training.model.get_submodule(name).modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    return breaks


def groups(**values: Any) -> Callable[[Training], None]:
    def breaks(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group.update({key: value for key, value in values.items() if key in group})

    return breaks


def of_a_copy(training: Training) -> None:
    made = type(training.optimizer)(copy.deepcopy(training.model).parameters(), lr=1e-3)
    training.optimizer = made


def _trains_only(name: str) -> Callable[[Training], None]:
    """The optimizer has no other parameters."""

    def breaks(training: Training) -> None:
        parameters, lr = training.model.get_submodule(name).parameters(), training.optimizer.param_groups[0]["lr"]
        training.optimizer = type(training.optimizer)(parameters, lr=lr)

    return breaks


def _all_frozen_but(name: str) -> Callable[[Training], None]:
    def breaks(training: Training) -> None:
        training.model.requires_grad_(False)
        training.model.get_submodule(name).requires_grad_(True)

    return breaks


def never_zeroed(training: Training) -> None:
    training.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def _zeroed_too_late(training: Training) -> None:
    update = training._update
    training._update = lambda: (training.optimizer.zero_grad(), update())  # type: ignore[method-assign]


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
    groups(momentum=0.9999)(training)
    for group in training.optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.9999, group["betas"][1])


def mistakes(subject: Subject) -> tuple[Mistake, ...]:
    """The mistakes that can be made with any subject, or with its inputs."""
    first, hidden, head = subject.first, subject.hidden, subject.head
    outputs = f"{_at(head)}|^logits$"  # the last module, through which all gradients flow, or the model's output
    return (
        # The output and the loss
        Mistake("softmax before cross-entropy", _wrapped(lambda out: out.softmax(-1), head), outputs),
        Mistake("sigmoid before cross-entropy", _wrapped(torch.sigmoid, head), outputs),
        Mistake("ReLU on the logits", _wrapped(torch.relu, head), outputs),
        Mistake("log-softmax over the batch", loss(_over_batch), LABELS, is_held_out=True),
        Mistake("the loss is maximised", times(-1.0), "^loss", is_held_out=True),
        Mistake("loss times 1e-6", times(1e-6), ANYTHING, is_held_out=True),
        Mistake("loss times 1e6", times(1e6), ANYTHING, is_held_out=True),
        Mistake("logits times 1,000", _wrapped(lambda out: 1e3 * out, head), outputs),
        Mistake("a branch is detached", _wrapped(Tensor.detach, hidden), _at(first, hidden)),
        Mistake("a layer's output is zero", _wrapped(torch.zeros_like, hidden), _at(hidden)),
        Mistake("dropout of 0.95", _wrapped(lambda out: F.dropout(out, 0.95), hidden), _at(hidden)),
        # Data
        Mistake("shuffled labels", shuffled(1.0), LABELS, is_held_out=True),
        Mistake("half of the labels shuffled", shuffled(0.5), LABELS),
        Mistake("random labels", _random_labels, LABELS),
        Mistake("inputs and labels of different samples", every_batch(lambda b: (b[0].roll(1, 0), b[1])),
                f"{DATA}|{LABELS}"),
        Mistake("all labels equal", every_batch(lambda b: (b[0], torch.zeros_like(b[1]))), LABELS, is_held_out=True),
        Mistake("the same batch for ever", _repeated, DATA, is_held_out=True),
        Mistake("sorted data: batches of one class", _one_class, LABELS, "float", is_held_out=True),
        Mistake("inputs times 255", every_batch(lambda b: (255 * b[0], b[1])), DATA, "float"),
        Mistake("inputs plus 1,000", every_batch(lambda b: (b[0] + 1e3, b[1])), DATA, "float"),
        Mistake("inputs divided by 255 twice", every_batch(lambda b: (b[0] / 255, b[1])), DATA, "float"),
        Mistake("inputs are zero", every_batch(lambda b: (torch.zeros_like(b[0]), b[1])), DATA),
        Mistake("every batch repeats one sample", every_batch(constant_sample), DATA, is_held_out=True),
        Mistake("NaN in one batch", next_batch(_with_nan), DATA, "float"),
        Mistake("one batch times 1e4", next_batch(lambda b: (1e4 * b[0], b[1])), DATA, "float", (ONSET,)),
        # Optimizer
        Mistake("weight decay 50", groups(weight_decay=50.0), ANYTHING),
        Mistake("learning rate 1", groups(lr=1.0), RATE),
        Mistake("learning rate 1e-9", groups(lr=1e-9), RATE),
        Mistake("learning rate times 100", learning_rate(lambda lr: 100 * lr), RATE),
        Mistake("the scheduler of epochs runs every step", _halved, RATE),
        Mistake("momentum 0.9999", _heavy, ANYTHING),
        Mistake("optimizer of a copy of the model", of_a_copy, ANYTHING),
        Mistake("optimizer of the last layer only", _trains_only(head), ANYTHING),
        Mistake("all layers but the last are frozen", _all_frozen_but(head), ANYTHING),
        Mistake("zero_grad is missing", never_zeroed, ANYTHING),
        Mistake("zero_grad between backward and step", _zeroed_too_late, ANYTHING),
        Mistake("optimizer.step is missing", lambda training: setattr(training, "_update", lambda: None), ANYTHING),
        Mistake("a new optimizer for every step", _made_anew, ANYTHING),
        Mistake("gradients clipped to 1e-6", lambda training: setattr(training, "max_norm", 1e-6), ANYTHING),
        Mistake("optimizer state is lost", _forgets_state, ANYTHING, onsets=(ONSET,)),
        # Weights
        Mistake("dead units", changed(lambda w: w.fill_(-1e3), subject.dead),
                _at(*(name.rpartition(".")[0] for name in subject.dead))),
        Mistake("constant weights", changed(lambda w: w.fill_(0.05)), ANYTHING),
        Mistake("zero weights", changed(Tensor.zero_), ANYTHING),
        Mistake("weights times 20", changed(lambda w: w.mul_(20)), ANYTHING),
        Mistake("weights times 0.01", changed(lambda w: w.mul_(0.01)), ANYTHING),
        Mistake("a layer is initialised anew", _anew(hidden), _at(hidden), onsets=(ONSET,)),
        Mistake("half of the embeddings are zeroed", changed(lambda w: w[::2].zero_(), [f"{first}.weight"]),
                _at(first), "tokens", (ONSET,)),
        Mistake("one layer times 30", changed(lambda w: w.mul_(30), hidden), _at(hidden)),
        Mistake("noise on one layer",
                changed(lambda w: w.add_(torch.randn(w.shape, generator=torch.Generator().manual_seed(1))), hidden),
                _at(hidden)),
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """Every mistake with every subject whose inputs allow it."""
    for subject in SUBJECTS:
        inputs = "float" if subject.training(0).batch()[0].is_floating_point() else "tokens"
        for each in mistakes(subject):
            for onset in each.onsets if each.inputs in ("any", inputs) else ():
                yield Case(
                    "mistakes", subject.half, subject.name, each.what, subject.training, each.breaks, each.place, onset,
                    is_everywhere=each.place.endswith("^logits$"), is_held_out=each.is_held_out,
                )  # fmt: skip
