"""`assert_healthy`: fails in a test if a training run is not healthy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat._core.text import expect
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.monitor import Monitor
from gradstat.recording.findings import SEVERITIES


class UnhealthyTrainingError(AssertionError):
    """The monitor found a problem in training. The message is the diagnosis.

    Attributes:
        diagnosis: The diagnosis, or None.
    """

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


def assert_healthy(
    model: nn.Module,
    steps: int | Iterable[Any],
    step_fn: Callable[[], Any] | None = None,
    optimizer: Optimizer | None = None,
    *,
    severity: str = "warning",
    allow: Iterable[str] = (),
    loss_falls: bool = False,
    **options: Any,
) -> Diagnosis:
    """Trains for some steps under a `Monitor` and fails if it finds anything. For tests of models::

        def test_training(assert_healthy):  # the fixture of gradstat.pytest_plugin; or import the function
            model, optimizer, data = made_small()

            def step():
                optimizer.zero_grad()
                loss = loss_of(model, next(data))
                loss.backward()
                return loss

            assert_healthy(model, 50, step, optimizer)

    Args:
        model: The module that is trained.
        steps: Number of steps, with ``step_fn``; or an iterable that runs one step per item, for example a generator
            with a ``yield loss`` between ``backward()`` and ``optimizer.step()``.
        step_fn: Forward and backward; returns the loss. The optimizer steps after it.
        optimizer: Stepped after each call of ``step_fn``, and watched; with an iterable only watched.
        severity: The lowest severity that fails.
        allow: Names of rules whose findings do not fail.
        loss_falls: Whether the mean loss of the last quarter of the steps has to be below that of the first.
        options: Arguments of `gradstat.Monitor`.

    Returns:
        The diagnosis of the healthy run.

    Raises:
        UnhealthyTrainingError: Something was found; an ``AssertionError`` whose message is the diagnosis.
        TypeError, ValueError: The arguments do not fit together.
    """
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity!r}; expected one of {', '.join(SEVERITIES)}")
    if isinstance(steps, int):
        if step_fn is None:
            raise TypeError("a number of steps needs step_fn, which runs one; or pass an iterable that yields losses")
        expect("step_fn", step_fn, Callable, "a function")
        steps = _counted(steps, step_fn, optimizer)
    elif step_fn is not None:
        raise TypeError("pass a number of steps with step_fn, or an iterable without it")
    expect("allow", allow, Iterable, "names of rules")
    allowed = {allow} if isinstance(allow, str) else set(allow)
    monitor = Monitor(model, optimizer, **{"on_anomaly": dict.fromkeys(SEVERITIES, "record"), **options})
    losses: list[float] = []
    with monitor:
        for loss in steps:
            monitor.step(loss)
            if loss is not None:
                losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))
    diagnosis = monitor.diagnose()
    serious = SEVERITIES[SEVERITIES.index(severity) :]
    unhealthy = [f for f in diagnosis.findings if f.severity in serious and f.rule not in allowed]
    if unhealthy:
        raise UnhealthyTrainingError(f"{len(unhealthy)} finding{'s' * (len(unhealthy) != 1)}\n{diagnosis}", diagnosis)
    quarter = len(losses) // 4
    if loss_falls and quarter and not sum(losses[-quarter:]) < sum(losses[:quarter]):
        first, last = sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter
        raise UnhealthyTrainingError(
            f"the loss does not fall: its mean is {first:.4g} in the first {quarter} steps and {last:.4g} in the last",
            diagnosis,
        )
    return diagnosis


def _counted(steps: int, step_fn: Callable[[], Any], optimizer: Optimizer | None) -> Iterator[Any]:
    for _ in range(steps):
        yield step_fn()
        if optimizer is not None:
            optimizer.step()
