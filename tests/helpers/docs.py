"""The code on the pages of the documentation, and how it is run: from top to bottom, as a reader would.

The Python blocks of a page share a namespace and a working directory, both empty at first. In `sh` blocks, lines with
``python -m gradstat ...`` are run as well. Comments in the source of a page, which readers do not see, give
exceptions:

    <!-- run: model = ... -->                      runs code that later blocks depend on, or that cleans up
    <!-- file: train.py -->                        the next block is a file of that name, and is run as a script
    <!-- raises: RuntimeError: total norm -->      the next block ends with that error
    <!-- warns: UserWarning: is slow -->           the next block gives that warning
    <!-- prints -->                                the next block, of text, is the output of the last code; a line ...
                                                   stands for any text
    <!-- ranks: 2 -->                              the next block runs on that number of ranks
    <!-- not run: needs a GPU -->                  the next block is not run here, for that reason
"""

import contextlib
import io
import re
import runpy
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradstat.__main__ import main
from gradstat.monitor import AnomalyWarning

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
LANGUAGES = {"python", "sh", "text"}
MARKS = {"run", "file", "raises", "warns", "prints", "ranks", "not run"}

_PIECE = re.compile(
    r"^<!-- (?P<mark>[a-z ]+?)(?::\s(?P<words>.*?))? ?-->$"
    r"|^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_COMMAND = re.compile(r"(?:\$ )?python -m gradstat (.*)")


@dataclass
class Block:
    """A block of code or text on a page, or ``"python"`` code of a comment. ``marks``: the comments before it."""

    page: Path
    line: int  # of its first line on the page
    language: str
    code: str
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of the gradstat commands in a `sh` block."""
        lines = self.code.splitlines()
        return [shlex.split(match[1], comments=True) for line in lines if (match := _COMMAND.match(line))]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page in order, including code in comments, without directives of the site generator."""
    text = page.read_text()
    marks: dict[str, str] = {}
    for piece in _PIECE.finditer(text):
        line = text.count("\n", 0, piece.start()) + 1
        if (mark := piece["mark"]) is not None:
            if mark == "run":
                yield Block(page, line, "python", piece["words"] + "\n", marks)
                marks = {}
            elif mark in MARKS:
                marks[mark] = piece["words"] or ""
        elif not piece["language"].startswith("{"):
            yield Block(page, line + 1, piece["language"], piece["code"], marks)
            marks = {}
    assert not marks, f"{page}: no block follows the comments {marks}"


def run(blocks: list[Block]) -> None:
    """Runs blocks of one page in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks:
        if "prints" in block.marks:
            assert _is_told(block.code, printed), f"{block} does not match what was printed:\n{printed}"
        elif block.language in ("python", "sh"):
            try:
                printed = _run(block, names)
            except BaseException as error:
                if hasattr(error, "add_note"):  # Python 3.11 and later
                    error.add_note(f"in the block at {block}")
                raise


def _run(block: Block, names: dict[str, Any]) -> str:
    """Runs a block and returns its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(record="warns" in block.marks) as caught:
        # Pages demonstrate the warnings of monitors. All other warnings are errors, as in all tests.
        warnings.simplefilter("ignore", AnomalyWarning)
        if "warns" in block.marks:
            warnings.simplefilter("always")
        if block.language == "sh":
            for command in block.commands:
                _command(command)
        else:
            _python(block, names)
    if "warns" in block.marks:
        told = [f"{warning.category.__name__}: {warning.message}" for warning in caught or []]
        assert any(_has(text, block.marks["warns"]) for text in told), f"{block} warned of {told}"
    return out.getvalue()


def _python(block: Block, names: dict[str, Any]) -> None:
    try:
        if "file" in block.marks:
            Path(block.marks["file"]).write_text(block.code)
            names.update(runpy.run_path(block.marks["file"], run_name="__main__"))
        else:
            # Line numbers are those on the page, for tracebacks.
            exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if "raises" not in block.marks or not _has(text, block.marks["raises"]):
            raise
    else:
        assert "raises" not in block.marks, f"{block} does not raise {block.marks['raises']}"


def _command(arguments: list[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:  # raised by --help
        status = int(end.code or 0)
    assert status in (0, 1), f"python -m gradstat {shlex.join(arguments)} exits with {status}"


def _has(text: str, part: str) -> bool:
    """Whether ``part`` is in ``text``, ignoring line breaks."""
    return " ".join(part.split()) in " ".join(text.split())


def _is_told(told: str, printed: str) -> bool:
    """Whether ``printed`` matches the output shown on a page, in which ``...`` lines stand for any text."""
    parts = [re.escape(_rounded(part)) for part in re.split(r"^\.\.\.$", told, flags=re.MULTILINE)]
    return re.fullmatch(".*".join(parts), _rounded(printed)) is not None


def _rounded(text: str) -> str:
    """Replaces what may differ between machines: decimal numbers, and the width of columns."""
    return " ".join(re.sub(r"-?\d+\.\d+(e[-+]?\d+)?", "<number>", text).split())
