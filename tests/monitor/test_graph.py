"""What the graph of a first loss tells: of which parameters it is, what must be positive, and what takes logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from helpers.training import RECORD, serious
from torch import Tensor, nn
from torch.distributions import Beta, Gamma, Independent, Laplace, Normal
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradstat
from gradstat.monitor.probes.graph import LossGraph, dropped_by, leaves_of

X = torch.linspace(0.1, 0.9, 12).reshape(4, 3)
Of = Callable[[Tensor, Tensor], Tensor]

# What is computed of two parameters of three elements -> those that have to be positive.
POSITIVE: dict[str, tuple[Of, str]] = {
    "the deviation of a normal": (lambda p, q: Normal(X * q, p).log_prob(X), "p"),
    "one in half precision": (lambda p, q: Normal(X * q, p.half().float()).log_prob(X), "p"),
    "deviations of independent ones": (lambda p, q: Independent(Normal(X * q, p), 1).log_prob(X), "p"),
    "the scale of a Laplace": (lambda p, q: Laplace(X * q, p).log_prob(X), "p"),
    "both of a gamma": (lambda p, q: Gamma(p, q).log_prob(X), "pq"),
    "samples of a gamma": (lambda p, q: Gamma(p, q).rsample(), "p"),
    "both of a beta": (lambda p, q: Beta(p, q).log_prob(X), "pq"),
    "a temperature": (lambda p, q: (X * q / p).softmax(1), ""),
    "twice a temperature": (lambda p, q: X * q / (2 * p), ""),
    "a reciprocal": (lambda p, q: X * q * p.reciprocal(), ""),
    "a power of -1": (lambda p, q: X * q * p**-1, "p"),
    "a variance": (lambda p, q: X * q * p.sqrt(), "p"),
    "a precision": (lambda p, q: X * q * p.rsqrt(), "p"),
    "each of several": (lambda p, q: q * (p[0].log() + p[1].log() + p[-1].log()), "p"),
    "each in a loop": (lambda p, q: q * sum(one.log() for one in p), "p"),
    "one shared by several": (lambda p, q: torch.stack([X / p + p.log(), X * q / p + p.log()]), "p"),
    "some of several": (lambda p, q: q * (p[0].log() + p[1].log() + 1 / p[0]), ""),
    "the first of several": (lambda p, q: q * p[:1].log() + p.unbind()[1].log(), ""),
    "a logarithm": (lambda p, q: Normal(X * q, p.exp()).log_prob(X), ""),
    "softplus": (lambda p, q: Normal(X * q, F.softplus(p) + 1e-3).log_prob(X), ""),
    "a clamp": (lambda p, q: Normal(X * q, p.clamp(min=1e-3)).log_prob(X), ""),
    "an absolute value": (lambda p, q: X * q / p.abs(), ""),
    "a square": (lambda p, q: X * q / p**2 + p.square().log(), ""),
    "a gain": (lambda p, q: F.layer_norm(X, (3,), p, q), ""),
    "a gain by hand": (lambda p, q: X / (X + q).square().mean(1, keepdim=True).sqrt() * p, ""),
    "weight norm": (lambda p, q: p * q / q.norm(), ""),
    "a scale of cosines": (lambda p, q: p * F.cosine_similarity(X * q, X, dim=0), ""),
    "a sum with a constant": (lambda p, q: X * q / (1 + p), ""),
}  # fmt: skip


@pytest.mark.parametrize(("computed", "expected"), POSITIVE.values(), ids=POSITIVE)
def test_what_has_to_be_positive_is_in_the_graph(computed: Of, expected: str) -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))
    loss = computed(p, q).sum()
    loss.backward()  # after which what the graph has saved is gone
    graph = LossGraph.of([loss])
    assert {id(leaf()) for leaf, _ in graph.positive} == {id({"p": p, "q": q}[name]) for name in expected}
    assert {id(leaf()) for leaf, *_ in graph.leaves} == {id(one) for one in (p, q) if one.grad is not None}


# A loss of the outputs x, and the parameter p -> whether it has several terms.
TERMS: dict[str, tuple[Of, bool]] = {
    "a mean": (lambda x, p: F.cross_entropy(x, X.argmax(1)), False),
    "scaled": (lambda x, p: 2**10 * F.cross_entropy(x, X.argmax(1)) / 4, False),
    "smoothed labels": (lambda x, p: F.cross_entropy(x, X.argmax(1), label_smoothing=0.1), False),
    "both ways": (lambda x, p: F.cross_entropy(x, X.argmax(1)) / 2 + F.cross_entropy(x.T, X.argmax(0)) / 2, False),
    "by hand": (lambda x, p: (x.logsumexp(1) - x[:, 0]).mean(), False),
    "squares": (lambda x, p: (x - X).square().mean(), False),
    "a detached term": (lambda x, p: F.cross_entropy(x, X.argmax(1)) + 3 * x.detach().abs().mean(), True),
    "a constant": (lambda x, p: 1 + F.cross_entropy(x, X.argmax(1)), True),
    "less a detached term": (lambda x, p: (F.cross_entropy(x, X.argmax(1)) - p.detach().sum()) / 2, True),
    "a binary cross-entropy": (lambda x, p: F.binary_cross_entropy_with_logits(x, X.sigmoid()), True),
    "one of probabilities": (lambda x, p: 2 * F.binary_cross_entropy(x.sigmoid(), X.sigmoid()), True),
    "a penalty": (lambda x, p: F.cross_entropy(x, X.argmax(1)) + 0.1 * p.square().sum(), True),
}  # fmt: skip


@pytest.mark.parametrize(("computed", "expected"), TERMS.values(), ids=TERMS)
def test_terms_of_a_loss_are_in_its_graph(computed: Of, expected: bool) -> None:
    p = nn.Parameter(torch.ones(3))
    loss = computed((X * p).tanh(), p)
    loss.backward()
    assert LossGraph.of([loss]).is_sum == expected


# A loss of the outputs x and the targets y -> whether it is of numbers that are never negative, up to a factor.
SIGNS: dict[str, tuple[Of, bool]] = {
    "squares": (lambda x, y: -F.mse_loss(x, y), True),
    "squares by hand": (lambda x, y: -((x - y) ** 2).sum(1).mean() / 2, True),
    "magnitudes": (lambda x, y: -1 * F.l1_loss(x, y), True),
    "clamped magnitudes": (lambda x, y: -(x.clamp(-0.1, 0.1) - y).abs().sum() / 8, True),
    "huber": (lambda x, y: -F.huber_loss(x, y), True),
    "cross-entropy": (lambda x, y: -F.cross_entropy(x, y.argmax(1)), True),
    "cross-entropy by parts": (lambda x, y: -F.nll_loss(x.log_softmax(1), y.argmax(1)), True),
    "likelihoods of labels": (lambda x, y: F.nll_loss(x, y.argmax(1)), False),
    "cosines": (lambda x, y: -F.cosine_similarity(x, y).mean(), False),
    "advantages": (lambda x, y: -(F.cross_entropy(x, y.argmax(1), reduction="none") * y[:, 0]).mean(), False),
    "a difference": (lambda x, y: F.mse_loss(x, y) - x.abs().mean(), False),
    "decibels": (lambda x, y: -10 * torch.log10(1 / F.mse_loss(x, y)), False),
    "cubes": (lambda x, y: ((x - y) ** 3).mean(), False),
    "a log-likelihood": (lambda x, y: -Normal(x, 0.1).log_prob(y).mean(), False),
}  # fmt: skip


@pytest.mark.parametrize(("computed", "expected"), SIGNS.values(), ids=SIGNS)
def test_a_loss_that_is_never_negative_is_known_by_its_graph(computed: Of, expected: bool) -> None:
    loss = computed((X * nn.Parameter(torch.ones(3))).tanh(), X)
    loss.backward()
    assert LossGraph.of([loss]).has_no_sign == expected


def first_finding(model: nn.Module, loss: Callable[[Tensor], Tensor], **options: Any) -> list[str]:
    """The first finding in two steps under `auto`."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu") if options else None
    with gradstat.auto(model, optimizer, on_anomaly=RECORD) as handle:
        for _ in range(2):
            for half in X.repeat(4, 1).chunk(2):
                with torch.autocast("cpu", enabled=bool(options), **options):
                    one = loss(model(half)) / 2
                (one if scaler is None else scaler.scale(one)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        found = serious(handle.monitor)
    return [f"{one.rule} {one.step}" for one in found[:1]]


def of_sigmoid(outputs: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.sigmoid().float(), (X.repeat(2, 1) > 0.5).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_activation_before_logits_is_seen_under_autocast_with_a_scaler(dtype: torch.dtype) -> None:
    assert first_finding(nn.Linear(3, 3), of_sigmoid, dtype=dtype) == ["activation-before-softmax 0"]


def test_a_compiled_model_hides_no_activation_in_the_loop() -> None:
    model = torch.compile(nn.Linear(3, 3), backend="aot_eager")
    assert first_finding(model, of_sigmoid) == ["activation-before-softmax 0"]


def found_with_ddp(finds_unused: bool) -> list[str]:
    """With ``finds_unused``, DDP passes outputs through a function of its own."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    loss = lambda outputs: F.cross_entropy(outputs, X.repeat(2, 1).argmax(1))  # noqa: E731
    return first_finding(DistributedDataParallel(model, find_unused_parameters=finds_unused), loss)


def test_an_activation_before_logits_is_seen_behind_ddp(ranks: Any) -> None:
    for finds_unused in (False, True):
        assert ranks.run(2, found_with_ddp, finds_unused) == [["activation-before-softmax 0"]] * 2


# The end of a run ------------------------------------------------------------------------------------------------


def ended(change: Callable[[Tensor], object], uses_auto: bool) -> tuple[list[str], gradstat.Monitor]:
    """What is told of a run whose forward pass raises after a ``change`` to a trained deviation."""
    model = nn.Module()
    model.net, model.std = nn.Linear(3, 3), nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    handle = gradstat.auto(model, optimizer, on_anomaly=RECORD) if uses_auto else None
    monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD) if handle is None else handle.monitor
    with pytest.raises(ValueError, match="parameter scale"), monitor if handle is None else handle:  # noqa: PT012
        for step in range(7):
            loss = -Normal(model.net(X[:2]), model.std, validate_args=True).log_prob(X[2:]).mean()
            optimizer.zero_grad()
            loss.backward()
            if handle is None:
                monitor.step(loss)
            optimizer.step()
            if step == 5:
                with torch.no_grad():
                    change(model.std)
    return [f"{one.rule} {one.severity} {one.step} {one.name}" for one in monitor.diagnose().findings], monitor


@pytest.mark.parametrize("uses_auto", [False, True])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda std: std[1, 2].fill_(-0.01), "nonpositive-parameter warning"),
        (lambda std: std[1, 2].fill_(float("nan")), "nonfinite-parameter error"),
    ],
)
def test_of_what_a_run_has_died_is_told(change: Callable[[Tensor], object], told: str, uses_auto: bool) -> None:
    found, monitor = ended(change, uses_auto)
    assert found[0] == f"{told} 6 std"
    assert len(found) == 1
    recording = monitor.recording()
    assert recording.steps.tolist() == [*range(6)]  # what never came is no step
    assert recording.tables["parameter"].steps.tolist() == [0]
    assert monitor.latest().step == 5


@pytest.mark.parametrize("uses_auto", [False, True])
@pytest.mark.parametrize(
    ("value", "told"),
    [(1.0, []), (float("nan"), ["nonfinite-batch error 6"]), (float("inf"), ["nonfinite-batch error 6"])],
)
def test_of_which_inputs_a_run_has_died_is_told(value: float, told: list[str], uses_auto: bool) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    handle = gradstat.auto(model, optimizer, on_anomaly=RECORD) if uses_auto else None
    monitor = gradstat.Monitor(model, optimizer, on_anomaly=RECORD) if handle is None else handle.monitor
    with pytest.raises(ValueError, match="parameter loc"), monitor if handle is None else handle:  # noqa: PT012
        for step in range(7):
            inputs = X[:2].clone()
            inputs[0, 1] = value if step == 6 else 0.5
            outputs = model(inputs)
            if step == 6:
                outputs = outputs * torch.nan  # a distribution checks them
            loss = -Normal(outputs, 1.0, validate_args=True).log_prob(X[2:]).mean()
            optimizer.zero_grad()
            loss.backward()
            if handle is None:
                monitor.step(loss)
            optimizer.step()
    assert [f"{one.rule} {one.severity} {one.step}" for one in monitor.diagnose().findings] == told
    assert monitor.latest().step == 5


@pytest.mark.parametrize("change", [lambda std: std.fill_(1e30), lambda std: std.zero_(), lambda std: std.neg_()])
def test_weights_that_are_changed_when_a_run_is_over_are_not_judged(change: Callable[[Tensor], object]) -> None:
    """As those of an earlier epoch, or of an average, that are loaded before the monitor is detached."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradstat.auto(model, optimizer, on_anomaly=RECORD) as handle:
        for _ in range(5):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            change(model.weight)
    assert handle.monitor.findings == []


# What is done to numbers -> the share that it sets to zero.
DROPPED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "a function": (lambda x: F.dropout(x, 0.95), 0.95),
    "a layer in place": (lambda x: nn.Dropout(0.9, inplace=True)(x + 0), 0.9),
    "in 16 bits": (lambda x: F.dropout(x.bfloat16(), 0.95), 0.95),
    "of channels": (lambda x: F.dropout1d(x, 0.9), 0.9),
    "of attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.9), 0.9),
    "the usual share": (lambda x: F.dropout(x, 0.1), 0.1),
    "in eval mode": (lambda x: F.dropout(x, 0.95, training=False) * 2, 0.0),
    "a mask": (lambda x: x * (torch.arange(16) % 2 * 10.0), 0.0),
    "a factor": (lambda x: x * torch.full((16,), 20.0).expand(64, 4, 16), 0.0),
    "checkpointed": (lambda x: checkpoint(F.dropout, x, 0.95, use_reentrant=False), 0.0),
}


@pytest.mark.parametrize(("computed", "share"), DROPPED.values(), ids=DROPPED)
def test_what_a_dropout_sets_to_zero_is_in_the_graph(computed: Callable[[Tensor], Tensor], share: float) -> None:
    torch.manual_seed(0)
    outputs, shares = computed(torch.randn(64, 4, 16, requires_grad=True)), [0.0]
    leaves_of(outputs, lambda node: shares.append(dropped_by(node)))
    assert max(shares) == pytest.approx(share, rel=1e-3)
    outputs.float().sum().backward()
    leaves_of(outputs, dropped_by)  # what was saved is gone
