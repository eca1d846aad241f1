"""Runs everything that needs a GPU, as commands of under eight minutes each, on a machine rented by the half hour.

    python3 benchmarks/gpu_session.py plan                               # the commands, for `make gpu-plan`
    python3 benchmarks/gpu_session.py bandwidth --results gpu-results    # one of them
    python3 benchmarks/gpu_session.py all --results gpu-results          # one after the other, for `make gpu`
    python3 benchmarks/gpu_session.py merge gpu-results                  # `make gpu-merge`: into benchmarks/results

A command needs no network, only the system's Python with torch, Triton, numpy, pytest and hypothesis (pytest-xdist
makes it faster). Rows and a log are written to the results folder as they are made, so a killed command keeps what it
measured; every part has its own time limit. With ``--device cpu`` the same parts run on small inputs, as a rehearsal,
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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from gpu_plan import BUDGET_SECONDS, COMMAND_SECONDS, COMMANDS, Part, Session

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
LEAST_SECONDS = 5.0  # a part is not started with less time left
LOG_BYTES = 8 << 20
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
# The system's compiler and packages are not the pinned versions, so their warnings are not errors here.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
    "PYTHONUNBUFFERED": "1",
    "GRADSTAT_WERROR": "0",
}


class Outcome(NamedTuple):
    """How a part ended: ``"passed"``, ``"FAILED"``, ``"STOPPED"`` at its limit, ``"not started"`` for lack of time."""

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
    return Part("build", 240, lambda session: argv, {"GRADSTAT_CUDA": "1" if session.on_gpu else "0"})


def run_command(name: str, session: Session) -> bool:
    """Runs the parts of a command and prints tables; returns whether all parts passed."""
    end = time.monotonic() + (COMMAND_SECONDS if session.part_seconds is None else math.inf)
    session.results.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    with (session.results / "log.txt").open("a") as log:
        build = installed(session)
        for part in (*([build] if build else []), *COMMANDS[name].parts):
            outcomes.append(run_part(part, session, log, end))
            record(name, outcomes[-1], session)
            if part is build and outcomes[-1].how != "passed":
                break
        _say(_summary(name, outcomes, session), log)
    return all(outcome.how == "passed" for outcome in outcomes)


def run_part(part: Part, session: Session, log: IO[str], end: float) -> Outcome:
    """Runs a part, at most until ``end``; its output goes to the terminal and to the log."""
    left = end - time.monotonic() - GRACE_SECONDS
    seconds = min(session.part_seconds or part.seconds, left)
    if left < LEAST_SECONDS:
        return Outcome(part.name, "not started", 0.0)
    _say(f"\n== {part.name}, {seconds:.0f} s at most\n", log)
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            part.argv(session),
            cwd=ROOT,
            env={**ENVIRONMENT, **part.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_start_process_group,
        )
    except OSError as error:
        _say(f"{error}\n", log)
        return Outcome(part.name, "FAILED", 0.0)
    assert process.stdout is not None
    reader = threading.Thread(target=_copy, args=(process.stdout, log), daemon=True)
    reader.start()
    try:
        how = "passed" if process.wait(seconds) == 0 else "FAILED"
    except subprocess.TimeoutExpired:
        how = "STOPPED"
    finally:
        _end(process)
        reader.join(GRACE_SECONDS)  # a process that left the group may still hold the pipe
    return Outcome(part.name, how, time.monotonic() - start)


def _start_process_group() -> None:
    """Runs in a part's process: makes a process group, so that all its processes can be ended together.

    On Linux the part is also killed if this program is. It stays in the session, so that killing the session ends it.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a part's process group; returns at once if the part has ended by itself."""
    for number, grace in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)


def _copy(stream: IO[str], log: IO[str]) -> None:
    with stream:
        for line in stream:
            _say(line, log)


def _say(text: str, log: IO[str]) -> None:
    print(text, end="", flush=True)
    if log.tell() < LOG_BYTES:
        log.write(text)
        log.flush()


def record(command: str, outcome: Outcome, session: Session) -> None:
    """Appends an outcome as rows."""
    import torch
    from rows import append, row

    of = {"device": torch.device(session.device)}
    about = (f"gpu session, {command}", outcome.part, "make gpu")
    passed = row(*about, "passed", "", float(outcome.how == "passed"), **of)
    stopped = row(*about, "stopped", "", float(outcome.how in ("STOPPED", "not started")), **of)
    append([passed, stopped, row(*about, "time", "s", outcome.seconds, **of)], "gpu_session", session.results)


def _summary(name: str, outcomes: list[Outcome], session: Session) -> str:
    import rows
    import tables

    lines = [[outcome.part, outcome.how, f"{outcome.seconds:.0f} s"] for outcome in outcomes]
    parts, devices = [], rows.devices(session.results)
    if any(outcome.how == "STOPPED" for outcome in outcomes):  # otherwise the programs have printed their rows
        parts += [tables.everything(device) for device in devices]
    parts += [f"\n== {name}: results\n", tables.grid(["part", "outcome", "time"], lines, 2)]
    return "\n".join(parts)


def merge(folder: Path, results: Path = RESULTS) -> list[Path]:
    """Appends rows below ``folder`` to ``results`` unless they are there already; returns the files that grew.

    Raises:
        SystemExit: There are no rows, or some are from a CPU. Nothing is appended then.
    """
    import rows

    found = [(path, rows.read(path)) for path in sorted(folder.rglob("*.jsonl"))]
    if not any(listed for _, listed in found):
        sys.exit(f"expected rows (*.jsonl) below {folder}, got none; pass the folder given to --results")
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
    yield f"Together they take at most {BUDGET_SECONDS / 60:.0f} minutes, with the machine's start and the transfers."
    yield "They need torch, Triton, numpy, pytest and hypothesis (pytest-xdist makes them faster), and no network."
    yield "So that nothing has to be compiled there, make gpu-bundle/ here (for an H100 or H200: `make gpu-bundle"
    yield "ARCHITECTURES=90`). Git ignores this folder, so a copy of git's files lacks it: copy it by name."
    yield "Afterwards copy the results folder back and merge it: `make gpu-merge FOLDER=...`."
    for number, (name, command) in enumerate(COMMANDS.items(), 1):
        most = sum(part.seconds for part in command.parts) / 60
        yield f"\n{number}. {command.what} ({most:.1f} min at most):"
        yield f"   python3 benchmarks/gpu_session.py {name} --results {results}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["plan", *COMMANDS, "all", "merge"])
    parser.add_argument("folder", nargs="?", type=plain, help="the folder to merge")
    parser.add_argument(
        "--results", type=plain, default="gpu-results", help="the folder for rows and the log; may name a variable"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu for a rehearsal")
    parser.add_argument(
        "--part-seconds",
        type=float,
        help="time limit of every part, and no other, as for a rehearsal on a slow machine",
    )
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
    session = Session(results.resolve(), options.device, options.part_seconds)
    if session.results.is_relative_to(RESULTS):
        parser.error(f"--results must be outside of {RESULTS}; `merge` adds rows there")
    import torch

    if session.on_gpu and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; `make gpu-code` checks what can be checked without one")
    chosen = list(COMMANDS) if options.command == "all" else [options.command]
    passed = [run_command(name, session) for name in chosen]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
