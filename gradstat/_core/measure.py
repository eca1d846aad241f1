"""From a list of tensors, of any kind and on any device, to their rows, their norm, or a decision about a step.

Lists of ordinary tensors on one device go directly to the compiled kernels, other lists are prepared in Python first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core import backends, norms
from gradstat._core.backends import COMPILED_FOR, NOT_COMPILED, Kernels
from gradstat._core.measurement import Measurement
from gradstat._core.native import BackendUnavailableError, DeviceModule, StaleExtensionError
from gradstat._core.norms import Decision, StepRequest
from gradstat._core.parameters import Names
from gradstat._core.tensors import (
    ExtraGroups,
    NameOf,
    TensorInfo,
    by_device,
    is_distributed,
    readable,
    refuse_distributed,
    to_device,
    writable,
)

_INFO_CACHE_SIZE = 64
_infos_by_signature: dict[tuple[int, int], tuple[TensorInfo, ...]] = {}


class Spread(NamedTuple):
    """What is known about tensors that ranks measure together, besides what distributed tensors say themselves."""

    # If the tensors are gradients, those that have or may get one: ranks without some of the gradients take part, too.
    parameters: list[Tensor] | None = None
    names: Names | None = None  # of the parameters, or else of the tensors, which ranks compare
    extra_groups: ExtraGroups | None = None  # as for `gradstat.check`

    def is_over_ranks(self, tensors: list[Any]) -> bool:
        """Whether other ranks take part in measuring ``tensors``, and wait for this one."""
        return self.extra_groups is not None or is_distributed(tensors or self.parameters or ())


ANY = Spread()


def measure(
    tensors: list[Any],
    name_of: NameOf,
    backend: str | None,
    spread: Spread | None = ANY,
    *,
    in_place: bool = False,
    to_host: bool = False,
) -> Measurement:
    """The rows of ``tensors``, without waiting for a device; one launch per device.

    Distributed tensors are measured shard by shard and their rows merged over their process groups, all of whose ranks
    have to call this. If ``spread`` is None, their rows are those of this rank's shards. ``in_place`` refuses tensors
    that cannot be multiplied in place, before anything is measured, and informs the other ranks. With ``to_host`` the
    launch also begins the copy that `HostRows` needs, if it can.
    """
    if tensors and (spread is None or spread.extra_groups is None):
        measured = measure_ordinary(tensors, backend, to_host)
        if measured is not None:
            return measured
    with torch.no_grad():
        if spread is not None and spread.is_over_ranks(tensors):
            return _merged(tensors, name_of, backend, spread, "rows", in_place)
        return _prepared(tensors, name_of, backend, in_place)


def measure_ordinary(tensors: list[Any], backend: str | None, to_host: bool = False) -> Measurement | None:
    """`measure` for ordinary tensors on one device, or an empty list; None, with nothing done, for other tensors."""
    if not tensors:
        return Measurement([], None, ())
    compiled = compiled_for(tensors, backend)
    begins_copy = compiled.check_to_host if to_host else None
    checked = (begins_copy or compiled.check)(tensors)
    if checked is None:
        return None
    table, signature, *receive = checked
    return Measurement([table], None, infos_of(tensors, signature), receive=receive[0] if receive else None)


def measure_step(
    gradients: list[Tensor],
    name_of: NameOf,
    backend: str | None,
    step: StepRequest,
    spread: Spread | None,
    *,
    in_place: bool = False,
) -> tuple[Measurement, Decision]:
    """`measure` for gradients, and the decision about an optimizer's step that follows from their rows.

    If ``spread`` is None, distributed gradients are refused.
    """
    if gradients and (spread is None or spread.extra_groups is None):
        compiled = compiled_for(gradients, backend)
        decided = compiled.measure_step(gradients, step.max_norm, 2.0, step.loss_scale, step.counters)
        if decided is not None:
            table, signature, *numbers = decided
            return Measurement([table], None, infos_of(gradients, signature)), Decision(*numbers)
    if spread is None:
        refuse_distributed(gradients, name_of)
    measured = measure(gradients, name_of, backend, spread, in_place=in_place)
    with torch.no_grad():
        decision = norms.decide(measured.summands(), step)
        return measured, decision._replace(norm=decision.norm.to(norms.norm_dtype(gradients)))


def measure_norm(
    tensors: list[Tensor],
    max_norm: float,
    norm_type: float,
    name_of: NameOf,
    backend: str | None,
    spread: Spread = ANY,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of all ``tensors``, in their promoted dtype, and the float64 multiplier that clips them to ``max_norm``.

    Both are on the first tensor's device; arguments and errors are as in `measure`. NaN if another rank could not
    measure its part: raising instead would need a sync.
    """
    if tensors and spread.extra_groups is None and is_fused(tensors, norm_type):
        measured = compiled_for(tensors, backend).measure_norm(tensors, max_norm, norm_type)
        if measured is not None:
            return measured
    with torch.no_grad():
        norm = _norm(tensors, norm_type, name_of, backend, spread, in_place)
        return norm.to(norms.norm_dtype(tensors)), norms.clip_multiplier(norm, max_norm)


def is_fused(tensors: list[Any], norm_type: float) -> bool:
    """Whether a norm of order ``norm_type`` can be derived from a table. `readable` refuses what is no tensor."""
    return norm_type == 2.0 or (
        norm_type == math.inf and not any(isinstance(t, Tensor) and (t.is_complex() or not t.numel()) for t in tensors)
    )


def compiled_for(tensors: list[Any], backend: str | None) -> DeviceModule:
    """The functions for lists of ordinary tensors on the first one's device, which return None for any other list.

    They return None also if the backend is unavailable: preparing the tensors then raises and informs the other ranks.
    """
    first = tensors[0]
    if not isinstance(first, Tensor):
        return NOT_COMPILED
    device_type = "cpu" if first.is_cpu else first.device.type  # the latter makes a new string
    if device_type not in COMPILED_FOR:
        return NOT_COMPILED
    try:
        return backends.resolve(backend, device_type).direct
    except (BackendUnavailableError, ValueError):
        return NOT_COMPILED


def _norm(
    tensors: list[Tensor], norm_type: float, name_of: NameOf, backend: str | None, spread: Spread, in_place: bool
) -> Tensor:
    """The norm of all ``tensors``, 0-d float64 on the first one's device."""
    if spread.is_over_ranks(tensors):
        if norm_type not in (2.0, math.inf):
            raise NotImplementedError(
                f"over several ranks gradstat supports norms of order 2 and inf only, not {norm_type}; use "
                "torch.nn.utils.clip_grad_norm_"
            )
        to: Literal["sums", "total"] = "sums" if norm_type == 2.0 else "total"
        return norms.total_norm(_merged(tensors, name_of, backend, spread, to, in_place).summands(), norm_type)
    if is_fused(tensors, norm_type):
        return norms.total_norm(_prepared(tensors, name_of, backend, in_place).summands(), norm_type)
    plain = readable(tensors, name_of, in_place)
    kernels_for(by_device(plain), backend, name_of)  # only to raise if the backend is unavailable
    each = []
    for tensor in plain:
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        each.append(to_device(torch.linalg.vector_norm(tensor.to(wide), norm_type), plain[0].device))
    total: Tensor = torch.linalg.vector_norm(torch.stack(each), norm_type)
    return total


def _merged(
    tensors: list[Any],
    name_of: NameOf,
    backend: str | None,
    spread: Spread,
    reduce_to: Literal["rows", "total", "sums"],
    in_place: bool,
) -> Measurement:
    """The rows of ``tensors``, merged over ranks.

    For smaller and fewer reductions ``reduce_to`` limits the result to the total, with the extremes of complex
    elements' moduli, or to the total's summed fields.
    """
    from gradstat._core.sharded import Sharded

    sharded = Sharded(tensors, spread.parameters, spread.extra_groups, spread.names)

    def measure_local(local: list[Tensor]) -> Measurement:
        if in_place and sharded.has_partial:
            writable(tensors, name_of)  # in ``local`` are reduced copies of some
        if reduce_to == "total" and not is_fused(local, math.inf):
            # The extremes in a row are those of the parts of complex elements, not of their moduli.
            plain = readable(local, name_of, in_place)
            local = [t.to(torch.complex128).abs() if t.is_complex() else t for t in plain]
            return _prepared(local, name_of, backend)
        # Tensors that the kernels can read directly they can also multiply in place.
        return measure(local, name_of, backend, None, in_place=in_place)

    if reduce_to == "rows":
        return sharded.rows(measure_local)
    return sharded.total(measure_local, reduce_to == "total")


def _prepared(tensors: list[Any], name_of: NameOf, backend: str | None, in_place: bool = False) -> Measurement:
    """The rows of any measurable tensors, on any devices; for distributed tensors, the rows of their local shards."""
    sparse: dict[int, Tensor] = {}
    plain = readable(tensors, name_of, in_place, sparse)
    groups = by_device(plain)
    tables, signature = [], None
    for device, positions in groups.items():
        kernels = resolve_for(backend, device.type, name_of, positions[0])
        table, signature = kernels.check([plain[i] for i in positions])
        tables.append(table)
        for row, position in enumerate(positions) if sparse else ():
            if position in sparse:
                _locate_(table[row], sparse[position])
    # The signature of copies says nothing about the layout of the tensors, which `infos_of` stands for.
    is_theirs = len(groups) == 1 and all(map(operator.is_, plain, tensors))
    infos = infos_of(plain, signature if is_theirs else None)
    if sparse:
        infos = [
            info._replace(shape=sparse[i].shape, stored=info.numel) if i in sparse else info
            for i, info in enumerate(infos)
        ]
    order = [position for positions in groups.values() for position in positions]
    return Measurement(tables, order if len(groups) > 1 else None, infos)


def _locate_(row: Tensor, sparse: Tensor) -> None:
    """Replaces the index in ``row``, of a coalesced tensor's values, by the index in the whole tensor. No sync."""
    values, indices = sparse.values(), sparse.indices()
    if not values.numel():
        return
    for column, field in enumerate(_fields.FIELDS):
        if not field.is_index:
            continue
        is_there = row[column].isfinite()
        flat = torch.where(is_there, row[column], 0.0).to(torch.int64).reshape(1)
        size = values[0].numel()
        at, place = indices.index_select(1, flat // size), torch.zeros_like(flat)
        for dim in range(len(at)):
            place = place * sparse.shape[dim] + at[dim]
        row[column] = torch.where(is_there, (place * size + flat % size).squeeze(0).to(row.dtype), row[column])


def resolve_for(backend: str | None, device_type: str, name_of: NameOf, i: int) -> Kernels:
    """`resolve`; an error names the i-th tensor, which is on that device type."""
    try:
        return backends.resolve(backend, device_type)
    except BackendUnavailableError as error:
        if isinstance(error, StaleExtensionError):
            raise
        raise BackendUnavailableError(f"{error} ({name_of(i)!r} is on a device of type {device_type!r})") from error


def kernels_for(
    groups: dict[torch.device, list[int]], backend: str | None, name_of: NameOf
) -> dict[torch.device, Kernels]:
    """The kernels for tensors grouped by `by_device`; errors as of `resolve_for`."""
    return {device: resolve_for(backend, device.type, name_of, at[0]) for device, at in groups.items()}


def infos_of(tensors: Sequence[Tensor], signature: int | None) -> Sequence[TensorInfo]:
    """The metadata that reports need about ``tensors``, cached by the signature that `Kernels.check` returned."""
    # Equal signatures mean equal sizes, strides, dtypes and devices, so a cache hit does not inspect the tensors.
    if signature is None:
        return [TensorInfo.of(tensor) for tensor in tensors]
    key = (len(tensors), signature)
    infos = _infos_by_signature.get(key)
    if infos is None:
        infos = tuple(TensorInfo.of(tensor) for tensor in tensors)
        if len(_infos_by_signature) >= _INFO_CACHE_SIZE:
            _infos_by_signature.clear()
        _infos_by_signature[key] = infos
    return infos
