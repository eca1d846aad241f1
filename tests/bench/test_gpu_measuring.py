"""How calls are measured on a GPU, with a clock in its place: device time and launches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import cases
import device_timing
import pytest
import rows
import suite
import tables
import torch
from device_timing import interleaved
from helpers import cuda_counts
from torch.autograd import DeviceType

from gradstat.bench import timing

CPU = torch.device("cpu")


class Clock:
    """Replaces torch.cuda by a host and a device that do nothing but take time."""

    RATE = 1.5e9

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.device = 0.0
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.time = clock.device = max(clock.host, clock.device)

            def query(self) -> bool:
                return self.time <= clock.host

            def synchronize(self) -> None:
                clock.host = max(clock.host, self.time)

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * (end.time - self.time)

        monkeypatch.setattr(torch.cuda, "Event", Event)

        @contextmanager
        def on(device: torch.device) -> Iterator[None]:
            self.current, before = device, self.current
            yield
            self.current = before

        def sleep(cycles: int) -> None:
            self.slept_on.add(str(self.current))
            self.launch(cycles / self.RATE)

        self.current, self.slept_on = torch.device("cuda:0"), set[str]()
        monkeypatch.setattr(torch.cuda, "device", on)
        monkeypatch.setattr(torch.cuda, "_sleep", sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait())
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.host)
        device_timing._cycles_per_second.cache_clear()

    def launch(self, seconds: float) -> None:
        self.device = max(self.host, self.device) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.device)

    def call(self, host: float, device: float, waits: bool = False) -> Callable[[], None]:
        def run() -> None:
            self.launch(device / 2)
            self.host += host
            self.launch(device / 2)
            if waits:
                self.wait()

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    yield Clock(monkeypatch)
    device_timing._cycles_per_second.cache_clear()


@pytest.mark.parametrize("host", [1e-6, 1e-3, 0.1])
def test_device_time_excludes_host_time(host: float, clock: Clock) -> None:
    samples = interleaved({"call": clock.call(host, 2e-5)}, 3, 1, device=torch.device("cuda:1"))["call"]
    assert samples.device == pytest.approx([2e-5] * 3)
    assert device_timing._cycles_per_second(torch.device("cuda:1")) == pytest.approx(clock.RATE)
    assert clock.slept_on == {"cuda:1"}


def test_calls_that_cannot_be_queued_ahead_have_no_device_time(clock: Clock) -> None:
    calls = {"waits": clock.call(1e-4, 1e-5, waits=True), "takes long": clock.call(1.0, 1e-5)}
    runs: list[str] = []
    samples = interleaved(calls, 6, 1, device=torch.device("cuda"), before=runs.append)
    assert not any(sample.device for sample in samples.values())
    assert all(len(sample.wall) == 6 for sample in samples.values())
    assert len(runs) == 2 * (7 + device_timing.TRIES)  # it is not retried in every round


def test_kernels_are_counted_and_annotations_are_not() -> None:
    def event(name: str, on: Any = DeviceType.CUDA, annotates: bool = False) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=on, is_user_annotation=annotates)

    events = [
        event("stats_kernel"),
        event("Memcpy DtoH"),
        event("Memset"),
        event("Optimizer.step#AdamW.step", annotates=True),
        event("cudaLaunchKernel", DeviceType.CPU),
        event("cudaEventSynchronize", DeviceType.CPU),
        event("cudaDeviceSynchronize", DeviceType.CPU),
    ]
    assert cuda_counts.counts_of(events) == cuda_counts.Counts(launches=1, syncs=1)
    with torch.profiler.profile() as profiler, torch.profiler.record_function("of a user"):
        torch.ones(3).sum()
    annotated = [each.name for each in profiler.events() if each.is_user_annotation]
    assert "of a user" in annotated
    assert not any(name.startswith("aten") for name in annotated)


def of_gpu(provider: str, case: str, value: float, metric: str = "wall time", **others: Any) -> rows.Row:
    about = {"group": "lists", "dtype": "float32", "bytes": 1 << 30, "device": "NVIDIA H100", "driver": "580"}
    return rows.Row(provider, case, metric, "us", value, **{**about, **others})


def test_tables_of_a_device_leave_out_what_has_no_time_there() -> None:
    members = [
        of_gpu(provider, "one", value, metric)
        for metric in ("wall time", "device time")
        for provider, value in ((f"{cases.LIMIT} (sum)", 90.0), (cases.STATS, 100.0), (cases.CLIP, 110.0))
    ]
    members += [of_gpu(cases.CHECK, "one", 130.0), of_gpu(cases.CLIP, "two", 5.0, "device time")]
    shown = tables.everything(members)
    assert " 130 µs (1.44) |" in shown  # to the report
    assert " 100 µs (1.11) |" in shown  # on the device


def test_a_rehearsal_runs_the_first_pieces_of_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(name: str) -> Callable[[suite.Plan], suite.Work]:
        return lambda plan: iter([(name, lambda number=number: [(name, number)]) for number in range(3)])  # type: ignore[misc]

    monkeypatch.setattr(suite, "GROUPS", {name: group(name) for name in "ab"})
    plan = suite.Plan(CPU, False, 0.01)
    assert list(suite.measure(plan, "ab", 1)) == [[("a", 0)], [("b", 0)]]
    assert len(list(suite.measure(plan, "ab"))) == 6
