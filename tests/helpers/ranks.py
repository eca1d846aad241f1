"""Tests on several ranks: a pool of processes for the whole session, of which each test uses as many as it needs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from gradstat.distributed._ranks import RankError
from gradstat.distributed._ranks import Ranks as _Ranks

MOST = 4
_ANSWER = 30.0


class Ranks(_Ranks):
    """Runs functions of a test module on ranks; a failure on any rank fails the test with that rank's traceback."""

    def __init__(self) -> None:
        super().__init__(MOST, preload=["pytest"])

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 20.0) -> list[Any]:  # type: ignore[override]
        try:
            return super().run(world, function, *arguments, timeout=timeout, limit=timeout + _ANSWER)
        except RankError as error:
            pytest.fail(str(error))


def on_ranks(world: int, timeout: float = 20.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a function into a test that calls it on ``world`` ranks, with the test's parameters."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function)

        @functools.wraps(function)
        def test(ranks: Ranks, **arguments: Any) -> None:
            ranks.run(world, _called, test, *(arguments[name] for name in own.parameters), timeout=timeout)

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
