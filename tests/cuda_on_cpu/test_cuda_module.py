"""The library ``_C_cuda`` over a replacement of CUDA's runtime: what calls enqueue, and how numbers reach the host.

Kernels run at once, since torch reuses memory at once. A copy to the host is done when somebody waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cuda_on_cpu import Stream
from helpers.cuda_on_cpu_build import module
from helpers.devices import parameters_with
from helpers.processes import Forks
from test_cuda_launchers import ONE_SLOT, counts, counts_since
from torch import nn

import gradstat
from gradstat._core import backends, native

CHECK = {"launches": 1, "copies": 1, "records": 1}


@pytest.fixture
def stream(kernels_on_host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """The current stream of the library, which serves tensors on the CPU."""
    library = module(Path(kernels_on_host._name))
    monkeypatch.setattr(native, "cuda_copies", lambda: library)
    monkeypatch.setattr(backends.resolve(None, "cpu"), "direct", library)
    stream = Stream(kernels_on_host)
    kernels_on_host.set_stream(stream.handle)
    yield stream
    kernels_on_host.set_stream(None)


def model(*values: float) -> nn.ParameterList:
    return nn.ParameterList(parameters_with(torch.full((3,), value) for value in values))


def cost(stream: Stream, call: Callable[[], object], times: int = 1) -> dict[str, int]:
    before = counts(stream.library)
    for _ in range(times):
        call()
    return counts_since(stream.library, before)


def test_what_calls_enqueue(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that they allocate nothing in steady state, whether reports are read or dropped."""
    trained, loss = model(1.0, 2.0), torch.ones(())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0, fused=True)
    monitor = gradstat.Monitor(trained, optimizer, on_anomaly="record", watch=None)
    for name in ("Event", "device", "is_current_stream_capturing"):
        monkeypatch.delattr(torch.cuda, name)
    calls: dict[Callable[[], object], dict[str, int]] = {
        lambda: gradstat.check_async(trained): CHECK,
        lambda: gradstat.check_async(trained).result(): CHECK | {"waits": 1},
        lambda: gradstat.check(trained).ok: CHECK | {"waits": 1},
        lambda: monitor.step(loss): CHECK | {"waits": 1},
        lambda: gradstat.stats([loss]): {"launches": 1},
        lambda: gradstat.guarded_step(optimizer, 1e9): {"launches": 1},
        lambda: gradstat.clip_grad_norm_(trained.parameters(), 1e9): {"launches": 2},
    }
    for call, expected in calls.items():
        call()
        assert cost(stream, call, 100) == {name: 100 * number for name, number in expected.items()}


def test_reports_are_read_in_any_order_and_their_memory_is_reused(stream: Stream) -> None:
    streams, models = (stream, Stream(stream.library)), [model(float(i)) for i in range(20)]

    def begun() -> list[gradstat.PendingReport]:
        reports = []
        for i, each in enumerate(models):
            stream.library.set_stream(streams[i % 2].handle)
            reports.append(gradstat.check_async(each))
        return reports

    before = counts(stream.library)
    reports = begun()
    assert counts_since(stream.library, before)["pinned_allocations"] == 20
    assert not any(report.done() for report in reports)
    assert reports[6].result()[0].max == 6
    assert [report.done() for report in reports] == [i % 2 == 0 for i in range(20)]  # those of one stream
    assert [report.result()[0].max for report in reports[::-1]] == list(range(20))[::-1]
    before = counts(stream.library)
    for _ in range(2):
        begun()  # never read
        assert [report.result()[0].max for report in begun()] == list(range(20))
    assert not ONE_SLOT.keys() & counts_since(stream.library, before)


def test_nothing_is_copied_during_capture_and_other_streams_capture_undisturbed(stream: Stream) -> None:
    trained, copies = model(3.0), native.cuda_copies()
    pending = gradstat.check_async(trained)
    stream.library.run_kernels(0)
    with stream.capture():
        assert cost(stream, lambda: gradstat.check_async(trained)) == {"launches": 1, "fills": 1}
        assert copies.to_host(torch.ones(2)) is None
    stream.library.run_kernels(1)
    with Stream(stream.library).capture():
        another = gradstat.check_async(trained)  # needs a second slot
        assert not another.done()
        assert pending.result()[0].max == another.result()[0].max == 3


def test_slots_belong_to_a_device_and_a_stream(stream: Stream) -> None:
    numbers, places = torch.arange(4.0), [(s, device) for s in (stream, Stream(stream.library)) for device in (0, 1)]
    for expected in (4 * [ONE_SLOT], 4 * [{}]):
        for (on, device), new in zip(places, expected, strict=True):
            to, size = torch.zeros(4), ctypes.c_int64(16)
            source, target = (ctypes.c_void_p(each.data_ptr()) for each in (numbers, to))
            call = lambda: stream.library.copy_over(source, size, on.handle, device, target)  # noqa: B023, E731
            used = {"copies": 1, "records": 1, "waits": 1, **({"devices_set": 2} if device else {})}
            assert cost(stream, call) == new | used
            assert torch.equal(to, numbers)


def test_a_failure_loses_no_slot(stream: Stream) -> None:
    trained = model(1.0)
    gradstat.check(trained)
    held = gradstat.check_async(trained)
    for what in ("allocating pinned memory", "copying to the host"):
        stream.library.fail_allocations(1)
        with pytest.raises(RuntimeError, match=f"gradstat: {what}: out of memory"):
            gradstat.check_async(trained)
        assert gradstat.check(trained).ok
    assert held.result().ok
    assert cost(stream, lambda: gradstat.check_async(trained)) == CHECK


def test_threads_share_a_stream(stream: Stream) -> None:
    def run(number: int) -> bool:
        trained = model(float(number))
        for _ in range(50):
            pending = [gradstat.check_async(trained) for _ in range(3)]
            assert {report.result()[0].max for report in pending[::-1]} == {number}
        return True

    before = counts(stream.library)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))
    assert counts_since(stream.library, before)["pinned_allocations"] <= 12


def test_dense_tensors_are_copied(stream: Stream) -> None:
    copies = native.cuda_copies()
    for values in (torch.arange(6).reshape(2, 3), torch.tensor(2.5), torch.ones(3, dtype=torch.float64)):
        receive = copies.to_host(values)
        assert receive(False) is None
        assert torch.equal(torch.frombuffer(receive(True), dtype=values.dtype), values.flatten())
    refused: list[Any] = [torch.ones(3, 3)[:, 1], torch.ones(0), 3.0]
    assert [copies.to_host(one) for one in refused] == [None] * 3


PROGRAM = """
import os, sys, torch, gradstat
from ctypes import c_void_p
from pathlib import Path
from gradstat._core import backends
from helpers.cuda_on_cpu_build import loaded, module
launchers = loaded(Path(sys.argv[1]))
backends.resolve(None, "cpu").direct = module(Path(sys.argv[1]))
launchers.set_stream(c_void_p(launchers.new_stream()))
model = torch.nn.Linear(2, 2)
model(torch.ones(2)).sum().backward()
pending, dropped = gradstat.check_async(model), gradstat.check_async(model)
if not os.fork():
    del dropped
    for use in (pending.result, pending.done, lambda: gradstat.check(model)):
        try:
            use()
        except RuntimeError as error:
            print(error)
    sys.exit()
print(os.wait()[1], pending.result().ok, dropped.done(), dropped.result().ok)
left = [gradstat.check_async(model)]
left.append(left)
"""


def test_a_fork_does_not_touch_slots_and_programs_end_with_them(kernels_on_host: ctypes.CDLL, forks: Forks) -> None:
    module(Path(kernels_on_host._name))
    *refused, last = forks.output_of(PROGRAM, kernels_on_host._name).splitlines()
    assert [line.rpartition(": ")[2] for line in refused] == ["initialization error"] * 3
    assert last == "0 True True True"
