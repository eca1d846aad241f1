"""Programs of a few lines, run by another Python with a limit of time, for tests of how processes begin and end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A program takes a few seconds, most of them to import torch. One that needs this long is stuck.
SECONDS = 120


def run(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """What became of ``program``; fails if it does not end. Its arguments are in ``sys.argv[1:]``."""
    return subprocess.run(
        command(program, *arguments),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def command(program: str, *arguments: object) -> list[str]:
    """How ``program`` is run."""
    return [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(program), *map(str, arguments)]


def output_of(program: str, *arguments: object, **environment: str) -> str:
    """What ``program`` printed; fails, with what it said, unless it ended as it should."""
    ended = run(program, *arguments, **environment)
    assert ended.returncode == 0, f"it ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout.strip()
