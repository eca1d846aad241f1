"""The commands that `gpu_session` runs on a machine with a GPU. Each has parts: programs with a time limit.

The limits of all parts add up to half an hour; within commands and parts, the most important comes first. In a
rehearsal (device ``"cpu"``) the same programs run on small inputs.
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


class Session(NamedTuple):
    """Settings for all parts.

    Attributes:
        results: The folder for rows and the log.
        device: ``"cuda"``, or ``"cpu"`` for a rehearsal.
        part_seconds: The most seconds for a part, whatever its own limit.
    """

    results: Path
    device: str = "cuda"
    part_seconds: float = COMMAND_SECONDS

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
    "accumulation", "adaptive", "amp", "check", "clip", "clip_value", "conformance", "every_clip", "fuzz", "guard",
    "host_path", "life_threads", "multiply", "noise_scale", "ops", "replay_state", "short_set", "step",
    "step_in_backward", "streams", "total_norm", "triton", "update",
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
        rest = ["--full", "--seconds", str(seconds)] if session.on_gpu else ["--seconds", "0.01"]
        recorded = ["--device", session.device, "--record", "--results", str(session.results)]
        return [sys.executable, "benchmarks/suite.py", "--only", *groups, *recorded, *rest]

    return argv


# Substrings of the mangled names of torch's own kernels. Excluding them leaves gradstat's CUDA and Triton kernels. If
# the filter no longer matches anything, that costs time but hides no errors.
OF_TORCH = "kns=at6native,kns=at_cuda_detail"
SHORT_SET = ("tools/gpu_gates/short_set.py",)
# Random tensors are checked for memory errors only, since they are slow under a sanitizer.
RANDOM_TENSORS = ("tools/fuzz.py", "--device", "cuda", "--seed", "1", "--tensors", "400", "--apart")


def _sanitized(tool: str, seconds: float, program: tuple[str, ...] = SHORT_SET) -> Part:
    """A program under one of compute-sanitizer's tools. Initcheck is not filtered: it has to see all writes."""

    def argv(session: Session) -> list[str]:
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        filtered = [] if tool == "initcheck" else ["--kernel-name-exclude", OF_TORCH]
        return [sanitizer, "--tool", tool, *filtered, "--error-exitcode", "9", sys.executable, *program]

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


def _recorded(script: str) -> Callable[[Session], list[str]]:
    """A benchmark outside of the suite, with all its models; in a rehearsal with the smallest."""

    def argv(session: Session) -> list[str]:
        rest = [] if session.on_gpu else ["--model", "gpt-0.9m", "--rounds", "1"]
        return [sys.executable, f"benchmarks/{script}", "--record", "--results", str(session.results), *rest]

    return argv


def _variants(kernels: str) -> Callable[[Session], list[str]]:
    def argv(session: Session) -> list[str]:
        how = ["--results", str(session.results)] if session.on_gpu else ["--compile", "90"]
        return [sys.executable, "benchmarks/gpu_variants.py", "--only", kernels, *how]

    return argv


def _numerics(session: Session) -> list[str]:
    vectors = ["--vectors", "6000"] if session.on_gpu else ["--vectors", "13", "--dtypes", "float32", "bfloat16"]
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


COMMANDS = {
    "correctness": Command(
        "tests that run on a GPU, and random tensors compared with exact results",
        (Part("tests", 280, _tests), Part("random tensors", 30, _fuzz)),
    ),
    "costs": Command(
        "counts of launches, syncs and allocations, and compute-sanitizer",
        (
            Part("test_gpu_costs", 50, lambda session: _pytest("tests/bench/test_gpu_costs.py")),
            Part("counts", 50, _suite("counts", seconds=1.0)),
            _sanitized("memcheck", 45),
            _sanitized("racecheck", 60),
            _sanitized("synccheck", 45),
            _sanitized("initcheck", 60),
            _sanitized("memcheck", 50, RANDOM_TENSORS),
        ),
    ),
    "bandwidth": Command(
        "all lists of gradients in all dtypes, growth in bytes and in tensors",
        (
            Part("lists", 170, _suite("lists", seconds=1.0)),
            Part("growth in tensors", 50, _suite("growth in tensors", seconds=0.5)),
            Part("growth in tensors, warm", 35, _suite("growth in tensors, warm", seconds=0.35)),
            Part("growth in bytes", 50, _suite("growth in bytes", seconds=0.5)),
        ),
    ),
    "steps": Command(
        "time added to training steps, optimizer steps, the host path, memory, several ranks",
        (
            Part("training steps", 130, _suite("steps", seconds=6.0)),
            Part("backward passes", 20, _suite("in backward", seconds=1.0)),
            Part("steps in backward", 20, _recorded("backward_step.py")),
            Part("noise scale", 15, _recorded("noise_scale.py")),
            Part("host path", 15, _suite("host path", seconds=1.0)),
            Part("steps of optimizers", 80, _suite("optimizer steps", seconds=0.3)),
            Part("updates to come", 25, _suite("updates to come", seconds=0.3)),
            Part("memory", 30, _suite("memory", seconds=1.0)),
            Part("distributed gradients", 25, _ranks("dtensor_clip.py")),
            Part("DDP steps", 25, _ranks("ddp_step.py")),
        ),
    ),
    "variants": Command(
        "the kernels compiled with other constants, interleaved",
        (Part("CUDA", 190, _variants("cuda")), Part("Triton", 100, _variants("triton"))),
    ),
    "numerics": Command(
        "norms of 6,000 vectors of each dtype compared with exact ones",
        (Part("numerics", 150, _numerics),),
    ),
}
