"""Checks: statistics of gradients, or of any tensors, brought to the host with the names put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import HostCopy
from gradstat._core.measure import measure
from gradstat._core.measurement import HostRows, Measurement
from gradstat._core.parameters import gradients_of, labels_of, source_of
from gradstat._core.tensors import ExtraGroups
from gradstat.report import Report


class PendingReport:
    """A report whose numbers may still be on their way from the device.

    Made by `check_async`. `result` waits for the numbers, if they are not there, and only for them.
    """

    def __init__(self, measurement: Measurement, make_report: Callable[..., Report], *others: Tensor) -> None:
        """``make_report`` is given the rows and the arrays of ``others``, tensors that are copied along."""
        self._rows: HostRows | None = HostRows(measurement)
        self._others = [HostCopy(tensor) for tensor in others]
        self._make_report = make_report
        self._report: Report | None = None

    def done(self) -> bool:
        """Whether `result` would return without waiting. Never waits itself."""
        return self._rows is None or (self._rows.done() and all(copy.done() for copy in self._others))

    def result(self) -> Report:
        """The report; waits once per device that has not delivered yet. Later calls return the same one."""
        if self._report is None:
            self._report = self._make_report(self._rows, *(copy.wait() for copy in self._others))
            self._rows, self._others = None, []
        return self._report


@never_traced
def check(target: Any, *, backend: str | None = None, extra_groups: ExtraGroups | None = None) -> Report:
    """Checks the gradients of ``target``: which are bad, where, and how large everything is.

    Call it after ``backward()`` and before clipping: clipping with a NaN norm makes every gradient NaN, and
    the culprit is lost. Reads each gradient once; exactly one host sync per device (none on the CPU).

    Gradients that are distributed tensors are measured where they lie and merged over the groups of their shards, two
    collectives for each group whatever their number; the report is about the whole tensors and the same on all
    ranks, which all have to call this.

    Args:
        target: A module, an optimizer, parameters, ``(name, parameter)`` pairs, or one parameter.
        backend: ``"native"``, ``"triton"`` or ``"reference"``; None chooses.
        extra_groups: Groups of ranks over which gradients are spread and which they do not tell: pipeline stages,
            experts. A process group or one-dimensional mesh, or several, for all gradients; or pairs of one and the
            parameters it is for. Totals then run over all ranks; entries stay those of this rank.

    Returns:
        The report, with a `TensorStats` for each gradient in the order of the parameters; those without a gradient are
        in its ``missing``. It holds numbers only, and keeps no gradient alive.

    Raises:
        TypeError: ``target`` is none of these, or a gradient has no statistics (an integer dtype, say).
        ValueError: A gradient cannot be measured (on the meta device, say), no tensor of ``target`` takes part
            in training, or ``backend`` is not known.
        BackendUnavailableError: ``backend`` cannot run here.
        RuntimeError: Gradients are distributed, and another rank could not measure its part.
    """
    return _launched(target, backend, extra_groups).result()


@never_traced
def check_async(target: Any, *, backend: str | None = None, extra_groups: ExtraGroups | None = None) -> PendingReport:
    """`check` without the sync: launches the kernel and returns at once. Arguments and errors as there.

    The gradients may be changed or freed as soon as this returns, on the same stream.

    Returns:
        The report on its way; ``result()`` waits for it, ``done()`` tells whether it would.
    """
    return _launched(target, backend, extra_groups)


def _launched(target: Any, backend: str | None, extra_groups: ExtraGroups | None) -> PendingReport:
    source = source_of(target)
    gradients = gradients_of(source.parameters)
    if not gradients.tensors and gradients.missing == [] and extra_groups is None:
        raise ValueError(
            f"none of the {len(source.parameters)} tensors requires a gradient or has one; check() reads the .grad of "
            "parameters after backward(). To check tensors themselves, use check_tensors()"
        )
    labels = labels_of(source, gradients)
    measured = measure(gradients.tensors, labels.of, backend, owners=source.parameters, extra_groups=extra_groups)

    def make(rows: HostRows) -> Report:
        rows.raise_if_others_failed()
        return Report(labels.present, rows.table(), rows.infos, labels.missing, total=rows.total())

    return PendingReport(measured, make)


@never_traced
def check_tensors(tensors: Mapping[str, Tensor] | Iterable[Tensor] | Tensor, *, backend: str | None = None) -> Report:
    """The same report about any tensors: activations, a batch, weights, losses. One sync, as `check`.

    Of a distributed tensor it is about this rank's shard: ranks need not call this together.

    Args:
        tensors: Tensors by name, or several (named by position), or one tensor.
        backend: As in `check`.

    Raises:
        As `check`.
    """
    if isinstance(tensors, Mapping):
        names, listed = list(tensors), list(tensors.values())
    else:
        if not isinstance(tensors, Iterable):
            raise TypeError(f"expected tensors, by name or in a sequence, or one tensor, got {type(tensors).__name__}")
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        names = [f"tensors[{i}]" for i in range(len(listed))]
    measured = measure(listed, lambda i: names[i], backend, over_ranks=False)
    return PendingReport(measured, lambda rows: Report(lambda: names, rows.table(), rows.infos, what="tensor")).result()
