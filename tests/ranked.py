"""What tests of Hugging Face's frameworks share: ranks of the pool as those of an Accelerator; running examples."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist


@contextlib.contextmanager
def accelerate_on_ranks() -> Iterator[None]:
    """Inside, ``Accelerator(cpu=True)`` joins the process group that there is."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    wanted = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ACCELERATE_USE_CPU": "true",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        forget_accelerators()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_example(name: str, *arguments: str) -> str:
    """What an example of ``examples/`` shows, standard error included."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(root / "examples" / name), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def forget_accelerators() -> None:
    """Accelerate keeps the state of its first accelerator for the process; the next one may be of another kind."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
