"""A case of the benchmark of detection: a fault in a training, which begins mid-run or before step 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import rows  # noqa: F401  # finds the helpers of the tests
from helpers.training import RECORD, Training

ONSET = 150  # the step in which faults in the middle of a run begin


@dataclass(frozen=True)
class Case:
    """A fault in a training, which begins in step ``onset``."""

    set: str
    half: str  # "tuning", "figures" or "both"
    subject: str
    what: str
    twin: Callable[[int], Training]  # the healthy training, from a seed
    breaks: Callable[[Training], object]
    place: str  # regular expression for names in findings about the right place; empty if the fault is everywhere
    onset: int
    broken: Callable[[int], Training] | None = None  # the training that ``breaks`` gets, if it is not the twin
    is_everywhere: bool = False  # a comparison that says so names the place
    is_held_out: bool = False  # judged by the healthy loss of unseen batches
    ranks: int = 1
    broken_ranks: tuple[int, ...] = (0,)
    policy: Any = field(default_factory=lambda: RECORD)

    @property
    def when(self) -> str:
        return "mid-run" if self.onset else "from step 0"
