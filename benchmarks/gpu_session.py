"""`make gpu`: everything that needs a GPU, in one command, without the network.

Builds in place with this Python and its torch, runs the tests, less those that touch no device, `compute-sanitizer` on
a short set, measures everything `suite.py` knows against torch, counts launches and syncs, and appends what it saw as
rows under ``benchmarks/results/<device>/``. Ends with tables; exits non-zero if a step failed. ``plots.py`` and
``render.py --write`` then bring charts and documents up to date.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rows import Row
    from suite import Plan

MEASURE_SECONDS = 540.0  # no further group is begun after that
ROOT = Path(__file__).resolve().parent.parent
# The system's compiler and packages are not the pinned ones, so what they warn about is no error here.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "GRADSTAT_CUDA": "1", "GRADSTAT_WERROR": "0"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="*", default=[], choices=list(STEPS), help="steps to leave out")
    parser.add_argument("--only", nargs="*", choices=list(STEPS), help="steps to run, all if not given")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch; set PYTHON= to one that has, as in `make gpu PYTHON=python3.12`")
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here; `make gpu-code` proves what can be proven without one")
    outcomes: dict[str, tuple[bool, float]] = {}
    for name, step in STEPS.items():
        if name in options.skip or (options.only and name not in options.only):
            continue
        print(f"\n== {name}: {step.__doc__}", flush=True)
        start = time.monotonic()
        try:
            passed = step()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            passed = False
        outcomes[name] = (passed, time.monotonic() - start)
    print("\n== summary")
    for name, (passed, seconds) in outcomes.items():
        print(f"{name:<12} {'passed' if passed else 'FAILED':<8} {seconds:7.1f} s")
    _record_outcomes(outcomes)
    return 0 if all(passed for passed, _ in outcomes.values()) else 1


def _run(*command: str, **environment: str) -> bool:
    return subprocess.run(command, cwd=ROOT, env={**ENVIRONMENT, **environment}, check=False).returncode == 0


def build() -> bool:
    """Compile the extension in place"""
    return _run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")


# They touch no device, so they say the same as without a GPU, and some need packages that are not here.
WITHOUT_A_DEVICE = (
    "accelerate", "automatic", "crash_safety", "cuda_launchers", "cuda_on_host", "demo", "diagnosis", "diff",
    "distributed", "documents", "faults", "gpu_session", "healthy", "life_leaks", "life_processes", "lightning",
    "lightning_ranks", "loggers", "monitor_ranks", "numerics", "origin", "packaging", "pages", "recorder", "reference",
    "replicas", "rules", "schedule", "tour", "transformers", "view",
)  # fmt: skip


def test() -> bool:
    """The tests, less those that touch no device"""
    left_out = [f"--ignore=tests/test_{name}.py" for name in WITHOUT_A_DEVICE]
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "--durations=5"]
    return _run(sys.executable, "-m", "pytest", *options, *left_out)


# What compute-sanitizer looks for, and in what: random tensors are for memory errors, as they are slow under its eyes.
SHORT_SET = ("tests/gpu_gates/short_set.py",)
RANDOM_TENSORS = ("tests/fuzz.py", "--device", "cuda", "--seed", "1", "--tensors", "400", "--apart")
WATCHED = (
    ("memcheck", SHORT_SET),
    ("racecheck", SHORT_SET),
    ("initcheck", SHORT_SET),
    ("synccheck", SHORT_SET),
    ("memcheck", RANDOM_TENSORS),
)


def sanitize() -> bool:
    """Compute-sanitizer: memory errors, races, memory read before it was written, barriers"""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(sanitizer):
        print("compute-sanitizer not found: memory errors and races were not looked for")
        return False
    passed = True
    for tool, program in WATCHED:
        command = (sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, *program)
        # Torch's caching allocator would hide overruns between blocks of one allocation.
        found_nothing = _run(*command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        print(f"{tool} of {program[0]}: {'nothing found' if found_nothing else 'FAILED'}", flush=True)
        passed = passed and found_nothing
    return passed


def measure() -> bool:
    """Times against torch, memory, launches and syncs, in ten minutes at most"""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import suite
    import tables
    import torch
    from rows import append

    plan = suite.Plan(torch.device("cuda"), full=True, seconds=1.0)
    started = time.monotonic()
    rows: list[Row] = []
    for made in suite.measure(plan, suite.GROUPS):
        rows += made
        if time.monotonic() - started > MEASURE_SECONDS:
            print(f"time is over after the group {made[0].group!r}; `python benchmarks/suite.py --full` does the rest")
            break
    rows += _counts(plan)
    print(tables.everything(rows))
    print(f"rows appended to {append(rows, 'full').relative_to(ROOT)}")
    return True


def _counts(plan: Plan) -> list[Row]:
    """Launches and syncs of stats, check and clip, by backend, and of steps of optimizers."""
    import torch
    from cases import CASES, input_of
    from gpu_counts import count
    from rows import row

    import gradstat

    rows: list[Row] = []
    for case in CASES:
        if not case.quick:
            continue
        given = input_of(case.shapes(), torch.float32, "cuda")
        for backend in ("native", "triton"):
            for name, call in (
                ("stats", partial(gradstat.stats, given.gradients, backend=backend)),
                ("check", partial(gradstat.check, given.parameters, backend=backend)),
                ("clip", partial(gradstat.clip_grad_norm_, given.parameters, 2 * given.max_norm, backend=backend)),
            ):
                for metric, value in count(call)._asdict().items():
                    rows.append(row("counts", case.name, f"gradstat {backend} {name}", metric, "", value, plan.device))
    return rows + _counts_of_optimizer_steps(plan)


def _counts_of_optimizer_steps(plan: Plan) -> list[Row]:
    """Launches and syncs from gradients to parameters; what the gradients are does not matter."""
    import optimizer_steps
    from gpu_counts import count
    from rows import row
    from step_providers import providers_for

    rows: list[Row] = []
    shapes = next(case.shapes() for case in optimizer_steps.STEP_CASES if case.name == optimizer_steps.QUICK_CASE)
    for choice in optimizer_steps.OPTIMIZERS:
        for circumstance in optimizer_steps.CIRCUMSTANCES:
            setting = optimizer_steps.Setting(shapes, choice, circumstance, "cuda")
            case_name = optimizer_steps.case_name(optimizer_steps.QUICK_CASE, choice, circumstance)
            for provider in providers_for(setting):
                for metric, value in count(partial(provider.run, setting))._asdict().items():
                    rows.append(row("counts", case_name, provider.name, metric, "", value, plan.device))
    return rows


def _record_outcomes(outcomes: dict[str, tuple[bool, float]]) -> None:
    sys.path.insert(0, str(ROOT))
    import torch
    from rows import append, row

    device = torch.device("cuda")
    append(
        (
            row("make gpu", name, "make gpu", "passed", "", float(passed), device)
            for name, (passed, _) in outcomes.items()
        ),
        "gpu_session",
    )


def numerics() -> bool:
    """Errors of norms against exact ones, 100,000 vectors for each dtype and backend"""
    return _run(sys.executable, "-W", "ignore", "benchmarks/numerics.py", "--record")


def ranks() -> bool:
    """Distributed gradients over NCCL, with as many ranks as there are GPUs"""
    import torch

    count = str(torch.cuda.device_count())
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count)
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    scripts = ("benchmarks/dtensor_clip.py", "benchmarks/ddp_step.py")
    passed = [_run(*launcher, script, "--record", PYTHONPATH=path) for script in scripts]
    return all(passed)


def variants() -> bool:
    """The ladder of kernel variants"""
    return _run(sys.executable, "benchmarks/gpu_variants.py")


STEPS: dict[str, Callable[[], bool]] = {
    "build": build,
    "test": test,
    "sanitize": sanitize,
    "measure": measure,
    "numerics": numerics,
    "ranks": ranks,
    "variants": variants,
}

if __name__ == "__main__":
    sys.exit(main())
