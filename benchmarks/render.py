"""Renders recorded rows as the tables of README.md and docs/performance.md, so that no figure is typed by hand.

``python benchmarks/render.py`` prints the table, ``--write`` puts it between the markers in both documents; a test
holds them equal to the rows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
ROWS = ROOT / "benchmarks" / "results" / "amd-epyc" / "quick.jsonl"
MARKED = re.compile(r"(<!-- rows: quick -->\n).*?(<!-- end of rows -->)", re.DOTALL)


def latest(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The newest row of every case and provider: ``[case][provider]``, in the order they were recorded."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        cases.setdefault(row["case"], {})[row["provider"]] = row
    return cases


def markdown(path: Path) -> str:
    """A table of medians, with the ratio to the first provider of each case, and a line about the machine."""
    lines = ["", "| case | call | median | times the first |", "| --- | --- | ---: | ---: |"]
    row: dict[str, Any] = {}
    for case, providers in latest(path).items():
        first = next(iter(providers.values()))["value"]
        for number, (provider, row) in enumerate(providers.items()):
            time = f"{row['value']:,.0f} µs" if row["value"] < 1e4 else f"{row['value'] / 1e3:,.1f} ms"
            rate = f" ({row['bytes'] / row['value'] / 1e3:.1f} GB/s)" if row["bytes"] > 1e7 else ""
            lines.append(f"| {case if number == 0 else ''} | {provider} | {time}{rate} | {row['value'] / first:.2f} |")
    driver = f", driver {row['driver']}" if row["driver"] else ""
    lines += ["", f"{row['device']}, {row['threads']} threads{driver}; {row['versions']}; {row['time'][:10]}.", ""]
    return "\n".join(lines) + "\n"


def rendered(document: str) -> str:
    """``document`` with the table between its markers brought up to date."""
    return MARKED.sub(lambda match: match[1] + markdown(ROWS) + match[2], document)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the documents instead of printing the table")
    if not parser.parse_args().write:
        print(markdown(ROWS))
        return 0
    for document in DOCUMENTS:
        document.write_text(rendered(document.read_text()))
        print(f"wrote {document.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
