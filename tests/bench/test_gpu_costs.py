"""Limits on the costs of checks and clips on a GPU: memory, compilations, ordering. Runs alone: it reads free memory.

Without a GPU test_cuda_launchers.py and test_cuda_module.py test them with a stand-in for CUDA's runtime.
"""

import time

import device_timing
import pytest
import torch
from helpers.cuda_counts import Counts, count
from helpers.training import backpropagated

import gradstat

pytestmark = pytest.mark.cuda
both_backends = pytest.mark.parametrize("backend", ["native", "triton"])


def parameters(count: int, size: int = 1000) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.zeros(size + i, device="cuda")) for i in range(count)]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).cuda()
    return made


@both_backends
def test_memory_stays_the_same_over_ten_thousand_steps(backend: str) -> None:
    """Both device memory that torch allocates, and memory that the libraries allocate outside of torch."""
    every = parameters(40)

    def memory_after(steps: int) -> tuple[int, int, int]:
        for number in range(steps):
            chosen = every[: (1, 7, 19, 40)[number % 4]]
            assert gradstat.check(chosen, backend=backend).ok
            gradstat.clip_grad_norm_(chosen, 1e9, backend=backend)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]

    before, after = memory_after(50), memory_after(10_000)
    assert after[:2] == before[:2]
    assert before[2] - after[2] < 1 << 20  # other processes may use the device, too


@both_backends
@pytest.mark.parametrize("count", [3, 2000])
def test_a_call_takes_kilobytes(backend: str, count: int) -> None:
    tensors = [p.grad for p in parameters(count, 50)]
    gradstat.stats(tensors, backend=backend)  # allocates persistent memory
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    table = gradstat.stats(tensors, backend=backend)
    peak = torch.cuda.max_memory_allocated() - before
    slots = 2 * 8 * 10 * 8 * torch.cuda.get_device_properties(0).multi_processor_count
    # The table, eight bytes per field and tensor for partial rows, 20 bytes per tensor for its address.
    assert peak <= table.nbytes + 8 * 10 * count + 20 * count + slots + 16384


@both_backends
@pytest.mark.parametrize("max_norm", [1e-2, 1e9])
def test_a_side_stream_keeps_its_order(backend: str, max_norm: float) -> None:
    """Values written just before on the caller's stream are measured; values read just after are clipped."""
    (parameter,) = parameters(1, 1 << 22)
    gradient = parameter.grad
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for step in range(1, 20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            gradient.fill_(float(step))
            norm = gradstat.clip_grad_norm_([parameter], max_norm, backend=backend)
            after = gradient.clone()
            gradient.fill_(-1.0)
        stream.synchronize()
        expected = step * gradient.numel() ** 0.5
        torch.testing.assert_close(norm.cpu(), torch.tensor(expected), rtol=1e-6, atol=0)
        factor = min(1.0, max_norm / (expected + 1e-6))
        torch.testing.assert_close(after, torch.full_like(after, step * factor), rtol=1e-5, atol=0)


def test_a_healthy_step_of_a_monitor_is_one_launch_and_no_sync() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    inputs = torch.randn(8, 64, device="cuda")
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")

    def train() -> torch.Tensor:
        loss = backpropagated(optimizer, model(inputs).square().mean())
        monitor.step(loss)
        gradstat.guarded_step(optimizer, 1.0)
        return loss

    for _ in range(4):  # the first step measures everything
        loss = train()
        torch.cuda.synchronize()
    assert count(lambda: monitor.step(loss)) == Counts(1, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(300):  # including steps that measure parameters and the optimizer's state
            train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert monitor.flush() == []


def test_a_monitor_skips_on_the_device_and_reports_a_step_later() -> None:
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly={"error": ("skip", "record")})
    for step in range(6):
        loss = backpropagated(optimizer, model(torch.randn(8, 64, device="cuda")).square().mean())
        if step == 3:
            model.weight.grad[1, 2] = float("nan")  # type: ignore[index]
        before = model.weight.detach().clone()
        torch.cuda.set_sync_debug_mode("error")
        found = monitor.step(loss)
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(before, model.weight) == (step == 3)
        assert bool(found) == (step == 4)
    assert monitor.findings[0].step == 3


@pytest.mark.parametrize("seconds", [0.0, 1e-3, 0.05])
def test_the_benchmarks_device_time_excludes_host_time(seconds: float) -> None:
    device = torch.device("cuda:0")
    cycles = int(1e-3 * device_timing._cycles_per_second(device))

    def call() -> None:
        torch.cuda._sleep(cycles)
        time.sleep(seconds)
        torch.cuda._sleep(cycles)

    samples = device_timing.interleaved({"call": call}, 3, 1, device=device)["call"]
    assert samples.device == pytest.approx([2e-3] * 3, rel=0.2)
