"""Runs short programs in another Python process with a time limit, for tests of how processes start and end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A program takes a few seconds, mostly to import torch. After this time it is assumed to hang.
SECONDS = 120


def run(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``program``, with its arguments in ``sys.argv[1:]``; fails if it does not end."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(program), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def output_of(program: str, *arguments: object, **environment: str) -> str:
    """The output of ``program``; fails, showing all its output, if it did not exit with 0."""
    return succeeded(run(program, *arguments, **environment))


def succeeded(ended: subprocess.CompletedProcess[str]) -> str:
    """The output of a program that has ended; fails, showing all its output, if it did not exit with 0."""
    assert ended.returncode == 0, f"the program ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout.strip()
