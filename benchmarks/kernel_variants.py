"""The variants of the CUDA kernels that `gpu_variants` times, and how each is compiled: needs nvcc, but no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "benchmarks" / "kernel_variant.cu"


class Variant(NamedTuple):
    """The macros of a variant, and prefixes of the names of cases to time it on (empty: all)."""

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
    "no tensor read by one warp": Variant(("SMALL_TENSOR_BYTES=-1",), LISTS),
    "up to 16 KB read by one warp": Variant(("SMALL_TENSOR_BYTES=16384",), LISTS),
    "no finish (wrong results)": Variant(("WITHOUT_FINISH",)),
}


def libraries_in(folder: Path) -> dict[str, Path]:
    """The path of each variant's library."""
    return {name: folder / (re.sub(r"\W+", "_", name) + ".so") for name in VARIANTS}


def compile_all(architecture: str, folder: Path, names: Iterable[str] = VARIANTS) -> dict[str, Path]:
    """Compiles the libraries of variants for an architecture such as ``"90"``; returns their paths."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        sys.exit(
            "expected nvcc, to compile variants of the kernels, found none on PATH or in /usr/local/cuda; "
            f"run `make gpu-bundle ARCHITECTURES={architecture}` on a machine that has it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    every = libraries_in(folder)
    libraries = {name: every[name] for name in names}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(partial(_compiled, nvcc, architecture), libraries, libraries.values()):
            print(line, flush=True)
    return libraries


def _compiled(nvcc: str, architecture: str, name: str, library: Path) -> str:
    """Compiles one variant; returns the registers and spills of its kernels as text."""
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = [nvcc, "-std=c++17", "-O3", target, f"-I{ROOT / 'csrc'}", "-Xptxas", "-v", "-shared"]
    # Hide all symbols but the interface, since the variants are loaded into one process.
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-gnu-unique", "-Xlinker", "--strip-all"]
    command += [f"-DGRADSTAT_{macro}" for macro in VARIANTS[name].macros]
    run = subprocess.run([*command, "-o", str(library), str(SOURCE)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(run.stderr)
    used = []
    for kernel in ("stats", "scale"):
        found = re.search(
            rf"entry function '\w*\d{kernel}_kernel.*?(\d+) bytes spill stores.*?Used (\d+)", run.stderr, re.S
        )
        assert found is not None
        used.append(f"{kernel} {found[2]} registers, {found[1]} bytes spilled")
    return f"{name:<34} {'; '.join(used)}"
