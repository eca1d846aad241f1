"""`gradstat bench` on a user's model: what it measures and says, and what it refuses to measure."""

import dataclasses
import itertools
import json
import math
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.processes import python
from torch import nn

import gradstat
from gradstat.__main__ import main
from gradstat.bench import command, steps, timing
from gradstat.bench.memory import peak_bytes

CPU = torch.device("cpu")
HERE = "gradstat.bench.command:made_here"
FILES = {
    "bench_these": """
import torch
from torch import nn

def factory():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    return model, lambda: model(x).square().mean()

constant = 3
""",
    "bench_broken": "import torch, no_such_package\n",
    "bench_raises": "raise OSError('disk on fire')\n",
}


@pytest.fixture
def _factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("_factories")
def test_the_command_measures_a_users_model(tmp_path: Path) -> None:
    arguments = "--model bench_these:factory --rounds 3 --device cpu --threads 1 --optimizer sgd --json out.json"
    result = python("-W", "error", "-m", "gradstat", "bench", *arguments.split(), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "90 trained parameters in 4 tensors of float32; optimizer sgd" in result.stdout
    assert "Added to a step: gradstat.check " in result.stdout.splitlines()[-2]
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["parameters"], written["threads"]) == (90, 1)
    plain, *_ = variants = written["variants"]
    assert [variant["name"] for variant in variants] == [variant.name for variant in steps.variants(CPU)]
    assert all(variant["name"] in result.stdout for variant in variants)
    assert all(0 < v["seconds"]["low"] <= v["seconds"]["median"] <= v["seconds"]["high"] for v in variants)
    assert plain["ratio"]["median"] == 1
    assert plain["extra_bytes"] == {"low": 0, "median": 0, "high": 0}
    assert variants[-1]["extra_bytes"]["low"] > 1000  # the stack traces of detect_anomaly


def with_loss(loss_of: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    model = nn.Linear(2, 2)
    return lambda: (model, lambda: loss_of(model(torch.ones(3, 2))))


@pytest.mark.usefixtures("_factories")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--rounds 0", "--rounds must be at least 1"),
        ("--threads 0", "--threads must be at least 1"),
        ("--device nonsense", "--device nonsense"),
        ("--device meta", "expected a cpu or cuda device"),
        ("--json no/such/folder/x.json", "there is no folder"),
        ("--model bench_these", "expected MODULE:FACTORY"),
        ("--model no_such_module:f", "no module 'no_such_module' in the current folder or the environment"),
        ("--model bench_broken:f", "importing bench_broken failed: No module named 'no_such_package'"),
        ("--model bench_raises:f", "disk on fire"),
        ("--model bench_these:missing", "bench_these has no missing"),
        ("--model bench_these:constant", "constant is a int, not a function"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: nn.Linear(2, 2), "returned a module alone; return (model, batch) or (model, loss)"),
        (lambda: (nn.Linear(2, 2), 1, 2), "got a tuple of 3"),
        (lambda: None, "got a NoneType"),
        (with_loss(lambda output: output), "shape (3, 2); reduce it"),
        (with_loss(lambda output: output.sum().detach()), "the loss has no graph"),
        (with_loss(lambda _: torch.ones(2, requires_grad=True).sum()), "no parameter of the model has a grad"),
        (with_loss(lambda _: 1.0), "the loss must be a tensor, not a float"),
        (with_loss(lambda output: (output * math.inf).sum()), "gradients are not finite"),
        (lambda: (nn.Linear(2, 2), torch.ones(3, 5)), "the forward pass raised"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    given: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options, or a factory."""
    monkeypatch.setattr(command, "made_here", given, raising=False)
    arguments = given.split() if isinstance(given, str) else ["--model", HERE]
    assert main(["bench", "--rounds", "1", "--device", "cpu", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "/command.py" not in printed


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (FileNotFoundError(2, "No such file", "a\nb"), 2, "gradstat bench: a\\nb: No such file\n"),
        (ImportError("no plotly"), 2, "gradstat bench: no plotly\n"),
    ],
)
def test_what_ends_a_command_is_told_in_a_line(
    raised: BaseException, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(gradstat.bench, "main", Mock(side_effect=raised))
    assert main(["bench"]) == status
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("kind", "form", "expected"),
    [
        (dict, lambda out: out, 3.0),
        (UserDict, lambda out: (out, "state"), 3.0),
        (lambda batch: tuple(batch.values()), lambda out: {"loss": out.sum()}, 6.0),
        (lambda batch: batch["x"] * 2, lambda out: SimpleNamespace(loss=out.sum()), 6.0),
    ],
)
def test_a_batch_on_the_device_becomes_a_loss(
    kind: Any, form: Callable[[torch.Tensor], object], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model multiplies its inputs by a weight of ones."""

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor | float = 1.0) -> object:  # type: ignore[override]
            return form(self.weight[0] * x * y)

    model = Model(2, 1)
    nn.init.ones_(model.weight)
    batch = kind({"x": torch.full((2,), 1.5), "y": torch.full((2,), 2.0)})
    monkeypatch.setattr(command, "made_here", lambda: (model, batch), raising=False)
    for device in (CPU, torch.device("meta")):
        _, loss = command.load(HERE, device)
        assert loss().device.type == device.type
        assert device.type == "meta" or loss().item() == expected


def tiny_step() -> steps.Step:
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=steps.LEARNING_RATE)
    return steps.Step(model, lambda: model(x).square().sum(), optimizer, CPU)


def test_a_variant_that_raises_is_left_out_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    # NaN inside the backward pass, repaired before it reaches the parameter: only detect_anomaly raises.
    model, x = nn.Linear(3, 2), torch.zeros(5, 3)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.nan_to_num(1.0))
    step = steps.Step(model, lambda: (model(x) * 0).sqrt().sum(), torch.optim.SGD(model.parameters(), lr=1e-9), CPU)
    names = [variant.name for variant in command._runnable_variants(step, "here")]
    assert names == [v.name for v in steps.variants(CPU) if v.name != steps.ANOMALY]
    assert not torch.is_anomaly_enabled()
    assert "left out: detect_anomaly, since it raised RuntimeError" in capsys.readouterr().err


def test_a_step_whose_parts_disagree_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps.verify(tiny_step())
    monkeypatch.setattr(steps, "naive_loop", lambda gradients: (0, 1.0, 0.0, 0.0))
    with pytest.raises(steps.WrongAnswerError, match="naive"):
        steps.verify(tiny_step())


def test_a_block_of_steps_ends_with_one_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setitem(steps.BLOCK, "cpu", 3)
    monkeypatch.setattr(timing, "synchronize", lambda device: events.append("sync"))
    step, own = tiny_step(), tiny_step()
    monkeypatch.setattr(step.optimizer, "step", lambda: events.append("step"))
    taking = steps.Variant("taken", lambda step, loss: events.append("taken"), takes_step=True)
    attached = steps.Variant("own", lambda step, loss: events.append("own" if step is own else "other"), own=own)
    plain = steps.Variant("plain", lambda step, loss: events.append("plain"))
    costs = steps.costs(step, 2, compared=[plain, attached, taking])
    timed = [" ".join(some) for is_sync, some in itertools.groupby(events, "sync".__eq__) if not is_sync]
    for block in ("plain step plain step plain step", "own own own", "taken taken taken"):
        assert timed.count(block) == 2 + steps.WARMUP
    assert [cost.inside is None for cost in costs] == [False, True, True]


def test_turns_are_taken_and_end_with_the_budget() -> None:
    called: list[str] = []
    calls = {name: (lambda n=name: called.append(n)) for name in "abc"}
    samples = timing.interleaved(calls, 5, 2, before=lambda name: called.append(f"before {name}"))
    assert called[::2] == [f"before {name}" for name in called[1::2]]
    turns = [tuple(called[i : i + 6 : 2]) for i in range(1, 42, 6)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1
    assert [len(sample) for sample in samples.values()] == [5, 5, 5]
    for budget, rounds in ((0.0, 3), (math.inf, 9)):
        assert {len(seconds) for seconds in timing.interleaved(calls, 9, budget=budget).values()} == {rounds}


def test_the_conclusion_of_a_noisy_measurement_is_that_it_is_noisy() -> None:
    def cost(name: str, seconds: float, ratio: tuple[float, ...], *inside: float) -> steps.Cost:
        time, none = timing.Quartiles(*[seconds] * 3), timing.Quartiles(0, 0, 0)
        return steps.Cost(name, time, timing.Quartiles(*ratio), timing.Quartiles(*inside) if inside else None, none)

    plain = cost(steps.PLAIN, 0.1, (1, 1, 1), 0, 0, 0)
    clear = cost(steps.CHECK, 0.2, (1.9, 2, 2.1), 0.0009, 0.001, 0.0011)
    noisy = cost(steps.CHECK, 0.2, (0.56, 0.87, 1.78), 0, 0.002, 0.0031)
    anomaly = cost(steps.ANOMALY, 0.2, (0.56, 0.87, 1.78))
    assert (clear.added(plain).median, anomaly.added(plain).median) == (0.001 / 0.1, 0.87 - 1)
    assert command.conclusion([plain, clear]) == "Added to a step: gradstat.check 1.0 %."
    assert command.conclusion([plain, noisy, anomaly]) == (
        f"Added to a step: gradstat.check {timing.NOISE} (0.0 % to 3.1 %), "
        f"detect_anomaly {timing.NOISE} (-44.0 % to 78.0 %)."
    )
    unsteady = dataclasses.replace(plain, seconds=timing.Quartiles(0.01, 0.1, 0.3))
    assert timing.NOISE in command.conclusion([unsteady, clear])
    lines = steps.table([unsteady, clear, dataclasses.replace(noisy, name=steps.TORCH_CLIP_CHECKED)]).splitlines()
    assert [line.count("noise") for line in lines] == [0, 1, 0, 2]
    assert timing.Quartiles(0.38, 0.42, 0.42).is_noise(1.0)  # what is added makes no step faster


def test_peak_memory_is_exact() -> None:
    def call() -> None:
        for size in (1 << 20, 1 << 19):
            made = torch.empty(size, dtype=torch.uint8)
            del made

    assert 1 << 20 <= peak_bytes(call, CPU) < (1 << 20) + 10_000
    assert 1 << 20 <= peak_bytes(lambda: bytearray(1 << 20), CPU) < (1 << 20) + 10_000
