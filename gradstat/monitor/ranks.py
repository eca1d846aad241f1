"""`RankVotes`: what ranks agree on in each step, so that all respond to a finding in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradstat._core.host_copy import HostCopy


class RankVotes:
    """Small collectives in each step, without a host sync on a GPU. All ranks have to call them in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._votes: HostCopy | None = None

    def mean(self, loss: Tensor | float | None) -> Tensor | None:
        """The mean loss over the ranks that have one, so that all find the same; None on a rank without a loss."""
        sums = torch.full((2,), float(loss is not None), dtype=torch.float64, device=self._device)
        if loss is not None:
            sums[0] = loss  # the other element counts the losses
        dist.all_reduce(sums)
        return None if loss is None else sums[0] / sums[1]

    def any_of(self, requests: Sequence[bool], wait: bool) -> list[bool]:
        """For each element, whether it is True on any rank; on a GPU, unless ``wait``, as of the previous call."""
        votes = torch.zeros(len(requests), device=self._device)
        for i, is_requested in enumerate(requests):
            if is_requested:
                votes[i].fill_(1.0)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        previous, self._votes = self._votes, HostCopy(votes)
        due = [self._votes] if wait or not self._votes.needs_copy else []
        if previous is not None and previous.needs_copy:  # the previous call returned without its votes
            due.append(previous)
        received = [votes.wait() for votes in due]
        if wait:
            self._votes = None
        return [any(votes[i] > 0 for votes in received) for i in range(len(requests))]
