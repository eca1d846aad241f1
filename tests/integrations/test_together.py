"""Every way of watching, beside every way of clipping and stepping: each step is seen once, raw, and skipped once."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.clip_grad import clip_grad_norm_ as clip_bound_before_watching

import gradstat
from gradstat.monitor import Monitor

STEPS, BAD = 12, 8
UTILS: Any = torch.nn.utils


class Run(NamedTuple):
    """A training whose gradients are spoilt in step `BAD`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    guard: gradstat.SpikeGuard
    raw: list[float]  # the norm of each step's gradients before anything changed them, unscaled

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self, step: int, fault: str) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        loss = mse_loss(self.model(torch.randn(16, 4, generator=generator)), torch.ones(16, 2))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if step == BAD and fault == "explosion":
            for gradient in gradients:
                gradient *= 1e4
        elif step == BAD:
            gradients[0][1, 2] = math.nan
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        self.raw.append(math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients)) / scale)
        return loss.detach()


Way = Callable[[Run, Tensor], object]


def clipped_by(clip: Callable[[Run], object]) -> Way:
    def step(run: Run, loss: Tensor) -> None:
        clip(run)
        run.optimizer.step()

    return step


def adaptive(make: Callable[[], Any]) -> Way:
    clip = make()
    return clipped_by(lambda run: clip.clip_(run.parameters))


def halves(utils: Any) -> Way:
    def clip(run: Run) -> None:
        norm = utils.get_total_norm([p.grad for p in run.parameters if p.grad is not None])
        utils.clip_grads_with_norm_(run.parameters, 0.01, norm)

    return clipped_by(clip)


def guarded(**options: Any) -> Way:
    return lambda run, loss: gradstat.guarded_step(run.optimizer, **options)


def guarded_by_a_guard(run: Run, loss: Tensor) -> None:
    gradstat.guarded_step(run.optimizer, 0.01, guard=run.guard, loss=loss)


def scaled(clip: Callable[[Run], object] | None = None) -> Way:
    def step(run: Run, loss: Tensor) -> None:
        if clip is not None:
            clip(run)
        run.scaler.step(run.optimizer)
        run.scaler.update()

    return step


def unscaled_and_clipped(run: Run) -> None:
    run.scaler.unscale_(run.optimizer)
    gradstat.clip_grad_norm_(run.parameters, 0.01)


def guarded_and_scaled(run: Run, loss: Tensor) -> None:
    gradstat.guarded_step(run.optimizer, 0.01, scaler=run.scaler)
    run.scaler.update()


STEPPING: dict[str, Callable[[], Way]] = {
    "no clip": lambda: clipped_by(lambda run: None),
    "torch's clip": lambda: clipped_by(lambda run: UTILS.clip_grad_norm_(run.parameters, 0.01)),
    "torch's clip by an old name": lambda: clipped_by(lambda run: clip_bound_before_watching(run.parameters, 0.01)),
    "torch's halves": lambda: halves(UTILS),
    "torch's value clip": lambda: clipped_by(lambda run: UTILS.clip_grad_value_(run.parameters, 1e-3)),
    "clip_grad_norm_": lambda: clipped_by(lambda run: gradstat.clip_grad_norm_(run.parameters, 0.01)),
    "halves": lambda: halves(gradstat),
    "FixedClip": lambda: adaptive(lambda: gradstat.FixedClip(0.01)),
    "AutoClip": lambda: adaptive(gradstat.AutoClip),
    "ZClip": lambda: adaptive(gradstat.ZClip),
    "AdaGC": lambda: adaptive(gradstat.AdaGC),
    "AGC": lambda: adaptive(gradstat.AGC),
    "guarded_step": lambda: guarded(),
    "guarded_step with a limit": lambda: guarded(max_norm=0.01),
    "guarded_step with AutoClip": lambda: guarded(max_norm=gradstat.AutoClip()),
    "guarded_step with AGC": lambda: guarded(max_norm=gradstat.AGC()),
    "guarded_step with a guard": lambda: guarded_by_a_guard,
    "scaler": scaled,
    "scaler, unscaled and clipped": lambda: scaled(unscaled_and_clipped),
    "scaler, unscale_and_clip_": lambda: scaled(lambda run: run.scaler.unscale_and_clip_(run.optimizer, 0.01)),  # type: ignore[union-attr]
    "guarded_step with a scaler": lambda: guarded_and_scaled,
}
# Which of these skip a step that is not finite.
SKIPPING = {way for way in STEPPING if way.startswith(("guarded_step", "scaler"))}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "other": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}


@contextlib.contextmanager
def watched(how: str, run: Run) -> Iterator[tuple[Monitor, bool]]:
    """A monitor, and whether the program has to call its ``step``."""
    options: dict[str, Any] = {"on_anomaly": {"error": "skip" if "skip" in how else "record", "warning": "record"}}
    if how.startswith("auto"):
        with contextlib.ExitStack() as stack:
            if "patched" in how:
                stack.enter_context(gradstat.patch_torch())
            handle = stack.enter_context(gradstat.auto(run.optimizer, run.model, **options))
            yield handle.monitor, False
    else:
        if "guard" in how:
            options["guard"] = run.guard
        with gradstat.Monitor(run.model, run.optimizer, run.scaler, **options) as monitor:
            yield monitor, True


WATCHING = ("auto", "auto, patched", "auto, skip", "Monitor", "Monitor, skip", "Monitor, guard")


def cases() -> Iterator[Any]:
    """Every way of watching with every way of stepping; each of both with every kind of optimizer."""
    for (i, how), (j, way) in itertools.product(enumerate(WATCHING), enumerate(STEPPING)):
        if way.startswith(("scaler", "guarded_step with a scaler")) and how == "Monitor, guard":
            continue  # refused: the scaler skips by itself
        kind = list(OPTIMIZERS)[(i + j) % len(OPTIMIZERS)]
        yield pytest.param(how, way, kind, id=f"{how}-{way}-{kind}")


@pytest.mark.parametrize(("how", "way", "kind"), [*cases()])
def test_a_step_is_seen_once_before_anything_changes_it(how: str, way: str, kind: str) -> None:
    for fault in ("explosion", "nan"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = OPTIMIZERS[kind](model.parameters())
        scaler = gradstat.amp.GradScaler("cpu", init_scale=128.0) if "scale" in way else None
        guard = gradstat.SpikeGuard(window=8, warmup=4, max_norm=1e3)
        run = Run(model, optimizer, scaler, guard, [])
        step_of = STEPPING[way]()
        skips = way in SKIPPING or "skip" in how or "guard" in how
        with watched(how, run) as (monitor, calls_step):
            for step in range(STEPS):
                optimizer.zero_grad()
                before = [parameter.detach().clone() for parameter in model.parameters()]
                loss = run.backward(step, fault)
                if calls_step:
                    monitor.step(loss)
                step_of(run, loss)
                is_same = all(map(torch.equal, before, model.parameters()))
                refused = fault == "explosion" and ("guard" in how or way == "guarded_step with a guard")
                assert is_same == (step == BAD and skips and (fault == "nan" or refused)), step
            assert not {"found_inf", "grad_scale"} & set(vars(optimizer))
        assert monitor.steps == STEPS
        norms = monitor.recording().scalars["norm"]
        assert norms[:BAD] == pytest.approx(run.raw[:BAD], rel=1e-4)
        found = [finding for finding in monitor.findings if finding.rule == "nonfinite-gradient"]
        if fault == "nan":
            assert [(finding.step, finding.name, finding.evidence["nonfinite_tensors"]) for finding in found] == [
                (BAD, "0.weight", 1)
            ]
            assert norms[BAD + 1 :] == pytest.approx(run.raw[BAD + 1 :], rel=1e-4, nan_ok=True) or not skips
        else:
            assert norms == pytest.approx(run.raw, rel=1e-4)
            assert not found
        if "guard" in how or way == "guarded_step with a guard":
            counts = guard.read(wait=True)
            assert (counts.steps, counts.nonfinite, counts.refused) == (STEPS, fault == "nan", fault != "nan")
        if way.startswith("guarded_step"):
            counted = gradstat.step_counters(optimizer).read(wait=True)
            skipped = fault == "nan" or "guard" in how or "guard" in way.removeprefix("guarded_step")
            assert (counted.steps, counted.skipped) == (STEPS, skipped)
