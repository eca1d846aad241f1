"""Steps from scaled gradients to updated parameters: settings, input, compared implementations, and their verification.

Each provider states its memory traffic in passes. A pass reads or writes as many bytes as there are gradients;
parameters and state are float32 like them. The counts follow from the sources, plus those of the optimizer's step
(`PASSES`):

- torch's ``unscale_`` and its clip multiply in place whatever the factor, one pass to read and one to write
  (``_amp_foreach_non_finite_check_and_unscale_``; ``torch/nn/utils/clip_grad.py``); the clip's norms are one more read.
- gradstat's statistics are one read. It multiplies in place only if the multiplier is not 1, and its ``unscale_``
  computes the statistics in the same pass.
- A fused optimizer that gets a divisor writes gradients back, one more pass. ``guarded_step`` passes a divisor unless
  it knows on the host that it is 1, which it does on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cases import CASES, Shape, input_of
from torch import Tensor, nn

import gradstat
from gradstat import amp
from gradstat.adaptive import AdaptiveClip
from gradstat.bench.steps import LEARNING_RATE, WrongAnswerError

GROUP = "optimizer steps"
QUICK_CASE, FULL_CASE = (case for case in CASES if case.name in ("ResNet-50, 161 tensors", "GPT-2 small, 148 tensors"))
LOSS_SCALE = 2.0**16
# Of AdamW, fused, which reads parameters, gradients and two states, and writes parameters and states
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
    return f"{case}; AdamW, fused; {setting.name}"


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


def _agreed_factor(given: StepInput, gradient: Tensor) -> Tensor | float:
    return given.setting.multiplier


@dataclass(frozen=True, slots=True)
class StepProvider:
    """An implementation of a step from gradients to parameters.

    Attributes:
        name: The displayed name.
        run: The timed call; returns the norm of the gradients before clipping, None if it does not compute it.
        passes: Memory passes over gradients, parameters and state, including the optimizer's.
        supports: Whether it can run on an input.
        skips: Whether it leaves everything unchanged if a gradient is NaN.
        tolerance: Relative error allowed for the norm.
        factor: The gradient that the optimizer has to see, as a multiple of the given, unscaled gradient.
    """

    name: str
    run: Callable[[StepInput], Tensor | None]
    passes: Callable[[StepInput], int]
    supports: Callable[[StepInput], bool] = lambda given: True
    skips: Callable[[StepInput], bool] = lambda given: True
    tolerance: float = 1e-6
    factor: Callable[[StepInput, Tensor], Tensor | float] = _agreed_factor


GUARDED = "gradstat.guarded_step"
ALONE = "limit: optimizer.step alone"
_READ, _MULTIPLY = 1, 2
_TORCH_ERROR = 1e-2  # of its float32 norm on a CPU: 9e-4 for GPT-2 small


def _torch_step(given: StepInput) -> Tensor:
    scaler, optimizer = given.torch_scaler, given.optimizer
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(given.parameters, given.limit)
    scaler.step(optimizer)
    scaler.update()
    return norm


def _torch_passes(given: StepInput) -> int:
    unscaling = _MULTIPLY if given.setting.scaled else 0
    return unscaling + _READ + _MULTIPLY + PASSES


def _guarded_step(given: StepInput, max_norm: float | AdaptiveClip, **guard: Any) -> Tensor:
    scaler = given.gradstat_scaler
    norm = gradstat.guarded_step(given.optimizer, max_norm, scaler=scaler, **guard).total_norm
    scaler.update()
    return norm


def _guarded_passes(given: StepInput) -> int:
    # Given a divisor, the optimizer writes gradients back. On a GPU it is always given one, even if that is 1.
    rewritten = given.setting.scaled or given.setting.share < 1 or given.device.type != "cpu"
    return _READ + PASSES + rewritten


def _amp_step(given: StepInput) -> Tensor:
    scaler, optimizer = given.gradstat_scaler, given.optimizer
    assert isinstance(scaler, amp.GradScaler)
    norm = scaler.unscale_and_clip_(optimizer, given.limit)
    scaler.step(optimizer)
    scaler.update()
    return norm


def _amp_passes(given: StepInput) -> int:
    return _MULTIPLY + (_MULTIPLY if given.setting.share < 1 else 0) + PASSES


def _auto_clip(given: StepInput) -> gradstat.AutoClip:
    # The tenth percentile stays at the limit until more than nine times as many norms follow.
    clip = gradstat.AutoClip()
    for _ in range(100):
        clip.multiplier(torch.tensor(given.limit, dtype=torch.float64, device=given.device))
    return clip


def _spike_guard(given: StepInput) -> dict[str, Any]:
    # Past its warm-up, so that it judges every step, and with a threshold so high that it refuses none.
    guard, loss = gradstat.SpikeGuard(1e9), torch.ones((), device=given.device)
    parameter = nn.Parameter(loss.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(200):
        parameter.grad = loss + step % 7
        gradstat.guarded_step(optimizer, loss=loss + step % 5, guard=guard)
    return {"guard": guard, "loss": loss}


def _unit_limit(given: StepInput) -> float:
    units = sum(len(gradient) if gradient.dim() > 1 else 1 for gradient in given.gradients)
    return given.limit / math.sqrt(units)


def _unit_factor(given: StepInput, gradient: Tensor) -> Tensor:
    units = gradient.flatten(1) if gradient.dim() > 1 else gradient.reshape(1, -1)
    factors = (_unit_limit(given) / units.norm(dim=1)).clamp(max=1.0)
    return factors.view(-1, *[1] * (gradient.dim() - 1))


def _in_one_setting(given: StepInput) -> bool:
    return given.setting is SCALED_AND_CLIPPED


def _adaptive(
    name: str,
    make: Callable[[StepInput], AdaptiveClip],
    passes: Callable[[StepInput], int] = _guarded_passes,
    factor: Callable[[StepInput, Tensor], Tensor | float] = _agreed_factor,
) -> StepProvider:
    """A guarded step with an adaptive clip, in the setting in which all clip to the same norm."""
    run = lambda given: _guarded_step(given, given.made(make))  # noqa: E731
    return StepProvider(f"{GUARDED}, {name}", run, passes, _in_one_setting, factor=factor)


PROVIDERS = (
    StepProvider(GUARDED, lambda given: _guarded_step(given, given.limit), _guarded_passes),
    StepProvider(
        f"{GUARDED}, SpikeGuard",
        lambda given: _guarded_step(given, given.limit, **given.made(_spike_guard)),
        _guarded_passes,
        _in_one_setting,
    ),
    StepProvider(
        "gradstat.amp: unscale_and_clip_, step", _amp_step, _amp_passes, supports=lambda given: given.setting.scaled
    ),
    StepProvider(
        "torch: unscale_, clip, step",
        _torch_step,
        _torch_passes,
        skips=lambda given: given.setting.scaled,
        tolerance=_TORCH_ERROR,
    ),
    StepProvider(
        ALONE,
        lambda given: given.optimizer.step(),
        lambda given: PASSES,
        skips=lambda given: False,
        factor=lambda given, gradient: LOSS_SCALE if given.setting.scaled else 1.0,
    ),
    _adaptive("FixedClip", lambda given: gradstat.FixedClip(given.limit)),
    _adaptive("AutoClip", _auto_clip),
    _adaptive("ZClip", lambda given: gradstat.ZClip(max_norm=given.limit)),
    _adaptive(
        "AdaGC",
        lambda given: gradstat.AdaGC(absolute=given.limit, warmup=1 << 30),
        lambda given: _READ + _MULTIPLY + PASSES,
    ),
    _adaptive(
        "AGC",  # which clips each unit to its share of the norm
        lambda given: gradstat.AGC(clipping=_unit_limit(given), eps=1.0),
        # The norms of units of gradients and of parameters are two more reads.
        lambda given: _READ + 2 * _READ + _MULTIPLY + PASSES,
        _unit_factor,
    ),
)


def providers_for(given: StepInput) -> list[StepProvider]:
    """The providers that run on this input."""
    return [provider for provider in PROVIDERS if provider.supports(given)]


_END = 1 << 16
_ROUNDING = 1e-4  # of a step in float32: the second moment's correction is a difference of numbers near 1


def _ends(tensor: Tensor) -> Tensor:
    """The first and last elements as float64, or all if they are few: steps treat all elements alike."""
    flat = tensor.reshape(-1)
    return (torch.cat([flat[:_END], flat[-_END:]]) if len(flat) > 2 * _END else flat).double().clone()


def _expected(provider: StepProvider, given: StepInput) -> list[Tensor]:
    """The expected `StepInput.tensors` after a step, computed in float64 by torch's loop over tensors."""
    expected = []
    scale = LOSS_SCALE if given.setting.scaled else 1.0
    for parameter, gradient in zip(given.parameters, given.gradients, strict=True):
        true = gradient.double() / scale
        wide = nn.Parameter(_ends(parameter.detach()))
        wide.grad = _ends(true * provider.factor(given, true))
        optimizer = torch.optim.AdamW([wide], lr=LEARNING_RATE, foreach=False)
        state = given.optimizer.state[parameter]
        optimizer.state[wide] = {name: _ends(value) for name, value in state.items()}
        optimizer.step()
        expected += [wide.detach(), *optimizer.state[wide].values()]
    return expected


def verify(provider: StepProvider, given: StepInput) -> None:
    """Compares a step of ``provider`` with float64, so that no time of a wrong result is reported.

    Its norm, the parameters and the state must be right. If it claims to skip a step with a NaN, which is put into the
    last element, everything must stay the same bit for bit.

    Raises:
        WrongAnswerError: A check failed.
    """
    given.renew()
    if provider.skips(given):
        before = [_ends(tensor) for _, tensor in given.tensors()]
        given.gradients[-1].view(-1)[-1] = math.nan
        provider.run(given)
        for (name, tensor), old in zip(given.tensors(), before, strict=True):
            if not torch.equal(_ends(tensor), old):
                raise WrongAnswerError(f"{provider.name} changed {name} although a gradient is NaN")
        given.forget()
        given.restore()
    expected = _expected(provider, given)
    norm = provider.run(given)
    if norm is not None and not math.isclose(float(norm), given.facts.norm, rel_tol=provider.tolerance):
        raise WrongAnswerError(f"{provider.name} returned norm {float(norm)}, expected {given.facts.norm}")
    # Second moments scale with the square of the multiplier, which scales with the norm.
    tolerance = _ROUNDING + 2 * provider.tolerance
    for (name, tensor), right in zip(given.tensors(), expected, strict=True):
        if not torch.allclose(_ends(tensor), right, rtol=tolerance, atol=1e-12):
            raise WrongAnswerError(f"{provider.name} updated {name} differently from a step in float64")
