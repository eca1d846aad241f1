"""The runner of the pages' code: what it lets pass, and that it fails where a page does not keep its word."""

from pathlib import Path

import pytest
from helpers import docs
from helpers.docs import blocks_of, run


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_what_is_wrong_fails(page: Path, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_page(page, text)


def test_a_traceback_leads_to_the_line_of_the_page(page: Path) -> None:
    with pytest.raises(NameError) as caught:
        run_page(page, "# Title\n\n```python\nx = 1\n\nnothing\n```\n")
    last = caught.traceback[-1]
    assert (Path(last.path), last.lineno + 1) == (page, 6)


def test_what_monitors_say_is_no_error(page: Path) -> None:
    warned = "import warnings\nfrom gradstat.monitor import AnomalyWarning\nwarnings.warn('so', AnomalyWarning)\n"
    run_page(page, f"```python\n{warned}```\n")
