"""How calls are measured on a GPU, with a clock in its place: device time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import device_timing
import pytest
import torch
from device_timing import interleaved

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
