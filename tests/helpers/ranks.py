"""Tests on several ranks: a pool of processes that run functions as the ranks of a gloo process group on the CPU.

Importing torch takes seconds, so the processes are forked from one that has imported it, and kept. Every call gets its
own process group, with as many ranks as it asks for.
"""

import contextlib
import datetime
import functools
import inspect
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

MOST = 4
_START_TIMEOUT, _STOP_TIMEOUT = 120.0, 10.0
# Seconds without progress after which a process group, and then a rank, is given up; much of them on a busy machine.
_COLLECTIVE, _ANSWER = 300.0, 120.0
# Imports shared by all ranks; torch imports _dynamo lazily, and it is large.
_PRELOADED = ["torch._dynamo", "gradstat.distributed", "pytest"]


class Ranks:
    """The pool. A failure on any rank raises an error with that rank's traceback."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._start()

    def _start(self) -> None:
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for _ in range(MOST):
            ours, theirs = self._context.Pipe()
            self._processes.append(self._context.Process(target=_serve, args=(theirs,), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(_START_TIMEOUT):
                raise RuntimeError(f"a rank did not start within {_START_TIMEOUT:g} s")
            pipe.recv()

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls an importable function on ranks 0 to ``world - 1`` and returns the result of each.

        Ranks that do not answer for longer than a collective may take are started again.
        """
        self._groups += 1
        store = Path(self._folder.name) / str(self._groups)
        for rank in range(world):
            self._pipes[rank].send((function, arguments, world, rank, str(store)))
        pending = dict(zip(self._pipes, range(world), strict=False))
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while pending:
            ready = connection.wait(pending, _COLLECTIVE + _ANSWER)
            if not ready:
                raise self._lost(f"ranks {list(pending.values())} made no progress for {_COLLECTIVE + _ANSWER:g} s")
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    raised, value = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join(_STOP_TIMEOUT)
                    raise self._lost(f"rank {rank} died with exit status {self._processes[rank].exitcode}") from None
                (failures if raised else answers)[rank] = value
        if failures:
            raise RuntimeError("\n".join(f"on rank {rank}:\n{failures[rank]}" for rank in sorted(failures)))
        return [answers[rank] for rank in range(world)]

    def _lost(self, how: str) -> RuntimeError:
        self._kill()
        self._start()
        return RuntimeError(how)

    def stop(self) -> None:
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            process.terminate()  # before SIGKILL, so that coverage tools can write their data
        for process in self._processes:
            process.join(_STOP_TIMEOUT)
            process.kill()
            process.join()


def _serve(pipe: connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            function, arguments, world, rank, store = pipe.recv()
        except EOFError:
            return
        except Exception:  # the function's module cannot be imported here
            pipe.send((True, traceback.format_exc()))
            continue
        try:
            timeout = datetime.timedelta(seconds=_COLLECTIVE)
            dist.init_process_group("gloo", f"file://{store}", timeout, world_size=world, rank=rank)
            torch.manual_seed(0)
            answer = (False, function(*arguments))
        except BaseException:  # of any kind: the caller reports it
            answer = (True, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone
            pipe.send(answer)


def on_ranks(world: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a function into a test that calls it on ``world`` ranks, with the test's parameters."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function)

        @functools.wraps(function)
        def test(ranks: Ranks, **arguments: Any) -> None:
            ranks.run(world, _called, test, *(arguments[name] for name in own.parameters))

        fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = own.replace(parameters=[fixture, *own.parameters.values()])  # type: ignore[attr-defined]
        return test

    return decorate


def _called(test: Callable[..., None], *arguments: Any) -> None:
    inspect.unwrap(test)(*arguments)


def collectives_of(call: Callable[[], object]) -> list[str]:
    """The collectives that ``call`` performs on this rank, with sizes in bytes for tensors."""
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
