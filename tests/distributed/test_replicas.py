"""Replicas are compared bit for bit on all ranks; differing tensors are named, with the ranks that differ."""

import dataclasses
import datetime
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.devices import parameter_with
from helpers.ranks import Ranks, collectives_of, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradstat
from gradstat import distributed
from gradstat.distributed import Drift, ReplicaReport, track_origin, verify_batches, verify_replicas
from gradstat.distributed._checksum import checksums, combined, of_text

CPU = torch.device("cpu")
MANY = 1 << 16  # elements, in several of the rows that a checksum is made of


def checksum(tensor: Tensor) -> int:
    return int(checksums([tensor], CPU).item())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float8_e4m3fn", "complex64", "int64", "uint8"])
@pytest.mark.parametrize("count", [1, 3, 1001, 40_000])
def test_every_single_bit_counts(dtype: str, count: int) -> None:
    of_dtype = getattr(torch, dtype)
    raw = torch.randint(0, 256, (count * of_dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(of_dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    for byte in {0, len(raw) // 2, len(raw) - 1}:
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert checksum(tensor) != before
            raw[byte] ^= 1 << bit
    assert checksum(tensor) == before


def of_bits(bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def test_different_bits_have_different_checksums() -> None:
    many = torch.arange(float(MANY))
    for one, other in (
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])),
        (torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.tensor([-1.0, 1.0, 1.0, -1.0])),
        (torch.ones(MANY), -torch.ones(MANY)),
        (many, many.roll(MANY // 4)),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (of_bits(0x7FC00000), of_bits(0x7FC00001)),
        (of_bits(0x7FA00000), of_bits(0x7FE00000)),  # signalling and quiet
    ):
        assert checksum(one) != checksum(other), (one, other)


def sparse(indices: list[int], values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor([indices], values, (9,), check_invariants=True)


def test_memory_does_not_count_only_elements_do() -> None:
    tensor = torch.randn(6, 7, 2, 3)
    expected = checksum(tensor)
    assert checksum(tensor.contiguous(memory_format=torch.channels_last)) == expected
    assert checksum(torch.cat([torch.zeros(1), tensor.view(-1)])[1:].view(6, 7, 2, 3)) == expected
    halves = torch.randn(8).bfloat16()
    assert checksum(torch.cat([halves[:1], halves])[1:]) == checksum(halves)
    bytes_ = torch.arange(9, dtype=torch.uint8)
    for start in range(4):
        for end in range(start, 10):
            assert checksum(bytes_[start:end]) == checksum(bytes_[start:end].clone())
    z = torch.randn(5, dtype=torch.complex64)
    assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)
    assert checksum(sparse([1, 4], [2.0, 3.0])) == checksum(sparse([4, 1], [3.0, 2.0]))
    assert len({checksum(sparse(i, v)) for i, v in (([1], [2.0]), ([2], [2.0]), ([1], [3.0]))}) == 3


def test_checksums_are_the_same_in_every_process() -> None:
    """Ranks may differ in machine and versions of Python, numpy and torch."""
    assert checksum(torch.arange(10_000, dtype=torch.int32)) == -3636065560721893542
    assert combined(torch.arange(5)).item() == -5596814131616125429
    assert combined(torch.arange(30_000)).item() == 8127786782923658567
    assert of_text("weight") == -8872040418398604730


def test_checksums_are_in_the_order_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if tensors are on several devices, where those of a device are processed together; also for no tensors."""
    assert checksums([], CPU).shape == (0,)
    tensors = [torch.randn(3), torch.randn(5), torch.randn(7), torch.randn(9)]
    expected = checksums(tensors, CPU)
    for groups in ({"a": [3, 1], "b": [0, 2]}, {"a": [1], "b": [3, 0], "c": [2]}):
        monkeypatch.setattr("gradstat.distributed._checksum.by_device", lambda _, groups=groups: groups)
        assert torch.equal(checksums(tensors, CPU), expected)


def trained() -> tuple[Any, torch.optim.Optimizer]:
    """A trained model, the same on every rank, as the pool gives all ranks the same seed."""
    model = nn.Sequential(OrderedDict(first=nn.Linear(8, 16), norm=nn.BatchNorm1d(16), last=nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def flip(tensor: Tensor, bit: int = 0) -> None:
    tensor.detach().view(-1).view(torch.int32)[0] ^= 1 << bit


EVERYTHING = ("gradients", "parameters", "buffers")


# For each tensor, by name: its kind, and a function that returns it.
CHANGED: dict[str, tuple[str, Callable[[Any, torch.optim.Optimizer], Tensor]]] = {
    "last.weight": ("gradient", lambda model, _: model.last.weight.grad),
    "first.weight": ("parameter", lambda model, _: model.first.weight),
    "norm.running_var": ("buffer", lambda model, _: model.norm.running_var),
    "first.bias.exp_avg_sq": ("state", lambda model, optimizer: optimizer.state[model.first.bias]["exp_avg_sq"]),
}


def expect_drift(culprit: int, name: str, ranks: tuple[int, ...], how: str) -> None:
    model, optimizer = trained()
    if dist.get_rank() == culprit:
        flip(CHANGED[name][1](model, optimizer))
    report, state = verify_replicas(model, what=EVERYTHING), verify_replicas(optimizer, what=("state",))
    assert report.compared + state.compared >= 32
    assert report.drifted + state.drifted == (Drift(name, CHANGED[name][0], ranks, how),)


@pytest.mark.parametrize("name", CHANGED)
def test_a_rank_that_drifted_is_named_and_of_two_ranks_both(ranks: Ranks, name: str) -> None:
    ranks.run(4, expect_drift, 2, name, (2,), "bits on rank 2 differ from those on the other 3")
    ranks.run(2, expect_drift, 1, name, (0, 1), "bits differ between ranks 0, 1, with no majority")


@on_ranks(4)
def test_what_a_rank_lacks_is_named_on_every_rank_and_nobody_waits() -> None:
    model, _ = trained()
    if dist.get_rank() == 1:
        model.first.bias.grad = None
        model.last.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        model.last.bias.grad = torch.zeros(2, dtype=torch.float64)
    if dist.get_rank() == 0:
        flip(model.last.weight.grad)
    expected = (
        Drift("first.bias", "gradient", (1,), "missing on rank 1"),
        Drift("last.bias", "gradient", (1,), "shape, dtype or placement differs: float64[2] on rank 1"),
        Drift("last.weight", "gradient", (0,), "bits on rank 0 differ from those on the other 3"),
    )
    report = verify_replicas(model)
    assert report == ReplicaReport(expected, compared=6, ranks=(0, 1, 2, 3))
    assert not report.ok
    with pytest.raises(distributed.ReplicaMismatchError) as raised:
        report.raise_if_drifted()
    lines = ["3 tensors DRIFTED between 4 ranks, of 6 compared:"]
    assert str(raised.value).splitlines() == lines + [f"  gradient {drift.name}: {drift.how}" for drift in expected]
    assert str(report) == f"gradstat: {raised.value}"
    assert pickle.loads(pickle.dumps(raised.value)).report == report


@on_ranks(2)
def test_whatever_has_a_gradient_somewhere_is_compared_and_nothing_else() -> None:
    """A list that is longer on one rank; gradients that no rank has; the gradient of a frozen parameter that drifts."""
    rank = dist.get_rank()
    reports = [verify_replicas(nn.ParameterList([torch.ones(3)] * (3 - rank)), what="parameters")]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    reports.append(verify_replicas([nn.Parameter(torch.ones(2)), frozen]))
    frozen.grad = torch.ones(2)
    reports.append(verify_replicas(target=frozen))
    frozen.grad[rank] = 2.0
    longer, nowhere, agreeing, drifting = [*reports, verify_replicas(frozen)]
    assert longer.drifted == (Drift("2", "parameter", (1,), "missing on rank 1"),)
    assert nowhere == ReplicaReport((), compared=0, ranks=(0, 1))
    assert agreeing == ReplicaReport((), compared=1, ranks=(0, 1))
    assert drifting.compared == len(drifting.drifted) == 1


@on_ranks(2)
def test_agreement_is_told_and_costs_one_small_reduction() -> None:
    """The collectives of a comparison that agrees, of one that differs, and of one with a missing gradient."""
    model, optimizer = trained()
    reports = verify_replicas(model, what=EVERYTHING), verify_replicas(optimizer, what=("state",))
    told = [f"gradstat: {count} tensors, bit-identical on all replicas (2 ranks)" for count in (15, 18)]
    assert list(map(str, reports)) == told
    healthy = collectives_of(lambda: verify_replicas(model, what=EVERYTHING))
    if dist.get_rank() == 0:
        flip(model.first.weight)
    drifted = collectives_of(lambda: verify_replicas(model, what=EVERYTHING))
    model.last.bias.grad = None
    one = "all_reduce of 32 bytes"
    assert healthy == collectives_of(lambda: verify_replicas(model)) == [one]
    assert drifted == [one, "all_gather_object"]


@on_ranks(4)
def test_only_the_ranks_of_the_group_are_compared() -> None:
    model, _ = trained()
    is_second = dist.get_rank() >= 2
    if is_second:
        flip(model.first.weight)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    beyond = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)), [Replicate()])
    with pytest.raises(ValueError, match=r"rank \d is not in the group"):
        verify_replicas(model, group=halves[not is_second])
    with pytest.raises(ValueError, match="has replicas on ranks 0, 1, 2, 3, not all of which take part"):
        verify_replicas(nn.Parameter(beyond), what="parameters", group=halves[is_second])
    assert verify_replicas(model, what="parameters", group=halves[is_second]).ok
    assert not verify_replicas(model, what="parameters").ok


def unusual_layouts() -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of these are in beta, or deprecated
        return [
            torch.eye(3).to_sparse_csr(),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        ]


def with_buffer(tensor: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("held", tensor)
    return module


@on_ranks(1)
def test_one_rank_has_no_replicas_and_bad_arguments_get_a_sentence() -> None:
    model, optimizer = trained()
    assert str(verify_replicas(model)) == "gradstat: nothing to compare: no tensor is replicated"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    twice = [("a", model.last.bias), ("a", model.last.bias)]
    for target, options, error, match in (
        (model, {"what": ("grads",)}, ValueError, "cannot compare grads; known: gradients, parameters, buffers, state"),
        (model, {"what": ()}, ValueError, "cannot compare nothing"),
        (optimizer, {"what": ("buffers",)}, TypeError, r"buffers: expected a torch\.nn\.Module, got AdamW"),
        (model, {"what": ("state",)}, TypeError, r"state: expected a torch\.optim\.Optimizer, got Sequential"),
        (nn.Linear(2, 2, device="meta"), {"what": "parameters"}, TypeError, "'(bias|weight)' is on the meta device"),
        (twice, {}, ValueError, "two tensors are named 'a'"),
        *(
            (with_buffer(tensor), {"what": "buffers"}, TypeError, "has a layout that cannot be compared")
            for tensor in unusual_layouts()
        ),
        (model, {"group": dist.group.WORLD, "mesh": mesh}, ValueError, "a group or a mesh, not both"),
    ):
        with pytest.raises(error, match=match):
            verify_replicas(target, **options)  # type: ignore[arg-type]
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"is not initialized; call torch\.distributed\.init_process_group"):
        verify_replicas(model)


# Placements on a mesh of 2 x 2, and the ranks that a change on rank 3, which is at (1, 1), sets apart.
PLACEMENTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "shard and replicate": ((Shard(0), Replicate()), (2, 3)),
    "replicate and shard": ((Replicate(), Shard(1)), (1, 3)),
    "replicate": ((Replicate(), Replicate()), (3,)),
    "shard": ((Shard(0), Shard(1)), ()),
}


@pytest.mark.parametrize("name", PLACEMENTS)
@on_ranks(4)
def test_shards_are_compared_only_where_they_are_replicated(name: str) -> None:
    """Every rank reports what differs, including those whose own shards are not affected."""
    placements, apart = PLACEMENTS[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parameter = parameter_with(distribute_tensor(torch.randn(4, 6), mesh, placements))
    report = verify_replicas(parameter)
    assert (report.drifted, report.compared) == ((), bool(apart))
    if dist.get_rank() == 3:
        flip(parameter.grad.to_local())
    assert [drift.ranks for drift in verify_replicas(parameter).drifted] == [apart] * bool(apart)


@on_ranks(4)
def test_plain_tensors_are_compared_over_the_mesh_given_and_distributed_ones_over_their_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    parameter = nn.Parameter(torch.full((3,), float(mesh.get_local_rank("stages"))))
    assert verify_replicas(parameter, what="parameters", mesh=mesh["replicas"]).ok
    (drift,) = verify_replicas(parameter, what="parameters", mesh=mesh).drifted
    assert drift.ranks == (0, 1, 2, 3)
    tensor = distribute_tensor(torch.ones(4), mesh["stages"], [Replicate()])
    on_one = nn.Parameter(tensor if mesh.get_local_rank("stages") else tensor.to_local())
    (drift,) = verify_replicas(on_one, what="parameters", mesh=mesh["stages"]).drifted
    first, second = mesh["stages"].mesh.tolist()
    assert drift.ranks == (first, second)
    placed = f"float32[4] as (Replicate(),) over ('stages',)(2,) on rank {second}"
    assert drift.how == f"shape, dtype or placement differs: float32[4] on rank {first}; {placed}"


@on_ranks(3)
def test_a_rank_outside_of_a_mesh_takes_part() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    agreeing = verify_replicas(nn.Parameter(tensor), what="parameters")
    assert agreeing == ReplicaReport((), compared=1, ranks=(0, 1, 2))
    if dist.get_rank() == 1:
        flip(tensor.to_local())
    (drift,) = verify_replicas(nn.Parameter(tensor), what="parameters").drifted
    assert drift.ranks == (0, 1)


def seen(batches: list[int]) -> str:
    number = batches[dist.get_rank()]
    batch = {"x": torch.full((2, 3), float(number)), "y": [torch.zeros(2), (torch.ones(1), "id")], "n": None}
    report = verify_batches(batch)
    assert report.ok == (len(set(batches)) == len(batches))
    if report.ok:
        report.raise_if_repeated()
    return str(report)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([0, 1, 2, 3], "different batches on all 4 ranks"),
        ([0, 1, 0, 3], "the SAME BATCH on ranks 0, 2 (of 4 ranks)"),
        ([5, 7, 7, 5], "the SAME BATCH on ranks 0, 3; the SAME BATCH on ranks 1, 2 (of 4 ranks)"),
        ([1, 1], "the SAME BATCH on ranks 0, 1 (of 2 ranks)"),
    ],
)
def test_ranks_with_the_same_batch_are_named(ranks: Ranks, batches: list[int], expected: str) -> None:
    advice = "" if expected.startswith("different") else ". Does the sampler know its rank and the number of ranks?"
    assert ranks.run(len(batches), seen, batches) == [f"gradstat: {expected}{advice}"] * len(batches)


@dataclasses.dataclass
class Sample:
    x: Tensor
    label: int


@on_ranks(2)
def test_shape_dtype_structure_and_order_make_a_batch_different() -> None:
    rank = dist.get_rank()
    x = torch.zeros(4)
    pairs: list[tuple[Any, Any]] = [
        (x, x.view(2, 2)),
        (x, x.double()),
        ([x], {"x": x}),
        ({"a": x}, {"b": x}),
        ([x, torch.ones(4)], [torch.ones(4), x]),
        ([x, "a"], [x, "b"]),
        (Sample(x, 0), Sample(x, 1)),
        (Sample(x, 0), {"x": x, "label": 0}),
    ]
    with pytest.raises(TypeError, match=r"batch\['a'\]\[1\] is of type object; expected tensors in mappings"):
        verify_batches({"a": [torch.ones(1), object()]})
    for tensor in (*unusual_layouts(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError, match=r"batch\['a'\]. (has a layout that cannot be|is on the meta device)"):
            verify_batches({"a": tensor})
    for pair in pairs:
        assert verify_batches(pair[rank]).ok


@on_ranks(2)
def test_a_rank_that_is_not_there_is_an_error_and_no_hang() -> None:
    parameter = parameter_with(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    model = DistributedDataParallel(nn.Linear(2, 2))
    tracker = track_origin(model)
    model(torch.ones(1, 2)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        return
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), dist.group.WORLD)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("verify_replicas", lambda: verify_replicas(nn.Linear(2, 2), what="parameters")),
        ("gradstat", lambda: gradstat.check([parameter])),
        ("gradstat", lambda: gradstat.clip_grad_norm_([parameter], 1.0)),
        ("OriginTracker.result", tracker.result),
    ]
    for caller, call in calls:
        with pytest.raises(distributed.UnreachableRankError) as raised:
            call()
        assert str(raised.value).startswith(f"{caller}: not all of ranks 0, 1 took part, as seen from rank 0")
        assert f"all of them have to call {caller} the same number of times. The backend said: " in str(raised.value)
    assert issubclass(distributed.UnreachableRankError, RuntimeError)
