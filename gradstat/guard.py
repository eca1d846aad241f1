"""`SpikeGuard`: rejects outlier steps of an optimizer; the decision is made on the device."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradstat._core import norms
from gradstat._core.backends import Kernels
from gradstat._core.host_copy import DeviceState, Streams
from gradstat._core.saved import are_counts, exactly, numbers, require
from gradstat._core.tensors import is_distributed, to_device
from gradstat._core.text import as_number
from gradstat.adaptive._base import number, positive, whole_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SERIES = ("loss", "norm")
# Names of the bits of a reason (csrc/decide.h).
_REASONS = ("nonfinite", *SERIES)
# Offsets in the state: steps, refused, refused by each series, not finite, refused in a row, reason, and the number of
# recorded values of each series; the values themselves begin at _TOTALS.
_REFUSED, _BY, _NONFINITE, _IN_A_ROW, _REASON, _RECORDED, _TOTALS = 1, 2, 4, 5, 6, 7, 9

_DIGESTS = 1 << 16  # so that sums of squares over many ranks are exact

# For this guard (csrc/decide.h) and the rules of the monitor.
THRESHOLD = 6.0
OF_LARGEST, OF_MEDIAN = 0.5, 0.01
# Standard deviation of a normal distribution over its median absolute deviation.
MAD = 1.4826022185056018


@dataclass(frozen=True, slots=True)
class GuardCounts:
    """The decisions of a `SpikeGuard` so far.

    Attributes:
        steps: Steps that the guard decided about.
        refused: Steps refused, that is skipped or scaled down.
        by_loss, by_norm: Steps refused because of each value; a step may count in both.
        nonfinite: Steps skipped because a gradient or the loss was NaN or Inf. Not included in ``refused``.
        consecutive_refused: Steps refused since the last step that was taken, not counting non-finite ones.
        reasons: Why the last step was not taken unchanged: some of ``"nonfinite"``, ``"loss"`` and ``"norm"``;
            empty if it was taken.
    """

    steps: int
    refused: int
    by_loss: int
    by_norm: int
    nonfinite: int
    consecutive_refused: int
    reasons: tuple[str, ...]


class SpikeGuard:
    """Refuses steps whose loss or gradient norm is an outlier; for `gradstat.guarded_step`. ::

        guard = gradstat.SpikeGuard()
        ...
        gradstat.guarded_step(optimizer, max_norm=1.0, loss=loss, guard=guard)

    A value is an outlier if it exceeds the median of the last values, excluding the newest eighth of the window, by
    more than ``threshold`` times their spread. The spread is the largest of three numbers. The first is the median
    absolute deviation times 1.4826, which estimates the standard deviation of normally distributed values. The second
    is half the distance from the median to the largest value, because losses and norms have long tails. The third is a
    hundredth of the median. With the default threshold an outlier is therefore more than three times as far from the
    median as the largest value. Except for the first, these terms are conventions of gradstat, as is excluding the
    newest values, which may already be part of a growth; benchmarks/guards.py measures their effect. Values of refused
    steps are not recorded, so a spike changes nothing. NaN and Inf are skipped whatever the method.

    The state is one float64 tensor, made on the gradients' device at first use and then changed in place: no step waits
    for the device, and steps can be captured into a CUDA graph once one has run outside of it. Use one guard per
    optimizer.

    With several ranks the loss is first averaged over ``process_group``, by an all-reduce of one number, so that all
    ranks decide alike. Either all ranks pass a loss, or none. Gradients must be the same on all ranks, or be
    distributed tensors. Inside of DDP's ``join()``, where ranks end at different steps, only the norm decides.
    A state has to be loaded on all ranks or on none: it is compared at the next step, which otherwise raises
    RuntimeError.

    Args:
        threshold: How many spreads a value may exceed the median by, at least 0.
        window: The number of values kept of each kind.
        warmup: The number of values before the first one can be an outlier; None for half of the window. Limits apply
            from the start.
        max_consecutive: After this many refusals in a row, a step that exceeds no limit is taken although it is an
            outlier, and the statistics restart with its values, since losses or norms now are of another size. None
            for no limit.
        scale: The factor, between 0 and 1, that multiplies the gradients of a refused step after any clip; None skips
            the step.
        max_loss, max_norm: Limits above which a value is always refused, even after ``max_consecutive``; the latter
            above 0.
        process_group: The ranks that train together; None for all ranks.

    Raises:
        ValueError: An option is out of range. TypeError: An option that has to be an integer is not.
    """

    def __init__(
        self,
        threshold: float = THRESHOLD,
        window: int = 128,
        warmup: int | None = None,
        *,
        max_consecutive: int | None = 10,
        scale: float | None = None,
        max_loss: float = math.inf,
        max_norm: float = math.inf,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._by_sigmas = False
        self._window = whole_number("window", window, 2)
        if scale is not None and not 0 < as_number("scale", scale) < 1:
            raise ValueError(f"scale is {scale}; expected a number between 0 and 1, or None to skip refused steps")
        limits = {"max_loss": max_loss, "max_norm": max_norm}
        if not as_number("max_loss", max_loss) > -math.inf:
            raise ValueError(f"max_loss is {float(max_loss)}; expected a number, or inf for no limit")
        positive("max_norm", max_norm, "inf for no limit")
        self._method_options = (
            number("threshold", threshold, 0.0),
            float(max(2, self._window // 2) if warmup is None else whole_number("warmup", warmup, 2)),
            math.inf if max_consecutive is None else float(whole_number("max_consecutive", max_consecutive, 0)),
            0.0 if scale is None else float(scale),
            *map(float, limits.values()),
        )
        self._options: dict[str, object] = {"threshold": threshold, "window": window}
        self._options |= {"warmup": int(self._method_options[1]), "max_consecutive": max_consecutive}
        self._options |= {"scale": scale, **limits}
        self.scales: bool = scale is not None  # a refused step, rather than to skip it
        self._group = process_group
        self._is_compared = False  # whether its state is known to be the same on all ranks
        numbers = torch.zeros(_TOTALS + len(SERIES) * self._window, dtype=torch.float64, device="cpu")
        self.state: DeviceState = DeviceState(numbers)

    @classmethod
    def sigma(
        cls, window: int = 128, threshold: float = 6.0, *, max_consecutive: int | None = None, **options: Any
    ) -> SpikeGuard:
        """The method of OLMo: refuses values that exceed the mean by more than ``threshold`` standard deviations.

        Like ``SkipStepOptimizer`` of OLMo-core (src/olmo_core/optim/skip_step_optimizer.py): mean and unbiased standard
        deviation are over the last ``window`` steps, including refused ones, once half a window has been seen, counting
        the current step. Unlike there, NaN and Inf are skipped and not recorded.

        Args:
            window, threshold, max_consecutive, options: As for `SpikeGuard`.
        """
        guard = cls(threshold, window, max(2, window // 2 - 1), max_consecutive=max_consecutive, **options)
        guard._by_sigmas = True
        return guard

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self._options.items())
        return f"{self._method}({options})"

    @property
    def _method(self) -> str:
        return "SpikeGuard.sigma" if self._by_sigmas else "SpikeGuard"

    def read(self, wait: bool = False) -> GuardCounts:
        """The newest decisions that have arrived on the host.

        Without ``wait`` only the first call waits for the device, as in `gradstat.StepCounters`.
        """
        numbers = map(int, self.state.newest(wait, lambda: self.state.tensor[:_RECORDED]))
        steps, refused, by_loss, by_norm, nonfinite, consecutive, reason = numbers
        return GuardCounts(steps, refused, by_loss, by_norm, nonfinite, consecutive, reasons_of(reason))

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: ``"rule"``, and ``"tensors"`` by name on their device. There is no host sync."""
        memory = self.state.tensor
        values = memory[_TOTALS:].view(len(SERIES), self._window)
        return {"rule": self._method, "tensors": {"totals": memory[:_TOTALS].clone(), "values": values.clone()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, made by `state_dict`, keeping its options.

        An existing state is overwritten in place, so that captured graphs see it. Waits for the device.

        Raises:
            ValueError: The state is of another method or window, or not what `state_dict` returns; the entry is named.
                Nothing has been changed then.
        """
        self.state.load_(state_tensor_of(self, state))
        self._is_compared = False

    @property
    def reason(self) -> Tensor:
        """Why the last step was not taken unchanged, as bits in a 0-d float64 on the device."""
        return self.state.tensor[_REASON]


def state_tensor_of(guard: SpikeGuard, state: Any, place: str = "state") -> Tensor:
    """The state tensor that ``guard.load_state_dict`` takes from the ``state`` at this place; ValueError as there."""
    kinds = {
        "totals": numbers((_TOTALS,), "counts", are_counts),
        "values": numbers((len(SERIES), guard._window), "finite numbers", torch.isfinite),
    }
    require(state, {"rule": exactly(guard._method), "tensors": kinds}, place)
    totals, values = (state["tensors"][name].detach() for name in kinds)
    return torch.cat([totals.to(values.device), values.reshape(-1)])


def decide(
    guard: SpikeGuard,
    kernels: Kernels,
    scaling: Tensor,
    verdict: Tensor,
    loss: Tensor | None,
    counters: Tensor | None,
    streams: Streams,
) -> Tensor:
    """The verdict on a step, ``[4]`` float32: that of `norms.Decision`, then the reason. No host sync.

    ``kernels`` are a backend's. ``scaling`` and ``verdict`` are from the step's decision; its multiplier is
    multiplied by ``scale`` if the step is refused. ``loss`` is judged if it is given.
    ``counters`` are the optimizer's, and count the step. ``streams`` are the streams that ``scaling`` is filled on.
    """
    device = verdict.device
    memory = guard.state.moved_to(device, "the state of a guard")
    guard.state.streams = streams
    if loss is not None:
        mean = _over_ranks(guard, loss.detach() if loss.requires_grad else loss)
        loss = None if mean is None else to_device(mean, device)
    if kernels.guard_ is not None:
        options = (float(guard._by_sigmas), *guard._method_options)
        return kernels.guard_(options, memory, guard._window, scaling, verdict, loss, counters)
    return _judge(guard, memory, scaling, verdict, loss, counters)


def _judge(
    guard: SpikeGuard, memory: Tensor, scaling: Tensor, verdict: Tensor, loss: Tensor | None, counters: Tensor | None
) -> Tensor:
    """Same as csrc/decide.h, which explains it, in plain torch."""
    threshold, warmup, most_in_a_row, scale, *limits = guard._method_options
    by_sigmas, window, values = guard._by_sigmas, guard._window, (loss, scaling[norms.NORM])
    totals, rings = memory[:_TOTALS], memory[_TOTALS:].view(len(SERIES), window)
    recorded = totals[_RECORDED:]
    finite, no = verdict[norms.SKIP] == 0, torch.zeros((), dtype=torch.bool, device=memory.device)
    above, outliers = [no] * len(SERIES), [no] * len(SERIES)
    for i, value in enumerate(values):
        if value is None:
            continue
        value = value.reshape(()).to(torch.float64)
        finite = finite & value.isfinite()
        newest = 0 if by_sigmas else window // 8
        places = torch.arange(window, device=memory.device)
        is_compared = (places < recorded[i]) & ((recorded[i] - 1 - places) % window >= newest)
        ring = torch.where(is_compared, rings[i], math.nan)
        if by_sigmas:
            count = recorded[i].clamp(max=window)
            centre = ring.nansum() / count
            spread = ((ring - centre).square().nansum() / (count - 1)).sqrt()
        else:
            centre = ring.nanquantile(0.5)
            spread = MAD * (ring - centre).abs().nanquantile(0.5)
            largest = torch.where(is_compared, rings[i], -math.inf).amax()
            spread = torch.maximum(torch.maximum(spread, OF_LARGEST * (largest - centre)), OF_MEDIAN * centre.abs())
        above[i] = value > limits[i]
        is_known = recorded[i] >= max(warmup, newest + 2)
        outliers[i] = ~above[i] & is_known & ~(value - centre <= threshold * spread)
    is_above, is_outlier = torch.stack(above).any(), torch.stack(outliers).any()
    accepts_new_level = finite & is_outlier & ~is_above & (totals[_IN_A_ROW] >= most_in_a_row)
    refused = finite & (is_above | (is_outlier & ~accepts_new_level))
    why = torch.stack([a | o for a, o in zip(above, outliers, strict=True)]) & refused
    is_recorded = finite & ~refused if not by_sigmas else finite
    recorded.mul_(~accepts_new_level)
    for i, value in enumerate(values):
        if value is not None:
            at = (recorded[i] % window).long().view(1)
            held_now = rings[i].gather(0, at)
            rings[i].scatter_(0, at, torch.where(is_recorded, value.reshape(1).to(torch.float64), held_now))
            recorded[i] += is_recorded
    scaled = refused if scale else no
    multiplier = torch.where(scaled, scale, 1.0).to(torch.float64)
    skip = ~finite | (refused & ~scaled)
    bits = to_device(torch.tensor([2.0, 4.0], dtype=torch.float64, device="cpu"), memory.device)
    reason = (why * bits).sum() + (~finite).to(torch.float64)
    totals[0] += 1
    totals[_REFUSED] += refused
    totals[_BY:_NONFINITE] += why
    totals[_NONFINITE] += ~finite
    totals[_IN_A_ROW] = torch.where(finite, (totals[_IN_A_ROW] + 1) * refused, totals[_IN_A_ROW])
    totals[_REASON] = reason
    scaling[norms.MULTIPLIER].mul_(multiplier)
    if counters is not None:
        norms.count_step(counters, skip)
    judged = [skip, verdict[norms.DIVISOR] / multiplier, verdict[norms.LOSS_SCALE], reason]
    return torch.stack(judged).to(torch.float32)


def leave(guard: SpikeGuard, loss: Tensor | None, error: Exception) -> None:
    """After a step failed with ``error``, still takes part in the mean of the loss: other ranks wait for it."""
    if loss is None or not torch.distributed.is_available():
        return
    from gradstat._core.collectives import UnreachableRankError

    if not isinstance(error, UnreachableRankError):
        _over_ranks(guard, torch.full_like(loss, math.nan, requires_grad=False))


def _over_ranks(guard: SpikeGuard, loss: Tensor) -> Tensor | None:
    """The mean of the loss. None inside of DDP's ``join()``, where a rank that has ended would not take part."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return loss
    from gradstat._core import collectives
    from gradstat._core.wrappers import is_joining

    group = collectives.require_member(guard._group)
    if dist.get_world_size(group) == 1:
        return loss
    module = _replicas[guard]() if guard in _replicas else None
    if module is not None and is_joining(module):
        return None
    world = dist.get_world_size(group)
    values = torch.nn.functional.pad(loss.reshape(1).to(collectives.device_of(group), torch.float64) / world, (0, 3))
    is_new, guard._is_compared = not guard._is_compared, True
    if is_new:  # waits for the device, once
        digest = zlib.crc32(guard.state.tensor.cpu().numpy().tobytes()) % _DIGESTS
        values[1:] = torch.tensor([1.0, digest, digest**2], dtype=torch.float64)
    collectives.reduce_(values, dist.ReduceOp.SUM, [group], "guarded_step with a guard")
    if is_new or values.is_cpu:
        _, news, digests, squares = values.tolist()
        if news not in (0, world) or squares * world != digests**2:
            guard._is_compared = False
            raise RuntimeError(collectives.differing_states(guard, group))
    return values[0]


def reasons_of(bits: int) -> tuple[str, ...]:
    """The names of the bits of a reason."""
    return tuple(name for i, name in enumerate(_REASONS) if bits >> i & 1)


def checked_value(name: str, value: Any) -> Tensor:
    """``value``, checked to be one that a guard can judge. Raises TypeError or ValueError."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected a tensor with one element, got {type(value).__name__}; pass the loss itself, not "
            "loss.item(), which waits for the device"
        )
    if is_distributed([value]):
        raise ValueError(f"{name} is a distributed tensor; pass {name}.full_tensor()")
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise ValueError(
            f"{name} is a tensor of shape {tuple(value.shape)} and {value.dtype}; expected one floating-point "
            f"number, such as {name}.mean()"
        )
    return value


# By optimizer, the guard of its last guarded step.
last_guards: weakref.WeakKeyDictionary[Optimizer, SpikeGuard] = weakref.WeakKeyDictionary()
# By guard, what returns the DDP module whose steps it judges, or None.
_replicas: weakref.WeakKeyDictionary[SpikeGuard, Callable[[], Any]] = weakref.WeakKeyDictionary()


def begin(guard: SpikeGuard, optimizer: Optimizer) -> None:
    """Before ``guard`` judges a step of ``optimizer``."""
    last_guards[optimizer] = guard
    if torch.distributed.is_available() and torch.distributed.is_initialized() and guard not in _replicas:
        from gradstat._core.collectives import replica_of

        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        _replicas[guard] = replica_of(next(parameters, None))
