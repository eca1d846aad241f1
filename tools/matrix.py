"""One wheel in clean environments of every Python and torch that this machine can install.

``python tools/matrix.py WHEEL`` makes an environment for each cell, installs torch and the wheel into it as a user
would, runs ``first_use.py`` without a compiler on PATH, in some cells the main tests too, and deletes it. What came
out goes to ``tools/compatibility.jsonl``, and from there into ``docs/compatibility.md`` (``--write``). A cell is
named by Python, torch and, where it is special, what is special: ``3.12/2.15.0``, ``3.11/2.15.0/numpy-1``. It takes
network and gigabytes, so ``make test`` does not run it. Where uv finds torch is uv's own configuration
(UV_FIND_LINKS, UV_INDEX and so on).
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
UV = (sys.executable, "-m", "uv", "pip")
# Those that need nothing but the installed package and pytest.
MAIN_TESTS = (
    "accumulation", "adaptive", "amp", "check", "clip", "clip_value", "compiling", "conformance", "every_clip",
    "host_path",
    "monitor", "multiply", "ops", "report", "step", "total_norm", "triton",
)  # fmt: skip


class CellError(Exception):
    """Something that should work in a cell does not."""


class NotRunError(Exception):
    """A cell that this machine cannot make; the message says why."""


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


class Environment:
    """A new environment for one cell, with nothing but the standard library."""

    def __init__(self, folder: Path, interpreter: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._must(interpreter, "-m", "venv", "--without-pip", folder)

    def install_torch(self, *what: str) -> None:
        """Raises `NotRunError` if there is no such release for this Python."""
        try:
            self.install(*what)
        except CellError as error:
            if "No solution found" in str(error):
                raise NotRunError(f"{NO_TORCH} {' with '.join(what)} for this Python") from error
            raise

    def install(self, *what: str | Path, **variables: str) -> None:
        """By uv, as it puts links to unpacked packages where pip unpacks gigabytes anew for every cell."""
        self._must(*UV, "install", "--python", self.python, "--quiet", *what, **variables)

    def first_use(self, *, warnings: str = "error", path: str = "") -> dict[str, str]:
        """What the program found, with nothing on PATH."""
        script = ROOT / "tools" / "first_use.py"
        options = {"PATH": path, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
        printed = self._must(self.python, "-W", warnings, script, **options).stdout
        self._must(self.python, "-m", "gradstat", "info", **options)
        found: dict[str, str] = json.loads(printed.splitlines()[-1])
        return found

    def cuda_library(self) -> dict[str, str]:
        """What the CUDA library, if there is one, was compiled for: loading it needs this torch, but no GPU."""
        code = (
            "import torch, gradstat._core.native as native\n"
            "if torch.version.cuda and native.library_path('_C_cuda'):\n"
            "    native.load_cpu(); import gradstat._C_cuda as library; print(library.architectures())"
        )
        printed = self._must(self.python, "-c", code, PYTHONPATH="", PYTHONSAFEPATH="1").stdout.strip()
        return {"cuda": printed} if printed else {}

    def main_tests(self) -> str:
        """The closing line of the main tests, run against what is installed."""
        self.install("pytest>=8", "pytest-benchmark>=4", "hypothesis>=6.100")
        copy = self.folder / "checkout"  # without the package, which must come from the wheel
        shutil.copytree(ROOT / "tests", copy / "tests")
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "benchmarks").mkdir()
        files = [next(copy.glob(f"tests/*/test_{name}.py")) for name in MAIN_TESTS]
        options = ["-q", "-p", "no:cacheprovider", "--no-header", "-r", "f"]
        # Not -m pytest, which puts the working directory on the path.
        done = run(self.folder / "bin" / "pytest", *options, *files, cwd=copy, PYTHONPATH="")
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            raise CellError("\n".join([last_line(done.stdout), *failed]))
        return re.sub(r" in .*|=+ ?", "", last_line(done.stdout))

    def _must(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        done = run(*command, cwd=self.folder.parent, **environment)
        if done.returncode:
            raise CellError(f"{' '.join(map(str, command[1:3]))}: {last_line(done.stderr)}\n{done.stderr[-3000:]}")
        return done


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def plain(environment: Environment, cell: Cell, wheel: Path, *numpy: str) -> dict[str, str]:
    environment.install_torch(f"torch=={cell.torch}", *numpy)
    environment.install(wheel, *numpy)
    return environment.first_use() | environment.cuda_library()


def with_tests(environment: Environment, cell: Cell, wheel: Path) -> dict[str, str]:
    # numpy 2.4 and the interpreter of the Triton that belongs to torch 2.10 do not go together.
    found = plain(environment, cell, wheel, *(["numpy<2"] if cell.torch.startswith("2.10.") else []))
    return {**found, "tests": environment.main_tests()}


def without_triton(environment: Environment, cell: Cell, wheel: Path) -> dict[str, str]:
    environment.install_torch(f"torch=={cell.torch}", "numpy")
    run(*UV, "uninstall", "--python", environment.python, "triton", cwd=environment.folder)
    environment.install("--no-deps", wheel)
    return environment.first_use()


def from_source(environment: Environment, cell: Cell, wheel: Path) -> dict[str, str]:
    """The source distribution that lies beside the wheel, compiled with this torch's headers, for CPU and CUDA.

    For one architecture, since what is compiled for each of them has no headers of torch in it.
    """
    source = next(wheel.parent.glob("gradstat-*.tar.gz"), None)
    if source is None:
        raise NotRunError(f"no source distribution lies beside {wheel.name}")
    environment.install_torch(f"torch=={cell.torch}", "numpy", "setuptools>=77")
    variables = {"GRADSTAT_CUDA": "1", "GRADSTAT_CUDA_ARCHITECTURES": "90"}
    try:
        environment.install("--no-build-isolation", "--no-cache", source, **variables)
    except CellError as error:
        if "no nvcc was found" in str(error):
            raise NotRunError("no nvcc on this machine") from error
        raise
    names = {"names": " ".join(compatibility.torch_names())} if compatibility.is_oldest(cell.torch) else {}
    return environment.first_use() | environment.cuda_library() | names


def torch_too_old(environment: Environment, cell: Cell, wheel: Path) -> dict[str, str]:
    environment.install_torch(f"torch=={cell.torch}", "numpy<2")
    environment.install("--no-deps", wheel)
    said = last_line(run(environment.python, "-c", "import gradstat", cwd=environment.folder, PYTHONPATH="").stderr)
    if f"ImportError: gradstat needs torch >= 2.10, found torch {cell.torch}" not in said:
        raise CellError(f"an old torch is not named: {said}")
    return {"torch": cell.torch, "says": said}


SPECIAL: dict[str, Callable[[Environment, Cell, Path], dict[str, str]]] = {
    "": plain,
    "tests": with_tests,
    "numpy-1": lambda environment, cell, wheel: plain(environment, cell, wheel, "numpy<2"),
    "no-triton": without_triton,
    "source": from_source,
    "too-old": torch_too_old,
}


def torch_releases() -> list[str]:
    """The last patch of every torch release that pip offers this Python and gradstat claims, oldest first."""
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
    """Every torch with this Python, its oldest and newest with the main tests; every Python with both of them.

    The main tests run also where the oldest Python meets the oldest torch, and the newest the newest.
    """
    own = "{}.{}".format(*sys.version_info)
    ends = list(dict.fromkeys([releases[-1], releases[0]]))
    corners = {(PYTHONS[-1], ends[0]), (PYTHONS[0], ends[-1]), (own, ends[0]), (own, ends[-1])}

    def cell(python: str, torch: str) -> Cell:
        return Cell(python, torch, "tests" if (python, torch) in corners else "")

    for torch in ends:
        yield cell(own, torch)
    for python in PYTHONS:
        if python != own:
            yield cell(python, ends[0])
    for torch in reversed(releases[1:-1]):
        yield Cell(own, torch)
    yield Cell(own, ends[0], "no-triton")
    for torch in reversed(releases):
        yield Cell(own, torch, "source")
    yield Cell(own, ends[0], "numpy-1")
    yield Cell(own, TOO_OLD, "too-old")
    for python in PYTHONS:
        if python != own:
            yield cell(python, ends[-1])


def interpreter_of(python: str, given: list[Path]) -> Path:
    """Among those given, on PATH and of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path) for path in given if path.name.endswith(python)]
    on_path = shutil.which(f"python{python}")
    candidates = [*found, *([on_path] if on_path else []), *map(str, pyenv.glob(f"{python}.*/bin/python{python}"))]
    for candidate in candidates:
        if run(candidate, "-c", "import ensurepip, ssl, venv", cwd=ROOT).returncode == 0:
            return Path(candidate)
    raise NotRunError(f"no Python {python} on this machine")


def outcome_of(cell: Cell, wheel: Path, given: list[Path]) -> compatibility.Row:
    row: compatibility.Row = {
        "python": cell.python,
        "torch": cell.torch,
        "special": cell.special,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "wheel": wheel.name,
    }
    with tempfile.TemporaryDirectory(prefix="gradstat-matrix-") as folder:
        try:
            environment = Environment(Path(folder) / "cell", interpreter_of(cell.python, given))
            row["found"] = SPECIAL[cell.special](environment, cell, wheel)
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
    parser.add_argument("--python", action="append", default=[], type=Path, help="another interpreter, pythonX.Y")
    parser.add_argument("--list", action="store_true", help="only print the names of the cells")
    parser.add_argument("--write", action="store_true", help="record the outcomes and rewrite docs/compatibility.md")
    options = parser.parse_args()
    releases = torch_releases()
    cells = [Cell(*name.split("/")) for name in options.cell] or list(planned(releases))
    failed = 0
    for cell in cells:
        if options.list:
            print(cell)
            continue
        row = outcome_of(cell, options.wheel.resolve(), [path.absolute() for path in options.python])
        print(f"{cell}: {row['outcome']} {row.get('found', '')}", flush=True)
        failed += row["outcome"].startswith("failed")
        if row["outcome"].startswith(f"not run: {NO_TORCH}") and cell.torch == releases[-1]:
            older = Cell(cell.python, releases[releases.index(cell.torch) - 1], cell.special)
            cells.append(older)  # the newest that serves this Python
        if options.write:  # after each, since the next takes minutes
            compatibility.record(row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
