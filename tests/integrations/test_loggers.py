"""Real loggers: they receive the measured values, in as few calls as possible."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.frameworks import run_example
from helpers.training import backpropagated
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import gradstat
from gradstat.integrations import loggers
from gradstat.integrations.loggers import AGGREGATES, JsonlWriter, ReportLogger, log_report, scalars_of


def trainee() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def model_and_report(bad: bool = False) -> tuple[nn.Module, gradstat.Report]:
    model, _ = trainee()
    (model(torch.randn(5, 4)).square().sum() * (math.nan if bad else 1)).backward()
    return model, gradstat.check(model)


def step(monitor: gradstat.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> gradstat.Report:
    loss = backpropagated(optimizer, model(torch.randn(5, 4)).square().mean())
    report = gradstat.check(model)
    monitor.step(loss)
    optimizer.step()
    return report


def test_a_report_gives_what_was_chosen() -> None:
    model, report = model_and_report()
    assert scalars_of(report) == report.scalars("grad/")
    assert tuple(scalars_of(report, prefix="")) == AGGREGATES
    chosen = scalars_of(report, aggregates=("total_norm",), per_tensor=("l2_norm", "mean"), top=2, prefix="g.")
    largest = [stats.name for stats in report.worst(2, by="l2_norm")]
    assert list(chosen) == ["g.total_norm", *(f"g.{c}/{name}" for c in ("l2_norm", "mean") for name in largest)]
    assert chosen[f"g.mean/{largest[0]}"] == report[largest[0]].mean
    every = scalars_of(report, aggregates=(), per_tensor=("max_abs",))
    assert every == {f"grad/max_abs/{stats.name}": stats.max_abs for stats in report}
    norms = scalars_of(report, aggregates=(), norms=["2", "*.bias", "?.weight", "nothing"])
    for glob, names in (("2", ["2.weight", "2.bias"]), ("*.bias", ["0.bias", "2.bias"]), ("nothing", [])):
        assert math.isclose(norms[f"grad/l2_norm/{glob}"], math.hypot(*(report[name].l2_norm for name in names)))
    model[2].bias.grad[0] = math.nan  # type: ignore[index]
    (name,) = scalars_of(gradstat.check(model), aggregates=(), per_tensor=("nan_count",), top=1)
    assert name == "grad/nan_count/2.bias"  # nonfinite tensors come first


@pytest.mark.parametrize("review_every", [1, 64])
@pytest.mark.parametrize("missing", [False, True])
def test_a_monitor_gives_its_newest_step(review_every: int, missing: bool) -> None:
    model, optimizer = trainee()
    model[2].weight.requires_grad_(not missing)  # type: ignore[index,union-attr]
    options: Any = {"options": {"review_every": review_every}, "watch": {"updates": 2}}
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record", **options)
    assert monitor.latest() is None
    assert scalars_of(monitor) == {}
    for i in range(5):
        report = step(monitor, model, optimizer)
        newest = monitor.latest()
        assert newest.step == i
        assert newest.report.names == report.names
        assert newest.report.to_dict()["tensors"] == report.to_dict()["tensors"]
        values = scalars_of(monitor)
        assert values["grad/total_norm"] == report.total_norm
        assert values["grad/lr"] == 0.1
        assert values["grad/findings"] == len(monitor.findings)
        assert (values["grad/missing"], values["grad/nonfinite_steps"]) == (0, 0)
        assert math.isfinite(values["grad/loss"])


def test_invalid_arguments_are_refused() -> None:
    model, report = model_and_report()
    for error, words, call in (
        (ValueError, "aggregates: unknown name 'norm'; known: tot", lambda: scalars_of(report, aggregates=("norm",))),
        (ValueError, "per_tensor is the string 'l2_norm'; expected", lambda: scalars_of(report, per_tensor="l2_norm")),
        (ValueError, "top is 0", lambda: scalars_of(report, top=0)),
        (ValueError, "every is 0", lambda: ReportLogger(print, every=0)),
        (TypeError, "a gradstat.Report or a .* got PendingReport;", lambda: scalars_of(gradstat.check_async(model))),
        (TypeError, "cannot log to a int; expected a TensorBoard Summ", lambda: log_report(3, report, 0)),
        (ValueError, "no step number; pass step=", lambda: log_report(lambda values, step: None, report)),
    ):
        with pytest.raises(error, match=words):
            call()


def events_in(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_gets_one_event_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a histogram of norms, if requested; numbers that are not finite are logged as such."""
    _, report = model_and_report()
    with SummaryWriter(tmp_path) as writer:
        file = writer._get_file_writer()
        written: list[Any] = []
        original = file.add_summary
        monkeypatch.setattr(file, "add_summary", lambda *a, **k: (written.append(a), original(*a, **k))[1])
        for at in (3, 7):
            log_report(writer, report, at, per_tensor=("l2_norm",), histogram=at == 7)
        assert len(written) == 3
        log_report(writer, model_and_report(bad=True)[1], 9, histogram=True)
        loggers.log_scalars(writer, {"large": 1e300, "low": -1e300, "inf": math.inf}, 9)
    events = events_in(tmp_path)
    names = {*report.scalars("grad/"), *(f"grad/l2_norm/{name}" for name in report.names)}
    assert set(events.Tags()["scalars"]) == {*names, "large", "low", "inf"}
    for name, value in scalars_of(report, per_tensor=("l2_norm",)).items():
        assert [(e.step, e.value) for e in events.Scalars(name)][:2] == [(at, pytest.approx(value)) for at in (3, 7)]
    event = events.Histograms("grad/log10_norms")[0]
    logs = [math.log10(stats.l2_norm) for stats in report]
    assert event.step == 7
    histogram = event.histogram_value
    assert (histogram.num, histogram.min, histogram.max) == (4, pytest.approx(min(logs)), pytest.approx(max(logs)))
    assert sum(histogram.bucket) == 4
    assert math.isnan(events.Scalars("grad/total_norm")[2].value)
    assert [events.Scalars(name)[0].value for name in ("large", "low", "inf")] == [math.inf, -math.inf, math.inf]


def test_wandb_gets_one_call_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    _, report = model_and_report()
    for mode in ("disabled", "offline"):
        run = wandb.init(mode=mode, dir=tmp_path, project="gradstat")
        try:
            for at in (0, 1):
                log_report([run, wandb], report, at)
            if mode == "offline":
                assert run.summary["grad/total_norm"] == report.total_norm
                assert run.step in (1, 2)
        finally:
            run.finish()


def test_new_findings_are_texts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the step that is logged next, by each logger that takes texts."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow
    import wandb

    model = nn.Linear(4, 2)
    monitor = gradstat.Monitor(model, on_anomaly="record", options={"lag": 0})
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    run = wandb.init(mode="offline", dir=tmp_path, project="gradstat")
    with SummaryWriter(tmp_path) as board, mlflow.start_run() as started:
        log = ReportLogger([board, run, mlflow], every=2)
        for step in range(8):
            model(torch.full((3, 4), math.nan if step == 3 else 1.0)).sum().backward()
            monitor.step()
            log(monitor)
            model.zero_grad()
        log_report(board, monitor, 8)
        assert "NaN" in run.summary["grad/finding"]
    run.finish()
    (name,) = [file.path for file in mlflow.MlflowClient().list_artifacts(started.info.run_id, "grad")]
    assert name == "grad/finding-4.txt"
    text = mlflow.artifacts.load_text(f"{started.info.artifact_uri}/{name}")
    assert text.splitlines() == [str(finding) for finding in monitor.findings if finding.step == 3]
    (event,) = events_in(tmp_path).Tensors("grad/finding/text_summary")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (4, text)


def test_mlflow_gets_one_asynchronous_batch_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    calls: list[dict[str, Any]] = []
    original = mlflow.log_metrics
    monkeypatch.setattr(mlflow, "log_metrics", lambda *a, **k: (calls.append(k), original(*a, **k))[1])
    _, report = model_and_report()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        for at in (0, 1):
            log_report(mlflow, report, at)
            mlflow.flush_async_logging()  # batches in flight at the same time may arrive in any order
    assert [call["synchronous"] for call in calls] == [False, False]
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "grad/total_norm")
    assert [(m.step, m.value) for m in history] == [(0, report.total_norm), (1, report.total_norm)]


def test_every_n_steps_once() -> None:
    seen: list[int] = []
    log = ReportLogger(lambda values, step: seen.append(step), every=3)
    model, optimizer = trainee()
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    for i in range(8):
        report = step(monitor, model, optimizer)
        assert bool(log(monitor)) == (i % 3 == 0)
        assert not log(monitor)
    assert seen == [0, 3, 6]
    assert [bool(log(report, i)) for i in range(4)] == [True, False, False, True]


def test_json_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    _, report = model_and_report(bad=True)
    for at in range(2):
        with JsonlWriter(path) as writer:
            log_report(writer, report, at)
    with path.open("a") as file:
        file.write('{"step": 2, "half')  # a crash
    with JsonlWriter(path) as writer:
        writer.write({"x": 1.5}, 3)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (*lines[:2], lines[3])] == [0, 1, 3]
    first = json.loads(lines[0])
    assert first["grad/total_norm"] is None
    assert first["grad/nan_count"] == report.nan_count
    assert json.loads(lines[3]) == {"step": 3, "x": 1.5}


def test_a_long_line_is_written_at_once(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "a.jsonl") as writer, JsonlWriter(tmp_path / "a.jsonl") as other:
        for i in range(20):
            writer.write({f"name{j}": float(i) for j in range(2000)}, i)
            other.write({"x": 1.0}, i)
    steps = [json.loads(line)["step"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert steps == [i for i in range(20) for _ in range(2)]


def test_a_file_gets_numbers_only_and_one_step(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with JsonlWriter(path) as writer:
        with pytest.raises(ValueError, match=r"the name 'step', under which .*log has the argument step; rename it"):
            writer.write({"step": 1.0}, 7)
        for value in (torch.tensor(1.0), "low", None, [1.0]):
            with pytest.raises(TypeError, match=r"values\['loss'\] is a \w+; expected a number, such as float\(val"):
                writer.write({"loss": value}, 7)
        assert path.read_text() == ""
        writer.write({"loss": np.float32(0.5), "count": np.int64(3), "tokens": 2}, 7)
    assert path.read_text() == '{"step": 7, "loss": 0.5, "count": 3.0, "tokens": 2}\n'


def test_the_example_shows_the_dead_layer(tmp_path: Path) -> None:
    shown = run_example("loggers.py", "--steps", "90", "--folder", str(tmp_path))
    assert "dead-gradient (warning), since step 60" in shown
    written = events_in(tmp_path / "tensorboard")
    norms = {e.step: e.value for e in written.Scalars("grad/l2_norm/2.weight")}
    assert norms[50] > 0
    assert norms[60] == norms[70] == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "gradients.jsonl").read_text().splitlines()]
    assert steps == list(range(90))
    assert [e.step for e in written.Scalars("grad/total_norm")] == list(range(0, 90, 10))
