"""The kinds of tensors that a monitor measures: their names, how often, and in which order a step computes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gradstat._core.text import expect


class Kind(NamedTuple):
    name: str  # as in `Recording.tables`, `Window.tables` and `Finding.about`
    watch: str  # its key in `watch=`
    period: int  # by default it is measured every so many steps, 0 for never
    names: Literal["batch", "module", "parameter"]  # what its tensors are named after
    sizes_vary: bool = False  # whether sizes depend on the input


STATE = Kind("optimizer state", "optimizer", 50, "parameter")
"""Stands for all optimizer states. Each is a kind of its own, named by its key in the optimizer, as ``"exp_avg"``."""

GRADIENT = Kind("gradient", "gradients", 1, "parameter")

KINDS: tuple[Kind, ...] = (
    Kind("batch", "inputs", 1, "batch", sizes_vary=True),
    Kind("input", "inputs", 1, "batch", sizes_vary=True),  # what the model was called with
    Kind("constant", "inputs", 1, "batch"),  # 1 if all samples are the same, else 0
    Kind("update", "updates", 0, "parameter"),  # how the step before has changed the parameters
    Kind("parameter", "parameters", 50, "parameter"),
    Kind("buffer", "buffers", 50, "parameter"),
    Kind("activation", "activations", 0, "module", sizes_vary=True),
    Kind("output", "outputs", 50, "module"),  # what is known of outputs; only recordings before 0.1.0 have rows
    GRADIENT,
    STATE,
)
"""All kinds, in the order in which a step computes them: if two go wrong in one step, the earlier is the cause."""

SCALARS = frozenset(
    {"loss", "loss_nonfinite", "lr", "norm", "finite_norm", "nonfinite", "missing"}
    | {"loss_scale", "refused", "not_zeroed", "scaled_clip", "tiny_clip", "dropped"}
)
"""The scalars that gradstat records, beside the rates ``"lr[1]"`` and so on of other groups; others are the user's."""

INPUT_KINDS = ("batch", "input")
"""What a training step begins with: what ``Monitor.check_batch`` was given, and what the model was called with."""

CHECKS: dict[str, int] = {"origin": 0, "replicas": 0, "rank_batches": 0}
"""Comparisons between ranks, by their key in ``watch=``; they add no tensors."""

DEFAULT_WATCH: dict[str, int] = {kind.watch: kind.period for kind in (GRADIENT, *KINDS)} | CHECKS
"""What is measured every how many steps; 0 for never."""

_PLACES = {kind.name: place for place, kind in enumerate(KINDS)}


def place_of(name: str) -> int:
    """The position in `KINDS` of the kind called ``name``."""
    return _PLACES.get(name, _PLACES[STATE.name])


def place_of_series(name: str) -> float:
    """As `place_of`, for a scalar: learning rates come first, the loss before the gradients, others after them."""
    if name.startswith("lr") or name == "loss_scale":
        return -1.0
    return place_of(GRADIENT.name) + (-0.5 if name == "loss" else 0.5)


def kind_of(name: str) -> Kind:
    """The kind called ``name``; `STATE` for names that are not in `KINDS`."""
    return KINDS[place_of(name)]


def plural_of(name: str) -> str:
    """What several tensors of the kind called ``name`` are called."""
    return f"{name} states" if kind_of(name) is STATE else "batches" if name == "batch" else f"{name}s"


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts ``names`` of kinds as in `KINDS`; optimizer states keep the order given."""
    return sorted(names, key=place_of)


def name_of_state(key: str) -> str:
    """The kind of the optimizer state ``key``: the key itself, with a prefix if that name is taken."""
    return f"optimizer {key}" if key in _PLACES or key == "scalars" else key


def asked_for(watch: Mapping[str, int] | Sequence[str] | None) -> dict[str, int]:
    """``watch`` as a dictionary of periods. Kinds given only by name are watched in every step."""
    expect("watch", watch, Iterable | None, "names of kinds, or a mapping from names to numbers of steps")
    if isinstance(watch, Mapping):
        return dict(watch)
    return dict.fromkeys([watch] if isinstance(watch, str) else watch or (), 1)


def periods(watch: Mapping[str, int] | Sequence[str] | None) -> dict[str, int]:
    """`DEFAULT_WATCH` updated with ``watch``."""
    chosen = dict(DEFAULT_WATCH)
    for name, period in asked_for(watch).items():
        if name not in chosen:
            raise ValueError(f"cannot watch {name!r}; known: {', '.join(chosen)}")
        if isinstance(period, bool) or not isinstance(period, int):
            raise TypeError(f"watch[{name!r}] is {period!r}; expected a number of steps, 0 for never")
        if period < 0:
            raise ValueError(f"watch[{name!r}] is {period}; expected 0 for never, 1 for every step, or more")
        chosen[name] = period
    if chosen["gradients"] != 1:
        raise ValueError(f"watch['gradients'] is {chosen['gradients']}; gradients must be measured in every step")
    return chosen
