"""The compared implementations of a step from scaled gradients to updated parameters, and their verification.

Each provider states its memory traffic in passes. A pass reads or writes as many bytes as there are gradients;
parameters and state are float32 like them. The counts follow from the sources, plus those of the optimizer's step
(`optimizer_steps.OPTIMIZERS`):

- torch's ``unscale_`` and its clip multiply in place whatever the factor, one pass to read and one to write
  (``_amp_foreach_non_finite_check_and_unscale_``; ``torch/nn/utils/clip_grad.py``); the clip's norms are one more read.
- gradstat's statistics are one read. It multiplies in place only if the coefficient is not 1, and its ``unscale_``
  computes the statistics in the same pass.
- A fused optimizer that gets a divisor writes gradients back, one more pass. ``guarded_step`` passes a divisor unless
  it knows on the host that it is 1, which it does on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from optimizer_steps import LOSS_SCALE, OPTIMIZERS, Setting
from torch import Tensor, nn

import gradstat
from gradstat import amp
from gradstat.adaptive import AdaptiveClip
from gradstat.bench.steps import WrongAnswerError


def _agreed_factor(setting: Setting, gradient: Tensor) -> Tensor | float:
    return setting.circumstance.coefficient


@dataclass(frozen=True, slots=True)
class StepProvider:
    """An implementation of a step from gradients to parameters.

    Attributes:
        name: The displayed name.
        run: The timed call; returns the norm of the gradients before clipping, None if it does not compute it.
        passes: Memory passes over gradients, parameters and state, including the optimizer's.
        supports: Whether it can run in a setting.
        skips: Whether it leaves everything unchanged if a gradient is NaN.
        tolerance: Relative error allowed for the norm.
        factor: The gradient that the optimizer has to see, as a multiple of the given, unscaled gradient.
    """

    name: str
    run: Callable[[Setting], Tensor | None]
    passes: Callable[[Setting], int]
    supports: Callable[[Setting], bool] = lambda setting: True
    skips: Callable[[Setting], bool] = lambda setting: True
    tolerance: float = 1e-6
    factor: Callable[[Setting, Tensor], Tensor | float] = _agreed_factor


TORCH = "torch: unscale_, clip, step"
GUARDED = "gradstat.guarded_step"
AMP = "gradstat.amp: unscale_and_clip_, step"
ALONE = "limit: optimizer.step alone"
_READ, _MULTIPLY = 1, 2
_TORCH_ERROR = 1e-2  # of its float32 norm on a CPU: 9e-4 for GPT-2 small


def _torch_step(setting: Setting) -> Tensor:
    scaler, optimizer = setting.torch_scaler, setting.optimizer
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(setting.parameters, setting.limit)
    scaler.step(optimizer)
    scaler.update()
    return norm


def _torch_passes(setting: Setting) -> int:
    unscaling = _MULTIPLY if setting.circumstance.scaled else 0
    return unscaling + _READ + _MULTIPLY + setting.choice.passes


def _guarded_step(setting: Setting, max_norm: float | AdaptiveClip, **guard: Any) -> Tensor:
    scaler = setting.gradstat_scaler
    norm = gradstat.guarded_step(setting.optimizer, max_norm, scaler=scaler, **guard).total_norm
    scaler.update()
    return norm


def _guarded_passes(setting: Setting) -> int:
    rewritten = setting.circumstance.scaled or setting.circumstance.share < 1
    if setting.choice.fused:
        # Given a divisor, the optimizer writes gradients back. On a GPU it is always given one, even if that is 1.
        return _READ + setting.choice.passes + (1 if rewritten or setting.device.type != "cpu" else 0)
    return _READ + (_MULTIPLY if rewritten else 0) + setting.choice.passes


def _amp_step(setting: Setting) -> Tensor:
    scaler, optimizer = setting.gradstat_scaler, setting.optimizer
    assert isinstance(scaler, amp.GradScaler)
    norm = scaler.unscale_and_clip_(optimizer, setting.limit)
    scaler.step(optimizer)
    scaler.update()
    return norm


def _amp_passes(setting: Setting) -> int:
    return _MULTIPLY + (_MULTIPLY if setting.circumstance.share < 1 else 0) + setting.choice.passes


def _auto_clip(setting: Setting) -> gradstat.AutoClip:
    # The tenth percentile stays at the limit until more than nine times as many norms follow.
    clip = gradstat.AutoClip()
    for _ in range(100):
        clip.coefficient(torch.tensor(setting.limit, dtype=torch.float64, device=setting.device))
    return clip


def _spike_guard(setting: Setting) -> dict[str, Any]:
    # Past its warm-up, so that it judges every step, and with a threshold so high that it refuses none.
    guard, loss = gradstat.SpikeGuard(1e9), torch.ones((), device=setting.device)
    parameter = nn.Parameter(loss.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(200):
        parameter.grad = loss + step % 7
        gradstat.guarded_step(optimizer, loss=loss + step % 5, guard=guard)
    return {"guard": guard, "loss": loss}


def _unit_limit(setting: Setting) -> float:
    units = sum(len(gradient) if gradient.dim() > 1 else 1 for gradient in setting.gradients)
    return setting.limit / math.sqrt(units)


def _unit_factor(setting: Setting, gradient: Tensor) -> Tensor:
    units = gradient.flatten(1) if gradient.dim() > 1 else gradient.reshape(1, -1)
    factors = (_unit_limit(setting) / units.norm(dim=1)).clamp(max=1.0)
    return factors.view(-1, *[1] * (gradient.dim() - 1))


def _adaptive(
    make: Callable[[Setting], AdaptiveClip],
    passes: Callable[[Setting], int] = _guarded_passes,
    factor: Callable[[Setting, Tensor], Tensor | float] = _agreed_factor,
) -> Callable[[str], StepProvider]:
    """A guarded step with an adaptive clip, for one optimizer and clipped settings only: some always clip."""
    return lambda name: StepProvider(
        name,
        lambda setting: _guarded_step(setting, setting.made(make)),
        passes,
        supports=lambda setting: setting.choice is OPTIMIZERS[0] and setting.circumstance.share < 1,
        factor=factor,
    )


# All are configured to clip to the same norm; AGC clips each unit to its share of it.
_ADAPTIVE = {
    "FixedClip": _adaptive(lambda setting: gradstat.FixedClip(setting.limit)),
    "AutoClip": _adaptive(_auto_clip),
    "ZClip": _adaptive(lambda setting: gradstat.ZClip(max_norm=setting.limit)),
    "AdaGC": _adaptive(
        lambda setting: gradstat.AdaGC(absolute=setting.limit, warmup=1 << 30),
        lambda setting: _READ + _MULTIPLY + setting.choice.passes,
    ),
    "AGC": _adaptive(
        lambda setting: gradstat.AGC(clipping=_unit_limit(setting), eps=1.0),
        # The norms of units of gradients and of parameters are two more reads.
        lambda setting: _READ + 2 * _READ + _MULTIPLY + setting.choice.passes,
        _unit_factor,
    ),
}
ADAPTIVE = tuple(f"{GUARDED}, {name}" for name in _ADAPTIVE)
GUARD = f"{GUARDED}, SpikeGuard"

PROVIDERS = (
    StepProvider(GUARDED, lambda setting: _guarded_step(setting, setting.limit), _guarded_passes),
    StepProvider(
        GUARD,
        lambda setting: _guarded_step(setting, setting.limit, **setting.made(_spike_guard)),
        _guarded_passes,
        supports=lambda setting: setting.choice is OPTIMIZERS[0],
    ),
    StepProvider(AMP, _amp_step, _amp_passes, supports=lambda setting: setting.circumstance.scaled),
    StepProvider(
        TORCH, _torch_step, _torch_passes, skips=lambda setting: setting.circumstance.scaled, tolerance=_TORCH_ERROR
    ),
    StepProvider(
        ALONE,
        lambda setting: setting.optimizer.step(),
        lambda setting: setting.choice.passes,
        skips=lambda setting: False,
        factor=lambda setting, gradient: LOSS_SCALE if setting.circumstance.scaled else 1.0,
    ),
    *(make(name) for name, make in zip(ADAPTIVE, _ADAPTIVE.values(), strict=True)),
)


def providers_for(setting: Setting) -> list[StepProvider]:
    """The providers that run in this setting."""
    return [provider for provider in PROVIDERS if provider.supports(setting)]


_END = 1 << 16
_ROUNDING = 1e-4  # of a step in float32: the second moment's correction is a difference of numbers near 1


def _ends(tensor: Tensor) -> Tensor:
    """The first and last elements as float64, or all if they are few: steps treat all elements alike."""
    flat = tensor.reshape(-1)
    return (torch.cat([flat[:_END], flat[-_END:]]) if len(flat) > 2 * _END else flat).double().clone()


def _expected(provider: StepProvider, setting: Setting) -> list[Tensor]:
    """The expected `Setting.tensors` after a step, computed in float64 by torch's loop over tensors."""
    expected = []
    scale = LOSS_SCALE if setting.circumstance.scaled else 1.0
    for parameter, gradient in zip(setting.parameters, setting.gradients, strict=True):
        true = gradient.double() / scale
        wide = nn.Parameter(_ends(parameter.detach()))
        wide.grad = _ends(true * provider.factor(setting, true))
        optimizer = setting.choice.make_plain([wide])
        state = setting.optimizer.state[parameter]
        optimizer.state[wide] = {name: _ends(value) for name, value in state.items()}
        optimizer.step()
        expected += [wide.detach(), *optimizer.state[wide].values()]
    return expected


def verify(provider: StepProvider, setting: Setting) -> None:
    """Compares a step of ``provider`` with float64, so that no time of a wrong result is reported.

    Its norm, the parameters and the state must be right. If it claims to skip a step with a NaN, which is put into the
    last element, everything must stay the same bit for bit.

    Raises:
        WrongAnswerError: A check failed.
    """
    setting.renew()
    if provider.skips(setting):
        before = [_ends(tensor) for _, tensor in setting.tensors()]
        setting.gradients[-1].view(-1)[-1] = math.nan
        provider.run(setting)
        for (name, tensor), old in zip(setting.tensors(), before, strict=True):
            if not torch.equal(_ends(tensor), old):
                raise WrongAnswerError(f"{provider.name} changed {name} although a gradient is NaN")
        setting.forget()
        setting.restore()
    expected = _expected(provider, setting)
    norm = provider.run(setting)
    if norm is not None and not math.isclose(float(norm), setting.facts.norm, rel_tol=provider.tolerance):
        raise WrongAnswerError(f"{provider.name} returned norm {float(norm)}, expected {setting.facts.norm}")
    # Second moments scale with the square of the coefficient, which scales with the norm.
    tolerance = _ROUNDING + 2 * provider.tolerance
    for (name, tensor), right in zip(setting.tensors(), expected, strict=True):
        if not torch.allclose(_ends(tensor), right, rtol=tolerance, atol=1e-12):
            raise WrongAnswerError(f"{provider.name} updated {name} differently from a step in float64")
