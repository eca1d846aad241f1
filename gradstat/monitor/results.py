"""`Results`: what a monitor has found out, to be read during the run and after it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradstat._core.text import count_of
from gradstat._core.wrappers import rank_and_size
from gradstat.guard import SpikeGuard, state_tensor_of
from gradstat.monitor.arguments import Settings
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.log import LatestStep
from gradstat.monitor.recorder import Recorder
from gradstat.monitor.responder import Responder
from gradstat.monitor.reviewer import Reviewer
from gradstat.monitor.source import StepSource
from gradstat.monitor.state import contents_of, load_rules, recording_of, state_of
from gradstat.recording.findings import Finding
from gradstat.recording.recording import Recording
from gradstat.replay.culprit import Culprit


class Results:
    """The findings, the recording and the state of a monitor, which makes what is used here.

    Attributes:
        source, recorder, reviewer, responder: Who steps, what is recorded, what is found in it, and who responds.
    """

    settings: Settings
    source: StepSource
    recorder: Recorder
    reviewer: Reviewer
    responder: Responder
    findings: list[Finding]
    guard: SpikeGuard | None
    lock: threading.RLock  # protects everything but responses, which call users' functions

    @property
    def steps(self) -> int:
        return self.reviewer.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.reviewer.steps = steps

    @property
    def nonfinite_steps(self) -> int:
        return self.reviewer.nonfinite_steps

    @property
    def should_stop(self) -> bool:
        return self.responder.should_stop

    @should_stop.setter
    def should_stop(self, should_stop: bool) -> None:
        self.responder.stop(should_stop)

    @property
    def culprit(self) -> Culprit | None:
        return self.responder.replayer.culprit

    # Findings --------------------------------------------------------------------------------------------

    def _read(self, leaving: int) -> None:
        """Reads the measured steps except the last ``leaving``, and acts on what is found in one before the next."""
        while True:
            with self.lock:
                is_quiet = self.reviewer.read(leaving)
            if is_quiet:
                return
            self.responder.respond(self)

    def flush(self) -> list[Finding]:
        """Reads and reviews all steps so far, waiting for the device if need be; returns the new findings."""
        first_new = len(self.findings)
        self._read(0)
        self._review()
        return self.findings[first_new:]

    def _review(self) -> None:
        """Runs all rules on the steps since the last review, and acts on their findings."""
        with self.lock:
            self.reviewer.review()
        self.responder.respond(self)

    def is_healthy(self, within: int = 100) -> bool:
        """Whether a checkpoint of the current state may replace the last good one. ::

            if step % 1000 == 0 and monitor.is_healthy():
                torch.save(model.state_dict(), "last_good.pt")

        False if one of the last ``within`` steps has an error or was refused by a guard, or if parameters or watched
        optimizer states, measured now, are not finite. Buffers may hold infinity on purpose. Waits for the device.

        Args:
            within: How many of the last steps count.

        Returns:
            Whether it may. For sharded tensors, only this rank's shards are checked.

        Raises:
            AnomalyError: As `flush`.
        """
        self.flush()
        with self.lock:
            return not self.reviewer.has_trouble(self.steps - within) and self.recorder.is_finite()

    # Recording and state ---------------------------------------------------------------------------------

    def recording(self, why: str = "") -> Recording:
        """The last ``history`` steps that were read, with findings; reviews those not reviewed yet.

        No host sync; call `flush` first to include steps that are still being copied to the host.

        Args:
            why: Why the recording is made, for its ``meta``.
        """
        self._review()
        with self.lock:
            return self.responder.recording(why)

    def latest(self) -> LatestStep | None:
        """The newest step whose numbers were read: report and scalars. None before the first. No host sync."""
        newest = self.reviewer.log.newest
        return None if newest is None else LatestStep.of(newest)

    def diagnose(self) -> Diagnosis:
        """All findings so far, ordered from cause to effect, to be printed. Waits for the device."""
        self.flush()
        return Diagnosis.of(self.recording(), "" if self.steps else self.source.why_nothing())

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
        """Everything needed to resume, as plain values and tensors. Waits for the device.

        Save it at the same moment as parameters and optimizer: what these hold now is kept by a few numbers of each
        tensor, unless it is sharded, and compared in the first step after `load_state_dict`.
        """
        self.flush()
        with self.lock:
            self.reviewer.catch_up()  # another thread may have taken a step
            contents = self.recorder.contents() if self.steps else None
            return state_of(
                self.reviewer.recorded(),
                self.reviewer.rules.rules,
                steps=self.steps,
                nonfinite_steps=self.nonfinite_steps,
                should_stop=self.should_stop,
                guard=None if self.guard is None else self.guard.state_dict(),
                contents=None if contents is None else contents.to_plain(),
            )

    def load_state_dict(self, state: Mapping[str, Any], *, expect_restored: bool = True) -> None:
        """The inverse of `state_dict`; rules that are not in it stay as they are.

        Discards steps that this monitor has not reviewed yet, and what it remembers of steps that will be repeated.
        May be called before or after parameters and optimizer are restored.

        Args:
            state: What `state_dict` returned, on any device.
            expect_restored: Whether the next step finds parameters and optimizer states as they were when the state was
                saved; the rule ``"not-restored"`` reports what it does not. False if they are changed on purpose.

        Raises:
            ValueError: The state is in another version, or no state of a monitor. The message names the field; nothing
                has changed.
        """
        with self.lock:
            history = recording_of(state)
            contents = contents_of(state)
            guard = None if state.get("guard") is None else self.guard
            memory = None if guard is None else state_tensor_of(guard, state["guard"], "state['guard']")
            load_rules(self.reviewer.rules.rules, state["rules"])
            # From here on nothing is refused.
            if guard is not None and memory is not None:
                guard.state.load_(memory)
            self.responder.forget()
            self.should_stop = state["should_stop"]
            self.reviewer.resume(history, state, contents if expect_restored else None)

    def __repr__(self) -> str:
        name = type(self.recorder.inner).__name__
        is_compared = self.settings.periods["replicas"] > 0 or rank_and_size()[1] == 1
        unknown = "" if is_compared else ", replicas not compared: watch={'replicas': n}"
        counts = f"{count_of(self.steps, 'step')}, {count_of(len(self.findings), 'finding')}"
        return f"Monitor({name}, {counts}{unknown})"
