"""`Responder`: acts on findings by the policies of ``on_anomaly``, on several ranks in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradstat._core.warn import QUIET, warn, warning_of_failure
from gradstat._step import decision
from gradstat._step.decision import SkipRequest
from gradstat.monitor.actions import Snapshots
from gradstat.monitor.arguments import Settings
from gradstat.monitor.flight_file import FlightFile
from gradstat.monitor.policies import AnomalyError, Policy, Warner
from gradstat.monitor.probes.base import Pending
from gradstat.monitor.ranks import RankVotes
from gradstat.monitor.recorder import Recorder
from gradstat.monitor.reviewer import Reviewer
from gradstat.monitor.source import StepSource
from gradstat.monitor.unwatched import Unwatched
from gradstat.recording.findings import Finding
from gradstat.recording.recording import Recording
from gradstat.replay.culprit import Culprit
from gradstat.replay.rerun import Replayer
from gradstat.rules.advice import causes_and_advice
from gradstat.rules.rows import Observation

# Policies that act on a running training: at its end they warn.
_OF_RUNNING_TRAINING = ("raise", "stop", "rollback", "replay", "checkpoint")
# Policies that ranks which respond together carry out after a vote.
_BY_VOTE = ("replay", "checkpoint", "raise", "stop")


class Responder:
    """Skips, warns, raises, stops, saves, rolls back and replays, as ``policies`` say.

    Where ranks respond together (`StepSource.device`), a finding on this rank only requests what would part it from the
    others; `agree` then carries it out on all of them.

    Attributes:
        should_stop: Whether the policy ``"stop"`` has been triggered.
    """

    def __init__(
        self,
        settings: Settings,
        source: StepSource,
        recorder: Recorder,
        reviewer: Reviewer,
        replayer: Replayer,
        unwatched: Unwatched,
        file: FlightFile,
    ) -> None:
        self._settings, self._policies, self._source, self._unwatched = settings, settings.policies, source, unwatched
        self._recorder, self._reviewer, self.replayer = recorder, reviewer, replayer
        self._file, self._warner, self._saved = file, Warner(), -QUIET
        # The optimizer that may be told to skip a step.
        self._skipping = optimizer = settings.optimizer if settings.skipped_by else None
        self._skip_flag: Tensor | None = None  # of the newest step
        self.snapshots: Snapshots | None = None
        if self._policies.uses("rollback"):
            self.snapshots = Snapshots(recorder.trained, settings.optimizer, recorder.scaler)
        self.prepares = optimizer is not None or self.snapshots is not None  # whether `prepare` has anything to do
        self.should_stop = False
        self._votes = None if source.device is None else RankVotes(source.device)
        if self._votes is not None:  # all ranks replay, and mostly one of them has made the NaN
            replayer.clean = "all operations gave finite values on this rank"
        self._requested: set[str] = set()
        self._error: AnomalyError | None = None  # to be raised after the vote
        self._is_withheld = False  # whether the last due checkpoint was
        if optimizer is not None:
            decision.request(optimizer, self, None)  # a closure may make the first request within a step

    # Before the step -------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> RankVotes | None:
        """The other ranks. None if this one trains alone, or others may have no data left."""
        return None if self._votes is None or self._source.is_joining() else self._votes

    def shared_loss(self, loss: Any) -> Any:
        """The mean loss over ranks that respond together, so that all find the same; else ``loss``."""
        ranks = self._ranks
        return loss if ranks is None else ranks.mean(loss)

    def prepare(self, pending: Pending, loss: Any) -> None:
        """Requests to skip a step that was just measured, if a policy does, and copies the state for a rollback."""
        optimizer = self._skipping
        if optimizer is not None:
            wish = self._skip_request(optimizer, pending, loss)
            self._skip_flag = None if wish is None else wish.flag
            decision.request(optimizer, self, wish)
        if self.snapshots is not None and pending.step % self._settings.options.rollback_every == 0:
            with self._unwatched.suppress_errors(pending.step, "the state of a step could not be copied"):
                self.snapshots.confirm(self._reviewer.healthy_at)
                self.snapshots.take(pending.step)

    def _skip_request(self, optimizer: Optimizer, pending: Pending, loss: Any) -> SkipRequest | None:
        """Asks for the step to be skipped if a gradient is not finite or the guard refuses; an enabled scaler skips."""
        measured, guard, scaler = pending.numbers[0], self._settings.guard, self._recorder.scaler
        if measured.flag is None or (scaler is not None and scaler.is_enabled()):
            return None
        wish = SkipRequest(measured.flag)
        if guard is not None and measured.norm is not None:
            backend = self._settings.options.backend
            with self._unwatched.suppress_errors(pending.step, "the guard could not decide about a step"):
                wish = decision.judged(guard, optimizer, measured.norm, measured.flag, loss, backend)
        return wish

    def stop(self, should_stop: bool = True) -> None:
        """Sets ``should_stop``; ranks that respond together first agree on it."""
        if should_stop and self._votes is not None:
            self._requested.add("stop")
        else:
            self._requested.discard("stop")
            self.should_stop = should_stop

    # After findings --------------------------------------------------------------------------------------

    def respond_to(self, monitor: Any, seen: list[Observation]) -> None:
        """Reviews what is known before the step is measured, or though no step comes; then as `respond`."""
        if seen:
            with monitor.lock:
                self._reviewer.observe(seen)
            self.respond(monitor)

    def respond(self, monitor: Any) -> None:
        """Acts on all findings that nobody has acted on, then raises AnomalyError if a policy says so.

        Without the monitor's lock, since this may call functions of the user.
        """
        findings = self._reviewer.take_new()
        if not findings:
            return
        raising = [finding for finding in findings if self._act_on(monitor, finding)]  # all, before one raises
        with self._unwatched.suppress_errors(self._reviewer.steps, "findings could not be shown"):
            self._source.show(findings)
        if raising:
            first = raising[0]
            self._reviewer.raised = None if self._reviewer.bad_since is None else first
            replayed = f"\n{self.replayer.text}" if 0 <= self.replayer.step == monitor.steps - 1 else ""
            error = AnomalyError(f"{first}{replayed}\n{causes_and_advice(first)}", first)
            if self._votes is None:
                raise error
            if self._error is None:
                self._error = error
                self._requested.add("raise")

    def respond_at_end(self, monitor: Any) -> None:
        """Acts on what was found last, when there is no training any more to act on: nothing raises, but warns."""
        for finding in self._reviewer.take_new():
            with warning_of_failure(f"a policy failed for the finding {finding}"):
                self._act_on(monitor, finding, is_over=True)

    def _act_on(self, monitor: Any, finding: Finding, is_over: bool = False) -> bool:
        """Applies the policies; returns whether to raise."""
        if finding is self._reviewer.raised:  # the program has caught its error, and goes on with such steps
            return not is_over
        raising = False
        policies: Iterable[Policy] = self._policies.of(finding)
        if is_over:
            policies = dict.fromkeys("warn" if policy in _OF_RUNNING_TRAINING else policy for policy in policies)
        policies = tuple(policies)
        if "warn" not in policies:
            self._warner.show(finding, self._reviewer.steps, warns=False)
        for policy in policies:
            if callable(policy):
                policy(monitor, finding)
            elif policy == "warn":
                self._warner.show(finding, self._reviewer.steps, warns=True)
            elif policy == "raise":
                raising = True
            elif policy == "snapshot":
                self._file.write(lambda: self.recording(str(finding)), self._file.beside(finding))
            elif policy == "rollback":
                self._roll_back(finding)
            elif policy == "replay" and finding.step + 1 < monitor.steps:
                continue  # an older step cannot be run again
            elif policy in _BY_VOTE and self._votes is not None:
                self._requested.add(policy)
            elif policy in _BY_VOTE:
                self._carry_out(policy, monitor)
        if finding.severity == "error" and finding.step - self._saved >= QUIET and not is_over:
            self._saved = finding.step
            if self._file.path is not None:
                self.save(str(finding))
        return raising

    def _carry_out(self, policy: str, monitor: Any) -> None:
        """Carries out one of the policies that ranks vote on, but for ``"raise"``."""
        if policy == "stop":
            self.should_stop = True
        elif policy == "checkpoint":
            with self._unwatched.suppress_errors(monitor.steps, "a checkpoint could not be saved"):
                self._source.save_checkpoint()
        elif policy == "replay" and not self._is_explained():
            self.replayer.run_once(monitor.steps - 1, monitor.replay)

    def _is_explained(self) -> bool:
        """Whether a replay has found the cause of what is not finite now: another would find a consequence."""
        replayed, since = self.replayer, self._reviewer.bad_since
        return replayed.culprit is not None and since is not None and replayed.step >= since

    def _roll_back(self, finding: Finding) -> None:
        snapshots = self.snapshots
        if snapshots is None:
            return
        snapshots.confirm(self._reviewer.healthy_at)
        if snapshots.restore() is not None:
            self._reviewer.drop_pending()
            self._recorder.forget()
        else:
            warn(f"cannot roll back: there is no healthy snapshot of this model; {finding}", RuntimeWarning)

    # Ranks that respond together -------------------------------------------------------------------------

    def agree(self, monitor: Any, in_step: bool = False, wait: bool = False) -> None:
        """Carries out what any rank has requested, on all of them; raises last. Each rank has to call it alike.

        Does nothing for a rank that responds by itself. ``in_step``: a replay is possible. ``wait``: for this vote,
        where on a GPU it would be read in the next call.
        """
        if self._votes is None:
            return
        requests = [policy in self._requested for policy in _BY_VOTE]
        self._requested.clear()
        ranks = self._ranks
        if ranks is not None:
            requests = ranks.any_of(requests, wait or self._policies.uses("replay"))
        for policy, is_requested in zip(_BY_VOTE, requests, strict=True):
            if is_requested and policy != "raise" and (policy != "replay" or in_step):
                self._carry_out(policy, monitor)
        if requests[_BY_VOTE.index("raise")]:
            error, self._error = self._error, None
            if error is None:
                raise AnomalyError("gradstat: another rank found an anomaly; see the error on that rank")
            replayed = self.replayer.text if 0 <= self.replayer.step == monitor.steps - 1 else ""
            raise AnomalyError(f"{error}\n{replayed}", error.finding) if replayed else error

    def withholds_checkpoint(self, monitor: Any, only_healthy: bool) -> bool:
        """Whether a checkpoint must not be saved now, though one is due.

        That is so if the training is about to stop with nonfinite parameters, or if the user wants ``only_healthy``
        checkpoints and some rank is not healthy. Waits for the device; all ranks call it. Raises as a step does.
        """
        monitor.flush()
        self.agree(monitor, wait=True)
        if not self.should_stop and not only_healthy:
            return False
        is_withheld = False
        with self._unwatched.suppress_errors(monitor.steps, "parameters could not be checked before they are saved"):
            is_withheld = not monitor.is_healthy(100 if only_healthy else 0)
        ranks = self._ranks
        if ranks is not None:
            is_withheld = ranks.any_of([is_withheld], wait=True)[0]
        if is_withheld and not self.should_stop and not self._is_withheld:
            warn("checkpoints are not saved until the training has been healthy for 100 steps (healthy_checkpoints)")
        self._is_withheld = is_withheld
        return is_withheld

    # Replays and recordings ------------------------------------------------------------------------------

    def replay(self, step: int, step_fn: Any) -> Culprit | None:
        """Runs ``step``, the newest, again. Raises as `gradstat.Monitor.replay`."""
        was_skipped = self._skip_flag is not None and bool(self._skip_flag.item())
        return self.replayer.run(step, step_fn, was_skipped)

    def recording(self, why: str) -> Recording:
        """What is recorded, with the result of the last replay."""
        recording = self._reviewer.recording(why)
        recording.meta["culprit"] = self.replayer.text
        return recording

    def save(self, why: str) -> None:
        """Writes the recording, if there is a place for it; warns if it cannot."""
        if self._file.path is not None:
            self._file.write(lambda: self.recording(why), self._file.path)

    def use_scaler(self, scaler: Any) -> None:
        """Takes ``scaler`` for the loss scaler of snapshots and replays."""
        self.replayer.scaler = scaler
        if self.snapshots is not None:
            self.snapshots.scaler = scaler

    def forget(self) -> None:
        """Forgets everything about earlier steps, as for another run."""
        self.replayer.forget()
        if self.snapshots is not None:
            self.snapshots.clear()
        self._warner, self._saved = Warner(), -QUIET
        self._requested.clear()
        self._error = None

    def remove(self) -> None:
        """Withdraws requests to skip, and removes the hook of replays."""
        if self._skipping is not None:
            decision.request(self._skipping, self, None)
        self.replayer.remove()
