"""The state of a monitor, for a checkpoint: made of plain values, and checked as a whole before any of it is used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from gradstat._core.text import printable
from gradstat._version import __version__
from gradstat.monitor.findings import Finding
from gradstat.monitor.recording.archive import encoded, texts
from gradstat.monitor.recording.recording import Recording, Series, check
from gradstat.monitor.rules import Rule

VERSION = 1
# Later steps still have to fit into 64 bits.
_MOST_STEPS = 1 << 53


class State(NamedTuple):
    """What a state says, apart from the parts that check their own: rules and the guard."""

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
    with reading("version"):
        version = _count(state["version"])
    if version != VERSION:
        raise ValueError(
            f"this state has version {version}, made by a newer gradstat; this is gradstat {__version__}, "
            f"which reads version {VERSION}. Upgrade gradstat: pip install -U gradstat"
        )
    with reading("steps"):
        steps = _count(state["steps"])
    with reading("nonfinite_steps"):
        nonfinite_steps = _count(state.get("nonfinite_steps", 0))  # states of early versions have none
    with reading("should_stop"):
        should_stop = _of(bool, state["should_stop"])
    with reading("findings"):
        findings = [Finding.from_dict(values) for values in _of(list, state["findings"])]
        for finding in findings:
            json.dumps(encoded(finding.evidence))  # otherwise no recording could be saved
    with reading("rules"):
        rules = [(_of(str, name), _of(Mapping, values)) for name, values in _of(list, state["rules"])]
    with reading("backward_order"):
        backward_order = texts(state["backward_order"])
    with reading("history"):
        history = _history(_of(Mapping, state["history"]))
        newest = max([-1, *(int(one[-1]) for one in _steps_of(history) if len(one))])
        if newest >= steps:
            raise ValueError(f"it has step {newest}, and the state {steps} steps; expected only steps before that")
    guard = state.get("guard")
    return State(steps, nonfinite_steps, should_stop, findings, rules, backward_order, history, guard)


def load_rules(rules: Iterable[Rule], saved: list[tuple[str, Mapping[str, Any]]]) -> None:
    """Loads the saved states of rules: of all, or of none, if one of them refuses its own, which raises ValueError.

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


def _history(values: Mapping[str, Any]) -> Recording:
    scalars = {_of(str, name): _array(one, torch.float64) for name, one in _of(Mapping, values["scalars"]).items()}
    tables = {}
    for kind, table in _of(Mapping, values["tables"]).items():
        numel, steps = _array(table["numel"], torch.int64), _array(table["steps"], torch.int64)
        tables[_of(str, kind)] = Series(texts(table["names"]), numel, steps, _array(table["values"], torch.float32))
    recording = Recording(_array(values["steps"], torch.int64), scalars, tables)
    check(recording)
    return recording


def _steps_of(recording: Recording) -> Iterator[Any]:
    yield recording.steps
    yield from (series.steps for series in recording.tables.values())


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
