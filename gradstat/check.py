"""Checks: statistics of gradients, or of any tensors, brought to the host with the names put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from gradstat import _fields
from gradstat._arrival import Arrival
from gradstat._plan import gradients_of, names_of, source_of
from gradstat.report import Report
from gradstat.stats import Part, measure_parts


class PendingReport:
    """A report whose numbers may still be on their way from the device.

    Made by `check_async`. `result` waits for the numbers, if they are not there, and only for them.
    """

    def __init__(self, parts: list[Part], make_report: Callable[..., Report], *others: Tensor) -> None:
        """``make_report`` is given table, infos and the arrays of ``others``, tensors that travel along."""
        self._arrivals = [Arrival(part.table) for part in parts]
        self._others = [Arrival(tensor) for tensor in others]
        self._parts = parts
        self._make_report = make_report
        self._report: Report | None = None

    def done(self) -> bool:
        """Whether `result` would return without waiting. Never waits itself."""
        return self._report is not None or all(arrival.done() for arrival in self._arrivals + self._others)

    def result(self) -> Report:
        """The report; waits once per device that has not delivered yet. Later calls return the same one."""
        if self._report is None:
            tables = [arrival.wait() for arrival in self._arrivals]
            if len(tables) == 1:
                table, infos = tables[0], self._parts[0].infos
            else:
                table, infos = _join(tables, self._parts)
            self._report = self._make_report(table, infos, *(arrival.wait() for arrival in self._others))
            self._arrivals, self._others, self._parts = [], [], []
        return self._report


def _join(tables: list[Any], parts: list[Part]) -> tuple[Any, list[Any]]:
    """The tables of several devices as one, rows in the order of the tensors given."""
    if not tables:
        return np.empty((0, len(_fields.NAMES))), []
    order = np.argsort([p for part in parts for p in part.positions or ()])
    infos = [info for part in parts for info in part.infos]
    return np.concatenate(tables)[order], [infos[i] for i in order]


def check(target: Any, *, backend: str | None = None) -> Report:
    """Checks the gradients of ``target``: which are bad, where, and how large everything is.

    Call it after ``backward()`` and before clipping: clipping with a NaN norm makes every gradient NaN, and
    the culprit is lost. Reads each gradient once; exactly one host sync per device (none on the CPU).

    Args:
        target: A module, an optimizer, parameters, ``(name, parameter)`` pairs, or one parameter.
        backend: ``"native"``, ``"triton"`` or ``"reference"``; None chooses.

    Raises:
        TypeError: ``target`` is none of these, or a gradient has no statistics (an integer dtype, say).
        ValueError: A gradient cannot be measured (on the meta device, say), no tensor of ``target`` takes part
            in training, or ``backend`` is not known.
        BackendUnavailableError: ``backend`` cannot run here.
    """
    return check_async(target, backend=backend).result()


def check_async(target: Any, *, backend: str | None = None) -> PendingReport:
    """`check` without the sync: launches the kernel and returns at once. Arguments and errors as there.

    The gradients may be changed or freed as soon as this returns, on the same stream.
    """
    source = source_of(target)
    gradients = gradients_of(source.parameters)
    if not gradients.tensors and gradients.missing == []:
        raise ValueError(
            f"none of the {len(source.parameters)} tensors requires a gradient or has one; check() reads the .grad of "
            "parameters after backward(). To check tensors themselves, use check_tensors()"
        )
    names, missing = names_of(source, gradients)
    parts = measure_parts(gradients.tensors, lambda i: names()[i], backend)
    return PendingReport(parts, lambda table, infos: Report(names, table, infos, missing))


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
