"""Life with a monitor: programs do random things to their training, and know what should be recorded."""

import contextlib
import io
import math
import os
import random
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.travelling import numbers_travel
from torch import Tensor, nn

import gradstat
from gradstat.monitor import AnomalyError
from gradstat.recording import load

LONG = os.environ.get("GRADSTAT_LONG") == "1"
# Different seeds each day, and the same in all processes of a parallel run.
SEEDS = random.Random(date.today().toordinal()).sample(range(2**32), 500) if LONG else range(20)
POLICIES = ("record", "skip", "rollback", "stop", "snapshot", "raise")
WATCHED = ("parameters", "buffers", "optimizer", "outputs", "updates", "activations")


class InTheMiddleError(Exception):
    """Raised by some forward passes."""


class Shifting(nn.Module):
    """Runs some of its branches; branches may be added, replaced or removed."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(self.branch() for _ in range(2))
        self.last = nn.Linear(4, 3)
        self.taken = [0]
        self.fails = False

    @staticmethod
    def branch(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in self.taken:
            x = x + self.branches[i % len(self.branches)](x)
        if self.fails:
            raise InTheMiddleError
        return self.last(x)


class Seen(NamedTuple):
    """The true values of a step; norms are of finite elements."""

    loss: float
    gradients: dict[str, float]
    parameters: dict[str, float] | None


class Program:
    """A random program, in which `EVENTS` happen. With ``late``, numbers arrive a step later, as from a GPU."""

    def __init__(self, seed: int, folder: Path, late: bool = False) -> None:
        self.late = late
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.folder = folder
        self.model = Shifting()
        make = self.random.choice([torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=1e-2)
        scaled = self.random.random() < 0.3
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5) if scaled else None
        self.watch = {kind: self.random.choice([0, 1, 2, 3, 7]) for kind in WATCHED}
        self.policy = self.random.choice(POLICIES)
        self.history = self.random.choice([1000, 9])
        file = folder / "run.gradstat"
        self.options = {
            "on_anomaly": {"error": (self.policy, "record"), "warning": "record"},
            "watch": self.watch,
            "num_classes": 3,
            "options": {
                "history": self.history,
                "review_every": self.random.choice([1, 3, 10, 64]),
                "rollback_every": self.random.choice([1, 4]),
            },
            "save_to": self.random.choice([None, file]) if self.policy != "snapshot" else file,
        }
        self.besides: dict[int, Tensor] = {}  # by id
        self.monitor = self.monitored()
        # A monitor's saved states, each with its steps and the true values of the steps up to then.
        self.states: list[tuple[bytes, int, dict[int, Seen]]] = []
        self.seen: dict[int, Seen] = {}
        self.done: list[tuple[int, str]] = []

    def monitored(self) -> gradstat.Monitor:
        self.besides.clear()  # a new monitor has seen none of their gradients
        return gradstat.Monitor(self.model, self.optimizer, self.scaler, **self.options)  # type: ignore[arg-type]

    def run(self, steps: int) -> None:
        """Runs some steps, and checks the monitor's recording."""
        expected = [AnomalyError] if self.policy == "raise" else []
        for _ in range(steps):
            event = self.random.choice([*EVENTS]) if self.random.random() < 0.5 else ""
            self.done.append((self.monitor.steps, event))
            try:
                with contextlib.suppress(*expected):
                    self.step(event)
            except InTheMiddleError:
                self.optimizer.zero_grad()
            self.compare_newest()
        with contextlib.suppress(*expected):
            self.monitor.flush()
        self.compare()

    def step(self, event: str) -> None:
        if event:
            EVENTS[event](self)
        x, labels = self.batch(event)
        self.optimizer.zero_grad(set_to_none=self.random.random() < 0.7)
        self.monitor.check_batch({"x": x, "labels": labels})
        loss = nn.functional.cross_entropy(self.model(x), labels.clamp(0, 2))
        if event == "loss":
            loss = loss * math.nan
        if loss.requires_grad:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        self.edit(event, [p.grad for p in parameters if p.grad is not None])
        stepped = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        unscaled = self.scaler is not None and bool(stepped) and self.random.random() < 0.5
        if unscaled:
            self.scaler.unscale_(self.optimizer)
        self.note(loss, 1.0 if self.scaler is None or unscaled else self.scaler.get_scale())
        try:
            self.monitor.step(self.random.choice([loss, loss.item()]))
        finally:
            if self.scaler is None:
                self.optimizer.step()
            elif any(p.grad is not None for p in stepped):
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif unscaled:  # a rollback has dropped the gradients
                self.scaler.update()
        if any(not p.isfinite().all() for p in self.model.parameters()) and self.random.random() < 0.5:
            self.heal()

    def batch(self, event: str) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, 4, dtype=self.model.last.weight.dtype)
        labels = torch.randint(0, 3, (6,))
        if event == "batch":
            x[self.random.randrange(6), self.random.randrange(4)] = self.random.choice([math.nan, math.inf])
        elif event == "label":
            labels[0] = 7
        return x, labels

    def edit(self, event: str, gradients: list[Tensor]) -> None:
        for gradient in gradients:
            if event == "spike":
                gradient *= 1e6
            elif event == "gradient" and self.random.random() < 0.3:
                gradient.view(-1)[0] = self.random.choice([math.nan, math.inf, -math.inf])

    def heal(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.nan_to_num_(0.1, 0.1, 0.1)
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    buffer.fill_(0.5)
        self.optimizer.state.clear()

    # Events of several statements ------------------------------------------------------------------------

    def freeze_or_thaw(self) -> None:
        parameter = self.random.choice(list(self.model.parameters()))
        parameter.requires_grad_(not parameter.requires_grad)
        parameter.grad = None

    def cast(self) -> None:
        self.model.to(self.random.choice([torch.float32, torch.float64]))
        self.optimizer.state.clear()

    def fail(self) -> None:
        self.model.fails = True
        try:
            self.model(torch.ones(6, 4, dtype=self.model.last.weight.dtype))
        finally:
            self.model.fails = False

    def save(self) -> None:
        file = io.BytesIO()
        torch.save(self.monitor.state_dict(), file)
        self.states.append((file.getvalue(), self.monitor.steps, dict(self.seen)))

    def load(self) -> None:
        if self.states:
            saved, steps, seen = self.random.choice(self.states)
            self.monitor.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
            assert self.monitor.steps == steps
            self.seen = dict(seen)

    def replace_monitor(self) -> None:
        if self.states:
            with contextlib.suppress(AnomalyError):
                self.monitor.remove()
            self.monitor = self.monitored()
            self.load()

    def any_branch(self) -> int:
        return self.random.randrange(len(self.model.branches))

    def trained(self, module: nn.Module) -> nn.Module:
        module = module.to(self.model.last.weight.dtype)
        self.optimizer.add_param_group({"params": list(module.parameters())})
        return module

    # Expected recordings ---------------------------------------------------------------------------------

    def note(self, loss: Tensor, scale: float) -> None:
        step, period = self.monitor.steps, self.watch["parameters"]
        named = list(self.model.named_parameters())
        own = {id(parameter) for _, parameter in named}
        for number, group in enumerate(self.optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                # A branch that was taken out of the model is still trained while it has gradients.
                if id(parameter) not in own and (parameter.grad is not None or id(parameter) in self.besides):
                    self.besides[id(parameter)] = parameter
                    named.append((f"group{number}.{i}", parameter))
        self.seen[step] = Seen(
            loss.item(),
            {name: finite_norm(p.grad) / scale for name, p in named if p.grad is not None},
            {name: finite_norm(p) for name, p in named} if period and step % period == 0 else None,
        )

    def compare_newest(self) -> None:
        newest = self.monitor.latest()
        if newest is not None:
            for name, norm in self.seen[newest.step].gradients.items():
                assert is_close(newest.report[name].finite_norm, norm), (newest.step, name)

    def compare(self) -> None:
        recording = self.monitor.recording()
        seen = sorted(self.seen)
        if self.late and self.policy == "rollback":  # a rollback drops numbers in transit
            seen = [step for step in seen if step in recording.steps]
            assert len(seen) == len(recording.steps)
        wanted = [step for step in seen if step > max(seen, default=0) - self.history]
        assert recording.steps.tolist() == wanted
        for step, loss in zip(wanted, recording.scalars.get("loss", ()), strict=True):
            np.testing.assert_allclose(loss, self.seen[step].loss, rtol=1e-6)
        tables = {
            "gradient": {step: self.seen[step].gradients for step in wanted},
            "parameter": {step: p for step in wanted if (p := self.seen[step].parameters) is not None},
        }
        for kind, norms in tables.items():
            table = recording.tables.get(kind)
            assert table is not None or not norms, kind
            for step, row in norms.items():
                at = table.steps.tolist().index(step)
                recorded = dict(zip(table.names, table.column("l2_norm")[at].tolist(), strict=True))
                for name, norm in row.items():
                    assert is_close(recorded.pop(name), norm), (kind, step, name)
                assert all(map(math.isnan, recorded.values())), (kind, step, recorded)  # others had none
        for kind, series in recording.tables.items():
            assert (np.diff(series.steps) > 0).all(), (kind, series.steps)
        assert load(self.monitor.save(self.folder / "now.gradstat")).steps.tolist() == wanted


# What happens before a step; a step itself takes note of the last ones.
EVENTS: dict[str, Callable[[Program], object]] = {
    "other branches": lambda p: setattr(p.model, "taken", p.random.choices(range(4), k=p.random.randrange(3))),
    "added": lambda p: p.model.branches.append(p.trained(p.model.branch())),
    "resized": lambda p: p.model.branches.__setitem__(p.any_branch(), p.trained(p.model.branch(8))),
    "removed": lambda p: p.model.branches.__delitem__(p.any_branch()) if len(p.model.branches) > 1 else None,
    "frozen or thawed": Program.freeze_or_thaw,
    "cast": Program.cast,
    "parameter spoilt": lambda p: p.random.choice(list(p.model.parameters())).detach().view(-1)[0].fill_(math.nan),
    "optimizer reset": lambda p: p.optimizer.state.clear(),
    "raised": Program.fail,
    "state saved": Program.save,
    "state loaded": Program.load,
    "monitor replaced": Program.replace_monitor,
    "diagnosed": lambda p: str(p.monitor.diagnose()),
    **dict.fromkeys(("batch", "label", "loss", "gradient", "spike"), lambda p: None),
}


def finite_norm(tensor: Tensor) -> float:
    values = tensor.detach().double()
    return math.sqrt(values[values.isfinite()].square().sum().item())


def is_close(recorded: float, norm: float) -> bool:
    """Whether a recorded norm is that of the finite elements; for tensors with nonfinite elements it is NaN or Inf."""
    return not math.isfinite(recorded) or math.isclose(recorded, norm, rel_tol=1e-5, abs_tol=1e-12)


@pytest.mark.filterwarnings("ignore::gradstat.monitor.AnomalyWarning")
@pytest.mark.filterwarnings("ignore:gradstat. cannot roll back:RuntimeWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_recorded_is_what_was_there(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = seed % 2 == 1
    if late:  # pretends that numbers are in transit, so that they are read a step later
        numbers_travel(monkeypatch)
    program = Program(seed, tmp_path, late)
    try:
        for _ in range(4):
            program.run(15)
    except BaseException:
        print(program.options, program.done)
        raise
