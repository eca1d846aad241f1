"""Measures many tensors of several kinds together: one launch, one transfer, and rows by kind on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradstat import _fields
from gradstat._core import norms
from gradstat._core.collectives import UnreachableRankError
from gradstat._core.host_copy import HostRows
from gradstat._core.measure import Spread, measure, measure_ordinary
from gradstat._core.measurement import Measurement
from gradstat._core.tensors import ExtraGroups, is_distributed, to_device, why_not_measured
from gradstat.recording.kinds import STATE, kind_of

ReduceTo: TypeAlias = Literal["flag", "norm"] | None
"""What `PendingRows` computes of gradients on the device; ``"norm"`` means flag and norm."""


class Segment(NamedTuple):
    """Tensors of one kind among those measured together."""

    kind: str  # as in `Recording.tables`, or "scalars"
    names: tuple[str, ...]  # of all tensors of the kind, including absent ones
    positions: list[int] | None = None  # of the measured tensors in names; None if all were measured

    @property
    def measured(self) -> int:
        return len(self.names if self.positions is None else self.positions)


class PendingRows(NamedTuple):
    """Rows of some segments that are being copied to the host, and what is made of the first segment on its device."""

    segments: list[Segment]
    rows: HostRows
    flag: Tensor | None = None  # 1 if it has NaN or Inf
    norm: Tensor | None = None

    @classmethod
    def of(cls, segments: list[Segment], measured: Measurement, reduce_to: ReduceTo = None) -> PendingRows:
        if reduce_to is None or not measured.tables:
            return cls(segments, HostRows(measured))
        first = _first(segments[0].measured, measured)
        norm = norms.total_norm(first, 2.0) if reduce_to == "norm" else None
        return cls(segments, HostRows(measured), norms.any_nonfinite(first).to(torch.float32), norm)


def _first(count: int, measured: Measurement) -> Tensor:
    """The rows of the first ``count`` tensors, or their total, on the device of the first."""
    if measured.total is not None:
        return measured.total[:, : _fields.COUNT]
    tables, start = [], 0
    for table in measured.tables:
        rows = table[:count]
        if measured.order is not None:
            here = measured.order[start : start + len(table)]
            rows, start = table[[i for i, position in enumerate(here) if position < count]], start + len(table)
        tables.append(rows)
    home = tables[0].device
    return tables[0] if len(tables) == 1 else torch.cat([to_device(rows, home) for rows in tables])


def measure_segments(
    segments: list[Segment],
    tensors: list[Tensor],
    parameters: list[Tensor] | None,
    backend: str | None,
    reduce_to: ReduceTo,
    left_out: dict[str, list[str]],
    extra_groups: ExtraGroups | None = None,
) -> list[PendingRows]:
    """Measures tensors, given in the order of the segments; ``reduce_to`` as for `PendingRows`.

    Ordinary tensors on one device take one launch and one transfer. If some are distributed, or the first segment is
    spread over ``extra_groups``, each segment is measured separately, with two collectives per process group. If the
    first segment is gradients, ``parameters`` are all of the model, so that ranks without some gradients take part.
    Tensors that cannot be measured are in no segment of the result; ``left_out`` gets the reasons, by kind.
    """
    # Other ranks may have gradients and wait for this one.
    is_awaited = extra_groups is not None or (
        parameters is not None and segments[0].positions == [] and is_distributed(parameters)
    )
    measured = None if is_awaited else measure_ordinary(tensors, backend, to_host=True)
    if measured is not None:
        if reduce_to is None:  # the usual case
            return [PendingRows(segments, HostRows(measured))]
        return [PendingRows.of(segments, measured, reduce_to)]
    parts = []
    for i, segment in enumerate(segments):
        some, tensors = tensors[: segment.measured], tensors[segment.measured :]
        # All ranks must keep the same tensors: distributed gradients are left to `Sharded`, which tells other ranks.
        is_over_ranks = i == 0 and (is_awaited or is_distributed(some))
        is_kept = segment.kind == "scalars" or is_over_ranks
        parts += [(segment, some)] if is_kept else _measurable(segment, some, left_out)
    if not is_awaited and not any(is_distributed(some) for _, some in parts):
        segments, tensors = [segment for segment, _ in parts], [tensor for _, some in parts for tensor in some]
        return [PendingRows.of(segments, measure(tensors, lambda i: _name_of(segments, i), backend), reduce_to)]
    numbers, error = [], None  # the error of the gradients, without which nothing is known
    for i, (segment, some) in enumerate(parts):
        try:
            extra = extra_groups if i == 0 else None
            name_of = functools.partial(_name_of, [segment])
            of = parameters if i == 0 and (is_awaited or is_distributed(some)) else None
            # Without their extra groups, tensors that only some ranks have, such as experts, cannot be told apart.
            names = None if i and extra_groups is not None else functools.partial(tuple, segment.names)
            rows = measure(some, name_of, backend, Spread(of, names, extra))
        except UnreachableRankError:  # noqa: PERF203 - a collective takes longer than a try
            raise
        except Exception as raised:  # other ranks wait in collectives of later segments
            if i == 0:
                error = raised
            else:
                left_out.setdefault(segment.kind, []).append(f"{segment.names[0]!r} and others: {raised}")
        else:
            # If another rank could not measure its shard, the merged rows are NaN.
            numbers.append(PendingRows.of([segment], rows.nan_if_failed(), None if i else reduce_to))
    if error is not None:
        raise error
    return numbers


def _measurable(
    segment: Segment, tensors: list[Tensor], left_out: dict[str, list[str]]
) -> list[tuple[Segment, list[Tensor]]]:
    """The tensors of a segment that can be measured, in segments with their new names.

    A tensor subclass is replaced by its plain inner tensors: a parameter ``w`` by ``w.scale``, for example, and the
    state ``exp_avg`` by a state ``exp_avg.scale``. Gradients keep the positions of their parameters and are not split.
    """

    def is_kept(name: str, tensor: Tensor) -> bool:
        refusal = why_not_measured(name, tensor)
        if refusal is not None:
            left_out.setdefault(segment.kind, []).append(refusal)
        return refusal is None

    if segment.kind == "gradient":
        at = range(len(segment.names)) if segment.positions is None else segment.positions
        measurable = [(i, tensor) for i, tensor in zip(at, tensors, strict=True) if is_kept(segment.names[i], tensor)]
        if len(measurable) == len(tensors):
            return [(segment, tensors)]
        return [(segment._replace(positions=[i for i, _ in measurable]), [gradient for _, gradient in measurable])]
    by_kind: dict[str, tuple[list[str], list[Tensor]]] = {}
    for name, tensor in zip(segment.names, tensors, strict=True):
        for part, plain in plain_parts(tensor):
            if is_kept(name + part, plain):
                is_state = kind_of(segment.kind) is STATE
                names, some = by_kind.setdefault(segment.kind + part * is_state, ([], []))
                names.append(name if is_state else name + part)
                some.append(plain)
    return [(Segment(kind, tuple(names)), some) for kind, (names, some) in by_kind.items()]


def plain_parts(tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors inside a tensor, with the suffixes of their names."""
    if is_distributed([tensor]) or not is_traceable_wrapper_subclass(tensor):
        yield "", tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        for part, plain in plain_parts(getattr(tensor, attribute)):
            yield f".{attribute}{part}", plain


def _name_of(segments: list[Segment], i: int) -> str:
    """The name of the i-th tensor, for error messages."""
    for segment in segments:
        if i < segment.measured:
            return segment.names[i if segment.positions is None else segment.positions[i]]
        i -= segment.measured
    raise IndexError(i)
