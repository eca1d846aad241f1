"""The command line: ``python -m gradstat info``, ``demo``, ``bench``, ``view`` and ``diff``."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import gradstat


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gradstat", description=gradstat.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    info = commands.add_parser("info", help="what runs on this machine, and why something does not")
    info.add_argument("--json", action="store_true", help="print JSON instead of a table")
    commands.add_parser(
        "demo",
        help="train a small GPT with every step checked, then break it (--help for options)",
        add_help=False,
    )
    commands.add_parser(
        "bench",
        help="what checks, clips and detect_anomaly cost on your own model and machine (--help for options)",
        add_help=False,
    )
    commands.add_parser(
        "view",
        help="what a recording of a run says, and a page to look at it (--help for options)",
        add_help=False,
    )
    commands.add_parser(
        "diff",
        help="in which step two recorded runs part, and what parts first (--help for options)",
        add_help=False,
    )
    # All but info have options of their own, which only they know.
    options, rest = parser.parse_known_args(arguments)
    if options.command == "demo":
        from gradstat.demo import main as run_demo

        return run_demo(rest)
    if options.command == "bench":
        from gradstat.bench import main as run_bench

        return run_bench(rest)
    if options.command in ("view", "diff"):
        from gradstat.monitor import command

        return (command.view_main if options.command == "view" else command.diff_main)(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    collected = collect_info()
    print(json.dumps(collected, indent=2) if options.json else format_info(collected))
    return 0


def collect_info() -> dict[str, Any]:
    """Versions, devices and backends of this machine, JSON-able."""
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
