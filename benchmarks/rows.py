"""Results as data: one row per measurement, appended to ``benchmarks/results/<device>/<suite>.jsonl``.

Plots and tables read rows and nothing else, so that no figure is ever typed by hand.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch

import gradstat

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        provider: What was measured, such as ``"gradstat native"`` or ``"torch clip"``.
        case: On which input.
        metric: What the value is, such as ``"median time"`` or ``"launches"``.
        unit: The value's unit, such as ``"us"`` or ``"GB/s"``; empty for counts.
        value: The measurement.
        bytes: Bytes of input read once; 0 where that means nothing.
        low, high: First and third quartile, where the value is a median.
        device, driver, versions, threads, time: Where and when, filled in.
    """

    provider: str
    case: str
    metric: str
    unit: str
    value: float
    bytes: int = 0
    low: float | None = None
    high: float | None = None
    device: str = field(default_factory=lambda: device_name())
    driver: str = field(default_factory=lambda: driver_version())
    versions: str = field(default_factory=lambda: versions())
    threads: int = field(default_factory=torch.get_num_threads)
    time: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))


@cache
def device_name() -> str:
    """The GPU if torch sees one, else the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        described = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        described = None
    return described[1].strip() if described else platform.processor() or platform.machine()


@cache
def driver_version() -> str:
    """The GPU driver's version, empty without a GPU."""
    if not torch.cuda.is_available():
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


@cache
def versions() -> str:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return (
        f"gradstat {gradstat.__version__}, torch {torch.__version__}, triton {triton_version}, "
        f"Python {platform.python_version()}"
    )


def append(rows: Iterable[Row], suite: str) -> Path:
    """Appends rows to the file of this device and ``suite``; returns its path."""
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{suite}.jsonl"
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")
    return path
