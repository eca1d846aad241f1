"""Defects planted in the PTX of the kernels, each of which must be reported: the checks of tools/ptx can fail."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import processes
from helpers.cuda_on_cpu import EmulatedKernels
from helpers.cuda_on_cpu_build import loaded
from helpers.exact import WrongError, assert_rows_match, rounded_product
from ptx.device import CudaDevice, Kernel, PtxError

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH to generate PTX with")

Edit = Callable[[str], str]


@pytest.fixture(scope="module")
def kernels(kernels_on_host: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernels:
    copy = shutil.copy(kernels_on_host._name, tmp_path_factory.mktemp("planted") / "launchers.so")
    library = loaded(Path(copy))
    return EmulatedKernels(library, device=CudaDevice(library, 90))


def stats(kernels: EmulatedKernels) -> None:
    """Tensors that span blocks, small ones and all ends of vectors, so that every part of the kernel is used."""
    values = [
        torch.randn(size)[skip:] for size, skip in ((40_000, 3), (30_000, 0), *((50 + i, i % 4) for i in range(60)))
    ]
    assert_rows_match(
        kernels.measured(values, norm=torch.zeros(()), multiplier=torch.zeros(1).double(), device=0), values
    )


def scale(kernels: EmulatedKernels) -> None:
    values = [torch.randn(size)[skip:] for size, skip in ((9000, 1), (77, 3), (5, 0))]
    values += [torch.randn(3000).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    expected = [rounded_product(one, torch.tensor(0.3).double(), one.dtype) for one in values]
    kernels._scale(values, torch.tensor(0.3).double())
    if not all(torch.equal(a.double(), b.double()) for a, b in zip(values, expected, strict=True)):
        raise WrongError


def without(pattern: str, number: int = 0) -> Edit:
    return replaced(pattern, "", number)


def replaced(pattern: str, by: str, number: int = 0) -> Edit:
    """Replaces the match of that number, or the last for -1."""

    def edit(ptx: str) -> str:
        match = list(re.finditer(pattern, ptx))[number]
        return ptx[: match.start()] + match.expand(by) + ptx[match.end() :]

    return edit


BARRIER, OF_WARP = r"bar\.sync\s+0;", r"bar\.warp\.sync\s+-1;"
ONLY_SOME = "{.reg .pred some; .reg .b32 x; mov.u32 x, %tid.x; setp.lt.u32 some, x, 99; @some bar.sync 0;}"
TOO_FAR = replaced(r"(ld\S*\.f32\s+%f\d+, \[%rd\d+)\]", r"\1+4]")
RUNS = {"stats_kernel": stats, "scale_kernel": scale}
# Defects by kernel, each with what reports it.
DEFECTS: dict[str, tuple[str, Edit, str]] = {
    "a tensor that is read by all lanes and replaced by the first": ("stats_kernel", without(OF_WARP, 4), "race"),
    "a ticket that orders nothing": ("stats_kernel", replaced(r"atom\.acq_rel", "atom.relaxed"), "race"),
    "a tail, an element too far": ("scale_kernel", TOO_FAR, "out of bounds"),
    "no barrier before products are read": ("scale_kernel", without(BARRIER, -1), "race"),
    "a barrier for some": ("stats_kernel", replaced(BARRIER, ONLY_SOME, -1), "never arrive"),
}


@pytest.mark.parametrize("run", RUNS)
def test_nothing_is_reported_as_the_kernels_are(run: str, kernels: EmulatedKernels) -> None:
    RUNS[run](kernels)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_in_ptx_is_reported(defect: str, kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, edit, complaint = DEFECTS[defect]
    device = kernels.device
    assert device is not None
    symbol = f"{len(kernel)}{kernel}"  # as C++ mangles it
    name = next(name for name in device.of_name if symbol in name and "DeviceTable" not in name)
    module = device.of_name[name]
    begin = module.index(f".entry {name}(")
    end = module.index("\n}", begin)
    monkeypatch.setitem(device.kernels, name, Kernel(module[:begin] + edit(module[begin:end]) + module[end:], name))
    with pytest.raises(PtxError, match=complaint):
        RUNS[kernel](kernels)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_defect_in_the_ptx_of_triton_is_reported() -> None:
    """In a process in which Triton compiles."""
    said = processes.output_of(
        r"""
        import re, torch
        from helpers.exact import assert_rows_match
        from ptx import on_triton
        from ptx.device import Kernel, PtxError
        from gradstat.kernels import stats

        on_triton.TritonDevice(90)
        # Only for float32: other types take most of the time to compile.
        branches = r"(?s)if kind == _table.BFLOAT16:.*?el(if kind == _table.FLOAT32:[^)]*\)).*?(?=\n\n    if count)"
        source, found = re.subn(branches, r"\1", stats.stats_kernel.src)
        assert found == 1
        stats.stats_kernel._unsafe_update_src(source)
        tensors = [torch.randn(40_000), torch.randn(99)]
        assert_rows_match(stats.stats(tensors), tensors)

        def without_barriers(ptx):  # that of the source, and one that Triton adds
            before, after = ptx.split("atom.global", 1)
            return "".join(before.rsplit("bar.sync \t0;", 2)) + "atom.global" + after

        for edit in (lambda ptx: ptx.replace("acq_rel", "relaxed"), without_barriers):
            on_triton.Kernel = lambda ptx, *rest, edit=edit: Kernel(edit(ptx), *rest)
            on_triton.TritonDevice(90)
            try:
                stats.stats(tensors)
            except PtxError as error:
                print(str(error).split(":")[1])
        """,
        TRITON_INTERPRET="0",
    )
    assert said.split() == ["race", "race"]
