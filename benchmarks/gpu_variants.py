"""The ladder of docs/performance.md on a GPU: the CUDA kernels compiled in variants and timed in turn.

Each variant is the launchers and kernels alone, compiled with other macros (needs nvcc), loaded beside the others and
called with the same tensors, caches flushed, so that differences are the kernels' own. Triton's variants are other
constants in its modules. Rows go to ``<results>/<device>/gpu_variants.jsonl`` as they are made: device times, and their
ratios to what is shipped, round by round.

    python benchmarks/gpu_variants.py --compile 90 --into FOLDER    # on any machine; prints registers and spills
    python benchmarks/gpu_variants.py --libraries FOLDER            # on a GPU: refused if the sources have changed
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"


class Variant(NamedTuple):
    """Macros, and which cases its rows decide about (all if empty), by how their names begin."""

    macros: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()


LISTS = ("3 tensors", "ResNet-50", "500 mixed", "1,000 tensors", "2,500 tensors")
LARGE = ("256 MiB", "1.5 GiB")
VARIANTS = {
    "as shipped": Variant(),
    "2 blocks per multiprocessor": Variant(("BLOCKS_PER_MULTIPROCESSOR=2",), (*LARGE, "ResNet-50")),
    "4 blocks per multiprocessor": Variant(("BLOCKS_PER_MULTIPROCESSOR=4",), (*LARGE, "ResNet-50")),
    "2 vectors per thread": Variant(("VECTORS_PER_THREAD=2",), (*LARGE, "ResNet-50")),
    "8 vectors per thread, 2 blocks": Variant(("VECTORS_PER_THREAD=8", "BLOCKS_PER_MULTIPROCESSOR=2"), LARGE),
    "2 ranges per block, dealt": Variant(("RANGES_PER_BLOCK=2",), (*LARGE, "ResNet-50", "500 mixed")),
    "4 ranges per block, dealt": Variant(("RANGES_PER_BLOCK=4",), (*LARGE, "ResNet-50", "500 mixed")),
    "next tensor prefetched": Variant(("PREFETCH_NEXT_TENSOR",), LISTS),
    "no tensor read by one warp": Variant(("SMALL_TENSOR_BYTES=-1",), LISTS),
    "up to 16 KB read by one warp": Variant(("SMALL_TENSOR_BYTES=16384",), LISTS),
    "one size of parameter table": Variant(("ONE_PARAMETER_TABLE",), LISTS[:4]),
    "no overlap of the kernels": Variant(("WITHOUT_OVERLAP",), (*LISTS[:4], "256 MiB, float32", "1.5 GiB")),
    "no finish (wrong results)": Variant(("WITHOUT_FINISH",)),
}

INTERFACE = r"""
#include "launch_state.cpp"
#include "stats_cuda.cu"
#include "scale_cuda.cu"
using namespace gradstat;
namespace {
std::vector<Entry> entries_of(int64_t count, const uint64_t* addresses, const int64_t* numels, int32_t dtype) {
  std::vector<Entry> entries;
  for (int64_t i = 0; i < count; ++i)
    entries.push_back({reinterpret_cast<void*>(addresses[i]), numels[i], static_cast<DType>(dtype), false});
  return entries;
}
}  // namespace
extern "C" int64_t workspace_bytes(int64_t n, const uint64_t* a, const int64_t* m, int32_t dtype) {
  const auto entries = entries_of(n, a, m, dtype);
  return std::max(stats_workspace_bytes(entries, 0), scale_workspace_bytes(entries, 0));
}
extern "C" int32_t run(int64_t n, const uint64_t* a, const int64_t* m, int32_t dtype, double* table, float* norm,
                       double* coefficient, double max_norm, int32_t scales, void* workspace, void* stream) {
  try {
    const auto entries = entries_of(n, a, m, dtype);
    const NormRequest request{max_norm, false, DType::kFloat32, norm, coefficient, {}};
    launch_stats(entries, reinterpret_cast<Row*>(table), &request, workspace, 0, stream);
    if (scales) launch_scale(entries, coefficient, true, workspace, 0, stream);
    return 0;
  } catch (const std::exception& error) {
    return 1;
  }
}
"""


def stem_of(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def state_of(architecture: str) -> dict[str, str]:
    """What compiled variants were made from."""
    digest = hashlib.sha256(repr((VARIANTS, INTERFACE)).encode())
    for path in sorted(CSRC.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return {"architecture": architecture, "sources": digest.hexdigest()}


def compile_all(architecture: str, folder: Path) -> dict[str, Path]:
    """The library of every variant."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    built_from = folder / "built_from.json"
    built_from.unlink(missing_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = pool.map(partial(compiled, nvcc, architecture, folder), VARIANTS)
        libraries = dict(zip(VARIANTS, built, strict=True))
    built_from.write_text(json.dumps(state_of(architecture)))
    return libraries


def load_all(architecture: str, folder: Path) -> dict[str, Path]:
    """Those that ``compile_all`` left in a folder, if they are of these sources and this device."""
    built_from = folder / "built_from.json"
    found = json.loads(built_from.read_text()) if built_from.exists() else None
    if found != state_of(architecture):
        sys.exit(
            f"expected in {folder} variants of these sources for sm_{architecture}, found {found or 'none'}; "
            f"run: python benchmarks/gpu_variants.py --compile {architecture} --into {folder}"
        )
    return {name: folder / f"{stem_of(name)}.so" for name in VARIANTS}


def compiled(nvcc: str, architecture: str, folder: Path, name: str) -> Path:
    """The library of one variant; prints what the compiler says of it."""
    source, library = folder / f"{stem_of(name)}.cu", folder / f"{stem_of(name)}.so"
    source.write_text(INTERFACE)
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", f"-I{CSRC}", "-Xptxas", "-v", "-shared"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=default", *(f"-DGRADSTAT_{macro}" for macro in VARIANTS[name].macros)]
    run = subprocess.run([*command, "-o", str(library), str(source)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(run.stderr)
    for kernel in ("stats", "scale"):
        found = re.search(
            rf"entry function '\w*\d{kernel}_kernel.*?(\d+) bytes spill stores.*?Used (\d+)", run.stderr, re.S
        )
        assert found is not None
        print(f"{name:<34} {kernel}: {found[2]} registers, {found[1]} bytes spilled", flush=True)
    return library


class Kernels:
    """One variant and one list of tensors."""

    def __init__(self, library: ctypes.CDLL, tensors: list[Any]) -> None:
        import torch

        count = len(tensors)
        dtype = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.float8_e4m3fn: 4}
        self.arguments = [
            ctypes.c_int64(count),
            (ctypes.c_uint64 * count)(*(tensor.data_ptr() for tensor in tensors)),
            (ctypes.c_int64 * count)(*(tensor.numel() for tensor in tensors)),
            ctypes.c_int32(dtype[tensors[0].dtype]),
        ]
        library.workspace_bytes.restype = ctypes.c_int64
        self.library = library
        new = partial(torch.zeros, device="cuda", dtype=torch.float64)
        self.memory = new(library.workspace_bytes(*self.arguments) // 8 + 1)
        self.table, self.norm, self.coefficient = new(count, 10), new(1, dtype=torch.float32), new(1)
        self.stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def __call__(self, max_norm: float, scales: bool) -> None:
        outputs = [ctypes.c_void_p(t.data_ptr()) for t in (self.table, self.norm, self.coefficient)]
        workspace = ctypes.c_void_p(self.memory.data_ptr())
        rest = [ctypes.c_double(max_norm), int(scales), workspace, self.stream]
        if self.library.run(*self.arguments, *outputs, *rest):
            raise RuntimeError("a launch failed")


def cases() -> dict[str, Callable[[], list[Any]]]:
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


def measure_cuda(libraries: dict[str, Path], rounds: int, results: Path) -> None:
    import torch

    for case, make in cases().items():
        tensors = make()
        deciding = [name for name, variant in VARIANTS.items() if not variant.cases or case.startswith(variant.cases)]
        kernels = {name: Kernels(ctypes.CDLL(str(libraries[name])), tensors) for name in deciding}
        first = kernels["as shipped"]
        for name, kernel in kernels.items():
            kernel(1e30, False)
            torch.cuda.synchronize()
            if "wrong" not in name:
                torch.testing.assert_close(kernel.norm, first.norm, rtol=1e-6, atol=0)
        # A clip by almost nothing leaves the tensors what they are, but writes them.
        limit = 0.99999 * float(first.norm)
        kinds = {"statistics": (1e30, False), "clip, unclipped": (1e30, True), "clip, clipped": (limit, True)}
        for kind, (max_norm, scales) in kinds.items():
            if kind == "clip, clipped" and tensors[0].element_size() == 1:
                continue  # multiplying would not leave them as they are
            calls = {
                name: partial(kernel, max_norm, scales)
                for name, kernel in kernels.items()
                if not (kind == "clip, clipped" and "wrong" in name)
            }
            timed("cuda variants", f"{kind}: {case}", tensors, calls, rounds, results)
        del tensors, kernels, first


def timed(
    group: str, case: str, tensors: list[Tensor], calls: dict[str, Callable[[], object]], rounds: int, results: Path
) -> None:
    """Rows of device time, printed and appended."""
    import torch
    from rows import append, row

    from gradstat.bench.machine import Flush
    from gradstat.bench.timing import Quartiles, interleaved, quartiles, ratios

    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    device = torch.device("cuda")
    make_row = partial(row, group, case, device=device, bytes=size, tensors=len(tensors), dtype=tensors[0].dtype)
    flush = Flush(device)
    made = []
    samples = interleaved(calls, rounds, 5, device=device, before=lambda _: flush())
    shipped = next(iter(samples.values())).device
    for name, sample in samples.items():
        if not sample.device:
            raise RuntimeError(f"{name}: the host did not get ahead of the device, so there is no device time")
        time = Quartiles(*(1e6 * seconds for seconds in quartiles(sample.device)))
        made.append(make_row(name, "device time", "us", time))
        compared = ""
        if len(samples) > 1 and len(sample.device) == len(shipped):
            ratio = ratios(sample.device, shipped)
            made.append(make_row(name, "time ratio", "", ratio))
            compared = f"{ratio.low:6.3f} {ratio.median:6.3f} {ratio.high:6.3f}"
        speed = size / time.median / 1e3
        print(f"{case:<50} {name:<32} {time.median:9.1f} us {speed:6.0f} GB/s  {compared}", flush=True)
    append(made, "gpu_variants", results)


def measure_triton(rounds: int, results: Path) -> int:
    """Other warps and chunks, as source with other numbers: Triton reads constants when it compiles.

    Returns how many of them failed.
    """
    failed = 0
    for warps, chunk in ((4, 4096), (2, 2048), (8, 4096), (4, 2048), (4, 8192)):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            shutil.copytree(ROOT / "gradstat", copy / "gradstat", symlinks=False)
            kernels = copy / "gradstat" / "kernels"
            numbers = (("stats.py", "WARPS", warps), ("_table.py", "CHUNK_VECTORS", chunk))
            for file, name, value in numbers:
                text, count = re.subn(rf"^{name} = \d+", f"{name} = {value}", (kernels / file).read_text(), flags=re.M)
                assert count == 1, file
                (kernels / file).write_text(text)
            environment = {**os.environ, "PYTHONPATH": f"{copy}:{ROOT / 'benchmarks'}"}
            command = [sys.executable, __file__, "--triton", f"{warps} warps, chunks of {chunk // 64} KB"]
            command += ["--rounds", str(rounds), "--results", str(results)]
            run = subprocess.run(command, env=environment, check=False)
            if run.returncode != 0:
                print(f"Triton with {warps} warps and chunks of {chunk} vectors failed")
                failed += 1
    return failed


def measure_triton_here(name: str, rounds: int, results: Path) -> None:
    import gradstat

    for case, make in cases().items():
        tensors = make()
        calls: dict[str, Callable[[], object]] = {name: partial(gradstat.stats, tensors, backend="triton")}
        # A group of its own: this is another process, and of a group the rows of the newest one count.
        timed(f"triton variants, {name}", f"statistics: {case}", tensors, calls, rounds, results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", metavar="ARCHITECTURE", help="only compile, for instance for 90")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="with --compile: keep the libraries there")
    parser.add_argument("--libraries", type=Path, metavar="FOLDER", help="what --compile --into left there")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=["cuda", "triton"], help="these kernels")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="the folder of rows")
    parser.add_argument("--triton", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.triton:
        measure_triton_here(arguments.triton, arguments.rounds, arguments.results)
        return 0
    if arguments.only == "triton":
        return int(measure_triton(arguments.rounds, arguments.results) > 0)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.compile:
            compile_all(arguments.compile, arguments.into or Path(folder))
            return 0
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA device; --compile 90 compiles without one")
        architecture = "{}{}".format(*torch.cuda.get_device_capability())
        given = arguments.libraries
        libraries = load_all(architecture, given) if given else compile_all(architecture, Path(folder))
        sys.path.insert(0, str(ROOT))
        measure_cuda(libraries, arguments.rounds, arguments.results)
    return 0 if arguments.only == "cuda" else int(measure_triton(arguments.rounds, arguments.results) > 0)


if __name__ == "__main__":
    sys.exit(main())
