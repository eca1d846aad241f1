"""Which rank brought NaN or Inf, from gradients measured before DDP's all-reduce spreads them."""

import contextlib
import gc
import math
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import collectives_of, on_ranks
from helpers.ranks_of_frameworks import assert_alike
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import gradstat
from gradstat.distributed import OriginReport, track_origin


class Net(nn.Module):
    """Two layers, a third that may stay unused, and a way to make gradients bad."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)
        self.reentrant = False

    def forward(self, x: Tensor, use_spare: bool = True) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=True) if self.reentrant else self.first(x)
        out: Tensor = self.last(hidden)
        return out + self.spare(hidden) if use_spare else out


def wrapped(**options: Any) -> DistributedDataParallel:
    # Small buckets, so that there are several, which DDP rebuilds after the first iteration.
    return DistributedDataParallel(Net(), bucket_cap_mb=0.0001, **options)


def spoiled_if(bad: bool, bias: nn.Parameter) -> RemovableHandle:
    """Makes one of the two elements of a bias' gradient NaN from now on."""
    return bias.register_hook(torch.tensor([1.0, math.nan if bad else 1.0]).mul)


def backward(model: DistributedDataParallel, bad: bool, use_spare: bool = True) -> None:
    """In a bad micro-batch one element of last.bias' gradient is NaN, and nothing else."""
    handle = spoiled_if(bad, model.module.last.bias)
    model(torch.randn(3, 4, requires_grad=True), use_spare).square().mean().backward()
    handle.remove()


def told(report: OriginReport, name: str) -> tuple[int | None, int, int | None]:
    return report.rank_of(name), report.nonfinite_ranks(name), report.micro_batch_of(name)


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "static_graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
}
HOOKS = {"none": None, "allreduce": allreduce_hook, "fp16": fp16_compress_hook}


@pytest.mark.parametrize(
    ("mode", "hook", "per_micro_batch"),
    [
        *((mode, "none", number % 2 == 0) for number, mode in enumerate(MODES)),
        ("plain", "allreduce", False),
        ("bucket views", "allreduce", True),
        ("static_graph", "fp16", True),
        ("find_unused_parameters", "fp16", False),
    ],
)
@on_ranks(2)
def test_the_rank_is_named_in_every_mode(mode: str, hook: str, per_micro_batch: bool) -> None:
    """Four steps, of which rank 1 spoils the first (before buckets are rebuilt) and the third."""
    model = wrapped(**MODES[mode])
    state = None if hook == "none" else dist.group.WORLD
    tracker = track_origin(model, HOOKS[hook], state, per_micro_batch=per_micro_batch)
    for step in range(4):
        is_bad = step % 2 == 0
        backward(model, bad=dist.get_rank() == 1 and is_bad, use_spare=mode != "find_unused_parameters")
        report = tracker.result()
        assert report.nonfinite == (("last.bias",) if is_bad else ())
        assert told(report, "last.bias") == ((1, 1, 0) if is_bad else (None, 0, None))
        assert report.ok is gradstat.check(model).ok is not is_bad, "the reduction spreads what is bad"
        model.zero_grad()
    tracker.remove()


@on_ranks(4)
def test_ranks_are_global_numbers_and_gradients_are_averaged_as_without_a_tracker() -> None:
    """That is, over the model's group, not over all ranks, which would spread the NaN."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    plain = wrapped(process_group=groups[dist.get_rank() % 2])
    model = wrapped(process_group=groups[dist.get_rank() % 2])
    model.module.load_state_dict(plain.module.state_dict())
    tracker = track_origin(model)
    for bad in (False, dist.get_rank() == 3):
        for each in (plain, model):
            torch.manual_seed(dist.get_rank())
            backward(each, bad)
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(p.grad.nan_to_num(7.0), w.grad.nan_to_num(7.0)) for p, w in pairs)
    report = tracker.result()
    even, odd = ((0, 2), (None, 0, None), True), ((1, 3), (3, 1, 1), False)
    found = (report.ranks, told(report, "last.bias"), gradstat.check(model).ok)
    assert found == (odd if dist.get_rank() % 2 else even)


@on_ranks(2)
def test_sparse_gradients() -> None:
    model = DistributedDataParallel(nn.Embedding(6, 3, sparse=True))
    tracker = track_origin(model)
    out = model(torch.tensor([1, 4]))
    (out * (float("inf") if dist.get_rank() == 0 else 1.0)).sum().backward()
    assert told(tracker.result(), "weight") == (0, 1, 0)


@on_ranks(2)
def test_a_hook_is_called_with_its_state() -> None:
    state: list[int] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    model = wrapped()
    tracker = track_origin(ddp_model=model, hook=hook, state=state)
    for again in ({}, {"hook": hook, "state": state}):  # DDP keeps its hook forever, so it need not be passed again
        tracker.remove()
        tracker = track_origin(model, **again)  # type: ignore[arg-type]
    backward(model, bad=dist.get_rank() == 1)
    assert state
    assert told(tracker.result(), "last.bias") == (1, 1, 0)


@pytest.mark.parametrize(
    ("mode", "bad", "expected"),
    [
        ("plain", {1: [1]}, (1, 1, 1)),
        ("plain", {0: [1], 1: [0]}, (1, 1, 0)),
        ("plain", {2: [0, 1]}, (0, 2, 2)),
        ("static_graph", {0: [1], 1: [0]}, (1, 1, 0)),
        ("bucket views", {1: [1]}, (1, 1, 1)),
        ("reentrant", {2: [0, 1]}, (0, 2, 2)),
        ("not told apart", {0: [1]}, (1, 1, 0)),
    ],
)
@on_ranks(2)
def test_the_first_micro_batch_is_named(mode: str, bad: dict[int, list[int]], expected: Any) -> None:
    """Steps of three micro-batches, reduced in the last; ``bad`` says which ranks spoil which micro-batch.

    In some modes a forward pass without a backward pass follows; it must not count as a micro-batch.
    """
    options, is_told_apart = MODES.get(mode, {}), mode != "not told apart"
    model = wrapped(**options)
    model.module.reentrant = mode == "reentrant"
    tracker = track_origin(model, per_micro_batch=is_told_apart)
    if mode == "static_graph":  # then torch cannot do without a reduction in its first backward()
        backward(model, bad=False)
        tracker.result()
        model.zero_grad()
    for step in range(2):
        for number in range(3):
            with contextlib.nullcontext() if number == 2 else model.no_sync():
                backward(model, bad=step == 1 and dist.get_rank() in bad.get(number, []))
                if number < 2 and not options:
                    model(torch.randn(3, 4))
        report = tracker.result()
        assert report.micro_batches == (3 if is_told_apart else 1)
        assert told(report, "last.bias") == (expected if step else (None, 0, None))
        model.zero_grad()


@pytest.mark.parametrize(("inside", "per_micro_batch"), [(False, True), (True, False)])
@on_ranks(2)
def test_compiled_models(inside: bool, per_micro_batch: bool) -> None:
    """Two micro-batches, the first not reduced and bad on rank 1; compiled is the module inside DDP or DDP itself."""
    if inside:
        model = DistributedDataParallel(torch.compile(Net(), backend="eager"))
        called, last = model, model.module._orig_mod.last
    else:
        model = DistributedDataParallel(Net())
        called, last = torch.compile(model, backend="eager"), model.module.last
    tracker = track_origin(called, per_micro_batch=per_micro_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r"`torch\.jit\.script", DeprecationWarning)
        for number in range(2):
            handle = spoiled_if(number == 0 and dist.get_rank() == 1, last.bias)
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                called(torch.randn(3, 4)).square().mean().backward()
            handle.remove()
    report = tracker.result()
    name = "_orig_mod.last.bias" if inside else "last.bias"
    assert report.nonfinite == (name,)
    assert told(report, name) == (1, 1, 0)


@on_ranks(2)
def test_every_reduction_is_a_micro_batch() -> None:
    """After the second one the gradient is bad on both ranks; its origin stays known."""
    model = wrapped()
    tracker = track_origin(model)
    for number in range(3):
        backward(model, bad=number == 1 and dist.get_rank() == 1)
    report = tracker.result()
    text = (
        "gradstat: NaN or Inf in 1 of 6 gradients before they were reduced\n"
        "caused by rank 1 alone (of 2) in micro-batch 1 of 3 (counted from 0): 1 gradient\n"
        "  last.bias: 1 NaN of 2 elements"
    )
    assert told(report, "last.bias") == (1, 1, 1)
    assert str(report) == text


ALL = "ALL {} ranks (so not by one rank's data: parameters, learning rate or loss scale?)"


@pytest.mark.parametrize(
    ("bad", "who"),
    [([], ""), ([1], "rank 1 alone (of 4)"), ([1, 3], "ranks 1, 3 (of 4)"), ([0, 1, 2, 3], ALL.format(4))],
)
@on_ranks(4)
def test_the_error_names_rank_and_parameter_on_every_rank(bad: list[int], who: str) -> None:
    model = wrapped()
    tracker = track_origin(model)
    x = torch.randn(3, 4) * (float("inf") if dist.get_rank() in bad else 1.0)
    model(x).sum().backward()
    report = tracker.result()
    assert [report.rank_of(name) for name in report.nonfinite] == bad[:1] * len(report.nonfinite)
    with pytest.raises(KeyError, match="no parameter named 'nobody' is reduced by this model"):
        report.rank_of("nobody")
    assert_alike(str(report))
    if not bad:
        report.raise_if_nonfinite()
        assert str(report) == "gradstat: 6 gradients, finite on all 4 ranks before the reduction"
        assert repr(report) == "OriginReport(6 gradients of 4 ranks, ok)"
        return
    with pytest.raises(gradstat.NonFiniteGradientError) as raised:
        report.raise_if_nonfinite()
    _, brought, *lines = str(raised.value).splitlines()
    assert str(report) == f"gradstat: {raised.value}"
    assert brought == f"caused by {who}: 3 gradients"
    where = f" on rank {bad[0]}" if len(bad) > 1 else ""
    for line, (name, numel) in zip(lines, (("first", 32), ("last", 16), ("spare", 16)), strict=True):
        assert re.fullmatch(rf"  {name}\.weight: .* of {numel} elements{where}", line)
    assert repr(report) == "OriginReport(6 gradients of 4 ranks, 3 not finite)"


@on_ranks(2)
def test_ddp_takes_one_hook_for_life() -> None:
    hooked = wrapped()
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match=r"has a communication hook.*pass it to track_origin\(ddp_model, hook, st"):
        track_origin(hooked)
    backward(hooked, bad=False)  # and it still works

    model = wrapped()
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        track_origin(model, fp16_compress_hook, backend="fast")
    tracker = track_origin(model, per_micro_batch=True)
    with pytest.raises(RuntimeError, match="already tracked; call remove"):
        track_origin(model)
    tracker.remove()
    backward(model, bad=True)
    with pytest.raises(RuntimeError, match=r"on some rank no gradient was reduced since the last result\(\)"):
        tracker.result()
    with pytest.raises(RuntimeError, match="never drops a communication hook"):
        track_origin(model, fp16_compress_hook)
    model.zero_grad()
    again = track_origin(model)
    tracker.remove()  # a second call, which must not end the new tracking
    backward(model, bad=True)
    again.reset()  # drops an abandoned step
    model.zero_grad()
    backward(model, bad=dist.get_rank() == 1)
    assert told(again.result(), "last.bias") == (1, 1, 0)

    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got Net"):
        track_origin(Net())  # type: ignore[arg-type]


@on_ranks(2)
def test_finite_gradients_cost_one_reduction() -> None:
    model = wrapped()
    tracker = track_origin(model, fp16_compress_hook)
    seen = []
    for bad in (False, True):
        backward(model, bad=bad)
        seen.append(collectives_of(tracker.result))
    assert seen == [["all_reduce of 56 bytes"], ["all_reduce of 56 bytes", "all_gather"]]


@on_ranks(2)
def test_a_model_is_not_kept_alive_by_its_tracker() -> None:
    model = wrapped()
    tracker = track_origin(model, per_micro_batch=True)
    backward(model, bad=False)
    alive = weakref.ref(model.module.first.weight)
    del model, tracker
    gc.collect()
    assert alive() is None
