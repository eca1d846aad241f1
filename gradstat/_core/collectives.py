"""The collectives that gradstat issues, and the error raised when a rank does not take part in one."""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradstat._core.wrappers import is_joining


class UnreachableRankError(RuntimeError):
    """A collective failed: a rank died, hangs, or did not make the same call as the other ranks.

    Raised with backends that report the failure to the caller, as gloo does after the group's timeout. NCCL's watchdog
    ends the process instead, and its log names the collective.
    """


def require_member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the group of all ranks; ValueError if this rank is not in it."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group() first")
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup) or dist.get_rank(chosen) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only its ranks may call this")
    return chosen


def replica_of(parameter: Tensor | None) -> Callable[[], Any]:
    """Returns the DistributedDataParallel module, held weakly, that keeps a parameter alike on its ranks, or None.

    Nothing but the garbage collector lists these modules, which is slow.
    """
    from torch.nn.parallel import DistributedDataParallel

    modules = (one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel))
    module = next((one for one in modules if any(own is parameter for own in one.parameters())), None)
    return (lambda: None) if module is None else weakref.ref(module)


def require_same_state(owner: Any, parameters: Sequence[Tensor]) -> None:
    """Before the first step that ``owner`` decides about, by its ``state_dict()``, for ``parameters``.

    RuntimeError on all ranks between which DDP keeps the parameters alike if the states differ. Waits.
    """
    module = replica_of(parameters[0])()
    if module is None or is_joining(module) or dist.get_world_size(module.process_group) == 1:
        return
    group, parts = module.process_group, owner.state_dict()["tensors"].values()
    digest = zlib.crc32(b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts))
    digests = gather(torch.tensor(digest, device=device_of(group)), group, type(owner).__name__)
    if len(digests.unique()) > 1:
        raise RuntimeError(differing_states(owner, group))


def differing_states(owner: object, group: dist.ProcessGroup) -> str:
    """The message that ranks of ``group`` would decide differently about steps."""
    return (
        f"the state of {owner!r} is not the same on all of {format_ranks(dist.get_process_group_ranks(group))}, which "
        "would skip or clip different steps: load one state on all ranks, or on none"
    )


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device on which the group's collectives need their tensors; independent of the tensors a rank has."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and f"{accelerator.type}:" in dist.get_backend_config(group):
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def reduce_(tensor: Tensor, op: Any, groups: Sequence[dist.ProcessGroup], caller: str) -> Tensor:
    """Reduces ``tensor`` in place by ``op`` over each group in turn, so over all their ranks together. No sync."""
    for group in groups:
        reduce_together_({op: tensor}, group, caller)
    return tensor


def reduce_together_(tensors: Mapping[Any, Tensor], group: dist.ProcessGroup, caller: str) -> None:
    """Reduces each tensor in place by its operation over ``group``, all at once. No sync.

    Raises `UnreachableRankError`, with a message that begins with ``caller``, if a rank did not take part.
    """
    with _explained(caller, group):
        works = [dist.all_reduce(tensor, op, group, async_op=True) for op, tensor in tensors.items()]
        for work in works:
            work.wait()  # with NCCL the stream waits, not the host


def gather(tensor: Tensor, group: dist.ProcessGroup, caller: str) -> Tensor:
    """``[ranks, *tensor.shape]``: the tensors of all ranks of ``group``, in its order. One collective.

    ``tensor`` has the same shape and dtype on all ranks. Raises as `reduce_together_`.
    """
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with _explained(caller, group):
        dist.all_gather(gathered, tensor, group)
    return torch.stack(gathered)


def gather_by_rank(value: object, groups: Sequence[dist.ProcessGroup], caller: str) -> dict[int, Any]:
    """The pickled values of all ranks of the groups, by global rank. Waits. Raises as `reduce_together_`."""
    by_rank = {dist.get_rank(): value}
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        with _explained(caller, group):
            dist.all_gather_object(gathered, by_rank, group)
        by_rank = {rank: theirs for part in gathered for rank, theirs in part.items()}
    return dict(sorted(by_rank.items()))


def format_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 1, 3``."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


@contextmanager
def _explained(caller: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turns errors that a backend raises in a collective of ``group`` into an `UnreachableRankError`."""
    try:
        yield
    except RuntimeError as error:
        raise UnreachableRankError(
            f"{caller}: not all of {format_ranks(dist.get_process_group_ranks(group))} took part, as seen from rank "
            f"{dist.get_rank()}. A rank that died, hangs or took another branch keeps the others waiting until the "
            f"group's timeout; all of them have to call {caller} the same number of times. The backend said: {error}"
        ) from error
