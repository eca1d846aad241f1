"""`OriginReport`: which rank brought NaN or Inf into which gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradstat._core.collectives import in_words
from gradstat.report import NonFiniteGradientError

_NAMED_IN_ERROR = 5
_NAMED_IN_TEXT = 20


class BadGradient(NamedTuple):
    """A gradient that was not finite before it was reduced.

    Attributes:
        name: Of its parameter.
        numel: Its elements.
        micro_batch: The first in which it was bad on any rank.
        counts: NaN and Inf elements on each rank where it was bad then, in order of the ranks; never empty.
    """

    name: str
    numel: int
    micro_batch: int
    counts: dict[int, tuple[int, int]]


class OriginReport:
    """Which rank brought NaN or Inf into which gradient, the same on every rank. Ranks are global numbers.

    Made by `OriginWatch.result`. What comes later tells nothing: once a bad gradient was reduced or accumulated, it is
    bad everywhere. So each parameter is described as it was in the first micro-batch in which any rank had it bad.
    """

    def __init__(
        self, names: Sequence[str], bad: Sequence[BadGradient], ranks: tuple[int, ...], micro_batches: int
    ) -> None:
        self._names = frozenset(names)
        self._bad = {one.name: one for one in bad}
        self._ranks = ranks
        self._micro_batches = micro_batches

    @property
    def ok(self) -> bool:
        """Whether every local gradient was finite on every rank."""
        return not self._bad

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """The parameters whose gradient was bad on some rank, in the model's order."""
        return tuple(self._bad)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that were asked."""
        return self._ranks

    @property
    def micro_batches(self) -> int:
        """How many there were: reductions, or each ``backward()`` with ``per_micro_batch``."""
        return self._micro_batches

    def rank_of(self, name: str) -> int | None:
        """The rank that brought it: the lowest of those where ``name``'s gradient was bad first; None if none was.

        Raises:
            KeyError: No parameter has this name.
        """
        bad = self._find(name)
        return None if bad is None else next(iter(bad.counts))

    def ranks_bad(self, name: str) -> int:
        """On how many ranks ``name``'s gradient was bad when it first was. Errors as in `rank_of`."""
        bad = self._find(name)
        return 0 if bad is None else len(bad.counts)

    def micro_batch_of(self, name: str) -> int | None:
        """The first micro-batch in which ``name``'s gradient was bad, counted from 0. Errors as in `rank_of`.

        Without ``per_micro_batch`` reductions are counted: under ``no_sync()`` all micro-batches of a step are one.
        """
        bad = self._find(name)
        return None if bad is None else bad.micro_batch

    def raise_if_nonfinite(self) -> None:
        """Raises `NonFiniteGradientError`, naming ranks and parameters, on every rank, unless `ok`.

        The error has no ``report`` of its own: the gradients described are those of several ranks.
        """
        if not self.ok:
            raise NonFiniteGradientError("\n".join(self._account(_NAMED_IN_ERROR)))

    def __repr__(self) -> str:
        state = "ok" if self.ok else f"{len(self._bad)} not finite"
        return f"OriginReport({len(self._names)} gradients of {len(self._ranks)} ranks, {state})"

    def __str__(self) -> str:
        if self.ok:
            return (
                f"gradstat: {len(self._names)} gradients, finite on all {len(self._ranks)} ranks before the reduction"
            )
        return "gradstat: " + "\n".join(self._account(_NAMED_IN_TEXT))

    def _find(self, name: str) -> BadGradient | None:
        if name not in self._names:
            raise KeyError(f"no parameter named {name!r} is reduced by this model")
        return self._bad.get(name)

    def _account(self, limit: int) -> list[str]:
        """Who brought what, in words: micro-batches in order, parameters of the same ranks together."""
        together: dict[tuple[int, tuple[int, ...]], list[BadGradient]] = {}
        for one in self._bad.values():
            together.setdefault((one.micro_batch, tuple(one.counts)), []).append(one)
        lines = [f"NaN or Inf in {len(self._bad)} of {len(self._names)} gradients before they were reduced"]
        left = limit
        for micro_batch, ranks in sorted(together):
            group = together[micro_batch, ranks]
            lines.append(f"brought by {self._who(ranks)}{self._when(micro_batch)}: {_gradients(len(group))}")
            lines += [f"  {one.name}: {_counts(one, ranks[0])}" for one in group[:left]]
            lines += [f"  and {len(group) - left} more"] if len(group) > left else []
            left = max(0, left - len(group))
        return lines

    def _who(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) == 1:
            return f"{in_words(ranks)} alone (of {len(self._ranks)})"
        if ranks == self._ranks:
            return f"ALL {len(ranks)} ranks (so not by one rank's data: parameters, learning rate or loss scale?)"
        return f"{in_words(ranks)} (of {len(self._ranks)})"

    def _when(self, micro_batch: int) -> str:
        if self._micro_batches == 1:
            return ""
        return f" in micro-batch {micro_batch} of {self._micro_batches} (counted from 0)"


def _counts(bad: BadGradient, rank: int) -> str:
    nan, inf = bad.counts[rank]
    found = " and ".join(f"{n:,} {kind}" for n, kind in ((nan, "NaN"), (inf, "Inf")) if n)
    return f"{found} of {bad.numel:,} elements" + (f" on rank {rank}" if len(bad.counts) > 1 else "")


def _gradients(count: int) -> str:
    return f"{count} gradient{'s' * (count != 1)}"
