"""`auto`: attaches a monitor to the step of an existing optimizer, without editing the training loop.

Clips and loss scalers change gradients before the step, and a scaler may skip the step. So while any optimizer is
watched, torch's clips and the methods of its scalers are patched to notify the monitor before they do their work.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradstat._core.engines import refuse_engine
from gradstat._core.measure import norm_of
from gradstat._core.parameters import as_list, gradients_to_clip, source_of
from gradstat._core.tensors import to_device
from gradstat._step.loss_scale import is_still_scaled
from gradstat.clip import clip_grad_norm_, clip_grads_with_norm_
from gradstat.monitor import Monitor
from gradstat.monitor.reporting import not_replacing, warn
from gradstat.patch import Layer, lock

if TYPE_CHECKING:
    from typing_extensions import Self

_MARK = "_gradstat_auto"  # the attribute set on a watched optimizer
_handles: weakref.WeakSet[AutoHandle] = weakref.WeakSet()
# Losses scaled by each scaler since an optimizer last consumed them.
_losses: weakref.WeakKeyDictionary[GradScaler, deque[Tensor]] = weakref.WeakKeyDictionary()


class AutoHandle:
    """A monitor attached to an optimizer; returned by `auto`.

    Attributes:
        monitor: The `gradstat.Monitor`.
    """

    def __init__(self, optimizer: Optimizer, monitor: Monitor, max_norm: float | None) -> None:
        self.monitor = monitor
        monitor._is_user_called = False
        self._optimizer = optimizer
        self._max_norm = max_norm
        # One of the measured gradients and its version; another backward pass changes it.
        self._measured: tuple[weakref.ref[Tensor], int] | None = None
        self._has_warned = False
        self._is_over = False  # the step has been measured; further calls of its closure are ignored
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        setattr(optimizer, _MARK, self)
        _handles.add(self)

    def __repr__(self) -> str:
        return f"AutoHandle({type(self._optimizer).__name__}, {self.monitor!r})"

    def _contained(self) -> AbstractContextManager[None]:
        """Keeps gradstat's internal errors from ending the training; errors of the monitor's policies pass through."""
        return self.monitor._gaps.suppress_errors(
            self.monitor.steps, "calls of clips and loss scalers could not be tracked"
        )

    def _after(self, *_: object) -> None:
        self._measured, self._is_over = None, False

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch passes the optimizer itself as the first argument.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            if self._measured is None:
                self.monitor.step()
            self._clip()
            return None
        # The closure computes the gradients inside the step; those of its first call are the step's.
        self._after()

        def evaluated() -> Any:
            loss = closure()
            if not self._is_over:
                if self._measured is None:  # the closure does not clip
                    is_number = isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1)
                    self.monitor.step(loss if is_number else None)
                self._clip()
                self._is_over = True
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _clip(self) -> None:
        if self._max_norm is None:
            return
        parameters = source_of(self._optimizer).parameters
        divisor: Tensor | None = getattr(self._optimizer, "grad_scale", None)
        if divisor is None:
            clip_grad_norm_(parameters, self._max_norm)
            return
        # A loss scaler leaves the division by the scale to the step of a fused optimizer.
        _, found = gradients_to_clip(parameters)
        norm = norm_of(found.tensors, 2.0, found.name_of, None, owners=parameters)
        clip_grads_with_norm_(parameters, self._max_norm, norm / to_device(divisor, norm.device))

    def _holds(self, parameters: Iterable[object]) -> bool:
        """Whether any of ``parameters`` is the optimizer's."""
        own: set[int] = set()
        with self._contained():
            own = {id(parameter) for parameter in source_of(self._optimizer).parameters}
        return not own.isdisjoint(map(id, parameters))

    def _measure(self, scaler: GradScaler | None) -> None:
        """Measures complete gradients, unless already measured, before ``scaler`` or (None) a clip changes them."""
        is_measured, loss = False, None
        with self._contained():
            if scaler is None and len(_handles) == len(_losses) == 1:
                scaler = next(iter(_losses))  # the only scaler that can have scaled these gradients
            if self.monitor.scaler is None and scaler is not None:
                self.monitor.scaler = scaler
            if self._measured is not None:
                known, version = self._measured
                gradient = known()
                is_measured = gradient is not None and gradient._version == version
            if not is_measured and self.monitor.scaler is not None:
                losses = _losses.pop(self.monitor.scaler, ())
                # On the last one's device: parts of a model may have losses on different devices.
                loss = torch.stack([one.to(losses[-1].device).float() for one in losses]).sum() if losses else None
        if not is_measured:
            self.monitor.step(loss)
            self._note_gradients()

    def _note_gradients(self) -> None:
        """Remembers the current gradients, either measured or changed since by a clip or scaler that notified us."""
        with self._contained():
            gradients = (parameter.grad for parameter in source_of(self._optimizer).parameters)
            gradient = next((gradient for gradient in gradients if gradient is not None), None)
            self._measured = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def _warn_if_scaled(self) -> None:
        """Warns once if gradients are clipped that still carry the loss scale."""
        scaler, is_scaled = self.monitor.scaler, False
        with self._contained():
            is_scaled = scaler is not None and scaler.is_enabled() and is_still_scaled(scaler, self._optimizer)
        if is_scaled and not self._has_warned:
            self._has_warned = True
            text = "gradients are clipped while they carry the loss scale, which divides the limit by that scale"
            warn(f"{text}; call scaler.unscale_(optimizer) before the clip")

    def remove(self) -> None:
        """Detaches the monitor from the optimizer and closes it; its findings remain."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer.__dict__.pop(_MARK, None)
        _handles.discard(self)
        _remove_layers()
        self.monitor.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with not_replacing(error):
            self.remove()


_layers: list[Layer] = []


def _call_and_measure(handles: list[AutoHandle], scaler: GradScaler | None, call: Callable[[], Any]) -> Any:
    """Calls ``call``, a clip or a method of ``scaler``, which changes gradients; measures before, takes note after."""
    for handle in handles:
        if not handle._is_over:
            handle._measure(scaler)
        if scaler is None:
            handle._warn_if_scaled()
    try:
        return call()
    finally:
        for handle in handles:
            handle._note_gradients()


def _clip(layer: Layer, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return layer.below(parameters, *args, **kwargs)
    given = as_list(parameters)
    concerned = [handle for handle in list(_handles) if handle._holds(given)]
    return _call_and_measure(concerned, None, lambda: layer.below(given, *args, **kwargs))


def _unscale(layer: Layer, scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    handle = getattr(optimizer, _MARK, None)
    concerned = [] if handle is None or not scaler.is_enabled() else [handle]
    return _call_and_measure(concerned, scaler, lambda: layer.below(scaler, optimizer, *args, **kwargs))


def _step(layer: Layer, scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    result = _unscale(layer, scaler, optimizer, *args, **kwargs)
    handle = getattr(optimizer, _MARK, None)
    if handle is not None:  # also if the scaler has skipped the optimizer's step
        handle._after()
    return result


def _scale(layer: Layer, scaler: GradScaler, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    is_loss = isinstance(outputs, Tensor) and outputs.numel() == 1
    if is_loss and not torch.compiler.is_compiling() and scaler.is_enabled():
        for handle in list(_handles)[:1]:
            with handle._contained():
                _losses.setdefault(scaler, deque(maxlen=64)).append(outputs.detach().reshape(()))
    return layer.below(scaler, outputs, *args, **kwargs)


def _scalers(kind: type[GradScaler]) -> Iterator[type[GradScaler]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _scalers(derived)


def _install_layers() -> None:
    """Patches torch's clips and scalers so that they notify the handles."""
    with lock:
        if _layers:
            return
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            _layers.extend(Layer(module, name, _clip, watches=True) for name in ("clip_grad_norm_", "clip_grad_value_"))
        for kind in _scalers(GradScaler):
            methods = {"unscale_": _unscale, "step": _step, "scale": _scale}
            _layers.extend(Layer(kind, name, method) for name, method in methods.items() if name in kind.__dict__)


def _remove_layers() -> None:
    """Restores torch's functions if no optimizer is watched any more."""
    with lock:
        if not _handles:
            for layer in _layers:
                layer.remove()
            _layers.clear()


class Parameters(nn.Module):
    """Parameters as a module, under names that may contain dots."""

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        super().__init__()
        self._parameters.update(named)  # register_parameter rejects names with dots


def auto(
    optimizer: Optimizer,
    model: nn.Module | None = None,
    *,
    max_norm: float | None = None,
    scaler: Any = None,
    **options: Any,
) -> AutoHandle:
    """Watches every step of ``optimizer`` from now on, without changes to the training loop. ::

        gradstat.auto(optimizer)  # that is all; warns when something is wrong

    Gradients are measured, as by `gradstat.Monitor.step` (one read, no host sync on a GPU), before the first of these
    changes them: a clip of ``torch.nn.utils``, a loss scaler, ``optimizer.step()``. Steps that a scaler skips are
    therefore seen as well. A clip that was imported by name earlier is not noticed; gradients are then measured after
    it. The loss is known if a scaler scales it, or if the step gets a closure, whose first call counts.

    Args:
        optimizer: Any ``torch.optim.Optimizer``.
        model: The model, for parameter names and everything else that a monitor can watch; None uses the optimizer's
            names (``group0.3``, or its own if it was made from ``named_parameters()``).
        max_norm: If given, gradients are clipped to it after they were measured, as by `gradstat.clip_grad_norm_`.
        scaler: The loss scaler; None to detect it when it is used.
        options: For `gradstat.Monitor`: ``on_anomaly``, ``watch``, ``save_to`` and so on.

    Returns:
        A handle with ``monitor`` and ``remove()``, which need not be kept; also a context manager. A second call for
        the same optimizer ends the first one's monitor, so that a notebook cell can be run again.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
    """
    given: object = optimizer
    if not isinstance(given, Optimizer):
        refuse_engine(given)
        raise TypeError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__module__}.{type(optimizer).__qualname__}; for a "
            "wrapped optimizer pass the inner one, for example optimizer.optimizer"
        )
    if model is None:
        source = source_of(optimizer)
        model = Parameters(zip(source.names(), source.parameters, strict=True))
    monitor = Monitor(model, optimizer, scaler, max_norm=max_norm, **options)
    known = getattr(optimizer, _MARK, None)
    if known is not None:
        known.remove()
    _install_layers()
    return AutoHandle(optimizer, monitor, max_norm)
