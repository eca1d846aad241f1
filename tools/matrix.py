"""Tests one wheel in clean environments of every Python and torch that this machine can install.

``python tools/matrix.py WHEEL`` makes an environment for each cell, installs torch and the wheel into it as a user
would, runs ``first_use.py`` without a compiler on PATH, in some cells also the main tests, and deletes it. With
``--write`` the outcomes go to ``tools/compatibility.jsonl`` and into ``docs/compatibility.md``. A cell is named by
Python, torch and, if it has one, its special condition: ``3.12/2.15.0``, ``3.11/2.15.0/numpy-1``. It takes network and
gigabytes, so ``make test`` does not run it. uv installs everything: it finds torch by its own configuration
(UV_FIND_LINKS, UV_INDEX and so on), and Pythons on PATH, in pyenv, or by download.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import compatibility

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TOO_OLD = "2.9.1"
NO_TORCH = "there is no"
# Test modules that need nothing but the installed package and pytest.
MAIN_TESTS = (
    "accumulation", "adaptive", "amp", "check", "clip", "clip_value", "compiling", "conformance", "every_clip",
    "host_path", "monitor", "multiply", "ops", "report", "step", "total_norm", "triton",
)  # fmt: skip
# Prints the architectures that the CUDA library, if any, was compiled for; loading it needs a CUDA torch, but no GPU.
ARCHITECTURES = """
import torch, gradstat._core.native as native
if torch.version.cuda and native.library_path('_C_cuda'):
    native.load_cpu(); import gradstat._C_cuda as library; print(library.architectures())
"""


class CellError(Exception):
    """A cell failed."""


class NotRunError(Exception):
    """This machine cannot make a cell; the message says why."""


class Cell(NamedTuple):
    """One environment."""

    python: str
    torch: str
    special: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, self))


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def must(folder: Path, *command: str | Path, **environment: str) -> str:
    """Runs a command that has to succeed; returns its output."""
    done = run(*command, cwd=folder, **environment)
    if done.returncode:
        raise CellError(f"{' '.join(map(str, command[1:3]))}: {last_line(done.stderr)}\n{done.stderr[-3000:]}")
    return done.stdout


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def tried(cell: Cell, wheel: Path, folder: Path) -> dict[str, str]:
    """Makes a cell in ``folder`` and tests it; returns what it found."""
    uv = (sys.executable, "-m", "uv")
    if run(*uv, "venv", "--quiet", "--python", cell.python, "cell", cwd=folder).returncode:
        raise NotRunError(f"no Python {cell.python} on this machine")
    python = folder / "cell" / "bin" / "python"

    def install(*what: str | Path, **variables: str) -> None:
        must(folder, *uv, "pip", "install", "--python", python, "--quiet", *what, **variables)

    # The main tests use features in which the interpreter of torch 2.10's Triton is incompatible with numpy 2.
    is_old = cell.special in ("numpy-1", "too-old") or (cell.special == "tests" and cell.torch.startswith("2.10."))
    torch = [f"torch=={cell.torch}", "numpy<2" if is_old else "numpy"]
    try:
        install(*torch, *(["setuptools>=77"] if cell.special == "source" else []))
    except CellError as error:
        if "No solution found" in str(error):
            raise NotRunError(f"{NO_TORCH} {torch[0]} for this Python") from error
        raise
    if cell.special == "source":
        install_source(install, wheel)
    elif cell.special == "too-old":
        install("--no-deps", wheel)
        message = last_line(run(python, "-c", "import gradstat", cwd=folder, PYTHONPATH="").stderr)
        if f"ImportError: gradstat needs torch >= 2.10, found torch {cell.torch}" not in message:
            raise CellError(f"the error does not name the old torch: {message}")
        return {"torch": cell.torch, "says": message}
    elif cell.special == "no-triton":
        run(*uv, "pip", "uninstall", "--python", python, "triton", cwd=folder)
        install("--no-deps", wheel)
    else:
        install(wheel, *torch[1:])
    alone = {"PATH": "", "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    found: dict[str, str] = json.loads(
        last_line(must(folder, python, "-W", "error", ROOT / "tools" / "first_use.py", **alone))
    )
    must(folder, python, "-m", "gradstat", "info", **alone)
    if cell.special != "no-triton" and (cuda := must(folder, python, "-c", ARCHITECTURES, **alone).strip()):
        found["cuda"] = cuda
    if cell.special == "source" and compatibility.is_oldest(cell.torch):
        found["names"] = " ".join(compatibility.torch_names())
    if cell.special == "tests":
        install("pytest>=8", "pytest-benchmark>=4", "hypothesis>=6.100")
        found["tests"] = main_tests(folder)
    return found


def install_source(install: Callable[..., None], wheel: Path) -> None:
    """Compiles the source distribution next to the wheel with this torch's headers, for CPU and CUDA.

    One CUDA architecture is enough, since device code does not include torch's headers.
    """
    source = next(wheel.parent.glob("gradstat-*.tar.gz"), None)
    if source is None:
        raise NotRunError(f"no source distribution lies beside {wheel.name}")
    variables = {"GRADSTAT_CUDA": "1", "GRADSTAT_CUDA_ARCHITECTURES": "90"}
    try:
        install("--no-build-isolation", "--no-cache", source, **variables)
    except CellError as error:
        if "no nvcc was found" in str(error):
            raise NotRunError("no nvcc on this machine") from error
        raise


def main_tests(folder: Path) -> str:
    """Runs the main tests against the installed package; returns their last line."""
    copy = folder / "checkout"  # without the package, which must come from the wheel
    shutil.copytree(ROOT / "tests", copy / "tests")
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "benchmarks").mkdir()
    files = [next(copy.glob(f"tests/*/test_{name}.py")) for name in MAIN_TESTS]
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "-r", "f"]
    # Not -m pytest, which puts the working directory on sys.path.
    done = run(folder / "cell" / "bin" / "pytest", *options, *files, cwd=copy, PYTHONPATH="")
    if done.returncode:
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise CellError("\n".join([last_line(done.stdout), *failed]))
    return re.sub(r" in .*|=+ ?", "", last_line(done.stdout))


def torch_releases() -> list[str]:
    """The last patch of every torch release that pip offers for this Python and gradstat supports, oldest first."""
    listed = run(sys.executable, "-m", "pip", "index", "versions", "torch", cwd=ROOT).stdout
    versions = re.findall(r"(\d+)\.(\d+)\.(\d+)", listed.partition("Available versions:")[2].partition("\n")[0])
    newest: dict[tuple[int, int], int] = {}
    for major, minor, patch in ((int(a), int(b), int(c)) for a, b, c in versions):
        if (major, minor) >= compatibility.OLDEST_TORCH:
            newest[major, minor] = max(patch, newest.get((major, minor), 0))
    if not newest:
        raise SystemExit(f"pip offers no torch >= {'.'.join(map(str, compatibility.OLDEST_TORCH))}:\n{listed}")
    return [f"{major}.{minor}.{patch}" for (major, minor), patch in sorted(newest.items())]


def planned(releases: list[str]) -> Iterator[Cell]:
    """Every torch with this Python, and every Python with the oldest and newest torch; then the special cells.

    The main tests run with this Python on the oldest and newest torch, with the oldest Python on the oldest torch, and
    with the newest Python on the newest torch.
    """
    own, oldest, newest = "{}.{}".format(*sys.version_info), releases[0], releases[-1]
    corners = {(PYTHONS[-1], newest), (PYTHONS[0], oldest), (own, newest), (own, oldest)}
    ends = [(python, torch) for torch in (newest, oldest) for python in (own, *PYTHONS)]
    for python, torch in dict.fromkeys([*ends, *((own, torch) for torch in reversed(releases))]):
        yield Cell(python, torch, "tests" if (python, torch) in corners else "")
    yield from (Cell(own, torch, "source") for torch in reversed(releases))
    yield from (Cell(own, newest, "no-triton"), Cell(own, newest, "numpy-1"), Cell(own, TOO_OLD, "too-old"))


def outcome_of(cell: Cell, wheel: Path) -> compatibility.Row:
    row: compatibility.Row = {
        "python": cell.python,
        "torch": cell.torch,
        "special": cell.special,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "wheel": wheel.name,
    }
    with tempfile.TemporaryDirectory(prefix="gradstat-matrix-") as folder:
        try:
            row["found"] = tried(cell, wheel, Path(folder))
            row["found"].pop("file", None)
            row["outcome"] = "passed"
        except CellError as error:
            row["outcome"] = f"failed: {error}"
        except NotRunError as error:
            row["outcome"] = f"not run: {error}"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel; for the cell `source`, its sdist lies beside it")
    parser.add_argument("--cell", action="append", default=[], help="run only these, such as 3.12/2.15.0")
    parser.add_argument("--list", action="store_true", help="only print the names of the cells")
    parser.add_argument("--write", action="store_true", help="record the outcomes and rewrite docs/compatibility.md")
    options = parser.parse_args()
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, pyenv.glob("versions/*/bin"))])
    releases = torch_releases()
    cells = [Cell(*name.split("/")) for name in options.cell] or list(planned(releases))
    failed = 0
    for cell in cells:
        if options.list:
            print(cell)
            continue
        row = outcome_of(cell, options.wheel.resolve())
        print(f"{cell}: {row['outcome']} {row.get('found', '')}", flush=True)
        failed += row["outcome"].startswith("failed")
        if row["outcome"].startswith(f"not run: {NO_TORCH}") and cell.torch == releases[-1]:
            older = Cell(cell.python, releases[releases.index(cell.torch) - 1], cell.special)
            cells.append(older)  # the newest torch that may support this Python
        if options.write:  # after each, since the next takes minutes
            compatibility.record(row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
