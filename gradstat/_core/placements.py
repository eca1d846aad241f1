"""What placements mean for statistics: which shard is here, and over which groups of ranks rows have to be merged.

Imported only when a distributed tensor, or ``extra_groups``, is met: importing gradstat does not import
``torch.distributed``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from gradstat._core.tensors import Shards

Group: TypeAlias = ProcessGroup | DeviceMesh
ExtraGroups: TypeAlias = Group | Iterable[Group | tuple[Group, Iterable[Tensor]]]

# Of a float64, which counts exactly up to 2**53.
_EXACT_BITS = 53
_layouts: dict[int, tuple[weakref.ref[DeviceMesh], dict[tuple[Any, ...], Layout]]] = {}


class Layout(NamedTuple):
    """What a mesh and placements mean.

    Attributes:
        groups: Those over which shards lie.
        resolved: Placements without pending sums; None if there are none.
        shards: For reports.
    """

    groups: tuple[ProcessGroup, ...]
    resolved: tuple[Any, ...] | None
    shards: Shards

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Layout:
        # By the mesh itself: equal ones may have other groups, if torch.distributed was started anew.
        known = _layouts.get(id(mesh))
        if known is None or known[0]() is not mesh:
            known = _layouts[id(mesh)] = (weakref.ref(mesh), {})
        layout = known[1].get(placements)
        if layout is None:
            layout = known[1][placements] = cls._made(mesh, placements)
        return layout

    @classmethod
    def _made(cls, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Layout:
        # There are shards of more than one kind; what is neither replicated nor partial is one.
        sharded = [d for d, p in enumerate(placements) if not (p.is_replicate() or p.is_partial())]
        resolved = tuple(Replicate() if p.is_partial() else p for p in placements)
        plain = all(type(placements[d]).__name__ == "Shard" for d in sharded)
        dims = tuple((d, placements[d].dim) for d in sharded) if plain else None
        return cls(
            tuple(mesh.get_group(d) for d in sharded),
            None if resolved == tuple(placements) else resolved,
            Shards(mesh.mesh.tolist(), dims, index_bits()),
        )


def index_bits() -> int:
    """How many bits of a float64 are left for an index when a rank stands above them."""
    return _EXACT_BITS - max(dist.get_world_size() - 1, 1).bit_length()


def extra_masks(owners: Sequence[Tensor], extra: ExtraGroups | None) -> tuple[list[int], list[ProcessGroup]]:
    """The extra groups, and for each owner a bit for each of them it is spread over; no masks if there are none."""
    listed = _listed(extra)
    masks = [0] * len(owners) if listed else []
    for bit, (_, members) in enumerate(listed):
        wanted = None if members is None else set(map(id, members))
        for row, owner in enumerate(owners):
            if wanted is None or id(owner) in wanted:
                masks[row] |= 1 << bit
    return masks, [group for group, _ in listed]


def _listed(extra: ExtraGroups | None) -> list[tuple[ProcessGroup, Iterable[Tensor] | None]]:
    if extra is None:
        return []
    if isinstance(extra, (ProcessGroup, DeviceMesh)):
        return [(_group_of(extra), None)]
    listed: list[tuple[ProcessGroup, Iterable[Tensor] | None]] = []
    for item in extra:
        group, members = item if isinstance(item, tuple) else (item, None)
        listed.append((_group_of(group), members))
    return listed


def _group_of(group: object) -> ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"extra_groups has a mesh of {group.ndim} dimensions; pass the dimension that is meant, mesh['name']"
            )
        return group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"extra_groups has {type(group).__name__} where a process group or one-dimensional mesh was expected, or a "
            "pair of one and its parameters"
        )
    return group
