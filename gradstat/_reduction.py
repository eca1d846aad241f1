"""Tables of tensors that are spread over ranks: which rows are merged over which groups of ranks.

A distributed tensor is read through its local shard. What its mesh dimensions do to it is told by its placements:
replicated, nothing has to be merged; sharded, rows are merged over that dimension's group; partial, the pending sum
is done first, since parts of a sum have no statistics. Tensors that are not distributed count once. Whatever the
number of tensors there is one SUM and one MAX for each group, and their size does not grow with the ranks.

Imported only when a distributed tensor, or ``extra_groups``, is met: importing gradstat does not import
``torch.distributed``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from gradstat import _fields
from gradstat._collectives import explained
from gradstat._tensors import Shards, TensorInfo

Group: TypeAlias = ProcessGroup | DeviceMesh
ExtraGroups: TypeAlias = Group | Iterable[Group | tuple[Group, Iterable[Tensor]]]

_FIELDS = len(_fields.FIELDS)
# The summed columns come first, and so are a view (tests/test_fields.py holds that).
_SUMMED = slice(0, sum(field.merge == "sum" for field in _fields.FIELDS))
_MIN, _MAX, _FIRST = (_fields.INDEX[name] for name in ("min", "max", "first_nonfinite"))
# Of a float64, which counts exactly up to 2**53.
_EXACT_BITS = 53
# Groups of shards, and a bit for each extra group.
_Kind: TypeAlias = tuple[tuple[ProcessGroup, ...], int]
_layouts: dict[int, tuple[weakref.ref[DeviceMesh], dict[tuple[Any, ...], _Layout]]] = {}


class Merged(NamedTuple):
    """What is true of whole tensors, on the device.

    Attributes:
        rows: ``[n, len(FIELDS) + 1]`` float64. ``first_nonfinite`` of a sharded tensor holds the lowest rank with a
            NaN or Inf, above the bits of the index in its shard (`Shards.index_bits`); the last column on how many
            ranks there is one.
        total: ``[1, len(FIELDS)]`` float64: all tensors of all ranks together, `first_nonfinite` without meaning.
        failed: 0-d float64: ranks that could not measure theirs.
    """

    rows: Tensor
    total: Tensor
    failed: Tensor


class Reduction:
    """The groups over which the rows of a list of tensors have to be merged.

    Args:
        tensors: In the order of the rows; those of a mesh in the same order on every rank of it.
        extra: Groups over which tensors are spread besides what they tell themselves: pipeline stages, experts. A
            process group or one-dimensional mesh, or several, for all tensors; or pairs of one and the owners it
            is for.
        owners: What ``extra`` calls the tensors, in their order: the parameters of gradients.

    Raises:
        TypeError, ValueError: Something in ``extra`` is no group.
    """

    def __init__(
        self, tensors: Sequence[Tensor], extra: ExtraGroups | None = None, owners: Sequence[Tensor] | None = None
    ) -> None:
        masks, self._extra = _masks(tensors if owners is None else owners, extra)
        self._layouts: list[_Layout | None] = []
        # Rows that belong to the same groups.
        self._kinds: dict[_Kind, list[int]] = {}
        # Neighbours mostly are alike, and to compare is cheaper than to hash.
        mesh: DeviceMesh | None = None
        placements: tuple[Any, ...] = ()
        layout: _Layout | None = None
        kind: list[int] | None = None
        for row, tensor in enumerate(tensors):
            if isinstance(tensor, DTensor):
                spec = tensor._spec
                if spec.mesh is not mesh or spec.placements != placements:
                    mesh, placements = spec.mesh, spec.placements
                    layout, kind = _Layout.of(mesh, placements), None
            elif mesh is not None:
                mesh, layout, kind = None, None, None
            self._layouts.append(layout)
            if kind is None or masks:
                groups = () if layout is None else layout.groups
                kind = self._kinds.setdefault((groups, masks[row] if masks else 0), [])
            kind.append(row)
        self._groups = list(dict.fromkeys(group for groups, _ in self._kinds for group in groups))

    @property
    def has_partial(self) -> bool:
        """Whether a tensor is a pending sum, so that what `local` gives is not its memory."""
        return any(layout is not None and layout.resolved is not None for layout in self._layouts)

    def local(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """What this rank holds of the tensors of some rows. Partial ones are summed up first, a collective for each."""
        found = []
        for tensor, row in zip(tensors, rows, strict=True):
            layout = self._layouts[row]
            if layout is None:
                found.append(tensor)
            elif layout.resolved is None:
                found.append(tensor._local_tensor)  # type: ignore[attr-defined]
            else:
                whole = tensor.redistribute(placements=layout.resolved)  # type: ignore[attr-defined]
                found.append(wait_tensor(whole._local_tensor))
        return found

    def infos(self, tensors: Sequence[Tensor], rows: Sequence[int], local: Sequence[TensorInfo]) -> list[TensorInfo]:
        """What reports need to know about the whole tensors of some rows, given the same about their shards."""
        found = []
        for tensor, row, info in zip(tensors, rows, local, strict=True):
            layout = self._layouts[row]
            if layout is not None and layout.groups:
                info = TensorInfo(tensor.shape, info.dtype, info.device, info.order, layout.shards)
            found.append(info)
        return found

    def merge(self, table: Tensor, failed: bool = False) -> Merged:
        """What is true of the whole tensors, from the rows of this rank's shards. No host sync with NCCL.

        Two reductions of one row for each of its tensors for every group of shards, and two of a few rows for
        every extra group.

        Args:
            table: ``[n, len(FIELDS)]`` float64.
            failed: Whether this rank could not measure its shards; the table is of no account then.
        """
        halves = _halves(table, failed, [layout is not None and bool(layout.groups) for layout in self._layouts])
        for group in self._groups:
            rows = [row for (groups, _), members in self._kinds.items() if group in groups for row in members]
            halves = _reduced(halves, group, None if len(rows) == len(table) else rows)
        merged = _stacked([_merged(halves, rows) for rows in self._kinds.values()], table)
        total, failures = self._totals(merged, table, failed)
        return Merged(_whole(halves), total, failures)

    def total(self, table: Tensor, failed: bool, extremes: bool) -> tuple[Tensor, Tensor]:
        """`Merged.total` and `Merged.failed` alone, for less: what travels is a row for each kind of tensor.

        Without ``extremes`` minima, maxima and first indices stay those of this rank, and there is one reduction
        for a group instead of two.
        """
        if not extremes and not self._extra and len(self._kinds) == 1 and len(table):
            return self._total_of_sums(table, failed)
        halves = _halves(table, failed)
        halves = _stacked([_merged(halves, rows) for rows in self._kinds.values()], table)
        for group in self._groups:
            rows = [i for i, (groups, _) in enumerate(self._kinds) if group in groups]
            halves = _reduced(halves, group, None if len(rows) == len(self._kinds) else rows, extremes)
        return self._totals(halves, table, failed, extremes)

    def _total_of_sums(self, table: Tensor, failed: bool) -> tuple[Tensor, Tensor]:
        """`total` for tensors all of one kind: what most models have, in as few operations as it takes."""
        total = identity_rows(1, table)
        sums = table.new_full((_SUMMED.stop + 1,), float(failed))
        torch.sum(table[:, _SUMMED], 0, out=sums[_SUMMED])
        for group in self._groups:
            with explained("gradstat", group):
                dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        total[0, _SUMMED] = sums[_SUMMED]
        return total, sums[-1]

    def _totals(self, kinds: _Halves, table: Tensor, failed: bool, extremes: bool = True) -> tuple[Tensor, Tensor]:
        """All kinds together, over the extra groups too, and how many failures were told."""
        nothing = _halves(identity_rows(1, table), failed)
        if self._extra:
            # A place for every set of extra groups, on every rank, whatever rows it has.
            places: list[list[int]] = [[] for _ in range(1 << len(self._extra))]
            for row, (_, mask) in enumerate(self._kinds):
                places[mask].append(row)
            kinds = _stacked([_merged(kinds, rows) if rows else nothing for rows in places], table)
            for bit, group in enumerate(self._extra):
                kinds = _reduced(kinds, group, [m for m in range(len(places)) if m >> bit & 1], extremes)
        everything = _merged(_stacked([kinds, nothing], table), None)
        return _whole(everything)[:, :_FIELDS], everything.sums[0, -1]


class _Layout(NamedTuple):
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
    def of(cls, mesh: DeviceMesh, placements: tuple[Any, ...]) -> _Layout:
        # By the mesh itself: equal ones may have other groups, if torch.distributed was started anew.
        known = _layouts.get(id(mesh))
        if known is None or known[0]() is not mesh:
            known = _layouts[id(mesh)] = (weakref.ref(mesh), {})
        layout = known[1].get(placements)
        if layout is None:
            layout = known[1][placements] = cls._made(mesh, placements)
        return layout

    @classmethod
    def _made(cls, mesh: DeviceMesh, placements: tuple[Any, ...]) -> _Layout:
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


class _Halves(NamedTuple):
    """Rows as they travel: what is added up, and what the highest of is taken.

    Attributes:
        sums: ``[n, 9]``: the summed fields, on how many ranks there is NaN or Inf, how many ranks failed.
        highs: ``[n, 3]``: minimum and first index, negated, and maximum between them.
    """

    sums: Tensor
    highs: Tensor


def _halves(table: Tensor, failed: bool, sharded: list[bool] | None = None) -> _Halves:
    """A table's rows, as they travel; in those of ``sharded`` tensors the rank is put above a first index."""
    bad = table[:, _fields.NONFINITE].sum(1, keepdim=True) > 0
    first = table[:, _FIRST]
    if sharded is not None:
        rank = dist.get_rank() * 2.0 ** index_bits()
        first = first + rank if all(sharded) else first + rank * torch.tensor(sharded, device=table.device)
    sums = torch.cat([table[:, _SUMMED], bad.to(torch.float64), torch.full_like(table[:, :1], float(failed))], 1)
    return _Halves(sums, torch.stack([-table[:, _MIN], table[:, _MAX], -first], 1))


def _whole(halves: _Halves) -> Tensor:
    """The columns in the order of the fields, and on how many ranks there is NaN or Inf."""
    sums, highs = halves
    rows = sums.new_empty(len(sums), _FIELDS + 1)
    rows[:, _SUMMED] = sums[:, :-2]
    rows[:, _MIN], rows[:, _MAX], rows[:, _FIRST] = -highs[:, 0], highs[:, 1], -highs[:, 2]
    rows[:, -1] = sums[:, -2]
    return rows


def _merged(halves: _Halves, rows: list[int] | None) -> _Halves:
    """Some rows, at least one, as one; all for None."""
    sums, highs = halves if rows is None or len(rows) == len(halves.sums) else (h[rows] for h in halves)
    return _Halves(sums.sum(0, keepdim=True), highs.amax(0, keepdim=True))


def _stacked(parts: list[_Halves], table: Tensor) -> _Halves:
    if not parts:
        return _halves(table[:0], False)
    return _Halves(torch.cat([part.sums for part in parts]), torch.cat([part.highs for part in parts]))


def _reduced(halves: _Halves, group: ProcessGroup, rows: list[int] | None, extremes: bool = True) -> _Halves:
    """The rows merged over the ranks of a group; the others as they were."""
    sums, highs = (h.contiguous() if rows is None else h[rows] for h in halves)
    with explained("gradstat", group):
        works = [dist.all_reduce(sums, dist.ReduceOp.SUM, group=group, async_op=True)]
        if extremes:
            works.append(dist.all_reduce(highs, dist.ReduceOp.MAX, group=group, async_op=True))
        for work in works:
            work.wait()  # with NCCL the stream waits, not the host
    if rows is None:
        return _Halves(sums, highs)
    halves.sums[rows], halves.highs[rows] = sums, highs
    return halves


def identity_rows(count: int, like: Tensor) -> Tensor:
    """Rows of tensors without elements: ``[count, len(FIELDS)]`` on the device of ``like``."""
    rows = torch.zeros(count, _FIELDS, dtype=torch.float64, device=like.device)
    for column in (_MIN, _MAX, _FIRST):
        rows[:, column] = _fields.FIELDS[column].identity
    return rows


def index_bits() -> int:
    """How many bits of a float64 are left for an index when a rank stands above them."""
    return _EXACT_BITS - max(dist.get_world_size() - 1, 1).bit_length()


def _masks(owners: Sequence[Tensor], extra: ExtraGroups | None) -> tuple[list[int], list[ProcessGroup]]:
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
