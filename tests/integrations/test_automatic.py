"""`gradstat.auto`: a monitor in an optimizer that a program has already."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import run_example
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradstat
from gradstat.monitor import AnomalyWarning

pytestmark = pytest.mark.usefixtures("_one_thread")


def program(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, bad: int | None = None) -> Iterator[int]:
    """A loop that knows nothing of gradstat."""
    for step in range(steps):
        loss = mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2))
        optimizer.zero_grad()
        loss.backward()
        if step == bad:
            model[0].weight.grad[1, 2] = math.inf  # type: ignore[index]
        optimizer.step()
        yield step


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), **options)


def test_one_line_is_enough_and_the_handle_need_not_be_kept() -> None:
    model, optimizer = made()
    gradstat.auto(optimizer)
    gc.collect()
    with pytest.warns(AnomalyWarning, match=r"step 3.*group0\.0 has 1 Inf in 32 elements, the first at \[1, 2\]"):
        list(program(optimizer, model, 4, bad=3))


def test_names_of_the_model_or_of_the_optimizer() -> None:
    model, optimizer = made()
    with gradstat.auto(optimizer, model, on_anomaly="record") as handle:
        list(program(optimizer, model, 2, bad=1))
    assert handle.monitor.findings[0].name == "0.weight"
    model, _ = made()
    optimizer = torch.optim.AdamW(model.named_parameters())
    with gradstat.auto(optimizer, on_anomaly="record") as handle:
        list(program(optimizer, model, 2, bad=1))
    assert handle.monitor.findings[0].name == "0.weight"


def test_the_program_trains_as_without_it() -> None:
    weights = []
    for watched in (False, True):
        model, optimizer = made()
        if watched:
            gradstat.auto(optimizer)
        list(program(optimizer, model, 10))
        weights.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_clips_behind_the_check() -> None:
    model, optimizer = made()
    handle = gradstat.auto(optimizer, max_norm=1e-3, on_anomaly="record")
    list(program(optimizer, model, 3))
    assert math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())) == pytest.approx(1e-3, rel=1e-2)  # type: ignore[union-attr]
    assert (handle.monitor.recording().scalars["norm"] > 1e-3).all()


@pytest.mark.parametrize("fused", [True, False])
def test_skips_bad_steps(fused: bool) -> None:
    model, optimizer = made(fused=fused)
    gradstat.auto(optimizer, on_anomaly={"error": ("skip", "record")})
    before = None
    for step in program(optimizer, model, 6, bad=3):
        now = model[0].weight.detach().clone()  # type: ignore[index]
        assert step != 3 or torch.equal(now, before)  # type: ignore[arg-type]
        before = now
        assert now.isfinite().all()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_closure_is_looked_at_once_in_a_step(kind: Any, by_keyword: bool) -> None:
    model, _ = made()
    optimizer = kind(model.parameters(), lr=0.1)
    handle = gradstat.auto(optimizer, on_anomaly="record")
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(torch.ones(8, 4)), torch.zeros(8, 2))
        loss.backward()
        losses.append(loss.item())
        return loss

    firsts = []
    for _ in range(3):
        already = len(losses)
        optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        firsts.append(losses[already])
    assert handle.monitor.steps == 3
    assert handle.monitor.recording().scalars["loss"].tolist() == pytest.approx(firsts)


def test_removing_takes_everything_away_and_another_may_come() -> None:
    model, optimizer = made()
    handle = gradstat.auto(optimizer)
    with pytest.raises(RuntimeError, match="watched already"):
        gradstat.auto(optimizer)
    list(program(optimizer, model, 2))
    handle.remove()
    list(program(optimizer, model, 2))
    assert handle.monitor.steps == 2
    assert not optimizer._optimizer_step_pre_hooks
    gradstat.auto(optimizer)


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="of a wrapped one pass what it wraps"):
        gradstat.auto(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_example_runs_and_names_the_fault(tmp_path: Path) -> None:
    shown = run_example("auto_example.py", "--steps", "30", "--output", str(tmp_path / "run.gradstat"))
    assert "it began in step 15 with 2.weight" in shown
    assert "the first at [17, 42]" in shown
    assert "all parameters are finite: True" in shown
    assert (tmp_path / "run.gradstat").exists()
