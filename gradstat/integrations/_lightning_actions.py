"""What the Lightning callback does about findings: replay, checkpoint, stop, raise; on every rank alike."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradstat.integrations._agreement import Agreement
from gradstat.integrations._policies import Noted
from gradstat.monitor import AnomalyError, AnomalyWarning, Finding, Monitor

# In so many steps after a replay there is no other.
_QUIET = 20


class Actions:
    """Does what monitors have taken note of.

    Args:
        save_dir: Where checkpoints go; None for the trainer's folder of them.

    Attributes:
        noted: What is to be done; monitors add to it.
        checkpoints: Files that were saved.
    """

    def __init__(self, save_dir: str | Path | None) -> None:
        self._save_dir = save_dir
        self._agreement: Agreement | None = None
        self._last_replay = -_QUIET
        self.noted: list[Noted] = []
        self.checkpoints: list[Path] = []

    def begin(self, world_size: int) -> None:
        """A training begins, on all ranks together."""
        self._agreement, self._last_replay = Agreement(world_size), -_QUIET
        self.noted.clear()

    def end(self) -> None:
        """It has ended, on all ranks together; may be called twice."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    def take(self, trainer: Any, monitors: Sequence[Monitor], monitor: Monitor | None) -> None:
        """Does what was noted, on every rank what any of them wants; an error comes last.

        Args:
            trainer: Lightning's.
            monitors: All there are.
            monitor: The one whose step this is; None between steps, when nothing can be replayed.

        Raises:
            AnomalyError: That is what the policy of a finding says, on some rank.
        """
        noted = list(self.noted)
        self.noted.clear()
        wants = {policy: [one for one in noted if one.policy == policy] for policy in ("replay", "checkpoint", "raise")}
        ballot = [*(bool(some) for some in wants.values()), any(one.should_stop for one in monitors)]
        replays, saves, raises, stops = ballot if self._agreement is None else self._agreement.any_of(ballot)
        if replays and monitor is not None:
            self._replay(monitor)
        if saves:
            self._save_checkpoint(trainer)
        if stops:
            trainer.should_stop = True
        if raises:
            own = [one.finding for one in wants["raise"]]
            culprit = None if monitor is None else monitor.culprit
            text = _in_words(own[0]) if own else "gradstat: another rank found an anomaly; its message tells which"
            raise AnomalyError(text if culprit is None else f"{text}\n{culprit}", own[0] if own else None)

    def _replay(self, monitor: Monitor) -> None:
        step = monitor.steps - 1
        if step - self._last_replay < _QUIET:
            return
        self._last_replay = step
        try:
            culprit = monitor.replay()
            text = str(culprit) if culprit is not None else "the replay was clean on this rank"
        except Exception as error:  # watching must not end what is watched
            text = f"the replay failed: {type(error).__name__}: {error}"
        warnings.warn(f"gradstat: step {step}: {text}", AnomalyWarning, stacklevel=2)

    def _save_checkpoint(self, trainer: Any) -> None:
        folder = self._save_dir or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(folder) / f"gradstat-step{trainer.global_step}.ckpt"
        if path not in self.checkpoints:
            self.checkpoints.append(path)
            trainer.save_checkpoint(path)


def _in_words(finding: Finding) -> str:
    lines = [str(finding)]
    for title, words in (("likely causes", finding.causes), ("what to try", finding.advice)):
        lines += [f"{title}:", *(f"  - {word}" for word in words)] if words else []
    return "\n".join(lines)
