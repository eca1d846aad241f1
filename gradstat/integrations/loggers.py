"""Statistics to loggers: one call a step, floats that are on the host already, and each logger's cheapest way in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradstat.integrations._ways import Way, put_histogram, ways_to
from gradstat.integrations._writers import CsvWriter, JsonlWriter
from gradstat.monitor import Monitor
from gradstat.report import Report

__all__ = ["AGGREGATES", "CsvWriter", "JsonlWriter", "ReportLogger", "log_report", "log_scalars", "scalars_of"]

AGGREGATES: tuple[str, ...] = ("total_norm", "max_abs", "nan_count", "inf_count", "zero_fraction")
"""Of all gradients together; what is logged unless something else is asked for."""

_COLUMNS = ("l2_norm", "max_abs", "mean", "std", "min", "max", "nan_count", "inf_count", "zero_count")
# Of a monitor's step besides its gradients.
_SCALARS = ("loss", "lr", "loss_scale")


class Choice(NamedTuple):
    """What to log.

    Attributes:
        aggregates: Which of `AGGREGATES`.
        per_tensor: Columns of `gradstat.Report.to_numpy` for each tensor, ``("l2_norm",)`` for example.
        top: Only of so many tensors, those that stand out most in this step; None for all of them.
        prefix: Put before every name.
    """

    aggregates: Sequence[str] = AGGREGATES
    per_tensor: Sequence[str] = ()
    top: int | None = None
    prefix: str = "grad/"

    def check(self) -> Choice:
        """Itself.

        Raises:
            ValueError: A name is not known, or ``top`` is less than 1.
        """
        for what, names, known in (
            ("aggregates", self.aggregates, AGGREGATES),
            ("per_tensor", self.per_tensor, _COLUMNS),
        ):
            if isinstance(names, str):
                raise ValueError(f"{what} is the string {names!r}; expected a sequence of names, ({names!r},)")
            for name in names:
                if name not in known:
                    raise ValueError(f"{what}: unknown name {name!r}; known: {', '.join(known)}")
        if self.top is not None and (type(self.top) is not int or self.top < 1):
            raise ValueError(f"top is {self.top!r}; expected a number of tensors of at least 1, or None for all")
        return self

    def of(self, report: Report) -> dict[str, float]:
        """The floats chosen of a report."""
        totals = report.scalars("")
        out = {self.prefix + name: totals[name] for name in self.aggregates}
        if self.per_tensor:
            table = report.to_numpy()
            rows = np.arange(len(table)) if self.top is None else _worst(table, self.top)
            names = [report.names[i] for i in rows]
            for column in self.per_tensor:
                values = table[column][rows].astype(np.float64).tolist()
                out.update({f"{self.prefix}{column}/{name}": v for name, v in zip(names, values, strict=True)})
        return out


def scalars_of(
    source: Report | Monitor,
    *,
    aggregates: Sequence[str] = AGGREGATES,
    per_tensor: Sequence[str] = (),
    top: int | None = None,
    prefix: str = "grad/",
) -> dict[str, float]:
    """Flat floats for any logger. No host sync.

    Args:
        source: A report; or a monitor, whose newest step that has arrived is told, with its loss, learning rate and
            loss scale.
        aggregates: Totals to log, of `AGGREGATES`.
        per_tensor: Columns to log for each tensor: ``"l2_norm"``, ``"max_abs"``, ``"mean"``, ``"std"``, ``"min"``,
            ``"max"``, ``"nan_count"``, ``"inf_count"``, ``"zero_count"``.
        top: Only of so many tensors, those that stand out most in this step; None for all of them.
        prefix: Put before every name.

    Returns:
        By name; empty if the monitor has read no step yet.

    Raises:
        TypeError: ``source`` is neither. ValueError: A name is not known; the message lists them.
    """
    choice = Choice(_listed(aggregates), _listed(per_tensor), top, prefix).check()
    told = _told(source, choice)
    return {} if told is None else told.values


def log_report(
    target: Any,
    source: Report | Monitor,
    step: int | None = None,
    *,
    aggregates: Sequence[str] = AGGREGATES,
    per_tensor: Sequence[str] = (),
    top: int | None = None,
    prefix: str = "grad/",
    histogram: bool = False,
) -> dict[str, float]:
    """Writes the statistics of a step to a logger. No host sync besides what the logger does.

    Args:
        target: Where to: a TensorBoard ``SummaryWriter``, a wandb run or the module ``wandb``, the module ``mlflow``
            (its active run), a logger of Lightning, a `JsonlWriter` or `CsvWriter`, a function
            ``(values, step)``; or several of them in a list.
        source: As for `scalars_of`.
        step: The step to log at; None, for a monitor, for its own count.
        aggregates, per_tensor, top, prefix: As for `scalars_of`.
        histogram: For TensorBoard: also the histogram over tensors of the decimal logarithms of their norms.

    Returns:
        What was logged; empty if a monitor has read no step yet.

    Raises:
        TypeError: ``target`` or ``source`` is nothing known; the message says what is.
        ValueError: A name is not known, or a report is logged without a step.
    """
    choice = Choice(_listed(aggregates), _listed(per_tensor), top, prefix).check()
    return _log(ways_to(target), source, step, choice, histogram)


def log_scalars(target: Any, values: Mapping[str, float], step: int) -> None:
    """Writes floats to a logger by its cheapest way in.

    Args:
        target: As for `log_report`.
        values: By name.
        step: The step to log at.

    Raises:
        TypeError: ``target`` is nothing known; the message says what is.
    """
    for way in ways_to(target):
        way.put(dict(values), step)


class ReportLogger:
    """`log_report` every so many steps, with the target looked at once. ::

        log = ReportLogger(SummaryWriter(), every=10, per_tensor=("l2_norm",), top=20)
        for step, batch in enumerate(batches):
            ...
            monitor.step(loss)
            log(monitor)

    Args:
        target: As for `log_report`.
        every: Steps divisible by this are logged.
        aggregates, per_tensor, top, prefix, histogram: As for `log_report`.

    Raises:
        TypeError: ``target`` is nothing known. ValueError: Another argument makes no sense.
    """

    def __init__(
        self,
        target: Any,
        every: int = 1,
        *,
        aggregates: Sequence[str] = AGGREGATES,
        per_tensor: Sequence[str] = (),
        top: int | None = None,
        prefix: str = "grad/",
        histogram: bool = False,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {every!r}; expected a number of steps of at least 1")
        self._ways = ways_to(target)
        self._every = every
        self._choice = Choice(_listed(aggregates), _listed(per_tensor), top, prefix).check()
        self._histogram = histogram
        self._last: int | None = None

    def __call__(self, source: Report | Monitor, step: int | None = None) -> dict[str, float]:
        """Logs if it is time. A step of a monitor is logged once, however often this is called.

        Args:
            source, step: As for `log_report`.

        Returns:
            What was logged; empty if nothing was.
        """
        if isinstance(source, Monitor):
            newest = source.latest()
            if newest is None or newest.step % self._every or newest.step == self._last:
                return {}
            self._last = newest.step
        elif step is not None and step % self._every:
            return {}
        return _log(self._ways, source, step, self._choice, self._histogram)


# What is told ------------------------------------------------------------------------------------------------


class _Told(NamedTuple):
    step: int | None
    report: Report
    values: dict[str, float]


def _told(source: object, choice: Choice) -> _Told | None:
    if isinstance(source, Report):
        return _Told(None, source, choice.of(source))
    if not isinstance(source, Monitor):
        raise TypeError(
            f"expected a gradstat.Report or a gradstat.Monitor, got {type(source).__name__}; of a pending report ask "
            "for its result() first"
        )
    newest = source.latest()
    if newest is None:
        return None
    values = choice.of(newest.report)
    values.update({choice.prefix + name: newest.scalars[name] for name in _SCALARS if name in newest.scalars})
    values[choice.prefix + "findings"] = float(len(source.findings))
    return _Told(newest.step, newest.report, values)


def _log(
    ways: Sequence[Way], source: Report | Monitor, step: int | None, choice: Choice, histogram: bool
) -> dict[str, float]:
    told = _told(source, choice)
    if told is None:
        return {}
    at = told.step if step is None else step
    if at is None:
        raise ValueError("a report does not know its step: pass step=")
    for way in ways:
        way.put(told.values, at)
        if histogram and way.writer is not None:
            put_histogram(way.writer, choice.prefix + "log10_norms", told.report, at)
    return told.values


def _listed(names: Sequence[str]) -> Sequence[str]:
    return names if isinstance(names, str) else tuple(names)  # a string is refused by name later


def _worst(table: Any, top: int) -> Any:
    """The rows that stand out most: NaN and Inf first, then by norm."""
    bad = table["nan_count"] + table["inf_count"]
    return np.lexsort((-table["l2_norm"], -bad))[:top]
