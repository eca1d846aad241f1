"""`audit_norm`: right norms of random layouts are right, and mistakes that frameworks make are explained."""

import datetime
import functools
import itertools
import math
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.engines import Megatron
from helpers.layouts import LAYOUTS, make_layout_and_reference
from helpers.ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from gradstat.distributed import UnreachableRankError, audit_norm
from gradstat.distributed._sketch import distance, sketches


class Made(NamedTuple):
    """This rank's part of a random model, and the gradients of the whole."""

    named: list[tuple[str, nn.Parameter]]
    whole: dict[str, Tensor]

    @property
    def norm(self) -> float:
        return norm_of(self.whole.values())

    def norm_within(self, part: str) -> float:
        return norm_of(gradient for name, gradient in self.whole.items() if part in name)

    @property
    def own(self) -> float:
        return norm_of(local(parameter.grad) for _, parameter in self.named if parameter.grad is not None)


def norm_of(tensors: Any) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(number: float) -> list[float]:
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return numbers


def random_model(draw: random.Random, experts: int, alike: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Parameters of random sizes with gradients, by name, the same on all ranks."""
    world = dist.get_world_size()
    width, hidden, vocabulary = (world * draw.randint(3, 12) for _ in range(3))
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, width)}
    for i in range(world):
        shapes |= {
            f"blocks.{i}.norm.weight": (width,),
            f"blocks.{i}.up.weight": (hidden, width),
            f"blocks.{i}.up.bias": (hidden,),
            f"blocks.{i}.down.weight": (width, hidden),
            f"blocks.{i}.down.bias": (width,),
            **{f"blocks.{i}.experts.{j}.weight": (width, width) for j in range(experts)},
        }
    shapes["head.weight"] = (vocabulary, width)
    random_numbers = torch.Generator().manual_seed(draw.randrange(1 << 30))
    dtype, first = draw.choice([torch.float32, torch.float32, torch.bfloat16]), torch.empty(0)
    made = {}
    for name, shape in shapes.items():
        parameter = torch.randn(shape, generator=random_numbers) / 8
        if alike and "experts" in name:  # as of a dense model that was made one of experts
            parameter = first = first if first.shape == shape else parameter
        if name.endswith("bias") or "norm" in name:
            parameter = torch.full(shape, float("norm" in name))
        gradient = torch.randn(shape, generator=random_numbers) * 4 ** draw.uniform(-2, 1)
        made[name] = parameter.to(dtype), gradient.to(dtype)
    return made


@functools.lru_cache(maxsize=2)
def mesh_of(_: Any, shape: tuple[int, ...]) -> DeviceMesh:
    """One for all models of a group: torch keeps meshes, and finds their groups by numbers, also in a later group."""
    return init_device_mesh("cpu", shape)


def make(layout: str, seed: int) -> Made:
    draw, rank, world = random.Random(f"{layout} {seed}"), dist.get_rank(), dist.get_world_size()
    wholes = random_model(draw, world * draw.randint(1, 2) if layout.startswith("ep") else 0, layout == "ep alike")
    mesh = mesh_of(dist.group.WORLD, (2, world // 2) if layout == "hsdp" else (world,))
    noise = torch.Generator().manual_seed(rank)
    named: list[tuple[str, nn.Parameter]] = []

    def add(name: str, parameter: Tensor, gradient: Tensor) -> None:
        made = nn.Parameter(parameter.clone() if not isinstance(parameter, DTensor) else parameter)
        made.grad = gradient
        named.append((name, made))

    def spread(tensor: Tensor, *placements: Any) -> DTensor:
        return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)

    for name, (parameter, gradient) in wholes.items():
        rounded = torch.randn(gradient.shape, generator=noise) * torch.finfo(gradient.dtype).eps / 2
        replica = (gradient * (1 + rounded)).to(gradient.dtype)
        cut = 1 if "down.weight" in name else 0 if "up" in name or name == "embed.weight" else None
        stage = int(name.split(".")[1]) * world // world if "blocks" in name else (world - 1) * ("head" in name)
        numbers = [int(number) for number in re.findall(r"experts\.(\d+)", name)]
        if layout == "fsdp2":
            add(name, spread(parameter, Shard(0)), spread(gradient, Shard(0)))
        elif layout == "hsdp":
            add(name, spread(parameter, Replicate(), Shard(0)), spread(gradient, Replicate(), Shard(0)))
        elif layout == "tp" and cut is not None:
            add(name, parameter.chunk(world, cut)[rank], gradient.chunk(world, cut)[rank])
        elif layout == "tp of dtensors" and cut is not None:
            add(name, spread(parameter, Shard(cut)), spread(gradient, Shard(cut)))
        elif layout == "tp of dtensors" and "norm" in name:
            addend = DTensor.from_local(gradient.double() / world, mesh, [Partial()])
            add(name, spread(parameter.double(), Replicate()), addend)
        elif layout.startswith("pp"):
            if stage == rank:
                add(name, parameter, gradient)
            if layout == "pp tied" and name == "embed.weight" and rank == world - 1:
                add("output.weight", parameter, replica)
        elif numbers:
            mine = len({other for other in wholes if other.startswith("blocks.0.experts")}) // world
            if numbers[0] // mine == rank:
                add(name.replace(f"experts.{numbers[0]}", f"experts.{numbers[0] % mine}"), parameter, gradient)
        else:
            add(name, parameter, replica)
    return Made(named, {name: gradient for name, (_, gradient) in wholes.items()})


HEALTHY = ["ddp", "fsdp2", "hsdp", "tp", "tp of dtensors", "pp", "pp tied", "ep", "ep alike"]


def audit_healthy(seeds: range) -> list[str]:
    told = []
    for layout in HEALTHY:
        for seed in seeds:
            made = make(layout, seed)
            audit = audit_norm(made.named, made.norm)
            is_right = audit.agrees and (audit.ok or layout == "ep alike")
            told += [] if is_right else [f"{layout} {seed}: {audit}"]
    return told


@pytest.mark.parametrize("world", [2, 4])
def test_right_norms_of_random_layouts_are_right(ranks: Ranks, world: int) -> None:
    told = ranks.run(world, audit_healthy, range(7))
    assert told == [[]] * world


def audited(name: str) -> bool:
    layout, single = make_layout_and_reference(name)
    norm = norm_of(parameter.grad for parameter in single.parameters() if parameter.grad is not None)
    return audit_norm(layout.named_parameters().items(), norm).ok


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_right_norms_of_models_in_the_layouts_of_trainers_are_right(ranks: Ranks, name: str, world: int) -> None:
    assert ranks.run(world, audited, name) == [True] * world


# Mistakes ------------------------------------------------------------------------------------------------------------


def without(made: Made, part: str, factor: float = 0.0) -> float:
    """The norm if the squared norm of a part is multiplied by ``factor``."""
    return math.sqrt(made.norm**2 + (factor - 1) * made.norm_within(part) ** 2)


def unreduced(made: Made) -> float:
    random_numbers = torch.Generator().manual_seed(dist.get_rank())
    for _, parameter in made.named:
        addend = torch.randn(parameter.shape, generator=random_numbers)
        parameter.grad = parameter.grad * 0.3 + addend.to(parameter.dtype)
    return made.own


def ranks_() -> int:
    return dist.get_world_size()


def root(number: float) -> float:
    return math.sqrt(number)


_OWN = "each rank reports the norm of its own tensors"
# What a framework does: the layout, the norm that it reports, and the beginning of the explanation.
MISTAKES: dict[str, tuple[str, Callable[[Made], float], str]] = {
    "not added up over shards": ("fsdp2", lambda m: m.own, _OWN),
    "not added up over stages": ("pp", lambda m: m.own, _OWN),
    "not added up over tensor parallel ranks": ("tp", lambda m: m.own, _OWN),
    "not added up over experts": ("ep", lambda m: m.own, _OWN),
    "counted on each replica": ("ddp", lambda m: m.norm * root(ranks_()), r"everything counted \d times"),
    "root of the number of shards": ("fsdp2", lambda m: m.norm / root(ranks_()), "everything divided by the square"),
    "summed, not averaged": ("fsdp2", lambda m: m.norm * ranks_(), r"everything multiplied by \d, the number of ranks"),
    "averaged twice": ("ddp", lambda m: m.norm / ranks_(), r"everything divided by \d, the number of ranks"),
    "micro-batches": ("fsdp2", lambda m: m.norm * 11, "everything is multiplied by 11"),
    "loss scale": ("tp", lambda m: m.norm * 65536, "everything is multiplied by 65536, as by a loss scale"),
    "replicas counted on each rank": (
        "tp", lambda m: root(sum(own**2 for own in gathered(m.own))), "every tensor is counted|replicated tensors",
    ),
    "experts left out": ("ep", lambda m: without(m, "experts"), "(part|blocks).* left out"),
    "experts averaged": ("ep", lambda m: without(m, "experts", ranks_() ** -2), "(part|blocks).* divided by"),
    "experts counted on each rank": ("ep", lambda m: without(m, "experts", ranks_()), "(part|blocks).* counted"),
    "experts multiplied": ("ep", lambda m: without(m, "experts", ranks_() ** 2), "(part|blocks).* multiplied"),
    "tied embedding counted twice": (
        "pp tied", lambda m: without(m, "embed", 2), "tied tensors .* counted 2|every tensor is counted",
    ),
    "norm layers left out": ("fsdp2", lambda m: without(m, "norm"), r"blocks.\*.norm .* left out"),
    "embedding left out": ("hsdp", lambda m: without(m, "embed"), r"embed .*left out"),
    "shards left out": ("tp of dtensors", lambda m: without_shards(m), r"sharded tensors .* left out"),
    "head divided": ("ddp", lambda m: without(m, "head", ranks_() ** -2), r"head .* divided by"),
    "largest of ranks": ("fsdp2", lambda m: max(gathered(m.own)), "the largest of the ranks' own norms"),
    "mean of ranks": ("pp", lambda m: sum(gathered(m.own)) / ranks_(), "the mean of the ranks' own norms"),
    "sum of ranks": ("fsdp2", lambda m: sum(gathered(m.own)), "the sum of the ranks' own norms"),
    "order infinity": (
        "fsdp2", lambda m: max(g.abs().max().item() for g in m.whole.values()), "the largest magnitude of all elements",
    ),
    "order 1 of norms": ("ddp", lambda m: sum(norm_of([g]) for g in m.whole.values()), "the sum of the tensors'"),
    "no root": ("fsdp2", lambda m: m.norm**2, "the square of the norm"),
    "not reduced yet": ("ddp", unreduced, "each rank reports the norm of its own gradients, which are not"),
    "experts left out, all divided": (
        "ep", lambda m: without(m, "experts") / ranks_(), r"(part|blocks).* left out; and everything divided",
    ),
}  # fmt: skip


def without_shards(made: Made) -> float:
    shards = (g for name, g in made.whole.items() if "up" in name or "down.weight" in name or name == "embed.weight")
    return math.sqrt(made.norm**2 - norm_of(shards) ** 2)


def audit_mistakes(seed: int) -> list[tuple[str, bool, str]]:
    told = []
    for what, (layout, reported, expected) in MISTAKES.items():
        seeds = itertools.count(seed)
        for _ in range(3):
            made, number = next(pair for at in seeds if matters(*(pair := with_mistake(layout, reported, at))))
            audit = audit_norm(made.named, torch.tensor(number, dtype=torch.float64))
            first = audit.explanations[0] if audit.explanations else None
            if first is not None:
                assert math.isclose(first.predicted[dist.get_rank()], number, rel_tol=audit.tolerance)
            is_found = not audit.agrees and first is not None and re.match(expected, first.text) is not None
            is_certain = len(audit.explanations) == 1
            assert is_found or not is_certain, f"{what}\n{audit}"
            told.append((what, is_found, str(audit)))
    return told


def with_mistake(layout: str, reported: Callable[[Made], float], seed: int) -> tuple[Made, float]:
    made = make(layout, seed)
    return made, reported(made)


def matters(made: Made, number: float) -> bool:
    """Whether a mistake changes the norm by more than rounding, as that of a tiny part does not."""
    return all(abs(each / made.norm - 1) > 0.01 for each in gathered(number))


@pytest.mark.parametrize("world", [2, 4])
def test_mistakes_of_frameworks_are_explained(ranks: Ranks, world: int) -> None:
    told, *others = ranks.run(world, audit_mistakes, 20)
    assert [other == told for other in others] == [True] * (world - 1)
    missed = [f"{what}\n{audit}" for what, is_found, audit in told if not is_found]
    assert len(missed) <= 0.05 * len(told), "\n\n".join(missed)
    assert {what for what, is_found, _ in told if is_found} == MISTAKES.keys()


# What looks wrong, and what cannot be audited ------------------------------------------------------------------------


@on_ranks(2)
def test_an_all_reduce_that_is_missing_is_told_though_the_norm_agrees() -> None:
    """That of norm layers under sequence parallelism, as the first rank counts them."""
    made, random_numbers = make("tp", 3), torch.Generator().manual_seed(dist.get_rank())
    for name, parameter in made.named:
        if "norm" in name:
            made.whole[name] = parameter.grad = torch.randn(parameter.shape, generator=random_numbers)
    norm, _ = gathered(made.norm)
    audit = audit_norm(made.named, norm)
    assert audit.agrees, audit
    assert not audit.ok
    (told,) = audit.suspicions
    assert told.startswith("2 gradients of the same parameters differ between ranks 0, 1 (blocks.0.norm.weight, blocks")


@on_ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_clip_after_the_norm_was_taken_explains_it(layout: str) -> None:
    """Neither a norm that is right nor one that is too small is explained by it."""
    made = make(layout, 3)
    limit = float(f"{made.norm / 3:.1g}")
    assert torch.nn.utils.clip_grad_norm_([parameter for _, parameter in made.named], limit) > limit
    audit = audit_norm(made.named, made.norm)
    assert audit.explanations[-1].text.startswith(f"the gradients were clipped to {limit:g} after this norm was taken")
    assert audit_norm(made.named, limit).agrees
    assert not any("clipped" in one.text for one in audit_norm(made.named, limit / 2).explanations)


@on_ranks(4)
def test_a_rank_with_other_tensors_than_the_rest_is_told() -> None:
    made = make("ddp", 3)
    named = made.named[:-1] if dist.get_rank() == 2 else made.named
    assert audit_norm(named, made.norm).suspicions == ("rank 2 does not have 1 gradient, head.weight",)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    audit = audit_norm(made.named, made.norm, group=halves[dist.get_rank() // 2])
    assert audit.ok
    assert audit.ranks == ((0, 1), (2, 3))[dist.get_rank() // 2]


@on_ranks(2)
def test_what_is_not_finite_is_named_and_nothing_explained() -> None:
    made = make("fsdp2", 4)
    if dist.get_rank() == 1:
        local(made.named[2][1].grad)[0, 0] = math.nan
    audit = audit_norm(made.named, 1.0)
    assert "1 NaN in blocks.0.up.weight on rank 1, the first that is not finite" in str(audit)
    assert (audit.agrees, audit.explanations, math.isnan(audit.whole)) == (False, (), True)
    assert audit_norm(made.named, math.nan).agrees
    assert "gradstat.check before it" not in str(audit)
    for _, parameter in made.named:
        local(parameter.grad).fill_(math.nan)
    assert "as after a clip with a NaN norm: call gradstat.check before it" in " ".join(
        str(audit_norm(made.named, 1.0)).split()
    )


NOTHING = "no explanation found. "


@on_ranks(2)
def test_no_mistake_is_made_up() -> None:
    made = make("tp", 5)
    for factor, words in ((1.2345, "a clip by 0.81 after that norm would explain it"), (0.9, NOTHING), (0, NOTHING)):
        audit = audit_norm(made.named, made.norm * factor)
        assert audit.explanations == ()
        assert words in str(audit)
        assert len(str(audit).splitlines()) <= 15


@on_ranks(2)
def test_a_rank_that_cannot_be_audited_is_an_error_on_all_ranks() -> None:
    is_first = dist.get_rank() == 0
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    for bad, told in ((nn.Parameter(torch.ones(2, device="meta")), "holds no data"), (1.0, "param")):
        if isinstance(bad, nn.Parameter):
            bad.grad = torch.ones(2, device="meta")
        target = [parameter] if is_first else [bad]
        expected = f"rank 1 could not measure the gradients: TypeError: .*{told}" if is_first else told
        with pytest.raises((TypeError, RuntimeError), match=expected):
            audit_norm(target, 1.0)
    with pytest.raises(TypeError):
        audit_norm([parameter], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no rank has a gradient"):
        audit_norm([nn.Parameter(torch.ones(3))], 1.0)
    before = parameter.grad.clone()
    norm = DTensor.from_local(torch.tensor(1.5), init_device_mesh("cpu", (2,)), [Partial()])
    assert audit_norm([parameter], norm).reported == (3.0, 3.0)
    assert torch.equal(before, parameter.grad)
    dist.barrier()
    if is_first:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), dist.group.WORLD)
        with pytest.raises(UnreachableRankError, match="audit_norm: not all of ranks 0, 1 took part"):
            audit_norm([parameter], 1.0)


@on_ranks(2)
def test_shards_of_an_engine_are_added_up() -> None:
    gradient = torch.randn(10, generator=torch.Generator().manual_seed(1))
    engine = Megatron(gradient)
    assert audit_norm(engine, gradient.norm()).ok
    own = gradient.chunk(2)[dist.get_rank()].norm()
    assert audit_norm(engine, own).explanations[0].text.startswith(_OWN)


@pytest.mark.parametrize("count", [1, 5, 4096, 4097, 40_000, 9_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_the_distance_of_sketches_is_that_of_tensors(count: int, dtype: torch.dtype) -> None:
    if count > 1_000_000 and dtype is not torch.bfloat16:
        count = 70_001
    one, other = torch.randn(2, count, dtype=dtype)
    scale = 1e300 if dtype is torch.float64 else 1.0
    made = sketches([one * scale, (one + 0.001 * other) * scale, other * scale, one * scale])
    assert distance(made[0], made[3]) == 0.0
    # Of 16 projections the root mean square is within these factors of the norm but for one case in 10,000.
    assert 0.4 < np.linalg.norm(made[0] / scale) / 4 / one.abs().double().norm().item() < 1.7 or count < 5
    near = (one - (one + 0.001 * other)).norm().item() / one.norm().item()
    assert distance(made[0], made[1]) < 3 * near + 1e-12
    if count > 5:
        assert 0.5 < distance(made[0], made[2]) < 2.5
        assert distance(*sketches([one, one.flip(0)])) > 0.3  # the order matters
