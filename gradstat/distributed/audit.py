"""`audit_norm`: whether the gradient norm that a framework reports is that of the whole model, and if not, why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradstat import _fields
from gradstat._core.collectives import format_ranks, gather_by_rank, require_member
from gradstat._core.engines import FlatShard
from gradstat._core.measurement import without_scale
from gradstat._core.parameters import gradients_of, labels_of, named_parameters_of
from gradstat._core.sharded import Sharding
from gradstat._core.tensors import readable, why_not_measured
from gradstat._core.text import count_of, lines_of, listed, nan_and_inf, printable, wrapped
from gradstat.check import stats
from gradstat.distributed._explanations import Explanation, NormPart, explain
from gradstat.distributed._sketch import WIDTH, Sketch, distance, sketches
from gradstat.tensor_stats import Judged, l2_norm_of

_CALLER = "audit_norm"
# Two tensors are the same up to rounding if they are no further apart than this share of their norm. Sums of 64 random
# tensors in another order are up to 5e-7 apart in float32 and 0.022 in bfloat16, of 512 up to 7e-7 and 0.051. Parts,
# and addends of a sum over ranks, are about 1 apart.
_NEAR = 0.05
# The variance over the mean square, below which parameters are near 1 on all ranks, be they replicas or parts.
_VARIES = 0.01
_SHOWN, _NAMED, _LARGEST = 5, 3, 10
_SUM, _SQUARES, _MIN, _MAX = (_fields.INDEX[name] for name in ("sum", "sq_sum", "min", "max"))


@dataclass(frozen=True)
class NormAudit(Judged):
    """The result of `audit_norm`, the same on every rank that took part.

    Attributes:
        whole: The L2 norm of all gradients of all ranks, each counted once; NaN if one is not finite.
        reported: The norm that each rank reported, in the order of ``ranks``.
        agrees: Whether all reported norms are ``whole``, within ``tolerance``.
        explanations: If not, mistakes that would produce the reported norms, the simplest first. Several may fit, so
            none is certain.
        parts: The gradients, or parts of them, that ``whole`` counts.
        suspicions: Other signs of a mistake, in words, whatever norm was reported.
        tolerance: The relative difference that rounding explains.
        ranks: The global ranks that took part.
    """

    whole: float
    reported: tuple[float, ...]
    agrees: bool
    explanations: tuple[Explanation, ...]
    parts: tuple[NormPart, ...]
    suspicions: tuple[str, ...]
    tolerance: float
    ranks: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether the reported norm is right, and nothing else looks wrong."""
        return self.agrees and not self.suspicions

    def __str__(self) -> str:
        given = list(dict.fromkeys(f"{norm:.6g}" for norm in self.reported))
        norms, verb = ("norm", "is") if len(given) == 1 else ("norms", "are")
        title = (
            f"gradstat: the {norms} {listed(given, _NAMED)} that {count_of(len(self.ranks), 'rank')} reported {verb} "
        )
        lines = [f"{title}right", f"  counted: {', '.join(self._counted())}"]
        if not self.agrees:
            right = f"the norm of all gradients is {self.whole:.6g} (relative tolerance {self.tolerance:.1g})"
            lines[0] = f"{title}WRONG: {right}"
        if self.explanations:
            lines.append(f"  {'each of these' if len(self.explanations) > 1 else 'this'} would explain it:")
            lines += lines_of(self.explanations, _SHOWN, lambda one: f"    {one}", "    and {} more")
        elif not self.agrees and not math.isnan(self.whole):
            largest = sorted(self.parts, key=lambda part: -part.norm)[:_LARGEST]
            if len(given) == 1 and 0 < self.whole < self.reported[0]:
                clip = f"a clip by {self.whole / self.reported[0]:.3g} after that norm"
                lines.append(f"  {clip} would explain it: pass the norm of a clip with the limit 1e9")
            else:
                lines.append(
                    "  no explanation found. Did anything, such as a clip, change the gradients after that norm?"
                )
            lines.append("  The largest contributions:")
            for part in largest:
                where = format_ranks(part.ranks) if len(part.ranks) == 1 else f"on {len(part.ranks):,} ranks"
                lines.append(f"    {printable(part.name)} ({part.kind}, {where}): {part.norm:.6g}")
        return "\n".join(map(wrapped, [*lines, *(f"  {suspicion}" for suspicion in self.suspicions)]))

    def _counted(self) -> Iterator[str]:
        """How many tensors of each kind there are, and their norm."""
        for kind in dict.fromkeys(part.kind for part in self.parts):
            some = [part for part in self.parts if part.kind == kind]
            tensors = len({part.name for part in some})
            pieces = f"{len(some):,} pieces, " if len(some) > tensors else ""
            norm = math.hypot(*(part.norm for part in some))
            yield f"{count_of(tensors, f'{kind} tensor')} ({pieces}norm {norm:.6g})"


def audit_norm(target: Any, reported: Tensor | float, *, group: dist.ProcessGroup | None = None) -> NormAudit:
    """Checks the gradient norm that a framework reports, and explains it if it is wrong. ::

        loss.backward()
        norm = the_frameworks_clip(model, max_norm=1e9)  # a limit so high that gradients stay as they are
        print(gradstat.distributed.audit_norm(model, norm))

    It is a collective: all ranks of the group have to call it. Call it in a few steps only. It changes nothing. It
    reads gradients and parameters twice, gathers about 500 bytes per tensor from each rank, as objects, and waits for
    the device.

    Replicas on several ranks count once. For distributed tensors and the flat shards of DeepSpeed and Megatron-Core it
    is known which tensors are replicas. For plain tensors, the parameters show it, since replicas begin equal and stay
    equal: they are compared by random projections, which separate replicas that differ by rounding from different
    parts. Where parameters cannot show it, as the ones and zeros of a fresh layer, the gradients are compared.

    Args:
        target: As for `gradstat.check`.
        reported: The norm that the framework reports of the gradients as they are now: a number or a tensor of one
            element, which may differ between ranks.
        group: The ranks that have the model; None for all.

    Returns:
        The same audit on all ranks.

    Raises:
        TypeError: ``target`` is none of these, ``reported`` is no number, or a gradient cannot be measured.
        ValueError: This rank is not in ``group``, or no rank has a gradient.
        RuntimeError: Another rank could not measure its gradients; the message names it.
        UnreachableRankError: A rank did not take part (where the backend reports it; see there).
    """
    member = require_member(group)
    error: Exception | None = None
    mine: Any = None
    try:
        number = reported.full_tensor() if isinstance(reported, DTensor) else reported
        mine = float(number), _pieces_of(target)
    except Exception as caught:  # the other ranks wait for this one
        error, mine = caught, f"{type(caught).__name__}: {caught}"
    by_rank = gather_by_rank(mine, [member], _CALLER)
    if error is not None:
        raise error
    failed = [rank for rank, theirs in by_rank.items() if isinstance(theirs, str)]
    if failed:
        raise RuntimeError(f"{format_ranks(failed)} could not measure the gradients: {by_rank[failed[0]]}")
    ranks = tuple(dist.get_process_group_ranks(member))
    return _audited(tuple(by_rank[rank][0] for rank in ranks), {rank: by_rank[rank][1] for rank in ranks})


class _Piece(NamedTuple):
    """What a rank says of one gradient of its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: tuple[Any, ...]  # of the shard of a distributed tensor; empty for a plain tensor
    mesh: tuple[int, ...]  # the ranks that such a tensor is distributed over
    is_frozen: bool
    row: Sketch
    sketch: Sketch
    parameter: Sketch  # its sketch, NaN if it says nothing
    varies: bool  # whether also parameters that are near show that they are the same


def _pieces_of(target: Any) -> list[_Piece]:
    """This rank's gradients. Pending sums of distributed tensors are reduced first."""
    named = named_parameters_of(target)
    gradients = gradients_of(named.parameters, named.engine)
    names, owners = list(labels_of(named, gradients).names()), gradients.owners(named.parameters)
    whys = (why_not_measured(name, gradient) for name, gradient in zip(names, gradients.tensors, strict=True))
    why = next(filter(None, whys), None)
    if why is not None:
        raise TypeError(f"{why}, so that its norm cannot be audited")
    placed = [(name, owner, *_placed(one)) for name, owner, one in zip(names, owners, gradients.tensors, strict=True)]
    placed = [one for one in placed if one[2] is not None]  # this rank may be outside of a mesh
    shards = readable([shard for _, _, shard, _, _ in placed], lambda i: placed[i][0])
    rows = stats(shards).cpu().numpy()
    if named.engine is not None:
        rows = without_scale(rows, named.engine.loss_scale)
    of_parameters = _sketches_of([owner for _, owner, *_ in placed])
    dtypes = [str(shard.dtype).removeprefix("torch.") for shard in shards]
    return [
        _Piece(name, dtype, tuple(shard.shape), place, mesh, not owner.requires_grad, row, sketch, *own)
        for (name, owner, shard, place, mesh), dtype, row, sketch, own in zip(
            placed, dtypes, rows, sketches(shards), of_parameters, strict=True
        )
    ]


def _placed(gradient: Any) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """This rank's shard of a gradient, its place in the whole, and the ranks of its mesh; None outside of the mesh."""
    if isinstance(gradient, FlatShard):
        return gradient._local_tensor, ("flat", gradient.start), tuple(dist.get_process_group_ranks(gradient.group))
    if not isinstance(gradient, DTensor):
        return gradient, (), ()
    mesh = gradient.device_mesh
    resolved = Sharding.of(mesh, tuple(gradient.placements)).resolved
    whole = gradient if resolved is None else gradient.redistribute(placements=resolved)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None, (), ()
    pairs = zip(whole.placements, coordinate, strict=True)
    place = tuple((d, str(p), at) for d, (p, at) in enumerate(pairs) if not p.is_replicate())
    return whole.to_local(), ("mesh", *place), tuple(mesh.mesh.flatten().tolist())


def _sketches_of(parameters: Sequence[Tensor]) -> list[tuple[Sketch, bool]]:
    """The sketches of ``parameters``, and whether they vary. NaN for constants, twins and shards, which are alike."""
    known = [i for i, p in enumerate(parameters) if not isinstance(p, DTensor) and why_not_measured("", p) is None]
    whole = readable([parameters[i].detach() for i in known], str)
    found = [(np.full(WIDTH, math.nan), False)] * len(parameters)
    made = sketches(whole)
    seen = Counter(sketch.tobytes() for sketch in made)
    for i, tensor, row, sketch in zip(known, whole, stats(whole).cpu().numpy(), made, strict=True):
        if row[_MIN] < row[_MAX] and seen[sketch.tobytes()] == 1:
            found[i] = sketch, bool(1 - row[_SUM] ** 2 / (row[_SQUARES] * tensor.numel()) > _VARIES)
    return found


class _Counted(list[tuple[int, _Piece]]):
    """Replicas, by rank, which count once."""

    @property
    def first(self) -> _Piece:
        return self[0][1]

    @property
    def differs(self) -> bool:
        return any(distance(self.first.sketch, piece.sketch) > _NEAR for _, piece in self[1:])

    def has(self, piece: _Piece) -> bool:
        """Whether a piece of this name, shape and place is another replica."""
        first = self.first
        if first.mesh and first.mesh == piece.mesh:
            return True
        if np.array_equal(first.parameter, piece.parameter):
            return True
        if first.varies and piece.varies:
            return distance(first.parameter, piece.parameter) <= _NEAR
        return distance(first.sketch, piece.sketch) <= _NEAR


def _counted(by_rank: Mapping[int, Sequence[_Piece]]) -> list[_Counted]:
    """What counts once: replicas of one name, and those of other names on other ranks with the very same parameter."""
    alike: dict[tuple[Any, ...], list[_Counted]] = {}
    for rank, pieces in by_rank.items():
        for piece in pieces:
            found = alike.setdefault((piece.name, piece.shape, piece.place), [])
            known = next((one for one in found if one.has(piece)), None)
            if known is None:
                found.append(_Counted([(rank, piece)]))
            else:
                known.append((rank, piece))
    _join_vectors(alike)
    joined: dict[Any, _Counted] = {}
    for number, one in enumerate(each for found in alike.values() for each in found):
        first = one.first
        is_known = not np.isnan(first.parameter).any()
        key: Any = (first.shape, first.place, first.parameter.tobytes()) if is_known else number
        other = joined.get(key)
        if other is not None and {rank for rank, _ in other}.isdisjoint(rank for rank, _ in one):
            other.extend(one)
        else:
            joined[key if other is None else number] = one
    return list(joined.values())


def _join_vectors(alike: Mapping[tuple[Any, ...], list[_Counted]]) -> None:
    """Takes vectors that look like those of norm layers for replicas, if parameters say nothing and gradients differ.

    Such a vector is as long as a matrix is wide, and no other tensor of its module is a part.
    """
    split = {key: ones for key, ones in alike.items() if len(ones) > 1 and not key[2]}
    known = {key[0].rpartition(".")[0] for key, ones in split.items() if any(one.first.varies for one in ones)}
    widths = {size for _, shape, _ in alike if len(shape) > 1 for size in shape}
    for (name, shape, _), ones in split.items():
        if {*shape} <= widths and name.rpartition(".")[0] not in known:
            ones[:] = [_Counted(member for one in ones for member in one)]


def _parts_of(counted: Sequence[_Counted]) -> list[NormPart]:
    of_name, parts = Counter(one.first.name for one in counted), []
    for one in counted:
        first, ranks = one.first, tuple(rank for rank, _ in one)
        kind = "part" if of_name[first.name] > 1 else "replicated" if len(ranks) > 1 else "alone"
        if len({piece.name for _, piece in one}) > 1:
            kind = "tied"
        if len(first.place) > 1:
            kind = "sharded"
        largest = max(0.0, -first.row[_MIN], first.row[_MAX])
        numbers = float(l2_norm_of(first.row)), float(largest)
        parts.append(NormPart(first.name, kind, ranks, *numbers, first.dtype, first.is_frozen, one.differs))
    return parts


def _audited(reported: tuple[float, ...], by_rank: Mapping[int, Sequence[_Piece]]) -> NormAudit:
    """The audit of what all ranks have sent."""
    once, ranks = _counted(by_rank), tuple(by_rank)
    if not once:
        raise ValueError("no rank has a gradient; audit_norm() reads the .grad of parameters after backward()")
    tolerance = max(_tolerance(once, norm) for norm in reported)
    # Parts of a model that began alike, such as experts, look like replicas that were not reduced, of which no norm is
    # right. So they are taken for parts if that makes the reported norm right; or for what the first rank
    # has, if all report the same.
    each = [one for same in once for one in ([_Counted([it]) for it in same] if same.differs else [same])]
    of_parts, whole = (_norm_of([one.first for one in counted]) for counted in (each, once))
    agree = [all(math.isclose(norm, right, rel_tol=tolerance) for norm in reported) for right in (of_parts, whole)]
    agrees = agree[0] or (agree[1] and len({*reported}) == 1)
    whole, parts = (of_parts, _parts_of(each)) if agree[0] else (whole, _parts_of(once))
    nonfinite = list(_nonfinite(by_rank))
    if nonfinite:
        whole, agrees = math.nan, not any(map(math.isfinite, reported))
    own = [_norm_of(pieces) for pieces in by_rank.values()]
    explanations = () if agrees or nonfinite else tuple(explain(parts, own, reported, ranks, whole, tolerance))
    suspicions = (*nonfinite, *_differing(once), *_unlike(by_rank))
    return NormAudit(whole, reported, agrees, explanations, tuple(parts), suspicions, tolerance, ranks)


def _norm_of(pieces: Sequence[_Piece]) -> float:
    return float(l2_norm_of(_fields.merge(np, np.stack([piece.row for piece in pieces])))) if pieces else 0.0


def _tolerance(counted: Sequence[_Counted], reported: float) -> float:
    """The relative difference that rounding explains.

    A norm that a gradient's dtype of 16 bits represents was rounded to it, as torch's clips do. Another one may be that
    of norms of single tensors which were, by up to half the epsilon, and mostly not all one way. Sums of n squares in
    float32, in many lanes, have a relative error of about its epsilon times the root of n over their number, here 64.
    """
    most, tolerance = max(math.prod(one.first.shape) for one in counted), 4e-6
    for dtype in {getattr(torch, one.first.dtype) for one in counted} - {torch.float32, torch.float64}:
        is_rounded = torch.tensor(reported, dtype=torch.float64).to(dtype).item() == reported
        tolerance = max(tolerance, torch.finfo(dtype).eps / (1 if is_rounded else 4))
    return tolerance + torch.finfo(torch.float32).eps * math.sqrt(most / 64)


# What looks wrong ----------------------------------------------------------------------------------------------------


def _nonfinite(by_rank: Mapping[int, Sequence[_Piece]]) -> Iterator[str]:
    for rank, pieces in by_rank.items():
        for piece in pieces:
            nan, inf = (int(count) for count in piece.row[_fields.NONFINITE])
            if nan or inf:
                every = [one for of_rank in by_rank.values() for one in of_rank]
                are_all = all(one.row[_fields.NONFINITE].any() for one in every) and len(every) > 1
                more = "; all gradients have some, as after a clip with a NaN norm: call gradstat.check before it"
                where = f"{printable(piece.name)} on rank {rank}, the first that is not finite"
                yield f"{nan_and_inf(nan, inf)} in {where}{more * are_all}"
                return


def _differing(counted: Sequence[_Counted]) -> Iterator[str]:
    differing = [one for one in counted if one.differs]
    if differing:
        ranks = format_ranks(sorted({rank for one in differing for rank, _ in one}))
        yield (
            f"{count_of(len(differing), 'gradient')} of the same parameters differ between {ranks} "
            f"({listed([one.first.name for one in differing], _NAMED)}): they were not reduced yet, an all-reduce is "
            "missing, or the ranks have different parts that were initialised alike"
        )


def _unlike(by_rank: Mapping[int, Sequence[_Piece]]) -> Iterator[str]:
    """Ranks with other tensors than most of the others."""
    names = {rank: frozenset(piece.name for piece in pieces) for rank, pieces in by_rank.items()}
    (usual, count), *_ = Counter(names.values()).most_common(1)
    for rank, own in names.items() if 2 * count > len(names) else ():
        for which, only in (("does not have", usual - own), ("alone has", own - usual)):
            if only:
                yield f"rank {rank} {which} {count_of(len(only), 'gradient')}, {listed(sorted(only), _NAMED)}"
