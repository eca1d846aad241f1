"""The state of a monitor, for a checkpoint: made of plain values, and checked as a whole before any of it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from gradstat._core.text import printable
from gradstat._version import __version__
from gradstat.monitor.findings import Finding
from gradstat.monitor.recording.archive import encoded, texts
from gradstat.monitor.recording.recording import Recording, Series, check
from gradstat.monitor.rules import Rule

_T = TypeVar("_T")

VERSION = 1
# Later steps still have to fit into 64 bits.
_MOST_STEPS = 1 << 53


class State(NamedTuple):
    """The contents of a state, except for rules and the guard, which check their own parts."""

    steps: int
    nonfinite_steps: int
    should_stop: bool
    findings: list[Finding]
    rules: list[tuple[str, Mapping[str, Any]]]
    backward_order: tuple[str, ...]
    history: Recording
    guard: Any


def as_state(recording: Recording) -> dict[str, Any]:
    """Numbers of a recording as tensors and plain values."""

    def tensors(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: torch.from_numpy(value.copy()) for name, value in values.items()}

    tables = {}
    for kind, series in recording.tables.items():
        arrays = {"numel": series.numel, "steps": series.steps, "values": series.values}
        tables[kind] = {"names": list(series.names), **tensors(arrays)}
    return {**tensors({"steps": recording.steps}), "scalars": tensors(recording.scalars), "tables": tables}


def checked(state: Any) -> State:
    """The contents of ``state``. ValueError, which names the field, if they are not those of a monitor's state."""
    if not isinstance(state, Mapping):
        raise ValueError(f"expected what Monitor.state_dict() returned, got {type(state).__name__}")

    def read(field: str, check: Callable[[Any], _T], missing: Any = ...) -> _T:
        with reading(field):
            return check(state[field] if missing is ... else state.get(field, missing))

    version = read("version", _count)
    if version != VERSION:
        raise ValueError(
            f"this state has version {version}, made by a newer gradstat; this is gradstat {__version__}, "
            f"which reads version {VERSION}. Upgrade gradstat: pip install -U gradstat"
        )
    steps = read("steps", _count)
    return State(
        steps,
        read("nonfinite_steps", _count, 0),  # states of early versions have none
        read("should_stop", partial(_of, bool)),
        read("findings", _findings),
        read("rules", lambda rules: [(_of(str, name), _of(Mapping, values)) for name, values in _of(list, rules)]),
        read("backward_order", texts),
        read("history", partial(_history, steps)),
        state.get("guard"),
    )


def load_rules(rules: Iterable[Rule], saved: list[tuple[str, Mapping[str, Any]]]) -> None:
    """Loads the saved states of all rules. If one refuses its state, none is loaded and ValueError is raised.

    Rules that are not in ``saved`` stay as they are.
    """
    left, replaced = list(saved), []
    try:
        for rule in rules:  # rules of one name are in order
            place = next((i for i, (name, _) in enumerate(left) if name == rule.name), None)
            if place is not None:
                now = rule.state_dict()
                with reading("rules"):
                    rule.load_state_dict(left.pop(place)[1])
                replaced.append((rule, now))
    except ValueError:
        for rule, values in replaced:
            rule.load_state_dict(values)
        raise


@contextmanager
def reading(field: str) -> Iterator[None]:
    """Turns any exception inside into a ValueError that names the ``field`` of a state."""
    try:
        yield
    except Exception as error:
        is_missing = isinstance(error, KeyError) and error.args == (field,)
        reason = "is missing" if is_missing else f"cannot be loaded: {str(error) or type(error).__name__}"
        raise ValueError(
            f"state[{field!r}] {printable(reason)}. Expected what Monitor.state_dict() returned"
        ) from error


def _findings(values: Any) -> list[Finding]:
    findings = list(map(Finding.from_dict, _of(list, values)))
    for finding in findings:
        json.dumps(encoded(finding.evidence))  # otherwise no recording could be saved
    return findings


def _history(steps_of_run: int, values: Any) -> Recording:
    values = _of(Mapping, values)
    scalars = {_of(str, name): _array(one, torch.float64) for name, one in _of(Mapping, values["scalars"]).items()}
    tables = {}
    for kind, table in _of(Mapping, values["tables"]).items():
        numel, steps = _array(table["numel"], torch.int64), _array(table["steps"], torch.int64)
        tables[_of(str, kind)] = Series(texts(table["names"]), numel, steps, _array(table["values"], torch.float32))
    recording = Recording(_array(values["steps"], torch.int64), scalars, tables)
    check(recording)
    every = [recording.steps, *(series.steps for series in tables.values())]
    newest = max(int(steps[-1]) if len(steps) else -1 for steps in every)
    if newest >= steps_of_run:
        raise ValueError(f"it has step {newest}, and the state {steps_of_run} steps; expected only steps before that")
    return recording


def _array(tensor: Any, dtype: torch.dtype) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"expected tensors of {dtype}, got {got}")
    return np.array(tensor.detach().cpu().numpy())  # a copy, since the state is the caller's


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_STEPS:
        raise ValueError(f"it is {value!r:.80}; expected a whole number of at least 0")
    return value


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, got {value!r:.80}")
    return value
