"""Every way of watching, beside every way of clipping and stepping: each step is seen once, raw, and skipped once."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.clip_grad import clip_grad_norm_ as clip_bound_before_watching

import gradstat
from gradstat.monitor import Monitor

STEPS, BAD = 12, 8
UTILS: Any = torch.nn.utils


@dataclass
class Run:
    """A training whose gradients are spoilt in step `BAD`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    guard: gradstat.SpikeGuard
    clip: Any  # an adaptive one
    raw: list[float] = field(default_factory=list)  # norms of gradients before anything changed them, unscaled

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self, step: int, fault: str) -> None:
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
        self.loss = loss.detach()

    def step(self, way: str) -> None:
        if way in GUARDED:
            gradstat.guarded_step(self.optimizer, **GUARDED[way](self))
        elif way in SCALED:
            SCALED[way](self)
            self.scaler.step(self.optimizer)
        else:
            CLIPS.get(way, lambda run: run.clip.clip_(run.parameters))(self)
            self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()


def halves(utils: Any) -> Callable[[Run], object]:
    def clip(run: Run) -> None:
        norm = utils.get_total_norm([p.grad for p in run.parameters if p.grad is not None])
        utils.clip_grads_with_norm_(run.parameters, 0.01, norm)

    return clip


def unscaled_and_clipped(run: Run) -> None:
    run.scaler.unscale_(run.optimizer)
    gradstat.clip_grad_norm_(run.parameters, 0.01)


# What comes before ``optimizer.step()``.
CLIPS: dict[str, Callable[[Run], object]] = {
    "no clip": lambda run: None,
    "torch's clip": lambda run: UTILS.clip_grad_norm_(run.parameters, 0.01),
    "torch's clip by an old name": lambda run: clip_bound_before_watching(run.parameters, 0.01),
    "torch's halves": halves(UTILS),
    "torch's value clip": lambda run: UTILS.clip_grad_value_(run.parameters, 1e-3),
    "clip_grad_norm_": lambda run: gradstat.clip_grad_norm_(run.parameters, 0.01),
    "halves": halves(gradstat),
}
ADAPTIVE: dict[str, Callable[[], Any]] = {
    "FixedClip": lambda: gradstat.FixedClip(0.01),
    **{kind.__name__: kind for kind in (gradstat.AutoClip, gradstat.ZClip, gradstat.AdaGC, gradstat.AGC)},
}
# What a guarded step is given, and what comes before the scaler's step; all of these skip a step that is not finite.
GUARDED: dict[str, Callable[[Run], dict[str, Any]]] = {
    "guarded_step": lambda run: {},
    "guarded_step with a limit": lambda run: {"max_norm": 0.01},
    "guarded_step with AutoClip": lambda run: {"max_norm": run.clip},
    "guarded_step with AGC": lambda run: {"max_norm": run.clip},
    "guarded_step with a guard": lambda run: {"max_norm": 0.01, "guard": run.guard, "loss": run.loss},
    "guarded_step with a scaler": lambda run: {"max_norm": 0.01, "scaler": run.scaler},
}
SCALED: dict[str, Callable[[Run], object]] = {
    "scaler": lambda run: None,
    "scaler, unscaled and clipped": unscaled_and_clipped,
    "scaler, unscale_and_clip_": lambda run: run.scaler.unscale_and_clip_(run.optimizer, 0.01),
}
STEPPING = (*CLIPS, *ADAPTIVE, *GUARDED, *SCALED)

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
        if "scale" in way and how == "Monitor, guard":
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
        run = Run(model, optimizer, scaler, guard, ADAPTIVE.get(way.split()[-1], lambda: None)())
        skips = way in {*GUARDED, *SCALED} or "skip" in how or "guard" in how
        with watched(how, run) as (monitor, calls_step):
            for step in range(STEPS):
                optimizer.zero_grad()
                before = [parameter.detach().clone() for parameter in model.parameters()]
                run.backward(step, fault)
                if calls_step:
                    monitor.step(run.loss)
                run.step(way)
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
        if way in GUARDED:
            counted = gradstat.step_counters(optimizer).read(wait=True)
            skipped = fault == "nan" or "guard" in how or "guard" in way.removeprefix("guarded_step")
            assert (counted.steps, counted.skipped) == (STEPS, skipped)
