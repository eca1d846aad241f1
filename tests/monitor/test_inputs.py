"""What a monitor sees by hooks: inputs and outputs of the model, and whether anybody zeroes gradients."""

import copy
import gc
import io
import itertools
import json
import math
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cuda_counts import NoSync
from helpers.outputs import SeenOutputs
from helpers.ranks import on_ranks
from helpers.training import RECORD, trained
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)
from torch.nn.parallel import DistributedDataParallel

import gradstat
from gradstat.monitor import Finding, default_rules
from gradstat.monitor.probes.outputs import _sample
from gradstat.rules.output_facts import Activation, OutputFacts

Batch = Callable[[int], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


def run(
    batch: Batch,
    steps: int = 60,
    model: nn.Module | None = None,
    zero: Callable[[Any, int], object] = lambda optimizer, step: optimizer.zero_grad(),
    optimizer: Any = None,
    backwards: int = 1,
    **options: Any,
) -> gradstat.Monitor:
    """Trains on ``batch(step)``, which only the model sees."""
    model = mlp() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer is None else optimizer(model.parameters())
    monitor = gradstat.Monitor(model, optimizer, **{"on_anomaly": RECORD, **options})
    for step in range(steps):
        total = torch.zeros(())
        for _ in range(backwards):
            x = batch(step)
            loss = mse_loss(model(x), x.nan_to_num().sum(1, keepdim=True) / 6)
            loss.backward()
            total += loss.detach()
        monitor.step(total)
        optimizer.step()
        zero(optimizer, step)
    monitor.flush()
    return monitor


def normal(step: int) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(step))


def of_rules(monitor: gradstat.Monitor, *rules: str) -> list[Finding]:
    return [finding for finding in monitor.findings if finding.rule in rules]


INPUT_RULES = ("nonfinite-batch", "batch-range", "constant-feature")


def from_step(first: int, change: Callable[[Tensor], Tensor], count: int = 1000) -> Batch:
    return lambda step: change(normal(step)) if first <= step < first + count else normal(step)


def with_nan(x: Tensor) -> Tensor:
    x[3, 2] = math.nan
    return x


def test_tensors_in_an_object_are_measured() -> None:
    """As in DETR's NestedTensor."""
    model = mlp()
    monitor = gradstat.Monitor(model, on_anomaly=RECORD)
    model.register_forward_pre_hook(lambda _module, inputs: (inputs[0].tensors,))
    trained(monitor, lambda step: model(SimpleNamespace(tensors=with_nan(normal(step)), name="batch")).sum(), 2)
    (found,) = of_rules(monitor, "nonfinite-batch")
    assert (found.name, found.step) == ("input[0].tensors", 0)


@pytest.mark.parametrize("missing", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [dict, tuple])
def test_what_marks_missing_labels_is_information(missing: float, shape: type) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor, healthy = gradstat.Monitor(model, optimizer, on_anomaly=RECORD), 0
    for step in range(40):
        inputs, labels = normal(step), torch.randn(16, 1)
        labels[torch.rand(16, 1) < 0.3] = missing
        monitor.batch((inputs, labels) if shape is tuple else {"inputs": inputs, "labels": labels})
        known = labels.isfinite()
        optimizer.zero_grad()
        loss = mse_loss(model(inputs)[known], labels[known])
        loss.backward()
        monitor.step(loss)
        optimizer.step()
        healthy += monitor.is_healthy()
    assert healthy == 40
    found = of_rules(monitor, "nonfinite-batch")
    assert [one.severity for one in found] == ["info"] * math.isnan(missing)
    assert all("loss and gradients are finite, so the program handles it" in one.text for one in found)


# Inputs -------------------------------------------------------------------------------------------------------------


def test_a_nan_in_what_the_model_is_called_with_is_the_cause_of_a_nan_loss() -> None:
    monitor = run(from_step(30, with_nan, 1))
    first = monitor.diagnose().incidents[0].findings[0]
    assert (first.rule, first.step, first.name, first.about) == ("nonfinite-batch", 30, "input[0]", "input")
    assert first.evidence["first"] == [3, 2]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: 255 * x, "the largest magnitude in input[0] is"),
        (lambda x: x + 30, "the largest magnitude in input[0] is"),
        (lambda x: x / 255, "input[0] has a standard deviation of"),
        (torch.zeros_like, "input[0] is 0 everywhere"),
        (lambda x: torch.full_like(x, 0.1), "input[0] is 0.1 everywhere"),
    ],
)
def test_inputs_that_change_in_the_middle_of_a_run_are_told(change: Callable[[Tensor], Tensor], told: str) -> None:
    (found,) = of_rules(run(from_step(40, change), 100), *INPUT_RULES)
    assert (found.rule, found.severity, found.step, found.name) == ("batch-range", "warning", 40, "input[0]")
    assert found.text.startswith(told)


@pytest.mark.parametrize(
    ("batch", "rule"),
    [
        (lambda step: torch.zeros(16, 6), "batch-range"),
        (lambda step: normal(step)[:1].repeat(16, 1), "constant-feature"),
    ],
)
def test_inputs_that_are_zero_or_repeat_a_sample_from_the_beginning_are_told(batch: Batch, rule: str) -> None:
    (found,) = of_rules(run(batch), *INPUT_RULES)
    assert (found.rule, found.step, found.name) == (rule, 0, "input[0]")


@pytest.mark.parametrize(
    "batch",
    [
        normal,
        lambda step: normal(step) * (1 + step % 7) ** 2,
        lambda step: normal(step) * (step % 9 != 0),  # silence now and then
        lambda step: torch.rand(16, 6) + step,  # the time of a sample
        lambda step: (normal(step) > 0).float() if step < 60 else torch.ones(16, 6),  # a mask
        lambda step: torch.nn.functional.one_hot(torch.arange(16) * (step + 3) % 6, 6).float(),
    ],
)
def test_usual_inputs_are_not_told(batch: Batch) -> None:
    assert of_rules(run(batch, 120), *INPUT_RULES) == []


@pytest.mark.parametrize("first", [0, 60])
def test_a_batch_that_repeats_is_told_unless_it_is_all_data(first: int) -> None:
    found = of_rules(run(lambda step: normal(min(step, first)), 120), "repeated-batch")
    assert [(each.severity, each.step, each.name) for each in found] == [("warning", 60, "input[0]")] * (first > 0)


def words(step: int) -> Tensor:
    return torch.randint(60, (8, 4), generator=torch.Generator().manual_seed(step))


def watched(model: nn.Module, lr: float = 0.1, **options: Any) -> gradstat.Monitor:
    return gradstat.Monitor(model, torch.optim.SGD(model.parameters(), lr), on_anomaly=RECORD, **options)


@pytest.mark.parametrize(
    ("batch", "is_told"),
    [
        (lambda step: words(min(step, 60)), True),
        (lambda step: words(step) * (step < 60), True),
        (words, False),
        (lambda step: words(step) if step < 60 else torch.arange(60)[None], False),  # all of them, as in a larger batch
        (lambda step: words(0), False),
    ],
)
def test_tokens_that_repeat_are_told_by_the_gradient_of_their_embedding(batch: Batch, is_told: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 6), nn.Linear(6, 1))
    monitor = trained(watched(model), lambda step: (model(batch(step)) - normal(step)[0, 0]).square().mean(), 120)
    found = of_rules(monitor, "repeated-batch")
    assert [(each.step, each.name) for each in found] == [(60, "0.weight")] * is_told


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(60, 6), nn.Embedding(60, 6), nn.Linear(6, 1)

    def forward(
        self, words: Tensor, places: Tensor | None = None, more: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        seen = self.words(words) + (0 if places is None else self.places(places))
        return self.head(seen.mean(1) + (0 if more is None else more))


@pytest.mark.parametrize(
    ("batch", "is_told"),
    [
        (lambda step: (words(step) * 0,), True),
        (lambda step: (words(step)[:1].expand(8, 4),), True),
        (lambda step: (words(step)[:1].expand(8, 4), torch.arange(4).expand(8, 4)), True),
        (lambda step: (words(step),), False),
        (lambda step: (words(step), torch.arange(4).expand(8, 4)), False),
        (lambda step: (torch.arange(4).expand(8, 4), torch.ones(8, 4, dtype=torch.int32), normal(step)[:8]), False),
        (lambda step: (words(step)[:1],), False),
        (lambda step: (words(0)[:1].expand(8, 4), None, torch.ones(8, 6, dtype=torch.bool)), True),
        (lambda step: (words(0)[:1].expand(8, 4), None, normal(step)[:8] > 0), False),
        (lambda step: (words(0)[:1].expand(8, 4), None, normal(step)[:8] @ torch.eye(6, requires_grad=True)), False),
        (lambda step: (words(0)[:1].expand(8, 4), None, words(step)[0, 0]), True),
        (lambda step: (words(0)[:1].expand(8, 4), None, words(step)[:1, 0]), False),
    ],
)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("labels", [{}, {"labels": torch.arange(32).view(8, 4)}])
def test_tokens_are_told_if_all_samples_are_the_same(
    batch: Callable[[int], Any], is_told: bool, passes: int, labels: dict[str, Tensor]
) -> None:
    torch.manual_seed(0)
    model = Words()

    def loss(step: int) -> Tensor:
        losses = [(model(*batch(step), **labels) - normal(step)[0, 0]).square().mean() for _ in range(passes)]
        return sum(losses, torch.zeros(()))

    monitor = trained(watched(model), loss, 60)
    found = [(each.step, each.name) for each in of_rules(monitor, *INPUT_RULES, "not-watched")]
    assert found[:1] == [(0, "input[0]")] * is_told


def test_dead_units_are_no_tokens() -> None:
    """Their number changes at first, in a model without floating inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 1))
    monitor = watched(model, lr=0.0, watch={"batch": 0})
    trained(monitor, lambda step: model(normal(min(step, 60))[:2]).square().mean(), 120)
    assert of_rules(monitor, "repeated-batch") == []


# Outputs ------------------------------------------------------------------------------------------------------------


def classify(
    loss: Loss,
    *last: nn.Module,
    labels: Batch = lambda step: (normal(step)[:, :4] + normal(step)[:, 2:]).argmax(1),
    steps: int = 310,
    lr: float = 1e-3,
) -> list[str]:
    """Trains a classifier that ends with ``last``; returns what `no-learning` finds in its outputs and labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4), *last)
    monitor = gradstat.Monitor(model, torch.optim.AdamW(model.parameters(), lr=lr), on_anomaly=RECORD)
    trained(monitor, lambda step: loss(model(normal(step)), labels(step)).float(), steps)
    return [found.text for found in of_rules(monitor, "no-learning") if found.name == "logits"]


def one_hot(loss: Callable[..., Tensor], **options: Any) -> Loss:
    return lambda outputs, labels: loss(outputs, torch.nn.functional.one_hot(labels, 4).float(), **options)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "told"),
    [
        (nn.Softmax(-1), "are probabilities already, and the loss takes their softmax: it cannot fall below 0.7437"),
        (nn.Sigmoid(), "are all between 0 and 1, and the loss takes their softmax: it cannot fall below 0.7437"),
        (nn.ReLU(), "are never negative, but often 0, and the loss takes their softmax"),
    ],
)
def test_an_activation_before_a_softmax_in_the_loss_is_told(
    activation: nn.Module, told: str, dtype: torch.dtype
) -> None:
    cast = [nn.Linear(4, 4), activation]
    (text,) = classify(lambda x, labels: cross_entropy(x.to(dtype), labels, label_smoothing=0.1), *cast, lr=1e-2)
    assert text == f"the outputs of the model {told}"


@pytest.mark.parametrize(
    ("activation", "told"), [(nn.Softmax(-1), "probabilities already"), (nn.Sigmoid(), "between 0 and 1")]
)
def test_an_activation_that_comes_later_is_told(activation: nn.Module, told: str) -> None:
    class Late(nn.Module):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return activation(x) if self.passes > 60 else x

    (text,) = classify(cross_entropy, Late(), steps=102)
    assert told in text


def test_a_softmax_over_the_samples_is_told() -> None:
    (text,) = classify(lambda x, labels: nll_loss(x.log_softmax(0), labels), lr=1e-2)
    assert (
        text == "the loss takes the softmax of the outputs over samples or places in a sequence, not over the classes"
    )


def by_place(x: Tensor, labels: Tensor) -> Tensor:
    return nll_loss(x.flatten(0, 1), labels.repeat_interleave(2))


def gathered(p: Tensor, labels: Tensor) -> Tensor:
    return -p.gather(1, labels[:, None]).log().mean()


@pytest.mark.parametrize(
    ("loss", "last", "is_wrong"),
    [
        (nll_loss, nn.LogSoftmax(0), True),
        (gathered, nn.Softmax(0), True),
        (lambda x, labels: gathered(x[:, 0], labels), nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Softmax(0)), True),
        (by_place, nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.LogSoftmax(1)), True),
        (by_place, nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.LogSoftmax(2)), False),
        (
            lambda x, labels: nll_loss(x, labels[:, None].repeat(1, 2)),  # classes come before places
            nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (4, 2)), nn.LogSoftmax(1)),
            False,
        ),
        (nll_loss, nn.LogSoftmax(1), False),
        (gathered, nn.Softmax(1), False),
    ],
)
def test_outputs_that_are_a_softmax_over_the_samples_are_told(loss: Any, last: nn.Module, is_wrong: bool) -> None:
    text = "the outputs of the model are a softmax over samples or places in a sequence, not over the classes"
    assert classify(loss, nn.Linear(4, 4), last, lr=1e-2) == [text] * is_wrong


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_softmax_in_the_loss_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    model, outputs = looked_at(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)).to(dtype))
    labels, predicted = torch.tensor([0, 2, 2, 1]), model(torch.randn(4, 4, dtype=dtype))
    cross_entropy(predicted, labels).backward()
    right = (predicted.argmax(1) == labels).float().mean().item()
    expected = OutputFacts(
        activation=Activation.PROBABILITIES, is_named=True, classes=3, labels=4, label=None, right=right
    )
    assert outputs.take()._replace(fit=None) == expected


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (cross_entropy, []),
        (cross_entropy, [nn.ReLU(), nn.Linear(4, 4)]),
        (nll_loss, [nn.LogSoftmax(-1)]),
        (lambda x, labels: nll_loss(x.log(), labels), [nn.Softmax(-1)]),
        (one_hot(mse_loss), [nn.Softmax(-1)]),
        (one_hot(mse_loss, reduction="sum"), [nn.Softmax(-1)]),
        (lambda x, labels: 4 * one_hot(mse_loss)(x, labels), [nn.Softmax(-1)]),
        (one_hot(binary_cross_entropy), [nn.Sigmoid()]),
        (one_hot(mse_loss), [nn.ReLU()]),
        (lambda x, labels: cross_entropy(x, labels) + x.square().mean(), [nn.ReLU()]),
        (lambda x, labels: nll_loss((x - x.mean(0)).log_softmax(-1), labels), []),
        (lambda x, labels: ((x - x.mean(0)) - labels[:, None]).square().mean(), []),
        (lambda x, labels: cross_entropy(x[:4], labels[:4]) + cross_entropy(x[:4].T, labels[:4]), []),
        (lambda x, labels: cross_entropy((x[:4] @ x[:4].T).T, torch.arange(4)), []),
        (cross_entropy, [Scaled()]),  # equal outputs, as those of a head that begins at zero
    ],
)
def test_outputs_that_fit_to_their_loss_are_not_told(loss: Loss, last: list[nn.Module]) -> None:
    assert classify(loss, *last) == []


def taken(outputs: Tensor, step: int) -> Tensor:
    """One output of each row, another one in each step."""
    return outputs.gather(1, (torch.arange(len(outputs)) + step)[:, None] % outputs.shape[1])[:, 0]


@pytest.mark.parametrize(
    ("way", "severity"),
    [
        ("one of each row", "info"),
        ("before another pass", "info"),
        ("all", "warning"),
        ("the first", "warning"),
        ("binary", "warning"),
        ("logarithms in sequences", "warning"),
        ("wrong sign", "warning"),
    ],
)
def test_a_loss_that_jumps_is_an_info_if_it_takes_one_output_of_each_row(way: str, severity: str) -> None:
    """So does Q-learning, whose targets jump with the network that makes them."""
    torch.manual_seed(0)
    last = nn.LogSoftmax(-1) if way == "logarithms in sequences" else nn.Identity()
    model, truth = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3), last), nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    for step in range(220):
        inputs = torch.randn(*[4] * ("sequences" in way), 32, 6)
        outputs, targets = model(inputs), truth(inputs).detach()
        if way == "before another pass":
            with torch.no_grad():
                model(inputs)
        if way not in ("all", "the first", "logarithms in sequences"):
            outputs, targets = taken(outputs, step), taken(targets, step)
        if way == "binary":
            flips = torch.where(targets > 0, 1.0, 0.0)
            loss = binary_cross_entropy_with_logits(outputs, flips if step < 150 else 1 - flips)
        elif way == "logarithms in sequences":
            labels = (targets.argmax(-1) + (step >= 150)) % 3
            loss = nll_loss(outputs.flatten(0, 1), labels.flatten())
        else:
            targets = targets + 3 * (step >= 150 and way != "wrong sign")
            loss = mse_loss(outputs[:, 0], targets[:, 0]) if way == "the first" else mse_loss(outputs, targets)
            loss = 0.1 + loss if step < 150 or way != "wrong sign" else -0.1 - loss
        optimizer.zero_grad()
        loss.backward()
        monitor.step(loss)
        optimizer.step()
    monitor.flush()
    assert max(finding.severity for finding in of_rules(monitor, "loss-spike")) == severity


def drawn(share: float) -> Batch:
    """Labels of which ``share`` are 0, the others 1."""
    return lambda step: (torch.rand(16, generator=torch.Generator().manual_seed(step)) >= share).long()


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (lambda step: torch.full((16,), 2), ["the same class"]),
        (lambda step: torch.full((16,), step // 20 % 4), ["one class"]),
        *((drawn(share), []) for share in (0.5, 0.8, 0.95)),
        (lambda step: torch.tensor([step % 3] + [-100] * 15), []),  # ignored labels are of no class
    ],
)
@pytest.mark.parametrize(("loss", "last"), [(cross_entropy, []), (nll_loss, [nn.LogSoftmax(-1)])])
def test_batches_of_one_class_are_told_and_rare_classes_are_not(
    labels: Batch, told: list[str], loss: Loss, last: list[nn.Module]
) -> None:
    expected = [f"in each of 7 batches looked at, all labels are of {each}" for each in told]
    assert classify(loss, *last, labels=labels) == expected


@pytest.mark.parametrize(
    ("loss", "last", "told"),
    [
        (lambda x, labels: cross_entropy(x.softmax(-1), labels), [], True),
        (lambda x, labels: cross_entropy(x.softmax(-1), labels, ignore_index=1), [], True),
        (lambda x, labels: cross_entropy(x.log_softmax(-1), labels), [], False),
        (lambda x, labels: cross_entropy(x / 3, labels, label_smoothing=0.1), [], False),
        (lambda x, labels: cross_entropy(x, labels, torch.tensor([0.1, 1.0, 2.0, 5.0])), [], False),
    ],
)
def test_a_softmax_between_the_model_and_its_loss_is_told(loss: Loss, last: list[nn.Module], told: bool) -> None:
    text = "the outputs of the model pass through a softmax, and the loss takes their softmax: "
    assert classify(loss, *last, lr=0.02) == [f"{text}it cannot fall below 0.7437"] * told


def fitted(
    loss: Loss, targets: Batch, outputs: int = 1, wrap: Callable[[Tensor], Any] = lambda x: x, lr: float = 0.01
) -> list[str]:
    """What `no-learning` finds in a regression on ``targets``; ``wrap`` is what the model makes of its outputs."""

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    torch.manual_seed(0)
    model = Model(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))
    monitor = gradstat.Monitor(model, torch.optim.AdamW(model.parameters(), lr=lr), on_anomaly=RECORD)
    trained(monitor, lambda step: loss(model(normal(step)), targets(step)), 260)
    return [found.text for found in of_rules(monitor, "no-learning")]


def score(step: int, columns: int = 1) -> Tensor:
    return normal(step)[:, :columns] + normal(step)[:, 2 : 2 + columns]


def other(targets: Batch) -> Batch:
    """``targets`` of other samples."""
    return lambda step: targets(5000 + step)


Fit = tuple[Loss, Batch, int, Callable[[Tensor], Any]]
FITS: dict[str, Fit] = {
    "squared error": (mse_loss, score, 1, lambda x: x),
    "its sum, two columns": (lambda x, y: mse_loss(x, y, reduction="sum"), lambda step: score(step, 2), 2, lambda x: x),
    "in a tuple": (lambda x, y: 0.5 * mse_loss(x[0], y), score, 1, lambda x: (x, None)),
    "in a dict": (lambda x, y: mse_loss(x["y"], y), score, 1, lambda x: {"y": x}),
    "one dimension": (mse_loss, lambda step: score(step)[:, 0], 1, lambda x: x[:, 0]),
    "logits": (binary_cross_entropy_with_logits, lambda step: (score(step) > 0).float(), 1, lambda x: x),
    "probabilities": (binary_cross_entropy, lambda step: (score(step) > 0).float(), 1, torch.sigmoid),
    "several labels": (binary_cross_entropy_with_logits, lambda step: (score(step, 3) > 0).float(), 3, lambda x: x),
    "classes": (cross_entropy, lambda step: score(step, 4).argmax(1), 4, lambda x: x),
    "one class rare": (cross_entropy, lambda step: (score(step)[:, 0] > 1.2).long(), 2, lambda x: x),
    "log probabilities": (nll_loss, lambda step: score(step, 4).argmax(1), 4, lambda x: x.log_softmax(-1)),
}


@pytest.mark.parametrize("name", FITS)
def test_targets_of_other_samples_are_told(name: str) -> None:
    loss, targets, outputs, wrap = FITS[name]
    assert fitted(loss, targets, outputs, wrap) == []
    (text,) = fitted(loss, other(targets), outputs, wrap)
    assert "their targets have a correlation of" in text or "guessing among 4 classes" in text


def test_a_linear_loss_that_stays_the_same_is_no_sum_of_squares() -> None:
    texts = fitted(lambda x, y: (x.detach() - x).mean() - 4, score, 1)
    assert not any("squares" in text or "correlation" in text for text in texts)


def from_the_middle(targets: Batch, later: Batch) -> Batch:
    return lambda step: (targets if step < 150 else later)(step)


@pytest.mark.parametrize("name", ["classes", "log probabilities"])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_labels_that_become_equal_are_told(name: str, is_sorted: bool) -> None:
    loss, targets, outputs, wrap = FITS[name]

    def equal(step: int) -> Tensor:
        first = targets(step // 20 if is_sorted else 0)
        return first[:1].expand_as(first)

    told = f"all labels are of {'one' if is_sorted else 'the same'} class; of 9 before, 9 had several"
    assert any(told in text for text in fitted(loss, from_the_middle(targets, equal), outputs, wrap))


@pytest.mark.parametrize(
    ("name", "before"),
    # Three batches tell that an error is one of squares.
    [("squared error", 7), ("its sum, two columns", 7), ("logits", 9), ("probabilities", 9), ("several labels", 9)],
)
def test_targets_that_become_equal_are_told(name: str, before: int) -> None:
    loss, targets, outputs, wrap = FITS[name]
    equal: Batch = lambda step: targets(0)[:1].expand_as(targets(0))  # noqa: E731
    told = f"all targets are equal; of {before} before, {before} had several"
    assert any(told in text for text in fitted(loss, from_the_middle(targets, equal), outputs, wrap))
    assert not any("targets are equal" in text for text in fitted(loss, equal, outputs, wrap))  # as centres may be


@pytest.mark.parametrize(
    ("loss", "targets", "outputs"),
    [
        # A policy that settles on an action, whose actions are weighed by returns; a batch of one sample; rare classes.
        (lambda x, y: (nll_loss(x.log_softmax(-1), y, reduction="none") * torch.rand(len(y))).mean(),
         from_the_middle(lambda step: score(step, 4).argmax(1), lambda step: torch.ones(len(normal(0))).long()), 4),
        (lambda x, y: cross_entropy(x[:1], y[:1]), lambda step: score(step, 4).argmax(1), 4),
        (cross_entropy, lambda step: (score(step)[:, 0] > 2.5).long(), 2),
    ],
)  # fmt: skip
def test_equal_labels_are_not_told_where_they_may_be(loss: Loss, targets: Batch, outputs: int) -> None:
    assert not any("labels are of" in text for text in fitted(loss, targets, outputs))


@pytest.mark.parametrize("constant", ["last", "all"])
@pytest.mark.parametrize("columns", [1, 6])
def test_weights_that_all_begin_constant_are_told_and_last_layers_are_not(constant: str, columns: int) -> None:
    torch.manual_seed(0)
    nets = nn.ModuleList(nn.Sequential(nn.Linear(columns, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2))
    for net in nets:
        for layer in (net[0], net[2]) if constant == "all" else (net[2],):
            nn.init.constant_(layer.weight, 0.05)
    monitor = gradstat.Monitor(nets, torch.optim.AdamW(nets.parameters()), on_anomaly=RECORD)
    trained(monitor, lambda step: sum(net(normal(step)[:, :columns]).square().mean() for net in nets), 20)
    assert any("are equal at the start" in found.text for found in monitor.findings) == (constant == "all")


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: smooth_l1_loss(x, y, beta=0.1),  # neither a square nor a cross-entropy
        lambda x, y: mse_loss(x, y) + x.abs().mean(),
        lambda x, y: (x - y).square().mean() * (1 + y.abs().mean().detach()),  # another number in each batch
        lambda x, y: (x - 0.3).square().mean(),  # one target for all, as a centre
    ],
)
def test_targets_are_not_judged_where_the_loss_does_not_tell_them(loss: Loss) -> None:
    assert fitted(loss, other(score)) == []


@pytest.mark.parametrize(
    "loss",
    [
        # Hidden values that are normalised afterwards, a policy whose actions are weighed by returns.
        lambda x, y: cross_entropy(torch.nn.functional.layer_norm(x, x.shape[1:]) @ torch.ones(4, 4).triu(), y),
        lambda x, y: (nll_loss(x.log_softmax(-1), y, reduction="none") * torch.rand(len(y))).mean(),
    ],
)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: x.log_softmax(-1)])
def test_gradients_that_only_cancel_tell_no_targets(loss: Loss, wrap: Callable[[Tensor], Any]) -> None:
    texts = fitted(loss, other(lambda step: score(step, 4).argmax(1)), 4, wrap)
    assert not any("correlation" in text for text in texts)


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


def test_a_squared_error_with_the_wrong_sign_is_told_at_once() -> None:
    (text, *_) = fitted(lambda x, y: -mse_loss(x, y), score)
    assert "minus a sum of squares of residuals" in text


@pytest.mark.parametrize(("scale", "told"), [(1.0, False), (10.0, False), (1000.0, True)])
def test_targets_in_a_raw_scale_are_told(scale: float, told: bool) -> None:
    texts = fitted(mse_loss, lambda step: scale * score(step))
    assert [text.partition(" of ")[0] for text in texts][:1] == ["targets have a standard deviation"] * told


def contrastive(x: Tensor, y: Tensor) -> Tensor:
    """How well samples are told apart by the outputs ``x`` for one view of each, and ``y`` for the other."""
    return cross_entropy(0.3 * x @ y.T, torch.arange(len(x)))


def test_a_loss_that_stays_at_guessing_among_the_samples_is_told() -> None:
    assert fitted(contrastive, lambda step: score(step, 4), 4, lr=0.003) == []
    (text,) = fitted(contrastive, other(lambda step: score(step, 4)), 4, lr=0.003)
    assert "guessing among" in text


def test_weights_that_grow_while_no_loss_falls_are_told() -> None:
    (text,) = fitted(lambda x, y: (x - y).abs().mean(), score, lr=1.0)
    assert "the weights have grown" in text


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (lambda: nn.Dropout(0.95), True),
        (lambda: nn.MultiheadAttention(4, 2, dropout=0.95), True),
        (lambda: nn.Dropout(0.9), False),
        (lambda: nn.Dropout(0.95).eval(), False),
    ],
)
def test_a_dropout_that_leaves_next_to_nothing_is_told(layer: Callable[[], nn.Module], told: bool) -> None:
    model = nn.Linear(6, 4)
    model.layer = layer()
    monitor = trained(watched(model), lambda step: model(normal(step)).square().mean(), 40)
    texts = [(each.step, each.text) for each in of_rules(monitor, "no-learning")]
    assert texts == [(0, "the dropout of layer leaves less than a tenth")] * told


def test_a_dropout_that_is_raised_later_is_told_once() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1))

    def loss(step: int) -> Tensor:
        model[1].p = 0.1 if step < 60 else 0.95
        return model(normal(step)).square().mean()

    monitor = trained(watched(model), loss, 220)
    assert [(each.step, each.name) for each in of_rules(monitor, "no-learning")] == [(100, "1")]


@pytest.mark.parametrize("name", ["weight_decay", "eps"])
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [(0.01, 0.11, True), (0.01, 0.09, False), (0.0, 0.51, True), (0.0, 0.49, False), (0.1, 0.001, False)],
)
def test_a_setting_of_the_optimizer_that_jumps_is_told(name: str, before: float, after: float, told: bool) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD)

    def loss(step: int) -> Tensor:
        optimizer.param_groups[0][name] = before if step < 60 else after
        return mse_loss(model(normal(step)), score(step))

    trained(monitor, loss, 120)
    found = [(each.step, each.name, each.text) for each in of_rules(monitor, "learning-rate-jump")]
    assert found == [(51, name, f"{name} of group 0 has gone from {before:g} to {after:g}, after step 50")] * told


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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.flatten(0, 1),
    "sequences": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "time first": lambda x: x.transpose(0, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("last", "loss", "activation"),
    [
        (lambda x: 1 * x, of_rows(cross_entropy), "NONE"),
        (lambda x: 4 * x, of_rows(cross_entropy, label_smoothing=0.1), "NONE"),
        (torch.sigmoid, of_rows(cross_entropy), "UNIT, named"),
        (torch.relu, of_rows(cross_entropy), "NEVER_NEGATIVE, named"),
        (lambda x: x.softmax(-1), of_rows(cross_entropy), "PROBABILITIES, named"),
        (lambda x: 1 * x.sigmoid(), of_rows(cross_entropy), "UNIT"),
        (lambda x: 1 * x, lambda x, labels: of_rows(cross_entropy)(x, few_labelled(labels)), "NONE"),
        (lambda x: 1 * x, lambda x, labels: of_rows(cross_entropy)(x, torch.full_like(labels, 7)), "NONE"),
        (
            lambda x: 1 * x,
            lambda x, labels: nll_loss(x.flatten(0, -2).float().log_softmax(0), labels.flatten()),
            "NONE, over samples",
        ),
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
    monkeypatch.setattr("gradstat.monitor.probes.outputs._MOST_ROWS", 10**6)
    whole, without_sample = seen_in(*given)
    assert torch.equal(gradient, without_sample)
    shares = {"certain": pytest.approx(whole.certain, abs=0.03), "right": pytest.approx(whole.right, abs=0.05)}
    labelled = pytest.approx(whole.labels * 2047 / 6000, rel=0.1)
    assert sampled == whole._replace(**shares, labels=labelled)
    told = sampled.activation.name + ", named" * sampled.is_named + ", over samples" * sampled.takes_over_samples
    assert told == activation


@pytest.mark.parametrize(("rows", "elements", "count"), [(2048, 2**23, 2047), (2048, 2**16, 1637), (64, 2**23, 63)])
def test_the_sample_is_spread_evenly_over_every_dimension(
    rows: int, elements: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradstat.monitor.probes.outputs._MOST_ROWS", rows)
    monkeypatch.setattr("gradstat.monitor.probes.outputs._MOST_ELEMENTS", elements)
    state = torch.get_rng_state()
    for sizes in ((8, 1024), (1024, 8), (6, 19, 1000), (4096,), (1, 4098), (2047, 4), (64, 63, 2)):
        index = _sample(torch.zeros(1).expand(*sizes, 40))
        assert len({*zip(*(each.tolist() for each in index), strict=True)}) == len(index[0])
        assert 0.96 * count <= len(index[0]) <= count
        for size, places in zip(sizes, index, strict=True):
            often = places.bincount(minlength=size)
            assert len(often) == size
            assert often.max() - often.min() <= 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "outputs",
    [
        lambda dtype: torch.randn(16, 1024, 256, dtype=dtype),
        lambda dtype: torch.randn(16, 256, 1024, dtype=dtype).mT,
        lambda dtype: torch.randn(8, 8, 256, 256, dtype=dtype).to(memory_format=torch.channels_last),
    ],
)
@pytest.mark.parametrize("elements", [2**23, 2**16])
def test_a_sample_is_all_that_large_outputs_take(
    outputs: Any, elements: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradstat.monitor.probes.outputs._MOST_ELEMENTS", elements)
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
    monkeypatch.setattr("gradstat.monitor.probes.outputs._MOST_ELEMENTS", 8000)
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

    trained(watched(model, watch={"outputs": 2}), loss, 9)


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


def test_a_batch_that_was_shown_is_not_measured_twice() -> None:
    model = mlp()
    monitor = gradstat.Monitor(model)
    x = normal(0)
    monitor.batch({"x": x, "other": normal(1)})
    model(x).sum().backward()
    monitor.step()
    assert "input" not in monitor.recording().tables
    model(x).sum().backward()
    monitor.step()
    assert monitor.recording().tables["input"].names == ("input[0]",)


@pytest.mark.parametrize(("period", "steps"), [(0, []), (3, [0, 3, 6]), (50, [0])])
def test_inputs_are_measured_as_often_as_asked_for(period: int, steps: list[int]) -> None:
    tables = run(normal, 8, watch={"batch": period, "parameters": 0}).recording().tables
    assert (tables["input"].steps.tolist() if steps else [*tables].count("input") * [0]) == steps


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


def test_nothing_of_a_batch_is_kept_after_the_step() -> None:
    model = mlp()
    monitor = watched(model)
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


def test_a_watched_model_is_copied_and_pickled_without_hooks() -> None:
    model = mlp()
    with gradstat.Monitor(model):
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for one in (model, *others):
        assert not one._forward_pre_hooks
        assert not one._forward_pre_hooks_with_kwargs
        one(normal(0)).sum().backward()
    assert all(p._post_accumulate_grad_hooks in (None, {}) for p in model.parameters())


# A module whose children are called instead ---------------------------------------------------------------------------


class Holder(nn.Module):
    """Has no forward pass of its own, as a LightningModule whose ``training_step`` calls a child."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Sigmoid())


def found_in(holder: nn.Module, net: nn.Module) -> list[tuple[str, int]]:
    """What is found in a training of ``net``, which ``holder`` has, by a monitor of the holder."""
    optimizer = torch.optim.AdamW([p for p in holder.parameters() if p.requires_grad], lr=1e-3)
    monitor = gradstat.Monitor(holder, optimizer, on_anomaly=RECORD)
    batch = from_step(3, with_nan)
    trained(monitor, lambda step: cross_entropy(net(batch(step)), normal(step)[:, :4].argmax(1)), 4)
    return [(one.name, one.step) for one in of_rules(monitor, "no-learning", "nonfinite-batch")]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_only_trained_child_of_a_module_without_forward_is_watched(depth: int) -> None:
    net, teacher = classifier(), nn.Linear(6, 4).requires_grad_(False)
    holder: nn.Module = net
    for _ in range(depth):
        holder = Holder(loss=nn.CrossEntropyLoss(), teacher=teacher, net=holder)
    assert found_in(holder, net) == [("logits", 0), ("input[0]", 3)]


def test_of_several_children_none_is_watched_nor_one_of_a_module_that_has_a_forward() -> None:
    class Called(Holder):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    net = classifier()
    for holder in (Holder(net=net, critic=nn.Linear(6, 1)), nn.ModuleList([net, net[0], mlp()]), Called(net=net)):
        assert found_in(holder, net) == []
        assert sum(len(module._forward_pre_hooks) for module in holder.modules() if module is not holder) == 0


# Gradients that nobody zeroes ----------------------------------------------------------------------------------------


def missing_from(step: int) -> Callable[[Any, int], object]:
    return lambda optimizer, now: optimizer.zero_grad(set_to_none=now % 2 == 0) if now < step else None


NOT_ZEROED = "gradients-not-zeroed"
OPTIMIZERS: tuple[Any, ...] = (
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    lambda p: torch.optim.SGD(p, lr=0.01, maximize=True, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
)


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_missing_zero_grad_is_told_at_once(optimizer: Any, backwards: int) -> None:
    monitor = run(normal, 12, zero=missing_from(5), optimizer=optimizer, backwards=backwards)
    (found,) = of_rules(monitor, NOT_ZEROED)
    assert (found.step, found.severity, found.name) == (6, "warning", "gradients")
    seen: list[int] = []
    run(normal, 12, zero=missing_from(5), optimizer=optimizer, backwards=backwards,
        on_anomaly={NOT_ZEROED: lambda monitor, finding: seen.append(monitor.steps)})  # fmt: skip
    assert seen == [9]  # in step 8, after two such steps


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zeroed_gradients_are_not_told(optimizer: Any, backwards: int, set_to_none: bool) -> None:
    monitor = run(
        normal, 8, zero=lambda o, _: o.zero_grad(set_to_none=set_to_none), optimizer=optimizer, backwards=backwards
    )
    assert of_rules(monitor, NOT_ZEROED) == []


def test_momentum_by_hand_and_the_rule_switched_off_are_not_told() -> None:
    def decay(optimizer: Any, step: int) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    assert of_rules(run(normal, 8, zero=decay), NOT_ZEROED) == []
    rules = [rule for rule in default_rules() if rule.name != NOT_ZEROED]
    assert of_rules(run(normal, 8, zero=missing_from(0), rules=rules), NOT_ZEROED) == []


def test_gradients_that_another_loss_leaves_before_they_are_zeroed_are_not_told() -> None:
    """A generator's backward pass leaves gradients in the discriminator, which zeroes them before its own."""
    for set_to_none in (True, False):
        model, other = mlp(), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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

            def closure(step: int = step) -> Tensor:
                lbfgs.zero_grad()
                loss = model(normal(step)).square().mean()
                loss.backward()
                return loss

            lbfgs.step(closure)
    assert of_rules(handle.monitor, NOT_ZEROED) == []
    model = mlp()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with gradstat.auto(model, adam, on_anomaly=RECORD) as handle:
        for step in range(6):
            scaler.scale(model(normal(step)).square().mean()).backward()
            scaler.unscale_(adam)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(adam)
            scaler.update()
    (found,) = of_rules(handle.monitor, NOT_ZEROED)
    assert found.step == 1


def test_an_optimizer_without_hooks_or_defaults_is_watched() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups, self.state, self.defaults = [{"params": list(parameters), "lr": 0.1}], {}, {}

        def step(self, closure: Any = None) -> None: ...

        def zero_grad(self, set_to_none: bool = True) -> None: ...

    assert of_rules(run(normal, 4, optimizer=Bare), NOT_ZEROED, "not-watched") == []


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("zeroes", [True, False])
def test_sparse_gradients_and_a_graph_of_gradients(zeroes: bool) -> None:
    def found(model: nn.Module, optimizer: Any, loss: Batch, zero: Any, **options: Any) -> int:
        monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD)
        for step in range(6):
            loss(step).backward(**options)
            monitor.step()
            optimizer.step()
            zero(optimizer)
        return len(of_rules(monitor, NOT_ZEROED))

    table, dense = nn.Embedding(5, 2, sparse=True), mlp()
    adam, sgd = torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(dense.parameters(), lr=0.01)
    zero = lambda optimizer: zeroes and optimizer.zero_grad(set_to_none=False)  # noqa: E731
    assert found(table, adam, lambda step: table(torch.tensor([1, 2])).square().sum(), zero) == (not zeroes)
    zero = lambda optimizer: optimizer.zero_grad(set_to_none=zeroes)  # noqa: E731
    assert found(dense, sgd, lambda step: dense(normal(step)).square().mean(), zero, create_graph=True) == 0


@on_ranks(2)
def test_under_ddp_missing_zeroing_and_inputs_are_seen() -> None:
    for as_views, sets_to_none in itertools.product((True, False), (None, True, False)):

        def zero(optimizer: Any, step: int, how: bool | None = sets_to_none) -> None:
            if how is not None:
                optimizer.zero_grad(set_to_none=how)

        model = DistributedDataParallel(mlp(), gradient_as_bucket_view=as_views)
        monitor = run(normal, 8, model, zero)
        assert len(of_rules(monitor, NOT_ZEROED)) == (sets_to_none is None), (as_views, sets_to_none)
        assert monitor.recording().tables["input"].names == ("input[0]",)
        monitor.detach()


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


@pytest.mark.parametrize("width", [1, 8])
def test_of_two_forward_passes_before_a_backward_pass_the_last_is_measured(
    width: int, recwarn: pytest.WarningsRecorder
) -> None:
    class Narrow(nn.Linear):
        def forward(self, x: Tensor, width: int) -> Tensor:
            return super().forward(x)[:, :width]

    model, x, seen = Narrow(4, 8), torch.randn(16, 4), []
    looks = gradstat.monitor.rule("looks")(lambda _, window: seen.extend(window.observed("outputs")))
    monitor = gradstat.Monitor(model, torch.optim.SGD(model.parameters(), 0.1), on_anomaly=RECORD, rules=[looks()])
    (cross_entropy(model(x, 8), torch.arange(16) % 8) + model(x, width).mean()).backward()
    monitor.step()
    monitor.detach()
    assert [(one.step, one.value.labels) for one in seen] == [(0, 0)]
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("seed", range(2))
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
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    for _ in range(150):
        x = torch.randn(32, 16)
        loss = cross_entropy(4 * model(x), (x @ targets).argmax(1), reduction=reduction)
        loss += 20 * isinstance(model[0], Drawn)  # for the distance to another distribution
        optimizer.zero_grad()
        loss.backward()
        monitor.step(loss)
        optimizer.step()
        if isinstance(model[0], nn.Linear):
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= weight.mean(1, keepdim=True)
                    weight /= weight.norm(dim=1, keepdim=True)
    monitor.detach()
    assert [str(finding) for finding in monitor.findings if finding.severity != "info"] == []
