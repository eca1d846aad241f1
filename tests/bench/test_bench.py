"""The benchmarks: wrong results are caught before timing, rows are kept, the command works on users' models."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cases
import device_timing
import plots
import pytest
import rows
import step_providers
import suite
import tables
import torch
from cases import CASES, PROVIDERS, Case, input_of
from models import Training, gpt_step
from step_providers import ALONE, GUARDED, SETTINGS, Setting, StepInput, case_name
from torch import nn

import gradstat
from gradstat.__main__ import main
from gradstat.bench import command, machine, steps, timing
from gradstat.bench.memory import peak_bytes
from gradstat.demo.model import TINY

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
HERE = "gradstat.bench.command:made_here"
FACTORY = """
import torch
from torch import nn

def factory():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    return model, lambda: model(x).square().mean()

constant = 3
"""


@pytest.fixture
def _factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench_these.py").write_text(FACTORY)
    (tmp_path / "bench_broken.py").write_text("import torch, no_such_package\n")
    (tmp_path / "bench_raises.py").write_text("raise OSError('disk on fire')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("bench_these", "bench_broken", "bench_raises"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("_factories")
def test_the_command_measures_a_users_model(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    arguments = "--model bench_these:factory --rounds 3 --device cpu --threads 1 --optimizer sgd --json out.json"
    command = [sys.executable, "-W", "error", "-m", "gradstat", "bench", *arguments.split()]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "90 trained parameters in 4 tensors of float32; optimizer sgd" in result.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["parameters"] == 90
    assert written["threads"] >= 1
    names = [variant["name"] for variant in written["variants"]]
    assert names == [variant.name for variant in steps.variants(CPU)]
    for variant in written["variants"]:
        assert variant["name"] in result.stdout
        assert 0 < variant["seconds"]["low"] <= variant["seconds"]["median"] <= variant["seconds"]["high"]
    assert written["variants"][0]["ratio"]["median"] == 1
    assert written["variants"][0]["extra_bytes"] == {"low": 0, "median": 0, "high": 0}
    assert "Added to a step: gradstat.check " in result.stdout.splitlines()[-2]


@pytest.mark.usefixtures("_factories")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds 0", "--rounds must be at least 1"),
        ("--threads 0", "--threads must be at least 1"),
        ("--device nonsense", "--device nonsense"),
        ("--device meta", "expected a cpu or cuda device"),
        ("--json no/such/folder/x.json", "there is no folder"),
        ("bench_these", "expected MODULE:FACTORY"),
        ("no_such_module:f", "no module 'no_such_module' in the current folder or the environment"),
        ("bench_broken:f", "importing bench_broken failed: No module named 'no_such_package'"),
        ("bench_raises:f", "disk on fire"),
        ("bench_these:missing", "bench_these has no missing"),
        ("bench_these:constant", "constant is a int, not a function"),
    ],
)
def test_what_cannot_be_measured_is_explained(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments.split() if arguments.startswith("--") else ["--model", arguments]
    assert main(["bench", "--rounds", "1", "--device", "cpu", *given]) == 2
    assert message in capsys.readouterr().err


def with_loss(loss_of: Callable[[torch.Tensor], object]) -> tuple[nn.Module, Callable[[], object]]:
    model = nn.Linear(2, 2)
    return model, lambda: loss_of(model(torch.ones(3, 2)))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: nn.Linear(2, 2), "returned a module alone; return (model, batch) or (model, loss)"),
        (lambda: (nn.Linear(2, 2), 1, 2), "got a tuple of 3"),
        (lambda: None, "got a NoneType"),
        (lambda: with_loss(lambda output: output), "shape (3, 2); reduce it"),
        (lambda: with_loss(lambda output: output.sum().detach()), "the loss has no graph"),
        (lambda: with_loss(lambda _: torch.ones(2, requires_grad=True).sum()), "no parameter of the model has a grad"),
        (lambda: with_loss(lambda _: 1.0), "the loss must be a tensor, not a float"),
        (lambda: with_loss(lambda output: (output * math.inf).sum()), "gradients are not finite"),
        (lambda: (nn.Linear(2, 2), torch.ones(3, 5)), "the forward pass raised"),
        (lambda: (nn.Linear(2, 2).requires_grad_(False), torch.ones(3, 2)), "the loss has no graph"),
    ],
)
def test_a_factory_that_makes_no_step_is_explained(
    factory: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "made_here", factory, raising=False)
    assert main(["bench", "--rounds", "1", "--device", "cpu", "--model", HERE]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "command.py" not in printed


def test_an_interrupted_command_ends_like_one_and_an_error_of_a_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for raised, status, told in (
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (FileNotFoundError(2, "No such file", "a\nb"), 2, "gradstat bench: a\\nb: No such file\n"),
        (ImportError("no plotly"), 2, "gradstat bench: no plotly\n"),
    ):
        monkeypatch.setattr(gradstat.bench, "main", Mock(side_effect=raised))
        assert main(["bench"]) == status
        assert capsys.readouterr().err == told
    monkeypatch.setattr(gradstat.bench, "main", Mock(side_effect=TypeError))
    with pytest.raises(TypeError):  # a defect
        main(["bench"])


class Output(dict[str, Any]):
    @property
    def loss(self) -> torch.Tensor:
        return self["inner"].sum()


class Echo(nn.Module):
    """Returns the sum of its weight, in a given form."""

    def __init__(self, form: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.form = form

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> object:
        return self.form(self.weight * x * (1 if y is None else y))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (lambda t: t, 3.0),
        (lambda t: (t, "state"), 3.0),
        (lambda t: {"loss": t.sum()}, 6.0),
        (lambda t: Output(inner=t), 6.0),
    ],
)
@pytest.mark.parametrize("kind", [dict, UserDict, lambda batch: tuple(batch.values()), lambda batch: batch["x"] * 2])
def test_a_batch_on_the_device_becomes_a_loss(
    form: Callable[[torch.Tensor], object], expected: float, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = kind({"x": torch.full((2,), 1.5), "y": torch.full((2,), 2.0)})
    monkeypatch.setattr(command, "made_here", lambda: (Echo(form), batch), raising=False)
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
    model = nn.Linear(3, 2)
    x = torch.zeros(5, 3)
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


def test_costs_hold_every_variant() -> None:
    count = iter(range(100))
    measured = steps.costs(tiny_step(), 2, progress=lambda: next(count))
    assert next(count) == steps.WARMUP + 2
    assert [cost.name for cost in measured] == [v.name for v in steps.variants(CPU)]
    assert measured[0].ratio == (1, 1, 1)
    check, anomaly = measured[1], measured[-1]
    assert 0 < check.inside.median < check.seconds.median
    added, plain = check.added(measured[0]), measured[0].seconds
    assert added.median == check.inside.median / plain.median
    assert added.low == check.inside.low / plain.high
    assert anomaly.inside is None
    assert anomaly.added(measured[0]).median == anomaly.ratio.median - 1
    assert anomaly.extra_bytes.low > 1000  # its stack traces
    assert "detect_anomaly" in steps.table(measured)
    assert "gradstat.check" in command.conclusion(measured)
    assert not torch.is_anomaly_enabled()


def test_a_block_of_steps_ends_with_one_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setitem(steps.BLOCK, "cpu", 3)
    monkeypatch.setattr(timing, "synchronize", lambda device: events.append("sync"))
    own = tiny_step()
    named = {
        "plain": steps.Variant("plain", lambda step, loss: events.append("plain")),
        "own": steps.Variant("own", lambda step, loss: events.append("own" if step is own else "other"), own=own),
        "taken": steps.Variant("taken", lambda step, loss: events.append("taken"), takes_step=True),
    }
    step = tiny_step()
    monkeypatch.setattr(step.optimizer, "step", lambda: events.append("step"))
    plain, attached, taken = steps.costs(step, 2, compared=list(named.values()))
    timed = [" ".join(some) for is_sync, some in itertools.groupby(events, "sync".__eq__) if not is_sync]
    for block in ("plain step plain step plain step", "own own own", "taken taken taken"):
        assert timed.count(block) == 2 + steps.WARMUP
    assert plain.inside.median < plain.seconds.median
    assert attached.inside is None is taken.inside


@pytest.mark.parametrize(
    ("model_name", "expected"),
    [
        ("AMD EPYC", "AMD EPYC (family 26 model 2)"),
        ("Intel(R) Xeon(R) Processor @ 2.60GHz", "Intel(R) Xeon(R) Processor @ 2.60GHz (family 26 model 2)"),
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654 96-Core Processor"),
    ],
)
def test_processors_are_distinguished(model_name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = f"processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: {model_name}\nstepping\t: 1\n"
    monkeypatch.setattr(Path, "read_text", lambda _: cpuinfo)
    assert machine.device_name.__wrapped__(CPU) == expected


def test_turns_are_taken_and_caches_flushed() -> None:
    called: list[str] = []
    calls = {name: (lambda n=name: called.append(n)) for name in "abc"}
    samples = timing.interleaved(calls, 5, 2, before=lambda name: called.append(f"before {name}"))
    order = called[1::2]
    assert called[::2] == [f"before {name}" for name in order]
    assert len(order) == 21
    turns = [order[i : i + 3] for i in range(0, 21, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1
    assert all(len(sample) == 5 for sample in samples.values())


def test_ratios_are_taken_round_by_round() -> None:
    assert timing.ratios([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == (2, 2, 2)
    assert timing.quartiles([3.0]) == (3, 3, 3)
    assert timing.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)


def cost(
    seconds: float, ratio: tuple[float, ...], inside: tuple[float, ...] | None, extra: tuple[float, ...]
) -> steps.Cost:
    """Of a check, or, without ``inside``, of ``detect_anomaly``."""
    time = timing.Quartiles(seconds, seconds, seconds)
    call = None if inside is None else timing.Quartiles(*inside)
    name = steps.ANOMALY if inside is None else steps.CHECK
    return steps.Cost(name, time, timing.Quartiles(*ratio), call, timing.Quartiles(*extra))


PLAIN = dataclasses.replace(cost(0.1, (1, 1, 1), (0, 0, 0), (0, 0, 0)), name=steps.PLAIN)


def test_the_conclusion_of_a_noisy_measurement_is_that_it_is_noisy() -> None:
    clear = cost(0.2, (1.9, 2, 2.1), (0.0009, 0.001, 0.0011), (0, 0, 0))
    noisy, anomaly = (cost(0.2, (0.56, 0.87, 1.78), inside, (0, 0, 0)) for inside in ((0, 0.002, 0.0031), None))
    assert command.conclusion([PLAIN, clear]) == "Added to a step: gradstat.check 1.0 %."
    assert command.conclusion([PLAIN, noisy, anomaly]) == (
        f"Added to a step: gradstat.check {timing.NOISE} (0.0 % to 3.1 %), "
        f"detect_anomaly {timing.NOISE} (-44.0 % to 78.0 %)."
    )
    unsteady = dataclasses.replace(PLAIN, seconds=timing.Quartiles(0.01, 0.1, 0.3))
    lines = steps.table([unsteady, clear, dataclasses.replace(noisy, name=steps.TORCH_CLIP_CHECKED)]).splitlines()
    assert [line.count("noise") for line in lines] == [0, 1, 0, 2]
    assert max(map(len, lines)) <= 100
    assert timing.NOISE in command.conclusion([unsteady, clear])


def test_peak_memory_is_exact() -> None:
    def call() -> None:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        del a
        b = torch.empty(1 << 19, dtype=torch.uint8)
        del b

    assert 1 << 20 <= peak_bytes(call, CPU) < (1 << 20) + 10_000
    assert 1 << 20 <= peak_bytes(lambda: bytearray(1 << 20), CPU) < (1 << 20) + 10_000


def tiny(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """A smaller list of the same kind, of at most six tensors."""
    return [tuple(min(size, 5) for size in shape) for shape in shapes[:6]]


@pytest.fixture
def plan() -> suite.Plan:
    return suite.Plan(CPU, full=True, seconds=0.0, min_rounds=2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_axis_runs(case: Case, plan: suite.Plan) -> None:
    for dtype in case.dtypes:
        given = input_of(tiny(case.shapes()), dtype)
        supporting = cases.providers_for(given)
        assert supporting
        made = suite.compare(plan, lambda: None, "lists", case.name, tiny(case.shapes()), dtype, cases.providers_for)
        timed = [row.provider for row in made if row.metric == "wall time"]
        assert sorted(timed) == sorted(provider.name for provider in supporting)
        assert {row.dtype for row in made} == {rows.dtype_name(dtype)}


def named(providers: list[Any], name: str) -> Any:
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
            lambda given: gradstat.clip_grad_norm_(given.parameters, given.max_norm / 2),
            "did not multiply the gradients by 1.0",
        ),
    ],
)
def test_a_wrong_answer_is_never_timed(
    name: str, run: Any, message: str, plan: suite.Plan, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    timed: list[str] = []
    monkeypatch.setattr(suite, "interleaved", lambda calls, *_, **__: timed.extend(calls) or {})
    providers = [dataclasses.replace(named(PROVIDERS, name), run=run), named(PROVIDERS, cases.STATS)]
    ours = pytest.raises(steps.WrongAnswerError, match=message) if "gradstat" in name else contextlib.nullcontext()
    with ours:
        suite.compare(plan, lambda: None, "lists", "x", [(4, 3), (5,)], torch.float32, lambda given: providers)
    assert set(timed) == (set() if "gradstat" in name else {cases.STATS})
    assert (message in capsys.readouterr().err) is ("gradstat" not in name)


def test_what_is_recorded_is_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In a run of the whole suite on tiny inputs."""
    case = Case("10,000 tensors of 64", lambda: [(8, 8)] * 3, (torch.float32, torch.bfloat16))
    monkeypatch.setattr(suite, "CASES", [case])
    monkeypatch.setattr(step_providers, "FULL_CASE", case)
    monkeypatch.setattr(suite, "TRAININGS", [Training("tiny GPT", lambda device: gpt_step(TINY, 8, device))])
    monkeypatch.setattr(suite, "BYTES", (16, 64))
    monkeypatch.setattr(suite, "TENSORS", (1, 3))
    monkeypatch.setattr(device_timing, "cache_bytes", lambda device: 1 << 12)
    arguments = ["suite.py", "--full", "--device", "cpu", "--seconds", "1e-6", "--record", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert suite.main() == 0
    printed = capsys.readouterr().out
    (device,) = rows.devices(tmp_path)
    assert {row.group for row in device} == set(suite.GROUPS)
    assert all(row.device and row.versions and row.threads and row.time and row.run for row in device)
    assert tables.everything(device) in printed
    lists = tables.selected(device, "lists")
    assert "10,000 tensors of 64" in lists
    ratio = next(row for row in device if row.metric == "time ratio" and row.provider == "detect_anomaly")
    assert f" {100 * (ratio.value - 1):+.1f} % |" in tables.selected(device, "steps")
    for shown in (tables.everything(device), lists, tables.summary(device)):
        assert ("tiny GPT" in shown) == (shown != lists)  # README.md has the training steps
        assert all(line.endswith("|") for line in shown.splitlines() if line.startswith("|"))
    drawn = plots.charts_of(device)
    assert set(drawn) == {
        name for name, (groups, _) in plots.DRAWN.items() if not suite.GROUPS.keys().isdisjoint(groups)
    }
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    for name, members in drawn.items():
        plots.DRAWN[name][1](members, first)
        plots.DRAWN[name][1](members, second)
        assert first.read_bytes() == second.read_bytes()
        assert len(first.read_bytes()) > 10_000


def test_old_rows_are_read_and_charts_in_the_documents_have_rows() -> None:
    for path in rows.RESULTS.glob("*/*.jsonl"):
        assert rows.read(path)
    shown = {plots.file_of(n, m) for device in rows.shown() for n, m in plots.charts_of(device).items()}
    assert {path.name for path in plots.CHARTS.glob("*.png")} == shown, "run `python benchmarks/plots.py`"


# Steps of optimizers -----------------------------------------------------------------------------------------

SHAPES = [(40, 30), (7,), (200, 3, 5)]
SCALED, PLAIN_STEP = SETTINGS[1], SETTINGS[3]  # clipped


def without_skipping(given: StepInput) -> torch.Tensor:
    norm = gradstat.clip_grad_norm_(given.parameters, given.limit)
    given.optimizer.step()
    return norm


@pytest.mark.parametrize(
    ("name", "setting", "run", "message"),
    [
        (GUARDED, SCALED, lambda given: torch.tensor(1.0), "returned norm 1.0, expected"),
        (GUARDED, SCALED, lambda given: torch.tensor(given.facts.norm), "updated parameter 0 differently"),
        (GUARDED, PLAIN_STEP, without_skipping, "changed parameter 0 although a gradient is NaN"),
        (ALONE, SCALED, step_providers._torch_step, "updated .* differently from a step in float64"),
    ],
)
def test_a_wrong_step_is_never_timed(
    name: str, setting: Setting, run: Any, message: str, plan: suite.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = dataclasses.replace(named(step_providers.PROVIDERS, name), run=run)
    monkeypatch.setattr(step_providers, "PROVIDERS", [broken])
    monkeypatch.setattr(suite, "interleaved", lambda *_, **__: pytest.fail("was timed"))
    with pytest.raises(steps.WrongAnswerError, match=message):
        suite._steps_of_optimizer(plan, lambda: None, case_name("tiny", setting), SHAPES, setting)


# Device time, with a clock in place of a GPU ---------------------------------------------------------------------


class Clock:
    """A host and a device that do nothing but take time."""

    RATE = 1.5e9

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.current, self.slept_on = torch.device("cuda:0"), set[str]()

    def launch(self, seconds: float) -> None:
        self.device = max(self.host, self.device) + seconds

    def wait(self, device: torch.device | None = None) -> None:
        self.host = max(self.host, self.device)

    def sleep(self, cycles: int) -> None:
        self.slept_on.add(str(self.current))
        self.launch(cycles / self.RATE)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.current, before = device, self.current
        yield
        self.current = before


class Event:
    """Replaces those of torch."""

    clock: Clock

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.clock.launch(0.0)
        self.time = self.clock.device

    def query(self) -> bool:
        return self.time <= self.clock.host

    def synchronize(self) -> None:
        self.clock.host = max(self.clock.host, self.time)

    def elapsed_time(self, end: Any) -> float:
        return 1e3 * (end.time - self.time)


@pytest.mark.parametrize("host", [1e-6, 1e-3, 0.1])
def test_device_time_excludes_host_time(host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Event.clock = Clock()
    for name, value in (("Event", Event), ("device", clock.on), ("_sleep", clock.sleep), ("synchronize", clock.wait)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.host)
    monkeypatch.setattr(device_timing, "_cycles_per_second", device_timing._cycles_per_second.__wrapped__)

    def call() -> None:
        clock.launch(1e-5)
        clock.host += host
        clock.launch(1e-5)

    samples = device_timing.interleaved({"call": call}, 3, 1, device=torch.device("cuda:1"))["call"]
    assert samples.device == pytest.approx([2e-5] * 3)
    assert clock.slept_on == {"cuda:1"}
    assert device_timing._cycles_per_second(torch.device("cuda:1")) == pytest.approx(clock.RATE)


def test_what_is_added_makes_no_step_faster() -> None:
    assert timing.Quartiles(0.38, 0.42, 0.42).is_noise(1.0)
    assert not timing.Quartiles(1.38, 1.42, 1.42).is_noise(1.0)


@pytest.mark.parametrize(("budget", "rounds"), [(0.0, 3), (math.inf, 9)])
def test_rounds_end_with_the_budget(budget: float, rounds: int) -> None:
    samples = timing.interleaved({"a": lambda: None, "b": lambda: None}, 9, budget=budget)
    assert {name: len(seconds) for name, seconds in samples.items()} == {"a": rounds, "b": rounds}
