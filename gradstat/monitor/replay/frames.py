"""Places in the user's code: from the frames that run now, and from the traceback kept with an autograd node."""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable
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
        return f"{_cell(self.file) or self.file.removeprefix(os.getcwd() + os.sep)}:{self.number}"

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


def told(lines: list[Line]) -> dict[str, Any]:
    """What a `Culprit` tells of the place that ``lines``, innermost first, lead to."""
    if not lines:
        return {}
    return {"source": lines[0].source, "line": lines[0].text, "stack": tuple(map(str, reversed(lines)))}


def running() -> list[Line]:
    """All lines that run now, innermost first, up to the replay, without whatever called it."""
    frames = traceback.walk_stack(sys._getframe(1))
    return _up_to_replay(Line(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in frames)


def _up_to_replay(lines: Iterable[Line]) -> list[Line]:
    return list(itertools.takewhile(lambda line: line.file != _REPLAY, lines))


def users(lines: list[Line]) -> dict[str, Any]:
    """What a `Culprit` tells of the user's lines among ``lines``."""
    return told([line for line in lines if line.is_users])


def below_engine(lines: list[Line]) -> list[Line]:
    """Those that the innermost running backward pass has called; all of them on the threads of the engine."""
    return list(itertools.takewhile(lambda line: (line.file, line.function) != _ENGINE, lines))


def is_torch(line: Line, *path: str) -> bool:
    """Whether ``line`` is in that file of torch."""
    return line.file == os.path.join(_TORCH, *path)


def of_node(node: Any) -> dict[str, Any]:
    """What a `Culprit` tells of the user's lines that made an autograd node; torch keeps them in anomaly mode.

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
    return _up_to_replay(reversed(lines))


def is_recomputation(lines: list[Line]) -> bool:
    """Whether a checkpoint runs part of the forward pass again; ``lines`` are those below the engine."""
    return any(is_torch(line, "utils", "checkpoint.py") for line in lines)


def is_machinery(line: Line) -> bool:
    """Whether ``line`` only carries a call from torch's dispatcher to this package."""
    return line.file.startswith((_GRADSTAT, _TORCH + "_dynamo", _TORCH + "_compile.py"))
