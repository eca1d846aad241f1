"""Checks that replicas agree: bit-exact comparison, by checksums, of tensors that must be equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from gradstat._core.collectives import device_of, format_ranks, gather_by_rank, reduce_, require_member
from gradstat._core.parameters import named_parameters_of
from gradstat._core.text import count_of, expect, lines_of, printable
from gradstat.accumulation import NAMED_IN_ERROR, NAMED_IN_TEXT
from gradstat.distributed._checksum import checksums, combined, comparable, of_text
from gradstat.tensor_stats import Judged

_CALLER = "verify_replicas"
_MISSING = "missing"  # the layout that stands for a gradient that is None
_KNOWN = ("gradients", "parameters", "buffers", "state")


class Drift(NamedTuple):
    """A tensor that differs between ranks on which it should be the same.

    Attributes:
        name: Its name.
        kind: ``"gradient"``, ``"parameter"``, ``"buffer"`` or ``"state"``.
        ranks: The global ranks that differ from the majority; all of them if there is no majority.
        how: The difference, in words.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    how: str


class ReplicaMismatchError(RuntimeError):
    """Replicas differ. The message names tensors and ranks.

    Attributes:
        report: The whole `ReplicaReport`.
    """

    def __init__(self, message: str, report: ReplicaReport | None = None) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class ReplicaReport(Judged):
    """The result of `verify_replicas`, the same on every rank that took part.

    Attributes:
        drifted: One `Drift` for each tensor that differs, sorted by kind and name.
        compared: Number of tensors compared.
        ranks: The global ranks that took part.
    """

    drifted: tuple[Drift, ...]
    compared: int
    ranks: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether all compared tensors have the same bits."""
        return not self.drifted

    def raise_if_drifted(self) -> None:
        """Raises `ReplicaMismatchError`, which names tensors and ranks, on every rank, unless `ok`."""
        if not self.ok:
            raise ReplicaMismatchError(self._summary(NAMED_IN_ERROR), self)

    def __str__(self) -> str:
        if self.ok and not self.compared:
            return "gradstat: nothing to compare: no tensor is replicated"
        if self.ok:
            compared = count_of(self.compared, "tensor")
            return f"gradstat: {compared}, bit-identical on all replicas ({len(self.ranks)} ranks)"
        return f"gradstat: {self._summary(NAMED_IN_TEXT)}"

    def _summary(self, limit: int) -> str:
        count, compared = count_of(len(self.drifted), "tensor"), f"of {self.compared:,} compared"
        title = f"{count} DRIFTED between {len(self.ranks)} ranks, {compared}:"
        lines = lines_of(self.drifted, limit, lambda drift: f"  {drift.kind} {printable(drift.name)}: {drift.how}")
        return "\n".join([title, *lines])


def verify_replicas(
    target: Any,
    *,
    group: dist.ProcessGroup | None = None,
    what: Sequence[str] = ("gradients",),
    mesh: DeviceMesh | None = None,
) -> ReplicaReport:
    """Compares, bit by bit, tensors that have to be equal on all ranks, and names tensors and ranks that drifted.

    Finds silent data corruption and diverging replicas on the step where it happens: gradients after DDP's reduction,
    parameters and buffers, optimizer state. Bits are compared: 0.0 and -0.0 differ, as do two NaN of different
    payload. Tensors are reduced to 64-bit checksums on their devices, with one pass and a few launches per tensor. A
    difference goes unnoticed with a probability of about 2**-32.

    A collective: all ranks of the group have to call it, and get the same report. If all agree it costs one all-reduce
    of 32 bytes and one host sync, however many tensors there are. With distributed tensors there are also one reduction
    for each mesh dimension they are replicated on, over which their shards are compared, one for the result, and a
    sync. Only if something differs are names and checksums gathered, as objects, to find the ranks.

    Args:
        target: A module, an optimizer, parameters, ``(name, parameter)`` pairs, or one parameter.
        group: The ranks that hold replicas; None for all.
        what: Any of ``"gradients"``, ``"parameters"``, ``"buffers"`` (of a module) and ``"state"`` (the tensors in an
            optimizer's state).
        mesh: Instead of ``group``: all ranks of this device mesh, for example the data-parallel part of a larger one.

    Raises:
        TypeError: ``target`` is none of these or lacks what is to be compared, or a tensor's bits cannot be compared.
        ValueError: ``what`` is unknown, both ``group`` and ``mesh`` are given, this rank is in neither, or a
            ``DTensor`` has replicas on other ranks.
        UnreachableRankError: A rank did not take part (where the backend reports it; see there).
    """
    groups, ranks = _participants(group, mesh)
    tensors = _replicated(target, what, ranks)
    with torch.no_grad():
        having = [(tensor, tensor.bits) for tensor in tensors if tensor.bits is not None and tensor.replicas]
        numbers = checksums([bits for _, bits in having], device_of(groups[0]))
        drifted: tuple[Drift, ...] = ()
        compared = _count_if_equal(tensors, [tensor for tensor, _ in having], numbers, groups)
        if compared is None:
            mine = {(t.kind, t.name): _Seen(t.layout, t.replicas, None) for t in tensors}
            for (t, _), number in zip(having, numbers.tolist(), strict=True):
                mine[t.kind, t.name] = _Seen(t.layout, t.replicas, number)
            seen_by = gather_by_rank(mine, groups, _CALLER)
            drifted = tuple(_drifts(seen_by))
            compared = len({key for seen in seen_by.values() for key, tensor in seen.items() if tensor.replicas})
    return ReplicaReport(drifted, compared, ranks)


class _Seen(NamedTuple):
    """The description of a tensor that a rank sends to the others if something differs."""

    layout: str
    replicas: tuple[int, ...]
    checksum: int | None


def _participants(
    group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[list[dist.ProcessGroup], tuple[int, ...]]:
    """Groups whose reductions, one after the other, cover all participating ranks; and those ranks."""
    if mesh is None:
        member = require_member(group)
        return [member], tuple(dist.get_process_group_ranks(member))
    if group is not None:
        raise ValueError("pass a group or a mesh, not both")
    expect("mesh", mesh, DeviceMesh, "a DeviceMesh or None")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh; only its ranks may call this")
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return groups, tuple(sorted(mesh.mesh.flatten().tolist()))


def _count_if_equal(
    tensors: list[_Replicated], compared: list[_Replicated], numbers: Tensor, groups: list[dist.ProcessGroup]
) -> int | None:
    """How many tensors some rank has in ``compared``, whose checksums are ``numbers``; the same answer on all ranks.

    None unless all ranks have the same tensors and checksums.
    """
    # First compare over all ranks: the list of tensors, so that all ranks or none go on, and the plain tensors. These
    # are two numbers, whatever tensors a rank has.
    listed = of_text("\n".join(f"{tensor.kind} {tensor.name} {tensor.layout}" for tensor in tensors))
    plain = [i for i, tensor in enumerate(compared) if tensor.over is None]
    both = torch.stack([torch.tensor(listed, device=numbers.device), combined(numbers[plain])])
    if not bool(_equal(both, groups).item()):
        return None
    by_dimension: dict[tuple[DeviceMesh, int], list[int]] = {}
    for i, tensor in enumerate(compared):
        if tensor.over is not None:
            mesh, dimensions = tensor.over
            for dimension in dimensions:
                by_dimension.setdefault((mesh, dimension), []).append(i)
    if not any(tensor.distributed for tensor in tensors):
        return len(compared)
    # Tensors equal along every dimension are equal everywhere, so no group over several dimensions is needed.
    are_equal = [
        _equal(combined(numbers[chosen]).reshape(1), [mesh.get_group(dimension)])
        for (mesh, dimension), chosen in by_dimension.items()
    ]
    # Which tensors are compared here: with several meshes, ranks compare different ones.
    here = torch.tensor([t.bits is not None and bool(t.replicas) for t in tensors], device=numbers.device)
    differs = ~torch.stack(are_equal).all() if are_equal else here.new_zeros(())
    flags = torch.cat([differs.reshape(1), here]).to(torch.int64)
    is_different, *is_compared = reduce_(flags, dist.ReduceOp.MAX, groups, _CALLER).tolist()
    return None if is_different else sum(is_compared)


def _equal(numbers: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    """Whether ``numbers``, int64, are the same on all ranks of the groups, 0-d bool; no sync."""
    # ~x is -1 - x, so the maximum of ~x gives the minimum of x in the same reduction.
    largest, smallest = reduce_(torch.stack([numbers, ~numbers]), dist.ReduceOp.MAX, groups, _CALLER)
    return torch.all(largest == ~smallest)


def _drifts(seen_by: Mapping[int, Mapping[tuple[str, str], _Seen]]) -> Iterator[Drift]:
    """The differences, from the views of all ranks: first missing tensors, then layouts, then bits."""
    for kind, name in sorted({key for seen in seen_by.values() for key in seen}):
        seen = {rank: each[kind, name] for rank, each in seen_by.items() if (kind, name) in each}
        lacking = tuple(r for r in seen_by if r not in seen or seen[r].layout == _MISSING)
        having = {rank: each for rank, each in seen.items() if rank not in lacking}
        if lacking and having:
            yield Drift(kind=kind, name=name, ranks=lacking, how=f"missing on {format_ranks(lacking)}")
        if apart := _minority({rank: each.layout for rank, each in having.items()}):
            layouts = "; ".join(f"{having[rank].layout} on rank {rank}" for rank in apart)
            yield Drift(kind=kind, name=name, ranks=apart, how=f"shape, dtype or placement differs: {layouts}")
            continue
        for replicas in sorted({each.replicas for each in having.values()}):
            checksum_of = {rank: having[rank].checksum for rank in replicas if rank in having}
            if apart := _minority(checksum_of):
                how = f"bits on {format_ranks(apart)} differ from those on the other {len(replicas) - len(apart)}"
                if len(apart) == len(replicas):
                    how = f"bits differ between {format_ranks(apart)}, with no majority"
                yield Drift(kind=kind, name=name, ranks=apart, how=how)


def _minority(value_of: Mapping[int, object]) -> tuple[int, ...]:
    """The ranks whose value is not the most frequent one; all ranks in case of a tie; none if all are equal."""
    (first, most), *others = Counter(value_of.values()).most_common() or [(None, 0)]
    if not others:
        return ()
    tied = others[0][1] == most
    return tuple(rank for rank, value in value_of.items() if tied or value != first)


class _Replicated(NamedTuple):
    """One tensor of this rank, or its absence."""

    kind: str
    name: str
    bits: Tensor | None  # None for a missing gradient, or if this rank is not in the tensor's mesh
    layout: str  # everything besides the bits that has to be equal on all ranks, in words
    replicas: tuple[int, ...]  # the ranks that have to have the same bits; empty if there are no others
    # The mesh and the dimensions on which the tensor is replicated; None for plain tensors.
    over: tuple[DeviceMesh, tuple[int, ...]] | None
    distributed: bool  # the same on all ranks, if the layout is


def _replicated(target: Any, what: Sequence[str], ranks: tuple[int, ...]) -> list[_Replicated]:
    """The tensors of ``target``, sorted by kind and name, since the order of optimizer state may differ by rank."""
    wanted = {what} if isinstance(what, str) else set(what)
    unknown = sorted(wanted.difference(_KNOWN))
    if unknown or not wanted:
        raise ValueError(f"cannot compare {', '.join(unknown) or 'nothing'}; known: {', '.join(_KNOWN)}")
    described: dict[tuple[str, str], _Replicated] = {}
    for each in wanted:
        kind = each.removesuffix("s")
        for name, tensor in _tensors_of(target, each):
            if (kind, name) in described:
                raise ValueError(f"two tensors are named {name!r}; ranks match tensors by name")
            described[kind, name] = _described(kind, name, tensor, ranks)
    return [described[key] for key in sorted(described)]


def _tensors_of(target: Any, what: str) -> Iterable[tuple[str, Tensor | None]]:
    if what == "buffers":
        if not isinstance(target, Module):
            raise TypeError(f"buffers: expected a torch.nn.Module, got {type(target).__name__}")
        return target.named_buffers()
    if what == "state" and not isinstance(target, Optimizer):
        raise TypeError(f"state: expected a torch.optim.Optimizer, got {type(target).__name__}")
    named = named_parameters_of(target)
    parameters: list[tuple[str, Any]] = list(zip(named.names(), named.parameters, strict=True))
    if what == "parameters":
        return parameters
    if what == "gradients":
        return [(name, p.grad) for name, p in parameters if p.requires_grad or p.grad is not None]
    states = ((name, target.state.get(parameter, {})) for name, parameter in parameters)
    return [
        (f"{name}.{key}", value) for name, state in states for key, value in state.items() if torch.is_tensor(value)
    ]


def _described(kind: str, name: str, tensor: Tensor | None, ranks: tuple[int, ...]) -> _Replicated:
    if tensor is None:
        return _Replicated(kind, name, None, _MISSING, (), None, distributed=False)
    bits = comparable((tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach(), name)
    layout = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not isinstance(tensor, DTensor):
        replicas = ranks if len(ranks) > 1 else ()
        return _Replicated(kind, name, bits, layout, replicas, None, distributed=False)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    layout += f" as {tensor.placements} over {mesh.mesh_dim_names or ''}{tuple(mesh.shape)}"
    dimensions = tuple(i for i, placement in enumerate(tensor.placements) if placement.is_replicate())
    if coordinate is None:
        return _Replicated(kind, name, None, layout, (), None, distributed=True)
    here = mesh.mesh[tuple(slice(None) if i in dimensions else at for i, at in enumerate(coordinate))]
    replicas = tuple(sorted(here.flatten().tolist()))
    if not set(replicas) <= set(ranks):
        raise ValueError(
            f"{kind} {printable(name)} has replicas on {format_ranks(replicas)}, not all of which take part; pass "
            "their group"
        )
    over = (mesh, dimensions) if len(replicas) > 1 else None
    return _Replicated(kind, name, bits, layout, replicas if over else (), over, distributed=True)
