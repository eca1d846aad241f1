"""Five healthy training runs, and whether one after a change of the code is still like them.

::

    python examples/golden_example.py
    python examples/golden_example.py --mistake unscaled

A classifier of sentences by one attention layer is trained for 60 steps with five seeds, on the CPU, in a few seconds.
What they have in common is kept in golden.gradstat. Then it is trained once more, after a refactoring, which
``--mistake`` spoils; the exit status is 1 if that run is unlike the golden ones.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import gradstat
from gradstat.monitor import Golden, Recording

TOKENS, LENGTH, WIDTH = 32, 12, 32
MISTAKES = ("none", "unscaled", "undivided", "shuffled")


class Classifier(nn.Module):
    """Attention over embedded tokens, and a head."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(TOKENS, WIDTH), scale
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mixed = scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), scale=self.scale)
        logits: Tensor = self.head(mixed.mean(1))
        return logits


def train(seed: int, mistake: str = "none", steps: int = 60) -> Recording:
    """A training run, two micro-batches a step; the label says whether small tokens are in the majority."""
    torch.manual_seed(seed)
    model = Classifier(1.0 if mistake == "unscaled" else WIDTH**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with gradstat.Monitor(model, optimizer) as monitor:
        for _ in range(steps):
            total = torch.zeros(())
            for _ in range(2):
                tokens = torch.randint(TOKENS, (32, LENGTH))
                labels = ((tokens < TOKENS // 2).sum(1) > LENGTH // 2).long()
                if mistake == "shuffled":
                    labels = labels[torch.randperm(32)]
                loss = cross_entropy(model(tokens), labels) / (1 if mistake == "undivided" else 2)
                loss.backward()
                total += loss.detach()
            monitor.step(total)
            optimizer.step()
            optimizer.zero_grad()
        return monitor.recording()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mistake", choices=MISTAKES, default="undivided", help="default: %(default)s")
    options = parser.parse_args()
    Golden.of(train(seed) for seed in range(5)).save("golden.gradstat")
    comparison = Golden.load("golden.gradstat").compare(train(5, options.mistake))
    print(comparison)
    return 0 if comparison.ok else 1


if __name__ == "__main__":
    sys.exit(main())
