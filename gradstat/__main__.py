"""The command line, ``gradstat`` or ``python -m gradstat``: ``info`` and the commands below."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import gradstat
from gradstat._core.importing import UsageError
from gradstat._core.text import printable

# The commands besides info: module, function, description. The module parses the command's options.
COMMANDS = {
    "demo": ("gradstat.demo", "main", "train a small GPT with every step checked, then inject a fault"),
    "bench": ("gradstat.bench", "main", "the cost of checks, clips and detect_anomaly on your own model and machine"),
    "view": ("gradstat.monitor.command", "view_main", "the findings of a recorded run, and a page that shows it"),
    "golden": ("gradstat.monitor.command", "golden_main", "whether a recorded run is like healthy ones, or where not"),
    "diff": ("gradstat.monitor.command", "diff_main", "the first step at which two recorded runs diverge, and in what"),
}

_BROKEN_PIPE = 141  # the exit status of a shell's command that was ended by SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. Ends without a message when its output is closed, as by ``| head``."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes to nowhere on exit
        return _BROKEN_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="gradstat", description=gradstat.__doc__)
    parser.add_argument("--version", action="version", version=f"gradstat {gradstat.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    info = commands.add_parser("info", help="the backends of this machine, and why one is unavailable")
    info.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for name, (_, _, what) in COMMANDS.items():
        commands.add_parser(name, help=f"{what} (--help for options)", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command not in COMMANDS:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        collected = collect_info()
        print(json.dumps(collected, indent=2) if options.json else format_info(collected))
        return 0
    module, function, _ = COMMANDS[options.command]
    try:
        status: int = getattr(importlib.import_module(module), function)(rest)
        return status
    except BrokenPipeError:
        raise  # the output was closed; this is no error about a file
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except OSError as error:
        has_reason = error.filename and error.strerror
        reason = printable(f"{error.filename}: {error.strerror}" if has_reason else str(error))
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
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
