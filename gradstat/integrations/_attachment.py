"""`Attachment`: `gradstat.auto` for a model and its optimizer under a framework, with what only an adapter knows."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat._core.engines import engine_of
from gradstat._core.host_copy import HostCopy
from gradstat._core.warn import warn
from gradstat._core.wrappers import without_ddp
from gradstat.accumulation import AccumulationReport, MicroBatches
from gradstat.adaptive._base import Limit
from gradstat.automatic import AutoHandle, sum_of
from gradstat.monitor import AnomalyError, Finding, Monitor, MonitorOptions
from gradstat.monitor.policies import Policy
from gradstat.replay.step_state import is_replaying

if TYPE_CHECKING:
    from gradstat.integrations._adapter import Adapter

# Policies that a monitor only requests; the attachment carries them out, on all ranks together.
_COLLECTIVE_POLICIES = ("replay", "checkpoint")
# Rules whose findings are caused by some micro-batch.
_MICRO_BATCH_RULES = ("nonfinite-gradient", "nonfinite-loss")
# Number of steps after a replay without another one.
_REPLAY_INTERVAL = 20
# Every how many steps replicas are compared, unless ``watch`` says otherwise.
_COMPARE_EVERY = 100
# The attribute of a model with names of parameters that DDP leaves different on each rank.
_OWN = "_ddp_params_and_buffers_to_ignore"


class RankReductions:
    """Small collectives in each step, without a host sync on a GPU. All ranks have to call them in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._votes: HostCopy | None = None

    def mean(self, loss: Tensor | None) -> Tensor | None:
        """The mean loss over the ranks that have one, so that all find the same; None on a rank without a loss."""
        sums = torch.full((2,), float(loss is not None), dtype=torch.float64, device=self._device)
        if loss is not None:
            sums[0].copy_(loss)  # the other element counts the losses
        dist.all_reduce(sums)
        return None if loss is None else sums[0] / sums[1]

    def any_of(self, requests: Sequence[bool], wait: bool) -> list[bool]:
        """For each element, whether it is True on any rank; on a GPU, unless ``wait``, as of the previous call."""
        votes = torch.zeros(len(requests), device=self._device)
        for i, is_requested in enumerate(requests):
            if is_requested:
                votes[i].fill_(1.0)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        previous, self._votes = self._votes, HostCopy(votes)
        due = [self._votes] if wait or not self._votes.needs_copy else []
        if previous is not None and previous.needs_copy:  # the previous call returned without its votes
            due.append(previous)
        received = [votes.wait() for votes in due]
        if wait:
            self._votes = None
        return [any(votes[i] > 0 for votes in received) for i in range(len(requests))]


class Attachment(AutoHandle):
    """A monitor on a model and its optimizer, which takes the steps that are announced, as `gradstat.auto` does.

    The adapter adds the losses (`saw_backward`), says what only the framework knows, and has policies that ranks carry
    out together. ``limit`` is the framework's own clip, if it has one: ``max_norm`` then clips nothing. ``step_fn``
    runs a step again if the user gave no function for that. ``steps_itself``: no other optimizer does for this one.
    Parameters that DDP keeps the same on all ranks are compared from time to time. ``should_stop`` is the same on all
    ranks.
    """

    def __init__(
        self,
        adapter: Adapter,
        model: nn.Module,
        optimizer: Optimizer | None,
        scaler: Any,
        limit: Limit | None = None,
        step_fn: Callable[..., Any] | None = None,
        steps_itself: bool = False,
    ) -> None:
        self.model, self._adapter = model, adapter
        self._requested: set[str] = set()
        arguments, number = dict(adapter.arguments), len(adapter.attachments)
        arguments["rules"] = copy.deepcopy(arguments["rules"])  # rules have state
        if number:  # the first attachment uses the user's own guard
            arguments["guard"] = copy.deepcopy(arguments.get("guard"))
        arguments["on_anomaly"] = adapter.table.changed(self._carried_out_here)
        if adapter.device is not None and adapter.is_replicated and not getattr(without_ddp(model), _OWN, ()):
            arguments["watch"] = {"replicas": _COMPARE_EVERY} | adapter.watch
        arguments["max_norm"] = adapter.max_norm if limit is None else limit
        if adapter.replays and not callable(arguments.get("replay")):
            arguments["replay"] = step_fn or arguments.get("replay", False)
        if "replay" in adapter.policies:
            # The next step would overwrite what a replay needs.
            arguments["options"] = replace(MonitorOptions.of(arguments.get("options")), lag=0)
        if number and arguments.get("save_to") is not None:
            base = Path(arguments["save_to"])
            arguments["save_to"] = base.with_name(f"{base.stem}-{number}{base.suffix}")
        self.engine = engine_of(model)  # an engine has its own optimizer, which announces nothing
        monitor = Monitor(model, None if self.engine else optimizer, scaler=scaler, **arguments)
        monitor.connection.in_use |= adapter.policies & {"replay"}  # the monitor only requests a replay
        monitor.connection.runs_steps = adapter.runs_steps
        # Checks of micro-batches, read only if something was found: `_checked` of the current step; `_history` of the
        # newest steps, each with its number and losses.
        self._checked: MicroBatches | None = None
        self._history: deque[tuple[int, MicroBatches, list[Tensor]]] = deque(maxlen=monitor.options.lag + 2)
        self._reductions = None if adapter.device is None else RankReductions(adapter.device)
        self._losses: list[Tensor] = []
        self._reported = 0
        self._error: AnomalyError | None = None
        self._last_replay = -_REPLAY_INTERVAL
        self._is_withheld = False  # whether the last due checkpoint was withheld
        self.should_stop = False
        self.micro_batch_reports: dict[int, AccumulationReport] = {}
        self._turn = 0  # in the last backward pass
        super().__init__(optimizer, monitor, adapter.max_norm if limit is None else None, self.engine is None)
        self._steps_itself = steps_itself

    @property
    def _ranks(self) -> RankReductions | None:
        """Collectives with the other ranks. None if this rank trains alone or others may have no data left."""
        return None if self._connection.is_joining() else self._reductions

    def _why_nothing(self) -> str:
        return f"no step of an optimizer of {type(self.model).__name__} has been seen"

    def before_backward(self) -> None:
        """The adapter adds the losses."""

    def after_backward(self, losses: Sequence[Tensor]) -> None:
        """As `before_backward`."""

    def _is_complete(self) -> bool:
        return self._adapter.is_complete(self)

    def is_measured(self) -> bool:
        """Whether the coming step has been measured."""
        return self._measured is not None  # a backward pass sets it to None: `saw_backward`

    def measure(self) -> None:
        """Measures the complete gradients before a change that nothing announces."""
        if self.engine is None:
            self._measure()
        else:
            self._take(None)

    def saw_batch(self, batch: Any) -> None:
        """Shows the monitor a batch, before the forward pass. Raises as a step; with several ranks, in the step."""
        self._call_monitor(lambda: self.monitor.batch(batch))
        if self._ranks is None:  # now rather than in the step, as computing the loss may fail on this batch
            self._carry_out()

    def saw_backward(self, loss: Any, is_micro_batch: bool) -> None:
        """Notes a backward pass from the unscaled ``loss``, and checks gradients of a micro-batch; no host sync."""
        self._measured = None
        if self._turn != self._adapter.turns:  # what has not been measured belongs to the step of another model
            self._turn, self._losses, self._checked = self._adapter.turns, [], None
        with self._contained("a loss could not be recorded"):
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
                self._losses.append(loss.detach().reshape(()))
        checked, self._checked = self._checked, None
        with self._contained("a micro-batch could not be checked"):
            if is_micro_batch:
                checked = checked or MicroBatches(without_ddp(self.model), backend=self.monitor.options.backend)
                checked.check()
            self._checked = checked

    def _take(self, loss: Any) -> None:
        """Lets the monitor measure the step, and carries out policies in the same way on every rank.

        Raises AnomalyError if the policy ``"raise"`` applies on any rank. The message also names the micro-batch.
        """
        if is_replaying():
            return
        self._adapter.turns += 1
        losses, self._losses = self._losses, []
        loss = None  # announcements know less about the loss than the adapter
        with self._contained("the losses of a step could not be added"):
            if losses:
                loss = sum_of(losses)
                loss = loss / divisor if (divisor := self._adapter.divisor()) != 1 else loss
        if self._checked is not None:
            self._history.append((self.monitor.steps, self._checked, losses))
            self._checked = None
        if self._ranks is not None:
            loss = self._ranks.mean(loss)
        self._call_monitor(lambda: self.monitor.step(loss))
        self._carry_out(in_step=True)

    def flush(self) -> None:
        """Waits for all numbers so far. Raises as a step does; with several ranks, in the next step."""
        self._call_monitor(self.monitor.flush)
        if self._ranks is None:
            self._carry_out()

    def end(self) -> None:
        """Reads all pending numbers when training has ended or paused, on all ranks together; raises as a step does."""
        self._call_monitor(self.monitor.flush)
        self._carry_out(wait=True)

    def withholds_checkpoint(self) -> bool:
        """Whether a checkpoint must not be saved now.

        That is so if the training is about to stop with nonfinite parameters, or if the user wants healthy checkpoints
        only and some rank is not healthy. Waits for the device; all ranks have to call it. Raises as a step does.
        """
        self.end()
        if not self.should_stop and not self._adapter.healthy_checkpoints:
            return False
        is_withheld = False
        with self._contained("parameters could not be checked before they are saved"):
            is_withheld = not self.monitor.is_healthy(100 if self._adapter.healthy_checkpoints else 0)
        if self._ranks is not None:
            is_withheld = self._ranks.any_of([is_withheld], wait=True)[0]
        if is_withheld and not self.should_stop and not self._is_withheld:
            warn("checkpoints are not saved until the training has been healthy for 100 steps (healthy_checkpoints)")
        self._is_withheld = is_withheld
        return is_withheld

    def _call_monitor(self, call: Callable[[], object]) -> None:
        """Calls the monitor, and reports which micro-batch caused what it finds."""
        error: AnomalyError | None = None
        try:
            call()
        except AnomalyError as raised:
            error = raised
        findings = self.monitor.findings[self._reported :]
        self._reported = len(self.monitor.findings)
        caused = [finding for finding in findings if finding.rule in _MICRO_BATCH_RULES]
        texts = [(finding, text) for finding in caused if (text := self._micro_batch_of(finding))]
        if error is None:
            for finding, text in texts:
                if self._adapter.table.of(finding) != ("record",):
                    warn(text)
        elif self._error is None:
            self._error = AnomalyError("\n".join([str(error), *(text for _, text in texts)]), error.finding)
            self._requested.add("raise")  # once: votes may arrive a step later
        if findings:
            with self._contained("findings could not be shown"):
                self._adapter.on_findings(findings)

    def _micro_batch_of(self, finding: Finding) -> str:
        """Which micro-batch caused a finding, as text; empty if unknown, or already reported for its step."""
        text = ""
        with self._contained("the micro-batch with NaN or Inf could not be determined"):
            entry = next((step for step in self._history if step[0] == finding.step), None)
            if entry is not None:
                self._history.remove(entry)
                number, checked, losses = entry
                report = self.micro_batch_reports[number] = checked.result()
                text = f"step {number}: {report.cause([float(loss) for loss in losses])}"
                text = text if self._ranks is None else f"{text} (on this rank)"
        return text

    def _carried_out_here(self, policy: Policy) -> Policy:
        """A policy as the monitor gets it: a function that requests it, for `_COLLECTIVE_POLICIES`."""
        if not isinstance(policy, str) or policy not in _COLLECTIVE_POLICIES:
            return policy

        def request(monitor: Monitor, finding: Finding) -> None:
            if policy != "replay" or finding.step >= monitor.steps - 1:  # an older step cannot be run again
                self._requested.add(policy)

        return request

    def _carry_out(self, in_step: bool = False, wait: bool = False) -> None:
        """Carries out the policies that any rank requests; raises last."""
        requests = [name in self._requested for name in (*_COLLECTIVE_POLICIES, "raise")]
        requests.append(self.monitor.should_stop)
        self._requested.clear()
        if self._ranks is not None:
            requests = self._ranks.any_of(requests, wait or "replay" in self._adapter.policies)
        replays, saves, raises, stops = requests
        outcome = self._replay() if replays and in_step else ""
        if saves:
            with self._contained("a checkpoint could not be saved"):
                self._adapter.save_checkpoint()
        self.should_stop = self.should_stop or stops
        if raises:
            error, self._error = self._error, None
            if error is None:
                raise AnomalyError("gradstat: another rank found an anomaly; see the error on that rank")
            raise AnomalyError(f"{error}\n{outcome}", error.finding) if outcome else error

    def _replay(self) -> str:
        """Replays the newest step, unless one of the last `_REPLAY_INTERVAL` was; returns the outcome as text."""
        step = self.monitor.steps - 1
        if step - self._last_replay < _REPLAY_INTERVAL:
            return ""
        self._last_replay = step
        try:
            culprit = self.monitor.replay()
            text = str(culprit) if culprit is not None else "the replay found nothing on this rank"
        except Exception as error:  # a failure of the monitor must not end the training
            text = f"the replay failed: {type(error).__name__}: {error}"
        warn(f"step {step}: {text}")
        return text

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the monitor's state. Its findings count as reported, and a ``should_stop`` in it is cleared."""
        self.monitor.load_state_dict(state)
        self.monitor.should_stop = self.should_stop = False
        self._reported = len(self.monitor.findings)

    def remove(self, error: BaseException | None = None) -> None:
        """Ends the watching and saves the recording; ``error`` is the exception that ended the training, if any."""
        self._losses = []
        self._leave()
        self.monitor.__exit__(None if error is None else type(error), error, None)
