"""The cost of `track_origin` and `verify_replicas` in a DDP step: ``torchrun benchmarks/ddp_step.py``.

::

    torchrun --nproc-per-node 2 benchmarks/ddp_step.py            # gloo on the CPU, or NCCL with a GPU for each rank
    torchrun --nproc-per-node 2 benchmarks/ddp_step.py --model gpt-17m --rounds 20
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from launched import process_group, show
from rows import add_arguments, step_rows
from torch.nn.parallel import DistributedDataParallel

from gradstat.bench.timing import interleaved
from gradstat.demo.model import GPT, MODEST, SMALL, Size
from gradstat.distributed import track_origin, verify_replicas

GROUP = "DDP steps"
_SIZES = {"gpt-0.9m": SMALL, "gpt-17m": MODEST}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time added to a DDP step, on rank 0.")
    parser.add_argument("--model", choices=list(_SIZES), default="gpt-0.9m")
    parser.add_argument("--rounds", type=int, default=15)
    add_arguments(parser)
    options = parser.parse_args()
    with process_group() as device:
        torch.manual_seed(0)
        # All ranks draw the same order of calls (the same in every run), so their collectives match.
        samples = interleaved(_calls(_SIZES[options.model], device), options.rounds, device=device)
        case = f"{options.model}, {dist.get_world_size()} ranks"
        made = []
        for name, sample in samples.items():
            made += step_rows(GROUP, case, name, sample, samples["step"], device)
        show(made, options)


def _calls(size: Size, device: torch.device) -> dict[str, Callable[[], object]]:
    model = GPT(size).to(device)
    plain, watched = DistributedDataParallel(model), DistributedDataParallel(copy.deepcopy(model))
    tracker = track_origin(watched)
    optimizers = {ddp: torch.optim.AdamW(ddp.parameters()) for ddp in (plain, watched)}
    tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)

    def step(ddp: DistributedDataParallel, before_the_optimizer: Callable[[], object] = lambda: None) -> None:
        logits = ddp(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, -2).float(), tokens[:, 1:].flatten()).backward()
        before_the_optimizer()
        optimizers[ddp].step()
        optimizers[ddp].zero_grad()

    return {
        "step": lambda: step(plain),
        "+ track_origin, result()": lambda: step(watched, lambda: tracker.result().raise_if_nonfinite()),
        "+ verify_replicas, gradients": lambda: step(plain, lambda: verify_replicas(plain).raise_if_drifted()),
        "+ verify_replicas, parameters too": lambda: step(
            plain, lambda: verify_replicas(plain, what=("gradients", "parameters")).raise_if_drifted()
        ),
    }


if __name__ == "__main__":
    main()
