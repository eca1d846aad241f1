"""A file of scalars, for users without a logger: JSON lines, safe to append to."""

from __future__ import annotations

import errno
import json
import math
import os
import weakref
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class JsonlWriter:
    """Appends one JSON object for each step to a file. NaN and infinities, which JSON lacks, become null.

    A line that a crash or a full disk has cut short is ended before the next one, so only that line is lost.

    Args:
        path: The file. It is created with its folders if it does not exist, and appended to otherwise.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        # Unbuffered, so each line is one system call, and lines of several writers do not mix.
        self._file = self.path.open("ab", buffering=0)
        self._is_broken = False  # whether the last line was cut short
        self._close = weakref.finalize(self, self._file.close)  # closes the file if nobody else does

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Appends the line ``{"step": step, ...}`` for ``values``, floats by name, in one system call.

        Raises:
            TypeError, ValueError: A value is no number, or its name is ``step``; nothing is written.
        """
        line: dict[str, float | None] = {"step": int(step)}
        for name, value in values.items():
            if not isinstance(value, Real):
                raise TypeError(
                    f"values[{name!r}] is a {type(value).__name__}; expected a number, such as float(value)"
                )
            if name == "step":
                raise ValueError(
                    f"values has the name 'step', under which {self.path} has the argument step; rename it"
                )
            number = value if isinstance(value, int) else float(value)
            line[name] = number if math.isfinite(number) else None
        data = b"\n" * self._is_broken + json.dumps(line, allow_nan=False).encode() + b"\n"
        written = self._file.write(data)
        self._is_broken = written < len(data) if written else self._is_broken
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
