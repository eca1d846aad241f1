"""`LatestStep`: the newest step that a monitor has read, as a report, for loggers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradstat._measured import without_scale
from gradstat.monitor.collecting import Pending
from gradstat.monitor.rows import Floats
from gradstat.report import Report


class LatestStep(NamedTuple):
    """A step of a monitor, on the host.

    Attributes:
        step: Its number, counted from 0.
        report: About its gradients, without the loss scale.
        scalars: What else is known of it: ``"loss"``, ``"lr"``, ``"loss_scale"``, ``"norm"`` and so on.
    """

    step: int
    report: Report
    scalars: dict[str, float]

    @classmethod
    def of(cls, pending: Pending, table: Floats) -> LatestStep:
        """A step, ``pending`` until now, whose numbers have arrived: ``table``."""
        numbers = pending.numbers[0]
        segment = numbers.segments[0]
        rows, total = table[: segment.measured], numbers.total()
        scale = pending.scalars.get("loss_scale")
        if pending.is_scaled and scale:
            rows, total = without_scale(rows, scale), total if total is None else without_scale(total[None], scale)[0]
        missing = [position for seen in pending.seen_at_once if seen.kind == "missing" for position in seen.value]
        positions = range(len(segment.names)) if segment.positions is None else segment.positions
        report = Report(
            _names_at(segment.names, positions),
            rows,
            numbers.infos()[: segment.measured],
            _names_at(segment.names, missing),
            loss_scale=scale,
            total=total,
        )
        return cls(pending.step, report, dict(pending.scalars))


def _names_at(names: tuple[str, ...], positions: Sequence[int]) -> Callable[[], list[str]]:
    return lambda: [names[position] for position in positions]
