"""What a clip remembers of its steps, in three tensors on the gradients' device, changed in place and never read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

State = dict[str, Tensor]

# The columns of "totals": norms recorded, norms not finite, coefficients decided, those below 1, and their sum.
RECORDED, NONFINITE, DECIDED, CLIPPED, REMAINING = range(5)


def new(window: int, device: torch.device) -> State:
    """The tensors of a history without steps."""
    return {
        # The last norms in a ring, NaN where there is none yet.
        "norms": torch.full((window,), math.nan, dtype=torch.float64, device=device),
        "totals": torch.zeros(5, dtype=torch.float64, device=device),
        "smallest": torch.ones((), dtype=torch.float64, device=device),  # coefficient
    }


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
