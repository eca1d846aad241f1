"""Several processes for tests of what runs on many ranks: started once, used by every test.

Importing torch takes seconds, so a pool of `MOST`, forked from a process that has, stays alive for the session. Every
test gets a process group of its own, over gloo on the CPU, with as many ranks as it asks for.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

MOST = 4
_START, _ANSWER, _END = 120.0, 30.0, 10.0
# What the ranks would import each for themselves.
_PRELOADED = ["pytest", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "gradstat.distributed"]


class Ranks:
    """A pool of processes that run functions as the ranks of a process group."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(MOST):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            if not pipe.poll(_START):
                raise RuntimeError("a rank did not start")
            pipe.recv()

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 20.0) -> list[Any]:
        """Calls a function of a test module on ranks 0 to ``world - 1``; what it returns on each.

        A failure on any rank fails the test, with that rank's traceback.
        """
        self._groups += 1
        store = Path(self._folder.name) / str(self._groups)
        for rank in range(world):
            self._pipes[rank].send((function, arguments, world, rank, str(store), timeout))
        results, failures = [], []
        for rank in range(world):
            if not self._pipes[rank].poll(timeout + _ANSWER):
                self._kill()
                self._start()
                pytest.fail(f"rank {rank} did not answer")
            succeeded, result = self._pipes[rank].recv()
            (results if succeeded else failures).append(result if succeeded else f"on rank {rank}:\n{result}")
        if failures:
            pytest.fail("\n".join(failures))
        return results

    def stop(self) -> None:
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            process.terminate()  # kindly first: what measures coverage writes its data then
        for process in self._processes:
            process.join(_END)
            process.kill()
            process.join()


def on_ranks(world: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function: it is called on so many ranks, with the parameters of the test."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function)

        @functools.wraps(function)
        def test(ranks: Ranks, **arguments: Any) -> None:
            ranks.run(world, test, *(arguments[name] for name in own.parameters))

        fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = own.replace(parameters=[fixture, *own.parameters.values()])  # type: ignore[attr-defined]
        return test

    return decorate


def collectives_of(call: Callable[[], object]) -> list[str]:
    """The collectives of ``call`` on this rank, reductions with their size."""
    import torch.distributed as dist
    from torch import Tensor

    calls: list[str] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name} of {args[0].nbytes} bytes" if isinstance(args[0], Tensor) else name)
            return original(*args, **kwargs)

        return note

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier"):
            patch.setattr(dist, name, noted(name, getattr(dist, name)))
        call()
    return calls


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            function, arguments, world, rank, store, timeout = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout),
            )
            torch.manual_seed(0)
            answer = (True, inspect.unwrap(function)(*arguments))  # of a test, what it is made of
        except BaseException:  # whatever it is, it is for the test to show
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
