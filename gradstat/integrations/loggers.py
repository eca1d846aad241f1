"""Statistics for loggers: one call per step, with floats already on the host, by the fastest call of each logger."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from gradstat._core.files import path_of
from gradstat._core.text import as_number, expect
from gradstat.monitor import Monitor
from gradstat.report import Report

__all__ = ["AGGREGATES", "JsonlWriter", "ReportLogger", "log_report", "log_scalars", "scalars_of"]

AGGREGATES: tuple[str, ...] = ("total_norm", "max_abs", "nan_count", "inf_count", "zero_fraction")
"""Statistics of all gradients together, which are logged by default."""

_COLUMNS = ("l2_norm", "max_abs", "mean", "std", "min", "max", "nan_count", "inf_count", "zero_count")


class Choice(NamedTuple):
    """What to log; the arguments of `scalars_of`."""

    aggregates: Sequence[str] = AGGREGATES
    per_tensor: Sequence[str] = ()
    top: int | None = None
    prefix: str = "grad/"
    norms: Sequence[str] = ()

    def check(self) -> Choice:
        """A copy with tuples; raises ValueError if a name is not known, or ``top`` is less than 1."""
        for what, names, known in (
            ("aggregates", self.aggregates, AGGREGATES),
            ("per_tensor", self.per_tensor, _COLUMNS),
            ("norms", self.norms, ()),
        ):
            expect(what, names, Iterable, "a sequence of names")
            if isinstance(names, str):
                raise ValueError(f"{what} is the string {names!r}; expected a sequence of names, ({names!r},)")
            for name in names:
                if known and name not in known:
                    raise ValueError(f"{what}: unknown name {name!r}; known: {', '.join(known)}")
        expect("prefix", self.prefix, str, "text")
        if self.top is not None and (type(self.top) is not int or self.top < 1):
            raise ValueError(f"top is {self.top!r}; expected a number of tensors of at least 1, or None for all")
        return self._replace(
            aggregates=tuple(self.aggregates), per_tensor=tuple(self.per_tensor), norms=tuple(self.norms)
        )

    def of(self, report: Report) -> dict[str, float]:
        """The chosen floats of a report."""
        totals = report.scalars("")
        out = {self.prefix + name: totals[name] for name in self.aggregates}
        if self.per_tensor:
            table = report.to_numpy()
            rows = np.arange(len(table))
            if self.top is not None:  # those with most NaN and Inf first, then by norm
                rows = np.lexsort((-table["l2_norm"], -(table["nan_count"] + table["inf_count"])))[: self.top]
            names = [report.names[i] for i in rows]
            for column in self.per_tensor:
                values = table[column][rows].astype(np.float64).tolist()
                out.update({f"{self.prefix}{column}/{name}": v for name, v in zip(names, values, strict=True)})
        norms = np.array([stats.l2_norm for stats in report]) if self.norms else np.empty(0)
        for pattern in self.norms:
            fits = [fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in report.names]
            out[f"{self.prefix}l2_norm/{pattern}"] = float(np.linalg.norm(norms[fits]))
        return out


def scalars_of(
    source: Report | Monitor,
    *,
    aggregates: Sequence[str] = AGGREGATES,
    per_tensor: Sequence[str] = (),
    top: int | None = None,
    prefix: str = "grad/",
    norms: Sequence[str] = (),
) -> dict[str, float]:
    """Flat floats for any logger. No host sync.

    Args:
        source: A report, or a monitor. A monitor gives its newest step that has arrived, and in addition ``loss``,
            ``lr`` and ``loss_scale`` of this step; ``refused``, why a `gradstat.SpikeGuard` refused the last guarded
            step (the sum of 2 and 4 for loss and norm); ``missing``, the number of missing gradients; and for the whole
            run ``findings``, the number of findings, and ``nonfinite_steps``, the number of steps with a gradient that
            was not finite.
        aggregates: Totals to log, from `AGGREGATES`.
        per_tensor: Columns to log for each tensor: ``"l2_norm"``, ``"max_abs"``, ``"mean"``, ``"std"``, ``"min"``,
            ``"max"``, ``"nan_count"``, ``"inf_count"``, ``"zero_count"``.
        top: The number of tensors to log: first those with most NaN and Inf, then those with the largest norm. None
            logs all.
        prefix: Put before every name.
        norms: Globs such as ``"layers.*.attn"``. Each gives the L2 norm of all gradients of parameters that match it or
            are in a module that does, as ``l2_norm/layers.*.attn``.

    Returns:
        Floats by name; empty if the monitor has read no step yet.

    Raises:
        TypeError: ``source`` is neither. ValueError: A name is not known. The message lists the known names.
    """
    choice = Choice(aggregates, per_tensor, top, prefix, norms).check()
    newest = _newest_values(source, choice)
    return {} if newest is None else newest[2]


def log_report(
    target: Any, source: Report | Monitor, step: int | None = None, *, histogram: bool = False, **choice: Any
) -> dict[str, float]:
    """Writes the statistics of a step to a logger. No host sync, except in the logger.

    Args:
        target: A TensorBoard ``SummaryWriter``, a run of wandb or trackio or one of these modules, the module
            ``mlflow`` (its active run), a Lightning logger, a `JsonlWriter`, a function ``(values, step)``, or a list
            of several.
        source: As for `scalars_of`.
        step: The step to log at; None for the monitor's own count. It is required for a report.
        histogram: For TensorBoard, whether to add a histogram of the tensors' log10 norms.
        choice: ``aggregates``, ``per_tensor``, ``top``, ``prefix`` and ``norms``, as for `scalars_of`.

    Returns:
        What was logged; empty if a monitor has read no step yet.

    Raises:
        TypeError: ``target`` or ``source`` is of an unknown type. The message lists the known ones.
        ValueError: A name is not known, or a report is logged without a step.
    """
    log = ReportLogger(target, histogram=histogram, **choice)
    log._told = len(source.findings) if isinstance(source, Monitor) else 0
    return log(source, step)


def log_scalars(target: Any, values: Mapping[str, float], step: int) -> None:
    """Writes floats to a logger by its fastest call.

    Args:
        target: As for `log_report`.
        values: Floats by name.
        step: The step to log at.

    Raises:
        TypeError: ``target`` is of an unknown type. The message lists the known ones.
    """
    for one in _targets_of(target):
        one.put(dict(values), step)


@final
class JsonlWriter:
    """Appends one JSON object for each step to a file. NaN and infinities, which JSON lacks, become null.

    A line that a crash or a full disk has cut short is ended before the next one, so only that line is lost.

    Args:
        path: The file. It is created with its folders if it does not exist, and appended to otherwise.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = path_of(path).absolute()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        # Unbuffered, so each line is one system call, and lines of several writers do not mix.
        self._file = self.path.open("ab", buffering=0)
        self._is_broken = False  # whether the last line was cut short
        self._close = weakref.finalize(self, self._file.close)  # closes the file if nobody else does

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Appends the line ``{"step": step, ...}`` for ``values``, floats by name, in one system call.

        Raises:
            TypeError, ValueError: A value is no number, or its name is ``step``; nothing is written.
        """
        expect("values", values, Mapping, "a mapping from names to numbers")
        line: dict[str, float | None] = {"step": int(as_number("step", step))}
        given: Mapping[str, Any] = values  # by a user, who may pass anything
        for name, value in given.items():
            if not isinstance(value, int | Real):
                raise TypeError(
                    f"values[{name!r}] is a {type(value).__name__}; expected a number, such as float(value)"
                )
            if name == "step":
                raise ValueError(
                    f"values has the name 'step', under which {self.path} has the argument step; rename it"
                )
            number = value if isinstance(value, int) else float(value)
            line[name] = number if math.isfinite(number) else None
        data = b"\n" * self._is_broken + json.dumps(line, allow_nan=False).encode() + b"\n"
        written = self._file.write(data)
        self._is_broken = written < len(data) if written else self._is_broken
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReportLogger:
    """Calls `log_report` every ``every`` steps, and logs new findings as text; the target's type is examined once. ::

        log = ReportLogger(SummaryWriter(), every=10, per_tensor=("l2_norm",), top=20)
        for step, batch in enumerate(batches):
            ...
            monitor.step(loss)
            log(monitor)

    Findings are the text ``grad/finding`` at the step that is logged next: of TensorBoard, wandb and trackio, and a
    file of mlflow's run.

    Args:
        target: As for `log_report`.
        every: Steps divisible by this are logged.
        histogram, choice: As for `log_report`.

    Raises:
        TypeError: ``target`` is of an unknown type. ValueError: Another argument is invalid.
    """

    def __init__(self, target: Any, every: int = 1, *, histogram: bool = False, **choice: Any) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {every!r}; expected a number of steps of at least 1")
        self._targets = _targets_of(target)
        self._every = every
        self._choice = Choice(**choice).check()
        self._histogram = histogram
        self._last: int | None = None
        self._told = 0  # findings

    def __call__(self, source: Report | Monitor, step: int | None = None) -> dict[str, float]:
        """Logs if the step is due. A step of a monitor is logged once, however often this is called.

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
        elif step is not None and as_number("step", step) % self._every:
            return {}
        chosen = _newest_values(source, self._choice)
        if chosen is None:
            return {}
        at, report, values = chosen
        at = at if step is None else step
        if at is None:
            raise ValueError("a report has no step number; pass step=")
        found = source.findings[self._told :] if isinstance(source, Monitor) else []
        self._told += len(found)
        for target in self._targets:
            target.put(values, at)
            if found and target.put_text is not None:
                target.put_text(f"{self._choice.prefix}finding", "\n".join(map(str, found)), at)
            if self._histogram and target.writer is not None:
                norms = report.to_numpy()["l2_norm"]
                logs = np.log10(norms[(norms > 0) & np.isfinite(norms)])
                if len(logs):
                    target.writer.add_histogram(self._choice.prefix + "log10_norms", logs, at, bins=30)
        return values


def _newest_values(source: object, choice: Choice) -> tuple[int | None, Report, dict[str, float]] | None:
    """Step (None for a report), report and floats; None if a monitor has read no step yet."""
    if isinstance(source, Report):
        return None, source, choice.of(source)
    if not isinstance(source, Monitor):
        raise TypeError(
            f"expected a gradstat.Report or a gradstat.Monitor, got {type(source).__name__}; call result() on a "
            "pending report first"
        )
    newest = source.latest()
    if newest is None:
        return None
    values = choice.of(newest.report)
    names = [name for name in ("loss", "lr", "loss_scale", "refused") if name in newest.scalars]
    values.update({choice.prefix + name: newest.scalars[name] for name in names})
    values[f"{choice.prefix}missing"] = float(len(newest.report.missing))
    values[f"{choice.prefix}findings"] = float(len(source.findings))
    values[f"{choice.prefix}nonfinite_steps"] = float(source.nonfinite_steps)
    return newest.step, newest.report, values


class _Target(NamedTuple):
    """How to reach a logger."""

    put: Callable[[dict[str, float], int], object]  # its fastest call of (values, step)
    put_text: Callable[[str, str, int], object] | None = None  # of (name, text, step), if it takes texts
    writer: Any = None  # TensorBoard's, for histograms


def _targets_of(target: Any) -> list[_Target]:
    """How to reach each logger in ``target``; TypeError if one is unknown."""
    if isinstance(target, list | tuple):
        return [one for several in target for one in _targets_of(several)]
    module = getattr(target, "__module__", None) or type(target).__module__
    name = getattr(target, "__name__", None)
    if isinstance(target, JsonlWriter):
        return [_Target(target.write)]
    if hasattr(target, "_get_file_writer") and hasattr(target, "add_scalar"):
        return [_Target(lambda values, step: _put_summary(target, values, step), target.add_text, target)]
    if name == "mlflow" and hasattr(target, "log_metrics"):
        # A synchronous call would wait for the server in every step.
        return [
            _Target(
                lambda values, step: target.log_metrics(values, step=step, synchronous=False),
                lambda name, text, step: target.log_text(text, f"{name}-{step}.txt"),
            )
        ]
    if hasattr(target, "log") and not {"wandb", "trackio"}.isdisjoint((name, *module.split("."))):
        return [
            _Target(
                lambda values, step: target.log(values, step=step),
                lambda name, text, step: target.log({name: text}, step=step),
            )
        ]
    if hasattr(target, "log_metrics") and hasattr(target, "experiment"):  # Lightning's
        if type(target).__name__ == "TensorBoardLogger" and not getattr(target, "_prefix", None):
            return [
                _Target(
                    lambda values, step: _put_summary(target.experiment, values, step),
                    lambda *text: target.experiment.add_text(*text),
                )
            ]
        return [_Target(lambda values, step: target.log_metrics(values, step))]
    if callable(target):
        return [_Target(target)]
    raise TypeError(
        f"cannot log to a {type(target).__name__}; expected a TensorBoard SummaryWriter, a wandb or trackio run, the "
        "module mlflow, a Lightning logger, gradstat's JsonlWriter, or a function (values, step)"
    )


def _put_summary(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Writes all scalars in one event; ``add_scalar`` would make an event, with a lock and a queue, for each."""
    file = writer._get_file_writer()
    if file is None or not hasattr(file, "add_summary"):  # a dummy writer, on ranks that do not log
        return
    if type(writer).__module__.startswith("tensorboardX"):
        from tensorboardX.proto.summary_pb2 import Summary
    else:
        from tensorboard.compat.proto.summary_pb2 import Summary
    # Values are written as float32, so finite numbers beyond its range become infinite.
    entries = [Summary.Value(tag=name, simple_value=ctypes.c_float(value).value) for name, value in values.items()]
    file.add_summary(Summary(value=entries), step)
