"""Layouts: a small model, with gradients, distributed over a process group in the ways that trainers use."""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from helpers.ranks_of_frameworks import assert_alike
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
    """Experts without a router: each processes every token, so that its gradient does not depend on routing."""

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
    """A model, the same on every rank. The last layer has three rows, so with four ranks some shards are empty."""
    torch.manual_seed(7)
    blocks = nn.Sequential(_block(), _block())
    return _named(first=nn.Linear(5, 8), blocks=blocks, experts=Experts(), last=nn.Linear(8, 3))


def batch(number: int = 0) -> Tensor:
    """The inputs of batch ``number``, ``[4, 6, 5]``."""
    return torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(number))


def backward(single: nn.Module, numbers: Collection[int], shift: float = 0.0) -> None:
    """Gives an undistributed model the mean gradients of ranks that process the batches ``numbers``."""
    dtype = next(single.parameters()).dtype
    for number in numbers:
        (single(batch(number).to(dtype) + shift).square().mean() / len(numbers)).backward()


@dataclass(eq=False)
class Layout:
    """This rank's part of a small model with gradients.

    ``model`` is wrapped by DDP or FSDP2, or parallelised; where trainers shard by themselves (ZeRO, experts), its
    parameters are this rank's shards; or it is this rank's stage of a pipeline. ``mesh`` has all ranks.
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
        """The groups that plain tensors are spread over, as for `gradstat.check`; None if no tensor is."""
        over = self._spread_over
        if over is None or not self.ep_enabled:
            return over
        return [(over.get_group(), [p for name, p in self.named_parameters().items() if "experts" in name])]

    @property
    def pp_mesh(self) -> DeviceMesh | None:
        """The mesh dimension of a pipeline's stages; None if there are none."""
        return self.mesh["pp"] if "pp" in LAYOUTS[self.name].mesh else None

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are spread over ranks."""
        return "ep" in LAYOUTS[self.name].mesh

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of the undistributed model."""
        return {name.removeprefix("module."): parameter for name, parameter in self.model.named_parameters()}

    def has_first_shard(self, parameter: nn.Parameter) -> bool:
        """Whether this rank holds the first shard of a parameter."""
        if isinstance(parameter, DTensor):
            coordinate = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
            return all(place == 0 or placement.is_replicate() for place, placement in coordinate)
        return self._spread_over is None or self._spread_over.get_local_rank() == 0


def mesh_of(world: int, *names: str) -> DeviceMesh:
    """A mesh of all ranks: one-dimensional, or with two rows."""
    return init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)


def _ddp(mesh: DeviceMesh) -> nn.Module:
    # Gradients that are views of one buffer are the harder case.
    return nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True, static_graph=True)


def fsdp(spread: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The model with FSDP2 around each block and around the whole."""
    for block in spread.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(spread, mesh=mesh, **options)
    return spread  # type: ignore[no-any-return]


def _tensor_parallel(mesh: DeviceMesh) -> Any:
    """Blocks with distributed tensors; the rest of the model has plain tensors."""
    spread = model()
    for block in spread.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return spread


def _sequence_parallel(mesh: DeviceMesh) -> Any:
    """As `_tensor_parallel`; the gradients of the norm layers are pending sums."""
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


_Cut: TypeAlias = Callable[[Tensor], Tensor]


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _sharded(mesh: DeviceMesh, *dimensions: int) -> _Cut:
    placements = list(map(Shard, dimensions))
    return lambda whole: distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _slice(mesh: DeviceMesh, end: int = 0) -> _Cut:
    """Cuts out this rank's part, possibly empty, as a plain tensor, by rows; with ``end=-1``, of the flat tensor."""
    return lambda whole: whole.flatten(0, end).tensor_split(mesh.size())[mesh.get_local_rank()].clone()


def _with_pieces(cut_of: Callable[[str, int], _Cut | None], gradients_only: bool = False) -> nn.Module:
    """A model with this rank's piece of each parameter. ``cut_of`` gets name and number; None drops the parameter."""
    spread: nn.Module = model()
    backward(spread, range(dist.get_world_size()))
    for number, (name, parameter) in enumerate(list(spread.named_parameters())):
        path, _, attribute = name.rpartition(".")
        cut, gradient = cut_of(name, number), parameter.grad
        if cut is not None and gradient is not None:
            piece = nn.Parameter(cut(parameter.detach()))
            piece.grad = cut(gradient)
            setattr(spread.get_submodule(path), attribute, piece)
        elif gradients_only:
            parameter.grad = None
        else:
            delattr(spread.get_submodule(path), attribute)
    return spread


def _stage(mesh: DeviceMesh, cut: _Cut) -> nn.Module:
    first = mesh["pp"].get_local_rank() == 0
    return _with_pieces(lambda name, _: cut if name.startswith(("first", "blocks.0")) is first else None)


def _experts(of_experts: _Cut, of_others: _Cut) -> nn.Module:
    return _with_pieces(lambda name, _: of_experts if "experts" in name else of_others)


def _owned(mesh: DeviceMesh, gradients_only: bool) -> nn.Module:
    mine = mesh.get_local_rank()
    return _with_pieces(lambda _, number: _whole if number % mesh.size() == mine else None, gradients_only)


class Recipe(NamedTuple):
    """A mesh of all ranks, a function that makes the model on it, and the dimension plain tensors are spread over."""

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
    # Parameters on two meshes, some of which are sharded twice along the same dimension.
    "fsdp2+tp": Recipe(("dp_shard", "tp"), lambda mesh: fsdp(_tensor_parallel(mesh["tp"]), mesh["dp_shard"])),
    "pp": Recipe(("pp", "dp_replicate"), lambda mesh: _stage(mesh, _whole), "pp", True),
    "pp+fsdp2": Recipe(("pp", "dp_shard"), lambda mesh: _stage(mesh, _sharded(mesh["dp_shard"], 0)), "pp", True),
    # Each rank has some of the experts, as plain tensors, and everything else.
    "ep": Recipe(("dp_replicate", "ep"), lambda mesh: _experts(_slice(mesh["ep"]), _whole), "ep", True),
    # Experts are on a two-dimensional mesh of their own.
    "ep+fsdp2": Recipe(
        ("efsdp", "ep"),
        lambda mesh: _experts(_sharded(mesh, 1, 0), _sharded(mesh_of(mesh.size(), "dp_shard"), 0)),
        has_gradients=True,
    ),
    # Each rank has: some whole parameters; all parameters, but only some gradients; a slice of each parameter.
    "zero-1": Recipe(("dp_shard",), lambda mesh: _owned(mesh, gradients_only=False), "dp_shard", True),
    "zero-2": Recipe(("dp_shard",), lambda mesh: _owned(mesh, gradients_only=True), "dp_shard", True),
    "zero-3": Recipe(("dp_shard",), lambda mesh: _with_pieces(lambda *_: _slice(mesh, -1)), "dp_shard", True),
}


def make_layout(name: str) -> tuple[Layout, list[int]]:
    """A layout over all ranks, and the number of the batch that each rank processes."""
    recipe, world = LAYOUTS[name], dist.get_world_size()
    mesh = mesh_of(world, *recipe.mesh)
    together = mesh["tp"].size() if "tp" in recipe.mesh else 1
    return Layout(name, recipe.make(mesh), mesh), [rank // together for rank in range(world)]


def make_layout_and_reference(name: str) -> tuple[Layout, nn.Module]:
    """A layout over all ranks, and the undistributed model in float64, both with the gradients of the same data."""
    (layout, batches), single = make_layout(name), model().double()
    if not LAYOUTS[name].has_gradients:
        layout.model(batch(batches[dist.get_rank()])).square().mean().backward()
    backward(single, set(batches))
    return layout, single


# Gets a layout, its parameters, the limit and the order of the norm; returns the norm.
Clip: TypeAlias = Callable[[Layout, list[nn.Parameter], float, float], Any]


def assert_clips_as_one_process(name: str, clip: Clip, orders: Iterable[float] = (2.0, math.inf)) -> None:
    """Compares the norm of a clip, and what it does to gradients, with those of one process in float64, on all ranks.

    The cases: a limit above and below the norm, in each order; one NaN element; and one missing gradient, of a DTensor
    on all ranks, of a plain tensor on one.
    """
    layout, single = make_layout_and_reference(name)
    parameters, whole = layout.named_parameters(), dict(single.named_parameters())
    complete = {key: (p.grad, _local(p.grad).clone()) for key, p in parameters.items() if p.grad is not None}

    def clipped(max_norm: float, order: float) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """The norm, and this rank's gradients before and after the clip, which is then undone."""
        before = _values(parameters)
        norm = float(clip(layout, list(layout.model.parameters()), max_norm, order))
        after = _values(parameters)
        for key, (gradient, values) in complete.items():
            _local(gradient).copy_(values)
            parameters[key].grad = gradient
        assert before.keys() == after.keys()
        return norm, before, after

    def compare(expected: float, max_norm: float, order: float) -> None:
        norm, before, after = clipped(max_norm, order)
        assert math.isclose(norm, expected, rel_tol=1e-4), (name, order, norm, expected)
        multiplier = min(1.0, max_norm / (expected + 1e-6))
        for key, values in before.items():
            torch.testing.assert_close(after[key], multiplier * values, rtol=1e-4, atol=1e-7)

    for order in orders:
        norm = _norm(_values(whole), order)
        compare(norm, 2.0 * norm, order)
        compare(norm, 0.5 * norm, order)

    norm, victim = _norm(_values(whole), 2.0), "experts.weight" if layout.ep_enabled else "blocks.0.up.weight"
    gradient = complete[victim][0] if victim in complete else None
    is_first = gradient is not None and layout.has_first_shard(parameters[victim])
    if is_first:
        _local(gradient).view(-1)[0] = math.nan
    found, before, after = clipped(0.5 * norm, 2.0)
    assert not math.isfinite(found)
    assert_alike(all(torch.equal(before[key].nan_to_num(), after[key].nan_to_num()) for key in before))  # none or all

    lost = torch.zeros((), dtype=torch.float64)
    # On a mesh, all ranks must lack the gradient or none, or torch's own collectives would not match.
    if is_first or isinstance(gradient, DTensor):
        lost += _norm(_values({victim: whole[victim] if isinstance(gradient, DTensor) else parameters[victim]}), 2.0)
        parameters[victim].grad = None
    dist.all_reduce(lost, dist.ReduceOp.MAX)
    norm = math.sqrt(norm**2 - lost.item() ** 2)
    compare(norm, 0.5 * norm, 2.0)


def _local(gradient: Any) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _values(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flat copies of this rank's part of each gradient; of the full tensor if a sum is pending."""
    values = {}
    for key, parameter in parameters.items():
        gradient: Any = parameter.grad
        if gradient is not None:
            is_pending = isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)
            part = gradient.full_tensor() if is_pending else _local(gradient)
            values[key] = part.flatten().to(torch.float64, copy=True)
    return values


def _norm(values: Mapping[str, Tensor], order: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat(list(values.values())), order))
