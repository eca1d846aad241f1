"""`verify_clip`: checks that a clip has the same effect on distributed gradients as in a single process."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from gradstat._core.collectives import format_ranks
from gradstat._core.importing import UsageError, attribute_of
from gradstat.distributed._ranks import LostRankError, RankError, Ranks
from gradstat.distributed.layouts import LAYOUTS, Layout, make_layout_and_reference
from gradstat.patch import importable_version
from gradstat.tensor_stats import Judged

WORLD = 4
ORDERS = (2.0, math.inf, 1.0)
_KEYWORDS = ("layout", "model", "mesh", "extra_groups", "pp_mesh", "ep_enabled")
_RELATIVE = 1e-4  # gradients are float32, expected is float64
_COLUMNS = ("norm", "scaling", "gradients")
_OK = "ok"


@dataclass(frozen=True)
class LayoutResult(Judged):
    """The effect of a clip in one layout.

    Attributes:
        layout: Name of the layout.
        norm: ``"ok"``, or what is wrong with the returned norms: ``"x0.41 to 0.55"`` are ratios to the right one.
        scaling: The same for the factor by which each rank's gradients were multiplied.
        gradients: The same for each gradient, element by element.
        problems: Sentences: what is wrong, the usual cause if one fits, and in which cases.
    """

    layout: str
    norm: str = _OK
    scaling: str = _OK
    gradients: str = _OK
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything is as in one process."""
        return self.norm == self.scaling == self.gradients == _OK


@dataclass(frozen=True)
class ClipReport(Judged):
    """The result of `verify_clip`.

    Attributes:
        clip: The function's name.
        results: One for each layout.
    """

    clip: str
    results: tuple[LayoutResult, ...]

    @property
    def ok(self) -> bool:
        """Whether every layout is ok."""
        return all(result.ok for result in self.results)

    def raise_if_wrong(self) -> None:
        """Raises an ``AssertionError`` with the report as its message, unless `ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    @property
    def summary(self) -> str:
        """The problems, in sentences, and the number of layouts without any."""
        right = sum(result.ok for result in self.results)
        problems: dict[str, list[str]] = {}
        for result in self.results:
            for problem in result.problems:
                problems.setdefault(problem, []).append(result.layout)
        lines = [f"{', '.join(layouts)}: {problem}" for problem, layouts in problems.items()]
        return "\n".join([*lines, f"{self.clip}: matches a single process in {right} of {len(self.results)} layouts"])

    def __str__(self) -> str:
        return "\n".join([_row(), *map(_row, self.results), self.summary])


def _row(result: LayoutResult | None = None) -> str:
    cells = ("layout", *_COLUMNS) if result is None else (result.layout, *(getattr(result, c) for c in _COLUMNS))
    return "  {:<10}  {:<20}  {:<20}  {}".format(*cells)


def verify_clip(
    clip: Callable[..., Any],
    *,
    layouts: Iterable[str] = tuple(LAYOUTS),
    orders: Iterable[float] = ORDERS,
    limit: float = 30.0,
    on_result: Callable[[LayoutResult], object] | None = None,
) -> ClipReport:
    """Runs a clip function on a small model distributed over four gloo ranks, and compares with one float64 process.

    For the tests of a trainer. Call it in one process, which starts the ranks::

        def test_clip():
            verify_clip(trainer.clip, layouts=["fsdp2", "hsdp"], orders=[2.0]).raise_if_wrong()

    The layouts: ``ddp``, ``fsdp2``, ``hsdp``, ``tp``, ``sp`` (sequence parallel: gradients of norm layers are partial
    sums), ``pp``, ``ep`` (experts are plain tensors), ``zero-1`` to ``zero-3`` (plain tensors: some whole parameters,
    some gradients, flat slices), ``fsdp2+tp``, ``pp+fsdp2`` and ``ep+fsdp2``. Some shards are empty. The cases in each
    layout: gradients above and below the limit, in each order; one NaN element; and one missing gradient, of a DTensor
    on all ranks, of a plain tensor on one.

    Args:
        clip: Called as ``clip(parameters, max_norm, norm_type)`` on every rank, with a list of parameters that have
            gradients. Has to scale these in place by ``min(1, max_norm / (norm + 1e-6))`` and return the norm, which is
            converted by ``float()``. If it has parameters named ``layout``, ``model``, ``mesh``, ``extra_groups``,
            ``pp_mesh`` or ``ep_enabled``, they are passed by keyword: the `Layout` and its attributes.
        layouts, orders: The layouts and orders of the norm to try.
        limit: Seconds per layout, after which ranks that wait for each other are stopped.
        on_result: Called with each result as soon as it is available.

    Raises:
        TypeError: ``clip`` cannot be imported by other processes, for example a lambda.
        ValueError: A layout is unknown, or an order is not above zero.
        RuntimeError: The ranks could not be started, or a layout could not be made.
    """
    clip = importable_version(clip)  # the ranks import it by name
    wanted, cases = list(layouts), list(_cases(orders))
    for name in wanted:
        if name not in LAYOUTS:
            raise ValueError(f"there is no layout {name!r}; expected one of {', '.join(LAYOUTS)}")
    if not all(case.order > 0 for case in cases):
        raise ValueError("orders: expected numbers above zero")
    where = f"{getattr(clip, '__module__', '?')}:{getattr(clip, '__qualname__', type(clip).__name__)}"
    try:
        ForkingPickler.dumps(clip)
    except Exception as error:  # of any kind: pickling runs the function's own class
        raise TypeError(f"the ranks cannot import clip, which is {where}; pass a module-level function") from error
    results = []
    with Ranks(WORLD) as ranks:
        for name in wanted:
            results.append(_result_of(name, cases, _outcomes(ranks, clip, name, cases, limit)))
            if on_result is not None:
                on_result(results[-1])
    return ClipReport(where, tuple(results))


class _Case(NamedTuple):
    name: str
    order: float = 2.0
    share: float = 0.5  # max_norm over the norm


_NAN, _MISSING = _Case("a NaN"), _Case("a gradient missing")


def _cases(orders: Iterable[float]) -> Iterator[_Case]:
    for order in map(float, orders):
        yield _Case(f"order {order:g}, unclipped", order, 2.0)
        yield _Case(f"order {order:g}, clipped", order)
    yield from (_NAN, _MISSING)


@dataclass
class _Outcome:
    """The effect of a clip on one rank."""

    raised: str = ""
    expected: float = math.nan  # the norm in one process
    local: float = math.nan  # the norm of this rank's part
    limit: float = math.nan
    norm: float = math.nan
    factors: dict[str, float] = field(default_factory=dict)  # by which each gradient was multiplied
    odd: list[str] = field(default_factory=list)  # gradients not multiplied by a single number, or added or removed
    unchanged: bool = False


def _outcomes(
    ranks: Ranks, clip: Callable[..., Any], name: str, cases: list[_Case], limit: float
) -> list[list[_Outcome]]:
    try:
        on_ranks = ranks.run(WORLD, _on_rank, clip, name, cases, timeout=10 * limit, limit=limit)
    except LostRankError as error:
        if len(cases) > 1:  # run each case by itself, to find the one that fails
            return [outcome for case in cases for outcome in _outcomes(ranks, clip, name, [case], limit)]
        lost = [_Outcome(raised=error.how if rank in error.ranks else "was stopped") for rank in range(WORLD)]
        return [[error.answers.get(rank, [lost[rank]])[0] for rank in range(WORLD)]]
    except RankError as error:
        raise RankError(f"layout {name}: {error}") from error
    return [list(case) for case in zip(*on_ranks, strict=True)]


def _on_rank(clip: Callable[..., Any], name: str, cases: list[_Case]) -> list[_Outcome]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about this model say nothing about the user's
        layout, single = make_layout_and_reference(name)
    parameters = layout.named_parameters()
    gradients_before = {key: (p.grad, _storage(p.grad).clone()) for key, p in parameters.items() if p.grad is not None}
    asked = inspect.signature(clip).parameters
    passed = {key: layout if key == "layout" else getattr(layout, key) for key in _KEYWORDS if key in asked}
    apart = dist.new_group()  # separate, so that collectives the clip left unfinished do not match ours
    outcomes = []
    for case in cases:
        for key, (gradient, values) in gradients_before.items():
            _storage(gradient).copy_(values)
            parameters[key].grad = gradient
        expected = _norm(_values(dict(single.named_parameters())), case.order)
        lost = torch.tensor(_inject_fault(case, layout, single))
        dist.all_reduce(lost, dist.ReduceOp.MAX, apart)
        expected = math.sqrt(expected**2 - lost.item() ** 2) if lost else expected
        values_before = _values(parameters)
        outcome = _Outcome(expected=expected, local=_norm(values_before, case.order), limit=case.share * expected)
        outcomes.append(outcome)
        try:
            outcome.norm = float(clip(list(layout.model.parameters()), outcome.limit, case.order, **passed))
        except Exception as error:
            outcome.raised = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            continue
        after = _values(parameters)
        outcome.odd = sorted(values_before.keys() ^ after.keys())
        outcome.unchanged = values_before.keys() == after.keys() and all(
            torch.equal(old.nan_to_num(), after[key].nan_to_num()) for key, old in values_before.items()
        )
        for key in values_before.keys() & after.keys():
            old, new = values_before[key], after[key]
            if case != _NAN and old.any():
                factor = outcome.factors[key] = (old.dot(new) / old.dot(old)).item()
                if not (new - factor * old).abs().max() <= _RELATIVE * abs(factor) * old.abs().max():
                    outcome.odd.append(key)
    return outcomes


def _inject_fault(case: _Case, layout: Layout, single: Module) -> float:
    """Puts the case's defect into this rank's gradients; returns the norm of the gradients removed here."""
    name = "experts.weight" if layout.ep_enabled else "blocks.0.up.weight"
    victim = layout.named_parameters().get(name)
    if victim is None or victim.grad is None:
        return 0.0
    is_first, gradient = layout.has_first_shard(victim), victim.grad
    if case == _NAN and is_first:
        _storage(gradient).view(-1)[0] = math.nan
    # On a mesh, all ranks must lack the gradient or none, or torch's own collectives would not match.
    if case == _MISSING and (is_first or isinstance(gradient, DTensor)):
        lost = _values({name: single.get_parameter(name) if isinstance(gradient, DTensor) else victim})
        victim.grad = None
        return _norm(lost, case.order)
    return 0.0


def _storage(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _values(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flat copies of this rank's part of each gradient; of the full tensor if a sum is pending."""
    values = {}
    for key, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is not None:
            pending = isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)
            values_of_one = gradient.full_tensor() if pending else _storage(gradient)  # type: ignore[attr-defined]
            values[key] = values_of_one.detach().flatten().to(torch.float64, copy=True)
    return values


def _norm(values: Mapping[str, Tensor], order: float) -> float:
    everything = torch.cat([torch.zeros(1, dtype=torch.float64), *values.values()])
    return float(torch.linalg.vector_norm(everything, order))


# Evaluating the outcomes of all ranks -------------------------------------------------------------------------


def _result_of(layout: str, cases: list[_Case], outcomes: list[list[_Outcome]]) -> LayoutResult:
    wrong: dict[str, dict[str, str]] = {column: {} for column in _COLUMNS}  # cells by case
    problems: dict[str, list[str]] = {}
    for case, on_ranks in zip(cases, outcomes, strict=True):
        for columns, cell, problem in _problems_of(case, on_ranks):
            for column in columns:
                wrong[column].setdefault(case.name, cell)
            if problem:
                problems.setdefault(problem, []).append(case.name)
    cells = {}
    for column, found in wrong.items():
        some = f" ({len(found)}/{len(cases)})" * (len(found) < len(cases))
        cells[column] = next(iter(found.values())) + some if found else _OK
    texts = [f"{p} ({'; '.join(names) if len(names) < 4 else f'{len(names)} cases'})" for p, names in problems.items()]
    return LayoutResult(layout, **cells, problems=tuple(texts))


def _problems_of(case: _Case, outcomes: list[_Outcome]) -> Iterator[tuple[Sequence[str], str, str]]:
    """Columns, cell and sentence of each problem in a case; an empty sentence adds nothing to the others."""
    norms, expected = [o.norm for o in outcomes], [o.expected for o in outcomes]
    if any(o.raised for o in outcomes):
        raised: dict[str, list[int]] = {}
        for rank, outcome in enumerate(outcomes):
            if outcome.raised:
                raised.setdefault(outcome.raised, []).append(rank)
        text = "; ".join(f"{format_ranks(on)}: {how}" for how, on in raised.items())
        cell = "dies" if "died with exit" in text else "hangs" if "made no progress" in text else "raises"
        hint = " (a collective that not all ranks call, or not with the same size)" * (cell != "raises")
        yield _COLUMNS, cell, text + hint
        return
    if case == _NAN:
        finite = [rank for rank, norm in enumerate(norms) if math.isfinite(norm)]
        if finite:
            yield ["norm"], "no NaN", f"the norm is finite on {format_ranks(finite)}, which would take the step"
        elif len({o.unchanged for o in outcomes}) > 1:
            spared = format_ranks([rank for rank, o in enumerate(outcomes) if o.unchanged])
            yield ["gradients"], "differ", f"gradients are unchanged on {spared} only"
        return
    if not _same(norms, expected):
        yield ["norm"], _ratio(norms, expected), _cause(case, outcomes)
    wanted, by_norm = (
        [min(1.0, o.limit / (n + 1e-6)) for o, n in zip(outcomes, of, strict=True)] for of in (expected, norms)
    )
    factors = [statistics.median(o.factors.values() or [math.nan]) for o in outcomes]
    if not _same(factors, wanted):
        usual = [
            (by_norm, ""),  # the wrong norm explains it
            ([1.0] * WORLD, "the norm is computed, but gradients are never scaled"),
            ([factors[0]] * WORLD, "gradients are not multiplied by min(1, max_norm / (norm + 1e-6))"),
            (factors, "ranks multiply by different factors, so their parts of the model no longer match"),
        ]
        lost = "gradients became NaN, or were removed"  # their factor is NaN, which equals nothing
        told = next((what for values, what in usual if _same(factors, values)), lost)
        yield _COLUMNS[1:], _ratio(factors, wanted), told
    odd: dict[str, list[int]] = {}
    for rank, (outcome, factor) in enumerate(zip(outcomes, factors, strict=True)):
        for name in {*outcome.odd, *(key for key, f in outcome.factors.items() if not _same([f], [factor]))}:
            odd.setdefault(name, []).append(rank)
    if odd:
        name, on = min(odd.items())
        more = f" and {len(odd) - 1} more gradients" * (len(odd) > 1)
        yield ["gradients"], name, f"{name}{more} scaled differently on {format_ranks(on)}: left out of the clip?"


def _cause(case: _Case, outcomes: list[_Outcome]) -> str:
    """The usual cause of the wrong norms in ``outcomes``."""
    norms, expected, local = ([getattr(o, of) for o in outcomes] for of in ("norm", "expected", "local"))
    root = WORLD ** (1 / case.order)
    together = torch.linalg.vector_norm(torch.tensor(local, dtype=torch.float64), case.order).item()
    usual = {
        "each rank has the norm of its own shards; return full_tensor() of a DTensor": local,
        "replicas are counted once per rank: reduce over different shards only": [together] * WORLD,
        f"too small by the root of {WORLD}: averaged instead of summed": [norm / root for norm in expected],
    }
    for rank, norm in enumerate(local):
        usual[f"all ranks have the norm of rank {rank}: shards or experts of the others are left out"] = [norm] * WORLD
    unknown = "are pipeline stages left out, or pending sums (Partial placements) not reduced before?"
    return next((cause for cause, values in usual.items() if _same(norms, values)), unknown)


def _same(values: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(v, e, rel_tol=_RELATIVE) for v, e in zip(values, expected, strict=True))


def _ratio(values: Sequence[float], expected: Sequence[float]) -> str:
    ratios = sorted((f"{value / right:.4g}" for value, right in zip(values, expected, strict=True)), key=float)
    return f"x{ratios[0]}" if ratios[0] == ratios[-1] else f"x{ratios[0]} to {ratios[-1]}"


# The command -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``norms``; returns 0 if everything is as in one process, else 1."""
    parser = argparse.ArgumentParser(
        prog="gradstat norms",
        description="Run a clip function on a small model distributed over four processes of this machine, in the "
        "layouts of DDP, FSDP2, HSDP, tensor and sequence parallelism, pipeline stages, experts and ZeRO, and report "
        "where norm, scaling and gradients differ from those of a single process.",
        epilog="The function is called as clip(parameters, max_norm, norm_type), and with the following keywords if it "
        f"has them: {', '.join(_KEYWORDS)}. Exit status: 0 if all layouts match, 1 if not, 2 if it cannot be run.",
    )
    names = tuple(LAYOUTS)
    parser.add_argument("clip", metavar="MODULE:FUNCTION", help="such as torch.nn.utils:clip_grad_norm_")
    parser.add_argument("--layouts", nargs="+", choices=names, default=names, metavar="LAYOUT", help=", ".join(names))
    parser.add_argument("--orders", nargs="+", type=float, default=ORDERS, help="of the norm (default: 2 inf 1)")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds per layout (default %(default)g)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    table = sys.stderr if options.json else sys.stdout

    def print_row(*result: LayoutResult) -> None:
        print(_row(*result), file=table, flush=True)

    try:
        clip = attribute_of(options.clip, "MODULE:FUNCTION, such as torch.nn.utils:clip_grad_norm_")
        print_row()
        report = verify_clip(
            clip, layouts=options.layouts, orders=options.orders, limit=options.limit, on_result=print_row
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    as_json = {"ok": report.ok, "clip": report.clip, "verdicts": [*map(asdict, report.results)]}
    print(json.dumps(as_json, indent=2) if options.json else report.summary)
    return 0 if report.ok else 1
