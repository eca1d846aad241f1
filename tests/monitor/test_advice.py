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


SPOIL: dict[str, Any] = {
    "nothing": lambda model, x: None,
    "input": lambda model, x: x[3, 1].fill_(math.nan),
    "weight": lambda model, x: model.last.weight.data[0, 1].fill_(math.nan),
    "gradient": lambda model, x: model.last.bias.register_hook(lambda gradient: gradient * math.nan),
    "loss": lambda model, x: model.last.register_forward_hook(lambda module, inputs, output: output * math.inf),
    "codebook": lambda model, x: model.codebook[1].fill_(math.nan),
    "statistics": lambda model, x: model.norm.running_var[1].fill_(math.nan),
}


def spoilt(what: str, rule: str, scaler: Any = None, **options: Any) -> Finding:
    """Trains; in step 2 something of the model, or its input, is spoilt. The finding of a rule."""
    torch.manual_seed(0)
    model, scaler = Codebook(), scaler or torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradstat.Monitor(model, optimizer, scaler, **{"on_anomaly": RECORD, **options})
    for step in range(4):
        x = torch.randn(8, 4)
        SPOIL[what if step == 2 else "nothing"](model, x)
        loss = mse_loss(model(x), x.nan_to_num()[:, :1])
        scaler.scale(loss).backward()
        monitor.step(loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    monitor.flush()
    return next(finding for finding in monitor.findings if finding.rule == rule)


def test_a_diagnosis_does_not_send_its_reader_to_the_diagnosis() -> None:
    assert [kind.name for kind in RULES for one in (*kind.causes, *kind.advice) if "diagnose()" in one] == []


def test_the_causes_of_a_loss_are_those_that_what_was_measured_leaves() -> None:
    assert spoilt("input", "nonfinite-loss").causes == ("input[0] is not finite",)
    assert spoilt("weight", "nonfinite-loss").causes == ("last.weight is not finite",)
    operation, batch = spoilt("loss", "nonfinite-loss").causes  # parameters were finite
    assert "log of 0" in operation
    assert "NaN" not in batch  # the input was finite
    causes = spoilt("loss", "nonfinite-loss", watch={"inputs": 0, "parameters": 0}).causes
    assert len(causes) == 3
    assert "a batch with NaN or Inf" in causes[1]


def test_what_is_in_use_is_not_advised() -> None:
    def advised(**options: Any) -> tuple[bool, bool]:
        advice = " | ".join(spoilt("gradient", "nonfinite-gradient", **options).advice)
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
    words = {"activations": "activations", "clip": "clip", "replay": "'replay'", "skip": "'skip'"}
    words["rollback"] = "'rollback'"
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


def test_a_finding_says_that_its_step_is_skipped() -> None:
    def told(**options: Any) -> str:
        return spoilt("gradient", "nonfinite-gradient", **options).text

    assert told(on_anomaly={**RECORD, "nonfinite-gradient": "skip"}).endswith("the policy 'skip' skips this step")
    assert told(scaler=torch.amp.GradScaler("cpu", init_scale=2.0)).endswith("the loss scaler skips this step")
    assert told().endswith("is not finite")


def test_only_running_statistics_are_to_be_reset() -> None:
    for what, is_advised in (("codebook", False), ("statistics", True)):
        found = spoilt(what, "nonfinite-buffer", watch={"buffers": 1})
        assert ("reset_running_stats" in " ".join(found.advice)) == is_advised
