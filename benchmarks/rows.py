"""Results as data: one row per measurement, appended to ``benchmarks/results/<device>/<suite>.jsonl``.

Plots and tables read nothing but rows, so that no figure is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch

from gradstat._core.files import replacing
from gradstat.bench import machine
from gradstat.bench.timing import Quartiles, quartiles, ratios

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "tests"))  # whose helpers benchmarks share


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        provider: What was measured, such as ``"gradstat.check"`` or ``"torch clip, clipped"``.
        case: The input it was measured on.
        metric: What the value is: ``"wall time"`` (with a final sync), ``"device time"``, ``"time ratio"`` (to the
            plain step), ``"time inside"`` (of the added call alone, within a step), ``"extra memory"``,
            ``"bytes moved"`` (calculated) and so on.
        unit: The value's unit, such as ``"us"`` or ``"B"``; empty for ratios and counts.
        value: The measurement.
        bytes: Bytes of input read once; 0 if not applicable.
        low, high: First and third quartile, where the value is a median.
        device, driver, versions, threads, time: Where and when it was measured.
        group: The part of the suite it belongs to.
        dtype: The dtype of the gradients, such as ``"float32"``; empty if there is no single dtype.
        tensors: The number of gradients; 0 if not applicable.
        run: The time of the first row that the process recorded; the same for all rows of one run.
    """

    provider: str
    case: str
    metric: str
    unit: str
    value: float
    bytes: int = 0
    low: float | None = None
    high: float | None = None
    device: str = ""
    driver: str = ""
    versions: str = ""
    threads: int = 0
    time: str = ""
    group: str = ""
    dtype: str = ""
    tensors: int = 0
    run: str = ""


@cache
def _run() -> str:
    return _now()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def row(
    group: str,
    case: str,
    provider: str,
    metric: str,
    unit: str,
    value: float | Quartiles,
    device: torch.device,
    *,
    bytes: int = 0,
    tensors: int = 0,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
) -> Row:
    """A row about ``device``, with versions, threads and time filled in."""
    low, median, high = value if isinstance(value, Quartiles) else (None, value, None)
    where = machine.device_name(device), machine.driver_version(device), machine.versions(), torch.get_num_threads()
    of = (group, dtype_name(dtype), tensors, _run())
    return Row(provider, case, metric, unit, median, bytes, low, high, *where, _now(), *of)


def microseconds(seconds: Sequence[float]) -> Quartiles:
    """The quartiles of ``seconds``, in microseconds."""
    return quartiles([1e6 * s for s in seconds])


def step_rows(
    group: str, case: str, provider: str, seconds: Sequence[float], plain: Sequence[float], device: torch.device
) -> list[Row]:
    """A step's time in microseconds, and its ratio to the plain step, round by round."""
    return [
        row(group, case, provider, "wall time", "us", microseconds(seconds), device),
        row(group, case, provider, "time ratio", "", ratios(seconds, plain), device),
    ]


def dtype_name(dtype: torch.dtype | tuple[torch.dtype, ...] | None) -> str:
    """The name used in rows, such as ``"float32"``, or ``"float32 and bfloat16"`` for a list with both."""
    several = dtype if isinstance(dtype, tuple) else () if dtype is None else (dtype,)
    return " and ".join(str(each).removeprefix("torch.") for each in several)


def append(rows: Iterable[Row], suite: str, results: Path = RESULTS) -> Path:
    """Appends rows of one device that are not there yet to its file for ``suite``, atomically; returns the path."""
    listed = list(rows)
    path = results / slug(listed[0].device) / f"{suite}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    with replacing(path) as file:
        lines = list(dict.fromkeys([*lines, *(json.dumps(asdict(each)) for each in listed)]))
        file.write("".join(f"{line}\n" for line in lines).encode())
    return path


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of a program that records rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="record them below this folder instead")
    return parser


def record(made: Sequence[Row], suite: str, options: argparse.Namespace) -> None:
    """Appends the rows to the file of ``suite``, if this was asked for."""
    if options.record:
        print(f"recorded in {append(made, suite, options.results)}")


def slug(device: str) -> str:
    """A device's name as a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def read(path: Path) -> list[Row]:
    """All rows of a file."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def current(rows: Iterable[Row]) -> list[Row]:
    """The current rows: of every case in a group those of its newest run, and of repeated measurements the last.

    A run may measure a part of a group, as runs on a rented GPU do.
    """
    listed = list(rows)
    newest: dict[tuple[str, str, str], str] = {}
    for row in listed:
        case = (row.group, row.case, row.dtype)
        newest[case] = max(newest.get(case, ""), row.run)
    return list(
        {
            (row.group, row.case, row.dtype, row.provider, row.metric): row
            for row in listed
            if row.run == newest[row.group, row.case, row.dtype]
        }.values()
    )


def devices(results: Path = RESULTS, suite: str = "full") -> list[list[Row]]:
    """The rows of every device that has a file for ``suite``; GPUs first."""
    files = sorted(results.glob(f"*/{suite}.jsonl"))
    return sorted(map(read, files), key=lambda rows: not rows[-1].driver)


def shown(results: Path = RESULTS) -> list[list[Row]]:
    """The rows that documents show: of every GPU the current ones; of CPUs each group from its newest run."""
    gpus = [current(device) for device in devices(results) if device[-1].driver]
    others = [current(device) for device in devices(results) if not device[-1].driver]
    groups: set[str] = set()
    kept = []
    for device in sorted(others, key=lambda rows: rows[-1].run, reverse=True):
        kept.append([row for row in device if row.group not in groups])
        groups |= {row.group for row in device}
    return gpus + [device for device in kept if device]
