"""`assert_healthy` and `assert_golden`: fail in a test if a training is not healthy, or unlike golden runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.findings import SEVERITIES
from gradstat.monitor.monitor import Monitor
from gradstat.monitor.recording.golden import Golden
from gradstat.monitor.recording.golden_comparison import GoldenComparison
from gradstat.monitor.recording.recording import Recording


class UnhealthyTrainingError(AssertionError):
    """The monitor found a problem in training. The message is the diagnosis.

    Attributes:
        diagnosis: The diagnosis, or None.
    """

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class UnlikeGoldenError(AssertionError):
    """A run is unlike the golden runs; the message says where and how.

    Attributes:
        comparison: The comparison, or None.
    """

    def __init__(self, message: str, comparison: GoldenComparison | None = None) -> None:
        super().__init__(message)
        self.comparison = comparison


def assert_golden(
    run: Monitor | Recording | str | os.PathLike[str] | Callable[[int], Any],
    golden: Golden | str | os.PathLike[str],
    *,
    rewrite: bool = False,
    runs: int = 5,
) -> GoldenComparison:
    """Fails if a training is unlike golden runs. For tests in CI::

        def train(seed):
            model, optimizer, batches = made_small(seed)
            monitor = gradstat.Monitor(model, optimizer)
            for batch in batches:
                loss = loss_of(model, batch)
                loss.backward()
                monitor.step(loss)
                optimizer.step()
                optimizer.zero_grad()
            return monitor

        def test_training_is_still_what_it_was(assert_golden):  # the fixture of gradstat.pytest_plugin
            assert_golden(train, "tests/golden.gradstat")

    ``pytest --rewrite-golden`` makes the file anew, which takes as many trainings as there are golden runs.

    Args:
        run: A monitor, a recording or its file; or a function that trains with a seed and returns one of them.
        golden: The golden runs, or their file.
        rewrite: Whether to call ``run`` with the seeds 1 to ``runs`` first, and write the file.
        runs: Number of golden runs to make.

    Returns:
        The comparison of the run, which is like them. A function is called with seed 0.

    Raises:
        UnlikeGoldenError: The run is unlike them; an ``AssertionError`` whose message is the comparison.
        TypeError: To rewrite, ``run`` has to be a function and ``golden`` a file.
        ValueError, OSError: As `Golden.of`, `Golden.compare` and `Golden.load`.
    """
    train = run if callable(run) else None
    if rewrite:
        if train is None or isinstance(golden, Golden):
            raise TypeError(
                "to rewrite golden runs takes several trainings: pass a function of a seed, and the path of the file"
            )
        Golden.of([_recording_of(train(seed)) for seed in range(1, runs + 1)]).save(golden)
    expected = golden if isinstance(golden, Golden) else Golden.load(golden)
    comparison = expected.compare(_recording_of(run if train is None else train(0)))
    if not comparison.ok:
        raise UnlikeGoldenError(str(comparison), comparison)
    return comparison


def _recording_of(run: Any) -> Recording | str | os.PathLike[str]:
    if isinstance(run, Monitor):
        run.flush()
        return run.recording()
    if not isinstance(run, (Recording, str, os.PathLike)):
        raise TypeError(f"run is a {type(run).__name__}; expected a Monitor, a recording, or the file of one")
    return run


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
        steps = _counted(steps, step_fn, optimizer)
    elif step_fn is not None:
        raise TypeError("pass a number of steps with step_fn, or an iterable without it")
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
