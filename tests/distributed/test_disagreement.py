"""Ranks that have different tensors: every call says so on all ranks, and nothing is merged, changed or aborted."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.devices import parameter_with
from helpers.ranks import Ranks, collectives_of, on_ranks
from helpers.ranks_of_frameworks import assert_alike
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import gradstat
from gradstat._core import agreement, backends, sharded

SHAPES = {"a": [8, 8], "b": [8], "c": [6, 2], "d": [3]}
Named = list[tuple[str, nn.Parameter]]


def parameter_of(gradient: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> nn.Parameter:
    """A parameter of zeros with this gradient, made without communication."""
    return parameter_with(distribute_tensor(gradient, mesh, placements, src_data_rank=None))


def named(
    mesh: DeviceMesh, shapes: dict[str, list[int]] = SHAPES, dtype: torch.dtype = torch.float32, replicated: str = "d"
) -> Named:
    """Sharded parameters by name, with gradients of ones; the last one is replicated."""
    made: Named = []
    for name, shape in shapes.items():
        placement: Placement = Replicate() if name in replicated else Shard(0)
        made.append((name, parameter_of(torch.ones(shape, dtype=dtype), mesh, [placement])))
    return made


def parameters_of(pairs: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in pairs]


def gradients_of(pairs: Named) -> list[Tensor]:
    return [parameter.grad for parameter in parameters_of(pairs)]  # type: ignore[misc]


def outcome_of(call: Callable[[], object]) -> Any:
    """What ``call`` returns or raises."""
    try:
        return call()
    except Exception as error:
        return error


def stepped(pairs: Named) -> object:
    return gradstat.guarded_step(torch.optim.SGD(pairs, lr=1.0), 1.0)


def monitored(pairs: Named) -> None:
    """A monitor does not raise, so what it warns of is raised here."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        monitor = gradstat.Monitor(nn.ParameterDict(pairs), on_anomaly="record", options={"lag": 0})
        monitor.step()
        monitor.remove()
    for warning in warned:
        raise RuntimeError(str(warning.message).partition("RuntimeError: ")[2] or str(warning.message))


CALLS: dict[str, Callable[[Named], object]] = {
    "check": gradstat.check,
    "check_async": lambda pairs: gradstat.check_async(pairs).result(),
    "stats": lambda pairs: gradstat.stats(gradients_of(pairs)),
    "clip": lambda pairs: gradstat.clip_grad_norm_(parameters_of(pairs), 1.0),
    "clip by the largest": lambda pairs: gradstat.clip_grad_norm_(parameters_of(pairs), 1.0, math.inf),
    "norm": lambda pairs: gradstat.get_total_norm(gradients_of(pairs)),
    "step": stepped,
    "monitor": monitored,
}
MEASURING = ("check", "stats", "clip", "step")
BY_NAME = {"check", "check_async", "step", "monitor"}  # others do not know names


def one_fewer(pairs: Named) -> Named:
    return [pair for pair in pairs if pair[0] != "b"]


def again(pairs: Named, **options: Any) -> Named:
    return named(pairs[0][1].device_mesh, **options)  # type: ignore[attr-defined]


# How rank 1 differs; the number of the first other tensor; what it is there (and how many there are); what on rank 0.
A, B, D = "'a' float32[8, 8] as S(0)", "'b' float32[8] as S(0)", "'d' float32[3] as R"
DIFFERENCES: dict[str, tuple[Callable[[Named], Named], int, str, int, str]] = {
    "one fewer": (one_fewer, 2, "'c' float32[6, 2] as S(0)", 3, B),
    "one replica fewer": (lambda pairs: pairs[:-1], 4, "none", 3, D),
    "one more": (
        lambda pairs: again(pairs, shapes={"a": [8, 8], "x": [6, 2], **SHAPES}),
        *(2, "'x' float32[6, 2] as S(0)", 5, B),
    ),
    "order": (lambda pairs: pairs[::-1], 1, D, 4, A),
    "shape": (lambda pairs: again(pairs, shapes={**SHAPES, "b": [10]}), 2, "'b' float32[10] as S(0)", 4, B),
    "dtype": (lambda pairs: again(pairs, dtype=torch.float64), 1, "'a' float64[8, 8] as S(0)", 4, A),
    "placement": (lambda pairs: again(pairs, replicated="bd"), 2, "'b' float32[8] as R", 4, B),
    "names": (lambda pairs: [(name.upper(), p) for name, p in pairs], 1, "'A' float32[8, 8] as S(0)", 4, A),
}


@pytest.mark.parametrize("known", ["neither", "one", "both"])
@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_the_rank_and_the_first_difference_are_named_on_all_ranks(call: str, known: str) -> None:
    """At once, and after calls in which the ranks had the same list: a list that is known is not announced."""
    mesh = init_device_mesh("cpu", (2,))
    for difference, (differ, number, there, count, here) in DIFFERENCES.items():
        if difference == "names" and call not in BY_NAME:
            continue
        words = f"number {number} is {there} on rank 1 (of {count}), {here} on rank 0 (of 4)"
        if call not in BY_NAME:
            words = re.sub(r"'\w' ", "", words)
        if known != "neither":
            CALLS[call](named(mesh))
        if known == "both":
            CALLS[call](differ(named(mesh)))
        pairs = differ(named(mesh)) if dist.get_rank() == 1 else named(mesh)
        before = [parameter.to_local().clone() for parameter in parameters_of(pairs)]  # type: ignore[operator]
        with pytest.raises(RuntimeError) as raised:
            CALLS[call](pairs)
        assert str(raised.value).startswith(f"rank 1 has other tensors than rank 0: {words}")
        assert_alike(str(raised.value))
        for parameter, value in zip(parameters_of(pairs), before, strict=True):
            assert torch.equal(parameter.to_local(), value)  # type: ignore[operator]
            assert bool((parameter.grad.to_local() == 1).all())  # type: ignore[union-attr]
        CALLS[call](named(mesh))  # and the ranks are still in step


@pytest.mark.parametrize("known", ["neither", "one", "both"])
@pytest.mark.parametrize("other", ["clip", "largest", "stranger"])
@on_ranks(2)
def test_another_order_of_calls_on_a_rank_is_refused_on_all_ranks(other: str, known: str) -> None:
    """Reductions of the same list are of other sizes then, for which gloo ends the process."""
    pairs = named(init_device_mesh("cpu", (2,)))
    calls: list[Callable[[], object]] = [
        lambda: gradstat.check(pairs),
        {
            "clip": lambda: gradstat.clip_grad_norm_(parameters_of(pairs), 100.0),
            "largest": lambda: gradstat.clip_grad_norm_(parameters_of(pairs), 100.0, math.inf),
            "stranger": lambda: gradstat.check(pairs[:2]),
        }[other],
    ]
    for call in calls[: ("neither", "one", "both").index(known)]:
        call()
    for call in calls if dist.get_rank() == 0 else calls[::-1]:
        with pytest.raises(RuntimeError, match=r"did not make the same calls|has other tensors than rank 0") as raised:
            call()
        assert_alike(str(raised.value))
    for call in calls:  # and the ranks are still in step
        call()


def similar_lists(value: float) -> dict[str, Named]:
    """Lists of two ranks that begin with the same tensor and differ in one respect; each tensor has ``value``."""
    mesh, turned = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])
    alone = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("outer", "inner"))["inner"]

    def of(name: str, mesh: DeviceMesh, placement: Placement, *shape: int, dtype: torch.dtype = torch.float32) -> Named:
        gradient = torch.arange(1.0, math.prod(shape) + 1, dtype=dtype)
        gradient[-3] = value
        return [(name, parameter_of(gradient.view(shape), mesh, [placement]))]

    a, b, c = of("a", mesh, Shard(0), 4), of("b", mesh, Shard(0), 6, 2), of("c", mesh, Replicate(), 3, 2)
    return {
        "the list": a + b + c,
        "placement": a + of("b", mesh, Replicate(), 6, 2) + c,
        "dimension": a + of("b", mesh, Shard(1), 6, 2) + c,
        "mesh": a + of("b", turned, Shard(0), 6, 2) + c,
        "group": a + of("b", alone, Shard(0), 6, 2) + c,
        "shape": a + of("b", mesh, Shard(0), 4, 3) + c,
        "dtype": a + b + of("c", mesh, Replicate(), 3, 2, dtype=torch.float64),
        "order": a + c + b,
        "names": a + of("x", mesh, Shard(0), 6, 2) + c,
        "no gradient of b": [*a, ("b", nn.Parameter(b[0][1].detach())), *c],
        "no gradient of c": [*a, *b, ("c", nn.Parameter(c[0][1].detach()))],
    }


@pytest.mark.parametrize("value", [2.0, math.nan])
@on_ranks(2)
def test_a_list_is_never_taken_for_the_one_before(value: float) -> None:
    lists = similar_lists(value)

    def measured(some: Named) -> str:
        norm, report = gradstat.clip_grad_norm_(parameters_of(some), math.inf), gradstat.check(some)
        return f"{norm} {norm.dtype} {report.missing} {report.total_norm} {[t.to_dict() for t in report]}"

    expected = {}
    for what, some in lists.items():
        sharded._caches.clear()
        expected[what] = measured(some)
    assert_alike(expected["placement"])
    assert len(set(expected.values())) > len(lists) // 2
    for before in lists.values():
        for what, some in lists.items():
            measured(before)
            assert measured(some) == expected[what]


@on_ranks(3)
def test_of_several_ranks_the_minority_is_named() -> None:
    mesh = init_device_mesh("cpu", (3,))
    pairs = named(mesh)
    with pytest.raises(RuntimeError, match=r"^rank 0 has other tensors than rank 1: number 2 is 'c'"):
        gradstat.check(one_fewer(pairs) if dist.get_rank() == 0 else pairs)
    with pytest.raises(RuntimeError, match=r"^ranks 1, 2 have other tensors than rank 0: number 2 is 'c'"):
        gradstat.check([pairs, one_fewer(pairs), one_fewer(pairs)[::-1]][dist.get_rank()])


@on_ranks(2)
def test_over_extra_groups_only_tensors_that_are_not_spread_have_to_be_the_same() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    rank = dist.get_rank()
    own = [(f"stage{rank}.{i}", parameter_with(torch.ones(2 + rank))) for i in range(1 + rank)]
    shared = [("shared", parameter_with(torch.ones(3)))]
    everything, groups = [*shared, *own], [(mesh["stage"], parameters_of(own))]
    expected = math.sqrt(3 + 2 + 2 * 3)
    assert gradstat.check(everything, extra_groups=groups).total_norm == pytest.approx(expected)
    assert gradstat.clip_grad_norm_(parameters_of(everything), math.inf, extra_groups=groups) == pytest.approx(expected)
    assert gradstat.check(own, extra_groups=mesh["stage"]).total_norm == pytest.approx(math.sqrt(8))
    some = everything[rank:]
    with pytest.raises(RuntimeError, match=r"rank 1 has other .* rank 0: number 1 is none on rank 1 \(of 0\)"):
        gradstat.check(some, extra_groups=groups)
    assert gradstat.check(everything, extra_groups=groups).total_norm == pytest.approx(expected)


@on_ranks(4)
def test_ranks_of_other_groups_do_not_wait_for_those_that_differ() -> None:
    """On a mesh of two dimensions only pairs of ranks see both lists; the other ranks are told that ranks failed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parameter = parameter_of(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    for is_warm in (False, True):
        if is_warm:
            assert gradstat.check([("w", parameter)]).total_norm == 4.0
        name = "v" if dist.get_rank() == 3 else "w"
        with pytest.raises(RuntimeError, match=r"other tensors than rank|other ranks? failed to measure"):
            gradstat.check([(name, parameter)])
    assert gradstat.check([("w", parameter)]).total_norm == 4.0


@pytest.mark.parametrize("call", ["check", "clip", "step", "norm"])
@on_ranks(2)
def test_a_list_costs_more_collectives_only_when_it_is_new(call: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    count = 1 if call in ("clip", "norm") else 2
    short, long = named(mesh), named(mesh, {f"{name}{i}": shape for name, shape in SHAPES.items() for i in range(9)})
    first = collectives_of(lambda: CALLS[call](short))
    assert first[0] == "all_reduce of 24 bytes"
    assert len(first) == 1 + count
    for pairs in (long, short):
        CALLS[call](pairs)
    for pairs in (short, long, short):
        steady = collectives_of(lambda pairs=pairs: CALLS[call](pairs))
        assert len(steady) == count, "lists that take turns stay known"


@on_ranks(2)
def test_a_rank_without_any_gradient_takes_part() -> None:
    mesh = init_device_mesh("cpu", (2,))
    pairs = named(mesh)[:-1]
    for is_missing in (False, True):
        if is_missing and dist.get_rank() == 1:
            for _, parameter in pairs:
                parameter.grad = None
        norm = pytest.approx(math.sqrt((64 + 8 + 12) / (1 + is_missing)))
        report = gradstat.check(pairs)
        assert report.total_norm == norm
        assert len(report.missing) == (3 if is_missing and dist.get_rank() == 1 else 0)
        assert gradstat.clip_grad_norm_(parameters_of(pairs), math.inf).item() == norm
        assert gradstat.guarded_step(torch.optim.SGD(pairs, lr=1.0)).total_norm.item() == norm
        monitored(pairs)


def assert_told(outcomes: list[Any], words: str) -> None:
    """What ranks get of `MEASURING` if others have another list or could not measure it."""
    told, table, norm, step = outcomes
    assert str(told).startswith(words)
    assert str(outcome_of(step.report.result)).startswith(words)
    assert table.isnan().all()
    assert norm.isnan()
    assert step.total_norm.isnan()
    assert step.skipped


@pytest.mark.parametrize("is_warm", [False, True])
@on_ranks(2)
def test_where_the_host_would_have_to_wait_the_numbers_say_so_instead(is_warm: bool) -> None:
    """As on a GPU: lists that differ from the first call on are compared at once, later ones when numbers are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_host_sees", lambda device: False)
        mesh = init_device_mesh("cpu", (2,))
        pairs = named(mesh)
        other = one_fewer(pairs) if dist.get_rank() == 1 else pairs
        calls = [CALLS[name] for name in MEASURING]
        if not is_warm:
            for call in calls:
                with pytest.raises(RuntimeError, match=r"^rank 1 has other tensors than rank 0: number 2 is"):
                    call(other)
            return
        for call in calls:
            call(pairs)
        outcomes = [outcome_of(lambda call=call: call(other)) for call in calls]
        if dist.get_rank() == 1:
            assert all(str(one).startswith("rank 1 has other tensors than in the calls before") for one in outcomes)
        else:
            assert_told(outcomes, "other ranks have other tensors, so the result is unknown")
        for call in calls:  # lists that were used before are compared as well
            call(named(mesh, {"a": [8, 8]}))
        for parameter in parameters_of(pairs):
            parameter.grad.to_local().fill_(1.0)  # type: ignore[union-attr]  # the clip made some of them NaN
        assert gradstat.check(pairs).ok


def spoiled(pairs: Named) -> Named:
    """The same parameters, of which this rank cannot measure one gradient if it is the last rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient = pairs[1][1].grad
        gradient._local_tensor = gradient._local_tensor.to(torch.int64)  # type: ignore[union-attr]
    return pairs


@pytest.mark.parametrize("world", [2, 4])
def test_failed_ranks_are_counted_and_not_once_for_each_tensor(ranks: Ranks, world: int) -> None:
    ranks.run(world, failed_to_measure)


def failed_to_measure() -> None:
    world = dist.get_world_size()
    sizes = (2, world // 2) if world > 2 else (2,)
    mesh, placements = init_device_mesh("cpu", sizes), [Shard(dim) for dim in range(len(sizes))]
    pairs = spoiled([(f"p{i}", parameter_of(torch.ones(4, 4), mesh, placements)) for i in range(20)])
    outcomes = [outcome_of(lambda call=call: CALLS[call](pairs)) for call in MEASURING]
    assert not any(parameter.to_local().any() for parameter in parameters_of(pairs))  # type: ignore[operator]
    if dist.get_rank() < world - 1:
        assert_told(outcomes, "1 other rank failed to measure their shards")
    else:
        assert [type(outcome) for outcome in outcomes] == [TypeError] * 4
        assert all("torch.int64" in str(outcome) for outcome in outcomes)


@on_ranks(2)
def test_a_rank_without_the_backend_takes_part() -> None:
    calls: list[Callable[[Named, str | None], object]] = [
        lambda pairs, backend: gradstat.check(pairs, backend=backend),
        lambda pairs, backend: gradstat.stats(gradients_of(pairs), backend=backend),
        lambda pairs, backend: gradstat.clip_grad_norm_(parameters_of(pairs), 1.0, backend=backend),
        lambda pairs, backend: gradstat.guarded_step(torch.optim.SGD(pairs, lr=1.0), 1.0, backend=backend),
    ]
    is_here = dist.get_rank() == 0

    def missing(*_: object) -> None:
        raise gradstat.BackendUnavailableError("not here")

    for backend, error in ((None, gradstat.BackendUnavailableError), ("tritno", ValueError)):
        with pytest.MonkeyPatch.context() as patch:
            if not is_here and backend is None:
                patch.setattr(backends, "resolve", missing)
            mesh, wanted = init_device_mesh("cpu", (2,)), None if is_here else backend
            outcomes = [outcome_of(lambda call=call: call(named(mesh), wanted)) for call in calls]  # noqa: B023
        if is_here:
            assert_told(outcomes, "1 other rank failed")
        else:
            assert [type(outcome) for outcome in outcomes] == [error] * len(calls)


@on_ranks(2)
def test_a_rank_that_fails_takes_part_in_the_mean_of_the_loss_and_the_scaler_finds_it() -> None:
    mesh = init_device_mesh("cpu", (2,))
    scaler = gradstat.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.AdamW(spoiled(named(mesh)), fused=True)
    guard = gradstat.SpikeGuard()
    outcomes = [
        # With a guard there is one more collective, which has to stay in step.
        outcome_of(lambda: gradstat.guarded_step(optimizer, 1.0, loss=torch.tensor(1.0), guard=guard)),
        outcome_of(lambda: scaler.step(optimizer)),
    ]
    if dist.get_rank() == 1:
        assert all("int64" in str(outcome) for outcome in outcomes)
    else:
        assert outcomes[0].skipped
        assert guard.read(wait=True).nonfinite == 1
        scaler.update()
        assert scaler.get_scale() == 2.0
    assert not any(p.to_local().any() for p in optimizer.param_groups[0]["params"])
    assert gradstat.check(named(mesh)).ok
