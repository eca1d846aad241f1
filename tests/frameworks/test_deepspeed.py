"""DeepSpeed's real engine on gloo ranks: what gradstat says of its partitions, beside the whole gradients."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradstat

if TYPE_CHECKING:
    from ranks import Ranks

STAGES = (0, 1, 2, 3)
# The first use of an engine in a process imports a lot.
TIMEOUT = 300.0
BAD = {"0.weight": [3, 30], "2.bias": [2]}  # flat indices; partitions of two or three ranks end inside of 0.weight


def _start() -> Any:
    """DeepSpeed on the process group there is, without the operator that it would compile on a CPU."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # slow here, and right
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 3))
        self[3].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(4))


def _config(stage: int, dtype: str = "fp32", offload: bool = False, accumulate: int = 1, clip: float = 0.5) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    return config


def _engine(deepspeed: Any, config: Any) -> Any:
    torch.manual_seed(3)
    net = Net()
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def _backward(engine: Any, seed: int) -> Tensor:
    dtype = next(engine.module.parameters()).dtype
    made = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    loss = engine(torch.randn(4, 7, generator=made).to(dtype)).float().square().sum()
    engine.backward(loss)
    return loss


def _spoil(engine: Any, value: float) -> None:
    """From now on some elements of rank 1's gradients are not finite."""
    for name, parameter in engine.module.named_parameters():
        if name in BAD:

            def spoiled(gradient: Tensor, places: list[int] = BAD[name]) -> Tensor:
                flat = gradient.clone().reshape(-1)
                if dist.get_rank() == 1:
                    flat[places] = value
                return flat.view_as(gradient)

            # On all ranks: ZeRO-2 reduces gradients in the order in which they come, which a hook may change.
            parameter.register_hook(spoiled)


def _is_scaled(engine: Any) -> bool:
    """Without ZeRO, DeepSpeed 0.19.8 divides gradients by the loss scale, but has not multiplied the loss by it."""
    return bool(engine.fp16_enabled() and engine.zero_optimization_stage())


def _hold_against_whole(engine: Any, tells_missing: bool) -> gradstat.Report:
    """The report about the engine, which is held against the whole gradients as DeepSpeed gathers them."""
    from deepspeed.utils import safe_get_full_grad

    scale = engine.optimizer.loss_scale if _is_scaled(engine) else 1.0
    report = gradstat.check(engine)
    squares = 0.0
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad or (name == "unused" and tells_missing):
            assert name not in report
            continue
        whole = safe_get_full_grad(parameter).double()
        expected = gradstat.check_tensors({name: whole / scale})[name]
        ours = report[name]
        assert ours.shape == getattr(parameter, "ds_shape", parameter.shape) == whole.shape
        for value in ("nan_count", "inf_count", "zero_count", "first_nonfinite"):
            assert getattr(ours, value) == getattr(expected, value), (name, value, ours, expected)
        for value in ("l2_norm", "min", "max", "mean"):
            close = pytest.approx(getattr(expected, value), rel=1e-6, abs=1e-12, nan_ok=True)
            assert getattr(ours, value) == close, (name, value, ours, expected)
        squares += expected.l2_norm**2
    assert report.finite_norm == pytest.approx(math.sqrt(squares), rel=1e-6)
    assert set(report.missing) == ({"unused"} if tells_missing else set())
    assert report.loss_scale == (scale if _is_scaled(engine) else None)
    return report


CASES = [
    *(_config(stage, dtype) for stage, dtype in itertools.product(STAGES, ("fp32", "bf16", "fp16"))),
    *(_config(stage, offload=True) for stage in (2, 3)),
    *(_config(stage, accumulate=2) for stage in STAGES),
    *(_config(stage, "bf16", True, 2) for stage in (2, 3)),
]


def _describe(config: Any) -> str:
    zero = config["zero_optimization"]
    dtype = next((dtype for dtype in ("bf16", "fp16") if dtype in config), "fp32")
    offload = ", offloaded" * ("offload_optimizer" in zero)
    return f"ZeRO-{zero['stage']} {dtype}{offload}, {config['gradient_accumulation_steps']} micro-batches"


def _reports(configs: list[Any]) -> dict[str, str]:
    deepspeed = _start()
    return {_describe(config): _report(deepspeed, config) for config in configs}


def _report(deepspeed: Any, config: Any) -> str:
    engine = _engine(deepspeed, config)
    tells_missing = hasattr(engine.optimizer, "fp32_groups_has_gradients")  # elsewhere the unused has one of zeros
    several = config["gradient_accumulation_steps"]
    for step in range(2):
        before = gradstat.check(engine)
        assert not before.names, "gradients of another step"
        for micro in range(several):
            _backward(engine, 10 * step + micro)
            if micro < several - 1:
                engine.step()
        report = _hold_against_whole(engine, tells_missing)
        engine.step()
        theirs = engine.get_global_grad_norm()  # in float32, or from squares in the low precision
        if theirs is None:
            assert _describe(config).startswith("ZeRO-0 fp32")
        else:
            close = pytest.approx(report.total_norm, rel=2e-2 if "bf16" in config else 1e-3)
            assert float(theirs) == close, (_describe(config), step, theirs, report)
    _spoil(engine, math.nan)
    for micro in range(several):
        _backward(engine, 99 + micro)
        if micro < several - 1:
            engine.step()
    report = _hold_against_whole(engine, tells_missing)
    assert [stats.name for stats in report.nonfinite] == ["0.weight", "2.bias"], (_describe(config), report.nonfinite)
    assert report["0.weight"].first_nonfinite == (0, 3)
    return str(report)


@pytest.mark.parametrize("world", [2, 3])
def test_reports_are_those_of_the_whole_gradients(ranks: Ranks, world: int) -> None:
    results = ranks.run(world, _reports, CASES, timeout=TIMEOUT)
    assert all(result == results[0] for result in results)


def _monitored(stages: list[tuple[int, str]]) -> list[Any]:
    deepspeed = _start()
    return [_watched(deepspeed, stage, dtype) for stage, dtype in stages]


def _watched(deepspeed: Any, stage: int, dtype: str) -> dict[str, list[tuple[int, str, str]]]:
    """Findings of a run in which gradients hold NaN from step 25 on."""
    engine = _engine(deepspeed, _config(stage, dtype, clip=0.0))
    if dtype == "fp16":
        engine.optimizer.loss_scaler.cur_scale = 2.0**20  # overflows, until it has fallen
    monitor = gradstat.Monitor(engine, watch={"parameters": 1, "activations": 1}, on_anomaly="record")
    for step in range(30):
        if step == 25:
            _spoil(engine, math.nan)
        scale = engine.optimizer.loss_scale if dtype == "fp16" else None
        monitor.step(_backward(engine, step))
        report = monitor.latest().report
        assert report.loss_scale == scale
        engine.step()
        theirs = float(engine.get_global_grad_norm() or math.nan)  # Inf or -1 for what is not finite
        if math.isfinite(theirs) and report.ok:
            assert theirs == pytest.approx(report.total_norm, rel=1e-3), step
    monitor.detach()
    recording = monitor.recording()
    assert set(recording.scalars["lr"].tolist()) == {1e-3}
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in engine.module.named_parameters()}
    series = recording.tables["parameter"]
    assert dict(zip(series.names, map(tuple, series.shapes), strict=True)) == shapes
    found: dict[str, list[tuple[int, str, str]]] = {}
    for finding in monitor.findings:
        found.setdefault(finding.rule, []).append((finding.step, finding.severity, finding.text))
    return found


def test_a_monitor_names_the_parameter_at_every_stage(ranks: Ranks) -> None:
    stages = [(0, "fp32"), *((stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "fp16"))]
    every = ranks.run(2, _monitored, stages, timeout=TIMEOUT)
    assert every[0] == every[1]
    for (stage, dtype), found in zip(stages, every[0], strict=True):
        print(stage, dtype, found)
