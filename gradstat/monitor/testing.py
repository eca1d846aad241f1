"""`assert_healthy`: fails in a test if a training is not healthy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradstat._core.text import count_of, expect
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
    steps: int,
    step_fn: Callable[[], Any],
    optimizer: Optimizer | None = None,
    *,
    severity: str = "warning",
    allow: Iterable[str] = (),
    **options: Any,
) -> Diagnosis:
    """Trains for some steps under a `Monitor` and fails if it finds anything. For tests of models::

        def test_training():
            model, optimizer, data = made_small()

            def step():
                optimizer.zero_grad()
                loss = loss_of(model, next(data))
                loss.backward()
                return loss

            gradstat.monitor.assert_healthy(model, 50, step, optimizer)

    Args:
        model: The module that is trained.
        steps: Number of steps.
        step_fn: Forward and backward; returns the loss.
        optimizer: Stepped after each call of ``step_fn``, and watched.
        severity: The lowest severity that fails.
        allow: Names of rules whose findings do not fail.
        options: Arguments of `gradstat.Monitor`.

    Returns:
        The diagnosis of the healthy run.

    Raises:
        UnhealthyTrainingError: Something was found; an ``AssertionError`` whose message is the diagnosis.
        TypeError, ValueError: An argument is invalid.
    """
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity!r}; expected one of {', '.join(SEVERITIES)}")
    expect("step_fn", step_fn, Callable, "a function")
    expect("allow", allow, Iterable, "names of rules")
    allowed = {allow} if isinstance(allow, str) else set(allow)
    with Monitor(model, optimizer, **{"on_anomaly": dict.fromkeys(SEVERITIES, "record"), **options}) as monitor:
        for _ in range(steps):
            monitor.step(step_fn())
            if optimizer is not None:
                optimizer.step()
    diagnosis = monitor.diagnose()
    serious = SEVERITIES[SEVERITIES.index(severity) :]
    unhealthy = [f for f in diagnosis.findings if f.severity in serious and f.rule not in allowed]
    if unhealthy:
        raise UnhealthyTrainingError(f"{count_of(len(unhealthy), 'finding')}\n{diagnosis}", diagnosis)
    return diagnosis
