"""Where something was measured: names and versions, and how much the caches hold."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

import gradstat

_UNKNOWN_CACHE = 64 << 20


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done everything; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        described = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        described = None
    return described[1].strip() if described else platform.processor() or platform.machine()


@cache
def driver_version(device: torch.device) -> str:
    """The version of the GPU's driver, empty for a CPU."""
    if device.type != "cuda":
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


@cache
def versions() -> str:
    """gradstat, torch, Triton and Python, as one line."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return (
        f"gradstat {gradstat.__version__}, torch {torch.__version__}, triton {triton_version}, "
        f"Python {platform.python_version()}"
    )


def description(device: torch.device) -> str:
    """Device and, on a CPU, threads, in words."""
    name = device_name(device)
    return f"{name}, {circumstance('', torch.get_num_threads())}" if device.type == "cpu" else name


def circumstance(driver: str, threads: int) -> str:
    """What besides its name matters about a device: a GPU's driver, or how many threads a CPU runs."""
    return f"driver {driver}" if driver else f"{threads} thread{'s' * (threads != 1)}"


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
    return max(sizes) or _UNKNOWN_CACHE


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
