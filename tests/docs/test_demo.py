"""The demo, quickly: it names what it corrupted, and fails when it does not."""

from pathlib import Path

import pytest
import torch

import gradstat
from gradstat.__main__ import main
from gradstat.demo import corpus, run, train


def test_the_demo_names_the_corrupted_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--steps", "25", "--device", "cpu", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 29 gradients NOT FINITE: 0 NaN and 32 Inf" in printed
    assert "the fault is in blocks.1.mlp.down.weight: 32 elements are not finite, the first at [0, 7]" in printed
    for variant in ("plain step", "gradstat.check", "torch clip", "naive", "detect_anomaly"):
        assert variant in printed
    assert "of GPT; first in step 20: the gradient of blocks.1.mlp.down.weight" in " ".join(printed.split())
    assert b"blocks.1.mlp.down.weight" in (tmp_path / "run.html").read_bytes()
    assert main(["view", str(tmp_path / "run.gradstat"), "--no-page"]) == 0


def test_an_undetected_corruption_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CORRUPTED_VALUE", 0.25)  # an ordinary value: nothing to find
    monkeypatch.setattr(run.variants, "costs", lambda *_, **__: [])
    assert main(["demo", "--quick", "--steps", "12", "--device", "cpu", "--output", str(tmp_path)]) == 1


def test_options_that_cannot_work_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    refused = {"at least 10": ("--steps", "3"), f"cannot make the folder {in_the_way}": ("--output", str(in_the_way))}
    if not torch.cuda.is_available():
        refused["--device cuda: "] = ("--device", "cuda")
    for words, option in refused.items():
        assert main(["demo", "--quick", *option]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert "step" not in captured.out
    assert main(["demo", "--steps", "0"]) == 2


def test_a_sample_cannot_reach_the_terminal_as_escapes() -> None:
    assert run._printable(b"def\x1b[2J\tx\xe9\nend") == ["def?[2J x?", "end"]


def test_the_corpus_is_the_standard_librarys_sources_that_can_be_read(tmp_path: Path) -> None:
    data = corpus.read(corpus.standard_library(), limit=200_000)
    assert len(data) == 200_000
    assert b"import" in bytes(data.tolist())
    (tmp_path / "a.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="found 0 bytes of Python sources"):
        corpus.read(tmp_path)
    (tmp_path / "b.py").write_bytes(b"# \xff\n" * 5_000)
    assert len(corpus.read(tmp_path)) == 20_000


def test_info_lists_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # long details go on in the next line
    for status in gradstat.backends():
        assert status.detail in printed
    assert main(["info", "--json"]) == 0
    assert '"backends"' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["info", "--wrong"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"gradstat {gradstat.__version__}\n")
