"""Advice follows from what was measured and from what is switched on: nobody is told what they do already."""

import math
from typing import Any

import pytest
import torch
from helpers.training import RECORD
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradstat
from gradstat.monitor import RULES, Finding
from gradstat.rules.advice import Remedy, fitted


class Codebook(nn.Module):
    """A layer with a buffer of its own, and one with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.ones(3))
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


def spoilt(spoil: Any = lambda model, x: None, steps: int = 4, scaler: Any = None, **options: Any) -> gradstat.Monitor:
    """Trains; in step 2 the model or its input is spoilt."""
    torch.manual_seed(0)
    model, scaler = Codebook(), scaler or torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradstat.Monitor(model, optimizer, scaler, **{"on_anomaly": RECORD, **options})
    for step in range(steps):
        x = torch.randn(8, 4)
        if step == 2:
            spoil(model, x)
        loss = mse_loss(model(x), x.nan_to_num()[:, :1])
        scaler.scale(loss).backward()
        monitor.step(loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    monitor.flush()
    return monitor


def bad_input(model: Any, x: Tensor) -> None:
    x[3, 1] = math.nan


def bad_weight(model: Any, x: Tensor) -> None:
    model.last.weight.data[0, 1] = math.nan


def bad_gradient(model: Any, x: Tensor) -> None:
    model.last.bias.register_hook(lambda gradient: gradient * math.nan)


def bad_loss(model: Any, x: Tensor) -> None:
    model.last.register_forward_hook(lambda module, inputs, output: output * math.inf)


def of(monitor: gradstat.Monitor, rule: str) -> Finding:
    return next(finding for finding in monitor.findings if finding.rule == rule)


def test_a_diagnosis_does_not_send_its_reader_to_the_diagnosis() -> None:
    assert [kind.name for kind in RULES for one in (*kind.causes, *kind.advice) if "diagnose()" in one] == []


def test_the_causes_of_a_loss_are_those_that_what_was_measured_leaves() -> None:
    assert of(spoilt(bad_input), "nonfinite-loss").causes == ("input[0] is not finite",)
    assert of(spoilt(bad_weight), "nonfinite-loss").causes == ("last.weight is not finite",)
    operation, batch = of(spoilt(bad_loss), "nonfinite-loss").causes  # parameters were finite
    assert "log of 0" in operation
    assert "NaN" not in batch  # the input was finite
    causes = of(spoilt(bad_loss, watch={"batch": 0, "parameters": 0}), "nonfinite-loss").causes
    assert len(causes) == 3
    assert "a batch with NaN or Inf" in causes[1]


def test_what_is_in_use_is_not_advised() -> None:
    def advised(**options: Any) -> tuple[bool, bool]:
        advice = " | ".join(of(spoilt(bad_gradient, **options), "nonfinite-gradient").advice)
        return "on_anomaly='replay'" in advice, "'skip'" in advice

    assert advised() == (True, True)
    assert advised(on_anomaly={**RECORD, "nonfinite-gradient": "skip"}) == (True, False)
    with pytest.warns(gradstat.monitor.AnomalyWarning):
        assert advised(on_anomaly={"error": "replay"}, replay=lambda: None) == (False, True)


REMEDIES = {one for kind in RULES for one in kind.advice if isinstance(one, Remedy)}


def fitted_to(advice: tuple[str, ...], *arguments: Any) -> tuple[str, ...]:
    finding = Finding("x", "error", 0, "x", {}, advice=("first", *advice))
    _, *left = fitted(finding, lambda: pytest.fail("not asked"), *arguments).advice
    assert {type(one) for one in left} <= {str}
    return tuple(left)


@pytest.mark.parametrize("remedy", sorted(REMEDIES))
def test_a_remedy_is_left_out_where_it_is_used_and_replaced_where_it_cannot_be(remedy: Remedy) -> None:
    words = {name: f"'{name}'" for name in ("replay", "skip", "rollback")} | {
        "activations": "activations",
        "clip": "clip",
    }
    assert words[remedy.uses] in remedy
    others = words.keys() - {remedy.uses}
    assert fitted_to((remedy,), others, others) == (remedy,)
    assert fitted_to((remedy,), {remedy.uses}) == ()
    assert fitted_to((remedy,), (), {remedy.uses}) == ((remedy.otherwise,) if remedy.otherwise else ())
    (where_run,) = fitted_to((remedy,), (), (), True)
    assert "step_fn" not in where_run
    assert words[remedy.uses] in where_run


def test_every_advice_that_names_something_of_gradstat_is_a_remedy() -> None:
    assert {one.uses for one in REMEDIES} == {"replay", "skip", "rollback", "activations", "clip"}
    plain = [one for kind in RULES for one in kind.advice if not isinstance(one, Remedy)]
    assert not [one for one in plain if "on_anomaly" in one or "clip gradients" in one or "step_fn" in one]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_anomaly": {**RECORD, "nonfinite-gradient": "skip"}}, "the policy 'skip' skips this step"),
        ({"scaler": torch.amp.GradScaler("cpu", init_scale=2.0)}, "the loss scaler skips this step"),
        ({}, "is not finite"),
    ],
)
def test_a_finding_says_that_its_step_is_skipped(options: dict[str, Any], told: str) -> None:
    assert of(spoilt(bad_gradient, **options), "nonfinite-gradient").text.endswith(told)


def test_only_running_statistics_are_to_be_reset() -> None:
    for name, is_advised in (("codebook", False), ("norm.running_var", True)):
        found = spoilt(lambda model, x, name=name: model.get_buffer(name)[1].fill_(math.nan), watch={"buffers": 1})
        assert ("reset_running_stats" in " ".join(of(found, "nonfinite-buffer").advice)) == is_advised
