"""Statistics of distributed tensors: each rank measures its shards, then rows are merged over the process groups.

The placement on each mesh dimension decides how. Rows of a replicated tensor are not merged. Rows of a sharded tensor
are merged over that dimension's group. The pending sum of a partial tensor is reduced first, because statistics of its
addends do not merge. A rank that cannot measure its shards still joins the collectives, so that no other rank hangs.
Ranks whose tensors differ get an error (`gradstat._core.agreement`).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from gradstat import _fields
from gradstat._core.agreement import ListDescription, Reducer
from gradstat._core.collectives import device_of, require_member
from gradstat._core.engines import FlatShard
from gradstat._core.measurement import Measurement
from gradstat._core.parameters import Names, as_list, gradients_of
from gradstat._core.tensors import ExtraGroups, Shards, TensorInfo

_SUMMED = _fields.SUMMED
# The remaining columns. Fields merged by "min" are negated before the all-reduce, so that a single MAX serves both.
_EXTREMES = tuple(enumerate(_fields.FIELDS))[_SUMMED.stop :]
_INDICES = [column for column, field in _EXTREMES if field.is_index]
# Columns of packed rows: summed fields and the number of ranks with a NaN or Inf; and those with the maximum taken.
_SUMS, _MAXIMA = _SUMMED.stop + 1, len(_EXTREMES)
# The groups over which a tensor's rows are merged, and a bit for each extra group.
_GroupKey: TypeAlias = tuple[tuple[ProcessGroup, ...], int]
# A float64 represents integers exactly up to 2**53.
_EXACT_BITS = 53
_MOST_PLANS = 64
MeasureLocal = Callable[[list[Tensor]], Measurement]


class Sharding(NamedTuple):
    """What a mesh and placements mean: the groups that a tensor is sharded over, and where its shards lie."""

    groups: tuple[ProcessGroup, ...]
    resolved: tuple[Any, ...] | None  # the placements with Replicate for each Partial; None if there is no Partial
    shards: Shards | None  # None for a `FlatShard`, whose indices are converted to indices in the whole tensor
    words: str = "flat"  # the placements, with Replicate for each Partial

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Sharding:
        shardings = _cache_of(mesh).shardings
        if placements in shardings:
            return shardings[placements]
        # There are several kinds of shard placements, so every placement neither replicated nor partial counts as one.
        sharded = [d for d, p in enumerate(placements) if not (p.is_replicate() or p.is_partial())]
        resolved = tuple(Replicate() if p.is_partial() else p for p in placements)
        plain = all(type(placements[d]).__name__ == "Shard" for d in sharded)
        dims = tuple((d, placements[d].dim) for d in sharded) if plain else None
        sharding = shardings[placements] = cls(
            tuple(mesh.get_group(d) for d in sharded),
            None if resolved == tuple(placements) else resolved,
            Shards(mesh.mesh.tolist(), dims, index_bits()),
            ", ".join(map(str, resolved)),
        )
        return sharding


@dataclass
class _Plan:
    """What follows from the layouts of a list of tensors."""

    shardings: list[Sharding | None]
    rows_by_key: dict[_GroupKey, list[int]]  # rows by the groups they are merged over
    listed: ListDescription
    has_partial: bool  # whether a reduced copy of some tensor is measured instead of its own memory
    made_from: object = None  # what is compared to see whether a list is this one; None if that is not possible
    meshes: tuple[weakref.ref[DeviceMesh], ...] = ()  # while they live, their ids in ``made_from`` mean them
    infos: tuple[object, object, Sequence[TensorInfo]] | None = None  # of the shards, their positions, of the tensors

    @classmethod
    def of(
        cls, stand_ins: Sequence[Any], names: tuple[str, ...] | None, metadata: list[Any], masks: list[int]
    ) -> _Plan:
        """``names`` and ``metadata`` are those of the parameters, which ``stand_ins`` stand for in the same order."""
        shardings: list[Sharding | None] = []
        rows_by_key: dict[_GroupKey, list[int]] = {}
        mesh: DeviceMesh | None = None
        placements: tuple[Any, ...] = ()
        of_last: Sharding | None = None
        every_words = []
        for row, tensor in enumerate(stand_ins):
            sharding: Sharding | None = None
            if isinstance(tensor, DTensor):
                spec = tensor._spec
                # Consecutive tensors usually share mesh and placements, and comparing is cheaper than hashing.
                if spec.mesh is not mesh or spec.placements != placements:
                    mesh, placements, of_last = spec.mesh, spec.placements, Sharding.of(spec.mesh, spec.placements)
                sharding = of_last
            elif isinstance(tensor, FlatShard):
                sharding = Sharding((tensor.group,), None, None)
            groups, words = ((), "") if sharding is None else (sharding.groups, sharding.words)
            rows_by_key.setdefault((groups, masks[row] if masks else 0), []).append(row)
            shardings.append(sharding)
            every_words.append(words)
        has_partial = any(sharding is not None and sharding.resolved is not None for sharding in shardings)
        description = ListDescription(names, tuple(metadata), tuple(every_words))
        return cls(shardings, rows_by_key, description, has_partial)

    @classmethod
    def of_distributed(
        cls, stand_ins: Sequence[Any], names: tuple[str, ...] | None, metadata: list[Any]
    ) -> _Plan | None:
        """`of` for a list of DTensors without extra groups, kept between calls; None for any other list.

        The names and the tensors' metadata, meshes and placements are compared with those of the list before. Usually
        they are the same objects, so that comparing takes much less time than making a plan.
        """
        try:
            specs = [tensor._spec for tensor in stand_ins]
            meshes, placements = [spec.mesh for spec in specs], [spec.placements for spec in specs]
        except AttributeError:
            return None
        made_from = names, metadata, [spec.tensor_meta for spec in specs], list(map(id, meshes)), placements
        plans = _cache_of(meshes[0]).plans
        key = len(specs), metadata[0], names is None
        plan = plans.get(key)
        if plan is None or plan.made_from != made_from or any(mesh() is None for mesh in plan.meshes):
            if len(plans) == _MOST_PLANS:
                plans.clear()
            plan = plans[key] = cls.of(stand_ins, names, metadata, [])
            plan.made_from = made_from
            plan.meshes = tuple(map(weakref.ref, {id(mesh): mesh for mesh in meshes}.values()))
        return plan


class _MeshCache(NamedTuple):
    mesh: weakref.ref[DeviceMesh]
    world: ProcessGroup | None
    shardings: dict[tuple[Any, ...], Sharding]  # by placements
    plans: dict[object, _Plan]  # of lists that begin with a tensor on this mesh


_caches: dict[int, _MeshCache] = {}


def _cache_of(mesh: DeviceMesh) -> _MeshCache:
    # Keyed by the mesh's identity, since meshes that compare equal may have different groups, and by WORLD: after
    # torch.distributed is restarted, torch's caches return old meshes whose group names now mean other groups.
    key, world = id(mesh), dist.group.WORLD
    cache = _caches.get(key)
    if cache is None or cache.mesh() is not mesh or cache.world is not world:
        cache = _caches[key] = _MeshCache(weakref.ref(mesh, lambda _: _caches.pop(key, None)), world, {}, {})
    return cache


def index_bits() -> int:
    """How many low bits of an exact float64 integer hold an index when the bits above them hold a rank."""
    return _EXACT_BITS - max(dist.get_world_size() - 1, 1).bit_length()


def _extra_masks(parameters: Sequence[Tensor], extra: ExtraGroups | None) -> tuple[list[int], list[ProcessGroup]]:
    """By parameter a bit mask of the extra groups it is spread over, and these groups; no masks without groups."""
    items = extra if isinstance(extra, Iterable) else () if extra is None else (extra,)
    pairs = [item if isinstance(item, tuple) else (item, None) for item in items]
    groups = [_group_of(group) for group, _ in pairs]
    masks = [0] * len(parameters) if groups else []
    for bit, (_, members) in enumerate(pairs):
        ids = None if members is None else set(map(id, as_list(members)))
        for row, parameter in enumerate(parameters):
            if ids is None or id(getattr(parameter, "parameter", parameter)) in ids:  # a `FlatShard` has one
                masks[row] |= 1 << bit
    return masks, groups


def _group_of(group: object) -> ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"extra_groups has a mesh of {group.ndim} dimensions; pass one of them, mesh['name']")
        group = dist.GroupMember.NON_GROUP_MEMBER if group.get_coordinate() is None else group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("extra_groups has a group that this rank is not in; pass it only on the ranks of the group")
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"extra_groups has {type(group).__name__}; expected a process group or one-dimensional mesh, or a pair of "
            "one and its parameters"
        )
    return group


class Sharded:
    """A list of tensors, some of which are distributed, and the groups over which their rows are merged.

    Every rank of a mesh has a row for every parameter that requires or has a gradient, so that all ranks reduce the
    same number of rows. Tensors that are no gradients count as parameters themselves. ``extra`` is as in
    `gradstat.check`. ``names`` returns the parameters' names.
    """

    def __init__(
        self, tensors: list[Any], parameters: list[Tensor] | None, extra: ExtraGroups | None, names: Names | None
    ) -> None:
        self._tensors = tensors
        self._starts = tuple(tensor.start for tensor in self._tensors if isinstance(tensor, FlatShard))
        listed_names = None if names is None else tuple(names())
        if self._starts:
            parameters = None  # every rank has a shard of every tensor
        # Positions of the tensors' rows among the rows of all parameters.
        self._positions: Sequence[int] = range(len(self._tensors))
        self._parameters: Sequence[Tensor] = self._tensors if parameters is None else parameters
        stand_ins: Sequence[Tensor] = self._tensors
        if (
            parameters is not None
            and len(parameters) > len(self._tensors)
            and gradients_of(parameters).positions is not None
        ):
            taking_part = [i for i, p in enumerate(parameters) if p.requires_grad or p.grad is not None]
            self._parameters = [parameters[i] for i in taking_part]
            listed_names = None if listed_names is None else tuple(listed_names[i] for i in taking_part)
            self._positions = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
            stand_ins = [parameter if parameter.grad is None else parameter.grad for parameter in self._parameters]
        masks, self._extra = _extra_masks(self._parameters, extra)
        names_of_all = listed_names if listed_names is not None and len(listed_names) == len(self._parameters) else None
        # A gradient may be missing on one rank, so all ranks describe it by its parameter.
        metadata = _metadata(self._parameters)
        plan = None if masks or not metadata else _Plan.of_distributed(stand_ins, names_of_all, metadata)
        self._plan = plan or _Plan.of(stand_ins, names_of_all, metadata, masks)
        self.has_partial = self._plan.has_partial
        self._shardings, self._rows_by_key = self._plan.shardings, self._plan.rows_by_key
        self._groups = list(dict.fromkeys(group for groups, _ in self._rows_by_key for group in groups))
        # What all ranks of a group have to have: without the tensors that are spread over extra groups.
        self._listed = dict.fromkeys((*self._groups, *self._extra), self._plan.listed)
        for group in self._listed if masks else ():
            spread = {row for (groups, _), rows in self._rows_by_key.items() if group in groups for row in rows}
            common = [row for row, mask in enumerate(masks) if not mask or row in spread]
            self._listed[group] = self._plan.listed.take(common)
        self._error: Exception | None = None
        # By group and what is reduced; None if other ranks have other tensors, and know it.
        self._reducers: dict[tuple[ProcessGroup, str], Reducer | None] = {}

    def rows(self, measure_local: MeasureLocal) -> Measurement:
        """Measures this rank's shards with ``measure_local`` and merges their rows over the ranks. No sync with NCCL.

        The tables have an additional last column: the number of ranks with a NaN or Inf. ``first_nonfinite`` of a
        sharded tensor holds the lowest such rank, in the bits above the index in that rank's shard. An exception from
        ``measure_local`` is raised after the reductions; the other ranks see it in ``failed``. RuntimeError if another
        rank has other tensors.
        """
        places = {
            group: [row for (groups, _), rows in self._rows_by_key.items() if group in groups for row in rows]
            for group in self._groups
        }
        self._announce(places, "rows", extremes=True)
        table, infos = self._measured(measure_local)
        is_sharded = [each is not None and bool(each.groups and each.shards) for each in self._shardings]
        packed, failed = _pack(table, is_sharded), table.new_full((), float(self._error is not None))
        for group, rows in places.items():
            packed, failed = self._reduced(packed, failed, group, rows, "rows")
        merged = _stacked([_merged(packed, rows) for rows in self._rows_by_key.values()], table)
        total, failed = self._over_extra_groups(merged, failed, table)
        if self._error is not None:
            raise self._error
        whole = _unpack(packed)
        if len(self._positions) < len(self._parameters):
            whole = whole[_index(self._positions, whole)]
        return Measurement([whole], None, self._infos(infos), total, failed)

    def total(self, measure_local: MeasureLocal, extremes: bool) -> Measurement:
        """`rows` without the rows: reduces one row per kind of tensor, and only its sums unless ``extremes``."""
        every = list(self._rows_by_key)
        places = {group: [i for i, (groups, _) in enumerate(every) if group in groups] for group in self._groups}
        self._announce(places, "kinds", extremes)
        table, _ = self._measured(measure_local)
        failed = table.new_full((), float(self._error is not None))
        if not extremes and not self._extra and len(every) == 1 and len(table):
            # In the common case all tensors are of one kind; this takes as few operations as possible.
            kinds = _Packed(table.new_zeros(1, _SUMS), table.new_empty(1, 0))
            torch.sum(table[:, _SUMMED], 0, out=kinds.sums[0, _SUMMED])
        else:
            packed = _pack(table)
            kinds = _stacked([_merged(packed, rows) for rows in self._rows_by_key.values()], table)
        for group, at in places.items():
            kinds, failed = self._reduced(kinds, failed, group, at, "kinds", extremes)
        if kinds.maxima.shape[1]:
            total, failed = self._over_extra_groups(kinds, failed, table, extremes)
        else:
            total = identity_rows(1, table)
            total[0, _SUMMED] = kinds.sums[0, _SUMMED]
        if self._error is not None:
            raise self._error
        return Measurement([], None, (), total, failed)

    def _announce(self, places: dict[ProcessGroup, list[int]], kind: str, extremes: bool) -> None:
        """Announces new tensors to the ranks of each group, before a rank with other tensors can fail."""
        counts = [(group, kind, len(at)) for group, at in places.items()]
        counts += [(group, "extra", 1 << len(self._extra) - 1) for group in self._extra]
        for group, what, count in counts:
            reducer, widths = Reducer.of(group, (what, extremes)), (_SUMS, _MAXIMA if extremes else 0)
            difference = reducer.announce(self._listed[group], count, widths, self._device)
            self._reducers[group, what] = reducer if difference is None else None
            self._note(difference)

    def _note(self, difference: str | None) -> None:
        if difference is not None and self._error is None:
            self._error = RuntimeError(difference)

    def _reduced(
        self, packed: _Packed, failed: Tensor, group: ProcessGroup, rows: list[int], kind: str, extremes: bool = True
    ) -> tuple[_Packed, Tensor]:
        """The given rows merged over the ranks of ``group``, the other rows unchanged; and how many ranks failed."""
        reducer = self._reducers[group, kind]
        if reducer is None:
            return packed, failed
        index = None if len(rows) == len(packed.sums) else _index(rows, packed.sums)
        sums, maxima = packed if index is None else (part[index] for part in packed)
        exchanged = maxima if extremes else maxima[:, :0]
        reduced, largest, failed, difference = reducer.reduce(sums, exchanged, self._listed[group], failed)
        if difference is not None:
            self._note(difference)
            failed = torch.ones_like(failed)
        maxima = largest if extremes else maxima
        if index is None:
            return _Packed(reduced, maxima), failed
        packed.sums[index], packed.maxima[index] = reduced, maxima
        return packed, failed

    def _over_extra_groups(
        self, kinds: _Packed, failed: Tensor, table: Tensor, extremes: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The total over all kinds and over the extra groups, and the number of ranks that failed."""
        nothing = _pack(identity_rows(1, table))
        if self._extra:
            # One row for every set of extra groups, on every rank, whatever tensors it has.
            places: list[list[int]] = [[] for _ in range(1 << len(self._extra))]
            for row, (_, mask) in enumerate(self._rows_by_key):
                places[mask].append(row)
            kinds = _stacked([_merged(kinds, rows) if rows else nothing for rows in places], table)
            for bit, group in enumerate(self._extra):
                at = [m for m in range(len(places)) if m >> bit & 1]
                kinds, failed = self._reduced(kinds, failed, group, at, "extra", extremes)
        everything = _merged(_stacked([kinds, nothing], table), None)
        return _unpack(everything)[:, : _fields.COUNT], failed

    def _measured(self, measure_local: MeasureLocal) -> tuple[Tensor, Sequence[TensorInfo]]:
        """A row for every parameter: the identity for those that have no tensor here."""
        if not self._tensors or self._error is not None:
            return self._identities(), []
        try:
            local = measure_local(self._local())
        except Exception as error:
            self._error = error
            return self._identities(), []
        table = local.table()
        if len(self._positions) == len(self._parameters):
            for column in _INDICES if self._starts else ():
                table[:, column] += _on_device(self._starts, torch.float64, table.device)
        else:
            table = self._identities()
            table[_index(self._positions, table)] = local.table()
        return table, local.infos

    def _local(self) -> list[Tensor]:
        """This rank's shards of the tensors. Partial tensors are all-reduced first, with one collective each."""
        if self._plan.made_from is not None and not self.has_partial:
            return [tensor._local_tensor for tensor in self._tensors]
        shards = []
        for tensor, row in zip(self._tensors, self._positions, strict=True):
            sharding = self._shardings[row]
            if sharding is None:
                shards.append(tensor)
            elif sharding.resolved is None:
                shards.append(tensor._local_tensor)
            else:
                whole = tensor.redistribute(placements=sharding.resolved)
                shards.append(wait_tensor(whole._local_tensor))
        return shards

    def _infos(self, local: Sequence[TensorInfo]) -> Sequence[TensorInfo]:
        """The metadata of the whole tensors for reports, from the metadata of their shards."""
        cached = self._plan.infos
        if cached is not None and cached[0] is local and cached[1] == self._positions:
            return cached[2]
        infos = []
        for tensor, row, info in zip(self._tensors, self._positions, local, strict=True):
            sharding = self._shardings[row]
            if sharding is not None and sharding.groups:
                info = TensorInfo(tensor.shape, info.dtype, info.device, info.order, sharding.shards, info.stored)
            infos.append(info)
        self._plan.infos = local, self._positions, tuple(infos)
        return self._plan.infos[2]

    def _identities(self) -> Tensor:
        return identity_rows(len(self._parameters), torch.empty(0, device=self._device))

    @property
    def _device(self) -> torch.device:
        both: Iterable[object] = itertools.chain(self._tensors, self._parameters)  # no tensor? that is refused later
        tensors = (tensor for tensor in both if isinstance(tensor, (Tensor, FlatShard)) and not tensor.is_meta)
        first = next(tensors, None)
        return device_of(require_member(None)) if first is None else first.device


def _metadata(tensors: Sequence[Any]) -> list[Any]:
    """For each tensor an object with the whole tensor's shape and dtype. Other items are returned unchanged."""
    try:
        return [tensor._spec.tensor_meta for tensor in tensors]  # a tenth of the time of reading shape and dtype
    except AttributeError:
        return [tensor._spec.tensor_meta if isinstance(tensor, DTensor) else _Meta.of(tensor) for tensor in tensors]


class _Meta(NamedTuple):
    shape: Any
    dtype: Any

    @classmethod
    def of(cls, tensor: Any) -> _Meta:
        parameter = getattr(tensor, "parameter", tensor)
        return cls(getattr(tensor, "shape", None), getattr(parameter, "dtype", None))


class _Packed(NamedTuple):
    """Rows packed for reduction: columns to sum, and columns to take the maximum of."""

    sums: Tensor  # [n, summed fields + 1]; the last column counts ranks with a NaN or Inf
    maxima: Tensor  # [n, other fields]; fields with merge "min" are negated


def _pack(table: Tensor, is_sharded: list[bool] | None = None) -> _Packed:
    """A table's rows packed for reduction; indices of sharded tensors get the rank in the bits above them."""
    nonfinite = table[:, _fields.NONFINITE].sum(1, keepdim=True) > 0
    sums = torch.cat([table[:, _SUMMED], nonfinite.to(torch.float64)], 1)
    columns = {column: table[:, column] for column, _ in _EXTREMES}
    if is_sharded is not None and any(is_sharded):
        rank = dist.get_rank() * 2.0 ** index_bits()
        offset = rank if all(is_sharded) else rank * _on_device(tuple(is_sharded), torch.float64, table.device)
        columns.update({column: columns[column] + offset for column in _INDICES})
    maxima = [-columns[column] if field.merge == "min" else columns[column] for column, field in _EXTREMES]
    return _Packed(sums, torch.stack(maxima, 1))


def _unpack(packed: _Packed) -> Tensor:
    """Rows with their columns in field order, and a last column: the number of ranks with a NaN or Inf."""
    rows = packed.sums.new_empty(len(packed.sums), _fields.COUNT + 1)
    rows[:, _SUMMED] = packed.sums[:, _SUMMED]
    for place, (column, field) in enumerate(_EXTREMES):
        rows[:, column] = -packed.maxima[:, place] if field.merge == "min" else packed.maxima[:, place]
    rows[:, -1] = packed.sums[:, -1]
    return rows


def _merged(packed: _Packed, rows: list[int] | None) -> _Packed:
    """Merges the given rows, at least one, into one; None merges all."""
    sums, maxima = packed
    if rows is not None and len(rows) != len(sums):
        index = _index(rows, sums)
        sums, maxima = sums[index], maxima[index]
    return _Packed(sums.sum(0, keepdim=True), maxima.amax(0, keepdim=True))


def _index(rows: Sequence[int], table: Tensor) -> Tensor:
    """The given rows as an index of ``table``; a list would be copied to its device every time."""
    return _on_device(tuple(rows), torch.int64, table.device)


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached, since a copy to the device may synchronize."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def _stacked(parts: list[_Packed], table: Tensor) -> _Packed:
    if not parts:
        return _pack(table[:0])
    return _Packed(torch.cat([part.sums for part in parts]), torch.cat([part.maxima for part in parts]))


def identity_rows(count: int, like: Tensor) -> Tensor:
    """Rows of tensors without elements: ``[count, len(FIELDS)]`` float64 on the device of ``like``."""
    rows = torch.zeros(count, _fields.COUNT, dtype=torch.float64, device=like.device)
    for column, field in _EXTREMES:
        rows[:, column] = field.identity
    return rows


def without_ranks(table: Tensor) -> Tensor:
    """The field columns of `Sharded.rows`' table, with the rank removed from the indices."""
    table = table[:, : _fields.COUNT].clone()
    for column in _INDICES:
        index = table[:, column]
        table[:, column] = torch.where(index.isfinite(), index % 2.0 ** index_bits(), index)
    return table
