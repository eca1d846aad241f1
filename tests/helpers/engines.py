"""A stand-in for an engine that keeps gradients in a buffer of its own, split over the ranks."""

from types import SimpleNamespace

import torch.distributed as dist
from torch import Tensor, nn


class Megatron(nn.Module):
    """Like Megatron-Core's DistributedDataParallel with its distributed optimizer: each rank has half of the buffer."""

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()
        self.module = nn.Linear(gradient.numel(), 1, bias=False)
        bucket = SimpleNamespace(grad_data=gradient, offset=0)
        ends = {self.module.weight: (0, gradient.numel(), 0)}
        buffer = SimpleNamespace(params=[*ends], param_index_map=ends, buckets=[bucket], grad_data=gradient)
        buffer.data_parallel_group = dist.group.WORLD
        self.buffers, self.expert_parallel_buffers = [buffer], []  # type: ignore[assignment]
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=True)

    def finish_grad_sync(self) -> None:
        """What such a class is recognised by."""
