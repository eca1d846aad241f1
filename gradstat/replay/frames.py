"""Locations in the user's code: from the running frames, and from the traceback kept with an autograd node."""

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
_GRADSTAT = os.path.dirname(_HERE) + os.sep
_REPLAY = os.path.join(_HERE, "rerun.py")
# Frames of decorators and context managers of the standard library are left out.
_PASSED_THROUGH = ("contextlib.py", "functools.py")
_ENGINE = (os.path.join(_TORCH, "autograd", "graph.py"), "_engine_run_backward")
# File names of cells in a notebook, or in IPython in a terminal.
_CELL = re.compile(r"<ipython-input-(?P<number>\d+)-|[\\/]ipykernel_\d+[\\/]\d+\.py$")
_TRACEBACK_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


class Line(NamedTuple):
    file: str
    number: int
    function: str

    @property
    def is_user_code(self) -> bool:
        """Whether it is neither torch's nor gradstat's."""
        return not self.file.startswith((_TORCH, _GRADSTAT, "<frozen")) and not self.file.endswith(_PASSED_THROUGH)

    @property
    def source(self) -> str:
        """``"path/file.py:line"``, relative to the working directory if inside it; ``"In[5]:line"`` for a cell."""
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


def culprit_fields(lines: list[Line]) -> dict[str, Any]:
    """The `Culprit` fields of the location at ``lines``, innermost first."""
    if not lines:
        return {}
    return {"source": lines[0].source, "line": lines[0].text, "stack": tuple(map(str, reversed(lines)))}


def running_lines() -> list[Line]:
    """The lines of all running frames, innermost first, up to the replay and without its callers."""
    frames = traceback.walk_stack(sys._getframe(1))
    return _up_to_replay(Line(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in frames)


def _up_to_replay(lines: Iterable[Line]) -> list[Line]:
    return list(itertools.takewhile(lambda line: line.file != _REPLAY, lines))


def user_fields(lines: list[Line]) -> dict[str, Any]:
    """The `Culprit` fields of the user's lines among ``lines``."""
    return culprit_fields([line for line in lines if line.is_user_code])


def below_engine(lines: list[Line]) -> list[Line]:
    """The lines called by the innermost running backward pass; on the engine's threads, all of them."""
    return list(itertools.takewhile(lambda line: (line.file, line.function) != _ENGINE, lines))


def is_torch(line: Line, *path: str) -> bool:
    """Whether ``line`` is in the file ``path`` of torch."""
    return line.file == os.path.join(_TORCH, *path)


def node_fields(node: Any) -> dict[str, Any]:
    """The `Culprit` fields of the user's lines that created an autograd node; torch keeps them in anomaly mode.

    A node created by a backward pass (for a second derivative) is followed to the node of the forward pass, unless a
    checkpoint created it while it ran part of the forward pass again.
    """
    metadata = node.metadata
    lines = _traceback(metadata)
    while (parent := metadata.get("parent_")) is not None and not is_recomputation(below_engine(lines)):
        metadata = parent.metadata
        lines = _traceback(metadata)
    return user_fields(lines)


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
