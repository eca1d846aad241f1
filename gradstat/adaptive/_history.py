"""The state of a clip: numbers in one float64 tensor, on the gradients' device, that the host does not read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradstat._core.tensors import to_device

State = dict[str, Tensor]

# Indices into "totals": norms recorded, non-finite norms, coefficients decided, those below 1, and the sum of these.
RECORDED, NONFINITE, DECIDED, CLIPPED, COEFFICIENT_SUM = range(5)

_TOTALS = 5


def size(window: int, own: tuple[int, float]) -> int:
    """The length of the state tensor."""
    return _TOTALS + 1 + window + own[0]


def extended(memory: Tensor | None, window: int, own: tuple[int, float], device: torch.device) -> Tensor:
    """``memory`` on ``device``, or an initial state, with the layout of csrc/decide.h.

    The history is followed by ``own[0]`` numbers of the rule itself, with initial value ``own[1]``.
    """
    if memory is None:
        start = [*[0.0] * _TOTALS, 1.0, *[math.nan] * window]
        memory = torch.tensor(start, dtype=torch.float64, device="cpu")
    missing = memory.new_full((size(window, own) - len(memory),), own[1])
    return to_device(torch.cat([memory, missing]), device)


def views(memory: Tensor, window: int) -> tuple[State, Tensor]:
    """Views of the history's tensors by name, and of the rule's own numbers."""
    totals, smallest, norms, own = memory.split((_TOTALS, 1, window, len(memory) - window - _TOTALS - 1))
    # "norms" is a ring of the last norms, NaN where there is none yet; "smallest" is the smallest coefficient.
    return {"norms": norms, "totals": totals, "smallest": smallest[0]}, own


def joined(state: State) -> Tensor:
    """A new state tensor from such views by name, with the rule's own last."""
    first = ("totals", "smallest", "norms")
    return torch.cat([state[name].view(-1) for name in (*first, *(name for name in state if name not in first))])


def add_norm_(state: State, norm: Tensor, kept: Tensor) -> None:
    """Records the 0-d float64 ``norm`` where the 0-d bool ``kept`` is True; counts one that is not finite."""
    norms, totals = state["norms"], state["totals"]
    position = (totals[RECORDED] % len(norms)).long().view(1)
    norms.scatter_(0, position, torch.where(kept, norm, norms.gather(0, position)))
    totals[:DECIDED] += torch.stack((kept, ~norm.isfinite()))


def add_coefficients_(state: State, coefficients: Tensor, kept: Tensor) -> None:
    """Counts the coefficients, 0-d or 1-d float64, of the decisions where ``kept`` is True; the others must be 1."""
    clipped = coefficients < 1
    counted = torch.stack((kept, clipped, torch.where(clipped, coefficients, 0.0)))
    state["totals"][DECIDED:] += counted.view(3, -1).sum(1)
    state["smallest"].copy_(torch.cat([state["smallest"].view(1), coefficients.view(-1)]).amin())


def add_totals_(state: State, memories: Tensor) -> None:
    """Adds the coefficient counts of other states, one per row."""
    state["totals"][DECIDED:] += memories[:, DECIDED:_TOTALS].sum(0)
    state["smallest"].copy_(torch.minimum(state["smallest"], memories[:, _TOTALS].amin()))
