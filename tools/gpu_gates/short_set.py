"""A short set of calls that reaches every path of the CUDA and Triton kernels, for compute-sanitizer and the tests.

Run by `make gpu`. Results are compared with those of the CPU kernels for copies, so it also fails on wrong
numbers. Under the sanitizer a launch or an allocation takes a millisecond and more: small tensors share memory, and
nothing but the calls under test runs on the device (tests/bench/test_gpu.py counts it).
"""

import argparse
import itertools
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradstat
from gradstat import _fields
from gradstat._core import backends

REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (*REAL, *COMPLEX, *FLOAT8)
# An H100 runs 396 blocks at once. So each gets ten tiles of 16 KB, and each of their warps two or three small tensors.
LARGE_BYTES = 64 << 20
TINY = 9000

EXACT = [_fields.INDEX[name] for name in ("nan_count", "inf_count", "zero_count", "min", "max", "first_nonfinite")]
SUM = _fields.INDEX["sum"]


class Piece(NamedTuple):
    """Memory on the CPU, and where its tensors, which do not overlap, begin and end."""

    memory: Tensor
    spans: Sequence[tuple[int, int]]

    def tensors(self, memory: Tensor) -> list[Tensor]:
        return [memory[begin:end] for begin, end in self.spans]


def random(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)


def one(memory: Tensor) -> Piece:
    return Piece(memory, [(0, len(memory))])


def small(dtype: torch.dtype) -> list[Piece]:
    """Tensors that are aligned, misaligned, empty, of one element, of several tiles, or have special values."""
    spans = [(0, 40_000), (40_001, 70_001), (70_004, 70_041), (70_041, 70_041), (70_042, 70_043)]
    special = random(30_001, dtype)
    special[5], special[-1], special[7] = math.nan, math.inf, 0.0
    tiny = torch.full((5000,), 1e-30).to(dtype)
    return [Piece(random(70_043, dtype), spans), one(special), one(torch.zeros(999).to(dtype)), one(tiny)]


def large(dtype: torch.dtype, size: int) -> list[Piece]:
    return [one(random(size // dtype.itemsize, dtype))]


def thousands(count: int) -> list[Piece]:
    """Tensors of one to nine elements, at all alignments."""
    ends = list(itertools.accumulate((1 + i % 9 for i in range(count)), initial=0))
    return [Piece(random(ends[-1], torch.float32), list(itertools.pairwise(ends)))]


def lists(large_bytes: int, tiny: int, dtypes: Sequence[torch.dtype]) -> Iterator[list[Piece]]:
    every = [small(dtype) for dtype in dtypes]
    yield from every
    yield [piece for pieces in every for piece in pieces]
    yield thousands(tiny // 15)  # still in the launch's parameters
    yield thousands(tiny)
    for dtype in dtypes:
        yield large(dtype, large_bytes)


def values(tensor: Tensor) -> Tensor:
    """Real values in float64, with a number for NaN, whose bits may differ."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().nan_to_num(0.625)


def assert_same_table(found: Tensor, expected: Tensor, tensors: Sequence[Tensor]) -> None:
    found = found.cpu()
    assert torch.equal(found[:, EXACT], expected[:, EXACT])
    norms = _fields.l2_norm(torch, expected)
    torch.testing.assert_close(_fields.l2_norm(torch, found), norms, rtol=2e-7, atol=0)
    # The magnitudes that are added up are at most the norm times the root of their number.
    numbers = torch.tensor([2.0 * tensor.numel() for tensor in tensors], dtype=torch.float64)
    assert ((found[:, SUM] - expected[:, SUM]).abs() <= 5e-7 * norms * numbers.sqrt()).all()


class Twins:
    """Tensors on a device, and a copy of them on the CPU that goes through the same calls."""

    def __init__(self, pieces: Sequence[Piece], device: str) -> None:
        self.pieces = pieces
        self.on_device = [piece.memory.to(device, copy=True) for piece in pieces]
        self.on_cpu = [piece.memory.clone() for piece in pieces]
        self.tensors, self.twins = (
            [tensor for piece, memory in zip(pieces, memories, strict=True) for tensor in piece.tensors(memory)]
            for memories in (self.on_device, self.on_cpu)
        )

    def assert_same(self) -> None:
        for found, expected in zip((memory.cpu() for memory in self.on_device), self.on_cpu, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) or torch.equal(
                values(found), values(expected)
            )


def measure_and_multiply(kernels: backends.Kernels, twins: Twins, multiplies: bool) -> None:
    """Every operation on one list, one after another."""
    tensors, cpu = twins.tensors, backends.resolve("native", "cpu")
    device = tensors[0].device
    assert_same_table(kernels.check(tensors)[0], cpu.check(twins.twins)[0], tensors)
    if not multiplies:
        return
    factor, multiplier = torch.tensor(0.3), torch.tensor(0.7, dtype=torch.float64)
    each = (1 + torch.arange(len(tensors), dtype=torch.float64) % 7) / 8
    fused: Any = kernels if kernels.direct is backends.NOT_COMPILED else kernels.direct
    found, expected = fused.unscale_(tensors, factor.to(device)), torch.ops.gradstat.unscale_(twins.twins, factor)
    assert_same_table(found[0], expected[0], tensors)
    kernels.scale_(tensors, multiplier.to(device))
    cpu.scale_(twins.twins, multiplier)
    kernels.scale_each_(tensors, each.to(device))
    cpu.scale_each_(twins.twins, each)
    twins.assert_same()


def units(kernels: backends.Kernels, device: str) -> None:
    cpu = backends.resolve("native", "cpu")
    twin = torch.randn(3000, 33)
    matrix = twin.to(device, copy=True)
    found, expected = kernels.unit_stats([matrix, matrix[0]]), cpu.unit_stats([twin, twin[0]])
    assert_same_table(found, expected, [*twin, twin[0]])
    multipliers = expected[:-1, SUM].contiguous()
    kernels.scale_units_([matrix], multipliers.to(device))
    cpu.scale_units_([twin], multipliers)
    assert torch.equal(matrix.cpu(), twin)


def steps(backend: str, device: str) -> list[Tensor]:
    """Clips, adaptive clips and guards, which decide on the device: parameters after three steps of each."""
    source = torch.Generator().manual_seed(1)
    made = []
    for clip in (0.5, gradstat.ZClip(warmup=1), gradstat.AdaGC(warmup=1), gradstat.AGC()):
        parameters = [nn.Parameter(torch.ones(shape, device=device)) for shape in ((70, 900), (900,), (3,))]
        optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
        guard = gradstat.SpikeGuard()
        for scale in (1.0, 1.1, 30.0):
            for parameter in parameters:
                parameter.grad = scale * torch.randn(parameter.shape, generator=source).to(device)
            loss = torch.full((), scale, device=device)
            gradstat.guarded_step(optimizer, clip, loss=loss, guard=guard, backend=backend)
        norm = gradstat.clip_grad_norm_(parameters, 1e9, backend=backend)
        assert torch.equal(norm, gradstat.clip_grad_norm_(parameters, 0.5, backend=backend))
        made += [parameter.detach().cpu() for parameter in parameters]
    return made


def run(
    names: Sequence[str],
    device: str,
    large_bytes: int = LARGE_BYTES,
    tiny: int = TINY,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Makes all calls of the named backends."""
    torch.manual_seed(0)
    for pieces in lists(large_bytes, tiny, dtypes):
        has_float8 = any(piece.memory.dtype in FLOAT8 for piece in pieces)
        for name in names:
            multiplies = not (has_float8 and name == "triton")
            measure_and_multiply(backends.resolve(name, device), Twins(pieces, device), multiplies)
    for name in names:
        units(backends.resolve(name, device), device)
        for found, expected in zip(steps(name, device), steps("native", "cpu"), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu for a rehearsal")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    if options.device == "cuda":
        run(("native", "triton"), "cuda")
        torch.cuda.synchronize()
    else:
        run(("native",), "cpu", 1 << 20)
    print("short set: done")


if __name__ == "__main__":
    main()
