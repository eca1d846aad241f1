"""Times what `NoiseScale` adds to a training step that accumulates gradients: ``python benchmarks/noise_scale.py``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import tables
import torch
import torch.nn.functional as F  # noqa: N812
from rows import Row, add_arguments, append, row, step_rows
from torch.optim import AdamW

import gradstat
from gradstat.bench.machine import synchronize
from gradstat.bench.timing import interleaved
from gradstat.demo.model import GPT, MODEST, SMALL

GROUP = "noise scale"
_SIZES = {"gpt-0.9m": SMALL, "gpt-17m": replace(MODEST, batch=8)}
_MICRO_BATCHES, _EVERY = 4, (1, 4)
_PLAIN = "step"


def _measured(name: str, rounds: int, device: torch.device) -> list[Row]:
    size = _SIZES[name]
    torch.manual_seed(0)
    model = GPT(size).to(device)
    optimizer = AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)
    inside: dict[str, list[float]] = {}

    def step(name: str, noise_scale: gradstat.NoiseScale | None) -> None:
        seconds = 0.0

        def timed(call: Callable[[], object]) -> None:
            nonlocal seconds
            synchronize(device)  # so that only the kernels of the call are timed
            start = time.perf_counter()
            call()
            synchronize(device)
            seconds += time.perf_counter() - start

        for _ in range(_MICRO_BATCHES):
            logits = model(tokens[:, :-1]).flatten(0, -2).float()
            (F.cross_entropy(logits, tokens[:, 1:].flatten()) / _MICRO_BATCHES).backward()
            if noise_scale is not None:
                timed(noise_scale.micro_batch)
        if noise_scale is not None:
            timed(noise_scale.step)
        inside.setdefault(name, []).append(seconds)
        optimizer.step()
        optimizer.zero_grad()

    def variant(name: str, every: int) -> Callable[[], None]:
        noise_scale = gradstat.NoiseScale(model, size.batch, every=every)
        return lambda: step(name, noise_scale)

    calls = {_PLAIN: lambda: step(_PLAIN, None)}
    calls |= {f"+ NoiseScale, every={every}": variant(f"+ NoiseScale, every={every}", every) for every in _EVERY}
    # Warmup and timed rounds are whole periods of every variant.
    samples = interleaved(calls, rounds * _EVERY[-1], warmup=_EVERY[-1], device=device)
    case, made = f"{name}, {_MICRO_BATCHES} micro-batches of {size.batch}x{size.context}", []
    for call, sample in samples.items():
        made += step_rows(GROUP, case, call, sample, samples[_PLAIN], device)
        if call != _PLAIN:
            share = 100 * sum(inside[call][-len(sample) :]) / sum(samples[_PLAIN])
            made.append(row(GROUP, case, call, "time inside", "%", share, device))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(_SIZES), help="only this model")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of four steps each")
    add_arguments(parser)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = [options.model] if options.model else list(_SIZES)
    made = [one for name in models for one in _measured(name, options.rounds, device)]
    print(tables.table_of_rows(made))
    if options.record:
        print(f"recorded in {append(made, 'noise_scale', options.results)}")


if __name__ == "__main__":
    main()
