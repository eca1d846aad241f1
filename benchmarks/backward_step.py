"""Time and memory of a training step with `step_in_backward`: ``python benchmarks/backward_step.py``.

The script compares it with a step after backward, and with the usual recipe of one optimizer and hook per parameter.
With FSDP2: ``torchrun --nproc-per-node 2 benchmarks/backward_step.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tables
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from launched import process_group
from rows import Row, add_arguments, append, row, step_rows
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import gradstat
from gradstat.bench.machine import synchronize
from gradstat.bench.memory import peak_bytes
from gradstat.bench.timing import Quartiles, interleaved
from gradstat.demo.model import GPT, MODEST, SMALL

GROUP = "steps in backward"
_SIZES = {"gpt-0.9m": replace(SMALL, batch=1), "gpt-17m": replace(MODEST, batch=1)}
_LIMIT = 0.01
_RECIPE = "one AdamW and hook for each, clip_grad_norm_"


def _calls(name: str, device: torch.device) -> dict[str, Callable[[], object]]:
    size = _SIZES[name]
    tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)
    options: dict[str, Any] = {"lr": 1e-5, "fused": True}

    def model() -> GPT:
        torch.manual_seed(0)
        made = GPT(size).to(device)
        for module in (*made.blocks, made) if dist.is_initialized() else ():
            fully_shard(module)
        return made

    def backward(of: GPT) -> None:
        F.cross_entropy(of(tokens[:, :-1]).flatten(0, -2).float(), tokens[:, 1:].flatten()).backward()

    def after() -> Callable[[], object]:
        of = model()
        optimizer = AdamW(of.parameters(), **options)

        def step() -> None:
            backward(of)
            for parameter in of.parameters():
                clip_grad_norm_([parameter], _LIMIT)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def recipe() -> Callable[[], object]:
        of = model()
        optimizers: dict[Tensor, AdamW] = {parameter: AdamW([parameter], **options) for parameter in of.parameters()}

        def hook(parameter: Tensor) -> None:
            clip_grad_norm_([parameter], _LIMIT)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in of.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        return lambda: backward(of)

    def ours(clip: Any) -> Callable[[], object]:
        of = model()
        gradstat.step_in_backward(AdamW, of, clip, **options)
        return lambda: backward(of)

    calls = {
        _RECIPE: recipe(),
        "clip_grad_norm_ of each and AdamW after backward": after(),
        "step_in_backward": ours(None),
        "step_in_backward, limit of each": ours(_LIMIT),
        "step_in_backward, LastNormClip": ours(gradstat.LastNormClip(_LIMIT)),
        "step_in_backward, AdaGC": ours(gradstat.AdaGC(warmup=0)),
    }
    if not dist.is_initialized():
        calls["step_in_backward, AGC"] = ours(gradstat.AGC())
    return calls


def _measured(model: str, rounds: int, device: torch.device) -> list[Row]:
    made = []
    calls = _calls(model, device)
    group, case, threads = GROUP, model, torch.get_num_threads()
    if dist.is_initialized():
        ranks = dist.get_world_size()
        group, case, threads = f"{GROUP}, ranks", f"{model}, FSDP2 on {ranks} ranks", threads * ranks
    # All ranks draw the same order of calls, so their collectives match.
    samples = interleaved(calls, rounds, device=device)
    synchronize(device)
    for name, sample in samples.items():
        made += step_rows(group, case, name, sample, samples[_RECIPE], device)
        peak = peak_bytes(calls[name], device)
        made.append(row(group, case, name, "peak memory", "B", Quartiles(peak, peak, peak), device))
    return [replace(one, threads=threads) for one in made]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of training steps.")
    parser.add_argument("--model", choices=list(_SIZES), help="only this model")
    parser.add_argument("--rounds", type=int, default=15)
    add_arguments(parser)
    options = parser.parse_args()
    alone = contextlib.nullcontext(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with process_group() if "LOCAL_RANK" in os.environ else alone as device:
        models = [options.model] if options.model else list(_SIZES)
        made = [one for model in models for one in _measured(model, options.rounds, device)]
        if dist.is_initialized() and dist.get_rank():
            return
    print(tables.table_of_rows(made))
    if options.record:
        print(f"recorded in {append(made, 'backward_step', options.results)}")


if __name__ == "__main__":
    main()
