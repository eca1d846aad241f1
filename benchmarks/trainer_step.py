"""The cost of monitoring a step of the Trainer of transformers: ``python benchmarks/trainer_step.py``.

gradstat is compared with the framework's own facility, ``TrainingArguments(debug="underflow_overflow")``
(``DebugUnderflowOverflow``, which checks inputs, weights and outputs of every module), and torch's anomaly mode. ::

    python benchmarks/trainer_step.py
    python benchmarks/trainer_step.py --model gpt2-7m --rounds 10 --record
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tables
import torch
import transformers
from rows import Row, add_arguments, append, microseconds, row
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from gradstat.bench.machine import synchronize
from gradstat.bench.timing import ratios
from gradstat.integrations.transformers import install

GROUP = "Trainer steps"
# Layers, width, heads, context, batch size.
_SIZES = {"gpt2-1m": (4, 128, 4, 64, 8), "gpt2-7m": (8, 256, 8, 128, 4)}
_PASSED_OVER = 3  # untimed steps at the beginning of a training

Attach = Callable[[Trainer], contextlib.AbstractContextManager[object]]


class Timed(NamedTuple):
    """Medians of a training, in seconds.

    Attributes:
        step: From the first forward pass to the end of the optimizer's step.
        clip: The part of it spent in the Trainer's clip, where gradstat measures.
    """

    step: float
    clip: float


class Clock(TrainerCallback):
    """Times steps, and the clips within them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._start = device, 0.0
        self.seconds: list[float] = []
        self.inside: list[float] = []

    def time_clip(self, trainer: Trainer) -> None:
        """Patches the clip that ``trainer`` calls, to time it."""
        original = trainer.accelerator.clip_grad_norm_

        def clip(*args: Any, **kwargs: Any) -> Any:
            synchronize(self.device)
            start = time.perf_counter()
            norm = original(*args, **kwargs)
            synchronize(self.device)
            self.inside.append(time.perf_counter() - start)
            return norm

        trainer.accelerator.clip_grad_norm_ = clip

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize(self.device)
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._start)


def variants() -> dict[str, tuple[dict[str, Any], Attach]]:
    """For each variant further arguments of the Trainer, and a function called on it before it trains."""

    def plain(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def watched(**options: Any) -> Attach:
        return lambda trainer: install(trainer, **{"on_anomaly": "record", **options})

    def anomaly(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
        return torch.autograd.detect_anomaly()

    return {
        "Trainer": ({}, plain),
        "+ gradstat install": ({}, watched()),
        "+ gradstat install, skip": ({}, watched(on_anomaly={"error": "skip"})),
        "+ gradstat install, replay kept": ({}, watched(replay=True)),
        "+ DebugUnderflowOverflow": ({"debug": "underflow_overflow"}, plain),
        "+ detect_anomaly": ({}, anomaly),
    }


def one_training(size: str, device: torch.device, steps: int, settings: dict[str, Any], attach: Attach) -> Timed:
    layers, width, heads, context, batch = _SIZES[size]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=context, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=0,
            eos_token_id=0,
        )
    )  # fmt: skip
    tokens = torch.randint(256, (64, context))
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, logging_steps=10, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=device.type == "cpu", dataloader_pin_memory=False,
            **settings,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
        with attach(trainer):
            clock.time_clip(trainer)
            trainer.add_callback(clock)
            trainer.train()
    return Timed(*(statistics.median(seconds[_PASSED_OVER:]) for seconds in (clock.seconds, clock.inside)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time added to a step of the Trainer.")
    parser.add_argument("--model", choices=list(_SIZES), default="gpt2-1m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=23, help="steps of each training")
    add_arguments(parser)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transformers.logging.set_verbosity_error()
    every = variants()
    timed: dict[str, list[Timed]] = {name: [] for name in every}
    order, shuffle = list(every), random.Random(0).shuffle
    for number in range(1 + options.rounds):  # the first round warms up
        shuffle(order)
        for name in order:
            took = one_training(options.model, device, options.steps, *every[name])
            if number:
                timed[name].append(took)
    case = f"{options.model}, transformers {transformers.__version__}"
    made: list[Row] = []
    plain = [one.step for one in timed["Trainer"]]
    for name, samples in timed.items():
        steps, clips = [one.step for one in samples], [one.clip for one in samples]
        made.append(row(GROUP, case, name, "wall time", "us", microseconds(steps), device))
        made.append(row(GROUP, case, f"{name}: its clip", "time inside", "us", microseconds(clips), device))
        made.append(row(GROUP, case, name, "time ratio", "", ratios(steps, plain), device))
    print(tables.table_of_rows(made))
    if options.record:
        print(f"recorded in {append(made, 'full', options.results)}")


if __name__ == "__main__":
    main()
