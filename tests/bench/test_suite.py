"""The repository's benchmarks: no wrong answer is timed, and what is recorded is what is shown."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import cases
import device_timing
import plots
import pytest
import rows
import step_providers
import suite
import tables
import torch
from cases import CASES, PROVIDERS, Case
from models import Training, gpt_step
from step_providers import ALONE, GUARDED, SETTINGS, Setting, StepInput, case_name

import gradstat
from gradstat.bench import steps
from gradstat.demo.model import TINY

CPU = torch.device("cpu")
PLAN = suite.Plan(CPU, full=True, seconds=0.0, min_rounds=2)


def named(providers: Any, name: str) -> Any:
    return next(each for each in providers if each.name == name)


@pytest.mark.parametrize(
    ("name", "run", "message"),
    [
        (cases.FOREACH_NORM, lambda given: [g.norm() * 1.2 for g in given.gradients], "returned norm "),
        (cases.CHECK, lambda given: gradstat.check(given.parameters[:1]), "gradstat.check returned "),
        (cases.NAIVE, lambda given: (0, *given.facts[:3]), "found 0 nonfinite gradients, expected 1"),
        (cases.CLIPPED, lambda given: torch.tensor(given.facts.norm), "did not multiply the gradients by 0.5"),
        (
            cases.CLIP,
            lambda given: gradstat.clip_grad_norm_(given.parameters, given.facts.norm / 2),
            "did not multiply the gradients by 1.0",
        ),
    ],
)
def test_a_wrong_answer_is_never_timed(
    name: str, run: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    timed = set[str]()
    monkeypatch.setattr(suite, "interleaved", lambda calls, *_, **__: timed.update(calls) or {})
    providers = [dataclasses.replace(named(PROVIDERS, name), run=run), named(PROVIDERS, cases.STATS)]
    is_ours = "gradstat" in name  # then the benchmark ends
    with pytest.raises(steps.WrongAnswerError, match=message) if is_ours else contextlib.nullcontext():
        suite.compare(PLAN, lambda: None, "lists", "x", [(4, 3), (5,)], torch.float32, lambda given: providers)
    assert timed == (set() if is_ours else {cases.STATS})
    assert (message in capsys.readouterr().err) is not is_ours


def without_skipping(given: StepInput) -> torch.Tensor:
    norm = gradstat.clip_grad_norm_(given.parameters, given.limit)
    given.optimizer.step()
    return norm


@pytest.mark.parametrize(
    ("name", "setting", "run", "message"),
    [
        (GUARDED, SETTINGS[1], lambda given: torch.tensor(1.0), "returned norm 1.0, expected"),
        (GUARDED, SETTINGS[1], lambda given: torch.tensor(given.facts.norm), "updated parameter 0 differently"),
        (GUARDED, SETTINGS[3], without_skipping, "changed parameter 0 although a gradient is NaN"),
        (ALONE, SETTINGS[1], step_providers._torch_step, "updated .* differently from a step in float64"),
    ],
)
def test_a_wrong_step_is_never_timed(
    name: str, setting: Setting, run: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = dataclasses.replace(named(step_providers.PROVIDERS, name), run=run)
    monkeypatch.setattr(step_providers, "PROVIDERS", [broken])
    monkeypatch.setattr(suite, "interleaved", lambda *_, **__: pytest.fail("was timed"))
    shapes = [(40, 30), (7,), (200, 3, 5)]
    with pytest.raises(steps.WrongAnswerError, match=message):
        suite._steps_of_optimizer(PLAN, lambda: None, case_name("tiny", setting), shapes, setting)


def test_what_is_recorded_is_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In a run of the whole suite on tiny inputs."""
    dtypes = dict.fromkeys(dtype for case in CASES for dtype in case.dtypes)
    case = Case("10,000 tensors of 64", lambda: [(8, 8)] * 3, tuple(dtypes))
    monkeypatch.setattr(suite, "CASES", [case])
    monkeypatch.setattr(step_providers, "FULL_CASE", case)
    monkeypatch.setattr(suite, "TRAININGS", [Training("tiny GPT", lambda device: gpt_step(TINY, 8, device))])
    monkeypatch.setattr(suite, "BYTES", (16, 64))
    monkeypatch.setattr(suite, "TENSORS", (1, 3))
    monkeypatch.setattr(device_timing, "cache_bytes", lambda device: 1 << 12)
    arguments = ["suite.py", "--full", "--device", "cpu", "--seconds", "1e-6", "--record", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert suite.main() == 0
    (device,) = rows.devices(tmp_path)
    assert tables.everything(device) in capsys.readouterr().out
    assert {row.group for row in device} == set(suite.GROUPS)
    assert all(row.device and row.versions and row.threads and row.time and row.run for row in device)
    ratio = next(row for row in device if row.metric == "time ratio" and row.provider == "detect_anomaly")
    assert f" {100 * (ratio.value - 1):+.1f} % |" in tables.selected(device, "steps")
    assert "10,000 tensors of 64" in tables.selected(device, "lists")
    assert "tiny GPT" in tables.summary(device)  # of README.md
    drawn = plots.charts_of(device)
    assert set(drawn) == set(plots.DRAWN)
    for name, members in drawn.items():
        pictures = [tmp_path / f"{number}.png" for number in range(2)]
        for picture in pictures:
            plots.DRAWN[name][1](members, picture)
        first, second = (picture.read_bytes() for picture in pictures)
        assert first == second
        assert len(first) > 10_000


def test_rows_of_every_machine_are_shown_and_charts_in_the_documents_have_rows() -> None:
    """Also rows of a GPU, where the naive loop is not timed on thousands of tensors."""
    for path in rows.RESULTS.glob("*/*.jsonl"):
        assert "| call " in tables.everything(rows.read(path))
    shown = {plots.file_of(n, m) for device in rows.shown() for n, m in plots.charts_of(device).items()}
    assert {path.name for path in plots.CHARTS.glob("*.png")} == shown, "run `python benchmarks/plots.py`"
