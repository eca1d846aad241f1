"""Clips and checks of many distributed gradients, by torch and gradstat: ``torchrun benchmarks/ranks.py``.

::

    torchrun --nproc-per-node 2 benchmarks/ranks.py --record    # gloo on the CPU, or NCCL with a GPU for each rank

Shards are small, so that the overhead of calls and collectives dominates. Collectives are counted. Norms have to agree.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import tables
import torch
import torch.distributed as dist
from rows import Row, microseconds, parser_of, record, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import gradstat
from gradstat.bench.steps import WrongAnswerError
from gradstat.bench.timing import interleaved

COUNT = 3000  # tensors


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Sets up the process group and yields this rank's device: a GPU with NCCL, or a share of CPU cores with gloo."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def measured(device: torch.device, rounds: int) -> list[Row]:
    """Clips and checks of distributed gradients, by torch and gradstat."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parameters = []
    for _ in range(COUNT):
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
    about = ("distributed gradients", f"{COUNT:,} tensors of 16x8, {dist.get_world_size()} ranks")
    # All ranks draw the same order of calls, so their collectives match; a barrier starts each call together.
    samples = interleaved(calls, rounds, device=device, before=lambda _: dist.barrier())
    made = [row(*about, name, "wall time", "us", microseconds(s), device, tensors=COUNT) for name, s in samples.items()]
    for name in ("gradstat clip", "gradstat.check"):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
            calls[name]()
        made.append(row(*about, name, "collectives", "", float(counted.call_count), device, tensors=COUNT))
    return made


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=25, help="default %(default)s")
    options = parser.parse_args()
    with process_group() as device:
        made = measured(device, options.rounds)
        if dist.get_rank() == 0:
            print(tables.table_of_rows(made))
            # Its threads are those of all ranks.
            record([replace(row, threads=row.threads * dist.get_world_size()) for row in made], "full", options)


if __name__ == "__main__":
    main()
