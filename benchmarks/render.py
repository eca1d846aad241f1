"""Renders recorded rows as the tables of README.md and other documents, so that no figure is typed by hand.

``python benchmarks/render.py`` prints all tables. ``--write`` puts most of them, and the charts that have rows (see
``plots.py``), between the markers in these documents; a test checks that they match the rows.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import detection_tables
import plots
import rows
import tables

ROOT = Path(__file__).resolve().parent.parent
_PAGES = (
    "alternatives",
    "detection",
    "golden",
    "performance",
    "numerics",
    "stepping",
    "testing",
)
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _PAGES)]
MARKED = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)
TITLES = {
    "step-overhead": "Time and memory added to training steps by gradstat, torch's clip, a naive loop, detect_anomaly",
    "time-vs-bytes": "Time against bytes, with a plain read as the limit",
    "time-vs-tensors": "Time against the number of tensors, with a plain read as the limit",
    "norm-errors": "Worst and mean error of norms by dtype: gradstat, torch, numpy",
}


def summary(folder: Path) -> str:
    """For the README: what is added to training steps, in a steady state for each GPU with such rows."""
    shown = [(device, tables.STEADY if device[-1].driver else "steps") for device in rows.shown()]
    return "".join(tables.summary(device) for device, group in shown if any(row.group == group for row in device))


def alternatives(folder: Path) -> str:
    """For docs/alternatives.md: what gradstat and other tools add to steps under trainers and loggers."""
    found = [device for device in rows.shown() if any(row.group in tables.ALTERNATIVES for row in device)]
    return "\n" + "\n".join(tables.alternatives(device) + "\n" + tables.where(device) for device in found) + "\n"


def of_lists(folder: Path, on_gpu: bool) -> str:
    """For docs/performance.md: charts and tables of GPUs or of CPUs, except those of optimizer steps."""
    devices = [device for device in rows.shown() if bool(device[-1].driver) is on_gpu]
    return "".join(_charts(device, folder, list(TITLES)) + tables.selected(device) for device in devices)


def steps_of_optimizers(folder: Path) -> str:
    """For docs/performance.md: the tables of optimizer steps."""
    return "".join(map(tables.selected_optimizer_steps, rows.shown()))


def numerics(folder: Path) -> str:
    """For docs/numerics.md: the chart and tables of errors, for every device."""
    parts = []
    for device in rows.devices(suites=["numerics"]):
        parts += [
            _charts(device, folder, ["norm-errors"]),
            tables.norm_errors(rows.current(device), short=True),
            tables.where(device),
        ]
    return "\n".join(["", *parts, ""])


def fuzzed(folder: Path) -> str:
    """For docs/testing.md: the results of the tests with random tensors."""
    return _of_every_device("fuzz", tables.fuzzed)


def leaks(folder: Path) -> str:
    """For docs/testing.md: the memory growth of a process."""
    return _of_every_device("leaks", tables.leaks_summary)


def golden_healthy(folder: Path) -> str:
    """For docs/golden.md: how often healthy runs are called unlike."""
    return _of_every_device("golden", tables.golden_healthy)


def golden_cases(folder: Path) -> str:
    """For docs/golden.md: which mistakes and harmless changes are called unlike."""
    return _of_every_device("golden", tables.golden_cases)


def golden_cost(folder: Path) -> str:
    """For docs/golden.md: the time of a comparison, and the size of a file."""
    return _of_every_device("golden", tables.golden_cost)


def guards(folder: Path) -> str:
    """For docs/stepping.md: how guards handle faults."""
    return _of_every_device("guards", partial(tables.guards, short=True))


def detected(folder: Path) -> str:
    """For the README: how many faults the monitor finds."""
    return "\n" + "\n\n".join(
        map(detection_tables.in_a_sentence, map(rows.current, rows.devices(suites=["detection"])))
    )


def detection(folder: Path) -> str:
    """For docs/detection.md: what the monitor, other tools and golden runs find, and in healthy trainings; time."""
    return _of_every_device("detection", detection_tables.everything)


def _of_every_device(suite: str, table: Callable[[Sequence[rows.Row]], str]) -> str:
    parts = [table(rows.current(device)) + "\n" + tables.where(device) for device in rows.devices(suites=[suite])]
    return "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n"


def _charts(device: Sequence[rows.Row], folder: Path, names: list[str]) -> str:
    drawn = plots.charts_of(device)
    where = os.path.relpath(plots.CHARTS, folder)
    shown = {name: drawn[name] for name in names if name in drawn}
    return "".join(
        f"\n![{TITLES[name]}; {members[0].device}]({where}/{plots.file_of(name, members)})\n"
        for name, members in shown.items()
    )


REGIONS: dict[str, Callable[[Path], str]] = {
    "alternatives": alternatives,
    "summary": summary,
    "detected": detected,
    "detection": detection,
    "gpu": partial(of_lists, on_gpu=True),
    "cpu": partial(of_lists, on_gpu=False),
    "optimizer_steps": steps_of_optimizers,
    "numerics": numerics,
    "fuzz": fuzzed,
    "golden_healthy": golden_healthy,
    "golden_cases": golden_cases,
    "golden_cost": golden_cost,
    "guards": guards,
    "leaks": leaks,
}


def rendered(document: str, folder: Path) -> str:
    """``document``, which lies in ``folder``, with the regions between its markers rendered anew."""
    return MARKED.sub(lambda match: match[1] + REGIONS[match[2]](folder) + "\n" + match[3], document)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the documents instead of printing the tables")
    if not parser.parse_args().write:
        print("".join(map(tables.everything, rows.devices())))
        return 0
    for document in DOCUMENTS:
        document.write_text(rendered(document.read_text(), document.parent))
        print(f"wrote {document.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
