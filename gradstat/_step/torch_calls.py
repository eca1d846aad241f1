"""Makes torch's clips, loss scalers and optimizers announce what they do, as gradstat's own functions do.

While somebody listens, torch's functions are wrapped; when the last listener leaves or is collected, they are back. The
hooks of optimizers are those of `gradstat._step.decision`, and stay.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradstat._core import announce
from gradstat._core.parameters import as_list
from gradstat._step import decision
from gradstat.patch import Layer, lock

_T = TypeVar("_T")

_clips: list[Layer] = []  # and of the backward pass
_layers: list[Layer] = []  # of scalers
_scaler_kinds: set[type[GradScaler]] = set()  # those whose methods are wrapped
_seekers: weakref.WeakSet[Any] = weakref.WeakSet()


class _Scaled(threading.local):
    """What scalers have scaled in a thread, since another one may train another model."""

    def __init__(self) -> None:
        # By scaler, the losses since the last `losses_scaled_by`.
        self.losses: weakref.WeakKeyDictionary[GradScaler, deque[Tensor]] = weakref.WeakKeyDictionary()


_scaled = _Scaled()


def listen(listener: announce.Listener) -> None:
    """Announces to ``listener``, which is held weakly, what torch and gradstat do to gradients, until `leave`."""
    announce.add(listener)
    weakref.finalize(listener, _restore_if_unused).atexit = False
    with lock:
        if _clips:
            return
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            # torch looks up the second half of its own clip by the private name, also for callers who imported the
            # clip by name before.
            for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "_clip_grads_with_norm_"):
                if hasattr(module, name):
                    _clips.append(Layer(module, name, _clip))
        _clips.append(Layer(torch.autograd, "backward", _backward))  # Tensor.backward calls it
        _wrap_scalers(GradScaler)
    decision.install_hooks()


def leave(listener: announce.Listener) -> None:
    """The inverse of `listen`."""
    announce.discard(listener)
    _restore_if_unused()


def seek_scaler(seeker: object) -> None:
    """Notes which scalers scale losses, for `only_scaler`, until ``seeker``, held weakly, calls `end_seeking`."""
    weakref.finalize(seeker, _restore_if_unused).atexit = False
    with lock:
        _seekers.add(seeker)
        _wrap_scalers(GradScaler)


def end_seeking(seeker: object) -> None:
    """The inverse of `seek_scaler`; does nothing for one that does not seek."""
    if seeker in _seekers:
        with lock:
            _seekers.discard(seeker)
        _restore_if_unused()


def _restore_if_unused() -> None:
    with lock:
        if announce.listeners() or list(_seekers):  # the set's length may count some that are gone
            return
        while layers := _clips or _layers:  # the collection of another listener may come in between
            layers.pop().remove()
        _scaler_kinds.clear()
        _scaled.losses.clear()


def has_losses() -> bool:
    """Whether a scaler has scaled losses in this thread that `losses_scaled_by` has not returned yet."""
    return bool(_scaled.losses)


def only_scaler() -> GradScaler | None:
    """The scaler that has scaled losses in this thread which nobody asked for yet, if there is exactly one."""
    scalers = list(_scaled.losses)
    return scalers[0] if len(scalers) == 1 else None


def losses_scaled_by(scaler: object) -> list[Tensor]:
    """The losses, before this thread scaled them, since the last call, ``[]`` each; at most the last 64."""
    return list(_scaled.losses.pop(scaler, ())) if isinstance(scaler, GradScaler) else []


def _wrap_scalers(kind: type[GradScaler]) -> None:
    for each in with_subclasses(kind):
        if each not in _scaler_kinds:
            _scaler_kinds.add(each)
            methods = {"unscale_": _unscale, "step": _step, "scale": _scale}
            _layers.extend(Layer(each, name, method) for name, method in methods.items() if name in each.__dict__)


def with_subclasses(kind: type[_T]) -> Iterator[type[_T]]:
    """The class, and all that are derived from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from with_subclasses(derived)


def _clip(layer: Layer, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return layer.below(parameters, *args, **kwargs)
    listed = as_list(parameters)
    # Each of torch's clips takes its limit first, under a name of its own.
    limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
    if layer.name == "clip_grad_value_" and isinstance(limit, (int, float)):
        limit = announce.ElementLimit(limit)
    with announce.change(listed, limit=limit):
        return layer.below(listed, *args, **kwargs)


def _backward(layer: Layer, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return layer.below(tensors, grad_tensors, *args, **kwargs)
    # torch also takes edges of the graph, which are tuples, and iterators, which must not be used up.
    roots = [tensors] if isinstance(tensors, Tensor) else tensors if isinstance(tensors, list | tuple) else []
    given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else grad_tensors
    is_loss = all(isinstance(root, Tensor) and root.numel() == 1 for root in roots)
    with announce.backward(roots if is_loss and all(one is None for one in given) else []):
        return layer.below(tensors, grad_tensors, *args, **kwargs)


def _unscale(layer: Layer, scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    parameters = []
    if scaler.is_enabled() and isinstance(optimizer, Optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with announce.change(parameters, scaler):
        return layer.below(scaler, optimizer, *args, **kwargs)


def _step(layer: Layer, scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    try:
        return _unscale(layer, scaler, optimizer, *args, **kwargs)
    finally:
        announce.step_ended(optimizer)  # also if the scaler has skipped it


def _scale(layer: Layer, scaler: GradScaler, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    is_loss = isinstance(outputs, Tensor) and outputs.numel() == 1
    if is_loss and not torch.compiler.is_compiling() and scaler.is_enabled():
        if type(scaler) not in _scaler_kinds:  # a class that was defined later
            with lock:
                _wrap_scalers(type(scaler))
        _scaled.losses.setdefault(scaler, deque(maxlen=64)).append(outputs.detach().reshape(()))
    return layer.below(scaler, outputs, *args, **kwargs)
