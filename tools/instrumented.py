"""A copy of the package whose library is instrumented: with sanitizers, or with coverage counters."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ("baseline", "avx2", "avx512")
# Tests that run the CUDA code on the host; tests of guards and clip decisions, for any backend.
HOST_TESTS = ("cuda_on_cpu/test_cuda_launchers.py", "cuda_on_cpu/test_cuda_module.py")
DECISIONS = ("step/test_guard.py", "clip/test_decide.py")
# Selects the tests that run the compiled CPU library.
COMPILED = ("-k", "not (triton or emulated or reference- or reference])")


def build(folder: Path, flags: str) -> None:
    """Builds the package ``folder/gradstat``, with a library compiled and linked with ``flags``."""
    package = folder / "gradstat"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "gradstat", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(folder)]
    command += ["--build-temp", str(folder / "objects")]
    with_flags = {**os.environ, "GRADSTAT_INSTRUMENTATION": flags, "GRADSTAT_CUDA": "0", "GRADSTAT_WERROR": "0"}
    subprocess.run(command, cwd=ROOT, env=with_flags, check=True)


def environment(folder: Path, host_flags: str) -> dict[str, str]:
    """Environment variables to import that package, and to compile CUDA code for the host with ``host_flags``."""
    path = os.pathsep.join([str(folder), str(ROOT / "tests")])
    return {**os.environ, "PYTHONPATH": path, "GRADSTAT_INSTRUMENTATION": host_flags}


def run_program(program: str, folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a Python program with the package in ``folder``."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def levels(folder: Path, variables: dict[str, str]) -> list[str]:
    """The instruction sets of `LEVELS` that this machine has."""
    found = []
    for level in LEVELS:
        program = "from gradstat._core import native; print(native.load_cpu().instructions(), native._PACKAGE)"
        result = run_program(program, folder, {**variables, "GRADSTAT_CPU_INSTRUCTIONS": level})
        if result.stdout.split() == [level, str(folder / "gradstat")]:
            found.append(level)
        elif "is not available on this machine" not in result.stderr:
            sys.exit(f"the library of {folder} does not load:\n{result.stdout}{result.stderr}")
    print(f"levels of instructions on this machine: {', '.join(found)}", flush=True)
    return found


def tests(names: tuple[str, ...], *options: str) -> list[str]:
    """The command that runs files and folders of tests/ with the package of the current folder."""
    configuration = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    paths = [str(ROOT / "tests" / name) for name in dict.fromkeys(names)]
    return [sys.executable, "-m", "pytest", "-q", *configuration, *paths, *options]


def step(name: str, command: list[str], folder: Path, variables: dict[str, str]) -> bool:
    """Runs a command in ``folder``; prints and returns whether it passed."""
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    passed = subprocess.run(command, cwd=folder, env=variables, check=False).returncode == 0
    print(f"{'passed' if passed else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True)
    return passed
