"""Runs the tests of kernels on the PTX that nvcc and Triton generate, on the CPU; needs nvcc and Triton, no GPU.

    python tools/ptx/check.py              # part of the tests, for the oldest, the first and the newest with float8
    python tools/ptx/check.py --all 90     # every test that reaches a kernel, for one architecture

Fails if a test fails, which includes all complaints of device.cpp, or if a kernel has not been launched. Each launch is
in a new random order, from a seed that complaints name.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from ptx.device import ROOT, SOURCES, Kernel, ptx_of
from ptx.translate import names_of

# The oldest that ships, the one of H100, and the newest, whose PTX is shipped as well for later devices.
ARCHITECTURES = [80, 90, 120]
BACKENDS = "(emulated or triton or cuda_on_host)"
OF_NVCC = "((emulated or cuda_on_host) and not triton)"  # Triton's code for sm_100 and later has further instructions
ALL = {
    f"tests/{name}": ""
    for name in (
        *("core/test_conformance.py", "core/test_fuzz.py", "core/test_multiply.py", "core/test_triton.py"),
        *("step/test_update.py", "step/test_guard.py", "clip/test_decide.py", "gpu_on_host/test_cuda_on_host.py"),
    )
}
# Random bits and layouts through every operation; both tables; every rule of updates and decisions.
QUICK = {
    "tests/core/test_fuzz.py": "any_tensors",
    "tests/gpu_on_host/test_cuda_on_host.py": "thousands",
    "tests/step/test_update.py": "zeros or operands_of_different",
    "tests/clip/test_decide.py": "emulated and (rows or percentile)",
    "tests/step/test_guard.py": "emulated and (limits or refused_step)",
}


def compile_all(architectures: list[int]) -> None:
    """Compiles what nvcc generates, on all cores. Triton's kernels are compiled on their first launch."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(lambda job: ptx_of(*job), [(s, a) for a in architectures for s in SOURCES])
        kernels = [(text, name) for text in texts for name in names_of(text)]
        list(pool.map(lambda kernel: Kernel(*kernel), kernels))
        print(f"{len(kernels)} kernels of nvcc for sm_{', sm_'.join(map(str, architectures))}", flush=True)


def run(architecture: int, tests: dict[str, str], environment: dict[str, str]) -> list[str]:
    """Runs tests in one process; returns the lines about launches, or ends the program if a test fails."""
    backends = BACKENDS if architecture < 100 else OF_NVCC
    selected = [f"({Path(path).name} and {backends}{names and f' and ({names})'})" for path, names in tests.items()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", " or ".join(selected)]
    variables = {**os.environ, "GRADSTAT_PTX": str(architecture), **environment}
    tested = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    if tested.returncode:
        raise SystemExit(f"sm_{architecture}, {' '.join(command)}:\n{tested.stdout}\n{tested.stderr}")
    print(f"sm_{architecture}: {tested.stdout.splitlines()[-1]}", flush=True)
    return re.findall(r"^PTX: .*", tested.stdout, re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", type=int, default=ARCHITECTURES, metavar="NUMBER")
    parser.add_argument("--all", action="store_true", help="every test that reaches a kernel")
    options = parser.parse_args()
    began = time.monotonic()
    compile_all(options.architectures)
    tests = ALL if options.all else QUICK
    more = {"GRADSTAT_LONG": "1"} if options.all else {}
    launches: dict[str, int] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for lines in pool.map(lambda architecture: run(architecture, tests, more), options.architectures):
            for line in lines:
                _, where, kernel, number = line.rsplit(maxsplit=3)
                launches[f"{where} {kernel}"] = launches.get(f"{where} {kernel}", 0) + int(number)
    for kernel, number in sorted(launches.items()):
        print(f"{number:>7} launches of {kernel}" + "  FAILED: none" * (number == 0))
    print(f"{sum(launches.values()):,} launches, {time.monotonic() - began:.0f} s")
    return 0 if launches and all(launches.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
