"""The tools that watch the trainings of the benchmark of detection: gradstat's monitor, and rules of other projects.

The rules are written anew from descriptions: OLMo-core's stability monitor, Megatron-Core's test for unexpectedly large
losses, Lightning's ``SpikeDetection`` and the test of ``EarlyStopping`` for finite losses, and AutoTrainer's five rules
(ICSE 2021), each with its own thresholds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from helpers.training import RECORD, Training
from torch import Tensor, nn

Found = tuple[int, str, str]  # the step it is about, a rule, a name


@dataclass
class Step:
    """One step, as it is after backward and before clipping."""

    number: int
    training: Training
    loss: float
    tensor: Tensor  # the loss
    norm: float  # of all gradients
    accuracy: float | None  # of the step's batch, if outputs and labels are those of a classifier


class Tool(Protocol):
    """Watches one training."""

    name: str

    def step(self, step: Step) -> list[Found]: ...

    def end(self) -> list[Found]: ...


class Gradstat:
    """The monitor with default options, as two lines of a training loop use it: without batches."""

    name = "gradstat"

    def __init__(self, training: Training) -> None:
        self.monitor = training.monitor(on_anomaly=RECORD)
        self._known = 0

    def step(self, step: Step) -> list[Found]:
        self.monitor.step(step.tensor)
        return self._new()

    def _new(self) -> list[Found]:
        fresh = self.monitor.findings[self._known :]
        self._known += len(fresh)
        return [(finding.step, finding.rule, finding.name) for finding in fresh if finding.severity != "info"]

    def end(self) -> list[Found]:
        self.monitor.flush()
        fresh = self._new()
        self.monitor.remove()
        return fresh


class _Rule:
    """A rule that reads only losses and norms of steps, and names the one it read."""

    name = ""

    def step(self, step: Step) -> list[Found]:
        return [(step.number, *found) for found in self.look(step)]

    def look(self, step: Step) -> Iterator[tuple[str, str]]:
        raise NotImplementedError

    def end(self) -> list[Found]:
        return []


class SixSigma(_Rule):
    """OLMo-core: the loss or the norm is above the mean of the last 128 steps by six standard deviations."""

    name = "OLMo-core, 6 sigma"

    def __init__(self) -> None:
        self._last: dict[str, deque[float]] = {"loss": deque(maxlen=128), "norm": deque(maxlen=128)}

    def look(self, step: Step) -> Iterator[tuple[str, str]]:
        for (name, last), value in zip(self._last.items(), (step.loss, step.norm), strict=True):
            if len(last) == last.maxlen and all(map(math.isfinite, last)):
                deviation = statistics.pstdev(last)
                if deviation >= 1e-10 and value > statistics.fmean(last) + 6 * deviation:
                    yield "six-sigma", name
            last.append(value)


class TenTimes(_Rule):
    """Megatron-Core: a loss that is not finite, or at least ten times the largest of the first 100."""

    name = "Megatron-Core, 10 times"

    def __init__(self) -> None:
        self._largest, self._seen = 0.0, 0

    def look(self, step: Step) -> Iterator[tuple[str, str]]:
        value = abs(step.loss)
        if not math.isfinite(value):
            yield "not-finite", "loss"
        elif self._seen < 100:
            self._seen += 1
            self._largest = max(self._largest, value)
        elif value >= 10 * self._largest:
            yield "ten-times", "loss"


class Lightning(_Rule):
    """Lightning: a loss that is not finite, or that grows to three times the mean of the last ten."""

    name = "Lightning"

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=10)

    def look(self, step: Step) -> Iterator[tuple[str, str]]:
        if not math.isfinite(step.loss):
            yield "not-finite", "loss"
            return
        if self._last and step.loss > self._last[-1]:
            mean = statistics.fmean(self._last)
            if abs(step.loss - mean) >= abs(2 * mean):
                yield "spike", "loss"
                return
        self._last.append(step.loss)


class AutoTrainer(_Rule):
    """AutoTrainer's rules: vanishing and exploding gradients, dying ReLUs, oscillating loss, slow convergence.

    The rules run after every epoch, which here is ten steps. The first three need an accuracy that is below 0.7 or does
    not rise. The last two begin after 30 % of the 30 epochs.
    """

    name = "AutoTrainer"
    _EPOCH, _EPOCHS = 10, 30

    def __init__(self) -> None:
        self._accuracies: list[float] = []
        self._epochs: list[float] = []
        self._symptoms: set[str] = set()

    def look(self, step: Step) -> Iterator[tuple[str, str]]:
        if step.accuracy is not None:
            self._accuracies.append(step.accuracy)
        if (step.number + 1) % self._EPOCH:
            return
        if self._accuracies:
            self._epochs.append(statistics.fmean(self._accuracies))
            self._accuracies.clear()
        gradients = [p.grad for p in step.training.model.parameters() if p.grad is not None]
        kernels = [gradient for gradient in gradients if gradient.dim() > 1]
        if not math.isfinite(step.loss) or step.loss >= 1e5 or not math.isfinite(step.norm):
            yield "explode", "loss"
            return
        if len(kernels) > 1:
            first, last = (float(kernel.norm()) for kernel in (kernels[0], kernels[-1]))
            ratio = first / last if last else math.inf
            if ratio < 1e-3 and first < 1e-4:
                self._symptoms.add("vanish")
            if ratio > 70:
                self._symptoms.add("explode")
        zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
        if gradients and zeros >= 0.7 * sum(gradient.numel() for gradient in gradients):
            self._symptoms.add("relu")
        epochs = self._epochs
        if len(epochs) < 0.3 * self._EPOCHS:
            return
        is_slow = max((b - a for a, b in itertools.pairwise(epochs)), default=0.0) < 0.01
        if max(epochs) < 0.7 or is_slow:
            for symptom in ("relu", "explode", "vanish"):
                if symptom in self._symptoms:
                    yield symptom, "gradients"
                    return
            if is_slow:
                yield "not-converging", "accuracy"
        elif self._swings() >= 0.2 * len(epochs):
            yield "unstable", "accuracy"

    def _swings(self) -> int:
        """The number of pairs of a local maximum and a local minimum that are 0.03 apart."""
        a = self._epochs
        inner = range(1, len(a) - 1)
        tops = [a[i] for i in inner if a[i] >= a[i - 1] and a[i] >= a[i + 1]]
        bottoms = [a[i] for i in inner if a[i] <= a[i - 1] and a[i] <= a[i + 1]]
        return sum(top - bottom >= 0.03 for top, bottom in zip(tops, bottoms, strict=False))


RIVALS = (SixSigma, TenTimes, Lightning, AutoTrainer)
DETECT_ANOMALY = "torch detect_anomaly"  # a run of its own, as it raises
GOLDEN = "gradstat, golden runs"  # compares the recordings of finished runs
NAMES = (Gradstat.name, *(rival.name for rival in RIVALS), DETECT_ANOMALY)


class Watcher:
    """Takes the place of a training's monitor: passes every step on to tools, and keeps losses and norms."""

    def __init__(self, training: Training, tools: list[Tool]) -> None:
        self._training, self._tools = training, tools
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.found: dict[str, list[tuple[int, Found]]] = {tool.name: [] for tool in tools}
        self._labels: Any = None
        self._outputs: Any = None
        self._hook = training.model.register_forward_hook(self._see)

    def __deepcopy__(self, memo: Any) -> Watcher:
        return self  # a fault may copy the model, whose hook this is

    def _see(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs = getattr(output, "logits", output)

    def check_batch(self, batch: Any) -> None:
        self._labels = batch[1] if isinstance(batch, tuple) and len(batch) > 1 else None

    def step(self, loss: Tensor) -> None:
        step = Step(len(self.losses), self._training, float(loss), loss, self._norm(), self._accuracy())
        self.losses.append(step.loss)
        self.norms.append(step.norm)
        for tool in self._tools:
            self.found[tool.name] += [(step.number, found) for found in tool.step(step)]

    def _norm(self) -> float:
        gradients = [p.grad for p in self._training.model.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def _accuracy(self) -> float | None:
        logits, labels = self._outputs, self._labels
        if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or logits.shape[:-1] != labels.shape:
            return None
        known = labels >= 0
        return float((logits.detach().argmax(-1) == labels)[known].float().mean()) if known.any() else None

    def end(self) -> None:
        self._hook.remove()
        for tool in self._tools:
            self.found[tool.name] += [(len(self.losses) - 1, found) for found in tool.end()]


def anomaly_mode(is_on: bool) -> Any:
    """Torch's anomaly mode, in which the backward pass raises at the first operator that returns NaN."""
    return torch.autograd.detect_anomaly(check_nan=True) if is_on else nullcontext()
