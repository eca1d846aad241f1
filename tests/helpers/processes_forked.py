"""Runs short programs, each in a process forked from one that has imported torch but nothing of gradstat."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_TEMPLATE = """
import json, os, sys, warnings
import torch
for line in sys.stdin:
    program, arguments, environment, wanted, output = json.loads(line)
    pid = os.fork()
    if not pid:
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
    """The process that forks; started with the first program."""

    def __init__(self) -> None:
        self._template: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()

    def run(
        self, program: str, *arguments: str, warnings: str = "error", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``program`` and returns its result; ``warnings`` is the filter action for all warnings."""
        if self._template is None:
            # The caller's interpreter may have found gradstat through its working directory.
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            self._template = subprocess.Popen(
                [sys.executable, "-c", _TEMPLATE],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._template.stdin is not None
        assert self._template.stdout is not None
        output = [Path(self._folder.name, name) for name in ("out", "err")]
        print(
            json.dumps([program, arguments, environment, warnings, [str(path) for path in output]]),
            file=self._template.stdin,
            flush=True,
        )
        status = int(self._template.stdout.readline())
        out, err = (path.read_text() for path in output)
        for path in output:
            path.unlink()
        return subprocess.CompletedProcess(program, status, out, err)

    def stop(self) -> None:
        if self._template is not None:
            self._template.communicate()
        self._folder.cleanup()
