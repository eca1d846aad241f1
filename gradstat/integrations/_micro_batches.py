"""Which micro-batch of an accumulated step brought what a monitor found."""

from __future__ import annotations

import math
from collections import deque

from torch import Tensor, nn

from gradstat.accumulation import AccumulationReport, MicroBatches

_NAMED = 3


class MicroBatchHistory:
    """Checks of the micro-batches of the newest steps, asked for only if something was found in one.

    Args:
        model: Whose gradients are checked after each micro-batch.
        keep: For how many steps; the numbers of a step are read so much later.
        backend: As in `gradstat.check`.
    """

    def __init__(self, model: nn.Module, keep: int, backend: str | None) -> None:
        self._steps: deque[tuple[int, MicroBatches, list[Tensor]]] = deque(maxlen=keep)
        self._model, self._backend = model, backend
        self._current: MicroBatches | None = None

    def check(self) -> None:
        """To be called after a micro-batch's backward pass: one read of the gradients, no sync."""
        if self._current is None:
            self._current = MicroBatches(self._model, backend=self._backend)
        self._current.check()

    def forget(self) -> None:
        """Gives up what was checked since the last step."""
        self._current = None

    def end_step(self, number: int, losses: list[Tensor]) -> None:
        """Says that the micro-batches since the last call were step ``number``, with these losses."""
        if self._current is not None:
            self._steps.append((number, self._current, losses))
            self._current = None

    def of(self, number: int) -> tuple[str, AccumulationReport] | None:
        """Which micro-batch of a step was bad first, in words, and all reports; None if that is not known. Waits."""
        known = next((step for step in self._steps if step[0] == number), None)
        if known is None:
            return None
        self._steps.remove(known)
        report, losses = known[1].result(), known[2]
        return _in_words(number, report, [float(loss) for loss in losses]), report


def _in_words(number: int, report: AccumulationReport, losses: list[float]) -> str:
    total = report.micro_batches
    bad_losses = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
    if report.ok and not bad_losses:
        return f"step {number}: no single micro-batch of {total} was bad"
    if report.ok:
        first, names = bad_losses[0], []
    else:
        first = min(report.first_bad.values())
        names = [name for name, when in report.first_bad.items() if when == first]
    words = [f"step {number}: micro-batch {first} of {total} (counted from 0) brought it"]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        words.append(f"gradients not finite from then on: {', '.join(names[:_NAMED])}{more}")
    if first < len(losses):
        words.append(f"its loss was {losses[first]:g}")
    return "; ".join(words)
