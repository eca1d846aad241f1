"""How much the caches of a device hold, and how to empty them between timed calls."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import torch

_UNKNOWN = 64 << 20


@cache
def cache_bytes(device: torch.device) -> int:
    """Size in bytes of the last cache before memory: a GPU's second level, a processor's last level."""
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
    """Called between timed calls, it leaves nothing in the caches that they could profit from.

    Twice as much as the last cache holds is read, not written: lines that were written would still have to go back to
    memory while the call runs. A training step throws gradients out of the caches by itself.
    """

    def __init__(self, device: torch.device) -> None:
        # Not zeros, which a CPU may keep as one page that is seen everywhere.
        self._buffer = torch.ones(2 * cache_bytes(device) // 4, device=device)

    def __call__(self) -> None:
        self._buffer.sum()
