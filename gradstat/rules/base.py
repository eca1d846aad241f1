"""What a rule is, and how users add their own."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from gradstat._core.saved import FINITE, FLAG, MAPPING, NUMBER, TEXT, WHOLE, exactly, require
from gradstat._core.text import and_more, expect, printable
from gradstat.recording.findings import SEVERITIES, Finding, Severity
from gradstat.rules.rows import Bools, Floats, Rows, Window

_T = TypeVar("_T")

Band = tuple[float, float]
"""A closed interval of a scalar; a step outside of it is reviewed at once."""

# Causes of a loss that is negative, for the rules on losses.
WRONG_SIGN = ("a loss with the wrong sign, so that training maximises it", "a reward or a score used as the loss")
# Causes of a level that changes and stays, for the rules on losses and norms.
CHANGED = (
    "inputs, labels or targets changed at this step: shuffled, all the same, masked, scaled, or a few samples only",
    "the loss changed at this step: multiplied by a factor, its sign, a term, or what it averages",
    "the model changed at this step: its weights, a dead or overwritten layer, a dropout, an activation, or its mode",
)


class _Carried(NamedTuple):
    initial: Any


def carried(initial: _T) -> _T:
    """Declares, in the class of a rule, what each instance keeps from step to step: a copy of ``initial`` at first."""
    return cast("_T", _Carried(initial))


class Rule:
    """Base class of rules, which review new steps and report problems. A subclass implements `review`.

    Steps are reviewed in blocks, over arrays, so that a healthy step costs next to nothing. A step in which a scalar
    leaves the rule's `bands`, or in which something is not finite, is reviewed at once.

    Attributes:
        name: Its name in findings.
        severity: Severity of its findings, unless a finding has its own.
        causes, advice: Default causes and advice of its findings, the most important first.
        quiet: The number of steps without a problem after which the same problem is reported again.
        explained_by: Names of rules whose findings explain this rule's. Once one of them has a finding, this rule is
            not run any more.
        explains: Names of rules whose warnings a finding of this rule explains. Within the next 100 steps, such a
            warning becomes an info that names this finding as its cause.
        judges_end: Whether the rule also reviews the parameters after the last step, when the run has ended, and what
            the model got in a step that an exception ended.
    """

    name: ClassVar[str] = ""
    severity: ClassVar[Severity] = "warning"
    causes: ClassVar[tuple[str, ...]] = ()
    advice: ClassVar[tuple[str, ...]] = ()
    quiet: ClassVar[int] = 100
    explained_by: ClassVar[tuple[str, ...]] = ()
    explains: ClassVar[tuple[str, ...]] = ()
    judges_end: ClassVar[bool] = False

    def __init__(self) -> None:
        self._episodes: dict[str, int] = {}  # the last step of each problem, by name
        for name in dir(type(self)):
            declared = getattr(type(self), name)
            if isinstance(declared, _Carried):
                setattr(self, name, copy.deepcopy(declared.initial))

    def review(self, window: Window) -> Iterable[Finding]:
        """Finds problems in the steps of ``window``.

        Every step is reviewed once, in order, up to 256 at a time. A rule keeps what it needs of earlier steps in
        attributes that begin with an underscore, which `state_dict` saves. A rule that raises is switched off.

        Args:
            window: The new steps, as `gradstat.rules.rows.Window`.

        Returns:
            Findings, preferably made by `found`.
        """
        raise NotImplementedError

    def bands(self) -> Mapping[str, Band]:
        """By scalar, the interval in which a step needs no immediate review."""
        return {}

    def begins(self, problem: str, step: int) -> bool:
        """Notes a ``problem``, by a name, in ``step``; returns whether it is new, or was not met for `quiet` steps."""
        last = self._episodes.get(problem)
        self._episodes[problem] = int(step)
        return last is None or step - last > self.quiet

    def found(
        self,
        step: int,
        name: str,
        text: str,
        about: str = "series",
        severity: Severity | None = None,
        causes: Sequence[str] | None = None,
        advice: Sequence[str] | None = None,
        **evidence: Any,
    ) -> Finding:
        """A finding of this rule.

        Args:
            step: The step in which it began.
            name: The parameter, module or series that the finding is about.
            text: What was found, in one sentence.
            about: The kind of ``name``, as in `gradstat.monitor.Recording.tables`, or ``"series"``.
            severity, causes, advice: None takes those of the rule.
            evidence: The numbers it is based on, by name.
        """
        return Finding(
            self.name,
            severity or self.severity,
            int(step),
            name,
            {key: _plain(value) for key, value in evidence.items()},
            tuple(self.causes if causes is None else causes),
            tuple(self.advice if advice is None else advice),
            printable(text),
            about,
        )

    def led_by(self, cause: str) -> tuple[str, ...]:
        """Its causes, with ``cause`` first."""
        return (cause, *(other for other in self.causes if other != cause))

    def state_dict(self) -> dict[str, Any]:
        """Its state, as plain values."""
        return {key: _plain(value) for key, value in vars(self).items() if key.startswith("_")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError: A value is not of the kind that the rule keeps there; nothing is loaded.
        """
        require(state, MAPPING, self.name)
        require(state.get("_episodes", {}), {str: WHOLE}, f"{self.name}._episodes")
        is_own = type(self).__module__.startswith("gradstat.")  # what users keep may change its type
        held = {key: value for key, value in vars(self).items() if key.startswith("_") and key in state}
        loaded = {key: _loaded(value, state[key], f"{self.name}.{key}", is_own) for key, value in held.items()}
        vars(self).update(loaded)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if not key.startswith("_"))
        return f"{type(self).__name__}({settings})"


def _plain(value: Any) -> Any:
    """Converts numpy numbers and arrays to Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, PerName):
        return value.saved()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _loaded(held: Any, value: Any, place: str, is_own: bool) -> Any:
    """``value`` of a state, as a rule keeps it in place of ``held``. ValueError if it is of another kind."""
    if isinstance(held, PerName):
        require(value, {str: WHOLE if isinstance(held.initial, int) else NUMBER}, place)
        return PerName(held.initial, value)
    if isinstance(held, Records):
        require(value, [[FINITE]], place)
        require([*map(len, value)], [exactly(held.width)], f"{place}, lengths")
        return Records(held.width, value)
    if is_own:
        kinds: dict[type, Any] = {dict: {str: NUMBER}, list: [FINITE], bool: FLAG, int: WHOLE, str: TEXT}
        require(value, kinds.get(type(held), NUMBER), place)
        if isinstance(held, float):
            return float(value)  # it may have been a whole number, and may be any other in the next state
    return copy.deepcopy(value)


class PerName:
    """One number for each tensor, ``initial`` at first, kept across windows while tensors are added and removed."""

    def __init__(self, initial: float, saved: Mapping[str, float] = MappingProxyType({})) -> None:
        self.initial = initial
        self._names = tuple(saved)
        self._values: npt.NDArray[Any] = np.array(list(saved.values()), dtype=type(initial))

    def values_for(self, names: tuple[str, ...]) -> Floats:
        """``[n]`` in the order of ``names``, int64 or float64 as ``initial``, to be changed in place."""
        if names is not self._names and names != self._names:
            by_name = dict(zip(self._names, self._values.tolist(), strict=True))
            self._values = np.array([by_name.get(name, self.initial) for name in names], dtype=type(self.initial))
        self._names = names
        return self._values

    def saved(self) -> dict[str, float]:
        return dict(zip(self._names, self._values.tolist(), strict=True))


class Records(list[list[float]]):
    """A list of lists of ``width`` finite numbers each, for what belongs together in a state."""

    def __init__(self, width: int, saved: Iterable[Sequence[float]] = ()) -> None:
        super().__init__(map(list, saved))
        self.width = width


def series(window: Window, name: str) -> Iterator[tuple[int, float]]:
    """The steps and values of the scalar ``name``; empty if it has none in these steps."""
    values = window.scalars.get(name)
    return iter(()) if values is None else zip(window.steps.tolist(), values.tolist(), strict=True)


def median(values: Any) -> float:
    """As numpy's. The first call of that one imports numpy.ma, which takes a tenth of a second in a training step."""
    ordered, middle = np.sort(values), len(values) // 2
    if np.isnan(ordered[-1]):
        return math.nan
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


HUGE = 1e300  # stands for what is not finite, also for NaN, where values are compared or kept in a state


def bounded(values: Any) -> list[float]:
    """``values`` with what is not finite at ±`HUGE`."""
    limited: list[float] = np.fmax(np.fmin(values, HUGE), -HUGE).tolist()
    return limited


def around(values: Sequence[float], at: int, before: int, within: int) -> tuple[Sequence[float], Sequence[float]]:
    """Those of ``values`` in so many steps ``before`` the position ``at``, and in so many from it on."""
    at = max(at, 0)
    return values[max(at - before, 0) : at], values[at : at + within]


def risen(
    before: Sequence[float], after: Sequence[float], count: int, of: Callable[[Sequence[float]], float] = median
) -> float | None:
    """How high a loss or norm has risen, or None if it has not: the one answer where the step is known.

    It has if ``count`` values in a row ``after`` a step are above all ``before``: their median, or ``of`` them.
    """
    highest = max((of(after[i : i + count]) for i in range(len(after) - count + 1)), default=-math.inf)
    return highest if highest > max(before, default=math.inf) else None


def sizes_of_weights(parameters: Rows, row: int) -> tuple[list[int], Floats]:
    """The positions of weights, and for each its standard deviation times the root of its number of inputs.

    Around its mean, since some are numbers of another scale, such as the logarithm of a deviation.
    """
    shapes = parameters.tensors.shapes
    judged = [i for i, shape in enumerate(shapes) if len(shape) > 1 and min(shape[:2]) > 1]
    inputs = np.array([math.prod(shapes[i][1:]) for i in judged])
    return judged, parameters.std[row, judged] * np.sqrt(inputs)


def numbered(name: str) -> tuple[str, list[int]]:
    """A name without the numbers in it, which is the same for all layers of a kind, and these."""
    return re.sub(r"\d+", "", name), list(map(int, re.findall(r"\d+", name)))


def same_for(count: int) -> str:
    """What ends the text of a finding that is about the first of ``count`` things."""
    return and_more(count - 1, "; the same holds for {} more")


def directions(rows: Rows, row: int) -> tuple[Floats, Floats]:
    """``[n]`` each: sums and ranges over norms, which weight decay does not change; ranges tell of centred weights."""
    norms = np.maximum(rows.l2_norm[row], 1e-300)
    return rows.field("sum")[row] / norms, (rows.field("max")[row] - rows.field("min")[row]) / norms


def reaches(window: Window) -> Floats:
    """``[k]``: by how much each step can have moved an element, without momentum; 0 if not known."""
    nothing = np.zeros(len(window.steps))
    groups = (values for name, values in window.scalars.items() if name.partition("[")[0] == "lr")
    rates = np.nan_to_num(functools.reduce(np.fmax, groups, nothing))
    if window.run.step_size != "gradient":
        return rates if window.run.step_size else nothing
    norms: Floats = np.nan_to_num(window.scalars.get("finite_norm", nothing))
    return rates * norms


class RowsRule(Rule):
    """Base of rules that look at tensors of some ``kinds``."""

    kinds: ClassVar[tuple[str, ...]] = ("gradient",)

    def review(self, window: Window) -> Iterable[Finding]:
        for kind in self.kinds:
            rows = window.measured.get(kind)
            if rows is not None:
                yield from self.judge(window, rows, kind)

    def judge(self, window: Window, rows: Rows, kind: str) -> Iterable[Finding]:
        """Finds problems in the ``rows`` of a ``kind`` in the ``window``."""
        raise NotImplementedError


class LastingRule(RowsRule):
    """Base of rules about a condition that holds for several measurements of a tensor in a row."""

    quiet = 1000

    _lasts_for, _since, _times = carried(PerName(0.0)), carried(PerName(0)), carried(PerName(0.0))

    def is_intermittent(self, names: tuple[str, ...]) -> bool:
        """Whether the condition has begun more than once for one of the tensors ``names``."""
        return bool((self._times.values_for(names) > 1).any())

    def lasting(
        self, rows: Rows, condition: Bools, measurements: int | npt.NDArray[Any]
    ) -> Iterator[tuple[int, list[int], Floats, Floats]]:
        """Finds tensors whose ``condition``, ``[m, n]``, has held for ``measurements`` rows and begins an episode.

        Yields the row, the positions of these tensors, and for all tensors for how many rows and since which step it
        has held. ``measurements`` broadcasts to ``[m, n]``.
        """
        lasts_for, since = self._lasts_for.values_for(rows.names), self._since.values_for(rows.names)
        times = self._times.values_for(rows.names)
        if not condition.any():  # nearly always
            lasts_for[:] = 0
            return
        needed = np.broadcast_to(measurements, condition.shape)
        for row, step in enumerate(rows.steps.tolist()):
            lasts_for[:] = np.where(condition[row], lasts_for + 1, 0)
            since[lasts_for == 1] = step
            times += lasts_for == 1
            due = np.flatnonzero(lasts_for == needed[row]).tolist()
            fresh = [i for i in due if self.begins(rows.names[i], step)]
            if fresh:
                yield row, fresh, lasts_for, since


def rule(
    name: str, *, severity: Severity = "warning", causes: Sequence[str] = (), advice: Sequence[str] = ()
) -> Callable[[Callable[[Rule, Window], Iterable[Finding]]], type[Rule]]:
    """Turns a function ``(rule, window) -> findings`` into a rule::

        @gradstat.monitor.rule("loss-negative", advice=["check the sign of the loss"])
        def loss_negative(rule, window):
            loss = window.scalar("loss")
            if loss is not None and (loss < 0).any():
                first = (loss < 0).argmax()
                yield rule.found(window.steps[first], "loss", f"the loss is {loss[first]:.3g}", loss=loss[first])

        monitor = gradstat.Monitor(model, rules=[*gradstat.monitor.default_rules(), loss_negative()])

    Args:
        name: As in `Finding.rule`.
        severity, causes, advice: As for `Rule`.

    Returns:
        A subclass of `Rule` that takes no arguments.

    Raises:
        ValueError: ``severity`` is not one of the three, or ``name`` is empty.
    """
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity!r}; expected one of {', '.join(SEVERITIES)}")
    expect("causes", causes, Iterable, "texts")
    expect("advice", advice, Iterable, "texts")
    if not name:
        raise ValueError("name is empty; a rule needs a name, by which its findings refer to it")

    def made(function: Callable[[Rule, Window], Iterable[Finding]]) -> type[Rule]:
        def review(self: Rule, window: Window) -> Iterable[Finding]:
            return function(self, window) or ()

        functools.update_wrapper(review, function)
        attributes: dict[str, Any] = {"name": name, "severity": severity, "review": review}
        attributes |= {"causes": tuple(causes), "advice": tuple(advice)}
        attributes |= {"__doc__": function.__doc__, "__module__": function.__module__}
        return type(function.__name__, (Rule,), attributes)

    return made
