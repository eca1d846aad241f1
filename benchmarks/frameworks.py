"""What gradstat and the facilities of frameworks add to a step of Lightning, of transformers' Trainer, and under wandb.

::

    python benchmarks/frameworks.py                       # minutes; small models, on the CPU
    python benchmarks/frameworks.py Trainer --record      # append the rows to benchmarks/results

Steps are timed inside a framework, from the start of a batch to its end. Variants take turns, each with a short
training.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import tables
import torch
from rows import Row, parser_of, record, step_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradstat
from gradstat.bench.timing import interleaved
from gradstat.demo.model import GPT, SMALL
from gradstat.integrations.loggers import log_report

# A monitor reviews the first steps one by one, then 64 at a time, and measures parameters every 50 steps.
_WARM, _TIMED = 32, 64
# By name, a training that returns the seconds of a step; the first is the plain one.
Trainings = dict[str, Callable[[], float]]


class Clock:
    """Records the durations of steps."""

    def __init__(self) -> None:
        self.took: list[float] = []

    def begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def end(self, *_: Any, **__: Any) -> None:
        self.took.append(time.perf_counter() - self._began)


def lightning(folder: str) -> Iterator[tuple[str, str, Trainings]]:
    """Lightning with and without the callback, ``detect_anomaly=True``, and norms that are logged."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import TensorBoardLogger

    from gradstat.integrations.lightning import GradstatCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class LightningClock(Clock, pl.Callback):
        on_train_batch_start, on_train_batch_end = Clock.begin, Clock.end

    class Module(pl.LightningModule):
        def __init__(self, model: nn.Module, loss: Callable[..., Tensor], optimize: Any, logs: bool = False) -> None:
            super().__init__()
            self.model, self.loss, self.optimize, self.logs = model, loss, optimize, logs

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.loss(self.model, batch[0])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.logs:
                named = [(name, p.grad) for name, p in self.named_parameters() if p.grad is not None]
                self.log_dict({f"grad/l2_norm/{name}": gradient.norm() for name, gradient in named})

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimize(self.parameters())

    def language() -> Module:
        return Module(GPT(SMALL), GPT.loss, partial(torch.optim.AdamW, fused=True))

    def layers(logs: bool = False) -> Module:
        """300 small parameters."""
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(150)))
        loss = lambda model, inputs: model(inputs).square().mean()  # noqa: E731
        return Module(model, loss, partial(torch.optim.SGD, lr=1e-3), logs)

    def training(module: pl.LightningModule, data: Tensor, **options: Any) -> Callable[[], float]:
        loader = DataLoader(TensorDataset(data), batch_size=len(data) // (_WARM + _TIMED))

        def fit() -> float:
            clock = LightningClock()
            made = {name: option() if callable(option) else option for name, option in options.items()}
            callbacks = [clock, *made.pop("callbacks", ())]
            trainer = pl.Trainer(
                max_epochs=1, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, callbacks=callbacks, **{"logger": False, **made},
            )  # fmt: skip
            trainer.fit(module, loader)
            return statistics.fmean(clock.took[_WARM:])

        return fit

    tokens = torch.randint(SMALL.vocabulary, (SMALL.batch * (_WARM + _TIMED), SMALL.context + 1))
    yield (
        "Lightning steps",
        "gpt-0.9m",
        {
            "Lightning": training(language(), tokens),
            "+ gradient_clip_val": training(language(), tokens, gradient_clip_val=1.0),
            "+ GradstatCallback()": training(language(), tokens, callbacks=lambda: [GradstatCallback()]),
            "detect_anomaly=True": training(language(), tokens, detect_anomaly=True),
        },
    )
    batch = torch.randn(8 * (_WARM + _TIMED), 8)
    board = {"logger": lambda: TensorBoardLogger(folder), "log_every_n_steps": 1}
    yield (
        "Lightning steps",
        "300 norms to TensorBoard",
        {
            "Lightning": training(layers(), batch, **board),
            "log_dict, logged every step": training(layers(logs=True), batch, **board),
            "GradstatCallback, logged every step": training(
                layers(), batch, callbacks=lambda: [GradstatCallback(per_tensor=("l2_norm",), top=None)], **board
            ),
        },
    )


def trainer(folder: str) -> Iterator[tuple[str, str, Trainings]]:
    """The Trainer of transformers; its own facility checks inputs, weights and outputs of every module."""
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from gradstat.integrations.transformers import install

    transformers.logging.set_verbosity_error()

    class TrainerClock(Clock, TrainerCallback):
        on_step_begin, on_step_end = Clock.begin, Clock.end

    def training(attach: Callable[[Trainer], AbstractContextManager[object]], **settings: Any) -> Callable[[], float]:
        def train() -> float:
            torch.manual_seed(0)
            config = GPT2Config(
                vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
            )
            tokens, clock = torch.randint(256, (64, 64)), TrainerClock()
            arguments = TrainingArguments(
                output_dir=folder, max_steps=23, per_device_train_batch_size=8, logging_steps=10, report_to=[],
                save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, **settings,
            )  # fmt: skip
            data = [{"input_ids": t, "labels": t} for t in tokens]
            with contextlib.redirect_stdout(io.StringIO()):
                made = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
                with attach(made):
                    made.add_callback(clock)
                    made.train()
            return statistics.median(clock.took[3:])

        return train

    yield (
        "Trainer steps",
        f"gpt2-1m, transformers {transformers.__version__}",
        {
            "Trainer": training(lambda made: contextlib.nullcontext()),
            "+ gradstat install": training(lambda made: install(made, on_anomaly="record")),
            "+ DebugUnderflowOverflow": training(lambda made: contextlib.nullcontext(), debug="underflow_overflow"),
            "+ detect_anomaly": training(lambda made: torch.autograd.detect_anomaly()),
        },
    )


def wandb(folder: str) -> Iterator[tuple[str, str, Trainings]]:
    """``wandb.watch``, compared with a monitor that logs every step to the same run, offline."""
    import wandb

    plain = GPT(SMALL)
    monitored, watched = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizers = {model: torch.optim.AdamW(model.parameters()) for model in (plain, monitored, watched)}
    monitor = gradstat.Monitor(monitored, optimizers[monitored], on_anomaly="record")
    tokens = torch.randint(SMALL.vocabulary, (SMALL.batch, SMALL.context + 1))

    def steps(model: GPT, then: Callable[[Tensor], object] = lambda loss: None) -> Callable[[], float]:
        def take() -> float:
            began = time.perf_counter()
            for _ in range(6):
                loss = model.loss(tokens)
                loss.backward()
                then(loss)
                optimizers[model].step()
                optimizers[model].zero_grad()
            return (time.perf_counter() - began) / 6

        return take

    with wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True)) as run:
        run.watch(watched, log="gradients", log_freq=1)

        def log(loss: Tensor) -> None:
            monitor.step(loss)
            # The other loop counts the run's steps as well, and wandb leaves out what is logged to an earlier one.
            log_report(run, monitor, run.step + 1, per_tensor=("l2_norm",))

        yield (
            "Weights & Biases steps",
            "gpt-0.9m",
            {
                "step": steps(plain),
                "+ Monitor, all norms logged": steps(monitored, log),
                "+ wandb.watch, histograms of gradients": steps(watched, lambda loss: run.log({"loss": loss.item()})),
            },
        )


FRAMEWORKS = {"Lightning": lightning, "Trainer": trainer, "wandb": wandb}


def measured(group: str, case: str, trainings: Trainings, rounds: int = 5) -> list[Row]:
    """The rows of trainings that take turns, after a round to warm up."""
    took: dict[str, list[float]] = {name: [] for name in trainings}
    calls = {name: (lambda name=name: took[name].append(trainings[name]())) for name in trainings}
    interleaved(calls, rounds, 1)
    seconds = {name: each[1:] for name, each in took.items()}
    plain, device = next(iter(seconds.values())), torch.device("cpu")
    return [row for name, each in seconds.items() for row in step_rows(group, case, name, each, plain, device)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("frameworks", nargs="*", choices=[*FRAMEWORKS, []], help="default: all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.frameworks or FRAMEWORKS:
            for group, case, trainings in FRAMEWORKS[name](folder):
                made += measured(group, case, trainings)
    print(tables.table_of_rows(made))
    record(made, "full", options)


if __name__ == "__main__":
    main()
