"""The notebook docs/tour.ipynb opens with outputs, and they are what its cells put out."""

import ast
import contextlib
import io
import json
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOUR = json.loads((Path(__file__).resolve().parents[2] / "docs" / "tour.ipynb").read_text())
CELLS = [cell for cell in TOUR["cells"] if cell["cell_type"] == "code"]


def saved(cell: dict[str, Any], kind: str) -> str:
    """What a cell has printed (``"text"``) or shown of a type, as saved."""
    parts = [o.get("text") if kind == "text" else o.get("data", {}).get(kind) for o in cell["outputs"]]
    return "".join("".join(part) for part in parts if part)


@pytest.fixture
def _cells() -> Iterator[None]:
    """The source of cells, where a notebook keeps it too, so that lines of code can be shown."""
    files = {name_of(cell): "".join(cell["source"]) for cell in CELLS}
    for file, text in files.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    yield
    for file in files:
        del linecache.cache[file]


def name_of(cell: dict[str, Any]) -> str:
    return f"<ipython-input-{cell['execution_count']}-0123456789ab>"


@pytest.mark.usefixtures("_cells")
@pytest.mark.filterwarnings("default::gradstat.monitor.AnomalyWarning")
def test_its_cells_print_what_is_saved() -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for cell in CELLS:
            printed, shown = run(cell, names)
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
    assert (culprit.op, culprit.module, culprit.source, culprit.line) == (
        "log",
        "entropy",
        "In[5]:4",
        "return -(p * p.log()).sum(-1)",
    )
    assert names["result"].counters.read().skipped == 1


def run(cell: dict[str, Any], names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and what its last line is, if that is an expression."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, name_of(cell), "exec"), names)
        assert last is None or isinstance(last, ast.Expr)
        shown = None if last is None else eval(compile(ast.Expression(last.value), name_of(cell), "eval"), names)
    return out.getvalue(), shown


def in_outline(text: str) -> str:
    """Text without its numbers, the last digits of which, or a few counts, may differ between machines."""
    return " ".join(re.sub(r"-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", text).split())
