"""The cost of additions to a training step: variants of the step, their interleaved times and their peak memory."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import gradstat
from gradstat._core.text import columns
from gradstat.bench.memory import peak_bytes
from gradstat.bench.timing import NOISE, Quartiles, interleaved, quartiles, ratios

MAX_NORM = 1.0
LEARNING_RATE = 1e-6  # so small that the model hardly changes, however many steps are timed
PLAIN = "plain step"
CHECK = "+ gradstat.check"
CHECK_ASYNC = "+ gradstat.check_async"
MONITOR = "+ gradstat.Monitor"
CLIP = "+ gradstat.clip_grad_norm_"
GUARDED = "+ gradstat.guarded_step"
TORCH_CLIP = "+ torch clip_grad_norm_"
TORCH_CLIP_CHECKED = "+ torch clip, isfinite().item()"
LOSS_ITEM = "+ loss.item()"
NAIVE = "+ naive .item() loop"
ANOMALY_WITHOUT_NAN = "detect_anomaly(check_nan=False)"
ANOMALY = "detect_anomaly"
WARMUP = 1
# Steps between two syncs of the benchmark. On a GPU a sync after each step would hide what a sync of the program costs,
# and charge calls without one for the time that the GPU needs.
BLOCK = {"cpu": 1, "cuda": 6}


class WrongAnswerError(AssertionError):
    """A call to be timed gave a wrong answer, so its time is meaningless."""


@dataclass(frozen=True, slots=True)
class Step:
    """A training step without any inspection; ``loss`` does the forward pass. The optimizer uses `LEARNING_RATE`."""

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    device: torch.device


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the step: ``inspect`` is called between ``backward()`` and the optimizer's step."""

    name: str
    inspect: Callable[[Step, Tensor], object] = lambda step, loss: None
    anomaly: bool | None = None  # the ``check_nan`` of anomaly mode; None leaves it off
    takes_step: bool = False  # whether ``inspect`` takes the optimizer's step itself
    own: Step | None = None  # the step it runs, which something is attached to, in place of the one that is given

    def run(self, step: Step) -> float:
        """Runs one training step; returns the seconds that the call of ``inspect`` took."""
        step = self.own or step
        with torch.autograd.set_detect_anomaly(self.anomaly is not None, bool(self.anomaly)):
            step.optimizer.zero_grad()
            loss = step.loss()
            loss.backward()
            start = time.perf_counter()
            self.inspect(step, loss)
            inside = time.perf_counter() - start
            if not self.takes_step:
                step.optimizer.step()
        return inside


def naive_loop(gradients: Iterable[Tensor | None]) -> tuple[int, float, float, float]:
    """A typical hand-written loop: number of nonfinite gradients, total norm, smallest and largest element."""
    nonfinite, squares, low, high = 0, 0.0, math.inf, -math.inf
    for gradient in gradients:
        if gradient is not None:
            nonfinite += bool(gradient.isnan().any().item()) or bool(gradient.isinf().any().item())
            squares += gradient.norm().item() ** 2
            low = min(low, gradient.min().item())
            high = max(high, gradient.max().item())
    return nonfinite, math.sqrt(squares), low, high


def variants(device: torch.device) -> list[Variant]:
    """All variants, the plain step first; on a GPU also what people do there that waits for it."""
    pending: deque[gradstat.PendingReport] = deque()

    # Reads the report of the previous step after launching the next check, as a training loop would.
    def check_async(step: Step, loss: Tensor) -> bool:
        pending.append(gradstat.check_async(step.model))
        return len(pending) == 1 or pending.popleft().result().ok

    monitor = functools.cache(lambda step: gradstat.Monitor(step.model, step.optimizer, on_anomaly="record"))

    def torch_clip(step: Step, loss: Tensor) -> Tensor:
        return nn.utils.clip_grad_norm_(step.model.parameters(), MAX_NORM)

    waiting = [
        Variant(TORCH_CLIP_CHECKED, lambda step, loss: torch_clip(step, loss).isfinite().item()),
        Variant(LOSS_ITEM, lambda step, loss: loss.item()),
    ]
    return [
        Variant(PLAIN),
        Variant(CHECK, lambda step, loss: gradstat.check(step.model).ok),
        Variant(CHECK_ASYNC, check_async),
        Variant(MONITOR, lambda step, loss: monitor(step).step(loss)),
        Variant(CLIP, lambda step, loss: gradstat.clip_grad_norm_(step.model.parameters(), MAX_NORM)),
        Variant(GUARDED, lambda step, loss: gradstat.guarded_step(step.optimizer, MAX_NORM), takes_step=True),
        Variant(TORCH_CLIP, torch_clip),
        *(waiting if device.type == "cuda" else []),
        Variant(NAIVE, lambda step, loss: naive_loop(p.grad for p in step.model.parameters())),
        Variant(ANOMALY_WITHOUT_NAN, anomaly=False),
        Variant(ANOMALY, anomaly=True),
    ]


def verify(step: Step) -> None:
    """Checks the variants' results for one step's gradients against float64; ValueError if nothing can be timed."""
    step.optimizer.zero_grad()
    step.loss().backward()
    parameters = [p for p in step.model.parameters() if p.grad is not None]
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    if not gradients:
        raise ValueError("no parameter of the model has a gradient after backward(); does the loss depend on them?")
    report = gradstat.check(step.model)
    wide = (_dense(g).to(torch.complex128 if g.is_complex() else torch.float64) for g in gradients)
    exact = math.sqrt(sum(float(g.abs().square().sum()) for g in wide))
    if not math.isfinite(exact):
        raise ValueError(f"the model's gradients are not finite, so timings would be meaningless:\n{report}")
    coarse = 1e-3 if all(_dense(g).dtype in (torch.float32, torch.float64) for g in gradients) else 2e-2
    norms = {
        CHECK: (report.total_norm, 1e-6),
        CHECK_ASYNC: (gradstat.check_async(step.model).result().total_norm, 1e-6),
        CLIP: (float(gradstat.clip_grad_norm_(parameters, math.inf)), coarse),
    }
    if not any(g.is_sparse for g in gradients):
        norms[NAIVE] = (naive_loop(gradients)[1], coarse)
        norms[TORCH_CLIP] = (float(nn.utils.get_total_norm(gradients)), coarse)
    for name, (norm, tolerance) in norms.items():
        if not math.isclose(norm, exact, rel_tol=tolerance, abs_tol=1e-30):
            raise WrongAnswerError(f"{name} returned norm {norm}, expected {exact}")


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@dataclass(frozen=True, slots=True)
class Cost:
    """What one variant of a step costs."""

    name: str
    seconds: Quartiles  # of a step, with a sync after each `BLOCK`
    ratio: Quartiles  # to the plain step of the same round
    # Seconds in the added call itself, which resolves costs too small for the noisy ratio. None if something else is
    # added, and on a GPU, where a call that syncs also waits for the backward pass.
    inside: Quartiles | None
    extra_bytes: Quartiles  # peak memory beyond those of several plain steps

    def added(self, plain: Cost) -> Quartiles:
        """Added time as a share of the plain step, from ``inside`` if known, else from ``ratio``."""
        if self.inside is None:
            return Quartiles(*(ratio - 1 for ratio in self.ratio))
        return Quartiles(*(mine / whole for mine, whole in zip(self.inside, reversed(plain.seconds), strict=True)))

    def share(self, plain: Cost) -> str:
        """`added` in words."""
        return self.added(plain).text(lambda share: f"{share * 100:.1f} %")


def costs(
    step: Step,
    rounds: int,
    *,
    compared: list[Variant] | None = None,
    progress: Callable[[], object] = lambda: None,
    budget: float = math.inf,
) -> list[Cost]:
    """Time and peak memory of the variants ``compared`` (None: all), the plain step first; a `BLOCK` in each round.

    ``budget`` is as for `interleaved`.
    """
    compared = compared or variants(step.device)
    block = BLOCK[step.device.type]
    inside: dict[str, list[float]] = {variant.name: [] for variant in compared}

    def run(variant: Variant) -> None:
        inside[variant.name].append(sum(variant.run(step) for _ in range(block)) / block)

    calls = {variant.name: partial(run, variant) for variant in compared}
    blocks = interleaved(calls, rounds, WARMUP, device=step.device, progress=progress, budget=budget)
    samples = {name: [seconds / block for seconds in sample] for name, sample in blocks.items()}

    def peak(variant: Variant) -> int:
        return peak_bytes(lambda: variant.run(step), step.device, step.optimizer.zero_grad)

    plain, bases = samples[compared[0].name], [peak(compared[0]) for _ in range(3)]
    measured = []
    for variant in compared:
        adds_a_call = variant.anomaly is None and not variant.takes_step and variant.own is None
        is_timed = adds_a_call and step.device.type == "cpu"
        call = quartiles(inside[variant.name][WARMUP:]) if is_timed else None
        most, wall = peak(variant), samples[variant.name]
        extra = quartiles([most - base for base in (bases if variant is not compared[0] else [most])])
        measured.append(Cost(variant.name, quartiles(wall), ratios(wall, plain), call, extra))
    return measured


def table(measured: list[Cost]) -> str:
    """Costs as text: median, ratio to the plain step with quartiles, the added call alone, extra peak memory.

    Noise is called noise. All fits 100 columns.
    """

    def cell(values: Quartiles, form: Callable[[float], str]) -> str:
        return "noise" if values.is_noise() else form(values.median)

    rows = [["", "median", "ratio to plain", "the call alone", "extra memory"]]
    for cost in measured:
        rows.append([cost.name, cell(cost.seconds, in_time)])
        if len(rows) > 2:
            alone = "" if cost.inside is None else cell(cost.inside, in_time)
            if cost.inside is not None and not (cost.inside.is_noise() or cost.added(measured[0]).is_noise()):
                alone += f", {cost.share(measured[0])}"
            rows[-1] += [
                cost.ratio.text("{:.2f}".format, neutral=1, spread=True).replace(NOISE, "noise"),
                alone,
                cell(cost.extra_bytes, in_bytes),
            ]
    return "\n".join(f"  {line}" for line in columns([row + [""] * (len(rows[0]) - len(row)) for row in rows]))


def in_time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def in_bytes(count: float) -> str:
    """A number of bytes in readable units, powers of ten: ``"1.5 MB"``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
