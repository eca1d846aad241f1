"""`Undo`: saves what a training step changes, and restores it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradstat._core.text import printable
from gradstat._core.warn import warn
from gradstat._step.torch_calls import with_subclasses
from gradstat.counters import _counters
from gradstat.guard import last_guards
from gradstat.patch import Layer
from gradstat.replay.step_state import ALWAYS_COPIED, RngState, same_version


class Undo:
    """Saves and restores what running a step again would change; large tensors are copied only `before_write`."""

    def __init__(self) -> None:
        self._protected: dict[int, list[Tensor]] = {}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._on_restore = contextlib.ExitStack()
        self._optimizers: set[int] = set()
        self._names: dict[int, str] = {}  # of buffers, by id
        self._failures: list[str] = []

    def protect(self, tensor: Tensor) -> None:
        """Registers ``tensor``, to be copied before it is written."""
        key = _storage_of(tensor)
        if key is not None:
            self._protected.setdefault(key, []).append(tensor)

    def copy(self, tensor: Tensor) -> None:
        if id(tensor) not in self._copies:
            with torch.no_grad():
                self._copies[id(tensor)] = tensor, tensor.detach().clone()

    def before_write(self, tensor: Tensor) -> None:
        """Copies what is protected in the memory of ``tensor``, which is about to be written."""
        for protected in self._protected.pop(_storage_of(tensor) or 0, ()):
            self.copy(protected)

    def restore(self) -> None:
        """Restores everything, even if something raises: tensors first, then the rest in reverse order.

        A warning says what could not be restored.
        """
        self._protected.clear()
        with self._on_restore:
            for tensor, copy in reversed(self._copies.values()):  # of shared memory, the first copy is right
                name = self._names.get(id(tensor), f"a tensor {list(copy.shape)}")
                self._attempt(name, _copy_back, tensor, copy)
        if self._failures:
            left = "; ".join(self._failures)
            warn(f"after the replay not everything could be restored as it was before: {left}", RuntimeWarning)

    def _attempt(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # the rest is restored all the same
            self._failures.append(f"{name} ({type(error).__name__}: {printable(str(error))})")

    def _later(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Calls ``function``, which restores ``name``, in `restore`."""
        self._on_restore.callback(self._attempt, name, function, *args)

    def rng(self) -> None:
        self._later("random states", RngState.capture().restore)

    def model(self, model: Module) -> None:
        """Buffers, parameters and training flags."""
        self._names |= {id(buffer): f"buffer {name}" for name, buffer in model.named_buffers()}
        for module in model.modules():
            self.attribute(module, "training")
            for buffer in module.buffers(recurse=False):
                self._tensor(buffer)
            self._mapping(
                module._buffers, tensors=False
            )  # no dictionary in a scripted module, which cannot replace them

    def parameters(self, parameters: Iterable[Tensor]) -> None:
        """Values and gradients; gradients are None until they are restored."""
        for parameter in parameters:
            data = parameter.data  # an alias, in case the step gives the parameter other memory
            self.protect(data)
            self.attribute(parameter, "requires_grad")
            self.gradient(parameter)  # restored after the data, whose shape it must have
            self._later("a parameter's memory", _set_data, parameter, data)

    def inputs(self, tensors: Iterable[Tensor]) -> None:
        """Values, and gradients of leaves, which are None until they are restored."""
        for tensor in tensors:
            self.protect(tensor)
            if tensor.requires_grad and tensor.is_leaf:
                self.gradient(tensor)

    def gradient(self, leaf: Tensor) -> None:
        """Sets the gradient of ``leaf`` to None until it is restored."""
        gradient = leaf.grad
        self._later("a gradient", setattr, leaf, "grad", gradient)
        leaf.grad = None

    def attribute(self, owner: Any, name: str) -> None:
        self._later(name, setattr, owner, name, getattr(owner, name))

    def optimizer(self, optimizer: Optimizer) -> None:
        """State, hyperparameters and other attributes."""
        if id(optimizer) in self._optimizers:
            return
        self._optimizers.add(id(optimizer))
        for group in optimizer.param_groups:
            self._mapping(group)
            for parameter in group["params"]:
                self.protect(parameter.data)
        for state in optimizer.state.values():
            self._mapping(state)
        self._mapping(optimizer.state, tensors=False)
        groups = optimizer.param_groups
        self._later("parameter groups", groups.__setitem__, slice(None), list(groups))
        self._mapping(vars(optimizer), tensors=False)

    def scaler(self, scaler: GradScaler) -> None:
        """Scale and counters; its per-optimizer states are empty until they are restored."""
        state: dict[str, Any] = scaler.__dict__
        for value in state.values():
            for part in (value, *vars(value).values()) if hasattr(value, "__dict__") else (value,):
                if isinstance(part, Tensor):
                    self.copy(part)
        self._mapping(state, tensors=False)
        per_optimizer = state.get("_per_optimizer_states")
        if per_optimizer is not None:
            state["_per_optimizer_states"] = per_optimizer.__class__(per_optimizer.default_factory)

    def _mapping(self, mapping: Any, tensors: bool = True) -> None:
        if not isinstance(mapping, dict):
            return
        contents = dict(mapping)
        for value in contents.values() if tensors else ():
            if isinstance(value, Tensor):
                self._tensor(value)
        self._later("a dictionary", _set_contents, mapping, contents)

    def _tensor(self, tensor: Tensor) -> None:
        if tensor.numel() <= ALWAYS_COPIED:
            self.copy(tensor)
        else:
            self.protect(tensor)

    def no_steps(self, optimizers: Iterable[Optimizer]) -> None:
        """Until restored, ``step`` of ``optimizers`` does nothing except call its closure.

        Any other optimizer that steps is restored. Learning-rate schedulers do not step.
        """
        counts = dict(_counters)  # of guarded steps, updated by kernels before any hook of an optimizer
        for counters in counts.values():
            self.copy(counters.tensor)
        guards = dict(last_guards)
        for guard in guards.values():
            self.copy(guard.state.tensor)

        def forget_guards() -> None:
            for guard in {*last_guards.values()} - {*guards.values()}:  # first used in the meantime
                guard.state.load_(torch.zeros_like(guard.state.tensor))
            _set_contents(last_guards, guards)

        self._later("guards", forget_guards)
        self._later("counters", _set_contents, _counters, counts)
        for optimizer in optimizers:
            self.optimizer(optimizer)
            optimizer.step = _no_step  # type: ignore[method-assign]
        thread = threading.get_ident()  # others train on

        def restore_afterwards(optimizer: Optimizer, *_: object) -> None:
            if threading.get_ident() == thread:
                self.optimizer(optimizer)

        def only_in_others(layer: Layer, *args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == thread else layer.below(*args, **kwargs)

        self._on_restore.callback(register_optimizer_step_pre_hook(restore_afterwards).remove)
        for schedule in with_subclasses(LRScheduler):
            if "step" in vars(schedule):
                self._on_restore.callback(Layer(schedule, "step", only_in_others).remove)


def _no_step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _copy_back(tensor: Tensor, copy: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad(), same_version(tensor):
        if tensor.shape != copy.shape:  # a cache that grows
            tensor.resize_(copy.shape)
        if _storage_of(tensor) is not None:
            mine, kept = (getattr(one, "_local_tensor", one).untyped_storage() for one in (tensor, copy))
            if not mine.nbytes():  # freed
                mine.resize_(kept.nbytes())
        tensor.copy_(copy)


def _set_contents(mapping: MutableMapping[Any, Any], contents: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(contents)


def _set_data(parameter: Tensor, data: Tensor) -> None:
    if parameter.data_ptr() != data.data_ptr():
        parameter.data = data


def _storage_of(tensor: Tensor) -> int | None:
    values = getattr(tensor, "_local_tensor", tensor)
    if values.layout is not torch.strided or values.numel() == 0 or values.device.type == "meta":
        return None
    key: int = values.untyped_storage()._cdata
    return key
