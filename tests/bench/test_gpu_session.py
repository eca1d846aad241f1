"""The commands for a rented GPU: time limits, rows written early, the sanitizer's arguments, merging; without a GPU."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gpu_plan
import gpu_session
import pytest
import rows
from gpu_plan import COMMANDS, Command, Part, Session

ROOT = gpu_session.ROOT
Run = Callable[..., tuple[bool, list[rows.Row], str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command of programs, each Python source and a time limit; returns whether all passed, rows and log."""
    bundle = SimpleNamespace(install=lambda: True)
    monkeypatch.setitem(sys.modules, "gpu_bundle", bundle)  # type: ignore[arg-type]

    def run(programs: dict[str, tuple[str, float]], most: float | None = None) -> tuple[bool, list[rows.Row], str]:
        parts = [
            Part(name, seconds, lambda session, source=source: [sys.executable, "-c", source])  # type: ignore[misc]
            for name, (source, seconds) in programs.items()
        ]
        monkeypatch.setitem(COMMANDS, "correctness", Command("", tuple(parts)))
        passed = gpu_session.run_command("correctness", Session(tmp_path, "cpu", most))
        (path,) = tmp_path.glob("*/gpu_session.jsonl")
        return passed, rows.read(path), (tmp_path / "log.txt").read_text()

    return run


def outcomes(recorded: list[rows.Row], metric: str) -> dict[str, float]:
    return {row.case: row.value for row in recorded if row.metric == metric}


def test_a_part_that_fails_or_runs_over_does_not_stop_the_next(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    passed, recorded, log = run(
        {
            "failing": ("raise SystemExit(3)", 60),
            "endless": ("print('begun', flush=True); import time; time.sleep(600)", 1.5),
            "last": ("print('done')", 60),
        }
    )
    assert not passed
    assert outcomes(recorded, "passed") == {"failing": 0, "endless": 0, "last": 1}
    assert outcomes(recorded, "stopped") == {"failing": 0, "endless": 1, "last": 0}
    assert 1.5 <= outcomes(recorded, "time")["endless"] < 30
    assert "begun\n" in log
    assert "done\n" in log
    shown = capsys.readouterr().out
    assert log in shown
    for line in ("| failing | FAILED", "| endless | STOPPED", "| last    | passed"):
        assert line in shown.split(": results\n")[1]


def test_what_a_stopped_part_has_started_ends_with_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also processes that ignore SIGTERM."""
    stubborn = (
        "import signal, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"[(pathlib.Path({str(tmp_path / 'alive')!r}).touch(), time.sleep(0.1)) for _ in range(6000)]"
    )
    monkeypatch.setattr(gpu_session, "GRACE_SECONDS", 0.5)
    run({"parent": (f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])", 3)})
    alive = tmp_path / "alive"
    assert alive.exists()
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()


KILLED = """
import gpu_session, pathlib, sys
from gpu_plan import COMMANDS, Command, Part, Session
gpu_session.installed = lambda session: None
endless = "import time, pathlib, sys; [(pathlib.Path(sys.argv[1]).touch(), time.sleep(0.1)) for _ in range(6000)]"
programs = {"first": "print('measured')", "second": endless}
argv = lambda source: lambda session: [sys.executable, "-c", source, sys.argv[1] + "/alive"]
COMMANDS["correctness"] = Command("", tuple(Part(name, 60, argv(source)) for name, source in programs.items()))
gpu_session.run_command("correctness", Session(pathlib.Path(sys.argv[1]), "cpu"))
"""


def test_what_is_killed_keeps_what_it_had_and_leaves_nothing_running(tmp_path: Path) -> None:
    """By SIGKILL, as where commands have a time limit."""
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=gpu_session.ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    alive = tmp_path / "alive"
    for _ in range(600):
        if alive.exists() or killed.poll() is not None:
            break
        time.sleep(0.1)
    assert alive.exists()
    killed.kill()
    killed.wait()
    time.sleep(0.5)
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()
    (path,) = tmp_path.glob("*/gpu_session.jsonl")
    assert outcomes(rows.read(path), "passed") == {"first": 1}
    assert "measured\n" in (tmp_path / "log.txt").read_text()


def test_another_limit_for_all_parts_replaces_theirs_and_the_commands(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "COMMAND_SECONDS", 0.0)
    endless = "import time; time.sleep(600)"
    _, recorded, _ = run({"slow": ("import time; time.sleep(1.5)", 0.1), "endless": (endless, 600)}, 4.0)
    assert outcomes(recorded, "passed") == {"slow": 1, "endless": 0}


def test_no_part_starts_without_time_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session, "COMMAND_SECONDS", gpu_session.GRACE_SECONDS + 1)
    passed, recorded, log = run({"late": ("print('begun')", 60)})
    assert not passed
    assert outcomes(recorded, "stopped") == {"late": 1}
    assert "begun\n" not in log


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


def test_every_part_is_a_program_that_is_there_and_the_limits_fit_the_budget() -> None:
    total = gpu_plan.START_SECONDS + gpu_plan.TRANSFER_SECONDS * len(COMMANDS)
    assert list(COMMANDS)[:3] == ["correctness", "bandwidth", "steps"]
    for command in COMMANDS.values():
        limits = sum(part.seconds for part in command.parts)
        assert limits <= gpu_plan.COMMAND_SECONDS < 8 * 60
        total += limits
        for device in ("cuda", "cpu"):
            for part in command.parts:
                argv = part.argv(Session(ROOT / "somewhere", device))
                files = [word for word in argv if word.endswith(".py")]
                assert files or "tests" in argv
                assert all((ROOT / file).exists() for file in files)
    assert total <= gpu_plan.BUDGET_SECONDS <= 24 * 60


def test_modules_with_tests_on_a_device_are_known() -> None:
    """Modules that mark tests, or whose tests take a device, or a backend with its device, as a fixture."""
    tests = (ROOT / "tests").glob("*/test_*.py")
    marks = ("@pytest.mark.cuda", ", device: str", "(device: str", "where: tuple[str, str]")
    found = {path.stem.removeprefix("test_") for path in tests if any(mark in path.read_text() for mark in marks)}
    assert found - {"gpu_session", "gpu_costs"} <= set(gpu_plan.ON_A_DEVICE)


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
    watched = [part for part in COMMANDS["costs"].parts if "check of" in part.name]
    with (tmp_path / "log.txt").open("w") as log:
        end = time.monotonic() + 600
        ended = [gpu_session.run_part(part, Session(tmp_path), log, end) for part in watched]
    assert [outcome.how == "FAILED" for outcome in ended] == [failing in part.name for part in watched]
    lines = [line.split() for line in asked.read_text().splitlines()]
    assert {argv[2] for argv in lines} == {"memcheck", "racecheck", "initcheck", "synccheck"}
    for argv in lines:
        assert argv[0] == "1"
        assert ("--kernel-name-exclude" in argv) == (argv[2] != "initcheck")
        assert argv[argv.index("--error-exitcode") + 1 :][:2] == ["9", sys.executable]
        assert argv[argv.index(sys.executable) + 1] in ("tools/gpu_gates/short_set.py", "tools/fuzz.py")


def measured(**others: object) -> rows.Row:
    made = rows.Row("gradstat.check", "case", "wall time", "us", 1.0, device="NVIDIA H100", driver="580", group="lists")
    return replace(made, **others)  # type: ignore[arg-type]


def test_rows_that_came_back_are_merged_once(tmp_path: Path) -> None:
    back, results = tmp_path / "back", tmp_path / "results"
    rows.append([measured()], "full", back / "1")
    rows.append([measured(case="other"), measured()], "full", back / "2")
    rows.append([measured(group="numerics")], "numerics", back / "2")
    grown = gpu_session.merge(back, results)
    assert {path.relative_to(results).as_posix() for path in grown} == {
        "nvidia-h100/full.jsonl",
        "nvidia-h100/numerics.jsonl",
    }
    assert rows.devices(results) == [[measured(), measured(case="other")]]
    assert gpu_session.merge(back, results) == []


def test_a_rehearsal_is_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    back, results = tmp_path / "back", tmp_path / "results"
    rows.append([measured()], "full", back)
    rows.append([measured(device="a CPU", driver="")], "quick", back)
    with pytest.raises(SystemExit, match="a CPU, which is not a GPU"):
        gpu_session.merge(back, results)
    assert not results.exists()
    with pytest.raises(SystemExit, match="expected rows"):
        gpu_session.merge(tmp_path / "nothing", results)
    with pytest.raises(SystemExit):
        gpu_session.main(["correctness", "--device", "cpu", "--results", str(rows.RESULTS / "x")])
    assert "--results must be outside of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "shown"), [("somewhere", "somewhere"), ("$OUT", '"$OUT"'), ("${OUT}/a b", '"${OUT}/a b"')]
)
def test_the_systems_python_prints_every_command(given: str, shown: str) -> None:
    """Without site-packages: the plan needs the standard library only."""
    command = [sys.executable, "-S", "benchmarks/gpu_session.py", "plan", "--results", given]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in COMMANDS:
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
    assert made.stdout.count('--results "$VARIABLE"\n') == len(COMMANDS)


@pytest.mark.parametrize("target", ["gpu-merge", "bench-full", "numerics"])
def test_a_fresh_environment_gets_matplotlib_before_charts_are_drawn(target: str) -> None:
    command = ["make", "--dry-run", "--always-make", target, "VENV=fresh"]
    commands = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=outside_of_make())
    before, *_ = re.split(r"(gpu_session\.py merge|plots\.py)", commands.stdout, maxsplit=1)
    assert re.search(r'-e "\.\[(plots|test)\]"', before), "only these extras contain matplotlib"


def test_a_variable_that_is_not_set_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_session.main(["costs", "--device", "cpu", "--results", "$NOT_SET_HERE/results"])
    assert "expected a folder, got $NOT_SET_HERE/results, whose variable is not set here" in capsys.readouterr().err
