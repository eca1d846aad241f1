"""What a monitor remembers of a run on the host: the last steps, compactly."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradstat.monitor.recording.recording import Recording, Series
from gradstat.monitor.rows import KEPT, Floats, Layout, Rows, expanded


class _Chunk(NamedTuple):
    """Compact rows of some steps, ``[len(KEPT), m, n]``."""

    layout: Layout
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class History:
    """The last steps of a run.

    Args:
        length: How many steps are kept.
        max_bytes: Of all kinds of tensors together, roughly; fewer steps are kept if need be.

    Attributes:
        latest: The newest rows of each kind, of one step.
    """

    def __init__(self, length: int, max_bytes: int) -> None:
        self._length = length
        self._max_bytes = max_bytes
        self._chunks: dict[str, deque[_Chunk]] = {}
        self._scalars: deque[tuple[npt.NDArray[np.int64], dict[str, Floats]]] = deque()
        self.latest: dict[str, Rows] = {}

    def keep(self, steps: npt.NDArray[np.int64], scalars: dict[str, Floats], tables: Mapping[str, Rows]) -> None:
        """Takes up new steps."""
        for kind, rows in tables.items():
            self.latest[kind] = Rows(rows.layout, rows.steps[-1:], rows.raw[-1:].copy())
            if self._length:
                self._chunks.setdefault(kind, deque()).append(_Chunk(rows.layout, rows.steps, rows.compact()))
        if self._length and len(steps):  # none if a batch was reviewed before the first step
            self._scalars.append((steps, scalars))
            self._forget()

    def _forget(self) -> None:
        newest = int(self._scalars[-1][0][-1])
        held = sum(chunk.values.nbytes for chunks in self._chunks.values() for chunk in chunks)
        while self._scalars and (
            newest - int(self._scalars[0][0][-1]) >= self._length or (held > self._max_bytes and len(self._scalars) > 1)
        ):
            last = int(self._scalars.popleft()[0][-1])
            for chunks in self._chunks.values():
                while chunks and int(chunks[0].steps[-1]) <= last:
                    held -= chunks.popleft().values.nbytes

    def recording(self) -> Recording:
        """All that is kept, without findings."""
        first = 0
        if self._scalars:
            first = max(0, int(self._scalars[-1][0][-1]) - self._length + 1)
        steps = np.concatenate([s for s, _ in self._scalars]) if self._scalars else np.empty(0, np.int64)
        names = list(dict.fromkeys(name for _, scalars in self._scalars for name in scalars))
        scalars = {
            name: np.concatenate([held.get(name, np.full(len(s), math.nan)) for s, held in self._scalars])
            for name in names
        }
        kept = steps >= first
        joined = {kind: _joined(chunks, first) for kind, chunks in self._chunks.items() if chunks}
        tables = {kind: series for kind, series in joined.items() if len(series.steps)}
        return Recording(steps[kept], {name: values[kept] for name, values in scalars.items()}, tables)

    def load(self, recording: Recording) -> None:
        """Replaces what is kept by the history of another run."""
        self._chunks, self._scalars, self.latest = {}, deque(), {}
        if len(recording.steps):
            self._scalars.append((recording.steps, dict(recording.scalars)))
        for kind, series in recording.tables.items():
            if not len(series.steps):
                continue
            unknown = Layout.of(series.names, [None] * len(series.names))
            layout = unknown._replace(numel=series.numel, values=series.numel.astype(np.float64))
            kept = np.stack([series.column(name) for name in KEPT])
            self._chunks[kind] = deque([_Chunk(layout, series.steps, kept)])


def _joined(chunks: deque[_Chunk], first: int) -> Series:
    """Chunks put one behind the other; tensors that came later get columns of their own."""
    names = chunks[-1].layout.names
    if any(chunk.layout.names is not names and chunk.layout.names != names for chunk in chunks):
        names = tuple(dict.fromkeys(name for chunk in reversed(chunks) for name in chunk.layout.names))
    column = {name: i for i, name in enumerate(names)}
    numel = np.zeros(len(names), dtype=np.int64)
    steps = np.concatenate([chunk.steps for chunk in chunks])
    values = np.full((len(KEPT), len(steps), len(names)), math.nan, dtype=np.float32)
    row = 0
    for chunk in chunks:
        at = [column[name] for name in chunk.layout.names]
        values[:, row : row + len(chunk.steps), at] = chunk.values
        seen = chunk.layout.numel > 0
        numel[np.array(at, dtype=np.int64)[seen]] = chunk.layout.numel[seen]
        row += len(chunk.steps)
    kept = steps >= first
    return Series(names, numel, steps[kept], expanded(values[:, kept], numel))


def as_state(recording: Recording) -> dict[str, Any]:
    """A recording as tensors and plain values, for a ``state_dict``."""
    import torch

    return {
        "steps": torch.from_numpy(recording.steps.copy()),
        "scalars": {name: torch.from_numpy(values.copy()) for name, values in recording.scalars.items()},
        "tables": {
            kind: {
                "names": list(series.names),
                "numel": torch.from_numpy(series.numel.copy()),
                "steps": torch.from_numpy(series.steps.copy()),
                "values": torch.from_numpy(series.values.copy()),
            }
            for kind, series in recording.tables.items()
        },
    }


def from_state(state: Mapping[str, Any]) -> Recording:
    """The inverse of `as_state`."""
    return Recording(
        state["steps"].cpu().numpy(),
        {name: values.cpu().numpy() for name, values in state["scalars"].items()},
        {
            kind: Series(
                tuple(table["names"]), table["numel"].cpu().numpy(), table["steps"].cpu().numpy(),
                table["values"].cpu().numpy(),
            )
            for kind, table in state["tables"].items()
        },
    )  # fmt: skip
