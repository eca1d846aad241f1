"""`update_stats`: the size and composition of the update that an optimizer is about to make."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gradstat import _fields
from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import HostCopy
from gradstat._core.parameters import named_by, named_parameters_of, names_at
from gradstat._core.tensors import to_device
from gradstat._core.text import columns, printable
from gradstat._step import loss_scale as _scaling
from gradstat._step.optimizers import in_order
from gradstat._step.updates import kind_of, update_sums
from gradstat.tensor_stats import ByName

_SHOWN = 20
# The sums that are finite if and only if the tensor they are computed from is, unless squares overflow float64.
_OPERANDS = ("gradient", "weight", "momentum", "second_moment")


class UpdateStats(NamedTuple):
    """One parameter's upcoming update. A number is NaN if it is undefined (as 0 / 0) or an input is NaN or Inf.

    Attributes:
        name: Name of the parameter.
        update_rms: Root mean square of what the next ``step()`` adds to the parameter, learning rate included.
        update_to_weight: Norm of the update over the norm of the current parameter.
        scaled_gradient_rms: Root mean square of the gradient over the root of its second moment, as in the step: with
            this gradient included, bias-corrected, ``eps`` added. About 1 while gradients stay as they were; a far
            larger value means an outdated second moment (M. Wortsman and others, arXiv 2304.13013; N. Shazeer and
            M. Stern, arXiv 1804.04235). NaN for SGD, which has no second moment.
        cosine: Cosine of the angle between the gradient and the momentum before this step; NaN without momentum.
        nonfinite: Which of ``"gradient"``, ``"weight"``, ``"momentum"`` and ``"second_moment"`` contain NaN or Inf, or
            have squares beyond float64; every number is then NaN.
    """

    name: str
    update_rms: float
    update_to_weight: float
    scaled_gradient_rms: float
    cosine: float
    nonfinite: tuple[str, ...] = ()


UPDATE_FIELDS: tuple[str, ...] = UpdateStats._fields[1:-1]
"""Names of the columns of `UpdateReport.table`, in order."""


class UpdateReport(ByName[UpdateStats]):
    """The upcoming updates of all parameters with a gradient; iterates over `UpdateStats`, ``report[name]`` gives one.

    Returned by `update_stats`. It waits for the device only when the first number is read or when it is pickled. A
    pickled report has its tensors on the CPU. A report holds no parameter.
    """

    def __init__(self, names: Any, sums: Tensor, sizes: Sequence[int]) -> None:
        self._names = names
        self._sums, self._sizes = sums, sizes
        self._copy = HostCopy(sums)

    def __reduce__(self) -> tuple[Any, ...]:
        sums = torch.from_numpy(self._copy.wait().copy())
        return UpdateReport, (functools.partial(tuple, self.names), sums, tuple(self._sizes))

    @functools.cached_property
    def table(self) -> Tensor:
        """``[n, 4]`` float64 on the device, with the columns of `UPDATE_FIELDS`. No sync."""
        sizes = torch.tensor(self._sizes, dtype=torch.float64, device="cpu")
        table: Tensor = _derived(torch, self._sums, to_device(sizes, self._sums.device))
        return table

    @functools.cached_property
    def overall(self) -> Tensor:
        """``[4]``: the same values for all parameters taken together, on the device. No sync.

        One of these, or of the largest, ``report.table.amax(0)``, can be given to a guard.
        """
        overall: Tensor = _derived(torch, self._sums.sum(0), float(sum(self._sizes)))
        return overall

    @functools.cached_property
    def _rows(self) -> Any:
        with np.errstate(all="ignore"):
            return _derived(np, self._copy.wait(), np.array(self._sizes, dtype=np.float64))

    def _absent(self, name: str) -> str:
        return f"no parameter named {name!r} with a gradient in this report; see report.names"

    def _at(self, i: int) -> UpdateStats:
        sums = dict(zip(_fields.UPDATE_SUMS, self._copy.wait()[i].tolist(), strict=True))
        nonfinite = tuple(name for name in _OPERANDS if not np.isfinite(sums[name]))
        return UpdateStats._make([self.names[i], *self._rows[i].tolist(), nonfinite])

    def __repr__(self) -> str:
        return f"UpdateReport({len(self)} parameters)"

    @never_traced
    def __str__(self) -> str:
        worst = np.argsort(-np.nan_to_num(self._rows[:, 1], nan=np.inf), kind="stable")[:_SHOWN].tolist()
        rows = [(printable(stats.name), *(f"{value:.3g}" for value in stats[1:-1])) for stats in map(self._at, worst)]
        lines = columns([("", *UPDATE_FIELDS), *rows])
        return "\n".join([f"gradstat: the next update of {len(self)} parameters, largest first", *lines])


def _derived(xp: Any, sums: Any, sizes: Any) -> Any:
    """The columns of `UPDATE_FIELDS` from the sums; ``xp`` is numpy or torch."""
    by = {name: sums[..., column] for column, name in enumerate(_fields.UPDATE_SUMS)}
    # A non-finite input may give a finite update: Inf in a second moment makes it 0. So NaN is added explicitly.
    nothing = 0.0 * sum(by[name] for name in _OPERANDS)
    update = by["update"] + nothing
    cosine = xp.clip(by["product"] / xp.sqrt(by["gradient"]) / xp.sqrt(by["momentum"]), -1.0, 1.0)
    columns = [
        xp.sqrt(update / sizes),
        xp.sqrt(update / by["weight"]),
        xp.sqrt((by["scaled_gradient"] + nothing) / sizes),
        cosine + nothing,
    ]
    return xp.stack(columns, -1)


@never_traced
def update_stats(
    model: Module | Optimizer | None = None,
    optimizer: Optimizer | Module | None = None,
    *,
    scaler: Any = None,
    backend: str | None = None,
) -> UpdateReport:
    """Measures the update that the next ``optimizer.step()`` makes, before it is made. No host sync.

    Call it where ``step`` is called, after clipping. One pass reads gradients, parameters and states, and nothing is
    written. Supports torch's SGD, Adam, AdamW, NAdam, RAdam and Adamax, fused or not, and classes that inherit their
    ``step``. Decoupled weight decay (AdamW) is excluded, as it does not depend on the gradient. The L2 penalty of all
    other optimizers is included as part of the gradient, because it enters gradient, momentum and second moment.

    Distributed tensors are measured shard by shard and their rows summed over the process groups. All ranks have to
    call this, with gradients for the same parameters.

    Args:
        model: The module whose parameter names are used, as for `guarded_step`. May be left out, as in
            ``update_stats(optimizer)``.
        optimizer: An optimizer with gradients from ``backward()``. The two may come in either order.
        scaler: The loss scaler, if gradients still carry its scale.
        backend: As for `check`.

    Returns:
        An entry for each parameter with a gradient, to about 1e-6, in float64 for float64 parameters.

    Raises:
        NotImplementedError: The class of ``optimizer`` is not supported; a gradient is sparse, or is sharded in another
            way than its parameter.
        TypeError: ``optimizer`` is not a torch optimizer, ``model`` not a module, or ``scaler`` not a loss scaler.
        ValueError: A state is missing or has another shape than its parameter; a tensor cannot be measured.
        BackendUnavailableError: ``backend`` cannot run here.
    """
    module, stepping = in_order(model, optimizer)
    kind_of(stepping)
    scaler = _scaling.inner_scaler(scaler)
    is_scaled = scaler is not None and scaler.is_enabled() and _scaling.is_still_scaled(scaler, stepping)
    scale = _scaling.require_scale(scaler, "update_stats") if is_scaled else None
    named = named_parameters_of(stepping)
    if module is not None:
        named = named_by(module, named)
    positions, sizes, sums = update_sums(stepping, lambda i: named.names()[i], backend, scale)
    return UpdateReport(names_at(named, positions), sums, sizes)
