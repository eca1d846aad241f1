"""A smoke test of an installed gradstat: checks, clips, monitors, records, views.

It needs nothing but gradstat, torch and numpy, no test runner and no checkout, so it runs wherever gradstat is
installed. ``python first_use.py`` prints a line of JSON with versions, and fails if a result is wrong.
"""

import contextlib
import io
import json
import math
import platform
import sys
import tempfile
from pathlib import Path

import numpy
import torch

import gradstat
from gradstat.__main__ import main as command_line


def expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise SystemExit(f"wrong: {what}")


def gradients(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Computes new gradients; returns the loss."""
    torch.manual_seed(seed)
    model.zero_grad()
    inputs, labels = torch.randn(16, 8), torch.randint(3, (16,))
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


def check_and_clip(model: torch.nn.Module) -> None:
    gradients(model, 1)
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    report = gradstat.check(model)
    expect(report.ok and math.isclose(report.total_norm, exact, rel_tol=1e-7), "the norm of a healthy step")
    expect(gradstat.stats([p.grad for p in model.parameters()]).shape == (4, len(gradstat.FIELDS)), "the table")
    report.to_numpy()  # numpy 1 and 2 differ in their interfaces
    norm = gradstat.clip_grad_norm_(model.parameters(), 0.5 * exact)
    expect(math.isclose(float(norm), exact, rel_tol=1e-6), "the norm that clipping returns")
    expect(math.isclose(gradstat.check(model).total_norm, 0.5 * exact, rel_tol=1e-5), "the norm after clipping")
    model[2].weight.grad[1, 4] = float("nan")
    report = gradstat.check(model)
    expect(report.nan_count == 1 and report.nonfinite[0].name == "2.weight", "the name of the nonfinite gradient")
    expect(report.nonfinite[0].first_nonfinite == (1, 4), "its place")
    gradients(model, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    expect(not gradstat.guarded_step(optimizer, max_norm=1.0).skipped, "a healthy step was skipped")


def monitor_record_and_view(model: torch.nn.Module, folder: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = folder / "run.gradstat"
    monitor = gradstat.Monitor(model, optimizer, save_to=recording, on_anomaly="record")
    for step in range(20):
        loss = gradients(model, step)
        if step == 12:
            model[0].weight.grad[0, 0] = float("inf")
        monitor.step(loss)
        if step != 12:
            optimizer.step()
    diagnosis = str(monitor.diagnose())
    monitor.remove()
    expect("0.weight" in diagnosis and "12" in diagnosis, f"the diagnosis, which says:\n{diagnosis}")
    expect(recording.exists(), "the recording, which was not written")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = command_line(["view", str(recording), "--no-page"])
    expect(status == 0 and "0.weight" in printed.getvalue(), "what `view` says")


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    check_and_clip(model)
    with tempfile.TemporaryDirectory() as folder:
        monitor_record_and_view(model, Path(folder))
    chosen = {status.device: status.name for status in gradstat.backends() if status.chosen}
    found = {
        "gradstat": gradstat.__version__,
        "python": platform.python_version(),
        "system": " ".join([platform.machine(), *platform.libc_ver()]),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cpu": chosen["cpu"],
        "file": gradstat.__file__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
