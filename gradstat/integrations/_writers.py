"""Files of scalars, for users without a logger: JSON lines and CSV, safe to append to."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import weakref
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradstat._core.text import printable

if TYPE_CHECKING:
    from typing_extensions import Self


class _Lines:
    """A text file to which whole lines are appended, one write each.

    A line that a crash or a full disk has cut short is ended before the next one, so only that line is lost.
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

    def _put(self, line: str) -> None:
        data = b"\n" * self._is_broken + line.encode()
        written = self._file.write(data)
        self._is_broken = written < len(data) if written else self._is_broken
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, float]:
        """``values`` as numbers of Python. Raises TypeError or ValueError."""
        for name, value in values.items():
            if not isinstance(value, Real):
                raise TypeError(
                    f"values[{name!r}] is a {type(value).__name__}; expected a number, such as float(value)"
                )
        if "step" in values:
            raise ValueError(f"values has the name 'step', under which {self.path} has the argument step; rename it")
        return {name: value if isinstance(value, int) else float(value) for name, value in values.items()}

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonlWriter(_Lines):
    """Appends one JSON object for each step to a file. NaN and infinities, which JSON lacks, become null.

    Args:
        path: The file. It is created with its folders if it does not exist, and appended to otherwise.
    """

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Appends the line ``{"step": step, ...}`` for ``values``, floats by name, in one system call.

        Raises:
            TypeError, ValueError: A value is no number, or its name is ``step``; nothing is written.
        """
        numbers = self._numbers(values).items()
        line = {"step": int(step), **{name: value if math.isfinite(value) else None for name, value in numbers}}
        self._put(json.dumps(line, allow_nan=False) + "\n")


class CsvWriter(_Lines):
    """Appends one row for each step to a CSV file. Columns are the step and the names in the first row ever written.

    Args:
        path: The file. If it exists, its header is kept and rows are appended.

    Raises:
        ValueError: The file exists and its first column is not ``step``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._columns: list[str] | None = None
        target = Path(path)
        if target.exists() and _is_cut_header(target):
            os.truncate(target, 0)
        if target.exists() and target.stat().st_size:
            with target.open(encoding="utf-8", newline="") as file:
                header = next(csv.reader(file), [])
            if header[:1] != ["step"]:
                raise ValueError(
                    f"{target} is not a table of scalars by step: its first column is {header[:1]}, expected 'step'. "
                    "Choose another file, or move this one"
                )
            self._columns = header[1:]
        super().__init__(target)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Appends a row of ``values`` at ``step``, floats by name; cells of columns without a value stay empty.

        Raises:
            TypeError, ValueError: A value is no number, or its name is ``step`` or has no column; nothing is written.
        """
        values = {printable(name): value for name, value in self._numbers(values).items()}
        if self._columns is None:
            self._put(_row(["step", *values]))
            self._columns = list(values)
        new = [name for name in values if name not in self._columns]
        if new:
            raise ValueError(
                f"{self.path} has no column for {new[0]!r} (and {len(new) - 1} more); a CSV file keeps the columns of "
                "its first row. Log the same names on every step (per_tensor with top=None), or use JsonlWriter"
            )
        self._put(_row([int(step), *(values.get(name, "") for name in self._columns)]))


def _is_cut_header(path: Path) -> bool:
    """Whether a file holds nothing but an incomplete header of this class, as a full disk leaves it."""
    with path.open("rb") as file:
        first = file.readline()
    return not first.endswith(b"\n") and first[:5] == b"step,"[: len(first)]


def _row(cells: list[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
