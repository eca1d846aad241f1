"""The state of a monitor, for a checkpoint: plain values and tensors. It is checked before any of it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradstat._core.saved import COUNT, FLAG, MAPPING, Kind, reading, require, require_version
from gradstat._version import __version__
from gradstat.recording.recording import Recording, from_parts, parts_of
from gradstat.rules.base import Rule
from gradstat.rules.contents import Contents

_VERSION = 1
_STATE = {
    **dict.fromkeys(("steps", "nonfinite_steps"), COUNT),
    "should_stop": FLAG,
    "rules": {str: [MAPPING]},
    "arrays": MAPPING,
}


def state_of(recording: Recording, rules: Iterable[Rule], **more: Any) -> dict[str, Any]:
    """A state of ``recording``, the states of the ``rules`` and ``more`` values."""
    header, arrays = parts_of(recording)
    of_rules: dict[str, list[dict[str, Any]]] = {}
    for rule in rules:
        of_rules.setdefault(rule.name, []).append(rule.state_dict())
    tensors = {name: torch.tensor(array, device="cpu") for name, array in arrays.items()}
    versions = {"version": _VERSION, "gradstat": __version__}
    return {**versions, **header, **more, "rules": of_rules, "arrays": tensors}


def recording_of(state: Any) -> Recording:
    """The recording in ``state``, a copy. ValueError if anything in ``state`` is not as `state_of` makes it.

    Rules and the guard check their own parts.
    """

    def array_of(name: str, dtype: str) -> Any:
        expected = torch.from_numpy(np.empty(0, dtype)).dtype
        kind = Kind(f"a tensor of {expected}", lambda held: isinstance(held, Tensor) and held.dtype == expected)
        require(state["arrays"], {name: kind}, "state['arrays']")
        return state["arrays"][name].detach().cpu().numpy().copy()

    with reading("state"):
        require_version(state, _VERSION)
        require(state, _STATE)
        recording = from_parts(state, array_of, "state")
        every = [recording.steps, *(series.steps for series in recording.tables.values())]
        newest = max(int(steps[-1]) if len(steps) else -1 for steps in every)
        if newest >= state["steps"]:
            raise ValueError(f"it has a measurement of step {newest}, and state['steps'] is {state['steps']}")
    return recording


def contents_of(state: Any) -> Contents | None:
    """What the training held when ``state`` was saved, a copy; None if that is not in it. ValueError as above."""
    held = state.get("contents")
    with reading("state"):
        return None if held is None else Contents.from_plain(held, "state['contents']")


def load_rules(rules: Sequence[Rule], saved: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Loads the states of all rules, those of one name in order. If one is refused, none is loaded: ValueError.

    Rules that are not in ``saved`` stay as they are.
    """
    left, before = {name: iter(states) for name, states in saved.items()}, []
    try:
        for rule in rules:
            values = next(left.get(rule.name, iter(())), None)
            if values is not None:
                before.append((rule, rule.state_dict()))
                with reading(f"state['rules'][{rule.name!r}]"):
                    rule.load_state_dict(values)
    except ValueError:
        for rule, values in before:
            rule.load_state_dict(values)
        raise
