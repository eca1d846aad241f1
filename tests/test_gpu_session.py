"""What `make gpu` has compute-sanitizer watch, with a tool in its place that writes down what it was asked."""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_session
import pytest

FAKE = """#!/bin/sh
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {log}
case "$2" in {failing}) exit 9;; esac
"""


def sanitized(monkeypatch: pytest.MonkeyPatch, folder: Path, failing: str) -> tuple[bool, list[list[str]]]:
    log, tool = folder / "log", folder / "compute-sanitizer"
    tool.write_text(FAKE.format(log=log, failing=failing))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    passed = gpu_session.sanitize()
    return passed, [line.split() for line in log.read_text().splitlines()]


def test_every_tool_watches_and_memory_is_not_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed, asked = sanitized(monkeypatch, tmp_path, "none")
    assert passed
    assert all(words[0] == "1" for words in asked)
    assert {words[2] for words in asked} == {"memcheck", "racecheck", "initcheck", "synccheck"}
    for words in asked:
        assert words[3:6] == ["--error-exitcode", "9", sys.executable]
        assert (gpu_session.ROOT / words[6]).exists()
    assert any(words[6] == "tests/fuzz.py" for words in asked)


@pytest.mark.parametrize("failing", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_what_one_tool_finds_fails_the_step_and_the_others_still_look(
    failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passed, asked = sanitized(monkeypatch, tmp_path, failing)
    assert not passed
    assert len(asked) == len(gpu_session.WATCHED)
