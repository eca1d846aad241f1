"""`make sanitize`: runs the C++ code under address, undefined-behaviour and thread sanitizers.

Builds the CPU library with the first two into ``build/sanitize/``, with a copy of the package, and runs tests and
random tensors with every instruction set that this machine has. The CUDA kernels and launchers are compiled for the
host with the same flags. Their stacks are not checked, because AddressSanitizer does not notice how coroutines, which
act as their threads, switch stacks. The threads of the CPU kernels run under ThreadSanitizer in a separate
program (tests/cpu_threads). Deliberate errors have to be reported first, as proof that the sanitizers are active.
"""

import os
import subprocess
import sys

import instrumented
from instrumented import COMPILED, DECISIONS, HOST_TESTS, ROOT, step, tests

BUILD = ROOT / "build" / "sanitize"
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
# With the sanitizers' checks gcc warns of variables that are in fact initialized.
HOST_FLAGS = f"{FLAGS} --param asan-stack=0 -Wno-error"
KERNEL_TESTS = ("core/test_conformance.py", "core/test_fuzz.py", "core/test_multiply.py")
KERNEL_TESTS += ("lowprecision/test_quantization.py",)
OTHER_TESTS = ("core/test_ops.py", "core/test_host_path.py", "clip", "step", "life/test_life_programs.py")
TENSORS = 20_000

# Measures a float32 tensor that is one element longer than its memory.
BEHIND_A_TENSOR = """
import numpy, torch, gradstat
class Longer:
    memory = numpy.ones(5000, dtype=numpy.float32)
    __array_interface__ = {**memory.__array_interface__, "shape": (5001,)}
print(gradstat.stats([torch.from_numpy(numpy.asarray(Longer()))]))
"""
BEHIND_AN_ARRAY = "import ctypes; print(ctypes.CDLL({library!r}).read_behind(ctypes.c_int64(10)))"
TOO_FAR = "import ctypes; print(ctypes.CDLL({library!r}).shift_by(1, 32))"


def main() -> int:
    instrumented.build(BUILD, FLAGS)
    environment = sanitized()
    prove_that_errors_are_reported(environment)
    passed = watch_threads()
    for level in instrumented.levels(BUILD, environment):
        at_level = {**environment, "GRADSTAT_CPU_INSTRUCTIONS": level}
        passed &= step(f"{level}: tests of kernels", tests(KERNEL_TESTS, *COMPILED), BUILD, at_level)
        fuzz = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--seed", "1", "--tensors", str(TENSORS), "--apart"]
        passed &= step(f"{level}: {TENSORS:,} random tensors", fuzz, BUILD, at_level)
    passed &= step("tests of everything around the kernels", tests(OTHER_TESTS, *COMPILED), BUILD, environment)
    passed &= step("the CUDA code on the host", tests(HOST_TESTS), BUILD, environment)
    as_backend = tests((*KERNEL_TESTS, *DECISIONS), "-k", "emulated")
    passed &= step("the CUDA kernels as a backend", as_backend, BUILD, environment)
    return 0 if passed else 1


def sanitized() -> dict[str, str]:
    """Environment variables that load the sanitizers' runtime before everything else."""
    compiler = os.environ.get("CXX", "g++").split()[0]

    def path_of(library: str) -> str:
        command = [compiler, f"-print-file-name={library}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return {
        **instrumented.environment(BUILD, HOST_FLAGS),
        # libstdc++ is preloaded so that libasan finds its exception functions at startup.
        "LD_PRELOAD": f"{path_of('libasan.so')} {path_of('libstdc++.so')}",
        # Python and torch do not free all their memory at exit, so leaks are not detected.
        "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Python's allocations go through malloc, so that AddressSanitizer sees them.
        "PYTHONMALLOC": "malloc",
    }


def prove_that_errors_are_reported(environment: dict[str, str]) -> None:
    os.environ["GRADSTAT_INSTRUMENTATION"] = HOST_FLAGS
    sys.path.append(str(ROOT / "tests"))
    from helpers.cuda_on_cpu_build import compiled

    library = str(compiled("planted.cpp", BUILD))
    for program, report in (
        (BEHIND_A_TENSOR, "20000-byte region"),
        (BEHIND_AN_ARRAY.format(library=library), "heap-buffer-overflow"),
        (TOO_FAR.format(library=library), "shift exponent 32 is too large"),
    ):
        result = instrumented.run_program(program, BUILD, environment)
        if result.returncode == 0 or report not in result.stderr:
            sys.exit(f"a deliberate error was not reported as {report!r}:\n{program}\n{result.stdout}{result.stderr}")
    print("deliberate errors are reported", flush=True)


def watch_threads() -> bool:
    """Runs the CPU kernels under ThreadSanitizer, after it has reported a deliberate race."""
    from torch.utils.cpp_extension import include_paths

    program = BUILD / "threads"
    compiler = os.environ.get("CXX", "g++").split()[0]
    command = [compiler, *["-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-pthread", "-Wno-psabi"]]
    command += [f"-I{ROOT / 'tests' / 'cpu_threads'}", f"-I{ROOT / 'csrc'}"]
    command += [flag for path in include_paths() for flag in ("-isystem", path)]
    subprocess.run([*command, str(ROOT / "tests" / "cpu_threads" / "threads.cpp"), "-o", str(program)], check=True)
    raced = subprocess.run([str(program), "race"], capture_output=True, text=True, check=False)
    if raced.returncode == 0 or "data race" not in raced.stderr:
        sys.exit(f"a deliberate race was not reported:\n{raced.stdout}{raced.stderr}")
    return step("the threads of the CPU kernels", [str(program)], BUILD, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
