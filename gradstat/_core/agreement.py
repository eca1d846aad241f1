"""Reductions of rows over ranks that may have different tensors: all ranks learn of it, and rows are not mixed.

A reduction needs buffers of the same size on all ranks. So a list of tensors that the group has not reduced before is
announced first, and all ranks know the largest number of rows that any of them has. Every later reduction has that many
rows, behind a header with a checksum of the list. A rank whose list is new sends zeros instead of rows and waits for
the header. If the list is new on all ranks and is the same, the ranks repeat the reduction with their rows. So all
ranks issue the same collectives whatever lists they have, and a known list needs only one reduction.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradstat._core.collectives import format_ranks, gather_by_rank, reduce_together_

# A header counts the ranks that failed and those whose list is new, and sums the checksums.
_HEADER = 3
# A sum of this many bits over 2**20 ranks is exact in float64.
_CHECKSUM_BYTES = 4
_MOST_KNOWN = 1 << 16
_reducers: weakref.WeakKeyDictionary[ProcessGroup, dict[object, Reducer]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ListDescription:
    """What has to be the same on all ranks about a list of tensors: one item for each tensor in every column."""

    names: tuple[str, ...] | None  # None if unknown
    metadata: tuple[Any, ...]  # have ``shape`` and ``dtype``
    layouts: tuple[str, ...]  # in words

    def take(self, rows: Sequence[int]) -> ListDescription:
        names = None if self.names is None else tuple(self.names[row] for row in rows)
        return ListDescription(names, *(tuple(part[row] for row in rows) for part in (self.metadata, self.layouts)))

    @functools.cached_property
    def checksum(self) -> int:
        """Equal for equal lists; for others with a chance of 2**-32."""
        return _checksum(self)

    def lines(self) -> list[str]:
        """Each tensor in words."""
        lines = []
        for i, (about, layout) in enumerate(zip(self.metadata, self.layouts, strict=True)):
            name = "" if self.names is None else f"{self.names[i]!r} "
            sizes = None if about.shape is None else list(about.shape)
            lines.append(f"{name}{str(about.dtype).removeprefix('torch.')}{sizes}{layout and ' as '}{layout}")
        return lines


@functools.lru_cache(maxsize=64)
def _checksum(description: ListDescription) -> int:
    text = "\n".join(description.lines()).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=_CHECKSUM_BYTES).digest(), "little")


class Reducer:
    """The reductions of one kind over a group. All its ranks make the same calls, possibly with different lists."""

    def __init__(self, group: ProcessGroup, kind: object) -> None:
        self._group, self._world = group, dist.get_world_size(group)
        self._kind = zlib.crc32(repr(kind).encode())
        self._ranks = format_ranks(dist.get_process_group_ranks(group))
        self._rows = 0  # in every reduction; the same on all ranks, as is what is known
        self._agreed: set[int] = set()

    @classmethod
    def of(cls, group: ProcessGroup, kind: object) -> Reducer:
        """The reducer of ``group`` for one ``kind`` of reductions: rows of one width, by the same operations."""
        by_kind = _reducers.setdefault(group, {})
        if kind not in by_kind:
            by_kind[kind] = cls(group, kind)
        return by_kind[kind]

    def _checksum(self, listed: ListDescription) -> int:
        """Of a call: reductions of another kind are other calls, also of the same list."""
        return listed.checksum ^ self._kind

    def announce(self, listed: ListDescription, rows: int, widths: tuple[int, int], device: torch.device) -> str | None:
        """Before `reduce`: makes a list known that is new, by one more reduction, for which the host waits.

        Returns the difference, in words, if the list is not new on all ranks, or not the same. Then all
        others know, and `reduce` must not be called. ``rows`` is how many rows `reduce` will get, ``widths`` the number
        of their columns to be summed, and to be maximised.
        """
        checksum = self._checksum(listed)
        if checksum in self._agreed:
            return None
        like = torch.empty(0, dtype=torch.float64, device=device)
        sums, maxima = (like.new_zeros(self._rows, width) for width in widths)
        header, _, _ = self._reduced(sums, maxima, listed, like.new_zeros(()), is_new=True)
        _, new, total = header.tolist()
        everyone = new == self._world
        if everyone and total == checksum * self._world:
            if len(self._agreed) == _MOST_KNOWN:
                self._agreed.clear()
            self._agreed.add(checksum)
            self._rows = max(self._rows, rows)
            return None
        if everyone or _host_sees(device):
            return self._difference(listed)
        return (  # ranks whose list is known do not wait for the header, so nothing can be gathered from them
            f"rank {dist.get_rank()} has other tensors than in the calls before, unlike at least one of "
            f"{self._ranks}. {_ADVICE}"
        )

    def reduce(
        self, sums: Tensor, maxima: Tensor, listed: ListDescription, failed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, str | None]:
        """Reduces ``sums`` and ``maxima``, ``[rows, width]`` each, and ``failed``, a 0-d sum, over the ranks.

        If a rank had other tensors, the rows have no meaning: then the difference is returned in words if the group's
        tensors are on the CPU. On other devices, where the host would have to wait, ``failed`` is infinite instead.
        """
        header, sums, maxima = self._reduced(sums, maxima, listed, failed, is_new=False)
        others = 0.0, float(self._checksum(listed) * self._world)
        if not _host_sees(header.device):
            differs = header[1:] != _pair(*others, header.device)
            return sums, maxima, header[0] + torch.where(differs, math.inf, 0.0).sum(), None
        numbers = header.tolist()
        difference = None if (numbers[1], numbers[2]) == others else self._difference(listed)
        return sums, maxima, header[0], difference

    def _reduced(
        self, sums: Tensor, maxima: Tensor, listed: ListDescription, failed: Tensor, is_new: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The header and the rows given, reduced with as many rows as any rank may have.

        Gloo ends the process if ranks reduce different sizes. So on the CPU the sums are as large as those of the
        largest kind, and maxima follow only if the header says that all ranks make this call.
        """
        count, width = sums.shape
        checksum, host_sees = self._checksum(listed), _host_sees(sums.device)
        kinds = _reducers[self._group].values() if host_sees else (self,)
        parts = [failed.reshape(1), _pair(float(is_new), float(checksum), sums.device), sums.reshape(-1)]
        missing = max(kind._rows for kind in kinds) - count
        if missing:
            parts.append(sums.new_zeros(missing * width))
        every = {dist.ReduceOp.SUM: torch.cat(parts)}
        largest: dict[Any, Tensor] = {}
        if maxima.shape[1] and self._rows:
            largest[dist.ReduceOp.MAX] = torch.cat([maxima, maxima.new_zeros(self._rows - count, maxima.shape[1])])
        reduce_together_(every if host_sees else every | largest, self._group, "gradstat")
        reduced = every[dist.ReduceOp.SUM]
        header, body = reduced[:_HEADER], reduced[_HEADER : _HEADER + count * width].view(count, width)
        if host_sees and largest:
            if header[1:].tolist() != [0.0, float(checksum * self._world)]:
                return header, body, maxima
            reduce_together_(largest, self._group, "gradstat")
        return header, body, largest[dist.ReduceOp.MAX][:count] if largest else maxima

    def _difference(self, listed: ListDescription) -> str:
        """The first difference between the ranks' lists. All ranks of the group call this together; waits."""
        by_rank = gather_by_rank(tuple(listed.lines()), [self._group], "gradstat")
        usual = Counter(by_rank.values()).most_common(1)[0][0]
        like = next(rank for rank, lines in by_rank.items() if lines == usual)
        apart = [rank for rank, lines in by_rank.items() if lines != usual]
        if not apart:  # a checksum was of another call
            return f"{self._ranks} did not make the same calls in the same order. {_ADVICE}"
        theirs = by_rank[apart[0]]
        place = next(i for i in itertools.count() if theirs[i : i + 1] != usual[i : i + 1])
        seen, expected = (lines[place] if place < len(lines) else "none" for lines in (theirs, usual))
        return (
            f"{format_ranks(apart)} {'has' if len(apart) == 1 else 'have'} other tensors than rank {like}: number "
            f"{place + 1} is {seen} on rank {apart[0]} (of {len(theirs)}), {expected} on rank {like} "
            f"(of {len(usual)}). {_ADVICE}"
        )


_ADVICE = (
    "Pass the same tensors on all ranks: the same names, shapes and dtypes, in the same order. Tensors that only "
    "some ranks have need extra_groups"
)


def _host_sees(device: torch.device) -> bool:
    """Whether the host reads numbers on ``device`` without waiting."""
    return device.type == "cpu"


@functools.lru_cache(maxsize=1 << 14)  # a program may clip each parameter by itself, as a list of its own
def _pair(is_new: float, checksum: float, device: torch.device) -> Tensor:
    """Cached, since a copy to the device may synchronize."""
    return torch.tensor((is_new, checksum), dtype=torch.float64, device=device)
