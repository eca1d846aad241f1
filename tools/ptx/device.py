"""Runs PTX on the CPU: `Device` compiles what translate.py makes of a kernel, and launches it under device.cpp."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import random
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from ptx import translate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "ptx"
SOURCES = [ROOT / "csrc" / f"{name}_cuda.cu" for name in ("stats", "scale", "decide")]

FLAGS = ["-std=c++17", "-fwrapv", "-ffp-contract=off", "-fPIC", "-shared"]
# Unoptimized code compiles in seconds. A thread's frame must fit its stack.
OF_KERNELS = ["-O0", "-w", "-Werror=frame-larger-than=400000"]

Span = tuple[int, int]
"""Address and size in bytes of memory that kernels may access."""


class PtxError(AssertionError):
    """A kernel broke a rule of the device, even if its results are right."""


def cached(suffix: str, make: Callable[[Path], object], *inputs: str | Path) -> Path:
    """The file that ``make`` writes from these inputs, made once."""
    digest = hashlib.sha256()
    for item in inputs:
        digest.update(item.read_bytes() if isinstance(item, Path) else item.encode())
        digest.update(b"\0")
    path = BUILD / f"{digest.hexdigest()[:24]}{suffix}"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{os.getpid()}_{threading.get_ident()}_{path.name}")
        make(unfinished)
        unfinished.rename(path)
    return path


def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    """A shared library from C++ that includes device.h."""
    command = ["g++", *FLAGS, *flags, f"-I{HERE}", str(source), "-o"]
    return ctypes.CDLL(
        str(cached(".so", lambda to: _run([*command, str(to)]), " ".join(command), source, HERE / "device.h")),
        ctypes.RTLD_GLOBAL,
    )


def _run(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{run.stderr[:4000]}")
    return run.stdout


@functools.cache
def ptx_of(source: Path, architecture: int) -> str:
    """What nvcc generates for one of the .cu files, with the lines of the source."""
    command = ["nvcc", "-std=c++17", "-O3", "-lineinfo", "-ptx", f"-arch=compute_{architecture}", str(source), "-o"]
    inputs = [" ".join(command), _run(["nvcc", "--version"]), *sorted((ROOT / "csrc").iterdir())]
    return cached(".ptx", lambda to: _run([*command, str(to)]), *inputs).read_text()


@functools.cache
def runtime() -> ctypes.CDLL:
    """device.cpp."""
    library = compiled(HERE / "device.cpp", "-O2", "-Wall", "-Wextra", "-Werror")
    library.take_complaints.restype = ctypes.c_char_p
    return library


class Kernel:
    """A kernel, compiled for the CPU."""

    def __init__(self, ptx: str, name: str, dynamic_shared_bytes: int = 0) -> None:
        self.translation = translate.translated(ptx, name, dynamic_shared_bytes)
        source = cached(".cpp", lambda to: to.write_text(self.translation.code), self.translation.code)
        self.argument_bytes = max((offset + size for offset, size in self.translation.parameters), default=0)
        runtime()  # whose functions kernels call
        self.run = ctypes.cast(compiled(source, *OF_KERNELS).kernel, ctypes.c_void_p)

    def explained(self, complaint: str) -> str:
        """A complaint with lines of source code instead of lines of PTX."""
        places = self.translation.places
        return re.sub(r"@(\d+)", lambda match: places.get(int(match[1]), "?").replace(f"{ROOT}/", ""), complaint)


class Device:
    """An imagined GPU. A seed decides the order of threads and the errors of approximate instructions.

    It is that of GRADSTAT_PTX_SEED, or a new one.
    """

    every: ClassVar[list[Device]] = []

    def __init__(self, architecture: int = 90, kernels: Iterable[str] = ()) -> None:
        self.architecture = architecture
        self.library = runtime()
        self.seed = int(os.environ.get("GRADSTAT_PTX_SEED", random.SystemRandom().randrange(2**32)))
        self.launches = Counter(dict.fromkeys(kernels, 0))  # by name; those that could be launched are 0
        Device.every.append(self)
        self.complaints: list[str] = []

    def launch(self, kernel: Kernel, blocks: int, threads: int, arguments: bytes, memory: Iterable[Span]) -> None:
        """Runs a kernel, which may access this memory."""
        name, translation = kernel.translation.name, kernel.translation
        if len(arguments) != kernel.argument_bytes:
            raise ValueError(f"{name} takes {kernel.argument_bytes} bytes of arguments, got {len(arguments)}")
        begins, ends = apart(memory)
        numbers = ctypes.c_uint64 * len(begins)
        self.launches[name] += 1
        number = self.launches.total()
        self.library.run_kernel(
            *(kernel.run, blocks, threads, translation.shared_bytes, arguments, len(arguments)),
            *(ctypes.c_uint64(len(begins)), numbers(*begins), numbers(*ends)),
            *(ctypes.c_uint64((self.seed * 1_000_003 + number) % 2**64), ctypes.c_uint64(self.seed)),
        )
        for complaint in self.library.take_complaints().decode().splitlines():
            where = f"{name}, {blocks} blocks, launch {number} of GRADSTAT_PTX_SEED={self.seed}"
            self.complaints.append(f"{where}: {kernel.explained(complaint)}")

    def check(self) -> None:
        """Raises if kernels have done something wrong since the last call."""
        complaints, self.complaints = self.complaints, []
        if complaints:
            raise PtxError("\n".join(complaints))


def apart(memory: Iterable[Span]) -> tuple[list[int], list[int]]:
    """The begins and ends of spans in ascending order; those that overlap are one."""
    begins: list[int] = []
    ends: list[int] = []
    for begin, size in sorted(memory):
        if size == 0:
            continue
        if ends and begin < ends[-1]:
            ends[-1] = max(ends[-1], begin + size)
        else:
            begins.append(begin)
            ends.append(begin + size)
    return begins, ends


class CudaDevice(Device):
    """Runs the kernels that nvcc compiles for an architecture, launched by tests/cuda_on_cpu."""

    def __init__(self, launchers: ctypes.CDLL, architecture: int) -> None:
        sources = [ptx_of(source, architecture) for source in SOURCES]
        self.of_name = {name: ptx for ptx in sources for name in translate.names_of(ptx)}
        super().__init__(architecture, self.of_name)
        self.launchers = launchers
        self.memory: list[Span] = []  # of the tensors of the current call
        self.kernels: dict[str, Kernel] = {}
        signature = [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64]
        self._callback = ctypes.CFUNCTYPE(None, *signature)(self._launch)
        launchers.set_launcher(self._callback)

    def _launch(self, name: bytes, blocks: int, threads: int, arguments: int, size: int) -> None:
        try:
            symbol = name.decode()
            if symbol not in self.kernels:
                self.kernels[symbol] = Kernel(self.of_name[symbol], symbol)
            count = self.launchers.memory(None, None)
            addresses, sizes = (ctypes.c_uint64 * count)(), (ctypes.c_uint64 * count)()
            self.launchers.memory(addresses, sizes)
            memory = [*self.memory, *zip(addresses, sizes, strict=True)]
            self.launch(self.kernels[symbol], blocks, threads, ctypes.string_at(arguments, size), memory)
        except Exception as error:  # which ctypes would only print
            self.complaints.append(f"{type(error).__name__}: {error}")
