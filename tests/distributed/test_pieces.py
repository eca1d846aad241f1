"""Flattened tensors that are split over ranks at any element: their rows are those of the whole tensors."""

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.ranks_of_frameworks import assert_same_stats
from torch import Tensor

import gradstat
from gradstat._core.engines import FlatShard
from gradstat._core.measure import measure
from gradstat._core.measurement import HostRows
from gradstat.report import Report


def _wholes(seed: int) -> dict[str, Tensor]:
    made, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    wholes = {}
    for i in range(12):
        shape = [chance.randint(0 if i == 0 else 1, 9) for _ in range(chance.randint(0, 3))]
        dtype = chance.choice([torch.float32, torch.bfloat16, torch.float64])
        whole = torch.randn(shape, generator=made).to(dtype)
        for value in chance.choices((math.nan, math.inf, 0.0), k=chance.randint(0, 2)):
            if whole.numel():
                whole.view(-1)[chance.randrange(whole.numel())] = value
        wholes[f"p{i}"] = whole
    return wholes


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
    wholes = _wholes(seed)
    group = dist.group.WORLD
    if split:  # two groups of two ranks, each with its own tensors
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[dist.get_rank() // 2]
        wholes = {name: whole * (1 + dist.get_rank() // 2) for name, whole in wholes.items()}
    expected = gradstat.check_tensors(wholes)
    total = sum(whole.numel() for whole in wholes.values())
    for partition in (1, total // 3, total // 2 + 1, total, 2 * total):
        pieces = _pieces(wholes, partition, group)
        measured = measure(pieces, lambda i: str(i), None, parameters=list(wholes.values()))
        rows = HostRows(measured)
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


def _a_rank_that_cannot() -> str:
    whole = torch.arange(10.0)
    half = whole[5 * dist.get_rank() :][:5]
    local = half.to(torch.int64) if dist.get_rank() == 1 else half
    piece: Any = FlatShard(whole, whole.shape, local, 5 * dist.get_rank(), dist.group.WORLD)  # type: ignore[arg-type]
    try:
        HostRows(measure([piece], lambda i: "p", None)).total()
    except (TypeError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_measure_its_piece_is_told_of(ranks: Ranks) -> None:
    healthy, broken = ranks.run(2, _a_rank_that_cannot)
    assert "1 other rank failed to measure" in healthy
    assert "'p' (dtype torch.int64" in broken
