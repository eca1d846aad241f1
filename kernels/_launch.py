"""Launches of compiled kernels without what Triton does before each: binding, specialization, cache keys.

That takes Triton tens of microseconds of Python, more than the GPU needs for a small model. Our kernels are
compiled once for each device, whatever the tensors (see test_triton.py), so the second launch can use what the
first one returned.
"""

from __future__ import annotations

from typing import Any

import torch

from gradstat.kernels import _table

ALIGNMENT = 16
"""Bytes. Triton compiles pointers that are multiples of this differently, so it is part of what must not vary."""


class Launcher:
    """Launches one kernel, on whichever device is current.

    Uses ``CompiledKernel.__getitem__``, which the launch through ``kernel[grid]`` returns (Triton 3.5 to 3.9).
    Where there is no such thing, as in the interpreter, every launch goes through ``kernel[grid]``.
    """

    def __init__(self, kernel: Any, warps: int) -> None:
        self.kernel = kernel
        self.warps = warps
        self.handles: dict[torch.device, Any] = {}

    def __call__(
        self, device: torch.device, programs: int, pointers: tuple[torch.Tensor, ...], *rest: torch.Tensor | int
    ) -> None:
        """Enqueues ``programs`` programs.

        Args:
            device: Where everything lies; current.
            programs: The size of the grid.
            pointers: The kernel's first arguments, which it is compiled to find aligned.
            rest: Its other arguments, compiled alike for every value.
        """
        is_aligned = not any(pointer.data_ptr() % ALIGNMENT for pointer in pointers)
        handle = self.handles.get(device) if is_aligned else None
        if handle is not None:
            handle[(programs, 1, 1)](*pointers, *rest)
            return
        compiled = self.kernel[(programs,)](*pointers, *rest, num_warps=self.warps, enable_fp_fusion=_table.FUSE)
        if is_aligned and hasattr(compiled, "__getitem__"):
            self.handles[device] = compiled
