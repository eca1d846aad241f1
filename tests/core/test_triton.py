"""The Triton kernels against exact sums and torch's own multiplication.

Without a GPU the kernels run in Triton's interpreter, which is slow: sizes here stay near the places where
something changes, the ends of vectors, steps and chunks.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from exact import COMPLEX, FLOAT8, REAL
from test_conformance import assert_rows_match
from test_multiply import product

if not torch.cuda.is_available():
    # Read by Triton when a kernel is defined, hence before the imports below.
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

import triton.language as tl

from gradstat.kernels import _table
from gradstat.kernels import scale as scale_module
from gradstat.kernels import stats as stats_module
from gradstat.kernels._table import Launcher
from gradstat.kernels.scale import scale_, scale_each_, scale_kernel
from gradstat.kernels.stats import LANES, STEPS_PER_TILE, UNROLL, stats, stats_kernel

# The interpreter computes with numpy, which warns of the overflows that the fast loop provokes on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VECTOR_BYTES = _table.VECTOR_BYTES
STEP_BYTES = UNROLL.value * LANES.value * VECTOR_BYTES
STEPS_PER_CHUNK = 2 if DEVICE.type == "cpu" else STEPS_PER_TILE.value
CHUNK_BYTES = STEPS_PER_CHUNK * STEP_BYTES


@pytest.fixture(autouse=True, scope="module")
def _short_chunks() -> Iterator[None]:
    """A chunk is a tile here too, but the interpreter's are a quarter as long; test_conformance.py has real ones."""
    assert STEPS_PER_TILE.value * STEP_BYTES == _table.CHUNK_VECTORS * VECTOR_BYTES
    _table._tables.clear()
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":  # what is compiled has its constants for good
            patch.setattr(stats_module, "STEPS_PER_TILE", tl.constexpr(STEPS_PER_CHUNK))
            for module, vectors in (
                (_table, CHUNK_BYTES // VECTOR_BYTES),
                (stats_module, tl.constexpr(CHUNK_BYTES // VECTOR_BYTES)),
                (scale_module, tl.constexpr(CHUNK_BYTES // VECTOR_BYTES)),
            ):
                patch.setattr(module, "CHUNK_VECTORS", vectors)
        yield
    _table._tables.clear()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def by_dtype(dtypes: list[torch.dtype]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", dtypes, ids=name_of)


def random_tensor(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values with some zeros, on the device."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 if dtype.is_complex else 1
    values = torch.randn(count, width, generator=generator, dtype=torch.float64)
    values[torch.rand(count, generator=generator) < 0.1] = 0
    if dtype.is_complex:
        return torch.view_as_complex(values).to(dtype).to(DEVICE)
    return values[:, 0].to(dtype).to(DEVICE)


def check(tensors: list[torch.Tensor]) -> torch.Tensor:
    table = stats(tensors)
    assert_rows_match(table, tensors)
    return table


def sizes(dtype: torch.dtype) -> list[int]:
    """Around a vector, a step, a chunk and a few chunks."""
    counts = [0, 1]
    for size in (VECTOR_BYTES, STEP_BYTES, CHUNK_BYTES):
        counts += [size // dtype.itemsize + extra for extra in (-1, 0, 1)]
    return [*counts, 3 * CHUNK_BYTES // dtype.itemsize + 1]


@by_dtype(REAL + COMPLEX + FLOAT8)
def test_sizes(dtype: torch.dtype) -> None:
    check([random_tensor(count, dtype, seed=count) for count in sizes(dtype)])


@by_dtype(REAL + COMPLEX + FLOAT8)
def test_misaligned(dtype: torch.dtype) -> None:
    """Views that begin and end inside a vector, some of them inside the same one."""
    per_step = STEP_BYTES // dtype.itemsize
    x = random_tensor(2 * per_step, dtype)
    views = [x[1:], x[3:], x[3:-1], x[1:2], x[1:3], x[5 : per_step + 6], x[1:1]]
    check(views)


@by_dtype(FLOAT8)
def test_every_float8_code(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    check([codes.view(dtype), *codes.view(dtype).split(8)])
    # The fast loop reads no tile for good that holds special values, or numbers float16 has not: hence a step of
    # others, and then one with a code among them that float16 takes for a number, the NaN of e4m3 and fnuz types.
    values = codes.view(dtype).float()
    ordinary = codes[values.abs() < 2.0**15]
    step = ordinary.repeat(STEP_BYTES // len(ordinary) + 1)
    spoiled = step.clone()
    spoiled[77] = codes[values.isnan()][0]
    check([step.view(dtype), spoiled.view(dtype)])


def test_special_values_anywhere() -> None:
    """One NaN or Inf in the head, the fast loop, its remainder and the tail of a misaligned view."""
    count = 2 * CHUNK_BYTES // 2 + 77
    tensors = []
    for position in (0, 6, 4000, CHUNK_BYTES // 2 + 5, count - 40, count - 1):
        for value in (math.nan, -math.inf):
            x = random_tensor(count + 1, torch.bfloat16, seed=position)[1:]
            x[position] = value
            tensors.append(x)
    check(tensors)


EXTREME = (math.nan, math.inf, -math.inf, 0.0, -0.0)
MAGNITUDES = {
    torch.float32: (1e30, 1e-30, 1e-44, 1e-22, 1e-19, 3e17),
    torch.bfloat16: (1e30, 1e-30, 1e-22),
    torch.float16: (6e4, 6e-8),
    torch.float64: (1e200, 1e-200, 1e-160, 1e300, 5e-324, 2.0**486, 2.0**-511),
    torch.complex32: (),
    torch.complex64: (1e30,),
    torch.complex128: (1e-200, 1e200),
}


@by_dtype(list(MAGNITUDES))
def test_extreme_values(dtype: torch.dtype) -> None:
    """All elements extreme, and one extreme element among ordinary ones."""
    count = STEP_BYTES // dtype.itemsize + 5
    factors = (1 + torch.arange(count, dtype=torch.float64) % 7 / 7).to(
        torch.complex128 if dtype.is_complex else torch.float64
    )
    tensors = []
    for magnitude in (*EXTREME, *MAGNITUDES[dtype]):
        uniform = (factors * magnitude).to(dtype).to(DEVICE)
        mixed = random_tensor(count, dtype)
        mixed[17] = uniform[3]
        tensors += [uniform, mixed]
    check(tensors)


def test_worst_rounding() -> None:
    """Elements whose squares and sums all round the same way still keep the norm within its error."""
    count = STEP_BYTES // 4
    for bits in (0x3F800001, 0x3FB504F3, 0x3F9837F1, 0x3FFFFFFF):
        check([torch.full((count,), bits, dtype=torch.int32, device=DEVICE).view(torch.float32)])


def many_tensors(count: int) -> list[torch.Tensor]:
    dtypes = REAL + COMPLEX + FLOAT8
    return [random_tensor(i * 37 % 211, dtypes[i % len(dtypes)], seed=i) for i in range(count)]


def test_many_tensors() -> None:
    check(many_tensors(44))


def test_repeatable() -> None:
    """Equal bits call after call, whatever the tensors' neighbours; shared scratch is left as it was found."""
    x = random_tensor(4 * CHUNK_BYTES // 4 + 11, torch.float32)
    y = random_tensor(2 * CHUNK_BYTES // 2 + 3, torch.bfloat16)
    first = stats([x, y])
    for tensors in ([x, y], [x, y]):
        assert torch.equal(stats(tensors).view(torch.int64), first.view(torch.int64))
    assert torch.equal(stats([y, random_tensor(5, torch.float16), x])[[2, 0]], first)


def test_groups_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of several groups, the last one smaller, is merged in two rounds; every ticket is left at zero."""
    if DEVICE.type == "cpu":  # what is compiled has its constants for good
        monkeypatch.setattr(stats_module, "GROUP", tl.constexpr(2))
    x = random_tensor(2 * stats_module.GROUP.value * CHUNK_BYTES // 2 + 77, torch.bfloat16)
    x[CHUNK_BYTES // 2 + 3], x[-CHUNK_BYTES] = 100.0, -100.0
    x[-5], x[-3] = math.nan, math.inf
    first = check([x, x[: CHUNK_BYTES // 2 + 1]])
    assert torch.equal(stats([x])[0], first[0])
    assert not any(tickets.any() for _, tickets in stats_module._scratch.values())


def test_chunks_double_for_huge_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_table, "MAX_CHUNKS", 2)
    x = random_tensor(5 * CHUNK_BYTES // 4 + 9, torch.float32)[1:]
    x[-3] = math.nan
    table = _table.table_of([x])
    assert table.chunks == 2
    check([x])
    expected = x * 0.5
    scale_([x], torch.tensor(0.5, dtype=torch.float64, device=DEVICE))
    assert torch.equal(x.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_tables_are_kept() -> None:
    x = random_tensor(100, torch.float32)
    assert _table.table_of([x]) is _table.table_of([x])
    assert _table.table_of([x]) is not _table.table_of([x[:50]])
    assert _table.table_of([x]) is not _table.table_of([x.view(torch.bfloat16)])


def test_misaligned_elements_are_refused() -> None:
    raw = torch.zeros(40, dtype=torch.uint8)
    x = torch.frombuffer(memoryview(raw.numpy())[1:33], dtype=torch.float32).to(DEVICE)
    if x.data_ptr() % 4 == 0:
        pytest.skip("copying to the device aligned the tensor")
    with pytest.raises(ValueError, match="clone"):
        stats([x])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter compiles nothing")
def test_compiled_once() -> None:
    """Neither number, size nor type of the tensors makes another kernel."""
    half = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64, device=DEVICE)
    split = random_tensor(3 * CHUNK_BYTES, torch.bfloat16)
    for tensors in ([random_tensor(1, torch.float32)], many_tensors(16), [split], many_tensors(33)):
        stats(tensors)
        scalable = [tensor for tensor in tensors if tensor.dtype not in FLOAT8]
        scale_(scalable, half[0])
        scale_(scalable, half[1])
        scale_each_(scalable, half[:1].repeat(len(scalable)))
    for kernel in (stats_kernel, scale_kernel):
        assert len(kernel.device_caches[torch.cuda.current_device()][0]) == 1


def test_nothing_is_specialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes one compiled kernel serve every list: Triton's binder finds the same in all arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import JITFunction
    from triton.runtime.jit import create_function_from_signature

    seen: dict[str, set[str]] = {}

    def recorder(launcher: Launcher) -> Callable[..., None]:
        kernel = launcher.kernel
        jit = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        bind = create_function_from_signature(jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32)))
        keys = seen[jit.__name__] = set()

        # Nothing is launched: only what a launch would be given matters.
        return lambda device, programs, pointers, *rest: keys.add(str(bind(*pointers, *rest)[1]))

    monkeypatch.setattr(stats_module, "_launch_stats", recorder(stats_module._launch_stats))
    monkeypatch.setattr(scale_module, "_launch_scale", recorder(scale_module._launch_scale))
    coefficients = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    split = random_tensor(2 * CHUNK_BYTES // 2 + 1, torch.bfloat16)
    # One and sixteen and multiples of it are what Triton likes to specialize on.
    for tensors in (
        many_tensors(1),
        many_tensors(16),
        many_tensors(33),
        [split],
        [split] * 16,
        [*many_tensors(2), split],
    ):
        stats(tensors)
        for i in range(3):
            scale_(
                [tensor for tensor in tensors if tensor.dtype not in FLOAT8 and tensor.numel()] or [split],
                coefficients[i],
            )
        scalable = [tensor for tensor in tensors if tensor.dtype not in FLOAT8]
        scale_each_(scalable, torch.full((len(scalable) + 1,), 0.5, dtype=torch.float64, device=DEVICE)[1:])
    assert {name: len(keys) for name, keys in seen.items()} == {"stats_kernel": 1, "scale_kernel": 1}


class FakeKernel:
    """A kernel as Triton's launcher sees it, and what it returns: something that launches too."""

    def __init__(self, returns: object) -> None:
        self.returns = returns
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launch(*arguments: object, **options: object) -> object:
            self.launches.append((grid, arguments, options))
            return self.returns

        return launch


def test_the_second_launch_uses_what_the_first_returned() -> None:
    compiled = FakeKernel(None)
    kernel = FakeKernel(compiled)
    launch = Launcher(kernel, warps=4)
    pointer, number = torch.zeros(4), torch.zeros(3)[1:]
    for programs in (1, 7, 8):
        launch(DEVICE, programs, (pointer,), number, programs)
    assert [grid for grid, *_ in kernel.launches] == [(1,)]
    assert kernel.launches[0][2] == {"num_warps": 4, "enable_fp_fusion": _table.FUSE}
    assert [(grid, arguments[1:]) for grid, arguments, _ in compiled.launches] == [
        ((7, 1, 1), (number, 7)),
        ((8, 1, 1), (number, 8)),
    ]
    # Each device has its own code; and so have pointers that are not aligned.
    launch(torch.device("meta"), 1, (pointer,), number, 1)
    launch(DEVICE, 1, (pointer[1:],), number, 1)
    launch(DEVICE, 1, (pointer,), number, 1)
    assert (len(kernel.launches), len(compiled.launches)) == (3, 3)


def test_without_a_handle_every_launch_goes_through_triton() -> None:
    kernel = FakeKernel(None)
    launch = Launcher(kernel, warps=4)
    for _ in range(3):
        launch(DEVICE, 1, (torch.zeros(4),), 1)
    assert len(kernel.launches) == 3


def test_triton_has_the_handle() -> None:
    """What Launcher uses, in the Triton installed here: tensors and numbers in the order of the kernel's."""
    from triton.compiler import CompiledKernel

    code = inspect.getsource(CompiledKernel.__getitem__)
    assert "def runner(*args, stream=None)" in code
    assert "self.run(grid[0], grid[1], grid[2], stream" in code


def coefficient_of(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, device=DEVICE)


def scaled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    if tensor.dtype == torch.bfloat16 and DEVICE.type == "cpu":
        # Triton's interpreter drops the low half where a GPU rounds to nearest even; that the compiled
        # kernel rounds is checked by gpu_gates/check_triton.py.
        return (product(tensor.float(), value).view(torch.int32) & -0x10000).view(torch.float32).to(torch.bfloat16)
    return product(tensor, value)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    both_nan = a.isnan() & b.isnan()
    a, b = a.masked_fill(both_nan, 0), b.masked_fill(both_nan, 0)
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@by_dtype(REAL + COMPLEX)
def test_scale(dtype: torch.dtype) -> None:
    # The large one takes float16 to infinity.
    for value, counts in ((0.3712345678901234, sizes(dtype)), (-1e6, sizes(dtype)[::4]), (0.0, sizes(dtype)[1::4])):
        storage = [random_tensor(count + 4, dtype, seed=count) for count in counts]
        before = [x.clone() for x in storage]
        scale_([x[1:-3] for x in storage], coefficient_of(value))
        for x, old in zip(storage, before, strict=True):
            assert same_bits(x[1:-3], scaled(old[1:-3], value))
            # Nothing outside the view is written.
            assert same_bits(x[:1], old[:1])
            assert same_bits(x[-3:], old[-3:])


@by_dtype(FLOAT8)
def test_scale_refuses_float8(dtype: torch.dtype) -> None:
    x = torch.ones(4, device=DEVICE)
    with pytest.raises(NotImplementedError, match=name_of(dtype)):
        scale_([x, torch.zeros(4, device=DEVICE).to(dtype)], coefficient_of(0.5))
    assert torch.equal(x, torch.ones_like(x))
