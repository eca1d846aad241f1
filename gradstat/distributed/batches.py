"""Checks that ranks get different batches: with a sampler that does not shard, all of them train on the same data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradstat._core.collectives import device_of, format_ranks, gather, require_member
from gradstat._core.nested import leaves_in
from gradstat.distributed._checksum import checksums, combined, comparable, of_text
from gradstat.tensor_stats import Judged

_CALLER = "verify_batches"
_COMPARED_BY_REPR = (str, bytes, int, float, complex, type(None))


class RepeatedBatchError(RuntimeError):
    """Several ranks have the same batch. The message names these ranks."""


@dataclass(frozen=True)
class BatchReport(Judged):
    """The result of `verify_batches`, the same on every rank that took part.

    Attributes:
        repeated: The global ranks that have the same batch; one tuple for each batch that occurs more than once.
        ranks: The ranks that took part.
    """

    repeated: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether every rank has a different batch."""
        return not self.repeated

    def raise_if_repeated(self) -> None:
        """Raises `RepeatedBatchError`, which names the ranks, on every rank, unless `ok`."""
        if not self.ok:
            raise RepeatedBatchError(self._summary())

    def __str__(self) -> str:
        return f"gradstat: {self._summary()}"

    def _summary(self) -> str:
        if self.ok:
            return f"different batches on all {len(self.ranks)} ranks"
        same = "; ".join(f"the SAME BATCH on {format_ranks(ranks)}" for ranks in self.repeated)
        return f"{same} (of {len(self.ranks)} ranks). Does the sampler know its rank and the number of ranks?"


def verify_batches(batch: Any, group: dist.ProcessGroup | None = None) -> BatchReport:
    """Finds ranks that were given bit-identical batches, as by a sampler that does not shard.

    A collective: all ranks of the group have to call it, and get the same report. One all-gather of 8 bytes from each
    rank and one host sync.

    Args:
        batch: A tensor, or tensors in nested mappings, lists, tuples and dataclasses. Strings, bytes, numbers and None
            are compared, too.
        group: The ranks that should have different batches; None for all. With tensor or pipeline parallelism, pass the
            data-parallel group, since the other ranks of a model share their batch.

    Raises:
        TypeError: ``batch`` contains something else, or a tensor whose bits cannot be compared. The message says where.
        ValueError: This rank is not in ``group``.
        UnreachableRankError: A rank did not take part (where the backend reports it; see there).
    """
    members = require_member(group)
    device = device_of(members)
    words: list[str] = []
    tensors: list[Tensor] = []
    for path, leaf in leaves_in(batch, "batch"):
        if isinstance(leaf, Tensor):
            tensors.append(comparable(leaf.detach(), path))
            words.append(f"{path}: {leaf.dtype} {tuple(leaf.shape)}")
        elif isinstance(leaf, _COMPARED_BY_REPR):
            words.append(f"{path}: {leaf!r}")
        else:
            raise TypeError(
                f"{path} is of type {type(leaf).__name__}; expected tensors in mappings, lists, tuples and dataclasses"
            )
    with torch.no_grad():
        structure = torch.tensor([of_text("\n".join(words))], device=device)
        number = combined(torch.cat([structure, checksums(tensors, device)]))
        numbers = gather(number, members, _CALLER).tolist()
    ranks = tuple(dist.get_process_group_ranks(members))
    ranks_of: dict[int, list[int]] = {}
    for rank, theirs in zip(ranks, numbers, strict=True):
        ranks_of.setdefault(theirs, []).append(rank)
    return BatchReport(tuple(tuple(same) for same in ranks_of.values() if len(same) > 1), ranks)
