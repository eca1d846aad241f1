"""The state of a clip: numbers in one float64 tensor, on the gradients' device, that the host does not read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradstat._core.saved import are_counts, exactly, numbers, require
from gradstat._core.tensors import to_device

State = dict[str, Tensor]

# Indices into "totals": norms recorded, non-finite norms, multipliers decided, those below 1, and the sum of these.
RECORDED, NONFINITE, DECIDED, CLIPPED, MULTIPLIER_SUM = range(5)

_TOTALS = 5


class MethodState(NamedTuple):
    length: int
    initial: float


def size(window: int, of_method: MethodState) -> int:
    return _TOTALS + 1 + window + of_method.length


def extended(memory: Tensor | None, window: int, of_method: MethodState, device: torch.device) -> Tensor:
    """``memory`` on ``device``, or an initial state, with the layout of csrc/decide.h.

    The history is followed by the numbers of the method itself.
    """
    if memory is None:
        start = [*[0.0] * _TOTALS, 1.0, *[math.nan] * window]
        memory = torch.tensor(start, dtype=torch.float64, device="cpu")
    missing = memory.new_full((size(window, of_method) - len(memory),), of_method.initial)
    return to_device(torch.cat([memory, missing]), device)


def views(memory: Tensor, window: int) -> tuple[State, Tensor]:
    """Views of the history's tensors by name, and of the method's own numbers."""
    totals, smallest, norms, of_method = memory.split((_TOTALS, 1, window, len(memory) - window - _TOTALS - 1))
    # "norms" is a ring of the last norms, NaN where there is none yet; "smallest" is the smallest multiplier.
    return {"norms": norms, "totals": totals, "smallest": smallest[0]}, of_method


def loaded(
    state: Any, place: str, rule: str, window: int, method_names: Sequence[str], of_method: MethodState
) -> Tensor:
    """A new state tensor from the saved ``state`` of a clip, with the method's own numbers in the order of the names.

    ``of_method`` is the method's state before the first step; without a length it has one number for each tensor. Waits
    for the device. ValueError, naming the entry, unless a clip of this ``rule`` and ``window`` can have made the state.
    """

    def fit_totals(totals: Tensor) -> Tensor:
        sum_ = totals[MULTIPLIER_SUM]
        return are_counts(totals[:MULTIPLIER_SUM]) & (sum_ >= 0) & (sum_ <= totals[CLIPPED])

    def fit_norms(norms: Tensor) -> Tensor:
        recorded = state["tensors"]["totals"][RECORDED].to(norms.device)
        is_used = torch.arange(window, device=norms.device) < recorded
        return torch.where(is_used, (norms >= 0) & norms.isfinite(), norms.isnan())

    kinds = {
        "totals": numbers((_TOTALS,), "counts, and a sum of as many multipliers below 1", fit_totals),
        "smallest": numbers((), "a number from 0 to 1", lambda smallest: (smallest >= 0) & (smallest <= 1)),
        "norms": numbers((window,), "a finite number from 0 for each norm recorded, NaN for others", fit_norms),
    }
    shape, initial = () if of_method.length else None, of_method.initial
    fits = numbers(shape, "finite numbers from 0", lambda own: (own >= 0) & (own.isfinite() | (own == initial)))
    kinds |= dict.fromkeys(method_names, fits)
    require(state, {"rule": exactly(rule), "tensors": kinds}, place)
    tensors = state["tensors"]
    return torch.cat([tensors[name].detach().reshape(-1).to(tensors["norms"].device) for name in kinds])


def add_norm_(state: State, norm: Tensor, is_recorded: Tensor) -> None:
    """Records the 0-d float64 ``norm`` where the 0-d bool ``is_recorded`` is True; counts one that is not finite."""
    norms, totals = state["norms"], state["totals"]
    position = (totals[RECORDED] % len(norms)).long().view(1)
    norms.scatter_(0, position, torch.where(is_recorded, norm, norms.gather(0, position)))
    totals[:DECIDED] += torch.stack((is_recorded, ~norm.isfinite()))


def add_multipliers_(state: State, multipliers: Tensor, is_recorded: Tensor) -> None:
    """Counts the multipliers, 0-d or 1-d float64, of the decisions where ``is_recorded``; the others must be 1."""
    clipped = multipliers < 1
    counted = torch.stack((is_recorded, clipped, torch.where(clipped, multipliers, 0.0)))
    state["totals"][DECIDED:] += counted.view(3, -1).sum(1)
    state["smallest"].copy_(torch.cat([state["smallest"].view(1), multipliers.view(-1)]).amin())
