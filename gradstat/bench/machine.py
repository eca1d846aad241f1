"""Describes the machine of a measurement: names and versions."""

from __future__ import annotations

import platform
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

import gradstat


def synchronize(device: torch.device) -> None:
    """Waits for all work queued on ``device``; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        described = ""
    entries = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.*?)\s*$", described, re.MULTILINE))
    name: str = entries.get("model name", "")
    if name and not re.search(r"\d", name.partition("@")[0]) and {"cpu family", "model"} <= entries.keys():
        return f"{name} (family {entries['cpu family']} model {entries['model']})"
    return name or platform.processor() or platform.machine()


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
    """The versions of gradstat, torch, Triton and Python, as one line."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return (
        f"gradstat {gradstat.__version__}, torch {torch.__version__}, triton {triton_version}, "
        f"Python {platform.python_version()}"
    )


def driver_or_threads(driver: str, threads: int) -> str:
    """What else matters about a device besides its name: a GPU's driver, or the number of CPU threads."""
    return f"driver {driver}" if driver else f"{threads} thread{'s' * (threads != 1)}"
