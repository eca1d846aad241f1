"""A Lightning script with one added line that finds a layer with NaN: ``python examples/lightning_example.py``.

A small model learns to predict letters of Python's own sources, on the CPU, in seconds. One of its layers is a norm
without an eps. In batch 60 some lines are empty, so their inputs are all padding, that is zeros, and the norm divides 0
by 0. The callback skips that step, runs it again, and names the layer and the line of code.

Needs ``pip install 'gradstat[lightning,loggers]'``.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradstat.demo import corpus
from gradstat.integrations.lightning import GradstatCallback

CONTEXT = 16


class BareNorm(nn.Module):
    """Divides by the root mean square, without the eps it should have."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()


class Letters(pl.LightningModule):
    """Predicts the next letter from those before it; 0 is padding."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 32, padding_idx=0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(CONTEXT * 32, 64, bias=False), BareNorm(), nn.GELU())
        self.head = nn.Linear(64, letters)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        context, following = batch
        if batch_idx == 60:
            context[:3] = 0  # the fault: three lines are empty
        loss = nn.functional.cross_entropy(self.head(self.body(self.embedding(context))), following)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data(steps: int) -> tuple[DataLoader[Any], int]:
    """Pieces of text as tokens above 0, and the vocabulary size including 0."""
    text = corpus.read(corpus.standard_library(), max(10_000, 32 * steps + CONTEXT))
    _, numbers = text.unique(return_inverse=True)
    pieces = (numbers + 1).unfold(0, CONTEXT + 1, 1)[: 32 * steps]
    dataset = TensorDataset(pieces[:, :-1].clone(), pieces[:, -1].clone())
    return DataLoader(dataset, batch_size=32), int(numbers.max()) + 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", default="example-output", help="where the log goes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    pl.seed_everything(0, verbose=False)
    loader, letters = data(options.steps)
    callback = GradstatCallback(
        max_norm=1.0, on_anomaly=["warn", "skip", "replay"], per_tensor=("l2_norm",), top=None, log_every=20
    )
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=CSVLogger(options.folder),
        callbacks=[callback],  # the one line
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Letters(letters), loader)
    assert callback.monitor is not None
    print(callback.monitor.diagnose())
    print(f"\nlogged: {trainer.loggers[0].log_dir}/metrics.csv")


if __name__ == "__main__":
    main()
