"""`auto`: attaches a monitor to the steps of an existing optimizer, without editing the training loop.

Clips and loss scalers change gradients before the step, and a scaler may skip the step. Each of them announces what it
is about to do (`gradstat._core.announce`), and the monitor measures before the first of them does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat._core.announce import Closure
from gradstat._core.engines import refuse_engine
from gradstat._core.parameters import Parameters, named_parameters_of
from gradstat._core.warn import not_replacing, warn
from gradstat._step import decision, optimizers, torch_calls
from gradstat._step.loss_scale import is_still_scaled
from gradstat._step.record import clip_before_step
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import Limit, checked_limit
from gradstat.monitor import Monitor
from gradstat.monitor.arguments import refuse_unknown
from gradstat.monitor.unwatched import Unwatched
from gradstat.rules.rows import Observation

if TYPE_CHECKING:
    from typing_extensions import Self

_MARK = "_gradstat_auto"  # the attribute set on a watched optimizer, which keeps the handle alive
_handles: weakref.WeakSet[AutoHandle] = weakref.WeakSet()
_UNUSED = 50  # so many gradients in a row that no step uses are told; four times as many before the first step
# A gradient, if there is one, and its version, which another backward pass changes.
_State: TypeAlias = tuple[weakref.ref[Tensor] | None, int]


class AutoHandle:
    """A monitor attached to an optimizer, as returned by `auto`.

    Attributes:
        monitor: The `gradstat.Monitor`.
        optimizer: The optimizer whose steps are watched.
    """

    def __init__(
        self, optimizer: Optimizer | None, monitor: Monitor, max_norm: Limit | None, listens: bool = True
    ) -> None:
        self.monitor, self.optimizer, self._max_norm = monitor, optimizer, max_norm
        self._connection, self._unwatched = monitor.connection, Unwatched(monitor.findings)
        self._connection.is_stepped_by_user = False
        self._connection.why_nothing = self._why_nothing
        # The first of the gradients that have been measured, and of those that the last step has used.
        self._measured: _State | None = None
        self._used: _State | None = None
        # Some parameter, and its gradient before the running backward pass and after the last one.
        self._followed: Callable[[], Tensor | None] = lambda: None
        self._before: _State = None, 0
        self._after: _State = None, 0
        self._roots: list[Tensor] = []  # whose backward passes have changed the gradients since they were zeroed
        # How often gradients were zeroed since the last step, and the version of that parameter then.
        self._unused = self._version = 0
        self._enough = 4 * _UNUSED  # some programs take the gradient of each sample
        self._clips_late = self._has_warned = False
        self._is_over = False  # the step has been measured; further calls of its closure are ignored
        self._running: Optimizer | None = None  # the optimizer whose step has begun and not ended
        self._steps_itself = False  # whether a step of this very optimizer has been seen
        self._others: set[str] = set()  # classes of other optimizers whose steps were seen before the first of ours
        if listens:
            _handles.add(self)
            torch_calls.listen(self)

    def _leave(self) -> None:
        if getattr(self.optimizer, _MARK, None) is self:
            delattr(self.optimizer, _MARK)
        _handles.discard(self)
        torch_calls.leave(self)

    def _take(self, loss: Any) -> None:
        self.monitor.step(loss)

    def _is_complete(self) -> bool:
        """Whether gradients are complete now, which the adapter of a framework may know better."""
        return True

    def __repr__(self) -> str:
        return f"AutoHandle({type(self.optimizer).__name__}, {self.monitor!r})"

    def _contained(
        self, what: str = "calls of clips and loss scalers could not be tracked"
    ) -> AbstractContextManager[None]:
        """Turns gradstat's own errors inside into one warning that begins with ``what``; those of policies pass."""
        return self._unwatched.suppress_errors(self.monitor.steps, what)

    def before_change(self, parameters: Sequence[Tensor], scaler: Any, loss: Any) -> None:
        """Measures the complete gradients of ``parameters``, unless it has, before ``scaler`` or a clip changes them.

        ``loss`` is the step's, or None.
        """
        if not (self.holds(parameters) and self._is_complete()):
            return
        if scaler is None and self._are_used():
            self._clips_late = True
            watched = set(map(id, self._connection.trained.named_parameters().parameters))
            if watched.issuperset(map(id, parameters)):  # else others may not be used yet
                self._connection.recorder.note_late_clip()
            return
        self._measure(scaler, loss)
        used, is_scaled = self.monitor.scaler, False
        if scaler is None and used is not None:  # a clip
            with self._contained():
                is_scaled = used.is_enabled() and is_still_scaled(used, self.optimizer)
        if is_scaled and not self._has_warned:
            self._has_warned = True
            text = "gradients are clipped while they carry the loss scale, which divides the limit by that scale"
            warn(f"{text}; call scaler.unscale_(optimizer) before the clip")

    def before_backward(self) -> None:
        """Notes the gradients; forgets the losses of those that were zeroed, and tells if nothing uses them."""
        self._before = self._now()
        if not _is_same(self._before, self._after):
            self._roots.clear()
            version = getattr(self._followed(), "_version", 0)
            # Not in an evaluation, which may take gradients, and not if something else changes the parameter.
            is_unused = version == self._version and self._connection.wrapper.training
            self._unused, self._version = self._unused + 1 if is_unused else 0, version
            if self._unused == self._enough:
                self.monitor._observe([Observation("unused", self.monitor.steps, self._unused)])

    def after_backward(self, losses: Sequence[Tensor]) -> None:
        """Takes ``losses`` for those of the coming step, if the gradients have changed."""
        with self._contained():
            self._after = self._now()
            if self._after[0] is None:  # another parameter may have a gradient
                parameters = self._connection.trained.named_parameters().parameters
                followed = next((one for one in parameters if one.grad is not None), None)
                self._followed = (lambda: None) if followed is None else weakref.ref(followed)
                self._after = self._now()
            if not _is_same(self._before, self._after):
                self._measured = None
                self._roots += [loss.detach().reshape(()) for loss in losses]
                self._connection.recorder.saw_loss(losses)

    def _now(self) -> _State:
        """The gradient of one parameter, if it has one, and its version: a look at all would take long."""
        parameter = self._followed()
        return _state_of(None if parameter is None else parameter.grad)

    def after_change(self, parameters: Sequence[Tensor]) -> None:
        """Notes that the gradients of ``parameters`` have been measured, though they are others now."""
        if self.holds(parameters) and self._is_complete():
            with self._contained():
                self._after, now = self._now(), _state_of(self._first_gradient())
                if self._clips_late:
                    self._used, self._clips_late = now, False
                else:
                    self._measured = now

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        """Measures and clips before ``optimizer`` steps, or in its closure, which computes the gradients."""
        if optimizer is self.optimizer:
            self._steps_itself = True
        elif not self._steps_in_place(optimizer):
            return closure
        # A step that has raised in a hook or in the optimizer did not end.
        has_failed, self._running = self._running is optimizer, optimizer
        if closure is None:
            if has_failed:
                self._is_over = False
            if has_failed or self._measured is None:
                self._measure()
            if self._max_norm is not None:
                _clip(optimizer, self._max_norm)
            return None
        # The gradients of the closure's first call are the step's. It may compute none, as Lightning's under manual
        # optimization; then those that were measured before stay measured.
        self._measured, self._is_over = None if has_failed else self._measured, False

        def evaluated() -> Any:
            loss = closure()
            is_first = not self._is_over
            self._measure(None, loss)  # unless a clip in the closure has
            self._is_over = True
            # An adaptive clip would take each evaluation for a step.
            if self._max_norm is not None and (is_first or not isinstance(self._max_norm, AdaptiveClip)):
                _clip(optimizer, self._max_norm)
            return loss

        return evaluated

    def after_step(self, optimizer: Optimizer) -> None:
        """Marks the coming step of ``optimizer`` as not measured yet."""
        if optimizer is self.optimizer or self._steps_in_place(optimizer):
            self._used, self._measured, self._is_over, self._running = self._measured, None, False, None
            self._unused, self._enough = 0, max(_UNUSED, 2 * self._unused)

    def _steps_in_place(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` takes the steps of the watched one, for whose parameters it was made, as SAM does."""
        if self._steps_itself or any(handle.optimizer is optimizer for handle in _handles):
            return False
        if not self.holds(named_parameters_of(optimizer).parameters):
            self._others.add(type(optimizer).__name__)
            return False
        return True

    def _why_nothing(self) -> str:
        name = type(self.optimizer).__name__
        others = f"; steps of {', '.join(sorted(self._others))}, with other parameters, were seen" * bool(self._others)
        return (
            f"step() of the watched {name} has not been called{others}. Pass auto() the optimizer that steps, after it "
            "was made for the final (wrapped, moved) model"
        )

    def holds(self, parameters: Sequence[object]) -> bool:
        """Whether any of ``parameters`` is watched."""
        watched: Sequence[object] = ()
        with self._contained():
            watched = self._connection.trained.named_parameters().parameters
        if watched and parameters and watched[0] is parameters[0]:
            return True
        return not set(map(id, watched)).isdisjoint(map(id, parameters))

    def _measure(self, scaler: Any = None, loss: Any = None) -> None:
        """Lets the monitor take the step, unless it has."""
        is_measured = self._is_over
        with self._contained():
            are_scaled = torch_calls.has_losses()
            if are_scaled and scaler is None and len(_handles) == 1:
                scaler = torch_calls.only_scaler()  # no other can have scaled these gradients
            if scaler is not None and self.monitor.scaler is None:
                self.monitor.scaler = scaler
            is_measured = is_measured or self.is_measured()
            if not is_measured:
                losses, self._roots = self._roots, []
                losses = torch_calls.losses_scaled_by(self.monitor.scaler) if are_scaled else losses
                if losses and loss is None:
                    loss = sum_of(losses)
        if not is_measured:
            # A closure may return anything.
            is_loss = isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1)
            try:
                self._take(loss if is_loss else None)
            finally:  # a program may catch the error of a policy
                self._measured = self._connection.recorder.first_gradient

    def is_measured(self) -> bool:
        """Whether the current gradients have been measured: no backward pass has changed them since."""
        if self._measured is None:
            return False
        now = _state_of(self._first_gradient())
        return now[0] is None or _is_same(now, self._measured)

    def _are_used(self) -> bool:
        """Whether a change of the current gradients has no effect: there are none, or the last step has used them."""
        is_none = is_used = False
        with self._contained():
            now = _state_of(self._first_gradient())
            is_none, is_used = now[0] is None, self._used is not None and _is_same(now, self._used)
        return is_none or is_used

    def _first_gradient(self) -> Tensor | None:
        gradients = (parameter.grad for parameter in self._connection.trained.named_parameters().parameters)
        return next((gradient for gradient in gradients if gradient is not None), None)

    def remove(self) -> None:
        """Detaches the monitor from the optimizer and closes it. The findings remain."""
        self._leave()
        self.monitor.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with not_replacing(error):
            self.remove()


def sum_of(losses: list[Tensor]) -> Tensor:
    """On the last one's device: parts of a model may have losses on different devices."""
    if len(losses) == 1:
        return losses[0]
    return torch.stack([loss.to(losses[-1].device).float() for loss in losses]).sum()


def _state_of(gradient: Tensor | None) -> _State:
    return (None, 0) if gradient is None else (weakref.ref(gradient), gradient._version)


def _is_same(one: _State, other: _State) -> bool:
    """Whether both are of one gradient in one version; references are compared by identity, as tensors cannot be."""
    return one[0] is other[0] and one[1] == other[1]


def _clip(optimizer: Optimizer, limit: Limit) -> None:
    decision.carry_out(optimizer)  # a skipped step is not clipped
    clip_before_step(optimizer, limit)


def auto(
    model: nn.Module | Optimizer | None = None,
    optimizer: Optimizer | nn.Module | None = None,
    *,
    max_norm: float | AdaptiveClip | None = None,
    scaler: Any = None,
    **options: Any,
) -> AutoHandle:
    """Watches every step of ``optimizer`` from now on, without changes to the training loop. ::

        gradstat.auto(model, optimizer)  # that is all; warns when something is wrong

    Gradients are measured, as by `gradstat.Monitor.step` (one pass, no host sync on a GPU), before the first of these
    calls changes them: a clip of torch or gradstat, a loss scaler, `gradstat.guarded_step`, ``optimizer.step()``. Steps
    that a scaler or a guarded step skips are therefore seen as well. In each step it watches what the optimizer holds
    then, so groups may be added and parameters replaced. The loss is the root of the backward passes that have changed
    the gradients since they were zeroed, summed over micro-batches, before a scaler scaled it; or what
    `gradstat.guarded_step` gets, or what the first call of a closure returns. A root of several elements is none.

    Args:
        model: The model, for parameter names and everything else that a monitor can watch. May be left out, as in
            ``gradstat.auto(optimizer)``, which uses the optimizer's names (``group0.3``, or its own if it was made from
            ``named_parameters()``). What the optimizer trains besides is watched as well, under those names.
        optimizer: Any ``torch.optim.Optimizer``; of one that wraps another, as Accelerate's and Opacus' do, the inner.
            The two may come in either order.
        max_norm: If given, gradients are clipped to it after they were measured, as by `gradstat.clip_grad_norm_` or by
            an adaptive clip. Where a loss scaler leaves unscaling to a fused optimizer's step, the clip does so, too.
            Each evaluation of a closure is clipped, by an adaptive clip the first.
        scaler: The loss scaler; None to detect it when it is used.
        options: For `gradstat.Monitor`: ``on_anomaly``, ``watch``, ``save_to`` and so on.

    Returns:
        A handle with ``monitor`` and ``remove()``, which is also a context manager and need not be kept. A second call
        for the same optimizer ends the first one's monitor, so that a notebook cell can be run again.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or ``max_norm`` neither a number nor an adaptive clip.
        ValueError: ``max_norm`` is not above 0.
    """
    model, optimizer = optimizers.in_order(model, optimizer)
    if not isinstance(optimizer, Optimizer):
        refuse_engine(optimizer)
        raise TypeError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__module__}.{type(optimizer).__qualname__}; for a "
            "wrapped optimizer pass the inner one, for example optimizer.optimizer"
        )
    refuse_unknown(options, auto, Monitor)
    optimizer, limit = optimizers.unwrapped(optimizer), checked_limit(max_norm)
    monitor = Monitor(Parameters() if model is None else model, optimizer, scaler, max_norm=max_norm, **options)
    earlier = getattr(optimizer, _MARK, None)
    if earlier is not None:
        earlier.remove()
    handle = AutoHandle(optimizer, monitor, limit)
    setattr(optimizer, _MARK, handle)
    return handle
