"""Where something was measured: names and versions."""

from __future__ import annotations

import platform
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

import gradstat


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
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        described = ""
    return _processor_name(described) or platform.processor() or platform.machine()


def _processor_name(cpuinfo: str) -> str:
    """The name in such a text, empty if it has none; with family and model where it has no number."""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.*?)\s*$", cpuinfo, re.MULTILINE))
    name: str = found.get("model name", "")
    if not name or re.search(r"\d", name.partition("@")[0]) or not {"cpu family", "model"} <= found.keys():
        return name
    return f"{name} (family {found['cpu family']} model {found['model']})"


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


def circumstance(driver: str, threads: int) -> str:
    """What besides its name matters about a device: a GPU's driver, or how many threads a CPU runs."""
    return f"driver {driver}" if driver else f"{threads} thread{'s' * (threads != 1)}"
