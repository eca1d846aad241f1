"""DeepSpeed's real engine on gloo ranks: statistics of its partitions against those of the whole gradients."""

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import processes
from helpers.frameworks import training_arguments
from helpers.ranks import Ranks, on_ranks
from helpers.ranks_of_frameworks import assert_alike, assert_same_stats, spoil
from torch import Tensor, nn

import gradstat

STAGES = (0, 1, 2, 3)
BAD = {"0.weight": [3, 30], "2.bias": [2]}  # flat indices; with two or three ranks a partition ends inside 0.weight


def _start() -> Any:
    """DeepSpeed on the existing process group, without the operator that it would compile on a CPU."""
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
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but correct
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


def _spoil(net: nn.Module, value: float) -> None:
    """Makes some elements of rank 1's gradients nonfinite from now on."""
    # Hooks on all ranks: ZeRO-2 reduces gradients in the order in which they complete, which a hook may change.
    spoil(net, {name: at * (dist.get_rank() == 1) for name, at in BAD.items()}, value)


def _is_scaled(engine: Any) -> bool:
    """Without ZeRO, DeepSpeed 0.19.8 divides gradients by the loss scale without having multiplied the loss by it."""
    return bool(engine.fp16_enabled() and engine.zero_optimization_stage())


def _hold_against_whole(engine: Any, tells_missing: bool) -> gradstat.Report:
    """The report about the engine, after comparing it with the whole gradients that DeepSpeed gathers."""
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
        assert ours.shape == getattr(parameter, "ds_shape", parameter.shape)
        assert_same_stats(ours, expected, rel=1e-6, abs=1e-12)
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
    tells_missing = hasattr(engine.optimizer, "fp32_groups_has_gradients")  # else an unused one has zeros
    several = config["gradient_accumulation_steps"]
    for step in range(3):
        before = gradstat.check(engine)
        assert not before.names, "gradients of another step"
        if step == 2:
            _spoil(engine.module, math.nan)
        for micro in range(several):
            _backward(engine, 10 * step + micro)
            if micro < several - 1:
                engine.step()
        report = _hold_against_whole(engine, tells_missing)
        if step == 2:
            break
        engine.step()
        theirs = engine.get_global_grad_norm()  # in float32, or from squares in low precision
        if theirs is None:
            assert _describe(config).startswith("ZeRO-0 fp32")
        else:
            close = pytest.approx(report.total_norm, rel=2e-2 if "bf16" in config else 1e-3)
            assert float(theirs) == close, (_describe(config), step, theirs, report)
    assert [stats.name for stats in report.nonfinite] == ["0.weight", "2.bias"], (_describe(config), report.nonfinite)
    assert report["0.weight"].first_nonfinite == (0, 3)
    return str(report)


@pytest.mark.parametrize("world", [2, 3])
def test_reports_are_those_of_the_whole_gradients(ranks: Ranks, world: int) -> None:
    results = ranks.run(world, _reports, CASES)
    assert all(result == results[0] for result in results)


def _watched(deepspeed: Any, stage: int, dtype: str) -> dict[str, list[tuple[int, str, str]]]:
    """Findings of a run in which gradients hold NaN from step 25 on."""
    engine = _engine(deepspeed, _config(stage, dtype, clip=0.0))
    if dtype == "fp16":
        engine.optimizer.loss_scaler.cur_scale = 2.0**20  # overflows until it has been reduced
    monitor = gradstat.Monitor(engine, watch={"parameters": 1, "activations": 1}, on_anomaly="record")
    for step in range(30):
        if step == 25:
            _spoil(engine.module, math.nan)
        scale = engine.optimizer.loss_scale if dtype == "fp16" else None
        monitor.step(_backward(engine, step))
        report = monitor.latest().report
        assert report.loss_scale == scale
        engine.step()
        theirs = float(engine.get_global_grad_norm() or math.nan)  # Inf or -1 if not finite
        if math.isfinite(theirs) and report.ok:
            assert theirs == pytest.approx(report.total_norm, rel=1e-3), step
    monitor.remove()
    recording = monitor.recording()
    assert set(recording.scalars["lr"].tolist()) == {1e-3}
    sizes = {name: math.prod(getattr(p, "ds_shape", p.shape)) for name, p in engine.module.named_parameters()}
    series = recording.tables["parameter"]
    assert dict(zip(series.names, series.numel.tolist(), strict=True)) == sizes
    assert (series.column("l2_norm")[0] > 0).all()  # ZeRO-3 leaves parameters without elements
    found: dict[str, list[tuple[int, str, str]]] = {}
    for finding in monitor.findings:
        found.setdefault(finding.rule, []).append((finding.step, finding.severity, finding.text))
    return found


@on_ranks(2)
def test_a_monitor_names_the_parameter_at_every_stage() -> None:
    deepspeed = _start()
    for stage, dtype in [(0, "fp32"), *((stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "fp16"))]:
        found = _watched(deepspeed, stage, dtype)
        assert_alike(found)
        assert found["dead-gradient"][0][2].startswith("all elements of the gradient of unused have been zero")
        step, severity, text = found["nonfinite-gradient"][-1]
        assert (step, "2.bias has 1 NaN in 3 elements, the first at [2]; 2 of" in text) == (25, True), (stage, found)
        if dtype == "fp32":
            assert severity == "error"
            assert found.keys() <= {"dead-gradient", "nonfinite-gradient"} or not stage


@on_ranks(2)
def test_what_the_engine_does_itself_is_refused() -> None:
    deepspeed = _start()
    for stage in (0, 2, 3):
        engine = _engine(deepspeed, _config(stage))
        _backward(engine, 1)
        parameters = list(engine.module.parameters())
        words = "clips, skips and steps by itself: set gradient_clipping"
        calls = [lambda e=engine: gradstat.clip_grad_norm_(e, 1.0)]
        if stage:
            calls += [
                lambda p=parameters: gradstat.clip_grad_norm_(p, 1.0),
                lambda e=engine: gradstat.guarded_step(e.optimizer, 1.0),
                lambda e=engine: gradstat.auto(e.optimizer),
            ]
        for call in calls:
            with pytest.raises(TypeError, match=words):
                call()
        for policy in ("skip", "rollback", "replay"):
            with pytest.raises(NotImplementedError, match=f"'{policy}' is not supported with DeepSpeed"):
                gradstat.Monitor(engine, on_anomaly=policy)
        with pytest.raises(TypeError, match="optimizer: expected None with DeepSpeed's engine"):
            gradstat.Monitor(engine, torch.optim.SGD(parameters, lr=0.1))
        with gradstat.patch_torch():  # calls of torch's clip still work
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert gradstat.check_async(engine).result().names == gradstat.check(engine).names
        engine.step()


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_accelerate(stage: int) -> None:
    _start()
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    from gradstat.integrations.accelerate import install

    config = {key: value for key, value in _config(stage, accumulate=2).items() if key != "optimizer"}
    PartialState(cpu=True)  # as the Trainer does; otherwise an accelerator on a CPU assumes a single process
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=2)
    torch.manual_seed(3)
    net = Net()
    data = torch.utils.data.DataLoader(torch.randn(128, 7), batch_size=4)
    engine, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), data)
    with install(accelerator, on_anomaly="record") as handle:
        norms, losses = [], []
        for number, batch in enumerate(data):
            if number == 6:
                _spoil(engine.module, math.nan)
            with accelerator.accumulate(engine):
                loss = engine(batch).square().sum()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(engine.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
        means = [sum(pair) / 2 for pair in zip(losses[::2], losses[1::2], strict=True)]
        _is_seen_as_the_engine_has_it(handle.monitor, "2.bias", norms, means)


def _is_seen_as_the_engine_has_it(monitor: gradstat.Monitor, name: str, norms: list[Any], losses: list[float]) -> None:
    """All ranks find the NaN of step 3, although the engine steps as a part of the backward pass."""
    monitor.flush()
    found = {finding.rule: (finding.step, finding.severity, finding.name) for finding in monitor.findings}
    assert found["nonfinite-gradient"] == (3, "error", name)
    scalars = monitor.recording().scalars
    assert scalars["norm"][:3].tolist() == pytest.approx([float(norm) for norm in norms[:3]], rel=1e-5)
    assert [math.isfinite(norm) for norm in scalars["norm"]] == [step < 3 for step in range(len(norms))]
    assert scalars["loss"].tolist() == pytest.approx(losses, rel=1e-4)
    assert_alike(scalars["loss"].tolist())


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_trainer(stage: int, tmp_path: Path) -> None:
    _start()
    from transformers import Trainer, TrainerCallback

    from gradstat.integrations.transformers import install

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.net(x) - labels).square().sum()}

    class Spoils(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 3:
                _spoil(model.net, math.nan)

    config = {key: value for key, value in _config(stage, accumulate=2).items() if key != "optimizer"}
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 1e-3}
    arguments = training_arguments(tmp_path, deepspeed=config, **settings)
    made = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(7, generator=made), "labels": torch.randn(3, generator=made)} for _ in range(128)]
    torch.manual_seed(3)
    trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=[Spoils()])
    with install(trainer, on_anomaly="record") as handle:
        trainer.train()
        logs = [row for row in trainer.state.log_history if "loss" in row]
        norms, losses = ([row[name] for row in logs] for name in ("grad_norm", "loss"))
        _is_seen_as_the_engine_has_it(handle.monitor, "net.2.bias", norms, losses)


def test_the_example_names_the_parameter() -> None:
    example = processes.ROOT / "examples" / "deepspeed_example.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    made = processes.python(*launcher, example, "--steps", "30", DS_ACCELERATOR="cpu")
    assert "the gradient of 2.bias has 1 NaN in 8 elements, the first at [5]" in made.stdout, made.stderr
