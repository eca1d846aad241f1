"""The commands for a rented GPU: limits, archives written early, the sanitizer's arguments, merging; without a GPU."""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

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

    def run(*groups: Programs, most: float | None = None) -> tuple[bool, list[rows.Row], str]:
        monkeypatch.setitem(COMMANDS, "first", tuple(map(parts_of, groups)))
        passed = gpu_session.run_command("first", Session(tmp_path, "cpu", most))
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


STUBBORN = """
import pathlib, signal, time
print("begun", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(6000):
    pathlib.Path({alive!r}).touch()
    time.sleep(0.1)
"""


def test_parts_side_by_side_end_together_with_all_they_have_started(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit; also processes that ignore SIGTERM."""
    monkeypatch.setattr(gpu_session, "GRACE_SECONDS", 0.5)
    alive = [tmp_path / name for name in ("alive 1", "alive 2")]
    programs = {path.name: (STUBBORN.format(alive=str(path)), 8.0) for path in alive}
    source, _ = programs["alive 2"]
    programs["alive 2"] = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {source!r}])", 8.0
    _, recorded, log = run({"quick": ("print('done')", 8.0), **programs}, {"later": ("pass", 60)})
    assert outcomes(recorded, "stopped") == {"quick": 0, "alive 1": 1, "alive 2": 1, "later": 0}
    seconds = outcomes(recorded, "time")
    assert seconds["quick"] < 8 <= seconds["alive 1"] == seconds["alive 2"]
    assert "quick: done\n" in log
    for path in alive:
        path.unlink()
    time.sleep(0.5)
    assert not any(path.exists() for path in alive)


KILLED = """
import gpu_session, pathlib, sys
from gpu_plan import COMMANDS, Part, Session
gpu_session.installed = lambda session: None
gpu_session.ARCHIVE_SECONDS = 0.1
argv = lambda source: lambda session: [sys.executable, "-c", source]
COMMANDS["first"] = (Part("measured", 60, argv("print('measured')")),), (Part("endless", 60, argv(sys.argv[1])),)
gpu_session.run_command("first", Session(pathlib.Path(sys.argv[2]), "cpu"))
"""


def test_what_is_killed_leaves_an_archive_with_what_it_had_and_nothing_running(tmp_path: Path) -> None:
    """By SIGKILL, as where commands have a time limit."""
    alive, results = tmp_path / "alive", tmp_path / "results"
    program = [sys.executable, "-c", KILLED, STUBBORN.format(alive=str(alive)), str(results)]
    killed = subprocess.Popen(program, env=gpu_session.ENVIRONMENT, stdout=subprocess.DEVNULL)
    for _ in range(600):
        if alive.exists() or killed.poll() is not None:
            break
        time.sleep(0.1)
    assert alive.exists()
    time.sleep(1)
    killed.kill()
    killed.wait()
    time.sleep(0.5)
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()
    recorded, log = archived(results)
    assert outcomes(recorded, "passed") == {"measured": 1}
    assert "measured\n" in log
    assert "begun\n" in log


def test_some_parts_can_be_run_again_by_their_names(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, recorded, _ = run({"a": ("pass", 60), "b": ("pass", 60)}, {"c": ("pass", 60)})
    assert outcomes(recorded, "passed") == {"a": 1, "b": 1, "c": 1}
    again = ["--device", "cpu", "--results", str(tmp_path / "again")]
    assert gpu_session.main(["all", "--only", "b", "c", *again]) == 0
    assert outcomes(archived(tmp_path / "again")[0], "passed") == {"b": 1, "c": 1}
    with pytest.raises(SystemExit):
        gpu_session.main(["first", "--only", "b", "lists", *again])
    assert "expected names of parts (a, b, c), got lists" in capsys.readouterr().err


def test_another_limit_for_all_parts_replaces_theirs(run: Run) -> None:
    endless = {"endless": ("import time; time.sleep(600)", 600)}
    _, recorded, _ = run({"slow": ("import time; time.sleep(1.5)", 0.1)}, endless, most=4.0)
    assert outcomes(recorded, "passed") == {"slow": 1, "endless": 0}


def test_libraries_are_taken_from_the_bundle_or_compiled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = Mock(side_effect=RuntimeError("gpu-bundle/ is stale"))
    monkeypatch.setitem(sys.modules, "gpu_bundle", SimpleNamespace(install=stale))  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="gpu-bundle/ is stale"):
        gpu_session.installed(Session(Path()))
    monkeypatch.setitem(sys.modules, "gpu_bundle", SimpleNamespace(install=lambda: False))  # type: ignore[arg-type]
    build = gpu_session.installed(Session(Path(), "cuda"))
    assert build is not None
    assert "build_ext" in build.argv(Session(Path()))
    assert build.environment == {"GRADSTAT_CUDA": "1"}
    failing = replace(build, argv=lambda session: [sys.executable, "-c", "raise SystemExit(1)"])
    monkeypatch.setattr(gpu_session, "installed", lambda session: failing)
    passed, recorded, _ = run({"pointless": ("pass", 60)})
    assert not passed
    assert outcomes(recorded, "passed") == {"build": 0}


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


FAKE = """#!/bin/sh
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {log}
case "$2" in {failing}) exit 9;; esac
"""


@pytest.mark.parametrize("failing", ["none", "memcheck", "racecheck", "initcheck", "synccheck"])
def test_every_tool_watches_ours_and_memory_is_not_cached(
    failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a program in place of the sanitizer that records its arguments."""
    tool, asked = tmp_path / "compute-sanitizer", tmp_path / "asked"
    tool.write_text(FAKE.format(log=asked, failing=failing))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tools = ["memcheck", "racecheck", "initcheck", "synccheck"]
    watched = [part for part in COMMANDS["first"][0] if part.name in tools]
    with (tmp_path / "log.txt").open("w") as log:
        ended = gpu_session.run_together(watched, Session(tmp_path), log)
    assert [outcome.how == "FAILED" for outcome in ended] == [tool == failing for tool in tools]
    lines = [line.split() for line in asked.read_text().splitlines()]
    assert sorted(argv[2] for argv in lines) == sorted(tools)
    for argv in lines:
        assert argv[0] == "1"
        assert ("--kernel-name-exclude" in argv) == (argv[2] != "initcheck")
        assert argv[argv.index("--error-exitcode") + 1 :][:3] == ["9", sys.executable, "tools/gpu_gates/short_set.py"]


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


def test_a_rehearsal_is_not_merged(tmp_path: Path) -> None:
    back, results = tmp_path / "back", tmp_path / "results"
    rows.append([measured()], "full", back)
    rows.append([measured(device="a CPU", driver="")], "quick", back)
    with pytest.raises(SystemExit, match="a CPU, which is not a GPU"):
        gpu_session.merge(back, results)
    assert not results.exists()
    with pytest.raises(SystemExit, match="expected rows"):
        gpu_session.merge(tmp_path / "nothing", results)


@pytest.mark.parametrize(
    ("given", "shown"), [("somewhere", "somewhere"), ("$OUT", '"$OUT"'), ("${OUT}/a b", '"${OUT}/a b"')]
)
def test_the_systems_python_prints_every_command(given: str, shown: str) -> None:
    """Without site-packages: the plan needs the standard library only."""
    command = [sys.executable, "-S", "benchmarks/gpu_session.py", "plan", "--results", given]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in (*COMMANDS, "all --only lists"):
        assert f"python3 benchmarks/gpu_session.py {name} --results {shown}\n" in printed
    assert "copy it by name" in printed


def outside_of_make() -> dict[str, str]:
    """The environment, without what `make test` passes on."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


@pytest.mark.parametrize("given", ["$VARIABLE", "$$VARIABLE", r"\$$VARIABLE"])
def test_make_leaves_a_variable_of_the_other_machine_in_the_commands(given: str) -> None:
    command = ["make", "--silent", "gpu-plan", f"PYTHON={sys.executable}", f"RESULTS={given}"]
    environment = outside_of_make() | {"VARIABLE": "expanded"}
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    assert made.stdout.count('--results "$VARIABLE"\n') == len(COMMANDS) + 1


@pytest.mark.parametrize("target", ["gpu-merge", "bench-full", "numerics"])
def test_a_fresh_environment_gets_matplotlib_before_charts_are_drawn(target: str) -> None:
    command = ["make", "--dry-run", "--always-make", target, "VENV=fresh"]
    commands = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=outside_of_make())
    before, *_ = re.split(r"(gpu_session\.py merge|plots\.py)", commands.stdout, maxsplit=1)
    assert re.search(r'-e "\.\[(plots|test)\]"', before), "only these extras contain matplotlib"


def test_a_variable_that_is_not_set_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_session.main(["first", "--device", "cpu", "--results", "$NOT_SET_HERE/results"])
    assert "expected a folder, got $NOT_SET_HERE/results, whose variable is not set here" in capsys.readouterr().err
