"""Each rule on hand-made windows: a table of stories, and what must be told of them; of slightly less, nothing.

A `Story` holds what a monitor would have measured. It is told the same however its steps are cut into windows.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training import fill
from torch import nn

import gradstat
from gradstat.monitor import RULES, Finding, Monitor, Rule, default_rules, rule
from gradstat.monitor.probes.gradients import Zeroed
from gradstat.monitor.probes.optimizer import Coverage, optimizer_settings
from gradstat.rules import MissingGradient
from gradstat.rules.contents import COLUMNS, Contents
from gradstat.rules.output_facts import ActivatedLogits, Activation, Fit, OutputFacts
from gradstat.rules.rows import Observation, Rows, RunSettings, TensorInfo, TensorSet, Window
from gradstat.rules.runner import RuleRunner
from gradstat.rules.weights import Average, Moves

NAMES = ("a.weight", "a.bias", "b.weight")
SHAPES = ((8, 8), (8,), (8, 8))
ABSENT = [math.nan] * len(gradstat.FIELDS)
NORMAL16 = float(torch.finfo(torch.float16).smallest_normal)
SIZES = (1, 7, 32, 10_000)  # of windows


def row(
    size: float = 1.0, numel: int = 64, zeros: int = 0, mean: float = 0.0, nan: int = 0, inf: int = 0, **more: float
) -> list[float]:
    """The row of a tensor whose elements are ±``size``, except for zeros and nonfinite ones."""
    left = numel - zeros - nan - inf
    values = {
        "nan_count": nan, "inf_count": inf, "zero_count": zeros, "sum": mean * left, "sq_sum": left * size**2,
        "min": -size, "max": size, "first_nonfinite": 0.0 if nan or inf else math.inf, **more,
    }  # fmt: skip
    return [float(values.get(name, 0)) for name in gradstat.FIELDS]


@dataclass
class Table:
    """Rows of one kind, by step."""

    rows: Mapping[int, list[list[float]]]
    names: Sequence[str] = NAMES
    shapes: Sequence[tuple[int, ...]] = SHAPES
    dtype: torch.dtype = torch.float32
    sizes: Sequence[int] = ()  # of a single tensor in each step, if they vary

    def within(self, first: int, end: int) -> Rows | None:
        steps = [step for step in sorted(self.rows) if first <= step < end]
        raw = np.array([self.rows[step] for step in steps], dtype=np.float64)
        by_row = [self.of_shapes([(size,)]) for size in self.sizes[first:end]] or None
        tensors = by_row[-1] if by_row else self.of_shapes(self.shapes)
        return Rows(tensors, np.array(steps), raw, by_row) if steps else None

    def of_shapes(self, shapes: Sequence[tuple[int, ...]]) -> TensorSet:
        infos = [TensorInfo(torch.Size(shape), self.dtype, torch.device("cpu"), None) for shape in shapes]
        return TensorSet.of(self.names, infos)


@dataclass
class Story:
    """The measurements of some steps."""

    steps: int
    scalars: dict[str, Sequence[float]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    observations: Sequence[Observation] = ()
    run: RunSettings = field(default_factory=RunSettings)
    ends: bool = False  # whether the end is reviewed as well, which has no scalars
    settings: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # by the step since which they hold

    def windows(self, size: int) -> list[Window]:
        """All steps, in windows of ``size``."""
        made, latest, outputs = [], dict[str, Rows](), OutputFacts()
        for first in range(0, self.steps, size):
            end = min(first + size, self.steps)
            tables = {kind: table.within(first, end) for kind, table in self.tables.items()}
            known = {kind: rows for kind, rows in tables.items() if rows is not None}
            looks = [seen for seen in self.observations if first <= seen.step < end]
            outputs = next((seen.value for seen in looks[::-1] if seen.kind == "outputs"), outputs)
            latest |= {kind: Rows(rows.tensors, rows.steps[-1:], rows.raw[-1:]) for kind, rows in known.items()}
            scalars = {name: np.array(values[first:end], dtype=np.float64) for name, values in self.scalars.items()}
            settings = [by_name for since, by_name in self.settings.items() if since < end]
            run = replace(self.run, settings=settings[-1]) if settings else self.run
            made.append(Window(np.arange(first, end), scalars, known, run, looks, dict(latest), outputs))
        return [*made, *[Window(np.array([self.steps]), {}, {}, self.run)] * self.ends]


def new(name: str) -> Rule:
    """Makes the rule of that name."""
    return next(kind for kind in RULES if kind.name == name)()


def findings(asked: Rule, windows: Sequence[Window]) -> list[Finding]:
    """What a rule finds, as the monitor runs it."""
    runner = RuleRunner([asked], 64)
    found = [finding for window in windows for finding in runner.review(window)]
    assert all(json.dumps(finding.to_dict()) and finding.text for finding in found)
    for finding in found:
        if finding.rule in ("loss-spike", "exploding-gradient"):
            value = finding.evidence.get("loss", finding.evidence.get("norm", math.inf))
            assert finding.evidence.get("limit", -math.inf) < value
    return found


def places(found: Sequence[Finding]) -> list[str]:
    return [f"{finding.severity} {finding.step} {finding.name}" for finding in found]


# Stories -------------------------------------------------------------------------------------------------------

Cells = list[list[float]]  # the rows of all tensors in a step


def series(name: str, values: Sequence[float], run: RunSettings | None = None, **scalars: Sequence[float]) -> Story:
    return Story(len(values), {name: values, **scalars}, run=run or RunSettings())


losses, norms, rates = (functools.partial(series, name) for name in ("loss", "norm", "lr"))


def rows_of(kind: str, by_step: Mapping[int, Cells], steps: int | None = None, **more: Any) -> Story:
    table = Table(by_step, **{key: more.pop(key) for key in ("names", "shapes", "dtype") if key in more})
    return Story(steps or max(by_step) + 1, tables={kind: table, **more.pop("tables", {})}, **more)


def each(steps: Iterable[int], cells: Cells) -> dict[int, Cells]:
    return dict.fromkeys(steps, cells)


def healthy_rows(bad: int | None = None, **how: int) -> Cells:
    """Rows of three tensors, of which one is not healthy."""
    return [row(0.1, n, **(how if i == bad else {})) for i, n in enumerate((64, 8, 64))]


def spoilt(kind: str, step: int, bad: int = 2, **how: int) -> Story:
    """Healthy rows, and in ``step`` one that is not finite."""
    return rows_of(kind, {0: healthy_rows(), step: healthy_rows(bad, **(how or {"nan": 1}))})


def one(kind: str, values: Sequence[float], every: int = 50, name: str = "x", **more: Any) -> Story:
    """Rows of a kind, for one tensor of 64 elements of these sizes, every ``every`` steps."""
    return rows_of(kind, {i * every: [row(v)] for i, v in enumerate(values)}, names=(name,), shapes=[(8, 8)], **more)


def scales(*least: float, words: Mapping[str, str] = {"x": "its logarithm"}) -> Story:
    """Like `one`, of parameters whose smallest elements are these, and what the loss takes of which."""
    rows = {50 * i: [row(1.0, min=value)] for i, value in enumerate(least)}
    return rows_of("parameter", rows, names=("x",), shapes=[(64,)], run=RunSettings(positive=words))


def adam(*squares: float, eps: float = 1e-8) -> Story:
    """Second moments of these means, every 50 steps."""
    rows = {50 * i: [row(mean, mean=mean)] for i, mean in enumerate(squares)}
    return rows_of("exp_avg_sq", rows, names=("x",), shapes=[(8, 8)], run=RunSettings(optimizer_eps=eps))


def constant(*values: float, **batch: Any) -> Story:
    """Whether all samples are the same, every 50 steps, in a batch with such rows."""
    rows = {i * 50: [row(v, 1, mean=v)] for i, v in enumerate(values)}
    tables = {"batch": Table(each(rows, [row(**batch)]), "x", [(8, 8)])} if batch else {}
    return rows_of("constant", rows, names="x", shapes=[(1,)], tables=tables)


def in_a_dict(*names: str, of_others: float = 0.0) -> Story:
    """The first of two inputs is the same in all samples, the other one is not."""
    rows = {i * 50: [row(1.0, 1, mean=1.0), row(1.0, 1, mean=of_others)] for i in range(3)}
    return rows_of("constant", rows, names=names, shapes=[(1,)] * 2)


def seen(kind: str, *values: Any, every: int = 5, first: int = 3, **more: Any) -> Story:
    """Observations of a kind."""
    looks = [Observation(kind, first + every * i, value) for i, value in enumerate(values)]
    return Story(first + every * len(values), observations=looks, **more)


def covered(*looks: Mapping[str, Any], every: int = 5, **more: Any) -> Story:
    """Looks at what the optimizer has."""
    made = [Coverage([], [], [], [], [])._replace(**look) for look in looks]
    return seen("coverage", *made, every=every, first=0, **more)


def beside(taken: int, others: int, every: int = 50) -> Story:
    """So many steps of the optimizer, and of another one of the same parameters, up to the second look."""
    return covered({}, {"steps": taken, "steps_beside": others, "beside": "SGD"}, every=every)


def set_to(*settings: Mapping[str, float], every: int = 50) -> Story:
    """Settings that change every so many steps."""
    return Story(every * len(settings), settings={every * i: by_name for i, by_name in enumerate(settings)})


def restored(of: str = "a", kind: str = "parameter", loss: float = 0.0, ranks: int = 1, **now: float) -> Story:
    """A run that goes on in step 30 with three weights, which have states, of which those ``of`` some are others."""
    rank = int(now.pop("rank", 0))
    usual = dict.fromkeys(COLUMNS, 4.0) | {"numel": 64.0, "eps": 1e-7, "tiny": 0.0, "min": -1.0}
    keys = [(which, name) for which in ("parameter", "momentum_buffer") for name in "abc"]
    kinds, names = zip(*keys, strict=True)
    before = [[usual[column] for column in COLUMNS] for _ in keys]
    after = [
        [(usual | now if which == kind and name in of else usual)[column] for column in COLUMNS] for which, name in keys
    ]
    pair = Contents(kinds, names, np.array(before)), Contents(kinds, names, np.array(after), rank=rank, ranks=ranks)
    return replace(seen("restored", pair, first=30), scalars={"loss": [4.0] + [1.0] * 29 + [loss] * 5})


def frozen(
    *looks: Sequence[str], rows: int = 9, largest: float = 3.0, names: str = "xy", key: str = "frozen", **run: Any
) -> Story:
    """In each look, which parameters are frozen of a weight with so many rows and others with 8."""
    weights = [row(max=largest, min=-largest) for _ in names]
    table = Table({0: weights}, names, [(rows, 8), *[(8, 8)] * (len(names) - 1)])
    return covered(*({key: look} for look in looks), tables={"parameter": table}, run=RunSettings(**run))


def not_thawed(looks: int, rows: int = 9, thawed: int = -1, has_other_optimizer: bool = True) -> Story:
    """A weight with so many rows, beside one with 8, that was trainable and is frozen from the first look on."""
    frozen = [{} if look == thawed else {"frozen": ["x"], "frozen_since": ["x"]} for look in range(looks)]
    trained = [row(max=3.0, min=-3.0)] * 2
    weights = Table({50 * look: trained for look in range(looks)}, "xy", [(rows, 8), (8, 8)])
    return covered(
        *frozen, every=50, tables={"parameter": weights}, run=RunSettings(has_other_optimizer=has_other_optimizer)
    )


def progress(*looks: tuple[int, int]) -> Story:
    """Looks at the optimizer every 50 steps: how many steps it has taken, and how often its parameters changed."""
    return covered(*({"steps": steps, "changes": changes} for steps, changes in looks), every=50)


def gone(steps: Sequence[int], at: int = 1, end: int = 60, run: RunSettings | None = None, **sizes: int) -> Story:
    """A parameter that has no gradient in some steps, and the sizes of all."""
    sizes = sizes or dict.fromkeys(NAMES, 8)
    shapes = [(size, 8) for size in sizes.values()]
    rows = {step: [ABSENT if i == at and step in steps else row() for i in range(3)] for step in range(end)}
    tables = {"parameter": Table({0: [row()] * 3}, (*sizes,), shapes)}
    looks = [Observation("missing", step, [at]) for step in steps]
    more: dict[str, Any] = {"names": (*sizes,), "shapes": shapes, "tables": tables, "run": run or RunSettings()}
    return rows_of("gradient", rows, observations=looks, **more)


def idle(name: str, **more: int) -> Story:
    """A parameter without gradients beside a twin with one, and which one belongs to an output without a loss."""
    story = gone(range(60), 0, **{"x.0": 8, "x.1": 8}, **more)
    return replace(story, observations=[*seen("idle", [name], first=0).observations, *story.observations])


THREE: dict[str, Any] = {"names": "xyz", "shapes": [(8, 8)] * 3}
ZERO, ZERO_BIAS = row(0.0, zeros=64), row(0.0, 8, 8)
ALIVE, DEAD = [row(), row(0.1, 8), row()], [ZERO, ZERO_BIAS, row()]


def gradients(*spans: tuple[int, Cells], weights: Cells | None = None, **more: Any) -> Story:
    """Rows of gradients, each for so many steps, and of parameters in the first step."""
    every = [rows for steps, rows in spans for _ in range(steps)]
    return rows_of(
        "gradient", dict(enumerate(every)), tables={"parameter": Table({0: weights})} if weights else {}, **more
    )


def noisy_gate(ratio: float = 1e-7, *first: Cells, steps: int = 30, others: float = 1.0, **more: Any) -> Story:
    """Gradients of three weights, the first of which is so many times as large as another, and smaller than a third."""
    cells = [row(ratio), row(), row(others)]
    return gradients(*((1, cell) for cell in first), (steps, cells), names="xyz", shapes=[(8, 8)] * 3, **more)


def layers(ratio: float) -> Story:
    rows = [row(0.1 * ratio ** (1 - i / 5)) for i in range(6)]
    return gradients((8, rows), names=[f"{i}.weight" for i in range(6)], shapes=[(8, 8)] * 6)


def halves(zeros: int, normals: float, steps: int = 10) -> Story:
    low = [row(normals * NORMAL16, 64, zeros), row(0.1, 8), row()]
    return gradients((steps, low), (20 - steps, healthy_rows()), dtype=torch.float16)


def begun(weight: float, gradient: list[float] | None = None, shape: tuple[int, ...] = (8, 8)) -> Story:
    """The first weight has this size in both measurements, and the bias is even larger."""
    shapes = [shape, (8,), (8, 8)]
    table = Table(each(range(51), [gradient or row(), row(0.1, 8), row()]), NAMES, shapes)
    rows = each((0, 50), [row(weight), row(1e9, 8), row()])
    return rows_of("parameter", rows, tables={"gradient": table}, names=NAMES, shapes=shapes)


def forgetting(decay: float, steps: int = 53, group: int = 0, second: float = math.nan, **run: Any) -> Story:
    """A decay that takes this share of weights from step 5 on, when the rate has risen to 1; the ``second`` group's."""
    rates, settings = [0.0] * 5 + [1.0] * (steps - 5), {f"weight_decay of group {group}": decay}
    story = series("lr", rates, RunSettings(**{"step_size": "rate", **run}), **{"lr[1]": [second] * steps})
    return replace(story, settings={0: settings})


def unbiased(size: float) -> Story:
    """A weight that may be of an embedding, when it is first measured."""
    return one("parameter", [size], tables={"gradient": Table({0: [row()]}, ("x",), [(8, 8)])})


def beside_losses(losses: Sequence[float], size: float = 0.01) -> Story:
    """A weight that becomes ``size`` times as large in step 100, beside another, and losses."""
    rows = {0: [row(), row()], 50: [row(), row()], 100: [row(size), row()]}
    return rows_of("parameter", rows, len(losses), names="xy", shapes=[(8, 8)] * 2, scalars={"loss": losses})


def repeating(first: int, steps: int, *others: float, changes: int = 1) -> Story:
    """The first input changes in every ``changes``-th step up to ``first``, and not any more; others go on."""
    every = range(first + steps + 1)
    rows = {
        step: [row(mean=min(step, first) // changes), *(row(mean=step * other) for other in others)] for step in every
    }
    names = [f"input[{i}]" for i in range(1 + len(others))]
    return rows_of("input", rows, names=names, shapes=[(8, 8)] * len(names))


def turned(count: int, looks: int, by: int = 1) -> list[list[float]]:
    """Numbers of so many samples, in another order in each look."""
    return [[float((i * by + j) % count) for j in range(count)] for i in range(looks)]


def others(looks: int, of: int = 99) -> list[list[float]]:
    """Numbers of eight samples in each look, ``of`` so many."""
    return [[100.0 + (8 * i + j) % of for j in range(8)] for i in range(looks)]


def samples(*looks: list[float], bits: float = 8.0, later: float = 0.9, **epoch: int) -> Story:
    """Looks at samples every 12 steps, which differ by so many bits; the loss falls from 2 after the first step."""
    story = seen("samples", *([("input[0]", bits, look)] for look in looks), every=12, first=0)
    return replace(story, scalars={"loss": [2.0] + [later] * (story.steps - 1)}, run=RunSettings(**epoch))


def inputs(
    values: Sequence[tuple[float, float]], first: tuple[int, ...] = (8, 8), shape: tuple[int, ...] = (8, 8)
) -> Story:
    """In each step an input with half of its elements so far below a mean and half above; the shape of a weight."""
    rows = [[row(numel=64, mean=mean, min=mean - d, max=mean + d, sq_sum=64 * (mean**2 + d**2))] for mean, d in values]
    gradients = Table({0: [row(0.1)]}, ("a.weight",), [first])
    tables = {"input": Table(dict(enumerate(rows)), ("input[0]",), [shape]), "gradient": gradients}
    return Story(len(rows), tables=tables)


def counted(*counts: int) -> Story:
    """Batches of so many elements, one in each step."""
    rows = {i: [row(numel=count)] for i, count in enumerate(counts)}
    return Story(len(counts), tables={"batch": Table(rows, ("x",), sizes=counts)})


def zero_inputs(steps: int, *names: str, shape: tuple[int, ...] = (8, 8), size: float = 0.0) -> Story:
    """The first input is zero in all steps, or of another ``size``; others are not."""
    names = names or ("input[0]",)
    cells = [row(size), row()][: len(names)]
    return rows_of("input", each(range(steps), cells), names=names, shapes=[shape] * len(names))


def unchanged(times: int, gradient: float = 0.1, apart: int = 50, zeros: int = 1, until: int = 2, **more: Any) -> Story:
    """The first weight changes until its third measurement, and then stays the same for ``times`` more."""
    weights = {
        apart * i: [
            row(1 + 0.01 * min(i, until), zeros=zeros),
            *((row(1 + i, 8), row(1 + i)) if until else (row(1.0, 8, zeros=1), row())),
        ]
        for i in range(until + times + 1)
    }
    table = Table(each(range(max(weights) + 1), [row(gradient), row(0.1, 8), row()]))
    return rows_of("parameter", weights, tables={"gradient": table}, **more)


def drifting(*moves: float, last: tuple[float, float] = (0.1, 1.0)) -> Story:
    """A weight whose sum moves by these fractions of its norm in each interval of 50 steps; the last rate and norm."""
    sums = [0.0, *np.cumsum(moves).tolist()]
    weights = {50 * i: [row(mean=total / 8), row(1 + i, 8), row(0.0, zeros=64)] for i, total in enumerate(sums)}
    at = max(weights)
    scalars = {"lr": [0.1] * at + [last[0]], "finite_norm": [1.0] * at + [last[1]]}
    table = Table(each(range(at + 1), [row(0.1), row(0.1, 8), ABSENT]))
    return rows_of("parameter", weights, tables={"gradient": table}, scalars=scalars)


def averaged(steps: int = 50, is_written: bool = True, far: float = 0.2, still: float = 0.6) -> Story:
    """One look at an average, which so many steps were between."""
    return seen("averages", [Average("t", steps, is_written, far, still)], first=3 + steps)


EACH, WRITTEN = (50, 50, 50), (50, 50, 51)


def written(
    *changes: Sequence[int], cosine: float = 0.1, others: float = 0.9, distance: float = 0.0,
    sizes: Sequence[float] = (), rates: Sequence[float] = (0.01,) * 160, **run: Any,
) -> Story:  # fmt: skip
    """Three parameters change in place so often in each interval of 50 steps; in the last one, the last moves far.

    Its elements have these ``sizes``, if any, in each look.
    """
    looks = [
        Observation("moves", 50 * i, Moves(50, dict(zip(NAMES, count, strict=True)), dict(zip(NAMES, of, strict=True)),
                                           dict.fromkeys(NAMES[:2], 0.0) | {NAMES[2]: distance * (i == len(changes))}))
        for i, count in enumerate(changes, 1)
        for of in [(others, others, cosine if i == len(changes) else 0.5)]
    ]  # fmt: skip
    weights = {50 * i: [row(1.0), row(1.0, 8), row(size)] for i, size in enumerate(sizes)}
    tables = {"parameter": Table(weights)} if sizes else {}
    looks.insert(0, Observation("moves", 0, Moves(0, {}, {}, {})))
    return Story(len(rates), {"lr": list(rates)}, tables, looks, RunSettings(**{"step_size": "rate", **run}))


def resized(*sizes: float, changes: Sequence[int] = WRITTEN) -> Story:
    """The last parameter changes in place once more, and its elements have these sizes."""
    return written(EACH, EACH, changes, cosine=1.0, sizes=sizes)


def creeping(
    moved: float,
    losses: Sequence[float] = (2.1,) * 193,
    largest: float = 0.2,
    rises: bool = False,
    rate: float = 1e-6,
    **run: Any,
) -> Story:
    """Like `learning`, with a learning ``rate``, which may rise from 0, and a gradient norm of 1.

    Each of two weights has a norm of 1.6, a ``largest`` element, and has ``moved`` in the last step.
    """
    given = {"lr": np.linspace(0 if rises else rate, rate, len(losses)).tolist(), "finite_norm": [1.0] * len(losses)}
    story = learning(losses, **given)
    first, last = ([row(0.2, mean=mean, max=largest), row(1.0, 16)] for mean in (0.0, moved / 40))
    rows = {0: [*first, first[0]], len(losses) - 1: [*last, last[0]]}
    parameters = Table(rows, shapes=((8, 8), (16,), (8, 8)))
    return replace(story, tables={**story.tables, "parameter": parameters}, run=RunSettings(**run))


def warming(
    rates: Sequence[float], peak: float = 1e-2, planned: int = 0, loss: float = 1.0, ends: bool = False, **run: Any
) -> Story:
    """A learning ``rate`` that a scheduler warms up to a ``peak``. The last 64 losses are ``loss``, others 1."""
    values, settings = (
        [1.0] * (len(rates) - 64) + [loss] * 64,
        RunSettings(initial_lrs=(peak,) * (peak > 0), planned_steps=planned, **run),
    )
    return Story(len(rates), {"loss": values[-len(rates) :], "lr": rates}, run=settings, ends=ends)


def pulled(decay: float, later: float = 0.89, gradients: tuple[float, float] = (0.1, 0.1)) -> Story:
    """A weight of size 1 that is another one ``later``, with gradients and the weight decay that is added to them."""
    shown = {"names": ["a.weight"], "shapes": [(8, 8)]}
    sizes, pulls = ({0: [row(one)], 50: [row(other)]} for one, other in ((1.0, later), gradients))
    run = RunSettings(added_decay=decay)
    return rows_of("parameter", sizes, 60, tables={"gradient": Table(pulls, **shown)}, run=run, **shown)


def of_sizes(*sizes: float) -> Story:
    """Weights of these sizes in the first step, times the root of the number of their inputs."""
    names, rows = "abc"[: len(sizes)], [row(size, zeros=1) for size in sizes]
    return rows_of("parameter", {0: rows}, 1, names=names, shapes=[(8, 8)] * len(sizes), scalars={"loss": [2.1]})


def learning(
    losses: Sequence[float],
    certain: float = 0.0,
    right: float = 0.0,
    weights: tuple[float, float] | None = None,
    later: tuple[float, float, float] = (1.0, 1.0, 1.0),
    when: int = 50,
    **scalars: Sequence[float],
) -> Story:
    """Losses of a classifier with 8 classes, whose gradients' elements cancel. Outputs are looked at.

    Guessing has a loss of 2.08. The sizes of its two ``weights`` are those of all parameters ``later``, in the step
    ``when``.
    """
    tables = {"gradient": Table({0: [row(0.1, mean=0.0), row(0.1, 8, mean=0.0), row(0.1, mean=0.0)]})}
    looks = [Observation("outputs", 0, OutputFacts(certain=certain, right=right, classes=8))]
    if weights is not None:
        first = [row(weights[0], zeros=1), row(1.0, 8), row(weights[1], zeros=1)]
        grown = [row(size, numel) for size, numel in zip(later, (64, 8, 64), strict=True)]
        tables["parameter"] = Table({0: first} | ({when: grown} if when < len(losses) else {}))
    return Story(len(losses), {"loss": losses, **scalars}, tables, looks)


def clipped(limit: float, steps: int = 33, gaps: int = 0, lr: float = 0.1) -> Story:
    """Steps of SGD with gradients of norm 1, that are clipped in all steps but the last and ``gaps`` before."""
    limits = [math.nan, *[limit] * (steps - 1 - gaps), *[math.nan] * gaps]
    return series("tiny_clip", limits, RunSettings(step_size="gradient"), finite_norm=[1.0] * steps, lr=[lr] * steps)


def constants(*names: str, value: float = 0.1) -> Story:
    """Weights of which those with these names are constant."""
    rows = [row(value, n, min=value if name in names else -1.0) for name, n in zip(NAMES, (64, 8, 64), strict=True)]
    return Story(3, {"loss": [1.0] * 3}, {"parameter": Table({0: rows})})


def adapted(*sizes: float, low: float | None = None, trains: tuple[bool, ...] = (True, True, False)) -> Story:
    """Two constant weights, of which the first may vary, beside one that varies; some get gradients."""
    rows = [row(size, min=size if low is None or i else low) for i, size in enumerate(sizes)]
    shown: Any = {"names": ("a.weight", "b.weight", "c.weight"), "shapes": [(8, 8)] * 3}
    gradients = [row() if one else ABSENT for one in trains]
    tables = {"parameter": Table({0: [*rows, row()]}, **shown), "gradient": Table({0: gradients}, **shown)}
    return Story(3, {"loss": [1.0] * 3}, tables)


def fitted(loss: float = 0.0, spread: float = 1.0, related: float = 0.0, **more: float) -> OutputFacts:
    """Outputs of which targets are known: at once, or from a ``loss`` that is an eighth of the squared gradients.

    Their standard deviations are 1 and ``spread``, and they are ``related``. Of a `Fit` there may be ``more``.
    """
    scale, squares = 0.25 if loss >= 0 else -0.25, 8 * abs(loss)
    scale = scale if loss else 1.0
    sums = 64.0, 64 * (1 - related * spread) / scale, 64 * (1 + spread**2 - 2 * related * spread) / scale**2
    return OutputFacts(fit=Fit(*sums, squares, 64.0, 16.0)._replace(**more))


def unlike(i: int, related: float, evenness: float = 0.51) -> OutputFacts:
    """Outputs with a loss that is no squared error: it is another share of squared gradients in each look."""
    return fitted(2.0, 1.0, related, squares=10 * 1.02 ** (-1) ** i, evenness=evenness)


def several(related: float, **more: int) -> OutputFacts:
    """As `unlike`, of classes, with two labels for each sample."""
    return facts(**{"fit": unlike(0, related).fit, "labels": 32, **more})


def raw(spread: float, related: float = 0.3, looks: int = 12, falls: bool = False) -> Story:
    """Outputs of a squared error whose targets vary by ``spread`` times as much, and whose loss may fall."""
    losses = [4.0 if falls and i < 4 else 2.0 + 0.1 * (i % 2) for i in range(looks)]
    return looking([fitted(loss, spread, related) for loss in losses], losses)


def constant_target() -> OutputFacts:
    """Equal targets of many elements, which may all be 0."""
    return fitted(2.0, crossing=0.0, facing=0.3, elements=65.0, are_errors=1.0)


def with_extremes(*pairs: tuple[float, float]) -> Story:
    """Two weights with gradients, of which the first has these extremes, every 50 steps."""
    rows = {50 * i: [row(high, min=low), row(0.3 + 0.01 * i)] for i, (low, high) in enumerate(pairs)}
    gradients = Table({50 * i: [row(), row()] for i in range(len(pairs))}, NAMES[::2], [(8, 8)] * 2)
    return rows_of("parameter", rows, names=NAMES[::2], shapes=[(8, 8)] * 2, tables={"gradient": gradients})


def alike(label: int) -> OutputFacts:
    """Outputs for as many classes as the last layer has rows, and labels of one class."""
    return facts(classes=8, least=label, most=label, middle=float(label))


def of(labels: int, label: int) -> OutputFacts:
    """As `alike`, with so many ``labels``."""
    return alike(label)._replace(labels=labels)


def few(i: int, **more: Any) -> OutputFacts:
    """As `alike`, but two labels."""
    return facts(**{"classes": 8, "least": i, "most": i + 1, "middle": i + 0.5, "spread": 0.25, **more})


def facts(**more: Any) -> OutputFacts:
    """Outputs whose softmax over 4 classes a loss takes, for 16 labels."""
    return OutputFacts(**{"classes": 4, "labels": 16, "most": 3, "fit": fitted().fit, **more})


def looking(looks: Sequence[OutputFacts | None], losses: float | Sequence[float] = 2.1, **more: Any) -> Story:
    """Outputs are looked at every 10 steps, or not where there is None."""
    by_look = [losses] * len(looks) if isinstance(losses, float) else losses
    story = learning([loss for loss in by_look for _ in range(10)])
    seen = [Observation("outputs", 10 * i, look) for i, look in enumerate(looks) if look is not None]
    return replace(story, observations=seen, **more)


def activated(*values: Any, classes: int = 0) -> Story:
    """The graph of the first loss tells of an activation before logits."""
    return replace(learning([2.1]), observations=[Observation("activated", 0, ActivatedLogits(*values, classes))])


def dropped(level: float, spread: float = 0.1) -> list[float]:
    """200 losses around 1 that vary so far, then 64 of another level."""
    return [1 + spread * (-1) ** i for i in range(200)] + [level] * 64


def fallen(level: float) -> list[float]:
    """160 losses that fall from 1 to a ``level``."""
    return [(1 - level) * 0.6**i + level for i in range(160)]


def noisy(level: Sequence[float], deviation: float, seed: int = 0) -> list[float]:
    return (np.asarray(level) + np.random.default_rng(seed).normal(0, deviation, len(level))).tolist()


def wobbling(count: int, level: float = 1.0) -> list[float]:
    return [level * (1 + 0.05 * math.sin(i * 1.7)) for i in range(count)]


def rising(steps: int, level: float = 1.2) -> list[float]:
    """From the last of `LOSSES` to a ``level`` in so many steps, and 20 there."""
    return [0.3 + (level - 0.3) * min(1.0, (i + 1) / steps) for i in range(steps + 20)]


LOSSES = [3.0] * 20 + wobbling(76, 0.3)
NORMS = [2.0] * 20 + wobbling(76, 0.1)
SETTLED = [1.0] * 20 + [0.1] * 108
HIGH = [1.6 + 44 * math.exp(-i / 15) + 0.05 * (-1) ** i for i in range(160)] + [4.0] * 40
CHANGING_SIGN = [*(math.exp(1.5 * math.sin(i * 1.7)) * (-1) ** (i // 5) for i in range(96)), *[15.0] * 5]
CLIMBS = noisy([*np.linspace(1, 0.1, 100), *[0.1] * 100, *np.linspace(0.1, 0.9, 200)], 0.02)
SCATTERED = noisy([*[5.0] * 20, *np.linspace(5, 1, 80), *[1.0] * 100], 0.15)
RISES = noisy([*np.linspace(1, 0.1, 200), *[0.1] * 200, *[0.4] * 64], 0.05)
FALLING, LESS = (
    (np.exp(noisy(np.zeros(260), 0.1)) * np.where(np.arange(260) < 200, 1, 1 / by)).tolist() for by in (2.6, 2.4)
)  # at step 200
# Every tenth logarithm of the norm of a model that memorizes one batch: 3 % less in each step, in the end.
MEMORIZING = np.exp(np.interp(np.arange(250), np.arange(0, 260, 10), [
    -1.93, -1.98, -1.84, -1.82, -1.91, -2.08, -2.32, -2.53, -2.71, -2.92, -3.09, -3.25, -3.37,
    -3.50, -3.69, -3.86, -3.99, -4.15, -4.41, -4.74, -5.07, -5.41, -5.77, -6.13, -6.48, -6.82,
])).tolist()  # fmt: skip
RIVAL, TO_FIVE = RunSettings(has_other_optimizer=True), RunSettings(initial_lrs=(5.0,))
PROBABILITIES = facts(activation=Activation.PROBABILITIES)
EVEN = [1e-5 * step for step in range(160)]
BACKWARDS = RunSettings(("b.weight", "a.bias", "a.weight"))
SCALED = RunSettings(("module.2.weight", "module.0.weight"), is_scaled=True)
report = SimpleNamespace
LABELS = [("batch[1]", 0, 4, 4)]
BAD_RANK = report(ok=False, nonfinite=["0.weight"], rank_of=lambda name: 1)

# What happens -> the rule, and for each finding severity, step, name and a part of its text. Behind it the story, and
# others in which it is just short of happening.
STORIES: list[tuple[Any, ...]] = [
    ("a NaN in a batch -> nonfinite-batch, info 4 b.weight: has 1 NaN in 64 elements, the first at [0, 0]",
     spoilt("batch", 4), rows_of("batch", {0: healthy_rows()}), rows_of("gradient", {0: healthy_rows(2, nan=1)})),
    ("inputs far larger -> batch-range, warning 20 x: largest magnitude of x is 101; before, it was between 1 and 1",
     one("batch", [1.0] * 20 + [101.0], 1), one("batch", [1.0] * 20 + [99.0] * 15, 1),
     one("batch", [0.5] * 19 + [50.5], 1)),
    ("inputs that hardly vary -> batch-range, warning 20 x: deviation of x has been about 0.0099 for 16 steps; before,",
     one("batch", [1.0] * 20 + [0.0099] * 16, 1), one("batch", [1.0] * 20 + [0.0099] * 15 + [1.0], 1),
     one("batch", [1.0] * 19 + [0.0099] * 30, 1), one("batch", [1.0] * 10 + [0.0] + [1.0] * 10 + [0.0099] * 30, 1)),
    ("inputs that vary 2 % less -> batch-range, warning 20 x: the standard deviation of x has been about 0.98 for 16",
     one("batch", [1.0] * 20 + [0.98] * 16, 1), one("batch", [1.0] * 20 + [0.992] * 99, 1),
     one("batch", [1.0] * 20 + ([0.98] * 15 + [1.0]) * 4, 1)),
    ("inputs that vary more than ever -> batch-range, warning 20 x: about 2.01 for 16 steps; before, it was between 1",
     one("batch", [1.0, 1.5] * 10 + [2.01] * 16, 1), one("batch", [1.0, 1.5] * 10 + [1.99] * 99, 1),
     one("batch", [1.0, 1.5] * 10 + [0.51] * 99, 1), one("batch", [1.0, 1.5] * 10 + [2.01] * 8 + [1.5, 2.01] * 9, 1),
     one("batch", [1.02**i for i in range(200)], 1)),
    ("inputs of another mean -> batch-range, warning 20 input[0]: the mean of input[0] has been about 0.31 for 16",
     inputs([(0.1, 0.4), (0.2, 0.4)] * 10 + [(0.31, 0.4)] * 16),
     inputs([(0.1, 0.4), (0.2, 0.4)] * 10 + [(0.31, 0.4)] * 15 + [(0.1, 0.4)]),
     inputs([(0.1, 0.4), (0.2, 0.4)] * 10 + [(0.29, 0.4)] * 99),
     inputs([(0.1, 0.4), (0.2, 0.4)] * 10 + [(0.01, 0.4)] * 99),
     inputs([(0.1, 0.4), *[(0.2, 0.4)] * 18] + [(0.31, 0.4)] * 16)),
    ("batches of one -> batch-range, warning 20 x: the number of elements of x has been about 1 for 16 steps; before,",
     counted(*[8, 12] * 10, *[1] * 16), counted(*[8, 12] * 10, *[1] * 15, 8), counted(*[8, 12] * 10, *[2] * 20),
     counted(*[8, 12] * 9, *[1] * 20), counted(*[8] * 20, *[99] * 20)),
    ("inputs in a raw scale -> batch-range, warning 0 x: has had a standard deviation of 76 since the first step",
     one("batch", [76.0] * 20, 1), one("batch", [74.0] * 20, 1), one("batch", [76.0] * 19, 1)),
    ("a batch that is zero -> batch-range, warning 0 x: the model's input x has been 0 everywhere since the first",
     one("batch", [0.0] * 20, 1), one("batch", [0.0] * 19 + [1.0], 1)),
    ("zero inputs -> batch-range, warning 0 input[0]: has been 0 everywhere since the first step", zero_inputs(20),
     zero_inputs(19), zero_inputs(20, "input[1]"), zero_inputs(20, shape=(64,)),
     zero_inputs(20, "input[0]", "input[1]"), zero_inputs(20, size=1.0)),
    ("tiny inputs -> batch-range, warning 0 input[0]: a standard deviation of 0.0049 and no magnitude above 0.0049",
     zero_inputs(20, size=0.0049), zero_inputs(19, size=0.0049), zero_inputs(20, size=0.0051),
     zero_inputs(20, "input[0]", "input[1]", size=0.0049)),
    ("tiny inputs of a norm -> batch-range, warning 0 input[0]: a standard deviation of 0.00029 and no magnitude above",
     inputs([(0.0, 2.9e-4)] * 20, first=(64,)), inputs([(0.0, 3.1e-4)] * 20, first=(64,))),
    ("inputs far from 0 -> batch-range, warning 0 input[0]: a mean of 101 and a standard deviation of only 1, since",
     inputs([(101.0, 1.0)] * 20), inputs([(99.0, 1.0)] * 20), inputs([(101.0, 1.0)] * 19),
     inputs([(101.0, 0.0)] * 20), inputs([(101.0, 1.0)] * 20, first=(64,)), inputs([(101.0, 1.0)] * 20, shape=(64,))),
    ("inputs that become a mask -> batch-range, warning 20 input[0]: the mean of input[0] has been about 0.5 for 16",
     inputs([(0.0, 0.5)] * 20 + [(0.5, 0.5)] * 16), inputs([(0.5, 0.5)] * 20 + [(1.0, 0.0)] * 20),
     inputs([(1.0, 0.0)] * 20 + [(0.5, 0.5)] * 20)),
    ("a label too many -> label-out-of-range, error 3 batch[1]: the labels batch[1] run from 0 to 4; expected 0 to 3",
     seen("label", LABELS), seen("other", LABELS)),
    ("equal samples -> constant-feature, warning 50 x: all samples of a batch are the same in x",
     constant(0.0, 1.0, 1.0), constant(0.0, 1.0, 0.0), constant(0.9, 0.9, 0.9), constant(*[1.0] * 4, min=1.0)),
    ("an entry of a dict that is constant -> constant-feature, warning 0 x['a']: all samples + warning 0 x['b']: all",
     in_a_dict("x['a']", "x['b']", of_others=1.0), in_a_dict("x['a']", "x['b']"), in_a_dict("input[0]", "input[1]")),
    ("an entry of a list that is constant -> constant-feature, warning 0 x[0]: all samples", in_a_dict("x[0]", "x[1]")),
    ("ranks with one batch -> repeated-batch, error 3 batch: repeated=[(0, 1)]",
     seen("rank_batches", report(ok=False, repeated=[(0, 1)])), seen("rank_batches", report(ok=True))),
    ("gradients of each rank alone -> unreduced-gradients, error 3 gradients: not all-reduced any gradient for 16",
     seen("unreduced", (3, False), first=19), seen("unreduced", (3, False), first=18)),
    ("few samples -> repeated-batch, warning 0 input[0]: the 9 batches of input[0] that were inspected from step 0 to",
     samples(*turned(8, 9)), samples(*turned(8, 8)), samples(*turned(8, 9), bits=7.9),
     samples(*turned(8, 9), later=1.0), samples(*turned(8, 9, by=0)), samples(*turned(33, 9)),
     samples(*turned(8, 2), *others(3), *turned(8, 4)), samples(*([float(i)] * 8 for i in range(9)))),
    ("one of several batches -> repeated-batch, warning 0 input[0]: the 9 batches of input[0] that were inspected from",
     samples(*turned(8, 9, by=0), batches=2), samples(*turned(8, 8, by=0), batches=2),
     samples(*turned(8, 9, by=0), batches=1), samples(*turned(8, 9, by=0), batches=2, later=1.0)),
    ("a single sample of tokens -> batch-range, warning 96 input[0]: of input[0] has been 1 in 4 batches that were",
     samples(*others(5), *([[float(i)] for i in range(4)])), samples(*others(5), *([[float(i)] for i in range(3)])),
     samples(*others(5), *([[float(i)] * 3 for i in range(4)]))),
    ("few samples in all -> repeated-batch, warning 0 input[0]: the training set has 32 samples; the loss has fallen",
     samples(*others(9), samples=32), samples(*others(8), samples=32), samples(*others(9), samples=33),
     samples(*others(9), samples=32, later=1.0)),
    ("as many as a batch -> repeated-batch, warning 0 input[0]: only 32 different samples; the loss has fallen from 2",
     samples(*turned(32, 9))),
    ("few samples after others -> repeated-batch, warning 60 input[0]: 8 different samples; the 5 before them had 40",
     samples(*others(5), *turned(8, 5, by=0), later=2.0), samples(*others(5), *turned(8, 4)),
     samples(*others(2), *turned(8, 5)), samples(*others(17, of=33), *turned(8, 5)),
     samples(*others(10, of=36), *turned(8, 5), bits=7.0)),
    ("few samples after others of 100 -> repeated-batch, warning 192 input[0]: the 16 before them had 40",
     samples(*others(16, of=40), *turned(8, 5))),
    ("inputs that repeat -> repeated-batch, warning 100 input[0]: the same samples for 20 steps; before, they changed",
     repeating(100, 20), repeating(100, 19), repeating(25, 60), repeating(0, 120), repeating(100, 20, changes=2)),
    ("one input that repeats -> repeated-batch, warning 100 input[0]: the same samples for 20 steps; before, they",
     repeating(100, 20, 1.0, 2.0), repeating(100, 19, 1.0, 2.0)),
    ("a rate that jumps -> learning-rate-jump, warning 5 lr: the learning rate jumps from 1 to 3.1",
     rates([1.0] * 5 + [3.1] * 5), rates([1.0] * 5 + [3.0] * 5), rates([0.0] + [1.0] * 5), rates([math.nan] * 9),
     rates([1.0, 0.1, 1.0, 0.1, 1.0])),
    ("a rate above its schedule -> learning-rate-jump, warning 5 lr: jumps from 1 to 5.1",
     rates([1.0] * 5 + [5.1] * 5, TO_FIVE), rates([1.0] * 5 + [5.0] * 5, TO_FIVE)),
    ("a rate that does harm -> learning-rate-jump, warning 9 lr: jumps from 1 to 3.1",
     rates([1.0] * 9 + [3.1] * 3, loss=[1.0] * 11 + [math.nan]), rates([1.0] * 9 + [3.1] * 3, loss=[1.0] * 12),
     rates([1.0] * 9 + [3.1] * 3, norm=[1.0] * 11 + [math.inf], loss_scale=[1.0] * 12),
     rates([1.0] * 9 + [3.1] * 20, loss=[1.0] * 28 + [math.nan])),
    ("losses that rise behind a rate -> learning-rate-jump, warning 9 lr: jumps from 1 to 3.1",
     rates([1.0] * 9 + [3.1] * 9, loss=[1.0] * 12 + [1.1] * 6),
     rates([1.0] * 9 + [3.1] * 9, loss=[1.0] * 15 + [1.1] * 3),
     rates([1.0] * 9 + [3.1] * 40, loss=[1.0] * 27 + [1.1] * 22),
     rates([1.0] * 2 + [3.1] * 9, loss=[1.0] * 5 + [1.1] * 6)),
    ("norms that rise behind a rate -> learning-rate-jump, warning 9 lr: jumps from 1 to 3.1",
     rates([1.0] * 9 + [3.1] * 9, norm=[1.0] * 12 + [3.1] * 6),
     rates([1.0] * 9 + [3.1] * 9, norm=[1.0] * 12 + [2.9] * 6)),
    ("a rate that drops -> learning-rate-jump, warning 5 lr: jumps from 1 to 0.049", rates([1.0] * 5 + [0.049] * 5),
     rates([1.0] * 5 + [0.05] * 5), rates([1.0] + [1e-5 * i for i in range(1, 99)])),
    ("the rate of another group -> learning-rate-jump, warning 5 lr[1]: of group 1 jumps from 1 to 3.1",
     rates([1.0] * 9, **{"lr[1]": [math.nan] * 5 + [3.1] * 4}),
     rates([1.0] * 9, **{"lr[1]": [math.nan] * 5 + [3.0] * 4})),
    ("a negative rate -> learning-rate-jump, error 5 lr: the learning rate is -1.0", rates([1.0] * 5 + [-1.0] * 5)),
    ("a rate that stays 0 -> learning-rate-jump, warning 5 lr: the learning rate has been 0 for 20 steps",
     rates([1.0] * 5 + [0.0] * 20), rates([1.0] * 5 + [0.0] * 19 + [0.1]), rates([0.0] * 30)),
    ("a rate that fades later -> learning-rate-jump, warning 113 lr: has come from 1 to 1.587e-05, nearly nothing",
     rates([1.0] * 60 + [0.85**i for i in range(69)]), rates([1.0] * 60 + [0.85**i for i in range(68)]),
     rates([1.0] * 60 + [0.9**i for i in range(80)] + [0.9**80] * 60), rates([0.98**i for i in range(300)]),
     rates([1.0] * 600 + [0.85**i for i in range(100)]),
     rates([1 + math.cos(math.pi * i / 200) for i in range(200)]), rates([1 - i / 200 for i in range(200)])),
    ("a warm-up of 1,000 steps -> long-warm-up, warning 0 lr: come to the 0.01 that its scheduler warms up to after",
     warming(EVEN[:49], planned=900), warming(EVEN[:49], planned=1100), warming(EVEN[:48], planned=900),
     warming(EVEN[:49]), warming([x * x for x in EVEN[:49]], planned=900), warming([1e-5] * 49, planned=900),
     warming(EVEN[:49], 0.2, planned=900, step_size="rate"), warming(EVEN[:49], 0.0, planned=900)),
    ("a large rate of SGD -> long-warm-up, warning 0 lr: after 20,000, but the run has 900",
     warming(EVEN[:49], 0.2, planned=900, step_size="gradient")),
    ("a warm-up that outlasts the run -> long-warm-up, warning 0 lr: risen to 0.0001 in 100 steps, and would",
     warming([x / 10 for x in EVEN[:101]], ends=True), warming([x / 10 for x in EVEN[:101]]),
     warming([x / 10 for x in EVEN[:96]], ends=True), warming(EVEN[:101], 0.039, ends=True),
     warming([1e-5] * 101, ends=True)),
    ("a rate that still rises at the end -> long-warm-up, warning 0 lr: in 159 steps, up to the end of the run",
     warming(EVEN, 0.0, loss=0.81, ends=True), warming(EVEN, 0.0, loss=0.79, ends=True),
     warming(EVEN, 0.0, loss=1.3, ends=True), warming(EVEN, 0.0, loss=0.81),
     warming([*EVEN[:100], *[1e-3] * 60], 0.0, loss=0.81, ends=True)),
    ("a decay that outweighs gradients -> heavy-decay, warning 0 weight_decay: added 1.2 times its gradient",
     pulled(0.12), pulled(0.05), pulled(0.12, later=0.91), pulled(0.12, gradients=(0.3, 0.1)), pulled(0.0)),
    ("a decay that takes half in 138 steps -> heavy-decay, warning 5 weight_decay: takes 0.005 of each weight",
     forgetting(5.01e-3), forgetting(4.99e-3), forgetting(5.01e-3, 52), forgetting(5.01e-3, step_size=""),
     forgetting(5.01e-3, added_decay=1.0)),
    ("a decay of a second group -> heavy-decay, warning 5 weight_decay: takes 0.005 of each weight in a step",
     forgetting(5.01e-3, group=1), forgetting(5.01e-3, group=1, second=0.1)),
    ("a weight that is lost -> not-restored, warning 30 a: when the monitor's state was saved: it had a norm of 4",
     restored(norm=3.7), restored(norm=3.9), restored(norm=3.7, numel=65.0), restored(norm=3.7, rank=1)),
    ("weights that are lost -> not-restored, error 30 a: the same holds for 2 more",
     restored(norm=3.7, of="abc", loss=3.8), restored(norm=3.7, of="abc", loss=3.6)),
    ("an optimizer that is made again -> not-restored, warning 30 a: the optimizer has no momentum_buffer of a",
     restored(norm=0.0, kind="momentum_buffer"), restored(norm=0.0, kind="momentum_buffer", ranks=2)),
    ("a parameter it lacks -> optimizer-coverage, warning 0 a.weight: a gradient and is not in the optimizer",
     covered({"left_out": ["a.weight"]}), covered({})),
    ("parameters in the loss -> optimizer-coverage, warning 0 optimizer: the loss depends on 2 parameters in neither",
     seen("untrained", [(3, 4), (3,)]), seen("untrained", [])),
    ("what rests -> optimizer-coverage, info 0 x: has no gradient and is not in the optimizer",
     covered({"unused": ["x"]})),
    ("what is frozen -> optimizer-coverage, info 0 x: is frozen", covered({"frozen": ["x"]})),
    ("what is frozen later -> optimizer-coverage, info 5 x: is frozen", covered({}, {"frozen": ["x"]})),
    ("most of the model is frozen later -> optimizer-coverage, warning 5 x: is frozen", frozen("", "x")),
    ("a ninth of the model is frozen later -> optimizer-coverage, warning 5 x: is frozen", frozen("", "x", rows=1)),
    ("a little is frozen later -> optimizer-coverage, info 5 x: is frozen", frozen("", "x", rows=1, names="xyz")),
    ("trained weights are frozen -> optimizer-coverage, info 0 x: is frozen", frozen("x")),
    ("new weights are frozen -> optimizer-coverage, warning 0 x: and looks newly initialised: nothing has trained it",
     frozen("x", rows=2, largest=1.7)),
    ("nearly all weights are new and frozen -> optimizer-coverage, warning 0 v: as nearly all weights, and looks newly",
     frozen("vwxy", names="vwxyz", largest=1.7, key="asleep"), frozen("vwx", names="vwxyz", largest=1.7, key="asleep"),
     frozen("vwxy", names="vwxyz", key="asleep"),
     frozen("vwxy", names="vwxyz", largest=1.7, key="asleep", has_other_optimizer=True)),
    ("few new weights are frozen -> optimizer-coverage, info 0 x: is frozen", frozen("x", largest=1.7, names="xyz")),
    ("what is not thawed -> optimizer-coverage, info 0 x: is frozen + warning 0 x: whenever its optimizer steps",
     not_thawed(3)),
    ("what is thawed later -> optimizer-coverage, info 0 x: is frozen", not_thawed(2)),
    ("what is thawed at times -> optimizer-coverage, info 0 x: is frozen", not_thawed(9, thawed=1)),
    ("half is not thawed -> optimizer-coverage, info 0 x: is frozen", not_thawed(3, rows=8)),
    ("what is frozen at first, without a rival -> optimizer-coverage, info 0 x: is frozen",
     not_thawed(9, has_other_optimizer=False)),
    ("two optimizers -> optimizer-coverage, warning 0 optimizer: another optimizer (SGD) steps the same parameters",
     beside(50, 25), beside(50, 24), beside(50, 15, every=20)),
    ("an optimizer made anew in each step -> optimizer-coverage, warning 0 optimizer: beside 0 of the optimizer that",
     beside(0, 25), beside(0, 24)),
    ("another one trains -> optimizer-coverage, warning 50 optimizer: was called in 2 of the last 50 steps",
     progress((0, 0), (50, 50), (2, 50)), progress((0, 0), (50, 50), (2, 49)), progress((0, 0), (50, 50), (3, 50)),
     progress((0, 0), (0, 50))),
    ("gradients that nobody zeroes -> gradients-not-zeroed, warning 3 gradients: the last 2 optimizer steps",
     series("not_zeroed", [math.nan] * 4 + [1.0] * 3), series("not_zeroed", [math.nan, 1.0, math.nan, 1.0, math.nan]),
     Story(9)),
    ("gradients zeroed before each pass -> unused-gradients, warning 3 gradients: 7 of 8 backward passes are zeroed",
     seen("unused", Zeroed(7, 8, 3)), seen("unused", Zeroed(7, 8, 3), run=RIVAL), Story(9)),
    ("no step at all -> unused-gradients, warning 3 optimizer: computed and zeroed 50 times",
     seen("unused", Zeroed(50)), Story(9)),
    ("replicas that differ -> replica-mismatch, error 3 a.bias: drifted=[namespace(name='a.bias')]",
     seen("replicas", report(ok=False, drifted=[report(name="a.bias")])), seen("replicas", report(ok=True))),
    ("a NaN in a state -> nonfinite-optimizer-state, error 50 a.bias: the optimizer's exp_avg of a.bias has 1 NaN",
     spoilt("exp_avg", 50, 1), rows_of("exp_avg", {0: healthy_rows()}),
     rows_of("parameter", {0: healthy_rows(2, nan=1)})),
    ("states that are cleared -> optimizer-memory, warning 5 optimizer: has taken 200 steps, but its state has seen 1:",
     covered(*[{"age": 1.0, "all_steps": steps} for steps in (100, 200, 300)]),
     covered({"age": 1.0, "all_steps": 100}, {"age": 90.0, "all_steps": 200}, {"age": 1.0, "all_steps": 300}),
     covered(*[{"age": 1.0, "all_steps": steps} for steps in (1, 2, 3)]), covered(*[{"all_steps": 100}] * 3)),
    ("a tiny second moment -> small-second-moment, warning 50 x: of x is 9e-17: eps (1e-08) dominates its updates",
     adam(1.0, 0.9e-16), adam(*[1.1e-16] * 5), adam(*[1.1e-16] * 5, eps=1e-5), adam(*[0.0] * 5),
     adam(*[0.9e-16] * 5, eps=0.0)),
    ("an eps that is large for Adam -> small-second-moment, warning 50 x: of x is 0.009: eps (1) dominates its updates",
     adam(1.0, 0.009, eps=1.0), adam(1.0, 0.011, eps=1.0), adam(1.0, 9e-9, eps=1e-3)),
    ("a second moment in a branch that begins small -> small-second-moment, info 50 x: of x is 9e-17",
     rows_of("exp_avg_sq", each((0, 50, 100), [row(1, mean=0.9e-16), *[row(mean=1)] * 2]), names="xyz",
             shapes=[(8, 8)] * 3, run=RunSettings(optimizer_eps=1e-8))),
    ("a NaN in a parameter -> nonfinite-parameter, error 50 b.weight: 1 NaN in 64 elements", spoilt("parameter", 50),
     rows_of("parameter", {0: healthy_rows()}), rows_of("buffer", {0: healthy_rows(2, nan=1)})),
    ("a weight that jumps -> parameter-jump, error 50 x: the largest magnitude in x jumps from 1 to 101",
     one("parameter", [1.0, 101.0]), one("parameter", [1.0, 99.0]),
     rows_of("parameter", {0: [row(1e-4), row(1, 8), row()], 50: [row(0.1), row(1, 8), row()]}),
     one("parameter", [0.0, 1.0]), one("parameter", [math.nan, 1.0])),
    ("a weight that begins huge -> parameter-jump, error 0 a.weight: has an element of magnitude 1.1e+08 at the start",
     begun(1.1e8), begun(1.1e8, ABSENT), one("parameter", [1e9])),
    ("a large weight of one output -> parameter-jump, warning 0 a.weight: begins with 32 times the standard deviation",
     begun(4.0, shape=(1, 16)), begun(0.6, shape=(1, 16)), begun(4.0, shape=(1, 15))),
    ("a weight that begins large -> parameter-jump, warning 0 a.weight: begins with 11.3 times the standard",
     begun(4.0), begun(1.76), begun(4.0, ABSENT), unbiased(4.0)),
    ("a norm that grows -> parameter-jump, error 150 x: the norm of x grows from 13.6 to 68.8",
     one("parameter", [1.0, 1.6, 1.7, 8.6]), one("parameter", [1.0, 1.6, 1.7, 8.4]),
     one("parameter", [1.0, 1.8, 1.7, 8.6]), one("parameter", [1.0, 8.6]),
     one("parameter", [0.0, 0.05, 1.0, 90.0])),
    ("a norm that falls -> parameter-jump, error 100 x: the norm of x falls from 8 to 0.256",
     one("parameter", [1.0, 1.0, 0.032]), one("parameter", [1.0, 1.0, 0.034]), one("parameter", [1.0, math.nan, 1.0]),
     one("exp_avg", [1.0, 0.0])),
    ("a norm that falls to 0 -> parameter-jump, error 50 x: the norm of x falls from 8 to 0",
     one("parameter", [1.0, 0.0]), one("parameter", [0.0, 0.0]),
     rows_of("parameter", {0: healthy_rows(), 50: healthy_rows(2, nan=64), 100: [row(0.0, nan=64)] * 3})),
    ("a weight that is drawn in -> parameter-jump, info 100 x: falls from 8 to 0.08", beside_losses([0.9] * 105)),
    ("zeros, and a loss that rose -> parameter-jump, error 100 x: falls from 8 to 0.08",
     beside_losses([0.9] * 97 + [1.1] * 4)),
    ("zeros, and a loss that rises -> parameter-jump, info 100 x: falls from 8 to 0.08 + error 100 x: has fallen far",
     beside_losses([0.9] * 101 + [1.1] * 4)),
    ("a weight that is normalised where it is used -> parameter-jump, info 100 x: jumps from 1 to 200",
     beside_losses(np.linspace(1, 0.5, 101).tolist(), 200)),
    ("a weight and the loss with it -> parameter-jump, error 100 x: jumps",
     beside_losses([0.9] * 100 + [math.nan], 200)),
    ("a bit flip without harm -> parameter-jump, error 100 x: from 1 to 1e+30", beside_losses([0.9] * 101, 1e30)),
    ("a weight, and no loss -> parameter-jump, error 100 x: jumps from 1 to 200", beside_losses([math.nan] * 101, 200)),
    ("a weight that is drawn anew -> overwritten-parameter, warning 101 b.weight: its value then is 0.1, against 0.9",
     written(EACH, EACH, WRITTEN), written(EACH, EACH, WRITTEN, cosine=0.81, others=0.99),
     written(EACH, EACH, WRITTEN, others=0.81), written(EACH, EACH, EACH), written(EACH, EACH, (51,) * 3),
     written((50, 50, 40), (50, 50, 40), (50, 50, 41)), written(EACH, EACH, (51, 51, 52))),
    ("a weight drawn anew at first -> overwritten-parameter, warning 1 b.weight: by other code than the optimizer",
     written(WRITTEN), written(WRITTEN, cosine=0.6)),
    ("a weight that moves too far -> overwritten-parameter, warning 51 b.weight: its value then is 0.1, against 0.9",
     written(EACH, EACH, distance=1.6), written(EACH, EACH, distance=1.4), written(EACH, EACH, distance=9, cosine=0.9),
     written(EACH, EACH, distance=9, step_size=""), written(EACH, EACH, distance=1.6, rates=[0.01] * 99 + [0.02] * 9)),
    ("a scale that falls -> nonpositive-parameter, warning 50 x: of x is -0.001, down from 1 at first; the loss",
     scales(1, -1e-3), scales(1, 1.1e-3), scales(1, -1e-3, words={}), scales(0, -1e-3)),
    ("a scale near 0 -> nonpositive-parameter, warning 100 x: the smallest element of x is 0.0019, down from 2 at",
     scales(2, 0.1, 1.9e-3), scales(2, 0.1, 2.1e-3)),
    ("a weight that grows -> overwritten-parameter, warning 101 b.weight: its norm went from 9.6 to 20",
     resized(1, 1.1, 1.2, 2.5), resized(1, 1.1, 1.2, 2.3), resized(1, 1.5, 1.6, 5.0), resized(1, 1.1, 1.2, 0.1),
     resized(1, 1.1, 1.2, 2.5, changes=EACH)),
    ("a weight that shrinks -> overwritten-parameter, warning 101 b.weight: its norm went from 9.6 to 0.24",
     resized(1, 1.1, 1.2, 0.03), resized(1, 1.1, 1.2, 0.05), resized(1, 1.1, 1.2, 0.03, changes=EACH)),
    ("an average that stands still -> unchanged-parameter, warning 3 t: an average of weights in 16 bits, does not",
     averaged(), averaged(steps=49), averaged(is_written=False), averaged(far=0.19), averaged(still=0.5)),
    ("a weight that stays -> unchanged-parameter, warning 100 a.weight: has not changed since step 100",
     unchanged(2), unchanged(1), unchanged(2, gradient=0.9e-5), unchanged(9, apart=5), unchanged(2, zeros=0)),
    ("a weight with small gradients -> unchanged-parameter, warning 100 a.weight: has not changed since step 100",
     unchanged(2, gradient=1.1e-5), unchanged(2, gradient=0.0)),
    ("a group that rests -> unchanged-parameter, info 100 a.weight: has not changed since step 100",
     unchanged(2, scalars={"lr": [0.1] * 201, "lr[1]": [0.0] * 201})),
    ("weights that are rounded -> unchanged-parameter, warning 100 weights: of 50% of all weights have 8 significant",
     with_extremes((0.3, 0.5), (0.3, 0.7), (0.375, 0.75)), with_extremes((0.375, 0.75), (0.375, 0.5)),
     with_extremes((0.3, 0.5), (0.3, 0.7), (0.3759765625, 0.75)), with_extremes((0.3, 0.5), (-0.5, 0.5))),
    ("all weights stay -> unchanged-parameter, warning 0 a.weight: since step 0; the same holds for 1 more",
     unchanged(1, until=0), unchanged(9, apart=5, until=0)),
    ("weights that hardly move -> unchanged-parameter, warning 0 a.weight: by more than 9e-06 of its norm in 50 steps",
     drifting(0.9e-5), drifting(1.1e-5), drifting(1.0, 0.9e-5, last=(1e-7, 1.0))),
    ("weights that stop -> unchanged-parameter, warning 100 a.weight: in 50 steps; before, it was up to 0.01",
     drifting(0.01, 0.001, 0.9e-5), drifting(0.1, 0.01, 1.1e-5), drifting(0.01, 0.001, 1.1e-5),
     drifting(0.01, 0.001, 0.9e-5, last=(0.08, 1.0)), drifting(0.01, 0.001, 0.9e-5, last=(0.1, 0.09))),
    ("a NaN in a buffer -> nonfinite-buffer, error 50 a.weight: the buffer a.weight has 1 NaN", spoilt("buffer", 50, 0),
     rows_of("buffer", {0: healthy_rows()})),
    # A mask of -Inf from the start is meant; one with more of them is not.
    ("a mask with another infinity -> nonfinite-buffer, error 100 a.weight: has 10 Inf in 64 elements",
     rows_of("buffer", {step: healthy_rows(0, inf=9 + step // 100) for step in (0, 50, 100)}),
     rows_of("buffer", {step: healthy_rows(0, inf=9 - step // 100) for step in (0, 50, 100)})),
    ("a NaN in an output -> nonfinite-activation, error 5 a.bias: the output of module a.bias has 1 NaN",
     spoilt("activation", 5, 1), rows_of("activation", {0: healthy_rows()})),
    ("a loss of NaN -> nonfinite-loss, error 5 loss: the loss is NaN", series("loss_nonfinite", [math.nan] * 5 + [1.0]),
     series("loss_nonfinite", [math.nan] * 9), losses([1.0] * 9)),
    ("a loss that stays infinite -> nonfinite-loss, error 5 loss: the loss is infinite",
     series("loss_nonfinite", [math.nan] * 5 + [2.0] * 4)),
    ("losses of NaN now and then -> nonfinite-loss, error 0 loss: is NaN + error 3 loss: is NaN",
     series("loss_nonfinite", [1.0, 1.0, math.nan, 1.0, 1.0, math.nan])),
    ("one large loss -> loss-spike, info 96 loss: the loss jumps to 12.1 from about 0.3019",
     losses([*LOSSES, 12.1, *LOSSES[-9:]]), losses([*LOSSES, 11.9]), losses([*LOSSES, math.nan, math.inf]),
     losses([1.0] * 40 + [9.0]), losses([-1.0] * 40 + [1e6]),
     losses([0.0] * 20 + wobbling(100, 0.02) + [1.8] + wobbling(50, 0.02)), losses(CHANGING_SIGN)),
    ("losses that stay large -> loss-spike, info 96 loss: jumps + warning 96 loss: jumps + warning 99 loss: up from",
     losses([*LOSSES, *[12.1] * 4])),
    ("four of five losses -> loss-spike, warning 96 loss: jumps to 1.2 from about 0.3019",
     losses([*LOSSES, 1.2, 1.2, 0.3, 1.3, 1.4]), losses([*LOSSES, 1.2, 1.2, 0.3, 0.3, 1.2, 1.2]),
     losses([*LOSSES, 0.5, 0.5, 0.5, 0.5])),
    ("losses that rise in five steps -> loss-spike, warning 99 loss: jumps to 1.02 from about 0.3145",
     losses([*LOSSES, *rising(5)]), losses([*LOSSES, *rising(50, 0.7)])),
    ("losses that rise in eight steps -> loss-spike, warning 101 loss: rises from about 0.3099 to about 0.6",
     losses([*LOSSES, *rising(8, 0.6)]), losses([*LOSSES, *rising(25)]), losses([*LOSSES, *rising(100)[:60]])),
    ("losses that rise by a little -> loss-spike, warning 96 loss: rises from about 0.3019 to about 0.46, and stays",
     losses([*LOSSES, *[0.46] * 8]), losses([*LOSSES, *[0.44] * 64]), losses([*LOSSES, *[0.46] * 7, 0.3, 0.3, 0.3])),
    ("a level that two losses leave -> loss-spike, warning 96 loss: rises from about 0.3019 to about 0.6, and stays",
     losses([*LOSSES, *[0.6] * 7, 0.28, 0.301, *[0.6] * 7]), losses([*LOSSES, *[0.6] * 7, 0.28, 0.28, *[0.6] * 7])),
    ("a level that rises -> loss-spike, warning 99 loss: rises from about 2.048 to about 2.874, and stays there",
     losses([2.0] * 20 + noisy([2.0] * 80 + [3.0] * 24, 0.25)),
     losses([2.0] * 20 + noisy([2.0] * 80 + [2.6] * 24, 0.25)),
     losses([2.0] * 20 + noisy([2.0] * 40 + [3.0] * 24, 0.25))),
    ("a larger rise than one before -> loss-spike, warning 108 loss: rises from about 2.736 to about 4.594, and stays",
     losses([2.0] * 20 + noisy([2.0] * 40 + [2.7] * 48 + [4.6] * 24, 0.3)),
     losses([2.0] * 20 + noisy([2.0] * 40 + [3.0] * 48 + [4.3] * 24, 0.3))),
    ("a quarter of the way back -> loss-spike, warning 120 loss: rises from about 1.994 to about 2.417, and stays",
     losses([3.0] * 20 + noisy([2.0] * 100 + [2.4] * 16, 0.1)),
     losses([3.0] * 20 + noisy([2.0] * 100 + [2.1] * 64, 0.1)),
     losses([3.0] * 20 + noisy([2.0] * 60 + [2.4] * 16, 0.1))),
    ("losses that rise from step to step -> loss-spike, warning 96 loss: jumps to 1.5 from about 0.3019",
     losses([*LOSSES, 1.5, 3.0, 5.0, 9.0])),
    ("a level far below the first losses -> loss-spike, warning 160 loss: rises from about 1.602 to about 4",
     losses(HIGH), losses([*HIGH[:160], *HIGH[64:160]])),
    ("a level that rises by half under noise -> loss-spike, warning 200 loss: rises from about",
     losses([*SCATTERED, *noisy([1.7] * 64, 0.15)]), losses([*SCATTERED, *noisy([1.25] * 64, 0.15)]),
     losses([loss - 0.7 for loss in [*SCATTERED, *noisy([1.7] * 64, 0.15)]])),
    ("a rise of some losses -> loss-spike, warning 143 loss: is 0.485, up from 0.1 at its lowest",
     losses([*SETTLED, *[1.2, 1.2, 0.1, 0.1, 0.1] * 6]), losses([*SETTLED, *[0.95, 0.95, 0.1, 0.1, 0.1] * 6]),
     losses([1.0] * 20 + [0.5] * 108 + [3.9, 3.9, 0.5, 0.5, 0.5] * 6)),
    ("a rise above the lowest losses -> loss-spike, warning 143 loss: is 0.485, up from 0.05 at its lowest",
     losses([*SETTLED[:70], *[0.05] * 20, *SETTLED[90:], *[1.2, 1.2, 0.1, 0.1, 0.1] * 6])),
    ("a loss that climbs beside a rival -> loss-spike, info 299 loss: up from", losses(CLIMBS, run=RIVAL)),
    ("a loss that rises beside a rival -> loss-spike, info 400 loss: rises from about", losses(RISES, run=RIVAL)),
    ("a rank with NaN -> nonfinite-rank, error 3 0.weight: nonfinite=['0.weight']", seen("origin", BAD_RANK),
     seen("origin", report(ok=True))),
    ("an overflow on one rank -> nonfinite-rank, info 3 module.0.weight", seen("origin", BAD_RANK, run=SCALED)),
    ("NaN in a gradient -> nonfinite-gradient, error 4 a.weight: 3 NaN in 64 elements, the first at [0, 0]",
     spoilt("gradient", 4, 0, nan=3), rows_of("gradient", {0: healthy_rows()}), rows_of("gradient", {0: [ABSENT] * 3})),
    ("two episodes -> nonfinite-gradient, error 3 b.weight + error 20 b.weight",
     rows_of("gradient", each((*range(3, 9), *range(20, 23)), healthy_rows(2, nan=1)))),
    ("the first in the backward pass -> nonfinite-gradient, error 0 a.bias: 2 of 3 gradients are not finite",
     rows_of("gradient", {0: [row(nan=1), row(0.1, 8, nan=1), row()]}, run=BACKWARDS)),
    ("an overflow is the scaler's -> nonfinite-gradient, info 0 b.weight: (with a loss scaler, occasional overflows",
     rows_of("gradient", {0: healthy_rows(2, nan=1)}, run=SCALED)),
    ("overflows in each step -> nonfinite-gradient, info 0 b.weight + error 0 gradients: NaN or Inf in 50 steps in a",
     rows_of("gradient", each(range(50), healthy_rows(2, nan=1)), run=SCALED)),
    ("overflows in many steps -> nonfinite-gradient, info 0 b.weight",
     rows_of("gradient", each(range(49), healthy_rows(2, nan=1)), run=SCALED)),
    ("a gradient that goes -> missing-gradient, warning 4 a.bias: no gradient for 30 steps: unused or detached from",
     gone(range(4, 60)), gone(range(4, 33)), gradients((20, [ABSENT, ABSENT, row()])),
     replace(gone(range(4, 60)), observations=covered({"unused": ["a.bias"]}).observations)),
    # As in mixtures of experts: if a gradient is missing for the second time, that is how the model works.
    ("gradients that come and go -> missing-gradient, info 10 a.bias", gone([0, 1, *range(10, 45)])),
    ("what another optimizer trains -> missing-gradient, info 0 b", gone(range(60), run=RIVAL, a=8, b=8, c=8)),
    ("what has trained beside a rival -> missing-gradient, warning 9 b", gone(range(9, 60), run=RIVAL, a=8, b=8, c=8)),
    ("a small part that is never used -> missing-gradient, info 0 b", gone(range(60), a=99, b=10, c=99)),
    ("a part that is cut off from the start -> missing-gradient, warning 0 b", gone(range(60), a=99, b=11, c=99)),
    ("a small part that is cut off -> missing-gradient, warning 1 b", gone(range(1, 60), a=99, b=1, c=99)),
    ("a small part with a twin -> missing-gradient, warning 0 x.0: which depends on another output of the model of",
     idle("x.0", x=99), idle("", x=99), idle("y", x=99)),
    ("an expert -> missing-gradient, warning 0 x.0.up: no gradient for 300 steps",
     gone(range(310), 0, 310, **{"x.0.up": 8, "x.1.up": 8, "out": 8})),
    ("no expert by its name -> missing-gradient, warning 0 x.0.up: no gradient for 30 steps",
     gone(range(310), 0, 310, **{"x.0.up": 8, "y.1.up": 8, "out": 8})),
    ("no expert by its size -> missing-gradient, warning 0 x.0.up: no gradient for 30 steps",
     gone(range(310), 0, 310, **{"x.0.up": 8, "x.1.up": 4, "out": 8})),
    ("no gradient at all -> missing-gradient, warning 0 gradients: no parameter has had a gradient for 5 steps",
     gradients((5, [ABSENT] * 3), observations=seen("missing", *[[0, 1, 2]] * 5, every=1, first=0).observations),
     gradients((4, [ABSENT] * 3), observations=seen("missing", *[[0, 1, 2]] * 4, every=1, first=0).observations)),
    ("gradients that are zero -> dead-gradient, warning 4 a.bias: zero for 20 steps; the same holds for 1 more",
     gradients((4, healthy_rows()), (20, DEAD), (16, healthy_rows()), run=BACKWARDS),
     gradients((4, healthy_rows()), (19, DEAD), (17, healthy_rows()), run=BACKWARDS)),
    ("a bias that the loss does not see -> dead-gradient, info 0 a.bias",
     gradients((30, [row(0.1), ZERO_BIAS, row()]))),
    ("a bias and all before it -> dead-gradient, warning 0 a.bias", gradients((30, DEAD))),
    ("all gradients, later -> dead-gradient, warning 0 a.weight: zero for 20 steps + warning 60 gradients: all",
     gradients((30, [ZERO, *healthy_rows()[1:]]), (30, healthy_rows()), (30, [ZERO, ZERO_BIAS, ZERO]))),
    ("a slope for negative inputs -> dead-gradient, info 0 p.weight",
     gradients((30, [row(0.0, 1, 1), row()]), names=("p.weight", "b.weight"), shapes=[(1,), (8, 8)])),
    ("a bias for each user -> dead-gradient, info 0 users",
     gradients((30, [ZERO_BIAS, row()]), names=("users", "items"), shapes=[(8, 1), (8, 8)])),
    ("a weight that was never initialised -> dead-gradient, warning 0 a.weight: its own elements are zero as well",
     gradients((30, DEAD), weights=DEAD), gradients((19, DEAD), weights=DEAD),
     gradients((2, DEAD), (28, ALIVE), weights=DEAD), gradients((9, ALIVE), (15, [ZERO, *ALIVE[1:]]), weights=DEAD)),
    ("a weight that is not zero -> dead-gradient, warning 0 a.bias: zero for 20 steps; the same",
     gradients((30, DEAD), weights=[row(), ZERO_BIAS, row()])),
    ("a weight that is zero later -> dead-gradient, warning 3 a.bias: zero for 20 steps; the same",
     gradients((3, ALIVE), (30, DEAD), weights=[ZERO, row(), row()])),
    ("a gate over one element -> dead-gradient, warning 0 x: noise for 20 steps: 1e-07 times that of the median",
     noisy_gate(), noisy_gate(steps=19), noisy_gate(5e-7), noisy_gate(1e-7, [ZERO, row(), row()]),
     noisy_gate(1e-7, [row(1e-6), row(), row()]), noisy_gate(others=9e-5), noisy_gate(dtype=torch.float64)),
    ("a gate in float64 -> dead-gradient, warning 0 x: rounding noise", noisy_gate(8e-16, dtype=torch.float64)),
    ("a gate in bfloat16 -> dead-gradient, warning 0 x: rounding noise", noisy_gate(dtype=torch.bfloat16)),
    ("a gate that is zero now and then -> dead-gradient, warning 1 x: rounding noise",
     noisy_gate(1e-7, [row(nan=1), row(), row()], *[[row(2e-7), row(), row()], [ZERO, row(), row()]] * 5, steps=10)),
    ("a weight that is cut off beside a gate -> dead-gradient, warning 0 x: noise for + warning 0 y: zero for 20 steps",
     gradients((30, [row(1e-7), ZERO, row()]), **THREE)),
    ("gradients that underflow -> underflow, warning 0 a.weight: 47% of the gradient of a.weight is zero",
     halves(30, 7.0), halves(30, 7.0, steps=9), halves(19, 7.0), halves(30, 9.0)),
    ("gradients that vanish by layers -> vanishing-gradient, warning 0 0.weight: of 0.weight is 1e-06 times that of",
     layers(1e-6), layers(1e-4)),
    ("a level that falls -> vanishing-gradient, warning 200 norm: falls from about", norms(FALLING),
     norms(MEMORIZING), norms(LESS), norms(FALLING[101:]),
     gradients((200, healthy_rows()), (60, [*healthy_rows()[:2], ABSENT]), scalars={"norm": FALLING}),
     norms(FALLING, lr=[0.1] * 199 + [0.02] * 61)),
    ("a level that falls by far after a changed rate -> vanishing-gradient, warning 200 norm: falls from about",
     norms([*FALLING[:200], *(norm / 50 for norm in FALLING[200:])], lr=[0.1] * 199 + [0.02] * 61),
     norms([*FALLING[:200], *(norm / 30 for norm in FALLING[200:])], lr=[0.1] * 199 + [0.02] * 61)),
    ("a level that falls beside a rival -> vanishing-gradient, info 200 norm: falls from", norms(FALLING, run=RIVAL)),
    ("a large norm -> exploding-gradient, info 96 norm: is 20.1, 200 times the median of the last 100 steps",
     norms([*NORMS, 20.1, *NORMS[-9:]]), norms([*NORMS, 19.9]), norms([*NORMS, math.nan, math.inf]),
     norms([1.0] * 30 + [9.0]), norms(CHANGING_SIGN), norms(FALLING)),
    # A spike does not excuse the next one, and growth from step to step is not a spike.
    ("a larger norm than one before -> exploding-gradient, info 97 norm: is 30, 298 times the median",
     norms([*NORMS, 5.0, 30.0]), norms([*NORMS, 0.9, 5.0, 30.0])),
    ("four of five norms -> exploding-gradient, warning 96 norm: is 1.5, 14.9 times the median",
     norms([*NORMS, 1.5, 0.1, 1.5, 1.5, 1.5]), norms([*NORMS, 1.5, 1.5, 1.5, 0.1, 0.1]), norms([*NORMS, *[0.9] * 4])),
    ("norms that rise from step to step -> exploding-gradient, warning 96 norm: is 1.5, 14.9 times the median",
     norms([*NORMS, 1.5, 1.6, 1.7, 1.8])),
    ("a huge norm in the beginning -> exploding-gradient, info 5 norm: the gradient norm is 2001",
     norms([1.0, 2.0, 1.0, 1.0, 1.0, 2001.0]), norms([1.0, 2.0, 1.0, 1.0, 1.0, 1999.0]),
     norms([1.0, 1.0, 1.0, 1.0, 1e9]), norms([1e6] * 60), norms([0.0] * 40 + [1.0])),
    ("large norms without harm -> exploding-gradient, info 96 norm: is 9, 89.5 times",
     norms([*NORMS, *[9.0] * 60], loss=[1.0] * 156)),
    ("norms far too large -> exploding-gradient, warning 96 norm: is 11, 109 times",
     norms([*NORMS, *[11.0] * 4], loss=[1.0] * 100)),
    ("norms with heavy tails -> exploding-gradient, info 96 norm: is 1000",
     norms([*(math.exp(4 * math.sin(i * 1.7)) for i in range(96)), 1e3])),
    ("a clip of scaled gradients -> scaled-clip, warning 1 norm: clips the true gradients to 0.0303",
     series("scaled_clip", [math.nan, math.nan, 31.0, 31.0], loss_scale=[1024.0] * 4),
     series("scaled_clip", [33.0] * 4, loss_scale=[1024.0] * 4), series("scaled_clip", [1.0] * 4, loss_scale=[1.0] * 4),
     series("scaled_clip", [1.0] * 4)),
    ("a clip to next to nothing -> tiny-clip, warning 0 norm: their norm was at least 1 in 32 steps: 10,000 times the",
     clipped(1e-4), clipped(1e-4, 32), clipped(0.011), clipped(1e-4, gaps=1), clipped(1e-4, lr=20.0)),
    ("a loss that falls at once -> loss-drop, warning 200 loss: the loss falls from about 1 to about 0.75 at once",
     losses(dropped(0.75)[:224]), losses(dropped(0.75)[:223]), losses(dropped(0.83)), losses(dropped(0.91, 0.01)),
     losses([*dropped(0.75)[:200], *np.linspace(0.89, 0.6, 16), *[0.6] * 48]),
     losses(dropped(0.75), lr=[0.1] * 190 + [0.03] * 74), losses(dropped(0.75), run=RIVAL)),
    ("a loss that falls to nothing -> loss-drop, warning 0 loss: the loss is 0.0004 after 160 steps, 0.0004 times its",
     losses(fallen(4e-4)), losses(fallen(4e-4)[:159]), losses(fallen(6e-4)), losses(fallen(4e-4), run=RIVAL)),
    ("a loss without a lowest value -> negative-loss, warning 63 loss: from about 2 to about -61, ever faster",
     losses([2.0] * 16 + [1.0] * 16 + [-20.0] * 16 + [-61.0] * 16), losses([2.0] * 16 + [1.0] * 32 + [-61.0] * 16),
     losses([2.0] * 16 + [1.0] * 16 + [-9.0] * 16 + [-20.0] * 16), losses([2.0] * 16 + [-15.0] * 16 + [-24.0] * 16),
     losses([2.0] * 16 + [1.0] * 16 + [-20.0] * 16 + [-61.0] * 16, run=RIVAL)),
    ("minus magnitudes -> negative-loss, warning 2 loss: is -0.1: a mean or sum of numbers that are never",
     losses([0.2, 0.1, -0.1], run=RunSettings(loss_has_no_sign=True)), losses([0.2, 0.1, -0.1]),
     losses([0.2, 0.1, 0.0], run=RunSettings(loss_has_no_sign=True)),
     losses([-0.1] * 9, run=RunSettings(loss_has_no_sign=True, has_other_optimizer=True))),
    ("certain from the beginning -> far-beginning, warning 0 loss: begins at 5.3; guessing among 8 classes gives 2.079",
     learning([5.3] + [1.0] * 40, certain=0.4), learning([5.1] + [1.0] * 40, certain=0.4),
     learning([5.3] + [1.0] * 40, certain=0.2), learning([5.3] + [1.0] * 40, certain=0.9, right=0.8)),
    ("weights that have grown -> growing-weights, warning 50 lr: grown to 10.6 times its first value after 51 steps",
     learning([1.7] * 64, weights=(0.2, 0.2), later=(2.1, 2.1, 2.1)),
     learning([1.5] * 64, weights=(0.2, 0.2), later=(2.1, 2.1, 2.1)),
     learning([2.0] * 64, weights=(0.2, 0.2), later=(0.2, 99.0, 0.2)),
     learning([1.7] * 64, weights=(0.2, 0.2), later=(0.7, 5.0, 0.7)),
     learning([1.7] * 160, weights=(0.2, 0.2), later=(2.1, 2.1, 2.1), when=130)),
    ("weights and losses that explode -> growing-weights, warning 50 lr: grown to 35.3 times its first value",
     learning([2.1] + [300.0] * 63, weights=(0.2, 0.2), later=(7.0, 7.0, 7.0)),
     learning([2.1] + [300.0] * 63, weights=(0.2, 0.2), later=(5.8, 5.8, 5.8))),
    ("most weights have grown -> growing-weights, warning 50 lr: has grown to 2.37 times its first value after 51",
     learning([1.7] * 64, weights=(3.0, 0.2), later=(5.0, 1.0, 5.0)),
     learning([1.7] * 64, weights=(3.0, 1.4), later=(5.0, 1.0, 5.0))),
    ("huge weights -> growing-weights, warning 50 lr: grown to 13.4 times its first value after 51 steps",
     learning([1.1] * 64, weights=(0.2, 0.2), later=(2.65, 1.0, 2.65)),
     learning([1.1] * 64, weights=(0.2, 0.2), later=(2.1, 1.0, 2.1))),
    ("a rate far too low -> tiny-steps, warning 0 lr: has moved by 0.03 of its norm in 193 steps, at a learning rate",
     creeping(0.029), creeping(0.031), creeping(0.029, (2.1,) * 192), creeping(0.029, (2.1,) * 129 + (1.88,) * 64),
     creeping(0.029, has_other_optimizer=True), creeping(0.0), creeping(0.029, largest=0.5), learning((2.1,) * 193),
     creeping(0.029, (2.1,) * 81 + (1.5,) * 48 + (2.1,) * 64),  # a mistake in the middle
     creeping(0.004, (2.1,) * 300, rises=True)),
    ("weights that stand still -> tiny-steps, warning 0 lr: has moved by 0.0009 of its norm in 193 steps",
     creeping(9e-4, (2.1,) * 129 + (1.1,) * 64), creeping(9e-4, (2.1,) * 129 + (1.0,) * 64),
     creeping(1.1e-3, (2.1,) * 129 + (1.1,) * 64)),
    ("one of two networks stands still -> tiny-steps, warning 0 lr: has moved by 0.0009 of its norm in 193 steps",
     creeping(9e-4, has_other_optimizer=True), creeping(1.1e-3, has_other_optimizer=True),
     creeping(4e-4, largest=0.5, has_other_optimizer=True)),
    ("a rate far too low for weights that were trained -> tiny-steps, warning 0 lr: has moved by 0.0004 of its norm",
     creeping(4e-4, largest=0.5), creeping(6e-4, largest=0.5), creeping(4e-4, (-2.1,) * 193, largest=0.5),
     creeping(4e-4, (2.1,) * 129 + (2.05,) * 64, largest=0.5)),
    ("a negative loss that stays -> tiny-steps, warning 0 lr: the loss began at -2.1 and is -2.3",
     creeping(0.029, (-2.1,) * 129 + (-2.3,) * 64), creeping(0.029, (-2.1,) * 129 + (-2.4,) * 64)),
    ("an eps that gradients do not reach -> tiny-steps, warning 0 lr: and an eps of 1, far larger than the",
     creeping(0.029, optimizer_eps=1.0), creeping(0.031, optimizer_eps=1.0)),
    ("weights that begin small -> tiny-weights, warning 0 a: half of the weights begin with at most 0.02 times",
     of_sizes(0.007, 0.007, 1.0), of_sizes(0.0072, 0.0072, 1.0), of_sizes(0.007, 0.007)),
    ("weights that are all equal -> constant-weights, warning 0 a.weight: the same holds for every other weight",
     constants("a.weight", "b.weight"), constants("a.weight"), constants("b.weight"),
     constants("a.weight", "b.weight", value=0.125)),
    ("all weights that train are equal -> constant-weights, warning 0 a.weight: the same holds for every other weight",
     adapted(0.01, 0.0), adapted(0.01, 0.0, low=-0.01), adapted(0.01, 0.02, trains=(True, False, True))),
    ("most weights are equal -> constant-weights, warning 0 a.weight: the same holds for most weights",
     adapted(0.3, 0.3, trains=(True,) * 3), adapted(0.0, 0.0, trains=(True,) * 3),
     adapted(0.3, 0.3, low=-0.3, trains=(True,) * 3)),
    ("a dropout of nearly all -> heavy-dropout, warning 0 a.drop: keeps a tenth of its input or less; the same holds",
     set_to({"dropout of a.drop": 0.9, "dropout of b.drop": 1.0}), set_to({"dropout of a.drop": 0.89})),
    ("a dropout that is a function -> heavy-dropout, warning 0 dropped: sets 0.9 of its input to zero",
     series("dropped", [0.9, math.nan]), series("dropped", [0.89, math.nan])),
    ("a model in eval mode -> eval-mode, warning 0 model: the model is trained in eval mode: dropouts do nothing",
     set_to({"number of idle modules": 2.0}), set_to({"number of idle modules": 2.0}, every=16)),
    ("a sigmoid before a softmax -> activation-before-softmax, warning 0 logits: come from a sigmoid",
     looking([facts(activation=Activation.SIGMOID)]), looking([facts()])),
    ("a ReLU before a softmax -> activation-before-softmax, warning 0 logits: come from a ReLU",
     looking([facts(activation=Activation.RELU)])),
    ("a softmax before logsigmoid -> activation-before-softmax, warning 0 logits: gets the output of a softmax",
     activated("logsigmoid", "softmax"), looking([facts()])),
    ("a sigmoid in a cross-entropy -> activation-before-softmax, warning 0 logits: sample cannot fall below 0.7437",
     activated("log_softmax", "sigmoid", classes=4)),
    ("a softmax twice -> activation-before-softmax, warning 0 logits: are probabilities already",
     looking([PROBABILITIES], 1.25), looking([PROBABILITIES], 1.24), looking([None, PROBABILITIES], 1.25)),
    ("a softmax twice, later -> activation-before-softmax, warning 20 logits: are probabilities already",
     looking([facts(), None, PROBABILITIES])),
    ("a softmax over the samples -> softmax-dimension, warning 10 logits: the model's outputs are a softmax over",
     looking([facts(is_over_samples=True)] * 2), looking([facts(is_over_samples=True), facts()] * 2)),
    ("a loss over the samples -> softmax-dimension, warning 10 logits: the loss applies a softmax to the outputs",
     looking([facts(takes_over_samples=True)] * 2)),
    ("labels of one class -> equal-targets, warning 0 logits: each of 6 batches that were inspected, all labels are of",
     looking([alike(1)] * 6), looking([alike(1)] * 5), looking([alike(1), facts()] * 6),
     looking([alike(1)] * 6, run=RIVAL), looking([facts(least=1, most=1)] * 6)),
    ("data sorted by class -> equal-targets, warning 0 logits: in the first 7 batches that were inspected, 100% is",
     looking([alike(i) for i in range(7)]), looking([alike(i) for i in range(6)]),
     looking([of(4, i) for i in range(9)])),
    ("sorted data that are known by heart at times -> equal-targets, warning 0 logits: in the first 7 batches that",
     looking([alike(0), alike(1), fitted(), *(alike(i) for i in range(2, 7))])),
    ("few labels of a class after those of another -> equal-targets, warning 0 logits: in the first 7 batches that",
     looking([*[of(5, 0)] * 5, of(10, 1), of(5, 1)]), looking([*[of(6, 0)] * 8, of(6, 1)]),
     looking([*[of(5, 0)] * 5, of(5, 1), *[facts(classes=8, labels=10, most=1, middle=0.5, spread=0.25)] * 3])),
    ("batches of few labels -> equal-targets, warning 0 logits: of the variance of labels in the first 7 batches that",
     looking([few(i) for i in range(7)]), looking([few(i) for i in range(6)]),
     looking([few(i, spread=6.7) for i in range(9)]), looking([few(i, labels=4) for i in range(9)]),
     looking([few(i, labels=513) for i in range(9)]), looking([few(i, classes=4) for i in range(9)]),
     looking([few(i, fit=None) for i in range(9)]), looking([few(i) for i in range(9)], run=RIVAL)),
    ("labels that become equal -> equal-targets, warning 40 logits: of one class, the same in all of them; of 4 before",
     looking([facts()] * 4 + [facts(least=1, most=1)] * 7), looking([facts()] * 4 + [facts(least=1, most=1)] * 6),
     looking([facts()] * 4 + [facts(least=1, most=1, fit=None)] * 7)),
    ("targets that become equal -> equal-targets, warning 40 logits: all targets are equal; of 4 before them, 4 had",
     looking([fitted()] * 4 + [fitted(spread=0.0)] * 7), looking([fitted(spread=0.0)] * 11, 1.0)),
    ("targets that are equal -> equal-targets, warning 0 logits: in each of 6 batches that were inspected, all targets",
     looking([fitted(2.0, crossing=0.0, facing=0.3)] * 6), looking([fitted(2.0, crossing=0.0, facing=0.3)] * 5),
     looking([fitted(2.0, crossing=0.0, facing=0.3, outputs=0.0)] * 6),
     looking([fitted(-2.0, crossing=0.0, facing=0.3)] * 6, -2.0),
     looking([fitted(2.0, crossing=0.01, facing=0.3)] * 6), looking([fitted(2.0, crossing=0.0, facing=0.2)] * 6),
     looking([fitted(2.0, crossing=0.0, facing=0.3, are_errors=1.0)] * 6),
     looking([fitted(2.0, crossing=0.0, facing=0.3, elements=65.0)] * 6)),
    ("labels of other samples, several of each -> unrelated-outputs, warning 0 loss: after 240 steps, no more than",
     looking([several(0.02)] * 25), looking([several(0.3)] * 25), looking([several(0.02, labels=16)] * 25),
     looking([several(0.02, classes=65)] * 25), looking([several(0.02)] * 25, [3.0] * 7 + [2.0] * 18),
     looking([several(0.02)] * 25, 0.6)),
    ("targets in a raw unit -> unrelated-outputs, warning 0 loss: but after 100 steps these still vary 11 times as",
     raw(11.0), raw(9.0), raw(11.0, related=0.2), raw(11.0, looks=10), raw(11.0, falls=True)),
    ("targets of many elements that are equal -> equal-targets, warning 0 logits: that were inspected, all targets",
     looking([constant_target()] * 9, [2.0] * 2 + [0.0019] * 7),
     looking([constant_target()] * 9, [2.0] * 2 + [0.0021] * 7)),
    ("targets of other samples -> unrelated-outputs, warning 0 loss: after 240 steps, no more than by chance",
     looking([fitted(related=0.02 * (-1) ** i) for i in range(25)]),
     looking([fitted(related=0.02 * (-1) ** i) for i in range(24)]),
     looking([fitted(related=0.02 * (-1) ** i + 0.1) for i in range(25)])),
    ("targets of other samples in any loss -> unrelated-outputs, warning 0 loss: after 240 steps, no more than by",
     looking([unlike(i, 0.02 * (-1) ** i) for i in range(25)], 2.0),
     looking([unlike(i, 0.02 * (-1) ** i, 0.06) for i in range(25)], 2.0),
     looking([unlike(i, 0.02 * (-1) ** i + 0.12) for i in range(25)], 2.0),
     looking([unlike(i, 0.02 * (-1) ** i) for i in range(25)], 2.0, run=RunSettings(loss_is_sum=True)),
     looking([unlike(i, 0.02 * (-1) ** i) for i in range(25)], [3.0] * 7 + [2.0] * 18)),
    ("a loss that has stopped to fall -> unrelated-outputs, warning 141 loss: after 240 steps, no more than by chance",
     looking([unlike(i, 0.02 * (-1) ** i) for i in range(25)], [3.0] * 4 + [2.0] * 21),
     looking([unlike(i, 0.02 * (-1) ** i) for i in range(25)], [3.0] * 4 + [2.0 - i / 50 for i in range(21)])),
    ("outputs that become alike -> unrelated-outputs, warning 240 loss: after 240 steps they vary 0.088 times as much",
     looking([fitted(related=0.9)] * 5 + [fitted(related=0.9, outputs=0.5)] * 20),
     looking([fitted(related=0.9)] * 5 + [fitted(related=0.9, outputs=0.5)] * 19)),
]  # fmt: skip
by_story = pytest.mark.parametrize(
    ("of_rule", "told", "story", "fine"),
    [
        pytest.param(of_rule, told.split(" + "), story, fine, id=what)
        for what, story, *fine in STORIES
        for of_rule, _, told in [what.partition(" -> ")[2].partition(", ")]
    ],
)


def test_every_rule_has_a_story() -> None:
    assert {what.partition(" -> ")[2].partition(", ")[0] for what, *_ in STORIES} == {kind.name for kind in RULES}


@by_story
def test_a_story_is_told_however_steps_are_cut_up_and_just_below_nothing(
    of_rule: str, told: list[str], story: Story, fine: Sequence[Story]
) -> None:
    for size in SIZES:
        found = findings(new(of_rule), story.windows(size))
        assert places(found) == [what.partition(": ")[0] for what in told], size
        assert all(what.partition(": ")[2] in finding.text for what, finding in zip(told, found, strict=True))
        for i, less in enumerate(fine):
            assert places(findings(new(of_rule), less.windows(size))) == [], (i, size)


@by_story
def test_a_rule_goes_on_from_a_saved_state(of_rule: str, told: list[str], story: Story, fine: Any) -> None:
    windows = story.windows(1)
    whole = findings(new(of_rule), windows)
    for cut in {1, len(windows) // 3, len(windows) // 2, len(windows) - 1}:
        before, after = new(of_rule), new(of_rule)
        found = findings(before, windows[:cut])
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert after.bands() == before.bands()
        found += findings(after, windows[cut:])
        assert [(one.step, one.name, one.text) for one in found] == [(one.step, one.name, one.text) for one in whole]


@by_story
def test_other_names_and_what_is_not_there_do_no_harm(of_rule: str, told: Any, story: Story, fine: Any) -> None:
    asked = new(of_rule)
    assert all((asked.__doc__, asked.causes, asked.advice, repr(asked).startswith(type(asked).__name__)))
    empty = Window(np.empty(0, np.int64), {}, {})
    nothing = Window(np.arange(3), {"loss": np.full(3, math.nan), "norm": np.full(3, math.nan)}, {})
    assert findings(asked, [empty, nothing, empty]) == []
    asked = new(of_rule)
    for kind in (*story.tables, "gradient", "parameter"):
        findings(asked, rows_of(kind, {0: [row()]}, names=("z",), shapes=[(8, 8)]).windows(1))
        findings(asked, rows_of(kind, {1: [ABSENT, row()]}, names=("y", "z"), shapes=[(8, 8)] * 2).windows(2)[1:])
    name = told[0].partition(": ")[0].split(" ", 2)[2]
    assert name in {finding.name for finding in findings(asked, story.windows(7))}
    findings(asked, rows_of("gradient", {0: []}, names=(), shapes=()).windows(1))


# Noise ---------------------------------------------------------------------------------------------------------

AFTER = {
    "for ever": np.full(64, 4.5),  # less than twice as much
    "decaying": 2.5 + 2.5 * np.exp(-np.arange(64) / 50),
    "small": np.full(64, 2.9),  # within the noise of each value
}


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
def test_a_loss_that_rises_and_stays_is_found_in_noise(after: Any) -> None:
    for seed, size in itertools.product(range(3), SIZES):
        values = noisy([*(2.5 + np.exp(-np.arange(400) / 20)), *after], 0.1, seed)
        (found,) = findings(new("loss-spike"), losses(values).windows(size))
        assert 395 <= found.step <= 406


NOISE: dict[str, tuple[tuple[str, ...], Callable[[Any, Any], Any]]] = {
    "falling": (("loss",), lambda t, draw: 2.5 + 3 * np.exp(-t / 200) + draw.normal(0, 0.2, len(t))),
    "heavy tails": (("loss",), lambda t, draw: 1 + 0.1 * draw.standard_t(3, len(t))),
    "factors": (("loss", "norm"), lambda t, draw: np.exp(draw.normal(0, 0.7, len(t)))),
    "slow rise": (("loss",), lambda t, draw: 3 * np.exp(-t / 20) + 1 + t / 2000 + draw.normal(0, 0.1, len(t))),
    "drifting": (("loss",), lambda t, draw: 2 + np.cumsum(draw.normal(0, 0.02, len(t))) + draw.normal(0, 0.2, len(t))),
    "waves": (("norm",), lambda t, draw: np.exp(np.sin(t / 60) + draw.normal(0, 0.2, len(t)))),
    "decay": (("norm",), lambda t, draw: 5 * np.exp(-t / 100 + draw.normal(0, 0.2, len(t)))),
}


@pytest.mark.parametrize(("scalars", "course"), NOISE.values(), ids=NOISE)
def test_noise_and_drift_are_no_new_level(scalars: tuple[str, ...], course: Any) -> None:
    of = {"loss": ["loss-spike"], "norm": ["exploding-gradient", "vanishing-gradient"]}
    for seed, scalar in itertools.product(range(20), scalars):
        story = series(scalar, course(np.arange(1000), np.random.default_rng(seed)).tolist())
        assert [places(findings(new(name), story.windows(64))) for name in of[scalar]] == [[]] * len(of[scalar])


@pytest.mark.parametrize(
    ("fallen_to", "maximizes", "is_told"), [(0.5, False, True), (0.7, False, True), (1, False, False), (1, True, True)]
)
def test_a_loss_that_climbs_far_above_its_beginning_is_told(fallen_to: float, maximizes: bool, is_told: bool) -> None:
    course = [*np.linspace(1, fallen_to, 150), *(fallen_to * np.exp(np.arange(300) / 100))]  # or it never falls
    for seed in range(3):
        story = losses(noisy(course, 0.05, seed), RunSettings(maximizes=maximizes))
        found = [finding for finding in findings(new("loss-spike"), story.windows(64)) if "it began" in finding.text]
        assert ["maximize=True" in finding.causes[0] for finding in found] == [maximizes] * is_told


def test_what_the_guard_refuses_again_and_again_is_a_spike() -> None:
    values = noisy([*(2.5 + 1.5 * np.exp(-np.arange(200) / 20)), *[3.2] * 5], 0.04)
    guard, parameter = gradstat.SpikeGuard(), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for value in values:
        parameter.grad = torch.ones(1)
        gradstat.guarded_step(optimizer, loss=torch.tensor(value), guard=guard)
    assert guard.read(wait=True).by_loss == 5
    assert [found.step for found in findings(new("loss-spike"), losses(values).windows(1))] == [200]


@pytest.mark.parametrize("name", ["loss-spike", "exploding-gradient"])
@pytest.mark.parametrize("size", [1e200, 1e307])
def test_huge_values_do_not_raise(name: str, size: float) -> None:
    values = [*(size * np.array(noisy(np.ones(150), 0.05))), *[-size, size, 0.0] * 20, *[3.0] * 90]
    asked = new(name)
    findings(asked, series("loss" if name == "loss-spike" else "norm", values).windows(32))
    json.dumps(asked.state_dict(), allow_nan=True)


# What rules look at, and what they are made with ----------------------------------------------------------------


LOW_RATE = "a learning rate far too low"


@pytest.mark.parametrize(
    ("story", "causes"),
    [
        (creeping(0.01, step_size="rate"), [LOW_RATE]),
        (creeping(0.01, step_size="gradient"), [LOW_RATE, "a loss or gradients that are multiplied"]),
        (creeping(0.01, rate=2e-3, step_size="gradient"), ["a loss or gradients that are multiplied", LOW_RATE]),
        (creeping(0.01, step_size="rate", optimizer_eps=0.1), ["an optimizer eps", LOW_RATE]),
    ],
)
def test_why_steps_are_tiny_depends_on_the_optimizer(story: Story, causes: list[str]) -> None:
    (found,) = findings(new("tiny-steps"), story.windows(64))
    assert len(found.causes) == len(causes)
    assert all(map(str.startswith, found.causes, causes))


def test_the_newest_rows_keep_no_others_alive() -> None:
    rows = Table(each(range(3), healthy_rows())).within(0, 3)
    assert rows is not None
    assert rows.newest.steps.tolist() == [2]
    assert not np.shares_memory(rows.newest.raw, rows.raw)


@pytest.mark.parametrize(
    ("first", "lr", "values"),
    [
        ("inputs, labels or targets changed at this step", [1e-3] * 200, [*LOSSES, *[12.1] * 104]),
        ("the learning rate, which rose from 0.001 to 0.3", [1e-3] * 90 + [0.3] * 110, [*LOSSES, *[12.1] * 104]),
        ("inputs, labels or targets changed at this step", [1e-3] * 98 + [0.3] * 102, [*LOSSES, *[12.1] * 104]),
        ("a loss with the wrong sign", [1e-3] * 200, [1.0, *[-100.0 - i % 7 for i in range(150)], *[-30.0] * 49]),
    ],
)
def test_what_the_scalars_show_comes_before_other_causes(first: str, lr: list[float], values: list[float]) -> None:
    for size in (1, 7, 200):
        found = findings(new("loss-spike"), losses(values, lr=lr).windows(size))[0]
        assert found.causes[0].startswith(first)
        assert len({*found.causes}) == len(found.causes)


def jumping(name: str, *values: float, when: int = 96) -> Story:
    """A loss that jumps in step 96, and a setting that changes, there at the latest."""
    settings = {at: {name: value} for at, value in zip((0, when), values, strict=True)}
    return replace(losses([*LOSSES, *[12.1] * 104]), settings=settings)


NO_CHANGE = "inputs, labels or targets changed at this step"


@pytest.mark.parametrize(
    ("first", "story"),
    [
        ("the dropout of a, which rose from 0.1 to 0.8 shortly before", jumping("dropout of a", 0.1, 0.8)),
        ("the beta1 of group 0, which rose from 0.9 to 0.99", jumping("beta1 of group 0", 0.9, 0.99)),
        ("the momentum of group 0, which rose from 0 to 0.9", jumping("momentum of group 0", 0.0, 0.9)),
        ("the beta2 of group 0, which fell from 0.999 to 0", jumping("beta2 of group 0", 0.999, 0.0)),
        ("the weight_decay of group 0, which rose from 0 to 1", jumping("weight_decay of group 0", 0.0, 1.0)),
        ("the eps of group 1, which fell from 0.01 to 1e-08", jumping("eps of group 1", 1e-2, 1e-8)),
        (
            "the step counter in the optimizer's state, which fell",
            jumping("step counter in the optimizer's state", 90, 0),
        ),
        ("the number of modules in training mode, which fell", jumping("number of modules in training mode", 9, 1)),
        ("the number of parameters that train, which rose", jumping("number of parameters that train", 9, 10)),
        (NO_CHANGE, jumping("dropout of a", 0.1, 0.3)),
        (NO_CHANGE, jumping("beta1 of group 0", 0.9, 0.95)),
        (NO_CHANGE, jumping("weight_decay of group 0", 0.0, 0.1)),
        (NO_CHANGE, jumping("step counter in the optimizer's state", 0, 90)),
        (NO_CHANGE, jumping("dropout of a", 0.1, 0.8, when=150)),
    ],
)
def test_what_changed_before_a_jump_is_its_first_cause(first: str, story: Story) -> None:
    for size in (1, 7, 50):
        found = findings(new("loss-spike"), story.windows(size))[0]
        assert found.causes[0].startswith(first)
        assert (found.advice[0] == "print what has changed, in the steps before it") == (first != NO_CHANGE)


@pytest.mark.parametrize(
    ("rate", "norm", "step_size", "is_of_steps"),
    [
        (1.0, 2.0, "gradient", True),
        (0.01, 2.0, "gradient", False),
        (1.0, 0.02, "gradient", False),
        (1.0, 0.0, "rate", True),
        (0.01, 9.0, "rate", False),
        (1.0, 2.0, "", False),
    ],
)
def test_a_jump_that_steps_explain_is_no_bit_flip(rate: float, norm: float, step_size: str, is_of_steps: bool) -> None:
    for sizes in ([1.0, 101.0], [1.0, 1.6, 1.7, 8.6]):
        scalars = {"lr": [rate] * 151, "finite_norm": [norm] * 151}
        story = one("parameter", sizes, scalars=scalars, run=RunSettings(step_size=step_size))
        for size in (1, 7, 200):
            (found,) = findings(new("parameter-jump"), story.windows(size))
            assert found.causes[0].startswith("steps that are far too large") == is_of_steps
            assert any("a bit flip" in cause for cause in found.causes)


@pytest.mark.parametrize("size", [1, 3])
def test_a_mask_of_another_size_may_have_more_infinities(size: int) -> None:
    tables = [Table({step: [row(0.1, n * n, inf=n)]}, ("mask",), [(n, n)]) for step, n in enumerate((4, 8, 8))]
    measured = [made for table in tables if (made := table.within(0, 9)) is not None]
    asked = new("nonfinite-buffer")
    for first in range(0, 3, size):
        some = measured[first : first + size]
        steps, raw = (np.concatenate([getattr(made, key) for made in some]) for key in ("steps", "raw"))
        joined = Rows(some[-1].tensors, steps, raw, [made.tensors for made in some])
        assert findings(asked, [Window(steps, {}, {"buffer": joined})]) == []


WEIGHT, OTHER = ([nn.Parameter(torch.ones(2))] for _ in range(2))


@pytest.mark.parametrize(
    ("optimizer", "decay", "momentum", "is_told"),
    [
        (torch.optim.Adadelta(WEIGHT, rho=0.9), 0.9, 0.0, False),
        (torch.optim.RMSprop(WEIGHT, alpha=0.8), 0.8, 0.0, False),
        (torch.optim.Adam([{"params": WEIGHT, "betas": (0.9, 0.95, 0.7)}]), 0.7, 0.9, False),
        (torch.optim.Adam([{"params": OTHER}, {"params": WEIGHT, "betas": (0.9999, 0.99)}]), 0.99, 0.9999, True),
        (torch.optim.AdamW(WEIGHT, betas=(0.999, 0.9)), 0.9, 0.999, True),
        (torch.optim.RMSprop(WEIGHT, momentum=0.999), 0.99, 0.999, False),
        (torch.optim.SGD(WEIGHT, 0.1, momentum=0.9999), 0.0, 0.9999, True),
        (torch.optim.SGD(WEIGHT, 0.1, momentum=0.999), 0.0, 0.999, False),
        (torch.optim.AdamW(WEIGHT, betas=(0.9, 0.0)), 0.0, 0.9, True),
        (torch.optim.Adam(WEIGHT, betas=(0.0, 0.9)), 0.9, 0.0, False),
        (torch.optim.RMSprop(WEIGHT, alpha=0.4), 0.4, 0.0, True),
        (torch.optim.Adagrad(WEIGHT), 0.0, 0.0, False),
        (None, 0.0, 0.0, False),
    ],
)
def test_decays_are_found_under_whatever_name_and_what_forgets_nothing_or_all_is_told_once(
    optimizer: Any, decay: float, momentum: float, is_told: bool
) -> None:
    settings = optimizer_settings(optimizer)
    assert (settings["second_moment_decay"], settings["momentum"]) == (decay, momentum)
    story = Story(40, run=RunSettings(**settings))
    assert len(findings(new("optimizer-memory"), story.windows(9))) == is_told


@pytest.mark.parametrize(
    ("step_size", "before", "later", "told"),
    [
        ("gradient", 0.9, 0.9985, [20]),
        ("gradient", 0.998, 0.9985, [20]),
        ("gradient", 0.9, 0.998, []),
        ("gradient", 0.9985, 0.9985, []),  # of SGD, up to 0.999 may be meant
        ("rate", 0.9985, 0.9985, [0]),
    ],
)
def test_a_momentum_that_has_grown_is_told_of_every_optimizer(
    step_size: str, before: float, later: float, told: list[int]
) -> None:
    for size in (1, 5, 20):
        windows = [
            replace(window, run=RunSettings(step_size=step_size, momentum=before if window.steps[0] < 20 else later))
            for window in Story(40).windows(size)
        ]
        found = findings(new("optimizer-memory"), windows)
        assert [one.step for one in found] == told
        assert all(f"the momentum (or beta1) of the optimizer is {later}" in one.text for one in found)


@pytest.mark.parametrize(("before", "later", "told"), [(0.0, 0.12, [50]), (0.12, 0.12, [0]), (0.05, 0.0, [])])
def test_a_decay_that_is_set_in_the_middle_is_judged_by_its_first_gradients(
    before: float, later: float, told: list[int]
) -> None:
    sizes = {50 * i: [row(size)] for i, size in enumerate((1.0, 1.0, 0.89))}
    shown: Any = {"names": ["a.weight"], "shapes": [(8, 8)]}
    story = rows_of("parameter", sizes, 110, tables={"gradient": Table(each(sizes, [row(0.1)]), **shown)}, **shown)
    windows = [
        replace(window, run=RunSettings(added_decay=before if window.steps[0] < 50 else later))
        for window in story.windows(10)
    ]
    assert [one.step for one in findings(new("heavy-decay"), windows)] == told


@pytest.mark.parametrize(("later", "told"), [(0.06, ["the weight decay jumps from 0.001 to 0.06"]), (0.04, [])])
def test_a_decay_that_is_set_to_far_more_is_told(later: float, told: list[str]) -> None:
    shown: Any = {"names": ["a.weight"], "shapes": [(8, 8)]}
    tables = {"gradient": Table({0: [row(9.0)], 50: [row(9.0)]}, **shown)}
    story = rows_of("parameter", {0: [row()], 50: [row()]}, 60, tables=tables, **shown)
    windows = [
        replace(window, run=RunSettings(added_decay=0.001 if window.steps[0] < 50 else later))
        for window in story.windows(10)
    ]
    assert [one.text for one in findings(new("heavy-decay"), windows)] == told


@pytest.mark.parametrize(
    ("counts", "is_told"),
    [
        ([60, 30], True),
        ([60, 31], False),  # it began before the last look, as one of a checkpoint
        ([20, 19], True),
        ([19, 18], False),
        ([40, 40], False),
        ([60, None, 30], False),
    ],
)
def test_a_state_whose_step_counter_begins_anew_is_told(counts: list[float | None], is_told: bool) -> None:
    looks = [{} if count is None else {"step counter in the optimizer's state": count} for count in counts]
    for size in (1, 10, 30):
        found = findings(new("optimizer-memory"), set_to(*looks, every=30).windows(size))
        text = f"the optimizer's state was lost or replaced: its step counter fell from {counts[0]} to {counts[1]}"
        assert [one.text for one in found] == [text] * is_told


def test_the_band_of_a_rule_leaves_out_what_it_would_report() -> None:
    asked, heavy, calm = new("loss-spike"), new("exploding-gradient"), new("exploding-gradient")
    findings(asked, losses(LOSSES).windows(32))
    assert 0.4 < asked.bands()["loss"][1] < 1.2
    rate = new("learning-rate-jump")
    assert rate.bands() == {"lr": (0.0, math.inf)}
    findings(rate, rates([1.0]).windows(1))
    assert rate.bands() == {"lr": (0.05, 3.0)}
    # While a growth waits, whatever might follow it is looked at soon.
    findings(rate, rates([1.0] * 8 + [3.1], loss=[1.0] * 8 + [0.9], norm=[2.0] * 9).windows(9))
    assert (rate.bands()["loss"], rate.bands()["norm"]) == ((-math.inf, 1.0), (-math.inf, 6.0))
    # A series with heavy tails, whose values vary by a factor of 20, has a higher limit.
    assert findings(heavy, norms([math.exp(1.5 * math.sin(i * 1.7)) for i in range(96)]).windows(32)) == []
    assert findings(calm, norms(wobbling(96)).windows(32)) == []
    assert heavy.bands()["norm"][1] > 2 * calm.bands()["norm"][1]


# Rules of users ------------------------------------------------------------------------------------------------


@rule("loss-negative", causes=["a sign"], advice=["check the sign of the loss"])
def loss_negative(asked: Rule, window: Window) -> Any:
    """A loss below 0."""
    for step, loss in zip(window.steps, window.scalar("loss"), strict=True):
        if loss < 0:
            yield asked.found(step, "loss", f"the loss is {loss:.3g}", loss=loss)
            return


def trained(monitor_rules: list[Rule], steps: int = 5) -> Monitor:
    model = nn.Linear(4, 2)
    fill(model)
    monitor = Monitor(model, rules=monitor_rules, on_anomaly={"warning": "record"})
    for _ in range(steps):
        monitor.step(-1.0)
    monitor.flush()
    return monitor


def test_steps_of_patience_are_arguments() -> None:
    patient = MissingGradient(in_a_row=3)
    assert "in_a_row=3" in repr(patient)
    assert [finding.step for finding in findings(patient, gone(range(4, 7), end=7).windows(32))] == [4]


def test_a_rule_may_be_a_function() -> None:
    silent = rule("silent")(lambda asked, window: None)
    monitor = trained([*default_rules(), loss_negative(), silent()])
    (found,) = [finding for finding in monitor.findings if finding.rule == "loss-negative"][:1]
    assert (places([found]), found.causes, found.evidence["loss"] < 0) == (["warning 0 loss"], ("a sign",), True)
    assert (loss_negative.__doc__, loss_negative.__module__) == ("A loss below 0.", __name__)


def test_a_rule_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"severity is 'bad'; expected one of info, warning, error"):
        rule("x", severity="bad")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a name"):
        rule("")
    with pytest.raises(NotImplementedError):
        Rule().review(Window(np.arange(1), {}, {}))


@pytest.mark.parametrize("fails", ["review", "bands"])
def test_a_rule_that_raises_is_switched_off_and_training_goes_on(fails: str) -> None:
    calls = []

    class Broken(Rule):
        name = "broken"

        def review(self, window: Window) -> Any:
            calls.append("review")
            return 1 // (fails != "review") and ()

        def bands(self) -> Any:
            calls.append("bands")
            return 1 // (fails != "bands") and {}

    with pytest.warns(RuntimeWarning, match=r"rule 'broken' failed and is switched off(.|\n)*ZeroDivisionError"):
        monitor = trained([Broken(), loss_negative()], steps=70)
    assert calls.count(fails) == 1
    assert monitor.steps == 70
    assert monitor.findings  # other rules still run
