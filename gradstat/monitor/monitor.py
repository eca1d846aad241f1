"""`Monitor`: statistics of every step, turned into findings, at the price of a check."""

from __future__ import annotations

import atexit
import os
import platform
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat._core.backends import known_name, resolve
from gradstat._core.compiling import never_traced
from gradstat._core.engines import Engine, engine_of
from gradstat._core.host_copy import streams_of
from gradstat._core.parameters import source_of
from gradstat._step.loss_scale import inner_scaler
from gradstat._version import __version__
from gradstat.adaptive import AdaptiveClip
from gradstat.backward_step import handle_of
from gradstat.guard import SpikeGuard, remember_guard
from gradstat.monitor.actions import Skipping, Snapshots
from gradstat.monitor.collector import Collector, Pending, facts_of, model_name
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.findings import Finding
from gradstat.monitor.gaps import NOT_OURS, Gaps
from gradstat.monitor.history import History, as_state, from_state
from gradstat.monitor.kinds import periods
from gradstat.monitor.options import MonitorOptions
from gradstat.monitor.policies import AnomalyError, Policies, PolicyTable, Warner
from gradstat.monitor.recording.recording import Recording
from gradstat.monitor.replay.culprit import Culprit
from gradstat.monitor.replay.rerun import CLEAN, Replayer, find_culprit
from gradstat.monitor.reporting import warn
from gradstat.monitor.rows import Facts, Observation
from gradstat.monitor.rules import Rule, default_rules
from gradstat.monitor.rules.runner import RuleRunner
from gradstat.monitor.segments import Wanted
from gradstat.monitor.step_buffer import LatestStep, StepBuffer

if TYPE_CHECKING:
    from typing_extensions import Self

# In so many steps after an incident, states are not measured again and no further file is written.
_QUIET = 20

_POSITIONAL = re.compile(r"\bgroup\d+\.\d+(?!\.?\w)")  # a name of `gradstat._core.parameters`

_UNARMED = (
    "nothing of the step was kept, so it was run with parameters, buffers and random state as they are now, which may "
    "hide what happened; gradstat.Monitor(..., replay=True) keeps what it takes to run it as it was"
)

# What advice names to be given besides the policy "replay".
_FUNCTION = ", replay=step_fn"


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

    Every step costs one read of the gradients, as `gradstat.check_async`; no host sync on a GPU. What is looked at
    besides, and how often, says ``watch``. Rules look at the numbers, a block of steps at a time, or at once if a step
    is out of the ordinary. What they find is in `findings`, and done about it is what ``on_anomaly`` says.

    Args:
        model: The module that is trained; as wrapped by DDP or FSDP, if it is. Or DeepSpeed's engine or
            Megatron-Core's DistributedDataParallel, alone.
        optimizer: Gives the learning rate and the optimizer's states; needed to skip, roll back and replay.
        scaler: The loss scaler, if there is one: the loss scale is watched and taken out of the statistics.
        on_anomaly: What to do about findings: ``"warn"``, ``"raise"``, ``"skip"``, ``"stop"``, ``"snapshot"``,
            ``"rollback"``, ``"replay"``, ``"record"`` (nothing but `findings`), a callable ``(monitor, finding)``, or
            several; for errors, or in a mapping by severity or by the name of a rule, which goes before its severity.
        watch: What is looked at every how many steps; on top of `gradstat.monitor.DEFAULT_WATCH`.
        rules: What to look for; None for `gradstat.monitor.default_rules()`. Thresholds are arguments of the rules.
        save_to: A file for the flight recording, written after errors and at the end of the run; None for none.
        replay: The function that does a step, for ``on_anomaly="replay"``; True to remember what `replay` needs, and do
            none by itself. Costs tens of microseconds for each forward pass, for the states of random generators, and
            a copy of the buffers. ``on_anomaly="replay"`` reads numbers at once, as the option ``lag=0``.
        max_norm: What gradients are clipped to, so that the rule on clipping can judge, and updates are foretold.
        classes: Into how many classes the integer tensors of batches fall, for `batch`; or by their place,
            ``{"batch['labels']": 10}``, if not all of them are labels.
        guard: Keeps ``optimizer`` from steps that are out of the ordinary, as the policy ``"skip"`` keeps it from those
            that are not finite, which it does as well; by the loss that `step` is given, and the norm.
        options: What is seldom changed, as `gradstat.monitor.MonitorOptions` or a mapping, ``{"lag": 0}`` for example:
            how much is kept, how late numbers are read, how often rules look, what a replay and a rollback keep.

    Attributes:
        findings: What was found, in order.
        should_stop: Whether the policy ``"stop"`` has been met; for the training loop to look at.
        steps: How many steps were taken.
        nonfinite_steps: In how many of those that have been read a gradient was not finite.
        options: As given, the defaults for the rest.
        guard: As given.
        culprit: What the last replay found; None if there was none, or it was clean.

    Raises:
        TypeError, ValueError: An argument makes no sense; the message says what was expected.
    """

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
        rules = None if rules is None else list(rules)
        _refuse_nonsense(model, optimizer, rules)
        _refuse_guard(guard, optimizer, scaler)
        self.options = options = MonitorOptions.of(options)
        known_name(options.backend)  # an unknown one is told here, not in the steps
        self._rules = RuleRunner(default_rules() if rules is None else rules, options.review_every)
        self._policies = PolicyTable(on_anomaly, [rule.name for rule in self._rules.rules])
        self._watch = periods(watch)
        scaler = inner_scaler(scaler)
        engine = engine_of(model)
        if engine is not None:
            _refuse_under_engine(engine, optimizer, self._policies, replay, self._watch)
            optimizer = engine.optimizer
            self._watch["optimizer"] = 0  # its states are cut up as well
        if handle_of(optimizer) is not None:
            _refuse_in_backward(guard, self._policies, replay)
        self._model = model if engine is None else engine.module
        self._optimizer = optimizer
        self._lag = options.lag
        self._max_norm = float(max_norm) if isinstance(max_norm, (int, float)) else None
        self._save_to = None if save_to is None else Path(save_to)
        self._history = History(options.history, options.max_bytes)
        self._warner = Warner()
        self.findings: list[Finding] = []
        self._gaps = Gaps(self.findings)
        self.should_stop = False
        self.steps = self.nonfinite_steps = 0
        self.culprit: Culprit | None = None
        self._replayed = ""
        self._is_called_by_hand = True
        self._replays_with: str | None = (
            _FUNCTION if engine is None else None
        )  # what `"replay"` needs; None if there is none
        self._pending: deque[Pending] = deque()
        self._looked_closer = [-_QUIET, -_QUIET]  # when, with a finite loss and without
        self._saved = self._last_replay = -_QUIET
        self._paused = False
        self.guard = guard
        skips = self._policies.uses("skip") or guard is not None
        wanted: Wanted = "norm" if guard is not None else "flag" if skips else None
        self._collector = Collector(
            model, optimizer, scaler, self._watch, classes, options, wanted, self._gaps, self._max_norm
        )
        self._buffer = StepBuffer(self._collector.judged_label)
        self._to_act_on: list[Finding] = []
        self._skipping = Skipping(optimizer) if skips else None
        self._snapshots = Snapshots(model, optimizer, scaler) if self._policies.uses("rollback") else None
        self._replayer: Replayer | None = None
        step_fn = replay if callable(replay) else None
        if self._policies.uses("replay"):
            if step_fn is None:
                raise TypeError(
                    "on_anomaly='replay' needs the function that does a step: gradstat.Monitor(..., replay=step_fn)"
                )
            self._lag = 0  # the next step would overwrite what a replay needs
        if replay:
            self._replayer = Replayer(model, optimizer, scaler, step_fn, options.keep_batch)
        if self._save_to is not None:
            _unsaved.add(self)

    @property
    def scaler(self) -> Any:
        """The loss scaler, or None. One that is only found while training goes on may be set then."""
        return self._collector.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        for part in (self._collector, self._snapshots, self._replayer):
            if part is not None:
                part.scaler = inner_scaler(scaler)

    # One step --------------------------------------------------------------------------------------------

    @never_traced
    def step(self, loss: Tensor | float | None = None, lr: float | Tensor | None = None) -> list[Finding]:
        """Takes note of a step: call it after ``backward()``, before gradients are clipped, once per step.

        No host sync on a GPU unless the option ``lag`` is 0, or the policy ``"skip"`` meets an optimizer that is not
        fused.

        Args:
            loss: The loss: a tensor of one element, or a number.
            lr: The learning rate; None takes that of the optimizer's first group.

        Returns:
            What was found now; on a GPU that is about the step before.

        Raises:
            TypeError, ValueError: ``loss`` is not one number.
            AnomalyError: Something was found that ``on_anomaly`` says to raise about; or what a callable there raises.
            BackendUnavailableError: The backend asked for cannot run here. Other errors of the monitor's own are told
                as a warning, once, and training goes on.
        """
        if self._paused:
            return []
        scalars = self._collector.scalars(loss, lr)
        known = len(self.findings)
        if self._save_to is not None:
            _unsaved.add(self)
        try:
            pending = self._collector.collect(self.steps, *scalars)
            if self._replayer is not None:
                self._replayer.note(list(self._model.parameters()))
        except NOT_OURS:
            raise
        except Exception:
            self._gaps.tell_failure(self.steps, "a step could not be measured and is not watched")
            self.steps += 1
            return self.findings[known:]
        self.steps += 1  # first: an interrupt in between leaves a gap, and not two steps of one number
        self._pending.append(pending)
        if self._skipping is not None:
            flag = pending.numbers[0].flag
            if self.guard is not None and flag is not None:
                flag = self._guarded(self.guard, flag, pending.numbers[0].norm, loss)
            self._skipping.arm(flag, self.scaler)
        if self._snapshots is not None and pending.step % self.options.rollback_every == 0:
            self._snapshots.take(pending.step)
        # On the CPU nothing travels, and there is nothing to wait for.
        self._read(self._lag if pending.numbers[0].travels else 0)
        return self.findings[known:]

    def _guarded(self, guard: SpikeGuard, flag: Tensor, norm: Any, loss: Tensor | float | None) -> Tensor:
        """Whether not to step, as the flags of `PendingRows`: if that says so, or else the guard."""
        verdict = flag.reshape(1)
        with self._gaps.contained(self.steps - 1, "the guard could not judge a step"), torch.no_grad():
            if loss is not None and not isinstance(loss, Tensor):
                loss = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
            numbers = torch.stack([torch.ones_like(norm), norm])
            given = torch.stack([flag, torch.ones_like(flag), torch.ones_like(flag)])
            kernels = resolve(self.options.backend, flag.device.type)
            verdict = guard._decide(kernels, numbers, given, loss, None, None, streams_of([flag]))
            if self._optimizer is not None:
                remember_guard(self._optimizer, guard)
        return verdict[0]

    @never_traced
    def batch(self, batch: Any) -> list[Finding]:
        """Shows the monitor a batch, before the forward pass: tensors, in mappings, lists, tuples and dataclasses.

        Floating tensors are measured with the gradients of the step. Of integer ones, if ``classes`` was given, the
        range is looked at: on the CPU at once, so that a label out of range is told before the loss fails on it.
        No host sync on a GPU.

        Args:
            batch: What the loop gets from its loader. Nothing in it is kept, unless the monitor keeps batches for
                a replay.

        Returns:
            What was found now.

        Raises:
            AnomalyError: Something was found that ``on_anomaly`` says to raise about.
        """
        if self._paused or not self._watch["batch"]:
            return []
        known = len(self.findings)
        if self._replayer is not None:
            self._replayer.see_batch(batch)
        seen: list[Observation] = []
        with self._gaps.contained(self.steps, "a batch could not be looked at"):
            seen = self._collector.see_batch(self.steps, batch)
        if seen:
            self._buffer.observations += seen
            self._review()
        return self.findings[known:]

    def flush(self) -> list[Finding]:
        """Reads and reviews all steps so far, waiting for the device if need be; returns what was found now."""
        known = len(self.findings)
        self._read(0)
        self._review()
        return self.findings[known:]

    def is_healthy(self, within: int = 100) -> bool:
        """Whether the state of now is worth keeping, as a checkpoint that may replace the last good one. ::

            if step % 1000 == 0 and monitor.is_healthy():
                torch.save(model.state_dict(), "last_good.pt")

        It is not if an error was found in the last steps or a guard has refused one, or if parameters or states of the
        optimizer are not finite, which are read for this; buffers may hold infinity on purpose. Waits for the device.

        Args:
            within: In how many of the last steps that speaks against it.

        Returns:
            The verdict; of what is spread over ranks, about this rank's part.

        Raises:
            AnomalyError: As `flush`.
        """
        self.flush()
        since = self.steps - within
        vetoes = [f for f in self.findings if f.severity == "error" or f.rule == "refused-step"]
        return not any(finding.step >= since for finding in vetoes) and self._collector.is_finite()

    def replay(self, step_fn: Callable[..., Any] | None = None) -> Culprit | None:
        """Runs the newest step again under watch, and names the first place that made a NaN or Inf.

        To be called before the optimizer has stepped, or if it was skipped. Afterwards everything is as before. See
        `gradstat.monitor.find_culprit`, and docs/replay.md. A monitor made without ``replay`` has kept nothing of the
        step: parameters, buffers and random state are then as they are now, and a warning says so.

        Args:
            step_fn: Forward and backward, or a whole training step; called with the batch if it was kept. None takes
                the function given as ``replay``.

        Returns:
            The culprit, which is also in `culprit` and in the diagnosis; None if all was finite this time.

        Raises:
            RuntimeError: The parameters have changed since a step of which the rest was kept.
            TypeError: There is no function.
        """
        if self._replayer is None and step_fn is None:
            raise TypeError("no function to run: monitor.replay(step_fn), or gradstat.Monitor(..., replay=step_fn)")
        if self._replayer is None:
            warn(f"replay: {_UNARMED}", RuntimeWarning)
        paused, self._paused = self._paused, True  # the step calls this monitor
        try:
            if self._replayer is not None:
                self.culprit = self._replayer.run(step_fn, self._skipping is not None)
            elif step_fn is not None:
                self.culprit = find_culprit(self._model, step_fn, optimizer=self._optimizer, scaler=self.scaler)
        finally:
            self._paused = paused
        self._replayed = CLEAN if self.culprit is None else str(self.culprit)
        if self._replayer is None:
            self._replayed += f"\n{_UNARMED}"
        return self.culprit

    # From numbers to findings ----------------------------------------------------------------------------

    def _read(self, leaving: int) -> None:
        """Reads the steps that were measured, up to the last ``leaving``."""
        while len(self._pending) > leaving:
            pending = self._pending.popleft()
            try:
                bad = self._buffer.read(pending)
                self.nonfinite_steps += "nonfinite" in pending.scalars
                odd = bad or self._rules.is_out_of_band(pending.scalars)
                lost = "loss_nonfinite" in pending.scalars
                # Everything that has a state, if it still is as it was in the step.
                if odd and pending.step + 1 == self.steps and pending.step - self._looked_closer[lost] >= _QUIET:
                    self._looked_closer[lost] = pending.step
                    pending.numbers.extend(self._collector.look_closer(pending.step, pending.kinds()))
                self._buffer.take(pending, self._judge)
            except Exception:
                self._gaps.tell_failure(pending.step, "a step could not be read and is not watched")
                continue
            if odd or self._to_act_on or self._rules.is_due(pending.step):
                self._review()
            if self._snapshots is not None and not odd:
                self._snapshots.confirm(pending.step)

    def _review(self) -> None:
        """Lets all rules look at the steps since the last review, and acts on what they find."""
        with self._gaps.contained(self.steps, "the last steps could not be judged and are not watched"):
            self._judge()
        found, self._to_act_on = self._to_act_on, []
        raising = [finding for finding in found if self._act_on(finding)]  # all are acted on before one raises
        if raising:
            first = raising[0]
            replayed = f"\n{self._replayed}" if self._replayed else ""
            raise AnomalyError(f"{first}{replayed}\n{_in_words(first)}", first)

    def _judge(self) -> None:
        """Lets all rules look at the steps since the last review."""
        if self._buffer.is_empty:
            return
        collector = self._collector
        facts = Facts(
            *(collector.backward_order, collector.is_scaled, self._max_norm),
            classes=collector.classes,
            is_called_by_hand=self._is_called_by_hand,
            origin_is_unknown=collector.origin_is_unknown,
            **facts_of(self._optimizer),
        )
        window = self._buffer.close(facts, self._history.latest)
        self._history.keep(window)
        found = [self._as_it_is_here(finding) for finding in self._rules.review(window)]
        self.findings += found
        self._to_act_on += found

    def _as_it_is_here(self, finding: Finding) -> Finding:
        """With advice that can be followed, and shapes of parameters named by their position in an optimizer."""
        if self._replays_with != _FUNCTION:
            finding = replace(finding, advice=tuple(_possible(finding.advice, self._replays_with is not None)))
        if not _POSITIONAL.search(finding.text):
            return finding
        source = source_of(self._model)
        shapes = {name: list(p.shape) for name, p in zip(source.names(), source.parameters, strict=True)}
        text = _POSITIONAL.sub(lambda m: f"{m[0]} {shapes[m[0]]}" if m[0] in shapes else m[0], finding.text)
        return replace(finding, text=text)

    # What is done about them -----------------------------------------------------------------------------

    def _act_on(self, finding: Finding) -> bool:
        """Does what the policies say; whether to raise."""
        raising = False
        for policy in self._policies.of(finding):
            if callable(policy):
                policy(self, finding)
            elif policy == "warn":
                self._warner.warn(finding, self.steps)
            elif policy == "raise":
                raising = True
            elif policy == "stop":
                self.should_stop = True
            elif policy == "snapshot":
                base = self._save_to if self._save_to is not None else Path("incident.gradstat")
                rule = re.sub(r"[^\w.-]+", "_", finding.rule)[:60]  # rules of users are called as they like
                beside = base.with_name(f"{base.stem}-step{finding.step}-{rule}.gradstat")
                self._save_or_warn(beside, str(finding))
            elif policy == "rollback":
                self._roll_back(finding)
            elif policy == "replay":
                self._replay_once(finding)
        if finding.severity == "error" and self._save_to is not None and finding.step - self._saved >= _QUIET:
            self._saved = finding.step
            self._save_or_warn(self._save_to, str(finding))
        return raising

    def _save_or_warn(self, path: Path, why: str) -> None:
        try:
            self.save(path, why)
        except (OSError, ValueError) as error:  # a full disk must not end what is watched
            warn(f"{path} could not be saved: {error}", RuntimeWarning)

    def _replay_once(self, finding: Finding) -> None:
        """Replays the step that was found bad, once in an incident; says what came of it."""
        if finding.step + 1 != self.steps or finding.step - self._last_replay < _QUIET:
            return
        self._last_replay = finding.step
        try:
            self.replay()
        except Exception as error:  # watching must not end what is watched
            self._replayed = f"the replay of step {finding.step} failed: {type(error).__name__}: {error}"
        warn(f"step {finding.step}: {self._replayed}")

    def _roll_back(self, finding: Finding) -> None:
        assert self._snapshots is not None
        step = self._snapshots.go_back()
        if step is None:
            warn(f"no healthy state of this model to go back to, at {finding}", RuntimeWarning)
        else:
            self._pending.clear()
            self._collector.forget()

    # What is kept ----------------------------------------------------------------------------------------

    def recording(self, why: str = "") -> Recording:
        """The last ``history`` steps, as far as they have been read, with findings. Reviews what has not been.

        No host sync; `flush` first brings what is still on its way.

        Args:
            why: Why it is made, for its ``meta``.
        """
        self._review()
        recording = self._history.recording()
        recording.findings = tuple(self.findings)
        recording.backward_order = self._collector.backward_order
        recording.meta = {
            "gradstat": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "model": model_name(self._model),
            "optimizer": type(self._optimizer).__name__ if self._optimizer is not None else None,
            "devices": sorted({str(parameter.device) for parameter in self._model.parameters()}),
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "steps": self.steps,
            "saved": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "why": why,
            "culprit": self._replayed,
        }
        return recording

    def latest(self) -> LatestStep | None:
        """The newest step whose numbers were read: report and scalars. None before the first. No host sync."""
        newest = self._buffer.newest
        return None if newest is None else LatestStep.of(newest)

    def diagnose(self) -> Diagnosis:
        """What was found so far, in the order of cause and effect; ``print`` it. Waits for the device."""
        self.flush()
        return Diagnosis.of(self.recording(), self._replayed)

    def save(self, path: str | Path, why: str = "on request") -> Path:
        """Writes the `recording` to one file, for ``python -m gradstat view``; replaces it only by a whole one.

        Args:
            path: Where, by convention ``*.gradstat``; missing folders are made.
            why: Why, for the recording's ``meta``.

        Returns:
            ``path``.

        Raises:
            OSError: The disk does not take it; nothing is left behind.
        """
        from gradstat.monitor.recording.file import save

        target = Path(path)
        save(self.recording(why), target)
        return target

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on as if nothing had happened: plain values and tensors. Waits for the device."""
        self.flush()
        return {
            "version": 1,
            "steps": self.steps,
            "nonfinite_steps": self.nonfinite_steps,
            "should_stop": self.should_stop,
            "findings": [finding.to_dict() for finding in self.findings],
            "rules": [(rule.name, rule.state_dict()) for rule in self._rules.rules],
            "backward_order": list(self._collector.backward_order),
            "history": as_state(self._history.recording()),
            "guard": None if self.guard is None else self.guard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; rules that are not in it stay as they are.

        What this monitor has seen since its own last review, and everything it remembers of steps to come again, goes.

        Args:
            state: What `state_dict` returned, on any device; by the same or an older gradstat.

        Raises:
            ValueError: The state is from a newer gradstat.
        """
        if state["version"] != 1:
            raise ValueError(
                f"this state has version {state['version']}, made by a newer gradstat; this is gradstat {__version__}, "
                "which knows version 1. Upgrade gradstat: pip install -U gradstat"
            )
        self._pending.clear()
        self._buffer.clear()
        self._to_act_on = []
        if self._snapshots is not None:
            self._snapshots.clear()
        self._warner = Warner()
        self._looked_closer = [-_QUIET, -_QUIET]
        self._saved = self._last_replay = -_QUIET
        self.steps, self.should_stop = int(state["steps"]), bool(state["should_stop"])
        self.nonfinite_steps = int(state.get("nonfinite_steps", 0))
        self.findings[:] = [Finding.from_dict(values) for values in state["findings"]]
        saved = dict(state["rules"])
        for rule in self._rules.rules:
            if rule.name in saved:
                rule.load_state_dict(saved[rule.name])
        self._collector.backward_order = tuple(state["backward_order"])
        self._history.load(from_state(state["history"]))
        if self.guard is not None and state.get("guard") is not None:
            self.guard.load_state_dict(state["guard"])
        self._rules.refresh(self.steps)
        self._collector.resume(self.steps)

    def detach(self, why: str = "the run ended") -> None:
        """Ends the watch: reads what is left, takes all hooks away, saves the recording if there is a file for it.

        `findings`, `recording` and `diagnose` stay. Waits for the device.

        Args:
            why: What the recording says about why it was saved.

        Raises:
            AnomalyError: Something was found in what was left that ``on_anomaly`` says to raise about.
            OSError: The recording cannot be written.
        """
        if self._paused:
            return
        try:
            self.flush()
        finally:
            self._paused = True
            _unsaved.discard(self)
            self._collector.remove()
            if self._skipping is not None:
                self._skipping.remove()
            if self._replayer is not None:
                self._replayer.remove()
            if self._save_to is not None:
                self.save(self._save_to, why)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Monitor belongs to one model, on which it has hooks, and cannot be copied or pickled, nor can a model "
            "with it as an attribute; keep it beside the model, save monitor.state_dict(), make a new one for a copy"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Detaches. An error that ends the run is told in the recording, and goes before one of the monitor."""
        try:
            self.detach("the run ended" if error is None else f"{type(error).__name__}: {error}")
        except AnomalyError as found:
            if error is None:
                raise
            warn(str(found))


def _refuse_nonsense(model: object, optimizer: object, rules: list[Any] | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    for rule in rules or ():
        if not isinstance(rule, Rule):
            hint = "; it is a class, make an instance of it" if isinstance(rule, type) else ""
            raise TypeError(f"rules: expected instances of gradstat.monitor.Rule, got {rule!r}{hint}")


def _refuse_guard(guard: object, optimizer: object, scaler: Any) -> None:
    if guard is None:
        return
    if not isinstance(guard, SpikeGuard):
        raise TypeError(f"guard: expected a gradstat.SpikeGuard, got {type(guard).__name__}")
    if optimizer is None:
        raise TypeError("a guard needs the optimizer: gradstat.Monitor(model, optimizer, guard=...)")
    if guard.scales:
        raise ValueError("a monitor skips steps and scales none down; make the guard without scale=")
    scaler = inner_scaler(scaler)
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "a loss scaler decides by itself whether to step; use gradstat.guarded_step(optimizer, scaler=scaler, "
            "loss=loss, guard=guard)"
        )


def _refuse_under_engine(
    engine: Engine, optimizer: object, policies: PolicyTable, replay: object, watch: Mapping[str, int]
) -> None:
    for policy in ("skip", "rollback", "replay"):
        if policies.uses(policy) or (policy == "replay" and replay):
            raise NotImplementedError(
                f"{policy!r} cannot be done under {engine.name}, which clips, skips and steps by itself; use "
                "'warn', 'raise', 'stop' or 'snapshot'"
            )
    if watch["updates"]:
        raise NotImplementedError(f"watch={{'updates': ...}} cannot be done under {engine.name}, which may cut them up")
    if optimizer is not None:
        raise TypeError(
            f"optimizer: expected None beside {engine.name}, which is watched alone: gradstat.Monitor(model)"
        )


def _refuse_in_backward(guard: object, policies: PolicyTable, replay: object) -> None:
    chosen = [f"on_anomaly={policy!r}" for policy in ("skip", "replay") if policies.uses(policy)]
    chosen += ["guard"] * (guard is not None) + ["replay"] * bool(replay)
    if chosen:
        raise ValueError(
            f"{chosen[0]}: the optimizer has stepped in backward, before the monitor sees a step, and left out what "
            "was not finite; use 'warn', 'raise', 'stop', 'snapshot' or 'rollback'"
        )


def _possible(advice: Iterable[str], replays: bool) -> Iterator[str]:
    """``advice`` where a replay needs no function, or cannot be done."""
    for one in advice:
        before, policy, after = one.partition("on_anomaly='replay'")
        if not policy:
            yield one
        elif replays:
            yield before + policy + after.removeprefix(_FUNCTION).removeprefix(" (arguments of the monitor)")
        elif before:
            yield before.rstrip(".; ")
        elif "names" in after:
            yield "watch={'activations': 1} names the first module whose output is not finite"


def _in_words(finding: Finding) -> str:
    causes = "".join(f"\n  - {cause}" for cause in finding.causes)
    advice = "".join(f"\n  - {advice}" for advice in finding.advice)
    return f"likely causes:{causes}\nwhat to try:{advice}"


# Monitors whose recordings are written when the program ends. A process that was forked must not write over what its
# parent has written meanwhile, unless it takes steps itself.
_unsaved: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _save_at_exit() -> None:
    for monitor in list(_unsaved):
        if not monitor._paused and monitor._save_to is not None:
            try:
                monitor._save_or_warn(monitor._save_to, "the program ended")
            except AnomalyError as found:
                warn(str(found))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unsaved.clear)
