"""One measurement of many tensors of several kinds: one kernel, one transfer, and rows by kind on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradstat import _fields
from gradstat._arrival import Arrival
from gradstat._parts import Part
from gradstat._tensors import TensorInfo, is_distributed, moved
from gradstat.monitor.rows import Floats
from gradstat.stats import measure_directly, measure_generally, measure_parts

_WIDTH = len(_fields.FIELDS)


class Segment(NamedTuple):
    """Tensors of one kind among those measured together.

    Attributes:
        kind: As in `Recording.tables`, or ``"scalars"``.
        names: Of all tensors of the kind, those included that were not there.
        positions: Of those measured among ``names``; None for all of them.
        measured: How many were measured.
    """

    kind: str
    names: tuple[str, ...]
    positions: list[int] | None
    measured: int


class Arrived(NamedTuple):
    """Rows of one segment on the host.

    Attributes:
        segment: Which.
        rows: ``[measured, len(FIELDS)]``.
        every: Of all tensors measured together; the same object as long as they stay alike.
        start: Where those of the segment begin.
    """

    segment: Segment
    rows: Floats
    every: Sequence[TensorInfo]
    start: int

    @property
    def infos(self) -> Sequence[TensorInfo]:
        """Of each tensor measured."""
        return self.every[self.start : self.start + self.segment.measured]


class Numbers:
    """Rows of some segments on their way to the host."""

    __slots__ = ("_arrivals", "_parts", "_total", "flag", "segments")

    def __init__(
        self, segments: list[Segment], parts: list[Part], total: Tensor | None = None, flagged: bool = False
    ) -> None:
        """With ``flagged`` they have a ``flag``: 1 if a tensor of the first segment is not finite, on the device."""
        self.segments = segments
        self.flag = _nonfinite_flag(segments[0].measured, parts, total) if flagged and parts else None
        # Of the parts only what keeps no table on a device.
        self._parts = [(part.positions, part.infos) for part in parts]
        self._arrivals = [Arrival(part.table) for part in parts]
        self._total = None if total is None else Arrival(total)

    @property
    def travels(self) -> bool:
        """Whether there is a way to go."""
        return any(arrival.travels for arrival in self._arrivals)

    def table(self) -> Floats:
        """The rows of all segments, one behind the other; waits for them, once per device."""
        if len(self._arrivals) == 1 and self._total is None:
            only: Floats = self._arrivals[0].wait()
            return only
        tables = [arrival.wait() for arrival in self._arrivals]
        if not tables:
            return np.empty((0, _WIDTH))
        if len(tables) == 1:
            return tables[0][:, :_WIDTH]  # type: ignore[no-any-return]  # distributed tensors have a column more
        joined: Floats = np.concatenate(tables)[self._order()]
        return joined

    def total(self) -> Floats | None:
        """The row of all tensors of all ranks, if they are distributed; waits for it."""
        return None if self._total is None else self._total.wait()[0]

    def infos(self) -> Sequence[TensorInfo]:
        """Of the tensors of all rows; the same object as long as they stay alike."""
        if len(self._parts) == 1:
            return self._parts[0][1]
        every = [info for _, some in self._parts for info in some]
        return [every[i] for i in self._order()] if every else ()

    def _order(self) -> Any:
        return np.argsort([position for positions, _ in self._parts for position in positions or ()])

    def split(self, table: Floats) -> list[Arrived]:
        """The rows of each segment."""
        arrived, start, infos = [], 0, self.infos()
        for segment in self.segments:
            end = start + segment.measured
            arrived.append(Arrived(segment, table[start:end], infos, start))
            start = end
        return arrived


def _nonfinite_flag(count: int, parts: list[Part], total: Tensor | None) -> Tensor:
    """1 if an element of the first ``count`` tensors is not finite, else 0: 0-d float32 where the first one lies."""
    if total is not None:
        return (total[0, _fields.NONFINITE].sum() > 0).to(torch.float32)
    flags = []
    for part in parts:
        rows = part.table
        if part.positions is None:
            rows = rows[:count]
        else:
            rows = rows[[i for i, position in enumerate(part.positions) if position < count]]
        flags.append((rows[:, _fields.NONFINITE].sum() > 0).to(torch.float32))
    home = flags[0].device
    return flags[0] if len(flags) == 1 else torch.stack([moved(flag, home) for flag in flags]).amax()


def measured(
    segments: list[Segment],
    tensors: list[Tensor],
    owners: list[Tensor] | None,
    backend: str | None,
    flagged: bool = False,
) -> list[Numbers]:
    """Measures tensors, those of each segment behind those of the segment before.

    Ordinary tensors on one device take one launch and one transfer. If some are distributed, each segment is measured
    by itself, two collectives for each group of ranks.

    Args:
        segments: What the tensors are.
        tensors: Of all segments.
        owners: Of the first segment, if it is gradients: all parameters, so that ranks without some of the gradients
            take part as well.
        backend: As in `gradstat.check`.
        flagged: As for `Numbers`, of the first segment.

    Raises:
        As `gradstat.check`.
    """
    name_of = _namer(segments)
    if not tensors:
        return [Numbers(segments, [])]
    parts = measure_directly(tensors, name_of, backend)
    if parts is None and is_distributed(tensors):
        return [
            _measured_over_ranks(segment, some, owners if i == 0 else None, backend, flagged and i == 0)
            for i, (segment, some) in enumerate(_split(segments, tensors))
        ]
    if parts is None:
        parts = measure_generally(tensors, name_of, backend)
    return [Numbers(segments, parts, flagged=flagged)]


def _measured_over_ranks(
    segment: Segment, tensors: list[Tensor], owners: list[Tensor] | None, backend: str | None, flagged: bool
) -> Numbers:
    name_of = _namer([segment])

    def measure(local: list[Tensor]) -> list[Part]:
        return measure_parts(local, name_of, backend)

    if not is_distributed(tensors):
        return Numbers([segment], measure(tensors), flagged=flagged)
    from gradstat._spread import Spread

    spread = Spread(tensors, tensors) if owners is None else Spread.of_gradients(owners)
    with torch.no_grad():
        rows = spread.rows(measure)
        # If another rank could not measure its part, nothing is known here either.
        failed = rows.failed > 0
        total = torch.where(failed, torch.nan, rows.total)
        part = rows.part._replace(table=torch.where(failed, torch.nan, rows.part.table))
    return Numbers([segment], [part], total, flagged)


def _split(segments: list[Segment], tensors: list[Tensor]) -> list[tuple[Segment, list[Tensor]]]:
    pieces, start = [], 0
    for segment in segments:
        pieces.append((segment, tensors[start : start + segment.measured]))
        start += segment.measured
    return pieces


def _namer(segments: list[Segment]) -> Callable[[int], str]:
    """What gives the name of the i-th tensor, for errors."""

    def name_of(i: int) -> str:
        for segment in segments:
            if i < segment.measured:
                return segment.names[i if segment.positions is None else segment.positions[i]]
            i -= segment.measured
        raise IndexError(i)

    return name_of
