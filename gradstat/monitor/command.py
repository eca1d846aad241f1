"""``python -m gradstat view``, ``diff`` and ``golden``: show a recording, compare two, compare one with golden runs."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradstat._core.importing import Parser, UsageError
from gradstat._core.text import listed, printable, steps_in_words
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.view import write_page
from gradstat.recording import archive
from gradstat.recording.diff import TOLERANCE, compare
from gradstat.recording.file import load
from gradstat.recording.golden import Golden
from gradstat.recording.kinds import plural_of
from gradstat.recording.recording import Recording, extent_of

# The option that all commands with results share.
_JSON = Parser(add_help=False)
_JSON.add_argument("--json", action="store_true", help="print JSON instead of text")


def describe(recording: Recording) -> str:
    """A recording as text for a terminal: its steps and series, and the diagnosis."""
    counts = {kind: len(series.names) for kind, series in recording.tables.items()}
    tensors = ", ".join(f"{count} {kind if count == 1 else plural_of(kind)}" for kind, count in counts.items())
    extent = steps_in_words(extent_of(recording))
    return f"Recorded: {extent}" + printable(f"; series: {tensors}") * bool(tensors) + f"\n\n{Diagnosis.of(recording)}"


def view_main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``view``; returns 0."""
    parser = Parser(
        prog="gradstat view",
        description="Print a summary of a recording and write it as one self-contained HTML page.",
        epilog='The page needs plotly: pip install "gradstat[view]". Exit status: 0, or 2 if a file cannot be read or '
        "written.",
        parents=[_JSON],
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording, usually *.gradstat")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PAGE.html",
        help="where to write the page (default: FILE with the suffix .html)",
    )
    parser.add_argument("--no-page", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    if options.no_page and options.output is not None:
        parser.error("--output cannot be used with --no-page, which writes none")
    recording = load(options.file)
    page = None if options.no_page else _page_of(options)
    if options.json:
        _print_json(
            {
                **Diagnosis.of(recording).to_dict(),
                "recorded": extent_of(recording),
                "meta": recording.meta,
                "page": None if page is None else str(page),
            }
        )
    else:
        print(describe(recording))
    if page is not None:
        write_page(recording, page, title=options.file.name)
        if not options.json:
            print(f"\npage: {printable(str(page))}")
    return 0


def _page_of(options: argparse.Namespace) -> Path:
    """Where the page is written. Refuses to overwrite a recording or golden runs."""
    page: Path = options.output or options.file.with_suffix(".html")
    if options.output is None and page == options.file:
        page = options.file.with_name(options.file.name + ".page.html")
    _refuse_to_replace(page, page.is_file() and zipfile.is_zipfile(page))
    return page


def _refuse_to_replace(output: Path, is_ours: bool) -> None:
    if is_ours:
        raise UsageError(f"--output {printable(str(output))} is a recording or golden runs; choose another file")


def diff_main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``diff``; returns 0 for no relevant difference, 1 for some, 2 if the recordings cannot be compared."""
    parser = Parser(
        prog="gradstat diff",
        description="Find the first step in which two runs diverge, bitwise and beyond a tolerance, and what diverges "
        "first.",
        epilog="Exit status: 0 if nothing differs by more than the tolerance, 1 if something does, 2 if the recordings "
        "cannot be read or have no step in common.",
        parents=[_JSON],
    )
    parser.add_argument("first", type=Path, metavar="A", help="a recording")
    parser.add_argument("second", type=Path, metavar="B", help="another recording, of the same steps")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="relative difference up to which numbers count as equal (default %(default)s; 0: bitwise)",
    )
    options = parser.parse_args(arguments)
    if not options.tolerance >= 0:
        parser.error(f"argument --tolerance: must be a number of at least 0, not {options.tolerance:g}")
    comparison = compare(load(options.first), load(options.second), options.tolerance)
    if options.json:
        _print_json(comparison.to_dict())
    else:
        print(f"first: {printable(str(options.first))}, second: {printable(str(options.second))}")
        print(comparison)
    if not comparison.comparable:
        return 2
    return 0 if comparison.same else 1


def golden_main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``golden``; returns 0 if a run is like the golden ones, 1 if not, 2 if it cannot be compared."""
    parser = Parser(
        prog="gradstat golden",
        description="Save what a few healthy runs have in common, and show where another run is unlike them.",
        epilog="Exit status of check: 0 if the run is like the golden ones, 1 if not, 2 if a file cannot be read or "
        "written or there is nothing to compare.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    make = actions.add_parser("make", help="write the file of golden runs")
    make.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="recordings of healthy runs: three, better five"
    )
    make.add_argument("-o", "--output", type=Path, default=Path("golden.gradstat"), help="default: %(default)s")
    check = actions.add_parser("check", help="compare a run with golden runs", parents=[_JSON])
    check.add_argument("run", type=Path, metavar="RUN", help="the recording of a run")
    check.add_argument("golden", type=Path, metavar="GOLDEN", help="the file of golden runs")
    options = parser.parse_args(arguments)
    try:
        if options.action == "make":
            golden = Golden.of(map(load, options.runs))
            output = options.output
            _refuse_to_replace(output, output.exists() and any(map(output.samefile, options.runs)))
            golden.save(output)
            print(f"{golden.runs} golden runs, steps 0 to {golden.steps - 1}: {printable(str(options.output))}")
            if golden.left_out:
                print(f"left out as rounding noise: {listed(golden.left_out, 5)}")
            return 0
        comparison = Golden.load(options.golden).compare(load(options.run))
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.json:
        _print_json({"ok": comparison.ok, **asdict(comparison)})
    else:
        print(comparison)
    return 0 if comparison.ok else 1 if comparison.comparable else 2


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(archive.encoded(content, strict=True), indent=2, allow_nan=False))
