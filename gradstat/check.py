"""Statistics of gradients or of any tensors, as a report on the host or as a table left on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradstat._core.backends import COMPILED_FOR
from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import HostCopy, HostRows
from gradstat._core.measure import Spread, measure, resolve_for
from gradstat._core.measurement import Measurement, without_scale
from gradstat._core.native import operators
from gradstat._core.parameters import Labels, gradients_of, labels_of, named_parameters_of
from gradstat._core.tensors import ExtraGroups, name_by_position, readable
from gradstat._core.text import expect
from gradstat.report import Report


class PendingReport:
    """A report whose numbers may not have arrived from the device yet.

    Returned by `check_async`. `result` waits for these numbers if they have not arrived, and for nothing else. Pickling
    waits as well, because another process needs the numbers. Printing does not wait.
    """

    def __init__(self, measurement: Measurement, make_report: Callable[..., Report], *others: Tensor) -> None:
        """``make_report`` is called with the rows, and with ``others``, copied along, as arrays."""
        self._rows: HostRows | None = HostRows(measurement)
        self._others = [HostCopy(tensor) for tensor in others]
        self._make_report = make_report
        self._report: Report | None = None

    def done(self) -> bool:
        """Whether `result` would return without waiting. Never waits itself."""
        return self._rows is None or (self._rows.done() and all(copy.done() for copy in self._others))

    def result(self) -> Report:
        """The report. Waits once for each device whose numbers have not arrived. Later calls return the same report."""
        if self._report is None:
            self._report = self._make_report(self._rows, *(copy.wait() for copy in self._others))
            self._rows, self._others = None, []
        return self._report

    def __getstate__(self) -> dict[str, Any]:
        self.result()
        return {**vars(self), "_make_report": None}  # `result` has been called before

    def __repr__(self) -> str:
        return f"PendingReport({repr(self.result()) if self.done() else 'not arrived yet; result() waits'})"

    def __str__(self) -> str:
        return str(self.result()) if self.done() else repr(self)


@never_traced
def check(target: Any, *, backend: str | None = None, extra_groups: ExtraGroups | None = None) -> Report:
    """Checks the gradients of ``target``: which are not finite, where, and how large all of them are.

    Call it after ``backward()`` and before clipping: clipping with a NaN norm turns every gradient into NaN, and the
    culprit is lost. Takes one pass over the gradients, and exactly one host sync per device (none on the CPU).

    Gradients that are distributed tensors are measured shard by shard and merged over their process groups, with two
    collectives per group whatever the number of gradients, and one or two more when these are new. The report describes
    the whole tensors and is the same on all ranks, which all have to call this.

    Args:
        target: A module, an optimizer, parameters, ``(name, parameter)`` pairs, a mapping of these, or one parameter.
            Or DeepSpeed's engine, between its ``backward`` and ``step``: its shards are merged, its loss scale is
            divided out. Or Megatron-Core's DistributedDataParallel, between ``finish_grad_sync`` and the step.
        backend: ``"native"``, ``"triton"`` or ``"reference"``; None selects one automatically.
        extra_groups: Further groups of ranks over which gradients are spread without being distributed tensors, as with
            pipeline stages and experts. Pass process groups or one-dimensional meshes, or one of them, for all
            gradients; or pairs of a group and the parameters that it applies to. Totals then cover all ranks, and
            entries only this rank.

    Returns:
        The report, with a `TensorStats` for each gradient in the order of the parameters. Parameters without a gradient
        are in its ``missing``. It holds only numbers and keeps no gradient alive.

    Raises:
        TypeError: ``target`` is none of these, or a gradient's dtype has no statistics (for example an integer dtype).
        ValueError: A gradient cannot be measured (for example on the meta device), no tensor of ``target`` takes part
            in training, ``target`` is one computed tensor, or ``backend`` is unknown.
        BackendUnavailableError: ``backend`` cannot run here.
        RuntimeError: Gradients are distributed, and another rank could not measure its part, or has other parameters.
            The message then names the rank and the first difference.
    """
    measured, make_report = _launched(target, backend, extra_groups)
    return make_report(HostRows(measured))


@never_traced
def check_async(target: Any, *, backend: str | None = None, extra_groups: ExtraGroups | None = None) -> PendingReport:
    """`gradstat.check` without the sync: launches the kernel and returns a pending report.

    The gradients may be changed or freed as soon as this returns, on the same stream. ``target``, ``backend``,
    ``extra_groups`` and the errors are as for `check`.
    """
    return PendingReport(*_launched(target, backend, extra_groups))


def _launched(
    target: Any, backend: str | None, extra_groups: ExtraGroups | None
) -> tuple[Measurement, Callable[[HostRows], Report]]:
    """The rows of the gradients, on their device, and a function that makes a report once they are on the host."""
    named = named_parameters_of(target)
    engine = named.engine
    gradients = gradients_of(named.parameters, engine)
    scale = None if engine is None else engine.loss_scale
    if not gradients.tensors and gradients.missing == [] and extra_groups is None:
        raise ValueError(
            f"none of the {len(named.parameters)} tensors requires a gradient or has one; check() reads the .grad of "
            "parameters after backward(). To check tensors themselves, use check_tensors()"
        )
    labels = labels_of(named, gradients)
    spread = Spread(named.parameters, named.names, extra_groups)
    if engine is not None:  # not in ``.grad``; same parameters on all ranks
        spread = Spread(gradients.owners(named.parameters), labels.names, extra_groups)
    measured = measure(gradients.tensors, labels.of, backend, spread, to_host=True)
    return measured, functools.partial(report_of, labels, scale)


def report_of(labels: Labels, scale: float | None, rows: HostRows, refused: tuple[str, ...] = ()) -> Report:
    """The report on gradients that carry the loss scale ``scale``. RuntimeError if another rank could not measure."""
    total, table = rows.total(), rows.table()
    if scale is not None:
        table, total = without_scale(table, scale), without_scale(total, scale)
    return Report(labels.names, table, rows.infos, labels.missing_names, loss_scale=scale, total=total, refused=refused)


@never_traced
def check_tensors(tensors: Mapping[str, Tensor] | Iterable[Tensor] | Tensor, *, backend: str | None = None) -> Report:
    """Checks any tensors, like `gradstat.check`: activations, a batch, weights, losses. Needs the same one sync.

    For a distributed tensor it covers this rank's shard only, so ranks need not call this together.

    Args:
        tensors: A mapping of tensors by name, several tensors (named by position), or one tensor.
        backend: As for `check`, as are the errors.
    """
    if isinstance(tensors, Mapping):
        names, listed = list(tensors), list(tensors.values())
    else:
        if not isinstance(tensors, Iterable):
            raise TypeError(f"expected a tensor, or tensors in a mapping or sequence, got {type(tensors).__name__}")
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        names = [name_by_position(i) for i in range(len(listed))]
    rows = HostRows(measure(listed, names.__getitem__, backend, None, to_host=True))
    return Report(lambda: names, rows.table(), rows.infos, what="tensor")


def stats(tensors: Iterable[Tensor], *, backend: str | None = None) -> Tensor:
    """All fields of all tensors in one pass: one kernel launch per device, no host sync.

    Tensors that gradstat's functions return on a GPU do not respect ``record_stream``: if another stream reads one, the
    stream that made it has to wait for that read before the last reference is dropped.

    Args:
        tensors: Tensors of floating-point or complex dtype, in any layout that can be measured; the README lists them.
        backend: As for `check`.

    Returns:
        ``[n, len(gradstat.FIELDS)]`` float64 on the device of the first tensor, with the columns of `gradstat.FIELDS`.
        Tensors on other devices are measured there and their rows moved; moving from a GPU to the CPU makes the host
        wait. An empty list gives an empty table on the CPU. Rows of distributed tensors describe the whole tensors, on
        all ranks, which all have to call this. ``first_nonfinite`` is then the index in the shard of the lowest rank
        that has a NaN or Inf.

    Raises:
        TypeError, ValueError: A tensor cannot be measured. The message names its position.
        BackendUnavailableError: ``backend`` cannot run here.
    """
    if isinstance(tensors, Tensor):
        raise TypeError("expected a list of tensors, got a tensor; pass [tensor]")
    expect("tensors", tensors, Iterable, "a list of tensors")
    listed = tensors if isinstance(tensors, list) else list(tensors)
    if listed and torch.compiler.is_compiling():
        # Only the operator runs at run time; everything else here runs at trace time.
        plain = readable(listed, name_by_position)
        device = plain[0].device
        if backend is None and device.type in COMPILED_FOR:
            table: Tensor = operators(device).stats.default(plain)
            return table
        return resolve_for(backend, device.type, name_by_position, 0).check(plain)[0]
    measured = measure(listed, name_by_position, backend)
    if measured.failed is None:
        return measured.table()
    from gradstat._core.sharded import without_ranks

    return without_ranks(measured.nan_if_failed().table())
