"""The size of a device's caches, and how to flush them between timed calls."""

from __future__ import annotations

import os

import torch


def cache_bytes(device: torch.device) -> int:
    """Size in bytes of the last cache before memory: a GPU's L2, a processor's last level."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    known = "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names
    return (os.sysconf("SC_LEVEL3_CACHE_SIZE") if known else 0) or 64 << 20


class Flush:
    """Evicts the caches when called between timed calls, as a training step evicts its gradients.

    It reads twice the size of the last cache. It does not write, because dirty lines would still be written back to
    memory during the timed call.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.ones(2 * cache_bytes(device) // 4, device=device)  # zeros may be one shared page

    def __call__(self) -> None:
        self._buffer.sum()
