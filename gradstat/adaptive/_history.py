"""What a clip remembers of its steps: numbers in one float64 tensor, on the gradients' device, that are never read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

State = dict[str, Tensor]

# Of "totals": norms recorded, norms not finite, coefficients decided, those below 1, and their sum.
RECORDED, NONFINITE, DECIDED, CLIPPED, REMAINING = range(5)

_TOTALS = 5


def size(window: int, own: tuple[int, float]) -> int:
    """How many numbers are remembered."""
    return _TOTALS + 1 + window + own[0]


def extended(memory: Tensor | None, window: int, own: tuple[int, float], device: torch.device) -> Tensor:
    """``memory``, or that of no steps, on ``device``, laid out as csrc/decide.h has it.

    Behind the history are numbers of the rule itself, ``own``: how many, and what they begin with.
    """
    if memory is None:
        start = [*[0.0] * _TOTALS, 1.0, *[math.nan] * window]
        memory = torch.tensor(start, dtype=torch.float64, device="cpu")
    missing = memory.new_full((size(window, own) - len(memory),), own[1])
    return torch.cat([memory, missing]).to(device)


def views(memory: Tensor, window: int) -> tuple[State, Tensor]:
    """The tensors of the history, and the rule's own numbers."""
    totals, smallest, norms, own = memory.split((_TOTALS, 1, window, len(memory) - window - _TOTALS - 1))
    # The last norms in a ring, NaN where there is none yet; the smallest coefficient.
    return {"norms": norms, "totals": totals, "smallest": smallest[0]}, own


def joined(state: State) -> Tensor:
    """New memory of such tensors by name, those of the rule last."""
    first = ("totals", "smallest", "norms")
    return torch.cat([state[name].view(-1) for name in (*first, *(name for name in state if name not in first))])


def add_norm_(state: State, norm: Tensor, kept: Tensor) -> None:
    """Records the 0-d float64 ``norm`` where the 0-d bool ``kept`` is True; one that is not finite is counted."""
    norms, totals = state["norms"], state["totals"]
    position = (totals[RECORDED] % len(norms)).long().view(1)
    norms.scatter_(0, position, torch.where(kept, norm, norms.gather(0, position)))
    totals[:DECIDED] += torch.stack((kept, ~norm.isfinite()))


def add_coefficients_(state: State, coefficients: Tensor, kept: Tensor) -> None:
    """Counts the coefficients, 0-d or 1-d float64, of those decisions that ``kept`` keeps; the others are 1."""
    clipped = coefficients < 1
    counted = torch.stack((kept, clipped, torch.where(clipped, coefficients, 0.0)))
    state["totals"][DECIDED:] += counted.view(3, -1).sum(1)
    state["smallest"].copy_(torch.cat([state["smallest"].view(1), coefficients.view(-1)]).amin())


def add_totals_(state: State, memories: Tensor) -> None:
    """Adds what other memories, a row each, have counted of coefficients."""
    state["totals"][DECIDED:] += memories[:, DECIDED:_TOTALS].sum(0)
    state["smallest"].copy_(torch.minimum(state["smallest"], memories[:, _TOTALS].amin()))
