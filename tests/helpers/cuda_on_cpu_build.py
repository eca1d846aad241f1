"""Compiles the CUDA code for the CPU with g++, for tests/cuda_on_cpu, and loads it."""

import ctypes
import fcntl
import importlib.util
import os
import subprocess
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from gradstat._core.native import exchange_tensors

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "cuda_on_cpu"
INCLUDED = SOURCES / "runtime", ROOT / "csrc", SOURCES
COMMON = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-fPIC"]
COMMON += ["-shared", "-fno-gnu-unique"]
# Flags for sanitizers and coverage, as in setup.py.
COMMON += os.environ.get("GRADSTAT_INSTRUMENTATION", "").split()


def build(folder: Path) -> ctypes.CDLL:
    """The CUDA launchers and kernels, loaded; the first process that needs them compiles them into ``folder``."""
    made = folder / "launchers.so"
    with (folder / "launchers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return loaded(made if made.exists() else compiled("launchers.cpp", folder))


def module(launchers: Path) -> Any:
    """The extension module of tests/cuda_on_cpu/module.cpp, over a library of launchers; made beside it."""
    from torch.utils.cpp_extension import include_paths, library_paths

    target = launchers.with_name("module.so")
    with launchers.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            flags = [*COMMON, "-fvisibility=hidden", *(f"-I{path}" for path in INCLUDED), str(SOURCES / "module.cpp")]
            flags += [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
            flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030a0000", "-DUSE_CUDA"]
            flags += [str(launchers), *(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10"]
            subprocess.run(["g++", *flags, "-Wl,-rpath,$ORIGIN", "-o", str(target)], check=True)
    spec = importlib.util.spec_from_loader("_C_cuda", ExtensionFileLoader("_C_cuda", str(target)))
    made = importlib.util.module_from_spec(spec)
    exchange_tensors(made)
    return made


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
    flags = [*COMMON, "-Wno-unknown-pragmas", "-fsanitize=alignment"]
    flags += ["-Wno-uninitialized"]  # a Share is initialized by its first vector, which g++ does not see
    flags += [f"-I{path}" for path in (csrc, *INCLUDED)]
    subprocess.run(["g++", *flags, str(SOURCES / source), "-o", str(target)], check=True)
    return target
