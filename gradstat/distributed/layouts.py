"""Layouts: a small model spread over the ranks of a process group in the ways that trainers know, with gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

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


class Experts(nn.Module):
    """All of them see every token, so that what each has to learn does not depend on a router."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("...i,eij->...j", torch.tanh(x), self.weight)


def _named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _block() -> nn.Sequential:
    return _named(norm=nn.LayerNorm(8), up=nn.Linear(8, 12), tanh=nn.Tanh(), down=nn.Linear(12, 8))


def model() -> Any:
    """The same on every rank. The last layer has three rows: some of four ranks hold none."""
    torch.manual_seed(7)
    blocks = nn.Sequential(_block(), _block())
    return _named(first=nn.Linear(5, 8), blocks=blocks, experts=Experts(), last=nn.Linear(8, 3))


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

    @property
    def _spread_over(self) -> DeviceMesh | None:
        dimension = LAYOUTS[self.name].spread_over
        return self.mesh[dimension] if dimension else None

    @property
    def extra_groups(self) -> ExtraGroups | None:
        over = self._spread_over
        if over is None or not self.ep_enabled:
            return over
        return [(over.get_group(), [p for name, p in self.named_parameters().items() if "experts" in name])]

    @property
    def pp_mesh(self) -> DeviceMesh | None:
        return self.mesh["pp"] if "pp" in LAYOUTS[self.name].mesh else None

    @property
    def ep_enabled(self) -> bool:
        return "ep" in LAYOUTS[self.name].mesh

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of the model in one piece."""
        return {name.removeprefix("module."): parameter for name, parameter in self.model.named_parameters()}

    def begins_here(self, parameter: nn.Parameter) -> bool:
        """Whether the shard of a parameter that this rank has is the first one."""
        if isinstance(parameter, DTensor):
            coordinate = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
            return all(place == 0 or placement.is_replicate() for place, placement in coordinate)
        return self._spread_over is None or self._spread_over.get_local_rank() == 0


def mesh_of(world: int, *names: str) -> DeviceMesh:
    """All ranks: in a row, or two rows of a half."""
    return init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)


# Spread by torch ----------------------------------------------------------------------------------------------


def _ddp(mesh: DeviceMesh) -> nn.Module:
    # Gradients that are views into one buffer are the harder case.
    return nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True, static_graph=True)


def fsdp(spread: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The model with FSDP2 around every block and everything."""
    for block in spread.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(spread, mesh=mesh, **options)
    return spread  # type: ignore[no-any-return]


def _tensor_parallel(mesh: DeviceMesh) -> Any:
    """The rest of the model are plain tensors beside the distributed ones."""
    spread = model()
    for block in spread.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return spread


def _sequence_parallel(mesh: DeviceMesh) -> Any:
    """The norms' gradients are pending sums."""
    spread = model()
    split = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    plan = {
        "norm": SequenceParallel(sequence_dim=1, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    for block in spread.blocks:
        parallelize_module(block, mesh, {"norm": split})
        parallelize_module(block, mesh, plan)
    return spread


# Handed out, as trainers do: pieces of a model in one piece, and of its gradients -----------------------------

_Cut: TypeAlias = Callable[[Tensor], Tensor]


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _sharded(mesh: DeviceMesh, *dimensions: int) -> _Cut:
    placements = list(map(Shard, dimensions))
    return lambda whole: distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _slice(mesh: DeviceMesh, end: int = 0) -> _Cut:
    """Plain tensors of this rank's part, that of a small tensor maybe empty; ``end=-1`` of flat ones."""
    return lambda whole: whole.flatten(0, end).tensor_split(mesh.size())[mesh.get_local_rank()].clone()


def _handed_out(cut_of: Callable[[str, int], _Cut | None], gradients_only: bool = False) -> nn.Module:
    """A model of which this rank has what is cut of each parameter, by its name and number; None: not here."""
    spread: nn.Module = model()
    backward(spread, range(dist.get_world_size()))
    for number, (name, parameter) in enumerate(list(spread.named_parameters())):
        path, _, own = name.rpartition(".")
        cut, gradient = cut_of(name, number), parameter.grad
        if cut is not None and gradient is not None:
            piece = nn.Parameter(cut(parameter.detach()))
            piece.grad = cut(gradient)
            setattr(spread.get_submodule(path), own, piece)
        elif gradients_only:
            parameter.grad = None
        else:
            delattr(spread.get_submodule(path), own)
    return spread


def _stage(mesh: DeviceMesh, cut: _Cut) -> nn.Module:
    first = mesh["pp"].get_local_rank() == 0
    return _handed_out(lambda name, _: cut if name.startswith(("first", "blocks.0")) is first else None)


def _experts(of_experts: _Cut, of_others: _Cut) -> nn.Module:
    return _handed_out(lambda name, _: of_experts if "experts" in name else of_others)


def _owned(mesh: DeviceMesh, gradients_only: bool) -> nn.Module:
    mine = mesh.get_local_rank()
    return _handed_out(lambda _, number: _whole if number % mesh.size() == mine else None, gradients_only)


class Recipe(NamedTuple):
    """A mesh of all ranks, what to make on it, and the dimension over which plain tensors are spread, if any is."""

    mesh: tuple[str, ...]
    make: Callable[[DeviceMesh], nn.Module]
    spread_over: str = ""
    has_gradients: bool = False


LAYOUTS = {
    "ddp": Recipe(("dp_replicate",), _ddp),
    "fsdp2": Recipe(("dp_shard",), lambda mesh: fsdp(model(), mesh)),
    "hsdp": Recipe(("dp_replicate", "dp_shard"), lambda mesh: fsdp(model(), mesh)),
    "tp": Recipe(("tp",), _tensor_parallel),
    "sp": Recipe(("tp",), _sequence_parallel),
    # Parameters on two meshes, some of them sharded twice along the same dimension.
    "fsdp2+tp": Recipe(("dp_shard", "tp"), lambda mesh: fsdp(_tensor_parallel(mesh["tp"]), mesh["dp_shard"])),
    "pp": Recipe(("pp", "dp_replicate"), lambda mesh: _stage(mesh, _whole), "pp", True),
    "pp+fsdp2": Recipe(("pp", "dp_shard"), lambda mesh: _stage(mesh, _sharded(mesh["dp_shard"], 0)), "pp", True),
    # Each rank has some experts, as plain tensors, and everything else.
    "ep": Recipe(("dp_replicate", "ep"), lambda mesh: _experts(_slice(mesh["ep"]), _whole), "ep", True),
    # Experts are on a mesh of their own, which is two-dimensional.
    "ep+fsdp2": Recipe(
        ("efsdp", "ep"),
        lambda mesh: _experts(_sharded(mesh, 1, 0), _sharded(mesh_of(mesh.size(), "dp_shard"), 0)),
        has_gradients=True,
    ),
    # Each rank has some parameters, whole; all of them, but gradients of some; a slice of each.
    "zero-1": Recipe(("dp_shard",), lambda mesh: _owned(mesh, gradients_only=False), "dp_shard", True),
    "zero-2": Recipe(("dp_shard",), lambda mesh: _owned(mesh, gradients_only=True), "dp_shard", True),
    "zero-3": Recipe(("dp_shard",), lambda mesh: _handed_out(lambda *_: _slice(mesh, -1)), "dp_shard", True),
}


def made(name: str) -> tuple[Layout, list[int]]:
    """A layout over all ranks, and the number of the batch that each rank sees."""
    recipe, world = LAYOUTS[name], dist.get_world_size()
    mesh = mesh_of(world, *recipe.mesh)
    together = mesh["tp"].size() if "tp" in recipe.mesh else 1
    return Layout(name, recipe.make(mesh), mesh), [rank // together for rank in range(world)]


def laid_out(name: str) -> tuple[Layout, nn.Module]:
    """A layout over all ranks, and the model in one piece, in float64, both with the gradients of the same data."""
    (layout, batches), single = made(name), model().double()
    if not LAYOUTS[name].has_gradients:
        layout.model(batch(batches[dist.get_rank()])).square().mean().backward()
    backward(single, set(batches))
    return layout, single
