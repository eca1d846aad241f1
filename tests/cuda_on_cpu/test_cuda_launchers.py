"""The CUDA launchers over a replacement of CUDA's runtime: tickets, uploaded tables, streams, graphs.

Work runs when its stream is synchronized, not before, so memory that is reused too early leads to a wrong result. Only
a real GPU can show whether CUDA keeps the order that this runtime imitates.
"""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cuda_on_cpu import EmulatedKernels, arrays, pointer
from helpers.cuda_on_cpu_build import loaded
from helpers.exact import assert_rows_match

import gradstat
from gradstat import _fields
from gradstat import guard as guards
from gradstat._core import backends
from gradstat.adaptive._base import decide

COUNTERS = ("allocations", "pinned_allocations", "copies", "fills", "launches", "records", "waits", "devices_set")
ONE_SLOT = {"pinned_allocations": 1, "allocations": 1}  # the latter for its event
MANY = 750  # tensors, for which a table is uploaded
NO_STEP = None, None, None  # loss scale, verdict and counters: no decision about an optimizer step


@pytest.fixture
def library(kernels_on_host: ctypes.CDLL) -> ctypes.CDLL:
    return kernels_on_host


@pytest.fixture
def fresh(library: ctypes.CDLL, tmp_path: Path) -> ctypes.CDLL:
    """A new copy of the library, in the state before its first call in a process."""
    return loaded(shutil.copy(library._name, tmp_path / "fresh.so"))


class Stream:
    """A stream of the runtime, and calls that use it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = ctypes.c_void_p(library.new_stream())
        self.pending: list[object] = []  # memory that pending work will read and write

    def synchronize(self, *results: Result) -> None:
        """Runs what is pending, after which the results have to be right."""
        self.check(self.library.synchronize(self.handle))
        self.pending.clear()
        for result in results:
            result.assert_correct()

    def stats(self, tensors: list[np.ndarray]) -> Result:
        return Result(self, tensors, max_norm=1.0)

    def scale(self, tensors: list[np.ndarray], multiplier: np.ndarray) -> None:
        self.pending.append((tensors, multiplier))
        numbers = pointer(multiplier), ctypes.c_int64(0)
        self.check(self.library.start_scale(self.handle, 0, *arguments(tensors), *numbers))

    def unscale(self, tensors: list[np.ndarray], factor: np.ndarray) -> np.ndarray:
        table = np.full((len(tensors), len(_fields.FIELDS)), 1e33)
        self.pending.append((tensors, factor, table))
        no_norm = None, 0, ctypes.c_double(1.0), 0, None
        numbers = pointer(table), pointer(factor), *no_norm, *NO_STEP
        self.check(self.library.start_stats(self.handle, 0, *arguments(tensors), *numbers, 0))
        return table

    def clip(self, tensors: list[np.ndarray], max_norm: float, times: int = 1) -> Result:
        return Result(self, tensors, max_norm, times)

    @contextmanager
    def capture(self) -> Iterator[Callable[[Stream], None]]:
        """Captures the work given to the stream inside; yields a function that replays it on a stream afterwards."""
        graph = ctypes.c_void_p()
        self.library.begin_capture(self.handle)
        yield lambda stream: self.library.replay(graph, stream.handle)
        graph.value = self.library.end_capture(self.handle)

    def check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(self.library.error_text().decode())


class Result:
    """What one launch writes by the time its stream is synchronized."""

    def __init__(self, stream: Stream, tensors: list[np.ndarray], max_norm: float, scalings: int = 0) -> None:
        self.tensors = tensors
        self.max_norm = max_norm
        self.table = np.full((len(tensors), len(_fields.FIELDS)), 1e33)
        self.norm = np.full(1, 77, dtype=np.float32)
        self.multiplier = np.full(1, 77.0)
        stream.pending.append(self)
        norm = pointer(self.norm), 0, ctypes.c_double(max_norm), 0, pointer(self.multiplier)
        numbers = pointer(self.table), None, *norm, *NO_STEP
        stream.check(stream.library.start_stats(stream.handle, 0, *arguments(tensors), *numbers, scalings))

    def assert_correct(self, tensors: list[np.ndarray] | None = None) -> None:
        """Compares with ``tensors``: the contents of the tensors when the launch ran."""
        expected = [t.astype(np.float64) for t in tensors or self.tensors]
        column = dict(zip(_fields.NAMES, self.table.T, strict=True))
        np.testing.assert_allclose(column["sq_sum"], [np.square(t).sum() for t in expected], rtol=2e-7)
        np.testing.assert_array_equal(column["max"], [t.max() for t in expected])
        np.testing.assert_array_equal(column["first_nonfinite"], math.inf)
        norm = math.sqrt(sum(np.square(t).sum() for t in expected))
        assert self.norm[0] == pytest.approx(norm, rel=2e-7, abs=0.0)
        assert self.multiplier[0] == pytest.approx(min(1.0, self.max_norm / (norm + 1e-6)), rel=2e-7, abs=0.0)


def arguments(tensors: list[np.ndarray]) -> list[object]:
    # Kept alive by the caller's frame only during the call: launchers must copy what they need by then.
    return arrays([torch.from_numpy(tensor) for tensor in tensors])


def tensors(count: int, size: int = 50, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(size + i % 7).astype(np.float32) for i in range(count)]


def counts(library: ctypes.CDLL) -> dict[str, int]:
    values = np.zeros(len(COUNTERS), dtype=np.int64)
    library.counters(pointer(values))
    return dict(zip(COUNTERS, values.tolist(), strict=True))


def counts_since(library: ctypes.CDLL, before: dict[str, int]) -> dict[str, int]:
    """The counts since ``before``, without zeros."""
    return {name: value - before[name] for name, value in counts(library).items() if value != before[name]}


def test_a_check_or_an_unscaling_is_one_launch_and_nothing_else(library: ctypes.CDLL) -> None:
    stream = Stream(library)
    stream.stats(tensors(1))  # allocates the tickets of the stream
    before = counts(library)
    results = [stream.stats(tensors(n, 30_000 // max(n, 1), n)) for n in (0, 1, 5, 190, 600, 729, 730)]
    assert counts_since(library, before) == {"launches": 7}
    for n in (3, 190, 730):
        stream.unscale(tensors(n), np.array([0.25], dtype=np.float32))
    assert counts_since(library, before) == {"launches": 10}
    stream.synchronize(*results)


def test_a_table_is_uploaded_only_when_it_changed(library: ctypes.CDLL) -> None:
    stream, many = Stream(library), tensors(MANY)
    first = stream.stats(many)
    before = counts(library)
    again = [stream.stats(many) for _ in range(3)]
    assert counts_since(library, before) == {"launches": 3}
    multiplier = np.array([2.0])
    doubled = [2 * t for t in many]
    stream.scale(many, multiplier)
    assert counts_since(library, before) == {"launches": 4}
    after = stream.stats(many)
    others = stream.stats(tensors(MANY, 50, 9))  # as many and as large, at other addresses
    assert counts_since(library, before) == ONE_SLOT | {"copies": 1, "records": 1, "launches": 6}
    originals = [t.copy() for t in many]
    stream.synchronize()
    for result in (first, *again):
        result.assert_correct(originals)
    after.assert_correct(doubled)
    others.assert_correct()


def test_pending_tables_are_not_overwritten(library: ctypes.CDLL) -> None:
    stream = Stream(library)
    lists = [tensors(MANY + 30 * i, 20, i) for i in range(6)]
    results = [stream.stats(some) for some in lists]  # none has run yet
    stream.synchronize(*results)
    # All staging memory is free again: lists no larger than before allocate nothing.
    before = counts(library)
    results = [stream.stats(some) for some in lists[:2]]
    stream.synchronize(*results)
    assert counts_since(library, before) == {"copies": 2, "records": 2, "launches": 2}


def test_streams_are_independent(library: ctypes.CDLL) -> None:
    streams = [Stream(library) for _ in range(3)]
    lists = [[tensors(1, 40_000, 1), tensors(MANY, 30, 2)], [tensors(2, 20_000, 3), tensors(MANY + 30, 30, 4)]]
    results = [stream.stats(some) for pair in lists for some in pair for stream in streams]
    for stream in reversed(streams):
        stream.synchronize()
    for result in results:
        result.assert_correct()


@pytest.mark.parametrize(
    ("call", "count", "is_first"),
    [
        *(("stats", 3, True), ("stats", MANY, False)),
        *(("clip", 3, False), ("clip", MANY, True)),
        *(("unscale", 3, True), ("unscale", MANY, False)),
    ],
)
def test_a_captured_call_is_replayed_on_new_values_beside_other_work(
    fresh: ctypes.CDLL, call: str, count: int, is_first: bool
) -> None:
    """Also as the first call in a process: CUDA loads kernels at their first launch, which a capture refuses."""
    stream, other = Stream(fresh), Stream(fresh)
    some, eager = tensors(count, 9000 if count == 3 else 30, 5), tensors(4, 9000, 6)
    if not is_first:
        stream.stats(some)
        stream.synchronize()
    factor = np.array([0.5], dtype=np.float32)
    with stream.capture() as replay:
        if call == "unscale":
            table = stream.unscale(some, factor)
        else:
            captured = stream.stats(some) if call == "stats" else stream.clip(some, 1.0)
            table = captured.table
    for value in (0.5, 1.0, -3.0):
        factor[0] = value
        for tensor in some:
            tensor *= -50.0
        originals = [tensor.copy() for tensor in some]
        # Replays on another stream than the captured one, between eager launches on both.
        beside = [stream.stats(eager), other.stats(eager)]
        replay(other)
        beside.append(other.stats(some))
        other.synchronize()
        stream.synchronize(*beside)
        if call == "unscale":
            assert table.tobytes() == beside[-1].table.tobytes()
        else:
            captured.assert_correct(originals)
        by = value if call == "unscale" else captured.multiplier[0] if call == "clip" else 1.0
        assert equal(some, times(originals, by))
        table[:] = 1e33


def test_a_refused_allocation_is_reported_and_the_next_call_works(library: ctypes.CDLL) -> None:
    stream, many = Stream(library), tensors(MANY)
    for _ in range(3):  # tickets, table, pinned memory: one more is allocated each time
        library.fail_allocations(1)
        with pytest.raises(RuntimeError, match=r"gradstat: allocating .*: out of memory"):
            stream.stats(many)
    result = stream.stats(many)
    stream.synchronize(result)


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, a, b))


def times(tensors: list[np.ndarray], multiplier: float) -> list[np.ndarray]:
    return [tensor * np.float32(multiplier) for tensor in tensors]


@pytest.mark.parametrize(("count", "size"), [(3, 30_000), (730, 30), (731, 30)])
def test_a_clip_is_two_launches_and_writes_only_above_the_limit(library: ctypes.CDLL, count: int, size: int) -> None:
    stream, some = Stream(library), tensors(count, size)
    originals = [tensor.copy() for tensor in some]
    before = counts(library)
    result = stream.clip(some, 1.0)
    behind = stream.stats(some)
    assert counts_since(library, before)["launches"] == 3
    stream.synchronize()
    result.assert_correct(originals)
    assert result.multiplier[0] < 1
    assert equal(some, times(originals, result.multiplier[0]))
    behind.assert_correct()
    # Below the limit nothing is written.
    unclipped = [tensor.copy() for tensor in some]
    stream.clip(some, 1e9)
    stream.synchronize()
    assert equal(some, unclipped)


def test_scale_kernels_in_a_row_see_each_other(library: ctypes.CDLL) -> None:
    """As for tensors listed more than once; empty tensors among them leave blocks without work."""
    stream, some = Stream(library), [*tensors(5, 9000), np.zeros(0, dtype=np.float32)]
    originals = [tensor.copy() for tensor in some]
    result = stream.clip(some, 1.0, times=3)
    stream.synchronize()
    expected = originals
    for _ in range(3):
        expected = times(expected, result.multiplier[0])
    assert equal(some, expected)


@pytest.mark.parametrize(("fits", "blocks"), [(1, 2), (3, 6), (5, 10), (100_000, 73)])
def test_the_grid_is_what_the_device_holds(fresh: ctypes.CDLL, fits: int, blocks: int) -> None:
    """On a device with two multiprocessors; at most one block per tile of 4,096 elements."""
    fresh.set_blocks_that_fit(fits)
    stream, some = Stream(fresh), tensors(1, 73 * 4096)
    result = stream.stats(some)
    assert fresh.last_blocks() == blocks
    stream.synchronize(result)
    stream.stats(tensors(1, 3 * 4096))
    assert fresh.last_blocks() == min(blocks, 3)
    stream.synchronize()


def test_memory_stays_the_same_over_ten_thousand_steps(library: ctypes.CDLL) -> None:
    """The number, sizes and addresses of tensors change, and some tables are uploaded."""
    stream, random = Stream(library), np.random.default_rng(3)
    lists = [tensors(count, 9, count) for count in (1, 7, 300, 731, 1100)]
    for some in sorted(lists, key=len):
        stream.clip(some, 1.0)
        stream.synchronize()
    before = counts(library), library.bytes_allocated()
    library.run_kernels(0)  # kernels allocate nothing
    for step in range(10_000):
        count = int(random.integers(1, 5)) if step % 20 else 731 + int(random.integers(0, 250))
        offset = int(random.integers(0, 9))
        some = lists[-1][offset : offset + count]
        stream.clip(some, 1e9) if step % 2 else stream.stats(some)
        stream.synchronize()
    library.run_kernels(1)
    assert library.bytes_allocated() == before[1]
    assert {"allocations", "pinned_allocations", "fills"}.isdisjoint(counts_since(library, before[0]))


@pytest.mark.parametrize("count", [0, 1, 161, 730, 731, 5000])
def test_device_memory_is_kilobytes_and_eight_bytes_per_field_and_tensor(library: ctypes.CDLL, count: int) -> None:
    """The formula in docs/performance.md, for the six blocks of this device."""
    some, fields = tensors(count), len(_fields.FIELDS)
    blocks = min(6, max(count, 1))  # each of these tensors is one tile
    table = -(-(20 * count + 4 * (blocks + 2)) // 8) * 8 if count > library.table_capacity() else 0
    expected = 8 * fields * (count + 2 * blocks) + (blocks + 2) // 2 * 8 + table
    assert library.stats_bytes(*arguments(some)) == expected
    assert library.scale_bytes(*arguments(some)) == table


def test_every_replay_of_a_graph_decides_about_a_step_of_its_own(fresh: ctypes.CDLL) -> None:
    """Also if its first launch in the process is captured, provided statistics were launched before."""
    stream, norm = Stream(fresh), torch.ones((), dtype=torch.float64)
    kernels = EmulatedKernels(fresh, stream.handle)
    kernels.check([torch.ones(10)])
    clip, other = gradstat.AutoClip(50, window=5), gradstat.AutoClip(50, window=5)
    for each in (clip, other):
        each.multiplier(norm)
    with stream.capture() as replay:
        out = decide(clip, kernels, norm)
    for given in (3.0, 1.0, 7.0, 2.0, math.inf, 9.0, 4.0):
        norm.fill_(given)
        replay(stream)
        assert fresh.last_blocks() == 1
        stream.synchronize()
        np.testing.assert_allclose(out, [other.multiplier(norm).item(), given])
    torch.testing.assert_close(clip.state_dict()["tensors"], other.state_dict()["tensors"])


def test_every_replay_of_a_graph_guards_a_step_of_its_own(fresh: ctypes.CDLL) -> None:
    stream, guard = Stream(fresh), gradstat.SpikeGuard(window=8, max_norm=5.0)
    kernels = EmulatedKernels(fresh, stream.handle)
    kernels.check([torch.ones(10)])
    numbers, verdict = torch.ones(2, dtype=torch.float64), torch.tensor([0.0, 1.0, 1.0])
    counters = torch.zeros(3, dtype=torch.int64)
    asked = numbers, verdict, None, counters, ()
    guards.decide(guard, backends.resolve("native", "cpu"), *asked)
    with stream.capture() as replay:
        out = guards.decide(guard, kernels, *asked)
    for norm, skip, in_a_row in ((3.0, 0, 0), (7.0, 1, 1), (6.0, 1, 2), (5.0, 0, 0)):
        numbers[1] = norm
        replay(stream)
        stream.synchronize()
        assert out.tolist() == [skip, 1, 1, 4 * skip]
        assert guard.read().consecutive_refused == counters[2] == in_a_row
    assert counters.tolist() == [5, 2, 0]
    assert guard.read().by_norm == 2


# The kernels, where they differ from other backends: order of blocks, norms. As the backend "emulated" they run in the
# same tests as all others (tests/core, and every call of tools/gpu_gates/short_set.py) ------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_in_any_order_of_blocks(emulated_kernels: EmulatedKernels, dtype: torch.dtype) -> None:
    per_tile = 2**14 // dtype.itemsize
    values = [torch.randn(n).to(dtype) for n in (40 * per_tile + 5, 3, 7 * per_tile, 100, 2 * per_tile)]
    values[2].view(torch.uint8)[:8] = 0xFF  # NaN

    def measured() -> list[torch.Tensor]:
        norm, multiplier = torch.tensor([77.0, 77.0], dtype=torch.float64)
        table = emulated_kernels.measured(values, None, norm, multiplier=multiplier, device=2)
        return [numbers.view(torch.int64) for numbers in (table, norm)]

    first = measured()
    assert_rows_match(first[0].view(torch.float64), values, wide_tolerance=1e-13)
    for _ in range(5):
        assert all(map(torch.equal, measured(), first))


@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norm_and_multiplier(emulated_kernels: EmulatedKernels, norm_dtype: torch.dtype) -> None:
    values = [torch.randn(n) for n in (5000, 0, 12)]
    exact = torch.cat(values).double().norm()

    def asked(max_norm: float = 1.0, infinity: bool = False) -> tuple[torch.Tensor, float]:
        norm, multiplier = torch.tensor(77.0, dtype=norm_dtype), torch.tensor(77.0, dtype=torch.float64)
        emulated_kernels.measured(values, None, norm, max_norm, infinity, multiplier)
        return norm, multiplier.item()

    norm, multiplier = asked(2.0)
    torch.testing.assert_close(norm, exact.to(norm_dtype), rtol=1e-7, atol=0.0)
    assert multiplier == pytest.approx(2.0 / (exact.item() + 1e-6), rel=1e-7, abs=0.0)
    assert asked(1e9)[1] == asked(math.inf)[1] == 1.0
    assert asked(infinity=True)[0] == torch.cat(values).abs().max().to(norm_dtype)
    values.append(torch.tensor([1.0, math.inf]))
    assert asked() == (math.inf, 0.0)
    values.append(torch.tensor([math.nan]))
    assert all(math.isnan(number) for number in asked())
    for count in (0, 1, 700):  # nothing to read
        values[:] = [torch.zeros(0)] * count
        assert asked() == (0.0, 1.0)
