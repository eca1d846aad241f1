"""Compiles the CUDA code for the CPU with g++, for tests/cuda_on_cpu, and loads it."""

import ctypes
import fcntl
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "cuda_on_cpu"


def build(folder: Path) -> ctypes.CDLL:
    """The CUDA launchers and kernels, loaded; the first process that needs them compiles them into ``folder``."""
    made = folder / "launchers.so"
    with (folder / "launchers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return loaded(made if made.exists() else compiled("launchers.cpp", folder))


def loaded(path: Path) -> ctypes.CDLL:
    """A library of launchers, whose functions return what tests/cuda_on_cpu/launchers.cpp says."""
    library = ctypes.CDLL(str(path))
    library.new_stream.restype = library.end_capture.restype = ctypes.c_void_p
    library.bytes_allocated.restype = library.stats_bytes.restype = library.scale_bytes.restype = ctypes.c_int64
    library.error_text.restype = ctypes.c_char_p
    return library


def compiled(source: str, folder: Path, csrc: Path = ROOT / "csrc") -> Path:
    """Compiles a file of tests/cuda_on_cpu, or one elsewhere, to a shared library."""
    target = folder / f"{Path(source).stem}.so"
    flags = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    flags += ["-Wno-uninitialized"]  # a Share is initialized by its first vector, which g++ does not see
    flags += ["-fno-strict-aliasing", "-fPIC", "-shared", "-fno-gnu-unique", "-fsanitize=alignment"]
    flags += [f"-I{path}" for path in (SOURCES / "runtime", csrc, SOURCES)]
    # Flags for sanitizers and coverage, as in setup.py.
    flags += os.environ.get("GRADSTAT_INSTRUMENTATION", "").split()
    subprocess.run(["g++", *flags, str(SOURCES / source), "-o", str(target)], check=True)
    return target
