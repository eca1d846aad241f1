"""Tools name tests, and the commands of the Makefile name programs: all of them exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r'"((?:clip|core|cuda_on_cpu|monitor|step)(?:/test_\w+\.py)?)"')


@pytest.mark.parametrize("tool", ["coverage_cxx", "instrumented", "noxfile", "sanitize"])
def test_tests_that_a_tool_runs_exist(tool: str) -> None:
    named = NAMED.findall((ROOT / "tools" / f"{tool}.py").read_text())
    assert named
    for name in named:
        assert (ROOT / "tests" / name).exists(), name


def test_programs_that_the_makefile_runs_exist() -> None:
    named = re.findall(r"(?:benchmarks|tools|docs|\.ci)/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name
