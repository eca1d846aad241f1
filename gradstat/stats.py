"""Tables: every field of every tensor, left on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradstat._core.measure import COMPILED_FOR, measure, resolve_for
from gradstat._core.native import operators
from gradstat._core.tensors import name_by_position, readable


def stats(tensors: Iterable[Tensor], *, backend: str | None = None) -> Tensor:
    """All fields of all tensors in one pass: one kernel launch per device, no host sync.

    On a GPU the tensors that this and gradstat's other functions return do not heed ``record_stream``: if another
    stream reads one, let the stream that made it wait for that before the last reference goes.

    Args:
        tensors: Tensors of floating or complex dtype, of any layout that can be measured; the README
            lists them.
        backend: ``"native"``, ``"triton"`` or ``"reference"``; None chooses.

    Returns:
        ``[n, len(gradstat.FIELDS)]`` float64 on the device of the first tensor, its columns named by
        `gradstat.FIELDS`. Tensors on other devices are measured there and their rows moved, which makes the
        host wait if they move from a GPU to the CPU. An empty list gives an empty table on the CPU. The rows of
        distributed tensors are those of the whole, on all ranks, which all have to call this; ``first_nonfinite`` is
        then the index in the shard of the lowest rank that has one.

    Raises:
        TypeError, ValueError: A tensor cannot be measured; the message names its position.
        BackendUnavailableError: ``backend`` cannot run here.
    """
    if isinstance(tensors, Tensor):
        raise TypeError("expected a list of tensors, got a tensor; pass [tensor]")
    listed = tensors if isinstance(tensors, list) else list(tensors)
    if listed and torch.compiler.is_compiling():
        return _compiled_stats(listed, backend)
    measured = measure(listed, name_by_position, backend)
    if measured.failed is None:
        return measured.table()
    from gradstat._core.sharded import without_ranks

    return without_ranks(measured.nan_if_failed().table())


def _compiled_stats(tensors: list[Tensor], backend: str | None) -> Tensor:
    # Inside torch.compile everything here but the operator runs at trace time only.
    plain = readable(tensors, name_by_position)
    if backend is None and plain[0].device.type in COMPILED_FOR:
        table: Tensor = operators(plain[0].device).stats.default(plain)
        return table
    return resolve_for(backend, plain[0].device.type, name_by_position, 0).check(plain)[0]
