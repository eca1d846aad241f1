"""Places in the user's code: from the frames that run now, and from the traceback kept with an autograd node."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__))
_GRADSTAT = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_REPLAY = os.path.join(_HERE, "rerun.py")
# Decorators and context managers of the standard library stand between the user's frames and say nothing.
_PASSED_THROUGH = ("contextlib.py", "functools.py")
_ENGINE = (os.path.join(_TORCH, "autograd", "graph.py"), "_engine_run_backward")
# What a notebook, or IPython in a terminal, calls the code of a cell.
_CELL = re.compile(r"<ipython-input-(?P<number>\d+)-|[\\/]ipykernel_\d+[\\/]\d+\.py$")
_TRACEBACK_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


class Line(NamedTuple):
    """One line of code that was running."""

    file: str
    number: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is neither torch's nor gradstat's."""
        return not self.file.startswith((_TORCH, _GRADSTAT, "<frozen")) and not self.file.endswith(_PASSED_THROUGH)

    @property
    def source(self) -> str:
        """``"path/file.py:line"``, relative to the working directory if it lies there; ``"In[5]:line"`` of a cell."""
        here = os.getcwd() + os.sep
        return f"{_cell(self.file) or self.file.removeprefix(here)}:{self.number}"

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.source} in {self.function}: {self.text}"


def _cell(file: str) -> str | None:
    """The cell of a notebook that ``file`` stands for, as the notebook numbers it; None if it is a real file."""
    match = _CELL.search(file)
    if match is None:
        return None
    if match["number"]:
        return f"In[{match['number']}]"
    # A kernel names code by a hash, and remembers in which cell it last ran.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    named = None if shell is None else shell.compile.format_code_name(file)
    return "a cell" if named is None else str(named[1])


class Place(NamedTuple):
    """Where something happened: the user's lines, outermost first. May be empty."""

    lines: tuple[Line, ...] = ()

    def fields(self) -> dict[str, Any]:
        """What a `Culprit` tells about it."""
        if not self.lines:
            return {}
        last = self.lines[-1]
        return {"source": last.source, "line": last.text, "stack": tuple(map(str, self.lines))}

    @classmethod
    def of_code(cls, code: CodeType) -> Place:
        """The first line of a function."""
        return cls((Line(code.co_filename, code.co_firstlineno, code.co_name),))


def running(frame: FrameType | None = None) -> list[Line]:
    """All lines that run now, innermost first, up to the replay, without whatever called it."""
    return list(_up_to_replay(_lines(frame if frame is not None else sys._getframe(1))))


def _lines(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _up_to_replay(lines: Iterable[Line]) -> Iterator[Line]:
    for line in lines:
        if line.file == _REPLAY:
            return
        yield line


def users(lines: Iterable[Line]) -> Place:
    """The user's lines among ``lines``, which are innermost first."""
    return Place(tuple(line for line in reversed(list(lines)) if line.is_users))


def below_engine(lines: list[Line]) -> list[Line]:
    """Those of ``lines``, innermost first, that the innermost running backward pass has called.

    All of them on the threads of the engine, on which its Python function does not run.
    """
    for i, line in enumerate(lines):
        if (line.file, line.function) == _ENGINE:
            return lines[:i]
    return lines


def is_torch(line: Line, *path: str) -> bool:
    """Whether ``line`` is in that file of torch."""
    return line.file == os.path.join(_TORCH, *path)


def of_node(node: Any) -> Place:
    """The user's lines that made an autograd node in the forward pass; kept by torch in anomaly mode.

    A node made by a backward pass (a second derivative) is followed to the node of the forward pass, unless it was a
    checkpoint that ran part of the forward pass again.
    """
    metadata = node.metadata
    lines = _traceback(metadata)
    while (parent := metadata.get("parent_")) is not None and not is_recomputation(below_engine(lines)):
        metadata = parent.metadata
        lines = _traceback(metadata)
    return users(lines)


def _traceback(metadata: dict[str, Any]) -> list[Line]:
    """The lines kept with a node, innermost first."""
    matches = [_TRACEBACK_LINE.search(entry) for entry in metadata.get("traceback_") or ()]
    lines = [Line(match["file"], int(match["line"]), match["function"]) for match in matches if match]
    return list(_up_to_replay(reversed(lines)))


def is_recomputation(lines: list[Line]) -> bool:
    """Whether a checkpoint runs part of the forward pass again; ``lines`` are those below the engine."""
    return any(is_torch(line, "utils", "checkpoint.py") for line in lines)


def is_machinery(line: Line) -> bool:
    """Whether ``line`` only carries a call from torch's dispatcher to this package."""
    return line.file.startswith((_GRADSTAT, _TORCH + "_dynamo", _TORCH + "_compile.py"))
