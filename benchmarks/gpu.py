"""Runs what needs a GPU, on a machine that is lent for a quarter of an hour and has no network.

::

    make gpu-bundle ARCHITECTURES=90                          # here: compiles for that machine, into gpu-bundle/
    python3 benchmarks/gpu.py run --results gpu-results       # there: all commands, for `make gpu`
    python3 benchmarks/gpu.py run --only lists "host path"    # there: some of them
    make gpu-merge FOLDER=gpu-results                         # here: into benchmarks/results, charts and tables

There, the system's Python needs torch, Triton, numpy, pytest and hypothesis (pytest-xdist makes it faster). Rows and
logs come back as one archive in the results folder. It is replaced every few seconds, so that a run that is killed
keeps what it measured. ``--device cpu --limit 20`` is a rehearsal, whose rows ``merge`` refuses.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
ARCHIVE_SECONDS = 5.0
# The system's compiler and packages are not the pinned versions, so their warnings are not errors here.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "GRADSTAT_WERROR": "0"}


@dataclass(frozen=True)
class Command:
    """A program with a time limit.

    Attributes:
        name: The name in outcomes, logs and ``--only``.
        seconds: The time limit, after which it is stopped.
        line: The program and its arguments, as for a shell. ``{python}`` is the Python that runs this, ``{device}``
            is "cuda" or "cpu", and ``{rows}`` the folder for rows.
    """

    name: str
    seconds: float
    line: str


Groups = Sequence[Sequence[Command]]  # the commands of a group run side by side, the groups one after another
_PYTEST = "{python} -m pytest -q -W default -p no:cacheprovider --durations=5"
_RECORDED = "--record --results {rows}"
_SUITE = "{python} benchmarks/suite.py --full --device {device} " + _RECORDED
# What a test module with tests on a GPU contains. test_gpu_costs, which measures free memory, does not: it runs alone.
_ON_A_DEVICE = ("@pytest.mark.cuda", ", device: str", "(device: str", "where: tuple[str, str]", "DEVICES")


def _tests() -> str:
    """Pytest, of the tests whose marker, parameter id or name has "cuda" or "triton"."""
    paths = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("tests/*/test_*.py"))}
    modules = [name for name, text in paths.items() if any(mark in text for mark in _ON_A_DEVICE)]
    workers = f"-n {min(10, os.cpu_count() or 1)} --dist worksteal" if importlib.util.find_spec("xdist") else ""
    return f"{_PYTEST} -k 'cuda or triton' {workers} {' '.join(modules)}"


def _sanitized(tool: str) -> Command:
    """The short set under one of compute-sanitizer's tools. Initcheck is not filtered: it has to see all writes."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Torch's own kernels are excluded by parts of their mangled names, which leaves those of gradstat. If the filter no
    # longer matches anything, that costs time but hides no errors.
    filtered = "" if tool == "initcheck" else "--kernel-name-exclude kns=at6native,kns=at_cuda_detail"
    # Torch's caching allocator would hide overruns between blocks of one allocation.
    line = f"PYTORCH_NO_CUDA_MEMORY_CACHING=1 {sanitizer} --tool {tool} {filtered} --error-exitcode 9"
    return Command(tool, 130, f"{line} {{python}} tools/gpu_gates/short_set.py --device {{device}}")


def commands() -> Groups:
    """All commands in the order of their worth, because time may run out. What is timed runs alone."""
    numerics = "{python} -W ignore benchmarks/numerics.py --vectors 3000 --device {device} " + _RECORDED
    ranks = "{python} -m torch.distributed.run --nproc-per-node auto benchmarks/ranks.py --rounds 10 " + _RECORDED
    side_by_side = (
        Command("tests", 130, _tests()),
        *map(_sanitized, ("memcheck", "racecheck", "initcheck", "synccheck")),
        Command("random tensors", 130, "{python} tools/fuzz.py --device {device} --seed 1 --tensors 50000"),
        Command("numerics", 130, numerics),
    )
    alone = (
        Command("lists", 75, f"{_SUITE} --only lists --seconds 1"),
        Command("training steps", 80, f"{_SUITE} --only steps --seconds 1"),
        Command("host path", 15, f"{_SUITE} --only 'host path' --seconds 1"),
        Command("costs", 25, f"{_PYTEST} tests/bench/test_gpu_costs.py"),
        Command("growth in bytes", 20, f"{_SUITE} --only 'growth in bytes' --seconds 0.5"),
        Command("growth in tensors", 25, f"{_SUITE} --only 'growth in tensors' --seconds 0.5"),
        Command("steps of optimizers", 35, f"{_SUITE} --only 'optimizer steps' --seconds 0.3"),
        Command("distributed gradients", 25, ranks),
    )
    return (side_by_side, *((command,) for command in alone))


def run(groups: Groups, results: Path, device: str = "cuda", limit: float | None = None) -> list[str]:
    """Runs commands, each for at most ``limit`` seconds, or its own limit; returns a line about how each ended.

    One that fails or is stopped does not stop the others.
    """
    results.mkdir(parents=True, exist_ok=True)
    archive, ended = results / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}.zip", list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for group in groups:
            for line in _run_together(group, Path(folder), archive, device, limit):
                print(line, flush=True)
                ended.append(line)
                Path(folder, "outcomes.txt").write_text("\n".join(ended))
            _keep(Path(folder), archive)
    print(f"rows and logs: {archive}")
    return ended


def _run_together(
    group: Sequence[Command], folder: Path, archive: Path, device: str, limit: float | None
) -> Iterator[str]:
    """Runs commands side by side; yields a line about each as it ends."""
    kept = start = time.monotonic()
    running = {each: _started(each, device, folder, is_alone=len(group) == 1) for each in group}
    try:
        while running:
            time.sleep(0.05)
            now = time.monotonic()
            for each, process in list(running.items()):
                if process.poll() is not None or now - start > (limit or each.seconds):
                    how = {None: "STOPPED", 0: "passed"}.get(process.returncode, "FAILED")
                    _end(running.pop(each))
                    yield f"{each.name}: {how} after {now - start:.0f} s"
            if now - kept > ARCHIVE_SECONDS:
                _keep(folder, archive)
                kept = now
    finally:
        for process in running.values():
            _end(process)


def _started(command: Command, device: str, folder: Path, is_alone: bool) -> subprocess.Popen[bytes]:
    words = [word.format(python=sys.executable, device=device, rows=folder) for word in shlex.split(command.line)]
    how = {**ENVIRONMENT, **({} if is_alone else {"OMP_NUM_THREADS": "1"})}
    # `env` sets variables, and turns a program that is missing into one that fails. The process group makes it possible
    # to end all its processes together; they stay in the session, so that they end with it.
    with (folder / f"{command.name}.txt").open("wb") as log:
        return subprocess.Popen(["env", *words], cwd=ROOT, env=how, stdout=log, stderr=log, preexec_fn=os.setpgrp)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a command's process group."""
    for number, grace in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(grace)


def _keep(folder: Path, archive: Path) -> None:
    """Replaces the archive by one of the rows and the logs in the folder."""
    unfinished = archive.with_suffix(".new")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as file:
        for path in (*folder.glob("*.txt"), *folder.rglob("*.jsonl")):
            file.writestr(path.relative_to(folder).as_posix(), path.read_bytes())
    os.replace(unfinished, archive)


def merge(folder: Path, results: Path = ROOT / "benchmarks" / "results") -> list[Path]:
    """Appends rows below ``folder``, in files or archives, to ``results``; returns the files they are in then.

    Raises:
        SystemExit: There are no rows, or some are from a CPU. Nothing is appended then.
    """
    import rows

    with tempfile.TemporaryDirectory() as unpacked:
        for archive in folder.rglob("*.zip"):
            zipfile.ZipFile(archive).extractall(Path(unpacked, archive.name))
        found = [(path.stem, rows.read(path)) for at in (folder, Path(unpacked)) for path in at.rglob("*.jsonl")]
    if not any(listed for _, listed in found):
        sys.exit(f"expected rows (*.jsonl, or in *.zip) below {folder}, got none; pass the folder given to --results")
    if rehearsed := [row.device for _, listed in found for row in listed if not row.driver]:
        sys.exit(f"{folder} has rows of {rehearsed[0]}, which is not a GPU; rows of a rehearsal cannot be merged")
    return list(dict.fromkeys(rows.append(listed, suite, results) for suite, listed in found))


def bundle() -> None:
    """Compiles the libraries into ``gpu-bundle/``, for all architectures or those in GRADSTAT_CUDA_ARCHITECTURES.

    They use the stable ABIs of Python and torch, so the versions there may differ.
    """
    made, sources = ROOT / "gpu-bundle", hash_of_sources(ROOT)
    shutil.rmtree(made, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", folder, "--build-temp", folder]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "GRADSTAT_CUDA": "1"}, check=True)
        shutil.copytree(Path(folder) / "gradstat", made)
    (made / "sources.txt").write_text(sources)


def install(root: Path = ROOT) -> bool:
    """Copies the bundle's libraries into the package; returns whether there is a bundle.

    Raises:
        SystemExit: They were compiled from other sources.
    """
    made = root / "gpu-bundle" / "sources.txt"
    if not made.exists():
        return False
    if made.read_text() != hash_of_sources(root):
        sys.exit("gpu-bundle/ was compiled from other sources; rebuild it (`make gpu-bundle`), or delete it and build")
    for library in made.parent.glob("*.so"):
        # Replaced by a rename, since a running program may have the old file mapped.
        os.replace(shutil.copyfile(library, root / "gradstat" / "library.new"), root / "gradstat" / library.name)
    return True


def hash_of_sources(root: Path) -> str:
    files = [*sorted((root / "csrc").glob("*.*")), root / "setup.py", root / "gradstat" / "_fields.py"]
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "bundle", "merge"])
    parser.add_argument("--results", type=Path, default=Path("gpu-results"), help="the folder for, or of, archives")
    names = [each.name for group in commands() for each in group]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="only these commands")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu for a rehearsal")
    parser.add_argument("--limit", type=float, help="seconds for each command, instead of its own limit")
    options, ended = parser.parse_args(), list[str]()
    if options.action == "bundle":
        bundle()
    elif options.action == "merge":
        print(*(f"appended to {path}" for path in merge(options.results)), sep="\n")
    else:
        build = [] if install() else [Command("build", 240, "{python} setup.py --quiet build_ext --inplace")]
        chosen = [build, *([each for each in group if each.name in options.only] for group in commands())]
        ended = run(list(filter(None, chosen)), options.results, options.device, options.limit)
    return int(any(": passed" not in line for line in ended))


if __name__ == "__main__":
    sys.exit(main())
