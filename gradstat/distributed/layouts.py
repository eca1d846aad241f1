"""Layouts: a small model spread over the ranks of a process group in the ways that trainers know, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gradstat._core.tensors import ExtraGroups

EXPERTS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Experts(nn.Module):
    """All of them see every token, so that what each has to learn does not depend on a router."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.einsum("...i,eij->...j", torch.tanh(x), self.weight)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.experts = Experts()
        self.last = nn.Linear(8, 3)  # three rows: some of four ranks hold none

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(self.experts(x))
        return out


def model() -> Model:
    """The same on every rank."""
    torch.manual_seed(7)
    return Model()


def batch(number: int = 0) -> Tensor:
    """Inputs, ``[4, 6, 5]``, of that number."""
    return torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(number))


def backward(single: nn.Module, numbers: Collection[int], shift: float = 0.0) -> None:
    """Gives a model in one piece the gradients that ranks with these batches have on average."""
    dtype = next(single.parameters()).dtype
    for number in numbers:
        (single(batch(number).to(dtype) + shift).square().mean() / len(numbers)).backward()


@dataclass(eq=False)
class Layout:
    """This rank's part of a small model with gradients: what a clip function may ask for while `verify_clip` tries it.

    Attributes:
        name: Of the layout.
        model: The module, wrapped by DDP or FSDP2 or parallelised; one whose parameters are this rank's shards where
            trainers shard by themselves (ZeRO, experts); this rank's stage of a pipeline. Its gradients are there.
        mesh: All ranks. Its dimensions are called ``dp_replicate``, ``dp_shard``, ``tp``, ``pp``, ``efsdp`` and ``ep``.
        extra_groups: The groups over which plain tensors are spread, as for `gradstat.check`; None if no tensor is.
        pp_mesh: The mesh dimension of a pipeline's stages; None if there are none.
        ep_enabled: Whether experts are spread over ranks.
    """

    name: str
    model: nn.Module
    mesh: DeviceMesh
    extra_groups: ExtraGroups | None = None

    @property
    def pp_mesh(self) -> DeviceMesh | None:
        return self.mesh["pp"] if "pp" in (self.mesh.mesh_dim_names or ()) else None

    @property
    def ep_enabled(self) -> bool:
        return "ep" in (self.mesh.mesh_dim_names or ())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of the model in one piece."""
        return {name.removeprefix("module."): parameter for name, parameter in self.model.named_parameters()}

    def begins_here(self, parameter: nn.Parameter) -> bool:
        """Whether the shard of a parameter that this rank has is the first one."""
        if isinstance(parameter, DTensor):
            coordinate = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
            return all(place == 0 or placement.is_replicate() for place, placement in coordinate)
        return all(dist.get_rank(group) == 0 for group in self._groups())

    def _groups(self) -> list[dist.ProcessGroup]:
        dimension = next((name for name in ("pp", "ep") if name in (self.mesh.mesh_dim_names or ())), "dp_shard")
        return [] if self.extra_groups is None else [self.mesh.get_group(dimension)]


def mesh_of(world: int, *names: str) -> DeviceMesh:
    """All ranks: in a row, or two rows of a half."""
    return init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)


def fsdp(spread: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """A `Model` with FSDP2 around every block and everything."""
    for block in spread.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(spread, mesh=mesh, **options)
    return spread  # type: ignore[no-any-return]


def _ddp(world: int) -> Layout:
    # Gradients that are views into one buffer are the harder case.
    spread = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True, static_graph=True)
    return Layout("ddp", spread, mesh_of(world, "dp_replicate"))


def _fsdp2(world: int) -> Layout:
    mesh = mesh_of(world, "dp_shard")
    return Layout("fsdp2", fsdp(model(), mesh), mesh)


def _hsdp(world: int) -> Layout:
    mesh = mesh_of(world, "dp_replicate", "dp_shard")
    return Layout("hsdp", fsdp(model(), mesh), mesh)


def _in_parts(spread: Any, mesh: DeviceMesh) -> Any:
    """The rest of the model are plain tensors beside the distributed ones."""
    for block in spread.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return spread


def _tp(world: int) -> Layout:
    mesh = mesh_of(world, "tp")
    return Layout("tp", _in_parts(model(), mesh), mesh)


def _sp(world: int) -> Layout:
    """The norms' gradients are pending sums."""
    spread, mesh = model(), mesh_of(world, "tp")
    split = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    plan = {
        "norm": SequenceParallel(sequence_dim=1, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    for block in spread.blocks:
        parallelize_module(block, mesh, {"norm": split})
        parallelize_module(block, mesh, plan)
    return Layout("sp", spread, mesh)


def _fsdp2_and_tp(world: int) -> Layout:
    """Parameters on two meshes, some of them sharded twice along the same dimension."""
    mesh = mesh_of(world, "dp_shard", "tp")
    return Layout("fsdp2+tp", fsdp(_in_parts(model(), mesh["tp"]), mesh["dp_shard"]), mesh)


# What follows is not sharded by torch: gradients of the model in one piece are handed out as trainers leave them.


def _handed_out(world: int, change: Callable[[str, nn.Parameter, int], nn.Parameter | None]) -> nn.Module:
    """A model of which this rank has what ``change`` makes of each parameter, given its name and number."""
    spread = model()
    backward(spread, range(world))
    for number, (name, parameter) in enumerate(list(spread.named_parameters())):
        module, _, own = name.rpartition(".")
        delattr(spread.get_submodule(module), own)
        changed = change(name, parameter, number)
        if changed is not None:
            spread.get_submodule(module).register_parameter(own, changed)
    return spread


def _piece(parameter: nn.Parameter, cut: Callable[[Tensor], Tensor]) -> nn.Parameter:
    piece = nn.Parameter(cut(parameter.detach()))
    assert parameter.grad is not None
    piece.grad = cut(parameter.grad)
    return piece


def _sharded(parameter: nn.Parameter, mesh: DeviceMesh, *dimensions: int) -> nn.Parameter:
    placements = list(map(Shard, dimensions))
    return _piece(parameter, lambda whole: distribute_tensor(whole, mesh, placements, src_data_rank=None))


def _of_first_stage(name: str) -> bool:
    return name.startswith(("first", "blocks.0"))


def _pp(world: int) -> Layout:
    mesh = mesh_of(world, "pp", "dp_replicate")
    first = mesh["pp"].get_local_rank() == 0
    stage = _handed_out(world, lambda name, parameter, _: parameter if _of_first_stage(name) is first else None)
    return Layout("pp", stage, mesh, mesh["pp"])


def _pp_and_fsdp2(world: int) -> Layout:
    mesh = mesh_of(world, "pp", "dp_shard")
    first = mesh["pp"].get_local_rank() == 0
    stage = _handed_out(
        world,
        lambda name, parameter, _: _sharded(parameter, mesh["dp_shard"], 0) if _of_first_stage(name) is first else None,
    )
    return Layout("pp+fsdp2", stage, mesh, mesh["pp"])


def _ep(world: int) -> Layout:
    """Each rank has some experts, as plain tensors, and everything else."""
    mesh = mesh_of(world, "dp_replicate", "ep")
    ep = mesh["ep"]
    mine = slice(ep.get_local_rank() * EXPERTS // ep.size(), (ep.get_local_rank() + 1) * EXPERTS // ep.size())
    spread: Any = _handed_out(
        world,
        lambda name, parameter, _: (
            _piece(parameter, lambda whole: whole[mine].clone()) if "experts" in name else parameter
        ),
    )
    return Layout("ep", spread, mesh, [(ep.get_group(), [spread.experts.weight])])


def _ep_and_fsdp2(world: int) -> Layout:
    """Everything is a DTensor: experts on a mesh of their own, which is two-dimensional."""
    mesh, dense = mesh_of(world, "efsdp", "ep"), mesh_of(world, "dp_shard")
    spread = _handed_out(
        world,
        lambda name, parameter, _: (
            _sharded(parameter, mesh, 1, 0) if "experts" in name else _sharded(parameter, dense, 0)
        ),
    )
    return Layout("ep+fsdp2", spread, mesh)


def _zero_1(world: int) -> Layout:
    """The optimizer of each rank has some of the parameters, whole."""
    mesh = mesh_of(world, "dp_shard")
    own = _handed_out(world, lambda _, parameter, number: parameter if number % world == dist.get_rank() else None)
    return Layout("zero-1", own, mesh, mesh)


def _zero_2(world: int) -> Layout:
    """Each rank has all parameters, but gradients only of some."""

    def own(name: str, parameter: nn.Parameter, number: int) -> nn.Parameter:
        if number % world != dist.get_rank():
            parameter.grad = None
        return parameter

    mesh = mesh_of(world, "dp_shard")
    return Layout("zero-2", _handed_out(world, own), mesh, mesh)


def _zero_3(world: int) -> Layout:
    """Each rank has a slice of each parameter, flat; that of a small one may be empty."""

    def mine(whole: Tensor) -> Tensor:
        slices = whole.flatten().split(-(-whole.numel() // world))
        rank = dist.get_rank()
        return slices[rank].clone() if rank < len(slices) else whole.new_empty(0)

    mesh = mesh_of(world, "dp_shard")
    return Layout("zero-3", _handed_out(world, lambda _, parameter, __: _piece(parameter, mine)), mesh, mesh)


def _of_all(rank: int, world: int) -> int:
    return 0


def _of_its_own(rank: int, world: int) -> int:
    return rank


LAYOUTS: dict[str, tuple[Callable[[int], Layout], Callable[[int, int], int] | None]] = {
    "ddp": (_ddp, _of_its_own),
    "fsdp2": (_fsdp2, _of_its_own),
    "hsdp": (_hsdp, _of_its_own),
    "tp": (_tp, _of_all),
    "sp": (_sp, _of_all),
    "fsdp2+tp": (_fsdp2_and_tp, lambda rank, world: rank // (world // 2)),
    "pp": (_pp, None),
    "pp+fsdp2": (_pp_and_fsdp2, None),
    "ep": (_ep, None),
    "ep+fsdp2": (_ep_and_fsdp2, None),
    "zero-1": (_zero_1, None),
    "zero-2": (_zero_2, None),
    "zero-3": (_zero_3, None),
}
"""How to make each, for a number of ranks, and the number of the batch that a rank sees; None: has its gradients."""


def laid_out(name: str) -> tuple[Layout, Model]:
    """A layout over all ranks, and the model in one piece, in float64, both with the gradients of the same data."""
    make, batch_of = LAYOUTS[name]
    world = dist.get_world_size()
    layout, single = make(world), model().double()
    if batch_of is not None:
        layout.model(batch(batch_of(dist.get_rank(), world))).square().mean().backward()
    backward(single, {(batch_of or _of_its_own)(rank, world) for rank in range(world)})
    return layout, single
