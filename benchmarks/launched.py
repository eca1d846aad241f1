"""Helpers for benchmarks under ``torchrun``: a device for each rank, and rows of what rank 0 timed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import tables
import torch
import torch.distributed as dist
from rows import Row, append


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


def show(made: Sequence[Row], options: argparse.Namespace) -> None:
    """On rank 0 prints a table and, with ``--record``, appends rows, whose threads are those of all ranks."""
    if dist.get_rank() != 0:
        return
    print(tables.table_of_rows(made))
    if options.record:
        everywhere = [replace(row, threads=row.threads * dist.get_world_size()) for row in made]
        print(f"recorded in {append(everywhere, 'full', options.results)}")
