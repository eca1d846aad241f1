"""Gradient statistics in TensorBoard and JSON lines from a plain loop: ``python examples/loggers.py``.

A small model learns to predict letters of Python's own sources, on the CPU, in seconds. In step 60 the biases of a
layer are set far below zero, so its ReLU is dead. The loss rises only a little; the logged gradient norms show which
layers have zero gradients from there on, and the monitor reports it in words.

Needs ``pip install 'gradstat[loggers]'``. Then: ``tensorboard --logdir example-output``.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import gradstat
from gradstat.demo import corpus
from gradstat.integrations.loggers import JsonlWriter, ReportLogger

CONTEXT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", type=Path, default=Path("example-output"))
    options = parser.parse_args()
    torch.manual_seed(0)
    text = corpus.read(corpus.standard_library(), 20_000)
    _, numbers = text.unique(return_inverse=True)
    pieces = numbers.unfold(0, CONTEXT + 1, 1)
    letters = int(numbers.max()) + 1
    model = nn.Sequential(
        nn.Embedding(letters, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, 64), nn.ReLU(), nn.Linear(64, letters)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warnings.simplefilter("ignore", gradstat.monitor.AnomalyWarning)  # the diagnosis below says it all
    monitor = gradstat.Monitor(model, optimizer)
    path = options.folder / "gradients.jsonl"
    with SummaryWriter(options.folder / "tensorboard") as board, JsonlWriter(path) as lines:
        # A few numbers in every step, and all of them in every tenth.
        each_step = ReportLogger(lines)
        now_and_then = ReportLogger(board, every=10, per_tensor=("l2_norm", "max_abs"), histogram=True)
        for step in range(options.steps):
            batch = pieces[torch.randint(len(pieces), (32,))]
            if step == 60:
                with torch.no_grad():
                    model[2].get_parameter("bias").fill_(-100)  # the fault
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            loss.backward()
            monitor.step(loss)
            each_step(monitor)
            now_and_then(monitor)
            gradstat.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(monitor.diagnose())
    print(f"\nsteps around the fault, from {path}:")
    for line in path.read_text().splitlines()[-options.steps :][57:63]:
        values = json.loads(line)
        print(f"  step {values['step']}: loss {values['grad/loss']:.3f}, norm {values['grad/total_norm']:.3g}")


if __name__ == "__main__":
    main()
