"""The state of a clip: numbers in one float64 tensor, on the gradients' device, that the host does not read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradstat._core.saved import A_COUNT, Saved, is_count
from gradstat._core.tensors import to_device

State = dict[str, Tensor]

# Indices into "totals": norms recorded, non-finite norms, multipliers decided, those below 1, and the sum of these.
RECORDED, NONFINITE, DECIDED, CLIPPED, MULTIPLIER_SUM = range(5)

_TOTALS = 5


class MethodState(NamedTuple):
    """The numbers that a method itself keeps."""

    length: int = 0
    initial: float = 0.0


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


def loaded(saved: Saved, window: int, method_names: Sequence[str], of_method: MethodState) -> Tensor:
    """A new state tensor from such views by name, as saved, with the method's own last, in the order of the names.

    ``of_method`` is the method's state before the first step; without a length it has one number for each tensor. Waits
    for the device. ValueError, naming the entry, unless a clip with this ``window`` can have made this.
    """
    norms = saved["norms"].numbers(None)
    if len(norms) != window:
        raise ValueError(
            f"this state keeps the last {len(norms)} norms, this clip {window}; make the clip with window={len(norms)}"
        )
    totals, smallest = saved["totals"].numbers(_TOTALS), saved["smallest"].numbers()
    saved["totals"].require(totals[:MULTIPLIER_SUM], is_count(totals[:MULTIPLIER_SUM]), A_COUNT)
    fine = (totals >= 0) & (totals <= totals[CLIPPED])  # of the sum
    fine[:MULTIPLIER_SUM] = True
    saved["totals"].require(totals, fine, "a sum of that many multipliers below 1")
    saved["smallest"].require(smallest, (smallest >= 0) & (smallest <= 1), "a number from 0 to 1")
    is_used = torch.arange(window, device=norms.device) < totals[RECORDED].to(norms.device)
    fine = torch.where(is_used, (norms >= 0) & norms.isfinite(), norms.isnan())
    saved["norms"].require(norms, fine, "a finite number from 0 for each norm recorded, NaN where there is none")
    parts = [totals, smallest.view(1), norms]
    for name in method_names if of_method.length else [name for name in method_names if name in saved]:
        numbers = saved[name].numbers(*(() if of_method.length else (None,)))
        fine = (numbers >= 0) & (numbers.isfinite() | (numbers == of_method.initial))
        saved[name].require(numbers, fine, "a finite number from 0")
        parts.append(numbers.view(-1))
    return torch.cat([part.to(norms.device) for part in parts])


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
