"""Where numbers are logged to: what each logger takes many floats by at the least cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gradstat.integrations._writers import CsvWriter, JsonlWriter
from gradstat.report import Report

_Put = Callable[[dict[str, float], int], object]


class Target(NamedTuple):
    """A logger.

    Attributes:
        put: Takes floats and a step.
        writer: TensorBoard's, if it is one.
    """

    put: _Put
    writer: Any = None


def targets_of(target: Any) -> list[Target]:
    """A logger, or several, to be written to.

    Raises:
        TypeError: It is nothing known.
    """
    if isinstance(target, list | tuple):
        return [one for several in target for one in targets_of(several)]
    module = getattr(target, "__module__", None) or type(target).__module__
    if isinstance(target, JsonlWriter | CsvWriter):
        return [Target(target.write)]
    if hasattr(target, "_get_file_writer") and hasattr(target, "add_scalar"):
        return [Target(lambda values, step: _put_summary(target, values, step), target)]
    if getattr(target, "__name__", None) == "mlflow" and hasattr(target, "log_metrics"):
        # Synchronous, it waits for the server in every step.
        return [Target(lambda values, step: target.log_metrics(values, step=step, synchronous=False))]
    if hasattr(target, "log") and (getattr(target, "__name__", None) == "wandb" or "wandb" in module.split(".")):
        return [Target(lambda values, step: target.log(values, step=step))]
    if hasattr(target, "log_metrics") and hasattr(target, "experiment"):  # Lightning's
        if type(target).__name__ == "TensorBoardLogger" and not getattr(target, "_prefix", None):
            return [Target(lambda values, step: _put_summary(target.experiment, values, step))]
        return [Target(lambda values, step: target.log_metrics(values, step))]
    if callable(target):
        return [Target(target)]
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


def put_histogram(writer: Any, tag: str, report: Report, step: int) -> None:
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
