"""What would explain a gradient norm that is wrong: mistakes that frameworks make, each with the norm it predicts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradstat._core.text import count_of, printable

_Norms = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]

# Factors on everything that no number of ranks explains: numbers of micro-batches, and loss scales.
_MICRO_BATCHES, _SCALES = range(2, 65), [2.0**k for k in range(7, 25)]
# No pair of mistakes is named if so many are expected to fit by chance, from how many predict a norm so near.
_BY_CHANCE, _AROUND = 0.5, 0.2
_MOST_SUBSETS, _MOST_IN_PAIRS = 60, 12
# Rounding of a norm in float32: what fits so well comes before what fits within the rounding of 16 bits.
_FINE = 1e-5


class NormPart(NamedTuple):
    """A gradient, or a part of one, that the whole norm counts once.

    Attributes:
        name: The name of the parameter, on the first of ``ranks``.
        kind: ``"replicated"``, ``"tied"`` (replicas of several names), ``"part"`` (ranks have different tensors of this
            name), ``"sharded"`` (a shard of a distributed tensor or of a flat buffer), or ``"alone"``.
        ranks: The global ranks that have it.
        norm: Its L2 norm, on the first of ``ranks``.
        largest: The largest magnitude of its elements.
        dtype: As torch prints it, without ``torch.``.
        is_frozen: Whether the parameter does not require a gradient.
        differs: Whether ranks that have the same parameter have other gradients of it.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    norm: float
    largest: float
    dtype: str
    is_frozen: bool
    differs: bool


class Explanation(NamedTuple):
    """One or two mistakes that would produce the norm that was reported.

    Attributes:
        text: The mistake, in words.
        predicted: The norm that each rank would report.
    """

    text: str
    predicted: tuple[float, ...]

    def __str__(self) -> str:
        norms = list(dict.fromkeys(f"{norm:.6g}" for norm in self.predicted))
        return f"{self.text} (this would give {', '.join(norms[:4])}{', ...' * (len(norms) > 4)})"


class _Change(NamedTuple):
    """A mistake with the squared norm that each rank then reports, as a share of the right one."""

    words: str
    squares: _Norms


def explain(
    parts: Sequence[NormPart],
    own: Sequence[float],
    reported: Sequence[float],
    ranks: Sequence[int],
    whole: float,
    tolerance: float,
) -> list[Explanation]:
    """The mistakes that predict what all ``ranks`` have ``reported``: one, or if none fits two; the simplest first.

    ``own`` are the norms of the ranks' own tensors, ``whole`` is the right norm, ``tolerance`` relative.
    """
    model, clipped = _Model(parts, own, ranks, whole), _clipped(reported, whole, tolerance)
    for level, changes in enumerate((model.single, model.double)):
        every = list(changes())
        predicted = whole * np.sqrt(np.maximum([change.squares for change in every], 0.0))
        with np.errstate(all="ignore"):
            apart = np.abs(predicted / np.array(reported) - 1).max(1)
        fits = sorted(np.flatnonzero(apart <= tolerance).tolist(), key=lambda i: (apart[i] > _FINE, i))
        near = int((apart <= _AROUND).sum()) - len(fits)
        if fits and (level == 0 or near * tolerance / _AROUND <= _BY_CHANCE):
            return [*(Explanation(every[i].words, tuple(predicted[i].tolist())) for i in fits), *clipped]
    return clipped


def _clipped(reported: Sequence[float], whole: float, tolerance: float) -> list[Explanation]:
    """That a clip came between, if it left a ``whole`` of so few digits that it may be a limit."""
    is_fine = tolerance < _FINE
    limit = float(f"{whole:.{2 if is_fine else 1}g}")
    margin = tolerance if is_fine else tolerance + 2**-8  # a clip rounds its factor to bfloat16, too
    is_one = max(reported) <= min(reported) * (1 + tolerance)
    if not is_one or min(reported) <= whole or abs(whole - limit) > margin * limit:
        return []
    words = f"the gradients were clipped to {limit:g} after this norm was taken: clip to 1e9, and audit again"
    return [Explanation(words, tuple(reported))]


class _Model:
    """The parts of a model as shares of its squared norm, and the mistakes that can be made with them."""

    def __init__(self, parts: Sequence[NormPart], own: Sequence[float], ranks: Sequence[int], whole: float) -> None:
        self._parts, self._world, self._whole = parts, len(ranks), whole or 1.0
        self._own = np.square(np.array(own) / self._whole)
        self._shares: _Norms = np.array([(part.norm / self._whole) ** 2 for part in parts])
        self._present = np.array([[rank in part.ranks for rank in ranks] for part in parts])
        self._copies = self._present.sum(1)
        divisors = (n for n in range(2, self._world + 1) if self._world % n == 0)
        # That of all ranks comes first: it is the likeliest.
        self._sizes = [
            n for n in sorted({*divisors, *self._copies.tolist()}, key=lambda n: (n != self._world, n)) if n > 1
        ]
        self._subsets = list(self._find_subsets())[:_MOST_SUBSETS]

    def single(self) -> Iterator[_Change]:
        """One mistake, the simplest first."""
        yield from self._of_ranks()
        yield from self._of_everything()
        for name, members in self._subsets:
            yield from self._of_subset(name, members)
        for name, members in self._subsets:
            yield self._same(f"only {name} counted", float(self._shares[members].sum()))
        yield from self._of_other_norms()
        for n in (*_MICRO_BATCHES, *_SCALES):
            what = "a loss scale" if n in _SCALES else "a number of micro-batches"
            if n not in self._sizes:
                yield self._same(f"everything is multiplied by {n:g}, as by {what}", n * n)
                yield self._same(f"everything is divided by {n:g}, as by {what}", 1 / (n * n))

    def double(self) -> Iterator[_Change]:
        """Two mistakes."""
        few = self._subsets[:_MOST_IN_PAIRS]
        changes = [(members, change) for name, members in few for change in self._of_subset(name, members)]
        ones = [*self._of_ranks(), *(change for _, change in changes)]
        for one, other in itertools.product(ones, list(self._of_everything())):
            yield _Change(f"{one.words}; and {other.words}", one.squares * other.squares)
        for (some, one), (others, other) in itertools.combinations(changes, 2):
            if not (some & others).any():
                yield _Change(f"{one.words}; and {other.words}", one.squares + other.squares - 1)

    def _same(self, words: str, square: float) -> _Change:
        return _Change(words, np.full(self._world, square))

    def _of_ranks(self) -> Iterator[_Change]:
        """Mistakes in what is added up over which ranks."""
        own, places = self._own, np.arange(self._world)
        is_reduced = not any(part.differs for part in self._parts)
        what = "own tensors, not summed over ranks" if is_reduced else "own gradients, which are not reduced yet"
        yield _Change(f"each rank reports the norm of its {what}", own)
        for size in (n for n in self._sizes if n < self._world and self._world % n == 0):
            others = self._world // size
            for which, block in ((f"{size} neighbours", places // size), (f"every {others}th rank", places % others)):
                has = np.stack([self._present[:, block == at].any(1) for at in block], 1)
                yield _Change(f"norms are summed over groups of {which} only", self._shares @ has)
        for what, square in (
            ("largest", own.max()), ("mean", np.sqrt(own).mean() ** 2), ("sum", np.sqrt(own).sum() ** 2),
        ):  # fmt: skip
            yield self._same(f"the {what} of the ranks' own norms is reported", square)
        if len({*self._copies.tolist()}) > 1:
            yield self._same("every tensor is counted on each rank that has it", own.sum())

    def _of_everything(self) -> Iterator[_Change]:
        return self._of_factors("everything", 1.0)

    def _of_subset(self, name: str, members: _Flags) -> Iterator[_Change]:
        share = float(self._shares[members].sum())
        yield self._same(f"{name} left out", 1 - share)
        yield from self._of_factors(name, share)

    def _of_factors(self, name: str, share: float) -> Iterator[_Change]:
        for n in self._sizes:
            of = f"{n}, the number of ranks" if n == self._world else f"{n}, a number of ranks"
            for words, square in (
                (f"{name} counted {n} times", n),
                (f"{name} divided by {of}", 1 / (n * n)),
                (f"{name} multiplied by {of}", n * n),
                (f"{name} divided by the square root of {of}", 1 / n),
            ):
                yield self._same(words, 1 + (square - 1) * share)

    def _of_other_norms(self) -> Iterator[_Change]:
        whole = self._whole
        norms, largest = np.sqrt(self._shares), max(part.largest for part in self._parts)
        yield self._same("the square of the norm is reported", whole**2)
        yield self._same("the sum of the tensors' norms is reported", norms.sum() ** 2)
        yield self._same("the largest of the tensors' norms is reported", norms.max() ** 2)
        yield self._same("the largest magnitude of all elements is reported, which is the norm of order infinity",
                         (largest / whole) ** 2)  # fmt: skip

    def _find_subsets(self) -> Iterator[tuple[str, _Flags]]:
        """Tensors that a framework may treat in one way, in words: by kind, dtype, ranks and names."""
        parts, seen = self._parts, {np.ones(len(self._parts), dtype=bool).tobytes()}
        names = [printable(re.sub(r"\b\d+\b", "*", part.name)) for part in parts]
        prefixes = {".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 2)}
        for words, of_parts in (
            ("{} tensors", [part.kind for part in parts]),
            ("{} tensors", [part.dtype for part in parts]),
            ("{} parameters", ["frozen" if part.is_frozen else "trained" for part in parts]),
            ("tensors on {} ranks", self._copies.tolist()),
            *((prefix, [_is_in(name, prefix) for name in names]) for prefix in sorted(prefixes, key=_by_depth)),
        ):
            for value in dict.fromkeys(of_parts):
                members = np.array([one == value for one in of_parts])
                if value and members.tobytes() not in seen:
                    seen.add(members.tobytes())
                    yield f"{words.replace('{}', str(value))} ({count_of(int(members.sum()), 'tensor')})", members


def _is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _by_depth(prefix: str) -> tuple[int, str]:
    return prefix.count("."), prefix
