"""Advice follows from what was measured and from what is switched on: nobody is told what they do already."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradstat
from gradstat.monitor import RULES, Finding
from gradstat.monitor.advice import _FOLLOWED, fitted

RECORD = {"error": "record", "warning": "record"}


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
    model = Codebook()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"on_anomaly": RECORD, **options}
    monitor = gradstat.Monitor(model, optimizer, scaler, **options)
    for step in range(steps):
        x = torch.randn(8, 4)
        if step == 2:
            spoil(model, x)
        loss = mse_loss(model(x), x.nan_to_num()[:, :1])
        (loss if scaler is None else scaler.scale(loss)).backward()
        monitor.step(loss)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    monitor.flush()
    return monitor


@torch.no_grad()
def bad_input(model: Any, x: Tensor) -> None:
    x[3, 1] = math.nan


@torch.no_grad()
def bad_weight(model: Any, x: Tensor) -> None:
    model.last.weight[0, 1] = math.nan


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
    def advice(rule: str, **options: Any) -> str:
        return " | ".join(of(spoilt(bad_gradient, **options), rule).advice)

    plain = advice("nonfinite-gradient")
    assert "on_anomaly='replay'" in plain
    assert "'skip'" in plain
    skipped = advice("nonfinite-gradient", on_anomaly={**RECORD, "nonfinite-gradient": "skip"})
    assert "'skip'" not in skipped
    assert "on_anomaly='replay'" in skipped


@pytest.mark.filterwarnings("ignore::gradstat.monitor.AnomalyWarning")
def test_a_replay_is_not_advised_to_who_replays() -> None:
    found = of(spoilt(bad_gradient, on_anomaly={"error": "replay"}, replay=lambda: None), "nonfinite-gradient")
    assert "replay" not in " ".join(found.advice)
    assert len(found.advice) == 2


@pytest.mark.parametrize("key", list(_FOLLOWED))
def test_each_part_that_may_be_left_out_is_in_some_advice_and_leaves_whole_sentences(key: str) -> None:
    every = [one for kind in RULES for one in kind.advice]
    changed = 0
    for one in every:
        finding = Finding("x", "error", 0, "x", {}, advice=(one,))
        (left,) = fitted(finding, lambda: pytest.fail("not asked"), ", replay=step_fn", [key]).advice or ("",)
        changed += left != one
        assert left == left.strip(" ;,.:")
        assert {"replay": "replay'", "rollback": "rollback", "skip": "'skip'"}.get(key, "no such") not in left
    assert changed


@pytest.mark.parametrize("how", ["on_anomaly", "scaler", "nothing"])
def test_a_finding_says_that_its_step_is_skipped(how: str) -> None:
    options: dict[str, Any] = {}
    if how == "on_anomaly":
        options["on_anomaly"] = {**RECORD, "nonfinite-gradient": "skip"}
    if how == "scaler":
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0)
    text = of(spoilt(bad_gradient, **options), "nonfinite-gradient").text
    told = {"on_anomaly": "the policy 'skip' skips this step", "scaler": "the loss scaler skips this step"}
    assert text.endswith(told.get(how, "is not finite"))


def test_only_running_statistics_are_to_be_reset() -> None:
    def codebook(model: Any, x: Tensor) -> None:
        model.codebook[1] = math.nan

    def statistics(model: Any, x: Tensor) -> None:
        model.norm.running_var[1] = math.nan

    watch = {"buffers": 1}
    assert "reset_running_stats" not in " ".join(of(spoilt(codebook, watch=watch), "nonfinite-buffer").advice)
    assert "reset_running_stats" in of(spoilt(statistics, watch=watch), "nonfinite-buffer").advice[0]
