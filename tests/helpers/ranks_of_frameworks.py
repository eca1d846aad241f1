"""Helpers for tests on ranks: pool processes as ranks of a framework, and comparisons of results and ranks."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.frameworks import forget_accelerators
from torch import Tensor, nn

import gradstat


@contextlib.contextmanager
def accelerate_on_ranks() -> Iterator[None]:
    """Lets ``Accelerator(cpu=True)`` join the existing process group, without warnings of the frameworks."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    wanted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in wanted.items():
            patch.setenv(name, value)
        try:
            yield
        finally:
            forget_accelerators()


def lightning_on_ranks() -> Any:
    """A Lightning environment for existing processes, for ``Trainer(plugins=...)``."""
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
    """Checks that statistics over several ranks equal those of the whole tensor in one process."""
    for name in ("shape", "nan_count", "inf_count", "zero_count", "first_nonfinite"):
        assert getattr(ours, name) == getattr(theirs, name), (name, ours, theirs)
    for name in ("l2_norm", "min", "max", "mean"):
        close = pytest.approx(getattr(theirs, name), rel=rel, abs=abs, nan_ok=True)
        assert getattr(ours, name) == close, (name, ours, theirs)


def spoil(net: nn.Module, places: dict[str, list[int]], value: float) -> None:
    """Makes some elements of parameters' gradients, given by flat indices, nonfinite from now on."""
    for name, parameter in net.named_parameters():
        if name in places:

            def spoiled(gradient: Tensor, at: list[int] = places[name]) -> Tensor:
                return gradient.reshape(-1).index_fill(0, torch.tensor(at, dtype=torch.long), value).view_as(gradient)

            parameter.register_hook(spoiled)


def assert_alike(values: object) -> None:
    """Checks that ``values`` are the same on all ranks."""
    first = [str(values)]
    dist.broadcast_object_list(first)
    assert str(values) == first[0]
