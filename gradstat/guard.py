"""`SpikeGuard`: refuses steps of an optimizer that are out of the ordinary, decided on the device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradstat._core import norms
from gradstat._core.backends import Kernels
from gradstat._core.host_copy import Mirror, Streams, behind, refuse_capture
from gradstat._core.tensors import is_distributed, moved
from gradstat.adaptive._base import number, whole_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SERIES = ("loss", "norm", "update")
# What the bits of a reason mean (csrc/decide.h).
_REASONS = ("nonfinite", *SERIES)
# Of the state: steps, refused, those by each series, not finite, refused in a row, reason, values of each series.
_REFUSED, _BY, _NONFINITE, _IN_A_ROW, _REASON, _RECORDED, _TOTALS = 1, 2, 5, 6, 7, 8, 11


@dataclass(frozen=True, slots=True)
class GuardCounts:
    """What a `SpikeGuard` has decided.

    Attributes:
        steps: Steps judged.
        refused: Those refused, skipped or scaled down.
        by_loss, by_norm, by_update: Those refused because of each; a step can be among several.
        nonfinite: Steps skipped because a gradient, the loss or the update was NaN or Inf. Not among ``refused``.
        in_a_row: Steps refused since the last that was taken, not counting those that were not finite.
        reasons: Why the last step was not taken as it was: some of ``"nonfinite"``, ``"loss"``, ``"norm"`` and
            ``"update"``; empty if it was.
    """

    steps: int
    refused: int
    by_loss: int
    by_norm: int
    by_update: int
    nonfinite: int
    in_a_row: int
    reasons: tuple[str, ...]


class SpikeGuard:
    """Refuses steps whose loss, gradient norm or update stands out from those before; for `gradstat.guarded_step`. ::

        guard = gradstat.SpikeGuard()
        ...
        gradstat.guarded_step(optimizer, max_norm=1.0, loss=loss, guard=guard)

    A value stands out if it is above the median of the last ones, less the newest eighth, by more than ``threshold``
    times their spread, the most of three: the median distance from it times 1.4826, which is the standard deviation of
    normal numbers; half the distance of the largest, as losses and norms have long tails; a hundredth of the median. So
    with the default it is three times as far away as any of them. Of updates all of the distance and of the median
    count, or a rare input, whose steps are large when all others are small, would never be learned. All but the first,
    and that the newest do not count, which may be a part of what grows, are conventions of gradstat;
    benchmarks/guards.py measures what comes of them.
    Steps that were refused do not enter, so a spike changes nothing. What is NaN or Inf is skipped whatever the rule.

    The state is one float64 tensor, made on the gradients' device at first use and then changed in place there: no
    step waits for the device, and steps can be captured into a CUDA graph once one has run outside of it. Use one
    guard for one optimizer.

    Over several ranks the loss is averaged over ``process_group`` first, by a reduction of one number, so all decide
    alike; all of them pass one, or none. Gradients are taken to be the same on all ranks, or distributed tensors.

    Args:
        threshold: How far a value may stand out, at least 0.
        window: How many values of each kind are kept.
        warmup: Values needed before the first is judged; None for half of the window. Limits hold from the start.
        max_consecutive: After so many refused in a row a step that only stands out is taken, and its values begin the
            statistics anew: the level has changed. None for no limit.
        scale: What the gradients of a refused step are multiplied by, behind any clip, between 0 and 1; None skips it.
            Skipped all the same is a step of which the update alone stands out, as smaller gradients do not mend a
            learning rate.
        max_loss, max_norm, max_update: A larger value is refused, in a row or not.
        process_group: Of the ranks that train together; None, as in torch, for all.

    Raises:
        ValueError: An option is out of range. TypeError: One that has to be is no integer.
    """

    def __init__(
        self,
        threshold: float = 6.0,
        window: int = 128,
        warmup: int | None = None,
        *,
        max_consecutive: int | None = 10,
        scale: float | None = None,
        max_loss: float = math.inf,
        max_norm: float = math.inf,
        max_update: float = math.inf,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._by_sigmas = False
        self._window = whole_number("window", window, 2)
        if scale is not None and not 0 < float(scale) < 1:
            raise ValueError(f"scale is {scale}; expected a number between 0 and 1, or None to skip refused steps")
        limits = {"max_loss": max_loss, "max_norm": max_norm, "max_update": max_update}
        for name, limit in limits.items():
            if math.isnan(float(limit)):
                raise ValueError(f"{name} is NaN; expected a number")
        self._numbers = (
            number("threshold", threshold, 0.0),
            float(max(2, self._window // 2) if warmup is None else whole_number("warmup", warmup, 2)),
            math.inf if max_consecutive is None else float(whole_number("max_consecutive", max_consecutive, 0)),
            0.0 if scale is None else float(scale),
            *map(float, limits.values()),
        )
        self._options: dict[str, object] = {"threshold": threshold, "window": window, "warmup": int(self._numbers[1])}
        self._options |= {"max_consecutive": max_consecutive, "scale": scale, **limits}
        self._group = process_group
        self._memory: Tensor | None = None
        self._streams: Streams = ()
        self._mirror = Mirror(self._totals)

    @classmethod
    def sigma(
        cls, window: int = 128, threshold: float = 6.0, *, max_consecutive: int | None = None, **options: Any
    ) -> SpikeGuard:
        """The rule of OLMo: refuses what is above the mean by more than ``threshold`` standard deviations.

        As ``SkipStepOptimizer`` of OLMo-core (src/olmo_core/optim/skip_step_optimizer.py): mean and unbiased standard
        deviation are those of the last ``window`` steps, refused ones included, once half a window has been seen, this
        step included. Unlike there, values that are NaN or Inf are skipped and not kept.

        Args:
            window, threshold, max_consecutive, options: As for `SpikeGuard`.
        """
        guard = cls(threshold, window, max(2, window // 2 - 1), max_consecutive=max_consecutive, **options)
        guard._by_sigmas = True
        return guard

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self._options.items())
        return f"{self._rule}({options})"

    @property
    def _rule(self) -> str:
        return "SpikeGuard.sigma" if self._by_sigmas else "SpikeGuard"

    @property
    def scales(self) -> bool:
        """Whether a refused step is scaled down rather than skipped."""
        return self._numbers[3] != 0

    def read(self, wait: bool = False) -> GuardCounts:
        """What was decided, on the host: the newest that has arrived.

        Without ``wait`` no call but the first waits for the device, as of `gradstat.StepCounters`.
        """
        with behind(self._streams):
            numbers = [int(number) for number in self._mirror.read(wait)]
        steps, refused, by_loss, by_norm, by_update, nonfinite, in_a_row, reason = numbers[:_RECORDED]
        return GuardCounts(steps, refused, by_loss, by_norm, by_update, nonfinite, in_a_row, reasons_of(reason))

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: ``"rule"``, and ``"tensors"``, by name, on their device. No host sync."""
        memory = self._new_memory() if self._memory is None else self._memory
        values = memory[_TOTALS:].view(len(SERIES), self._window)
        return {"rule": self._rule, "tensors": {"totals": memory[:_TOTALS].clone(), "values": values.clone()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, of `state_dict`, with own options; ValueError if of another rule or window.

        It is copied into a state that is there already, so that captured graphs see it. No host sync, unless values
        have to move from a GPU to the CPU.
        """
        values = state["tensors"]["values"]
        if state["rule"] != self._rule or values.shape[1] != self._window:
            raise ValueError(
                f"this is the state of {state['rule']} with window={values.shape[1]}, which {self!r} cannot continue "
                "from"
            )
        memory = torch.cat([state["tensors"]["totals"], values.reshape(-1)])
        self._memory = memory if self._memory is None else self._memory.copy_(memory)

    def _decide(
        self,
        kernels: Kernels,
        numbers: Tensor,
        verdict: Tensor,
        loss: Tensor | None,
        update: Tensor | None,
        counters: Tensor | None,
        streams: Streams,
    ) -> Tensor:
        """The verdict about a step, ``[4]`` float32: as of `norms.Decision`, and the reason. No host sync.

        ``numbers`` and ``verdict`` are those of the step's decision; the coefficient among the former is multiplied
        by ``scale`` if the step is refused. ``counters`` are those of its optimizer, to be counted in.
        """
        device = verdict.device
        if self._memory is None or self._memory.device != device:
            refuse_capture(device, "the state of a guard")
            self._memory = (self._new_memory() if self._memory is None else self._memory).to(device)
        self._streams = streams
        loss = None if loss is None else _on(self._over_ranks(loss.detach() if loss.requires_grad else loss), device)
        update = None if update is None else _on(update.detach(), device)
        options = (float(self._by_sigmas), *self._numbers)
        if kernels.guard_ is not None:
            return kernels.guard_(options, self._memory, self._window, numbers, verdict, loss, update, counters)
        return _judge(options, self._memory, self._window, numbers, verdict, [loss, numbers[1], update], counters)

    @property
    def reason(self) -> Tensor | None:
        """Why the last step was not taken as it was, as bits in a 0-d float64 on the device; None before the first."""
        return None if self._memory is None else self._memory[_REASON]

    def _totals(self) -> Tensor:
        return (self._new_memory() if self._memory is None else self._memory)[:_TOTALS]

    def _new_memory(self) -> Tensor:
        return torch.zeros(_TOTALS + len(SERIES) * self._window, dtype=torch.float64, device="cpu")

    def _over_ranks(self, loss: Tensor) -> Tensor:
        dist = torch.distributed
        if not dist.is_available() or not dist.is_initialized():
            return loss
        from gradstat._core import collectives

        group = collectives.member(self._group)
        if dist.get_world_size(group) == 1:
            return loss
        mean = loss.to(collectives.device_of(group), torch.float64) / dist.get_world_size(group)
        return collectives.reduce_(mean, dist.ReduceOp.SUM, [group], "guarded_step with a guard")


def _on(value: Tensor, device: torch.device) -> Tensor:
    return value if value.device == device else moved(value, device)


def reasons_of(bits: int) -> tuple[str, ...]:
    """What a reason says."""
    return tuple(name for i, name in enumerate(_REASONS) if bits >> i & 1)


def checked_value(name: str, value: Any) -> Tensor:
    """``value`` if a guard can judge it; else TypeError or ValueError."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected a tensor of one number, got {type(value).__name__}; pass the loss itself, not "
            "loss.item(), which waits for the device"
        )
    if is_distributed([value]):
        raise ValueError(f"{name} is a distributed tensor; pass {name}.full_tensor()")
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)} and {value.dtype}; expected one floating number, such "
            f"as {name}.mean()"
        )
    return value


_guards: weakref.WeakKeyDictionary[Optimizer, SpikeGuard] = weakref.WeakKeyDictionary()


def guard_of(optimizer: Optimizer | None) -> SpikeGuard | None:
    """The guard of the optimizer's last guarded step, if it had one."""
    return None if optimizer is None else _guards.get(optimizer)


def remember_guard(optimizer: Optimizer, guard: SpikeGuard) -> None:
    """For `guard_of`."""
    _guards[optimizer] = guard


def _judge(
    options: Sequence[float],
    memory: Tensor,
    window: int,
    numbers: Tensor,
    verdict: Tensor,
    values: Sequence[Tensor | None],
    counters: Tensor | None,
) -> Tensor:
    """As csrc/decide.h, which says why, in plain torch."""
    by_sigmas, threshold, warmup, most_in_a_row, scale, *limits = options
    totals, rings = memory[:_TOTALS], memory[_TOTALS:].view(len(SERIES), window)
    recorded = totals[_RECORDED:]
    finite, no = verdict[0] == 0, torch.zeros((), dtype=torch.bool, device=memory.device)
    above, outstanding = [no] * len(SERIES), [no] * len(SERIES)
    for i, value in enumerate(values):
        if value is None:
            continue
        value = value.reshape(()).to(torch.float64)
        finite = finite & value.isfinite()
        # The newest are left out, so that what grows step by step is held against what was before it grew.
        newest = 0 if by_sigmas else window // 8
        places = torch.arange(window, device=memory.device)
        held = (places < recorded[i]) & ((recorded[i] - 1 - places) % window >= newest)
        ring = torch.where(held, rings[i], math.nan)
        if by_sigmas:
            count = recorded[i].clamp(max=window)
            centre = ring.nansum() / count
            spread = ((ring - centre).square().nansum() / (count - 1)).sqrt()
        else:
            centre = ring.nanquantile(0.5)
            spread = 1.4826022185056018 * (ring - centre).abs().nanquantile(0.5)
            largest = torch.where(held, rings[i], -math.inf).amax()
            of_largest, of_centre = (1.0, 1.0) if SERIES[i] == "update" else (0.5, 0.01)
            spread = torch.maximum(torch.maximum(spread, of_largest * (largest - centre)), of_centre * centre.abs())
        above[i] = value > limits[i]
        is_known = recorded[i] >= max(warmup, newest + 2)
        outstanding[i] = ~above[i] & is_known & ~(value - centre <= threshold * spread)
    is_above, stands_out = torch.stack(above).any(), torch.stack(outstanding).any()
    gives_in = finite & stands_out & ~is_above & (totals[_IN_A_ROW] >= most_in_a_row)
    refused = finite & (is_above | (stands_out & ~gives_in))
    why = torch.stack([a | s for a, s in zip(above, outstanding, strict=True)]) & refused
    kept = finite & ~refused if not by_sigmas else finite
    recorded.mul_(~gives_in)
    for i, value in enumerate(values):
        if value is not None:
            at = (recorded[i] % window).long().view(1)
            held_now = rings[i].gather(0, at)
            rings[i].scatter_(0, at, torch.where(kept, value.reshape(1).to(torch.float64), held_now))
            recorded[i] += kept
    scaled = refused & (why[0] | why[1]) if scale else no
    coefficient = torch.where(scaled, scale, 1.0).to(torch.float64)
    skip = ~finite | (refused & ~scaled)
    bits = torch.tensor([2.0, 4.0, 8.0], dtype=torch.float64, device="cpu").to(memory.device)
    reason = (why * bits).sum() + (~finite).to(torch.float64)
    totals[0] += 1
    totals[_REFUSED] += refused
    totals[_BY:_NONFINITE] += why
    totals[_NONFINITE] += ~finite
    totals[_IN_A_ROW] = torch.where(finite, (totals[_IN_A_ROW] + 1) * refused, totals[_IN_A_ROW])
    totals[_REASON] = reason
    numbers[0] *= coefficient
    if counters is not None:
        norms.count_step(counters, skip)
    return torch.stack([skip, verdict[1] / coefficient, verdict[2], reason]).to(torch.float32)
