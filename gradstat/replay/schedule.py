"""`Schedule`: torch's anomaly mode in some steps only: at regular intervals, and for a while after a trigger."""

from __future__ import annotations

import sys
from typing import Any

import torch

from gradstat.adaptive._base import number, whole_number


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

    Attributes:
        active: Whether the step inside runs in anomaly mode; outside, whether the next one will.
        steps: Steps so far.
        active_steps: How many of them ran in anomaly mode.
        triggers: How often `trigger` was called.
        catches: How many steps in anomaly mode raised.
    """

    def __init__(
        self, every: int | None = None, after_trigger: int = 10, backoff: float = 2.0, *, check_nan: bool = True
    ) -> None:
        """Makes a schedule that starts at step 0.

        Args:
            every: Step 0 and each ``every``-th after it run in anomaly mode; None for none.
            after_trigger: Number of steps in anomaly mode after `trigger`.
            backoff: A burst that caught nothing is followed by a pause, in which `trigger` does nothing: first as
                long as the burst, then longer by this factor each time, until there was no trigger for that long. 1
                keeps the pause constant.
            check_nan: Whether the mode raises on NaN, like torch's argument of that name.

        Raises:
            TypeError: ``every`` or ``after_trigger`` is not a whole number, or ``backoff`` not a number.
            ValueError: ``every`` or ``after_trigger`` is less than 1, or ``backoff`` less than 1 or not finite.
        """
        self.every: int | None = None if every is None else whole_number("every", every, 1)
        self.after_trigger: int = whole_number("after_trigger", after_trigger, 1)
        self.backoff: float = number("backoff", backoff, 1.0, sys.float_info.max)
        self.check_nan = check_nan
        self.steps: int = 0
        self.active_steps: int = 0
        self.triggers: int = 0
        self.catches: int = 0
        self._burst_ends = 0
        self._pause_ends = 0
        self._pause: float = after_trigger
        self._mode: Any = None
        self._inside = False

    @property
    def active(self) -> bool:
        if self._inside:
            return self._mode is not None
        return self.steps < self._burst_ends or (self.every is not None and self.steps % self.every == 0)

    def trigger(self) -> bool:
        """Starts a burst: the next ``after_trigger`` steps run in anomaly mode. During a burst it changes nothing.

        Returns:
            Whether these steps run in anomaly mode: False in the pause after a burst that caught nothing.
        """
        self.triggers += 1
        now = self.steps + self._inside  # a running step has begun without anomaly mode
        if now < self._burst_ends:
            return True
        if now < self._pause_ends:
            return False
        if now - self._pause_ends > self._pause:  # after a long quiet time it is another fault
            self._pause = self.after_trigger
        self._burst_ends = now + self.after_trigger
        self._pause_ends = self._burst_ends + round(self._pause)  # unless the burst catches something
        self._pause *= self.backoff
        return True

    def reset(self) -> None:
        """Ends the burst or pause, and resets the length of pauses. Counts are kept."""
        self._burst_ends = self._pause_ends = 0
        self._pause = self.after_trigger

    def __enter__(self) -> Schedule:  # noqa: PYI034 (Self is not in Python 3.10)
        if self._inside:
            raise RuntimeError("this Schedule is already active; enter it once per step, and do not nest steps")
        if self.active:
            self._mode = torch.autograd.set_detect_anomaly(True, self.check_nan)
            self._mode.__enter__()
            self.active_steps += 1
        self._inside = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, *rest)
            if kind is not None and issubclass(kind, Exception):
                self.catches += 1
                self.reset()
        self._mode = None
        self._inside = False
        self.steps += 1
