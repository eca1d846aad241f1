"""Tables: every field of every tensor, left on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradstat import _backends
from gradstat._backends import Kernels
from gradstat._native import BackendUnavailableError, DeviceModule, StaleExtensionError, operators
from gradstat._parts import Part, assemble
from gradstat._tensors import NameOf, TensorInfo, is_distributed, readable

# The types of device for which there are compiled kernels.
COMPILED_FOR = frozenset({"cpu", "cuda"})
_INFO_CACHE_SIZE = 64
_infos_by_signature: dict[tuple[int, int], tuple[TensorInfo, ...]] = {}


def stats(tensors: Iterable[Tensor], *, backend: str | None = None) -> Tensor:
    """All fields of all tensors in one pass: one kernel launch per device, no host sync.

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
    parts = measure_directly(listed, _position_name, backend)
    if parts is None and is_distributed(listed):
        from gradstat._spread import whole_rows

        return whole_rows(listed, lambda local: measure_parts(local, _position_name, backend))
    if parts is None:
        parts = measure_generally(listed, _position_name, backend)
    return assemble(parts)


def measure_parts(tensors: list[Any], name_of: NameOf, backend: str | None) -> list[Part]:
    """Fills tables for ``tensors``, one per device; what cannot be measured raises, by name.

    Lists of ordinary tensors on one device take the short way into the compiled kernels. For anything else,
    and for the other backends, `readable` sorts out what can be read and where it lies.
    """
    parts = measure_directly(tensors, name_of, backend)
    return parts if parts is not None else measure_generally(tensors, name_of, backend)


def measure_directly(tensors: list[Any], name_of: NameOf, backend: str | None) -> list[Part] | None:
    """`measure_parts` for ordinary tensors on one device; None, and nothing done, if they are not."""
    if not tensors:
        return []
    direct = direct_for(tensors[0], name_of, backend)
    measured = direct.check(tensors) if direct is not None else None
    if measured is None:
        return None
    table, signature = measured
    return [Part(table, None, infos_of(tensors, signature))]


def measure_generally(tensors: list[Any], name_of: NameOf, backend: str | None) -> list[Part]:
    """`measure_parts` for any tensors; of distributed ones the shards."""
    with torch.no_grad():
        plain = readable(tensors, name_of)
        groups = by_device(plain)
        parts = []
        for device, positions in groups.items():
            group = [plain[i] for i in positions]
            table, known = resolve_for(backend, device.type, name_of, positions[0]).check(group)
            parts.append(Part(table, positions if len(groups) > 1 else None, infos_of(group, known)))
        return parts


def direct_for(first: Any, name_of: NameOf, backend: str | None) -> DeviceModule | None:
    """The short way into the kernels for a list that begins with ``first``, if its device has one."""
    if not isinstance(first, Tensor) or first.device.type not in COMPILED_FOR:
        return None
    return resolve_for(backend, first.device.type, name_of, 0).direct


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Positions of the tensors on each device, devices in order of appearance."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(i)
    return groups


def resolve_for(backend: str | None, device_type: str, name_of: NameOf, i: int) -> Kernels:
    """`_backends.resolve`, with the name of the i-th tensor, on that type of device, in the error."""
    try:
        return _backends.resolve(backend, device_type)
    except StaleExtensionError:
        raise
    except BackendUnavailableError as error:
        raise BackendUnavailableError(f"{error} ({name_of(i)!r} is on a device of type {device_type!r})") from error


def infos_of(tensors: Sequence[Tensor], signature: int | None) -> Sequence[TensorInfo]:
    """What reports need to know about ``tensors``, remembered by the signature that `Kernels.check` gave."""
    # Equal signatures mean equal sizes, strides, dtypes and devices, so nothing is asked of the tensors.
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


def _position_name(position: int) -> str:
    return f"tensors[{position}]"


def _compiled_stats(tensors: list[Tensor], backend: str | None) -> Tensor:
    # Inside torch.compile everything here but the operator runs at trace time only.
    plain = readable(tensors, _position_name)
    if backend is None and plain[0].device.type in COMPILED_FOR:
        table: Tensor = operators(plain[0].device).stats.default(plain)
        return table
    return resolve_for(backend, plain[0].device.type, _position_name, 0).check(plain)[0]
