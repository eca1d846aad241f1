"""What the documents claim: figures come from rows, examples run, links lead somewhere."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ranks import Ranks

import gradstat

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_rendered_from_the_recorded_rows() -> None:
    render = load_script(ROOT / "benchmarks" / "render.py")
    for document in render.DOCUMENTS:
        text = document.read_text()
        assert render.MARKED.search(text), f"{document.name} has lost its markers"
        assert render.rendered(text, document.parent) == text, "run `python benchmarks/render.py --write`"


def test_the_first_example_of_the_readme_runs_as_printed() -> None:
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "loss": model(torch.randn(3, 4)).sum()}
    exec(example, names)
    assert names["report"].ok  # type: ignore[attr-defined]
    assert names["norm"] > 0  # type: ignore[operator]


def run_examples(name: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(example, {})


@pytest.mark.parametrize("name", ["stepping.md", "clipping.md", "flight-recorder.md", "integrations.md"])
def test_examples_of_the_pages_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    run_examples(name)


def test_the_page_on_the_monitor_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "monitor.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)
    assert (tmp_path / "run.gradstat").exists()
    names["test_training_is_healthy"]()  # type: ignore[operator]


def test_the_monitor_of_the_readme_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(monitor = .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = torch.nn.Linear(4, 2)
    names = {
        "gradstat": gradstat,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loss_of": torch.nn.functional.mse_loss,
        "batches": [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(3)],
    }
    exec(example, names)
    assert names["monitor"].diagnose().ok  # type: ignore[attr-defined]


def test_examples_on_several_ranks_run(ranks: Ranks) -> None:
    ranks.run(2, run_examples, "distributed.md")


def test_the_accumulation_of_the_readme_runs_as_printed() -> None:
    (example,) = re.findall(r"```python\n(micro_batches = .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {
        "gradstat": gradstat,
        "model": torch.nn.Linear(4, 2),
        "loss_of": torch.nn.functional.mse_loss,
        "batches": [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(3)],
    }
    exec(example, names)
    assert names["report"].micro_batches == 3  # type: ignore[attr-defined]


def test_the_factory_of_the_readme_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradstat.bench import command

    (example,) = re.findall(r"```python\n# bench_me.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "bench_me.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    _, loss = command.load("bench_me:factory", torch.device("cpu"))
    assert loss().item() > 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_names_of_files_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target
    for name in re.findall(r"`((?:csrc|gradstat|kernels|tests|benchmarks|docs)/[\w./]*\w)`", text):
        assert (ROOT / name).exists(), name
