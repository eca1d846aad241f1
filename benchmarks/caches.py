"""The size of a device's caches, and how to flush them between timed calls."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import torch

_UNKNOWN = 64 << 20


@cache
def cache_bytes(device: torch.device) -> int:
    """Size in bytes of the last cache before memory: a GPU's L2, a processor's last level."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG])", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) * units[found[2]])
    if not max(sizes) and "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names:
        sizes.append(os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    return max(sizes) or _UNKNOWN


class Flush:
    """Evicts the caches when called between timed calls, as a training step evicts its gradients.

    It reads twice the size of the last cache. It does not write, because dirty lines would still be written back to
    memory during the timed call.
    """

    def __init__(self, device: torch.device) -> None:
        # Not zeros, which an operating system may map to one shared page.
        self._buffer = torch.ones(2 * cache_bytes(device) // 4, device=device)

    def __call__(self) -> None:
        self._buffer.sum()
