"""Tracks which memory holds nonfinite values, and which operation produced them: `Origin`, `Taint`."""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradstat.check import check_tensors
from gradstat.replay.culprit import Culprit
from gradstat.report import Report


@dataclass(eq=False)
class Origin:
    """A place where nonfinite values were produced, the ``index``-th of a replay."""

    index: int
    culprit: Culprit
    intended: bool = False  # infinities written on purpose, such as those of a mask
    unwritten: bool = False  # memory without an observed write; it counts once nonfinite values are read from it
    reduced: bool = False  # infinities on purpose that a mean, a sum or the like did not leave out

    def complete(self, tensor: Tensor) -> None:
        """Completes the culprit of unwritten memory by the nonfinite ``tensor`` that was read from it."""
        if self.unwritten:
            self.culprit = replace(self.culprit, kind=nan_or_inf(tensor), output=report_of({"memory": tensor}))
            self.unwritten = False


def first(origins: Iterable[Origin]) -> Origin | None:
    """The earliest origin that is not intended, or else the earliest."""
    return min(origins, key=lambda origin: (origin.intended, origin.index), default=None)


def stored_values(tensor: Tensor) -> Tensor | None:
    """The tensor whose memory holds the values, or None if there are none that could be NaN or Inf."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None  # the wrapped tensor is dispatched separately
    local = getattr(tensor, "_local_tensor", tensor)  # the local shard of a distributed tensor
    if local.layout is torch.sparse_coo:
        local = local._values()
    if local.layout is not torch.strided or local.numel() == 0 or local._is_zerotensor():  # the last has no memory
        return None
    return local


def finite(tensor: Tensor) -> Tensor:
    """Which elements are neither NaN nor Inf."""
    return torch.isfinite(tensor if tensor.element_size() > 1 else tensor.float())


def is_nonfinite(tensor: Tensor) -> bool:
    """Whether a tensor holds NaN or Inf. One sync on a GPU, or two if its sum is not finite."""
    values = stored_values(tensor)
    if values is None:
        return False
    if values.element_size() > 1:
        # A finite sum proves in one pass, without memory, that all values are finite. Any other sum may be an overflow.
        total = values.sum(dtype=torch.float32 if values.element_size() == 2 else None)
        if cmath.isfinite(total.item()):
            return False
    return not bool(finite(values).all())


def has_nan(tensor: Tensor) -> bool:
    values = stored_values(tensor)
    return values is not None and bool(torch.isnan(values if values.element_size() > 1 else values.float()).any())


def nan_or_inf(tensor: Tensor) -> Literal["nan", "inf"]:
    """Whether a nonfinite tensor holds NaN, or only Inf."""
    return "nan" if has_nan(tensor) else "inf"


def looks_like_mask(tensor: Tensor) -> bool:
    """Whether a nonfinite tensor may be an additive mask: -Inf beside one other value."""
    values = stored_values(tensor)
    if values is None or values.is_complex() or has_nan(values) or bool((values == torch.inf).any()):
        return False
    rest = values[finite(values)]
    return rest.numel() == 0 or bool((rest == rest[0]).all())


def report_of(tensors: dict[str, Tensor]) -> Report | None:
    """A report on the tensors that can be measured; None if there are none."""
    measurable = {name: tensor.detach() for name, tensor in tensors.items() if stored_values(tensor) is not None}
    if not measurable:
        return None
    try:
        return check_tensors(measurable)
    except (TypeError, ValueError, RuntimeError):  # an exotic dtype or device must not cost the rest of the answer
        return None


def other_in_words(name: str, tensor: Tensor) -> str | None:
    """A tensor without statistics in words: integers by their range, booleans by their number. None for others."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    about = f"{name}, {'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.numel() == 0:
        return f"{about}: empty"
    if tensor.dtype is torch.bool:
        return f"{about}: {int(tensor.sum()):,} True"
    if tensor.is_floating_point() or tensor.is_complex():
        return None
    try:
        low, high = tensor.min().item(), tensor.max().item()
    except RuntimeError:  # an exotic dtype must not cost the rest of the answer
        return about
    return f"{about}: {low if low == high else f'{low} to {high}'}"


class Taint:
    """Maps byte ranges of storages to the origins of the nonfinite values in them; does not keep storages alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, list[tuple[int, int, Origin]]]] = {}

    def add(self, tensor: Tensor, origin: Origin) -> None:
        values = stored_values(tensor)
        if values is None:
            return
        storage = values.untyped_storage()
        _, ranges = self._entries.setdefault(storage._cdata, (StorageWeakRef(storage), []))
        entry = (*_bytes(values), origin)
        if entry not in ranges:
            ranges.append(entry)

    def of(self, tensor: Tensor) -> Iterator[Origin]:
        """The origins of nonfinite values that a tensor may hold."""
        values = stored_values(tensor)
        if values is not None:
            begin, end = _bytes(values)
            _, ranges = self._entries.get(values.untyped_storage()._cdata, (None, []))
            yield from (origin for b, e, origin in ranges if b < end and e > begin)

    def clear(self, tensor: Tensor) -> None:
        """Drops the origins in the memory of a tensor that was overwritten."""
        values = stored_values(tensor)
        key = 0 if values is None else values.untyped_storage()._cdata
        if values is None or key not in self._entries:
            return
        begin, end = _bytes(values)
        if end - begin != values.numel() * values.element_size():
            return  # a view with gaps, between which nonfinite values may remain
        _, ranges = self._entries[key]
        ranges[:] = [r for r in ranges if not (begin <= r[0] and r[1] <= end)]


def _bytes(values: Tensor) -> tuple[int, int]:
    """The range of bytes in the storage, end exclusive."""
    size = values.element_size()
    begin = int(values.storage_offset())
    extent = sum(int(n - 1) * int(stride) for n, stride in zip(values.shape, values.stride(), strict=True))
    return begin * size, (begin + extent + 1) * size
