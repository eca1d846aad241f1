"""Faults injected into small trainings, and the finding that the monitor must report first for each.

A `Fault` declares what is broken, in which step, and the rule, name and step of the first finding. `inject` runs it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F  # noqa: N812
from helpers.ranks import Ranks
from helpers.training import (
    CLASSES,
    RECORD,
    TOKENS,
    Training,
    cross_entropy,
    factory,
    mlp,
    train_bag,
    train_cnn,
    train_gpt,
    train_mlp,
    train_recurrent,
    train_scaled,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradstat.monitor import Diagnosis, Recording

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Fault:
    """A broken training, and what must be found."""

    what: str  # what is broken, in words
    model: str  # the training, in words
    rule: str  # of the first finding; `name` likewise
    name: str
    breaks: Callable[[Training], object]
    training: Callable[[int], Training] = train_mlp  # from a seed
    twin: Callable[[int], Training] | None = None  # the training without the fault, if ``training`` itself has it
    step: int = 70  # the step before which the training is broken; 0: from the start
    late: int = 0  # by how many steps the finding may be dated too late
    further: int = 6  # steps to train after it
    also: tuple[str, ...] = ()  # other rules that must be among the findings
    watch: dict[str, int] | None = None
    num_classes: int | None = None
    ranks: int = 1  # run with DDP; the findings of rank 0 count
    broken_ranks: tuple[int, ...] = (0,)  # ranks on which the training is broken


class Outcome(NamedTuple):
    """What a monitor made of a training."""

    diagnosis: Diagnosis
    recording: Recording


def inject(fault: Fault, ranks: Ranks | None = None) -> Outcome:
    """Trains, breaks the training, and trains on; faults with several ranks run on ``ranks``."""
    if fault.ranks > 1:
        assert ranks is not None
        return ranks.run(fault.ranks, _inject, FAULTS.index(fault))[0]
    return _injected(fault, fault.training(0))


def _inject(number: int) -> Outcome:
    """Runs a fault as one of several ranks."""
    torch.set_num_threads(1)
    fault = FAULTS[number]
    training = fault.training(0)
    training.model = DistributedDataParallel(training.model)
    if torch.distributed.get_rank() not in fault.broken_ranks:
        fault = replace(fault, breaks=_unbroken)
    return _injected(fault, training)


def _injected(fault: Fault, training: Training) -> Outcome:
    if fault.step == 0:
        fault.breaks(training)
    monitor = training.monitor(on_anomaly=RECORD, watch=fault.watch, num_classes=fault.num_classes)
    for step, begins in training.steps(monitor, 0, fault.step + fault.further):
        if begins and step == fault.step > 0:
            fault.breaks(training)
    monitor.flush()
    outcome = Outcome(monitor.diagnose(), monitor.recording())
    monitor.remove()
    return outcome


# Ways to break a training -------------------------------------------------------------------------------------


def _unbroken(training: Training) -> None:
    """The training itself has the fault."""


def every_batch(spoil: Callable[[Batch], Batch], count: float = math.inf) -> Callable[[Training], None]:
    """Spoils the next ``count`` batches."""

    def breaks(training: Training) -> None:
        healthy, numbers = training.batch, itertools.count()
        training.batch = lambda: spoil(healthy()) if next(numbers) < count else healthy()

    return breaks


def ten_samples(training: Training) -> None:
    """Draws all further batches from ten samples."""
    inputs, labels = (torch.cat(parts)[:10] for parts in zip(training.batch(), training.batch(), strict=True))
    random, size = torch.Generator().manual_seed(0), len(training.batch()[0])

    def batch() -> Batch:
        drawn = torch.randint(10, (size,), generator=random)
        return inputs[drawn], labels[drawn]

    training.batch = batch


def next_batch(spoil: Callable[[Batch], Batch]) -> Callable[[Training], None]:
    """Spoils one batch."""
    return every_batch(spoil, 1)


def loss(function: Callable[[nn.Module, Batch], Tensor], shown: bool = False) -> Callable[[Training], None]:
    """Replaces the loss from now on; ``shown``: whether the monitor is shown the batches."""

    def breaks(training: Training) -> None:
        training.loss, training.shown = function, shown

    return breaks


@torch.no_grad()
def _poke(tensor: Tensor, value: float, index: int = 7) -> None:
    tensor.view(-1)[index] = value


def weight(name: str, value: float, index: int = 7) -> Callable[[Training], None]:
    """Overwrites one element of a parameter or buffer."""

    return lambda training: _poke(training.model.state_dict()[name], value, index)


def multiplied(name: str, factor: float) -> Callable[[Training], None]:
    """Multiplies a parameter."""
    return lambda training: training.model.state_dict()[name].mul_(factor)


def state(name: str, key: str, change: Callable[[Tensor], object]) -> Callable[[Training], None]:
    """Changes a tensor of the optimizer state."""
    return lambda training: change(training.optimizer.state[training.model.get_parameter(name)][key])


def learning_rate(change: Callable[[float], float]) -> Callable[[Training], None]:
    """Changes the learning rate from now on."""

    def breaks(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group["lr"] = change(group["lr"])

    return breaks


def replaced_forward(name: str, forward: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[Training], None]:
    """Replaces a module's forward pass by a function of the module and its original output."""

    def breaks(training: Training) -> None:
        module = training.model.get_submodule(name)
        before = module.forward
        module.forward = lambda *inputs: forward(module, before(*inputs))  # type: ignore[method-assign]

    return breaks


# Losses with a fault ------------------------------------------------------------------------------------------


def _log_of_softmax(model: nn.Module, batch: Batch) -> Tensor:
    # The first input is far from the centers, so that the probability of other classes is 0.
    inputs = batch[0].clone()
    inputs[0] *= 1e4
    return -F.softmax(model(inputs), -1)[:, 0].log().mean()


def _softmax_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    powers = torch.exp(model(batch[0]) * 200)
    return -(powers / powers.sum(-1, keepdim=True)).clamp_min(1e-6).log().gather(1, batch[1][:, None]).mean()


def _pairwise_distances(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model[0](batch[0])  # type: ignore[index]
    # The distance of each point from itself is 0.
    distances = (hidden[:, None] - hidden[None]).square().sum(-1).sqrt()
    return cross_entropy(model, batch) - 1e-4 * distances.mean()


def _cosine(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(torch.cat([torch.zeros_like(batch[0][:1]), batch[0][1:]]))
    directions = batch[0] - batch[0][:1]  # the first row is zero
    return F.cross_entropy(logits, batch[1]) + (directions / directions.norm(dim=1, keepdim=True)).mean()


def _never_zeroed(training: Training) -> None:
    training.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def _forgets(training: Training) -> None:
    """Clears the optimizer's state before every step."""
    update = training.update
    training.update = lambda: (training.optimizer.state.clear(), update())[1]  # type: ignore[method-assign]


def _rarely_steps(training: Training) -> None:
    update, numbers = training.update, itertools.count()
    training.update = lambda: None if next(numbers) % 10 else update()  # type: ignore[method-assign]


def every_step(period: int, change: Callable[[nn.Module], object]) -> Callable[[Training], None]:
    """Changes the model after every so many steps."""

    def breaks(training: Training) -> None:
        update, numbers = training.update, itertools.count(1)

        def updated() -> None:
            update()
            if next(numbers) % period == 0:
                change(training.model)

        training.update = updated  # type: ignore[method-assign]

    return breaks


def _without_branch(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model[1](model[0](batch[0])).detach()  # type: ignore[index]
    return F.cross_entropy(model[2:](hidden), batch[1])  # type: ignore[index]


def _fixed_scale(model: nn.Module, batch: Batch) -> Tensor:
    unscaled = F.cross_entropy(model(batch[0].half()).float(), batch[1])
    return (unscaled - unscaled.detach()) * 2.0**24 + unscaled.detach()  # the value that the monitor sees is unscaled


SIGNS = itertools.cycle((-1.0, 1.0))


def _alternating(model: nn.Module, batch: Batch) -> Tensor:
    """Adds a square root of 0 in one micro-batch and subtracts it in the next."""
    gain = model[2].bias[0]  # type: ignore[index]
    return cross_entropy(model, batch) + next(SIGNS) * torch.sqrt(gain - gain.detach())


def _of_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    labels = F.one_hot(batch[1], CLASSES).float()
    return F.binary_cross_entropy_with_logits(model(batch[0]).sigmoid(), labels)


def _absolute(change: Callable[[Tensor], Tensor] = lambda targets: targets) -> Callable[[nn.Module, Batch], Tensor]:
    """The absolute error of a regression on sums of inputs, whose targets are changed."""
    return lambda model, batch: (model(batch[0]) - change(batch[0].unflatten(1, (CLASSES, -1)).sum(2))).abs().mean()


def _regression(seed: int) -> Training:
    return train_mlp(seed, loss=_absolute())


def _with_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """With that of a normal distribution, which is smaller the smaller its standard deviation is."""
    return cross_entropy(model, batch) + model.get_parameter("std").log()


def _with_nan(batch: Batch) -> Batch:
    _poke(batch[0], math.nan, 37)
    return batch


# Trainings for faults -----------------------------------------------------------------------------------------


def _half_model(seed: int, loss_scale: float = 1.0) -> Training:
    """A model with float16 parameters, without a scaler."""
    return _in_dtype(seed, 0.05, torch.float16, lambda logits, y: F.cross_entropy(logits, y) * loss_scale)


def _stalled(seed: int, lr: float = 1e-6) -> Training:
    """A model with bfloat16 parameters, which such an update does not change."""
    return _in_dtype(seed, lr, torch.bfloat16, lambda logits, y: F.cross_entropy(logits.float(), y))


def _in_dtype(seed: int, lr: float, dtype: torch.dtype, loss: Callable[[Tensor, Tensor], Tensor]) -> Training:
    made = train_mlp(seed, model=lambda: mlp().to(dtype), optimize=factory(torch.optim.SGD, lr), shown=False)
    made.loss = lambda model, batch: loss(model(batch[0].to(dtype)), batch[1])
    return made


def _with_deviation() -> nn.Module:
    model = mlp()
    model.std = nn.Parameter(torch.tensor(0.03))
    return model


def _deep_sigmoid() -> nn.Module:
    layers = [layer for _ in range(10) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES))


class _Gated(nn.Module):
    """A layer times a gate, which may be normalised over all gates of a sample: over one."""

    def __init__(self, is_share: bool) -> None:
        super().__init__()
        self.body, self.gate, self.value = nn.Linear(16, 32), nn.Linear(32, 1), nn.Linear(32, 32)
        self.head, self.is_share = nn.Linear(32, CLASSES), is_share

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).relu()
        gate = self.gate(hidden).sigmoid()
        gate = gate / gate.sum(-1, keepdim=True) if self.is_share else gate
        return self.head((gate * self.value(hidden)).relu())


def _hooked(training: Training) -> None:
    name = "blocks.1.up.weight"
    training.model.get_parameter(name).register_hook(lambda g: g * torch.full_like(g[:1], math.nan))


FAULTS: tuple[Fault, ...] = (
    # NaN and Inf
    Fault("log of a softmax that is 0", "MLP", "nonfinite-loss", "loss", loss(_log_of_softmax),
          also=("nonfinite-gradient",)),
    Fault("sqrt of 0 in pairwise distances: infinite derivative", "MLP", "nonfinite-gradient", "0.bias",
          loss(_pairwise_distances)),
    Fault("hand-written softmax overflows", "MLP", "nonfinite-loss", "loss", loss(_softmax_by_hand)),
    Fault("division by the norm of a vector that is 0", "MLP", "nonfinite-loss", "loss", loss(_cosine)),
    Fault("all labels of a batch are ignore_index", "MLP", "nonfinite-loss", "loss",
          next_batch(lambda batch: (batch[0], torch.full_like(batch[1], -100)))),
    Fault("NaN in a batch", "CNN", "nonfinite-batch", "batch[0]", next_batch(_with_nan), train_cnn,
          also=("nonfinite-loss", "nonfinite-gradient", "nonfinite-buffer")),
    Fault("NaN in a weight", "GPT", "nonfinite-parameter", "blocks.0.qkv.weight",
          weight("blocks.0.qkv.weight", math.nan), train_gpt, also=("nonfinite-loss",)),
    Fault("a bit flip makes a weight 1e30", "GPT", "parameter-jump", "blocks.1.down.weight",
          weight("blocks.1.down.weight", 1e30), train_gpt),
    Fault("NaN in the embedding of a rare token", "embedding and linear layer", "nonfinite-parameter",
          "0.weight", weight("0.weight", math.nan, 395 * 16), train_bag, late=30, further=40),
    Fault("a layer is initialised anew", "MLP", "overwritten-parameter", "2.weight",
          lambda training: training.model[2].reset_parameters(), step=101, further=60),
    Fault("a bit flip makes a recurrent weight 1e30", "LSTM", "parameter-jump", "cells.weight_hh_l0",
          weight("cells.weight_hh_l0", 1e30), train_recurrent, late=30, further=40),
    Fault("NaN in the running variance of a batch norm", "CNN", "nonfinite-buffer", "4.running_var",
          weight("4.running_var", math.nan), train_cnn, late=30, further=40),
    Fault("NaN in exp_avg_sq of AdamW", "MLP", "nonfinite-optimizer-state", "2.weight",
          state("2.weight", "exp_avg_sq", lambda s: _poke(s, math.nan)), late=1),
    Fault("a hook on a parameter returns NaN", "GPT", "nonfinite-gradient", "blocks.1.up.weight", _hooked, train_gpt),
    Fault("accumulated gradients are Inf - Inf", "MLP", "nonfinite-gradient", "2.bias", loss(_alternating),
          lambda seed: train_mlp(seed, accumulate=2)),
    Fault("log of a negative output of a module", "MLP", "nonfinite-activation", "2",
          replaced_forward("2", lambda module, out: out.log()), watch={"activations": 1}),
    # Half precision
    Fault("float16 gradients overflow under a fixed loss scale", "MLP in float16", "nonfinite-gradient", "4.bias",
          loss(_fixed_scale), _half_model),
    Fault("float16 overflows in the forward pass, under a scaler", "MLP, autocast", "batch-range", "input[0]",
          every_batch(lambda batch: (batch[0] * 1e6, batch[1])),
          lambda seed: train_scaled(seed, 2.0**12, shown=False), also=("nonfinite-loss",)),
    Fault("float16 gradients underflow, without a scaler", "MLP in float16", "underflow", "0.weight",
          _unbroken, lambda seed: _half_model(seed, 1e-5), _half_model, step=0, further=40),
    Fault("gradients are clipped before they are unscaled", "MLP, autocast", "scaled-clip", "norm",
          lambda training: setattr(training, "unscales", False),
          lambda seed: train_scaled(seed, 2.0**12, max_norm=1.0, shown=False), step=0),
    Fault("gradients are clipped to 1e-4", "MLP", "tiny-clip", "norm",
          lambda training: setattr(training, "max_norm", 1e-4), step=0, further=80),
    # Size
    Fault("a trained standard deviation falls below 0", "MLP", "nonpositive-parameter", "std", loss(_with_entropy),
          lambda seed: train_mlp(seed, model=_with_deviation), step=0, late=40, further=40, also=("nonfinite-loss",)),
    Fault("learning rate times 1000", "MLP", "learning-rate-jump", "lr", learning_rate(lambda lr: lr * 1000)),
    Fault("zero_grad is not called any more", "MLP", "gradients-not-zeroed", "gradients", _never_zeroed),
    Fault("only every tenth step is taken", "MLP", "unused-gradients", "gradients", _rarely_steps,
          step=100, further=60),
    Fault("learning rate is negative", "MLP", "learning-rate-jump", "lr", learning_rate(lambda lr: -lr)),
    Fault("learning rate is 0", "MLP", "learning-rate-jump", "lr", learning_rate(lambda lr: 0.0), further=60),
    Fault("one element of exp_avg is 1e6", "MLP", "parameter-jump", "2.weight",
          state("2.weight", "exp_avg", lambda s: _poke(s, -1e6)), step=120, late=1, also=("loss-spike",)),
    # The weight becomes so negative that its unit is dead from then on, and the loss hardly changes.
    Fault("one element of exp_avg is 1e6, and its unit dies", "MLP", "parameter-jump", "2.weight",
          state("2.weight", "exp_avg", lambda s: _poke(s, 1e6)),
          step=120, late=30, further=40),
    Fault("the state of SGD is cleared in every step", "MLP", "optimizer-memory", "optimizer", _forgets,
          lambda seed: train_mlp(seed, optimize=factory(torch.optim.SGD, 0.05, momentum=0.9)), step=0, late=110,
          further=110),
    Fault("a weight decay of 1 in Adam", "MLP", "heavy-decay", "weight_decay", _unbroken,
          lambda seed: train_mlp(seed, optimize=factory(torch.optim.Adam, 1e-3, weight_decay=1.0)),
          lambda seed: train_mlp(seed, optimize=factory(torch.optim.Adam, 1e-3, weight_decay=1e-3)), step=0,
          further=60),
    Fault("a weight decay of 10 in AdamW", "MLP", "heavy-decay", "weight_decay", _unbroken,
          lambda seed: train_mlp(seed, optimize=factory(torch.optim.AdamW, 1e-3, weight_decay=10.0)),
          lambda seed: train_mlp(seed, optimize=factory(torch.optim.AdamW, 1e-3, weight_decay=0.01)), step=0,
          further=60),
    Fault("the state of AdamW is cleared", "MLP", "optimizer-memory", "optimizer",
          lambda training: training.optimizer.state.clear(), step=120, further=60),
    Fault("a custom backward returns gradients 1000 times too large", "MLP", "exploding-gradient", "0.weight",
          replaced_forward("2", lambda module, out: (out.register_hook(lambda g: g * 1e3), out)[1])),
    Fault("recurrent weights times 5", "RNN with ReLU", "loss-spike", "loss", multiplied("cells.weight_hh_l0", 5.0),
          lambda seed: train_recurrent(seed, nn.RNN, settings={"nonlinearity": "relu"}), also=("exploding-gradient",)),
    Fault("ten sigmoid layers, default initialization", "deep MLP", "vanishing-gradient", "0.weight",
          _unbroken,
          lambda seed: train_mlp(seed, model=_deep_sigmoid, optimize=factory(torch.optim.SGD, 0.1)),
          lambda seed: train_mlp(seed, optimize=factory(torch.optim.SGD, 0.1)), step=0, late=5, further=40),
    Fault("a loss so small that AdamW divides by its eps", "MLP", "small-second-moment", "0.weight",
          loss(lambda model, batch: 1e-7 * cross_entropy(model, batch)), step=0, late=50, further=160),
    Fault("a layer of dead ReLUs: inputs are always negative", "MLP", "dead-gradient", "2.bias",
          lambda training: nn.init.constant_(training.model[2].bias, -1e3), further=60),
    Fault("a layer is initialised anew every 30 steps", "MLP", "overwritten-parameter", "2.weight",
          every_step(30, lambda model: model[2].reset_parameters()), step=0, late=1, further=60),
    Fault("a gate is normalised over a single element", "gated MLP", "dead-gradient", "gate.weight", _unbroken,
          lambda seed: train_mlp(seed, model=lambda: _Gated(True)),
          lambda seed: train_mlp(seed, model=lambda: _Gated(False)), step=0, further=40),
    Fault("a hidden layer is detached", "MLP", "missing-gradient", "0.bias", loss(_without_branch), further=60),
    Fault("weights in bfloat16 and updates below their precision", "MLP in bfloat16", "unchanged-parameter",
          "0.weight", _unbroken, _stalled, lambda seed: _stalled(seed, 0.05), step=0, further=120),
    # The course of training
    Fault("labels are permuted from now on", "MLP", "loss-spike", "loss",
          every_batch(lambda batch: (batch[0], (batch[1] + 1) % CLASSES)), step=150, late=1, further=12),
    Fault("labels are those of other samples", "MLP", "unrelated-outputs", "loss",
          every_batch(lambda batch: (batch[0], batch[1].roll(1))), step=0, further=260),
    Fault("targets of an absolute error are those of other samples", "MLP, regression", "unrelated-outputs", "loss",
          loss(_absolute(lambda targets: targets.roll(1, 0))), _regression, step=0, further=260),
    Fault("targets of an absolute error are equal", "MLP, regression", "equal-targets", "logits",
          loss(_absolute(lambda targets: torch.full_like(targets, 0.4))), _regression, step=0, further=160),
    Fault("a sigmoid before a loss of logits", "MLP", "activation-before-softmax", "logits", loss(_of_probabilities),
          step=0),
    Fault("the loss is maximised", "MLP", "negative-loss", "loss",
          loss(lambda model, batch: -cross_entropy(model, batch)), step=0, late=130, further=130),
    Fault("all weights are equal", "MLP", "constant-weights", "0.weight",
          lambda training: [nn.init.constant_(p, 0.05) for p in training.model.parameters() if p.dim() > 1], step=0),
    Fault("the weights of one layer begin 30 times too large", "GPT", "parameter-jump", "blocks.1.up.weight",
          multiplied("blocks.1.up.weight", 30.0), train_gpt, step=0),
    Fault("the loss is summed instead of averaged", "MLP", "loss-spike", "loss",
          loss(lambda model, batch: cross_entropy(model, batch) * len(batch[0]))),
    Fault("logits times 1,000", "GPT", "far-beginning", "loss",
          replaced_forward("head", lambda module, out: out * 1e3), lambda seed: train_gpt(seed, 1e-4), step=0,
          further=110, num_classes=TOKENS),
    Fault("tied weights: the optimizer holds the old head", "GPT", "optimizer-coverage",
          "param_groups[0]['params'][28]",
          lambda training: setattr(training.model.head, "weight", training.model.tokens.weight), train_gpt,
          step=0, further=5),
    Fault("a layer replaced after the optimizer was created", "MLP", "optimizer-coverage", "4.weight",
          lambda training: training.model.__setitem__(4, nn.Linear(32, CLASSES)),
          further=100, also=("unchanged-parameter",)),
    # Several ranks
    Fault("NaN in a batch on one rank", "MLP, DDP on 2 ranks", "nonfinite-rank", "module.4.bias", next_batch(_with_nan),
          lambda seed: train_mlp(2 * seed + torch.distributed.get_rank(), shown=False), step=20, ranks=2,
          broken_ranks=(1,), watch={"origin": 1}, also=("nonfinite-gradient",)),
    Fault("a weight is changed on one rank only", "MLP, DDP on 2 ranks", "replica-mismatch", "module.0.weight",
          multiplied("module.0.weight", 1.0001), lambda seed: train_mlp(seed, shown=False), step=12, late=8, further=12,
          ranks=2, watch={"replicas": 10}),
    Fault("the module inside of DDP is called", "MLP, DDP on 2 ranks", "unreduced-gradients", "gradients",
          loss(lambda model, batch: cross_entropy(model.module, batch)), step=0, further=20, ranks=2,
          broken_ranks=(0, 1)),
    Fault("the same batches on all ranks", "MLP, DDP on 2 ranks", "repeated-batch", "batch", _unbroken,
          step=0, ranks=2, watch={"rank_batches": 10}),
    # Data
    Fault("labels start at 1 instead of 0", "MLP", "label-out-of-range", "batch[1]",
          every_batch(lambda batch: (batch[0], batch[1] + 1)), step=0, num_classes=CLASSES),
    Fault("labels out of range in one batch", "GPT", "label-out-of-range", "batch[1]",
          next_batch(lambda batch: (batch[0], batch[1] - 1)), train_gpt, num_classes=TOKENS),
    Fault("NaN in an input of the model", "CNN", "nonfinite-batch", "input[0]", next_batch(_with_nan),
          lambda seed: replace(train_cnn(seed), shown=False), also=("nonfinite-loss",)),
    Fault("inputs of the model are zero", "MLP", "batch-range", "input[0]",
          every_batch(lambda batch: (torch.zeros_like(batch[0]), batch[1])),
          lambda seed: replace(train_mlp(seed), shown=False), further=60),
    Fault("inputs are divided by 1,000", "MLP", "batch-range", "input[0]",
          every_batch(lambda batch: (batch[0] / 1e3, batch[1])), lambda seed: replace(train_mlp(seed), shown=False),
          step=0, further=30),
    Fault("a function drops 95 % of a hidden layer", "MLP", "heavy-dropout", "dropped",
          replaced_forward("1", lambda module, out: F.dropout(out, 0.95)), step=0),
    Fault("a batch that was not normalised", "MLP", "batch-range", "batch[0]",
          next_batch(lambda batch: (batch[0] * 1e3, batch[1]))),
    Fault("every batch repeats a single sample", "MLP", "constant-feature", "batch[0]",
          every_batch(lambda batch: (batch[0][:1].expand_as(batch[0]), batch[1])), late=50, further=200, step=10),
    Fault("a data set of ten samples", "MLP", "repeated-batch", "batch[0]", ten_samples, step=0, further=160),
    Fault("ten sentences are left", "GPT", "repeated-batch", "input[0]", ten_samples,
          lambda seed: replace(train_gpt(seed), shown=False), late=33, further=160),
)  # fmt: skip
