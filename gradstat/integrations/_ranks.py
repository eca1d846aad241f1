"""What several ranks find and decide together: small collectives in each step, for which no GPU is waited."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradstat._core.host_copy import HostCopy


class Ranks:
    """Collectives over all ranks, which every rank has to call in the same order.

    Args:
        device: Where this rank trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._votes: HostCopy | None = None

    def mean(self, loss: Tensor | None) -> Tensor | None:
        """The mean loss, so that all ranks find the same; None where there is none."""
        import torch.distributed as dist

        mine = torch.zeros((), device=self._device) if loss is None else loss.to(self._device)
        mean = mine.double() / dist.get_world_size()
        dist.all_reduce(mean)
        return None if loss is None else mean

    def any_of(self, wants: Sequence[bool], wait: bool) -> list[bool]:
        """For each place, whether any rank says True there.

        Args:
            wants: What this rank says; of the same length on all ranks.
            wait: Whether to wait for the answer. Otherwise, on a GPU, it is that of the call before.
        """
        import torch.distributed as dist

        votes = torch.zeros(len(wants), device=self._device)
        for i, want in enumerate(wants):
            if want:
                votes[i].fill_(1.0)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        before, self._votes = self._votes, HostCopy(votes)
        told = [self._votes] if wait or not self._votes.travels else []
        if before is not None and before.travels:  # one that was not waited for has not been heard yet
            told.append(before)
        heard = [votes.wait() for votes in told]
        if wait:
            self._votes = None
        return [any(votes[i] > 0 for votes in heard) for i in range(len(wants))]
