"""`auto`: attaches a monitor to the steps of an existing optimizer, without editing the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from gradstat._core.engines import refuse_engine
from gradstat._core.parameters import Parameters
from gradstat._core.warn import not_replacing
from gradstat._step import optimizers
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import checked_limit
from gradstat.monitor import Monitor
from gradstat.monitor.arguments import refuse_unknown
from gradstat.monitor.listener import StepListener
from gradstat.monitor.source import StepSource

if TYPE_CHECKING:
    from typing_extensions import Self

_MARK = "_gradstat_auto"  # the attribute set on a watched optimizer, which keeps the handle alive


class AutoHandle:
    """A monitor attached to an optimizer, as returned by `auto`.

    Attributes:
        monitor: The `gradstat.Monitor`.
        optimizer: The optimizer whose steps are watched.
    """

    def __init__(self, optimizer: Optimizer, monitor: Monitor, listener: StepListener) -> None:
        """Made by `auto`."""
        self.optimizer: Optimizer = optimizer
        self.monitor: Monitor = monitor
        self._listener = listener

    def __repr__(self) -> str:
        return f"AutoHandle({type(self.optimizer).__name__}, {self.monitor!r})"

    def remove(self) -> None:
        """Detaches the monitor from the optimizer and closes it. The findings remain."""
        if getattr(self.optimizer, _MARK, None) is self:
            delattr(self.optimizer, _MARK)
        self._listener.remove()
        self.monitor.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.monitor.reviewer.note_error(error)
        with not_replacing(error):
            self.remove()


class _HeardOptimizer(StepSource):
    """An optimizer whose steps are announced: losses are the roots of the backward passes that were heard."""

    is_loop = False

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model)
        self._name = type(optimizer).__name__
        self.others: set[str] = set()  # of the listener

    def why_nothing(self) -> str:
        others = f"; steps of {', '.join(sorted(self.others))}, with other parameters, were seen" * bool(self.others)
        return (
            f"step() of the watched {self._name} has not been called{others}. Pass auto() the optimizer that steps, "
            "after it was made for the final (wrapped, moved) model"
        )


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
            ``named_parameters()``). Parameters in the optimizer that are not the model's are watched as well, under
            those names.
        optimizer: Any ``torch.optim.Optimizer``, or an object that wraps one, as those of Accelerate, Opacus and
            fastai. Model and optimizer may come in either order.
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
    model, optimizer = optimizers.in_order(*map(optimizers.held_by, (model, optimizer)))
    if not isinstance(optimizer, Optimizer):
        refuse_engine(optimizer)
        raise TypeError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__module__}.{type(optimizer).__qualname__}, which "
            "holds none; make gradstat.Monitor(model) in place of this, and call its step(loss) after backward()"
        )
    refuse_unknown(options, auto, Monitor)
    optimizer, limit = optimizers.unwrapped(optimizer), checked_limit(max_norm)
    watched = Parameters() if model is None else model
    source = _HeardOptimizer(watched, optimizer)
    monitor = Monitor(watched, optimizer, scaler, max_norm=max_norm, source=source, **options)
    earlier = getattr(optimizer, _MARK, None)
    if earlier is not None:
        earlier.remove()
    listener = StepListener(monitor, optimizer, limit)
    source.others = listener.others
    listener.listen()
    handle = AutoHandle(optimizer, monitor, listener)
    setattr(optimizer, _MARK, handle)
    return handle
