"""The command line, ``gradstat`` or ``python -m gradstat``: ``info`` and the commands below."""

from __future__ import annotations

import importlib
import io
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from typing import Any, TextIO, cast

import torch

import gradstat
from gradstat._core.importing import Parser, UsageError
from gradstat._core.text import printable, wrapped

# The commands besides info: module, function, description. The module parses the command's options.
COMMANDS = {
    "demo": ("gradstat.demo", "main", "train a small GPT with every step checked, then inject a fault"),
    "bench": ("gradstat.bench", "main", "the cost of checks, clips and detect_anomaly on your own model and machine"),
    "view": ("gradstat.monitor.command", "view_main", "the findings of a recorded run, and a page that shows it"),
    "golden": ("gradstat.monitor.command", "golden_main", "whether a recorded run is like healthy ones, or where not"),
    "diff": ("gradstat.monitor.command", "diff_main", "the first step at which two recorded runs diverge, and in what"),
}


class _Output:
    """Standard output or error that ends no command: it drops what nobody reads, as after ``| head`` or ``>&-``.

    What its encoding cannot represent is written as Python's escape sequences.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = io.StringIO() if stream is None else stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError as error:
            # Python flushes what is left on exit: to nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if not isinstance(error, BrokenPipeError):
                raise
        return len(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status, also if nobody reads its output."""
    while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a file of the command must not take the place of a stream that is closed
    os.close(unused)
    output, errors = cast(Any, _Output(sys.stdout)), cast(Any, _Output(sys.stderr))
    with redirect_stdout(output), redirect_stderr(errors):
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(
        prog="gradstat",
        description=gradstat.__doc__,
        epilog="`gradstat COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"gradstat {gradstat.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    info = commands.add_parser("info", help="the backends of this machine, and why one is unavailable")
    info.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for name, (_, _, what) in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command not in COMMANDS and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command in COMMANDS:
            module, function, _ = COMMANDS[options.command]
            status: int = getattr(importlib.import_module(module), function)(rest)
        else:
            collected, status = collect_info(), 0
            print(json.dumps(collected, indent=2) if options.json else format_info(collected))
        return status
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        reason = printable(reason)
    except (UsageError, ImportError) as error:  # ImportError: of an optional package
        reason = str(error)
    # An expected error has no traceback.
    print("\n".join(map(printable, f"gradstat {options.command}: {reason}".splitlines())), file=sys.stderr)
    return 2


def collect_info() -> dict[str, Any]:
    """Versions, devices and backends of this machine, as JSON-serializable data."""
    cuda = torch.cuda.is_available()
    return {
        "gradstat": gradstat.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "backends": [asdict(status) for status in gradstat.backends()],
    }


def format_info(info: dict[str, Any]) -> str:
    lines = [
        f"gradstat {info['gradstat']}, Python {info['python']}, torch {info['torch']}, CUDA {info['cuda'] or 'none'}",
        f"GPUs: {', '.join(info['devices']) or 'none seen by torch'}",
        "",
        "  device  backend    state        detail",
    ]
    for status in info["backends"]:
        state = "chosen" if status["chosen"] else "available" if status["available"] else "unavailable"
        lines.append(f"  {status['device']:<7} {status['name']:<10} {state:<12} {status['detail']}")
    return "\n".join(wrapped(line, 34) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
