"""A pool of processes that run functions as the ranks of a gloo process group on the CPU: started once, used often.

Importing torch takes seconds, so the processes are forked from one that has imported it, and kept. Every call gets its
own process group, with as many ranks as it asks for.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_START_TIMEOUT, _STOP_TIMEOUT = 120.0, 10.0
# Imports shared by all ranks; torch imports _dynamo lazily, and it is large.
_PRELOADED = ["torch._dynamo", "gradstat.distributed"]


class RankError(RuntimeError):
    """A function raised on a rank, or a rank did not answer or died. The message says which rank and how."""


class LostRankError(RankError):
    """The ranks in ``ranks`` hung or died; ``answers`` are those of the other ranks. All have been restarted."""

    def __init__(self, how: str, ranks: Sequence[int], answers: dict[int, Any]) -> None:
        super().__init__(f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))} {how}")
        self.how = how
        self.ranks = tuple(ranks)
        self.answers = answers


class Ranks:
    """A pool of ``most`` processes; a context manager. ``preload`` lists modules to import before forking them."""

    def __init__(self, most: int, preload: Sequence[str] = ()) -> None:
        self._most = most
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, *preload])
        self._start()

    def _start(self) -> None:
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for _ in range(self._most):
            ours, theirs = self._context.Pipe()
            self._processes.append(self._context.Process(target=_serve, args=(theirs,), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(_START_TIMEOUT):
                raise RankError(f"a rank did not start within {_START_TIMEOUT:g} s")
            pipe.recv()

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout: float, limit: float) -> list[Any]:
        """Calls an importable function on ranks 0 to ``world - 1`` and returns the result of each.

        ``timeout`` is the process group's, in seconds; ``limit`` is the longest time without an answer from any rank.
        Raises `RankError` with the tracebacks of the ranks on which the function raised, or `LostRankError`.
        """
        self._groups += 1
        store = Path(self._folder.name) / str(self._groups)
        for rank in range(world):
            self._pipes[rank].send((function, arguments, world, rank, str(store), timeout))
        pending = dict(zip(self._pipes, range(world), strict=False))
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while pending:
            ready = connection.wait(pending, limit)
            if not ready:
                raise self._lost(f"made no progress for {limit:g} s", list(pending.values()), answers)
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    raised, value = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join(_STOP_TIMEOUT)
                    how = f"died with exit status {self._processes[rank].exitcode}"
                    raise self._lost(how, [rank], answers) from None
                (failures if raised else answers)[rank] = value
        if failures:
            raise RankError("\n".join(f"on rank {rank}:\n{failures[rank]}" for rank in sorted(failures)))
        return [answers[rank] for rank in range(world)]

    def stop(self) -> None:
        self._kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _lost(self, how: str, ranks: list[int], answers: dict[int, Any]) -> LostRankError:
        self._kill()
        self._start()
        return LostRankError(how, ranks, answers)

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
            function, arguments, world, rank, store, seconds = pipe.recv()
        except EOFError:
            return
        except Exception:  # the function's module cannot be imported here
            pipe.send((True, traceback.format_exc()))
            continue
        try:
            timeout = datetime.timedelta(seconds=seconds)
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
