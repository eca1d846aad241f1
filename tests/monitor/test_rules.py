"""Each rule on hand-made windows: it fires when it must and not slightly below, however steps are split into windows.

A `Story` holds what a monitor would have measured; `hits` runs a rule on it in windows of some size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training import fill
from torch import nn

import gradstat
from gradstat import _fields
from gradstat._core.tensors import TensorInfo
from gradstat.monitor import RULES, Finding, Monitor, Rule, default_rules, rule
from gradstat.monitor.collector import optimizer_settings
from gradstat.monitor.observers import Coverage
from gradstat.monitor.outputs import Outputs
from gradstat.rules import MissingGradient
from gradstat.rules.output_facts import OutputFacts
from gradstat.rules.rows import Observation, Rows, RunSettings, TensorSet, Window
from gradstat.rules.runner import RuleRunner

# The monitor runs rules with numpy's warnings off.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAMES = ("a.weight", "a.bias", "b.weight")
SHAPES = ((8, 8), (8,), (8, 8))
ABSENT = [math.nan] * len(_fields.FIELDS)
NORMAL16 = float(torch.finfo(torch.float16).smallest_normal)


def row(
    size: float = 1.0, numel: int = 64, zeros: int = 0, mean: float = 0.0, nan: int = 0, inf: int = 0
) -> list[float]:
    """The row of a tensor whose elements are ±``size``, except for zeros and nonfinite ones."""
    left = numel - zeros - nan - inf
    first = 0.0 if nan or inf else math.inf
    values = {
        "nan_count": nan, "inf_count": inf, "zero_count": zeros, "sum": mean * left, "sq_sum": left * size**2,
        "sq_sum_large": 0, "sq_sum_small": 0, "min": -size, "max": size, "first_nonfinite": first,
    }  # fmt: skip
    return [float(values.get(f.name, f.identity)) for f in _fields.FIELDS]


@dataclass
class Table:
    """Rows of one kind, by step."""

    rows: dict[int, list[list[float]]]
    names: tuple[str, ...] = NAMES
    shapes: Sequence[tuple[int, ...]] = SHAPES
    dtype: torch.dtype = torch.float32

    def within(self, first: int, end: int) -> Rows | None:
        steps = [step for step in sorted(self.rows) if first <= step < end]
        if not steps:
            return None
        infos = [TensorInfo(torch.Size(shape), self.dtype, torch.device("cpu"), None) for shape in self.shapes]
        return Rows(
            TensorSet.of(self.names, infos),
            np.array(steps),
            np.array([self.rows[step] for step in steps], dtype=np.float64),
        )


@dataclass
class Story:
    """The measurements of some steps."""

    steps: int
    scalars: dict[str, Sequence[float]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    observations: Sequence[Observation] = ()
    run: RunSettings = field(default_factory=RunSettings)

    def windows(self, size: int) -> list[Window]:
        """All steps, in windows of ``size``."""
        made, latest, outputs = [], {}, OutputFacts()
        for first in range(0, self.steps, size):
            end = min(first + size, self.steps)
            tables = {kind: table.within(first, end) for kind, table in self.tables.items()}
            known = {kind: rows for kind, rows in tables.items() if rows is not None}
            looks = [seen for seen in self.observations if first <= seen.step < end]
            outputs = next((seen.value for seen in looks[::-1] if seen.kind == "outputs"), outputs)
            latest |= {kind: Rows(rows.tensors, rows.steps[-1:], rows.raw[-1:]) for kind, rows in known.items()}
            made.append(
                Window(
                    np.arange(first, end),
                    {name: np.array(values[first:end], dtype=np.float64) for name, values in self.scalars.items()},
                    known,
                    self.run,
                    looks,
                    dict(latest),
                    outputs,
                )
            )
        return made


def new(name: str, **thresholds: Any) -> Rule:
    """Makes the rule of that name."""
    return next(kind for kind in RULES if kind.name == name)(**thresholds)


def hits(asked: Rule, windows: Sequence[Window]) -> list[tuple[str, int, str]]:
    """The findings of a rule, as (rule, step, name)."""
    return [(finding.rule, finding.step, finding.name) for finding in findings(asked, windows)]


def findings(asked: Rule, windows: Sequence[Window]) -> list[Finding]:
    found = [finding for window in windows for finding in asked.review(window)]
    for finding in found:
        assert isinstance(finding, Finding)
        assert finding.text
        json.dumps(finding.to_dict())
    return found


RIVAL = RunSettings(has_rival=True)

# Stories -------------------------------------------------------------------------------------------------------


def series(name: str, values: Sequence[float], **more: Any) -> Story:
    return Story(len(values), {name: values, **more.pop("scalars", {})}, **more)


def rows_of(kind: str, by_step: dict[int, list[list[float]]], steps: int | None = None, **more: Any) -> Story:
    options = {key: more.pop(key) for key in ("names", "shapes", "dtype") if key in more}
    table = Table(by_step, **options)
    return Story(steps or max(by_step) + 1, tables={kind: table, **more.pop("tables", {})}, **more)


def healthy_rows(numel: Sequence[int] = (64, 8, 64)) -> list[list[float]]:
    return [row(0.1, n) for n in numel]


def with_nan(position: int = 2, count: int = 1) -> list[list[float]]:
    made = healthy_rows()
    made[position] = row(0.1, (64, 8, 64)[position], nan=count)
    return made


def with_inf(position: int, count: int) -> list[list[float]]:
    made = healthy_rows()
    made[position] = row(0.1, (64, 8, 64)[position], inf=count)
    return made


def one(kind: str, values: Sequence[float], every: int = 50, name: str = "x") -> Story:
    """Rows of a kind, for one tensor of 64 elements of these sizes, every ``every`` steps."""
    return rows_of(kind, {i * every: [row(v)] for i, v in enumerate(values)}, names=(name,), shapes=[(8, 8)])


def adam(kind: str, values: Sequence[float], every: int = 50, eps: float = 1e-8) -> Story:
    """Like `one`, for an optimizer whose settings are known."""
    story = one(kind, values, every)
    story.run = RunSettings(optimizer_eps=eps, second_moment_decay=0.95)
    return story


def moved(kind: str, values: Sequence[float], norm: float = 8.0, norms: dict[int, float] | None = None) -> Story:
    """Like `one` (a norm is eight times the size), with norms of gradients."""
    story = one(kind, values)
    story.scalars["finite_norm"] = [(norms or {}).get(step, norm) for step in range(story.steps)]
    return story


def with_squares(story: Story) -> Story:
    """The same beside a running average of squared gradients, as RMSprop's."""
    return replace(story, tables=story.tables | one("square_avg", [1.0, 1.0]).tables)


def beside_another(story: Story) -> Story:
    """The same of one of two parameters with gradients."""
    return replace(story, tables=story.tables | {"gradient": Table({0: [row(), row()]}, ("x", "y"), [(8, 8)] * 2)})


def shares(kind: str, values: Sequence[float], every: int = 50, name: str = "x") -> Story:
    """Rows of a kind, for one number, every ``every`` steps."""
    rows = {i * every: [row(v, 1, mean=v)] for i, v in enumerate(values)}
    return rows_of(kind, rows, names=(name,), shapes=[(1,)])


def seen(kind: str, value: Any, step: int = 3) -> Story:
    return Story(10, observations=[Observation(kind, step, value)])


def covered(**parts: Any) -> Coverage:
    return Coverage([], [], [], [], [])._replace(**parts)


def labels(low: int, high: int) -> Any:
    return {"name": "batch[1]", "low": low, "high": high, "classes": 4}


def missing(steps: int) -> Story:
    rows = {step: [ABSENT, ABSENT, row()] for step in range(40)}
    return rows_of("gradient", rows, observations=[Observation("missing", step, [1]) for step in range(4, 4 + steps)])


def dead(steps: int) -> Story:
    zero = [row(0.0, 64, 64), row(0.0, 8, 8), row()]
    rows = {step: zero if 4 <= step < 4 + steps else healthy_rows() for step in range(40)}
    return rows_of("gradient", rows, run=RunSettings(("b.weight", "a.bias", "a.weight")))


def layers(ratio: float) -> Story:
    names = tuple(f"{i}.weight" for i in range(6))
    rows = [row(0.1 * ratio ** (1 - i / 5)) for i in range(6)]
    return rows_of("gradient", dict.fromkeys(range(8), rows), names=names, shapes=[(8, 8)] * 6)


def halves(zeros: int, normals: float, steps: int = 10) -> Story:
    low = [row(normals * NORMAL16, 64, zeros), row(0.1, 8), row()]
    rows = {step: low if step < steps else healthy_rows() for step in range(20)}
    return rows_of("gradient", rows, dtype=torch.float16)


def begun(weight: float, gradient: list[float] | None = None) -> Story:
    """The first weight has this size in both measurements, and the bias is even larger."""
    weights, gradients = [row(weight), row(1e9, 8), row()], [gradient or row(), row(0.1, 8), row()]
    table = Table(dict.fromkeys(range(51), gradients))
    return rows_of("parameter", {0: weights, 50: weights}, tables={"gradient": table})


def twins(*sizes: float, names: Sequence[str] = (), is_trained: bool = True) -> Story:
    """Weights of layers that are alike when they are first measured."""
    named = tuple(names or [f"{i}.weight" for i in range(len(sizes))])
    shapes = [(8, 8)] * len(sizes)
    tables = {"gradient": Table({0: [row() if is_trained else ABSENT] * len(sizes)}, named, shapes)}
    return rows_of("parameter", {0: [row(size) for size in sizes]}, names=named, shapes=shapes, tables=tables)


def repeating(first: int, steps: int, *others: float, changes: int = 1) -> Story:
    """The first input changes in every ``changes``-th step up to ``first``, and not any more; others go on."""
    rows = {
        step: [row(mean=min(step, first) // changes), *(row(mean=step * other) for other in others)]
        for step in range(first + steps + 1)
    }
    names = tuple(f"input[{i}]" for i in range(1 + len(others)))
    return rows_of("input", rows, names=names, shapes=[(8, 8)] * len(names))


def unscaled(spread: float = 90.0, reaches: float = 1.0, later: float = 1.9, bias: str = "a.bias") -> Story:
    """An input of such a spread, which the gradient of the first weight has as well, and losses that fall at once."""
    gradients = {0: [row(spread * reaches), row(1.0, 8), row()]}
    tables = {"gradient": Table(gradients, ("a.weight", bias, "c.weight"), [(8, 8), (8,), (8, 8)])}
    inputs = {step: [row(spread)] for step in range(70)}
    losses = {"loss": [20.0] + [later] * 69}
    return rows_of("input", inputs, names=("input[0]",), shapes=[(8, 8)], tables=tables, scalars=losses)


def unchanged(times: int, gradient: float = 0.1, apart: int = 50, zeros: int = 1) -> Story:
    """The first weight changes until its third measurement, and then stays the same for ``times`` more."""
    weights = {i * apart: [row(1 + 0.01 * min(i, 2), zeros=zeros), row(1 + i, 8), row(1 + i)] for i in range(3 + times)}
    gradients = {step: [row(gradient), row(0.1, 8), row()] for step in range(max(weights) + 1)}
    return rows_of("parameter", weights, tables={"gradient": Table(gradients)})


def written(*changes: Sequence[float], loss: float = 2.0, sizes: Sequence[float] = ()) -> Story:
    """Three parameters change in place so often in each interval of 50 steps; then the loss rises, at step 141.

    The elements of the last one have these ``sizes``, if any, in each look.
    """
    counts = np.cumsum([(0, 0, 0), *changes], axis=0).tolist()
    looks = [Observation("versions", 50 * i, dict(zip(NAMES, count, strict=True))) for i, count in enumerate(counts)]
    weights = {50 * i: [row(1.0), row(1.0, 8), row(size)] for i, size in enumerate(sizes)}
    tables = {"parameter": Table(weights)} if sizes else {}
    return series("loss", [1.0] * 141 + [loss] * 40, observations=looks, tables=tables)


def all_unchanged(times: int, apart: int = 50) -> Story:
    """No weight has changed in ``times`` measurements after the first."""
    weights = {i * apart: [row(1.0, zeros=1), row(1.0, 8, zeros=1), row(1.0)] for i in range(1 + times)}
    gradients = {step: healthy_rows() for step in range(max(weights) + 1)}
    return rows_of("parameter", weights, tables={"gradient": Table(gradients)})


def drifting(*moves: float, lr: float = 0.1, norm: float = 1.0, last: tuple[float, float] = (0.1, 1.0)) -> Story:
    """A weight whose sum moves by these fractions of its norm, of 8, in each interval of 50 steps."""
    sums = [0.0, *np.cumsum(moves).tolist()]
    weights = {50 * i: [row(mean=total / 8), row(1 + i, 8), row(0.0, zeros=64)] for i, total in enumerate(sums)}
    at = max(weights)
    scalars = {"lr": [lr] * at + [last[0]], "finite_norm": [norm] * at + [last[1]]}
    table = Table({step: [row(0.1), row(0.1, 8), ABSENT] for step in range(at + 1)})
    return rows_of("parameter", weights, tables={"gradient": table}, scalars=scalars)


def progress(*looks: tuple[int, int]) -> Story:
    """Looks at the optimizer every 50 steps: how many steps it has taken, and how often its parameters changed."""
    seen = [Observation("coverage", 50 * i, covered(steps=s, changes=c)) for i, (s, c) in enumerate(looks)]
    return Story(50 * len(looks), observations=seen)


def tokens(zeros: Sequence[int]) -> Story:
    """Gradients of an embedding of 8 tokens with so many zeros, each beside those of another layer."""
    rows = {step: [row(zeros=count), row()] for step, count in enumerate(zeros)}
    return rows_of("gradient", rows, names=("a.weight", "b.weight"), shapes=[(8, 8)] * 2)


def learning(
    losses: Sequence[float],
    mean: float = 0.0,
    certain: float | None = None,
    right: float = 0.0,
    weights: tuple[float, float] | None = None,
    later: tuple[float, float, float] = (1.0, 1.0, 1.0),
    when: int = 50,
    **scalars: Sequence[float],
) -> Story:
    """Losses of a classifier with 8 classes, whose gradients' elements cancel if ``mean`` is 0.

    The sizes of its two ``weights`` are those of all parameters ``later``, in the step ``when``.
    """
    tables = {"gradient": Table({0: [row(0.1, mean=mean), row(0.1, 8, mean=mean), row(0.1, mean=mean)]})}
    looks = [] if certain is None else [Observation("outputs", 0, OutputFacts(certain=certain, right=right))]
    if weights is not None:
        begun = [row(weights[0], zeros=1), row(1.0, 8), row(weights[1], zeros=1)]
        grown = [row(size, numel) for size, numel in zip(later, (64, 8, 64), strict=True)]
        tables["parameter"] = Table({0: begun} | ({when: grown} if when < len(losses) else {}))
    return Story(len(losses), {"loss": losses, **scalars}, tables, looks)


def wobbling(count: int, level: float = 1.0) -> list[float]:
    return [level * (1 + 0.05 * math.sin(i * 1.7)) for i in range(count)]


def zero_inputs(steps: int, *names: str, shape: tuple[int, ...] = (8, 8), size: float = 0.0) -> Story:
    """The first input is zero in all steps, or of another ``size``; others are not."""
    names = names or ("input[0]",)
    rows = {step: [row(size), row()][: len(names)] for step in range(steps)}
    return rows_of("input", rows, names=names, shapes=[shape] * len(names))


LOSSES = [3.0] * 20 + wobbling(76, 0.3)
NORMS = [2.0] * 20 + wobbling(76, 0.1)
SETTLED = [1.0] * 20 + [0.1] * 108
HIGH = [1.6 + 44 * math.exp(-i / 15) + 0.05 * (-1) ** i for i in range(160)] + [4.0] * 40
OF_OTHERS = RunSettings(is_torchs=False)  # states of optimizers that are not torch's
report = SimpleNamespace


@dataclass(frozen=True)
class Case:
    """A rule, a story in which it fires, and stories in which it is just short of firing."""

    rule: str
    bad: Story
    step: int
    name: str
    fine: tuple[Story, ...]
    sizes: tuple[int, ...] = (1, 7, 32, 10_000)


CASES = [
    Case("nonfinite-batch", rows_of("batch", {0: healthy_rows(), 4: with_nan()}), 4, "b.weight",
         (rows_of("batch", {0: healthy_rows()}), rows_of("gradient", {0: with_nan()}))),
    Case("batch-range", one("batch", [1.0] * 20 + [101.0], 1), 20, "x",
         (one("batch", [1.0] * 20 + [99.0], 1), one("batch", [1.0] * 19 + [101.0], 1),
          one("batch", [0.0] * 20 + [101.0], 1))),
    Case("batch-range", one("batch", [1.0] * 20 + [0.0099] * 5, 1), 20, "x",
         (one("batch", [1.0] * 20 + [0.0101] * 5, 1), one("batch", [1.0] * 20 + [0.0] * 4 + [1.0], 1),
          one("batch", [1.0] * 19 + [0.0] * 5, 1), one("batch", [1.0] * 10 + [0.0] + [1.0] * 10 + [0.0] * 5, 1))),
    Case("batch-range", zero_inputs(20), 0, "input[0]",
         (zero_inputs(19), zero_inputs(20, "input[1]"), zero_inputs(20, shape=(64,)),
          zero_inputs(20, "input[0]", "input[1]"), zero_inputs(20, size=1.0))),
    Case("label-out-of-range", seen("label", labels(0, 4)), 3, "batch[1]", (seen("other", labels(0, 4)),)),
    Case("constant-feature", shares("constant", [0.2, 1.0, 1.0]), 50, "x", (shares("constant", [0.2, 1.0, 0.2]),)),
    Case("constant-feature", shares("constant", [0.2, 0.95, 0.95, 0.95]), 50, "x",
         (shares("constant", [0.95, 0.95, 0.2, 0.95]), shares("constant", [0.9] * 5))),
    Case("repeated-batch", seen("batches", report(ok=False, repeated=[(0, 1)])), 3, "batch",
         (seen("batches", report(ok=True)),)),
    Case("repeated-batch", tokens([8, 16] * 40 + [24] * 21), 80, "a.weight",
         (tokens([8, 16] * 40 + [24] * 20), tokens([8, 16] * 40 + [64] * 40), tokens([8, 16] * 40 + [8] * 20))),
    Case("learning-rate-jump", series("lr", [1.0] * 5 + [3.1] * 5), 5, "lr",
         (series("lr", [1.0] * 5 + [3.0] * 5), series("lr", [0.0] + [1.0] * 5), series("lr", [math.nan] * 9),
          series("lr", [1.0, 0.1, 1.0, 0.1, 1.0]))),
    Case("learning-rate-jump", series("lr", [1.0] * 5 + [5.1] * 5, run=RunSettings(initial_lrs=(5.0,))), 5, "lr",
         (series("lr", [1.0] * 5 + [5.0] * 5, run=RunSettings(initial_lrs=(5.0,))),)),
    Case("learning-rate-jump", series("lr", [1.0] * 9 + [3.1] * 3, scalars={"loss": [1.0] * 11 + [math.nan]}), 9, "lr",
         (series("lr", [1.0] * 9 + [3.1] * 3, scalars={"loss": [1.0] * 12}),
          series("lr", [1.0] * 9 + [3.1] * 3, scalars={"norm": [1.0] * 11 + [math.inf], "loss_scale": [1.0] * 12}),
          series("lr", [1.0] * 9 + [3.1] * 20, scalars={"loss": [1.0] * 28 + [math.nan]}))),
    Case("learning-rate-jump", series("lr", [1.0] * 5 + [0.049] * 5), 5, "lr",
         (series("lr", [1.0] * 5 + [0.05] * 5), series("lr", [1.0] + [1e-5 * i for i in range(1, 99)]))),
    Case("learning-rate-jump", series("lr", [1.0] * 5 + [-1.0] * 5), 5, "lr", ()),
    Case("learning-rate-jump", series("lr", [1.0] * 5 + [0.0] * 20), 5, "lr",
         (series("lr", [1.0] * 5 + [0.0] * 19 + [0.1]), series("lr", [0.0] * 30))),
    Case("learning-rate-jump", series("lr", [0.8**i for i in range(60)]), 36, "lr",
         (series("lr", [0.8**i for i in range(36)]),)),
    Case("learning-rate-jump", series("lr", [1.0] * 60 + [0.85**i for i in range(60)]), 107, "lr",
         (series("lr", [1.0] * 60 + [0.9**i for i in range(50)] + [0.9**50] * 60),
          series("lr", [1 + math.cos(math.pi * i / 200) for i in range(200)]),
          series("lr", [1 - i / 200 for i in range(200)]))),
    Case("optimizer-coverage", seen("coverage", covered(left_out=["a.weight"])), 3, "a.weight",
         (seen("coverage", covered()),)),
    Case("unchanged-parameter", seen("unused", 50), 3, "optimizer", ()),
    Case("gradients-not-zeroed", series("not_zeroed", [math.nan] * 4 + [1.0, 1.0, 1.0]), 3, "gradients",
         (series("not_zeroed", [math.nan, 1.0, math.nan, 1.0, math.nan]), Story(9))),
    Case("replica-mismatch", seen("replicas", report(ok=False, drifted=[report(name="a.bias")])), 3, "a.bias",
         (seen("replicas", report(ok=True)),)),
    Case("nonfinite-optimizer-state", rows_of("exp_avg", {0: healthy_rows(), 50: with_nan(1)}), 50, "a.bias",
         (rows_of("exp_avg", {0: healthy_rows()}), rows_of("parameter", {0: with_nan()}))),
    Case("second-moment-drop", adam("exp_avg_sq", [1.0, 1.0, 0.49 * 0.95**5], 5), 10, "x",
         (adam("exp_avg_sq", [1.0, 1.0, 0.51 * 0.95**5], 5), adam("exp_avg_sq", [0.0, 0.0, 1.0], 5),
          adam("exp_avg", [1.0, 0.0, 0.0], 5), one("exp_avg_sq", [1.0, 1.0, 0.0], 5))),
    Case("momentum-drift", moved("exp_avg", [1.0, 101.0]), 50, "x",
         (moved("exp_avg", [1.0, 99.0]), moved("exp_avg_sq", [1.0, 101.0]), moved("exp_avg", [101.0]),
          with_squares(moved("momentum_buffer", [1.0, 101.0])),
          moved("exp_avg", [1.0, 101.0], norm=0.0))),
    Case("momentum-drift", moved("exp_avg", [0.9e-4] * 2), 0, "optimizer",
         (moved("exp_avg", [1.1e-4] * 2), moved("exp_avg", [0.9e-4] * 2, norms={9: 0.1}), moved("exp_avg", [0.0] * 2),
          moved("exp_avg_sq", [0.9e-4] * 2), beside_another(moved("exp_avg", [0.9e-4] * 2)),
          moved("exp_avg", [1.3e-4] * 2, norm=11.0),  # clipped
          replace(moved("exp_avg", [0.9e-4] * 2), run=OF_OTHERS))),
    Case("momentum-drift", replace(moved("exp_avg", [0.1, 0.1, 0.0019]), run=OF_OTHERS), 50, "optimizer",
         (moved("exp_avg", [0.1, 0.1, 0.0021]), moved("exp_avg", [0.1, 0.1, 0.0019], norms={99: 0.8}),
          moved("exp_avg", [0.1, 0.1, 0.021], norms=dict.fromkeys(range(50, 150), 99.0)))),  # clipped
    Case("momentum-drift", moved("momentum_buffer", [1.1, 1.1, 0.09]), 50, "optimizer",
         (moved("momentum_buffer", [1.1, 1.1, 0.11]), moved("exp_avg", [1.1, 1.1, 0.09]),
          moved("momentum_buffer", [0.9, 0.9, 0.09]))),
    Case("momentum-drift", moved("momentum_buffer", [1.0, 99.0, 101.0], norms={100: 1e6}), 100, "x",
         (moved("momentum_buffer", [1.0, 99.0, 101.0], norms={99: 9.0}),)),
    Case("nonfinite-parameter", rows_of("parameter", {0: healthy_rows(), 50: with_nan()}), 50, "b.weight",
         (rows_of("parameter", {0: healthy_rows()}), rows_of("buffer", {0: with_nan()}))),
    Case("parameter-jump", one("parameter", [1.0, 101.0]), 50, "x",
         (one("parameter", [1.0, 99.0]),
          rows_of("parameter", {0: [row(1e-4), row(1, 8), row()], 50: [row(0.1), row(1, 8), row()]}),
          one("parameter", [0.0, 1.0]), one("parameter", [math.nan, 1.0]))),
    Case("parameter-jump", begun(1.1e8), 0, "a.weight", (begun(0.9e8), begun(1.1e8, ABSENT), one("parameter", [1e9]))),
    Case("parameter-jump", one("parameter", [1.0, 1.6, 1.7, 8.6]), 150, "x",
         (one("parameter", [1.0, 1.6, 1.7, 8.4]), one("parameter", [1.0, 1.8, 1.7, 8.6]),
          one("parameter", [1.0, 1.6, 8.6]), one("parameter", [0.0, 0.05, 1.0, 90.0]))),
    Case("parameter-jump", one("parameter", [1.0, 1.0, 0.032]), 100, "x",
         (one("parameter", [1.0, 1.0, 0.034]), one("parameter", [1.0, math.nan, 1.0]), one("exp_avg", [1.0, 0.0]))),
    Case("parameter-jump", one("parameter", [1.0, 0.0]), 50, "x",
         (one("parameter", [0.0, 0.0]),
          rows_of("parameter", {0: healthy_rows(), 50: with_nan(2, 64), 100: [row(0.0, nan=64)] * 3}))),
    Case("parameter-jump", twins(1.0, 11.0, 1.0), 0, "1.weight",
         (twins(1.0, 9.0, 1.0), twins(11.0, 0.0), twins(1.0, 0.0, 2.0), twins(1.0, 11.0, 12.0),
          twins(1.0, 11.0, names=("up.weight", "down.weight")), twins(1.0, 11.0, is_trained=False),
          # Two weights of one block, and a residual branch that begins small.
          twins(1.0, 11.0, names=("0.conv1.weight", "0.conv2.weight")), twins(1e-10, 1.0), twins(1.0, 1.0, 1e-3))),
    Case("parameter-jump", twins(11.0, 1.0), 0, "0.weight", (twins(9.0, 1.0),)),
    Case("repeated-batch", repeating(100, 20), 100, "input[0]",
         (repeating(100, 19), repeating(25, 60), repeating(0, 120), repeating(100, 20, changes=2),
          repeating(100, 20, 1.0, 2.0))),
    Case("nonfinite-buffer", rows_of("buffer", {0: healthy_rows(), 50: with_nan(0)}), 50, "a.weight",
         (rows_of("buffer", {0: healthy_rows()}),)),
    # A mask of -Inf from the start is meant; one with more of them is not.
    Case("nonfinite-buffer", rows_of("buffer", {0: with_inf(0, 9), 50: with_inf(0, 9), 100: with_inf(0, 10)}), 100,
         "a.weight", (rows_of("buffer", {0: with_inf(0, 9), 50: with_inf(0, 9), 100: with_inf(0, 8)}),)),
    Case("nonfinite-activation", rows_of("activation", {0: healthy_rows(), 5: with_nan(1)}), 5, "a.bias",
         (rows_of("activation", {0: healthy_rows()}),)),
    Case("nonfinite-loss", series("loss_nonfinite", [math.nan] * 5 + [1.0]), 5, "loss",
         (series("loss_nonfinite", [math.nan] * 9), series("loss", [1.0] * 9))),
    # A single loss far above the first ones, and four of five losses above the limit.
    Case("loss-spike", series("loss", [*LOSSES, 12.1]), 96, "loss",
         (series("loss", [*LOSSES, 11.9]), series("loss", [*LOSSES, math.nan, math.inf]),
          series("loss", [1.0] * 40 + [9.0]), series("loss", [-1.0] * 40 + [1e6]))),
    Case("loss-spike", series("loss", [*LOSSES, 1.2, 1.2, 0.3, 1.2, 1.2]), 96, "loss",
         (series("loss", [*LOSSES, 1.2, 1.2, 0.3, 0.3, 1.2, 1.2]), series("loss", [*LOSSES, 0.5, 0.5, 0.5, 0.5]))),
    # A level far below the first losses, and one that fell steeply.
    Case("loss-spike", series("loss", HIGH), 160, "loss", (series("loss", [*HIGH[:160], *HIGH[64:160]]),)),
    # A rise without four of five losses above the limit.
    Case("loss-spike", series("loss", [*SETTLED, *[1.2, 1.2, 0.1, 0.1, 0.1] * 6]), 143, "loss",
         (series("loss", [*SETTLED, *[0.95, 0.95, 0.1, 0.1, 0.1] * 6]),
          series("loss", [1.0] * 20 + [0.5] * 108 + [3.9, 3.9, 0.5, 0.5, 0.5] * 6))),  # it never fell
    Case("loss-spike", series("loss", [2.1] * 16 + [1.0, 0.2] * 17 + [-1.0, -0.2] * 15), 50, "loss", ()),
    Case("loss-spike", series("loss", [2.1] * 16 + [1.0] * 34 + [-0.6] * 30), 50, "loss",
         (series("loss", [2.1] * 16 + [1.0] * 34 + [-0.4] * 90), series("loss", [2.1] * 16 + [1.0] * 34 + [-0.6] * 15),
          series("loss", [2.1] * 16 + [1.0 - step / 40 for step in range(90)]),
          series("loss", [2.1] * 16 + [1.0, -0.6] * 60))),
    Case("nonfinite-rank", seen("origin", report(ok=False, nonfinite=["b.weight"], rank_of=lambda name: 1)), 3,
         "b.weight", (seen("origin", report(ok=True)),)),
    Case("nonfinite-gradient", rows_of("gradient", {0: healthy_rows(), 4: with_nan(0, 3)}), 4, "a.weight",
         (rows_of("gradient", {0: healthy_rows()}), rows_of("gradient", {0: [ABSENT] * 3}))),
    Case("missing-gradient", missing(30), 4, "a.bias",
         (missing(29), rows_of("gradient", {step: [ABSENT, ABSENT, row()] for step in range(20)}))),
    Case("dead-gradient", dead(20), 4, "a.bias", (dead(19),)),
    Case("underflow", halves(30, 7.0), 0, "a.weight", (halves(30, 7.0, steps=9), halves(19, 7.0), halves(30, 9.0))),
    Case("vanishing-gradient", series("norm", [1.0] * 5 + [1e-9] * 5), 5, "norm",
         (series("norm", [1.0] * 5 + [1e-9] * 4 + [1.0]), series("norm", [2e-8] * 20),
          series("norm", [math.nan] * 20))),
    Case("batch-range", unscaled(), 0, "input[0]",
         (unscaled(spread=19.0), unscaled(reaches=0.1), unscaled(later=2.1), unscaled(bias="b.bias"))),
    Case("vanishing-gradient", layers(1e-6), 0, "0.weight", (layers(1e-4),)),
    Case("exploding-gradient", series("norm", [*NORMS, 20.1]), 96, "norm",
         (series("norm", [*NORMS, 19.9]), series("norm", [*NORMS, math.nan, math.inf]),
          series("norm", [1.0] * 30 + [9.0]))),
    # A spike does not excuse the next one, and growth from step to step is not a spike.
    Case("exploding-gradient", series("norm", [*NORMS, 5.0, 30.0]), 96, "norm",
         (series("norm", [*NORMS, 0.9, 5.0, 30.0]),)),
    Case("exploding-gradient", series("norm", [*NORMS, 1.5, 0.1, 1.5, 1.5, 1.5]), 96, "norm",
         (series("norm", [*NORMS, 1.5, 1.5, 1.5, 0.1, 0.1]), series("norm", [*NORMS, 0.9, 0.9, 0.9, 0.9]))),
    Case("exploding-gradient", series("norm", [1.0, 2.0, 1.0, 1.0, 1.0, 2001.0]), 5, "norm",
         (series("norm", [1.0, 2.0, 1.0, 1.0, 1.0, 1999.0]), series("norm", [1.0, 1.0, 1.0, 1.0, 1e9]),
          series("norm", [1e6] * 60), series("norm", [0.0] * 40 + [1.0]))),
    Case("unchanged-parameter", unchanged(2), 100, "a.weight",
         (unchanged(1), unchanged(2, gradient=0.9e-5), unchanged(9, apart=5), unchanged(2, zeros=0))),
    Case("unchanged-parameter", all_unchanged(1), 0, "a.weight", (all_unchanged(9, apart=5),)),
    Case("unchanged-parameter", drifting(0.9e-5), 0, "a.weight",
         (drifting(1.1e-5), drifting(1.0, 0.9e-5, last=(1e-7, 1.0)))),
    Case("unchanged-parameter", drifting(0.01, 0.001, 0.9e-5), 100, "a.weight",
         (drifting(0.1, 0.01, 1.1e-5), drifting(0.01, 0.001, 1.1e-5), drifting(0.01, 0.001, 0.9e-5, last=(0.08, 1.0)),
          drifting(0.01, 0.001, 0.9e-5, last=(0.1, 0.09)))),
    Case("optimizer-coverage", progress((0, 0), (50, 50), (2, 50)), 50, "optimizer",
         (progress((0, 0), (50, 50), (2, 49)), progress((0, 0), (50, 50), (3, 50)), progress((0, 0), (0, 50)))),
    Case("overwritten-parameter", written((50, 50, 50), (50, 50, 50), (50, 50, 51)), 101, "b.weight",
         (written((50, 50, 50), (50, 50, 50), (50, 50, 51), loss=1.0), written((50,) * 3, (50,) * 3, (51,) * 3),
          written((50, 50, 50), (50, 50, 51), (50, 50, 51)), written((50, 50, 40), (50, 50, 40), (50, 50, 41)),
          written((50, 50, 51), (50, 50, 50), (50, 50, 51)), written((50, 50, 50), (50, 50, 50), (50, 50, 49)),
          written((50, 50, 0), (50, 50, 0), (50, 50, 50)))),
    Case("overwritten-parameter", written((50,) * 3, (50,) * 3, (50, 50, 51), loss=1.0, sizes=(1, 1.1, 1.2, 2.5)), 101,
         "b.weight",
         (written((50,) * 3, (50,) * 3, (50, 50, 51), loss=1.0, sizes=(1, 1.1, 1.2, 2.3)),
          written((50,) * 3, (50,) * 3, (50, 50, 51), loss=1.0, sizes=(1, 1.5, 1.6, 5.0)),
          written((50,) * 3, (50,) * 3, (50, 50, 51), loss=1.0, sizes=(1, 1.1, 1.2, 0.1)),
          written((50,) * 3, (50,) * 3, (50, 50, 50), loss=1.0, sizes=(1, 1.1, 1.2, 2.5)))),
    Case("overwritten-parameter", written((50,) * 3, (50,) * 3, (50, 50, 51), loss=1.0, sizes=(1, 1.1, 1.2, 0.03)), 101,
         "b.weight",
         (written((50,) * 3, (50,) * 3, (50, 50, 51), loss=1.0, sizes=(1, 1.1, 1.2, 0.05)),
          written((50,) * 3, (50,) * 3, (50, 50, 50), loss=1.0, sizes=(1, 1.1, 1.2, 0.03)))),
    Case("unchanged-parameter", unchanged(2, gradient=1.1e-5), 100, "a.weight", (unchanged(2, gradient=0.0),)),
    Case("no-learning", learning([2.1] * 300), 0, "loss",
         (learning([2.1] * 255), learning([2.1] * 300, certain=0.0, right=0.6), learning([1.0] * 300),
          learning([2.1] * 80 + [1.8] * 80 + [2.1] * 200),
          learning([2.1] * 180 + [1.8] * 120), learning([2.1] * 300, mean=0.01),
          learning(np.linspace(2.1, 2.06, 256).tolist()),  # it begins to learn
          learning([20.0] + [30.0, 25.0] * 60 + [22.0] * 180),  # sums over batches of which the first is small
          learning([2.1] * 300, lr=np.linspace(0.0, 1.0, 300).tolist()))),
    # Guessing among 8 classes has a loss of 2.08.
    Case("no-learning", learning([-3.0] * 40 + [-8.2] * 88), 63, "loss",
         (learning([-3.0] * 40 + [-8.0] * 88), learning([-3.0] * 40 + [-8.2, 1.0] * 44))),
    Case("no-learning", learning([-2.1] * 16 + [-2.7] * 32), 47, "loss",
         (learning([-2.1] * 16 + [-2.5] * 40), learning([-2.1] * 16 + [-2.7] * 31))),
    Case("no-learning", learning([2.1] * 300, certain=0.0, right=0.5), 0, "loss", (learning([1.8] * 300),)),
    Case("no-learning", learning([5.3] + [1.0] * 40, certain=0.4), 0, "loss",
         (learning([5.1] + [1.0] * 40, certain=0.4), learning([5.3] + [1.0] * 40, certain=0.2))),
    Case("no-learning", learning([5.3] + [1.0] * 40, weights=(1.8, 0.17)), 0, "a.weight",
         (learning([5.1] + [1.0] * 40, weights=(1.8, 0.17)), learning([5.3] + [1.0] * 40, weights=(1.8, 0.19)),
          learning([5.3] + [1.0] * 40, weights=(1.7, 0.01)), learning([5.3] + [1.0] * 40, weights=(0.17, 1.8)))),
    Case("no-learning", learning([1.7] * 64, weights=(0.2, 0.2), later=(2.1, 2.1, 2.1)), 50, "lr",
         (learning([1.5] * 64, weights=(0.2, 0.2), later=(2.1, 2.1, 2.1)),
          learning([2.0] * 64, weights=(0.2, 0.2), later=(0.2, 99.0, 0.2)),
          learning([1.7] * 64, weights=(0.2, 0.2), later=(0.7, 5.0, 0.7)),
          learning([1.7] * 160, weights=(0.2, 0.2), later=(2.1, 2.1, 2.1), when=130))),
    Case("no-learning", learning([2.0] * 64, weights=(0.2, 0.2), later=(0.05, 0.05, 0.05)), 50, "weight_decay",
         (learning([1.8] * 64, weights=(0.2, 0.2), later=(0.05, 0.05, 0.05)),
          learning([2.0] * 64, weights=(0.2, 0.2), later=(0.1, 0.4, 0.1)),
          learning([1.7] * 64, weights=(12.0, 12.0), later=(2.5, 2.5, 2.5)))),
    Case("no-learning", learning([2.1] * 48, weights=(0.007, 0.007)), 0, "a.weight",
         (learning([2.1] * 48, weights=(0.0072, 0.0072)), learning([2.1] * 47, weights=(0.007, 0.007)),
          learning([2.0] * 48, weights=(0.007, 0.007)))),
    Case("no-learning", learning([2.1] + [11.0] * 20, lr=[0.1] * 21), 0, "lr",
         (learning([2.1] + [10.0] * 20), learning([2.1] + [11.0] * 7 + [2.0] * 13))),
    Case("small-second-moment", adam("exp_avg_sq", [1.0, 0.9e-16, 0.9e-16]), 50, "x",
         (adam("exp_avg_sq", [0.9e-16, 1.1e-16, 0.9e-16]), adam("exp_avg_sq", [1.1e-16] * 5),
          adam("exp_avg_sq", [1.1e-16] * 5, eps=1e-5), adam("exp_avg_sq", [0.0] * 5),
          one("exp_avg_sq", [0.9e-16] * 5))),
    Case("late-clip", series("late_clip", [0.0, 0.0, 1.0, 1.0]), 1, "norm", (series("late_clip", [0.0] * 4),)),
]  # fmt: skip
by_rule = pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.rule}" for i, case in enumerate(CASES)])


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {kind.name for kind in RULES}


@by_rule
def test_it_fires_however_steps_are_cut_up(case: Case) -> None:
    for size in case.sizes:
        assert hits(new(case.rule), case.bad.windows(size)) == [(case.rule, case.step, case.name)], size


@by_rule
def test_it_is_silent_just_below(case: Case) -> None:
    for fine in case.fine:
        for size in case.sizes:
            assert hits(new(case.rule), fine.windows(size)) == []


@by_rule
def test_it_goes_on_from_a_saved_state(case: Case) -> None:
    windows = case.bad.windows(1)
    whole = hits(new(case.rule), windows)
    for cut in {1, len(windows) // 3, len(windows) // 2, len(windows) - 1}:
        before, after = new(case.rule), new(case.rule)
        found = hits(before, windows[:cut])
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert after.bands() == before.bands()
        assert found + hits(after, windows[cut:]) == whole


@by_rule
def test_it_survives_other_names_and_rows_that_are_not_there(case: Case) -> None:
    asked = new(case.rule)
    for kind in (*case.bad.tables, "gradient", "parameter"):
        hits(asked, rows_of(kind, {0: [row()]}, names=("z",), shapes=[(8, 8)]).windows(1))
        hits(asked, rows_of(kind, {1: [ABSENT, row()]}, names=("y", "z"), shapes=[(8, 8)] * 2).windows(2)[1:])
    windows = [w for w in case.bad.windows(7) if len(w.steps)]
    assert (case.rule, case.name) in {(rule, name) for rule, _, name in hits(asked, windows)}
    hits(asked, rows_of("gradient", {0: []}, names=(), shapes=()).windows(1))


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.name)
def test_nothing_is_found_in_an_empty_window(kind: type[Rule]) -> None:
    empty = Window(np.empty(0, np.int64), {}, {})
    nothing = Window(np.arange(3), {"loss": np.full(3, math.nan), "norm": np.full(3, math.nan)}, {})
    asked = kind()
    assert hits(asked, [empty, nothing, empty]) == []
    assert repr(asked).startswith(kind.__name__)
    assert kind.__doc__
    assert kind.causes
    assert kind.advice


def noisy(level: Sequence[float], deviation: float, seed: int = 0) -> list[float]:
    return (np.asarray(level) + np.random.default_rng(seed).normal(0, deviation, len(level))).tolist()


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "after",
    [
        np.full(64, 4.5),  # less than twice as much
        2.5 + 2.5 * np.exp(-np.arange(64) / 50),
        np.full(64, 2.9),  # within the noise of each value
    ],
    ids=["for ever", "decaying", "small"],
)
def test_a_loss_that_rises_and_stays_is_found(after: Any, seed: int, size: int) -> None:
    losses = noisy([*(2.5 + np.exp(-np.arange(400) / 20)), *after], 0.1, seed)
    (found,) = findings(new("loss-spike"), series("loss", losses).windows(size))
    assert 395 <= found.step <= 406


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_norm_that_falls_to_another_level_at_once_is_found(size: int) -> None:
    norms = np.exp(noisy(np.zeros(260), 0.1)) * np.where(np.arange(260) < 200, 1, 1 / 2.6)
    (found,) = findings(new("vanishing-gradient"), series("norm", norms.tolist()).windows(size))
    assert 198 <= found.step <= 202
    assert findings(new("exploding-gradient"), series("norm", norms.tolist()).windows(size)) == []
    (found,) = findings(new("vanishing-gradient"), series("norm", norms.tolist(), run=RIVAL).windows(size))
    assert found.severity == "info"
    # Not so if other parameters have gradients from then on, or with another learning rate.
    rows = {step: [row(0.1), row(0.1, 8), row(0.1) if step < 200 else ABSENT] for step in range(260)}
    frozen = rows_of("gradient", rows, scalars={"norm": norms.tolist()})
    assert hits(new("vanishing-gradient"), frozen.windows(size)) == []
    rates = {"lr": [0.1] * 199 + [0.02] * 61}
    assert hits(new("vanishing-gradient"), series("norm", norms.tolist(), scalars=rates).windows(size)) == []


@pytest.mark.parametrize("name", ["exploding-gradient", "vanishing-gradient"])
@pytest.mark.parametrize("seed", range(20))
def test_noisy_norms_have_no_new_level(name: str, seed: int) -> None:
    t, draw = np.arange(1000), np.random.default_rng(seed)
    for norms in (np.exp(draw.normal(0, 0.7, 1000)), np.exp(np.sin(t / 60) + draw.normal(0, 0.2, 1000)),
                  5 * np.exp(-t / 100 + draw.normal(0, 0.2, 1000))):  # fmt: skip
        assert hits(new(name), series("norm", norms.tolist()).windows(64)) == []


def test_a_norm_that_falls_ever_faster_has_no_new_level() -> None:
    # Every tenth logarithm of the norm of a model that memorizes one batch: 3 % less in each step, in the end.
    logs = [
        -1.93, -1.98, -1.84, -1.82, -1.91, -2.08, -2.32, -2.53, -2.71, -2.92, -3.09, -3.25, -3.37,
        -3.50, -3.69, -3.86, -3.99, -4.15, -4.41, -4.74, -5.07, -5.41, -5.77, -6.13, -6.48, -6.82,
    ]  # fmt: skip
    norms = np.exp(np.interp(np.arange(250), np.arange(0, 260, 10), logs))
    assert hits(new("vanishing-gradient"), series("norm", norms.tolist()).windows(64)) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("name", "course"),
    [
        ("falling", lambda t, draw: 2.5 + 3 * np.exp(-t / 200) + draw.normal(0, 0.2, len(t))),
        ("heavy tails", lambda t, draw: 1 + 0.1 * draw.standard_t(3, len(t))),
        ("factors", lambda t, draw: np.exp(draw.normal(0, 0.7, len(t)))),
        ("slow rise", lambda t, draw: 3 * np.exp(-t / 20) + 1 + t / 2000 + draw.normal(0, 0.1, len(t))),
        ("drifting", lambda t, draw: 2 + 0.02 * np.cumsum(draw.normal(0, 1, len(t))) + draw.normal(0, 0.2, len(t))),
    ],
)
def test_noise_and_drift_are_no_rise_of_a_loss(name: str, course: Any, seed: int) -> None:
    losses = course(np.arange(1000), np.random.default_rng(seed)).tolist()
    assert findings(new("loss-spike"), series("loss", losses).windows(64)) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fallen_to", "maximizes", "is_told"), [(0.5, False, True), (0.7, False, True), (1, False, False), (1, True, True)]
)
def test_a_loss_that_climbs_far_above_its_beginning_is_told(
    fallen_to: float, maximizes: bool, is_told: bool, seed: int
) -> None:
    course = [*np.linspace(1, fallen_to, 150), *(fallen_to * np.exp(np.arange(300) / 100))]  # or it never falls
    story = series("loss", noisy(course, 0.05, seed), run=RunSettings(maximizes=maximizes))
    found = [finding for finding in findings(new("loss-spike"), story.windows(64)) if "it began at" in finding.text]
    assert ["maximize=True" in finding.causes[0] for finding in found] == [maximizes] * is_told


@pytest.mark.parametrize("has_rival", [False, True])
@pytest.mark.parametrize(
    ("course", "noise"),
    [
        ([*np.linspace(1, 0.1, 100), *[0.1] * 100, *np.linspace(0.1, 0.9, 200)], 0.02),
        ([*np.linspace(1, 0.1, 200), *[0.1] * 200, *[0.4] * 64], 0.05),
    ],
    ids=["climbs", "rises to a level"],
)
def test_a_loss_that_rises_while_another_optimizer_steps_is_an_info(
    course: list[float], noise: float, has_rival: bool
) -> None:
    story = series("loss", noisy(course, noise), run=RunSettings(has_rival=has_rival))
    runner = RuleRunner([new("loss-spike")], 64)
    (found,) = [finding for window in story.windows(64) for finding in runner.review(window)]
    assert found.severity == ("info" if has_rival else "warning")
    assert "jumps" not in found.text


def test_what_the_guard_refuses_again_and_again_is_a_spike() -> None:
    losses = noisy([*(2.5 + 1.5 * np.exp(-np.arange(200) / 20)), *[3.2] * 5], 0.04)
    guard, parameter = gradstat.SpikeGuard(), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for loss in losses:
        parameter.grad = torch.ones(1)
        gradstat.guarded_step(optimizer, loss=torch.tensor(loss), guard=guard)
    assert guard.read(wait=True).by_loss == 5
    assert [found.step for found in findings(new("loss-spike"), series("loss", losses).windows(1))] == [200]


@pytest.mark.parametrize("name", ["loss-spike", "exploding-gradient"])
@pytest.mark.parametrize("size", [1e200, 1e307])
def test_huge_values_do_not_raise(name: str, size: float) -> None:
    values = [*(size * np.array(noisy(np.ones(150), 0.05))), *[-size, size, 0.0] * 20, *[3.0] * 90]
    asked = new(name)
    findings(asked, series("loss" if name == "loss-spike" else "norm", values).windows(32))
    json.dumps(asked.state_dict(), allow_nan=True)


def test_the_newest_rows_keep_no_others_alive() -> None:
    table = Table({0: healthy_rows(), 1: [row(2.0), ABSENT, row(3.0, zeros=4)], 2: with_nan()})
    rows = table.within(0, 3)
    assert rows is not None
    assert rows.newest.steps.tolist() == [2]
    assert not np.shares_memory(rows.newest.raw, rows.raw)


def test_steps_of_patience_are_arguments() -> None:
    assert hits(MissingGradient(in_a_row=3), missing(3).windows(32)) == [("missing-gradient", 4, "a.bias")]
    assert "in_a_row=3" in repr(MissingGradient(in_a_row=3))


def beside(share: float, zeros: int, low: float = -1.0) -> Story:
    """A share of constant features, of a batch with so many zeros and this least element."""
    story = shares("constant", [share] * 4)
    batch = row(1.0, 64, zeros)
    batch[_fields.INDEX["min"]] = low
    return replace(
        story, tables=story.tables | {"batch": Table({step: [batch] for step in range(200)}, ("x",), [(8, 8)])}
    )


def comes_and_goes() -> Story:
    gone = [*range(0, 2), *range(10, 45)]
    rows = {step: [ABSENT if step in gone else row(), row(0.1, 8), row()] for step in range(50)}
    return rows_of("gradient", rows, observations=[Observation("missing", step, [0]) for step in gone])


def without(since: int, **sizes: int) -> Story:
    """A parameter that has no gradient since a step, and the sizes of all."""
    seen = [Observation("missing", step, [1]) for step in range(since, 60)]
    rows = {step: [row(), ABSENT if step >= since else row(), row()] for step in range(60)}
    weights = Table({0: [row()] * 3}, (*sizes,), [(size, 8) for size in sizes.values()])
    return rows_of(
        "gradient", rows, names=(*sizes,), shapes=weights.shapes, observations=seen, tables={"parameter": weights}
    )


def beside_losses(losses: Sequence[float], size: float = 0.01) -> Story:
    """A weight that becomes ``size`` times as large beside another, and losses."""
    rows = {0: [row(), row()], 50: [row(), row()], 100: [row(size), row()]}
    more = {"names": ("x", "y"), "shapes": [(8, 8)] * 2, "scalars": {"loss": losses}}
    return rows_of("parameter", rows, len(losses), **more)


def frozen_later(rows: int) -> Story:
    """A weight with so many rows, beside one with 8."""
    sizes = {"names": ("x", "y"), "shapes": [(rows, 8), (8, 8)]}
    seen = looks(covered(), covered(frozen=["x"]))
    return rows_of("parameter", {0: [row(), row()]}, 10, observations=seen, **sizes)


def looks(*coverages: Coverage) -> list[Observation]:
    return [Observation("coverage", 5 * i, coverage) for i, coverage in enumerate(coverages)]


def zero_gradients(zeros: int) -> Story:
    """Of a bias, beside those of a weight with so many zeros."""
    return rows_of("gradient", {step: [row(0.1, 64, zeros), row(0.0, 8, 8), row()] for step in range(30)})


def all_zero_after_some() -> Story:
    """Gradients of a weight are zero for 30 steps, and those of all from step 60 on."""
    zero = [row(0.0, 64, 64), row(0.0, 8, 8), row(0.0, 64, 64)]
    return rows_of("gradient", {
        step: zero if step >= 60 else [zero[0], *healthy_rows()[1:]] if step < 30 else healthy_rows()
        for step in range(90)
    })  # fmt: skip


BACKWARDS = RunSettings(("b.weight", "a.bias", "a.weight"))
SCALED = RunSettings(("module.2.weight", "module.0.weight"), is_scaled=True)
BAD_RANK = report(ok=False, nonfinite=["0.weight"], rank_of=lambda name: 1)
CHANGING_SIGN = [*(math.exp(1.5 * math.sin(i * 1.7)) * (-1) ** (i // 5) for i in range(96)), *[15.0] * 5]
# What a rule says of a story: severity, step and name.
TOLD: dict[str, tuple[str, Story, list[tuple[str, int, str]]]] = {
    "an episode is reported once and again after it ended": (
        "nonfinite-gradient", rows_of("gradient", {step: with_nan() for step in (*range(3, 9), *range(20, 23))}),
        [("error", 3, "b.weight"), ("error", 20, "b.weight")]),
    "the first gradient in the backward pass is named": (
        "nonfinite-gradient", rows_of("gradient", {0: [row(nan=1), row(0.1, 8, nan=1), row()]}, run=BACKWARDS),
        [("error", 0, "a.bias")]),
    "an overflow is the scaler's": (
        "nonfinite-gradient", rows_of("gradient", {0: with_nan()}, run=SCALED), [("info", 0, "b.weight")]),
    "an overflow on one rank": (
        "nonfinite-rank", replace(seen("origin", BAD_RANK), run=SCALED), [("info", 3, "module.0.weight")]),
    "a second moment is judged by the optimizer's decay": ("second-moment-drop", adam("exp_avg_sq", [1.0, 0.2]), []),
    "a slower decay": (
        "second-moment-drop",
        replace(one("exp_avg_sq", [1.0, 0.2]), run=RunSettings(second_moment_decay=0.999)), [("warning", 50, "x")]),
    "what rests": ("optimizer-coverage", Story(10, observations=looks(covered(unused=["x"]))), [("info", 0, "x")]),
    "what is frozen": ("optimizer-coverage", Story(10, observations=looks(covered(frozen=["x"]))), [("info", 0, "x")]),
    "what is frozen later": (
        "optimizer-coverage", Story(10, observations=looks(covered(), covered(frozen=["x"]))), [("info", 5, "x")]),
    "most of the model is frozen later": ("optimizer-coverage", frozen_later(9), [("warning", 5, "x")]),
    "half of the model is frozen later": ("optimizer-coverage", frozen_later(8), [("info", 5, "x")]),
    "what rests is not missed": (
        "missing-gradient",
        replace(missing(32), observations=[*looks(covered(unused=["a.bias"])), *missing(32).observations]), []),
    # As in mixtures of experts: if a gradient is missing for the second time, that is how the model works.
    "gradients that come and go": ("missing-gradient", comes_and_goes(), [("info", 10, "a.weight")]),
    "a bias that the loss does not see": ("dead-gradient", zero_gradients(0), [("info", 0, "a.bias")]),
    "a bias and all before it": ("dead-gradient", zero_gradients(64), [("warning", 0, "a.bias")]),
    "all gradients, after some that have come back": ("dead-gradient", all_zero_after_some(), [
        ("warning", 0, "a.weight"), ("warning", 60, "gradients")]),
    "a slope for negative inputs, of which there are none": (
        "dead-gradient",
        rows_of("gradient", {step: [row(0.0, 1, 1), row()] for step in range(30)}, names=("p.weight", "b.weight"),
                shapes=[(1,), (8, 8)]), [("info", 0, "p.weight")]),
    "what another optimizer trains": (
        "missing-gradient",
        replace(without(0, a=8, b=8, c=8), run=RIVAL), [("info", 0, "b")]),
    "what has trained beside a rival": (
        "missing-gradient",
        replace(without(9, a=8, b=8, c=8), run=RIVAL), [("warning", 9, "b")]),
    "a small part that is never used": ("missing-gradient", without(0, a=99, b=10, c=99), [("info", 0, "b")]),
    "a part that is cut off from the start": ("missing-gradient", without(0, a=99, b=11, c=99), [("warning", 0, "b")]),
    "a small part that is cut off": ("missing-gradient", without(1, a=99, b=1, c=99), [("warning", 1, "b")]),
    "a bias for each user": (
        "dead-gradient",
        rows_of("gradient", {step: [row(0.0, 8, 8), row()] for step in range(30)}, names=("users", "items"),
                shapes=[(8, 1), (8, 8)]), [("info", 0, "users")]),
    "a training that has converged": (
        "vanishing-gradient",
        series("norm", [1.0] * 5 + [1e-9] * 5, scalars={"loss": [2.0, 1.5, 1.0, 0.5, 0.1, *[0.01] * 5]}),
        [("info", 5, "norm")]),
    "outputs that are saturated": (
        "vanishing-gradient", series("norm", [1.0] * 5 + [1e-9] * 5, scalars={"loss": [2.0] * 10}),
        [("warning", 5, "norm")]),
    "a weight that is drawn in": (
        "parameter-jump", beside_losses([0.9] * 101), [("info", 100, "x")]),
    "a weight that is overwritten with zeros": (
        "parameter-jump", beside_losses([0.9] * 97 + [1.1] * 4), [("error", 100, "x")]),
    "a weight that is overwritten with zeros, and then the loss rises": (
        "parameter-jump", beside_losses([0.9] * 101 + [1.1] * 4), [("info", 100, "x"), ("error", 100, "x")]),
    "a weight that is drawn in, and the loss goes on": (
        "parameter-jump", beside_losses([0.9] * 105), [("info", 100, "x")]),
    "a weight that is normalised where it is used": (
        "parameter-jump", beside_losses(np.linspace(1, 0.5, 101).tolist(), 200), [("info", 100, "x")]),
    "a weight that is overwritten, and the loss with it": (
        "parameter-jump", beside_losses([0.9] * 100 + [math.nan], 200), [("error", 100, "x")]),
    "a bit flip that does the loss no harm": (
        "parameter-jump", beside_losses(np.linspace(1, 0.5, 101).tolist(), 1e30), [("error", 100, "x")]),
    "a weight that is overwritten, and no loss": (
        "parameter-jump", beside_losses([math.nan] * 101, 200), [("error", 100, "x")]),
    "a second moment in a branch that begins small": (
        "small-second-moment",
        rows_of("exp_avg_sq", {step: [row(0.9e-16), row(), row()] for step in (0, 50, 100)}, names=("x", "y", "z"),
                shapes=[(8, 8)] * 3, run=RunSettings(optimizer_eps=1e-8)), [("info", 0, "x")]),
    "constant features of a sparse input": ("constant-feature", beside(0.95, 40), []),
    "constant features of a mask": ("constant-feature", beside(1.0, 0, low=1.0), []),
    "constant features": ("constant-feature", beside(0.95, 10), [("warning", 0, "x")]),
    "an input that is constant": ("constant-feature", beside(1.0, 40), [("warning", 0, "x")]),
    "a divergence begins at 0, and has heavy tails": (
        "loss-spike", series("loss", [0.0] * 20 + wobbling(100, 0.02) + [1.8] + wobbling(50, 0.02)), []),
    "a loss that changes its sign is judged by its own scatter": ("loss-spike", series("loss", CHANGING_SIGN), []),
    "a norm likewise": ("exploding-gradient", series("norm", CHANGING_SIGN), []),
    "one large gradient": (
        "exploding-gradient", series("norm", [*NORMS, 20.1, *NORMS[-9:]]), [("info", 96, "norm")]),
    "gradients that stay large": (
        "exploding-gradient", series("norm", [*NORMS, *[20.1] * 4]), [("info", 96, "norm"), ("warning", 96, "norm")]),
    "large gradients that do the loss no harm": (
        "exploding-gradient", series("norm", [*NORMS, *[9.0] * 60], scalars={"loss": [1.0] * 156}),
        [("info", 96, "norm")]),
    "far too large ones": (
        "exploding-gradient", series("norm", [*NORMS, *[11.0] * 4], scalars={"loss": [1.0] * 100}),
        [("warning", 96, "norm")]),
    "one large loss": ("loss-spike", series("loss", [*LOSSES, 12.1, *LOSSES[-9:]]), [("info", 96, "loss")]),
    "losses that stay large": (
        "loss-spike", series("loss", [*LOSSES, *[12.1] * 4]),
        [("info", 96, "loss"), ("warning", 96, "loss"), ("warning", 99, "loss")]),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 9, 100, 600])
@pytest.mark.parametrize("what", TOLD)
def test_each_story_is_told_with_its_severity_step_and_name(what: str, size: int) -> None:
    name, story, told = TOLD[what]
    assert [(found.severity, found.step, found.name) for found in findings(new(name), story.windows(size))] == told


@pytest.mark.parametrize("size", [1, 7, 200])
@pytest.mark.parametrize(
    ("rates", "losses", "first"),
    [
        ([1e-3] * 200, [*LOSSES, *[12.1] * 104], "if it stays there, a change of data"),
        ([1e-3] * 90 + [0.3] * 110, [*LOSSES, *[12.1] * 104], "the learning rate, which went from 0.001 to 0.3"),
        ([1e-3] * 98 + [0.3] * 102, [*LOSSES, *[12.1] * 104], "if it stays there, a change of data"),
        ([1e-3] * 200, [1.0, *[-100.0 - i % 7 for i in range(150)], *[-30.0] * 49], "a loss with the wrong sign"),
    ],
)
def test_what_the_scalars_show_comes_before_other_causes(
    rates: list[float], losses: list[float], first: str, size: int
) -> None:
    runner = RuleRunner([new("loss-spike")], 64)
    windows = series("loss", losses, scalars={"lr": rates}).windows(size)
    found = next(finding for window in windows for finding in runner.review(window))
    assert found.causes[0].startswith(first)
    assert len({*found.causes}) == len(found.causes)


def test_the_limit_in_a_finding_of_a_spike_is_below_its_value() -> None:
    for name, scalar, values in (
        ("loss-spike", "loss", [*LOSSES, 12.1]),
        ("exploding-gradient", "norm", [*NORMS, 20.1]),
        ("exploding-gradient", "norm", [*(math.exp(4 * math.sin(i * 1.7)) for i in range(96)), 1e3]),
    ):
        for found in findings(new(name), series(scalar, values).windows(32)):
            assert found.evidence["limit"] < found.evidence[scalar]


@pytest.mark.parametrize("size", [1, 3])
def test_a_mask_of_another_size_may_have_more_infinities(size: int) -> None:
    rows = [Table({step: [row(0.1, n * n, inf=n)]}, ("mask",), [(n, n)]) for step, n in enumerate((4, 8, 8))]
    measured = [one.within(0, 9) for one in rows]
    asked = new("nonfinite-buffer")
    for first in range(0, 3, size):
        some = [made for made in measured[first : first + size] if made is not None]
        steps, raw = (np.concatenate([getattr(made, key) for made in some]) for key in ("steps", "raw"))
        joined = Rows(some[-1].tensors, steps, raw, [made.tensors for made in some])
        assert hits(asked, [Window(steps, {}, {"buffer": joined})]) == []


@pytest.mark.parametrize(("other", "shape", "after"), [("x.1.up", 8, 300), ("y.1.up", 8, 30), ("x.1.up", 4, 30)])
def test_one_of_several_that_are_alike_is_missed_later(other: str, shape: int, after: int) -> None:
    """Like experts, among which a router chooses."""
    names, shapes = ("x.0.up", other, "out"), [(8, 8), (shape, 8), (8, 8)]
    rows = {step: [ABSENT, row(), row()] for step in range(310)}
    weights = Table({0: [row()] * 3}, names, shapes)
    seen = [Observation("missing", step, [0]) for step in range(310)]
    story = rows_of("gradient", rows, names=names, shapes=shapes, tables={"parameter": weights}, observations=seen)
    for size in (1, 64):
        (found,) = findings(new("missing-gradient"), story.windows(size))
        assert (found.severity, found.evidence["in_a_row"], found.name) == ("warning", after, "x.0.up")


ZERO = row(0.0, zeros=64)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("gradients", "parameters", "is_blank"),
    [
        ([[ZERO, row(0.0, 8, 8), row()]] * 30, [ZERO, row(0.0, 8, 8), row()], [True]),
        ([[ZERO, row(0.0, 8, 8), row()]] * 19, [ZERO, row(0.0, 8, 8), row()], []),
        # As before an output layer that is initialised to zero: its first update ends this.
        ([[ZERO, row(0.0, 8, 8), row()]] * 2 + [[row(), row(0.1, 8), row()]] * 28, [ZERO, row(0.0, 8), row()], []),
        # The gradient is zero only later, when the weight no longer is; and a weight that is not zero.
        ([[row(), row(0.1, 8), row()]] * 9 + [[ZERO, row(0.1, 8), row()]] * 15, [ZERO, row(0.1, 8), row()], []),
        ([[ZERO, row(0.0, 8, 8), row()]] * 30, [row(), row(0.0, 8, 8), row()], [False]),
        ([[row(), row(0.1, 8), row()]] * 3 + [[ZERO, row(0.0, 8, 8), row()]] * 30, [ZERO, row(), row()], [False]),
    ],
)
def test_a_weight_that_is_zero_and_has_no_gradient_was_never_initialised(
    gradients: list[list[list[float]]], parameters: list[list[float]], is_blank: list[bool], size: int
) -> None:
    story = rows_of("gradient", dict(enumerate(gradients)))
    story.tables["parameter"] = rows_of("parameter", {0: parameters}).tables["parameter"]
    found = findings(new("dead-gradient"), story.windows(size))
    assert ["never initialised" in finding.causes[0] for finding in found] == is_blank
    assert all(finding.evidence["in_a_row"] == 20 for finding in found)


WEIGHT, OTHER = ([nn.Parameter(torch.ones(2))] for _ in range(2))


@pytest.mark.parametrize(
    ("optimizer", "decay", "momentum", "is_told"),
    [
        (torch.optim.Adadelta(WEIGHT, rho=0.9), 0.9, 0.0, False),
        (torch.optim.RMSprop(WEIGHT, alpha=0.8), 0.8, 0.0, False),
        (torch.optim.Adam([{"params": WEIGHT, "betas": (0.9, 0.95, 0.7)}]), 0.7, 0.9, False),
        (torch.optim.Adam([{"params": OTHER}, {"params": WEIGHT, "betas": (0.9999, 0.99)}]), 0.99, 0.9999, True),
        (torch.optim.SGD(WEIGHT, 0.1, momentum=0.9999), 0.0, 0.9999, True),
        (torch.optim.SGD(WEIGHT, 0.1, momentum=0.999), 0.0, 0.999, False),
        (torch.optim.Adagrad(WEIGHT), 0.0, 0.0, False),
        (None, 0.0, 0.0, False),
    ],
)
def test_decays_are_found_under_whatever_name_and_a_momentum_that_never_forgets_is_told_once(
    optimizer: Any, decay: float, momentum: float, is_told: bool
) -> None:
    settings = optimizer_settings(optimizer)
    assert (settings["second_moment_decay"], settings["momentum"]) == (decay, momentum)
    story = series("loss", [1.0] * 40, run=RunSettings(**settings))
    assert [step for _, step, _ in hits(new("momentum-drift"), story.windows(9))] == [8] * is_told


@pytest.mark.parametrize(("last", "is_classifier"), [("b.base", True), ("a.base", False)])
def test_the_last_layer_of_a_classifier_may_have_several_weights(last: str, is_classifier: bool) -> None:
    names = ("a.weight", last, "b.spline", "b.scaler")  # as in Kolmogorov-Arnold networks
    rows = {0: [row(0.1, mean=0.1), row(0.1), row(0.1, mean=0.1), row(0.1, mean=0.1)]}
    story = series("loss", [2.1] * 300, run=RunSettings(backward_order=names[::-1]))
    story.tables["gradient"] = Table(rows, names, [(8, 8)] * 4)
    assert bool(hits(new("no-learning"), story.windows(50))) == is_classifier


def test_the_band_of_a_rule_leaves_out_what_it_would_report() -> None:
    asked = new("loss-spike")
    hits(asked, series("loss", LOSSES).windows(32))
    _, high = asked.bands()["loss"]
    assert 0.4 < high < 1.2
    rate = new("learning-rate-jump")
    assert rate.bands() == {"lr": (0.0, math.inf)}
    hits(rate, series("lr", [1.0]).windows(1))
    assert rate.bands() == {"lr": (0.05, 3.0)}


def test_a_series_with_heavy_tails_has_a_higher_limit() -> None:
    values = [math.exp(1.5 * math.sin(i * 1.7)) for i in range(96)]  # they vary by a factor of 20
    asked, calm = new("exploding-gradient"), new("exploding-gradient")
    assert hits(asked, series("norm", values).windows(32)) == []
    assert hits(calm, series("norm", wobbling(96)).windows(32)) == []
    assert asked.bands()["norm"][1] > 2 * calm.bands()["norm"][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_share_of_certain_predictions_is_a_matter_of_margins(dtype: torch.dtype) -> None:
    model = nn.Identity()
    watch = Outputs(model)
    watch.switch(True)
    logits = torch.tensor([[0.0, 11.0, -50.0], [-100.0, -108.0, -109.0], [90.0, 95.0, 90.0], [0.0, math.nan, 1.0]])
    for outputs, share in ((logits, 0.25), (torch.tensor([[11.0], [-11.0], [9.0], [0.0]]), 0.5)):
        watch.measure(model, (), outputs.to(dtype))
        assert OutputFacts.of(watch.take().wait().tolist()) == OutputFacts(certain=share)
    watch.measure(model, (), torch.tensor(3.0))
    assert watch.take() is None


# Rules of users ------------------------------------------------------------------------------------------------


@rule("loss-negative", causes=["a sign"], advice=["look at the sign of the loss"])
def loss_negative(asked: Rule, window: Window) -> Any:
    """A loss below 0."""
    loss = window.scalar("loss")
    if loss is not None and (loss < 0).any():
        first = (loss < 0).argmax()
        yield asked.found(window.steps[first], "loss", f"the loss is {loss[first]:.3g}", loss=loss[first])


@rule("silent")
def silent(asked: Rule, window: Window) -> Any:
    return None


def trained(monitor_rules: list[Rule], loss: float, steps: int = 5) -> Monitor:
    monitor = Monitor(nn.Linear(4, 2), rules=monitor_rules, on_anomaly={"warning": "record"})
    fill(monitor._model)
    for _ in range(steps):
        monitor.step(loss)
    monitor.flush()
    return monitor


def test_a_rule_may_be_a_function() -> None:
    monitor = trained([*default_rules(), loss_negative(), silent()], -1.0)
    (found,) = [finding for finding in monitor.findings if finding.rule == "loss-negative"][:1]
    assert (found.rule, found.severity, found.step, found.name) == ("loss-negative", "warning", 0, "loss")
    assert found.causes == ("a sign",)
    assert found.evidence["loss"] < 0
    assert loss_negative.__doc__ == "A loss below 0."
    assert loss_negative.__module__ == __name__


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
        monitor = trained([Broken(), loss_negative()], -1.0, steps=70)
    assert calls.count(fails) == 1
    assert monitor.steps == 70
    assert monitor.findings  # other rules still run
