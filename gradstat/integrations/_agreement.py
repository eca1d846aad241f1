"""What several ranks do together because one of them wants to: one small exchange per step, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Agreement:
    """Whether any rank wants something. Made and closed by all ranks together.

    The exchange runs over gloo, between hosts: it waits for the other ranks to come to the same step, and for no
    device. On a single rank nothing is exchanged.

    Args:
        world_size: How many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self._group: Any = None
        if world_size > 1:
            import torch.distributed as dist

            if dist.is_available() and dist.is_initialized():
                self._group = dist.new_group(backend="gloo")

    def any_of(self, wants: Sequence[bool]) -> list[bool]:
        """For each place, whether any rank says True there. Every rank has to call this, with as many places."""
        if self._group is None:
            return list(wants)
        import torch.distributed as dist

        votes = torch.tensor([float(want) for want in wants], device="cpu")
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        return [vote > 0 for vote in votes.tolist()]

    def close(self) -> None:
        """Ends it; may be called twice, also after the process group has ended."""
        group, self._group = self._group, None
        if group is not None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group(group)
