"""`Schedule`: torch's anomaly mode in some steps only: at regular intervals, and for a while after a trigger."""

from __future__ import annotations

from typing import Any

import torch

from gradstat.adaptive._base import whole_number


class Schedule:
    """Switches the slow ``torch.autograd.detect_anomaly`` on in selected steps only.

    A context manager to be entered once in each step, around forward and backward. It restores the previous mode on
    exit. In anomaly mode, a backward pass that produces NaN raises RuntimeError and names the operation of the forward
    pass whose derivative it was. The mode does not detect Inf; `find_culprit` does.

    Example:
        >>> schedule = Schedule(every=1000, after_trigger=20)
        >>> for batch in loader:
        ...     with schedule:
        ...         loss = model(batch).mean()
        ...         loss.backward()
        ...     if not check(model).ok:
        ...         schedule.trigger()

    Args:
        every: Step 0 and each ``every``-th after it run in anomaly mode; None for none.
        after_trigger: Number of steps in anomaly mode after `trigger`.

    Attributes:
        active: Whether the step inside runs in anomaly mode; outside, whether the next one will.
        steps: Steps so far.
        active_steps: How many of them ran in anomaly mode.

    Raises:
        TypeError: ``every`` or ``after_trigger`` is not a whole number.
        ValueError: ``every`` or ``after_trigger`` is less than 1.
    """

    def __init__(self, every: int | None = None, after_trigger: int = 10) -> None:
        self.every = None if every is None else whole_number("every", every, 1)
        self.after_trigger = whole_number("after_trigger", after_trigger, 1)
        self.steps = self.active_steps = 0
        self._burst_ends = 0
        self._mode: Any = None
        self._inside = False

    @property
    def active(self) -> bool:
        if self._inside:
            return self._mode is not None
        return self.steps < self._burst_ends or (self.every is not None and self.steps % self.every == 0)

    def trigger(self) -> None:
        """Lets the next ``after_trigger`` steps run in anomaly mode; while such steps are left it changes nothing."""
        now = self.steps + self._inside  # a running step has begun without anomaly mode
        if now >= self._burst_ends:
            self._burst_ends = now + self.after_trigger

    def __enter__(self) -> Schedule:  # noqa: PYI034 (Self is not in Python 3.10)
        if self._inside:
            raise RuntimeError("this Schedule is already active; enter it once per step, and do not nest steps")
        if self.active:
            self._mode = torch.autograd.set_detect_anomaly(True)
            self._mode.__enter__()
            self.active_steps += 1
        self._inside = True
        return self

    def __exit__(self, *raised: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(*raised)
        self._mode = None
        self._inside = False
        self.steps += 1
