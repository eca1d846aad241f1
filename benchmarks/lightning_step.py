"""The cost of the Lightning callback, compared with ``detect_anomaly=True``, and of logging 300 norms.

::

    python benchmarks/lightning_step.py            # a GPT of 0.9 M parameters; minutes
    python benchmarks/lightning_step.py --record   # append the rows to benchmarks/results

Steps are timed inside Lightning, from the start of a batch to its end; variants take turns, each with a short training.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import tables
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.loggers import TensorBoardLogger
from rows import Row, add_arguments, append, microseconds, row, step_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import gradstat
from gradstat.bench.timing import interleaved
from gradstat.demo.model import GPT, SMALL
from gradstat.integrations.lightning import GradstatCallback
from gradstat.integrations.loggers import log_report

STEPS, LOGGING = "Lightning steps", "logging"
# A monitor reviews the first steps one by one, then 64 at a time, and measures parameters every 50 steps.
_WARM, _TIMED = 32, 64


class _Clock(pl.Callback):
    """Records the durations of steps."""

    def __init__(self) -> None:
        self.took: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.took.append(time.perf_counter() - self._began)


class _Timed(GradstatCallback):
    """Records how long the callback's own part of each step takes, since whole steps vary by more than that."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.took: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self._spent = 0.0
        self._time(super().on_train_batch_start, arguments)

    def on_before_backward(self, *arguments: Any) -> None:
        self._time(super().on_before_backward, arguments)

    def on_after_backward(self, *arguments: Any) -> None:
        self._time(super().on_after_backward, arguments)

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        self._time(super().on_before_optimizer_step, arguments)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self._time(super().on_train_batch_end, arguments)
        self.took.append(self._spent)

    def _time(self, hook: Callable[..., None], arguments: Any) -> None:
        began = time.perf_counter()
        hook(*arguments)
        self._spent += time.perf_counter() - began


class _Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(SMALL)

    def training_step(self, batch: Any, _: int) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, -2), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


class _Layers(pl.LightningModule):
    """300 small parameters."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(150)))
        self.logs = logs

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.logs:
            self.log_dict(
                {f"grad/l2_norm/{n}": p.grad.norm() for n, p in self.named_parameters() if p.grad is not None}
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _training(make: Callable[[], pl.LightningModule], data: Tensor, make_options: Callable[[], Any]) -> Any:
    module = make()
    loader = DataLoader(TensorDataset(data), batch_size=len(data) // (_WARM + _TIMED))

    def fit() -> float:
        clock, (callbacks, options) = _Clock(), make_options()
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock, *callbacks],
            **{"logger": False, **options},
        )
        trainer.fit(module, loader)
        return statistics.fmean(clock.took[_WARM:])

    return fit


def _timed(case: str, fits: dict[str, Callable[[], float]], rounds: int, device: torch.device) -> list[Row]:
    """Times variants in turn, each round in another order, and returns rows; the first variant is the plain one."""
    took: dict[str, list[float]] = {name: [] for name in fits}
    names = list(fits)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            took[name].append(fits[name]())
    made = []
    for name, seconds in took.items():
        made += step_rows(STEPS, case, name, seconds, took[names[0]], device)
    return made


def _lightning_rows(rounds: int, device: torch.device, folder: str) -> list[Row]:
    tokens = torch.randint(SMALL.vocabulary, (SMALL.batch * (_WARM + _TIMED), SMALL.context + 1))
    variants: dict[str, Callable[[], Any]] = {
        "Lightning": lambda: ([], {}),
        "+ gradient_clip_val": lambda: ([], {"gradient_clip_val": 1.0}),
        "+ GradstatCallback()": lambda: ([GradstatCallback()], {}),
        "+ GradstatCallback(max_norm=1)": lambda: ([GradstatCallback(max_norm=1.0)], {}),
        "detect_anomaly=True": lambda: ([], {"detect_anomaly": True}),
    }
    fits = {name: _training(_Language, tokens, options) for name, options in variants.items()}
    made = _timed("gpt-0.9m", fits, rounds, device)
    for name, options in (
        ("GradstatCallback()", {}),
        ("GradstatCallback(on_anomaly='replay')", {"on_anomaly": "replay"}),
    ):
        inside = _Timed(**options)
        _training(_Language, tokens, lambda inside=inside: ([inside], {}))()
        micro = microseconds(inside.took[_WARM:])
        made.append(row(STEPS, "gpt-0.9m, inside the step", name, "time inside", "us", micro, device))
    batch = torch.randn(8 * (_WARM + _TIMED), 8)

    def board() -> dict[str, Any]:
        return {"logger": TensorBoardLogger(folder), "log_every_n_steps": 1}

    fits = {
        "Lightning": _training(lambda: _Layers(False), batch, lambda: ([], board())),
        "log_dict, logged every step": _training(lambda: _Layers(True), batch, lambda: ([], board())),
        "log_dict, never logged": _training(
            lambda: _Layers(True), batch, lambda: ([], {**board(), "log_every_n_steps": 1000})
        ),
        "GradstatCallback, logged every step": _training(
            lambda: _Layers(False),
            batch,
            lambda: ([GradstatCallback(per_tensor=("l2_norm",), top=None)], board()),
        ),
        "GradstatCallback, never logged": _training(
            lambda: _Layers(False),
            batch,
            lambda: ([GradstatCallback(per_tensor=("l2_norm",), top=None, log_every=0)], board()),
        ),
    }
    return made + _timed("300 norms to TensorBoard", fits, rounds, device)


def _logging_rows(rounds: int, device: torch.device, folder: str) -> list[Row]:
    layers = _Layers(False)
    layers.training_step([torch.randn(8, 8)], 0).backward()
    report = gradstat.check(layers)
    writer = SummaryWriter(folder)
    step = 0

    def naive() -> None:
        nonlocal step
        step += 1
        for name, parameter in layers.named_parameters():
            assert parameter.grad is not None
            writer.add_scalar(f"grad/l2_norm/{name}", parameter.grad.norm().item(), step)

    def ours() -> None:
        nonlocal step
        step += 1
        log_report(writer, report, step, per_tensor=("l2_norm",))

    def checked() -> None:
        nonlocal step
        step += 1
        log_report(writer, gradstat.check(layers), step, per_tensor=("l2_norm",))

    calls = {"300 times norm().item() and add_scalar": naive, "log_report": ours, "check and log_report": checked}
    samples = interleaved(calls, rounds, device=device)
    writer.close()
    return [
        row(LOGGING, "300 norms to TensorBoard", name, "wall time", "us", microseconds(sample), device)
        for name, sample in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    add_arguments(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device("cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        made = _lightning_rows(options.rounds, device, folder) + _logging_rows(5 * options.rounds, device, folder)
    print(tables.table_of_rows(made))
    if options.record:
        print(f"recorded in {append(made, 'full', options.results)}")


if __name__ == "__main__":
    main()
