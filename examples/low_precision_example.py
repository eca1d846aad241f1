"""Which layers could be trained in four bits? ``gradstat.LowPrecision`` beside an ordinary training.

::

    python examples/low_precision_example.py

A small GPT learns to predict bytes of Python's standard library, on the CPU, in a minute. The study is printed, and
its page is low_precision.html.
"""

from __future__ import annotations

import argparse

import torch

import gradstat
from gradstat.demo import corpus
from gradstat.demo.model import GPT, TINY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, text = GPT(TINY), corpus.read(corpus.standard_library(), limit=1_000_000)
    optimizer, random = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.Generator().manual_seed(0)

    study = gradstat.LowPrecision(model, ("mxfp8", "nvfp4", "mxfp4"), every=10)  # the added line

    for _ in range(options.steps):
        loss = model.loss(corpus.batch(text, TINY.batch, TINY.context + 1, random, "cpu"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(study)
    print(f"page: {study.write_page('low_precision.html')}")


if __name__ == "__main__":
    main()
