"""The cost of ``wandb.watch``, compared with a monitor that logs every step to the same run, offline.

::

    python benchmarks/wandb_watch.py            # a GPT of 0.9 M parameters; about a minute
    python benchmarks/wandb_watch.py --record   # append the rows to benchmarks/results
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable

import tables
import torch
import wandb
from rows import add_arguments, append, step_rows

import gradstat
from gradstat.bench.timing import interleaved
from gradstat.demo.model import GPT, SMALL
from gradstat.integrations.loggers import log_report

GROUP = "Weights & Biases steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    add_arguments(parser)
    options = parser.parse_args()
    device = torch.device("cpu")
    torch.manual_seed(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True)) as run,
    ):
        samples = interleaved(_calls(run), options.rounds, device=device)
    made = []
    for name, sample in samples.items():
        made += step_rows(GROUP, "gpt-0.9m", name, sample, samples["step"], device)
    if options.record:
        append(made, "full", options.results)
    print(tables.table_of_rows(made))


def _calls(run: wandb.Run) -> dict[str, Callable[[], object]]:
    plain = GPT(SMALL)
    monitored, watched = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizers = {model: torch.optim.AdamW(model.parameters()) for model in (plain, monitored, watched)}
    monitor = gradstat.Monitor(monitored, optimizers[monitored], on_anomaly="record")
    run.watch(watched, log="gradients", log_freq=1)
    tokens = torch.randint(SMALL.vocabulary, (SMALL.batch, SMALL.context + 1))

    def step(model: GPT, then: Callable[[torch.Tensor], object] = lambda loss: None) -> None:
        loss = model.loss(tokens)
        loss.backward()
        then(loss)
        optimizers[model].step()
        optimizers[model].zero_grad()

    def look(loss: torch.Tensor) -> None:
        monitor.step(loss)
        log_report(run, monitor, monitor.steps, per_tensor=("l2_norm",))

    return {
        "step": lambda: step(plain),
        "+ Monitor, all norms logged": lambda: step(monitored, look),
        "+ wandb.watch, histograms of gradients": lambda: step(watched, lambda loss: run.log({"loss": loss.item()})),
    }


if __name__ == "__main__":
    main()
