"""The benchmark of optimizer steps: verified before timing, restored between calls, passes counted, rows rendered."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import render
import rows
import step_providers
import suite
import tables
import torch
from step_providers import (
    ALONE,
    GUARDED,
    SETTINGS,
    TORCH,
    Setting,
    StepInput,
    StepProvider,
    case_name,
    providers_for,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradstat
from gradstat.bench import steps

CPU = torch.device("cpu")
SHAPES = [(40, 30), (7,), (200, 3, 5)]
SCALED, PLAIN = SETTINGS[1], SETTINGS[3]  # clipped
in_every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)


def provider(name: str) -> StepProvider:
    return next(each for each in step_providers.PROVIDERS if each.name == name)


def measured(setting: Setting) -> list[rows.Row]:
    plan = suite.Plan(CPU, full=True, seconds=0.0, min_rounds=2)
    return suite._steps_of_optimizer(plan, lambda: None, case_name("tiny", setting), SHAPES, setting)


@in_every_setting
def test_every_axis_runs(setting: Setting) -> None:
    made = measured(setting)
    supporting = [each.name for each in providers_for(StepInput(SHAPES, setting))]
    assert {GUARDED, TORCH, ALONE} <= set(supporting)
    for metric in ("wall time", "bytes moved"):
        assert sorted(row.provider for row in made if row.metric == metric) == sorted(supporting)


def unclipped(given: StepInput) -> Tensor:
    return step_providers._guarded_step(given, math.inf)


def twice(given: StepInput) -> Tensor:
    step_providers._torch_step(given)
    return step_providers._torch_step(given)


def without_the_last_tensor(given: StepInput) -> Tensor:
    given.torch_scaler.unscale_(given.optimizer)
    norm = nn.utils.get_total_norm(given.gradients)
    nn.utils.clip_grads_with_norm_(given.parameters[:-1], given.limit, norm)
    given.torch_scaler.step(given.optimizer)
    return norm


def without_skipping(given: StepInput) -> Tensor:
    norm = gradstat.clip_grad_norm_(given.parameters, given.limit)
    given.optimizer.step()
    return norm


@pytest.mark.parametrize(
    ("name", "setting", "run", "message"),
    [
        (GUARDED, SCALED, lambda given: torch.tensor(1.0), "returned norm 1.0, expected"),
        (GUARDED, SCALED, lambda given: torch.tensor(given.facts.norm), "updated parameter 0 differently"),
        (GUARDED, PLAIN, unclipped, "updated .* differently from a step in float64"),
        (GUARDED, PLAIN, without_skipping, "changed parameter 0 although a gradient is NaN"),
        (TORCH, PLAIN, twice, "returned norm"),
        (TORCH, SCALED, without_the_last_tensor, "updated parameter 2 differently"),
        (ALONE, SCALED, step_providers._torch_step, "updated .* differently from a step in float64"),
    ],
)
def test_a_wrong_step_is_never_timed(
    name: str,
    setting: Setting,
    run: Callable[[StepInput], Tensor],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = dataclasses.replace(provider(name), run=run)
    monkeypatch.setattr(step_providers, "PROVIDERS", [broken])
    monkeypatch.setattr(suite, "interleaved", lambda *_, **__: pytest.fail("was timed"))
    with pytest.raises(steps.WrongAnswerError, match=message):
        measured(setting)


class PassesOfTorch(TorchDispatchMode):
    """Counts the bytes of tensors that torch's operators read and write, without views."""

    moved = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        returned = operator(*arguments, **options)
        schema = operator._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return returned
        given = [(a, v) for a, v in zip(schema.arguments, arguments, strict=False)]
        given += [(a, options[a.name]) for a in schema.arguments if a.name in options]
        read = {id(t): t for _, value in given for t in tree_leaves(value) if isinstance(t, Tensor)}
        # The schema lets fused optimizers write gradients, but they do so only if given a grad_scale.
        fused_as_they_are = "_fused" in schema.name and options.get("grad_scale") is None
        written = [v for a, v in given if a.is_write and not (fused_as_they_are and a.name == "grads")]
        written += [v for r, v in zip(schema.returns, [returned], strict=False) if r.alias_info is None]
        self.moved += sum(t.nbytes for t in [*read.values(), *tree_leaves(written)] if isinstance(t, Tensor))
        return returned


@in_every_setting
def test_passes_are_those_of_the_operators(setting: Setting) -> None:
    given = StepInput([(200, 300), (50_000,)], setting)
    # gradstat's own pass does not go through torch's dispatcher.
    for name, unseen in ((TORCH, 0), (ALONE, 0), (GUARDED, 1)):
        given.renew()
        with PassesOfTorch() as counted:
            provider(name).run(given)
        assert round(counted.moved / given.bytes, 1) == provider(name).passes(given) - unseen


def test_rows_become_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = [row for setting in (SCALED, PLAIN) for row in measured(setting)]
    shown = tables.everything(made)
    assert "From gradients of tiny to updated parameters" in shown
    assert len(re.findall(r"^\| AdamW, fused +\| (?:loss|no) scaler, clipped ", shown, re.MULTILINE)) == 2 + 1
    for row in made:
        assert row.provider in shown
        assert tables.in_time(row.value) in shown or row.metric != "wall time"
    assert "; 1.33)" in shown  # the ratio of passes, after that of times
    assert tables.summary(made) == ""
    monkeypatch.setattr(rows, "shown", lambda: [made])
    assert render.steps_of_optimizers(tmp_path) == shown
    monkeypatch.setattr(rows, "shown", lambda: [[]])
    assert render.steps_of_optimizers(tmp_path) == ""
