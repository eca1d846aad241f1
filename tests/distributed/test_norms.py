"""`verify_clip`: correct clips pass, and copies of bugs that were released are reported."""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

import gradstat
from gradstat.__main__ import main
from gradstat.distributed import norms, verify_clip
from gradstat.distributed._ranks import Ranks
from gradstat.distributed.layouts import LAYOUTS, Layout

Parameters = list[nn.Parameter]


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(norms.WORLD) as ranks:
        yield ranks


@pytest.fixture
def _pooled(pool: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "Ranks", lambda *_, **__: contextlib.nullcontext(pool))


def local(parameters: Parameters) -> list[Tensor]:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [g._local_tensor if isinstance(g, DTensor) else g for g in gradients]


def scaled(parameters: Parameters, norm: Tensor, max_norm: float) -> Tensor:
    for gradient in local(parameters):
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def square(parameters: Parameters) -> Tensor:
    return torch.stack([g.square().sum() for g in local(parameters)]).sum()


def of_local_shards(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    """pytorch#170862 as reported."""
    return scaled(parameters, square(parameters).sqrt(), max_norm)


def never_scaling(parameters: Parameters, max_norm: float, norm_type: float, extra_groups: Any) -> Tensor:
    """transformers#46113: returns the norm for logging, but leaves the gradients unchanged."""
    return gradstat.clip_grad_norm_(parameters, math.inf, norm_type, extra_groups=extra_groups)


def without_other_experts(parameters: Parameters, max_norm: float, norm_type: float, layout: Layout) -> Tensor:
    """Megatron-LM#5916: counts the experts on the first rank of a group only."""
    group = layout.mesh.get_group("ep")
    total = square(parameters)
    dist.broadcast(total, dist.get_global_rank(group, 0), group)
    return scaled(parameters, total.sqrt(), max_norm)


def averaged(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    """The norm is too small by the square root of the number of ranks."""
    total = square(parameters)
    dist.all_reduce(total)
    return scaled(parameters, (total / dist.get_world_size()).sqrt(), max_norm)


def logged_partial(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    """Clips correctly, but returns a norm whose sum over ranks is pending."""
    norm = square(parameters)
    gradstat.clip_grad_norm_(parameters, max_norm)
    made: Tensor = DTensor.from_local(norm.sqrt(), parameters[0].device_mesh, [Partial()])  # type: ignore[attr-defined]
    return made


def of_all_ranks(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    """VeOmni#184: sums over replicas as if they were shards."""
    total = square(parameters)
    dist.all_reduce(total)
    return scaled(parameters, total.sqrt(), max_norm)


def of_stages(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    """torchtitan#596: like torch's clip, which does not know about pipeline stages."""
    return gradstat.clip_grad_norm_(parameters, max_norm, norm_type)


def without_experts(parameters: Parameters, max_norm: float, norm_type: float, layout: Layout) -> Tensor:
    norm = gradstat.clip_grad_norm_(parameters, math.inf, norm_type, extra_groups=layout.extra_groups)
    dense = [p for name, p in layout.named_parameters().items() if "experts" not in name]
    return scaled(dense, norm, max_norm)


def pending_sums_taken_apart(parameters: Parameters, max_norm: float, norm_type: float, layout: Layout) -> Tensor:
    """Like clips that use the parameter's placements instead of its gradient's."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    whole = [g.full_tensor() if isinstance(g, DTensor) and not g.placements[0].is_partial() else g for g in gradients]
    total = [(g._local_tensor if isinstance(g, DTensor) else g).square().sum() for g in whole]
    return scaled(parameters, torch.stack(total).sum().sqrt(), max_norm)


def clipping_values(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    norm = gradstat.clip_grad_norm_(parameters, math.inf)
    for gradient in local(parameters):
        gradient.clamp_(-1e-3, 1e-3)
    return norm


def twice(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    norm = gradstat.clip_grad_norm_(parameters, max_norm)
    return scaled(parameters, norm, max_norm)


def each_by_its_rank(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    norm = gradstat.clip_grad_norm_(parameters, math.inf)
    scaled(parameters, norm * (1 + dist.get_rank()), max_norm)
    return norm


def waiting(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    """If a gradient is missing, a rank with an empty shard returns before the others' collective."""
    gradients = local(parameters)
    if len(gradients) < len(parameters) and any(g.numel() == 0 for g in gradients):
        return torch.zeros(())
    return gradstat.clip_grad_norm_(parameters, max_norm, norm_type)


def dying(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    if dist.get_rank() == 1 and len(local(parameters)) < len(parameters):
        os._exit(3)
    return gradstat.clip_grad_norm_(parameters, max_norm, norm_type)


def raising(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    if dist.get_rank() == 2:
        raise ValueError("two\nlines")
    return gradstat.clip_grad_norm_(parameters, max_norm)


def hiding_nan(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    return of_all_ranks(parameters, max_norm, norm_type).nan_to_num(1.0)


def making_nan(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    norm = gradstat.clip_grad_norm_(parameters, math.inf)
    scaled(parameters, norm * math.nan, max_norm)
    return norm


def dropping(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    norm = gradstat.clip_grad_norm_(parameters, math.inf)
    for parameter in parameters:
        parameter.grad = None
    return norm


def uneven(parameters: Parameters, max_norm: float, norm_type: float) -> Tensor:
    return gradstat.clip_grad_norm_(parameters, math.inf) * (9.0 if dist.get_rank() else 12.0)


@pytest.mark.parametrize(
    ("clip", "layout", "cells", "problem"),
    [
        (of_local_shards, "fsdp2", ("x0", "x", "x"), "norm of its own shards"),
        (of_local_shards, "zero-3", ("x0", "x", "x"), "the norm is finite on ranks 1, 2, 3, which would take the step"),
        (never_scaling, "pp+fsdp2", ("ok", "x2 (2/4)", "x2 (2/4)"), "computed, but gradients are never scaled"),
        (
            without_other_experts,
            "ep",
            ("x0", "x1.", "x1."),
            "norm of rank 0: shards or experts of the others",
        ),
        (averaged, "fsdp2", ("x0.5 (3/4)", "x", "x"), "too small by the root of 4: averaged"),
        (logged_partial, "fsdp2", ("x0", "ok", "ok"), r"norm of its own shards.*full_tensor\(\)"),
        (of_all_ranks, "hsdp", ("x1.414 (3/4)", "x0.7", "x0.7"), "replicas are counted once per rank"),
        (of_stages, "pp+fsdp2", ("x0", "x", "x"), "are pipeline stages left out"),
        (without_experts, "ep", ("ok", "ok", "experts.weight (2/4)"), "experts.weight scaled differently on"),
        (pending_sums_taken_apart, "sp", ("x", "x", "x"), r"pending sums \(Partial placements\)"),
        (clipping_values, "fsdp2", ("ok", "x", "x"), r"blocks.*gradients scaled differently on"),
        (twice, "ddp", ("ok", "x0.5 (2/4)", "x0.5 (2/4)"), r"not multiplied by min\(1, max_norm / \(norm \+ 1e-6\)\)"),
        (each_by_its_rank, "ddp", ("ok", "x0.5 to 1 (3/4)", "x0.5 to 1 (3/4)"), "ranks multiply by different factors"),
        (making_nan, "ddp", ("ok", "xnan (3/4)", "xnan (3/4)"), "gradients became NaN, or were removed"),
        (dropping, "ddp", ("ok", "xnan (3/4)", "xnan (3/4)"), "gradients became NaN, or were removed"),
        (uneven, "ddp", ("x9 to 12 (3/4)", "x2", "x2"), "are pipeline stages left out"),
        (waiting, "fsdp2", ("hangs (1/4)", "hangs (1/4)", "hangs (1/4)"), "ranks 0, 1, 2: made no progress for 3 s"),
        (dying, "fsdp2", ("dies (1/4)", "dies (1/4)", "dies (1/4)"), "rank 1: died with exit status 3"),
        (raising, "ddp", ("raises", "raises", "raises"), "rank 2: ValueError: two "),
        (hiding_nan, "fsdp2", ("no NaN (1/4)", "ok", "ok"), "the norm is finite on ranks 0, 1, 2, 3"),
    ],
)
@pytest.mark.usefixtures("_pooled")
def test_copies_of_bugs_are_named(
    clip: Callable[..., Tensor], layout: str, cells: tuple[str, str, str], problem: str
) -> None:
    report = verify_clip(clip, layouts=[layout], orders=[2.0], limit=3.0 if clip is waiting else 60.0)
    (result,) = report.results
    for cell, expected in zip((result.norm, result.scaling, result.gradients), cells, strict=True):
        assert cell.startswith(expected), result
    assert any(re.search(problem, told) for told in result.problems), result.problems
    assert not report.ok
    with pytest.raises(AssertionError, match=rf"(?s)layout.*{re.escape(layout)}.*in 0 of 1 layouts"):
        report.raise_if_wrong()


@pytest.mark.usefixtures("_pooled")
def test_gradstats_own_clip_is_as_in_one_process() -> None:
    results: list[norms.LayoutResult] = []
    report = verify_clip(gradstat.clip_grad_norm_, orders=[2.0, math.inf], on_result=results.append)
    report.raise_if_wrong()
    assert [result.layout for result in results] == list(LAYOUTS)


@pytest.mark.usefixtures("_pooled")
def test_torchs_own_clip_is_where_it_should_be() -> None:
    verify_clip(nn.utils.clip_grad_norm_, layouts=["ddp", "hsdp"], orders=[2.0, 1.0]).raise_if_wrong()
    known = nn.utils.clip_grad_norm_
    with gradstat.auto(torch.optim.SGD([nn.Parameter(torch.zeros(2))])):  # it patches torch's clip
        assert verify_clip(known, layouts=[]).ok
        report = verify_clip(nn.utils.clip_grad_norm_, layouts=["pp", "fsdp2+tp"], orders=[2.0])
    with gradstat.patch_torch(), pytest.raises(TypeError, match="cannot import clip"):  # not on the ranks
        verify_clip(nn.utils.clip_grad_norm_)
    pp, mixed = report.results
    assert pp.norm.startswith("x0.")
    assert "norm of its own shards" in pp.problems[0]
    assert mixed.norm == "raises"


def test_the_command(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_trainer.py").write_text(
        "import gradstat\n"
        "def clip(parameters, max_norm, norm_type, layout, **others):\n"
        "    assert layout.name in ('ddp', 'pp') and not others\n"
        "    groups = None if layout.name == 'pp' else layout.extra_groups\n"
        "    return gradstat.clip_grad_norm_(layout.model.parameters(), max_norm, norm_type, extra_groups=groups)\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["norms", "my_trainer:clip", "--layouts", "ddp", "pp", "--orders", "2"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["layout", "norm", "scaling", "gradients"]
    assert lines[1].split() == ["ddp", "ok", "ok", "ok"]
    assert lines[2].split()[0] == "pp"
    assert lines[-1] == "my_trainer:clip: matches a single process in 1 of 2 layouts"
    assert main(["norms", "my_trainer:clip", "--layouts", "ddp", "--orders", "inf", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["ok"] is True
    assert answer["verdicts"][0]["problems"] == []
    for wrong, told in {
        "my_trainer": "expected MODULE:FUNCTION, such as torch.nn.utils:clip_grad_norm_",
        "my_trainer:none": "my_trainer has no none",
        "my_trainer:number": "number is a int, not a function",
        "nowhere:clip": "no module 'nowhere'",
    }.items():
        assert main(["norms", wrong]) == 2
        assert f"gradstat norms: {told}" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["norms", "my_trainer:clip", "--layouts", "fsdp3"])


def test_what_cannot_be_tried_is_refused_before_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "Ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(TypeError, match=r"the ranks cannot import clip, which is test_norms:.*<lambda>;"):
        verify_clip(lambda *_: 1.0)
    with pytest.raises(ValueError, match="there is no layout 'fsdp3'; expected one of ddp, fsdp2"):
        verify_clip(averaged, layouts=["fsdp3"])
    with pytest.raises(ValueError, match="orders"):
        verify_clip(averaged, orders=[0.0])
