"""A training loop without any gradstat code, watched by one line: ``gradstat.auto(model, optimizer)``.

::

    python examples/auto_example.py

A small model learns to predict bytes of Python's standard library, on the CPU, in a few seconds. In one step an
element of a gradient becomes NaN. The parameter is named, the step is skipped on the device, and the recording can be
viewed afterwards with ``python -m gradstat view auto_example.gradstat``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradstat
from gradstat.demo import corpus

LENGTH = 32


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, steps: int, fault: int) -> None:
    """A plain training loop."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        batch = corpus.batch(text, 32, LENGTH + 1, generator, "cpu")
        loss = cross_entropy(model(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        if step == fault:
            model[2].weight.grad[17, 42] = math.nan  # type: ignore[index]
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("auto_example.gradstat"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * LENGTH, 128), nn.ReLU(), nn.Linear(128, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    # The added line. Without on_anomaly and save_to it only warns.
    handle = gradstat.auto(model, optimizer, on_anomaly={"error": ["warn", "skip"]}, save_to=options.output)

    train(model, optimizer, corpus.read(corpus.standard_library(), limit=1_000_000), options.steps, options.steps // 2)
    handle.remove()
    print(handle.monitor.diagnose())
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    print(f"all parameters are finite: {finite}")


if __name__ == "__main__":
    main()
