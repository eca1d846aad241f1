"""Lightning Fabric, where it differs from other integrations: loss scales, closures, its own clip, ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.frameworks import QUIET
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

import gradstat
from gradstat.integrations.fabric import install

pytestmark = [QUIET]


def prepared(optimizer: Any = torch.optim.AdamW, fabric: Fabric | None = None, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    fabric = fabric or Fabric(accelerator="cpu")
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return fabric, *fabric.setup(net, optimizer(net.parameters(), **{"lr": 0.01, **options}))


def train(fabric: Any, model: Any, optimizer: Any, clip: float | None = 0.05, bad: int = -1) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    norms = []
    for step in range(5):
        x = torch.randn(16, 4, generator=generator)
        loss = model(x).float().square().mean()
        fabric.backward(loss * math.nan if step == bad else loss)
        if clip is not None:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_auto_skips_steps_of_the_optimizer_that_fabric_wraps() -> None:
    fabric, model, optimizer = prepared()
    with gradstat.auto(optimizer, model.module, on_anomaly={"error": ("skip", "record")}) as handle:
        train(fabric, model, optimizer, clip=None, bad=2)
    assert handle.monitor.steps == 5
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_fabric_alone_refuses_to_clip_what_a_fused_optimizer_unscales() -> None:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    scaled = prepared(fabric=Fabric(accelerator="cpu", plugins=[precision]), fused=True)
    with pytest.raises(NotImplementedError, match="not implemented for optimizers handling the unscaling"):
        train(*scaled)


def test_a_norm_that_is_not_finite_is_an_error_unless_the_step_is_skipped() -> None:
    fabric, model, optimizer = prepared()
    with install(fabric, model, optimizer), pytest.raises(RuntimeError, match="non-finite"):
        train(fabric, model, optimizer, bad=2)
    fabric, model, optimizer = prepared()
    with install(fabric, model, optimizer, on_anomaly="skip"):
        norms = train(fabric, model, optimizer, bad=2)
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, True, True]


def test_gradients_are_measured_after_the_closure() -> None:
    fabric, model, optimizer = prepared(torch.optim.SGD)
    x = torch.ones(16, 4)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        losses.append(loss.item())
        fabric.backward(loss)
        return loss

    with install(fabric, model, optimizer, max_norm=0.05) as handle:
        for _ in range(3):
            optimizer.step(closure)
    assert handle.monitor.recording().scalars["loss"].tolist() == pytest.approx(losses)
    assert gradstat.check(model).total_norm == pytest.approx(0.05, rel=1e-3)


def test_models_that_take_turns_have_their_own_losses() -> None:
    fabric, maker, first = prepared()
    _, judge, second = prepared(fabric=fabric)
    with install(fabric, maker, first) as one, install(fabric, judge, second, micro_batches=2) as other:
        for step in range(4):
            fabric.backward(maker(torch.ones(2, 4)).mean() * 0 + step)
            first.step()
            for _ in range(2):
                fabric.backward(judge(torch.ones(2, 4)).mean() * 0 + 100)
            second.step()
        assert one.monitor.recording().scalars["loss"].tolist() == [0, 1, 2, 3]
        assert other.monitor.recording().scalars["loss"].tolist() == [200] * 4
        for model, loss in ((maker, 7), (judge, 8)):
            fabric.backward(model(torch.ones(2, 4)).mean() * 0 + loss, model=model)
        first.step()
        second.step()
    assert [handle.monitor.recording().scalars["loss"][-1] for handle in (one, other)] == [7, 8]


def test_other_clips_of_fabric_are_unchanged_and_remove_restores_everything() -> None:
    fabric, model, optimizer = prepared()
    before = set(vars(fabric)), set(vars(optimizer))
    with install(fabric, model, optimizer, max_norm=1.0) as handle:
        fabric.backward(model(torch.ones(16, 4)).square().mean())
        fabric.clip_gradients(model, optimizer, clip_val=1e-3)
        assert gradstat.check(model).max_abs == pytest.approx(1e-3)
        with pytest.raises(ValueError, match=r"clip configured twice: .*max_norm=1.0\), and clip_gradients"):
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
        fabric.clip_gradients(model, optimizer, max_norm=math.inf, norm_type=1.0)
        optimizer.step()
    assert handle.monitor.steps == 1
    assert (set(vars(fabric)), set(vars(optimizer))) == before


def test_a_checkpoint_of_fabric_holds_the_state(tmp_path: Path) -> None:
    fabric, model, optimizer = prepared()
    with install(fabric, model, optimizer, on_anomaly="skip") as handle:
        train(fabric, model, optimizer, None, bad=1)
        fabric.save(tmp_path / "c.ckpt", {"model": model, "gradstat": handle})
    fabric, model, optimizer = prepared()
    with install(fabric, model, optimizer) as again:
        fabric.load(tmp_path / "c.ckpt", {"model": model, "gradstat": again})
        assert again.monitor.findings == handle.monitor.findings


def test_what_fabric_setup_did_not_return_is_refused() -> None:
    fabric, model, optimizer = prepared()
    with pytest.raises(TypeError, match=r"expected a lightning.Fabric, got Linear"):
        install(nn.Linear(1, 1), model, optimizer)
    with pytest.raises(TypeError, match=r"model: expected what fabric.setup\(\) returned, got Sequential"):
        install(fabric, model.module, optimizer)
    with pytest.raises(TypeError, match=r"optimizer: expected what fabric.setup\(\) returned, got AdamW"):
        install(fabric, model, optimizer.optimizer)
    with pytest.raises(ValueError, match="micro_batches is 0"):
        install(fabric, model, optimizer, micro_batches=0)
