"""An Accelerate loop in which a layer's gradient becomes NaN, and the three lines that find it.

::

    pip install 'gradstat[accelerate]'
    python examples/accelerate_example.py

A small model learns to predict bytes of Python's standard library, on the CPU, in a few seconds. In a step halfway
through, an activation overflows. The step is skipped, the operation is named, and training goes on.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradstat.demo import corpus
from gradstat.integrations.accelerate import install

LENGTH, MICRO_BATCHES = 32, 2


class Overflows(nn.Module):
    """A ReLU that overflows while ``fault`` is set."""

    fault = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(100 * x.abs() + 50) if self.fault else torch.relu(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    overflows = Overflows()
    model: nn.Module = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * LENGTH, 128), overflows, nn.Linear(128, 256)
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    text = corpus.read(corpus.standard_library(), limit=1_000_000)
    generator = torch.Generator().manual_seed(0)
    batch = torch.empty(0)

    def forward_and_backward() -> Tensor:
        loss = cross_entropy(model(batch[:, :-1]), batch[:, -1])
        accelerator.backward(loss)
        return loss

    # The first of the added lines; the other two are at the end.
    handle = install(accelerator, on_anomaly=["warn", "skip", "replay"], replay=forward_and_backward)
    for micro_batch in range(options.steps * MICRO_BATCHES):
        batch = corpus.batch(text, 16, LENGTH + 1, generator, "cpu")
        overflows.fault = micro_batch == options.steps + 1  # the second micro-batch of a step halfway through
        with accelerator.accumulate(model):
            forward_and_backward()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if micro_batch % 40 == 39:
            numbers = handle.scalars()
            loss, norm = numbers["grad/loss"], numbers["grad/total_norm"]
            print(f"step {micro_batch // MICRO_BATCHES}: loss {loss:.3f}, norm {norm:.3f}")
    print(handle.monitor.diagnose())
    handle.remove()


if __name__ == "__main__":
    main()
