"""The axes of benchmarks of optimizer steps, from scaled gradients to updated parameters, and the input of a step.

The compared implementations are in `step_providers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cases import CASES, Shape, input_of
from torch import Tensor, nn

from gradstat import amp
from gradstat.bench.steps import LEARNING_RATE

GROUP = "optimizer steps"
QUICK_CASE, FULL_CASE = (case for case in CASES if case.name in ("ResNet-50, 161 tensors", "GPT-2 small, 148 tensors"))
LOSS_SCALE = 2.0**16
SEPARATOR = "; "  # between the parts of a row's case
OPTIMIZER = "AdamW, fused"
# It reads parameters, gradients and two states, and writes parameters and states
# (`aten/src/ATen/native/cpu/FusedAdamKernel.cpp`, `cuda/fused_adam_utils.cuh`).
PASSES = 4 + 3


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a step.

    Attributes:
        scaled: Whether gradients carry a loss scale.
        share: The limit of their norm, as a share of the actual norm.
    """

    scaled: bool
    share: float

    @property
    def name(self) -> str:
        return f"{'loss' if self.scaled else 'no'} scaler, {'clipped' if self.share < 1 else 'unclipped'}"

    @property
    def multiplier(self) -> float:
        return min(1.0, self.share)


SETTINGS = tuple(Setting(scaled, share) for scaled in (True, False) for share in (2.0, 0.5))
SCALED_AND_CLIPPED = SETTINGS[1]


def case_name(case: str, setting: Setting) -> str:
    """The ``case`` of a row."""
    return SEPARATOR.join((case, OPTIMIZER, setting.name))


class StepInput:
    """The input of a provider: gradients, parameters, an optimizer that has stepped before, scalers and clips.

    Attributes:
        setting: What it is made from.
        gradients: Random, times the loss scale if there is one.
        facts: Their true statistics without the loss scale.
        parameters: They begin at zero, so that changes by a small learning rate are not rounded away.
        optimizer: The optimizer of the parameters.
        torch_scaler, gradstat_scaler: Loss scalers whose scale stays constant; disabled if there is no loss scale.
        limit: The limit of the gradients' norm.
    """

    def __init__(self, shapes: list[Shape], setting: Setting, device: str = "cpu") -> None:
        self.setting = setting
        given = input_of(shapes, torch.float32, device)
        self.gradients, self.facts, self._fill = given.gradients, given.facts, given.restore
        self.bytes, self.device = given.bytes, given.device
        self.limit = setting.share * self.facts.norm
        self.parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in self.gradients]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, fused=True)
        self.renew()

    def restore(self) -> None:
        """Restores the gradients."""
        self._fill()
        if self.setting.scaled:
            torch._foreach_mul_(self.gradients, LOSS_SCALE)

    def renew(self) -> None:
        """Restores everything: the optimizer has taken one step, and the parameters are zero again."""
        self._fill()
        self.optimizer.state.clear()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_zero_(self.parameters)
        self.forget()
        self.restore()

    def forget(self) -> None:
        """Replaces scalers and clips by new ones."""
        self.torch_scaler, self.gradstat_scaler = self._scaler(torch.amp.GradScaler), self._scaler(amp.GradScaler)
        self._made: dict[Callable[[StepInput], Any], Any] = {}

    def _scaler(self, kind: Callable[..., torch.amp.GradScaler]) -> torch.amp.GradScaler:
        enabled = self.setting.scaled
        scaler = kind(self.device.type, init_scale=LOSS_SCALE, growth_interval=1 << 30, enabled=enabled)
        scaler.scale(torch.zeros(1, device=self.device))  # creates the scale tensor
        return scaler

    def made(self, make: Callable[[StepInput], Any]) -> Any:
        """The clip or guard that ``make`` returned on the first call."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a step changes, parameters and state, each with a name."""
        for i, parameter in enumerate(self.parameters):
            yield f"parameter {i}", parameter.detach()
            for name, value in self.optimizer.state[parameter].items():
                yield f"{name} of parameter {i}", value
