"""One suite for every backend: a table of cases, each compared with exact statistics of the same tensors."""

import ctypes
import math
import mmap
from collections.abc import Callable

import pytest
import torch
from helpers.devices import DEVICES, INTERPRETED, thinned, unscale_
from helpers.exact import COMPLEX, FLOAT8, REAL, assert_rows_match
from torch import Tensor

import gradstat
from gradstat import _fields
from gradstat._core import backends

Case = Callable[[torch.dtype, str], list[Tensor]]


def random(shape: int | tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, dtype=wide).to(dtype).to(device)


def with_values(values: list[float], dtype: torch.dtype, device: str, size: int = 5000) -> Tensor:
    """Random elements with special values among them, both in whole vectors and in the remainder."""
    out = random(size, dtype, device)
    for i, value in enumerate(values):
        out[(i * 1231 + 7) % size] = value
        out[size - 1 - i] = value
    return out


def full(value: float, dtype: torch.dtype, device: str, size: int = 3000) -> Tensor:
    return torch.full((size,), value, dtype=dtype, device=device)


def largest(dtype: torch.dtype) -> float:
    """The largest value such that the sum of 3000 of them is finite in float64."""
    return torch.finfo(dtype).max / (2**20 if dtype == torch.float64 else 1)


def around_tiles(dtype: torch.dtype, device: str) -> list[Tensor]:
    """Tensors of about the size of a GPU tile, 16 KB, at several alignments."""
    per_tile, vector = 2**14 // dtype.itemsize, 16 // dtype.itemsize
    sizes = [per_tile + more for more in (-vector - 1, -1, 0, 1, vector, vector + 1)]
    return [random(size + vector, dtype, device)[skip:][:size] for size in sizes for skip in (0, 1, vector - 1)]


def last_bits(dtype: torch.dtype, device: str) -> list[Tensor]:
    """Numbers that differ in their last bits only; for float64 these are in the lower of its two words."""
    steps = torch.randperm(5000) * torch.finfo(dtype).eps
    every = [base * (1 + steps.double()) for base in (1.0, -1.0, -3e-3, 7e2)]
    return [x.to(dtype).to(device) for x in (*every, 1e-3 + steps * (1 - 2 * torch.randint(2, (5000,))))]


def duplicates(dtype: torch.dtype, device: str) -> list[Tensor]:
    x = random(700, dtype, device)
    return [x, x, random(3, dtype, device), x]


def subnormals_among(dtype: torch.dtype, device: str) -> Tensor:
    tiny = torch.finfo(dtype).smallest_normal
    return torch.cat([random(300, dtype, device), random(300, dtype, device) * (tiny / 8)])


def other_sign(dtype: torch.dtype, device: str) -> list[Tensor]:
    """One positive among negatives and vice versa, at every place of a vector and in the remainder."""
    tensors = []
    for sign in (1, -1):
        for place in [*range(0, 66), 200, 4095, 4096, 4099]:
            x = sign * (random(4100, dtype, device).abs() + 1)
            x[place] = -sign
            tensors.append(x if place > 66 else x[: 67 + place])
    return tensors


BLOCK_EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 16385]
CASES: dict[str, Case] = {
    "zero-size": lambda t, d: [random(0, t, d), random((3, 0, 2), t, d), random(5, t, d), random(0, t, d)],
    "block-edges": lambda t, d: [random(n, t, d) for n in BLOCK_EDGES],
    "several-chunks": lambda t, d: [random(2 * 65536 + 321, t, d)],
    "around-tiles": around_tiles,
    "last-bits": last_bits,
    "duplicates": duplicates,
    "all-inf": lambda t, d: [full(math.inf, t, d), full(-math.inf, t, d, 70)],
    "specials": lambda t, d: [with_values([math.nan, math.inf, -math.inf, 0.0, -0.0], t, d)],
    "extremes": lambda t, d: [full(largest(t), t, d), full(torch.finfo(t).tiny, t, d), random(9, t, d)],
    "subnormals": lambda t, d: [full(torch.finfo(t).smallest_normal / 4, t, d), subnormals_among(t, d)],
    "one-sign": lambda t, d: [sign * random(n, t, d).abs() for sign in (1, -1) for n in (3, 70, 5000)],
    "one-of-other-sign": other_sign,
    # The shapes of pytorch#140066, at a hundredth of their size: empty tensors must not shift the rows of others.
    "empty-between": lambda t, d: [random(n, t, d) for n in (49152, 49152, 49152, 24576, 0, 0, 49152)],
    "mixed-types": lambda t, d: [random(17 * i % 701, [*REAL, *COMPLEX][i % 7], d) for i in range(100)],
    "many": lambda t, d: [*(random(1 + i % 40, t, d) for i in range(3000)), full(math.nan, t, d, 2), random(7, t, d)],
    "zeros-of-both-signs": lambda t, d: [with_values([0.0, -0.0], t, d, 600).abs(), -random(600, t, d).relu()],
}


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("case", CASES)
def test_every_field_is_exact(case: str, where: tuple[str, str]) -> None:
    backend, device = where
    turn = list(CASES).index(case) % len(REAL)
    for dtype in thinned(REAL[turn:] + REAL[:turn], where, 1):
        tensors = thinned(CASES[case](dtype, device), where, 17)
        assert_rows_match(gradstat.stats(tensors, backend=backend), tensors)


def test_several_chunks_of_triton_as_they_are() -> None:
    """In other tests chunks are shorter in its interpreter."""
    x = random(70_001, torch.bfloat16, DEVICES[-1])
    assert_rows_match(gradstat.stats([x, x[3:]], backend="triton"), [x, x[3:]])


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_pairs_may_be_aligned_only_to_their_parts(dtype: torch.dtype, where: tuple[str, str]) -> None:
    if where[0] == "triton" or where[1] != "cpu":
        pytest.skip("only memory of others is so")
    whole = random(3001, dtype, "cpu")
    whole[77] = math.nan
    memory = memoryview(bytearray(whole.view(torch.uint8).numpy().tobytes()))
    for begin in (0, dtype.itemsize // 2):
        x = torch.frombuffer(memory, dtype=dtype, count=3000, offset=begin)
        assert x.data_ptr() % dtype.itemsize in (0, dtype.itemsize // 2)
        assert_rows_match(gradstat.stats([x], backend=where[0]), [x])
        expected = torch.view_as_real(x) * 0.5
        assert_rows_match(unscale_(backends.resolve(*where), [x], torch.tensor(0.5)), [x])
        torch.testing.assert_close(torch.view_as_real(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_every_code(dtype: torch.dtype, where: tuple[str, str]) -> None:
    backend, device = where
    codes = torch.arange(256, dtype=torch.uint8).repeat(9)[3:].to(device)
    most = 5000 if where == INTERPRETED else 70_000
    same = [torch.full((n,), code, dtype=torch.uint8, device=device) for n, code in ((40, 0x35), (most, 0))]
    tensors = [x.view(dtype) for x in (codes, *same)]
    assert_rows_match(gradstat.stats(tensors, backend=backend), tensors)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, *FLOAT8], ids=str)
def test_every_length(dtype: torch.dtype, where: tuple[str, str]) -> None:
    """Every remainder of a step, with plain values, and with a NaN first, last or elsewhere."""
    backend, device = where
    tensors = []
    for size in thinned(range(301), where, 4):
        x = torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float32)
        bad = x.clone()
        if size:
            bad[(0, -1, size // 2)[size % 3]] = math.nan
        tensors += [x.to(dtype).to(device), bad.to(dtype).to(device)]
    assert_rows_match(gradstat.stats(tensors, backend=backend), tensors)


@pytest.mark.parametrize("where", [("native", "cpu"), ("emulated", "cpu")], indirect=True, ids="-".join)
def test_nothing_beside_a_tensor_is_read(where: tuple[str, str], kernels: backends.Kernels) -> None:
    """At both ends of memory, before and after which an access ends the process."""
    page, pages = mmap.PAGESIZE, 10
    memory = mmap.mmap(-1, (pages + 2) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for beside in (address, address + (pages + 1) * page):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(beside), ctypes.c_size_t(page), 0) == 0
    between = torch.frombuffer(memory, dtype=torch.uint8, count=pages * page, offset=page)
    for dtype in (*REAL, *COMPLEX, *FLOAT8):
        for size in (1, 5, 300, 3000 // dtype.itemsize, pages * page // dtype.itemsize):
            for start in (0, pages * page - size * dtype.itemsize):
                between.fill_(0x3B)
                x = between[start:][: size * dtype.itemsize].view(dtype)
                assert_rows_match(gradstat.stats([x], backend=where[0]), [x])
                kernels.scale_each_([x], torch.tensor([1.5], dtype=torch.float64))
                assert_rows_match(unscale_(kernels, [x], torch.tensor(0.5)), [x])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_more_zeros_than_16_bits_count(dtype: torch.dtype) -> None:
    """Enough to overflow a 16-bit lane of a vector of 32 lanes, if it were never flushed."""
    x = torch.zeros(66_000 * 32 + 5, dtype=dtype)
    x[7] = -0.0
    for last in (0.0, 3.0):
        x[-1] = last
        row = dict(zip(gradstat.FIELDS, gradstat.stats([x], backend="native")[0].tolist(), strict=True))
        assert row["zero_count"] == x.numel() - (last > 0)
        assert (row["min"], row["max"], row["sum"], row["sq_sum"]) == (0.0, last, last, last**2)


@pytest.mark.parametrize(
    ("shape", "dense"), [((9,), 0), ((9, 4), 1), ((9, 4), 0), ((5, 3, 4), 1), ((4, 3, 2, 5), 2), ((6, 0), 1), ((), 0)]
)
def test_sparse_is_measured_by_its_coalesced_values(shape: tuple[int, ...], dense: int, where: tuple[str, str]) -> None:
    """All but the index of the first bad element, which is that of the dense tensor."""
    backend, device = where
    draw = torch.Generator().manual_seed(len(shape) * 10 + dense)
    dtypes = (torch.float32, torch.bfloat16, torch.complex64)
    for count, dtype in thinned([*zip((0, 1, 2, 7, 8, 9), 2 * dtypes, strict=True)], where, 3):
        rows = [torch.randint(0, size, (count,), generator=draw) for size in shape[: len(shape) - dense]]
        indices = torch.stack(rows) if rows else torch.zeros(0, count, dtype=torch.int64)
        values = torch.randn(count, *shape[len(shape) - dense :], dtype=dtype, generator=draw)
        bad = torch.rand(values.shape, generator=draw) < 0.3
        values[bad] = math.nan
        # Repeated indices are added.
        sparse = torch.sparse_coo_tensor(indices, values, shape, device=device, check_invariants=True)
        held = [torch.ones(2, device=device), sparse.coalesce().values()]
        table = gradstat.stats([held[0], sparse], backend=backend)
        bad = gradstat.stats(held, backend=backend)[:, _fields.INDEX["first_nonfinite"]]
        table[:, _fields.INDEX["first_nonfinite"]] = bad  # of the values
        assert_rows_match(table, held)
        stats = gradstat.check_tensors({"w": sparse, "v": torch.ones(2, device=device)}, backend=backend)["w"]
        expected = sparse.to_dense().isnan().nonzero()
        assert stats.shape == shape
        assert stats.numel == sparse.coalesce().values().numel()
        assert stats.nan_count == len(expected)
        assert stats.first_nonfinite == (tuple(expected[0].tolist()) if len(expected) else None)


def test_lazy_zeros_conjugates_and_negations_are_what_they_stand_for(where: tuple[str, str]) -> None:
    backend, device = where
    x = random(300, torch.complex64, device)
    lazy = [torch._efficientzerotensor((3, 2), device=device), x.conj(), x.imag, x.conj().imag]
    written_out = [torch.zeros(3, 2), x.conj().resolve_conj(), x.imag, x.conj().imag.resolve_neg()]
    assert_rows_match(gradstat.stats(lazy, backend=backend), written_out)


def test_cpu_results_do_not_depend_on_the_number_of_threads() -> None:
    tensors = [random(n, torch.float32, "cpu") for n in (1_500_000, 900_001, 4, 77)]
    before, kernels = torch.get_num_threads(), backends.resolve("native", "cpu")
    tables, products = [], []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            copies = [tensor.clone() for tensor in tensors]
            tables.append(torch.cat([gradstat.stats(tensors), unscale_(kernels, copies, torch.tensor(0.3))]))
            kernels.scale_each_(copies, torch.tensor([1.5, -1.0, 3.0, 0.1]).double())
            products.append(torch.cat(copies))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, same[0]) for same in (tables, products) for one in same)
    assert_rows_match(tables[0][: len(tensors)], tensors)


@pytest.mark.cuda
def test_more_than_two_billion_elements() -> None:
    """pytorch#169930: 2**31 + 1 elements, of which the last ones are special."""
    x = torch.zeros(2**31 + 1, dtype=torch.bfloat16, device="cuda")
    x[-1] = math.inf
    x[-2] = 3.0
    for backend in ("native", "triton"):
        row = dict(zip(gradstat.FIELDS, gradstat.stats([x], backend=backend)[0].tolist(), strict=True))
        assert row["first_nonfinite"] == 2**31
        assert row["zero_count"] == 2**31 - 1
        assert row["max"] == 3.0
