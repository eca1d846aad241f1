"""What there is to compare between replicas: the tensors of a target, and which ranks have to have the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from gradstat._core.collectives import in_words
from gradstat._core.parameters import source_of

MISSING = "missing"
"""The layout of a gradient that is None."""

_Named = Iterable[tuple[str, Tensor | None]]


class Replicated(NamedTuple):
    """One tensor of this rank, or its absence.

    Attributes:
        kind: ``"gradient"``, ``"parameter"``, ``"buffer"`` or ``"state"``.
        name: As the target names it.
        bits: What lies on this rank; None for a gradient that is missing, or if the tensor's mesh is elsewhere.
        layout: What has to be equal on all ranks besides the bits, in words.
        replicas: The ranks that have to have the same bits; empty if there are no others.
        over: The mesh and those of its dimensions on which the tensor is replicated; None for plain tensors.
        distributed: Whether it is a ``DTensor``, on all ranks if the layout is the same.
    """

    kind: str
    name: str
    bits: Tensor | None
    layout: str
    replicas: tuple[int, ...]
    over: tuple[DeviceMesh, tuple[int, ...]] | None
    distributed: bool


def replicated(target: Any, what: Sequence[str], ranks: tuple[int, ...]) -> list[Replicated]:
    """The tensors of ``target``, sorted by kind and name, for a rank may have met its state in another order.

    Args:
        target, what: As `verify_replicas` takes them.
        ranks: Those that take part, which hold the replicas of plain tensors.

    Raises:
        As `verify_replicas`.
    """
    wanted = {what} if isinstance(what, str) else set(what)
    unknown = sorted(wanted - _FINDERS.keys())
    if unknown or not wanted:
        raise ValueError(f"cannot compare {', '.join(unknown) or 'nothing'}; known: {', '.join(_FINDERS)}")
    found: dict[tuple[str, str], Replicated] = {}
    for kind, find in (_FINDERS[each] for each in wanted):
        for name, tensor in find(target):
            if (kind, name) in found:
                raise ValueError(f"two tensors are named {name!r}; ranks tell them apart by name")
            found[kind, name] = _described(kind, name, tensor, ranks)
    return [found[key] for key in sorted(found)]


def _gradients(target: Any) -> _Named:
    source = source_of(target)
    pairs = zip(source.names(), source.parameters, strict=True)
    return [(name, p.grad) for name, p in pairs if p.requires_grad or p.grad is not None]


def _parameters(target: Any) -> _Named:
    source = source_of(target)
    return zip(source.names(), source.parameters, strict=True)


def _buffers(target: Any) -> _Named:
    if not isinstance(target, Module):
        raise TypeError(f"buffers are those of a torch.nn.Module, got {type(target).__name__}")
    return target.named_buffers()


def _state(target: Any) -> _Named:
    if not isinstance(target, Optimizer):
        raise TypeError(f"state is that of a torch.optim.Optimizer, got {type(target).__name__}")
    source = source_of(target)
    return [
        (f"{name}.{key}", value)
        for name, parameter in zip(source.names(), source.parameters, strict=True)
        for key, value in target.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]


# By what users call it: what one of them is called, and how they are found.
_FINDERS: dict[str, tuple[str, Callable[[Any], _Named]]] = {
    "gradients": ("gradient", _gradients),
    "parameters": ("parameter", _parameters),
    "buffers": ("buffer", _buffers),
    "state": ("state", _state),
}


def _described(kind: str, name: str, tensor: Tensor | None, ranks: tuple[int, ...]) -> Replicated:
    if tensor is None:
        return Replicated(kind, name, None, MISSING, (), None, distributed=False)
    bits = _comparable((tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach(), name)
    layout = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not isinstance(tensor, DTensor):
        replicas = ranks if len(ranks) > 1 else ()
        return Replicated(kind, name, bits, layout, replicas, None, distributed=False)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    layout += f" as {tensor.placements} over {mesh.mesh_dim_names or ''}{tuple(mesh.shape)}"
    dimensions = tuple(i for i, placement in enumerate(tensor.placements) if placement.is_replicate())
    if coordinate is None:
        return Replicated(kind, name, None, layout, (), None, distributed=True)
    here = mesh.mesh[tuple(slice(None) if i in dimensions else at for i, at in enumerate(coordinate))]
    replicas = tuple(sorted(here.flatten().tolist()))
    if not set(replicas) <= set(ranks):
        raise ValueError(
            f"{kind} {name} has replicas on {in_words(replicas)}, not all of which take part; pass their group"
        )
    over = (mesh, dimensions) if len(replicas) > 1 else None
    return Replicated(kind, name, bits, layout, replicas if over else (), over, distributed=True)


def _comparable(tensor: Tensor, name: str) -> Tensor:
    if tensor.is_meta:
        raise TypeError(f"{name!r} is on the meta device and holds no bits to compare")
    if tensor.layout not in (torch.strided, torch.sparse_coo) or tensor.is_nested or tensor.is_quantized:
        raise TypeError(f"{name!r} has a layout whose bits cannot be compared ({tensor.layout})")
    return tensor
