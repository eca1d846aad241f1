"""Runs everything that needs a GPU, as two commands of a few minutes, on a machine rented by the quarter of an hour.

    python3 benchmarks/gpu_session.py plan                                 # the commands, for `make gpu-plan`
    python3 benchmarks/gpu_session.py first --results gpu-results          # one of them
    python3 benchmarks/gpu_session.py all --only lists "host path"         # some of their parts
    python3 benchmarks/gpu_session.py all --results gpu-results            # one after the other, for `make gpu`
    python3 benchmarks/gpu_session.py merge gpu-results                    # `make gpu-merge`: into benchmarks/results

A command needs no network, only the system's Python with torch, Triton, numpy, pytest and hypothesis (pytest-xdist
makes it faster). Its rows and log come back as one archive in the results folder, which is replaced every few seconds,
so a killed command keeps what it measured. With ``--device cpu`` the same parts run on small inputs, as a rehearsal,
whose rows ``merge`` refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from gpu_plan import AGAIN_SECONDS, BUDGET_SECONDS, COMMANDS, START_SECONDS, TRANSFER_SECONDS, Part, Session, limit

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
ARCHIVE_SECONDS = 5.0
LOG_BYTES = 8 << 20
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_C = ctypes.CDLL(None)  # loaded here, since a process that was just forked may not load libraries
_SAYING = threading.Lock()
# The system's compiler and packages are not the pinned versions, so their warnings are not errors here.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
    "PYTHONUNBUFFERED": "1",
    "GRADSTAT_WERROR": "0",
}


class Outcome(NamedTuple):
    """How a part ended: ``"passed"``, ``"FAILED"``, or ``"STOPPED"`` at its limit."""

    part: str
    how: str
    seconds: float


def installed(session: Session) -> Part | None:
    """Installs prebuilt libraries if there are any and returns None; else returns the part that compiles in place."""
    import gpu_bundle

    try:
        if gpu_bundle.install():
            return None
    except RuntimeError as error:  # the bundle is stale or damaged
        sys.exit(str(error))
    argv = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {"GRADSTAT_CUDA": "1" if session.on_gpu else "0"}
    return Part("build", 240, lambda session: argv, environment=environment)


def run_command(name: str, session: Session) -> bool:
    """Runs the parts of a command and prints how they ended; returns whether all passed."""
    session.results.mkdir(parents=True, exist_ok=True)
    archive = session.results / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.zip"
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log.txt").open("w") as log:
        session = session._replace(results=Path(folder))
        build = installed(session)
        chosen = ([part for part in group if part.name in (session.only or [part.name])] for group in COMMANDS[name])
        for group in filter(None, ([build] if build else [], *chosen)):
            for outcome in run_together(group, session, log, lambda: keep(session.results, archive)):
                record(name, outcome, session)
                outcomes.append(outcome)
            keep(session.results, archive)
            if build in group and outcomes[0].how != "passed":
                break
        _say(_summary(name, outcomes, session), log)
        keep(session.results, archive)
    return all(outcome.how == "passed" for outcome in outcomes)


def keep(folder: Path, archive: Path) -> None:
    """Replaces the archive by one of the rows and the log in the folder."""
    unfinished = archive.with_suffix(".new")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as file:
        for path in (folder / "log.txt", *sorted(folder.rglob("*.jsonl"))):
            file.writestr(path.relative_to(folder).as_posix(), path.read_bytes())
    os.replace(unfinished, archive)


def run_together(
    parts: Sequence[Part], session: Session, log: IO[str], meanwhile: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """Runs parts side by side, at most for their limit; their output goes to the terminal and to the log.

    ``meanwhile`` is called every few seconds.
    """
    seconds = session.part_seconds or limit(parts)
    _say(f"\n== {', '.join(part.name for part in parts)}: {seconds:.0f} s at most\n", log)
    start = called = time.monotonic()
    running: list[Running] = []
    outcomes: dict[str, Outcome] = {}
    try:
        for part in parts:
            running.append(_started(part, session, log, alone=len(parts) == 1))
        while running:
            time.sleep(0.05)
            now = time.monotonic()
            over = [each for each in running if each.process.poll() is not None or now - start > seconds]
            for name, process, _ in over:
                how = {None: "STOPPED", 0: "passed"}.get(process.returncode, "FAILED")
                outcomes[name] = Outcome(name, how, now - start)
            end(over)
            running = [each for each in running if each not in over]
            if now - called > ARCHIVE_SECONDS:
                meanwhile()
                called = now
    finally:
        end(running)
    return [outcomes[part.name] for part in parts]


class Running(NamedTuple):
    """A part's process, in a process group of its own, and the thread that copies its output."""

    part: str
    process: subprocess.Popen[str]
    reader: threading.Thread


def _started(part: Part, session: Session, log: IO[str], alone: bool) -> Running:
    shared = {} if alone else {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["env", *part.argv(session)],  # a program that is missing fails like any other
        cwd=ROOT,
        env={**ENVIRONMENT, **shared, **part.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=_start_process_group,
    )
    reader = threading.Thread(target=_copy, args=(process.stdout, log, "" if alone else f"{part.name}: "), daemon=True)
    reader.start()
    return Running(part.name, process, reader)


def _start_process_group() -> None:
    """Runs in a part's process: makes a process group, so that all its processes can be ended together.

    On Linux the part is also killed if this program is. It stays in the session, so that killing the session ends it.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        _C.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def end(several: Sequence[Running]) -> None:
    """Ends what is left of their process groups; returns at once if the parts have ended by themselves."""
    for number, grace in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, math.inf)):
        for each in several:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, number)
        until = time.monotonic() + grace
        while any(each.process.poll() is None for each in several) and time.monotonic() < until:
            time.sleep(0.05)
    for each in several:
        each.reader.join(GRACE_SECONDS)  # a process that left the group may still hold the pipe


def _copy(stream: IO[str], log: IO[str], prefix: str) -> None:
    with stream:
        for line in stream:
            _say(prefix + line, log)


def _say(text: str, log: IO[str]) -> None:
    with _SAYING:
        print(text, end="", flush=True)
        if log.tell() < LOG_BYTES:
            log.write(text)
            log.flush()


def record(command: str, outcome: Outcome, session: Session) -> None:
    """Appends an outcome as rows."""
    import torch
    from rows import append, row

    about, device = (f"gpu session, {command}", outcome.part, "make gpu"), torch.device(session.device)
    passed, stopped = ((how, "", float(outcome.how.lower() == how)) for how in ("passed", "stopped"))
    listed = [row(*about, *value, device) for value in (passed, stopped, ("time", "s", outcome.seconds))]
    append(listed, "gpu_session", session.results)


def _summary(name: str, outcomes: list[Outcome], session: Session) -> str:
    import rows
    import tables

    lines = [[outcome.part, outcome.how, f"{outcome.seconds:.0f} s"] for outcome in outcomes]
    parts = [f"\n== {name}: results\n", tables.grid(["part", "outcome", "time"], lines, 2)]
    for device in rows.devices(session.results):
        parts += [tables.where(device), ""]
    return "\n".join(parts)


def merge(folder: Path, results: Path = RESULTS) -> list[Path]:
    """Appends rows below ``folder``, in files or archives, to ``results``; returns the files that grew.

    Rows that are there already are left out.

    Raises:
        SystemExit: There are no rows, or some are from a CPU. Nothing is appended then.
    """
    import rows

    with tempfile.TemporaryDirectory() as unpacked:
        for archive in folder.rglob("*.zip"):
            zipfile.ZipFile(archive).extractall(Path(unpacked, archive.name))
        found = [(path, rows.read(path)) for at in (folder, Path(unpacked)) for path in sorted(at.rglob("*.jsonl"))]
    if not any(listed for _, listed in found):
        sys.exit(f"expected rows (*.jsonl, or in *.zip) below {folder}, got none; pass the folder given to --results")
    for path, listed in found:
        rehearsed = [row.device for row in listed if not row.driver]
        if rehearsed:
            sys.exit(f"{path} has rows of {rehearsed[0]}, which is not a GPU; rows of a rehearsal cannot be merged")
    grown = []
    for path, listed in found:
        target = results / rows.slug(listed[0].device) / path.name
        known = set(rows.read(target)) if target.exists() else set()
        new = [row for row in listed if row not in known]
        if new:
            grown.append(rows.append(new, path.stem, results))
    return grown


def _merge_and_render(folder: Path) -> int:
    for path in dict.fromkeys(merge(folder)):
        print(f"appended to {path.relative_to(ROOT)}")
    for argv in (["benchmarks/plots.py"], ["benchmarks/render.py", "--write"]):
        subprocess.run([sys.executable, *argv], cwd=ROOT, env=ENVIRONMENT, check=True)
    return 0


def plain(folder: str) -> str:
    """A folder's name without the escapes of its variables for make or a shell: ``$NAME`` for ``$$NAME``."""
    return re.sub(r"\\?\$+", "$", folder)


def plan(results: str) -> Iterator[str]:
    """The lines of the plan: instructions and the commands to type, in which variables are not expanded."""
    results = f'"{results}"' if re.search(r"[$\s]", results) else results
    yield "Run these on a machine with a GPU, in the root of the checkout; the most valuable comes first."
    yield f"With its start and the transfers they take at most {planned_seconds():.0f} of {BUDGET_SECONDS:.0f} seconds."
    yield "They need torch, Triton, numpy, pytest and hypothesis (pytest-xdist makes them faster), and no network."
    yield "So that nothing has to be compiled there, make gpu-bundle/ here (for an H100 or H200: `make gpu-bundle"
    yield "ARCHITECTURES=90`). Git ignores this folder, so a copy of git's files lacks it: copy it by name."
    yield "Each leaves an archive in the results folder. Copy it back and merge it: `make gpu-merge FOLDER=...`."
    for number, (name, groups) in enumerate(COMMANDS.items(), 1):
        yield f"\n{number}. {sum(map(limit, groups)):.0f} seconds at most:"
        yield f"   python3 benchmarks/gpu_session.py {name} --results {results}"
        for group in groups:
            yield f"   {limit(group):5.0f} s  {', '.join(part.name for part in group)}"
    yield f"\n{len(COMMANDS) + 1}. {AGAIN_SECONDS:.0f} seconds for parts that were stopped or have changed:"
    yield f"   python3 benchmarks/gpu_session.py all --only lists --results {results}"


def planned_seconds() -> float:
    """The seconds of all commands at most, with the machine's start and the transfers."""
    commands = [*(sum(map(limit, groups)) for groups in COMMANDS.values()), AGAIN_SECONDS]
    return START_SECONDS + sum(seconds + TRANSFER_SECONDS for seconds in commands)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["plan", *COMMANDS, "all", "merge"])
    parser.add_argument("folder", nargs="?", type=plain, help="the folder to merge")
    parser.add_argument(
        "--results", type=plain, default="gpu-results", help="the folder for the archives; may name a variable"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu for a rehearsal")
    parser.add_argument("--part-seconds", type=float, help="time limit of every part, as for a slow machine")
    parser.add_argument("--only", nargs="+", default=[], help="names of parts: only these")
    options = parser.parse_args(arguments)
    if options.command == "plan":
        print("\n".join(plan(options.results)))
        return 0
    results, folder = (Path(os.path.expandvars(given or "")) for given in (options.results, options.folder))
    for path in (results, folder):
        if "$" in str(path):
            parser.error(f"expected a folder, got {path}, whose variable is not set here; set it, or pass a path")
    if importlib.util.find_spec("torch") is None:
        parser.error(f"{sys.executable} has no torch; use a Python that has it, as in `make gpu PYTHON=python3.12`")
    sys.path.insert(0, str(ROOT))
    if options.command == "merge":
        if options.folder is None:
            parser.error("merge needs the folder to merge, as in `make gpu-merge FOLDER=gpu-results`")
        return _merge_and_render(folder)
    chosen = list(COMMANDS) if options.command == "all" else [options.command]
    parts = {name: {part.name for group in COMMANDS[name] for part in group} for name in chosen}
    if unknown := set(options.only).difference(*parts.values()):
        known = ", ".join(part.name for name in chosen for group in COMMANDS[name] for part in group)
        parser.error(f"--only: expected names of parts ({known}), got {', '.join(sorted(unknown))}")
    session = Session(results.resolve(), options.device, options.part_seconds, tuple(options.only))
    import torch

    if session.on_gpu and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; `make gpu-code` checks what can be checked without one")
    passed = [run_command(name, session) for name in chosen if not options.only or parts[name] & {*options.only}]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
