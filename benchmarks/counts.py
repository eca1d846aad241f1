"""Counts launches and host syncs of statistics, checks and clips, by backend, and of optimizer steps, on a GPU.

They are counted by torch's profiler; on a CPU, where there are none, the same calls run and the counts are 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import optimizer_steps
import torch
from cases import Case, input_of
from rows import Row, row
from step_providers import providers_for

import gradstat

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.cuda_counts import count

GROUP = "counts"
CASES = ("300 tensors of 8x8", "10,000 tensors of 64")  # in the parameters of a launch, and too many for them


def counts(device: torch.device, cases: Sequence[Case]) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """The measurements, each a name and a function that returns rows."""
    for case in cases:
        yield f"counts, {case.name}", partial(_of_calls, device, case)
    for choice in optimizer_steps.OPTIMIZERS:
        yield f"counts, {choice.name}", partial(_of_steps, device, choice)


def _counted(device: torch.device, case: str, provider: str, call: Callable[[], object]) -> list[Row]:
    return [row(GROUP, case, provider, metric, "", value, device) for metric, value in count(call)._asdict().items()]


def _of_calls(device: torch.device, case: Case) -> list[Row]:
    given = input_of(case.shapes(), torch.float32, str(device))
    made = []
    for backend in ("native", "triton") if device.type == "cuda" else ("native",):
        for name, call in (
            ("stats", partial(gradstat.stats, given.gradients, backend=backend)),
            ("check", partial(gradstat.check, given.parameters, backend=backend)),
            ("clip", partial(gradstat.clip_grad_norm_, given.parameters, 2 * given.max_norm, backend=backend)),
        ):
            made += _counted(device, case.name, f"gradstat {backend} {name}", call)
    return made


def _of_steps(device: torch.device, choice: optimizer_steps.OptimizerChoice) -> list[Row]:
    """Counts of optimizer steps, for one list of shapes, since counts do not depend on the list."""
    case, made = optimizer_steps.QUICK_CASE, []
    for setting in optimizer_steps.SETTINGS:
        given = optimizer_steps.StepInput(case.shapes(), choice, setting, str(device))
        name = optimizer_steps.case_name(case.name, choice, setting)
        for provider in providers_for(given):
            made += _counted(device, name, provider.name, partial(provider.run, given))
    return made
