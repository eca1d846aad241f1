"""`make gpu`: everything that needs a GPU, in one command, without the network.

Builds in place with this Python and its torch, runs the whole test suite, `compute-sanitizer` on a short set,
counts launches and syncs, times checks and clips against torch, and appends what it saw as rows under
``benchmarks/results/<device>/gpu_session.jsonl``. Ends with a table; exits non-zero if a step failed.
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


def test() -> bool:
    """The whole test suite"""
    return _run(sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "--durations=5")


def sanitize() -> bool:
    """Compute-sanitizer: memory errors and races on a short set"""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(sanitizer):
        print("compute-sanitizer not found: memory errors and races were not looked for")
        return False
    short = [sys.executable, "tests/gpu_gates/short_set.py"]
    return all(
        # Torch's caching allocator would hide overruns between blocks of one allocation.
        _run(sanitizer, "--tool", tool, "--error-exitcode", "9", *short, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        for tool in ("memcheck", "racecheck")
    )


def measure() -> bool:
    """Launches, syncs, and times against torch in one run"""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    from cases import PROVIDERS, SHAPES, checked_norm, parameters_of
    from gpu_counts import count
    from rows import Row, append
    from timing import interleaved
    from torch import Tensor

    import gradstat

    rows: list[Row] = []

    def timed(calls: dict[str, Callable[[], object]], case: str, size: int) -> None:
        for name, (low, median, high) in interleaved(calls, rounds=30, warmup=5).items():
            rows.append(Row(name, case, "median time", "us", median * 1e6, size, low * 1e6, high * 1e6))
            print(f"{case:<34} {name:<26} {median * 1e6:10.1f} us {size / median / 1e9:9.1f} GB/s")

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(1 << 28, device="cuda").to(dtype)
        size = x.numel() * x.element_size()
        words = x.view(torch.float32)
        timed(
            {
                "gradstat native": lambda x=x: gradstat.stats([x], backend="native"),
                "gradstat triton": lambda x=x: gradstat.stats([x], backend="triton"),
                "torch._foreach_norm": lambda x=x: torch._foreach_norm([x]),
                "plain read (sum)": lambda w=words: w.sum(),
            },
            f"one tensor, {dtype}",
            size,
        )
        del x, words

    for case in SHAPES:
        parameters = parameters_of(case, device="cuda")
        norm = checked_norm(parameters)
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        size = sum(g.numel() * g.element_size() for g in gradients)
        timed(
            {
                **{name: partial(call, parameters, norm) for name, call in PROVIDERS.items()},
                "gradstat.check triton": lambda ps=parameters: gradstat.check(ps, backend="triton").ok,
            },
            case,
            size,
        )
        for backend in ("native", "triton"):
            for name, call in (
                ("stats", partial(gradstat.stats, gradients, backend=backend)),
                ("check", partial(gradstat.check, parameters, backend=backend)),
                ("clip", partial(gradstat.clip_grad_norm_, parameters, 2 * norm, backend=backend)),
            ):
                counts = count(call)
                provider = f"gradstat {backend} {name}"
                rows += [Row(provider, case, metric, "", value) for metric, value in counts._asdict().items()]
                print(f"{case:<34} {provider:<26} {counts.launches} launches, {counts.syncs} syncs")
    print(f"rows appended to {append(rows, 'gpu_session').relative_to(ROOT)}")
    return True


def _record_outcomes(outcomes: dict[str, tuple[bool, float]]) -> None:
    sys.path.insert(0, str(ROOT))
    from rows import Row, append

    append(
        (Row("make gpu", name, "passed", "", float(passed)) for name, (passed, _) in outcomes.items()),
        "gpu_session",
    )


STEPS: dict[str, Callable[[], bool]] = {"build": build, "test": test, "sanitize": sanitize, "measure": measure}

if __name__ == "__main__":
    sys.exit(main())
