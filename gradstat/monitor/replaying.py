"""What a monitor does about replays: remembers what a step depends on, and runs it again when asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat.monitor.culprit import Culprit
from gradstat.monitor.step_state import Recorder

CLEAN = (
    "the replay was clean: the same step gave finite values this time. So it depends on something that was not put "
    "back (an iterator, other state of your own), or it was no fault of the program: hardware, or a race"
)


class Replaying:
    """Keeps what a replay of the newest step needs.

    Args:
        model, optimizer, scaler: As for `gradstat.Monitor`.
        step_fn: What does a step; None if it is only given when a replay is asked for.
        keep_batch: Whether to keep the newest batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scaler: Any,
        step_fn: Callable[..., Any] | None,
        keep_batch: bool,
    ) -> None:
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._step_fn = step_fn
        self._keep_batch = keep_batch
        self._recorder = Recorder(model)
        self._batch: Any = None
        self._versions: list[int] = []

    def see_batch(self, batch: Any) -> None:
        """Takes note of the batch of the coming step."""
        if self._keep_batch:
            self._batch = batch

    def note(self, parameters: list[Tensor]) -> None:
        """A step was taken: its gradients are there, and the optimizer has not been."""
        self._versions = [parameter._version for parameter in parameters]
        self._recorder.end_step()

    def run(self, step_fn: Callable[..., Any] | None, was_skipped: bool) -> Culprit | None:
        """Runs the newest step again; see `gradstat.Monitor.replay`."""
        chosen = step_fn or self._step_fn
        if chosen is None:
            raise TypeError("no function to run: monitor.replay(step_fn), or gradstat.Monitor(..., replay=step_fn)")
        now = [parameter._version for parameter in self._model.parameters()]
        # A fused optimizer that was told to skip counts as a writer all the same.
        if self._versions and now != self._versions and not was_skipped:
            raise RuntimeError(
                "the parameters have changed since that step, so it cannot be run again as it was. Call replay() "
                "before optimizer.step(); or let on_anomaly='replay' do it; or skip bad steps: on_anomaly='skip'"
            )
        from gradstat.monitor.replay import find_culprit

        return find_culprit(
            self._model,
            chosen,
            state=self._recorder.states,
            batch=self._batch,
            optimizer=self._optimizer,
            scaler=self._scaler,
        )

    def remove(self) -> None:
        """Takes the hook off the model and lets go of everything kept."""
        self._recorder.detach()
        self._batch = None
