"""The Triton kernels, where they differ from other backends: chunks, groups, tables, and how they are launched.

Without a GPU they run in Triton's interpreter, which is slow: sizes stay near the ends of vectors, steps and chunks.
"""

import inspect
import math
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import triton.language as tl
from helpers.cuda_counts import Operations
from helpers.devices import DEVICES, parameters_with
from helpers.exact import COMPLEX, FLOAT8, REAL, assert_rows_match
from test_conformance import random
from torch.utils._python_dispatch import _disable_current_modes

import gradstat
from gradstat._core import backends, norms
from gradstat.kernels import _table
from gradstat.kernels import stats as stats_module
from gradstat.kernels._table import Launcher
from gradstat.kernels.scale import scale_, scale_kernel
from gradstat.kernels.stats import LANES, STEPS_PER_TILE, UNROLL, norm, norm_kernel, stats, stats_kernel

# The interpreter computes with numpy, which warns of the overflows that the fast loop allows by design.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("short_chunks")]

DEVICE = torch.device(DEVICES[-1])
VECTOR_BYTES = _table.VECTOR_BYTES
STEP_BYTES = UNROLL.value * LANES.value * VECTOR_BYTES
CHUNK_BYTES = STEP_BYTES * (2 if DEVICE.type == "cpu" else STEPS_PER_TILE.value)


def table_of(tensor: torch.Tensor) -> _table.Table:
    return _table.table_of(_table.entries_of([tensor]), tensor.device)


def check(tensors: list[torch.Tensor]) -> torch.Tensor:
    table = stats(tensors)
    assert_rows_match(table, tensors)
    return table


def test_worst_rounding() -> None:
    """Elements whose squares and sums all round in the same direction keep the norm within its error bound."""
    count = STEP_BYTES // 4
    for bits in (0x3F800001, 0x3FB504F3, 0x3F9837F1, 0x3FFFFFFF):
        check([torch.full((count,), bits, dtype=torch.int32, device=DEVICE).view(torch.float32)])


def many_tensors(count: int) -> list[torch.Tensor]:
    dtypes = REAL + COMPLEX + FLOAT8
    return [random(i * 37 % 211, dtypes[i % len(dtypes)], DEVICE) for i in range(count)]


def test_repeatable() -> None:
    """The same bits in every call, whatever other tensors are in the list; shared scratch memory is left clean."""
    x = random(4 * CHUNK_BYTES // 4 + 11, torch.float32, DEVICE)
    y = random(2 * CHUNK_BYTES // 2 + 3, torch.bfloat16, DEVICE)
    first = stats([x, y])
    for tensors in ([x, y], [x, y]):
        assert torch.equal(stats(tensors).view(torch.int64), first.view(torch.int64))
    assert torch.equal(stats([y, random(5, torch.float16, DEVICE), x])[[2, 0]], first)


def test_groups_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of several groups, the last one smaller, is merged in two rounds; all tickets are left at zero."""
    if DEVICE.type == "cpu":  # compiled kernels have fixed constants
        monkeypatch.setattr(stats_module, "GROUP", tl.constexpr(2))
    x = random(2 * stats_module.GROUP.value * CHUNK_BYTES // 2 + 77, torch.bfloat16, DEVICE)
    x[CHUNK_BYTES // 2 + 3], x[-CHUNK_BYTES] = 100.0, -100.0
    x[-5], x[-3] = math.nan, math.inf
    assert torch.equal(check([x, x[: CHUNK_BYTES // 2 + 1]])[0], stats([x])[0])
    assert not any(tickets.any() for _, tickets in stats_module._scratch.values())


def test_chunks_double_for_huge_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_table, "MAX_CHUNKS", 2)
    x = random(5 * CHUNK_BYTES // 4 + 9, torch.float32, DEVICE)[1:]
    x[-3] = math.nan
    assert table_of(x).chunks == 2
    check([x])
    expected = x * 0.5
    scale_([x], torch.tensor(0.5, dtype=torch.float64, device=DEVICE))
    assert torch.equal(x.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_tables_are_kept() -> None:
    x = random(100, torch.float32, DEVICE)
    assert table_of(x) is table_of(x)
    assert table_of(x) is not table_of(x[:50])
    assert table_of(x) is not table_of(x.view(torch.bfloat16))


def test_sources_of_captured_uploads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay of a graph reads them again."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(_table, "_sources_of_captured_uploads", kept)
    x, factor = random(100, torch.float32, DEVICE), torch.tensor(1.0, dtype=torch.float64, device=DEVICE)
    calls = (lambda: stats([x]), lambda: scale_([x], factor))
    for call in calls:
        call()
    assert not kept
    monkeypatch.setattr(_table, "is_capturing", lambda device: True)
    for count, call in enumerate(calls, 1):
        call()
        assert len(kept) == count
        assert kept[-1].device.type == "cpu"


def test_misaligned_elements_are_refused() -> None:
    raw = torch.zeros(40, dtype=torch.uint8)
    x = torch.frombuffer(memoryview(raw.numpy())[1:33], dtype=torch.float32).to(DEVICE)
    if x.data_ptr() % 4 == 0:
        pytest.skip("copying to the device aligned the tensor")
    with pytest.raises(ValueError, match="clone"):
        stats([x])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter compiles nothing")
def test_compiled_once() -> None:
    """Number, size and type of the tensors do not cause recompilation."""
    half = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64, device=DEVICE)
    split = random(3 * CHUNK_BYTES, torch.bfloat16, DEVICE)
    for tensors in ([random(1, torch.float32, DEVICE)], many_tensors(16), [split], many_tensors(33)):
        stats(tensors)
        scalable = [tensor for tensor in tensors if tensor.dtype not in FLOAT8]
        scale_(scalable, half[0])
        scale_(scalable, half[1])
        scale_(scalable, half[:1].repeat(len(scalable)))
    for kernel in (stats_kernel, scale_kernel):
        assert len(kernel.device_caches[torch.cuda.current_device()][0]) == 1


def kernel_that_returns(compiled: object) -> Any:
    """Imitates a Triton kernel, or the compiled kernel that its launch returns, which can be launched as well."""
    kernel = MagicMock()
    kernel.__getitem__.return_value.return_value = compiled
    return kernel


def launches_of(kernel: Any) -> list[tuple[object, tuple[object, ...]]]:
    calls = zip(kernel.__getitem__.call_args_list, kernel.__getitem__.return_value.call_args_list, strict=True)
    return [(grid.args[0], launch.args) for grid, launch in calls]


def test_the_second_launch_uses_what_the_first_returned() -> None:
    compiled = kernel_that_returns(None)
    kernel = kernel_that_returns(compiled)
    launch = Launcher(kernel, warps=4)
    pointer, number = torch.zeros(4), torch.zeros(3)[1:]
    for programs in (1, 7, 8):
        launch(DEVICE, programs, (pointer,), number, programs)
    assert [grid for grid, _ in launches_of(kernel)] == [(1,)]
    options = kernel.__getitem__.return_value.call_args.kwargs
    assert options == {"num_warps": 4, "enable_fp_fusion": _table.FUSE}
    told = [(grid, arguments[1:]) for grid, arguments in launches_of(compiled)]
    assert told == [((7, 1, 1), (number, 7)), ((8, 1, 1), (number, 8))]
    # Each device needs its own compiled code, and so do unaligned pointers.
    launch(torch.device("meta"), 1, (pointer,), number, 1)
    launch(DEVICE, 1, (pointer[1:],), number, 1)
    launch(DEVICE, 1, (pointer,), number, 1)
    assert (len(launches_of(kernel)), len(launches_of(compiled))) == (3, 3)
    # In the interpreter a launch returns nothing, so every one goes through Triton.
    without = kernel_that_returns(None)
    launch = Launcher(without, warps=4)
    for _ in range(3):
        launch(DEVICE, 1, (pointer,), 1)
    assert len(launches_of(without)) == 3


def test_triton_has_the_handle() -> None:
    """The installed Triton has the interface that Launcher uses: arguments in the order of the kernel's."""
    from triton.compiler import CompiledKernel

    code = inspect.getsource(CompiledKernel.__getitem__)
    assert "def runner(*args, stream=None)" in code
    assert "self.run(grid[0], grid[1], grid[2], stream" in code


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_scale_refuses_float8(dtype: torch.dtype) -> None:
    x = torch.ones(4, device=DEVICE)
    with pytest.raises(NotImplementedError, match=str(dtype)):
        scale_([x, torch.zeros(4, device=DEVICE).to(dtype)], torch.tensor(0.5, dtype=torch.float64, device=DEVICE))
    assert torch.equal(x, torch.ones_like(x))


def test_a_clip_is_four_launches_and_the_same_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, launched, call = backends.resolve("triton", DEVICE.type), [], Launcher.__call__

    def launch(self: Launcher, *given: Any) -> None:
        launched.append(self.kernel)
        with _disable_current_modes():  # the interpreter computes with torch
            call(self, *given)

    monkeypatch.setattr(Launcher, "__call__", launch)
    tensors, results = [random(99, dtype, DEVICE) for dtype in (torch.float32, torch.bfloat16, torch.complex64)], []
    for direct in (kernels.direct, backends.NOT_COMPILED):
        monkeypatch.setattr(kernels, "direct", direct)
        parameters = parameters_with(tensor.clone() for tensor in tensors)
        with Operations() as operations:
            norm = gradstat.clip_grad_norm_(parameters, 0.1, backend="triton")
        results.append([norm, *(parameter.grad for parameter in parameters)])
        if direct is not backends.NOT_COMPILED:
            assert [name for name in operations.names if "empty" not in name] == ["aten::_to_copy"]
            assert launched == [stats_kernel, norm_kernel, scale_kernel]
    torch.testing.assert_close(*results, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_many_rows_is_that_of_plain_torch(norm_type: float) -> None:
    """Also of large and small elements, and of NaN and Inf, which take precedence in this order."""
    rows = stats([random(5, torch.float64, DEVICE) for _ in range(3)]).repeat(400, 1)
    for scale in (1.0, 2.0**500, 2.0**-520):
        table = stats([random(9, torch.float64, DEVICE) * scale, torch.zeros(0, dtype=torch.float64, device=DEVICE)])
        for bad in ((), (math.inf,), (math.inf, math.nan)):
            nonfinite = [stats([torch.tensor([value], device=DEVICE)]) for value in bad]
            every = torch.cat([rows, table, *nonfinite])
            expected = norms.total_norm(every, norm_type)
            expected = torch.stack([norms.clip_multiplier(expected, 0.1), expected])
            torch.testing.assert_close(norm(every, 0.1, norm_type), expected, rtol=1e-14, atol=0.0, equal_nan=True)
