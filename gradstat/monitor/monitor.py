"""`Monitor`: measures every step and turns the statistics into findings, at the cost of one gradient check."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat._core.compiling import never_traced
from gradstat._core.host_copy import is_capturing
from gradstat._core.parameters import Trained
from gradstat._core.warn import not_replacing, warn
from gradstat._step import torch_calls
from gradstat._step.loss_scale import inner_scaler
from gradstat.adaptive import AdaptiveClip
from gradstat.guard import SpikeGuard
from gradstat.monitor import endings
from gradstat.monitor.arguments import Settings, check_guard
from gradstat.monitor.clips import Clips
from gradstat.monitor.flight_file import FlightFile
from gradstat.monitor.options import MonitorOptions
from gradstat.monitor.policies import Policies
from gradstat.monitor.recorder import Recorder
from gradstat.monitor.responder import Responder
from gradstat.monitor.results import Results
from gradstat.monitor.reviewer import Reviewer
from gradstat.monitor.source import StepSource
from gradstat.monitor.unwatched import PROPAGATED_ERRORS, Unwatched
from gradstat.recording.findings import Finding
from gradstat.replay.culprit import Culprit
from gradstat.replay.rerun import Replayer
from gradstat.rules.base import Rule
from gradstat.rules.rows import Observation

if TYPE_CHECKING:
    from typing_extensions import Self


class Monitor(Results):
    """Watches a training run: call ``step()`` once per step, after ``backward()``, before clipping. ::

        monitor = gradstat.Monitor(model, optimizer)
        for inputs, targets in batches:
            loss = loss_of(model(inputs), targets)
            loss.backward()
            monitor.step(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(monitor.diagnose())

    Every step takes one pass over the gradients and the model's floating-point inputs, like `gradstat.check_async`,
    without a host sync on a GPU. ``watch`` says what else is measured, and how often. Rules review the numbers in
    blocks of steps, or at once after an abnormal step. They add to `findings`, and ``on_anomaly`` says how to respond
    to a finding.

    Args:
        model: The module being trained, with its DDP or FSDP wrapper if it has one; or, without ``optimizer``,
            DeepSpeed's engine or Megatron-Core's DistributedDataParallel.
        optimizer: Provides the learning rate and the optimizer states; needed to skip; restored by rollback and replay.
        scaler: The loss scaler, if any: the loss scale is watched and divided out of the statistics. None to take the
            one that has scaled a loss before the first step, if it is the only one, and this the only open monitor.
        on_anomaly: How to respond to findings: ``"warn"``, ``"raise"``, ``"skip"``, ``"stop"``, ``"snapshot"``,
            ``"rollback"``, ``"replay"``, ``"record"`` (only add to `findings`), a callable ``(monitor, finding)``, or
            several. It applies to errors; a mapping is by severity or by rule name, which takes precedence.
        watch: What to measure every how many steps; overrides entries of `gradstat.monitor.DEFAULT_WATCH`.
        rules: The rules to run; None for `gradstat.monitor.default_rules()`.
        save_to: A file for the flight recording, written after errors and at the end of the run; None for none. The
            file is tried at once. A recording that cannot be written later costs a warning.
        replay: The function that runs one step, for ``on_anomaly="replay"``: forward and backward pass, of no
            argument or of what `check_batch` was given. True only keeps what `replay` needs. Costs tens of microseconds
            per forward pass to save the states of random generators, and a copy of the buffers.
            ``on_anomaly="replay"`` reads numbers at once, like the option ``lag=0``.
        max_norm: The norm or adaptive clip that gradients are clipped by, if they are. Findings then do not advise to
            clip.
        num_classes: Number of classes of the integer tensors passed to `check_batch`; or a mapping by path,
            ``{"batch['labels']": 10}``, if not all of them are labels.
        guard: Makes ``optimizer`` skip steps whose norm, or loss as given to `step`, is an outlier; and steps that are
            not finite, like the policy ``"skip"``.
        source: Who takes the steps, where `gradstat.auto` or an integration does; None for a loop that calls `step`.
        options: Settings that are rarely changed, as `gradstat.monitor.MonitorOptions` or a mapping, ``{"lag": 0}`` for
            example: history size, when numbers are read, how often rules run, what a replay and a rollback keep.

    Attributes:
        findings: All findings so far, in order.
        should_stop: Whether the policy ``"stop"`` has been triggered; the training loop should check it.
        steps: Number of steps taken.
        nonfinite_steps: Number of steps, among those read, in which a gradient was not finite.
        options: As given, with defaults for the rest.
        guard: As given.
        culprit: Result of the last replay, or None if there was none, or if it was clean.

    Raises:
        TypeError, ValueError: An argument is invalid. The message says what was expected.
    """

    # Whether this process has to end the monitor: not before it is made, nor after `remove`; and a forked process only
    # if it takes steps itself.
    is_open: bool = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scaler: Any = None,
        *,
        on_anomaly: Policies = None,
        watch: Mapping[str, int] | Sequence[str] | None = None,
        rules: Iterable[Rule] | None = None,
        save_to: str | Path | None = None,
        replay: Callable[..., Any] | bool = False,
        max_norm: float | AdaptiveClip | None = None,
        num_classes: int | Mapping[str, int] | None = None,
        guard: SpikeGuard | None = None,
        options: MonitorOptions | Mapping[str, Any] | None = None,
        source: StepSource | None = None,
    ) -> None:
        settings = Settings.of(
            on_anomaly=on_anomaly, watch=watch, rules=rules, max_norm=max_norm, num_classes=num_classes, guard=guard,
            options=options, saves=source is not None and source.saves,
        )  # fmt: skip
        self.source: StepSource = StepSource(model) if source is None else source
        scaler = inner_scaler(scaler)
        settings = settings.with_model(model, optimizer, scaler, replay, self.source.runs_steps)
        self.settings: Settings = settings
        self.options: MonitorOptions = settings.options
        self.guard: SpikeGuard | None = guard
        file = FlightFile(save_to)  # may raise, and so comes before all hooks
        self.findings: list[Finding] = []
        self.unwatched: Unwatched = Unwatched(self.findings)
        trained = Trained(model, settings.optimizer)
        self.recorder: Recorder = Recorder(settings, trained, scaler, self.source, self.unwatched)
        self.reviewer: Reviewer = Reviewer(settings, self.source, self.recorder, self.unwatched, self.findings)
        replayer = Replayer(self.recorder.inner, settings.optimizer, scaler, replay)
        self.responder: Responder = Responder(
            settings, self.source, self.recorder, self.reviewer, replayer, self.unwatched, file
        )
        # A replay is of the newest step: the next one would overwrite what it needs.
        self._lag = 0 if settings.policies.uses("replay") else settings.options.lag
        self.is_removed: bool = False
        self._is_paused = self._has_warned = False
        self.lock: threading.RLock = threading.RLock()  # protects everything but responses, which call users' functions
        self.is_open = True
        endings.remember(self)
        self.clips: Clips | None = None  # hears how the program clips
        self._is_new = True  # no step has been taken with this scaler
        if scaler is None and settings.engine is None:
            torch_calls.seek_scaler(self)

    @property
    def scaler(self) -> Any:
        """The loss scaler, or None. May be set during training, if it is not known earlier."""
        return self.recorder.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        self.recorder.scaler = scaler = inner_scaler(scaler)
        self.responder.use_scaler(scaler)
        self._is_new = True

    # One step --------------------------------------------------------------------------------------------

    @never_traced
    def step(
        self,
        loss: Tensor | float | None = None,
        lr: float | Tensor | None = None,
        scalars: Mapping[str, Tensor | float] | None = None,
    ) -> list[Finding]:
        """Records a step: call it once per step, after ``backward()`` and before gradients are clipped.

        No host sync on a GPU unless the option ``lag`` is 0, or the policy ``"skip"`` meets an optimizer that is not
        fused. For one thread: calls of another wait. After `remove` it only warns, once.

        Args:
            loss: The loss: a tensor of one element, or a number. Pass the tensor: rules read its graph.
            lr: The learning rate; None takes that of the optimizer's first group.
            scalars: More numbers of this step by name, such as an entropy: recorded, shown, and compared with golden
                runs. `gradstat.rules.LossSpike` with ``series`` reviews one.

        Returns:
            The new findings. On a GPU they are about the previous step.

        Raises:
            TypeError, ValueError: ``loss`` or one of ``scalars`` is not one number, or has the name of a scalar of
                gradstat, or the function of ``replay`` takes a batch that `check_batch` did not get.
            AnomalyError: A finding has the policy ``"raise"``. What a callable in ``on_anomaly`` raises is passed on.
            BackendUnavailableError: The requested backend cannot run here. Other internal errors of the monitor are
                reported once, as a warning, and training goes on.
        """
        responder = self.responder
        if self._is_paused:
            return self._not_watched("step")
        if responder.replayer.keeps_state:
            responder.replayer.require_batch()
        if self._is_new:
            self._begin()
        elif self.clips is not None:
            self.clips.is_over = False
        if self.source.device is not None:
            loss = responder.shared_loss(loss)
        with self.lock:
            self.is_open = True
            first_new, step = len(self.findings), self.reviewer.steps
            numbers = self.recorder.scalars(loss, lr, scalars)
            pending = None
            try:
                pending = self.recorder.collect(step, *numbers)
                if responder.replayer.keeps_state:
                    responder.replayer.end_step()
            except PROPAGATED_ERRORS:
                raise
            except Exception:
                self.unwatched.report_failure(step, "a step could not be measured")
            if pending is not None and responder.prepares:
                responder.prepare(pending, loss)
            # On the CPU nothing is copied, so there is nothing to wait for.
            leaving = self._lag if pending is None or pending.numbers[0].rows.needs_copy else 0
            is_quiet = self.reviewer.take(pending, leaving)
        if not is_quiet:
            responder.respond(self)
            self._read(leaving)
        if self.source.device is not None:
            responder.agree(self, in_step=True)
        return self.findings[first_new:]

    @never_traced
    def check_batch(self, batch: Any) -> list[Finding]:
        """Inspects a batch before the forward pass: tensors, in mappings, lists, tuples and dataclasses.

        For what the model itself is not called with, since its floating inputs are measured anyway, and for labels.

        Floating-point tensors are measured with the gradients of the step. If ``num_classes`` was given, the range of
        integer tensors is checked: on the CPU at once, so that a label out of range is reported before the loss fails
        on it. No host sync on a GPU.

        Args:
            batch: What the data loader returned. Its tensors are held until the step, or longer if the monitor keeps
                batches for a replay.

        Returns:
            The new findings.

        Raises:
            AnomalyError: A finding has the policy ``"raise"``.
        """
        if self._is_paused:
            return self._not_watched("check_batch")
        with self.lock:
            first_new = len(self.findings)
            self.responder.replayer.keep_batch(batch)
            seen: list[Observation] = []
            with self.unwatched.suppress_errors(self.steps, "a batch could not be inspected"):
                seen = self.recorder.inspect_batch(self.steps, batch)
        self.responder.respond_to(self, seen)
        return self.findings[first_new:]

    def _begin(self) -> None:
        """In the first step, takes the only scaler in use. With several monitors it could be another's."""
        optimizer, engine = self.recorder.optimizer, self.settings.engine
        is_alone = self.scaler is None and engine is None and endings.are_open() == 1
        found = torch_calls.only_scaler() if is_alone else None
        if found is not None:
            check_guard(self.guard, optimizer, found)
            self.scaler = found
        self._is_new = False
        torch_calls.end_seeking(self)
        if engine is None and optimizer is not None:
            if self.clips is not None:
                self.clips.remove()
            self.clips = Clips(self.recorder, optimizer, self.unwatched, self.source.is_loop)

    def _not_watched(self, call: str) -> list[Finding]:
        """What calls return during a replay, and after `remove`, when one warning says that nothing is watched."""
        if self.is_removed and not self._has_warned:
            self._has_warned = True
            warn(f"{call}() of a monitor that was removed at step {self.steps} watches nothing; make a new one")
        return []

    def replay(self, step_fn: Callable[..., Any] | None = None) -> Culprit | None:
        """Runs the newest step again, observes every operation, and names the first place that made a NaN or Inf.

        Call it before the optimizer steps, or after a skipped step. The state is restored afterwards. See
        `gradstat.monitor.find_culprit`, and docs/replay.md. A monitor made without ``replay`` has kept nothing of the
        step: it then runs with the current parameters, buffers and random state, and a warning says so.

        Args:
            step_fn: Forward and backward, or a whole training step; called with what `check_batch` last got if it
                takes an argument. None takes the function given as ``replay``.

        Returns:
            The culprit, also stored in `culprit` and shown in the diagnosis, or None if all was finite this time.

        Raises:
            RuntimeError: The parameters have changed since the step whose state was kept.
            TypeError: No function was given, or one that takes a batch, which `check_batch` did not get.
        """
        paused, self._is_paused = self._is_paused, True  # step_fn may call this monitor
        try:
            return self.responder.replay(self.steps - 1, step_fn)
        finally:
            self._is_paused = paused

    # The end ---------------------------------------------------------------------------------------------

    def remove(self, why: str = "the run ended") -> None:
        """Stops monitoring: reads the remaining steps, removes all hooks, saves the recording if ``save_to`` is set.

        `findings`, `recording` and `diagnose` stay available. Waits for the device. A recording that cannot be written
        costs a warning.

        Args:
            why: Why the recording is saved, for its ``meta``.

        Raises:
            AnomalyError: A finding in the remaining steps has the policy ``"raise"``.
        """
        if self._is_paused:
            return
        try:
            self.flush()
        finally:
            self._is_paused = self.is_removed = True
            if self.clips is not None:
                self.clips.remove()
            self.recorder.remove()
            self.responder.remove()
            endings.end(self, why)

    def __del__(self) -> None:
        if self.is_open and not sys.is_finalizing():
            if is_capturing():
                self.reviewer.drop_pending()  # their numbers cannot be waited for
            endings.end(self, "nothing referred to the monitor any more")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Monitor has hooks on its model, so neither it nor a module that has it can be copied or pickled; "
            "keep it outside of the model, save monitor.state_dict(), and make a new Monitor for a copied model"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Detaches. An exception that ends the run is noted in the recording, and is not replaced by another."""
        self.reviewer.note_error(error)
        with not_replacing(error):
            self.remove("the run ended" if error is None else f"{type(error).__name__}: {error}")
