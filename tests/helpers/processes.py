"""Runs short programs with a time limit, in a new Python process or in one forked after torch was imported."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A program takes seconds, and on a machine with much else to do minutes. After this time it is assumed to hang.
SECONDS = 600


def python(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments; fails if it does not end."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def run(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``program``, with its arguments in ``sys.argv[1:]``; fails if it does not end."""
    return python("-X", "faulthandler", "-c", textwrap.dedent(program), *arguments, **environment)


def output_of(program: str, *arguments: object, **environment: str) -> str:
    """The output of ``program``; fails, showing all its output, if it did not exit with 0."""
    return succeeded(run(program, *arguments, **environment))


def succeeded(ended: subprocess.CompletedProcess[str]) -> str:
    """The output of a program that has ended; fails, showing all its output, if it did not exit with 0."""
    assert ended.returncode == 0, f"the program ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout.strip()


_TEMPLATE = """
import json, os, signal, sys, warnings
import torch
for line in sys.stdin:
    program, arguments, environment, wanted, output, seconds = json.loads(line)
    pid = os.fork()
    if not pid:
        signal.alarm(seconds)
        for descriptor, path in enumerate(output, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        os.environ.update(environment)
        sys.argv[1:] = arguments
        warnings.simplefilter(wanted)
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forks:
    """Runs programs in processes forked from one that has imported torch but nothing of gradstat."""

    def __init__(self) -> None:
        self._template: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()

    def run(
        self, program: str, *arguments: object, warnings: str = "error", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``program`` and returns its result; ``warnings`` is the filter action for all warnings."""
        if self._template is None:
            # The caller's interpreter may have found gradstat through its working directory.
            path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
            self._template = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", _TEMPLATE],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        output = [Path(self._folder.name, name) for name in ("out", "err")]
        told = [textwrap.dedent(program), [*map(str, arguments)], environment, warnings, [*map(str, output)], SECONDS]
        print(json.dumps(told), file=self._template.stdin, flush=True)
        status = int(self._template.stdout.readline())
        out, err = (path.read_text() for path in output)
        for path in output:
            path.unlink()
        return subprocess.CompletedProcess(program, status, out, err)

    def output_of(self, program: str, *arguments: object, **environment: str) -> str:
        """The output of ``program``; fails, showing all its output, if it did not exit with 0."""
        return succeeded(self.run(program, *arguments, warnings="default", **environment))

    def stop(self) -> None:
        if self._template is not None:
            self._template.communicate()
        self._folder.cleanup()
