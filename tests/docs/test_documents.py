"""What the documents claim: figures come from rows, every block of code runs, links lead somewhere.

The Python blocks of a page share a namespace and a working directory, both empty at first. In `sh` blocks, lines with
``python -m gradstat ...`` are run as well. Comments in the source of a page, which readers do not see, give
exceptions:

    <!-- run: model = ... -->                      runs code that later blocks depend on, or that cleans up
    <!-- file: train.py -->                        the next block is a file of that name, and is run as a script
    <!-- raises: RuntimeError: total norm -->      the next block ends with that error
    <!-- prints -->                                the next block, of text, is the output of the last code; a line ...
                                                   stands for any text
    <!-- ranks: 2 -->                              the next block runs on that number of ranks
    <!-- not run: needs a GPU -->                  the next block is not run here, for that reason
"""

import ast
import contextlib
import io
import json
import linecache
import re
import runpy
import shlex
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import render
import torch
from helpers.frameworks import OF_FRAMEWORKS
from helpers.ranks import Ranks

from gradstat.__main__ import main
from gradstat.monitor import AnomalyWarning

pytestmark = OF_FRAMEWORKS
ROOT = Path(__file__).resolve().parents[2]
ABOVE = (ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"))
PAGES = sorted([*ABOVE, *(ROOT / "docs").rglob("*.md")])
QUICK_START = ROOT / "docs" / "quickstart.md"
LANGUAGES = {"python", "sh", "text"}
MARKS = {"run", "file", "raises", "prints", "ranks", "not run"}

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
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        # Pages demonstrate the warnings of monitors, and torch's slow mode. All others are errors, as in all tests.
        warnings.simplefilter("ignore", AnomalyWarning)
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        if block.language == "sh":
            for command in block.commands:
                _command(command)
        else:
            _python(block, names)
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
        if "raises" not in block.marks or " ".join(block.marks["raises"].split()) not in " ".join(text.split()):
            raise
    else:
        assert "raises" not in block.marks, f"{block} does not raise {block.marks['raises']}"


def _command(arguments: list[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:  # raised by --help
        status = int(end.code or 0)
    assert status in (0, 1), f"python -m gradstat {shlex.join(arguments)} exits with {status}"


def _is_told(told: str, printed: str) -> bool:
    """Whether ``printed`` matches the output shown on a page, in which ``...`` lines stand for any text."""
    parts = [re.escape(_rounded(part)) for part in re.split(r"^\.\.\.$", told, flags=re.MULTILINE)]
    return re.fullmatch(".*".join(parts), _rounded(printed)) is not None


def _rounded(text: str) -> str:
    """Replaces what may differ between machines: decimal numbers, and the width of columns."""
    return " ".join(re.sub(r"-?\d+\.\d+(e[-+]?\d+)?", "<number>", text).split())


BLOCKS = {page: list(blocks_of(page)) for page in PAGES}
# Blocks that no test runs, by page, with the reason that the page's source gives.
NOT_RUN = {
    "CONTRIBUTING.md": ["they are what sets up the tests"],
    "README.md": [
        "changes the environment; tests/life/test_packaging.py installs what it builds",
        "changes the environment",
    ],
    "docs/quickstart.md": ["changes the environment"],
    "docs/integrations.md": ["needs Megatron-LM", "needs ms-swift", "needs verl"],
}


def test_tables_are_rendered_from_the_recorded_rows() -> None:
    for document in render.DOCUMENTS:
        text = document.read_text()
        assert render.MARKED.search(text), f"{document.name} has lost its markers"
        assert render.rendered(text, document.parent) == text, "run `python benchmarks/render.py --write`"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def here(block: Block) -> bool:
    """Whether a block runs in this process."""
    return not block.marks.keys() & {"not run", "ranks"}


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(here, BLOCKS[page]))], ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    before = set(threading.enumerate())
    run([block for block in BLOCKS[page] if here(block)])
    # One that still writes would do so into the folder of another page.
    left = set(threading.enumerate()) - before
    assert not left, f"the code of {name_of(page)} leaves threads behind: {left}"


def run_on_a_rank(page: Path) -> None:
    run([block for block in blocks_of(page) if "ranks" in block.marks])


@pytest.mark.parametrize("page", [page for page in PAGES if any("ranks" in b.marks for b in BLOCKS[page])], ids=name_of)
def test_the_code_of_a_page_runs_on_several_ranks(page: Path, ranks: Ranks) -> None:
    (world,) = {int(block.marks["ranks"]) for block in BLOCKS[page] if "ranks" in block.marks}
    ranks.run(world, run_on_a_rank, page)


def test_what_is_not_run_is_known() -> None:
    found = {name_of(page): [b.marks["not run"] for b in BLOCKS[page] if "not run" in b.marks] for page in PAGES}
    assert {name: reasons for name, reasons in found.items() if reasons} == NOT_RUN


def test_every_block_says_what_it_is() -> None:
    for blocks in BLOCKS.values():
        for block in blocks:
            assert block.language in LANGUAGES, f"{block} is of the language {block.language!r}; known: {LANGUAGES}"
            if block.language == "sh" and "not run" not in block.marks:
                assert len(block.commands) == len(block.code.strip().splitlines()), f"not all lines of {block} run"
            assert "```" not in block.code, f"{block} has no end"


def test_the_factory_of_the_quick_start_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradstat.bench import command

    (example,) = (block.code for block in BLOCKS[QUICK_START] if block.marks.get("file") == "bench_me.py")
    (tmp_path / "bench_me.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    _, loss = command.load("bench_me:factory", torch.device("cpu"))
    assert loss().item() > 0


@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_links_and_names_of_files_exist(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target
    for name in re.findall(r"`((?:csrc|gradstat|kernels|tests|benchmarks|docs)/[\w./]*\w)`", text):
        assert (ROOT / name).exists(), name


# The runner of the pages' code -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nassert False\n```\n", AssertionError),
        ("```python\nx\n```\n", NameError),
        ("<!-- raises: ValueError -->\n```python\npass\n```\n", AssertionError),
        ("<!-- raises: ValueError: yes -->\n```python\nraise ValueError('no')\n```\n", ValueError),
        ("<!-- raises: ValueError -->\n```python\nraise TypeError('no')\n```\n", TypeError),
        ("```python\nimport warnings\nwarnings.warn('so')\n```\n", UserWarning),
        ("```python\nprint(2, 'a')\n```\n<!-- prints -->\n```text\n1 a\n```\n", AssertionError),
        ("```python\nprint('a\\nb\\nc')\n```\n<!-- prints -->\n```text\na\n...\nd\n```\n", AssertionError),
        ("```sh\npython -m gradstat view nowhere.gradstat\n```\n", AssertionError),
        ("<!-- raises: ValueError -->\n", AssertionError),
    ],
)
def test_what_is_wrong_fails(text: str, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(error):
        run(list(blocks_of(page)))


# The notebook docs/tour.ipynb opens with outputs, and they are what its cells put out ------------------------


TOUR = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
CELLS = [cell for cell in TOUR["cells"] if cell["cell_type"] == "code"]


def saved(cell: dict[str, Any], kind: str) -> str:
    """What a cell has printed (``"text"``) or shown of a type, as saved."""
    parts = [o.get("text") if kind == "text" else o.get("data", {}).get(kind) for o in cell["outputs"]]
    return "".join("".join(part) for part in parts if part)


def cell_name(cell: dict[str, Any]) -> str:
    return f"<ipython-input-{cell['execution_count']}-0123456789ab>"


@pytest.mark.filterwarnings("default::gradstat.monitor.AnomalyWarning")
def test_its_cells_print_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    for cell in CELLS:  # where a notebook keeps the source too, so that lines of code can be shown
        lines = "".join(cell["source"]).splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, cell_name(cell), (0, None, lines, cell_name(cell)))
    plt.switch_backend("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for cell in CELLS:
            printed, shown = run_cell(cell, names)
            assert in_outline(printed) == in_outline(saved(cell, "text"))
            assert hasattr(shown, "_repr_html_") == bool(saved(cell, "text/html"))
            if hasattr(shown, "_repr_html_"):
                assert in_outline(shown._repr_html_()) == in_outline(saved(cell, "text/html"))
        names["figure"].canvas.draw()
    finally:
        plt.close("all")
    assert names["report"].nan_count == 1
    assert names["monitor"].findings[0].rule == "batch-range"
    culprit = names["monitor"].culprit
    assert (culprit.op, culprit.module, culprit.source) == ("log", "entropy", "In[5]:4")
    assert culprit.line == "return -(p * p.log()).sum(-1)"
    assert names["result"].counters.read().skipped == 1


def run_cell(cell: dict[str, Any], names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and what its last line is, if that is an expression."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, cell_name(cell), "exec"), names)
        assert last is None or isinstance(last, ast.Expr)
        shown = None if last is None else eval(compile(ast.Expression(last.value), cell_name(cell), "eval"), names)
    return out.getvalue(), shown


def in_outline(text: str) -> str:
    """Text without its numbers, the last digits of which, or a few counts, may differ between machines."""
    return " ".join(re.sub(r"-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", text).split())
