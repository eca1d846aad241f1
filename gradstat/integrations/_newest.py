"""The newest step that a monitor has read, as a report, without waiting for anything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from gradstat import _fields
from gradstat._tensors import TensorInfo
from gradstat.monitor import Monitor
from gradstat.report import Report

_DEGREES = np.array(_fields.DEGREES, dtype=np.float64)
# Of a reviewed step a monitor keeps no device; a report that is only read for numbers asks for none.
_NOWHERE = torch.device("cpu")


class Newest(NamedTuple):
    """A step of a monitor.

    Attributes:
        step: Its number, counted from 0.
        report: About its gradients, without the loss scale.
        scalars: What else is known of it: ``"loss"``, ``"lr"``, ``"loss_scale"``, ``"norm"`` and so on.
    """

    step: int
    report: Report
    scalars: dict[str, float]


def newest_of(monitor: Monitor) -> Newest | None:
    """The newest step whose numbers have arrived and were read; None before the first. No host sync."""
    held = monitor._intake._steps
    if held:
        pending, table = held[-1]
        numbers = pending.numbers[0]
        segment = numbers.segments[0]
        rows, scale = table[: segment.measured], pending.scalars.get("loss_scale")
        if pending.is_scaled and scale:
            rows = rows / scale**_DEGREES
        positions = range(len(segment.names)) if segment.positions is None else segment.positions
        infos = numbers.infos()[: segment.measured]
        missing = _absent(segment.names, positions)
        report = Report(_named(segment.names, positions), rows, infos, missing, loss_scale=scale, total=numbers.total())
        return Newest(pending.step, report, dict(pending.scalars))
    history = monitor._history
    latest = history.latest.get("gradient")
    if latest is None:
        return None
    step = int(latest.steps[-1])
    scalars: dict[str, float] = {}
    if history._scalars and int(history._scalars[-1][0][-1]) == step:
        scalars = {name: float(values[-1]) for name, values in history._scalars[-1][1].items()}
    there = np.flatnonzero(latest.present[-1]).tolist()
    layout = latest.layout
    described = []
    for i in there:
        info = layout.info(i)
        assert info is not None
        described.append(TensorInfo(info.shape, info.dtype, _NOWHERE, None))
    missing = _absent(layout.names, there)
    rows = latest.raw[-1][there]
    return Newest(
        step,
        Report(_named(layout.names, there), rows, described, missing, loss_scale=scalars.get("loss_scale")),
        scalars,
    )


def _named(names: tuple[str, ...], positions: Any) -> Callable[[], list[str]]:
    return lambda: [names[i] for i in positions]


def _absent(names: tuple[str, ...], positions: Any) -> Callable[[], list[str]]:
    @functools.cache
    def missing() -> list[str]:
        there = set(positions)
        return [name for i, name in enumerate(names) if i not in there]

    return missing
