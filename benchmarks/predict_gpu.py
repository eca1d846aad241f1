"""Predicts the performance of the CUDA kernels on GPUs not measured yet, from compiled code and data sheets.

Compiles the kernels (needs nvcc and a disassembler, no GPU), counts the instructions of every hot loop and compares
them with what a multiprocessor can issue while memory delivers the bytes. Prints tables of predictions, to be confirmed
or refuted by measurements.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools" / "gpu_gates"))

from check_cuda import MOST_THREADS, REGISTERS, THREADS, Kernel, Loop, compile_and_read, find_nvdisasm  # noqa: E402

ISSUED = 128  # thread instructions issued per cycle and multiprocessor: four warps
READ_SHARE = 0.92  # of the data sheet's bandwidth, assumed of a plain read
ISSUE_SHARE = 0.9  # of the cycles, assumed of a loop without other stalls
IN_FLIGHT_BYTES = 64  # per thread, while it processes the previous 64


@dataclass(frozen=True)
class Gpu:
    """A GPU as in its data sheet, with arithmetic throughput from the CUDA programming guide.

    Attributes:
        architecture: The architecture that the kernels are compiled for.
        bandwidth: Bytes per second.
        clock: Hz, boost.
        latency: Seconds from a load to its data, assumed.
        fp32, fp64, conversions: Results per cycle and multiprocessor: float32 and half arithmetic, float64
            arithmetic, conversions from and to it. Everything else: 64.
    """

    name: str
    architecture: str
    bandwidth: float
    multiprocessors: int
    clock: float
    l2_megabytes: int
    latency: float
    fp32: int
    fp64: int
    conversions: int

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes of memory traffic per cycle and multiprocessor."""
        return self.bandwidth / self.multiprocessors / self.clock


GPUS = [
    Gpu("H200", "90", 4.8e12, 132, 1.98e9, 60, 0.9e-6, 128, 64, 16),
    Gpu("A100 80 GB", "80", 2.04e12, 108, 1.41e9, 40, 0.8e-6, 64, 32, 16),
    Gpu("RTX 4090", "89", 1.008e12, 128, 2.52e9, 72, 0.8e-6, 128, 2, 2),
    Gpu("RTX 5090", "120", 1.79e12, 170, 2.41e9, 96, 0.8e-6, 128, 2, 2),
]
WIDE = ["float32", "bfloat16", "float16", "float64"]
TYPES = ([*WIDE, "float8_e4m3fn", "float8_e5m2"], [*WIDE, "float8"])  # the types with their own loop, by kernel


def pipe_of(opcode: str) -> str:
    if opcode.startswith(("LDG", "STG", "LDS", "NOP")):
        return "memory"
    if opcode.startswith("F2F") and "F64" in opcode:
        return "conversions"
    if opcode.startswith("D"):
        return "fp64"
    if opcode.startswith(("FADD", "FMUL", "FFMA", "HADD", "HMUL", "HFMA", "HSET", "IMAD")):
        return "fp32"
    return "other"


def limits(loop: Loop, gpu: Gpu) -> dict[str, float]:
    """Bytes per cycle and multiprocessor that each unit can sustain."""
    rates = {"fp32": gpu.fp32, "fp64": gpu.fp64, "conversions": gpu.conversions, "other": 64}
    used: Counter[str] = Counter()
    for opcode, count in loop.opcodes.items():
        used[pipe_of(opcode)] += count
    if gpu.fp64 == gpu.conversions:  # one unit does both
        used["fp64"] += used.pop("conversions", 0)
    found = {unit: 64 * rates[unit] / count for unit, count in used.items() if unit in rates and count}
    return found | {"issue": 64 * ISSUED / len(loop)}


def loops_of(kernel: Kernel) -> dict[str, Loop]:
    """The longest loop of every type; loops of complex types count among those of their parts' type."""
    return {loop.dtype: loop for loop in kernel.loops}


def blocks_of(kernel: Kernel, architecture: str) -> int:
    registers = (kernel.registers + 7) // 8 * 8
    return min(REGISTERS // (registers * THREADS), MOST_THREADS[architecture] // THREADS)


def tightest(kernels: dict[str, tuple[Kernel, Kernel]], number: int, dtype: str, gpu: Gpu) -> tuple[float, str]:
    """The throughput that a kernel's loop allows, as a multiple of memory bandwidth, and the limiting unit."""
    loops = loops_of(kernels[gpu.architecture][number])
    loop = loops.get(dtype)
    if loop is None and dtype.startswith("float8"):
        loop = loops.get("other float8")
    if loop is None:
        raise SystemExit(f"no loop for {dtype} on sm_{gpu.architecture}: type_of needs a look")
    unit, least = min(limits(loop, gpu).items(), key=lambda item: item[1])
    return least * (1 + number) / gpu.bytes_per_cycle, unit


def render(kernels: dict[str, tuple[Kernel, Kernel]]) -> Iterator[str]:
    stats_blocks = {gpu.name: min(blocks_of(k, gpu.architecture) for k in kernels[gpu.architecture]) for gpu in GPUS}
    yield "Devices, from their makers' data sheets; latencies are assumed. Both kernels share one grid.\n"
    yield "| | " + " | ".join(gpu.name for gpu in GPUS) + " |"
    yield "| --- |" + " ---: |" * len(GPUS)
    rows = {
        "bandwidth, TB/s": [f"{g.bandwidth / 1e12:.2f}" for g in GPUS],
        "multiprocessors, boost GHz": [f"{g.multiprocessors}, {g.clock / 1e9:.2f}" for g in GPUS],
        "second-level cache, MB": [str(g.l2_megabytes) for g in GPUS],
        "registers, statistics and scale": [", ".join(str(k.registers) for k in kernels[g.architecture]) for g in GPUS],
        "KB in flight on a multiprocessor": [
            f"{stats_blocks[g.name] * THREADS * IN_FLIGHT_BYTES / 1000:.0f}" for g in GPUS
        ],
        "KB needed (bandwidth x latency)": [f"{g.bandwidth / g.multiprocessors * g.latency / 1000:.0f}" for g in GPUS],
    }
    for name, values in rows.items():
        yield f"| {name} | " + " | ".join(values) + " |"
    yield "\nThe statistics kernel, which reads every byte once: the unit that would be the first to fall behind memory"
    yield "and the share of memory's bandwidth it allows; predicted TB/s moved.\n"
    yield "| type | " + " | ".join(gpu.name for gpu in GPUS) + " |"
    yield "| --- |" + " --- |" * len(GPUS)
    for dtype in TYPES[0]:
        cells = []
        for gpu in GPUS:
            share, unit = tightest(kernels, 0, dtype, gpu)
            moved = min(READ_SHARE, ISSUE_SHARE * share) * gpu.bandwidth / 1e12
            cells.append(f"{unit} {share:.1f} x; {moved:.2f}")
        yield f"| {dtype} | " + " | ".join(cells) + " |"
    least = min((tightest(kernels, 1, dtype, gpu), dtype, gpu.name) for dtype in TYPES[1] for gpu in GPUS)
    yield "\nThe scale kernel, which reads and writes every byte: the unit first to fall behind memory allows at least"
    yield f"{least[0][0]:.1f} times memory's bandwidth ({least[1]} on {least[2]})."
    yield from render_clips()


def render_clips() -> Iterator[str]:
    """Bytes moved by a clip, and predictions for large gradients."""
    yield "\nA clip, in bytes moved per byte of gradients, and so the predicted ratio to torch at 1 GB and more."
    yield "torch's foreach clip reads for the norms, then reads and writes to multiply, clipped or not.\n"
    yield "| | gradstat | torch | predicted ratio | goal |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    yield "| nothing to clip | 1 | 3 | 3.0 | 2.5 |"
    yield "| clipped, nothing found in the cache | 3 | 3 | 1.0 | 1.2 |"
    found = [0.5 * gpu.l2_megabytes / 1000 for gpu in GPUS]
    moved = [3 - max(found), 3 - min(found)]
    bytes_moved, ratios = (f"{low:.2f} to {high:.2f}" for low, high in (moved, [3 / each for each in reversed(moved)]))
    yield f"| clipped, 1 GB, half of the cache found again | {bytes_moved} | 3 | {ratios} | 1.2 |"
    size = 25_557_032 * 4
    times = ", ".join(f"{g.name} {size / (READ_SHARE * g.bandwidth) * 1e6:.0f} µs" for g in GPUS)
    yield "\nResNet-50's gradients (161 tensors, 102.2 MB of float32) take the statistics kernel, at that bandwidth:"
    yield f"{times}. Assumed on top:"
    yield "4 µs to start the kernel and merge in the last block, 5 µs for the copy of 13 KB and its event, and the"
    yield "host's part, which is measured on the CPU (above)."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        parser.error("no nvcc on PATH")
    nvdisasm = find_nvdisasm(nvcc)
    sources = [ROOT / "csrc" / name for name in ("stats_cuda.cu", "scale_cuda.cu")]
    jobs = [(source, gpu.architecture) for gpu in GPUS for source in sources]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(lambda job: compile_and_read(nvcc, nvdisasm, job[0], job[1], Path(folder)), jobs))
    # Kernels differ by where the table of tensors is, and have the same loops.
    first = [next(kernel for kernel in kernels if kernel.name.endswith("/passed")) for kernels in compiled]
    kernels = {gpu.architecture: (first[2 * i], first[2 * i + 1]) for i, gpu in enumerate(GPUS)}
    print("\n".join(render(kernels)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
