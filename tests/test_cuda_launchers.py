"""The CUDA launchers over a runtime that stands in for CUDA's: tickets, uploaded tables, streams, graphs.

Work is done when its stream is synchronized and no sooner, so memory that is reused too early shows as a wrong
result. What a real GPU could still refute is the order that CUDA promises and this runtime imitates.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from host_build import SOURCES, build, needs_compiler

from gradstat import _fields

COUNTERS = ("allocations", "pinned_allocations", "copies", "fills", "launches")

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = build("launchers.cpp", tmp_path_factory.mktemp("launchers"), SOURCES / "runtime")
    for name in ("new_stream", "end_capture"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.error_text.restype = ctypes.c_char_p
    return loaded


class Stream:
    """A stream of the runtime, and calls into it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = ctypes.c_void_p(library.new_stream())

    def synchronize(self) -> None:
        self.library.synchronize(self.handle)

    def stats(self, tensors: list[np.ndarray], max_norm: float = 1.0) -> Result:
        return Result(self, tensors, max_norm)

    def scale(self, tensors: list[np.ndarray], coefficient: np.ndarray) -> None:
        self.check(self.library.start_scale(self.handle, *arguments(tensors), pointer(coefficient)))

    def check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(self.library.error_text().decode())


class Result:
    """What one launch will have written once its stream is synchronized."""

    def __init__(self, stream: Stream, tensors: list[np.ndarray], max_norm: float) -> None:
        self.tensors = tensors
        self.table = np.full((len(tensors), len(_fields.FIELDS)), 1e33)
        self.norm = np.full(1, 77, dtype=np.float32)
        self.coefficient = np.full(1, 77.0)
        start = stream.library.start_stats
        outputs = pointer(self.table), pointer(self.norm), ctypes.c_double(max_norm), pointer(self.coefficient)
        stream.check(start(stream.handle, *arguments(tensors), *outputs))

    def assert_right(self, tensors: list[np.ndarray] | None = None) -> None:
        """Holds it against ``tensors``: what the tensors of the launch held when it ran."""
        expected = [t.astype(np.float64) for t in tensors or self.tensors]
        column = dict(zip(_fields.NAMES, self.table.T, strict=True))
        np.testing.assert_allclose(column["sq_sum"], [np.square(t).sum() for t in expected], rtol=2e-7)
        np.testing.assert_array_equal(column["max"], [t.max() for t in expected])
        np.testing.assert_array_equal(column["first_nonfinite"], math.inf)
        norm = math.sqrt(sum(np.square(t).sum() for t in expected))
        assert self.norm[0] == pytest.approx(norm, rel=2e-7)
        assert self.coefficient[0] == pytest.approx(min(1.0, 1.0 / (norm + 1e-6)), rel=2e-7)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def arguments(tensors: list[np.ndarray]) -> list[object]:
    # Kept alive by the caller's frame only during the call: launchers must have copied what they need by then.
    addresses = np.array([t.ctypes.data for t in tensors], dtype=np.uint64)
    numels = np.array([t.size for t in tensors], dtype=np.int64)
    return [ctypes.c_int64(len(tensors)), pointer(addresses), pointer(numels)]


def tensors(count: int, size: int = 50, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(size + i % 7).astype(np.float32) for i in range(count)]


def counted(library: ctypes.CDLL) -> dict[str, int]:
    values = np.zeros(len(COUNTERS), dtype=np.int64)
    library.counters(pointer(values))
    return dict(zip(COUNTERS, values.tolist(), strict=True))


def spent(library: ctypes.CDLL, before: dict[str, int]) -> dict[str, int]:
    """What was counted since ``before``, without the zeros."""
    return {name: value - before[name] for name, value in counted(library).items() if value != before[name]}


def test_a_check_is_one_launch_and_nothing_else(library: ctypes.CDLL) -> None:
    stream = Stream(library)
    stream.stats(tensors(1))  # makes the stream's tickets
    before = counted(library)
    results = [stream.stats(tensors(n, 30_000 // n, n)) for n in (1, 5, 190, 191, 600, 601, 1620)]
    assert spent(library, before) == {"launches": 7}
    stream.synchronize()
    for result in results:
        result.assert_right()


def test_no_tensors_at_all_write_a_norm_of_zero(library: ctypes.CDLL) -> None:
    stream = Stream(library)
    result = stream.stats([])
    stream.synchronize()
    assert result.norm[0] == 0
    assert result.coefficient[0] == 1


def test_a_table_is_uploaded_only_when_it_changed(library: ctypes.CDLL) -> None:
    stream, many = Stream(library), tensors(2000)
    first = stream.stats(many)
    before = counted(library)
    again = [stream.stats(many) for _ in range(3)]
    assert spent(library, before) == {"launches": 3}
    coefficient = np.array([2.0])
    doubled = [2 * t for t in many]
    stream.scale(many, coefficient)
    assert spent(library, before) == {"launches": 4}
    after = stream.stats(many)
    others = stream.stats(tensors(2000, 50, 9))  # as many and as large, elsewhere in memory
    assert spent(library, before) == {"pinned_allocations": 1, "copies": 1, "launches": 6}
    originals = [t.copy() for t in many]
    stream.synchronize()
    for result in (first, *again):
        result.assert_right(originals)
    after.assert_right(doubled)
    others.assert_right()


def test_tables_under_way_are_not_overwritten(library: ctypes.CDLL) -> None:
    stream = Stream(library)
    lists = [tensors(1700 + 100 * i, 20, i) for i in range(6)]
    results = [stream.stats(some) for some in lists]  # none has run yet
    stream.synchronize()
    for result in results:
        result.assert_right()
    # Everything is free again: lists no larger than before allocate nothing.
    before = counted(library)
    results = [stream.stats(some) for some in lists[:2]]
    stream.synchronize()
    assert spent(library, before) == {"copies": 2, "launches": 2}
    for result in results:
        result.assert_right()


def test_streams_keep_apart(library: ctypes.CDLL) -> None:
    streams = [Stream(library) for _ in range(3)]
    lists = [[tensors(1, 40_000, 1), tensors(1800, 30, 2)], [tensors(2, 20_000, 3), tensors(1900, 30, 4)]]
    results = [stream.stats(some) for pair in lists for some in pair for stream in streams]
    for stream in reversed(streams):
        stream.synchronize()
    for result in results:
        result.assert_right()


@pytest.mark.parametrize("count", [3, 1800])
def test_a_graph_is_replayed_on_new_values_beside_other_work(library: ctypes.CDLL, count: int) -> None:
    stream, other = Stream(library), Stream(library)
    some, eager = tensors(count, 9000 if count == 3 else 30, 5), tensors(4, 9000, 6)
    warm = stream.stats(some)
    stream.synchronize()
    warm.assert_right()
    library.begin_capture(stream.handle)
    captured = stream.stats(some)
    graph = ctypes.c_void_p(library.end_capture(stream.handle))
    for _ in range(3):
        for tensor in some:
            tensor *= -1.5
        # On another stream than the captured one, between eager launches of both.
        beside = [stream.stats(eager), other.stats(eager)]
        library.replay(graph, other.handle)
        beside.append(other.stats(some))
        other.synchronize()
        stream.synchronize()
        captured.assert_right()
        for result in beside:
            result.assert_right()
        captured.table[:] = 1e33


def test_a_refused_allocation_is_reported_and_the_next_call_works(library: ctypes.CDLL) -> None:
    stream, many = Stream(library), tensors(2000)
    for _ in range(3):  # the tickets, the table, the pinned memory: each time one more is there
        library.refuse_allocations(1)
        with pytest.raises(RuntimeError, match=r"gradstat: allocating .*: out of memory"):
            stream.stats(many)
    result = stream.stats(many)
    stream.synchronize()
    result.assert_right()
