"""Gradients over several ranks: every layout against one process with the same model and data."""

import gc
import math
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.devices import parameter_with, parameters_with
from helpers.engines import Megatron
from helpers.layouts import (
    LAYOUTS,
    Layout,
    assert_clips_as_one_process,
    backward,
    batch,
    make_layout,
    make_layout_and_reference,
    model,
)
from helpers.ranks import Ranks, on_ranks
from helpers.ranks_of_frameworks import assert_same_stats
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

import gradstat
from gradstat._core import sharded
from gradstat._core.engines import FlatShard
from gradstat._core.host_copy import HostRows
from gradstat._core.measure import Spread, measure
from gradstat.report import Report


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_report(spread: gradstat.Report, single: gradstat.Report) -> None:
    assert [name.removeprefix("module.") for name in spread.names] == list(single.names)
    assert spread.total_norm == pytest.approx(single.total_norm, rel=1e-6)
    for ours, theirs in zip(spread, single, strict=True):
        assert_same_stats(ours, theirs, rel=1e-5, abs=1e-6)


def measured(name: str) -> float:
    layout, single = make_layout_and_reference(name)
    spread = layout.model
    if name == "sp":
        gradients = [p.grad for p in spread.parameters() if isinstance(p.grad, DTensor)]
        assert any(g.placements[0].is_partial() for g in gradients), "this layout is to have partial gradients"
    expected = gradstat.check(single)
    same_report(gradstat.check(spread), expected)
    pending = gradstat.check_async(spread.parameters())
    assert pending.result().total_norm == pytest.approx(expected.total_norm, rel=1e-5)
    for order in (2.0, math.inf):
        norm = gradstat.get_total_norm([p.grad for p in spread.parameters()], order)  # type: ignore[misc]
        assert type(norm) is Tensor
        of_one = nn.utils.get_total_norm([p.grad for p in single.parameters()], order)  # type: ignore[misc]
        torch.testing.assert_close(norm.double(), of_one, rtol=1e-6, atol=0)
    return norm.item()


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        *((layout, 4) for layout in ("ddp", "fsdp2", "hsdp", "tp", "sp", "fsdp2+tp", "ep+fsdp2")),
        *((layout, 2) for layout in ("fsdp2", "sp")),
    ],
)
def test_checks_are_those_of_the_whole(ranks: Ranks, layout: str, world: int) -> None:
    assert len(set(ranks.run(world, measured, layout))) == 1


def clip(layout: Layout, parameters: list[nn.Parameter], max_norm: float, order: float) -> Tensor:
    return gradstat.clip_grad_norm_(parameters, max_norm, order, extra_groups=layout.extra_groups)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_clips_are_those_of_one_process(layout: str) -> None:
    assert_clips_as_one_process(layout, clip)


# The ranks, of four, that hold the bad part of the first weight, in layouts that shard it.
HOLDS_THE_BAD_PART: dict[str, Callable[[int], bool]] = {
    "fsdp2": lambda rank: rank == 1,
    "hsdp": lambda rank: rank % 2 == 1,
    "fsdp2+tp": lambda rank: rank >= 2,
}


# torch's fused steps do not take a mix of plain and distributed tensors, which this tensor-parallel model has.
@pytest.mark.parametrize(
    ("layout", "fused", "scaling"),
    [
        ("fsdp2", True, True),
        ("fsdp2", False, False),
        ("hsdp", False, True),
        ("fsdp2+tp", True, False),
        ("ddp", True, True),
        ("tp", False, True),
    ],
)
@on_ranks(4)
def test_guarded_steps_are_taken_and_skipped_by_all_ranks_alike(layout: str, fused: bool, scaling: bool) -> None:
    (spread_out, batches), single = make_layout(layout), model()
    spread = spread_out.model
    ours = torch.optim.AdamW(spread.parameters(), lr=0.01, fused=fused)
    theirs = torch.optim.AdamW(single.parameters(), lr=0.01)
    scaler = gradstat.amp.GradScaler("cpu", init_scale=1024.0) if scaling else None
    for step in range(4):
        ours.zero_grad()
        theirs.zero_grad()
        loss = spread(batch(batches[dist.get_rank()]) + step).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        backward(single, set(batches), shift=step)
        if step == 2 and HOLDS_THE_BAD_PART.get(layout, lambda rank: True)(dist.get_rank()):
            gradient = spread_out.named_parameters()["first.weight"].grad
            local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            local.view(-1)[2] = math.nan  # type: ignore[union-attr]
        result = gradstat.guarded_step(ours, 0.1, scaler=scaler)
        if scaler is not None:
            scaler.update()
            assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)
        assert bool(result.skipped) is (step == 2)
        report = result.report.result()
        assert report.ok is (step != 2)
        if step != 2:
            norm = nn.utils.clip_grad_norm_(single.parameters(), 0.1)
            assert result.total_norm.item() == pytest.approx(norm.item(), rel=1e-5)
            assert report.total_norm == pytest.approx(norm.item(), rel=1e-5)
            theirs.step()
        for name, parameter in single.named_parameters():
            ours_now = whole(spread_out.named_parameters()[name].detach())
            torch.testing.assert_close(ours_now, parameter.detach(), rtol=1e-4, atol=1e-5)


def drawn_tensor(draw: random.Random, most: int) -> Tensor:
    """Of random shape and dtype, sometimes with special values."""
    tensor = torch.randn([draw.randint(1, most) for _ in range(draw.randint(0, 3))])
    for value in draw.choices((math.nan, math.inf, 0.0), k=draw.choice((0, 0, 0, 1, 2))):
        tensor.view(-1)[draw.randrange(tensor.numel())] = value
    return tensor.to(draw.choice([torch.float32, torch.bfloat16, torch.float64]))


def random_layouts(seed: int) -> None:
    """Tensors with random placements on a 2x2 mesh and its submeshes, and plain ones, against the full tensors."""
    draw = random.Random(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(seed)
    wholes, spreads = [], []
    for _ in range(draw.randint(1, 7)):
        tensor = drawn_tensor(draw, 5)
        wholes.append(tensor)
        on = draw.choice([mesh, mesh["a"], mesh["b"], None])
        if on is None:
            spreads.append(tensor.clone())
            continue
        placements = [draw.choice([Replicate(), *map(Shard, range(tensor.dim()))]) for _ in range(on.ndim)]
        made = distribute_tensor(tensor, on, placements)
        if draw.random() < 0.3 and Replicate() in placements:  # a pending sum in place of a replica
            dim = placements.index(Replicate())
            placements[dim] = Partial()
            local = made._local_tensor if on.get_local_rank(dim) == 0 else torch.zeros_like(made._local_tensor)
            made = DTensor.from_local(local.clone(), on, placements, shape=tensor.shape, stride=tensor.stride())
        spreads.append(made)
    ours = gradstat.stats(spreads)
    theirs = gradstat.stats(wholes)
    column = {name: i for i, name in enumerate(gradstat.FIELDS)}
    for name in ("nan_count", "inf_count", "zero_count", "min", "max"):
        assert torch.equal(ours[:, column[name]], theirs[:, column[name]]), (seed, name)
    torch.testing.assert_close(ours[:, column["sq_sum"]], theirs[:, column["sq_sum"]], rtol=1e-6, atol=0)
    parameters = parameters_with(spreads)
    report, expected = gradstat.check(parameters), gradstat.check_tensors(wholes)
    assert report.total_norm == pytest.approx(expected.total_norm, rel=1e-6, nan_ok=True)
    for bad, whole_bad in zip(report.nonfinite, expected.nonfinite, strict=True):
        index = bad.first_nonfinite
        assert index is not None
        # The first bad element of the lowest rank need not be the first of the whole tensor.
        assert not wholes[int(bad.name.removeprefix("param"))][index].isfinite()
        assert bad.nonfinite_count == whole_bad.nonfinite_count
    if report.ok:
        norm = gradstat.clip_grad_norm_(parameters, 0.5)
        assert norm.item() == pytest.approx(expected.total_norm, rel=1e-2)
        assert gradstat.check(parameters).total_norm == pytest.approx(min(0.5, expected.total_norm), rel=2e-2)


@on_ranks(4)
def test_random_placements() -> None:
    for seed in range(24):
        random_layouts(seed)


@on_ranks(4)
def test_a_report_names_rank_and_index() -> None:
    mesh = init_device_mesh("cpu", (4,))
    parameter = parameter_with(distribute_tensor(torch.ones(10, 3), mesh, [Shard(0)]))
    if dist.get_rank() in (1, 3):
        parameter.grad._local_tensor[0, 2] = math.nan  # type: ignore[attr-defined]
    report = gradstat.check([("w", parameter)])
    stats = report["w"]
    assert (stats.rank, stats.nonfinite_ranks, report.rank_of("w")) == (1, 2, 1)
    assert stats.first_nonfinite == (3, 2), "rank 1 begins at row 3"
    assert stats.to_dict()["rank"] == 1
    assert report.to_numpy()["first_nonfinite"].tolist() == [2]
    message = r"w: 2 NaN of 30 elements, first at \[3, 2\] on rank 1 \(of 2"
    with pytest.raises(gradstat.NonFiniteGradientError, match=message):
        report.raise_if_nonfinite()
    again = pickle.loads(pickle.dumps(report))
    assert again["w"].first_nonfinite == (3, 2)
    assert "[3, 2] rank 1" in str(again)


def clipped_by_torch() -> list[Tensor]:
    """A distributed gradient after torch's functions, and the norms that they return, which are distributed, too."""
    utils, found = nn.utils, []
    for clip in (
        lambda p: utils.clip_grad_norm_([p], 1.0),
        lambda p: utils.clip_grads_with_norm_([p], 0.5, utils.get_total_norm([p.grad])),
        lambda p: utils.clip_grad_norm_([p], 1.0, norm_type=3),  # passed on to torch by gradstat
        lambda p: utils.clip_grads_with_norm_([p], 0.5, utils.get_total_norm([p.grad], 1.5)),
    ):
        parameter = sharded_ones(4)
        norm = clip(parameter)  # type: ignore[no-untyped-call]
        if norm is not None:
            assert isinstance(norm, DTensor)
            found.append(norm.full_tensor())
        found.append(whole(parameter.grad))  # type: ignore[arg-type]
    return found


@on_ranks(2)
def test_the_patch_gives_norms_as_torch_does() -> None:
    expected = clipped_by_torch()
    with gradstat.patch_torch():
        for ours, theirs in zip(clipped_by_torch(), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@on_ranks(4)
def test_stages_of_a_pipeline_have_one_norm() -> None:
    """Two stages of two replicas each; norm and decisions are over all stages, whatever each holds."""
    layout, single = make_layout_and_reference("pp")
    stages = layout.pp_mesh
    parameters = list(layout.model.parameters())
    expected = pytest.approx(gradstat.check(single).total_norm)
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert gradstat.get_total_norm(gradients, extra_groups=stages).item() == expected
    for groups in (stages, [stages.get_group()], [(stages, parameters)]):
        assert gradstat.check(parameters, extra_groups=groups).total_norm == expected
    assert len(gradstat.check(parameters, extra_groups=stages)) == len(parameters)
    if stages.get_local_rank() == 1:
        gradients[0].view(-1)[3] = math.inf
    report = gradstat.check(parameters, extra_groups=stages)
    assert not report.ok
    assert report.inf_count == 1
    if stages.get_local_rank() == 0:
        assert report.nonfinite == []
        with pytest.raises(gradstat.NonFiniteGradientError, match="all of them on other ranks"):
            report.raise_if_nonfinite()
    before = [parameter.detach().clone() for parameter in parameters]
    assert gradstat.guarded_step(torch.optim.SGD(parameters, lr=1.0), 1.0, extra_groups=stages).skipped
    for fused in (True, False):  # the scalers of all stages find the overflow
        scaler = gradstat.amp.GradScaler("cpu", init_scale=8.0)
        scaler.extra_groups = stages.get_group()
        scaler.scale(torch.ones(()))
        scaler.step(torch.optim.SGD(parameters, lr=1.0, fused=fused))
        scaler.update()
        assert scaler.get_scale() == 4.0
    assert all(map(torch.equal, parameters, before))


class CopiesOfNumbers(TorchFunctionMode):
    """Notes operations that copy Python numbers to the device of a tensor, for which a GPU would have to be waited."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_index = function in (Tensor.__getitem__, Tensor.__setitem__)
        index = args[1] if is_index and isinstance(args[1], tuple) else args[1:2]
        if function is torch.tensor or (is_index and any(isinstance(item, Sequence) for item in index)):
            self.noted.append((function, args))
        return function(*args, **(kwargs or {}))


@on_ranks(2)
def test_merging_rows_copies_no_numbers_to_the_device() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    placements: list[Any] = [Shard(0), Shard(0), Replicate(), Shard(0)]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement])) for placement in placements]
    for parameter in parameters[1:]:
        parameter.grad = parameter.detach() * 3

    def merge() -> None:
        gradstat.check_async(parameters)
        gradstat.clip_grad_norm_(parameters, math.inf, math.inf)
        gradstat.clip_grad_norm_(parameters, math.inf, extra_groups=[(mesh["a"], parameters[2:])])

    merge()  # the first call may
    with CopiesOfNumbers() as copies:
        merge()
    assert not copies.noted


def sharded_ones(count: int) -> nn.Parameter:
    """A parameter over two ranks whose gradient is all ones."""
    mesh = init_device_mesh("cpu", (2,))
    return parameter_with(distribute_tensor(torch.ones(count), mesh, [Shard(0)]))


@on_ranks(2)
def test_groups_that_are_none_are_refused_before_anyone_waits() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    parameter = parameter_with(torch.ones(2))
    with pytest.raises(ValueError, match=r"a mesh of 2 dimensions; pass one of them, mesh\['name'\]"):
        gradstat.check([parameter], extra_groups=mesh)
    with pytest.raises(TypeError, match="extra_groups has str; expected a process group"):
        gradstat.clip_grad_norm_([parameter], 1.0, extra_groups=["world"])  # type: ignore[list-item]
    for given, groups in ((parameter, mesh["a"]), (sharded_ones(4), None)):
        with pytest.raises(NotImplementedError, match="norms of order 2 and inf only, not 3"):
            gradstat.clip_grad_norm_([given], 1.0, 3.0, extra_groups=groups)


@on_ranks(2)
def test_clips_by_tensor_refuse_distributed_gradients_wherever_they_clip() -> None:
    """Refused both by the clip itself and by steps that use it, before anything changes."""
    parameter = sharded_ones(4)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = gradstat.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for clip in (gradstat.AdaGC(), gradstat.AGC()):
        for call in (
            lambda clip=clip: clip.clip_([parameter]),
            lambda clip=clip: gradstat.guarded_step(optimizer, clip),
            lambda clip=clip: scaler.unscale_and_clip_(optimizer, clip),
        ):
            with pytest.raises(NotImplementedError, match="is a distributed tensor, whose norm needs a reduction"):
                call()
        assert clip.summary().steps == 0
    with pytest.raises(NotImplementedError, match=r"use gradstat\.clip_grad_norm_, or gradstat\.guarded_step with"):
        gradstat.ZClip().clip_([parameter])
    assert (parameter.grad.to_local() == 1).all()  # type: ignore[union-attr]
    with pytest.raises(KeyError):
        gradstat.step_counters(optimizer)
    assert gradstat.guarded_step(optimizer, gradstat.ZClip()).total_norm == 2.0


@on_ranks(2)
def test_accumulation_without_reductions() -> None:
    """FSDP2 has no gradients before the micro-batch that reduces them; then it has all."""
    spread: Any = make_layout("fsdp2")[0].model
    micro_batches = gradstat.MicroBatches(spread)
    spread.set_requires_gradient_sync(False)
    spread(batch(dist.get_rank())).square().mean().backward()
    micro_batches.check()
    report = gradstat.check(spread)
    assert len(report) == 0
    assert len(report.missing) == len(list(spread.parameters()))
    spread.set_requires_gradient_sync(True)
    spread(batch(dist.get_rank() + 7)).square().mean().backward()
    micro_batches.check()
    single = model()
    for numbers in (range(dist.get_world_size()), range(7, 7 + dist.get_world_size())):
        backward(single, numbers)
    same_report(gradstat.check(spread), gradstat.check(single))
    assert micro_batches.result().final.total_norm == pytest.approx(gradstat.check(single).total_norm, rel=1e-5)


@on_ranks(2)
def test_the_older_fsdp() -> None:
    """Its shards are plain tensors that do not know their process group, so the group has to be passed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is deprecated
        spread = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
        spread(batch(dist.get_rank())).square().mean().backward()
    single = model()
    backward(single, range(dist.get_world_size()))
    expected = gradstat.check(single).total_norm
    group = spread.process_group
    assert gradstat.check(spread, extra_groups=group).total_norm == pytest.approx(expected, rel=1e-5)
    norm = gradstat.clip_grad_norm_(spread.parameters(), 0.5 * expected, extra_groups=group).item()
    assert norm == pytest.approx(expected, rel=1e-5)
    assert gradstat.check(spread, extra_groups=group).total_norm == pytest.approx(0.5 * expected, rel=1e-4)


@on_ranks(2)
def test_the_infinity_norm_of_complex_shards_is_the_largest_modulus() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    whole = torch.tensor([1j, 2, 3 + 4j])
    parameter = parameter_with(distribute_tensor(whole, mesh, [Shard(0)]))
    assert gradstat.get_total_norm([parameter.grad], math.inf).item() == 5.0
    assert gradstat.clip_grad_norm_([parameter], 1.0, math.inf).item() == 5.0
    torch.testing.assert_close(parameter.grad.full_tensor(), whole / 5)  # type: ignore[attr-defined]
    mine = whole[dist.get_rank() :].expand(2, -1) if dist.get_rank() else whole
    assert gradstat.get_total_norm([mine], math.inf, extra_groups=mesh["a"]).item() == 5.0
    # A gradient that cannot be written is refused before any is clipped, although its moduli could be measured.
    plain = parameter_with(mine)
    if dist.get_rank():
        with pytest.raises(RuntimeError, match="is expanded"):
            gradstat.clip_grad_norm_([plain], 1.0, math.inf, extra_groups=mesh["a"])
    else:
        assert gradstat.clip_grad_norm_([plain], 1.0, math.inf, extra_groups=mesh["a"]).isnan()


@on_ranks(2)
def test_strided_shards() -> None:
    """Shards that are views with gaps are read through a copy, and scaled in place."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    mine = whole.chunk(dist.get_world_size())[dist.get_rank()]
    memory = torch.full((*mine.shape, 2), 77.0, dtype=torch.float64)
    shard = memory[..., 0].copy_(mine)
    parameter = parameter_with(DTensor.from_local(shard, mesh, [Shard(0)]))
    norm = gradstat.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(norm, whole.norm())
    assert norm.dtype == gradstat.clip_grad_norm_([parameter], math.inf).dtype
    torch.testing.assert_close(shard, mine / whole.norm())
    assert (memory[..., 1] == 77.0).all()


@on_ranks(2)
def test_shardings_are_forgotten_with_their_mesh() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    gradstat.stats([distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)])
    cache = sharded._caches[id(mesh)]
    assert cache.shardings
    assert cache.plans
    key = id(mesh)
    del mesh
    gc.collect()
    assert key not in sharded._caches


def _pieces(wholes: dict[str, Tensor], partition: int, group: Any) -> list[Any]:
    """A rank's pieces of concatenated tensors that are split into partitions of equal size, the last one longer."""
    begin, last = partition * dist.get_rank(group), dist.get_rank(group) == dist.get_world_size(group) - 1
    pieces, at = [], 0
    for whole in wholes.values():
        end = math.inf if last else begin + partition
        low, high = (min(max(edge - at, 0), whole.numel()) for edge in (begin, end))
        pieces.append(FlatShard(whole, whole.shape, whole.reshape(-1)[int(low) : int(high)], int(low), group))
        at += whole.numel()
    return pieces


def _reports(seed: int, split: bool) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    draw, group = random.Random(seed), dist.group.WORLD
    wholes = {"empty": torch.zeros(0, 3), **{f"p{i}": drawn_tensor(draw, 9) for i in range(11)}}
    if split:  # two groups of two ranks, each with its own tensors
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
        wholes = {name: whole * (1 + dist.get_rank() // 2) for name, whole in wholes.items()}
    expected = gradstat.check_tensors(wholes)
    total = sum(whole.numel() for whole in wholes.values())
    for partition in (1, total // 3, total // 2 + 1, total, 2 * total):
        pieces = _pieces(wholes, partition, group)
        rows = HostRows(measure(pieces, str, None, Spread(list(wholes.values()))))
        found = Report(lambda: list(wholes), rows.table(), rows.infos, total=rows.total())
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert_same_stats(ours, theirs, rel=1e-7, abs=1e-6)
        if not split:
            assert found.finite_norm == pytest.approx(expected.finite_norm, rel=1e-7)
        assert found.nan_count == expected.nan_count
    return [expected.to_dict()]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("world", "split"), [(3, False), (4, True)])
def test_pieces_have_the_rows_of_the_whole(ranks: Ranks, world: int, split: bool, seed: int) -> None:
    results = ranks.run(world, _reports, seed, split)
    assert (results[0] == results[-1]) is not split


@on_ranks(2)
def test_a_rank_that_cannot_measure_its_piece_is_told_of() -> None:
    whole = torch.arange(10.0)
    half = whole[5 * dist.get_rank() :][:5]
    local = half.to(torch.int64) if dist.get_rank() == 1 else half
    piece: Any = FlatShard(whole, whole.shape, local, 5 * dist.get_rank(), dist.group.WORLD)  # type: ignore[arg-type]
    told = r"'p' \(dtype torch.int64" if dist.get_rank() == 1 else "1 other rank failed to measure"
    with pytest.raises((TypeError, RuntimeError), match=told):
        HostRows(measure([piece], lambda i: "p", None)).total()


@on_ranks(2)
def test_a_monitor_of_pieces() -> None:
    monitor = gradstat.Monitor(Megatron(torch.tensor([1.0, 2.0, 3.0, math.nan])), on_anomaly="record")
    monitor.step()
    (found,) = monitor.findings
    assert (found.rule, found.step) == ("nonfinite-gradient", 0)
    assert "weight has 1 NaN in 4 elements, the first at [0, 3]" in found.text
