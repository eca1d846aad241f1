"""Compiles the CUDA kernels for every architecture and checks the machine code; needs nvcc, no GPU.

Fails if a kernel spills registers or has a stack frame, if it does not read and write 16 bytes at a time for every
element type, or if its tickets do not order the accesses of blocks. Prints registers, shared memory, the threads per
multiprocessor that registers allow, the size of the code, and the length of the hot loops.
"""

import argparse
import concurrent.futures
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The architectures that setup.py builds for.
ARCHITECTURES = re.findall(r'"(\d+)"', re.findall(r"CUDA_ARCHITECTURES = (.*)", (ROOT / "setup.py").read_text())[0])

# 16-byte instructions that a kernel must have. Statistics: eleven formats, each with four loads before the loop, four
# in it and four for a partial tile. Unscaling: the same, and stores for the loads in and after the loop. Scaling: five
# formats with four loads and four stores.
EXPECTED = {
    "stats": {"LDG": 11 * 12, "STG": 0},
    "unscale": {"LDG": 11 * 12, "STG": 11 * 8},
    "scale": {"LDG": 5 * 4, "STG": 5 * 4},
    "decide_clip": {},
    "guard": {},
}
# What makes an atomic a ticket: writes are visible to other blocks before it, and L1 is discarded after it.
ORDERED_ATOMIC = r"MEMBAR\.\w+\.GPU", r"ATOMG", r"CCTL\.IVALL"
THREADS = 256
# Per multiprocessor: registers, and the maximum of threads.
REGISTERS = 65536
MOST_THREADS = {"75": 1024, "80": 2048, "86": 1536, "89": 1536, "90": 2048, "100": 2048, "120": 1536}


@dataclass
class Kernel:
    name: str
    registers: int = 0
    shared_bytes: int = 0
    stack_and_spills: list[int] = field(default_factory=list)
    wide: dict[str, int] = field(default_factory=dict)
    tickets: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    code_bytes: int = 0


def find_nvdisasm(nvcc: str) -> str:
    candidates = [Path(nvcc).resolve().parent / "nvdisasm"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        candidates.append(Path(triton.submodule_search_locations[0]) / "backends/nvidia/bin/nvdisasm")
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    found = shutil.which("nvdisasm")
    if found is None:
        sys.exit("no nvdisasm: install triton, which brings one, or the CUDA toolkit's")
    return found


def short_name(mangled: str) -> str:
    kind = re.search(r"\d(stats|unscale|scale|decide_clip|guard)_kernel", mangled)
    table = "/passed" if "ParameterTable" in mangled else "/uploaded" if "DeviceTable" in mangled else ""
    return f"{kind[1] if kind else mangled}{table}"


def hot_loops(lines: list[str]) -> list[int]:
    """The instructions of one thread for its 64 bytes: lengths of the innermost loops with four 16-byte loads."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    spans: list[tuple[int, int]] = []
    for line in lines:
        label = re.match(r"(\.L_x_\d+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            instructions.append(line)
            if target and target[1] in labels:
                spans.append((labels[target[1]], len(instructions)))
    loads = [bool(re.search(r"LDG\S*\.128", line)) for line in instructions]
    # The loop over segments contains loads, too, but is several times as long as any hot loop.
    fitting = [(begin, end) for begin, end in spans if sum(loads[begin:end]) == 4 and end - begin < 1000]
    inner = [s for s in fitting if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in fitting)]
    return sorted(end - begin for begin, end in inner)


def compile_and_read(nvcc: str, nvdisasm: str, source: Path, architecture: str, folder: Path) -> list[Kernel]:
    cubin = folder / f"{source.stem}_{architecture}.cubin"
    command = [nvcc, "-std=c++17", "-O3", "-cubin", f"-arch=sm_{architecture}", f"-I{source.parent}"]
    command += ["-Xptxas", "-v", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    run = subprocess.run([*command, "-o", str(cubin), str(source)], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stderr)
    kernels: dict[str, Kernel] = {}
    current = None
    for line in run.stderr.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            current = kernels.setdefault(match[1], Kernel(short_name(match[1])))
        elif current and "stack frame" in line:
            current.stack_and_spills = [int(n) for n in re.findall(r"(\d+) bytes", line)]
        elif current and (match := re.search(r"Used (\d+) registers", line)):
            current.registers = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            current.shared_bytes = int(shared[1]) if shared else 0
    code = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    for section in re.split(r"^\.text\.", code, flags=re.MULTILINE)[1:]:
        mangled = section[: section.index(":")]
        if mangled in kernels:
            lines = section.splitlines()
            for name in ("LDG", "STG"):
                kernels[mangled].wide[name] = sum(bool(re.search(rf"{name}\S*\.128", line)) for line in lines)
            kernels[mangled].tickets = [len(re.findall(pattern, section)) for pattern in ORDERED_ATOMIC]
            kernels[mangled].loops = hot_loops(lines)
            kernels[mangled].code_bytes = 16 * sum(bool(re.search(r"/\*[0-9a-f]{4,}\*/ ", line)) for line in lines)
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def problems_of(kernel: Kernel) -> list[str]:
    problems = []
    if kernel.stack_and_spills != [0, 0, 0]:
        problems.append("stack frame, spill stores and spill loads: {} {} {} bytes".format(*kernel.stack_and_spills))
    for instruction, count in EXPECTED[kernel.name.split("/")[0]].items():
        if kernel.wide.get(instruction, 0) < count:
            problems.append(f"{kernel.wide.get(instruction, 0)} {instruction}.128, expected {count}")
    if len(set(kernel.tickets)) != 1:
        problems.append("memory barriers, atomics and invalidations of L1: {} {} {}".format(*kernel.tickets))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default=shutil.which("nvcc"), help="the compiler (default: the one on PATH)")
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES, metavar="NUMBER")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time (default: 2)")
    arguments = parser.parse_args()
    if arguments.nvcc is None:
        parser.error("no nvcc on PATH; give --nvcc")
    nvdisasm = find_nvdisasm(arguments.nvcc)
    begun = time.monotonic()
    failures = 0
    sources = [ROOT / "csrc" / f"{name}_cuda.cu" for name in ("stats", "scale")]
    jobs = [(source, architecture) for source in sources for architecture in arguments.architectures]
    print(
        f"{'kernel':16} {'sm':>4} {'regs':>5} {'smem':>6} {'threads/SM':>11} {'code':>7} {'LDG.128':>8} {'STG.128':>8}"
        "  hot loops"
    )
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda job: compile_and_read(arguments.nvcc, nvdisasm, job[0], job[1], Path(folder)), jobs)
        for (_, architecture), kernels in zip(jobs, results, strict=True):
            for kernel in kernels:
                registers = (kernel.registers + 7) // 8 * 8
                threads = REGISTERS // (registers * THREADS) * THREADS
                threads = min(threads, MOST_THREADS.get(architecture, 2048))
                wide = [kernel.wide.get(name, 0) for name in ("LDG", "STG")]
                print(
                    f"{kernel.name:16} {architecture:>4} {kernel.registers:5} {kernel.shared_bytes:6} {threads:11}"
                    f" {kernel.code_bytes:7} {wide[0]:8} {wide[1]:8}  {kernel.loops}"
                )
                for problem in problems_of(kernel):
                    failures += 1
                    print(f"  FAILED: {problem}")
    print(f"{failures} problems, {time.monotonic() - begun:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
