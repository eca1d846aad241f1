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
from step_providers import GROUP

ROOT = Path(__file__).resolve().parent.parent
ALTERNATIVES = ("Lightning steps", "Trainer steps", "Weights & Biases steps")
_PAGES = ("alternatives", "detection", "golden", "performance", "numerics", "stepping")
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _PAGES)]
MARKED = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)
TITLES = {
    "step-overhead": "Time and memory added to training steps by gradstat, torch's clip, a naive loop, detect_anomaly",
    "time-vs-bytes": "Time against bytes, with a plain read as the limit",
    "time-vs-tensors": "Time against the number of tensors, with a plain read as the limit",
}


def summary(folder: Path) -> str:
    """For the README: what is added to training steps, in a steady state for each GPU with such rows."""
    shown = [(device, tables.STEADY if device[-1].driver else "steps") for device in rows.shown()]
    return "".join(tables.summary(device) for device, group in shown if any(row.group == group for row in device))


def alternatives(folder: Path) -> str:
    """For docs/alternatives.md: what gradstat and other tools add to steps under trainers and loggers."""
    found = [device for device in rows.shown() if any(row.group in ALTERNATIVES for row in device)]
    return "".join(tables.selected(device, *ALTERNATIVES) for device in found)


def of_lists(folder: Path, on_gpu: bool) -> str:
    """For docs/performance.md: charts and tables of GPUs or of CPUs, except those of optimizer steps."""
    devices = [device for device in rows.shown() if bool(device[-1].driver) is on_gpu]
    shown = ("lists", "host path", "distributed gradients")
    return "".join(_charts(device, folder) + tables.selected(device, *shown) for device in devices)


def steps_of_optimizers(folder: Path) -> str:
    """For docs/performance.md: the tables of optimizer steps."""
    return "".join(tables.selected(device, GROUP) for device in rows.shown())


def detected(folder: Path) -> str:
    """For the README: how many faults the monitor finds."""
    return "\n" + "\n\n".join(map(detection_tables.in_short, map(rows.current, rows.devices(suite="detection")))) + "\n"


def _of_every_device(suite: str, table: Callable[[Sequence[rows.Row]], str]) -> Callable[[Path], str]:
    """A table of the rows of a suite, for every device."""

    def region(folder: Path) -> str:
        parts = [table(rows.current(device)) + "\n" + tables.where(device) for device in rows.devices(suite=suite)]
        return "\n" + "\n\n".join(parts) + "\n"

    return region


def _charts(device: Sequence[rows.Row], folder: Path) -> str:
    where = os.path.relpath(plots.CHARTS, folder)
    return "".join(
        f"\n![{TITLES[name]}; {members[0].device}]({where}/{plots.file_of(name, members)})\n"
        for name, members in plots.charts_of(device).items()
    )


# What is between the markers, by their names.
REGIONS: dict[str, Callable[[Path], str]] = {
    "alternatives": alternatives,
    "summary": summary,
    "detected": detected,
    "detection": _of_every_device("detection", detection_tables.everything),
    "gpu": partial(of_lists, on_gpu=True),
    "cpu": partial(of_lists, on_gpu=False),
    "optimizer_steps": steps_of_optimizers,
    "numerics": _of_every_device("numerics", tables.norm_errors),
    "golden_healthy": _of_every_device("golden", partial(tables.of_group, name="golden, healthy")),
    "golden_cases": _of_every_device("golden", tables.golden_cases),
    "guards": _of_every_device("guards", tables.guards),
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
