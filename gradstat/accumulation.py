"""Gradient accumulation: finds the micro-batch that made an accumulated gradient NaN or Inf."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, final

from gradstat._core.compiling import never_traced
from gradstat._core.parameters import named_parameters_of
from gradstat._core.text import count_of, lines_of, listed
from gradstat.check import PendingReport, check_async
from gradstat.report import NonFiniteGradientError, Report, nonfinite_line
from gradstat.tensor_stats import Judged

NAMED_IN_ERROR = 5
NAMED_IN_TEXT = 20
_NAMED_IN_CAUSE = 3


@final
class MicroBatches:
    """Checks gradients after every micro-batch of a step without a sync, and waits once, at the step's boundary.

    With gradient accumulation, a gradient that has become NaN or Inf stays so. A check at the end of the step therefore
    shows which parameter is not finite, but not which micro-batch caused it. ::

        micro_batches = gradstat.MicroBatches(model)
        for step in range(steps):
            for inputs, targets in next_micro_batches():
                (loss(model(inputs), targets) / accumulated).backward()
                micro_batches.check()  # one pass over the gradients, no sync
            report = micro_batches.result()  # the only wait of the step
            report.raise_if_nonfinite()  # or: if not report.ok, print(report) and skip the step
            gradstat.clip_grad_norm_(model.parameters(), 1.0)  # once, at the boundary: the accumulated gradient
            optimizer.step()
            optimizer.zero_grad()

    Between boundaries it keeps one row of numbers per parameter and micro-batch, but no gradients. It can be used as a
    context manager, which discards checks without a requested result at the end of the block. It is not thread-safe.

    Args:
        target: As for `check`. Parameters and modules may change between checks; they are matched by name.
        backend: As for `check`. Errors are those of `check`, too.
    """

    def __init__(self, target: Any, *, backend: str | None = None) -> None:
        self._target = list(target) if isinstance(target, Iterator) else target  # a generator can be used only once
        self._backend = backend
        self._pending: list[PendingReport] = []
        named_parameters_of(self._target)  # rejects a wrong target here rather than after the first backward

    def __repr__(self) -> str:
        return f"MicroBatches({len(self._pending)} checked since the last result)"

    def check(self) -> None:
        """Launches a check after a micro-batch's ``backward()``, with the errors of `check_async`."""
        self._pending.append(check_async(self._target, backend=self._backend))

    @never_traced
    def result(self) -> AccumulationReport:
        """Waits once and reports on all checks since the last boundary, which it forgets. RuntimeError without any."""
        if not self._pending:
            raise RuntimeError("no micro-batch was checked since the last result(); call check() after each backward()")
        pending = self._pending
        self.reset()
        # The last check is read first: when its numbers have arrived, those of all earlier checks have, too.
        reports = [one.result() for one in reversed(pending)]
        return AccumulationReport(reports[::-1])

    def reset(self) -> None:
        """Discards all checks since the last boundary, for a step that is abandoned."""
        self._pending = []

    def __enter__(self) -> MicroBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()


def place_in_step(micro_batch: int, count: int) -> str:
    """A micro-batch, of so many, in words."""
    return f"micro-batch {micro_batch} of {count} (counted from 0)"


class AccumulationReport(Judged):
    """The reports of one step's micro-batches, and which of them caused NaN or Inf. Micro-batches count from 0.

    Returned by `MicroBatches.result`. It describes the accumulated gradients, as they were after each micro-batch.

    Attributes:
        reports: One `Report` for each micro-batch, in order.
        micro_batches: The number of micro-batches checked.
        final: The report after the last micro-batch: on the gradients that are clipped and that the optimizer uses.
    """

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports: tuple[Report, ...] = tuple(reports)
        self.micro_batches: int = len(self.reports)
        self.final: Report = self.reports[-1]

    @property
    def ok(self) -> bool:
        """Whether every element was finite after every micro-batch. False if there was no gradient."""
        return self.final.ok and not self.nonfinite_since

    @functools.cached_property
    def nonfinite_since(self) -> dict[str, int]:
        """For each parameter whose gradient was ever not finite, the first micro-batch after which it was not.

        Ordered by micro-batch, then worst first as in `Report.nonfinite`.
        """
        first: dict[str, int] = {}
        for number, report in enumerate(self.reports):
            for stats in report.nonfinite:
                first.setdefault(stats.name, number)
        return first

    def cause(self, losses: Sequence[float]) -> str:
        """The first micro-batch whose gradients or loss were not finite, in words; ``losses`` as far as known."""
        lost = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        first = min(self.nonfinite_since.values(), default=lost[0] if lost else None)
        if first is None:
            return f"none of the {self.micro_batches} micro-batches had NaN or Inf by itself"
        words = [f"{place_in_step(first, self.micro_batches)} was the first with NaN or Inf"]
        if names := [name for name, number in self.nonfinite_since.items() if number == first]:
            words.append(f"gradients not finite from then on: {listed(names, _NAMED_IN_CAUSE)}")
        if first < len(losses):
            words.append(f"its loss was {losses[first]:g}")
        return "; ".join(words)

    def raise_if_nonfinite(self) -> None:
        """Raises `NonFiniteGradientError`, naming micro-batches and parameters, unless `ok`.

        The error's ``report`` is the one after the first micro-batch that left a gradient not finite.
        """
        if not self.nonfinite_since:
            self.final.raise_if_nonfinite()
        else:
            first = next(report for report in self.reports if not report.ok)
            raise NonFiniteGradientError("\n".join(self._summary(NAMED_IN_ERROR)), first)

    def _summary(self, limit: int) -> list[str]:
        """Which gradients became NaN or Inf in which micro-batch, in words, naming at most ``limit`` parameters."""
        nonfinite = list(self.nonfinite_since.items())
        first = place_in_step(nonfinite[0][1], self.micro_batches)
        title = f"NaN or Inf in {count_of(len(nonfinite), 'gradient')}, first in {first}:"

        def line(one: tuple[str, int]) -> str:
            name, number = one
            stats = next(stats for stats in self.reports[number].nonfinite if stats.name == name)
            return f"  micro-batch {number}:{nonfinite_line(stats)[1:]}"

        return [title, *lines_of(nonfinite, limit, line)]

    def __repr__(self) -> str:
        if since := self.nonfinite_since:
            state = f"{len(since)} not finite, first in {min(since.values())}"
        else:
            state = "ok" if self.ok else "nothing checked"
        return f"AccumulationReport({self._size()}, {state})"

    def __str__(self) -> str:
        if self.nonfinite_since:
            lines = self._summary(NAMED_IN_TEXT)
        else:
            lines = [f"{self._size()}, {'all finite after each' if self.ok else 'but no gradient'}"]
        return "\n".join([f"gradstat: {lines[0]}", *lines[1:], "after the last micro-batch:", str(self.final)])

    def _size(self) -> str:
        return count_of(self.micro_batches, "micro-batch", "es")
