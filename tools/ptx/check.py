"""Runs the tests of kernels on the PTX that nvcc and Triton generate, on the CPU; needs nvcc and Triton, no GPU.

    python tools/ptx/check.py              # part of the tests, for three architectures
    python tools/ptx/check.py --all 90     # every test that reaches a kernel, for one architecture

Fails if a test fails, which includes all complaints of device.cpp, or if a kernel has not been launched. Each launch is
in a new random order, from a seed that complaints name.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from ptx.device import ROOT, SOURCES, Kernel, ptx_of
from ptx.translate import names_of

# The oldest that ships, the one of H100, and the newest, whose PTX is shipped as well for later devices.
ARCHITECTURES = [80, 90, 120]
BACKENDS = {"Triton": "triton", "nvcc": "((emulated or cuda_on_host) and not triton)"}
ALL = {
    f"tests/{name}": ""
    for name in (
        *("core/test_conformance.py", "core/test_fuzz.py", "core/test_multiply.py", "core/test_triton.py"),
        *("step/test_guard.py", "clip/test_decide.py", "cuda_on_cpu/test_cuda_on_host.py"),
    )
}
# Random bits and layouts through every operation; both tables; every rule of decisions.
QUICK = {
    "tests/core/test_fuzz.py": "any_tensors",
    "tests/cuda_on_cpu/test_cuda_on_host.py": "thousands",
    "tests/clip/test_decide.py": "emulated and (rows or percentile)",
    "tests/step/test_guard.py": "emulated and (limits or refused_step)",
}


def compile_all(architectures: list[int]) -> None:
    """Compiles what nvcc generates, on all cores. Triton's kernels are compiled on their first launch."""

    def compile_one(source: Path, architecture: int) -> None:
        ptx = ptx_of(source, architecture)
        kernels = [Kernel(ptx, name) for name in names_of(ptx)]
        print(f"sm_{architecture}, nvcc: {len(kernels)} kernels of {source.name}", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, *zip(*itertools.product(SOURCES, architectures), strict=True)))


def run(architecture: int, generator: str, tests: dict[str, str], environment: dict[str, str]) -> Counter[str]:
    """Runs tests in one process; counts launches by kernel. Ends the program if a test fails."""
    selected = [
        f"({Path(path).name} and {BACKENDS[generator]}{names and f' and ({names})'})" for path, names in tests.items()
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", " or ".join(selected)]
    # Progress comes in lines, which are never shorter.
    variables = {
        **os.environ,
        "COLUMNS": "40",
        "PYTHONUNBUFFERED": "1",
        "GRADSTAT_PTX": str(architecture),
        **environment,
    }
    launches: Counter[str] = Counter()
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if counted := re.fullmatch(r"PTX: (.*) (\d+)\n", line):
                launches[counted[1]] += int(counted[2])
            elif line.strip():
                print(f"sm_{architecture}, {generator}: {line}", end="", flush=True)
    if process.returncode:
        raise SystemExit(f"sm_{architecture}, {generator}: exit status {process.returncode}, {' '.join(command)}")
    return launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", type=int, default=ARCHITECTURES, metavar="NUMBER")
    parser.add_argument("--all", action="store_true", help="every test that reaches a kernel")
    options = parser.parse_args()
    began = time.monotonic()
    compile_all(options.architectures)
    tests = ALL if options.all else QUICK
    more = {"GRADSTAT_LONG": "1"} if options.all else {}
    launches: Counter[str] = Counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(run, a, generator, tests, more) for generator in BACKENDS for a in options.architectures]
        for job in jobs:
            launches.update(job.result())
    for kernel, number in sorted(launches.items()):
        print(f"{number:>7} launches of {kernel}" + "  FAILED: none" * (number == 0))
    print(f"{launches.total():,} launches, {time.monotonic() - began:.0f} s")
    return 0 if launches and all(launches.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
