"""What is wrapped around a model: torch.compile's module and DDP's."""

from __future__ import annotations

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel


def uncompiled(model: Module) -> Module:
    """The module in what ``torch.compile(model)`` gave; any other module itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, Module) else model


def without_ddp(model: Module) -> Module:
    """The module inside of DDP, under the names that its user knows."""
    inner: Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner
