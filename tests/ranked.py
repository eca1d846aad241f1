"""What tests of frameworks share: what they train; ranks of the pool as those of a framework; running examples."""

import contextlib
import io
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradstat


class Net(nn.Module):
    """Gives its own loss, and breaks in chosen forward passes of the training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.bad_at: set[int] = set()
        self.passes = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += self.training
        hidden = torch.tanh(self.first(x))
        if self.passes - 1 in self.bad_at:
            hidden = torch.log(-hidden.abs())
        return {"loss": (self.last(hidden) - labels).square().mean()}


def samples(count: int) -> TensorDataset:
    """What `Net` is trained on: inputs and their sums."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


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


def lightning_on_ranks() -> Any:
    """Lightning's environment of processes that are there already, for ``Trainer(plugins=...)`` and Fabric's."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Here(LightningEnvironment):
        creates_processes_externally = True

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        local_rank = global_rank

    return Here()


def assert_same_stats(ours: gradstat.TensorStats, theirs: gradstat.TensorStats, rel: float, abs: float) -> None:
    """That those over several ranks are those of the whole tensor in one process."""
    for name in ("shape", "nan_count", "inf_count", "zero_count", "first_nonfinite"):
        assert getattr(ours, name) == getattr(theirs, name), (name, ours, theirs)
    for name in ("l2_norm", "min", "max", "mean"):
        close = pytest.approx(getattr(theirs, name), rel=rel, abs=abs, nan_ok=True)
        assert getattr(ours, name) == close, (name, ours, theirs)


def spoil(net: nn.Module, places: dict[str, list[int]], value: float) -> None:
    """From now on some elements of parameters' gradients, by their flat indices, are not finite."""
    for name, parameter in net.named_parameters():
        if name in places:

            def spoiled(gradient: Tensor, at: list[int] = places[name]) -> Tensor:
                return gradient.reshape(-1).index_fill(0, torch.tensor(at, dtype=torch.long), value).view_as(gradient)

            parameter.register_hook(spoiled)


def assert_alike(values: object) -> None:
    """That all ranks have them."""
    first = [str(values)]
    dist.broadcast_object_list(first)
    assert str(values) == first[0]


def run_example(name: str, *arguments: str) -> str:
    """What an example of ``examples/`` shows and warns of. It runs here, where its framework is imported already."""
    path = str(Path(__file__).resolve().parent.parent / "examples" / name)
    shown = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
    return "\n".join([shown.getvalue(), *(str(warning.message) for warning in told)])


def forget_accelerators() -> None:
    """Accelerate keeps the state of its first accelerator for the process; the next one may be of another kind."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
