"""Growth over thousands of steps: resident memory, Python objects, tensors. `make leaks` takes ten thousand of each.

Each kind of step is warmed up until caches are full and a monitor's history has wrapped around. The sizes after that
are compared with those at the end.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy.ma  # noqa: F401  # numpy imports it lazily for its first median, which a rule takes after some thousand steps
import torch
from torch import Tensor, nn

import gradstat

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import rows
import tables
from rows import Row

GROUP = "leaks"
# Allowed differences between two measurements of a process without leaks.
MOST_BYTES = 1 << 20
MOST_OBJECTS = 50


class Sizes(NamedTuple):
    """Sizes of a process: resident bytes, objects tracked by the garbage collector, and tensors among them."""

    resident: int
    objects: int
    tensors: int

    @classmethod
    def now(cls) -> Sizes:
        for _ in range(2):  # a tensor in a reference cycle may only be freed by the second collection
            gc.collect()
        resident = resident_bytes()  # first, since the list of all objects takes megabytes
        objects = gc.get_objects()
        return cls(resident, len(objects), sum(issubclass(type(item), Tensor) for item in objects))


def resident_bytes() -> int:
    """Resident memory of this process, without free memory of its heap, on Linux with glibc."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Training:
    """A model with new gradients in each step; sometimes it is another model, and sometimes a gradient is NaN."""

    def __init__(self) -> None:
        self.models = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 2)) for width in (8, 12)
        ]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in self.models]
        self.count = 0

    def backward(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Makes new gradients; returns the model and its optimizer."""
        self.count += 1
        which = self.count % 50 == 0
        for parameter in self.models[which].parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        if self.count % 40 == 0:
            self.models[which][0].weight.grad[0, 0] = float("nan")
        return self.models[which], self.optimizers[which]


def on_gradients(call: Callable[[nn.Module, torch.optim.Optimizer], object]) -> Callable[[], Callable[[], object]]:
    """A kind of step: ``call`` on new gradients."""

    def make() -> Callable[[], object]:
        training = Training()
        return lambda: call(*training.backward())

    return make


def monitor_step() -> Callable[[], object]:
    """A monitor with everything watched, findings, kept state for replays, and a recording."""
    training = Training()
    model, optimizer = training.models[0], training.optimizers[0]
    folder = tempfile.TemporaryDirectory()
    monitor = gradstat.Monitor(
        model,
        optimizer,
        on_anomaly="record",
        options={"history": 100},
        watch={"activations": 10, "updates": 10, "outputs": 10},
        replay=True,
        save_to=Path(folder.name) / "run.gradstat",
    )
    inputs = torch.randn(4, 8)

    def step() -> None:
        monitor.check_batch(inputs)
        loss = model(inputs).square().mean()
        loss.backward()
        training.count += 1
        if training.count % 160 == 0:
            model[0].weight.grad[0, 0] = float("nan")  # type: ignore[union-attr,index]
        monitor.step(loss)
        model[0].weight.grad.nan_to_num_()  # type: ignore[union-attr,operator]
        optimizer.step()
        optimizer.zero_grad()
        monitor.findings.clear()  # the list grows by design
        assert folder

    return step


def own_monitor(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A new monitor in every step, dropped without cleanup."""
    gradstat.Monitor(model, optimizer, on_anomaly="skip", replay=True, watch={"activations": 1}).step(1.0)


def own_model() -> None:
    """A new model in every step."""
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    assert gradstat.check(model).ok
    gradstat.guarded_step(torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0, model=model)


# For each kind of step: how it is made, the number of warm-up steps, and a divisor of the number of steps: a tenth of
# them is enough for steps that take milliseconds.
KINDS: dict[str, tuple[Callable[[], Callable[[], object]], int, int]] = {
    "check": (on_gradients(lambda model, _: str(gradstat.check(model))), 300, 1),
    "check_async": (on_gradients(lambda model, _: gradstat.check_async(model).result().total_norm), 300, 1),
    "clip_grad_norm_": (on_gradients(lambda model, _: gradstat.clip_grad_norm_(model.parameters(), 0.01)), 300, 1),
    "guarded_step": (
        on_gradients(lambda _, optimizer: gradstat.guarded_step(optimizer, max_norm=0.01).report.result().ok),
        300,
        1,
    ),
    "Monitor.step": (monitor_step, 960, 1),
    "Monitor, one a step": (on_gradients(own_monitor), 100, 10),
    "model, one a step": (lambda: own_model, 300, 1),
}


def growth(kind: str, steps: int, warm_up: int | None = None) -> Sizes:
    """The growth of the process in ``steps`` steps of a kind."""
    make, enough, _ = KINDS[kind]
    step = make()
    for _ in range(enough if warm_up is None else warm_up):
        step()
    before = Sizes.now()
    for _ in range(steps):
        step()
    after = Sizes.now()
    return Sizes(*(b - a for a, b in zip(before, after, strict=True)))


def as_rows(kind: str, steps: int, grown: Sizes) -> list[Row]:
    """The growth in ``steps`` steps as rows."""
    values = (("steps", steps), ("memory", grown.resident), ("objects", grown.objects), ("tensors", grown.tensors))
    return [
        rows.row(GROUP, kind, "gradstat", metric, "B" * (metric == "memory"), float(value), torch.device("cpu"))
        for metric, value in values
    ]


def main() -> int:
    parser = rows.parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=10_400)  # see test_life_leaks.py
    options = parser.parse_args()
    steps = options.steps
    torch.set_num_threads(1)  # for tensors this small, synchronizing threads costs more than it saves
    failed = []
    found: list[Row] = []
    for kind, (_, _, divisor) in KINDS.items():
        grown = growth(kind, steps // divisor)
        found += as_rows(kind, steps // divisor, grown)
        if grown.resident > MOST_BYTES or grown.objects > MOST_OBJECTS or grown.tensors > 0:
            failed.append(kind)
    print(tables.table_of_rows(found))
    if failed:
        print(f"memory grows: {', '.join(failed)}", file=sys.stderr)
    rows.record(found, GROUP, options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
