"""Memory over thousands of steps: of the process, Python's objects, tensors. `make leaks` takes ten thousand of each.

Each kind of step warms up first, until caches are full and the history of a monitor has wrapped around. What is there
then is compared with what is there at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy.ma  # noqa: F401  # numpy imports it by itself on the first median, which a rule takes some thousand steps in
import torch
from torch import Tensor, nn

import gradstat

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import rows
import tables
from rows import Row

GROUP = "leaks"
# What may come and go between two looks at a process whose memory is flat.
MOST_BYTES = 1 << 20
MOST_OBJECTS = 50


class Sizes(NamedTuple):
    """What a process holds: bytes that are resident, objects the garbage collector knows, tensors among them."""

    resident: int
    objects: int
    tensors: int

    @classmethod
    def now(cls) -> Sizes:
        for _ in range(2):  # a tensor in a cycle may go only with the second
            gc.collect()
        resident = resident_bytes()  # first: the list of all objects takes megabytes itself
        objects = gc.get_objects()
        return cls(resident, len(objects), sum(issubclass(type(item), Tensor) for item in objects))


def resident_bytes() -> int:
    """Resident memory of this process, less what its heap holds free; 0 where the system does not tell."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


class Training:
    """A model whose gradients are new in each step; now and then it is another model, and now and then one is bad."""

    def __init__(self) -> None:
        self.models = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 2)) for width in (8, 12)
        ]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in self.models]
        self.count = 0

    def backward(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """New gradients: the model and its optimizer."""
        self.count += 1
        which = self.count % 50 == 0
        for parameter in self.models[which].parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        if self.count % 40 == 0:
            self.models[which][0].weight.grad[0, 0] = float("nan")
        return self.models[which], self.optimizers[which]


def on_gradients(call: Callable[[nn.Module, torch.optim.Optimizer], object]) -> Callable[[], Callable[[], object]]:
    """A kind of step that is a call on new gradients."""

    def make() -> Callable[[], object]:
        training = Training()
        return lambda: call(*training.backward())

    return make


def monitor_step() -> Callable[[], object]:
    """With everything watched, findings, replays prepared, and the recording written."""
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
        monitor.batch(inputs)
        loss = model(inputs).square().mean()
        loss.backward()
        training.count += 1
        if training.count % 160 == 0:
            model[0].weight.grad[0, 0] = float("nan")  # type: ignore[union-attr,index]
        monitor.step(loss)
        model[0].weight.grad.nan_to_num_()  # type: ignore[union-attr,operator]
        optimizer.step()
        optimizer.zero_grad()
        monitor.findings.clear()  # the program's own list: it grows with what is found
        assert folder

    return step


def backward_step() -> Callable[[], object]:
    """Stepped in the backward pass, with clips that remember, the report asked for; now and then a gradient is bad."""
    model, inputs, count = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)), torch.randn(4, 8), 0
    handle = gradstat.step_in_backward(torch.optim.AdamW, model, gradstat.AdaGC(warmup=0), lr=1e-3)

    def step() -> None:
        nonlocal count
        count += 1
        model(inputs).square().mean().mul(float("nan") if count % 40 == 0 else 1.0).backward()
        assert handle.report.result().ok is (count % 40 != 0)

    return step


def own_handle() -> None:
    """A model of its own for every step, stepped in the backward pass and let go of without a word."""
    model = nn.Linear(3, 3)
    handle = gradstat.step_in_backward(torch.optim.SGD, model, gradstat.LastNormClip(1.0), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    assert handle.report.result().ok


def own_monitor(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A monitor of its own for every step, let go of without a word."""
    gradstat.Monitor(model, optimizer, on_anomaly="skip", replay=True, watch={"activations": 1}).step(1.0)


def own_model() -> None:
    """A model of its own for every step."""
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    assert gradstat.check(model).ok
    gradstat.guarded_step(torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0, model=model)


# Kinds of step; how many of them warm up, and for how many one counts: a tenth is enough of what costs milliseconds.
KINDS: dict[str, tuple[Callable[[], Callable[[], object]], int, int]] = {
    "check": (on_gradients(lambda model, _: str(gradstat.check(model))), 300, 1),
    "check_async": (on_gradients(lambda model, _: gradstat.check_async(model).result().total_norm), 300, 1),
    "clip_grad_norm_": (on_gradients(lambda model, _: gradstat.clip_grad_norm_(model.parameters(), 0.01)), 300, 1),
    "guarded_step": (
        on_gradients(lambda _, optimizer: gradstat.guarded_step(optimizer, max_norm=0.01).report.result().ok),
        300,
        1,
    ),
    "step_in_backward": (backward_step, 300, 1),
    "Monitor.step": (monitor_step, 960, 1),
    "Monitor, one a step": (on_gradients(own_monitor), 100, 10),
    "model, one a step": (lambda: own_model, 300, 1),
    "step_in_backward, one a step": (lambda: own_handle, 300, 1),
}


def growth(kind: str, steps: int, warm_up: int | None = None) -> Sizes:
    """By how much a process grows in so many steps of a kind."""
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
    """By how much a process grew in so many steps."""
    metrics = (("steps", "", steps), ("memory", "B", grown.resident), ("objects", "", grown.objects))
    return [
        rows.row(GROUP, kind, "gradstat", metric, unit, float(value), torch.device("cpu"))
        for metric, unit, value in (*metrics, ("tensors", "", grown.tensors))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_240)  # a multiple of 320: see test_life_leaks.py
    parser.add_argument("--record", action="store_true", help="append rows to benchmarks/results/")
    options = parser.parse_args()
    steps = options.steps
    torch.set_num_threads(1)  # the tensors are small, and threads that wait for each other take time
    failed = []
    found: list[Row] = []
    for kind, (_, _, divisor) in KINDS.items():
        grown = growth(kind, steps // divisor)
        found += as_rows(kind, steps // divisor, grown)
        if grown.resident > MOST_BYTES or grown.objects > MOST_OBJECTS or grown.tensors > 0:
            failed.append(kind)
    print(tables.leaks(found))
    if failed:
        print(f"memory is not flat: {', '.join(failed)}", file=sys.stderr)
    if options.record:
        print(f"rows appended to {rows.append(found, GROUP)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
