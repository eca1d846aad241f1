"""Numbers that are read later, on any stream: the read is ordered after the step that they are about.

Without a GPU torch's streams are replaced by stand-ins; tests on a GPU are at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cuda_counts import busy_device
from test_step import trained
from torch import nn

import gradstat
from gradstat import amp, counters
from gradstat._core.backends import resolve
from gradstat._core.host_copy import HostCopy, streams_of
from gradstat._step import record
from gradstat.adaptive._base import decide

SEEN: list[str] = []
GPU = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Makes a stream of that name current, as ``torch.cuda.stream``. `SEEN` lists the streams of transfers."""
    stack = ["default"]
    SEEN.clear()

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        stack.append(name)
        yield
        stack.pop()

    begin = HostCopy.__init__

    def recorded(arrival: HostCopy, *given: Any) -> None:
        SEEN.append(stack[-1])
        begin(arrival, *given)

    monkeypatch.setattr(HostCopy, "__init__", recorded)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for module in (record, amp):
        monkeypatch.setattr(module, "streams_of", lambda tensors: (stack[-1],))
    yield stream
    assert stack == ["default"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("by", ["guarded_step", "scaler"])
def test_reports_and_counts_follow_the_stream_of_their_step(current: Any, by: str, fused: bool) -> None:
    scaler = amp.GradScaler("cpu")
    with current("of the step"):
        _, optimizer = trained("SGD fused" if fused else "SGD", scaler=scaler)
        if by == "scaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            result = gradstat.guarded_step(optimizer, 1.0)
    assert by == "scaler" or not SEEN  # no transfer has been started
    with current("of somebody who logs"):
        assert (scaler.report(optimizer) if by == "scaler" else result.report).result().ok
        assert (scaler.read(wait=True) if by == "scaler" else result.counters.read(wait=True)).steps == 1
    assert set(SEEN) == {"of the step"}


def test_streams_are_remembered_for_each_device_but_not_those_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: Any = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in (1, 0, 1)]
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: f"stream of {index}")
    assert sorted(map(str, streams_of(tensors))) == ["stream of 0", "stream of 1"]
    assert streams_of([torch.ones(1)]) == ()
    capturing = True
    assert streams_of(tensors) == ()


def test_what_lasts_from_step_to_step_is_not_made_inside_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would reset it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _, optimizer = trained("SGD fused")
    message = "cannot be created during CUDA graph capture, as every replay would reset it; run one step"
    with pytest.raises(RuntimeError, match=f"the counters of guarded_step .*{message}"):
        counters.counters_on(optimizer, GPU)
    with pytest.raises(KeyError):
        gradstat.step_counters(optimizer)
    with pytest.raises(RuntimeError, match=message):
        counters.StepCounters.on(GPU, None, "the step counters of a loss scaler")
    kernels, on_gpu = resolve("reference", "cpu"), SimpleNamespace(device=GPU, dim=lambda: 0)
    for clip in (gradstat.AutoClip(), gradstat.ZClip()):
        with pytest.raises(RuntimeError, match=f"the state of {type(clip).__name__} .*{message}"):
            decide(clip, kernels, on_gpu)
        decide(clip, kernels, torch.ones((), dtype=torch.float64))
        with pytest.raises(RuntimeError, match=message):  # moving it would be repeated, too
            decide(clip, kernels, on_gpu)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_report_asked_for_on_another_stream_waits_for_its_step(backend: str) -> None:
    parameter = nn.Parameter(torch.zeros(1 << 16, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for step in range(1, 4):
        with torch.cuda.stream(stream):
            parameter.grad = torch.full_like(parameter, step)
            busy_device()  # so that the kernel has not run yet when the report is read
            result = gradstat.guarded_step(optimizer, backend=backend)
        pending = result.report
        counts = result.counters.read(wait=True)
        assert pending.result()[0].max == step
        assert counts.steps == step


@pytest.mark.cuda
def test_the_report_of_a_captured_step_follows_the_stream_of_its_replays() -> None:
    parameter = nn.Parameter(torch.zeros(1 << 16, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    parameter.grad = torch.ones_like(parameter)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run one step before the capture"), torch.cuda.graph(graph):
        gradstat.guarded_step(optimizer)
    gradstat.guarded_step(optimizer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gradstat.guarded_step(optimizer)
    parameter.grad.fill_(2.0)
    busy_device()
    graph.replay()
    assert result.report.result()[0].max == 2
    assert result.counters.read(wait=True).steps == 2
