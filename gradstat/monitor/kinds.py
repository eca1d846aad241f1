"""The kinds of tensors that a monitor measures: what they are called, how often, and which come first in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple


class Kind(NamedTuple):
    """One kind of tensors."""

    name: str  # as in `Recording.tables`, `Window.tables` and `Finding.about`
    watch: str  # what `watch=` calls it
    period: int  # measured every so many steps unless that says otherwise, 0 for never
    names: Literal["batch", "module", "parameter"]  # what its tensors are named after
    sizes_vary: bool = False  # with the input


STATE = Kind("optimizer state", "optimizer", 50, "parameter")
"""Stands for every state of the optimizer, each of which is a kind called as in the optimizer, ``"exp_avg"`` say."""

GRADIENT = Kind("gradient", "gradients", 1, "parameter")

KINDS: tuple[Kind, ...] = (
    Kind("batch", "batch", 1, "batch", sizes_vary=True),
    Kind("constant", "batch", 1, "batch"),  # the share of features that are the same in all samples
    Kind("label", "batch", 1, "batch"),  # the smallest and the largest, judged as they arrive
    Kind("parameter", "parameters", 50, "parameter"),
    Kind("buffer", "buffers", 50, "parameter"),
    Kind("activation", "activations", 0, "module", sizes_vary=True),
    Kind("output", "outputs", 50, "module"),  # the share of predictions that are certain
    GRADIENT,
    STATE,
    Kind("update", "updates", 0, "parameter"),
)
"""All of them. A step computes each from those before it: where two differ at once, the earlier one is the cause."""

CHECKS: dict[str, int] = {"origin": 0, "replicas": 0, "batches": 0}
"""What ranks compare, by the name in ``watch=``; no tensors come of it."""

DEFAULT_WATCH: dict[str, int] = {kind.watch: kind.period for kind in (GRADIENT, *KINDS)} | CHECKS
"""What is looked at every how many steps; 0 for never."""

_PLACES = {kind.name: place for place, kind in enumerate(KINDS)}


def place_of(name: str) -> int:
    """The place in the order of causes of the kind called ``name``."""
    return _PLACES.get(name, _PLACES[STATE.name])


def kind_of(name: str) -> Kind:
    """The kind called ``name``; what is not in the table is a state of the optimizer."""
    return KINDS[place_of(name)]


def in_order(names: Iterable[str]) -> list[str]:
    """Names of kinds, causes before effects; states of the optimizer stay in the order given."""
    return sorted(names, key=place_of)


def name_of_state(key: str) -> str:
    """What the kind of an optimizer's state is called: as the state, unless something else is called so."""
    return f"optimizer {key}" if key in _PLACES or key == "scalars" else key


def periods(watch: Mapping[str, int] | Sequence[str] | None) -> dict[str, int]:
    """The default with ``watch`` on top; a sequence of names means every step."""
    chosen = dict(DEFAULT_WATCH)
    wanted = dict(watch) if isinstance(watch, Mapping) else dict.fromkeys(watch or (), 1)
    for name, period in wanted.items():
        if name not in chosen:
            raise ValueError(f"cannot watch {name!r}; known: {', '.join(chosen)}")
        if isinstance(period, bool) or not isinstance(period, int):
            raise TypeError(f"watch[{name!r}] is {period!r}; expected a number of steps, 0 for never")
        if period < 0:
            raise ValueError(f"watch[{name!r}] is {period}; expected 0 for never, 1 for every step, or more")
        chosen[name] = period
    if chosen["gradients"] != 1:
        raise ValueError("gradients are what a monitor lives on; they are watched on every step")
    return chosen
