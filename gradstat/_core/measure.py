"""`measure`: the single entry point from a list of tensors, of any kind and on any device, to their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core import backends, norms
from gradstat._core.backends import Kernels
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
    to_device,
    writable,
)

# Device types that have compiled kernels.
COMPILED_FOR = frozenset({"cpu", "cuda"})
_INFO_CACHE_SIZE = 64
_infos_by_signature: dict[tuple[int, int], tuple[TensorInfo, ...]] = {}


def measure(
    tensors: list[Any],
    name_of: NameOf,
    backend: str | None,
    *,
    step: StepRequest | None = None,
    parameters: list[Tensor] | None = None,
    extra_groups: ExtraGroups | None = None,
    names: Names | None = None,
    over_ranks: bool = True,
    in_place: bool = False,
    reduce_to: Literal["rows", "total", "sums"] = "rows",
    to_host: bool = False,
) -> Measurement:
    """The rows of ``tensors``, without waiting for a device; one launch per device.

    Ordinary tensors on one device go directly to the compiled kernels. Other tensors, and other backends, are prepared
    in Python first, by `readable`. Distributed tensors are measured shard by shard and their rows merged over their
    process groups, all of whose ranks have to call this.

    With ``step`` it also decides about an optimizer's step. If ``tensors`` are gradients, ``parameters`` are their
    parameters: ranks without some of the gradients then take part as well. ``names`` returns the names of the
    parameters, or else of the tensors, which ranks compare. With ``over_ranks=False``, rows of distributed tensors are
    those of this rank's shards. ``in_place`` refuses tensors that cannot be multiplied in place, before anything is
    measured, and tells the other ranks. For smaller and fewer reductions of distributed tensors, ``reduce_to`` limits
    the result to the total, with the extremes of complex elements' moduli, or to the total's summed fields. With
    ``to_host`` the launch also begins the copy that `HostRows` needs, if it can.
    """
    is_awaited = extra_groups is not None or (not tensors and parameters is not None and is_distributed(parameters))
    if not is_awaited:
        measured = measure_directly(tensors, name_of, backend, step, to_host)
        if measured is not None:
            return measured
    with torch.no_grad():
        if is_awaited or (over_ranks and is_distributed(tensors)):
            from gradstat._core.sharded import Sharded

            sharded = Sharded(tensors, parameters, extra_groups, names)

            def measure_local(local: list[Tensor]) -> Measurement:
                if in_place and sharded.has_partial:
                    writable(tensors, name_of)  # in ``local`` are reduced copies of some
                if reduce_to == "total" and not is_fused(local, math.inf):
                    # The extremes in a row are those of the parts of complex elements, not of their moduli.
                    plain = readable(local, name_of, in_place)
                    local = [t.to(torch.complex128).abs() if t.is_complex() else t for t in plain]
                    return _measure_any(local, name_of, backend)
                # Tensors that the kernels can read directly they can also multiply in place.
                direct = measure_directly(local, name_of, backend)
                return direct if direct is not None else _measure_any(local, name_of, backend, in_place)

            measured = (
                sharded.rows(measure_local)
                if reduce_to == "rows"
                else sharded.total(measure_local, reduce_to == "total")
            )
        else:
            measured = _measure_any(tensors, name_of, backend, in_place)
        if step is not None:
            decision = norms.decide(measured.summands(), step)
            norm = decision.norm.to(norms.norm_dtype(tensors))
            measured = measured._replace(decision=decision._replace(norm=norm))
        return measured


def is_fused(tensors: list[Any], norm_type: float) -> bool:
    """Whether a norm of order ``norm_type`` can be derived from a table. `readable` refuses what is no tensor."""
    return norm_type == 2.0 or (
        norm_type == math.inf and not any(isinstance(t, Tensor) and (t.is_complex() or not t.numel()) for t in tensors)
    )


@torch.no_grad()
def norm_of(
    tensors: list[Tensor],
    norm_type: float,
    name_of: NameOf,
    backend: str | None,
    *,
    parameters: list[Tensor] | None = None,
    extra_groups: ExtraGroups | None = None,
    in_place: bool = False,
) -> Tensor:
    """The norm of all ``tensors``, 0-d float64 on the first one's device; arguments and errors as in `measure`.

    NaN if another rank could not measure its part: raising instead would need a sync.
    """
    is_over_ranks = extra_groups is not None or is_distributed(tensors or parameters or [])
    if is_over_ranks and norm_type not in (2.0, math.inf):
        raise NotImplementedError(
            f"over several ranks gradstat supports norms of order 2 and inf only, not {norm_type}; use "
            "torch.nn.utils.clip_grad_norm_"
        )
    if not is_over_ranks and not is_fused(tensors, norm_type):
        plain = readable(tensors, name_of, in_place)
        kernels_for(by_device(plain), backend, name_of)  # only to raise if the backend is unavailable
        each = []
        for tensor in plain:
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            each.append(to_device(torch.linalg.vector_norm(tensor.to(wide), norm_type), plain[0].device))
        total: Tensor = torch.linalg.vector_norm(torch.stack(each), norm_type)
        return total
    to: Literal["total", "sums"] = "sums" if norm_type == 2.0 else "total"
    measured = measure(
        tensors, name_of, backend, parameters=parameters, extra_groups=extra_groups, in_place=in_place, reduce_to=to
    )
    return norms.total_norm(measured.summands(), norm_type)


def measure_directly(
    tensors: list[Any], name_of: NameOf, backend: str | None, step: StepRequest | None = None, to_host: bool = False
) -> Measurement | None:
    """`measure` for ordinary tensors on one device, or an empty list; None, with nothing done, for other tensors."""
    if not tensors:
        return Measurement([], None, ())
    direct = direct_for(tensors[0], backend)
    if direct is None:
        return None
    if step is None:
        checked = (getattr(direct, "check_to_host", direct.check) if to_host else direct.check)(tensors)
        if checked is None:
            return None
        table, signature, *receive = checked
        return Measurement([table], None, infos_of(tensors, signature), receive=receive[0] if receive else None)
    decided = direct.measure_step(tensors, step.max_norm, 2.0, step.loss_scale, step.counters)
    if decided is None:
        return None
    table, signature, norm, scaling, verdict = decided
    return Measurement([table], None, infos_of(tensors, signature), decision=Decision(norm, scaling, verdict))


def _measure_any(tensors: list[Any], name_of: NameOf, backend: str | None, in_place: bool = False) -> Measurement:
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
    infos = infos_of(plain, signature if len(groups) == 1 else None)
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


def direct_for(first: Any, backend: str | None) -> DeviceModule | None:
    """The compiled functions for a list of ordinary tensors that begins with ``first``; None if there are none.

    Also None if the backend is unavailable: measuring the tensors then raises and tells the other ranks.
    """
    if not isinstance(first, Tensor):
        return None
    device_type = "cpu" if first.is_cpu else first.device.type  # the latter makes a new string
    if device_type not in COMPILED_FOR:
        return None
    try:
        return backends.resolve(backend, device_type).direct
    except (BackendUnavailableError, ValueError):
        return None


def resolve_for(backend: str | None, device_type: str, name_of: NameOf, i: int) -> Kernels:
    """`backends.resolve`; an error names the i-th tensor, which is on that device type."""
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
