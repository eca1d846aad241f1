"""Checks: statistics of gradients, or of any tensors, brought to the host with the names put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradstat import _fields
from gradstat._arrival import Arrival
from gradstat._compiling import never_traced, outside_of_the_graph
from gradstat._parts import Part
from gradstat._plan import gradients_of, names_of, source_of
from gradstat._tensors import TensorInfo, is_distributed
from gradstat.report import Report
from gradstat.stats import measure_directly, measure_generally, measure_parts

if TYPE_CHECKING:
    from gradstat._reduction import ExtraGroups


class _Rows(NamedTuple):
    """The rows of one device on their way. Their table there is let go of, for its memory is used behind the copy."""

    table: Arrival
    positions: list[int] | None
    infos: Sequence[TensorInfo]


class PendingReport:
    """A report whose numbers may still be on their way from the device.

    Made by `check_async`. `result` waits for the numbers, if they are not there, and only for them.
    """

    def __init__(self, parts: list[Part], make_report: Callable[..., Report], *others: Tensor) -> None:
        """``make_report`` is given table, infos and the arrays of ``others``, tensors that travel along."""
        self._rows = [_Rows(Arrival(part.table), part.positions, part.infos) for part in parts]
        self._others = [Arrival(tensor) for tensor in others]
        self._make_report = make_report
        self._report: Report | None = None

    def done(self) -> bool:
        """Whether `result` would return without waiting. Never waits itself."""
        return self._report is not None or all(a.done() for a in (*(r.table for r in self._rows), *self._others))

    def result(self) -> Report:
        """The report; waits once per device that has not delivered yet. Later calls return the same one."""
        if self._report is None:
            self._report = self._make_report(*_join(self._rows), *(arrival.wait() for arrival in self._others))
            self._rows, self._others = [], []
        return self._report


def _join(parts: list[_Rows]) -> tuple[Any, Sequence[TensorInfo]]:
    """The rows of all devices, once they are there, in the order of the tensors given, and their tensors' infos."""
    tables = [part.table.wait() for part in parts]
    if not tables:
        return np.empty((0, len(_fields.NAMES))), []
    if len(tables) == 1:
        return tables[0], parts[0].infos
    order = np.argsort([position for part in parts for position in part.positions or ()])
    infos = [info for part in parts for info in part.infos]
    return np.concatenate(tables)[order], [infos[i] for i in order]


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
    if torch.compiler.is_compiling():
        return outside_of_the_graph(check)(target, backend=backend, extra_groups=extra_groups)
    return _launched(target, backend, extra_groups).result()


def check_async(target: Any, *, backend: str | None = None, extra_groups: ExtraGroups | None = None) -> PendingReport:
    """`check` without the sync: launches the kernel and returns at once. Arguments and errors as there.

    The gradients may be changed or freed as soon as this returns, on the same stream.

    Returns:
        The report on its way; ``result()`` waits for it, ``done()`` tells whether it would.
    """
    if torch.compiler.is_compiling():
        return outside_of_the_graph(check_async)(target, backend=backend, extra_groups=extra_groups)
    return _launched(target, backend, extra_groups)


def _launched(target: Any, backend: str | None, extra_groups: ExtraGroups | None) -> PendingReport:
    source = source_of(target)
    gradients = gradients_of(source.parameters)
    if not gradients.tensors and gradients.missing == [] and extra_groups is None:
        raise ValueError(
            f"none of the {len(source.parameters)} tensors requires a gradient or has one; check() reads the .grad of "
            "parameters after backward(). To check tensors themselves, use check_tensors()"
        )
    names, missing = names_of(source, gradients)

    def name_of(i: int) -> str:
        return names()[i]

    parts = measure_directly(gradients.tensors, name_of, backend) if extra_groups is None else None
    if parts is None and (extra_groups is not None or is_distributed(gradients.tensors)):
        from gradstat._spread import Spread, raise_if_others_failed

        spread = Spread.of_gradients(source.parameters, extra_groups)
        rows = spread.rows(lambda local: measure_parts(local, name_of, backend))

        def make(table: Any, infos: Sequence[TensorInfo], total: Any, failed: Any) -> Report:
            raise_if_others_failed(float(failed))
            return Report(names, table, infos, missing, total=total[0])

        return PendingReport([rows.part], make, rows.total, rows.failed)
    if parts is None:
        parts = measure_generally(gradients.tensors, name_of, backend)
    return PendingReport(parts, lambda table, infos: Report(names, table, infos, missing))


@never_traced
def check_tensors(tensors: Mapping[str, Tensor] | Iterable[Tensor] | Tensor, *, backend: str | None = None) -> Report:
    """The same report about any tensors: activations, a batch, weights, losses. One sync, as `check`.

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
    parts = measure_parts(listed, lambda i: names[i], backend)
    return PendingReport(parts, lambda table, infos: Report(lambda: names, table, infos, what="tensor")).result()
