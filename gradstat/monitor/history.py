"""The history of a run that a monitor keeps on the host: the last steps, in compact form."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstat.monitor.recording.recording import Recording, Series
from gradstat.monitor.rows import Floats, Rows, Window

# Up to this many bytes, rows are kept unconverted: most are dropped before anyone asks for a series.
_MAX_RAW_BYTES = 16 * 2**20


class History:
    """The last steps of a run, no more than ``length`` and roughly ``max_bytes``, and the newest row of each kind."""

    def __init__(self, length: int, max_bytes: int) -> None:
        self._length = length
        self._max_bytes = max_bytes
        self._chunks: dict[str, deque[Any]] = {}  # `Series`, or `Rows` to be converted when needed
        self._scalars: deque[tuple[npt.NDArray[np.int64], Mapping[str, Floats]]] = deque()
        self._bytes = 0  # bytes of the chunks
        self.latest: dict[str, Rows] = {}

    def keep(self, window: Window) -> None:
        """Appends the new steps in ``window``."""
        for kind, rows in window.tables.items():
            self.latest[kind] = Rows(rows.layout, rows.steps[-1:], rows.raw[-1:].copy())
            if self._length:
                is_small = self._bytes + rows.raw.nbytes <= _MAX_RAW_BYTES
                chunk = Rows(rows.layout, rows.steps, rows.raw.copy("K"), rows.layouts) if is_small else rows.series()
                self._chunks.setdefault(kind, deque()).append(chunk)
                self._bytes += _bytes_of(chunk)
        if self._length and len(window.steps):  # empty if a batch was reviewed before the first step
            self._scalars.append((window.steps, window.scalars))
            self._forget()

    def _forget(self) -> None:
        newest = int(self._scalars[-1][0][-1])
        if self._bytes > self._max_bytes:
            self._condense()
        while self._scalars and (
            newest - int(self._scalars[0][0][-1]) >= self._length
            or (self._bytes > self._max_bytes and len(self._scalars) > 1)
        ):
            last = int(self._scalars.popleft()[0][-1])
            for chunks in self._chunks.values():
                while chunks and int(chunks[0].steps[-1]) <= last:
                    self._bytes -= _bytes_of(chunks.popleft())

    def _condense(self) -> None:
        """Converts all kept rows to series."""
        for kind, chunks in self._chunks.items():
            self._chunks[kind] = deque(chunk.series() if isinstance(chunk, Rows) else chunk for chunk in chunks)
        self._bytes = sum(_bytes_of(chunk) for chunks in self._chunks.values() for chunk in chunks)

    def recording(self) -> Recording:
        """Everything that is kept, without findings."""
        steps = np.concatenate([s for s, _ in self._scalars]) if self._scalars else np.empty(0, np.int64)
        first = max(0, int(steps[-1]) - self._length + 1) if len(steps) else 0
        kept = steps >= first
        names = dict.fromkeys(name for _, held in self._scalars for name in held)
        scalars = {
            name: np.concatenate([held.get(name, np.full(len(s), math.nan)) for s, held in self._scalars])[kept]
            for name in names
        }
        self._condense()
        joined = {kind: _joined(chunks, first) for kind, chunks in self._chunks.items() if chunks}
        tables = {kind: series for kind, series in joined.items() if len(series.steps)}
        return Recording(steps[kept], scalars, tables)

    def load(self, recording: Recording) -> None:
        """Replaces what is kept by the history of another run."""
        self._chunks, self._scalars, self._bytes, self.latest = {}, deque(), 0, {}
        if len(recording.steps):
            self._scalars.append((recording.steps, dict(recording.scalars)))
        for kind, series in recording.tables.items():
            if len(series.steps):
                self._chunks[kind] = deque([series])
                self._bytes += _bytes_of(series)


def _bytes_of(chunk: Series | Rows) -> int:
    return chunk.raw.nbytes if isinstance(chunk, Rows) else chunk.values.nbytes


def _joined(chunks: deque[Series], first: int) -> Series:
    """Joins ``chunks`` from step ``first`` on; every tensor that is in any of them gets a column."""
    layouts = dict.fromkeys(chunk.names for chunk in reversed(chunks))
    names = tuple(dict.fromkeys(itertools.chain.from_iterable(layouts)))
    column = {name: i for i, name in enumerate(names)}
    numel = np.zeros(len(names), dtype=np.int64)
    steps = np.concatenate([chunk.steps for chunk in chunks])
    values = np.full((len(steps), len(names), chunks[0].values.shape[2]), math.nan, dtype=np.float32)
    row = 0
    for chunk in chunks:
        at = np.array([column[name] for name in chunk.names], dtype=np.int64)
        values[row : row + len(chunk.steps), at] = chunk.values
        seen = chunk.numel > 0
        numel[at[seen]] = chunk.numel[seen]
        row += len(chunk.steps)
    kept = steps >= first
    return Series(names, numel, steps[kept], values[kept])
