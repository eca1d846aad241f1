"""Gradients that are zeroed before the step: told where the program does not mean it, under `auto` and frameworks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from helpers.frameworks import OF_FRAMEWORKS, Net, lightning_trainer, samples, training_arguments
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import gradstat
from gradstat.monitor import Monitor

RECORD = dict.fromkeys(("error", "warning", "info"), "record")
SAMPLES = 4
MISSED, HEALTHY = [(0, 3, 4)], list[Any]()  # since which step, and how many of how many passes


class Program:
    """A training of several micro-batches a step."""

    def __init__(self, make: Callable[..., Any] = torch.optim.SGD, dtype: torch.dtype = torch.float32, **how: Any):
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)
        self.optimizer = make(self.model.parameters(), lr=1e-2, **how)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def loss(self, model: Any = None) -> Tensor:
        model = model or self.model
        return F.mse_loss(model(torch.randn(4, 4, dtype=next(model.parameters()).dtype)).float(), torch.ones(4, 2))

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters()]

    def watched(self, steps: int, step: Callable[[Program], object], **options: Any) -> list[tuple[int, int, int]]:
        """What is told of ``steps`` steps under `gradstat.auto`."""
        with gradstat.auto(self.model, self.optimizer, on_anomaly=RECORD, **options) as handle:
            for _ in range(steps):
                step(self)
        return told(handle.monitor)


def told(monitor: Monitor) -> list[tuple[int, int, int]]:
    assert "not-watched" not in {one.rule for one in monitor.findings}
    found = [one for one in monitor.findings if one.rule == "unused-gradients"]
    return [(one.step, one.evidence["unused"], one.evidence["passes"]) for one in found]


# Programs that throw gradients away --------------------------------------------------------------------------

Zero = Callable[[Program], object]


def by_hand(program: Program) -> None:
    for parameter in program.model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


ZEROINGS: dict[str, Zero] = {
    "optimizer": lambda it: it.optimizer.zero_grad(),
    "optimizer, to zero": lambda it: it.optimizer.zero_grad(set_to_none=False),
    "model": lambda it: it.model.zero_grad(),
    "by hand": by_hand,
}


def accumulates(zero: Zero, after: Zero = lambda it: None, uses: Zero = lambda it: it.optimizer.step()) -> Zero:
    """Zeroes before each micro-batch."""

    def step(program: Program) -> None:
        for _ in range(4):
            zero(program)
            program.loss().backward()
            after(program)
        uses(program)

    return step


def scaled(clips: bool) -> Zero:
    def step(program: Program) -> None:
        for _ in range(4):
            program.optimizer.zero_grad()
            program.scaler.scale(program.loss()).backward()
        if clips:
            program.scaler.unscale_(program.optimizer)
            clip_grad_norm_(program.model.parameters(), 0.1)
        program.scaler.step(program.optimizer)
        program.scaler.update()

    return step


def of_two_losses(program: Program) -> None:
    for _ in range(2):
        program.optimizer.zero_grad()
        hidden = program.model[:2](torch.randn(4, 4))
        program.model[2](hidden).mean().backward(retain_graph=True)
        hidden.square().mean().backward()
    program.optimizer.step()


def of_changing_numbers(program: Program) -> None:
    """As at the end of short epochs."""
    program.steps = getattr(program, "steps", 0) + 1  # type: ignore[attr-defined]
    for _ in range(2 if program.steps % 3 == 0 else 4):  # type: ignore[attr-defined]
        program.optimizer.zero_grad()
        program.loss().backward()
    program.optimizer.step()


def from_later_on(program: Program) -> None:
    program.steps = getattr(program, "steps", 0) + 1  # type: ignore[attr-defined]
    program.optimizer.zero_grad()
    for _ in range(4):
        if program.steps > 5:  # type: ignore[attr-defined]
            program.optimizer.zero_grad()
        program.loss().backward()
    program.optimizer.step()


clipped = accumulates(
    ZEROINGS["model"], uses=lambda it: [clip_grad_norm_(it.model.parameters(), 0.1), it.optimizer.step()]
)
FAULTY: dict[str, tuple[Zero, list[tuple[int, int, int]]]] = {
    **{f"zeroed by the {name}": (accumulates(zero), MISSED) for name, zero in ZEROINGS.items()},
    "clipped": (clipped, MISSED),
    "scaled": (scaled(False), MISSED),
    "scaled and clipped": (scaled(True), MISSED),
    "two losses": (of_two_losses, [(0, 2, 4)]),
    "changing numbers": (of_changing_numbers, MISSED),
    "from the sixth step on": (from_later_on, [(5, 3, 4)]),
}


@pytest.mark.parametrize("name", FAULTY)
def test_micro_batches_that_are_zeroed_before_the_step_are_told_once(name: str) -> None:
    step, expected = FAULTY[name]
    assert Program().watched(20, step) == expected


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({"make": torch.optim.AdamW}, {}),
        ({"make": torch.optim.AdamW, "fused": True}, {}),
        ({"make": torch.optim.RMSprop, "dtype": torch.bfloat16}, {}),
        ({"dtype": torch.float64, "momentum": 0.9}, {}),
        ({}, {"max_norm": 0.1}),
    ],
)
def test_whatever_optimizer_steps(how: dict[str, Any], options: dict[str, Any]) -> None:
    assert Program(**how).watched(3, accumulates(ZEROINGS["optimizer"]), **options) == MISSED
    assert Program(**how).watched(2, accumulates(ZEROINGS["optimizer"]), **options) == HEALTHY


def test_a_part_of_the_model_may_be_frozen() -> None:
    for part in (0, 2):
        program = Program()
        program.model[part].requires_grad_(False)
        assert program.watched(4, accumulates(ZEROINGS["optimizer"])) == MISSED


# Programs that mean it ---------------------------------------------------------------------------------------


def of_each_sample(replace: Callable[[Tensor, Tensor], object], clips: bool = False) -> Zero:
    """Reads the gradient of each sample, and steps with what it makes of them."""

    def step(program: Program) -> None:
        totals = [torch.zeros_like(parameter) for parameter in program.model.parameters()]
        for _ in range(SAMPLES):
            program.optimizer.zero_grad()
            program.loss().backward()
            if clips:
                clip_grad_norm_(program.model.parameters(), 0.01)
            for total, gradient in zip(totals, program.gradients(), strict=True):
                total += gradient
        for parameter, total in zip(program.model.parameters(), totals, strict=True):
            replace(parameter, total)
        program.optimizer.step()

    return step


def in_part(program: Program) -> None:
    first = next(program.model.parameters())
    of_each_sample(lambda parameter, total: parameter is first and parameter.grad.data.copy_(total))(program)


def two_passes(move: Callable[[nn.Parameter], object]) -> Zero:
    """As SAM: the second pass is at other weights."""

    def step(program: Program) -> None:
        before = [parameter.detach().clone() for parameter in program.model.parameters()]
        for number in range(2):
            program.optimizer.zero_grad()
            program.loss().backward()
            with torch.no_grad():
                for parameter, value in zip(program.model.parameters(), before, strict=True):
                    _ = move(parameter) if number == 0 else parameter.data.copy_(value)
        program.optimizer.step()

    return step


def elsewhere(program: Program) -> None:
    """Gradients of other batches: an adversary, a gradient noise scale, an influence."""
    for _ in range(3):
        program.optimizer.zero_grad()
        program.loss().backward()
    program.optimizer.zero_grad()
    program.loss().backward()
    program.optimizer.step()


def in_evaluation(program: Program) -> None:
    for mode in (False, False, True):
        program.model.train(mode)
        program.optimizer.zero_grad()
        program.loss().backward()
    program.optimizer.step()


def beside_a_rival(program: Program) -> None:
    """Another optimizer steps with what the other passes compute besides."""
    rival = program.__dict__.setdefault("rival", torch.optim.SGD(program.model[2].parameters(), 1e-3))
    program.optimizer.param_groups[0]["params"] = list(program.model[0].parameters())
    for optimizer in (rival, rival, program.optimizer):
        program.model.zero_grad()
        program.loss().backward()
        optimizer.step()


def closure(program: Program) -> None:
    def evaluated() -> Tensor:
        program.optimizer.zero_grad()
        loss = program.loss()
        loss.backward()
        return loss

    program.optimizer.step(evaluated)


def decayed(program: Program) -> None:
    """Changes gradients by hand before it adds to them."""
    for _ in range(4):
        for parameter in program.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        program.loss().backward()
    program.optimizer.step()
    program.optimizer.zero_grad()


def now_and_then(program: Program) -> None:
    """Leaves out steps by a criterion of its own."""
    program.steps = getattr(program, "steps", 0) + 1  # type: ignore[attr-defined]
    program.optimizer.zero_grad()
    program.loss().backward()
    if program.steps % 7 in (0, 2, 5, 6):  # type: ignore[attr-defined]
        program.optimizer.step()


def once(program: Program) -> None:
    program.optimizer.zero_grad()
    for _ in range(4):
        program.loss().backward()
        clip_grad_norm_(program.model.parameters(), 0.01)
    program.optimizer.step()


MEANT: dict[str, Zero] = {
    "accumulation": once,
    "samples, another gradient": of_each_sample(lambda p, total: setattr(p, "grad", total)),
    "samples, in place": of_each_sample(lambda p, total: p.grad.copy_(total), clips=True),
    "samples, by data": of_each_sample(lambda p, total: p.grad.data.copy_(total), clips=True),
    "samples, one parameter": in_part,
    "two passes": two_passes(lambda p: p.add_(0.1 * p.grad)),
    "two passes, by data": two_passes(lambda p: p.data.add_(0.1 * p.grad)),
    "elsewhere": elsewhere,
    "evaluation": in_evaluation,
    "rival": beside_a_rival,
    "closure": closure,
    "decayed": decayed,
    "steps left out": now_and_then,
}


@pytest.mark.parametrize("name", MEANT)
def test_programs_that_have_another_use_for_gradients_are_not_accused(name: str) -> None:
    kind = torch.optim.LBFGS if name == "closure" else torch.optim.SGD
    assert Program(kind).watched(60, MEANT[name]) == HEALTHY


def test_a_quiet_step_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    monkeypatch.setattr(
        "gradstat.monitor.zeroed_passes.stats", lambda tensors: looks.append(1) or gradstat.stats(tensors)
    )
    assert Program().watched(40, once) == HEALTHY
    assert not looks
    # Of a program that means it, ever fewer steps are looked at.
    assert Program().watched(60, elsewhere) == HEALTHY
    assert 0 < len(looks) < 80


# Frameworks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_faulty", [True, False])
def test_under_accelerate(is_faulty: bool) -> None:
    from accelerate import Accelerator

    from gradstat.integrations.accelerate import install

    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=4), Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    with install(accelerator, on_anomaly=RECORD) as handle:
        for x, y in samples(24):
            with accelerator.accumulate(model):
                if is_faulty:
                    optimizer.optimizer.zero_grad()  # the accelerator's own does nothing within a step
                accelerator.backward(model(x[None], y[None])["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert told(handle.monitor) == (MISSED if is_faulty else HEALTHY)


@pytest.mark.parametrize("is_faulty", [True, False])
def test_under_the_trainer(is_faulty: bool, tmp_path: Path) -> None:
    from transformers import Trainer

    from gradstat.integrations.transformers import install

    class Zeroing(Trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
            model.zero_grad()
            return super().training_step(model, *args, **kwargs)

    data = [{"x": x, "labels": y} for x, y in samples(80)]
    arguments = training_arguments(tmp_path, gradient_accumulation_steps=4)
    trainer = (Zeroing if is_faulty else Trainer)(Net(), arguments, train_dataset=data)
    with install(trainer, on_anomaly=RECORD) as handle, contextlib.redirect_stdout(None):
        trainer.train()
    assert told(handle.monitor) == (MISSED if is_faulty else HEALTHY)


def _lightning() -> tuple[Any, Any]:
    import lightning.pytorch as pl

    from gradstat.integrations.lightning import GradstatCallback

    class Module(pl.LightningModule):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.net, self.how = Net(), how
            self.automatic_optimization = how != "by hand"

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

        def training_step(self, batch: Any, number: int) -> Tensor:
            if self.how in ("zeroed", "by hand"):
                self.zero_grad()
            if self.how == "adversary":  # its gradients are none of the step's
                kept = [parameter.grad for parameter in self.parameters()]
                self.zero_grad()
                self.net(*batch)["loss"].backward()
                for parameter, gradient in zip(self.parameters(), kept, strict=True):
                    parameter.grad = gradient
            loss: Tensor = self.net(*batch)["loss"]
            if not self.automatic_optimization:
                self.manual_backward(loss)
                if number % 4 == 3:
                    self.optimizers().step()
            return loss

    return Module, GradstatCallback(on_anomaly=RECORD)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec")
@pytest.mark.parametrize(
    ("how", "accumulated", "expected"),
    [
        ("", 4, HEALTHY),
        ("zeroed", 4, MISSED),
        ("by hand", 1, MISSED),
        ("adversary", 1, HEALTHY),
        ("adversary", 4, HEALTHY),
    ],
)
def test_under_lightning(how: str, accumulated: int, expected: list[Any]) -> None:
    """Whose last micro-batch runs inside of the optimizer's step."""
    module, callback = _lightning()
    data = torch.utils.data.DataLoader(samples(80), batch_size=4)
    lightning_trainer(callback, accumulate_grad_batches=accumulated).fit(module(how), data)
    assert told(callback.monitor) == expected


test_under_lightning.pytestmark += OF_FRAMEWORKS  # type: ignore[attr-defined]


def _on_a_rank(how: str) -> list[tuple[int, int, int]]:
    program = Program()
    program.model = DistributedDataParallel(program.model)
    within = contextlib.nullcontext

    def step(it: Program) -> None:
        it.optimizer.zero_grad()
        for number in range(4):
            if how != "accumulation":
                it.optimizer.zero_grad()
            if how == "two places" and number == 3:
                it.loss().backward()
            else:
                with within() if how == "no_sync is not used" or number == 3 else it.model.no_sync():
                    it.loss().backward()
        it.optimizer.step()

    return program.watched(5, step)


@pytest.mark.parametrize("how", ["accumulation", "no_sync", "no_sync is not used", "two places"])
def test_under_ddp(how: str, ranks: Ranks) -> None:
    for found in ranks.run(2, _on_a_rank, how):
        assert found == (HEALTHY if how == "accumulation" else MISSED)
