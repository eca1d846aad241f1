"""NoiseScale: against known covariances, against gradients of single examples, over ranks."""

import contextlib
import copy
import math
import pickle
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.cuda_counts import Counts, NoSync, Operations, count
from helpers.ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradstat
from gradstat.demo import corpus
from gradstat.demo.model import GPT, TINY
from gradstat.distributed import track_origin

SIZE = 4  # examples of a micro-batch


class Means(nn.Module):
    """Half the squared distance to each example, so that its gradient is the parameters minus the example."""

    def __init__(self, offsets: dict[str, float], width: int = 400) -> None:
        super().__init__()
        self.layers = nn.ParameterDict({name: nn.Parameter(torch.full((width,), x)) for name, x in offsets.items()})

    def loss(self, examples: dict[str, Tensor]) -> Tensor:
        """Mean over the examples, ``[count, width]`` of each layer."""
        return torch.stack([(p - examples[name]).square().sum(1).mean() / 2 for name, p in self.layers.items()]).sum()


def accumulate(
    noise: gradstat.NoiseScale, model: nn.Module, losses: list[Callable[[], Tensor]], divisor: float | None = None
) -> None:
    """A step with a micro-batch for each loss; losses are divided by their number."""
    for loss in losses:
        (loss() / (divisor or len(losses))).backward()
        noise.micro_batch()
    noise.step()
    model.zero_grad()


def squares(gradients: list[Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients)


@pytest.mark.parametrize("divided", [True, False])
def test_a_covariance_that_is_known(divided: bool) -> None:
    """Within 5 % of the analytic value, in total and for each layer; steps differ in the number of micro-batches."""
    # Examples have mean zero, so for a layer |G|^2 is width * offset^2 and tr(S) is width * deviation^2.
    offsets, deviations = {"a": 0.5, "b": 2.0, "still": 1.0}, {"a": 3.0, "b": 2.0, "still": 0.0}
    model = Means(offsets)
    noise = gradstat.NoiseScale(model, SIZE, every=1)
    for step in range(400):
        losses = [
            lambda: model.loss({name: torch.randn(SIZE, 400) * deviation for name, deviation in deviations.items()})
        ] * (4 + step % 5)
        accumulate(noise, model, losses, None if divided else 1.0)
    expected = {f"layers.{name}": deviations[name] ** 2 / offsets[name] ** 2 for name in offsets}
    assert expected["layers.a"] == 36.0
    together = sum(d**2 for d in deviations.values()) / sum(o**2 for o in offsets.values())
    assert noise.by_layer() == pytest.approx(expected, rel=0.05, abs=1e-6)
    assert noise.value() == pytest.approx(together, rel=0.05)
    assert noise.by_layer(depth=1) == pytest.approx({"layers": together}, rel=0.05)


def test_gradients_of_single_examples_of_a_gpt() -> None:
    """Batches are drawn from a pool; within 10 % of the value from the gradients of all its examples."""
    data = corpus.read(Path(sysconfig.get_paths()["stdlib"]), 400_000)
    pool = corpus.batch(data, 64, TINY.context + 1, torch.Generator().manual_seed(3), "cpu")
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):  # an untrained model has hardly any noise
        optimizer.zero_grad()
        model.loss(pool[torch.randint(len(pool), (16,))]).backward()
        optimizer.step()

    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]

    def gradient(examples: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(model.loss(examples), parameters)])

    each = torch.stack([gradient(example[None]) for example in pool])
    assert torch.allclose(gradient(pool[:4]), each[:4].mean(0), atol=1e-5)
    # So gradients of many batches can be computed as means of the known gradients.
    accumulated = torch.zeros(sum(sizes))
    for parameter, view in zip(parameters, accumulated.split(sizes), strict=True):
        parameter.grad = view.view_as(parameter)
    noise = gradstat.NoiseScale(model, 4, every=1, decay=0.9995)
    for _ in range(1500):
        drawn = nn.functional.one_hot(torch.randint(len(pool), (8, 4)), len(pool)).sum(1).cumsum(0) / 32.0
        for gradients in drawn @ each:
            accumulated.copy_(gradients)
            noise.micro_batch()
        noise.step()

    trace, square = each.double().var(0, correction=0), each.double().mean(0).square()
    assert trace.sum() > square.sum()
    assert noise.value() == pytest.approx(float(trace.sum() / square.sum()), rel=0.1)
    layers = noise.by_layer(depth=2)
    names = [".".join(name.split(".")[:2]) for name, _ in model.named_parameters()]
    pieces = list(zip(names, trace.split(sizes), square.split(sizes), strict=True))
    for layer in ("tokens.weight", "blocks.0", "blocks.1", "head.weight"):
        of = [(float(t.sum()), float(q.sum())) for name, t, q in pieces if name == layer]
        assert layers[layer] == pytest.approx(sum(t for t, _ in of) / sum(q for _, q in of), rel=0.1), layer


def estimates(small: list[Tensor], whole: list[Tensor], size: int, n: float) -> tuple[float, float]:
    """tr(S) and |G|^2 as in appendix A, from gradients of ``size`` and of ``n * size`` examples."""
    s, a, whole_size = squares(small), squares(whole), n * size
    return (s - a) / (1 / size - 1 / whole_size), (whole_size * a - size * s) / (whole_size - size)


def test_averages_are_those_of_the_paper_and_steps_with_nan_or_inf_are_left_out() -> None:
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    noise = gradstat.NoiseScale([("p", parameter)], SIZE, every=1, decay=0.5)
    assert math.isnan(noise.value())
    assert noise.by_layer() == {}
    tr, sq = 0.0, 0.0
    for bad in (None, math.nan, None, math.inf, 1e150, None):
        parts = [torch.randn(5, dtype=torch.float64) + 3 for _ in range(3)]
        parameter.grad = None
        for i, part in enumerate(parts):
            parameter.grad = part / 3 if parameter.grad is None else parameter.grad + part / 3
            if bad is not None and i == 1:
                parameter.grad[2] = bad
            noise.micro_batch()
        noise.step()
        if bad is None:
            found = estimates([parts[0]], [sum(parts) / 3], SIZE, 3)
            tr, sq = (0.5 * tr + 0.5 * found[0], 0.5 * sq + 0.5 * found[1])
        assert noise.value() == pytest.approx(tr / sq)
    assert noise.by_layer() == {"p": noise.value()}


@pytest.mark.parametrize(("first", "whole", "expected"), [(1.0, 0.0, math.inf), (0.4, 1.0, 0.0), (0.5, 1.0, 0.0)])
def test_what_cannot_be_told_from_noise_has_no_bound_and_none_is_below_zero(
    first: float, whole: float, expected: float
) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    noise = gradstat.NoiseScale(parameter, 1, every=1)
    for gradient in (first, whole):
        parameter.grad = torch.tensor([gradient])
        noise.micro_batch()
    noise.step()
    assert noise.value() == expected


def test_gradients_that_come_and_go_and_rows_that_a_caller_has() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    parameters = list(model[:2].parameters())
    read, given = gradstat.NoiseScale(model, 2, every=1), gradstat.NoiseScale(model, 2, every=1)
    gradients = [torch.randn_like(p) for p in parameters]
    parameters[2].grad, parameters[3].grad = gradients[2] / 2, gradients[3] / 2  # the first layer has gradients later
    read.micro_batch()
    stand_ins = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    given.micro_batch(gradstat.stats(stand_ins))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for noise, rows in ((read, None), (given, gradstat.stats(gradients))):
        noise.micro_batch()
        noise.step(rows)
    expected = estimates([g / 1 for g in gradients[2:]], gradients[2:], 2, 2)
    assert read.state_dict()["averages"].equal(given.state_dict()["averages"])
    layers = read.by_layer(depth=1)
    assert layers.keys() == {"0", "1"}
    assert layers["1"] == pytest.approx(max(expected[0], 0.0) / expected[1])
    with pytest.raises(ValueError, match=r"rows has the shape \(6, 10\); expected \(4, 10\)"):
        read.micro_batch(gradstat.stats([*gradients, *gradients[:2]]))


def test_state_goes_on_elsewhere_with_another_size_and_a_logger_reads_it() -> None:
    model = nn.Linear(3, 2)
    noise = gradstat.NoiseScale(model, 2, every=1)
    again = gradstat.NoiseScale(model, 6, every=1)
    accumulate(noise, model, [lambda x=x: model(torch.ones(2, 3) * x).square().mean() for x in (3, 2.8, 2.6)])
    assert noise.value(wait=False) == noise.value() > 0  # on a CPU there is no transfer to wait for
    assert math.isnan(again.value(wait=False))
    again.load_state_dict(copy.deepcopy(noise.state_dict()))
    assert again.value(wait=False) == pytest.approx(noise.value())
    parts = [lambda x=x: model(torch.ones(2, 3) * x).square().mean() for x in (3, 2)]
    accumulate(noise, model, parts)
    assert noise.value(wait=False) != pytest.approx(again.value())
    with pytest.raises(ValueError, match="state is of other parameters"):
        gradstat.NoiseScale(nn.Linear(3, 2, bias=False), 2).load_state_dict(noise.state_dict())


def test_a_copy_has_averages_of_its_own() -> None:
    model = nn.Linear(3, 2)
    noise = gradstat.NoiseScale(model, 2, every=1)
    parts = [lambda x=x: model(torch.ones(2, 3) * x).square().mean() for x in (3, 2.8, 2.6)]
    accumulate(noise, model, parts)
    before = noise.value()
    noise._averages.streams = (threading.Lock(),)  # type: ignore[assignment]  # like a torch.Stream, it cannot be copied
    copies = [copy.deepcopy(noise), pickle.loads(pickle.dumps(noise))]
    noise._averages.streams = ()
    accumulate(noise, model, parts[:2])
    assert noise.value() != before
    assert [copied.value() for copied in copies] == [before, before]


def test_what_is_refused() -> None:
    model = nn.Linear(3, 2)
    for given, message in (
        ({"micro_batch_size": 0}, "micro_batch_size is 0; expected a whole number from 1"),
        ({"micro_batch_size": -4}, "micro_batch_size is -4; expected a whole number from 1"),
        ({"ranks": 0}, "ranks is 0"),
        ({"decay": 1.0}, r"decay is 1\.0; expected a number from 0 to less than 1"),
        ({"every": 0}, "every is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            gradstat.NoiseScale(model, **{"micro_batch_size": 1, **given})
    with pytest.raises(ValueError, match="none of the 2 parameters requires a gradient"):
        gradstat.NoiseScale(nn.Linear(3, 2).requires_grad_(False), 1)
    noise = gradstat.NoiseScale(model, 1, every=1)
    with pytest.raises(RuntimeError, match=r"step\(\) before micro_batch\(\)"):
        noise.step()
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient; call micro_batch\(\) after backward"):
        noise.micro_batch()
    model(torch.randn(2, 3)).sum().backward()
    noise.micro_batch()
    with pytest.raises(RuntimeError, match="this step has one micro-batch"):
        noise.step()
    noise.micro_batch()  # the first micro-batch still counts
    noise.step()
    noise.micro_batch()
    noise.reset()
    with pytest.raises(RuntimeError, match=r"step\(\) before micro_batch\(\)"):
        noise.step()


# Cost --------------------------------------------------------------------------------------------------------


def test_nine_small_operations_and_no_read_of_a_number() -> None:
    model = nn.Linear(3, 2)
    noise = gradstat.NoiseScale(model, 1, every=1)
    for _ in range(2):
        model(torch.randn(2, 3)).sum().backward()
        with NoSync():
            noise.micro_batch()
    with NoSync(), Operations() as seen:
        noise.step()
    table, *small = seen.names
    assert table == "aten::empty.memory_format"  # the table that the kernel fills
    assert len(small) == 9, small
    model(torch.randn(2, 3)).sum().backward()
    noise.micro_batch()
    with Operations() as seen:
        noise.micro_batch()
    assert seen.names == []


def test_one_step_of_three_is_read() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    noise, alone = gradstat.NoiseScale(parameter, 1, every=3), gradstat.NoiseScale(parameter, 1, every=1)
    for step in range(7):
        parameter.grad = torch.ones(4) + step
        with Operations() as seen:
            noise.micro_batch()
        first = gradstat.stats([parameter.grad])
        parameter.grad = torch.ones(4) * 1.5 + step * 2
        with Operations() as seen_last:
            noise.micro_batch()
            noise.step()
        assert bool(seen.names) == bool(seen_last.names) == (step % 3 == 0)
        if step % 3 == 0:
            alone.micro_batch(first)
            alone.micro_batch()
            alone.step()
        assert noise.state_dict()["averages"].equal(alone.state_dict()["averages"])


@pytest.mark.cuda
def test_no_sync_on_a_gpu() -> None:
    model = nn.Linear(3, 2).cuda()
    model(torch.randn(2, 3, device="cuda")).sum().backward()
    noise = gradstat.NoiseScale(model, 1, every=1)

    def step() -> None:
        for _ in range(3):
            noise.micro_batch()
        noise.step()

    assert count(step) == Counts(launches=2 + 9, syncs=0)


# Several ranks -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_local_gradients_against_those_that_ddp_averaged() -> None:
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    # Small buckets, so that there are several, which DDP rebuilds after the first iteration.
    model = DistributedDataParallel(plain, bucket_cap_mb=0.0001)
    alone = copy.deepcopy(plain)
    tracker = track_origin(model)
    with pytest.raises(RuntimeError, match="0 gradients of 4 were measured in the last reduction"):
        tracker.rows()
    torch.manual_seed(7 + dist.get_rank())

    def expected(inputs: Tensor, size: int, n: int) -> float:
        small = torch.autograd.grad(alone(inputs).square().mean(), list(alone.parameters()))
        trace, square = estimates(list(small), [p.grad for p in plain.parameters() if p.grad is not None], size, n)
        return max(trace, 0.0) / square if square > 0 else math.inf

    noise = gradstat.NoiseScale(model, 8, ranks=2, every=1, decay=0.0)  # remembers the last step only
    for _ in range(3):
        inputs = torch.randn(8, 6) + 1
        model(inputs).square().mean().backward()
        noise.micro_batch(tracker.rows())
        noise.step()
        assert noise.value() == pytest.approx(expected(inputs, 8, 2), rel=1e-4)
        assert tracker.result().ok
        model.zero_grad()

    batches = [torch.randn(8, 6) + 1 for _ in range(4)]
    for i, batch in enumerate(batches):
        with contextlib.nullcontext() if i == 3 else model.no_sync():
            (model(batch).square().mean() / 4).backward()
        noise.micro_batch()
    noise.step()
    assert noise.value() == pytest.approx(expected(batches[0], 8, 8), rel=1e-4)


@on_ranks(2)
def test_gradients_of_fsdp2_count_as_a_whole() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    alone = copy.deepcopy(plain)
    model = fully_shard(plain)
    batches = [torch.randn(8, 6) + 1 for _ in range(3)]  # the same on both ranks; each uses one half
    halves = [batch.chunk(2)[dist.get_rank()] for batch in batches]
    sharded, whole = gradstat.NoiseScale(model, 8, every=1), gradstat.NoiseScale(alone, 8, every=1)
    accumulate(sharded, model, [lambda half=half: model(half).square().mean() for half in halves])
    accumulate(whole, alone, [lambda batch=batch: alone(batch).square().mean() for batch in batches])
    assert whole.value() > 0
    assert sharded.by_layer() == pytest.approx(whole.by_layer(), rel=1e-4)
