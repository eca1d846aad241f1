"""The commands that `gpu_session` runs on a machine with a GPU. Each has parts: programs with a time limit.

The most valuable command comes first, because time may run out. The limits of all parts, the machine's start and the
transfers add up to `BUDGET_SECONDS`, which leaves a fifth of half an hour unused. In a rehearsal (device ``"cpu"``) the
same programs run on small inputs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COMMAND_SECONDS = 470.0  # of all parts of a command together
BUDGET_SECONDS = 24 * 60.0
START_SECONDS, TRANSFER_SECONDS = 110.0, 20.0  # allowed for the start of the machine, and for each command


class Session(NamedTuple):
    """Settings for all parts.

    Attributes:
        results: The folder for rows and the log.
        device: ``"cuda"``, or ``"cpu"`` for a rehearsal.
        part_seconds: A time limit for every part, instead of its own and the command's.
    """

    results: Path
    device: str = "cuda"
    part_seconds: float | None = None

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


# Test modules with tests on a GPU, except test_gpu_costs, which measures free memory and runs alone.
ON_A_DEVICE = (
    "accumulation", "adaptive", "amp", "check", "clip", "clip_value", "conformance", "decide", "every_clip", "fuzz",
    "guard", "host_path", "life_threads", "multiply", "ops", "replay_state", "short_set", "step", "streams",
    "total_norm", "triton",
)  # fmt: skip
WORKERS = min(8, os.cpu_count() or 1)


def _pytest(*arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "--durations=5",
        *arguments,
    ]


def _modules() -> list[str]:
    return [str(next(ROOT.glob(f"tests/*/test_{name}.py")).relative_to(ROOT)) for name in ON_A_DEVICE]


def _tests(session: Session) -> list[str]:
    """The tests of those modules that run on a GPU: their marker, parameter id or name has "cuda" or "triton"."""
    if not session.on_gpu:
        return _pytest("tests/core/test_accumulation.py")
    side_by_side = ["-n", str(WORKERS), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    return _pytest("-k", "cuda or triton", *side_by_side, *_modules())


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
SHORT_SET = ("tools/gpu_gates/short_set.py",)
# Random tensors are checked for memory errors only, since they are slow under a sanitizer.
RANDOM_TENSORS = ("tools/fuzz.py", "--seed", "1", "--tensors", "400", "--apart")


def _sanitized(tool: str, seconds: float, program: tuple[str, ...] = SHORT_SET) -> Part:
    """A program under one of compute-sanitizer's tools. Initcheck is not filtered: it has to see all writes.

    Counted on a CPU, the short set makes 1,000 operations per backend on the device, random tensors 10,000.
    """

    def argv(session: Session) -> list[str]:
        watched = [sys.executable, *program, "--device", session.device]
        if not session.on_gpu:
            return watched
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        filtered = [] if tool == "initcheck" else ["--kernel-name-exclude", OF_TORCH]
        return [sanitizer, "--tool", tool, *filtered, "--error-exitcode", "9", *watched]

    # torch's caching allocator would hide overruns between blocks of one allocation.
    name = f"{tool} of {Path(program[0]).stem}"
    return Part(name, seconds, argv, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def _ranks(script: str) -> Callable[[Session], list[str]]:
    """A benchmark on as many ranks as there are GPUs, over NCCL; in a rehearsal on one rank."""

    def argv(session: Session) -> list[str]:
        processes = "gpu" if session.on_gpu else "1"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes]
        return [*launcher, f"benchmarks/{script}", "--record", "--results", str(session.results)]

    return argv


def _variants(kernels: str) -> Callable[[Session], list[str]]:
    def argv(session: Session) -> list[str]:
        how = ["--results", str(session.results)] if session.on_gpu else ["--compile", "90", "--variants", "as shipped"]
        return [sys.executable, "benchmarks/gpu_variants.py", "--only", kernels, *how]

    return argv


def _numerics(session: Session) -> list[str]:
    vectors = ["--vectors", "3000"] if session.on_gpu else ["--vectors", "13", "--dtypes", "float32", "bfloat16"]
    recorded = ["--device", session.device, "--record", "--results", str(session.results)]
    return [sys.executable, "-W", "ignore", "benchmarks/numerics.py", *vectors, *recorded]


class Command(NamedTuple):
    """One of the commands.

    Attributes:
        what: Its description in the plan.
        parts: Its parts, in order.
    """

    what: str
    parts: tuple[Part, ...]


# In brackets: pieces of work, counted, and seconds of each, estimated. A program takes some 8 s to start.
COMMANDS = {
    "correctness": Command(
        "tests that run on a GPU, random tensors compared with exact results, and norms",
        (
            Part("tests", 180, _tests),  # (1,865 tests, 8 at a time)
            Part("random tensors", 30, _fuzz),  # (50,000 tensors in 98 batches)
            Part("numerics", 75, _numerics),  # (3,000 vectors of 11 dtypes; drawing and judging them: 30 s)
        ),
    ),
    "bandwidth": Command(
        "all lists of gradients in all dtypes, growth in bytes and in tensors",
        (
            Part("lists", 110, _suite("lists", seconds=1.0)),  # (23 lists, 4 s)
            Part("growth in tensors", 30, _suite("growth in tensors", seconds=0.5)),  # (10 lists, 2 s)
            Part("growth in bytes", 40, _suite("growth in bytes", seconds=0.5)),  # (15 sizes, 2 s)
            Part("growth in tensors, warm", 25, _suite("growth in tensors, warm", seconds=0.35)),  # (10 lists, 1.5 s)
        ),
    ),
    "steps": Command(
        "time added to training steps, optimizer steps, the host path, memory, several ranks",
        (
            Part("training steps", 100, _suite("steps", seconds=4.5)),  # (5 trainings, 13.5 s and 4 s to set up)
            Part("steps of optimizers", 70, _suite("optimizer steps", seconds=0.3)),  # (48 cases, 1.3 s)
            Part("host path", 15, _suite("host path", seconds=1.0)),
            Part("memory", 15, _suite("memory", seconds=1.0)),  # (3 lists, 2 s)
            Part("distributed gradients", 20, _ranks("dtensor_clip.py")),
            Part("DDP steps", 20, _ranks("ddp_step.py")),
        ),
    ),
    "costs": Command(
        "counts of launches, syncs and allocations, and compute-sanitizer",
        (
            Part("test_gpu_costs", 35, lambda session: _pytest("tests/bench/test_gpu_costs.py")),
            Part("counts", 30, _suite("counts", seconds=1.0)),  # (9 lists, 2 s)
            # (under a sanitizer a program starts in 20 s; the CPU's part of the short set takes 8 s)
            _sanitized("memcheck", 55),
            _sanitized("racecheck", 50),
            _sanitized("initcheck", 45),
            _sanitized("synccheck", 40),
            _sanitized("memcheck", 45, RANDOM_TENSORS),
        ),
    ),
    "variants": Command(
        "the kernels compiled with other constants, interleaved",
        (
            Part("CUDA", 60, _variants("cuda")),  # (11 lists, 3 kinds of calls, 1.5 s)
            Part("Triton", 55, _variants("triton")),  # (5 compilations, 5 s; 11 lists, 1 s)
        ),
    ),
}
