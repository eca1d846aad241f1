"""`Monitor`: statistics of every step, turned into findings, at the price of a check."""

from __future__ import annotations

import atexit
import math
import platform
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat import _fields
from gradstat._version import __version__
from gradstat.adaptive import AdaptiveClip
from gradstat.monitor import watching
from gradstat.monitor.actions import Skipping, Snapshots
from gradstat.monitor.collecting import Collector, Pending, eps_of, second_moment_decay_of
from gradstat.monitor.findings import Finding
from gradstat.monitor.history import History, as_state, from_state
from gradstat.monitor.measuring import Arrived
from gradstat.monitor.policies import AnomalyError, Policies, PolicyTable, Warner
from gradstat.monitor.recording import Recording
from gradstat.monitor.rows import Facts, Floats, Layout, Observation, Window
from gradstat.monitor.rules import Rule, default_rules
from gradstat.tensor_stats import l2_norm_of

if TYPE_CHECKING:
    from typing_extensions import Self

_SUM, _SQ = _fields.INDEX["sum"], _fields.INDEX["sq_sum"]
_LARGE, _SMALL = _fields.INDEX["sq_sum_large"], _fields.INDEX["sq_sum_small"]
_WITH_SUM = _SUM + 1
_DEGREES = np.array(_fields.DEGREES, dtype=np.float64)

# In so many steps after an incident, states are not measured again and no further file is written.
_QUIET = 20
_NOTHING: list[Finding] = []


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
        model: The module that is trained; as wrapped by DDP or FSDP, if it is.
        optimizer: Gives the learning rate and the optimizer's states; needed to skip, roll back and replay.
        scaler: The loss scaler, if there is one: the loss scale is watched and taken out of the statistics.
        rules: What to look for; None for `gradstat.monitor.default_rules()`.
        on_anomaly: What to do about findings: ``"warn"``, ``"raise"``, ``"skip"``, ``"stop"``, ``"snapshot"``,
            ``"rollback"``, ``"replay"``, ``"record"`` (nothing but `findings`), a callable ``(monitor, finding)``, or
            several; for errors, or by severity or rule in a mapping (see `gradstat.monitor.PolicyTable`).
        history: How many steps are kept for `recording`.
        watch: What is looked at every how many steps; on top of `gradstat.monitor.DEFAULT_WATCH`.
        lag: On a GPU the numbers of a step are read so many steps later, when they have long arrived. 0 reads them at
            once, with a host sync in every step. On the CPU nothing travels and all is read at once.
        max_norm: What gradients are clipped to, so that the rule on clipping can judge.
        classes: Into how many classes integer labels in batches fall, for `batch`.
        ignore_index: A label that stands for none.
        save_to: A file for the flight recording, written after errors and at the end of the run; None for none.
        replay: The function that does a step, for ``on_anomaly="replay"`` (see `replay`); True to remember what a
            replay needs, and do none by itself. Costs tens of microseconds a step for the states of generators.
        keep_batch: Whether `batch` keeps the batch for a replay.
        review_every: At most so many steps are between two reviews of healthy steps.
        max_bytes: For the history.
        snapshot_every: For ``"rollback"``: every how many steps the state is copied to the host's memory.
        backend: As in `gradstat.check`.

    Attributes:
        findings: What was found, in order.
        should_stop: Whether the policy ``"stop"`` has been met; for the training loop to look at.
        steps: How many steps were taken.

    Raises:
        TypeError, ValueError: An argument makes no sense; the message says what was expected.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scaler: Any = None,
        rules: Iterable[Rule] | None = None,
        on_anomaly: Policies = None,
        history: int = 1000,
        *,
        watch: Mapping[str, int] | Sequence[str] | None = None,
        lag: int = 1,
        max_norm: float | AdaptiveClip | None = None,
        classes: int | None = None,
        ignore_index: int = -100,
        save_to: str | Path | None = None,
        replay: Any = False,
        keep_batch: bool = False,
        review_every: int = 32,
        max_bytes: int = 256 * 2**20,
        snapshot_every: int = 100,
        backend: str | None = None,
    ) -> None:
        rules = None if rules is None else list(rules)
        _refuse_nonsense(model, optimizer, rules)
        for name, number, least in (
            ("history", history, 0),
            ("lag", lag, 0),
            ("review_every", review_every, 1),
            ("snapshot_every", snapshot_every, 1),
        ):
            if type(number) is not int or number < least:
                raise ValueError(f"{name} is {number!r}; expected a whole number of at least {least}")
        self._rules = default_rules() if rules is None else rules
        self._policies = PolicyTable(on_anomaly, [rule.name for rule in self._rules])
        self._watch = watching.periods(watch)
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._lag, self._review_every = lag, review_every
        self._max_norm = float(max_norm) if isinstance(max_norm, (int, float)) else None
        self._save_to = None if save_to is None else Path(save_to)
        self._history = History(history, max_bytes, review_every)
        self._warner = Warner()
        self.findings: list[Finding] = []
        self.should_stop = False
        self.steps = 0
        self._pending: deque[Pending] = deque()
        self._observations: list[Observation] = []
        self._bands: dict[str, tuple[float, float]] = {}
        self._next_review = 1
        self._looked_closer = self._saved = -_QUIET
        self._layouts: dict[str, tuple[Any, Any, Layout]] = {}
        self._paused = False
        self._failed_rules: set[int] = set()
        self._collector = Collector(
            model, optimizer, scaler, self._watch, classes, ignore_index, backend, self._policies.uses("skip")
        )
        self._skipping = Skipping(optimizer) if self._policies.uses("skip") else None
        self._snapshots = Snapshots(model, optimizer, scaler) if self._policies.uses("rollback") else None
        self._snapshot_every = snapshot_every
        if self._save_to is not None:
            atexit.register(_save_at_exit, weakref.ref(self))  # what is left when the program ends

    # One step --------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None, lr: float | Tensor | None = None) -> list[Finding]:
        """Takes note of a step: call it after ``backward()``, before gradients are clipped, once per step.

        No host sync on a GPU unless ``lag`` is 0, or the policy ``"skip"`` meets an optimizer that is not fused.

        Args:
            loss: The loss: a tensor of one element, or a number.
            lr: The learning rate; None takes that of the optimizer's first group.

        Returns:
            What was found now; on a GPU that is about the step before.

        Raises:
            TypeError, ValueError: ``loss`` is not one number. Besides as `gradstat.check`.
            AnomalyError: Something was found that ``on_anomaly`` says to raise about.
        """
        if self._paused:
            return _NOTHING
        pending = self._collector.collect(self.steps, loss, lr)
        self._pending.append(pending)
        self.steps += 1
        if self._skipping is not None:
            self._skipping.arm(pending.numbers[0].flag, self._scaler)
        if self._snapshots is not None and pending.step % self._snapshot_every == 0:
            self._snapshots.take(pending.step)
        known = len(self.findings)
        # On the CPU nothing travels, and there is nothing to wait for.
        self._read(self._lag if pending.numbers[0].travels else 0)
        return self.findings[known:] if len(self.findings) > known else _NOTHING

    def batch(self, batch: Any) -> list[Finding]:
        """Shows the monitor a batch, before the forward pass: tensors, in mappings, lists and tuples, nested.

        Floating tensors are measured with the gradients of the step. Of integer ones, if ``classes`` was given, the
        range is looked at: on the CPU at once, so that a label out of range is told before the loss fails on it.

        Returns:
            What was found now.
        """
        if self._paused or not self._watch["batch"]:
            return _NOTHING
        known = len(self.findings)
        seen = self._collector.see_batch(self.steps, batch)
        if seen:
            self._observations += seen
            self._review()
        return self.findings[known:]

    def flush(self) -> list[Finding]:
        """Reads and reviews all steps so far, waiting for the device if need be; returns what was found now."""
        known = len(self.findings)
        self._read(0)
        self._review()
        return self.findings[known:]

    # From numbers to findings ----------------------------------------------------------------------------

    def _read(self, leaving: int) -> None:
        """Reads the steps that were measured, up to the last ``leaving``."""
        while len(self._pending) > leaving:
            self._take(self._pending.popleft())

    def _take(self, pending: Pending) -> None:
        """Takes in the numbers of a step; reviews the steps since the last review if it is time or something is odd."""
        step, scalars = pending.step, pending.scalars
        gradients, *others = [arrived for numbers in pending.numbers for arrived in numbers.wait()]
        if others and others[0].segment.kind == "scalars":
            self._take_scalars(others.pop(0), scalars)
        loss = scalars.get("loss")
        if loss is not None and not math.isfinite(loss):
            scalars["loss_nonfinite"] = 1.0 if math.isnan(loss) else 2.0
        rows = gradients.rows
        if pending.is_scaled:
            rows = rows / scalars["loss_scale"] ** _DEGREES
        nonfinite = _totals(rows, gradients.total, scalars)
        layout = self._layout_of(gradients)
        if not self._history.fits("gradient", layout):
            self._review()
            self._history.drop_block()
        self._history.add_rows("gradient", step, layout, rows, gradients.segment.positions)
        self._history.add_step(step, scalars)
        self._observations += pending.seen_at_once
        for arrived in others:
            self._take_rows(step, arrived)
        if nonfinite and pending.origin is not None:
            self._observations.append(Observation("origin", step, pending.origin()))
        odd = nonfinite or "loss_nonfinite" in scalars or self._is_out_of_band(scalars)
        if odd:
            self._look_closer(step)
        elif self._snapshots is not None:
            self._snapshots.confirm(step)
        if odd or step + 1 >= self._next_review:
            self._review()

    def _take_scalars(self, arrived: Arrived, scalars: dict[str, float]) -> None:
        for name, row in zip(arrived.segment.names, arrived.rows[:, :_WITH_SUM].tolist(), strict=True):
            value = row[_SUM] if not row[0] and not row[1] else math.nan if row[0] else math.inf
            scalars[name] = value

    def _layout_of(self, arrived: Arrived) -> Layout:
        """The layout of the tensors of a segment, remembered from step to step."""
        segment = arrived.segment
        known = self._layouts.get(segment.kind)
        if known is not None and known[0] is arrived.every and known[1] == segment.positions:
            layout = known[2]
            if layout.names is segment.names or layout.names == segment.names:
                return layout
        infos: list[Any] = list(arrived.infos)
        if segment.positions is not None:
            infos = [None] * len(segment.names)
            for position, info in zip(segment.positions, arrived.infos, strict=True):
                infos[position] = info
            if known is not None and known[2].names == segment.names:  # what was there before has its shape still
                infos = [known[2].info(i) if info is None else info for i, info in enumerate(infos)]
        layout = Layout.of(segment.names, infos)
        self._layouts[segment.kind] = (arrived.every, segment.positions, layout)
        return layout

    def _take_rows(self, step: int, arrived: Arrived) -> None:
        kind = arrived.segment.kind
        if kind == "label":
            for name, row in zip(arrived.segment.names, arrived.rows, strict=True):
                low, high = float(row[_fields.INDEX["min"]]), float(row[_fields.INDEX["max"]])
                self._observations += self._collector.judged_label(step, name, low, high)
            return
        layout = self._layout_of(arrived)
        if not self._history.fits(kind, layout):
            self._review()
        if not self._history.has_rows(kind, step):
            self._history.add_rows(kind, step, layout, arrived.rows)

    def _is_out_of_band(self, scalars: Mapping[str, float]) -> bool:
        for name, (low, high) in self._bands.items():
            value = scalars.get(name)
            if value is not None and not low <= value <= high:
                return True
        return False

    def _look_closer(self, step: int) -> None:
        """Measures everything that has a state, if it still is as it was in ``step``."""
        if step + 1 != self.steps or step - self._looked_closer < _QUIET:
            return
        self._looked_closer = step
        for numbers in self._collector.look_closer(lambda kind: self._history.has_rows(kind, step)):
            for arrived in numbers.wait():
                self._take_rows(step, arrived)

    def _review(self) -> None:
        """Lets all rules look at the steps since the last review, and acts on what they find."""
        if not self._history.open_steps and not self._observations:
            return
        steps, scalars, tables = self._history.close()
        observations, self._observations = self._observations, []
        facts = Facts(
            self._collector.backward_order,
            self._scaler is not None,
            self._max_norm,
            eps_of(self._optimizer),
            second_moment_decay_of(self._optimizer),
            self._collector.classes,
        )
        window = Window(steps, scalars, tables, facts, observations, self._history.latest)
        found: list[Finding] = []
        for rule in self._rules:
            found += self._asked(rule, window)
        self._bands = _joined_bands(self._rules)
        if len(steps):
            past = int(steps[-1]) + 1
            # The first steps are looked at soon: what is wrong from the start should be told at the start.
            self._next_review = past + min(max(past, 1), self._review_every)
        found.sort(key=lambda finding: finding.step)
        self.findings += found
        for finding in found:
            self._act_on(finding)

    def _asked(self, rule: Rule, window: Window) -> list[Finding]:
        if id(rule) in self._failed_rules:
            return []
        try:
            return list(rule.review(window))
        except Exception:
            # Watching must not end what is watched. The rule is not asked again.
            self._failed_rules.add(id(rule))
            warnings.warn(
                f"gradstat: the rule {rule.name!r} failed and is switched off:\n{traceback.format_exc()}",
                RuntimeWarning,
                stacklevel=2,
            )
            return []

    # What is done about them -----------------------------------------------------------------------------

    def _act_on(self, finding: Finding) -> None:
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
                self._save_incident(finding)
            elif policy == "rollback":
                self._roll_back(finding)
        if finding.severity == "error" and self._save_to is not None and finding.step - self._saved >= _QUIET:
            self._saved = finding.step
            self.save(self._save_to, why=str(finding))
        if raising:
            raise AnomalyError(f"{finding}\n{_in_words(finding)}", finding)

    def _roll_back(self, finding: Finding) -> None:
        assert self._snapshots is not None
        step = self._snapshots.go_back()
        if step is None:
            warnings.warn(f"gradstat: no healthy state to go back to yet, at {finding}", RuntimeWarning, stacklevel=2)
        else:
            self._pending.clear()

    # What is kept ----------------------------------------------------------------------------------------

    def recording(self, why: str = "") -> Recording:
        """The last steps, as far as they have been read, with findings. Reviews what has not been."""
        self._review()
        recording = self._history.recording()
        recording.findings = tuple(self.findings)
        recording.backward_order = self._collector.backward_order
        recording.meta = {
            "gradstat": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "model": type(self._model).__name__,
            "optimizer": type(self._optimizer).__name__ if self._optimizer is not None else None,
            "devices": sorted({str(parameter.device) for parameter in self._model.parameters()}),
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "steps": self.steps,
            "saved": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "why": why,
        }
        return recording

    def save(self, path: str | Path, why: str = "on request") -> Path:
        """Writes the recording to one file, for ``python -m gradstat view``; replaces it only by a whole one."""
        from gradstat.monitor.recorder import save

        target = Path(path)
        save(self.recording(why), target)
        return target

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on as if nothing had happened: plain values and tensors. Waits for the device."""
        self.flush()
        return {
            "version": 1,
            "steps": self.steps,
            "should_stop": self.should_stop,
            "findings": [finding.to_dict() for finding in self.findings],
            "rules": [(rule.name, rule.state_dict()) for rule in self._rules],
            "backward_order": list(self._collector.backward_order),
            "history": as_state(self._history.recording()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; rules that are not in it begin anew.

        Raises:
            ValueError: The state is from a newer gradstat.
        """
        if state["version"] != 1:
            raise ValueError(f"this state has version {state['version']}, made by a newer gradstat; this one knows 1")
        self._pending.clear()
        self.steps, self.should_stop = int(state["steps"]), bool(state["should_stop"])
        self.findings = [Finding.from_dict(values) for values in state["findings"]]
        saved = dict(state["rules"])
        for rule in self._rules:
            if rule.name in saved:
                rule.load_state_dict(saved[rule.name])
        self._collector.backward_order = tuple(state["backward_order"])
        self._history.load(from_state(state["history"]))
        self._bands = _joined_bands(self._rules)
        self._next_review = self.steps + self._review_every
        self._collector.resume(self.steps)

    def detach(self) -> None:
        """Ends the watch: reads what is left, takes all hooks away. `findings` and `recording` stay."""
        if self._paused:
            return
        try:
            self.flush()
        finally:
            self._paused = True
            self._collector.remove()
            if self._skipping is not None:
                self._skipping.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Detaches, and saves the recording if there is a file for it."""
        try:
            self.detach()
        except AnomalyError as found:
            if error is None:
                raise
            warnings.warn(f"gradstat: {found}", RuntimeWarning, stacklevel=2)
        finally:
            if self._save_to is not None:
                self.save(self._save_to, "the run ended" if error is None else f"{type(error).__name__}: {error}")

    def _save_incident(self, finding: Finding) -> None:
        base = self._save_to if self._save_to is not None else Path("incident.gradstat")
        self.save(base.with_name(f"{base.stem}-step{finding.step}-{finding.rule}.gradstat"), str(finding))


def _refuse_nonsense(model: object, optimizer: object, rules: list[Any] | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    for rule in rules or ():
        if not isinstance(rule, Rule):
            hint = "; it is a class, make an instance of it" if isinstance(rule, type) else ""
            raise TypeError(f"rules: expected instances of gradstat.monitor.Rule, got {rule!r}{hint}")


def _totals(rows: Floats, total: Floats | None, scalars: dict[str, float]) -> bool:
    """The norms of a step's gradients, into ``scalars``; whether an element is not finite."""
    # A product with ones is the quickest sum over few rows.
    sums = (np.ones(len(rows)) @ rows if total is None else total).tolist()
    extreme = sums[_LARGE] or sums[_SMALL]
    norm = float(l2_norm_of(np.array(sums))) if extreme else math.sqrt(sums[_SQ])
    nan, inf = sums[0], sums[1]
    scalars["finite_norm"] = norm
    if nan == 0 and inf == 0:
        scalars["norm"] = norm
        return False
    scalars["norm"] = math.inf if nan == 0 else math.nan
    scalars["nonfinite"] = nan + inf
    return True


def _joined_bands(rules: Iterable[Rule]) -> dict[str, tuple[float, float]]:
    joined: dict[str, tuple[float, float]] = {}
    for rule in rules:
        for name, (low, high) in rule.bands().items():
            before = joined.get(name, (-math.inf, math.inf))
            joined[name] = (max(low, before[0]), min(high, before[1]))
    return joined


def _in_words(finding: Finding) -> str:
    causes = "".join(f"\n  - {cause}" for cause in finding.causes)
    advice = "".join(f"\n  - {advice}" for advice in finding.advice)
    return f"likely causes:{causes}\nwhat to try:{advice}"


def _save_at_exit(monitor: weakref.ref[Monitor]) -> None:
    alive = monitor()
    if alive is not None and not alive._paused and alive._save_to is not None:
        alive.save(alive._save_to, "the program ended")
