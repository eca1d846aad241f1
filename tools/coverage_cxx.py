"""`make coverage-cxx`: the lines of csrc/ that the tests run, by gcov; fails if they are fewer than nine in ten.

Builds the CPU library without optimization and with counters into ``build/coverage-cxx/``, with a copy of the package,
and runs the tests that reach C++ code with it, those of the kernels with every instruction set that this machine has.
The CUDA kernels and launchers count as far as they run when compiled for the host. Not counted are code that only nvcc
compiles (a few functions that wrap GPU instructions), and csrc/ops_cuda.cpp, which registers the launchers with torch
and needs a torch with CUDA.
"""

import shutil
import subprocess
import sys

import instrumented
from instrumented import COMPILED, DECISIONS, HOST_TESTS, ROOT, step, tests

BUILD = ROOT / "build" / "coverage-cxx"
FLAGS = "-O0 -g --coverage -fprofile-update=atomic"
# Without the many tests of conformance, which reach no other lines.
KERNEL_TESTS = ("core/test_fuzz.py", "core/test_multiply.py")
OTHER_TESTS = ("core/test_ops.py", "core/test_host_path.py", "core/test_check.py", "clip", "step")
LEAST_PERCENT = 90


def main() -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    instrumented.build(BUILD, FLAGS)
    # The coroutines never run in parallel, so plain counters suffice.
    environment = instrumented.environment(BUILD, f"{FLAGS} -O1 -fprofile-update=single -Wno-error")
    passed = True
    for level in instrumented.levels(BUILD, environment):
        at_level = {**environment, "GRADSTAT_CPU_INSTRUCTIONS": level}
        passed &= step(f"{level}: tests of kernels", tests(KERNEL_TESTS, *COMPILED), BUILD, at_level)
    passed &= step("tests of everything around the kernels", tests(OTHER_TESTS, *COMPILED), BUILD, environment)
    # Counts are written next to the library's object files, so that folder has to outlive the tests.
    on_host = tests(
        (*HOST_TESTS, *KERNEL_TESTS, *DECISIONS),
        *("-k", "cuda_on_cpu or emulated", f"--basetemp={BUILD / 'host'}"),
    )
    passed &= step("the CUDA code on the host", on_host, BUILD, environment)
    return 0 if report() and passed else 1


def report() -> bool:
    command = [sys.executable, "-m", "gcovr", "--root", str(ROOT), "--filter", "csrc/", "--merge-lines"]
    command += ["--exclude-noncode-lines", "--gcov-ignore-errors", "source_not_found"]  # some of torch's headers
    command += ["--fail-under-line", str(LEAST_PERCENT), "--print-summary", "--txt", "-", str(BUILD)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
