"""Life with a program: several threads, and several streams, at once."""

import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch import nn

import gradstat

SECONDS = 120


def together(works: list[Callable[[], None]]) -> None:
    """Runs each function in a thread, all started at the same time; fails if one fails or does not end."""
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        begin.wait(SECONDS)
        work()

    with ThreadPool(len(works)) as pool:
        pool.map_async(run, works, chunksize=1).get(SECONDS)


def trained_by_itself(number: int, width: int, device: str = "cpu") -> Callable[[], None]:
    """A thread's function: trains its own model, with known numbers, using all kinds of calls."""

    def work() -> None:
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1)).to(device)
        count = sum(parameter.numel() for parameter in model.parameters())
        value = float(number)
        monitor = gradstat.Monitor(model, on_anomaly="record")
        for step in range(30):
            if step % 10 == 9:
                model[0] = nn.Linear(width, width).to(device)  # the others must not notice
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value)
            report = gradstat.check(model)
            pending = gradstat.check_async(model)
            monitor.step(1.0)
            norm = value * count**0.5
            assert report.total_norm == pytest.approx(norm, rel=1e-6)
            assert [(stats.min, stats.max) for stats in report] == [(value, value)] * 4
            assert gradstat.clip_grad_norm_(model.parameters(), norm / 2).item() == pytest.approx(norm, rel=1e-5)
            assert gradstat.check(model).total_norm == pytest.approx(norm / 2, rel=1e-4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            assert gradstat.guarded_step(optimizer, max_norm=1.0).total_norm.item() == pytest.approx(norm / 2, rel=1e-4)
            assert pending.result().total_norm == report.total_norm
        monitor.detach()
        assert monitor.recording().scalars["norm"].tolist() == pytest.approx([value * count**0.5] * 30, rel=1e-6)

    return work


def test_threads_train_models_of_their_own() -> None:
    # From small models to those whose kernels use several threads.
    together([trained_by_itself(number, width) for number, width in enumerate((4, 4, 30, 600), 1)])


def test_threads_ask_about_one_model_while_it_changes() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    stop = threading.Event()

    def with_gradients(parameter: nn.Parameter) -> nn.Parameter:
        parameter.grad = torch.full_like(parameter, 3.0)
        return parameter

    for parameter in model.parameters():
        with_gradients(parameter)

    def change() -> None:
        try:
            for _ in range(200):
                model[3].register_parameter("extra", with_gradients(nn.Parameter(torch.zeros(5))))
                del model[3].extra
        finally:
            stop.set()

    def ask() -> None:
        while not stop.is_set():
            try:
                report = gradstat.check(model)
            except RuntimeError as error:  # as torch itself raises if a module changes while it is traversed
                if "changed" not in str(error):
                    raise
                continue
            assert len(report) in (16, 17)
            assert {stats.max for stats in report} == {3.0}

    together([change, ask, ask, ask])
    assert len(gradstat.check(model)) == 16


@pytest.mark.cuda
def test_threads_on_streams_of_their_own() -> None:
    def on_a_stream(number: int, width: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            trained_by_itself(number, width, "cuda")()

    together([partial(on_a_stream, number, width) for number, width in enumerate((4, 4, 30, 600), 1)])
