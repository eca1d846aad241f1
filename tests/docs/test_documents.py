"""What the documents claim: figures come from rows, every block of code runs, links lead somewhere."""

import re
import threading
from pathlib import Path

import pytest
import render
import torch
from helpers import docs
from helpers.docs import LANGUAGES, PAGES, ROOT, Block, blocks_of, run
from helpers.frameworks import OF_FRAMEWORKS
from helpers.ranks import Ranks

pytestmark = OF_FRAMEWORKS
QUICK_START = ROOT / "docs" / "quickstart.md"
BLOCKS = {page: list(blocks_of(page)) for page in PAGES}
# Blocks that no test runs, by page, with the reason that the page's source gives.
NOT_RUN = {
    "CONTRIBUTING.md": ["they are what sets up the tests"],
    "README.md": ["changes the environment; tests/life/test_packaging.py installs what it builds"],
    "docs/quickstart.md": ["changes the environment"],
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
    found = {
        name_of(page): [b.marks["not run"] for b in blocks if "not run" in b.marks] for page, blocks in BLOCKS.items()
    }
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


@pytest.fixture
def new_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    return tmp_path / "page.md"


def run_page(page: Path, text: str) -> None:
    page.write_text(text)
    run(list(blocks_of(page)))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nassert False\n```\n", AssertionError),
        ("```python\nx\n```\n", NameError),
        ("<!-- raises: ValueError -->\n```python\npass\n```\n", AssertionError),
        ("<!-- raises: ValueError: yes -->\n```python\nraise ValueError('no')\n```\n", ValueError),
        ("<!-- raises: ValueError -->\n```python\nraise TypeError('no')\n```\n", TypeError),
        ("<!-- warns: UserWarning -->\n```python\npass\n```\n", AssertionError),
        ("```python\nimport warnings\nwarnings.warn('so')\n```\n", UserWarning),
        ("```python\nprint(2, 'a')\n```\n<!-- prints -->\n```text\n1 a\n```\n", AssertionError),
        ("```python\nprint('a\\nb\\nc')\n```\n<!-- prints -->\n```text\na\n...\nd\n```\n", AssertionError),
        ("```sh\npython -m gradstat view nowhere.gradstat\n```\n", AssertionError),
        ("<!-- raises: ValueError -->\n", AssertionError),
    ],
)
def test_what_is_wrong_fails(new_page: Path, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_page(new_page, text)


def test_a_traceback_leads_to_the_line_of_the_page(new_page: Path) -> None:
    with pytest.raises(NameError) as caught:
        run_page(new_page, "# Title\n\n```python\nx = 1\n\nnothing\n```\n")
    last = caught.traceback[-1]
    assert (Path(last.path), last.lineno + 1) == (new_page, 6)


def test_what_monitors_say_is_no_error(new_page: Path) -> None:
    warned = "import warnings\nfrom gradstat.monitor import AnomalyWarning\nwarnings.warn('so', AnomalyWarning)\n"
    run_page(new_page, f"```python\n{warned}```\n")
