"""What a monitor sees by hooks: inputs and outputs of the model, and whether anybody zeroes gradients.

`STORIES` are small trainings in which something is unusual, and what must be told of it.
"""

import functools
import gc
import io
import itertools
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cuda_counts import NoSync
from helpers.outputs import SeenOutputs
from helpers.ranks import on_ranks
from helpers.training import RECORD, backpropagated, serious
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    layer_norm,
    mse_loss,
    nll_loss,
    poisson_nll_loss,
    smooth_l1_loss,
)
from torch.nn.parallel import DistributedDataParallel

import gradstat
from gradstat.monitor import RULES, Finding, default_rules
from gradstat.monitor.probes.outputs import sampled_rows
from gradstat.rules.output_facts import Activation, OutputFacts

Batch = Callable[[int], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Change = Callable[[Tensor], Tensor]

REPEATED = "repeated-batch"
INPUT_RULES = ("nonfinite-batch", "batch-range", "constant-feature", REPEATED)
LEARNING = {f"gradstat.rules.{name}" for name in ("learning", "outputs", "beginnings")}
LEARNING_RULES = tuple(kind.name for kind in RULES if kind.__module__ in LEARNING)
NOT_ZEROED = "gradients-not-zeroed"


def mlp(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))


def normal(step: int) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr)


def trained(
    model: nn.Module, loss: Batch, steps: int, optimizer: torch.optim.Optimizer, **options: Any
) -> gradstat.Monitor:
    """Trains on the loss of each step, under a monitor that only records."""
    monitor = gradstat.Monitor(model, optimizer, **{"on_anomaly": RECORD, **options})
    for step in range(steps):
        monitor.step(backpropagated(optimizer, loss(step)))
        optimizer.step()
    monitor.flush()
    return monitor


def run(
    batch: Batch,
    steps: int = 60,
    model: nn.Module | None = None,
    zero: Callable[[Any, int], object] = lambda optimizer, step: optimizer.zero_grad(),
    optimizer: Any = torch.optim.AdamW,
    backwards: int = 1,
    **options: Any,
) -> gradstat.Monitor:
    """Trains on ``batch(step)``, which only the model sees."""
    model = mlp() if model is None else model
    optimizer = optimizer(model.parameters())
    monitor = gradstat.Monitor(model, optimizer, **{"on_anomaly": RECORD, **options})
    for step in range(steps):
        x, total = batch(step), torch.zeros(())
        for _ in range(backwards):
            loss = mse_loss(model(x), x.nan_to_num().sum(1, keepdim=True) / 6)
            loss.backward()
            total += loss.detach()
        monitor.step(total)
        optimizer.step()
        zero(optimizer, step)
    monitor.flush()
    return monitor


def of_rules(monitor: gradstat.Monitor, *rules: str) -> list[Finding]:
    return [finding for finding in monitor.findings if finding.rule in rules]


def lines(found: Iterable[Finding]) -> list[str]:
    return [f"{one.rule}, {one.severity} {one.step} {one.name}: {one.text}" for one in found]


# Stories ------------------------------------------------------------------------------------------------------------


def from_step(first: int, change: Change, count: int = 1000) -> Batch:
    return lambda step: change(normal(step)) if first <= step < first + count else normal(step)


def with_nan(x: Tensor) -> Tensor:
    x[3, 2] = math.nan
    return x


def one_hot_rows(step: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.arange(16) * (step + 3) % 6, 6).float()


def words(step: int) -> Tensor:
    return torch.randint(60, (8, 4), generator=torch.Generator().manual_seed(step))


def users(step: int) -> Tensor:
    return torch.randint(500, (60,), generator=torch.Generator().manual_seed(step))


def items(step: int) -> Tensor:
    return torch.randint(5000, (60,), generator=torch.Generator().manual_seed(1 + step))


def inputs(batch: Batch) -> list[Finding]:
    return of_rules(run(batch, 101), *INPUT_RULES)


class OnGrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.values = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, grid: Tensor, values: Tensor | None) -> Tensor:
        return self.places(grid) + (0 if values is None else self.values(values))


def on_a_grid(varies: bool) -> list[Finding]:
    """Places that are the same in all samples, as the model's first input, and what was measured there if it varies."""
    torch.manual_seed(0)
    model, grid = OnGrid(), torch.linspace(-1, 1, 6).repeat(16, 1)
    loss = lambda step: (model(grid, normal(step) if varies else None) - normal(step)).square().mean()  # noqa: E731
    return of_rules(trained(model, loss, 101, sgd(model)), "constant-feature")


def samples(*batch: Batch, halves: bool = True, passes: int = 1, **options: Any) -> list[Finding]:
    """What is told of samples, if the loss falls or not. They may come in several tensors, and in several passes."""
    weights = nn.ParameterList([nn.Parameter(torch.ones(()))])
    model, optimizer = Taking(weights), torch.optim.SGD(weights, 0.05 * halves / passes)
    once = lambda step: model(*(of(step) for of in batch))  # noqa: E731
    loss = lambda step: torch.stack([once(passes * step + i) for i in range(passes)]).sum()  # noqa: E731
    return of_rules(trained(model, loss, 210, optimizer, **options), REPEATED, "constant-feature")


class Taking(nn.Module):
    """Takes anything; its loss is the square of a weight."""

    def __init__(self, weights: nn.ParameterList) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, *_inputs: Any) -> Tensor:
        return self.weights[0].square()


def few(batch: Batch, count: int = 10, size: int = 8) -> Batch:
    """Of the first samples so many, drawn anew in each step."""
    return lambda step: batch(0)[torch.randint(count, (size,), generator=torch.Generator().manual_seed(step))]


def pixels(step: int, count: int = 16) -> Tensor:
    """Images that are mostly zero."""
    drawn = torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(step))
    return drawn * (drawn > 1)


def padded(step: int) -> Tensor:
    """Sentences of different lengths, padded to the longest of four."""
    words = torch.randint(2, 60, (10, 20), generator=torch.Generator().manual_seed(0))
    words[torch.arange(20) >= torch.arange(8, 18)[:, None]] = 1
    some = words[torch.randperm(10, generator=torch.Generator().manual_seed(step))[:4]]
    return some[:, : int((some > 1).sum(1).max())]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(60, 6), nn.Embedding(60, 6), nn.Linear(6, 1)

    def forward(
        self, words: Tensor, places: Tensor | None = None, more: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        seen = self.words(words) + (0 if places is None else self.places(places))
        return self.head(seen.mean(1) + (0 if more is None else more))


def alike(step: int) -> Tensor:
    return words(step)[:1].expand(8, 4)


PLACES = torch.arange(4).expand(8, 4)


def sentences(batch: Callable[[int], tuple[Any, ...]]) -> list[Finding]:
    """What is told of sentences that are passed to a model, with or without labels, once or twice in a step."""
    told = []
    for passes, labels in ((1, {}), (2, {"labels": torch.arange(32).view(8, 4)})):
        torch.manual_seed(0)
        model = Words()

        def loss(step: int, model: nn.Module = model, passes: int = passes, labels: Any = labels) -> Tensor:
            losses = [(model(*batch(step), **labels) - normal(step)[0, 0]).square().mean() for _ in range(passes)]
            return sum(losses, torch.zeros(()))

        told.append(of_rules(trained(model, loss, 60, sgd(model)), *INPUT_RULES[:3], "not-watched")[:1])
    assert lines(told[0]) == lines(told[1])
    return told[0]


def one_hot(loss: Callable[..., Tensor], **options: Any) -> Loss:
    return lambda outputs, labels: loss(outputs, torch.nn.functional.one_hot(labels, 4).float(), **options)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * x


class Late(nn.Module):
    """An activation that comes after 60 passes."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation, self.passes = activation, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.activation(x) if self.passes > 60 else x


class Holder(nn.Module):
    """Has no forward pass of its own, as a LightningModule whose ``training_step`` calls a child."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Wrapped(Holder):
    """Returns what ``wrap`` makes of the outputs of ``net``."""

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.net(x))


def by_place(x: Tensor, labels: Tensor) -> Tensor:
    return nll_loss(x.flatten(0, 1), labels.repeat_interleave(2))


def before_places(x: Tensor, labels: Tensor) -> Tensor:
    return nll_loss(x, labels[:, None].repeat(1, 2))  # classes come before places


def gathered(p: Tensor, labels: Tensor) -> Tensor:
    return -p.gather(1, labels[:, None]).log().mean()


def places_of(rows: int, columns: int, softmax: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (rows, columns)), softmax)


def askew(loss: Loss, last: nn.Module) -> list[Finding]:
    return classify(loss, nn.Linear(4, 4), last, lr=1e-2)


class _Compiled(torch.autograd.Function):
    """A loss in whose graph nothing can be seen, as in that of a compiled one."""

    @staticmethod
    def forward(ctx: Any, loss: Loss, x: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            result = loss(x, labels)
            (ctx.gradient,) = torch.autograd.grad(result, x)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient * ctx.gradient, None


def compiled(loss: Loss) -> Loss:
    return lambda x, labels: _Compiled.apply(loss, x, labels)


def drawn(share: float) -> Batch:
    """Labels of which ``share`` are 0, the others 1."""
    return lambda step: (torch.rand(16, generator=torch.Generator().manual_seed(step)) >= share).long()


def score(step: int, columns: int = 1) -> Tensor:
    return normal(step)[:, :columns] + normal(step)[:, 2 : 2 + columns]


def scores(step: int) -> Tensor:
    return score(step, 4)


def classes(step: int) -> Tensor:
    return scores(step).argmax(1)


def fitted(
    loss: Loss,
    targets: Batch,
    outputs: int = 1,
    wrap: Callable[[Tensor], Any] = lambda x: x,
    *last: nn.Module,
    lr: float = 0.01,
    steps: int = 260,
) -> list[Finding]:
    """What is told of a fit to ``targets`` by layers, of which the ``last`` may be given."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs), *last)
    model = Wrapped(net=net, wrap=wrap)
    return of_rules(
        trained(model, lambda step: loss(model(normal(step)), targets(step)), steps, adamw(model, lr)), *LEARNING_RULES
    )


def classify(
    loss: Loss, *last: nn.Module, labels: Batch = classes, steps: int = 310, lr: float = 1e-3
) -> list[Finding]:
    """What is told of the outputs and labels of a classifier that ends with ``last``."""
    found = fitted(loss, labels, 4, nn.Identity(), *last, lr=lr, steps=steps)
    return [one for one in found if one.name == "logits"]


def other(targets: Batch) -> Batch:
    """``targets`` of other samples."""
    return lambda step: targets(5000 + step)


def same(targets: Batch) -> Batch:
    """The first of ``targets`` for all samples."""
    return lambda step: targets(0)[:1].expand_as(targets(0))


def by_class(targets: Batch) -> Batch:
    """Sorted: one of ``targets`` for all samples of twenty batches."""
    return lambda step: targets(step // 20)[:1].expand_as(targets(step))


def positive(columns: int) -> Batch:
    return lambda step: (score(step, columns) > 0).float()


LOG_SOFTMAX = nn.LogSoftmax(-1)
Fit = tuple[Any, ...]
FITS: dict[str, Fit] = {
    "squared error": (mse_loss, score),
    "its sum, two columns": (lambda x, y: mse_loss(x, y, reduction="sum"), lambda step: score(step, 2), 2),
    "in a tuple": (lambda x, y: 0.5 * mse_loss(x[0], y), score, 1, lambda x: (x, None)),
    "in a dict": (lambda x, y: mse_loss(x["y"], y), score, 1, lambda x: {"y": x}),
    "one dimension": (mse_loss, lambda step: score(step)[:, 0], 1, lambda x: x[:, 0]),
    "logits": (binary_cross_entropy_with_logits, positive(1)),
    "probabilities": (binary_cross_entropy, positive(1), 1, torch.sigmoid),
    "several labels": (binary_cross_entropy_with_logits, positive(3), 3),
    "classes": (cross_entropy, classes, 4),
    "one class rare": (cross_entropy, lambda step: (score(step)[:, 0] > 1.2).long(), 2),
    "log probabilities": (nll_loss, classes, 4, LOG_SOFTMAX),
    "absolute error in a dict": (lambda x, y: smooth_l1_loss(x["y"], y, beta=0.1), score, 1, lambda x: {"y": x}),
    "relative error": (lambda x, y: (x - y).norm() / y.norm(), lambda step: score(step, 3), 3),
}


def fit(name: str, change: Callable[[Batch], Batch] = lambda targets: targets) -> list[Finding]:
    """What is told of one of `FITS`, with other targets."""
    loss, targets, *more = FITS[name]
    return fitted(loss, change(targets), *more)


def then(change: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
    """The change begins in the middle."""
    return lambda targets: lambda step: (targets if step < 150 else change(targets))(step)


def contrastive(x: Tensor, y: Tensor) -> Tensor:
    """How well samples are told apart by the outputs ``x`` for one view of each, and ``y`` for the other."""
    return cross_entropy(0.3 * x @ y.T, torch.arange(len(x)))


def by_returns(x: Tensor, y: Tensor) -> Tensor:
    """A policy, whose actions are weighed by returns."""
    return (nll_loss(x.log_softmax(-1), y, reduction="none") * torch.rand(len(y))).mean()


def hidden(x: Tensor, y: Tensor) -> Tensor:
    """Of hidden values that are normalised afterwards."""
    return cross_entropy(layer_norm(x, x.shape[1:]) @ torch.ones(4, 4).triu(), y)


def with_two_dropouts(dropout: float, attention_dropout: float) -> nn.Module:
    layer: Any = nn.Identity()
    layer.dropout, layer.attention_dropout = dropout, attention_dropout
    return layer


def dropped(layer: nn.Module, later: float | None = None) -> list[Finding]:
    """What is told of a dropout, whose probability becomes another one."""
    model = nn.Linear(6, 4)
    model.layer = layer

    def loss(step: int) -> Tensor:
        model.layer.p = later if later is not None and step >= 60 else getattr(layer, "p", None)
        return model(normal(step)).square().mean()

    return of_rules(trained(model, loss, 40 if later is None else 220, sgd(model)), "heavy-dropout")


SMOOTHED = functools.partial(cross_entropy, label_smoothing=0.1)
SORTED = "in the first 7 batches that were inspected, 100% is between batches"
OF_THE_SAME = "all labels are of one class, the same in all of them"
NO_LOWER = (
    "log_softmax expects logits but gets the output of a {}: the cross-entropy of a sample cannot fall below 0.7437"
)
LOGITS = "{} expects logits but gets the output of a {}"
EYE = torch.eye(4, requires_grad=True)  # stands for a weight
FOCAL = one_hot(lambda x, y: (binary_cross_entropy_with_logits(x, y, reduction="none") * (x.sigmoid() - y) ** 2).mean())
BINARY = "binary_cross_entropy_with_logits"
# Losses that take logits, and what they get in place of them.
ACTIVATED: list[tuple[str, str, str, Loss]] = [
    ("a sigmoid, labels of one column", BINARY, "sigmoid",
     lambda x, y: binary_cross_entropy_with_logits(x.sigmoid()[:, 0], (y > 1).float())),
    ("a softmax, several labels", BINARY, "softmax",
     one_hot(lambda x, y: binary_cross_entropy_with_logits(x.softmax(1), y))),
    ("a ReLU in a focal loss", BINARY, "ReLU", lambda x, y: FOCAL(x.relu(), y)),
    ("a sigmoid, multi-label", "logsigmoid", "sigmoid",
     one_hot(lambda x, y: torch.nn.functional.multilabel_soft_margin_loss(x.sigmoid(), y))),
    ("a softmax, soft labels", "log_softmax", "softmax",
     one_hot(lambda x, y: cross_entropy(x.softmax(1), 0.1 + 0.6 * y))),
    ("a softmax in float16", "log_softmax", "softmax", lambda x, y: cross_entropy(x.half().softmax(1).float(), y)),
    ("a softmax by hand", "log_softmax", "softmax",
     lambda x, y: cross_entropy(x.exp() / x.exp().sum(1, keepdim=True), y) + 0.1),
    ("a ReLU with another term", "log_softmax", "ReLU", lambda x, y: cross_entropy(x.relu(), y) + x.square().mean()),
    ("probabilities for logits of a policy", "x - logsumexp(x)", "softmax",
     lambda x, y: -torch.distributions.Categorical(logits=x.softmax(1)).log_prob(y).mean()),
]  # fmt: skip
LOGITS_AS_THEY_ARE: dict[str, Loss] = {
    "a focal loss": FOCAL,
    "a temperature": lambda x, y: cross_entropy(x / 0.7, y),
    "a scaled softmax": lambda x, y: cross_entropy(20 * x.softmax(1), y),
    "a soft cap": lambda x, y: cross_entropy(30 * torch.tanh(x / 30), y),
    "differences of sigmoids": one_hot(
        lambda x, y: binary_cross_entropy_with_logits(x.sigmoid() - x.roll(1, 1).sigmoid(), y)
    ),
    "a target from a sigmoid": one_hot(lambda x, y: binary_cross_entropy_with_logits(x, 0.9 * y + 0.1 * x.sigmoid())),
    "probabilities of a policy": lambda x, y: -torch.distributions.Categorical(x.softmax(1)).log_prob(y).mean(),
    "an attention of ReLUs before the last layer": lambda x, y: cross_entropy(
        (x.relu().log_softmax(1).exp() * x) @ EYE, y
    ),
}
# What happens -> the only finding, or a part of it; "nothing"; or behind "no" what no finding says, behind "also" what
# one of several says.
STORIES: dict[str, Callable[[], list[Finding]]] = {
    "in bytes -> batch-range, warning 40 input[0]: the largest magnitude of input[0] is":
        lambda: inputs(from_step(40, lambda x: 255 * x)),
    "equal -> batch-range, warning 40 input[0]: the standard deviation of input[0] has been about":
        lambda: inputs(from_step(40, lambda x: torch.full_like(x, 0.1))),
    "one sample -> constant-feature, warning 0 input[0]": lambda: inputs(lambda step: normal(step)[:1].repeat(16, 1)),
    "a grid beside what was measured on it -> nothing": lambda: on_a_grid(varies=True),
    "a grid alone -> constant-feature, warning 0 input[0]": lambda: on_a_grid(varies=False),
    "one batch -> repeated-batch, warning 60 input[0]": lambda: inputs(lambda step: normal(min(step, 60))),
    "one batch beside a hidden state -> repeated-batch, warning 60 input[0]: the same samples":
        lambda: samples(lambda step: normal(min(step, 60)), lambda step: normal(1000 + step)),
    "one hidden state beside batches -> repeated-batch, warning 60 input[1]: the same samples":
        lambda: samples(lambda step: normal(1000 + step), lambda step: normal(min(step, 60))),
    "one mask beside batches -> nothing":
        lambda: samples(lambda step: normal(1000 + step), lambda step: (normal(min(step, 60)) > 0).float()),
    "all data in one batch -> nothing": lambda: inputs(lambda step: normal(0)),
    "now large, now small -> nothing": lambda: inputs(lambda step: normal(step) * (1 + step % 7) ** 2),
    "silence now and then -> nothing": lambda: inputs(lambda step: normal(step) * (step % 9 != 0)),
    "the time of a sample -> nothing": lambda: inputs(lambda step: torch.rand(16, 6) + step),
    "a mask, later of ones -> no range": lambda: inputs(
        lambda step: (normal(step) > 0).float() if step < 60 else torch.ones(16, 6)),
    "one-hot rows -> nothing": lambda: inputs(one_hot_rows),
    **{
        f"{what} -> repeated-batch, warning {told}": functools.partial(samples, *batch)
        for what, told, batch in [
            ("few samples", "0 input[0]: the 13 batches of input[0] that were inspected from step 0 to 103 have only",
             [few(lambda step: torch.randn(16, 12, generator=torch.Generator().manual_seed(step)))]),
            ("few images", "0 input[0]: the 13 batches", [few(pixels)]),
            ("few images of 16 bits", "0 input[0]: the 13 batches", [few(lambda step: pixels(step).bfloat16())]),
            ("few images, channels last", "0 input[0]: the 13 batches",
             [few(lambda step: pixels(step).to(memory_format=torch.channels_last))]),
            ("few sentences", "0 input[0]: the 13 batches", [few(lambda step: words(step).repeat(4, 1))]),
            ("few sentences of many lengths", "0 input[0]: the ", [padded]),
            ("few users with items", "0 input[0]: the 13 batches", [few(users), few(items)]),
            ("few beside a table of places", "0 input[0]: the 13 batches", [few(pixels), lambda step: torch.eye(5)]),
            ("few samples, time first", "0 input[0]: the 13 batches",
             [lambda step: few(pixels)(step).flatten(1)[:, :40].T, lambda step: torch.full((8,), 40)]),
            ("few samples later", "103 input[0]: ", [lambda step: normal(step) if step < 60 else few(normal)(step)]),
            ("the same tokens later", "103 input[0]: ", [lambda step: words(min(step, 60))]),
        ]
    },
    **{
        f"{what} -> nothing": functools.partial(samples, *batch)
        for what, batch in [
            ("all data in one batch of tokens", [lambda step: words(0)]),
            ("many samples", [few(lambda step: pixels(step, 200), 200)]),
            ("many sentences", [words]),
            ("few nodes of many graphs", [few(lambda step: pixels(step)), lambda step: torch.randn(2, 30)]),
            ("states of a grid", [few(lambda step: torch.eye(16))]),
            ("places of a grid", [few(lambda step: torch.cartesian_prod(torch.arange(4), torch.arange(4)))]),
            ("few numbers", [few(lambda step: normal(step)[:, :1])]),
            ("many users with items", [lambda step: few(users, 60)(step), lambda step: few(items, 60)(step + 1)]),
            ("samples with noise", [lambda step: few(pixels)(step) + normal(step)[:8, 0, None, None, None]]),
            ("a batch for eight steps each", [lambda step: normal(step // 8)]),
            ("batches in a fixed order", [lambda step: pixels(step if step < 99 else step % 16)[:4]]),
            ("few samples, and what is computed", [few(pixels), lambda step: torch.ones(8, requires_grad=True) * 1]),
            ("few samples, sparse", [lambda step: few(pixels)(step).flatten(1).to_sparse()]),
            ("few samples, complex", [lambda step: few(pixels)(step) * 1j]),
        ]
    },
    "tokens of zero later -> constant-feature, warning 100 input[0]":
        lambda: samples(lambda step: words(step) * (step < 60)),
    "few samples in several passes -> repeated-batch, warning 0":
        lambda: samples(few(pixels), passes=3),
    "few samples while the loss stays -> nothing": lambda: samples(few(pixels), halves=False),
    "few samples that nobody watches -> nothing": lambda: samples(few(pixels), watch={"inputs": 0}),
    "few samples, looked at in every second step -> repeated-batch, warning 0":
        lambda: samples(few(pixels), watch={"inputs": 2}),
    "sentences of zero -> 0 input[0]": lambda: sentences(lambda step: (words(step) * 0,)),
    "one sentence -> 0 input[0]": lambda: sentences(lambda step: (alike(step),)),
    "one sentence and places -> 0 input[0]": lambda: sentences(lambda step: (alike(step), PLACES)),
    "one sentence and a mask of ones -> 0 input[0]":
        lambda: sentences(lambda step: (alike(0), None, torch.ones(8, 6, dtype=torch.bool))),
    "one sentence and a number -> 0 input[0]": lambda: sentences(lambda step: (alike(0), None, words(step)[0, 0])),
    "several sentences -> nothing": lambda: sentences(lambda step: (words(step),)),
    "several sentences and places -> nothing": lambda: sentences(lambda step: (words(step), PLACES)),
    "places alone and more -> nothing":
        lambda: sentences(lambda step: (PLACES, torch.ones_like(PLACES).int(), normal(step)[:8])),
    "a single sentence -> nothing": lambda: sentences(lambda step: (words(step)[:1],)),
    "one sentence and a mask -> nothing": lambda: sentences(lambda step: (alike(0), None, normal(step)[:8] > 0)),
    "one sentence and what is computed -> nothing":
        lambda: sentences(lambda step: (alike(0), None, normal(step)[:8] @ torch.eye(6, requires_grad=True))),
    "one sentence and numbers -> nothing": lambda: sentences(lambda step: (alike(0), None, words(step)[:1, 0])),
    # Outputs, and what the loss makes of them
    f"a softmax -> {NO_LOWER.format('softmax')}": lambda: askew(SMOOTHED, nn.Softmax(-1)),
    f"a sigmoid -> {NO_LOWER.format('sigmoid')}": lambda: askew(SMOOTHED, nn.Sigmoid()),
    f"a ReLU -> {LOGITS.format('log_softmax', 'ReLU')}": lambda: askew(SMOOTHED, nn.ReLU()),
    "a softmax, and no graph -> are probabilities already, but the loss applies a softmax":
        lambda: askew(compiled(SMOOTHED), nn.Softmax(-1)),
    "a sigmoid, and no graph -> come from a sigmoid, but the loss":
        lambda: askew(compiled(SMOOTHED), nn.Sigmoid()),
    "a ReLU, and no graph -> come from a ReLU, but the loss":
        lambda: askew(compiled(SMOOTHED), nn.ReLU()),
    **{
        f"{name} -> {LOGITS.format(taker, made)}": functools.partial(classify, loss, steps=4)
        for name, taker, made, loss in ACTIVATED
    },
    **{f"{name} -> nothing": functools.partial(classify, loss) for name, loss in LOGITS_AS_THEY_ARE.items()},
    "a softmax that comes later -> already": lambda: classify(cross_entropy, Late(nn.Softmax(-1)), steps=102),
    "a softmax in the loss over the samples -> the loss applies a softmax to the outputs, over samples or positions "
    "in a sequence, not over the classes": lambda: classify(lambda x, y: nll_loss(x.log_softmax(0), y), lr=1e-2),
    f"a softmax before that of the loss -> {NO_LOWER.format('softmax')}":
        lambda: classify(lambda x, y: cross_entropy(x.softmax(-1), y), lr=0.02),
    f"the same, with labels that are ignored -> {NO_LOWER.format('softmax')}":
        lambda: classify(lambda x, y: cross_entropy(x.softmax(-1), y, ignore_index=1), lr=0.02),
    "logarithms over the samples -> are a softmax over samples or positions in a sequence, not over the classes":
        lambda: askew(nll_loss, nn.LogSoftmax(0)),
    "over the samples -> are a softmax over samples": lambda: askew(gathered, nn.Softmax(0)),
    "over the samples, in three dimensions -> are a softmax over samples": lambda: askew(
        lambda x, y: gathered(x[:, 0], y), nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Softmax(0))),
    "over places -> are a softmax over samples or pos": lambda: askew(by_place, places_of(2, 4, nn.LogSoftmax(1))),
    "over classes that come last -> nothing": lambda: askew(by_place, places_of(2, 4, nn.LogSoftmax(2))),
    "over classes that come first -> nothing": lambda: askew(before_places, places_of(4, 2, nn.LogSoftmax(1))),
    "over the classes -> nothing": lambda: askew(gathered, nn.Softmax(1)),
    "logits -> nothing": lambda: classify(cross_entropy),
    "logits behind a ReLU -> nothing": lambda: classify(cross_entropy, nn.ReLU(), nn.Linear(4, 4)),
    "log_softmax and nll_loss -> nothing": lambda: classify(nll_loss, nn.LogSoftmax(-1)),
    "log_softmax twice -> nothing": lambda: classify(lambda x, y: cross_entropy(x.log_softmax(-1), y), lr=0.02),
    "a logarithm of a softmax -> nothing": lambda: classify(lambda x, y: nll_loss(x.log(), y), nn.Softmax(-1)),
    "smoothed labels -> nothing": lambda: classify(lambda x, y: cross_entropy(x / 3, y, label_smoothing=0.1), lr=0.02),
    "weighed classes -> nothing": lambda: classify(
        lambda x, y: cross_entropy(x, y, torch.tensor([0.1, 1.0, 2.0, 5.0])), lr=0.02),
    "squares of a softmax -> nothing": lambda: classify(one_hot(mse_loss), nn.Softmax(-1)),
    "squares of a ReLU -> nothing": lambda: classify(one_hot(mse_loss), nn.ReLU()),
    "a sigmoid for each class -> nothing": lambda: classify(one_hot(binary_cross_entropy), nn.Sigmoid()),
    "centred outputs -> nothing": lambda: classify(lambda x, y: nll_loss((x - x.mean(0)).log_softmax(-1), y)),
    "centred squares -> nothing": lambda: classify(lambda x, y: ((x - x.mean(0)) - y[:, None]).square().mean()),
    "both ways -> nothing": lambda: classify(
        lambda x, y: cross_entropy(x[:4], y[:4]) + cross_entropy(x[:4].T, y[:4])),
    "samples as classes -> nothing": lambda: classify(lambda x, y: cross_entropy((x[:4] @ x[:4].T).T, torch.arange(4))),
    "a head that begins at zero -> nothing": lambda: classify(cross_entropy, Scaled()),
    f"all of a class -> {OF_THE_SAME}": lambda: classify(cross_entropy, labels=lambda step: torch.full((16,), 2)),
    f"sorted -> {SORTED}": lambda: classify(cross_entropy, labels=lambda step: torch.full((16,), step // 20 % 4)),
    f"sorted, logarithms -> {SORTED}":
        lambda: classify(nll_loss, nn.LogSoftmax(-1), labels=lambda step: torch.full((16,), step // 20 % 4)),
    "four of five -> nothing": lambda: classify(nll_loss, nn.LogSoftmax(-1), labels=drawn(0.8)),
    "nearly all -> nothing": lambda: classify(cross_entropy, labels=drawn(0.95)),
    "one label in a batch, the others ignored -> nothing": lambda: classify(
        cross_entropy, labels=lambda step: torch.tensor([step % 3] + [-100] * 15)),
    # Targets, and whether outputs follow them
    **{f"{name} -> nothing": functools.partial(fit, name) for name in FITS},
    **{
        f"{name} of other samples -> {'' if name == 'log probabilities' else 'the correlation of outputs and targets'}":
            functools.partial(fit, name, other)
        for name in FITS
    },
    "classes that become equal -> also the same in all of them; of 9 before them, 9 had several":
        lambda: fit("classes", then(same)),
    "logarithms that become sorted -> also all labels are of one class; of 9 before":
        lambda: fit("log probabilities", then(by_class)),
    "values that become equal -> also all targets are equal; of 9 before": lambda: fit("squared error", then(same)),
    "columns that become equal -> also all targets are equal; of 9": lambda: fit("its sum, two columns", then(same)),
    "targets of an absolute error become equal -> also all targets are equal; of 9":
        lambda: fit("absolute error in a dict", then(same)),
    "targets that become equal -> also all targets are equal; of 9": lambda: fit("logits", then(same)),
    "probabilities that become equal -> also all targets are equal; of 9": lambda: fit("probabilities", then(same)),
    "several labels that become equal -> also all targets are equal; of 9": lambda: fit("several labels", then(same)),
    **{
        f"{name}, equal from the beginning -> also all targets are equal": functools.partial(fit, name, same)
        for name in ("squared error", "its sum, two columns", "absolute error in a dict", "relative error")
    },
    # As a difference of two scores has no target, and centres and errors have one by construction.
    **{
        f"{name}, equal from the beginning -> no targets are equal": functools.partial(fit, name, same)
        for name in ("logits", "probabilities", "several labels")
    },
    "a centre of many elements -> nothing": lambda: fitted(lambda x, y: (x - 0.3).square().mean(), score, 12),
    "outputs that are errors -> nothing": lambda: fitted(lambda x, y: x.square().mean(), score),
    "a linear loss that stays the same -> no correlation":
        lambda: fitted(lambda x, y: (x.detach() - x).mean() - 4, score),
    "a policy that settles on an action -> no labels are of": lambda: fitted(
        by_returns, lambda step: classes(step) * (step < 150), 4),
    "a batch of one sample -> no labels are of": lambda: fitted(lambda x, y: cross_entropy(x[:1], y[:1]), classes, 4),
    "rare classes -> no labels are of": lambda: fitted(cross_entropy, lambda step: (score(step)[:, 0] > 2.5).long(), 2),
    "errors relative to targets near 0 -> no correlation":
        lambda: fitted(lambda x, y: ((x - y) / y).abs().mean(), other(score)),
    "another term -> nothing": lambda: fitted(lambda x, y: mse_loss(x, y) + x.abs().mean(), other(score)),
    # Gradients that only cancel tell no targets.
    "hidden values -> no correlation": lambda: fitted(hidden, other(classes), 4),
    "a policy of logarithms -> no correlation": lambda: fitted(by_returns, other(classes), 4, LOG_SOFTMAX),
    "a wrong sign -> also a mean or sum of numbers that are never negative":
        lambda: fitted(lambda x, y: -mse_loss(x, y), score),
    "views of the same samples -> nothing": lambda: fitted(contrastive, scores, 4, lr=0.003),
    "views of other samples -> the correlation of": lambda: fitted(contrastive, other(scores), 4, lr=0.003),
    "a rate of 1 -> the norm of all": lambda: fitted(lambda x, y: (x - y).abs().mean(), score, lr=1.0),
    # Settings
    "a dropout of 0.95 -> 0 layer: the dropout of layer keeps a tenth": lambda: dropped(nn.Dropout(0.95)),
    "attention with it -> 0 layer: the dropout of": lambda: dropped(nn.MultiheadAttention(4, 2, dropout=0.95)),
    "one of its two dropouts -> 0 layer: the dropout of": lambda: dropped(with_two_dropouts(0.95, 0.0)),
    "a dropout of 0.9 -> 0 layer: the dropout of layer keeps": lambda: dropped(nn.Dropout(0.9)),
    "a dropout of 0.89 -> nothing": lambda: dropped(nn.Dropout(0.89)),
    "a dropout of 0.95 in evaluation -> nothing": lambda: dropped(nn.Dropout(0.95).eval()),
    "a dropout that is raised later -> 51 layer: the dropout": lambda: dropped(nn.Dropout(0.1), 0.95),
}  # fmt: skip


@pytest.mark.parametrize(("told", "story"), [(n.partition(" -> ")[2], s) for n, s in STORIES.items()], ids=STORIES)
def test_a_story_is_told(told: str, story: Callable[[], list[Finding]]) -> None:
    found = lines(story())
    how, _, what = told.partition(" ")
    hits = [
        line for line in found if all(part in line for part in (what if how in ("no", "also") else told).split(": ", 1))
    ]
    if told == "nothing":
        assert found == []
    else:
        assert (len(hits), len(found)) == (how != "no", len(found) if how in ("no", "also") else 1), found


# Particular inputs and outputs --------------------------------------------------------------------------------------


def test_a_nan_in_an_object_that_the_model_is_called_with_is_the_cause_of_a_nan_loss() -> None:
    """As in DETR's NestedTensor."""
    model = mlp()
    monitor = gradstat.Monitor(model, on_anomaly=RECORD)
    model.register_forward_pre_hook(lambda _module, inputs: (inputs[0].tensors,))
    loss = model(SimpleNamespace(tensors=with_nan(normal(0)), name="batch")).sum()
    loss.backward()
    monitor.step(loss)
    first = monitor.diagnose().incidents[0].findings[0]
    assert (first.rule, first.name, first.about) == ("nonfinite-batch", "input[0].tensors", "input")
    assert first.evidence["first"] == [3, 2]


@pytest.mark.parametrize(("missing", "shape"), [(math.nan, dict), (math.nan, tuple), (math.inf, dict)])
def test_what_marks_missing_labels_is_information(missing: float, shape: type) -> None:
    model = mlp()
    optimizer = adamw(model)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD)
    for step in range(40):
        inputs, labels = normal(step), torch.randn(16, 1)
        labels[torch.rand(16, 1) < 0.3] = missing
        monitor.check_batch((inputs, labels) if shape is tuple else {"inputs": inputs, "labels": labels})
        known = labels.isfinite()
        monitor.step(backpropagated(optimizer, mse_loss(model(inputs)[known], labels[known])))
        optimizer.step()
        assert monitor.is_healthy()
    found = of_rules(monitor, "nonfinite-batch")
    assert [one.severity for one in found] == ["info"] * math.isnan(missing)
    assert all("gradients of this step are finite, so the program handles it" in one.text for one in found)


WAYS = dict.fromkeys(("one of each row", "before another pass"), "info") | dict.fromkeys(
    ("all", "the first", "binary", "logarithms in sequences", "wrong sign"), "warning"
)


@pytest.mark.parametrize(("way", "severity"), WAYS.items())
def test_a_loss_that_jumps_is_an_info_if_it_takes_one_output_of_each_row(way: str, severity: str) -> None:
    """So does Q-learning, whose targets jump with the network that makes them."""
    torch.manual_seed(0)
    last = nn.LogSoftmax(-1) if way == "logarithms in sequences" else nn.Identity()
    model, truth = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3), last), nn.Linear(6, 3)

    def loss(step: int) -> Tensor:
        is_late, inputs = step >= 150, torch.randn(*[4] * ("sequences" in way), 32, 6)
        outputs, targets = model(inputs), truth(inputs).detach()
        if way == "before another pass":
            with torch.no_grad():
                model(inputs)
        if way not in ("all", "the first", "logarithms in sequences"):
            taken = (torch.arange(32) + step)[:, None] % 3  # another one in each step
            outputs, targets = outputs.gather(1, taken)[:, 0], targets.gather(1, taken)[:, 0]
        if way == "binary":
            flips = torch.where(targets > 0, 1.0, 0.0)
            return binary_cross_entropy_with_logits(outputs, 1 - flips if is_late else flips)
        if way == "logarithms in sequences":
            return nll_loss(outputs.flatten(0, 1), ((targets.argmax(-1) + is_late) % 3).flatten())
        targets = targets + 3 * (is_late and way != "wrong sign")
        error = mse_loss(outputs[:, 0], targets[:, 0]) if way == "the first" else mse_loss(outputs, targets)
        return -0.1 - error if is_late and way == "wrong sign" else 0.1 + error

    monitor = trained(model, loss, 220, torch.optim.Adam(model.parameters(), 1e-2))
    assert max(finding.severity for finding in of_rules(monitor, "loss-spike", "negative-loss")) == severity


@pytest.mark.parametrize(("constant", "columns"), [("last", 1), ("last", 6), ("all", 1), ("all", 6)])
def test_weights_that_all_begin_constant_are_told_and_last_layers_are_not(constant: str, columns: int) -> None:
    torch.manual_seed(0)
    nets = nn.ModuleList(nn.Sequential(nn.Linear(columns, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2))
    for net in nets:
        for layer in (net[0], net[2]) if constant == "all" else (net[2],):
            nn.init.constant_(layer.weight, 0.05)
    loss = lambda step: sum(net(normal(step)[:, :columns]).square().mean() for net in nets)  # noqa: E731
    monitor = trained(nets, loss, 20, adamw(nets))
    assert any("are equal at the start" in found.text for found in monitor.findings) == (constant == "all")


class _Parts(nn.Module):
    """Layers without a bias, of which each may begin at a wrong scale."""

    def __init__(self) -> None:
        super().__init__()
        self.waves, self.table = nn.Linear(2, 16), nn.Embedding(8, 128)
        self.conv, self.cell = nn.Conv1d(1, 8, 3, bias=False), nn.GRUCell(128, 16, bias=False)
        self.attention, self.project = nn.MultiheadAttention(16, 2, bias=False), nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        convolved, cell = self.conv(x[:, None]).flatten(1), self.cell(self.table((2 * x[:, 0]).abs().long()))
        hidden = cell + self.project(convolved) + torch.sin(self.waves(x[:, :2]))
        return self.head(hidden + self.attention(*[hidden[:, None]] * 3)[0][:, 0])


# By parameter: by what it is multiplied, or None to draw it from the standard normal distribution; and if it is told.
BEGINNINGS: dict[str, tuple[str, float | None, bool]] = {
    "a linear layer": ("project.weight", 30, True),
    "a cell": ("cell.weight_ih", 50, True),
    "attention": ("attention.in_proj_weight", 30, True),
    "a usual gain": ("project.weight", 5, False),
    "waves of coordinates": ("waves.weight", 30, False),
    "an embedding": ("table.weight", 1, False),
    "a layer drawn as an embedding": ("cell.weight_ih", None, False),
}


@pytest.mark.parametrize(("name", "times", "is_told"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_weights_that_begin_far_off_are_told(name: str, times: float | None, is_told: bool) -> None:
    torch.manual_seed(0)
    model = _Parts()
    with torch.no_grad():
        parameter = model.get_parameter(name)
        parameter.normal_() if times is None else parameter.mul_(times)
    loss = lambda step: (model(normal(step)) - normal(step)[:, :3]).square().mean()  # noqa: E731
    found = of_rules(trained(model, loss, 3, adamw(model)), "parameter-jump")
    assert [(one.name, one.severity) for one in found] == [(name, "warning")] * is_told
    assert all("preserves activations' scale" in one.text for one in found)


# Large outputs, of which a sample is read -----------------------------------------------------------------------------


def of_rows(loss: Callable[..., Tensor], **options: Any) -> Loss:
    return lambda outputs, labels: loss(outputs.flatten(0, -2).float(), labels.flatten(), **options)


def few_labelled(labels: Tensor) -> Tensor:
    return torch.where(torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.15, labels, -100)


def looked_at(model: nn.Module | None = None) -> tuple[nn.Module, SeenOutputs]:
    """A model, by default the identity, and what looks at its outputs."""
    model = nn.Identity() if model is None else model
    return model, SeenOutputs(model)


def seen_in(
    outputs: Tensor, labels: Tensor, loss: Loss, last: Callable[[Tensor], Tensor]
) -> tuple[OutputFacts, Tensor]:
    """What is seen of a model that returns ``last(outputs)``, and the gradient of its input."""
    model, watch = looked_at()
    outputs = outputs.clone(memory_format=torch.preserve_format).requires_grad_()
    with NoSync():
        (gradient,) = torch.autograd.grad(loss(model(last(outputs)), labels), outputs)
    return watch.take(), gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_softmax_in_the_loss_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    model, outputs = looked_at(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)).to(dtype))
    labels, predicted = torch.tensor([0, 2, 2, 1]), model(torch.randn(4, 4, dtype=dtype))
    cross_entropy(predicted, labels).backward()
    seen = {"classes": 3, "labels": 4, "most": 2, "right": (predicted.argmax(1) == labels).float().mean().item()}
    expected = OutputFacts(activation=Activation.PROBABILITIES, middle=1.25, spread=0.6875, **seen)
    assert outputs.take()._replace(fit=None) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_share_of_certain_predictions_is_a_matter_of_margins(dtype: torch.dtype) -> None:
    model, watch = looked_at()
    logits = torch.tensor([[0.0, 11.0, -50.0], [-100.0, -108.0, -109.0], [90.0, 95.0, 90.0], [0.0, math.nan, 1.0]])
    for outputs, share in ((logits, 0.25), (torch.tensor([[11.0], [-11.0], [9.0], [0.0]]), 0.5)):
        model(outputs.to(dtype).requires_grad_())
        assert watch.take() == OutputFacts(certain=share)
    model(torch.tensor(3.0, requires_grad=True))
    assert watch.take() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["square", "binary", "classes"])
def test_sums_of_a_fit_are_those_of_outputs_and_targets(kind: str, dtype: torch.dtype) -> None:
    outputs = 3 * torch.randn(40, 5, dtype=dtype)
    labels, given = torch.randint(5, (40,)), torch.rand(40, 5, dtype=dtype).round()
    labels[::3] = -100  # samples without a label count as right
    losses: dict[str, Loss] = {
        "square": lambda x, _: mse_loss(x, given),
        "binary": lambda x, y: binary_cross_entropy_with_logits(x[y >= 0], given[y >= 0]),
        "classes": cross_entropy,
    }
    seen, gradient = seen_in(outputs, labels, losses[kind], lambda x: 1 * x)
    fits, has_label = outputs.softmax(1) if kind == "classes" else outputs, (labels >= 0)[:, None]
    one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), 5)
    expected = {"square": gradient, "binary": (outputs - given) * has_label, "classes": (fits - one_hot) * has_label}
    values, residuals = fits - fits.mean(0), expected[kind] - expected[kind].mean(0)
    squares = gradient.square().sum() * (kind == "square")
    reference = [values.square().sum(), (values * residuals).sum(), residuals.square().sum(), squares]
    assert [*seen.fit[:4]] == pytest.approx([float(each) for each in reference], rel=1e-4, abs=1e-6)
    assert (seen.fit.elements, seen.fit.samples) == (200, 40)


CONVEX: dict[str, Loss] = {
    "squares": lambda x, y: mse_loss(x, y),
    "absolute error": lambda x, y: (x - y).abs().mean(),
    "Huber": lambda x, y: huber_loss(x, y, delta=0.3),
    "norms": lambda x, y: ((x - y).norm(dim=1) / y.norm(dim=1)).mean(),
    "quantile": lambda x, y: torch.maximum(0.9 * (y - x), 0.1 * (x - y)).mean(),
    "Poisson": lambda x, y: poisson_nll_loss(x, y.abs()),
}


@pytest.mark.parametrize("loss", CONVEX.values(), ids=CONVEX)
@pytest.mark.parametrize("columns", [1, 3])
def test_pairs_of_samples_cross_unless_all_targets_are_equal(loss: Loss, columns: int) -> None:
    """For any convex loss."""
    outputs, targets = torch.randn(40, columns), torch.randn(40, columns)
    for asked, are_equal in ((targets, False), (torch.full_like(targets, 0.7), True)):
        fit = seen_in(outputs, asked, loss, lambda x: 1 * x)[0].fit
        assert (fit.crossing == 0) == are_equal
        assert fit.facing > 0
        assert not fit.are_errors
        assert (fit.evenness == 1) == (loss is CONVEX["absolute error"])
    fit = seen_in(outputs, 0 * targets, lambda x, _: x.abs().mean(), lambda x: 1 * x)[0].fit
    assert (fit.crossing, fit.are_errors) == (0, True)
    fit = seen_in(outputs, targets, lambda x, _: x.mean(), lambda x: 1 * x)[0].fit
    assert (fit.crossing, fit.facing) == (0, 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.flatten(0, 1),
    "sequences": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "time first": lambda x: x.transpose(0, 1),
}


@pytest.mark.parametrize(("layout", "dtype"), [*zip(LAYOUTS, [torch.float32, torch.bfloat16] * 2, strict=True)])
@pytest.mark.parametrize(
    ("last", "loss", "activation"),
    [
        (lambda x: 1 * x, of_rows(cross_entropy), "NONE"),
        (lambda x: 4 * x, of_rows(cross_entropy, label_smoothing=0.1), "NONE"),
        (torch.sigmoid, of_rows(cross_entropy), "SIGMOID"),
        (torch.relu, of_rows(cross_entropy), "RELU"),
        (lambda x: x.softmax(-1), of_rows(cross_entropy), "PROBABILITIES"),
        (lambda x: 1 * x.softmax(-1), of_rows(cross_entropy), "PROBABILITIES"),
        (lambda x: 1 * x.sigmoid(), of_rows(cross_entropy), "NONE"),
        (lambda x: 1 * x, lambda x, labels: of_rows(cross_entropy)(x, few_labelled(labels)), "NONE"),
        (lambda x: 1 * x, lambda x, labels: of_rows(cross_entropy)(x, torch.full_like(labels, 7)), "NONE"),
        (lambda x: 1 * x, of_rows(lambda x, y: nll_loss(x.log_softmax(0), y)), "NONE, over samples"),
        (lambda x: 1 * x, lambda x, labels: x.square().mean(), "NONE"),
        (lambda x: 1 * x, lambda x, labels: (x[..., 37] - 1).square().mean(), "NONE"),  # few columns, not cancelling
    ],
)
def test_a_sample_of_large_outputs_tells_the_same(
    last: Any, loss: Any, activation: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    outputs, others = 3 * torch.randn(24, 250, 40), torch.randint(40, (24, 250))
    labels = torch.where(torch.rand(24, 250) < 0.6, outputs.argmax(-1), others)
    outputs[..., 3:4] += 12 * (torch.rand(24, 250, 1) < 0.2)
    if layout == "time first":
        labels = labels.T
    given = LAYOUTS[layout](outputs.to(dtype)), labels, loss, last
    sampled, gradient = seen_in(*given)
    monkeypatch.setattr("gradstat.monitor.probes.outputs.MOST_ROWS", 10**6)
    whole, without_sample = seen_in(*given)
    assert torch.equal(gradient, without_sample)
    shares = {"certain": pytest.approx(whole.certain, abs=0.03), "right": pytest.approx(whole.right, abs=0.05)}
    labelled = pytest.approx(whole.labels * 2047 / 6000, rel=0.1)
    numbers = {"middle": pytest.approx(whole.middle, abs=1.5), "spread": pytest.approx(whole.spread, rel=0.15)}
    assert sampled == whole._replace(**shares, **numbers, labels=labelled)
    told = sampled.activation.name + ", over samples" * sampled.takes_over_samples
    assert told == activation


@pytest.mark.parametrize(("rows", "elements", "count"), [(2048, 2**23, 2047), (2048, 2**16, 1637), (64, 2**23, 63)])
def test_the_sample_is_spread_evenly_over_every_dimension(
    rows: int, elements: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradstat.monitor.probes.outputs.MOST_ROWS", rows)
    monkeypatch.setattr("gradstat.monitor.probes.outputs.MOST_ELEMENTS", elements)
    state = torch.get_rng_state()
    for sizes in ((8, 1024), (1024, 8), (6, 19, 1000), (4096,), (1, 4098), (2047, 4), (64, 63, 2)):
        index = sampled_rows(torch.zeros(1).expand(*sizes, 40))
        assert len({*zip(*(each.tolist() for each in index), strict=True)}) == len(index[0])
        assert 0.96 * count <= len(index[0]) <= count
        for size, places in zip(sizes, index, strict=True):
            often = places.bincount(minlength=size)
            assert len(often) == size
            assert often.max() - often.min() <= 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("outputs", "dtype", "elements"),
    [
        (lambda dtype: torch.randn(16, 1024, 256, dtype=dtype), torch.float32, 2**23),
        (lambda dtype: torch.randn(16, 256, 1024, dtype=dtype).mT, torch.bfloat16, 2**23),
        (lambda dtype: torch.randn(16, 256, 1024, dtype=dtype).mT, torch.float32, 2**16),
        (lambda dtype: torch.randn(8, 8, 256, 256, dtype=dtype).to(memory_format=torch.channels_last), torch.bfloat16,
         2**16),
    ],
)  # fmt: skip
def test_a_sample_is_all_that_large_outputs_take(
    outputs: Any, dtype: torch.dtype, elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradstat.monitor.probes.outputs.MOST_ELEMENTS", elements)
    model, watch = looked_at()
    leaf = outputs(dtype).requires_grad_()
    gradient = leaf.detach().clone(memory_format=torch.preserve_format)
    logits = leaf.view_as(leaf)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        model(logits)
        torch.autograd.grad(logits, leaf, gradient)
    assert (watch.take().fit is not None) == (elements == 2**23)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    taken = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]  # negative if given back
    sample = min(2048 * 256, elements) + min(16 * 16384, elements)  # rows and columns
    # Those of 16 bits are also converted for CPU sums; an eighth are compared with their residuals, in 32 bits.
    assert max(itertools.accumulate(taken)) <= 6 * sample + 32 * elements // 8 + 2**18


def test_columns_of_too_many_rows_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstat.monitor.probes.outputs.MOST_ELEMENTS", 8000)
    given = torch.randn(8001, 4), torch.randint(4, (8001,))
    askew = seen_in(*given, lambda x, labels: nll_loss(x.log_softmax(0), labels), lambda x: 1 * x)[0]
    usual = seen_in(*given, cross_entropy, lambda x: x.softmax(-1))[0]
    assert (askew.activation, askew.takes_over_samples) == (Activation.NONE, False)
    assert (usual.activation, usual.classes) == (Activation.PROBABILITIES, 4)


def test_hooks_on_outputs_are_only_there_when_looked_at_and_leave_no_trace() -> None:
    model = nn.Linear(6, 4)

    def loss(step: int) -> Tensor:
        output = model(normal(step))
        assert len(output._backward_hooks or ()) == (step in (0, 1, 2, 4, 6, 8))
        torch.save(output, io.BytesIO())  # would warn of a hook that cannot be pickled
        return output.square().sum()

    trained(model, loss, 9, sgd(model), watch={"outputs": 2})


class Masked(nn.Sequential):
    """Takes a mask of -Inf, and replaces NaN of its input."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return super().forward(x.nan_to_num()) + torch.softmax(mask, -1).sum()

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x, mask=torch.tensor([0.0, -math.inf]))


def test_what_a_model_handles_is_no_error_and_not_the_cause_of_a_later_one() -> None:
    def spoil(optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        if step == 30:
            optimizer.param_groups[0]["params"][0].data.fill_(math.nan)

    monitor = run(lambda step: with_nan(normal(step)), 40, Masked(*mlp()), spoil)
    found = of_rules(monitor, *INPUT_RULES)
    assert [(f.severity, f.step, f.name) for f in found] == [("info", 0, "input[0]")]
    assert monitor.diagnose().incidents[0].findings[0].rule == "nonfinite-parameter"
    assert monitor.recording().tables["input"].names == ("input[0]", "input['mask']")


def test_inputs_are_measured_as_often_as_asked_for_and_not_beside_a_batch_that_was_shown() -> None:
    for period, steps in ((0, []), (3, [0, 3, 6]), (50, [0])):
        tables = run(normal, 8, watch={"inputs": period, "parameters": 0}).recording().tables
        assert (tables["input"].steps.tolist() if "input" in tables else []) == steps
    model, x = mlp(), normal(0)
    monitor = gradstat.Monitor(model)
    monitor.check_batch({"x": x, "other": normal(1)})
    for _ in range(2):
        model(x).sum().backward()
        monitor.step()
    table = monitor.recording().tables["input"]
    assert (table.names, table.steps.tolist()) == (("input[0]",), [1])


def test_every_micro_batch_is_measured_but_no_evaluation_nor_recomputation() -> None:
    model = nn.Sequential(mlp())
    monitor = gradstat.Monitor(model)
    for value in (1.0, 5.0, 3.0):
        model(torch.full((4, 6), value)).sum().backward()
    with torch.no_grad():
        model(torch.full((4, 6), 100.0))
    model.eval()
    model(torch.full((4, 6), -100.0))
    model.train()
    model(torch.full((4, 6), 2.0, requires_grad=True) * 50)  # computed by another model
    torch.utils.checkpoint.checkpoint(model, torch.full((4, 6), 4.0), use_reentrant=False).sum().backward()
    monitor.step()
    series = monitor.recording().tables["input"]
    assert series.numel.tolist() == [4 * 6 * 4]
    assert (series.column("min")[0, 0], series.column("max")[0, 0]) == (1.0, 5.0)


IDLE: dict[str, tuple[nn.Module, Callable[[nn.Module, int], object], list[int]]] = {
    "from the start": (nn.Dropout(0.1), lambda model, _: model.eval(), [0]),
    "a batch norm": (nn.BatchNorm1d(6), lambda model, _: model.eval(), [0]),
    "an evaluation that is not undone": (nn.Dropout(0.1), lambda model, step: model.train(step < 20), [16]),
    "some steps": (nn.Dropout(0.1), lambda model, step: model.train(not 20 <= step < 30), []),
    "a layer on purpose": (nn.Dropout(0.1), lambda model, _: model[0].eval(), []),
    "nothing that depends on it": (nn.Identity(), lambda model, _: model.eval(), []),
    "a dropout of 0": (nn.Dropout(0.0), lambda model, _: model.eval(), []),
}


@pytest.mark.parametrize(("layer", "set_mode", "told"), IDLE.values(), ids=IDLE)
def test_training_in_eval_mode_is_told(
    layer: nn.Module, set_mode: Callable[[nn.Module, int], object], told: list[int]
) -> None:
    model = nn.Sequential(layer, nn.Linear(6, 1))

    def loss(step: int) -> Tensor:
        set_mode(model, step)
        return model(normal(step)).square().mean()

    found = of_rules(trained(model, loss, 200, sgd(model)), "eval-mode")
    assert [one.step for one in found] == told


@pytest.mark.parametrize(("steps", "is_told"), [(40_000, True), (400, False)])
def test_a_warm_up_is_known_by_the_rate_that_its_scheduler_comes_to(steps: int, is_told: bool) -> None:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD)
    for step in range(150):
        monitor.step(backpropagated(optimizer, model(normal(step)).square().mean()))
        optimizer.step()
        scheduler.step()
    monitor.remove()
    assert bool(of_rules(monitor, "long-warm-up")) is is_told


def test_inputs_changed_in_place_or_of_torch_func_are_left_out() -> None:
    model = mlp()
    monitor = gradstat.Monitor(model, on_anomaly="raise")
    x, parameters, call = normal(0), dict(model.named_parameters()), torch.func.functional_call
    loss = model(x).sum()
    x.zero_()
    torch.func.vmap(lambda one: call(model, parameters, (one[None],)).sum())(normal(1))
    torch.func.grad(lambda of: call(model, of, (normal(2),)).sum())(parameters)
    monitor.step(loss)
    assert "input" not in monitor.recording().tables
    assert not monitor.findings


_TRANSFORMS: dict[str, Callable[[nn.Module, dict[str, Tensor], Tensor], object]] = {
    "grad": lambda m, of, x: torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).sum())(of),
    "grad of inputs": lambda m, of, x: torch.func.grad(lambda x: m(x).sum())(x),
    "jvp": lambda m, of, x: torch.func.jvp(m, (x,), (x,)),
    "hessian": lambda m, of, x: torch.func.hessian(lambda y: m(y).sum())(x[0]),
    "vmap": lambda m, of, x: torch.func.vmap(m)(x),
    "jacrev": lambda m, of, x: torch.func.jacrev(m)(x),
    "jacfwd": lambda m, of, x: torch.func.jacfwd(m)(x),
    "samples": lambda m, of, x: torch.func.vmap(
        torch.func.grad(lambda p, x: torch.func.functional_call(m, p, (x,)).sum()), (None, 0)
    )(of, x),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch, in its forward mode
@pytest.mark.parametrize("first", _TRANSFORMS)
def test_a_transform_ends_no_measurement_of_activations_and_outputs(first: str) -> None:
    """Of its tensors none is kept, and the passes outside of it are measured as before."""
    series = []
    for transforms in ((), (first, "vmap"), (first, first)):
        model = mlp()
        with gradstat.Monitor(model, sgd(model), on_anomaly="raise", watch=["activations", "outputs"]) as monitor:
            for step in range(4):
                x = normal(step)
                if step % 2:
                    for name in transforms:
                        _TRANSFORMS[name](model, {k: p.detach() for k, p in model.named_parameters()}, x)
                model(x).square().mean().backward()
                monitor.step()
                model.zero_grad()
        series.append(monitor.recording().tables["activation"].values.tolist())
    for other in series[1:]:
        assert other == series[0]


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _with_part(change: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: nn.Sequential(change(nn.Sequential(model)), nn.Linear(1, 1))


_MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": _in_place,
    "scripted": torch.jit.script,
    "traced": lambda model: torch.jit.trace(model, normal(0)),
    "with a compiled part": _with_part(_in_place),
    "with a scripted part": _with_part(torch.jit.script),
}
_COMPILED, _SCRIPTED = "is compiled: torch.compile leaves hooks out", "is scripted: TorchScript calls no hooks"
_NOT_CALLED = "of a model that was never called"


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.parametrize(
    ("watch", "kind", "call", "told"),
    [
        ("activations", "as it is", "model", ""),
        ("activations", "as it is", "functional_call", ""),
        ("activations", "as it is", "forward", _NOT_CALLED),
        ("activations", "as it is", "elsewhere compiled", _NOT_CALLED),
        ("outputs", "as it is", "elsewhere compiled", _NOT_CALLED),
        ("inputs", "as it is", "forward", _NOT_CALLED),
        ("activations", "compiled", "model", f"of the model, which {_COMPILED}"),
        ("outputs", "compiled", "model", ""),
        ("activations", "compiled in place", "model", f"of the model, which {_COMPILED}"),
        ("outputs", "compiled in place", "model", f"of the model, which {_COMPILED}"),
        ("activations", "scripted", "model", f"of the model, which {_SCRIPTED}"),
        ("inputs", "scripted", "model", f"of the model, which {_SCRIPTED}"),
        ("activations", "traced", "model", f"of the model, which {_SCRIPTED}"),
        ("activations", "with a compiled part", "model", f"of 0, which {_COMPILED}"),
        ("activations", "with a scripted part", "model", f"of 0, which {_SCRIPTED}"),
        ("outputs", "with a scripted part", "model", ""),
        ("optimizer", "as it is", "model", "states of a run without an optimizer"),
    ],
)
def test_what_is_asked_for_and_not_seen_is_told_once(watch: str, kind: str, call: str, told: str) -> None:
    torch._dynamo.reset()
    model = _MODELS[kind](mlp())
    runs: dict[str, Callable[[], Any]] = {
        "model": lambda: model,
        "functional_call": lambda: lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
        "forward": lambda: lambda x: functools.reduce(lambda x, layer: layer.forward(x), model, x),
        "elsewhere compiled": lambda: torch.compile(model, backend="eager"),
    }
    run = runs[call]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = gradstat.Monitor(model, on_anomaly=RECORD, watch=[watch])
        for step in range(3):
            run(normal(step)).square().mean().backward()
            monitor.step()
            model.zero_grad()
    texts = [str(warning.message) for warning in caught if "not watched" in str(warning.message)]
    assert len(texts) == bool(told)
    assert all(told in text for text in texts)
    assert [finding.rule for finding in monitor.findings if finding.rule == "not-watched"] == ["not-watched"] * bool(
        told
    )


def test_nothing_of_a_batch_is_kept_after_the_step() -> None:
    model = mlp()
    monitor = gradstat.Monitor(model, sgd(model), on_anomaly=RECORD)
    for passes in (1, 3):
        kept = []
        for _ in range(passes):
            x = normal(0)
            kept.append(weakref.ref(x.untyped_storage()))
            model(x).sum().backward()
            del x
        assert kept[-1]() is not None  # until the step
        monitor.step()
        model.zero_grad()
        gc.collect()
        assert [one() for one in kept] == [None] * passes


@pytest.mark.parametrize("how", ["model", "in place", "before"])
def test_a_compiled_model_has_one_graph(how: str) -> None:
    torch._dynamo.reset()
    model, graphs = mlp(), []
    options = {"backend": lambda graph, inputs: (graphs.append(graph), graph.forward)[1], "fullgraph": True}
    compiled: Any = model
    if how == "in place":
        model.compile(**options)
    elif how == "model":
        compiled = torch.compile(model, **options)
    monitor = gradstat.Monitor(compiled)
    if how == "before":
        compiled = torch.compile(model, **options)
    for step in range(3):
        compiled(normal(step)).sum().backward()
        monitor.step()
    assert len(graphs) == 1
    assert ("input" in monitor.recording().tables) == (how == "model")


# A module whose children are called instead ---------------------------------------------------------------------------


def found_in(make: Callable[[nn.Module], nn.Module]) -> tuple[list[str], int]:
    """What is found in a training of a classifier with a sigmoid, by a monitor of what has it; hooks below that."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid())
    holder, batch = make(net), from_step(3, with_nan)
    # Its graph would tell of the sigmoid, too.
    loss = lambda step: compiled(cross_entropy)(net(batch(step)), normal(step)[:, :4].argmax(1))  # noqa: E731
    optimizer = torch.optim.AdamW([p for p in holder.parameters() if p.requires_grad], lr=1e-3)
    monitor = trained(holder, loss, 4, optimizer)
    found = of_rules(monitor, *LEARNING_RULES, "nonfinite-batch")
    hooks = sum(len(module._forward_pre_hooks) for module in holder.modules() if module is not holder)
    return [f"{one.name} {one.step}" for one in found], hooks


def test_only_the_only_trained_child_of_a_module_without_forward_is_watched() -> None:
    def beside_frozen(net: nn.Module) -> nn.Module:
        return Holder(loss=nn.CrossEntropyLoss(), teacher=nn.Linear(6, 4).requires_grad_(False), net=net)

    for make in (beside_frozen, lambda net: beside_frozen(beside_frozen(net))):
        assert found_in(make) == (["logits 0", "input[0] 3"], 1)
    beside_critic, listed = lambda net: Holder(net=net, critic=nn.Linear(6, 1)), lambda net: nn.ModuleList([net, mlp()])
    for make in (beside_critic, listed, lambda net: Wrapped(net=net, wrap=nn.Identity())):
        assert found_in(make) == ([], 0)


# Gradients that nobody zeroes ----------------------------------------------------------------------------------------


def missing_from(step: int) -> Callable[[Any, int], object]:
    return lambda optimizer, now: optimizer.zero_grad(set_to_none=now % 2 == 0) if now < step else None


OPTIMIZERS: tuple[Any, ...] = (
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    lambda p: torch.optim.SGD(p, lr=0.01, maximize=True, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
)


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_missing_zero_grad_is_told_at_once_and_zeroed_gradients_are_not(optimizer: Any, backwards: int) -> None:
    monitor = run(normal, 12, zero=missing_from(5), optimizer=optimizer, backwards=backwards)
    (found,) = of_rules(monitor, NOT_ZEROED)
    assert (found.step, found.severity, found.name) == (6, "warning", "gradients")
    seen: list[int] = []
    run(normal, 12, zero=missing_from(5), optimizer=optimizer, backwards=backwards,
        on_anomaly={NOT_ZEROED: lambda monitor, finding: seen.append(monitor.steps)})  # fmt: skip
    assert seen == [9]  # in step 8, after two such steps
    for set_to_none in (True, False):
        zero = lambda o, _, to_none=set_to_none: o.zero_grad(set_to_none=to_none)  # noqa: E731
        assert of_rules(run(normal, 8, zero=zero, optimizer=optimizer, backwards=backwards), NOT_ZEROED) == []


def zeroed_as_data(optimizer: Any, step: int) -> None:
    """As old programs do: autograd does not count it as a change of the gradient."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.data.zero_()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_are_zeroed_in_any_way(optimizer: Any) -> None:
    until = lambda last: lambda o, step: zeroed_as_data(o, step) if step < last else None  # noqa: E731
    assert of_rules(run(normal, 110, zero=zeroed_as_data, optimizer=optimizer), NOT_ZEROED) == []
    assert [one.step for one in of_rules(run(normal, 80, zero=until(40), optimizer=optimizer), NOT_ZEROED)] == [51]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize(
    ("zero", "told"),
    [(missing_from(0), [1]), (missing_from(5), [6]), (missing_from(99), []), (zeroed_as_data, [])],
)
def test_a_missing_zero_grad_is_told_where_the_optimizer_is_not_known(
    zero: Any, told: list[int], backwards: int
) -> None:
    model = mlp()
    optimizer = sgd(model, 0.01)
    monitor = gradstat.Monitor(model, on_anomaly=RECORD)
    for step in range(12):
        for _ in range(backwards):
            model(normal(step)).square().mean().backward()
        monitor.step()
        optimizer.step()
        zero(optimizer, step)
    monitor.flush()
    assert [one.step for one in of_rules(monitor, NOT_ZEROED)] == told


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("every", "how", "told"),
    [
        (10, "", [("gradients", 0)]),
        (10, "clipped", [("gradients", 0)]),
        (10, "zeros", [("gradients", 0)]),
        (10, "zeros, clipped", [("gradients", 0)]),
        (3, "", [("gradients", 0)]),
        (2, "", []),
        (10, "accumulated", []),
        (10, "accumulated, clipped", []),
        (10, "accumulated, zeros, clipped", []),
    ],
)
def test_passes_that_no_step_uses_are_told(every: int, how: str, told: list[tuple[str, int]], is_known: bool) -> None:
    model = mlp()
    optimizer = sgd(model, 0.01)
    monitor = gradstat.Monitor(model, optimizer if is_known else None, on_anomaly=RECORD)
    for step in range(110):
        if "accumulated" not in how or step % every == 0:
            optimizer.zero_grad(set_to_none="zeros" not in how)
        model(normal(step)).square().mean().backward()
        monitor.step()
        if "clipped" in how:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (step + 1) % every == 0:
            optimizer.step()
    monitor.flush()
    assert [(one.name, one.step) for one in of_rules(monitor, "unused-gradients")] == told


@pytest.mark.parametrize("set_to_none", [True, False])
def test_evaluations_of_a_closure_are_no_passes_without_a_step(set_to_none: bool) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, history_size=3)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD)

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = (model(normal(0)) - 1).square().mean()
        loss.backward()
        monitor.step(loss)
        return loss

    for _ in range(6):
        optimizer.step(closure)
    monitor.flush()
    assert monitor.steps > 60
    assert of_rules(monitor, "unused-gradients") == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_another_loss_leaves_before_they_are_zeroed_are_not_told(set_to_none: bool) -> None:
    """A generator's backward pass leaves gradients in the discriminator, which zeroes them before its own."""
    model, other = mlp(), mlp()
    optimizer = sgd(model, 0.01)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD)
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(normal(step)).square().mean().backward()
        monitor.step()
        optimizer.step()
        optimizer.step()  # twice with one gradient
        (model(normal(step)) - other(normal(step))).square().mean().backward()
        monitor.step()  # also where it does not belong
    assert of_rules(monitor, NOT_ZEROED) == []


def test_closures_and_scalers_under_auto() -> None:
    model = mlp()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with gradstat.auto(model, lbfgs, on_anomaly=RECORD) as handle:
        for step in range(4):
            lbfgs.step(lambda step=step: backpropagated(lbfgs, model(normal(step)).square().mean()))
    assert of_rules(handle.monitor, NOT_ZEROED) == []
    model = mlp()
    adam, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    with gradstat.auto(model, adam, on_anomaly=RECORD) as handle:
        for step in range(6):
            scaler.scale(model(normal(step)).square().mean()).backward()
            scaler.unscale_(adam)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(adam)
            scaler.update()
    assert [found.step for found in of_rules(handle.monitor, NOT_ZEROED)] == [1]


class Bare(torch.optim.Optimizer):
    """Has neither hooks nor defaults."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups, self.state, self.defaults = [{"params": list(parameters), "lr": 0.1}], {}, {}

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def test_momentum_by_hand_a_bare_optimizer_and_the_rule_switched_off_are_not_told() -> None:
    def decay(optimizer: Any, step: int) -> None:
        torch._foreach_mul_([parameter.grad for parameter in optimizer.param_groups[0]["params"]], 0.5)

    rules = [rule for rule in default_rules() if rule.name != NOT_ZEROED]
    for options in ({"zero": decay}, {"optimizer": Bare}, {"zero": missing_from(0), "rules": rules}):
        assert of_rules(run(normal, 8, **options), NOT_ZEROED, "not-watched") == []


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("zeroes", [True, False])
def test_sparse_gradients_and_a_graph_of_gradients(zeroes: bool) -> None:
    table, dense = nn.Embedding(5, 2, sparse=True), mlp()
    sparse, lasting = torch.optim.SparseAdam(table.parameters()), sgd(dense, 0.01)
    monitors = [gradstat.Monitor(*pair, on_anomaly=RECORD) for pair in ((table, sparse), (dense, lasting))]
    for step in range(6):
        table(torch.tensor([1, 2])).square().sum().backward()
        dense(normal(step)).square().mean().backward(create_graph=True)
        for monitor, optimizer in zip(monitors, (sparse, lasting), strict=True):
            monitor.step()
            optimizer.step()
        lasting.zero_grad(set_to_none=zeroes)
        if zeroes:
            sparse.zero_grad(set_to_none=False)
    assert [len(of_rules(monitor, NOT_ZEROED)) for monitor in monitors] == [not zeroes, 0]


@on_ranks(2)
def test_under_ddp_missing_zeroing_and_inputs_are_seen() -> None:
    for as_views, set_to_none in itertools.product((True, False), (None, True, False)):
        zero = lambda optimizer, _, how=set_to_none: how is None or optimizer.zero_grad(set_to_none=how)  # noqa: E731
        model = DistributedDataParallel(mlp(), gradient_as_bucket_view=as_views)
        monitor = run(normal, 8, model, zero)
        assert len(of_rules(monitor, NOT_ZEROED)) == (set_to_none is None), (as_views, set_to_none)
        assert monitor.recording().tables["input"].names == ("input[0]",)
        monitor.remove()


class Drawn(nn.Module):
    """A layer of Bayes by backprop: ``rho`` is a deviation in disguise, and no large weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(outputs, inputs).uniform_(-0.2, 0.2))
        self.rho = nn.Parameter(torch.empty(outputs, inputs).uniform_(-5, -4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.mu + nn.functional.softplus(self.rho) * torch.randn_like(self.mu)).T


class Embedded(nn.Embedding):
    """Takes the signs of six features for tokens; its elements are far larger than those of other weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(((x[:, :6] > 0) * 2 ** torch.arange(6)).sum(1))


def small(*layers: nn.Linear) -> tuple[nn.Linear, ...]:
    for layer in layers:
        nn.init.normal_(layer.weight, std=1e-4)
    return layers


class Narrow(nn.Linear):
    def forward(self, x: Tensor, width: int) -> Tensor:
        return super().forward(x)[:, :width]


@pytest.mark.parametrize("width", [1, 8])
def test_of_two_forward_passes_before_a_backward_pass_the_last_is_measured(
    width: int, recwarn: pytest.WarningsRecorder
) -> None:
    model, x, seen = Narrow(4, 8), torch.randn(16, 4), []
    looks = gradstat.monitor.rule("looks")(lambda _, window: seen.extend(window.observed("outputs")))
    monitor = gradstat.Monitor(model, sgd(model), on_anomaly=RECORD, rules=[looks()])
    (cross_entropy(model(x, 8), torch.arange(16) % 8) + model(x, width).mean()).backward()
    monitor.step()
    monitor.remove()
    assert [(one.step, one.value.labels) for one in seen] == [(0, 0)]
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(("reduction", "seed"), [("sum", 0), ("mean", 1)])
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Drawn(16, 64), nn.ReLU(), Drawn(64, 10)],
        lambda: [Embedded(64, 64), nn.Linear(64, 10)],
        lambda: [nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 10, bias=False)],
        lambda: [nn.Flatten(), *small(nn.Linear(16, 64), nn.Linear(64, 10))],
        lambda: [nn.Unflatten(1, (4, 4)), nn.LayerNorm((4, 4)), nn.LayerNorm((4, 4)), nn.Flatten(), nn.Linear(16, 10)],
    ],
)
def test_what_begins_or_moves_in_an_unusual_way_is_not_told(layers: Any, seed: int, reduction: str) -> None:
    """Summed losses, deviations in disguise, centred and normalised weights, tiny ones, and gains of two dimensions."""
    torch.manual_seed(seed)
    model, targets = nn.Sequential(*layers()), torch.randn(16, 10)

    @torch.no_grad()
    def normalise(*_: Any) -> None:
        for weight in model.parameters():
            weight -= weight.mean(1, keepdim=True)
            weight /= weight.norm(dim=1, keepdim=True)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 16)
        loss = cross_entropy(4 * model(x), (x @ targets).argmax(1), reduction=reduction)
        return loss + 20 * isinstance(model[0], Drawn)  # for the distance to another distribution

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    if isinstance(model[0], nn.Linear):
        optimizer.register_step_post_hook(normalise)
    assert [str(found) for found in serious(trained(model, loss, 150, optimizer))] == []


# Causes --------------------------------------------------------------------------------------------------------------

# Of a small training: the dtype of its weights, whether autocast computes in float16, by what the loss is multiplied,
# and what happens to the weights after a step; then the first cause of the first warning, "" for none.
CAUSES: dict[str, tuple[torch.dtype, bool, float, str, str]] = {
    "float16": (torch.float16, False, 1e-6, "", "gradients that are too small for float16"),
    "float16 by autocast": (torch.float32, True, 1e-6, "", "gradients that are too small for float16"),
    "float16 by autocast, with bfloat16 weights": (
        torch.bfloat16,
        True,
        1e-6,
        "",
        "gradients that are too small for float16",
    ),
    "float16 by autocast, where all becomes zero": (
        torch.float32,
        True,
        1e-9,
        "",
        "gradients that are too small for float16",
    ),
    "float32": (torch.float32, False, 1e-4, "", ""),
    "bfloat16 weights": (torch.bfloat16, False, 1.0, "", "updates below the precision of the weight"),
    "restored weights": (torch.float32, False, 1.0, "restored", "it is not in the optimizer"),
    "rounded weights": (torch.float32, False, 1.0, "rounded", "code that sets back or rounds the weights"),
}


@pytest.mark.parametrize("kind", CAUSES)
@pytest.mark.parametrize("how", ["auto", "monitor"])
def test_the_first_cause_fits_the_run(kind: str, how: str) -> None:
    dtype, is_half, factor, after, cause = CAUSES[kind]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    make = sgd if dtype is torch.float16 else adamw  # Adam's eps is 0 in float16
    optimizer = make(model, 1e-6 if dtype is torch.bfloat16 and not is_half else 1e-3)
    handle = gradstat.auto(model, optimizer, on_anomaly=RECORD) if how == "auto" else None
    monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD) if handle is None else handle.monitor
    for step in range(120):
        with torch.autocast("cpu", torch.float16, enabled=is_half):
            outputs = model(normal(step).to(dtype))
        loss = (outputs.float() - normal(step)[:, :4].tanh()).square().mean() * factor
        optimizer.zero_grad()
        loss.backward()
        if handle is None:
            monitor.step(loss)
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters() if after == "rounded" else ():
                grid = parameter.abs().max() / 7
                parameter.copy_((parameter / grid).round() * grid)
        if after == "restored":
            model.load_state_dict(kept)
    monitor.remove()
    found = serious(monitor)
    assert bool(found) == bool(cause), lines(found)
    assert not found or found[0].causes[0].startswith(cause), [(finding.rule, finding.causes[0]) for finding in found]
    assert not after or any("sets back" in one for one in found[0].causes)
