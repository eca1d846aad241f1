"""Settings shared by all tests: Triton's interpreter if there is no GPU, poisoned allocations, seeds."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from browser import offline_chromium
from helpers.devices import BACKENDS, DEVICES, HAS_CUDA, INTERPRETED

if TYPE_CHECKING:
    from helpers.cuda_on_cpu import EmulatedKernels
    from helpers.processes import Forks
    from helpers.ranks import Ranks

    from gradstat._core.backends import Kernels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def _frozen() -> Iterator[None]:
    """Keeps the garbage collections that frameworks trigger from traversing all imported modules each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240229)


@pytest.fixture(autouse=True)
def _stop_watching() -> Iterator[None]:
    """Stops `gradstat.auto` of one test from watching torch's clips in the next, which may make another accelerator."""
    yield
    if "accelerate.state" in sys.modules:
        from helpers.frameworks import forget_accelerators

        forget_accelerators()
    if "gradstat.monitor" in sys.modules:
        from gradstat._core import announce
        from gradstat._step import torch_calls
        from gradstat.monitor import AnomalyError

        with warnings.catch_warnings():  # the test has checked its own
            warnings.simplefilter("ignore")
            for listener in announce.listeners():
                listener.remove()
                with contextlib.suppress(AnomalyError, AttributeError):  # one of a monitor's own has no monitor
                    listener.monitor.remove()
        torch_calls.leave(None)


@pytest.fixture(params=BACKENDS, ids="-".join)
def where(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend and the device to run it on: the one way for a test to ask for a backend that not every device has."""
    backend: tuple[str, str] = request.param
    fixtures = {("emulated", "cpu"): "emulated", ("dispatched", "cpu"): "dispatched", INTERPRETED: "short_chunks"}
    if backend in fixtures:
        request.getfixturevalue(fixtures[backend])
    return backend


@pytest.fixture
def kernels(where: tuple[str, str]) -> Kernels:
    from gradstat._core import backends

    return backends.resolve(*where)


@functools.cache
def _builtin_names(package: Any) -> list[str]:
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shortens the chunks of Triton's kernels in the interpreter, to a quarter (16 KB)."""
    import triton.language as tl
    from triton.runtime import interpreter

    from gradstat.kernels import _table, scale, stats

    vectors = 2 * stats.UNROLL.value * stats.LANES.value
    assert vectors * stats.STEPS_PER_TILE.value == 2 * _table.CHUNK_VECTORS  # a chunk is one tile before and after
    _table._table_of.cache_clear()
    if not HAS_CUDA:  # constants of compiled kernels cannot be changed
        for module, name, value in (
            *((stats, "STEPS_PER_TILE", tl.constexpr(2)), (_table, "CHUNK_VECTORS", vectors)),
            *((module, "CHUNK_VECTORS", tl.constexpr(vectors)) for module in (stats, scale)),
        ):
            monkeypatch.setattr(module, name, value)
        patch = interpreter._patch_builtin

        def patch_builtin(package: Any, *rest: Any) -> None:
            """Once a launch: every call of a function would look through what is patched, for half of the time."""
            if any(tl.core.is_builtin(getattr(package, name)) for name in _builtin_names(package)):
                patch(package, *rest)

        monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
    yield
    _table._table_of.cache_clear()


@pytest.fixture(scope="session")
def emulated_kernels(kernels_on_host: ctypes.CDLL) -> EmulatedKernels:
    """The CUDA kernels on the CPU."""
    from helpers.cuda_on_cpu import EmulatedKernels

    return EmulatedKernels(kernels_on_host)


def _registered(name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradstat._core import backends

    entry = backends.Backend(frozenset({"none"}), frozenset({"cpu"}), lambda _: kernels)
    monkeypatch.setitem(backends.REGISTRY, name, entry)


@pytest.fixture
def emulated(emulated_kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The CUDA kernels on the CPU (tests/helpers/cuda_on_cpu.py), as a backend during a test."""
    _registered("emulated", emulated_kernels, monkeypatch)
    return emulated_kernels


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels through torch's dispatcher only, as a backend during a test."""
    from gradstat._core import backends, native

    native.load_cpu()
    _registered("dispatched", backends.NativeKernels(backends.NOT_COMPILED), monkeypatch)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def _poisoned() -> object:
    """Makes torch fill new memory with NaN, so that outputs that were not written are noticed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def kernels_on_host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA kernels, compiled for the CPU by tests/helpers/cuda_on_cpu_build.py once for all workers."""
    from helpers.cuda_on_cpu_build import build

    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    return build(tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.mktemp("kernels_on_host"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that run a function as ranks; see tests/helpers/ranks.py."""
    from helpers.ranks import Ranks

    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Runs programs that start with torch imported but not gradstat; see tests/helpers/processes.py."""
    from helpers.processes import Forks

    made = Forks()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for all tests of a module."""
    started = offline_chromium()
    if started is None:
        pytest.skip("there is no chromium with chromedriver on the path")
    yield started
    started.quit()
