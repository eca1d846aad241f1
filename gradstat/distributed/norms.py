"""`verify_clip`: does a clip make of gradients on several ranks what one process makes of them?"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import pickle
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradstat._core.collectives import in_words
from gradstat._core.importing import attribute_of
from gradstat.distributed._ranks import LostRankError, RankError, Ranks

if TYPE_CHECKING:
    from gradstat.distributed.layouts import Layout, Model

WORLD = 4
ORDERS = (2.0, math.inf, 1.0)
# In the order of `LAYOUTS` of gradstat.distributed.layouts, which is imported where there are ranks.
NAMES = (
    *("ddp", "fsdp2", "hsdp", "tp", "sp", "fsdp2+tp", "pp", "pp+fsdp2", "ep", "ep+fsdp2"),
    *("zero-1", "zero-2", "zero-3"),
)
_PASSED = ("layout", "model", "mesh", "extra_groups", "pp_mesh", "ep_enabled")
# The parameters of which an element is made NaN, or the gradient taken away.
_VICTIM, _VICTIM_OF_EXPERTS = "blocks.0.up.weight", "experts.weight"
_RELATIVE = 1e-4  # gradients are float32, expected is float64
_COLUMNS = ("norm", "scaling", "gradients")
_OK = "ok"
_LOST = ("did not go on", "died")
_WIDTHS = (10, 20, 20, 20)


class WrongClipError(AssertionError):
    """A clip does not do what one process does; the message is the table and what went wrong."""


@dataclass(frozen=True)
class ClipVerdict:
    """What a clip did in one layout.

    Attributes:
        layout: Its name.
        norm: ``"ok"``, or what is wrong with the returned norms: ``"x0.41 to 0.55"`` are ratios to the right one.
        scaling: The same of the factor by which each rank's gradients were multiplied.
        gradients: The same of each gradient, element by element.
        problems: Sentences: in which cases, what is wrong, and its usual cause.
    """

    layout: str
    norm: str = _OK
    scaling: str = _OK
    gradients: str = _OK
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all is as in one process."""
        return self.cells[1:] == (_OK,) * 3

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row of a table: layout, norm, scaling, gradients."""
        return self.layout, self.norm, self.scaling, self.gradients


@dataclass(frozen=True)
class ClipReport:
    """What `verify_clip` found.

    Attributes:
        clip: The function's name.
        verdicts: One for each layout.
    """

    clip: str
    verdicts: tuple[ClipVerdict, ...]

    @property
    def ok(self) -> bool:
        """Whether every layout is."""
        return all(verdict.ok for verdict in self.verdicts)

    def raise_if_wrong(self) -> None:
        """Raises `WrongClipError`, an ``AssertionError`` whose message is the report, unless `ok`."""
        if not self.ok:
            raise WrongClipError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"clip": self.clip, "ok": self.ok, "verdicts": [asdict(verdict) for verdict in self.verdicts]}

    @property
    def account(self) -> str:
        """What is wrong, in sentences, and in how many layouts nothing is."""
        right = sum(verdict.ok for verdict in self.verdicts)
        layouts: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            for problem in verdict.problems:
                layouts.setdefault(problem, []).append(verdict.layout)
        lines = [f"{', '.join(names)}: {problem}" for problem, names in layouts.items()]
        return "\n".join([*lines, f"{self.clip}: as in one process in {right} of {len(self.verdicts)} layouts"])

    def __str__(self) -> str:
        table = [_row(("layout", *_COLUMNS)), *(_row(verdict.cells) for verdict in self.verdicts)]
        return "\n".join([*table, self.account])


def verify_clip(
    clip: Callable[..., Any],
    *,
    layouts: Iterable[str] = NAMES,
    orders: Iterable[float] = ORDERS,
    limit: float = 30.0,
    told: Callable[[ClipVerdict], object] | None = None,
) -> ClipReport:
    """Tries a clip function on a small model spread over four gloo ranks, and compares it with one process in float64.

    For the tests of a trainer; call it in one process, which starts the ranks::

        def test_clip():
            verify_clip(trainer.clip, layouts=["fsdp2", "hsdp"], orders=[2.0]).raise_if_wrong()

    The layouts: ``ddp``, ``fsdp2``, ``hsdp``, ``tp``, ``sp`` (sequence parallel: gradients of norms are partial sums),
    ``pp``, ``ep`` (experts are plain tensors), ``zero-1`` to ``zero-3`` (plain tensors: some of them whole, gradients
    of some of them, flat slices), ``fsdp2+tp``, ``pp+fsdp2`` and ``ep+fsdp2``. Some shards are empty. In each,
    gradients are clipped and not clipped in each order; one element is NaN; and one gradient is missing, of a DTensor
    on all ranks, of plain tensors on one.

    Args:
        clip: Called as ``clip(parameters, max_norm, norm_type)`` on every rank, with a list of parameters whose
            gradients are there. Has to scale them in place by ``min(1, max_norm / (norm + 1e-6))`` and to return the
            norm, of which ``float()`` is taken. If it has parameters named ``layout``, ``model``, ``mesh``,
            ``extra_groups``, ``pp_mesh`` or ``ep_enabled``, they are passed by keyword: the `Layout` and what it has.
        layouts, orders: Those to try.
        limit: Seconds after which ranks that wait for each other are stopped.
        told: Called with each verdict as soon as it is there.

    Raises:
        TypeError: ``clip`` cannot be imported by other processes, as a lambda.
        ValueError: There is no layout of that name.
        RuntimeError: The ranks could not be started, or a layout not be made.
    """
    wanted = list(layouts)
    for name in wanted:
        if name not in NAMES:
            raise ValueError(f"there is no layout {name!r}; expected one of {', '.join(NAMES)}")
    where = f"{getattr(clip, '__module__', '?')}:{getattr(clip, '__qualname__', type(clip).__name__)}"
    try:
        pickle.dumps(clip)
    except (AttributeError, pickle.PicklingError) as error:
        raise TypeError(f"the ranks cannot import clip, which is {where}; pass a function of a module") from error
    cases = list(_cases(orders))
    if not all(case.order > 0 for case in cases):
        raise ValueError("orders of norms have to be above zero")
    verdicts = []
    with Ranks(WORLD, preload=["gradstat.distributed.layouts"]) as ranks:
        for name in wanted:
            verdicts.append(_verdict(name, cases, _outcomes(ranks, clip, name, cases, limit)))
            if told is not None:
                told(verdicts[-1])
    return ClipReport(where, tuple(verdicts))


class _Case(NamedTuple):
    name: str
    order: float = 2.0
    share: float = 0.5  # of the norm, that it is clipped to
    defect: str = ""


def _cases(orders: Iterable[float]) -> Iterator[_Case]:
    for order in map(float, orders):
        yield _Case(f"order {order:g}, unclipped", order, 2.0)
        yield _Case(f"order {order:g}, clipped", order)
    yield _Case("a NaN", defect="nan")
    yield _Case("a gradient missing", defect="missing")


@dataclass
class _Outcome:
    """What a clip did on one rank."""

    raised: str = ""
    expected: float = math.nan  # the norm in one process
    local: float = math.nan  # that of what this rank holds
    own: float = math.nan  # that of the parameters of which this rank holds something
    limit: float = math.nan
    norm: float = math.nan
    factors: dict[str, float] = field(default_factory=dict)  # by which each gradient was multiplied
    altered: list[str] = field(default_factory=list)  # those that were not multiplied by one number, or came or went
    treatment: str = ""  # of gradients with a NaN among them
    partial: bool = False  # whether some are pending sums


def _outcomes(
    ranks: Ranks, clip: Callable[..., Any], name: str, cases: list[_Case], limit: float
) -> list[list[_Outcome]]:
    """For each case what happened on each rank. Ranks that are lost cost the case they were in."""
    try:
        on_ranks = ranks.run(WORLD, _on_rank, clip, name, cases, timeout=10 * limit, limit=limit)
    except LostRankError as error:
        done = min(len(error.told[rank]) for rank in error.ranks)
        how = [error.how if rank in error.ranks else "was stopped with it" for rank in range(WORLD)]
        on_ranks = [
            [*told, _Outcome(raised=how[rank] if len(told) == done else "")] for rank, told in enumerate(error.told)
        ]
        so_far = [list(case) for case in zip(*on_ranks)][: done + 1]  # noqa: B905 - some are further
        return [*so_far, *(_outcomes(ranks, clip, name, cases[done + 1 :], limit) if done + 1 < len(cases) else [])]
    except RankError as error:
        raise RankError(f"layout {name}: {error}") from error
    return [list(case) for case in zip(*on_ranks, strict=True)]


def _on_rank(clip: Callable[..., Any], name: str, cases: list[_Case]) -> Iterator[_Outcome]:
    from gradstat.distributed.layouts import laid_out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about a model that is not the user's
        layout, single = laid_out(name)
    parameters = layout.named_parameters()
    kept = {key: (p.grad, _storage(p.grad).clone()) for key, p in parameters.items() if p.grad is not None}
    asked = inspect.signature(clip).parameters
    passed = {key: layout if key == "layout" else getattr(layout, key) for key in _PASSED if key in asked}
    apart = dist.new_group()  # what the clip leaves unfinished in other groups does not meet the kit's own
    for case in cases:
        for key, (gradient, values) in kept.items():
            _storage(gradient).copy_(values)
            parameters[key].grad = gradient
        yield _tried(clip, case, layout, single, passed, apart)


def _tried(
    clip: Callable[..., Any],
    case: _Case,
    layout: Layout,
    single: Model,
    passed: dict[str, Any],
    apart: dist.ProcessGroup,
) -> _Outcome:
    parameters = layout.named_parameters()
    powers = {key: _power(_gradient(p), case.order) for key, p in single.named_parameters()}
    lost = torch.zeros((), dtype=torch.float64)
    held = {key: p for key, p in parameters.items() if p.grad is not None}
    name = _VICTIM_OF_EXPERTS if layout.ep_enabled else _VICTIM
    victim = held.get(name)
    if victim is not None and case.defect == "nan" and layout.begins_here(victim):
        _storage(_gradient(victim)).view(-1)[0] = math.nan
    if victim is not None and case.defect == "missing" and (isinstance(victim, DTensor) or layout.begins_here(victim)):
        # No rank of a mesh alone lacks a gradient, or torch's own reductions would not meet.
        lost += powers[name] if isinstance(victim, DTensor) else _power(_gradient(victim), case.order)
        victim.grad = None
    dist.all_reduce(lost, dist.ReduceOp.MAX, apart)
    before = {key: _values(p.grad) for key, p in parameters.items() if p.grad is not None}
    expected = _norm([*powers.values(), -lost.item()], case.order)
    outcome = _Outcome(
        expected=expected,
        local=_norm([_power(gradient, case.order) for gradient in before.values()], case.order),
        own=_norm([*(powers[key] for key in held), -lost.item() * (victim is not None)], case.order),
        limit=case.share * expected,
        partial=any(_is_partial(p.grad) for p in parameters.values()),
    )
    try:
        outcome.norm = float(clip(list(layout.model.parameters()), outcome.limit, case.order, **passed))
    except Exception as error:
        outcome.raised = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return outcome
    after = {key: _values(p.grad) for key, p in parameters.items() if p.grad is not None}
    if case.defect == "nan":
        outcome.treatment = _treatment(torch.cat(list(before.values())), torch.cat(list(after.values())))
        return outcome
    outcome.altered = sorted(before.keys() ^ after.keys())
    for key in sorted(before.keys() & after.keys()):
        old, new = before[key], after[key]
        if old.any():
            factor = outcome.factors[key] = (old.dot(new) / old.dot(old)).item()
            if not (new - factor * old).abs().max() <= _RELATIVE * abs(factor) * old.abs().max():
                outcome.altered.append(key)
    return outcome


def _treatment(before: Tensor, after: Tensor) -> str:
    if torch.equal(before.nan_to_num(), after.nan_to_num()):
        return "left as they are"
    return "all NaN" if after.isnan().all() else "zero" if not after.any() else "changed in another way"


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _is_partial(gradient: Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def _storage(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _values(gradient: Tensor) -> Tensor:
    """What this rank holds, or the sum that is pending; flat, a copy."""
    values = gradient.full_tensor() if _is_partial(gradient) else _storage(gradient)  # type: ignore[attr-defined]
    return values.detach().flatten().to(torch.float64, copy=True)


def _power(gradient: Tensor, order: float) -> float:
    """What adds up over tensors: the sum of powers; for infinity the maximum, which does not."""
    absolute = gradient.detach().double().abs()
    return (absolute**order).sum().item() if order < math.inf else max(absolute.flatten().tolist(), default=0.0)


def _norm(powers: Sequence[float], order: float) -> float:
    return max([0.0, *powers]) if order == math.inf else sum(powers) ** (1 / order)


# What the outcomes of all ranks say ---------------------------------------------------------------------------


def _verdict(layout: str, cases: list[_Case], outcomes: list[list[_Outcome]]) -> ClipVerdict:
    wrong: dict[str, dict[str, str]] = {column: {} for column in _COLUMNS}  # cells, by the case
    problems: dict[str, list[str]] = {}
    for case, on_ranks in zip(cases, outcomes, strict=True):
        for column, cell, problem in _wrong(case, on_ranks):
            wrong[column].setdefault(case.name, cell)
            if problem and case.name not in problems.setdefault(problem, []):
                problems[problem].append(case.name)
    cells = {}
    for column, found in wrong.items():
        some = f" ({len(found)}/{len(cases)})" * (len(found) < len(cases))
        cells[column] = next(iter(found.values())) + some if found else _OK
    told = [f"{p} ({'; '.join(names) if len(names) < 4 else f'{len(names)} cases'})" for p, names in problems.items()]
    return ClipVerdict(layout, **cells, problems=tuple(told))


def _wrong(case: _Case, outcomes: list[_Outcome]) -> Iterator[tuple[str, str, str]]:
    """Column, cell and sentence of what is wrong in a case; a sentence that is empty adds nothing to others."""
    raised: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.raised:
            raised.setdefault(outcome.raised, []).append(rank)
    if raised:
        lost = next((how for how in raised if how.startswith(_LOST)), "")
        cell = "raises" if not lost else "dies" if "died" in lost else "hangs"
        each = [f"{'all ranks' if len(on) == WORLD else in_words(on)}: {how}" for how, on in raised.items()]
        problem = "; ".join(each) + " (a collective that not all ranks call, or not with the same size)" * bool(lost)
        yield from ((column, cell, problem) for column in _COLUMNS)
    elif case.defect == "nan":
        finite = [rank for rank, outcome in enumerate(outcomes) if math.isfinite(outcome.norm)]
        if finite:
            yield "norm", "no NaN", f"the norm is finite on {in_words(finite)}, which step as if nothing were"
        elif len({outcome.treatment for outcome in outcomes}) > 1:
            told = ", ".join(f"{o.treatment} on rank {rank}" for rank, o in enumerate(outcomes))
            yield "gradients", "differ", f"ranks treat gradients differently: {told}"
    else:
        yield from _wrong_numbers(case, outcomes)


def _wrong_numbers(case: _Case, outcomes: list[_Outcome]) -> Iterator[tuple[str, str, str]]:
    expected = [outcome.expected for outcome in outcomes]
    norms = [outcome.norm for outcome in outcomes]
    if not _same(norms, expected):
        yield "norm", _ratio(norms, expected), _cause(case, outcomes)
    wanted = [min(1.0, outcome.limit / (outcome.expected + 1e-6)) for outcome in outcomes]
    by_norm = [min(1.0, outcome.limit / (outcome.norm + 1e-6)) for outcome in outcomes]
    factors = [statistics.median(outcome.factors.values() or [math.nan]) for outcome in outcomes]
    if not _same(factors, wanted):
        problem = ""
        if _same(factors, by_norm):
            pass  # the norm explains it
        elif _same(factors, [1.0] * WORLD):
            problem = "the norm is computed, but gradients are never scaled"
        elif not _same(factors, [factors[0]] * WORLD):
            problem = "ranks multiply by different factors, so that their parts of the model no longer fit together"
        else:
            problem = "gradients are not multiplied by min(1, max_norm / (norm + 1e-6))"
        yield "scaling", _ratio(factors, wanted), problem
        yield "gradients", _ratio(factors, wanted), ""
    odd: dict[str, list[int]] = {}
    for rank, (outcome, usual) in enumerate(zip(outcomes, factors, strict=True)):
        for name in {*outcome.altered, *(key for key, f in outcome.factors.items() if not _same([f], [usual]))}:
            odd.setdefault(name, []).append(rank)
    if odd:
        name, on = min(odd.items())
        more = f" and {len(odd) - 1} more gradients" * (len(odd) > 1)
        yield "gradients", name, f"{name}{more} not treated as the others on {in_words(on)}: left out of the scaling?"


def _cause(case: _Case, outcomes: list[_Outcome]) -> str:
    """The usual reason for these norms."""
    p = case.order
    norms, expected = [o.norm for o in outcomes], [o.expected for o in outcomes]
    local = [o.local for o in outcomes]
    everything = _norm([value if p == math.inf else value**p for value in local], p)
    if _same(norms, local):
        return (
            "each rank has the norm of what it holds itself: reduce powers (for inf, the maximum) over the ranks that "
            "hold the rest; of a DTensor whose reduction is pending, return full_tensor()"
        )
    if _same(norms, [o.own for o in outcomes]):
        return "each rank has the norm of its own parameters: those on other ranks only (stages, owners) are left out"
    for rank, value in enumerate(local):
        if _same(norms, [value] * WORLD):
            return f"all ranks have the norm of what rank {rank} holds: shards or experts of the others are left out"
    if _same(norms, [everything] * WORLD):
        return (
            "what several ranks hold is counted once for each of them: reduce over the ranks with different shards only"
        )
    for count in (2, WORLD):
        if p < math.inf and _same(norms, [value * count ** (1 / p) for value in expected]):
            return f"everything is counted {count} times: it is reduced over {count} ranks that hold the same"
        if p < math.inf and _same(norms, [value / count ** (1 / p) for value in expected]):
            return f"too small by the root of {count}: an average over {count} ranks where a sum belongs"
    if outcomes[0].partial:
        return "some gradients here are pending sums (Partial placements): sum them up before their norm is taken"
    return "none of the usual causes fits"


def _same(values: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(v, e, rel_tol=_RELATIVE) for v, e in zip(values, expected, strict=True))


def _ratio(values: Sequence[float], expected: Sequence[float]) -> str:
    ratios = sorted(f"{value / right:.4g}" for value, right in zip(values, expected, strict=True))
    return f"x{ratios[0]}" if ratios[0] == ratios[-1] else f"x{ratios[0]} to {ratios[-1]}"


# The command -------------------------------------------------------------------------------------------------


def _row(cells: Sequence[str]) -> str:
    return "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``norms``; returns 0 if all is as in one process, 1 if not, 2 if the function cannot be tried."""
    parser = argparse.ArgumentParser(
        prog="python -m gradstat norms",
        description="Try a clip function on a small model spread over four processes of this machine, as DDP, FSDP2, "
        "HSDP, tensor and sequence parallel, pipeline stages, experts and ZeRO leave gradients, and say where norm, "
        "scaling and gradients are not those of one process.",
        epilog="The function is called as clip(parameters, max_norm, norm_type); it also gets what it names of "
        f"{', '.join(_PASSED)}. Exit status: 0 if all is as in one process, 1 if not, 2 if it cannot be tried.",
    )
    parser.add_argument("clip", metavar="MODULE:FUNCTION", help="such as torch.nn.utils:clip_grad_norm_")
    parser.add_argument("--layouts", nargs="+", choices=NAMES, default=NAMES, metavar="LAYOUT", help=", ".join(NAMES))
    parser.add_argument("--orders", nargs="+", type=float, default=ORDERS, help="of the norm (default: 2 inf 1)")
    parser.add_argument(
        "--limit",
        type=float,
        default=30.0,
        help="seconds without an answer after which ranks are stopped (default %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)

    def told(cells: Sequence[str]) -> None:
        print(_row(cells), file=sys.stderr if options.json else sys.stdout, flush=True)

    try:
        clip = attribute_of(options.clip, "MODULE:FUNCTION, such as torch.nn.utils:clip_grad_norm_")
        told(("layout", *_COLUMNS))
        report = verify_clip(
            clip, layouts=options.layouts, orders=options.orders, limit=options.limit, told=lambda v: told(v.cells)
        )
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"gradstat norms: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if options.json else report.account)
    return 0 if report.ok else 1
