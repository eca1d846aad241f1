"""Settings all tests share: Triton's interpreter where there is no GPU, poisoned allocations, seeds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from forks import Forks
    from ranks import Ranks

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Decided when the kernels are first imported, hence before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if HAS_CUDA else [])]
# Every way to compute the statistic on this machine, as (backend, device). None of them may be missing.
BACKENDS = [("reference", "cpu"), ("native", "cpu")] + (
    [("reference", "cuda"), ("native", "cuda"), ("triton", "cuda")] if HAS_CUDA else [("triton", "cpu")]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def _frozen() -> Iterator[None]:
    """The garbage collections that frameworks ask for need not go through all that was imported each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240229)


@pytest.fixture(autouse=True)
def _watched_no_longer() -> Iterator[None]:
    """What `gradstat.auto` watched in a test does not watch torch's clips in the next."""
    yield
    automatic = sys.modules.get("gradstat.automatic")
    if automatic is not None:
        from gradstat.monitor import AnomalyError

        with warnings.catch_warnings():  # the test has seen those that it was about
            warnings.simplefilter("ignore")
            for handle in list(automatic._handles):
                with contextlib.suppress(AnomalyError):
                    handle.remove()
        automatic._take_off()


@pytest.fixture(params=BACKENDS, ids=lambda pair: "-".join(pair))
def where(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend and the device to run it on."""
    backend: tuple[str, str] = request.param
    return backend


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def skip_unless_fused() -> Callable[[Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], str], None]:
    """Skips what torch itself refuses to fuse on a device, as torch 2.11 does Adagrad on a GPU."""

    def skip(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], device: str) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2, device=device))
        parameter.grad = torch.zeros_like(parameter)
        try:
            make([parameter]).step()
        except RuntimeError as error:
            if "`fused=True` requires all the params" not in str(error):
                raise
            pytest.skip(f"torch: {error}")

    return skip


@pytest.fixture
def _poisoned() -> object:
    """New memory from torch is filled with NaN, so that an output nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """For many tiny operations: where cores are shared, threads that wait for each other take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernels_on_host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA kernels, compiled for the CPU by tests/host_build.py."""
    from host_build import build

    return build("kernels.cpp", tmp_path_factory.mktemp("kernels_on_host"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes to run a function on, as ranks; see tests/ranks.py."""
    from ranks import Ranks

    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Runs programs that begin with torch imported and gradstat not; see tests/forks.py."""
    from forks import Forks

    made = Forks()
    yield made
    made.stop()
