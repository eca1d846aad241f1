"""Gradients over several ranks: every layout against one process with the same model and data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import gradstat


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(8, 3)  # three rows: some of four ranks hold none

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def model() -> Model:
    torch.manual_seed(7)
    return Model()


def batch(rank: int = 0) -> Tensor:
    return torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(rank))


# Layouts: a model spread over ranks, and how many different batches its ranks see ---------------------------


def fsdp(world: int) -> nn.Module:
    return _fsdp(model(), init_device_mesh("cpu", (world,)))


def _fsdp(spread: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in spread.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(spread, mesh=mesh, **options)
    return spread  # type: ignore[no-any-return]


def hsdp(world: int) -> nn.Module:
    return _fsdp(model(), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))


def _tensor_parallel(spread: Any, mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in spread.blocks:
        parallelize_module(block, mesh, plan)
    return spread  # type: ignore[no-any-return]


def tensor_parallel(world: int) -> nn.Module:
    """The rest of the model are plain tensors beside the distributed ones."""
    return _tensor_parallel(model(), init_device_mesh("cpu", (world,)))


def sequence_parallel(world: int) -> nn.Module:
    """The norms' gradients are partial sums."""
    spread, mesh = model(), init_device_mesh("cpu", (world,))
    split = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    plan = {
        "norm": SequenceParallel(sequence_dim=1, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    for block in spread.blocks:
        parallelize_module(block, mesh, {"norm": split})  # type: ignore[arg-type]
        parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
    return spread


def fsdp_and_tensor_parallel(world: int) -> nn.Module:
    """Parameters on two meshes, some of them sharded twice along the same dimension."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    return _fsdp(_tensor_parallel(model(), mesh["tensor"]), mesh["data"])


def ddp(world: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model())


def ddp_with_views(world: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True, static_graph=True)


LAYOUTS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int, int], int]]] = {
    "fsdp": (fsdp, lambda rank, world: rank),
    "hsdp": (hsdp, lambda rank, world: rank),
    "tensor parallel": (tensor_parallel, lambda rank, world: 0),
    "sequence parallel": (sequence_parallel, lambda rank, world: 0),
    "fsdp and tensor parallel": (fsdp_and_tensor_parallel, lambda rank, world: rank // (world // 2)),
    "ddp": (ddp, lambda rank, world: rank),
    "ddp, bucket views": (ddp_with_views, lambda rank, world: rank),
}


def spread_and_single(layout: str) -> tuple[nn.Module, nn.Module]:
    """A model over all ranks and the same in one piece, both with the gradients of the same data."""
    make, batch_of = LAYOUTS[layout]
    world, rank = dist.get_world_size(), dist.get_rank()
    spread, single = make(world), model()
    spread(batch(batch_of(rank, world))).square().mean().backward()
    different = sorted({batch_of(r, world) for r in range(world)})
    for number in different:
        (single(batch(number)).square().mean() / len(different)).backward()
    return spread, single


def named(spread: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("module."): parameter for name, parameter in spread.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_report(spread: gradstat.Report, single: gradstat.Report) -> None:
    assert [name.removeprefix("module.") for name in spread.names] == list(single.names)
    assert spread.total_norm == pytest.approx(single.total_norm, rel=1e-5)
    assert spread.numel == single.numel
    for ours, theirs in zip(spread, single, strict=True):
        assert ours.shape == theirs.shape
        for field in ("l2_norm", "min", "max", "sum"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=1e-5, abs=1e-7), (ours, field)
        for field in ("nan_count", "inf_count", "numel"):
            assert getattr(ours, field) == getattr(theirs, field)


def checked(layout: str) -> None:
    spread, single = spread_and_single(layout)
    if layout == "sequence parallel":
        partial = [
            p.grad for p in spread.parameters() if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial()
        ]
        assert partial, "this layout is to have partial gradients"
    same_report(gradstat.check(spread), gradstat.check(single))
    pending = gradstat.check_async(spread.parameters())
    assert pending.result().total_norm == pytest.approx(gradstat.check(single).total_norm, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 4])
def test_check_sees_the_whole(ranks: Ranks, layout: str, world: int) -> None:
    ranks.run(world, checked, layout)


def clipped(layout: str, share: float, order: float) -> float:
    spread, single = spread_and_single(layout)
    limit = share * gradstat.get_total_norm([p.grad for p in single.parameters()], order).item()  # type: ignore[misc]
    total = gradstat.get_total_norm([p.grad for p in spread.parameters()], order)  # type: ignore[misc]
    expected = nn.utils.clip_grad_norm_(single.parameters(), limit, order)
    norm = gradstat.clip_grad_norm_(spread.parameters(), limit, order)
    assert type(norm) is Tensor
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(whole(named(spread)[name].grad), parameter.grad, rtol=2e-5, atol=1e-7)  # type: ignore[arg-type]
    return norm.item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("share", "order"), [(0.5, 2.0), (2.0, 2.0), (0.5, math.inf)])
def test_clipping_is_that_of_the_whole(ranks: Ranks, layout: str, share: float, order: float) -> None:
    assert len(set(ranks.run(4, clipped, layout, share, order))) == 1


# Of four ranks, those with the same shard of the first weight, where not all of them have all of it.
HOLDS_THE_BAD_PART: dict[str, Callable[[int], bool]] = {
    "fsdp": lambda rank: rank == 1,
    "hsdp": lambda rank: rank % 2 == 1,
    "fsdp and tensor parallel": lambda rank: rank >= 2,
}


def stepped(layout: str, fused: bool, scaling: bool) -> None:
    make, batch_of = LAYOUTS[layout]
    world, rank = dist.get_world_size(), dist.get_rank()
    spread, single = make(world), model()
    ours = torch.optim.AdamW(spread.parameters(), lr=0.01, fused=fused)
    theirs = torch.optim.AdamW(single.parameters(), lr=0.01)
    scaler = gradstat.amp.GradScaler("cpu", init_scale=1024.0) if scaling else None
    different = sorted({batch_of(r, world) for r in range(world)})
    for step in range(4):
        ours.zero_grad()
        theirs.zero_grad()
        loss = spread(batch(batch_of(rank, world)) + step).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for number in different:
            (single(batch(number) + step).square().mean() / len(different)).backward()
        if step == 2 and HOLDS_THE_BAD_PART.get(layout, lambda rank: True)(rank):
            gradient = named(spread)["first.weight"].grad
            local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            local.view(-1)[2] = math.nan  # type: ignore[union-attr]
        result = gradstat.guarded_step(ours, 0.1, scaler=scaler)
        if scaler is not None:
            scaler.update()
            assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)
        assert bool(result.skipped) is (step == 2)
        report = result.report.result()
        assert report.ok is (step != 2)
        if step != 2:
            norm = nn.utils.clip_grad_norm_(single.parameters(), 0.1)
            assert result.total_norm.item() == pytest.approx(norm.item(), rel=1e-5)
            assert report.total_norm == pytest.approx(norm.item(), rel=1e-5)
            theirs.step()
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(whole(named(spread)[name].detach()), parameter.detach(), rtol=1e-4, atol=1e-5)


# torch's fused steps take no plain tensors beside distributed ones, as this tensor parallel model has.
@pytest.mark.parametrize(
    ("layout", "fused"),
    [
        *((layout, fused) for layout in ("fsdp", "hsdp", "fsdp and tensor parallel", "ddp") for fused in (True, False)),
        ("tensor parallel", False),
    ],
)
@pytest.mark.parametrize("scaling", [True, False])
def test_guarded_steps_are_taken_and_skipped_by_all_ranks_alike(
    ranks: Ranks, layout: str, fused: bool, scaling: bool
) -> None:
    ranks.run(4, stepped, layout, fused, scaling)
