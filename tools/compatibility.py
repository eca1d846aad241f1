"""Results of the matrix, as rows in a file and as tables in docs/compatibility.md. ``--write`` renders the tables."""

import json
import re
import sys
from pathlib import Path
from typing import TypedDict

ROWS = Path(__file__).with_suffix(".jsonl")
ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "compatibility.md"
MARKED = re.compile(r"(<!-- cells -->\n).*?(<!-- end of cells -->)", re.DOTALL)
OLDEST_TORCH = (2, 10)
SPECIAL = {
    "numpy-1": "numpy 1",
    "no-triton": "Triton not installed",
    "source": "compiled from source",
    "too-old": "a torch that is too old, installed after gradstat",
}


class Row(TypedDict, total=False):
    """One cell of the matrix.

    ``special`` is empty for an ordinary cell, "tests" if the main tests ran in it, or a key of `SPECIAL`. ``found`` is
    the output of `first_use`, with the last line of the tests, the error message of an old torch, or `torch_names` if
    compiled with the oldest torch. ``outcome`` is "passed", "failed: …" or "not run: …".
    """

    python: str
    torch: str
    special: str
    date: str
    wheel: str
    found: dict[str, str]
    outcome: str


def recorded() -> list[Row]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def record(row: Row) -> None:
    """Records a row, in place of an older one for the same cell, and renders the document."""
    rows = {_key(each): each for each in [*recorded(), row]}
    ordered = sorted(
        rows.values(), key=lambda each: (each["special"], _version(each["python"]), _version(each["torch"]))
    )
    ROWS.write_text("".join(json.dumps(each) + "\n" for each in ordered))
    DOCUMENT.write_text(rendered(DOCUMENT.read_text()))


def rendered(document: str) -> str:
    """``document`` with its tables rendered anew."""
    return MARKED.sub(lambda match: match[1] + tables(recorded()) + match[2], document)


def is_oldest(torch: str) -> bool:
    """Whether this is a release of the oldest torch that gradstat supports."""
    return tuple(_version(torch)[:2]) == OLDEST_TORCH


def torch_names() -> list[str]:
    """The headers, macros, functions and types of torch that csrc uses."""
    code = "\n".join(path.read_text() for path in sorted((ROOT / "csrc").glob("*.*")))
    used = re.findall(r"<(torch/[^>]+)>|\b((?:STABLE_|STD_)?TORCH_\w+|aoti_torch_\w+|(?:torch|c10)::[\w:]+)", code)
    return sorted({header or name for header, name in used})


def tables(rows: list[Row]) -> str:
    grid = [row for row in rows if row["special"] in ("", "tests")]
    torches = sorted({row["torch"] for row in grid}, key=_version)
    pythons = sorted({row["python"] for row in grid}, key=_version)
    lines = ["", _line("", *(f"torch {torch}" for torch in torches)), _line("---", *("---" for _ in torches))]
    for python in pythons:
        cells = ([row for row in grid if (row["python"], row["torch"]) == (python, torch)] for torch in torches)
        lines.append(_line(f"Python {python}", *map(_outcome, cells)))
    lines += ["", _line("special", "Python", "torch", "numpy", "outcome"), _line("---", "---", "---", "---", "---")]
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["special"] in SPECIAL:
            found = row.get("found", {})
            kind = SPECIAL[row["special"]], found.get("python", row["python"]), found.get("numpy", "")
            alike.setdefault((*kind, _special_outcome(row)), []).append(found.get("torch", row["torch"]))
    for (special, python, numpy, outcome), versions in alike.items():
        lines.append(_line(special, python, ", ".join(versions), numpy, outcome))
    dates = sorted({row["date"] for row in rows})
    systems = sorted({row["found"]["system"] for row in rows if "system" in row.get("found", {})})
    lines += ["", f"Run on {', '.join(dates)} ({', '.join(systems)}).", ""]
    return "\n".join(lines)


def _outcome(rows: list[Row]) -> str:
    if not rows:
        return "-"
    row = next((row for row in rows if row["special"] == "tests"), rows[0])
    if row["outcome"] != "passed":
        return row["outcome"].splitlines()[0]
    found = row["found"]
    tests = f"; tests: {found['tests']}" if "tests" in found else ""
    return f"{found['python']}, {found['torch']}, numpy {found['numpy']}{tests}"


def _special_outcome(row: Row) -> str:
    if row["outcome"] != "passed":
        return row["outcome"].splitlines()[0]
    found = row["found"]
    cuda = f", CUDA library for {found['cuda']} loads" if "cuda" in found else ""
    if row["special"] == "source" and not cuda:  # it was compiled: otherwise GRADSTAT_CUDA=1 would have failed
        cuda = ", CUDA library compiles and this torch cannot load it"
    return f"`{found['says']}`" if "says" in found else f"first use, {found['cpu']}{cuda}"


def _key(row: Row) -> tuple[str, str, str]:
    return row["python"], row["torch"], "" if row["special"] == "tests" else row["special"]


def _version(text: str) -> list[int]:
    return [int(number) for number in text.split(".")]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(rendered(DOCUMENT.read_text()))
    else:
        print(tables(recorded()))
