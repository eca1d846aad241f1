"""The commands for a rented GPU: limits, archives written early, merging; without a GPU."""

import json
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu_plan
import gpu_session
import pytest
import rows
from gpu_plan import COMMANDS, Part, Session

ROOT = gpu_session.ROOT
Programs = dict[str, tuple[str, float]]
Run = Callable[..., tuple[bool, list[rows.Row], str]]


def parts_of(programs: Programs) -> tuple[Part, ...]:
    """Parts that run Python sources, each with its time limit."""
    return tuple(
        Part(name, seconds, lambda session, source=source: [sys.executable, "-c", source])  # type: ignore[misc]
        for name, (source, seconds) in programs.items()
    )


def archived(folder: Path) -> tuple[list[rows.Row], str]:
    """The outcomes and the log in the only archive of a folder."""
    (archive,) = folder.glob("first-*.zip")
    with zipfile.ZipFile(archive) as file:
        (path,) = (name for name in file.namelist() if name.endswith("gpu_session.jsonl"))
        listed = [rows.Row(**json.loads(line)) for line in file.read(path).decode().splitlines()]
        return listed, file.read("log.txt").decode()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with these groups of programs; returns whether all passed, its rows and its log."""
    bundle = SimpleNamespace(install=lambda: True)
    monkeypatch.setitem(sys.modules, "gpu_bundle", bundle)  # type: ignore[arg-type]

    def run(*groups: Programs) -> tuple[bool, list[rows.Row], str]:
        monkeypatch.setitem(COMMANDS, "first", tuple(map(parts_of, groups)))
        passed = gpu_session.run_command("first", Session(tmp_path, "cpu"))
        return passed, *archived(tmp_path)

    return run


def outcomes(recorded: list[rows.Row], metric: str) -> dict[str, float]:
    return {row.case: row.value for row in recorded if row.metric == metric}


def test_a_part_that_fails_or_runs_over_does_not_stop_the_next(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    passed, recorded, log = run(
        {"failing": ("raise SystemExit(3)", 60)},
        {"endless": ("print('begun', flush=True); import time; time.sleep(600)", 1.5)},
        {"last": ("print('done')", 60)},
    )
    assert not passed
    assert outcomes(recorded, "passed") == {"failing": 0, "endless": 0, "last": 1}
    assert outcomes(recorded, "stopped") == {"failing": 0, "endless": 1, "last": 0}
    assert 1.5 <= outcomes(recorded, "time")["endless"] < 30
    assert "begun\n" in log
    assert "done\n" in log
    shown = capsys.readouterr().out
    assert log == shown
    for line in ("| failing | FAILED", "| endless | STOPPED", "| last    | passed"):
        assert line in shown.split(": results\n")[1]


WAITING = """
import pathlib, time
while not list(pathlib.Path({folder!r}).glob("first-*.zip")):
    time.sleep(0.1)
"""


def test_an_archive_is_written_while_parts_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a command that is killed, as where commands have a time limit, leaves what it had."""
    monkeypatch.setattr(gpu_session, "ARCHIVE_SECONDS", 0.1)
    passed, *_ = run({"waiting": (WAITING.format(folder=str(tmp_path)), 30)})
    assert passed


def test_every_part_is_a_program_that_is_there_and_the_plan_fits_the_budget() -> None:
    for groups in COMMANDS.values():
        assert sum(map(gpu_plan.limit, groups)) <= 600  # of a command
        for part in (part for group in groups for part in group):
            for device in ("cuda", "cpu"):
                argv = part.argv(Session(ROOT / "somewhere", device))
                files = [word for word in argv if word.endswith(".py")]
                assert files
                assert all((ROOT / file).exists() for file in files)
    assert gpu_session.planned_seconds() <= gpu_plan.BUDGET_SECONDS == 900


def measured(**others: object) -> rows.Row:
    made = rows.Row("gradstat.check", "case", "wall time", "us", 1.0, device="NVIDIA H100", driver="580", group="lists")
    return replace(made, **others)  # type: ignore[arg-type]


def test_rows_that_came_back_are_merged_once(tmp_path: Path) -> None:
    """From archives and from files."""
    back, made, results = tmp_path / "back", tmp_path / "made", tmp_path / "results"
    rows.append([measured()], "full", back / "1")
    rows.append([measured(case="other"), measured()], "full", made)
    rows.append([measured(group="numerics")], "numerics", made)
    (made / "log.txt").touch()
    gpu_session.keep(made, back / "2.zip")
    grown = gpu_session.merge(back, results)
    assert {path.relative_to(results).as_posix() for path in grown} == {
        "nvidia-h100/full.jsonl",
        "nvidia-h100/numerics.jsonl",
    }
    assert rows.devices(results) == [[measured(), measured(case="other")]]
    assert gpu_session.merge(back, results) == []
