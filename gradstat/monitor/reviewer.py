"""`Reviewer`: reads the numbers of recorded steps and runs the rules on them: from rows to findings."""

from __future__ import annotations

import platform
import time
from collections import deque
from typing import Any

import torch

from gradstat._core.host_copy import is_capturing
from gradstat._core.tensors import is_uninitialized
from gradstat._core.warn import QUIET
from gradstat._version import __version__
from gradstat.monitor.arguments import Settings
from gradstat.monitor.log import StepLog
from gradstat.monitor.probes.base import Pending
from gradstat.monitor.probes.optimizer import optimizer_settings
from gradstat.monitor.recorder import Recorder, model_name
from gradstat.monitor.segments import PendingRows
from gradstat.monitor.source import StepSource
from gradstat.monitor.unwatched import PROPAGATED_ERRORS, Unwatched
from gradstat.recording.findings import Finding
from gradstat.recording.recording import Recording
from gradstat.rules.advice import fitted
from gradstat.rules.contents import Contents
from gradstat.rules.rows import Observation, RunSettings
from gradstat.rules.runner import RuleRunner


class Reviewer:
    """Keeps measured steps until their numbers are read, the log of those that were, and the findings of the rules.

    A step whose numbers are within the bands of all rules costs no more than that comparison. Not safe for several
    threads: its monitor has a lock.

    Attributes:
        steps: Number of steps taken.
        nonfinite_steps: Number of steps, among those read, in which a gradient was not finite.
        findings: All findings so far.
        bad_since: While the steps that are read are not finite, the first of them.
        healthy_at: The last step that was read and is within all bands; -1 before the first.
        raised: While they are not finite, the finding that was raised as an error: it is to be raised again.
    """

    def __init__(
        self,
        settings: Settings,
        source: StepSource,
        recorder: Recorder,
        unwatched: Unwatched,
        findings: list[Finding],
    ) -> None:
        self._settings, self._source, self._recorder, self._unwatched = settings, source, recorder, unwatched
        self._skipped_by, self._remedies = settings.skipped_by, settings.remedies
        options = settings.options
        self.rules = RuleRunner(settings.rules, options.review_every, settings.periods["parameters"])
        self.log = StepLog(options.history, options.max_bytes)
        self.findings = findings
        self.new: list[Finding] = []  # that nobody has acted on yet
        self._pending: deque[Pending] = deque()
        self.steps = self.nonfinite_steps = 0
        self._set: dict[str, float] = {}  # settings, at the last review in a step
        self._unfinished: list[PendingRows] = []  # the inputs of a step that an exception ended
        self._ended_by = ""  # the exception after the last step, in words
        self.forget()

    def forget(self) -> None:
        """Drops what is known of single steps, because they will be repeated or belong to another run."""
        self._pending.clear()
        self.log.clear()
        self.new = []
        self.bad_since: int | None = None
        self.raised: Finding | None = None
        self.healthy_at = -1
        self._last_state_check = [-QUIET, -QUIET]  # last steps with a finite loss, and with another

    def drop_pending(self) -> None:
        """Drops the steps that were not read, because the parameters they were measured with are gone."""
        self._pending.clear()

    def take_new(self) -> list[Finding]:
        """The findings that nobody has acted on yet."""
        findings, self.new = self.new, []
        return findings

    # Reading ---------------------------------------------------------------------------------------------

    def take(self, pending: Pending | None, leaving: int) -> bool:
        """Counts a step and reads those before it, as `read`; None for a step that could not be measured."""
        self.steps += 1  # first: an interrupt in between leaves a gap, not a duplicate step number
        self._ended_by, self._unfinished = "", []
        if pending is not None:
            self._pending.append(pending)
        return self.read(leaving)

    def read(self, leaving: int, past_findings: bool = False) -> bool:
        """Reads steps until ``leaving`` of them wait, or until there is something to act on before the next.

        Runs the rules if a step is out of band or a review is due. Waits for the device where numbers have not arrived.

        Args:
            leaving: So many steps stay unread.
            past_findings: Whether to go on after something was found.

        Returns:
            Whether there is nothing to act on.
        """
        while len(self._pending) > leaving and (past_findings or not self.new):
            pending = self._pending.popleft()
            try:
                is_nonfinite = self.log.read(pending)
                self.nonfinite_steps += "nonfinite" in pending.scalars
                is_out_of_band = is_nonfinite or self.rules.is_out_of_band(pending.scalars)
                if is_out_of_band:
                    self._measure_state(pending)
                self.log.take(pending, self._run_rules)
            except PROPAGATED_ERRORS:
                raise
            except Exception:
                self._unwatched.report_failure(pending.step, "the numbers of a step could not be read")
                continue
            if is_out_of_band or self.new or pending.step + 1 >= self.rules.next_review:
                self.review(is_in_step=not past_findings)
            if not is_nonfinite:
                self.bad_since = self.raised = None
            elif self.bad_since is None:
                self.bad_since = pending.step
            if self.raised is not None and not self.new:
                self.new.append(self.raised)
            if not is_out_of_band:
                self.healthy_at = pending.step
        return not self.new

    def _measure_state(self, pending: Pending) -> None:
        """Measures parameters, buffers and optimizer states as well, if they are still those of the step."""
        is_lost = "loss_nonfinite" in pending.scalars
        if pending.step + 1 == self.steps and pending.step - self._last_state_check[is_lost] >= QUIET:
            self._last_state_check[is_lost] = pending.step
            with self._unwatched.suppress_errors(pending.step, "parameters, buffers or states could not be measured"):
                pending.numbers.extend(self._recorder.measure_state(pending.step, pending.kinds()))

    def note_error(self, error: BaseException | None) -> None:
        """Keeps the exception that ended the run, if it does; not one by which a user or program ends it."""
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            first = (str(error).strip() or "no message").splitlines()[0]
            self._ended_by = f"{type(error).__name__}: {first}"
            with self._unwatched.suppress_errors(self.steps, "the inputs of the last step could not be measured"):
                self._unfinished = self._recorder.measure_unfinished(self.steps)

    def catch_up(self) -> None:
        """Reads and reviews all steps so far."""
        self.read(0, past_findings=True)
        self.review()

    def without_ranks(self) -> None:
        """From now on the other ranks may be gone: nothing that was measured asks them."""
        for pending in self._pending:
            pending.late.pop("origin", None)

    # Reviewing -------------------------------------------------------------------------------------------

    def observe(self, seen: list[Observation]) -> None:
        """Reviews what is known before the step is measured, or though no step comes."""
        self.log.observations += seen
        self.review()

    def review(self, is_in_step: bool = False) -> None:
        """Runs all rules on the steps since the last review.

        ``is_in_step``: settings are looked at. Elsewhere, as in an evaluation, modules have another mode.
        """
        with self._unwatched.suppress_errors(self.steps, "the rules could not review the last steps"):
            if is_in_step:
                self._set = self._recorder.settings()
            self._run_rules()

    def review_end(self) -> None:
        """Reviews the parameters as the last step has left them, and what the next got if the program died in it."""
        were_measured = any(kind.partition(".")[0] == "parameter" for kind in self.log.latest)
        if is_capturing() or not were_measured:
            return
        with self._unwatched.suppress_errors(self.steps, "parameters could not be measured at the end"):
            numbers = [*self._recorder.measure_parameters(self.steps), *self._unfinished]
            if numbers:
                self.log.take(Pending(self.steps, numbers, [], {}, False, [], {}), self._run_rules)
                self._run_rules(is_end=True)

    def _run_rules(self, is_end: bool = False) -> None:
        if self.log.is_empty:
            return
        recorder, source, settings = self._recorder, self._source, self._settings
        run = RunSettings(
            backward_order=recorder.backward_order,
            in_float16=recorder.in_float16,
            positive=recorder.positive,
            loss_is_sum=recorder.loss_is_sum,
            loss_has_no_sign=recorder.loss_has_no_sign,
            is_scaled=recorder.is_scaled,
            planned_steps=source.planned_steps,
            batches=source.batches,
            samples=source.samples,
            is_stepped_by_user=source.is_loop,
            origin_is_unknown=recorder.origin_is_unknown,
            skipped_by="the loss scaler" if recorder.is_scaled else self._skipped_by,
            has_other_optimizer=recorder.has_other_optimizer,
            settings=self._set,
            is_unfinished=is_end and bool(self._unfinished),
            **optimizer_settings(settings.optimizer),
        )
        # Remedies that the run uses already, or cannot use, are left out of advice.
        in_use = [*self._remedies, *["skip"] * bool(run.skipped_by)]
        not_usable = () if settings.engine is None else ("replay",)
        window = self.log.close(run, keeps=not is_end)
        findings = [
            fitted(one, recorder.trained.named_parameters, in_use, not_usable, source.runs_steps)
            for one in self.rules.review(window, is_end)
        ]
        self.findings += findings
        self.new += findings

    def has_trouble(self, since: int) -> bool:
        """Whether a step from ``since`` on has an error or was refused by a guard."""
        errors = [finding for finding in self.findings if finding.severity == "error"]
        # A finding has the step in which a problem began, and its rule knows in which it was last met.
        last = [self.rules.refused_at, *self.rules.last_steps({finding.rule for finding in errors})]
        return any(step >= since for step in [*(f.step for f in errors), *last])

    # Recordings ------------------------------------------------------------------------------------------

    def recorded(self) -> Recording:
        """The steps that were reviewed, and all findings, without ``meta``."""
        recording = self.log.recording()
        recording.findings, recording.backward_order = tuple(self.findings), self._recorder.backward_order
        return recording

    def recording(self, why: str) -> Recording:
        """All steps that were read, with what is known about the run and ``why`` it is recorded."""
        self.review()
        recording, trained, optimizer = self.recorded(), self._recorder.trained, self._settings.optimizer
        parameters = [*self._recorder.inner.parameters(), *trained.besides.parameters()]
        recording.meta = {
            "gradstat": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "model": model_name(self._recorder.inner),
            "optimizer": type(optimizer).__name__ if optimizer is not None else None,
            "devices": sorted({str(parameter.device) for parameter in parameters}),
            "parameters": sum(p.numel() for p in parameters if not is_uninitialized(p)),
            "steps": self.steps,
            "rules": [rule.name for rule in self.rules.rules],
            "saved": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "why": why,
            "ended_by": self._ended_by,
        }
        return recording

    def resume(self, history: Recording, state: Any, contents: Contents | None) -> None:
        """Goes on after the run whose ``state`` holds this ``history``, with ``contents`` that should be restored."""
        self.forget()
        self.steps, self.nonfinite_steps = state["steps"], state["nonfinite_steps"]
        self.findings[:] = history.findings
        self._recorder.backward_order = history.backward_order
        self.log.load(history)
        self.rules.resume(self.steps, history.scalars)
        if contents is not None:
            self.rules.next_review = self.steps + 1  # at once: what was not restored should not train on
        self._recorder.resume(self.steps, contents)
