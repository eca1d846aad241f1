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
from pathlib import Path

import detection_tables
import plots
import rows
import tables
from helpers.training import HEALTHY
from training_programs import PROGRAMS

from gradstat.lowprecision.formats import FORMATS

ROOT = Path(__file__).resolve().parent.parent
ALTERNATIVES = ("Lightning steps", "Trainer steps", "Weights & Biases steps")
_PAGES = ("alternatives", "detection", "golden", "low-precision", "monitor", "performance", "numerics", "stepping")
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _PAGES)]
NORMS = ("gradstat native", "gradstat CUDA kernels, on the CPU", "gradstat clip's norm", "torch._foreach_norm")
MARKED = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)
TITLES = {
    "step-overhead": "Time and memory added to training steps",
    "time-vs-bytes": "Time against bytes",
    "time-vs-tensors": "Time against the number of tensors",
}


def summary(folder: Path) -> str:
    """For the README: what is added to training steps, in a steady state for each GPU with such rows."""
    shown = [(device, tables.STEADY if device[-1].driver else "steps") for device in rows.shown()]
    return "".join(tables.summary(device) for device, group in shown if any(row.group == group for row in device))


def alternatives(folder: Path) -> str:
    """For docs/alternatives.md: what gradstat and other tools add to steps under trainers and loggers."""
    found = [device for device in rows.shown() if any(row.group in ALTERNATIVES for row in device)]
    return "".join(tables.selected(device, *ALTERNATIVES) for device in found)


def lists_on_gpus(folder: Path) -> str:
    """For docs/performance.md: of every GPU the charts, and the times of lists."""
    gpus = [(device, [row for row in device if row.group == "lists"]) for device in rows.shown() if device[-1].driver]
    return "".join(f"{_charts(gpu, folder)}\n{tables.lists(timed)}\n{tables.where(gpu)}\n" for gpu, timed in gpus)


def charts_of_cpus(folder: Path) -> str:
    """For docs/performance.md: of every CPU the charts."""
    charts = [(_charts(device, folder), device) for device in rows.shown() if not device[-1].driver]
    return "".join(f"{shown}\n{tables.where(device)}\n" for shown, device in charts if shown)


def detected(folder: Path) -> str:
    """For the README: how many faults the monitor finds."""
    return "\n" + "\n\n".join(map(detection_tables.in_short, map(rows.current, rows.devices(suite="detection")))) + "\n"


def healthy(folder: Path) -> str:
    """For docs/monitor.md: the trainings in which no rule may report a warning or error."""
    return "\n" + "; ".join(training.name for training in HEALTHY) + ".\n"


def programs(folder: Path) -> str:
    """For docs/monitor.md: the public programs in which the same holds, with their steps in a long run."""
    return "\n" + "; ".join(f"{program.name} {program.steps:,}" for program in PROGRAMS) + ".\n"


def formats(folder: Path) -> str:
    """For docs/low-precision.md: the formats, their blocks and the rules of their scales."""
    rules = {
        "float32": "amax / {largest:,.0f}, float32",
        "floor": "2^(floor(log2 amax) \N{MINUS SIGN} {exponent}), E8M0",
        "ceil": "least power of two not below amax / {largest:,.0f}, E8M0",
        "two-level": "amax / {largest:,.0f} as E4M3, in units of the tensor's amax / 2,688, float32",
    }
    lines = []
    for name, format in FORMATS.items():
        element, side = format.element, format.weight_block
        elements = f"{element.name}, at most {element.largest:,.0f}"
        scale = rules[format.rule].format(largest=element.largest, exponent=element.greatest_exponent)
        block = str(format.block or "the tensor") + f"; weights {side} x {side}" * bool(side)
        lines.append([f"`{name}`", elements, block, scale, format.source])
    return "\n" + tables.grid(["name", "elements", "block", "scale", "source"], lines, text_columns=5)


def norm_errors(measured: Sequence[rows.Row]) -> str:
    """For docs/numerics.md: the errors of the kernels and clips that most trainings use."""
    return tables.norm_errors([row for row in measured if row.provider in NORMS])


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
    "formats": formats,
    "healthy": healthy,
    "programs": programs,
    "detection": _of_every_device("detection", detection_tables.everything),
    "gpu": lists_on_gpus,
    "cpu": charts_of_cpus,
    "numerics": _of_every_device("numerics", norm_errors),
    "golden": _of_every_device("golden", tables.golden),
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
