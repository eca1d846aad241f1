"""The integration with Hugging Face Accelerate, in plain loops under the real Accelerator."""

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from ranked import accelerate_on_ranks, assert_alike
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader
from trainers import QUIET, Net, forget_accelerators, run_example, samples

import gradstat
from gradstat.integrations.accelerate import AccelerateHandle, install

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget_accelerators()  # those of other modules' tests
    yield
    forget_accelerators()


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader(samples(4 * batches), batch_size=4)


Prepared = tuple[Accelerator, Any, Any, Any]


def prepare(
    batches: int = 6,
    accumulated: int = 1,
    precision: str = "no",
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    bad_at: set[int] | None = None,
) -> Prepared:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated, mixed_precision=precision)
    if precision == "fp16":  # which Accelerate scales on a GPU only; from here on it is the same
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=1024.0), True
    model = Net()
    model.bad_at = bad_at or set()
    return (accelerator, *accelerator.prepare(model, optimizer(model.parameters()), loader(batches)))


def run(prepared: Prepared, clip: float | None = 0.5) -> list[float]:
    """A loop as people write it. The norms that clipping returned."""
    accelerator, model, optimizer, data = prepared
    model.train()
    norms = []
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y)["loss"])
            if accelerator.sync_gradients and clip is not None:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def parameters(prepared: Prepared) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in prepared[1].parameters()])


@QUIET
@pytest.mark.parametrize("bad_at", [None, {2}])
def test_an_unhealthy_state_is_not_saved(tmp_path: Path, bad_at: set[int] | None) -> None:
    prepared = prepare(bad_at=bad_at)
    with install(prepared[0], on_anomaly=["skip", "record"], healthy_checkpoints=True):
        run(prepared)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved = prepared[0].save_state(str(tmp_path / "state"))
    assert (saved is None) == (bad_at is not None) == (not (tmp_path / "state").exists())
    assert ["checkpoints are not saved" in str(one.message) for one in caught] == [True] * (bad_at is not None)


@pytest.mark.parametrize(
    ("precision", "accumulated", "clip"), [("bf16", 1, 0.5), ("bf16", 3, None), ("fp16", 1, None), ("fp16", 3, 0.5)]
)
def test_in_half_precision_training_is_the_same(precision: str, accumulated: int, clip: float | None) -> None:
    plain = prepare(accumulated=accumulated, precision=precision)
    plain_norms = run(plain, clip)
    forget_accelerators()
    prepared = prepare(accumulated=accumulated, precision=precision)
    with install(prepared[0]) as handle:
        norms = run(prepared, clip)
    assert norms == pytest.approx(plain_norms, rel=1e-4)
    torch.testing.assert_close(parameters(prepared), parameters(plain), rtol=1e-4, atol=1e-6)
    recording = handle.monitor.recording()
    assert recording.steps.tolist() == list(range(6 // accumulated))
    if clip is not None:  # unscaled and unclipped
        assert recording.scalars["norm"].tolist() == pytest.approx(norms, rel=1e-4)
        assert min(norms) > 0.5
    assert not any(math.isnan(loss) for loss in recording.scalars["loss"])


def test_a_scheduler_made_afterwards_works() -> None:
    """torch's schedulers wrap the optimizer's step, which is wrapped already."""
    prepared = prepare()
    handle = install(prepared[0])
    scheduler = prepared[0].prepare(torch.optim.lr_scheduler.StepLR(prepared[2], 1))
    run(prepared)
    scheduler.step()
    handle.remove()
    run(prepared)
    assert handle.monitor.steps == 6


def test_several_models_have_a_monitor_each() -> None:
    for precision in ("no", "fp16"):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        if precision == "fp16":
            accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=16.0), True
        maker, judge = nn.Linear(4, 1), nn.Linear(1, 1)
        maker, judge, first, second = accelerator.prepare(
            maker, judge, torch.optim.AdamW(maker.parameters()), torch.optim.SGD(judge.parameters(), lr=0.1)
        )
        handle = install(accelerator)
        with pytest.raises(RuntimeError, match=r"there are 2 models or optimizers with a monitor each: .monitors"):
            _ = handle.monitor
        for _ in range(3):
            made = maker(torch.randn(4, 4))
            accelerator.backward(judge(made.detach()).square().mean())
            accelerator.clip_grad_norm_(judge.parameters(), 1.0)
            second.step()
            second.zero_grad()
            accelerator.backward(judge(made).mean())
            accelerator.clip_grad_norm_(maker.parameters(), 1.0)
            first.step()
            first.zero_grad()
            second.zero_grad()
        assert [monitor.steps for monitor in handle.monitors] == [3, 3]
        assert {"grad/0/total_norm", "grad/1/total_norm"} <= set(handle.scalars())
        losses = [handle.monitors[i].recording().scalars["loss"] for i in (0, 1)]
        assert (losses[1] >= 0).all()
        handle.remove()
        forget_accelerators()


@QUIET
def test_an_overflow_under_a_loss_scale_is_the_scalers_to_skip() -> None:
    prepared = prepare(precision="fp16", bad_at={2}, batches=4)
    with install(prepared[0], on_anomaly="skip") as handle:
        run(prepared)
    assert parameters(prepared).isfinite().all()
    assert prepared[0].scaler.get_scale() == 512
    assert handle.monitor.recording().scalars["loss_scale"].tolist() == [1024, 1024, 1024, 512]


@QUIET
def test_a_checkpoint_brings_the_monitor_back(tmp_path: Path) -> None:
    def build() -> tuple[Prepared, AccelerateHandle]:
        prepared = prepare(bad_at={1})
        handle = install(prepared[0], on_anomaly="skip")
        prepared[0].register_for_checkpointing(handle)
        return prepared, handle

    prepared, handle = build()
    run(prepared)
    prepared[0].save_state(str(tmp_path))
    handle.remove()
    forget_accelerators()
    prepared, handle = build()
    prepared[0].load_state(str(tmp_path))
    assert handle.monitor.steps == 6
    assert [f.step for f in handle.monitor.findings if f.rule == "nonfinite-gradient"] == [1]
    handle.remove()


def test_clips_that_are_no_clip_of_a_step_are_refused_or_told() -> None:
    accelerator, model, optimizer, data = prepare(accumulated=2)
    with (
        install(accelerator, max_norm=0.5),
        pytest.raises(ValueError, match=r"clip configured twice: install\(..., max_norm=0.5\).* called with 1.0"),
    ):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    handle = install(accelerator)

    def loop() -> None:
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(x, y)["loss"])
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"while gradients are still being accumulated") as told:
        loop()
    assert len(told) == 1
    assert handle.monitor.steps == 3
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match="parameters of no model that is watched"):
        norm = accelerator.clip_grad_norm_(other.parameters(), 0.1)
    assert float(norm) == pytest.approx(math.sqrt(3))
    assert float(gradstat.check(other).total_norm) == pytest.approx(0.1, rel=1e-4)
    handle.remove()


def test_bad_arguments_are_refused_before_training() -> None:
    with pytest.raises(TypeError, match=r"expected an accelerate.Accelerator, got the class Accelerator; pass an inst"):
        install(Accelerator)
    with pytest.raises(TypeError, match=r"expected an accelerate.Accelerator, got int"):
        install(1)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match=r"got one without model; call install\(\) after accelerator.prepare"):
        install(accelerator)
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"got one without optimizer"):
        install(accelerator)
    accelerator.prepare(torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match="model is taken from the accelerator"):
        install(accelerator, model=model)
    install(accelerator).remove()


def test_steps_are_skipped_where_each_model_has_one_optimizer_of_its_own() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias]))
    with pytest.raises(ValueError, match="expected one optimizer for Linear to skip steps of, got 2"):
        install(accelerator, on_anomaly="skip")
    install(accelerator).remove()
    forget_accelerators()
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    *prepared, optimizer = accelerator.prepare(*models, torch.optim.SGD([p for m in models for p in m.parameters()]))
    with pytest.raises(ValueError, match="expected an optimizer for each of 2 models to skip steps of"):
        install(accelerator, on_anomaly="skip")
    with install(accelerator) as handle:
        accelerator.backward(sum(model(torch.ones(1, 2)).sum() for model in prepared))
        optimizer.step()
    assert [monitor.steps for monitor in handle.monitors] == [1, 1]


def test_the_example_runs_and_names_the_fault() -> None:
    shown = run_example("accelerate_example.py", "--steps", "20")
    for words in (
        "step 10: Inf was first made in the forward pass, by exp in module '3'",
        "step 10: micro-batch 1 of 2",
        "errors in 20 steps of Sequential",
    ):
        assert words in shown, shown


@on_ranks(2, timeout=60.0)
def test_sharded_parameters_are_whole() -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import fully_shard

    with accelerate_on_ranks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = Accelerator(cpu=True)
        # Accelerate shards on GPUs only; on a CPU it can be told that it has.
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        model = Net()
        model.bad_at = {2} if torch.distributed.get_rank() == 1 else set()
        fully_shard(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
        accelerator._models.append(model)
        data = accelerator.prepare(loader(12))
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = "FSDP", plugin
        assert accelerator.is_fsdp2
        with install(accelerator, on_anomaly="skip") as handle:
            norms = []
            for x, y in data:
                accelerator.backward(model(x, y)["loss"])
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        recording = handle.monitor.recording()
        assert all(p.full_tensor().isfinite().all() for p in model.parameters())  # type: ignore[attr-defined]
    assert "scalars" not in recording.tables, set(recording.tables)
    assert recording.scalars["norm"].tolist() == pytest.approx(norms, rel=1e-5, nan_ok=True)
    assert_alike([norms, handle.monitor.findings, recording.scalars["loss"].tolist()])
    for numbers in (norms, recording.scalars["loss"]):
        assert [math.isnan(number) for number in numbers] == [False, False, True, False, False, False]
    assert ("nonfinite-loss", 2, "loss") in [(f.rule, f.step, f.name) for f in handle.monitor.findings]
