"""Unwraps models: from torch.compile's module and from DDP; and what holds of ranks: which this is, who is joining."""

from __future__ import annotations

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel


def uncompiled(model: Module) -> Module:
    """The original module of ``torch.compile(model)``'s result; any other module itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, Module) else model


def is_joining(model: Module) -> bool:
    """Whether this is inside of the ``join()`` of a DDP module, where ranks take fewer steps."""
    config = getattr(uncompiled(model), "_join_config", None)
    return config is not None and bool(config.enable)


def rank_and_size() -> tuple[int, int]:
    """The rank of this process and how many there are: 0 and 1 for one that trains alone."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def without_ddp(model: Module) -> Module:
    """The module inside DDP, with the parameter names that the user knows."""
    inner: Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner
