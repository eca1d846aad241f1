"""Clips and checks of many distributed gradients, by torch and gradstat: ``torchrun benchmarks/dtensor_clip.py``.

::

    torchrun --nproc-per-node 2 benchmarks/dtensor_clip.py --record    # gloo on the CPU, or NCCL with GPUs

Shards are small, so that the overhead of calls and collectives dominates. Collectives are counted. Norms have to agree.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from launched import process_group, show
from rows import Row, add_arguments, microseconds, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import gradstat
from gradstat.bench.steps import WrongAnswerError
from gradstat.bench.timing import interleaved

GROUP = "distributed gradients"
COUNTS = (300, 3000)


def main() -> None:
    parser = argparse.ArgumentParser(description="Clips and checks of distributed gradients, on rank 0.")
    parser.add_argument("--rounds", type=int, default=25)
    add_arguments(parser)
    options = parser.parse_args()
    with process_group() as device:
        show([made for count in COUNTS for made in _measured(count, device, options.rounds)], options)


def _measured(count: int, device: torch.device, rounds: int) -> list[Row]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parameters = []
    for _ in range(count):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(16, 8, device=device), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.randn(16, 8, device=device), mesh, [Shard(0)])
        parameters.append(parameter)
    one = torch.zeros(9, dtype=torch.float64, device=device)
    calls: dict[str, Callable[[], object]] = {
        "gradstat clip": lambda: gradstat.clip_grad_norm_(parameters, 1e9),
        "torch clip": lambda: nn.utils.clip_grad_norm_(parameters, 1e9),
        "gradstat.check": lambda: gradstat.check(parameters).ok,
        "limit: one all-reduce of 72 bytes": lambda: dist.all_reduce(one),
    }
    ours, theirs = calls["gradstat clip"](), calls["torch clip"]()
    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, DTensor)
    if not math.isclose(float(ours), float(theirs.full_tensor()), rel_tol=1e-4):
        raise WrongAnswerError(f"gradstat returned norm {ours}, torch {theirs}")
    case = f"{count:,} tensors of 16x8, {dist.get_world_size()} ranks"
    # All ranks draw the same order of calls, so their collectives match; a barrier starts each call together.
    samples = interleaved(calls, rounds, device=device, before=lambda _: dist.barrier())
    made = []
    for name, sample in samples.items():
        made.append(row(GROUP, case, name, "wall time", "us", microseconds(sample), device, tensors=count))
    for name in ("gradstat clip", "gradstat.check"):
        made.append(row(GROUP, case, name, "collectives", "", float(_collectives(calls[name])), device, tensors=count))
    return made


def _collectives(call: Callable[[], object]) -> int:
    original, seen = dist.all_reduce, []

    def counted(*arguments: object, **options: object) -> object:
        seen.append(1)
        return original(*arguments, **options)  # type: ignore[arg-type]

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        call()
    finally:
        dist.all_reduce = original
    return len(seen)


if __name__ == "__main__":
    main()
