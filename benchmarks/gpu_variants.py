"""Times variants of the CUDA kernels on a GPU, for the ladder of docs/performance.md.

A variant is the launchers and kernels alone, compiled with other macros (`kernel_variants`). All are loaded into one
process and called with the same tensors, caches flushed, so that only the kernels differ. Triton's variants are copies
of its modules with other constants. Rows are appended to ``<results>/<device>/gpu_variants.jsonl`` as they are made:
device times, and their ratios to the shipped kernels, round by round.

    python benchmarks/gpu_variants.py                 # on a GPU: with the libraries of `make gpu-bundle`, or compiled
    python benchmarks/gpu_variants.py --compile 90    # anywhere; prints registers and spills
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import gpu_bundle
from kernel_variants import ROOT, VARIANTS, compile_all, libraries_in

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Cases = dict[str, Callable[[], list[Any]]]


class Kernels:
    """One variant and one list of tensors."""

    def __init__(self, library: ctypes.CDLL, tensors: list[Any]) -> None:
        import torch

        from gradstat import _fields

        count, device = len(tensors), tensors[0].device
        dtype = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.float8_e4m3fn: 4}
        self.arguments = [
            ctypes.c_int64(count),
            (ctypes.c_uint64 * count)(*(tensor.data_ptr() for tensor in tensors)),
            (ctypes.c_int64 * count)(*(tensor.numel() for tensor in tensors)),
            ctypes.c_int32(dtype[tensors[0].dtype]),
        ]
        library.workspace_bytes.restype = ctypes.c_int64
        self.library = library
        library.variant_error_text.restype = ctypes.c_char_p
        new = partial(torch.zeros, device=device, dtype=torch.float64)
        self.memory = new(library.workspace_bytes(*self.arguments) // 8 + 1)
        self.table, self.norm, self.multiplier = new(count, _fields.COUNT), new(1, dtype=torch.float32), new(1)
        self.stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)

    def __call__(self, max_norm: float, scales: bool) -> None:
        outputs = [ctypes.c_void_p(t.data_ptr()) for t in (self.table, self.norm, self.multiplier)]
        workspace = ctypes.c_void_p(self.memory.data_ptr())
        rest = [ctypes.c_double(max_norm), int(scales), workspace, self.stream]
        if self.library.run(*self.arguments, *outputs, *rest):
            raise RuntimeError(self.library.variant_error_text().decode())


def cases() -> Cases:
    """Lists of tensors on a GPU: single large ones, and many."""
    import torch
    from cases import CASES

    def filled(dtype: torch.dtype, *numels: int) -> list[Any]:
        return [torch.randn(numel, device="cuda").to(dtype) for numel in numels]

    def named(name: str) -> list[int]:
        shapes = next(case.shapes() for case in CASES if case.name.startswith(name))
        return [math.prod(shape) for shape in shapes]

    return {
        **{
            f"256 MiB, {str(dtype).removeprefix('torch.')}": partial(filled, dtype, (1 << 28) // dtype.itemsize)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
        },
        "1.5 GiB, float32": partial(filled, torch.float32, 3 << 27),
        "3 tensors of 64 float32": partial(filled, torch.float32, *[64] * 3),
        "ResNet-50, 161 tensors, float32": partial(filled, torch.float32, *named("ResNet-50")),
        "500 mixed tensors of 225 M, float32": partial(filled, torch.float32, *named("500 mixed")),
        "1,000 tensors of 64 float32": partial(filled, torch.float32, *[64] * 1000),
        "2,500 tensors of 64 float32": partial(filled, torch.float32, *[64] * 2500),
    }


def measure_cuda(libraries: dict[str, Path], listed: Cases, rounds: int, results: Path) -> None:
    import torch

    for case, make in listed.items():
        tensors = make()
        deciding = [name for name, variant in VARIANTS.items() if not variant.cases or case.startswith(variant.cases)]
        kernels = {name: Kernels(ctypes.CDLL(str(libraries[name])), tensors) for name in deciding}
        first = kernels["as shipped"]
        for name, kernel in kernels.items():
            kernel(1e30, False)
            torch.cuda.synchronize()
            if "wrong" not in name:
                torch.testing.assert_close(kernel.norm, first.norm, rtol=1e-6, atol=0)
        # Each call clips by a tiny amount: with a constant limit only the first call would clip.
        limits = map(partial(_falling, float(first.norm)), itertools.count(1))
        kinds = {
            "statistics": lambda kernel: kernel(1e30, False),
            "clip, unclipped": lambda kernel: kernel(1e30, True),
            "clip, clipped": lambda kernel, limits=limits: kernel(next(limits), True),
        }
        for kind, call in kinds.items():
            if kind == "clip, clipped" and tensors[0].element_size() == 1:
                continue  # multiplying would change the tensors
            calls = {
                name: partial(call, kernel)
                for name, kernel in kernels.items()
                if not (kind == "clip, clipped" and "wrong" in name)
            }
            timed("cuda variants", f"{kind}: {case}", tensors, calls, rounds, results)
        del tensors, kernels, first


def _falling(norm: float, number: int) -> float:
    return 0.99999**number * norm


def timed(
    group: str, case: str, tensors: list[Tensor], calls: dict[str, Callable[[], object]], rounds: int, results: Path
) -> None:
    """Times calls, and prints and appends rows of device time."""
    from caches import Flush
    from device_timing import interleaved
    from rows import append, microseconds, row

    from gradstat.bench.timing import ratios

    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    device = tensors[0].device
    make_row = partial(row, group, case, device=device, bytes=size, tensors=len(tensors), dtype=tensors[0].dtype)
    flush = Flush(device)
    made = []
    samples = interleaved(calls, rounds, 5, device=device, before=lambda _: flush())
    shipped = next(iter(samples.values())).device
    for name, sample in samples.items():
        if not sample.device:
            raise RuntimeError(f"{name}: the host cannot queue calls ahead of the device, so there is no device time")
        time = microseconds(sample.device)
        made.append(make_row(name, "device time", "us", time))
        compared = ""
        if len(samples) > 1 and len(sample.device) == len(shipped):
            ratio = ratios(sample.device, shipped)
            made.append(make_row(name, "time ratio", "", ratio))
            compared = f"{ratio.low:6.3f} {ratio.median:6.3f} {ratio.high:6.3f}"
        speed = size / time.median / 1e3
        print(f"{case:<50} {name:<32} {time.median:9.1f} us {speed:6.0f} GB/s  {compared}", flush=True)
    append(made, "gpu_variants", results)


def triton_variants(folder: Path) -> dict[str, ModuleType]:
    """The module of Triton's statistics kernel, and copies of it with other numbers of warps and chunk sizes.

    Triton compiles constants in, so the copies are of the sources, made below ``folder`` under other package names.
    """
    sys.path.insert(0, str(folder))
    found = {}
    for warps, chunk in ((4, 4096), (2, 2048), (8, 4096), (4, 2048), (4, 8192)):
        package = folder / f"triton_{warps}_{chunk}"
        shutil.copytree(ROOT / "kernels", package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in package.iterdir():
            text = path.read_text().replace("gradstat.kernels", package.name)
            for file, name, value in (("stats.py", "WARPS", warps), ("_table.py", "CHUNK_VECTORS", chunk)):
                if path.name == file:
                    text, count = re.subn(rf"^{name} = \d+", f"{name} = {value}", text, flags=re.M)
                    assert count == 1, file
            path.write_text(text)
        found[f"{warps} warps, chunks of {chunk // 64} KB"] = importlib.import_module(f"{package.name}.stats")
    return found


def measure_triton(modules: dict[str, ModuleType], listed: Cases, rounds: int, results: Path) -> None:
    for case, make in listed.items():
        tensors = make()
        calls: dict[str, Callable[[], object]] = {
            name: partial(module.stats, tensors) for name, module in modules.items()
        }
        timed("triton variants", f"statistics: {case}", tensors, calls, rounds, results)


def compile_triton(modules: dict[str, ModuleType], architecture: str) -> None:
    """Compiles the variants for an architecture, and prints registers and spills."""
    sys.path.insert(0, str(ROOT / "tools" / "gpu_gates"))
    import check_triton

    for name, module in modules.items():
        gate = replace(check_triton.GATES[0], kernel=module.stats_kernel, warps=module.WARPS)
        used = check_triton.resources(check_triton.compiled(gate, int(architecture)).asm["cubin"])
        print(f"{name:<34} stats {used['REG']} registers, {used['spills']} spills", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", metavar="ARCHITECTURE", help="only compile for this architecture, such as 90")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=["cuda", "triton"], help="only these kernels")
    parser.add_argument(
        "--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS), help="of CUDA, to compile"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="the folder for rows")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "triton":
            run_cuda(parser, arguments, Path(folder))
        if arguments.only != "cuda":
            modules = triton_variants(Path(folder))
            if arguments.compile:
                compile_triton(modules, arguments.compile)
            else:
                measure_triton(modules, cases(), arguments.rounds, arguments.results)
    return 0


def run_cuda(parser: argparse.ArgumentParser, arguments: argparse.Namespace, folder: Path) -> None:
    if arguments.compile:
        compile_all(arguments.compile, folder, arguments.variants)
        return
    import torch

    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --compile 90 compiles without one")
    capability = torch.cuda.get_device_capability()
    try:
        bundled = gpu_bundle.variants(capability)
    except RuntimeError as error:  # the bundle is stale or damaged
        sys.exit(str(error))
    libraries = libraries_in(bundled) if bundled else compile_all("{}{}".format(*capability), folder)
    measure_cuda(libraries, cases(), arguments.rounds, arguments.results)


if __name__ == "__main__":
    sys.exit(main())
