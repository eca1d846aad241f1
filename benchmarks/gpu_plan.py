"""The commands that `gpu_session` runs on a machine with a GPU. Each has parts: programs with a time limit.

Parts that need no quiet machine run side by side, the others alone. The most valuable come first, because time may run
out. The limits of all parts, the machine's start and the transfers fit into `BUDGET_SECONDS`. In a rehearsal (device
``"cpu"``) the same programs run on small inputs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUDGET_SECONDS = 900.0
START_SECONDS, TRANSFER_SECONDS = 30.0, 20.0  # allowed for the start of the machine, and for each command
AGAIN_SECONDS = 200.0  # for parts that are run once more, by their names


class Session(NamedTuple):
    """Settings for all parts.

    Attributes:
        results: The folder for what comes back; parts get one for their rows.
        device: ``"cuda"``, or ``"cpu"`` for a rehearsal.
        part_seconds: A time limit for every part, instead of its own.
        only: The names of the parts to run; all if empty.
    """

    results: Path
    device: str = "cuda"
    part_seconds: float | None = None
    only: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True, slots=True)
class Part:
    """A program that is run as part of a command.

    Attributes:
        name: The name in outcomes.
        seconds: The time limit, after which it is stopped.
        argv: The program and its arguments, for a session.
        environment: Environment variables for this part only.
    """

    name: str
    seconds: float
    argv: Callable[[Session], list[str]]
    environment: dict[str, str] = field(default_factory=dict)


# What a test module with tests on a GPU contains. test_gpu_costs, which measures free memory, does not: it runs alone.
_ON_A_DEVICE = ("@pytest.mark.cuda", ", device: str", "(device: str", "where: tuple[str, str]", "DEVICES")


def modules() -> Iterator[str]:
    """The test modules with tests on a GPU."""
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        if any(text in path.read_text() for text in _ON_A_DEVICE):
            yield str(path.relative_to(ROOT))


def _pytest(*arguments: str) -> list[str]:
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "--durations=5"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def _tests(session: Session) -> list[str]:
    """The tests of those modules that run on a GPU: their marker, parameter id or name has "cuda" or "triton"."""
    if not session.on_gpu:
        return _pytest("tests/core/test_accumulation.py")
    workers = str(min(10, os.cpu_count() or 1))
    side_by_side = ["-n", workers, "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    return _pytest("-k", "cuda or triton", *side_by_side, *modules())


def _fuzz(session: Session) -> list[str]:
    tensors = "50000" if session.on_gpu else "300"
    return [sys.executable, "tools/fuzz.py", "--device", session.device, "--seed", "1", "--tensors", tensors]


def _suite(*groups: str, seconds: float) -> Callable[[Session], list[str]]:
    def argv(session: Session) -> list[str]:
        rest = ["--full", "--seconds", str(seconds)] if session.on_gpu else ["--seconds", "0.01", "--first", "1"]
        recorded = ["--device", session.device, "--record", "--results", str(session.results)]
        return [sys.executable, "benchmarks/suite.py", "--only", *groups, *recorded, *rest]

    return argv


# Substrings of the mangled names of torch's own kernels. Excluding them leaves gradstat's CUDA and Triton kernels. If
# the filter no longer matches anything, that costs time but hides no errors.
OF_TORCH = "kns=at6native,kns=at_cuda_detail"


def _sanitized(tool: str) -> Part:
    """The short set under one of compute-sanitizer's tools. Initcheck is not filtered: it has to see all writes."""

    def argv(session: Session) -> list[str]:
        watched = [sys.executable, "tools/gpu_gates/short_set.py", "--device", session.device]
        if not session.on_gpu:
            return watched
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        filtered = [] if tool == "initcheck" else ["--kernel-name-exclude", OF_TORCH]
        return [sanitizer, "--tool", tool, *filtered, "--error-exitcode", "9", *watched]

    # torch's caching allocator would hide overruns between blocks of one allocation.
    return Part(tool, 130, argv, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def _ranks(session: Session) -> list[str]:
    """Distributed gradients on as many ranks as there are GPUs, over NCCL; in a rehearsal on one rank."""
    processes, rounds = ("gpu", "10") if session.on_gpu else ("1", "1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, "benchmarks/ranks.py"]
    return [*launcher, "--rounds", rounds, "--record", "--results", str(session.results)]


def _numerics(session: Session) -> list[str]:
    vectors = ["--vectors", "3000"] if session.on_gpu else ["--vectors", "13", "--dtypes", "float32", "bfloat16"]
    recorded = ["--device", session.device, "--record", "--results", str(session.results)]
    return [sys.executable, "-W", "ignore", "benchmarks/numerics.py", *vectors, *recorded]


# Each command is a sequence of groups of parts, which run side by side for as long as the longest limit among them.
COMMANDS: dict[str, tuple[tuple[Part, ...], ...]] = {
    "first": (
        (
            Part("tests", 130, _tests),
            *map(_sanitized, ("memcheck", "racecheck", "initcheck", "synccheck")),
            Part("random tensors", 130, _fuzz),
            Part("numerics", 130, _numerics),
        ),
        (Part("lists", 75, _suite("lists", seconds=1.0)),),
        (Part("training steps", 80, _suite("steps", seconds=1.0)),),
        (Part("host path", 15, _suite("host path", seconds=1.0)),),
    ),
    "second": (
        (Part("test_gpu_costs", 25, lambda session: _pytest("tests/bench/test_gpu_costs.py")),),
        (Part("growth in bytes", 20, _suite("growth in bytes", seconds=0.5)),),
        (Part("growth in tensors", 25, _suite("growth in tensors", seconds=0.5)),),
        (Part("steps of optimizers", 35, _suite("optimizer steps", seconds=0.3)),),
        (Part("distributed gradients", 25, _ranks),),
    ),
}


def limit(group: Sequence[Part]) -> float:
    """The time limit of parts that run side by side, in seconds."""
    return max(part.seconds for part in group)
