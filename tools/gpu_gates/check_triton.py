"""Compiles the Triton kernels for NVIDIA GPUs, without one, and checks the machine code.

    python tools/gpu_gates/check_triton.py            # four architectures, about two minutes

For every kernel and architecture it prints registers, spills and shared memory, and fails if anything is
spilled, if the main loop of any element type does not load (and, for scaling, store) 16 bytes at a time, if
tickets do not order accesses, or if scaling bfloat16 does not round to nearest. Needs torch and Triton with its
NVIDIA tools; no GPU.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Kernels defined under the interpreter cannot be compiled.
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradstat.kernels import _table, quantization, scale, stats
from gradstat.lowprecision.formats import FORMATS

ANY_ADDRESS = ("multipliers", "largest")  # arguments that may be any element of a tensor
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WIDE_LOAD = re.compile(r"ld\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)")
WIDE_STORE = re.compile(r"st\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)")


@dataclass(frozen=True, slots=True)
class Gate:
    """One kernel and what its code must contain.

    Attributes:
        kernel: The kernel.
        arguments: The types of its run-time arguments, in order.
        loops: The source lines of the main loops' loads (and stores), as (function, text in the line, number of loads
            for all element types together).
        warps: Warps per program.
        constants: Its compile-time arguments by name.
        fuses: Whether multiplications and additions may be fused.
    """

    kernel: Any
    arguments: dict[str, str]
    loops: tuple[tuple[Any, str, int], ...]
    warps: int
    constants: dict[str, Any] = field(default_factory=dict)
    fuses: bool = _table.FUSE

    @property
    def name(self) -> str:
        """The kernel's, and what it was compiled for."""
        return " ".join([self.kernel.__name__, *map(str, self.constants.values())])


def quantization_gate(name: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Gate:
    """The kernel of a format and a shape of its blocks, for elements of a dtype."""
    program, warps = quantization.program_of(rows, columns, 1 << 10 if name == "nvfp4" else 1, dtype)
    element = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}[dtype]
    arguments = {"x": element, "largest": "*fp32", "out": "*fp64"}
    loads = quantization.elements_per_thread(dtype) * dtype.itemsize // 16
    return Gate(
        quantization.rows_kernel,
        arguments | dict.fromkeys(("rows", "columns", "strips", "chunks"), "i32"),
        loops=((quantization._load_blocks, "values = tl.load(", loads),),
        warps=warps,
        constants=dict(zip(quantization.FORMAT, FORMATS[name].numbers, strict=True)) | program,
        fuses=False,
    )


GATES = (
    Gate(
        stats.stats_kernel,
        {"table": "*i64", "rows": "*fp64", "tickets": "*i32", "out": "*fp64", "tensors": "i32", "chunks": "i32"},
        loops=((stats._read_tile, "tl.load(pointer + step * STEP + offsets)", 7 * stats.UNROLL.value),),
        warps=stats.WARPS,
    ),
    Gate(
        stats.norm_kernel,
        {"table": "*fp64", "out": "*fp64", "count": "i32", "infinity": "i32", "max_norm": "fp64"},
        loops=(),
        warps=stats.WARPS,
    ),
    Gate(
        scale.scale_kernel,
        {"table": "*i64", "multipliers": "*fp64", "tensors": "i32", "chunks": "i32", "stride": "i32"},
        loops=((scale._scale_chunk, "tl.store(target, _scaled(tl.load(target), multiplier))", 4 * scale.UNROLL.value),),
        warps=scale.WARPS,
    ),
    # Every rule of a scale, every type of elements, and every shape of blocks.
    quantization_gate("e5m2", 1, 128),
    quantization_gate("e4m3-128", 128, 1),
    quantization_gate("e4m3-128", 128, 128),
    quantization_gate("mxfp8", 1, 32),
    quantization_gate("mxfp8", 1, 32, torch.float16),
    quantization_gate("mxfp8", 1, 32, torch.float32),
    quantization_gate("mxfp8", 1, 32, torch.float64),
    quantization_gate("mxfp8-rceil", 32, 1),
    quantization_gate("nvfp4", 1, 16),
    quantization_gate("nvfp4", 16, 1),
    quantization_gate("nvfp4", 16, 16),
)


def compiled(gate: Gate, architecture: int) -> Any:
    # As in a launch: torch's allocations are aligned, and so usually is each of their rows.
    place = {name: (i,) for i, name in enumerate(gate.kernel.arg_names)}
    aligned = [name for name, kind in gate.arguments.items() if kind[0] == "*" and name not in ANY_ADDRESS]
    aligned += [name for name in gate.arguments if name == "columns"]
    source = ASTSource(
        gate.kernel,
        gate.arguments | dict.fromkeys(gate.constants, "constexpr"),
        constexprs={place[name]: value for name, value in gate.constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": gate.warps, "enable_fp_fusion": gate.fuses}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def line_numbers(gate: Gate) -> set[int]:
    """The source lines of the main loops' memory accesses."""
    lines = set()
    for function, text, _ in gate.loops:
        found = {function.starting_line_number + i for i, line in enumerate(function.raw_src) if text in line}
        if len(found) != 1:
            raise SystemExit(f"{function.__name__} has changed: update the lines this script looks for")
        lines |= found
    return lines


def accesses(ptx: str, file: str, lines: set[int]) -> list[str]:
    """The global loads and stores that the PTX attributes to the given lines of a file."""
    number = next(
        (m[1] for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M) if m[2].endswith(file)), None
    )
    if number is None:
        raise SystemExit(f"no line information for {file}")
    here = is_assembly = False
    may_move = True
    found = []
    for line in ptx.splitlines():
        location = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)
        if location:
            # Inside inline assembly only the first location refers to the source; later ones count lines of assembly.
            if may_move:
                here = location[1] == number and int(location[2]) in lines
                may_move = not is_assembly
        elif "// begin inline asm" in line:
            is_assembly = True
        elif "// end inline asm" in line:
            is_assembly, may_move = False, True
        elif here and (access := re.search(r"\b(?:ld|st)\.global\S*", line)):
            found.append(access[0])
    return found


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory per thread, and spills, from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([str(CUOBJDUMP), flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found | {"spills": len(re.findall(r"\b(?:STL|LDL)\b", code)), "LDG.128": code.count("LDG.E.128")}


def check(gate: Gate, architecture: int) -> list[str]:
    """Prints the kernel's resources; returns its problems."""
    began = time.perf_counter()
    kernel = compiled(gate, architecture)
    seconds = time.perf_counter() - began
    used = resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    name = f"{gate.name} sm_{architecture}"
    main_loop = accesses(ptx, Path(gate.kernel.fn.__code__.co_filename).name, line_numbers(gate))
    loads = [a for a in main_loop if a.startswith("ld")]
    stores = [a for a in main_loop if a.startswith("st")]
    print(
        f"{name}: {used['REG']} registers, {used['STACK']} bytes of stack, {used['spills']} spills, "
        f"{kernel.metadata.shared} bytes of shared memory, {used['LDG.128']} LDG.E.128; "
        f"main loops: {len(loads)} loads, {len(stores)} stores; compiled in {seconds:.1f} s"
    )

    problems = []
    if used["spills"] or used["STACK"] or used["LOCAL"]:
        problems.append("spills registers")
    expected = sum(count for _, _, count in gate.loops)
    if len(loads) < expected:
        problems.append(f"expected {expected} loads in the main loops, found {len(loads)}")
    narrow = sorted({a for a in loads if not WIDE_LOAD.match(a)} | {a for a in stores if not WIDE_STORE.match(a)})
    if narrow:
        problems.append(f"accesses less than 16 bytes in a main loop: {', '.join(narrow)}")
    if unordered := [a for a in re.findall(r"\batom\.\S+", ptx) if "acq_rel" not in a]:
        problems.append(f"tickets that order nothing: {', '.join(unordered)}")
    if gate.kernel is quantization.rows_kernel and (found := re.findall(r"\bfma\.rn\.f32|\.ftz", ptx)):
        problems.append(f"rounds once where formats round twice, or loses subnormals: {', '.join(sorted(set(found)))}")
    if gate.kernel is scale.scale_kernel:
        if len(stores) < expected:
            problems.append(f"expected {expected} stores in the main loops, found {len(stores)}")
        if "cvt.rn.bf16" not in ptx:
            problems.append("does not round bfloat16 to nearest")
    return [f"{name}: {problem}" for problem in problems]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "architectures", nargs="*", type=int, default=[80, 90, 100, 120], help="compute capabilities, such as 80 90"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*TRITON_DEFAULT_FP_FUSION.*")
    began = time.perf_counter()
    problems = []
    with tempfile.TemporaryDirectory() as cache:
        # Without cached kernels, so that this source is checked and the time is that of compiling.
        os.environ["TRITON_CACHE_DIR"] = cache
        for gate in GATES:
            for architecture in arguments.architectures:
                problems += check(gate, architecture)
    print(f"Triton {triton.__version__}: {time.perf_counter() - began:.1f} s in all")
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
