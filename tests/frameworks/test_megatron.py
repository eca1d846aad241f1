"""Megatron-Core's real DistributedDataParallel on gloo ranks: statistics of its buffers against a single process."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks, on_ranks
from helpers.ranks_of_frameworks import assert_alike, assert_same_stats, spoil
from torch import Tensor, nn

import gradstat

BATCH = 4
BAD = {"0.weight": [1800, 1849], "2.bias": [2]}  # flat indices
# With and without: the distributed optimizer, overlap (and so buckets), bfloat16 with float32 gradients.
LAYOUTS = list(itertools.product((False, True), repeat=3))


def _start(**sizes: int) -> Any:
    """Initializes Megatron's groups on the existing process group; its buffers are made on the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)
    return parallel_state


def _config() -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )


def _wrapped(net: nn.Module, is_cut: bool, overlaps: bool, config: Any = None) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=is_cut, overlap_grad_reduce=overlaps, bucket_size=30
    )
    return DistributedDataParallel(config or _config(), settings, net)


def _net(dtype: torch.dtype, has_unused: bool) -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(37, 50), nn.Tanh(), nn.Linear(50, 3), nn.Linear(3, 3)).to(dtype)
    net[3].requires_grad_(False)
    if has_unused:
        net.unused = nn.Parameter(torch.ones(4, dtype=dtype))
    return net


def _batch(seed: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, 37, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def _backward(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).float().square().sum()
    loss.backward()
    return loss


def _of_one_process(net: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Averages of the gradients, accumulated in float64."""
    sums: dict[str, Tensor] = {}
    for batch in batches:
        net.zero_grad()
        _backward(net, batch)
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                sums[name] = sums.get(name, 0) + gradient.double() / len(batches)
    return sums


def _hold_against(report: gradstat.Report, wholes: dict[str, Tensor]) -> None:
    assert list(report.names) == list(wholes)
    assert report.missing == ()
    for name, whole in wholes.items():
        assert_same_stats(report[name], gradstat.check_tensors({name: whole})[name], rel=1e-5, abs=1e-7)


def _norm(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


def _reported(layouts: list[tuple[bool, bool, bool]]) -> list[str]:
    _start()
    return [_report(*layout) for layout in layouts]


def _report(is_cut: bool, overlaps: bool, is_low: bool) -> str:
    dtype = torch.bfloat16 if is_low else torch.float32
    net, alone = (_net(dtype, has_unused=not overlaps) for _ in range(2))  # overlap requires all gradients
    model = _wrapped(net, is_cut, overlaps)
    assert len(model.buffers[0].buckets) > overlaps
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        if step == 2 and rank == 1:
            spoil(net, BAD, math.nan)
        model.zero_grad_buffer()
        _backward(model, _batch(step, rank, dtype))
        model.finish_grad_sync()
        report = gradstat.check(model)
        wholes = _of_one_process(alone, [_batch(step, other, dtype) for other in range(world)])
        if step == 2:
            for name, places in BAD.items():
                wholes[name].view(-1)[places] = math.nan
        else:
            assert report.total_norm == pytest.approx(_norm(wholes.values()), rel=1e-5)
            with_groups = gradstat.check(model, extra_groups=[(model.tp_group, list(model.parameters())[:1])])
            assert with_groups.total_norm == pytest.approx(report.total_norm, rel=1e-12)
        _hold_against(report, wholes)
    assert [stats.name for stats in report.nonfinite] == list(BAD)
    return str(report)


@pytest.mark.parametrize("world", [2, 3])
def test_reports_are_those_of_one_process(ranks: Ranks, world: int) -> None:
    results = ranks.run(world, _reported, LAYOUTS)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("is_cut", [False, True])
@on_ranks(2)
def test_a_monitor_names_the_parameter(is_cut: bool) -> None:
    _start()
    net = _net(torch.float32, has_unused=False)
    model = _wrapped(net, is_cut, overlaps=True)
    monitor = gradstat.Monitor(model, watch={"parameters": 1, "activations": 1}, on_anomaly="record")
    for step in range(30):
        if step == 25 and dist.get_rank() == 1:
            spoil(net, BAD, math.inf)
        model.zero_grad_buffer()
        loss = _backward(model, _batch(step, dist.get_rank()))
        model.finish_grad_sync()
        monitor.step(loss)
        assert monitor.latest().report.total_norm == pytest.approx(gradstat.check(model).total_norm, nan_ok=True)
    monitor.remove()
    assert_alike([(finding.rule, finding.step, finding.text) for finding in monitor.findings])
    assert {(finding.rule, finding.step) for finding in monitor.findings} == {("nonfinite-gradient", 25)}
    assert "2.bias has 1 Inf in 3 elements, the first at [2]" in monitor.findings[0].text


@pytest.mark.parametrize("is_cut", [False, True])
@on_ranks(4)
def test_the_total_of_tensor_parallel_layers(is_cut: bool) -> None:
    """Tensor-parallel layers are sharded over two ranks, and replicated on two pairs of ranks."""
    groups = _start(tensor_model_parallel_size=2)
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    config = _config()
    made: Any = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True, "skip_bias_add": False}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = ColumnParallelLinear(37, 50, gather_output=False, **made)
            self.down = RowParallelLinear(50, 3, input_is_parallel=True, **made)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)[0]))[0]

    alone, net = _net(torch.float32, has_unused=False)[:3], Net()
    part, replica = groups.get_tensor_model_parallel_rank(), groups.get_data_parallel_rank()
    cuts = {"up.weight": ("0.weight", 0), "up.bias": ("0.bias", 0), "down.weight": ("2.weight", 1)}
    cuts["down.bias"] = ("2.bias", None)  # type: ignore[assignment]

    def own(name: str, tensors: dict[str, Any]) -> Tensor:
        whole, dim = cuts[name]
        return tensors[whole] if dim is None else tensors[whole].chunk(2, dim)[part]

    for name, parameter in net.named_parameters():
        parameter.data.copy_(own(name, dict(alone.named_parameters())))
    model = _wrapped(net, is_cut, overlaps=False, config=config)
    _backward(model, _batch(0, replica))
    model.finish_grad_sync()
    wholes = _of_one_process(alone, [_batch(0, 0), _batch(0, 1)])
    cut = [parameter for parameter in net.parameters() if getattr(parameter, "tensor_model_parallel", False)]
    report = gradstat.check(model, extra_groups=[(groups.get_tensor_model_parallel_group(), cut)])
    _hold_against(report, {name: own(name, wholes) for name, _ in net.named_parameters()})
    assert report.total_norm == pytest.approx(_norm(wholes.values()), rel=1e-5)


@on_ranks(1)
def test_what_cannot_be_done_is_refused() -> None:
    _start()
    model = _wrapped(_net(torch.float32, has_unused=True), is_cut=True, overlaps=False)
    _backward(model, _batch(0, 0))
    model.finish_grad_sync()
    parameters = list(model.parameters())
    for given in (model, parameters):
        with pytest.raises(TypeError, match="gradients in main_grad, which its optimizer clips: set clip_grad"):
            gradstat.clip_grad_norm_(given, 1.0)
    for policy in ("skip", "rollback", "replay"):
        with pytest.raises(NotImplementedError, match=f"'{policy}' is not supported with Megatron-Core's Distributed"):
            gradstat.Monitor(model, on_anomaly=policy)
    with pytest.raises(TypeError, match=r"model of torch, .* got megatron\.core\..*DistributedDataParallel"):
        gradstat.Monitor(model, watch={"origin": 1})
    with pytest.raises(TypeError, match="optimizer: expected None with Megatron-Core's DistributedDataParallel"):
        gradstat.Monitor(model, torch.optim.SGD(parameters, lr=0.1))
