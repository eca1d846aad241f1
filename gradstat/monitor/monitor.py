"""`Monitor`: measures every step and turns the statistics into findings, at the cost of one gradient check."""

from __future__ import annotations

import platform
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat._core.compiling import never_traced
from gradstat._core.engines import engine_of
from gradstat._core.parameters import Trained
from gradstat._core.tensors import is_uninitialized
from gradstat._core.warn import QUIET, not_replacing, warn, warning_of_failure
from gradstat._step import decision, torch_calls
from gradstat._step.decision import SkipRequest
from gradstat._step.loss_scale import inner_scaler
from gradstat._version import __version__
from gradstat.adaptive import AdaptiveClip
from gradstat.guard import SpikeGuard, state_tensor_of
from gradstat.monitor import endings
from gradstat.monitor.actions import Snapshots
from gradstat.monitor.arguments import Settings, check_arguments, check_engine_options, check_guard, check_policies
from gradstat.monitor.connection import Connection
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.flight_file import FlightFile
from gradstat.monitor.log import LatestStep, StepLog
from gradstat.monitor.options import MonitorOptions
from gradstat.monitor.policies import AnomalyError, Policies, Policy, Warner
from gradstat.monitor.probes.base import Pending
from gradstat.monitor.probes.optimizer import optimizer_settings
from gradstat.monitor.recorder import Recorder, model_name
from gradstat.monitor.segments import PendingRows, ReduceTo
from gradstat.monitor.state import load_rules, recording_of, state_of
from gradstat.monitor.unwatched import PROPAGATED_ERRORS, Unwatched
from gradstat.recording.findings import Finding
from gradstat.recording.recording import Recording
from gradstat.replay.culprit import Culprit
from gradstat.replay.rerun import Replayer
from gradstat.rules.advice import causes_and_advice, fitted
from gradstat.rules.base import Rule
from gradstat.rules.rows import Observation, RunSettings
from gradstat.rules.runner import RuleRunner

if TYPE_CHECKING:
    from typing_extensions import Self

# Policies that act on a running training: at its end they warn.
_OF_RUNNING_TRAINING = ("raise", "stop", "rollback", "replay")

# Seconds to wait at the end of the program for a thread that is inside of a monitor.
_PATIENCE = 10.0


class Monitor:
    """Watches a training run: call `step` once per step, after ``backward()`` and before clipping. ::

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
            argument or of what `batch` was given. True only keeps what `replay` needs. Costs tens of microseconds per
            forward pass to save the states of random generators, and a copy of the buffers.
            ``on_anomaly="replay"`` reads numbers at once, like the option ``lag=0``.
        max_norm: What gradients are clipped to, if they are. No finding then advises to clip them.
        classes: Number of classes of the integer tensors passed to `batch`; or a mapping by path,
            ``{"batch['labels']": 10}``, if not all of them are labels.
        guard: Makes ``optimizer`` skip abnormal steps, judged by the norm and the loss given to `step`; and steps that
            are not finite, like the policy ``"skip"``.
        options: Settings that are seldom changed, as `gradstat.monitor.MonitorOptions` or a mapping, ``{"lag": 0}`` for
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

    # Whether this process has to end the monitor: not before it is made, nor after `detach`; and a forked process only
    # if it takes steps itself.
    _is_open = False

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
        classes: int | Mapping[str, int] | None = None,
        guard: SpikeGuard | None = None,
        options: MonitorOptions | Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(model, optimizer)
        settings = Settings.of(
            on_anomaly=on_anomaly, watch=watch, rules=rules, max_norm=max_norm, classes=classes, guard=guard,
            options=options,
        )  # fmt: skip
        self.options = options = settings.options
        self._periods, self._policies = settings.periods, settings.policies
        self._rules = RuleRunner(settings.rules, options.review_every, self._periods["parameters"])
        scaler = inner_scaler(scaler)
        engine = engine_of(model)
        if engine is not None:
            check_engine_options(engine, optimizer, guard, self._policies, replay, self._periods)
            optimizer = engine.optimizer
            self._periods["optimizer"] = 0  # its states are sharded as well, and not measured
        check_guard(guard, optimizer, scaler)
        check_policies(self._policies, optimizer, replay)
        self._model = model if engine is None else engine.module
        self._optimizer = optimizer
        self._trained = Trained(model, optimizer)
        self.connection = Connection(self._trained)
        self._lag = options.lag
        self._file = FlightFile(save_to)
        self._warner = Warner()
        self.findings: list[Finding] = []
        self._unwatched = Unwatched(self.findings)
        self.should_stop = False
        self.steps = self.nonfinite_steps = 0
        self._pending: deque[Pending] = deque()
        self._last_state_check = [-QUIET, -QUIET]  # last steps with a finite loss, and with another
        self._saved = -QUIET
        self._paused = self._is_detached = self._has_warned = False
        self.guard = guard
        skips = self._policies.uses("skip") or guard is not None
        reduce_to: ReduceTo = "norm" if guard is not None else "flag" if skips else None
        self._recorder = self.connection.recorder = Recorder(
            self._trained, optimizer, scaler, self._periods, classes, options, reduce_to, self._unwatched,
            weakref.proxy(self.connection),
        )  # fmt: skip
        self._log = StepLog(options.history, options.max_bytes, self._recorder.check_label_range)
        self._to_act_on: list[Finding] = []
        # While the steps that are read are not finite: the first of them, and the finding that was raised.
        self._bad_since: int | None = None
        self._raised: Finding | None = None
        self._skips = skips
        # Remedies that the run cannot use or uses already, so that advice leaves them out; skips are known later.
        self._not_usable = {"replay"} if engine is not None else set()
        self.connection.in_use |= settings.remedies()
        if skips and optimizer is not None:
            decision.request(optimizer, self, None)  # a closure may make the first request within a step
        self._skip_flag: Tensor | None = None  # of the newest step
        self._snapshots = Snapshots(self._trained, optimizer, scaler) if self._policies.uses("rollback") else None
        if self._policies.uses("replay"):
            self._lag = 0  # the next step would overwrite what a replay needs
        self._replayer = Replayer(self._model, optimizer, scaler, replay)
        self._lock = threading.RLock()  # protects everything but the acting on findings, which calls users' functions
        self._is_open = True
        endings.remember(self)
        self._seeks_scaler = scaler is None and engine is None
        if self._seeks_scaler:
            torch_calls.seek_scaler(self)

    @property
    def culprit(self) -> Culprit | None:
        return self._replayer.culprit

    @property
    def scaler(self) -> Any:
        """The loss scaler, or None. May be set during training, if it is not known earlier."""
        return self._recorder.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        for part in (self._recorder, self._snapshots, self._replayer):
            if part is not None:
                part.scaler = inner_scaler(scaler)

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
        fused. Threads may share a monitor: their steps are numbered in the order in which they come. After `detach` it
        only warns, once.

        Args:
            loss: The loss: a tensor of one element, or a number.
            lr: The learning rate; None takes that of the optimizer's first group.
            scalars: More numbers of this step by name, such as an entropy: recorded, shown, and compared with golden
                runs. A `gradstat.rules.LossSpike` with ``series`` judges one.

        Returns:
            The new findings. On a GPU they are about the previous step.

        Raises:
            TypeError, ValueError: ``loss`` or one of ``scalars`` is not one number, or has the name of a scalar of
                gradstat, or the function of ``replay`` takes a batch that `batch` did not get.
            AnomalyError: A finding has the policy ``"raise"``. What a callable in ``on_anomaly`` raises is passed on.
            BackendUnavailableError: The requested backend cannot run here. Other internal errors of the monitor are
                reported once, as a warning, and training goes on.
        """
        if self._paused:
            return self._not_watched("step")
        if self._replayer.keeps_state:
            self._replayer.require_batch()
        if self._seeks_scaler:
            self._find_scaler()
        with self._lock:
            first_new = len(self.findings)
            self._is_open = True
            leaving = self._measure(loss, lr, scalars)
        self._read(leaving)
        return self.findings[first_new:]

    def _measure(
        self, loss: Tensor | float | None, lr: float | Tensor | None, given: Mapping[str, Tensor | float] | None
    ) -> int:
        """Measures a step and makes it pending; returns how many pending steps may stay so. Raises as `step`."""
        scalars = self._recorder.scalars(loss, lr, given)
        try:
            pending = self._recorder.collect(self.steps, *scalars)
            if self._replayer.keeps_state:
                self._replayer.end_step()
        except PROPAGATED_ERRORS:
            raise
        except Exception:
            self._unwatched.report_failure(self.steps, "a step could not be measured")
            self.steps += 1
            return len(self._pending)
        self.steps += 1  # first: an interrupt in between leaves a gap, not a duplicate step number
        self._pending.append(pending)
        if self._skips and self._optimizer is not None:
            wish = self._skip_request(pending.numbers[0], loss)
            self._skip_flag = None if wish is None else wish.flag
            decision.request(self._optimizer, self, wish)
        if self._snapshots is not None and pending.step % self.options.rollback_every == 0:
            with self._unwatched.suppress_errors(pending.step, "the state of a step could not be copied"):
                self._snapshots.take(pending.step)
        # On the CPU nothing is copied, so there is nothing to wait for.
        return self._lag if pending.numbers[0].needs_copy else 0

    def _find_scaler(self) -> None:
        """In the first step, takes the only scaler in use. With several monitors it could be another's."""
        found = torch_calls.only_scaler() if self.scaler is None and endings.are_open() == 1 else None
        if found is not None:
            check_guard(self.guard, self._optimizer, found)
            self.scaler = found
        self._end_seeking()

    def _end_seeking(self) -> None:
        if self._seeks_scaler:
            self._seeks_scaler = False
            torch_calls.end_seeking(self)

    def _not_watched(self, call: str) -> list[Finding]:
        """What calls return during a replay, and after `detach`, when one warning says that nothing is watched."""
        if self._is_detached and not self._has_warned:
            self._has_warned = True
            warn(f"{call}() of a monitor that was detached at step {self.steps} watches nothing; make a new one")
        return []

    def _skip_request(self, measured: PendingRows, loss: Tensor | float | None) -> SkipRequest | None:
        """Asks for the step to be skipped if a gradient is not finite or the guard refuses; an enabled scaler skips."""
        flag, guard = measured.flag, self.guard
        if flag is None or (self.scaler is not None and self.scaler.is_enabled()):
            return None
        wish = SkipRequest(flag)
        if guard is not None and self._optimizer is not None and measured.norm is not None:
            with self._unwatched.suppress_errors(self.steps - 1, "the guard could not judge a step"):
                wish = decision.judged(guard, self._optimizer, measured.norm, flag, loss, self.options.backend)
        return wish

    @never_traced
    def batch(self, batch: Any) -> list[Finding]:
        """Inspects a batch before the forward pass: tensors, in mappings, lists, tuples and dataclasses.

        For what the model itself is not called with, since its floating inputs are measured anyway, and for labels.

        Floating-point tensors are measured with the gradients of the step. If ``classes`` was given, the range of
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
        if self._paused:
            return self._not_watched("batch")
        with self._lock:
            first_new = len(self.findings)
            self._replayer.keep_batch(batch)
            seen: list[Observation] = []
            with self._unwatched.suppress_errors(self.steps, "a batch could not be inspected"):
                seen = self._recorder.inspect_batch(self.steps, batch)
        self._observe(seen)
        return self.findings[first_new:]

    def _observe(self, seen: list[Observation]) -> None:
        """Reviews what is known before the step is measured, or though no step comes."""
        if seen:
            with self._lock:
                self._log.observations += seen
            self._review()

    def flush(self) -> list[Finding]:
        """Reads and reviews all steps so far, waiting for the device if need be; returns the new findings."""
        first_new = len(self.findings)
        self._read(0)
        self._review()
        return self.findings[first_new:]

    def is_healthy(self, within: int = 100) -> bool:
        """Whether a checkpoint of the current state may replace the last good one. ::

            if step % 1000 == 0 and monitor.is_healthy():
                torch.save(model.state_dict(), "last_good.pt")

        False if one of the last ``within`` steps has an error or was refused by a guard, or if parameters or watched
        optimizer states, measured now, are not finite. Buffers may hold infinity on purpose. Waits for the device.

        Args:
            within: How many of the last steps count.

        Returns:
            Whether it may. Of sharded tensors, only this rank's shards are looked at.

        Raises:
            AnomalyError: As `flush`.
        """
        self.flush()
        since = self.steps - within
        errors = [finding for finding in self.findings if finding.severity == "error"]
        # A finding has the step in which a problem began, and its rule knows in which it was last met.
        last = [self._rules.refused_at, *self._rules.last_steps({finding.rule for finding in errors})]
        with self._lock:
            return all(step < since for step in [*(f.step for f in errors), *last]) and self._recorder.is_finite()

    def replay(self, step_fn: Callable[..., Any] | None = None) -> Culprit | None:
        """Runs the newest step again, observes every operation, and names the first place that made a NaN or Inf.

        Call it before the optimizer steps, or after a skipped step. The state is restored afterwards. See
        `gradstat.monitor.find_culprit`, and docs/replay.md. A monitor made without ``replay`` has kept nothing of the
        step: it then runs with the current parameters, buffers and random state, and a warning says so.

        Args:
            step_fn: Forward and backward, or a whole training step; called with the last `batch` if it takes an
                argument. None takes the function given as ``replay``.

        Returns:
            The culprit, also stored in `culprit` and shown in the diagnosis, or None if all was finite this time.

        Raises:
            RuntimeError: The parameters have changed since the step whose state was kept.
            TypeError: No function was given, or one that takes a batch, which `batch` did not get.
        """
        paused, self._paused = self._paused, True  # step_fn may call this monitor
        try:
            was_skipped = self._skip_flag is not None and bool(self._skip_flag.item())
            return self._replayer.run(self.steps - 1, step_fn, was_skipped)
        finally:
            self._paused = paused

    # From numbers to findings ----------------------------------------------------------------------------

    def _read(self, leaving: int) -> None:
        """Reads the measured steps except the last ``leaving``, and acts on what is found in one before the next."""
        while True:
            with self._lock:
                while len(self._pending) > leaving and not self._to_act_on:
                    self._read_one(self._pending.popleft())
                if not self._to_act_on:
                    return
            self._act()

    def _read_one(self, pending: Pending) -> None:
        """Reads a step, and runs the rules if it is out of band or a review is due."""
        try:
            is_nonfinite = self._log.read(pending)
            self.nonfinite_steps += "nonfinite" in pending.scalars
            is_out_of_band = is_nonfinite or self._rules.is_out_of_band(pending.scalars)
            lost = "loss_nonfinite" in pending.scalars
            # Measure parameters, buffers and optimizer states, if they are still those of the step.
            is_current = pending.step + 1 == self.steps
            if is_out_of_band and is_current and pending.step - self._last_state_check[lost] >= QUIET:
                self._last_state_check[lost] = pending.step
                with self._unwatched.suppress_errors(
                    pending.step, "parameters, buffers or states could not be measured"
                ):
                    pending.numbers.extend(self._recorder.measure_state(pending.step, pending.kinds()))
            self._log.take(pending, self._run_rules)
        except PROPAGATED_ERRORS:
            raise
        except Exception:
            self._unwatched.report_failure(pending.step, "the numbers of a step could not be read")
            return
        if is_out_of_band or self._to_act_on or pending.step + 1 >= self._rules.next_review:
            self._run_rules_safely()
        if not is_nonfinite:
            self._bad_since = self._raised = None
        elif self._bad_since is None:
            self._bad_since = pending.step
        if self._raised is not None and not self._to_act_on:
            self._to_act_on.append(self._raised)
        if self._snapshots is not None and not is_out_of_band:
            self._snapshots.confirm(pending.step)

    def _review(self) -> None:
        """Runs all rules on the steps since the last review, and acts on their findings."""
        with self._lock:
            self._run_rules_safely()
        self._act()

    def _take_findings(self) -> list[Finding]:
        with self._lock:
            findings, self._to_act_on = self._to_act_on, []
        return findings

    def _act(self) -> None:
        """Acts on findings, without the lock, since this may call functions of the user."""
        raising = [finding for finding in self._take_findings() if self._act_on(finding)]  # all, before one raises
        if raising:
            first = raising[0]
            self._raised = None if self._bad_since is None else first
            replayed = f"\n{self._replayer.text}" if 0 <= self._replayer.step == self.steps - 1 else ""
            raise AnomalyError(f"{first}{replayed}\n{causes_and_advice(first)}", first)

    def _run_rules_safely(self) -> None:
        with self._unwatched.suppress_errors(self.steps, "the rules could not review the last steps"):
            self._run_rules()

    def _run_rules(self) -> None:
        if self._log.is_empty:
            return
        recorder = self._recorder
        skipped_by = "" if not self._skips else "the policy 'skip'" if self.guard is None else "the guard"
        if recorder.is_scaled:
            skipped_by = "the loss scaler"
        run = RunSettings(
            backward_order=recorder.backward_order,
            is_scaled=recorder.is_scaled,
            is_stepped_by_user=self.connection.is_stepped_by_user,
            origin_is_unknown=recorder.origin_is_unknown,
            skipped_by=skipped_by,
            has_rival=recorder.has_rival,
            **optimizer_settings(self._optimizer),
        )
        in_use = [*self.connection.in_use, *["skip"] * bool(run.skipped_by)]
        window = self._log.close(run)
        findings = [
            fitted(one, self._trained.named_parameters, in_use, self._not_usable, self.connection.runs_steps)
            for one in self._rules.review(window)
        ]
        self.findings += findings
        self._to_act_on += findings

    # Policies --------------------------------------------------------------------------------------------

    def _act_on(self, finding: Finding, is_over: bool = False) -> bool:
        """Applies the policies; returns whether to raise. ``is_over``: there is no training any more to act on."""
        if finding is self._raised:  # the program has caught its error, and goes on with steps that are not finite
            return not is_over
        raising = False
        policies: Iterable[Policy] = self._policies.of(finding)
        if is_over:
            policies = dict.fromkeys("warn" if policy in _OF_RUNNING_TRAINING else policy for policy in policies)
        for policy in policies:
            if callable(policy):
                policy(self, finding)
            elif policy == "warn":
                self._warner.warn(finding, self.steps)
            elif policy == "raise":
                raising = True
            elif policy == "stop":
                self.should_stop = True
            elif policy == "snapshot":
                self._file.write(lambda: self._recording(str(finding)), self._file.beside(finding))
            elif policy == "rollback" and self._snapshots is not None:
                if self._snapshots.restore() is not None:
                    self._pending.clear()
                    self._recorder.forget()
                else:
                    warn(f"cannot roll back: there is no healthy snapshot of this model; {finding}", RuntimeWarning)
            elif policy == "replay" and finding.step + 1 == self.steps and not self._is_explained():
                self._replayer.run_once(finding.step, self.replay)
        if finding.severity == "error" and finding.step - self._saved >= QUIET and not is_over:
            self._saved = finding.step
            self._write(str(finding))
        return raising

    def _is_explained(self) -> bool:
        """Whether a replay has found the cause of what is not finite now: another would find a consequence."""
        replayed = self._replayer
        return replayed.culprit is not None and self._bad_since is not None and replayed.step >= self._bad_since

    def _write(self, why: str) -> None:
        """Writes the recording, if there is a place for it; warns if it had to go elsewhere."""
        if self._file.path is not None:
            self._file.write(lambda: self._recording(why), self._file.path)

    # Recording and state ---------------------------------------------------------------------------------

    def recording(self, why: str = "") -> Recording:
        """The last ``history`` steps that were read, with findings; reviews those not reviewed yet.

        No host sync; call `flush` first to include steps that are still being copied to the host.

        Args:
            why: Why the recording is made, for its ``meta``.
        """
        self._review()
        return self._recording(why)

    def _recording(self, why: str) -> Recording:
        """The recording, without acting on what it reviews."""
        with self._lock:
            self._run_rules_safely()
            recording = self._recorded()
        parameters = [*self._model.parameters(), *self._trained.besides.parameters()]
        recording.meta = {
            "gradstat": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "model": model_name(self._model),
            "optimizer": type(self._optimizer).__name__ if self._optimizer is not None else None,
            "devices": sorted({str(parameter.device) for parameter in parameters}),
            "parameters": sum(p.numel() for p in parameters if not is_uninitialized(p)),
            "steps": self.steps,
            "saved": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "why": why,
            "culprit": self._replayer.text,
        }
        return recording

    def _recorded(self) -> Recording:
        """The `recording` of the steps that were reviewed, without its ``meta``."""
        recording = self._log.recording()
        recording.findings, recording.backward_order = tuple(self.findings), self._recorder.backward_order
        return recording

    def latest(self) -> LatestStep | None:
        """The newest step whose numbers were read: report and scalars. None before the first. No host sync."""
        newest = self._log.newest
        return None if newest is None else LatestStep.of(newest)

    def diagnose(self) -> Diagnosis:
        """All findings so far, ordered from cause to effect, to be printed. Waits for the device."""
        self.flush()
        return Diagnosis.of(self.recording(), "" if self.steps else self.connection.why_nothing())

    def save(self, path: str | Path, why: str = "on request") -> Path:
        """Writes the `recording` to one file, for ``python -m gradstat view``; replaces an existing file atomically.

        Args:
            path: The file, by convention ``*.gradstat``; missing folders are made.
            why: Why it is saved, for the recording's ``meta``.

        Returns:
            ``path``.

        Raises:
            OSError: The file cannot be written; nothing is left behind.
        """
        from gradstat.recording.file import save

        target = Path(path)
        save(self.recording(why), target)
        return target

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume, as plain values and tensors. Waits for the device."""
        self.flush()
        with self._lock:
            self._catch_up()  # another thread may have taken a step
            return state_of(
                self._recorded(),
                self._rules.rules,
                steps=self.steps,
                nonfinite_steps=self.nonfinite_steps,
                should_stop=self.should_stop,
                guard=None if self.guard is None else self.guard.state_dict(),
            )

    def _catch_up(self) -> None:
        """Reads and reviews all steps so far, but acts on nothing yet."""
        while self._pending:
            self._read_one(self._pending.popleft())
        self._run_rules_safely()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; rules that are not in it stay as they are.

        Discards steps that this monitor has not reviewed yet, and what it remembers of steps that will be repeated.

        Args:
            state: What `state_dict` returned, on any device.

        Raises:
            ValueError: The state is in another version, or no state of a monitor. The message names the field; nothing
                has changed.
        """
        with self._lock:
            history = recording_of(state)
            guard = None if state.get("guard") is None else self.guard
            memory = None if guard is None else state_tensor_of(guard, state["guard"], "state['guard']")
            load_rules(self._rules.rules, state["rules"])
            # From here on nothing is refused.
            if guard is not None and memory is not None:
                guard.state.load_(memory)
            self._pending.clear()
            self._log.clear()
            self._to_act_on, self._raised, self._bad_since = [], None, None
            self._replayer.forget()
            if self._snapshots is not None:
                self._snapshots.clear()
            self._warner = Warner()
            self._last_state_check, self._saved = [-QUIET, -QUIET], -QUIET
            self.steps, self.should_stop = state["steps"], state["should_stop"]
            self.nonfinite_steps = state["nonfinite_steps"]
            self.findings[:] = history.findings
            self._recorder.backward_order = history.backward_order
            self._log.load(history)
            self._rules.resume(self.steps, history.scalars)
            self._recorder.resume(self.steps)

    # The end ---------------------------------------------------------------------------------------------

    def detach(self, why: str = "the run ended") -> None:
        """Stops monitoring: reads the remaining steps, removes all hooks, saves the recording if ``save_to`` is set.

        `findings`, `recording` and `diagnose` stay available. Waits for the device. A recording that cannot be written
        costs a warning.

        Args:
            why: Why the recording is saved, for its ``meta``.

        Raises:
            AnomalyError: A finding in the remaining steps has the policy ``"raise"``.
        """
        if self._paused:
            return
        try:
            self.flush()
        finally:
            self._paused = self._is_detached = True
            self._recorder.remove()
            if self._skips and self._optimizer is not None:
                decision.request(self._optimizer, self, None)
            self._replayer.remove()
            self._end(why)

    def _end(self, why: str) -> None:
        """Reviews what is left and saves the recording. Findings raise nothing any more, but warn."""
        self._is_open = False
        self._end_seeking()
        if not self._lock.acquire(timeout=_PATIENCE):
            warn("the last steps were not reviewed: another thread is inside of the monitor", RuntimeWarning)
            return
        try:
            # The other ranks may not be here: nothing collective.
            for pending in self._pending:
                pending.late.pop("origin", None)
            self._catch_up()
        except PROPAGATED_ERRORS as error:
            warn(f"the last steps could not be read: {error}", RuntimeWarning)
        finally:
            self._lock.release()
        if self.steps or self.findings or self._is_detached:
            self._write(why)
        for finding in self._take_findings():
            with warning_of_failure(f"a policy failed for the finding {finding}"):
                self._act_on(finding, is_over=True)

    def __del__(self) -> None:
        if self._is_open and not sys.is_finalizing():
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                self._pending.clear()  # their numbers cannot be waited for
            self._end("nothing referred to the monitor any more")

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Monitor has hooks on its model, so neither it nor a module that has it can be copied or pickled; "
            "keep it outside of the model, save monitor.state_dict(), and make a new Monitor for a copied model"
        )

    def __repr__(self) -> str:
        is_alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        is_compared = is_alone or self._periods["replicas"] > 0 or torch.distributed.get_world_size() == 1
        unknown = "" if is_compared else ", replicas not compared: watch={'replicas': n}"
        return f"Monitor({type(self._model).__name__}, {self.steps} steps, {len(self.findings)} findings{unknown})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Detaches. An exception that ends the run is noted in the recording, and is not replaced by another."""
        with not_replacing(error):
            self.detach("the run ended" if error is None else f"{type(error).__name__}: {error}")
