"""The CUDA kernels, compiled by g++ against a small emulator and held to an exact reference.

What this proves is the logic of the device code: peeling, tiles, segments, tickets, the exact path and all
arithmetic. What it cannot prove is the memory model of a real GPU; the launchers have test_cuda_launchers.py.
"""

import ctypes
import math

import numpy as np
import pytest
import torch
from exact import Account, assert_rows, rounded_product
from fuzzing import FILLS
from fuzzing import KINDS as KINDS_OF_BITS
from host_build import build, needs_compiler
from host_kernels import DTYPES, Piece, arrays, pointer, stats

from gradstat import _fields
from gradstat._core import norms

CAN_PAIR = (torch.float32, torch.float16, torch.float64)
KINDS = [(dtype, False) for dtype in DTYPES] + [(dtype, True) for dtype in CAN_PAIR]

pytestmark = needs_compiler


@pytest.fixture(scope="session")
def library(kernels_on_host: ctypes.CDLL) -> ctypes.CDLL:
    return kernels_on_host


# Macros of benchmarks/gpu_variants.py that change what the kernels do, and not only how fast.
VARIANT = ("RANGES_PER_BLOCK=4", "SMALL_TENSOR_BYTES=16384", "PREFETCH_NEXT_TENSOR")


@pytest.fixture(scope="session", params=["as shipped", "to be measured"])
def any_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if request.param == "as shipped":
        shipped: ctypes.CDLL = request.getfixturevalue("library")
        return shipped
    return build("kernels.cpp", tmp_path_factory.mktemp("variant"), macros=VARIANT)


@pytest.mark.parametrize("loss_scale", [None, 64.0, 1e-3, 0.0, math.inf])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_the_last_block_decides_about_a_step(library: ctypes.CDLL, loss_scale: float | None, bad: float | None) -> None:
    """As the specification, whichever block comes last; every launch counts once."""
    values = [torch.randn(30_001), torch.randn(7), torch.randn(50_000).bfloat16()]
    if bad is not None:
        values[2][40_123] = bad
    pieces = [Piece(tensor) for tensor in values]
    counters = np.array([10, 3, 2])
    expected_counters = torch.from_numpy(counters.copy())
    for seed in range(3):
        verdict = np.full(3, 55.0, dtype=np.float32)
        step = {"loss_scale": loss_scale, "verdict": verdict, "counters": counters}
        table, norm, coefficient = stats(library, pieces, 9, seed, None, torch.float64, 2.0, **step)
        scale_tensor = None if loss_scale is None else torch.tensor(loss_scale)
        expected = norms.decide(torch.from_numpy(table), norms.StepRequest(2.0, scale_tensor, expected_counters))
        np.testing.assert_allclose(verdict, expected.verdict.numpy(), rtol=1e-6)
        np.testing.assert_allclose(norm.item(), expected.norm.item(), rtol=1e-12)
        np.testing.assert_allclose(coefficient, expected.numbers[0].item(), rtol=1e-12)
        assert counters.tolist() == expected_counters.tolist()
        assert verdict[0] == (bad is not None or loss_scale in (0.0, math.inf))


def scale(library: ctypes.CDLL, pieces: list[Piece], coefficient: float, blocks: int = 5, seed: int = 0) -> None:
    library.run_scale(*arrays(pieces), blocks, seed, pointer(np.array([coefficient])), ctypes.c_int64(0))


def scale_each(library: ctypes.CDLL, pieces: list[Piece], coefficients: list[float], blocks: int = 5) -> None:
    library.run_scale(*arrays(pieces), blocks, 0, pointer(np.array(coefficients)), ctypes.c_int64(1))


def exact_norm(pieces: list[Piece]) -> float:
    return float(Account(np.concatenate([piece.doubles().reshape(-1, 1) for piece in pieces])).norm)


def check(pieces: list[Piece], table: np.ndarray) -> None:
    labels = [f"{p.values.dtype} pair={p.is_pair} {p.numel}+{p.offset}" for p in pieces]
    accounts, dtypes = [Account(piece.doubles()) for piece in pieces], [piece.values.dtype for piece in pieces]
    assert_rows(torch.from_numpy(table), accounts, dtypes, labels, wide_tolerance=1e-13)


def random_values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64).mul(0.7).to(dtype)


def random_piece(dtype: torch.dtype, is_pair: bool, numel: int, seed: int, offset: int = 0) -> Piece:
    """`offset` is taken for as much as fits between 16-byte boundaries."""
    element = dtype.itemsize * (2 if is_pair else 1)
    return Piece(random_values(dtype, numel * (2 if is_pair else 1), seed), is_pair, offset % max(16 // element, 1))


def mixed(count: int, first: float | None = None) -> list[Piece]:
    """Tensors of all types, three of each in a row, mostly small; each begins with ``first``."""
    random, pieces = np.random.default_rng(count), []
    for number in range(count):
        dtype, is_pair = KINDS[number // 3 % len(KINDS)]
        made = random_piece(dtype, is_pair, int(random.integers(0, 60 if number % 40 else 9000)), number)
        if first is not None and made.numel:
            made.values[0] = first
            made = Piece(made.values, is_pair)
        pieces.append(made)
    return pieces


def sizes_around_tiles(tile: int, element: int) -> list[int]:
    per_tile, vector = tile // element, 16 // element
    around = [per_tile + d for d in (-vector - 1, -1, 0, 1, vector, vector + 1)]
    return [0, 1, 2, max(vector - 1, 1), vector, vector + 1, 255, 256 * vector - 1, 256 * vector + 1, *around]


@pytest.mark.parametrize(("dtype", "is_pair"), KINDS)
def test_sizes_and_alignments(library: ctypes.CDLL, dtype: torch.dtype, is_pair: bool) -> None:
    element = dtype.itemsize * (2 if is_pair else 1)
    sizes = sizes_around_tiles(library.tile_bytes(), element)
    offsets = {0, 1 % (16 // element), 16 // element - 1}
    pieces = [random_piece(dtype, is_pair, numel, numel, offset) for numel in sizes for offset in offsets]
    for blocks in (1, 4, 1000):
        check(pieces, stats(library, pieces, blocks, seed=blocks)[0])


def special_values(dtype: torch.dtype) -> list[float]:
    numbers = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0]
    if dtype.itemsize > 1:
        info = torch.finfo(dtype)
        numbers += [info.max, info.min, info.tiny, info.smallest_normal / 2, 1e-30, 1e30, 3e-7]
    if dtype == torch.float64:
        numbers += [1e200, -1e200, 1e-200, 1e-310, 5e-324]
    return numbers


def with_special_values(library: ctypes.CDLL, dtype: torch.dtype, is_pair: bool, background: float) -> list[Piece]:
    """For each special value a tensor of two tiles with some of it, the first or the last element among them."""
    random, pieces = np.random.default_rng(5), []
    numel = 2 * library.tile_bytes() // dtype.itemsize + 70
    for number, special in enumerate(special_values(dtype)):
        values = random_values(dtype, numel, number).double() * background
        values[random.choice(numel, 3, replace=False)] = special
        values[[0, numel - 1][number % 2]] = special
        offset = number % 3 if dtype.itemsize * (2 if is_pair else 1) * (number % 3) < 16 else 0
        pieces.append(Piece(values.to(dtype), is_pair, offset))
    return pieces


@pytest.mark.parametrize(("dtype", "is_pair"), KINDS)
@pytest.mark.parametrize("background", [1.0, 0.0, 1e-25])
def test_special_values(library: ctypes.CDLL, dtype: torch.dtype, is_pair: bool, background: float) -> None:
    pieces = with_special_values(library, dtype, is_pair, background)
    check(pieces, stats(library, pieces, blocks=9, seed=3)[0])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize <= 2])
def test_every_bit_pattern(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Every 8-bit and 16-bit number, each alone in a vector so that none hides behind another."""
    integers = torch.uint8 if dtype.itemsize == 1 else torch.int16
    every = torch.arange(2 ** (8 * dtype.itemsize)).to(integers)
    if dtype.itemsize == 2:
        check([Piece(every.view(dtype))], stats(library, [Piece(every.view(dtype))])[0])
        every = every[:: 2**16 // 256]
    lone = torch.zeros(every.numel(), 16 // dtype.itemsize, dtype=integers)
    lone[torch.arange(every.numel()), torch.arange(every.numel()) % lone.shape[1]] = every
    pieces = [Piece(vector.contiguous().view(dtype)) for vector in lone]
    check(pieces, stats(library, pieces, blocks=50)[0])


@pytest.mark.parametrize("is_pair", [False, True])
def test_doubles_that_differ_in_their_last_bits(library: ctypes.CDLL, is_pair: bool) -> None:
    """They are compared in two words, of which all but the lower agree here."""
    random = np.random.default_rng(4)
    pieces = []
    for base in (1.0, -1.0, -3e-100, 7e50):
        bits = np.full(1, base).view(np.int64) + random.permutation(5000)
        pieces.append(Piece(torch.from_numpy(bits.view(np.float64).copy()), is_pair))
    mixed = np.where(random.random(5000) < 0.5, -1.0, 1.0) * np.spacing(1.0) * random.permutation(5000)
    pieces.append(Piece(torch.from_numpy(1e-3 + mixed), is_pair))
    check(pieces, stats(library, pieces)[0])


@pytest.mark.parametrize("seed", range(6))
def test_random_bits(library: ctypes.CDLL, seed: int) -> None:
    """NaN of every payload, subnormal numbers, squares that overflow or vanish, beside and among ordinary ones."""
    rng, pieces = np.random.default_rng(seed), []
    for number in range(160):
        kind = KINDS_OF_BITS[number % len(KINDS_OF_BITS)]
        numel = int(rng.choice([1, 2, 15, 16, 17, 40, 300, 4000]))
        bits = list(FILLS.values())[rng.integers(len(FILLS))](kind.format, rng, numel * kind.parts)
        real = kind.dtype.to_real() if kind.parts == 2 else kind.dtype
        values = torch.from_numpy(bits.view(np.uint8)).view(real)
        pieces.append(Piece(values, kind.parts == 2, number % max(16 // kind.dtype.itemsize, 1)))
    check(pieces, stats(library, pieces, blocks=11, seed=seed)[0])


@pytest.mark.parametrize("exponent", [0, 30, -20, -22, -30, 153, 200, -157, -200])
def test_norm_where_squares_leave_the_range(library: ctypes.CDLL, exponent: int) -> None:
    """Those of float32 and float64 are infinite, subnormal or nothing, or finite while their sum is not."""
    for dtype in [torch.float64] if abs(exponent) > 30 else [torch.float32, torch.bfloat16]:
        pieces = [Piece(random_values(torch.float64, 30000, 0).mul(10.0**exponent).to(dtype))]
        table, norm, _ = stats(library, pieces, norm_dtype=torch.float64)
        check(pieces, table)
        assert norm.item() == pytest.approx(exact_norm(pieces), rel=1e-7, abs=0)


def test_thousands_of_tensors_of_all_kinds(any_library: ctypes.CDLL) -> None:
    """More than the parameters of a launch hold, and each smaller table too."""
    library = any_library
    assert 3000 > library.table_capacity() > 1200
    for count, blocks in ((3000, 64), (1200, 4000), (500, 3), (100, 20)):
        pieces = mixed(count)
        table, norm, _ = stats(library, pieces, blocks, seed=count, norm_dtype=torch.float64)
        check(pieces, table)
        assert norm.item() == pytest.approx(exact_norm(pieces), rel=1e-7, abs=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_in_any_order_of_blocks(any_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    library = any_library
    per_tile = library.tile_bytes() // dtype.itemsize
    pieces = [Piece(random_values(dtype, n, n)) for n in (40 * per_tile + 5, 3, 7 * per_tile, 100, 2 * per_tile)]
    pieces[2].bytes[:8] = 0xFF  # NaN
    first = stats(library, pieces, blocks=23, seed=0, norm_dtype=torch.float64)
    tickets = np.zeros(library.most_ranges(23) + 2, dtype=np.uint32)
    for seed in range(1, 6):
        again = stats(library, pieces, 23, seed, tickets, torch.float64)
        assert again[0].tobytes() == first[0].tobytes()
        assert np.float64(again[1]).tobytes() == np.float64(first[1]).tobytes()
    pieces[2] = Piece(pieces[2].now())
    check(pieces, first[0])


@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norm_and_coefficient(library: ctypes.CDLL, norm_dtype: torch.dtype) -> None:
    pieces = [Piece(random_values(torch.float32, n, n)) for n in (5000, 0, 12)]
    exact = exact_norm(pieces)
    _, norm, coefficient = stats(library, pieces, norm_dtype=norm_dtype, max_norm=2.0)
    if norm_dtype == torch.float64:
        assert norm.item() == pytest.approx(exact, rel=1e-7, abs=0.0)
    else:
        assert norm == torch.tensor(exact, dtype=torch.float64).to(norm_dtype)
    assert coefficient == pytest.approx(2.0 / (exact + 1e-6), rel=1e-7, abs=0.0)
    assert stats(library, pieces, norm_dtype=norm_dtype, max_norm=1e9)[2] == 1.0
    assert stats(library, pieces, norm_dtype=norm_dtype, max_norm=math.inf)[2] == 1.0
    largest = stats(library, pieces, norm_dtype=norm_dtype, infinity=True)[1]
    assert largest == max(piece.values.abs().max() for piece in pieces if piece.numel).to(norm_dtype)
    pieces.append(Piece(torch.tensor([1.0, math.inf])))
    assert stats(library, pieces, norm_dtype=norm_dtype)[1:] == (math.inf, 0.0)
    pieces.append(Piece(torch.tensor([math.nan])))
    _, norm, coefficient = stats(library, pieces, norm_dtype=norm_dtype)
    assert norm.isnan()
    assert math.isnan(coefficient)


@pytest.mark.parametrize("count", [0, 1, 700])
def test_nothing_to_read(library: ctypes.CDLL, count: int) -> None:
    pieces = [Piece(torch.zeros(0)) for _ in range(count)]
    table, norm, coefficient = stats(library, pieces, norm_dtype=torch.float32)
    assert (norm, coefficient) == (0.0, 1.0)
    assert (table == [field.identity for field in _fields.FIELDS]).all()


def test_pairs_aligned_only_to_their_parts(library: ctypes.CDLL) -> None:
    for dtype in CAN_PAIR:
        values = random_values(dtype, 3000, 0)
        values[77] = math.nan
        whole = Piece(torch.cat([values[:1], values]))
        misaligned = Piece(values, is_pair=True)
        misaligned.address, misaligned.bytes = whole.address + dtype.itemsize, whole.bytes[dtype.itemsize :]
        check([misaligned], stats(library, [misaligned])[0])
        scale(library, [misaligned], 0.5)
        assert same(misaligned.now(), values * 0.5)
        table, _, _ = stats(library, [misaligned], factor=0.5)
        assert same(misaligned.now(), values * 0.25)
        check([Piece(misaligned.now(), is_pair=True)], table)


def product(values: torch.Tensor, coefficient: float) -> torch.Tensor:
    return rounded_product(values, torch.tensor(coefficient, dtype=torch.float64), values.dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.double(), b.double()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def assert_nothing_around(piece: Piece) -> None:
    begin = piece.address - piece.memory.ctypes.data
    assert (piece.memory[:begin] == 0xA5).all()
    assert (piece.memory[begin + len(piece.bytes) :] == 0xA5).all()


def assert_scaled(pieces: list[Piece], before: list[torch.Tensor], coefficients: list[float]) -> None:
    for piece, values, coefficient in zip(pieces, before, coefficients, strict=True):
        assert same(piece.now(), product(values, coefficient))
        assert_nothing_around(piece)


@pytest.mark.parametrize(("dtype", "is_pair"), KINDS)
def test_scale(library: ctypes.CDLL, dtype: torch.dtype, is_pair: bool) -> None:
    sizes = sizes_around_tiles(library.tile_bytes(), dtype.itemsize * (2 if is_pair else 1))
    for coefficient in (0.3, 1e-4, 7.0, math.nan):
        pieces = [random_piece(dtype, is_pair, numel, seed, seed) for seed, numel in enumerate(sizes)]
        for blocks in (1, 6):
            before = [piece.now() for piece in pieces]
            scale(library, pieces, coefficient, blocks, seed=blocks)
            assert_scaled(pieces, before, [coefficient] * len(pieces))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize <= 2])
@pytest.mark.parametrize("coefficient", [0.25, 0.7301, 3e-5, 300.0, math.inf])
def test_scale_rounds_like_torch(library: ctypes.CDLL, dtype: torch.dtype, coefficient: float) -> None:
    integers = torch.uint8 if dtype.itemsize == 1 else torch.int16
    values = torch.arange(2 ** (8 * dtype.itemsize)).to(integers).view(dtype)
    piece = Piece(values)
    scale(library, [piece], coefficient)
    assert same(piece.now(), product(values, coefficient))


def test_scale_mixes_types_and_leaves_everything_alone_at_one(library: ctypes.CDLL) -> None:
    pieces = mixed(2000, math.nan)
    memory = [piece.memory.copy() for piece in pieces]
    scale(library, pieces, 1.0)
    assert all((piece.memory == before).all() for piece, before in zip(pieces, memory, strict=True))
    scale(library, pieces, 0.77, blocks=33)
    assert_scaled(pieces, [piece.values for piece in pieces], [0.77] * len(pieces))


def test_scale_each_takes_a_coefficient_for_each_and_skips_ones(library: ctypes.CDLL) -> None:
    """Neighbouring 8-bit tensors of one type with different coefficients among them."""
    random = np.random.default_rng(6)
    for count, blocks in ((12, 5), (150, 1), (2000, 33)):
        pieces = mixed(count, math.nan)
        coefficients = random.choice([1.0, 0.77, -3.0, math.nan, 1e-3], count).tolist()
        memory = [piece.memory.copy() for piece in pieces]
        scale_each(library, pieces, coefficients, blocks)
        assert_scaled(pieces, [piece.values for piece in pieces], coefficients)
        for piece, before, coefficient in zip(pieces, memory, coefficients, strict=True):
            assert coefficient != 1 or (piece.memory == before).all()


FACTORS = (1 / 1024, 0.3, 7.0, 1.0, math.nan, math.inf)


def assert_unscale_is_scale_and_stats(library: ctypes.CDLL, pieces: list[Piece], factor: float, blocks: int) -> None:
    """In every bit, of the table as of the memory, around which nothing is written."""
    twins = [Piece(piece.values, piece.is_pair, piece.offset) for piece in pieces]
    tickets = np.zeros(library.most_ranges(blocks) + 2, dtype=np.uint32)
    table, _, _ = stats(library, pieces, blocks, seed=blocks, tickets=tickets, factor=factor)
    scale(library, twins, float(np.float32(factor)), blocks)
    assert table.tobytes() == stats(library, twins, blocks)[0].tobytes()
    for piece, twin in zip(pieces, twins, strict=True):
        assert (piece.bytes == twin.bytes).all()
        assert_nothing_around(piece)


@pytest.mark.parametrize(("dtype", "is_pair"), KINDS)
def test_unscale_sizes_and_alignments(library: ctypes.CDLL, dtype: torch.dtype, is_pair: bool) -> None:
    sizes = sizes_around_tiles(library.tile_bytes(), dtype.itemsize * (2 if is_pair else 1))
    for factor, blocks in zip(FACTORS, (1, 4, 1000, 4, 1000, 1), strict=True):
        pieces = [random_piece(dtype, is_pair, numel, seed, seed + blocks) for seed, numel in enumerate(sizes)]
        assert_unscale_is_scale_and_stats(library, pieces, factor, blocks)


@pytest.mark.parametrize(("dtype", "is_pair"), KINDS)
def test_unscale_special_values(library: ctypes.CDLL, dtype: torch.dtype, is_pair: bool) -> None:
    """Read twice by the exact path, they are still multiplied once; also where the product leaves the range."""
    for factor, background in zip(FACTORS, (1.0, 1e-25, 0.0, 1.0, 1e-25, 1.0), strict=True):
        pieces = with_special_values(library, dtype, is_pair, background)
        assert_unscale_is_scale_and_stats(library, pieces, factor, 9)


def test_unscale_mixes_types_and_measures_the_products(any_library: ctypes.CDLL) -> None:
    """More tensors than the parameters of a launch hold, and each smaller table too; against the exact account."""
    for count, blocks in ((2500, 64), (1200, 4000), (500, 3), (100, 20)):
        pieces = mixed(count)
        table, _, _ = stats(any_library, pieces, blocks, seed=count, factor=0.3)
        assert_scaled(pieces, [piece.values for piece in pieces], [float(np.float32(0.3))] * count)
        check([Piece(piece.now(), piece.is_pair) for piece in pieces], table)
