"""Gradients that are not in ``.grad``: engines that shard parameters keep gradients in buffers of their own.

Everything that depends on an engine's internals is in this module. An engine is recognised by its methods and never
imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FlatShard:
    """This rank's shard of a tensor that is flattened and split over the ranks of a group: its memory and its offset.

    Every rank of the group has a shard of each tensor, possibly an empty one. Like a DTensor, it has ``_local_tensor``.
    """

    __slots__ = ("_local_tensor", "device", "group", "parameter", "shape", "start")
    is_meta = False

    def __init__(self, parameter: Tensor, shape: torch.Size, local: Tensor, start: int, group: ProcessGroup) -> None:
        """``shape`` is that of the whole tensor."""
        self.parameter, self.shape, self.start, self.group = parameter, shape, start, group
        self._local_tensor, self.device = local.detach().reshape(-1), local.device


class _Wrapper:
    """Another package's wrapper around the user's module."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.module: torch.nn.Module = engine.module


class DeepSpeed(_Wrapper):
    """DeepSpeed's engine, with any ZeRO stage or none.

    Between ``engine.backward`` and ``engine.step`` gradients are averaged over the ranks and carry the loss scale.
    """

    name = "DeepSpeed's engine"

    @property
    def loss_scale(self) -> float | None:
        """The loss scale that gradients carry, a number on the host; None if they carry none."""
        optimizer = self.engine.optimizer
        # An engine with a `scale` method scales losses itself, except for fp16 without ZeRO (0.19.8, whose step divides
        # by the scale nevertheless); in earlier versions the optimizers scaled.
        scales = hasattr(optimizer, "scale_if_loss") or not hasattr(self.engine, "scale")
        return float(optimizer.loss_scale) if scales and self.engine.fp16_enabled() else None

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer: not a torch optimizer, but it has ``param_groups`` with learning rates."""
        return self.engine.optimizer

    def parameters(self, parameters: list[Tensor]) -> list[Any]:
        """The parameters, or under ZeRO-3 this rank's shards of them."""
        return [
            _stage_3_shard(parameter, parameter.ds_tensor) if hasattr(parameter, "ds_tensor") else parameter
            for parameter in parameters
        ]

    def gradients(self) -> dict[int, Any] | None:
        """The current gradients, or shards of them, by ``id`` of the parameter; None if they are in ``.grad``.

        All ranks return the same parameters. With offloading, waits for pending copies to the host.
        """
        optimizer = self.engine.optimizer
        pairs: Iterator[tuple[Tensor, Any]]
        # Distinguished by the attributes that are read below, since the classes have been moved and renamed.
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            pairs = _of_stage_3(optimizer)
        elif hasattr(optimizer, "single_partition_of_fp32_groups"):
            pairs = _of_stages_1_and_2(optimizer)
        elif hasattr(optimizer, "fp32_groups_has_gradients"):
            # ZeRO-1 in bfloat16 with float32 gradients: only the optimizer state is sharded, and ``.grad`` is stale.
            parts = optimizer.bf16_groups, optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients
            listed = (one for group in zip(*parts, strict=True) for one in zip(*group, strict=True))
            pairs = ((p, gradient.view(p.shape)) for p, gradient, is_there in listed if is_there)
        else:
            return None
        return {id(parameter): gradient for parameter, gradient in pairs}


def _of_stage_3(optimizer: Any) -> Iterator[tuple[Tensor, FlatShard]]:
    offloads = bool(optimizer.offload_optimizer)
    if offloads:
        if optimizer.swap_optimizer:
            raise NotImplementedError("gradients that DeepSpeed has swapped to disk (NVMe offload) cannot be measured")
        if not (optimizer._epilogue_ran_this_backward and optimizer.is_gradient_accumulation_boundary()):
            return
        _wait_for_copies()
    for number, group in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[number].grad if offloads else None
        averaged = optimizer.averaged_gradients.get(number)
        if not offloads and averaged is None:
            continue
        for position, parameter in enumerate(group):
            if not parameter.requires_grad:
                continue
            _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            size = parameter.partition_numel()
            local = averaged[position] if flat is None else flat.narrow(0, offset, size)
            yield parameter, _stage_3_shard(parameter, local)


def _stage_3_shard(parameter: Any, local: Tensor) -> FlatShard:
    """All shards are equally large, so the last ones may have padding after the parameter's end."""
    start = parameter.partition_numel() * torch.distributed.get_rank(parameter.ds_process_group)
    start = min(start, parameter.ds_numel)
    local = local.reshape(-1)[: parameter.ds_numel - start]
    return FlatShard(parameter, parameter.ds_shape, local, start, parameter.ds_process_group)


def _of_stages_1_and_2(optimizer: Any) -> Iterator[tuple[Tensor, FlatShard]]:
    if not optimizer.is_gradient_accumulation_boundary():
        return  # before that, only some ranks have begun to fill their buffers
    if optimizer.cpu_offload:
        if optimizer.micro_step_id < 0:
            return
        _wait_for_copies()
    for number, group in enumerate(optimizer.bit16_groups):
        averaged = optimizer.averaged_gradients.get(number)
        if averaged is None and not optimizer.cpu_offload:
            continue
        flat = optimizer.single_partition_of_fp32_groups[number].grad if optimizer.cpu_offload else averaged[0]
        for parameter in group:
            mapping = parameter._hp_mapping  # maps the parameter to its shard in this rank's buffer
            if mapping is None:
                local, start = flat.reshape(-1)[:0], 0
            else:
                local = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
                start = mapping.lp_fragment_address.start
            yield parameter, FlatShard(parameter, parameter.shape, local, start, parameter._dp_group)


def _wait_for_copies() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class Megatron(_Wrapper):
    """Megatron-Core's DistributedDataParallel: gradients are views of its buffers, in ``main_grad``.

    Between ``finish_grad_sync`` and the step they are averaged over the ranks; in float16 they carry the loss scale.
    """

    name = "Megatron-Core's DistributedDataParallel"
    loss_scale: float | None = None  # not known here: the optimizer keeps it on the device
    optimizer = None

    def parameters(self, parameters: list[Tensor]) -> list[Any]:
        return parameters  # they are not sharded

    def gradients(self) -> dict[int, Any]:
        """The gradients by ``id`` of the parameter; with the distributed optimizer, the shards this rank reduces."""
        is_sharded = self.engine.ddp_config.use_distributed_optimizer
        return {
            id(parameter): _bucket_shard(buffer, parameter) if is_sharded else parameter.main_grad
            for buffer in (*self.engine.buffers, *self.engine.expert_parallel_buffers)
            for parameter in buffer.params
        }


def _bucket_shard(buffer: Any, parameter: Tensor) -> FlatShard:
    """Each bucket of a buffer is split evenly over the ranks of the group."""
    start, end, number = buffer.param_index_map[parameter]
    bucket, group = buffer.buckets[number], buffer.data_parallel_group
    size = bucket.grad_data.numel() // group.size()
    begin = bucket.offset + size * group.rank()
    low = min(max(start, begin), end)
    high = max(min(end, begin + size), low)
    return FlatShard(parameter, parameter.shape, buffer.grad_data[low:high], low - start, group)


Engine: TypeAlias = DeepSpeed | Megatron


def engine_of(target: object) -> Engine | None:
    """``target`` as an engine, or None if it is not one."""
    if hasattr(type(target), "zero_optimization_stage"):
        return DeepSpeed(target)
    # Megatron's FSDP has finish_grad_sync too.
    if hasattr(type(target), "finish_grad_sync") and "expert_parallel_buffers" in vars(target):
        return Megatron(target)
    return None


_REMEDIES = {
    "deepspeed": "DeepSpeed's engine clips, skips and steps by itself: set gradient_clipping in its configuration. "
    "gradstat.check(engine) and gradstat.Monitor(engine) watch it",
    "megatron": "Megatron-Core keeps gradients in main_grad, which its optimizer clips: set clip_grad in its "
    "configuration. gradstat.check(model) and gradstat.Monitor(model) watch its DistributedDataParallel",
}


def refuse_engine(target: object) -> None:
    """Raises TypeError if ``target``, passed to a function that clips or steps, is an engine or its optimizer."""
    package = type(target).__module__.partition(".")[0]
    if package in _REMEDIES:
        raise TypeError(_REMEDIES[package])


def refuse_in_engine(parameters: list[Tensor]) -> None:
    """Raises TypeError if ``parameters``, none of which has a ``.grad``, belong to an engine that keeps gradients."""
    for parameter in parameters:
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            raise TypeError(_REMEDIES["deepspeed"])
        if hasattr(parameter, "main_grad"):
            raise TypeError(_REMEDIES["megatron"])
