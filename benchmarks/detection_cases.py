"""The cases of the benchmark of detection: all faults, each in a training and beginning mid-run or before step 0."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from detection_mistakes import MISTAKES, SUBJECTS, applies, at_outputs
from detection_published import HAS_OPERATORS, SILENT_ERRORS, TRANSFORMERS, operators, silent_training
from helpers.training import RECORD, Training
from helpers.training_faults import FAULTS
from helpers.training_healthy import HEALTHY, Healthy

ONSET = 150  # the step in which faults in the middle of a run begin
HEALTHY_STEPS = 1000  # of a healthy training of the tests
SETS = ("mistakes", "operators", "silent errors", "repository")
SEEDS = {"tuning": range(5), "figures": range(5, 10)}
GOLDEN_SEEDS = range(100, 105)


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


def _mistakes() -> Iterator[Case]:
    for subject in SUBJECTS:
        for mistake in MISTAKES:
            if not applies(mistake, subject):
                continue
            for when in mistake.onsets:
                yield Case(
                    "mistakes",
                    subject.half,
                    subject.name,
                    mistake.what,
                    subject.training,
                    lambda training, mistake=mistake, subject=subject: mistake.breaks(training, subject),
                    mistake.place(subject),
                    ONSET if when == "mid-run" else 0,
                    is_everywhere=mistake.place is at_outputs,
                    is_held_out=mistake.is_held_out,
                )


def _repository() -> Iterator[Case]:
    for fault in FAULTS:
        yield Case(
            "repository",
            "both",
            fault.model,
            fault.what,
            fault.twin or fault.training,
            fault.breaks,
            f"^{re.escape(fault.name)}",
            ONSET if fault.step else 0,
            fault.training,
            is_held_out="loss" in fault.what or fault.twin is not None,
            ranks=fault.ranks,
            broken_ranks=fault.broken_ranks,
            policy=fault.policy,
        )


def _operators() -> Iterator[Case]:
    for model in TRANSFORMERS if HAS_OPERATORS else ():
        for operator in operators(model.scope):
            for onset in (ONSET, 0):
                yield Case(
                    "operators",
                    model.half,
                    model.name,
                    operator.what,
                    model.training,
                    operator.breaks,
                    operator.place,
                    onset,
                    is_everywhere=operator.is_everywhere,
                )


def _silent_errors() -> Iterator[Case]:
    for error in SILENT_ERRORS:
        for onset in (ONSET, 0):
            yield Case(
                "silent errors",
                "both",
                "MLP" if error.ranks == 1 else f"MLP, DDP on {error.ranks} ranks",
                error.what,
                silent_training(error),
                error.breaks,
                "",
                onset,
                ranks=error.ranks,
                broken_ranks=tuple(range(error.ranks)),
            )


def _healthy() -> Iterator[Case]:
    """The healthy trainings of the tests, which have no fault."""
    for each in HEALTHY:

        def training(seed: int, each: Healthy = each) -> Training:
            return each.training(seed, HEALTHY_STEPS)

        yield Case("healthy", "both", each.name, "none", training, lambda training: None, "", 0)


@cache
def all_cases() -> tuple[Case, ...]:
    """The cases of all sets, and the healthy trainings."""
    return (*_mistakes(), *_operators(), *_silent_errors(), *_repository(), *_healthy())
