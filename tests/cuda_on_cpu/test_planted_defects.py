"""Defects planted in the CUDA code, each of which the emulation must notice."""

import ctypes
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.cuda_on_cpu import EmulatedKernels
from helpers.cuda_on_cpu_build import ROOT, compiled, loaded
from helpers.exact import FLOAT8, WrongError, assert_rows_match, rounded_product

from gradstat.adaptive import AutoClip
from gradstat.adaptive._base import decide

# A file of csrc, and a piece of its code with {what it is|what replaces that if PLANTED}.
DEFECTS = {
    "no barrier before rows are merged": ("stats_cuda.cuh", "{|if (!PLANTED) }__syncthreads();\n      set ^= 1;"),
    "rows are replaced while they are merged": ("stats_cuda.cuh", "{|if (!PLANTED) }set ^= 1;"),
    "no barrier before the norm is read": (
        "stats_cuda.cuh",
        "result[lane] = value;\n  {|if (!PLANTED) }__syncwarp();",
    ),
    "products are replaced while they are read": (
        "scale_cuda.cuh",
        "{|if (!PLANTED) }__syncthreads();\n      fill_products",
    ),
    "numbers are replaced while they are reduced": ("decide_cuda.cuh", "{|if (!PLANTED) }barrier();  // until"),
    "a barrier for some": (
        "stats_cuda.cuh",
        "{|if (PLANTED && tensor % kWarps != warp) continue;\n    }if (kMultiplies && size_of",
    ),
    "totals that are not set": ("stats_cuda.cuh", "if ({|!PLANTED && }lane < kFields) memory.total"),
    "a ticket that stays": ("device.cuh", "atomicInc(ticket, count - {1|!PLANTED})"),
    "a head of the wrong length": ("tile_table.h", "(({0 - address|PLANTED ? address : 0 - address}) &"),
    "half of a warp": ("stats_cuda.cuh", "int distance = {16|PLANTED ? 8 : 16}; distance"),
}
CHOICE = re.compile(r"\{([^|{}]*)\|([^{}]*)\}")


def run(kernels: EmulatedKernels) -> None:
    """Tensors that span blocks, small ones and all ends of vectors, and two types with products of their own."""
    values = [torch.randn(size)[size % 4 :] for size in (40_003, 30_000, 9001, *range(50, 110))]
    values += [torch.randn(3000).to(dtype) for _ in range(3) for dtype in FLOAT8[:2]]
    norm = torch.zeros((), dtype=torch.float64)
    for factor in (None, torch.tensor(0.5)):
        exact = assert_rows_match(kernels.measured(values, factor, norm, multiplier=torch.zeros(1).double()), values)
        assert norm.item() == pytest.approx(exact, rel=1e-7)
    expected = [rounded_product(one, torch.tensor(0.3).double(), one.dtype) for one in values]
    kernels.scale_(values, torch.tensor(0.3).double())
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(values, expected, strict=True))
    clip = AutoClip(50, 1000)
    for norm in torch.arange(1, 8, dtype=torch.float64):
        multiplier = decide(clip, kernels, norm)[0].item()
    assert multiplier == pytest.approx(4 / 7, rel=1e-6)


def test_defects_are_noticed(tmp_path: Path) -> None:
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for number, (file, piece) in enumerate(DEFECTS.values(), 1):
        text, code = (csrc / file).read_text(), CHOICE.sub(r"\1", piece)
        assert text.count(code) == 1
        defect = CHOICE.sub(r"\2", piece).replace("PLANTED", f"(planted == {number})")
        (csrc / file).write_text(text.replace(code, defect))
    source = tmp_path / "defects.cpp"
    source.write_text('extern "C" {\nint planted = 0;\n}\n#include "launchers.cpp"\n')
    library = compiled(str(source), tmp_path, csrc)
    unnoticed = []
    for number, name in enumerate(["none", *DEFECTS]):
        copy = loaded(shutil.copy(library, tmp_path / f"{number}.so"))  # with tickets of its own
        ctypes.c_int.in_dll(copy, "planted").value = number
        try:
            run(EmulatedKernels(copy))
        except (AssertionError, RuntimeError, WrongError):
            continue
        unnoticed.append(name)
    assert unnoticed == ["none"]
