"""The gradient noise scale, from the gradient norms of one micro-batch and of all micro-batches together."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import DeviceState, streams_of
from gradstat._core.measure import measure
from gradstat._core.parameters import gradients_of, labels_of, named_parameters_of
from gradstat._core.saved import Saved
from gradstat.adaptive._base import whole_number

_SQUARES, _LARGE = _fields.INDEX["sq_sum"], _fields.INDEX["sq_sum_large"]


@final
class NoiseScale:
    """The simple gradient noise scale, in examples, for training with gradient accumulation: the useful batch size.

    It is ``tr(S) / |G|^2``, where S is the covariance of the gradients of single examples and G their mean. It is
    estimated without bias from two squared norms, as in McCandlish et al., arXiv 1812.06162, appendix A: of the first
    micro-batch's gradients and of the accumulated ones. Numerator and denominator are smoothed separately. ::

        noise_scale = gradstat.NoiseScale(model, micro_batch_size=8)
        for _ in range(3):  # steps
            for inputs, targets in batches:
                (loss_of(model(inputs), targets) / len(batches)).backward()
                noise_scale.micro_batch()
            noise_scale.step()  # before gradients are clipped
            optimizer.step()
            optimizer.zero_grad()
        print(noise_scale.value(), noise_scale.by_layer())

    No step waits for the device. A measured step costs two passes over the gradients and nine small operations on their
    rows. The state is two float64 numbers per parameter, on the device. Steps with NaN or Inf, or with a float64
    element above 2**486, are left out. Losses must be means over the examples of a micro-batch. They may be divided by
    the number of micro-batches, because any factor that all gradients of a step share, such as a loss scale, cancels.
    Distributed tensors are measured as a whole. All ranks have to make the same calls.

    Args:
        parameters: As for `check`, except engines. Parameters that require a gradient now are measured from then on; a
            missing gradient counts as zero.
        micro_batch_size: The number of examples, at least 1, that the gradients seen by the first `micro_batch` are
            the mean of: the examples of all ranks, if gradients are reduced over ranks before that call (FSDP).
        ranks: The number of ranks over which the last micro-batch's ``backward()`` averages gradients that were local
            until then: DDP's, if the other micro-batches run under ``no_sync()``. With a single micro-batch,
            pass ``tracker.rows()`` of `gradstat.distributed.track_origin` to `micro_batch`.
        every: Measure one step out of this many, starting with the first, as the noise scale changes slowly.
        decay: The weight of the previous averages at each measured step, at least 0 and less than 1.
        backend: As for `check`, as are the errors.

    Raises:
        ValueError: A number is out of range, or no parameter requires a gradient.
    """

    def __init__(
        self,
        parameters: Any,
        micro_batch_size: int,
        *,
        ranks: int = 1,
        every: int = 4,
        decay: float = 0.99,
        backend: str | None = None,
    ) -> None:
        self._size = whole_number("micro_batch_size", micro_batch_size, 1)
        self._ranks = whole_number("ranks", ranks, 1)
        self._every = whole_number("every", every, 1)
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay is {decay}; expected a number from 0 to less than 1")
        named = named_parameters_of(parameters)
        if named.engine is not None:
            raise TypeError(f"{type(parameters).__name__} does not expose gradients per micro-batch")
        pairs = zip(named.names(), named.parameters, strict=True)
        trained = named_parameters_of([(name, parameter) for name, parameter in pairs if parameter.requires_grad])
        self._names = list(trained.names())
        self._named = trained._replace(names=functools.partial(list, self._names))  # can be pickled
        if not self._names:
            raise ValueError(f"none of the {len(named.parameters)} parameters requires a gradient")
        self._decay, self._backend = decay, backend
        self._averages = DeviceState(torch.zeros(2, len(self._names), dtype=torch.float64, device="cpu"))
        self._first: Tensor | None = None  # rows of the first micro-batch, in a step that is measured
        self._count = 0  # micro-batches in the current step
        self._steps = 0

    def __repr__(self) -> str:
        return f"NoiseScale({len(self._names)} parameters, {self._steps} steps)"

    @never_traced
    def micro_batch(self, rows: Tensor | None = None) -> None:
        """Call after each micro-batch's ``backward()``. In a measured step, the first call reads the gradients.

        These have to be the gradients of that micro-batch alone, so zero or None before it.

        Args:
            rows: The result of `stats` for the parameters' gradients, if it is known already: saves a pass over them.

        Raises:
            RuntimeError: No parameter has a gradient. ValueError: ``rows`` has another shape. Others as in `check`.
        """
        if not self._count and self._steps % self._every == 0:
            self._first = self._rows("micro_batch()", rows)
        self._count += 1

    @never_traced
    @torch.no_grad()
    def step(self, rows: Tensor | None = None) -> None:
        """Call after the last `micro_batch` of a step, before gradients are clipped or otherwise changed.

        ``rows`` and errors are as for `micro_batch`. Additionally:

        Raises:
            RuntimeError: There was no `micro_batch` since the last step, or only one on a single rank: then both norms
                are the same, and nothing can be estimated.
        """
        if not self._count:
            raise RuntimeError("step() before micro_batch(); call that after the backward() of each micro-batch")
        if self._count * self._ranks < 2:
            raise RuntimeError(
                "this step has one micro-batch, but the noise scale is estimated from the difference between one and "
                "all; accumulate at least two, see `ranks` for DDP, and call reset() where an epoch ends with one"
            )
        if self._first is not None:
            self._add(torch.stack([self._first, self._rows("step()", rows)]))
        self._steps += 1
        self.reset()

    def reset(self) -> None:
        """Discards the micro-batches since the last `step`, for a step that is abandoned."""
        self._first = None
        self._count = 0

    def value(self, wait: bool = True) -> float:
        """The noise scale of all parameters together, in examples; NaN before the first step.

        Inf while the estimate of the mean gradient's square is not positive. This happens when the noise scale is far
        above the number of examples in a step.

        Args:
            wait: True includes all steps so far. If False, only the first call waits for a GPU. The value may then be
                some steps old, which is enough for a logger.
        """
        noise, signal = self._read(wait)
        return _ratio(float(noise.sum()), float(signal.sum()))

    def by_layer(self, depth: int | None = None, wait: bool = True) -> dict[str, float]:
        """The noise scale of each parameter that had a gradient, by name; ``wait`` and values are as for `value`.

        Args:
            depth: Groups parameters by this many leading parts of their names: 2 gives ``"blocks.0"``, ``"blocks.1"``.
        """
        sums: dict[str, tuple[float, float]] = {}
        for name, noise, signal in zip(self._names, *self._read(wait).tolist(), strict=True):
            if noise or signal:
                layer = ".".join(name.split(".")[:depth])
                sum_so_far = sums.get(layer, (0.0, 0.0))
                sums[layer] = sum_so_far[0] + noise, sum_so_far[1] + signal
        return {layer: _ratio(noise, signal) for layer, (noise, signal) in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """A copy of the averages, on their device, with the parameter names and micro-batch size. No host sync."""
        return {"averages": self._averages.tensor.clone(), "names": list(self._names), "micro_batch_size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``, made by `state_dict`, with any micro-batch size. Waits for the device.

        Raises:
            ValueError: The state is of other parameters, or not what `state_dict` returns; the entry is named. Nothing
                has been changed then.
        """
        saved = Saved(state)
        if saved["names"].value != self._names:
            raise ValueError("this state is of other parameters, or of the same in another order or under other names")
        averages, size = saved["averages"].numbers(2, len(self._names)).clone(), saved["micro_batch_size"]
        if not isinstance(size.value, int) or not 1 <= size.value <= 2**53:
            size.refuse("a whole number from 1 to 2**53")
        averages[0] *= size.value / self._size
        saved["averages"].require(averages, averages.isfinite(), "a finite number")
        self._averages.load_(averages)
        self.reset()

    def _add(self, both: Tensor) -> None:
        """Adds a step to the averages, given the rows of its first micro-batch and of all micro-batches."""
        before = self._averages.moved_to(both.device, "the averages of NoiseScale")
        # With s and a the squared norms of the gradients averaged over one micro-batch of b examples, and over all n
        # micro-batches of all ranks, tr(S) is estimated as b (s - a) / (1 - 1/n) and |G|^2 as (a - s/n) / (1 - 1/n).
        # The divisors cancel, and b is applied when values are read. The first measurement is s / count^2, since a
        # micro-batch's gradients are one summand of the rank's mean.
        first, whole = both[..., _SQUARES]
        minus_noise = torch.sub(whole, first, alpha=self._count**2)
        signal = torch.sub(whole, first, alpha=self._count / self._ranks)
        left_out = both[..., _fields.NONFINITE].any() | both[..., _LARGE].any()
        after = before.lerp(torch.stack([minus_noise, signal]), 1.0 - self._decay)
        torch.where(left_out, before, after, out=before)
        self._averages.streams = streams_of([before])

    def _rows(self, caller: str, rows: Tensor | None) -> Tensor:
        """One row per parameter; zeros, correct for the columns used here, for a parameter without a gradient."""
        expected = (len(self._names), _fields.COUNT)
        if rows is not None:
            if rows.shape != expected:
                raise ValueError(
                    f"rows has the shape {tuple(rows.shape)}; expected {expected}: the table that gradstat.stats "
                    "returns for the gradients of all parameters that require one"
                )
            return rows
        gradients = gradients_of(self._named.parameters)
        if not gradients.tensors:
            raise RuntimeError(f"no parameter has a gradient; call {caller} after backward() and before zero_grad()")
        named = self._named
        name_of = labels_of(named, gradients).of
        measured = measure(gradients.tensors, name_of, self._backend, parameters=named.parameters, names=named.names)
        rows = measured.nan_if_failed().table()[:, : _fields.COUNT]  # rows of distributed tensors have one more column
        if gradients.positions is None:
            return rows
        at = torch.tensor(gradients.positions, device="cpu").to(rows.device, non_blocking=True)
        return rows.new_zeros(expected).index_copy_(0, at, rows)

    def _read(self, wait: bool) -> Any:
        """The averages of noise and signal for each parameter, [2, parameters], on the host."""
        averages = self._averages.newest(wait).copy()
        averages[0] *= -self._size
        return averages


def _ratio(noise: float, signal: float) -> float:
    if signal > 0.0:
        return max(noise, 0.0) / signal
    return math.inf if noise > 0.0 else math.nan
