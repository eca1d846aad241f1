"""Which tensors can be measured, and how other tensors are converted to measurable ones or rejected with a clear error.

The kernels read dense strided memory and recognise ordinary gradients by themselves, without any of this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = ProcessGroup | DeviceMesh
    ExtraGroups: TypeAlias = Group | Iterable[Group | tuple[Group, Iterable[Tensor]]]
else:
    ExtraGroups = Any  # importing gradstat does not import torch.distributed

NameOf = Callable[[int], str]

_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_DTYPES |= {torch.complex32, torch.complex64, torch.complex128}
_DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


class Shards(NamedTuple):
    """The shards of a distributed tensor: enough to map an index back to an element, without process groups."""

    ranks: list[Any]  # the ranks of its mesh, nested by mesh dimension
    # ``(mesh dimension, tensor dimension)`` of each sharding, in order; None if shards are interleaved.
    dims: tuple[tuple[int, int], ...] | None
    index_bits: int  # low bits of a ``first_nonfinite`` that hold the index in a shard; the rank is in the bits above

    def split(self, first_nonfinite: float) -> tuple[int, int]:
        """The rank, and the index in that rank's shard."""
        return divmod(int(first_nonfinite), 1 << self.index_bits)

    def shard_of(self, rank: int, shape: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Sizes and offsets of a rank's shard of a tensor of shape ``shape``; None if shards are interleaved."""
        if self.dims is None:
            return None
        ranks = np.array(self.ranks)
        at = np.argwhere(ranks == rank)[0].tolist()
        sizes, start = list(shape), [0] * len(shape)
        for mesh_dim, dim in self.dims:
            # As in torch.chunk: all chunks are as large as the first, until the elements run out.
            piece = -(-sizes[dim] // ranks.shape[mesh_dim])
            begin = min(piece * at[mesh_dim], sizes[dim])
            start[dim] += begin
            sizes[dim] = min(piece, sizes[dim] - begin)
        return sizes, start


class TensorInfo(NamedTuple):
    """The metadata that a report keeps of a tensor besides its row, so that it keeps no tensor alive."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...] | None  # dimensions from slowest to fastest varying in memory; None for row-major
    shards: Shards | None = None  # for a distributed tensor; ``shape`` is then the whole's and ``order`` a shard's
    stored: int | None = None  # for a sparse tensor, how many elements it stores, which are those measured

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        order = None if tensor.is_contiguous() else memory_order(tensor)
        return cls(tensor.shape, tensor.dtype, tensor.device, order)

    @property
    def numel(self) -> int:
        """Number of measured elements."""
        return self.shape.numel() if self.stored is None else self.stored


def name_by_position(position: int) -> str:
    """The name in errors of a tensor from a list without names."""
    return f"tensors[{position}]"


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the slowest to the fastest varying in memory."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def readable(
    tensors: Sequence[Any], name_of: NameOf, in_place: bool = False, sparse: dict[int, Tensor] | None = None
) -> list[Tensor]:
    """Dense strided tensors with the elements to be measured; the original tensors where possible.

    A tensor that cannot be measured raises an error with its name: see `_refusal`. With ``in_place``, so does a tensor
    that cannot be multiplied in place: see `writable`. ``sparse`` gets the sparse tensors by position, coalesced: their
    values are then in row-major order.
    """
    _refuse_fake_mode()
    plain = []
    for i, tensor in enumerate(tensors):
        local = _strided(tensor, name_of, i)
        if in_place:
            _target(local, name_of, i)
        if local.layout is torch.sparse_coo:
            whole = local.coalesce()
            local = whole.values().contiguous()
            if sparse is not None:
                sparse[i] = whole
        local = local.resolve_conj().resolve_neg()
        if not torch.compiler.is_compiling() and local._is_zerotensor():  # without memory
            local = torch.zeros_like(local)
        plain.append(local if is_dense(local) else local.contiguous())
    return plain


def _refuse_fake_mode() -> None:
    if torch.compiler.is_compiling():
        return
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise RuntimeError(
            "tensors hold no data inside FakeTensorMode, so there is nothing to measure; call gradstat outside of "
            "it, or let torch.compile trace gradstat.stats or gradstat.clip_grad_norm_"
        )


def _strided(tensor: Any, name_of: NameOf, i: int) -> Tensor:
    """The tensor without wrappers, checked for everything that kernels need except density and sparsity."""
    if not isinstance(tensor, Tensor):
        got = "None" if tensor is None else f"an object of type {type(tensor).__name__}"
        raise TypeError(f"expected a tensor for {name_of(i)!r}, got {got}")
    local = shard_of(tensor)
    refusal = _refusal(local)
    if refusal is not None:
        error, words = refusal
        raise error(f"{_describe(name_of(i), local)} {words}")
    return local


def why_not_measured(name: str, tensor: Tensor) -> str | None:
    """The reason why a tensor cannot be measured, in words; None if it can."""
    local = shard_of(tensor)
    if type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"{name!r} is of {type(local).__module__}.{type(local).__qualname__}, which stores its data elsewhere"
    refusal = _refusal(local)
    if refusal is None or (local is not tensor and local.dtype in _DTYPES):
        return None  # ranks have to select the same tensors, so it does not matter whether this rank's shard has data
    return f"{_describe(name, local)} {refusal[1].partition(';')[0]}"


def _refusal(tensor: Tensor) -> tuple[type[Exception], str] | None:
    """The error type and words for a tensor that kernels may not read; None if they may."""
    if tensor.is_quantized:
        return TypeError, "is quantized; call .dequantize() first"
    if tensor.dtype not in _DTYPES:
        return TypeError, (
            "has no gradient statistics, which need a floating-point or complex dtype; leave it out or convert it, for "
            "example with .float()"
        )
    if is_uninitialized(tensor):
        return ValueError, "has no shape yet; run a forward pass of its lazy module first"
    if tensor.is_meta:
        return ValueError, "holds no data; materialise it first, for example with module.to_empty(device=...)"
    if isinstance(tensor, FakeTensor):
        return ValueError, "is a FakeTensor, which holds no data; measure the real tensor that it stands for"
    if tensor.layout not in (torch.strided, torch.sparse_coo) or tensor.is_nested:
        return ValueError, "has a layout that cannot be measured; convert it with .to_dense() or .to_sparse_coo()"
    if torch.compiler.is_compiling():
        return None
    functorch = torch._C._functorch
    if functorch.is_functionaltensor(tensor) and functorch.peek_interpreter_stack() is None:
        return ValueError, (
            "was created inside torch.func.functionalize and holds no data outside of it; measure what functionalize "
            "returns"
        )
    inner = tensor
    while functorch.is_functorch_wrapped_tensor(inner):
        if functorch.is_batchedtensor(inner):
            return ValueError, (
                "is a batch inside torch.vmap, whose other elements are not accessible; measure what vmap returns"
            )
        inner = functorch.get_unwrapped(inner)
    # Subclasses that dispatch may keep their memory elsewhere. torch's lazy zero tensors have no memory and need none.
    dispatches = type(inner).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if inner.layout is not torch.strided or dispatches or inner._is_zerotensor():
        return None
    stored, needed = inner.untyped_storage().nbytes(), _bytes_needed(inner)
    if stored < needed:
        what = f"needs {needed} bytes of storage, which was shrunk to {stored}" if stored else "has no storage"
        why = "as programs that offload do" if stored else "resized to 0, as FSDP does after resharding"
        return ValueError, f"{what} ({why}); measure it before that, or drop it (p.grad = None)"
    return None


def _bytes_needed(tensor: Tensor) -> int:
    """How many bytes the storage of a strided tensor must have."""
    if not tensor.numel():
        return 0
    last = int(tensor.storage_offset()) + sum(stride * (size - 1) for stride, size in strides_of(tensor))
    return (last + 1) * tensor.element_size()


def is_uninitialized(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or buffer of a lazy module before its first forward pass, and has no shape."""
    return not torch.compiler.is_compiling() and bool(is_lazy(tensor))


_MOST_EMPTY_UNITS = 1 << 24  # as csrc/tensor_list.h


def unit_count(tensor: Tensor) -> int:
    """How many units a tensor has: its slices along dimension 0, or one if it has fewer than two dimensions."""
    return tensor.shape[0] if tensor.dim() > 1 else 1


def units_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The units of all tensors in order, as views. RuntimeError if too many have no elements."""
    if sum(unit_count(tensor) for tensor in tensors if tensor.dim() > 1 and not tensor.numel()) > _MOST_EMPTY_UNITS:
        raise RuntimeError(
            f"a list has too many units without elements: at most {_MOST_EMPTY_UNITS}, so leave tensors without "
            "elements out"
        )
    return [unit for tensor in tensors for unit in (tensor.unbind(0) if tensor.dim() > 1 else (tensor,))]


@contextmanager
def contiguous_for_update(tensors: Sequence[Tensor], fits: Callable[[Tensor], bool]) -> Iterator[list[Tensor]]:
    """The tensors, to be changed in place; those that do not fit as contiguous copies, copied back at the end."""
    # A tensor that is listed twice gets a single copy, so that the second change sees the first one; a different view
    # that begins at the same address gets its own copy.
    copies = {_place(t): (t, t.contiguous()) for t in tensors if not fits(t)}
    yield [t if fits(t) else copies[_place(t)][1] for t in tensors]
    for tensor, copy in copies.values():
        tensor.copy_(copy)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def is_distributed(tensors: Sequence[Any]) -> bool:
    """Whether any of ``tensors`` is a DTensor or a `FlatShard`, recognised without importing torch.distributed."""
    return any(hasattr(tensor, "_local_tensor") for tensor in tensors)


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, far cheaper than to_local(); any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Positions of the tensors on each device, devices in order of first appearance."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(i)
    return groups


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a strided tensor fill one contiguous range of memory, in any order."""
    if tensor.is_contiguous() or tensor.numel() <= 1:
        return True
    expected = 1
    for stride, size in sorted(strides_of(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def strides_of(tensor: Tensor) -> list[tuple[int, int]]:
    """``(stride, size)`` of the dimensions with more than one index, in order."""
    return [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. Waits only for a copy to the host, whose end could not be noticed otherwise."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def writable(tensors: Sequence[Tensor], name_of: NameOf) -> list[Tensor]:
    """The strided tensors that hold the elements of ``tensors``, to be multiplied in place by a real number."""
    _refuse_fake_mode()
    return [_target(_strided(tensor, name_of, i), name_of, i) for i, tensor in enumerate(tensors)]


def _target(local: Tensor, name_of: NameOf, i: int) -> Tensor:
    if local.layout is torch.sparse_coo:
        local = local._values()  # scaling uncoalesced values scales their sum
    _require_own_memory(local, name_of, i)
    if local.is_conj():
        local = local.conj()  # clears the conjugate bit; multiplying by a real number commutes with conjugation
    if local.is_neg():
        raise NotImplementedError(f"{_describe(name_of(i), local)} is a lazy negation; assign its .resolve_neg()")
    return local


def _require_own_memory(tensor: Tensor, name_of: NameOf, i: int) -> None:
    """Raises RuntimeError, by name, if not every element of a strided tensor has memory of its own to be changed."""
    if tensor._is_zerotensor():
        why = "is one of torch's lazy zero tensors, which have no memory"
    elif not is_dense(tensor) and _overlaps(tensor):
        why = "is expanded: several of its elements share memory"
    else:
        return
    raise RuntimeError(f"{_describe(name_of(i), tensor)} {why}, so it cannot be changed in place; assign its .clone()")


def _overlaps(tensor: Tensor) -> bool:
    extent = 0
    for stride, size in sorted(strides_of(tensor)):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def _describe(name: str, tensor: Tensor) -> str:
    return f"{name!r} (dtype {tensor.dtype}, layout {tensor.layout}, device {tensor.device})"


def refuse_distributed(tensors: Sequence[Tensor], name_of: NameOf) -> None:
    """Raises NotImplementedError if a tensor is distributed, for clips that do not reduce norms over ranks."""
    for i, tensor in enumerate(tensors):
        if is_distributed([tensor]):
            raise NotImplementedError(
                f"{name_of(i)!r} is a distributed tensor, whose norm needs a reduction over its mesh, which this "
                "clip does not do here; use gradstat.clip_grad_norm_, or gradstat.guarded_step with a clip of the "
                "total norm (AutoClip, ZClip, FixedClip)"
            )
