"""Statistics to loggers: one call a step, floats that are on the host already, and each logger's cheapest way in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradstat.integrations._writers import CsvWriter, JsonlWriter
from gradstat.monitor import Monitor
from gradstat.report import Report

__all__ = ["AGGREGATES", "CsvWriter", "JsonlWriter", "ReportLogger", "log_report", "log_scalars", "scalars_of"]

AGGREGATES: tuple[str, ...] = ("total_norm", "max_abs", "nan_count", "inf_count", "zero_fraction")
"""Of all gradients together; what is logged unless something else is asked for."""

_COLUMNS = ("l2_norm", "max_abs", "mean", "std", "min", "max", "nan_count", "inf_count", "zero_count")


class Choice(NamedTuple):
    """What to log, as told in `scalars_of`."""

    aggregates: Sequence[str] = AGGREGATES
    per_tensor: Sequence[str] = ()
    top: int | None = None
    prefix: str = "grad/"

    def check(self) -> Choice:
        """Itself, with tuples; raises ValueError if a name is not known, or ``top`` is less than 1."""
        known = {"aggregates": AGGREGATES, "per_tensor": _COLUMNS}
        for what, names in (("aggregates", self.aggregates), ("per_tensor", self.per_tensor)):
            if isinstance(names, str):
                raise ValueError(f"{what} is the string {names!r}; expected a sequence of names, ({names!r},)")
            for name in names:
                if name not in known[what]:
                    raise ValueError(f"{what}: unknown name {name!r}; known: {', '.join(known[what])}")
        if self.top is not None and (type(self.top) is not int or self.top < 1):
            raise ValueError(f"top is {self.top!r}; expected a number of tensors of at least 1, or None for all")
        return self._replace(aggregates=tuple(self.aggregates), per_tensor=tuple(self.per_tensor))

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
        source: A report; or a monitor, whose newest step that has arrived is told, with its ``loss``, ``lr`` and
            ``loss_scale``, why a `gradstat.SpikeGuard` ``refused`` the last guarded step (the sum of 2, 4 and 8 for
            loss, norm and update), how many gradients are ``missing``, and of the run how many ``findings`` there are
            and in how many steps a gradient was not finite, ``nonfinite_steps``.
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
    choice = Choice(aggregates, per_tensor, top, prefix).check()
    told = _told(source, choice)
    return {} if told is None else told[2]


def log_report(
    target: Any, source: Report | Monitor, step: int | None = None, *, histogram: bool = False, **choice: Any
) -> dict[str, float]:
    """Writes the statistics of a step to a logger. No host sync besides what the logger does.

    Args:
        target: Where to: a TensorBoard ``SummaryWriter``, a wandb run or the module ``wandb``, the module ``mlflow``
            (its active run), a logger of Lightning, a `JsonlWriter` or `CsvWriter`, a function
            ``(values, step)``; or several of them in a list.
        source: As for `scalars_of`.
        step: The step to log at; None, for a monitor, for its own count.
        histogram: For TensorBoard: also the histogram over tensors of the decimal logarithms of their norms.
        choice: ``aggregates``, ``per_tensor``, ``top`` and ``prefix``, as for `scalars_of`.

    Returns:
        What was logged; empty if a monitor has read no step yet.

    Raises:
        TypeError: ``target`` or ``source`` is nothing known; the message says what is.
        ValueError: A name is not known, or a report is logged without a step.
    """
    return ReportLogger(target, histogram=histogram, **choice)(source, step)


def log_scalars(target: Any, values: Mapping[str, float], step: int) -> None:
    """Writes floats to a logger by its cheapest way in.

    Args:
        target: As for `log_report`.
        values: By name.
        step: The step to log at.

    Raises:
        TypeError: ``target`` is nothing known; the message says what is.
    """
    for put, _ in _targets_of(target):
        put(dict(values), step)


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
        histogram, choice: As for `log_report`.

    Raises:
        TypeError: ``target`` is nothing known. ValueError: Another argument makes no sense.
    """

    def __init__(self, target: Any, every: int = 1, *, histogram: bool = False, **choice: Any) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {every!r}; expected a number of steps of at least 1")
        self._targets = _targets_of(target)
        self._every = every
        self._choice = Choice(**choice).check()
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
        told = _told(source, self._choice)
        if told is None:
            return {}
        at, report, values = told
        at = at if step is None else step
        if at is None:
            raise ValueError("a report does not know its step: pass step=")
        for put, writer in self._targets:
            put(values, at)
            if self._histogram and writer is not None:
                _put_histogram(writer, self._choice.prefix + "log10_norms", report, at)
        return values


def _told(source: object, choice: Choice) -> tuple[int | None, Report, dict[str, float]] | None:
    """Step, report and floats; None if a monitor has read no step yet."""
    if isinstance(source, Report):
        return None, source, choice.of(source)
    if not isinstance(source, Monitor):
        raise TypeError(
            f"expected a gradstat.Report or a gradstat.Monitor, got {type(source).__name__}; of a pending report ask "
            "for its result() first"
        )
    newest = source.latest()
    if newest is None:
        return None
    values = choice.of(newest.report)
    told = [name for name in ("loss", "lr", "loss_scale", "refused") if name in newest.scalars]
    values.update({choice.prefix + name: newest.scalars[name] for name in told})
    values[f"{choice.prefix}missing"] = float(len(newest.report.missing))
    values[f"{choice.prefix}findings"] = float(len(source.findings))
    values[f"{choice.prefix}nonfinite_steps"] = float(source.nonfinite_steps)
    return newest.step, newest.report, values


def _worst(table: Any, top: int) -> Any:
    """The rows that stand out most: NaN and Inf first, then by norm."""
    bad = table["nan_count"] + table["inf_count"]
    return np.lexsort((-table["l2_norm"], -bad))[:top]


def _targets_of(target: Any) -> list[tuple[Callable[[dict[str, float], int], object], Any]]:
    """Of loggers, what takes floats and a step in the cheapest way, and TensorBoard's writer; TypeError if unknown."""
    if isinstance(target, list | tuple):
        return [one for several in target for one in _targets_of(several)]
    module = getattr(target, "__module__", None) or type(target).__module__
    if isinstance(target, JsonlWriter | CsvWriter):
        return [(target.write, None)]
    if hasattr(target, "_get_file_writer") and hasattr(target, "add_scalar"):
        return [(lambda values, step: _put_summary(target, values, step), target)]
    if getattr(target, "__name__", None) == "mlflow" and hasattr(target, "log_metrics"):
        # Synchronous, it waits for the server in every step.
        return [(lambda values, step: target.log_metrics(values, step=step, synchronous=False), None)]
    if hasattr(target, "log") and (getattr(target, "__name__", None) == "wandb" or "wandb" in module.split(".")):
        return [(lambda values, step: target.log(values, step=step), None)]
    if hasattr(target, "log_metrics") and hasattr(target, "experiment"):  # Lightning's
        if type(target).__name__ == "TensorBoardLogger" and not getattr(target, "_prefix", None):
            return [(lambda values, step: _put_summary(target.experiment, values, step), None)]
        return [(lambda values, step: target.log_metrics(values, step), None)]
    if callable(target):
        return [(target, None)]
    raise TypeError(
        f"cannot log to a {type(target).__name__}; expected a TensorBoard SummaryWriter, a wandb run, the module "
        "mlflow, a logger of Lightning, gradstat's JsonlWriter or CsvWriter, or a function (values, step)"
    )


def _put_summary(writer: Any, values: Mapping[str, float], step: int) -> None:
    """All scalars in one event, where ``add_scalar`` makes one, with a lock and a queue, for each."""
    file = writer._get_file_writer()
    if file is None or not hasattr(file, "add_summary"):  # a stand-in, on ranks that do not log
        return
    if type(writer).__module__.startswith("tensorboardX"):
        from tensorboardX.proto.summary_pb2 import Summary
    else:
        from tensorboard.compat.proto.summary_pb2 import Summary
    entries = [Summary.Value(tag=name, simple_value=_single(value)) for name, value in values.items()]
    file.add_summary(Summary(value=entries), step)


def _single(value: float) -> float:
    """What fits into TensorBoard's float32; a larger number is its infinity."""
    return value if abs(value) <= 3.4e38 or not math.isfinite(value) else math.copysign(math.inf, value)


def _put_histogram(writer: Any, tag: str, report: Report, step: int) -> None:
    """Writes the histogram over tensors of the decimal logarithms of their norms."""
    norms = report.to_numpy()["l2_norm"]
    logs = np.log10(norms[(norms > 0) & np.isfinite(norms)])
    if not len(logs):
        return
    counts, edges = np.histogram(logs, bins=30)
    writer.add_histogram_raw(
        tag,
        min=float(logs.min()),
        max=float(logs.max()),
        num=len(logs),
        sum=float(logs.sum()),
        sum_squares=float(logs @ logs),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
    )
