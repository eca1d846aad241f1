"""`step_in_backward`: measures, clips and steps each parameter, and frees its gradient, as soon as it is complete."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad, Adam, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from gradstat import _fields
from gradstat._core import announce, norms
from gradstat._core.engines import engine_of, refuse_engine
from gradstat._core.host_copy import streams_of
from gradstat._core.measure import measure
from gradstat._core.measurement import Measurement
from gradstat._core.norms import StepRequest
from gradstat._core.parameters import (
    Gradients,
    Labels,
    NamedParameters,
    as_list,
    gradients_of,
    labels_of,
    named_by,
    named_parameters_of,
    names_at,
)
from gradstat._core.tensors import is_distributed, to_device
from gradstat._core.wrappers import uncompiled
from gradstat._step import optimizers
from gradstat._step.measured import StepMeasurement
from gradstat.adaptive import AGC, LastNormClip, NormClip, TensorClip
from gradstat.adaptive._base import ToClip, positive
from gradstat.check import PendingReport
from gradstat.counters import counters_on

_current_backward = torch._C._current_graph_task_id  # -1 outside a backward pass
_APPLY, _RUN = BackwardCFunction.apply.__code__, _engine_run_backward.__code__
_REMEDY = "use guarded_step after backward, or FSDP2 (fully_shard), which reduces them earlier"
# Only looked up in sys.modules, never imported here.
_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")


def step_in_backward(
    optimizer_class: type[Optimizer],
    model: Module | Iterable[Any],
    clip: float | TensorClip | LastNormClip | None = None,
    **options: Any,
) -> StepInBackward:
    """Steps each parameter during ``backward()``, as soon as its gradient is complete, and frees the gradient. ::

        handle = gradstat.step_in_backward(torch.optim.AdamW, model, clip=gradstat.AGC(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(handle.optimizer, 100)
        for inputs, targets in batches:
            loss_of(model(inputs), targets).backward()  # this is the whole step
            scheduler.step()

    The gradients of the whole model never exist at once. Each gradient is measured and clipped by itself. If a gradient
    is not finite, only its parameter keeps its value and state. *Every* ``backward()`` is a step: gradients cannot be
    accumulated over several. No host sync if torch's optimizer has a fused step, otherwise one for each parameter.

    Args:
        optimizer_class: A class of optimizers that treat each parameter independently, as torch's do. One optimizer is
            made from it, with ``fused=True`` where torch supports it and ``options`` do not say otherwise.
        model: The module whose parameters to step; or what the class accepts, such as groups of (named) parameters.
            Frozen parameters are stepped once they require a gradient.
        clip: A number above 0, to which the L2 norm of each gradient *by itself* is clipped, as by `clip_grad_norm_`
            for that parameter alone; `AGC`; `AdaGC` with ``warmup=0``; or `LastNormClip`, which approximates clipping
            all gradients together. None clips nothing.
        **options: Arguments of the optimizer, such as ``lr``.

    Returns:
        A handle with the optimizer, the last report, and `StepInBackward.remove`.

    Raises:
        TypeError: ``optimizer_class`` is not a class of optimizers, ``clip`` none of the above, or ``model`` an engine.
        ValueError: The optimizer needs a closure; ``clip`` is out of range, or needs the norm of all gradients.
        NotImplementedError: The parameters are in DistributedDataParallel or FSDP's first version, which reduce
            gradients after they would have been stepped (checked again in the first ``backward()``); `AGC` with
            distributed tensors; `AGC` or `AdaGC` with parameters on several devices.
        RuntimeError: A parameter already has a gradient or is already stepped in backward. During ``backward()``:
            parameters were added to the optimizer; a parameter's gradient is sparse and the optimizer fused; the
            backward pass runs inside another one (reentrant checkpointing); the optimizer counts steps per group. From
            ``optimizer.step()``, which has nothing to do: a loss scaler called it, or there is a gradient that no
            backward pass has stepped.
    """
    kind: Any = optimizer_class
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(
            "optimizer_class: expected a class such as torch.optim.AdamW, which step_in_backward instantiates with the "
            f"given options, got {kind if isinstance(kind, type) else type(kind)}"
        )
    checked: Any = kind
    if optimizers.traits_of_kind(checked).needs_closure:
        raise ValueError(
            f"{kind.__name__} evaluates the loss several times per step, so it cannot step in backward; use "
            "guarded_step(optimizer, closure=closure)"
        )
    _check_clip(clip)
    groups = _groups_of(model)
    parameters = [p[1] if isinstance(p, tuple) else p for group in groups for p in group["params"]]
    if isinstance(clip, TensorClip) and len({p.device for p in parameters}) > 1:
        raise NotImplementedError(f"{type(clip).__name__} in backward needs all parameters on one device")
    if _can_be_fused(kind, groups, parameters, options):
        options["fused"] = True
    # A module's parameters are passed as a list, so that groups and state dict are as in ordinary use.
    optimizer = optimizer_class(groups[0]["params"] if isinstance(model, Module) else groups, **options)
    named = named_parameters_of(optimizer)
    if isinstance(model, Module):
        named = named_by(model, named)
    _refuse_reducers(named)
    if isinstance(clip, AGC) and is_distributed(named.parameters):
        i = next(i for i, parameter in enumerate(named.parameters) if is_distributed([parameter]))
        raise NotImplementedError(
            f"{named.names()[i]!r} is a distributed tensor, and AGC clips slices of whole tensors only; "
            "pass a number, AdaGC or LastNormClip"
        )
    taken = [i for i, p in enumerate(named.parameters) if getattr(p, "_stepped_in_backward", None) is not None]
    if taken:
        raise RuntimeError(
            f"{named.names()[taken[0]]!r} is already stepped in backward, by an earlier step_in_backward; call "
            "remove() on the handle it returned"
        )
    gradients = gradients_of(named.parameters)
    if gradients.tensors:
        raise RuntimeError(
            f"{labels_of(named, gradients).of(0)!r} already has a gradient, to which backward() would add; call "
            "model.zero_grad() first"
        )
    return StepInBackward(optimizer, named, clip)


class StepInBackward:
    """Returned by `step_in_backward`. Dropping it has no effect: the parameters keep it alive until `remove`.

    Attributes:
        optimizer: The optimizer, for schedulers, groups and a `Monitor`. Its own ``step()`` and ``zero_grad()`` have
            nothing to do. `step_counters` counts the backward passes, and those in which a parameter was not stepped.
    """

    def __init__(
        self, optimizer: Optimizer, named: NamedParameters, clip: float | TensorClip | LastNormClip | None
    ) -> None:
        self.optimizer = optimizer
        self._named, self._clip = named, clip
        self._limit = float(clip) if isinstance(clip, (int, float)) else math.inf
        self._clips = [clip._for_one_tensor() for _ in named.parameters] if isinstance(clip, TensorClip) else []
        self._clip_states: Tensor | None = None
        self._is_foreign = optimizers.traits_of(optimizer).is_foreign
        kind: Any = type(optimizer)
        # torch's own `step` is called without its wrappers, which take longer than stepping a small tensor.
        original: Callable[[], Any] = functools.partial(optimizers.original_step(kind), optimizer)
        self._step = optimizer.step if self._is_foreign else original
        self._labels = [Labels(names_at(named, [i]), tuple) for i in range(len(named.parameters))]
        self._measurements: list[Measurement | None] = []
        self._backward, self._is_open = -1, False
        self._is_distributed, self._has_checked_reducers = is_distributed(named.parameters), False
        self._measured: StepMeasurement | None = None
        self._gradients = Gradients([], [], [])
        self._report: PendingReport | None = None
        self._lock = threading.Lock()  # autograd runs one thread per device
        numbers = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self._hooks: list[Any] = [
            _register_hook(parameter, functools.partial(_complete, weakref.ref(self), i, number))
            for i, (number, parameter) in enumerate(zip(numbers, named.parameters, strict=True))
            if parameter.is_floating_point() or parameter.is_complex()
        ]
        self._hooks.append(optimizer.register_step_pre_hook(self._refuse_step))
        for parameter in named.parameters:
            parameter._stepped_in_backward = _HandleReference(self)  # type: ignore[attr-defined]
        optimizer._stepped_in_backward = self  # type: ignore[attr-defined]

    @property
    def report(self) -> PendingReport:
        """The report on the last backward pass's gradients, as `check_async` would have given it before clipping.

        On the CPU the bits are the same, too. Parameters with NaN or Inf gradients were not stepped. RuntimeError if no
        backward pass has ended.
        """
        if self._report is None:
            self._report = self._last().report()
        return self._report

    @property
    def total_norm(self) -> Tensor:
        """L2 norm of all gradients of the last backward pass before clipping, 0-d float64 on the first one's device."""
        return self._last().norm

    def __repr__(self) -> str:
        state = f"{len(self._labels)} parameters" if self._hooks else "removed"
        return f"StepInBackward({type(self.optimizer).__name__}, {state})"

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, also loadable by an ordinary optimizer. A clip's state is saved by the clip."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, saved from this class of optimizer, whether or not it was stepped in backward."""
        self.optimizer.load_state_dict(state)

    def remove(self) -> None:
        """Detaches the handle: gradients are kept from now on, and `optimizer` has to be stepped like any other."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._named.parameters if self._hooks else ():
            vars(parameter).pop("_stepped_in_backward", None)
        self._hooks = []
        if handle_of(self.optimizer) is self:
            del self.optimizer._stepped_in_backward  # type: ignore[attr-defined]

    def _rows_for(self, parameters: list[Tensor]) -> tuple[Gradients, Measurement] | None:
        """Which of ``parameters`` had a gradient in the last backward pass, and their rows; None before the first."""
        if self._measured is None:
            return None
        rows = self._measured.rows
        at = range(len(self._labels)) if self._gradients.positions is None else self._gradients.positions
        row_of = {id(self._named.parameters[i]): row for row, i in enumerate(at)}
        positions = [i for i, parameter in enumerate(parameters) if id(parameter) in row_of]
        wanted = [row_of[id(parameters[i])] for i in positions]
        if wanted != list(range(len(at))):
            table = rows.table()
            table = table[to_device(torch.tensor(wanted, dtype=torch.int64, device="cpu"), table.device)]
            total = rows.total if len(wanted) == len(at) else None
            rows = Measurement([table], None, [rows.infos[row] for row in wanted], total)
        missing = [i for i, p in enumerate(parameters) if p.requires_grad and id(p) not in row_of]
        return Gradients([], None if len(positions) == len(parameters) else positions, missing), rows

    def _last(self) -> StepMeasurement:
        if self._measured is None:
            raise RuntimeError(
                "no backward pass of this model has finished since step_in_backward, or the last one failed"
            )
        return self._measured

    # Called during backward, under the lock ---------------------------------------------------------------------

    @torch.no_grad()
    def _complete(self, i: int, number: int, parameter: Tensor) -> None:
        """Steps the i-th parameter, which is in group ``number``, with its gradient."""
        gradient = parameter.grad
        if gradient is None:  # removed by another hook
            return
        with self._lock:
            if not self._is_open or self._backward != _current_backward():
                self._begin()
            labels, optimizer = self._labels[i], self.optimizer
            group = optimizer.param_groups[number]  # looked up each time: load_state_dict replaces the dicts
            if gradient.is_sparse and group.get("fused"):
                raise RuntimeError(
                    f"the gradient of {labels.of(0)!r} is sparse, unsupported by fused optimizers; pass fused=False"
                )
            request = StepRequest(self._limit, None, None)
            if is_distributed([gradient]):
                rows, measured, gradient = _measure_over_ranks(gradient, labels, request, parameter)
            else:
                measured = StepMeasurement.of(
                    [gradient], labels, request, NamedParameters([parameter], labels.names), None, None
                )
                rows = measured.rows
            rewrites = self._limit != math.inf
            if self._clips:
                assert self._clip_states is not None
                part = self._clips[i]
                part._state_tensor = self._clip_states[i]
                part.check(ToClip([gradient], [parameter], labels.of))
                measured.limit_tensors_(part, [parameter], [gradient])
            elif isinstance(self._clip, LastNormClip) and self._clip.multiplier is not None:
                measured.scale_by_(to_device(self._clip.multiplier, measured.verdict.device))
                rewrites = True
            self._step_alone(measured, group, parameter, gradient, rewrites)
            self._measurements[i] = rows
            parameter.grad = None

    def _step_alone(
        self, measured: StepMeasurement, group: dict[str, Any], parameter: Tensor, gradient: Tensor, rewrites: bool
    ) -> None:
        """Steps the optimizer as if it had one parameter."""
        optimizer = self.optimizer
        groups, every = optimizer.param_groups, group["params"]
        options = dict(group) if self._is_foreign else group
        try:
            optimizer.param_groups, group["params"] = [group], [parameter]
            measured.step_optimizer(optimizer, self._step, [gradient], rewrites, skips=True)
        finally:
            optimizer.param_groups, group["params"] = groups, every
        if options is not group:
            for key, value in group.items():
                if isinstance(value, (int, float)) and value != options.get(key):
                    raise RuntimeError(
                        f"{type(optimizer).__name__} changed {key!r} of its group in the step of "
                        f"{measured.labels.of(0)!r} alone; use guarded_step after backward"
                    )

    def _begin(self) -> None:
        """Called when the first gradient of a backward pass is complete."""
        frame: types.FrameType | None = sys._getframe()
        is_whole = False  # FSDP2 calls hooks in the backward of an autograd function of its own
        while frame is not None:
            is_whole = is_whole or frame.f_code is _RUN
            if is_whole and frame.f_code is _APPLY:
                raise RuntimeError(
                    "this backward pass runs inside another one, whose end is the end of the step (reentrant "
                    "checkpointing); use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            frame = frame.f_back
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count != len(self._labels):
            raise RuntimeError(
                f"the optimizer has {count} parameters and had {len(self._labels)} when step_in_backward was called; "
                "remove() the handle and call step_in_backward again"
            )
        if not self._has_checked_reducers:
            _refuse_reducers(self._named)
            self._has_checked_reducers = True
        if self._backward != _current_backward():
            self._backward = _current_backward()
            self._measurements = [None] * count
            self._measured = self._report = None
            if isinstance(self._clip, TensorClip):
                self._clip_states = self._clip._initial_states(count, self._named.parameters[0].device)
        self._is_open = True
        # FSDP2 completes gradients of modules whose inputs need none in its own callback, which is queued already.
        _queue(functools.partial(_queue, self._end) if self._is_distributed else self._end)

    @torch.no_grad()
    def _end(self) -> None:
        """Called when all gradients of a backward pass are complete."""
        self._is_open = False
        positions = [i for i, one in enumerate(self._measurements) if one is not None]
        measurements = [one for one in self._measurements if one is not None]
        missing = [i for i, p in enumerate(self._named.parameters) if self._measurements[i] is None and p.requires_grad]
        self._measurements = []
        self._gradients = Gradients([], None if len(measurements) == len(self._labels) else positions, missing)
        rows = Measurement.joined([one.tables[0] for one in measurements], [one.infos[0] for one in measurements])
        if self._is_distributed:
            from gradstat._core.sharded import Sharded

            local = rows
            parameters, names = [self._named.parameters[i] for i in positions], names_at(self._named, positions)
            rows = Sharded(parameters, names=names).rows(lambda _: local)
        counters = counters_on(self.optimizer, rows.tables[0].device)
        decision = norms.decide(rows.summands(), StepRequest(math.inf, None, counters.tensor))
        streams = counters.streams = streams_of([decision.verdict, *rows.tables])
        labels = labels_of(self._named, self._gradients)
        self._measured = StepMeasurement(rows, labels, *decision, is_scaled=False, backend=None, streams=streams)
        if isinstance(self._clip, LastNormClip):
            self._clip._remember(decision.norm)
        elif isinstance(self._clip, TensorClip):
            assert self._clip_states is not None
            self._clip._collect_(self._clip_states, decision.norm)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # keeps torch's schedulers from warning
        with announce.change(self._named.parameters):
            pass  # every step is done; only now have all gradients been measured
        announce.step_ended(self.optimizer)

    def _refuse_step(self, optimizer: Optimizer, *_: object) -> None:
        """Rejects ``optimizer.step()`` in a loop that still calls it, if it would change parameters."""
        if self._is_foreign and self._lock.locked():
            return  # called by us, during backward
        if "found_inf" in vars(optimizer):
            raise RuntimeError(
                "a loss scaler called step() of an optimizer that was already stepped in backward, with scaled "
                "gradients; step_in_backward does not unscale: train in bfloat16, or use guarded_step(scaler=scaler)"
            )
        if all(group.get("lr") == 0 for group in optimizer.param_groups):
            return  # torch.distributed.checkpoint creates the state by such a step, which changes no parameter
        gradients = gradients_of(self._named.parameters)
        if gradients.tensors:
            raise RuntimeError(
                f"{labels_of(self._named, gradients).of(0)!r} has a gradient that was not stepped in backward; call "
                "zero_grad(), or remove() the handle and call step() yourself"
            )


class _HandleReference:
    """A parameter's strong reference to its handle. Hooks refer to it weakly, as the GC cannot see through hooks.

    Pickling a parameter stores None in its place.
    """

    def __init__(self, handle: StepInBackward) -> None:
        self.handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _complete(reference: weakref.ref[StepInBackward], i: int, number: int, parameter: Tensor) -> None:
    """The hook of the i-th parameter, which is in group ``number``."""
    handle = reference()
    if handle is not None:  # None: the optimizer and the parameters are garbage as well
        handle._complete(i, number, parameter)


def handle_of(optimizer: Optimizer | None) -> StepInBackward | None:
    """The handle that steps ``optimizer`` in backward, or None."""
    return getattr(optimizer, "__dict__", {}).get("_stepped_in_backward")


def _check_clip(clip: object) -> None:
    if isinstance(clip, NormClip):
        raise ValueError(
            f"{type(clip).__name__} needs the norm of all gradients, which is not known until backward has finished; "
            f"use guarded_step, or LastNormClip({type(clip).__name__}(...)), which uses the norm of the previous step"
        )
    if isinstance(clip, TensorClip):
        clip._for_one_tensor()  # raises if it cannot
    elif isinstance(clip, (int, float)):
        positive("clip", clip, "None for no limit; it limits each gradient's norm")
    elif clip is not None and not isinstance(clip, LastNormClip):
        raise TypeError(
            f"clip: expected a number, gradstat.AGC, AdaGC or LastNormClip, or None; got {type(clip).__name__}"
        )


def _groups_of(model: Module | Iterable[Any]) -> list[dict[str, Any]]:
    refuse_engine(model)
    if isinstance(model, Module):
        if isinstance(uncompiled(model), DistributedDataParallel) or engine_of(model) is not None:
            raise NotImplementedError(
                f"{type(model).__name__} reduces gradients over ranks after they are complete, so ranks would step "
                f"with different ones; {_REMEDY}"
            )
        return [{"params": list(model.parameters())}]
    if isinstance(model, Tensor) or not isinstance(model, Iterable):
        raise TypeError(f"expected a torch.nn.Module, parameters or groups of them, got {type(model).__name__}")
    listed = list(model)
    if not any(isinstance(item, dict) for item in listed):
        return [{"params": listed}]
    return [{**group, "params": as_list(group["params"])} for group in listed]


def _refuse_reducers(named: NamedParameters) -> None:
    """Raises NotImplementedError for parameters whose gradients are reduced over ranks after our hooks run.

    Parameters do not show it, so this searches for the modules that reduce, which may have been made after the handle.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    older = getattr(sys.modules.get(_FSDP1[0]), _FSDP1[1], DistributedDataParallel)
    position = {id(parameter): i for i, parameter in enumerate(named.parameters)}
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, (DistributedDataParallel, older)):
            i = next((position[id(p)] for p in item.parameters() if id(p) in position), None)
            if i is not None:
                raise NotImplementedError(
                    f"{named.names()[i]!r} is in a {kind.__name__}, which reduces its gradient over ranks only after "
                    f"this rank would have stepped with its own; {_REMEDY}"
                )


def _can_be_fused(kind: Any, groups: list[dict[str, Any]], parameters: list[Tensor], options: dict[str, Any]) -> bool:
    """Whether torch has a fused step for ``parameters``, and the caller requested nothing else."""
    if not optimizers.traits_of_kind(kind).has_fused_step or "fused" not in inspect.signature(kind).parameters:
        return False
    if any(name in settings for settings in (options, *groups) for name in ("fused", "foreach", "differentiable")):
        return False
    if is_distributed(parameters) and not issubclass(kind, Adam):
        return False  # torch has no other fused step for distributed tensors
    devices = {"cpu"} if issubclass(kind, Adagrad) else set(_get_fused_kernels_supported_devices())
    return all(p.is_floating_point() and p.device.type in devices for p in parameters)


def _register_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Registers a hook; torch refuses that for a frozen parameter, which may be trained later."""
    is_frozen = not parameter.requires_grad
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        if is_frozen:
            parameter.requires_grad_(False)


def _measure_over_ranks(
    gradient: Any, labels: Labels, step: StepRequest, parameter: Any
) -> tuple[Measurement, StepMeasurement, Tensor]:
    """The rows of this rank's shard, the decision based on the whole tensor, and the gradient to step with.

    Needs one reduction, of a row's sums; the other fields are merged at the end, for all tensors together.
    """
    from gradstat._core.sharded import sum_over_shards_

    if gradient.placements != parameter.placements:  # a pending sum, as of norm layers in sequence parallelism
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    rows = measure([gradient], labels.of, None, over_ranks=False)
    whole = rows.tables[0].clone()
    sum_over_shards_(whole[:, _fields.SUMMED], [gradient], labels.names())
    decision = norms.decide(whole, step)
    streams = streams_of([decision.verdict])
    return (
        rows,
        StepMeasurement(Measurement([whole], None, rows.infos), labels, *decision, False, None, streams),
        gradient,
    )


def _queue(callback: Callable[[], None]) -> None:
    """Queues a callback for the end of the backward pass, behind those already queued."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
