"""`auto`: a monitor in the step of an optimizer that a program has already, without an edit of its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from gradstat._core.parameters import source_of
from gradstat.clip import clip_grad_norm_
from gradstat.monitor import Monitor

if TYPE_CHECKING:
    from typing_extensions import Self

_MARK = "_gradstat_auto"  # the attribute of an optimizer that is watched


class AutoHandle:
    """A monitor at work in an optimizer; made by `auto`.

    Attributes:
        monitor: The `gradstat.Monitor`.
    """

    def __init__(self, optimizer: Optimizer, monitor: Monitor, max_norm: float | None) -> None:
        self.monitor = monitor
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._handle = optimizer.register_step_pre_hook(self._before)
        setattr(optimizer, _MARK, self)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch gives the optimizer itself as the first argument.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._look(None)
            return None
        # Gradients are made inside of the step, when the closure is called; that of its first call are the step's.
        wrapped = self._wrapped(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _wrapped(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        is_first = True

        def evaluated() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first:
                self._look(loss)
            is_first = False
            return loss

        return evaluated

    def _look(self, loss: Any) -> None:
        self.monitor.step(loss)
        if self._max_norm is not None:
            clip_grad_norm_([p for group in self._optimizer.param_groups for p in group["params"]], self._max_norm)

    def remove(self) -> None:
        """Takes the monitor out of the optimizer and ends it; its findings stay."""
        self._handle.remove()
        self._optimizer.__dict__.pop(_MARK, None)
        self.monitor.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Parameters(nn.Module):
    """Parameters as a module, under names of which dots are a part."""

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        super().__init__()
        self._parameters.update(named)  # register_parameter refuses the dots


def auto(
    optimizer: Optimizer,
    model: nn.Module | None = None,
    *,
    max_norm: float | None = None,
    scaler: Any = None,
    **options: Any,
) -> AutoHandle:
    """Watches every step of ``optimizer`` from now on, in a program whose loop stays as it is. ::

        gradstat.auto(optimizer)  # that is all; warns when something is wrong

    Each ``optimizer.step()`` first measures the gradients, as `gradstat.Monitor.step`: one read, no host sync on a GPU.
    Gradients are seen as the optimizer gets them, so behind a clip of the program; the loss is not known, unless the
    step is given a closure, whose first call counts.

    Args:
        optimizer: Any of torch's kind.
        model: For the names of parameters, and for what else of a model a monitor looks at; None takes the names the
            optimizer has (``group0.3``, or its own if it was made of ``named_parameters()``).
        max_norm: If given, gradients are clipped to it behind the check, as by `gradstat.clip_grad_norm_`.
        scaler: The loss scaler, if there is one.
        options: For `gradstat.Monitor`: ``on_anomaly``, ``watch``, ``save_to`` and so on.

    Returns:
        A handle with ``monitor`` and ``remove()``, which need not be kept; also a context manager.

    Raises:
        TypeError: ``optimizer`` is none.
        RuntimeError: It is watched already.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; of a wrapped one pass what it wraps, "
            "optimizer.optimizer for example"
        )
    if hasattr(optimizer, _MARK):
        raise RuntimeError(
            "this optimizer is watched already; call remove() on the handle of the first gradstat.auto()"
        )
    if model is None:
        source = source_of(optimizer)
        model = Parameters(zip(source.names(), source.parameters, strict=True))
    monitor = Monitor(model, optimizer, scaler, max_norm=max_norm, **options)
    return AutoHandle(optimizer, monitor, max_norm)
