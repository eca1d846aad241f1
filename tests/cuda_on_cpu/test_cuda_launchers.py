"""The CUDA launchers over a replacement of CUDA's runtime: tickets, uploaded tables, streams, graphs.

Work runs when its stream is synchronized, not before, so memory that is reused too early leads to a wrong result. Only
a real GPU can show whether CUDA keeps the order that this runtime imitates.
"""

from __future__ import annotations

import ctypes
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cuda_on_cpu import EmulatedKernels, Stream, arrays, pointer
from helpers.cuda_on_cpu_build import loaded
from helpers.exact import assert_rows_match
from torch import Tensor

import gradstat
from gradstat import _fields
from gradstat import guard as guards
from gradstat._core import backends
from gradstat.adaptive._base import decide

COUNTERS = ("allocations", "pinned_allocations", "copies", "fills", "launches", "records", "waits", "devices_set")
ONE_SLOT = {"pinned_allocations": 1, "allocations": 1}  # the latter for its event
MANY = 750  # tensors, for which a table is uploaded


@pytest.fixture
def library(kernels_on_host: ctypes.CDLL) -> ctypes.CDLL:
    return kernels_on_host


@pytest.fixture
def fresh(library: ctypes.CDLL, tmp_path: Path) -> ctypes.CDLL:
    """A new copy of the library, in the state before its first call in a process."""
    return loaded(shutil.copy(library._name, tmp_path / "fresh.so"))


class Result:
    """What one launch writes by the time its stream is synchronized; with ``scalings``, a clip."""

    def __init__(self, stream: Stream, tensors: list[Tensor], max_norm: float = 1.0, scalings: int = 0) -> None:
        self.tensors, self.max_norm = tensors, max_norm
        self.norm, self.multiplier = torch.tensor(77.0), torch.tensor(77.0, dtype=torch.float64)
        self.table = stream.stats(tensors, None, self.norm, max_norm, False, self.multiplier, scalings=scalings)

    def assert_correct(self, tensors: list[Tensor] | None = None) -> None:
        """Compares with ``tensors``: the contents of the tensors when the launch ran."""
        norm = assert_rows_match(self.table, tensors or self.tensors) if self.tensors else 0.0
        assert self.norm.item() == pytest.approx(norm, rel=2e-7, abs=0.0)
        assert self.multiplier.item() == pytest.approx(min(1.0, self.max_norm / (norm + 1e-6)), rel=2e-7, abs=0.0)


def synchronize(stream: Stream, *results: Result) -> None:
    """Runs what is pending, after which the results have to be right."""
    stream.synchronize()
    for result in results:
        result.assert_correct()


def drawn(count: int, size: int = 50, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size + i % 7, generator=draw) for i in range(count)]


def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def times(tensors: list[Tensor], multiplier: float | Tensor) -> list[Tensor]:
    return [tensor * float(multiplier) for tensor in tensors]


def counts(library: ctypes.CDLL) -> dict[str, int]:
    values = np.zeros(len(COUNTERS), dtype=np.int64)
    library.counters(pointer(values))
    return dict(zip(COUNTERS, values.tolist(), strict=True))


def counts_since(library: ctypes.CDLL, before: dict[str, int]) -> dict[str, int]:
    """The counts since ``before``, without zeros."""
    return {name: value - before[name] for name, value in counts(library).items() if value != before[name]}


def test_a_check_or_an_unscaling_is_one_launch_and_nothing_else(library: ctypes.CDLL) -> None:
    stream = Stream(library)
    Result(stream, drawn(1))  # allocates the tickets of the stream
    before = counts(library)
    results = [Result(stream, drawn(n, 30_000 // max(n, 1), n)) for n in (0, 1, 5, 190, 600, 729, 730)]
    assert counts_since(library, before) == {"launches": 7}
    for n in (3, 190, 730):
        stream.stats(drawn(n), torch.tensor(0.25))
    assert counts_since(library, before) == {"launches": 10}
    synchronize(stream, *results)


def test_a_table_is_uploaded_only_when_it_changed(library: ctypes.CDLL) -> None:
    stream, many = Stream(library), drawn(MANY)
    first = Result(stream, many)
    before = counts(library)
    again = [Result(stream, many) for _ in range(3)]
    assert counts_since(library, before) == {"launches": 3}
    doubled = times(many, 2.0)
    stream.scale(many, torch.tensor(2.0, dtype=torch.float64))
    assert counts_since(library, before) == {"launches": 4}
    after = Result(stream, many)
    others = Result(stream, drawn(MANY, 50, 9))  # as many and as large, at other addresses
    assert counts_since(library, before) == ONE_SLOT | {"copies": 1, "records": 1, "launches": 6}
    originals = times(many, 1.0)
    stream.synchronize()
    for result in (first, *again):
        result.assert_correct(originals)
    after.assert_correct(doubled)
    others.assert_correct()


def test_pending_tables_are_not_overwritten(library: ctypes.CDLL) -> None:
    stream = Stream(library)
    lists = [drawn(MANY + 30 * i, 20, i) for i in range(6)]
    results = [Result(stream, some) for some in lists]  # none has run yet
    synchronize(stream, *results)
    # All staging memory is free again: lists no larger than before allocate nothing.
    before = counts(library)
    results = [Result(stream, some) for some in lists[:2]]
    synchronize(stream, *results)
    assert counts_since(library, before) == {"copies": 2, "records": 2, "launches": 2}


def test_streams_are_independent(library: ctypes.CDLL) -> None:
    streams = [Stream(library) for _ in range(3)]
    lists = [drawn(1, 40_000, 1), drawn(MANY, 30, 2), drawn(2, 20_000, 3), drawn(MANY + 30, 30, 4)]
    results = [Result(stream, some) for some in lists for stream in streams]
    for stream in reversed(streams):
        stream.synchronize()
    for result in results:
        result.assert_correct()


@pytest.mark.parametrize(
    ("call", "count", "is_first"),
    [(call, count, (count == 3) is (call != "clip")) for call in ("stats", "clip", "unscale") for count in (3, MANY)],
)
def test_a_captured_call_is_replayed_on_new_values_beside_other_work(
    fresh: ctypes.CDLL, call: str, count: int, is_first: bool
) -> None:
    """Also as the first call in a process: CUDA loads kernels at their first launch, which a capture refuses."""
    stream, other = Stream(fresh), Stream(fresh)
    some, eager = drawn(count, 9000 if count == 3 else 30, 5), drawn(4, 9000, 6)
    if not is_first:
        synchronize(stream, Result(stream, some))
    factor = torch.tensor(0.5)
    with stream.capture() as replay:
        if call == "unscale":
            table = stream.stats(some, factor)
        else:
            captured = Result(stream, some, scalings=int(call == "clip"))
            table = captured.table
    for value in (0.5, 1.0, -3.0):
        factor.fill_(value)
        for tensor in some:
            tensor *= -50.0
        originals = times(some, 1.0)
        # Replays on another stream than the captured one, between eager launches on both.
        beside = [Result(stream, eager), Result(other, eager)]
        replay(other)
        beside.append(Result(other, some))
        other.synchronize()
        synchronize(stream, *beside)
        if call == "unscale":
            assert torch.equal(table, beside[-1].table)
        else:
            captured.assert_correct(originals)
        by = value if call == "unscale" else captured.multiplier if call == "clip" else 1.0
        assert are_equal(some, times(originals, by))
        table.fill_(1e33)


def test_a_refused_allocation_is_reported_and_the_next_call_works(library: ctypes.CDLL) -> None:
    stream, many = Stream(library), drawn(MANY)
    for _ in range(3):  # tickets, table, pinned memory: one more is allocated each time
        library.fail_allocations(1)
        with pytest.raises(RuntimeError, match=r"gradstat: allocating .*: out of memory"):
            Result(stream, many)
    synchronize(stream, Result(stream, many))


@pytest.mark.parametrize(("count", "size"), [(3, 30_000), (730, 30), (731, 30)])
def test_a_clip_is_two_launches_and_writes_only_above_the_limit(library: ctypes.CDLL, count: int, size: int) -> None:
    stream, some = Stream(library), drawn(count, size)
    originals = times(some, 1.0)
    before = counts(library)
    result = Result(stream, some, scalings=1)
    behind = Result(stream, some)
    assert counts_since(library, before)["launches"] == 3
    stream.synchronize()
    result.assert_correct(originals)
    assert result.multiplier < 1
    assert are_equal(some, times(originals, result.multiplier))
    behind.assert_correct()
    # Below the limit nothing is written.
    unclipped = times(some, 1.0)
    Result(stream, some, 1e9, 1)
    stream.synchronize()
    assert are_equal(some, unclipped)


def test_scale_kernels_in_a_row_see_each_other(library: ctypes.CDLL) -> None:
    """As for tensors listed more than once; empty tensors among them leave blocks without work."""
    stream, some = Stream(library), [*drawn(5, 9000), torch.zeros(0)]
    expected = times(some, 1.0)
    result = Result(stream, some, scalings=3)
    stream.synchronize()
    for _ in range(3):
        expected = times(expected, result.multiplier)
    assert are_equal(some, expected)


@pytest.mark.parametrize(("fits", "blocks"), [(1, 2), (3, 6), (5, 10), (100_000, 73)])
def test_the_grid_is_what_the_device_holds(fresh: ctypes.CDLL, fits: int, blocks: int) -> None:
    """On a device with two multiprocessors; at most one block per tile of 4,096 elements."""
    fresh.set_blocks_that_fit(fits)
    stream, some = Stream(fresh), drawn(1, 73 * 4096)
    result = Result(stream, some)
    assert fresh.last_blocks() == blocks
    synchronize(stream, result)
    Result(stream, drawn(1, 3 * 4096))
    assert fresh.last_blocks() == min(blocks, 3)
    stream.synchronize()


def test_memory_stays_the_same_over_ten_thousand_steps(library: ctypes.CDLL) -> None:
    """The number, sizes and addresses of tensors change, and some tables are uploaded."""
    stream, random = Stream(library), np.random.default_rng(3)
    lists = [drawn(count, 9, count) for count in (1, 7, 300, 731, 1100)]
    for some in sorted(lists, key=len):
        Result(stream, some, scalings=1)
        stream.synchronize()
    before = counts(library), library.bytes_allocated()
    library.run_kernels(0)  # kernels allocate nothing
    for step in range(10_000):
        count = int(random.integers(1, 5)) if step % 20 else 731 + int(random.integers(0, 250))
        offset = int(random.integers(0, 9))
        some = lists[-1][offset : offset + count]
        Result(stream, some, 1e9, step % 2)
        stream.synchronize()
    library.run_kernels(1)
    assert library.bytes_allocated() == before[1]
    assert {"allocations", "pinned_allocations", "fills"}.isdisjoint(counts_since(library, before[0]))


@pytest.mark.parametrize("count", [0, 1, 161, 730, 731, 5000])
def test_device_memory_is_kilobytes_and_eight_bytes_per_field_and_tensor(library: ctypes.CDLL, count: int) -> None:
    """The formula in docs/performance.md, for the six blocks of this device."""
    some, fields = drawn(count), len(_fields.FIELDS)
    blocks = min(6, max(count, 1))  # each of these tensors is one tile
    table = -(-(20 * count + 4 * (blocks + 2)) // 8) * 8 if count > library.table_capacity() else 0
    expected = 8 * fields * (count + 2 * blocks) + (blocks + 2) // 2 * 8 + table
    assert library.stats_bytes(*arrays(some)) == expected
    assert library.scale_bytes(*arrays(some)) == table


def test_every_replay_of_a_graph_decides_about_a_step_of_its_own(fresh: ctypes.CDLL) -> None:
    """Also if its first launch in the process is captured, provided statistics were launched before."""
    stream, norm = Stream(fresh), torch.ones((), dtype=torch.float64)
    kernels = EmulatedKernels(fresh, stream)
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
    kernels = EmulatedKernels(fresh, stream)
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


# The kernels, where they differ from other backends; as the backend "emulated" they run in the same tests as others.
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
