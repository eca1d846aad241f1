"""The commands and libraries for a rented GPU: limits, archives written early, merging; without a GPU."""

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu_bundle
import gpu_plan
import gpu_session
import pytest
import rows
import torch
from gpu_gates import short_set
from gpu_plan import COMMANDS, Part, Session
from helpers.cuda_counts import Operations
from helpers.devices import BACKENDS

ROOT = gpu_session.ROOT
Programs = dict[str, tuple[str, float]]
Run = Callable[..., tuple[bool, list[rows.Row], str]]


def parts_of(programs: Programs) -> tuple[Part, ...]:
    """Parts that run Python sources, each with its time limit."""
    return tuple(
        Part(name, seconds, lambda session, source=source: [sys.executable, "-c", source])  # type: ignore[misc]
        for name, (source, seconds) in programs.items()
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with these groups of programs; returns whether all passed, and the archive's rows and log."""
    bundle = SimpleNamespace(install=lambda: True)
    monkeypatch.setitem(sys.modules, "gpu_bundle", bundle)  # type: ignore[arg-type]

    def run(*groups: Programs) -> tuple[bool, list[rows.Row], str]:
        monkeypatch.setitem(COMMANDS, "first", tuple(map(parts_of, groups)))
        passed = gpu_session.run_command("first", Session(tmp_path, "cpu"))
        (archive,) = tmp_path.glob("first-*.zip")
        with zipfile.ZipFile(archive) as file:
            (path,) = (name for name in file.namelist() if name.endswith("gpu_session.jsonl"))
            recorded = [rows.Row(**json.loads(line)) for line in file.read(path).decode().splitlines()]
            return passed, recorded, file.read("log.txt").decode()

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


# The libraries that `make gpu-bundle` makes: installed if compiled from these sources, refused otherwise -----


SOURCES = ("setup.py", "gradstat/_fields.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The sources, and a bundle that says it was compiled from them."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for folder in ("gradstat", "gpu-bundle"):
        (tmp_path / folder).mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, tmp_path / name)
    bundle = tmp_path / "gpu-bundle"
    (bundle / "_C.abi3.so").write_bytes(b"\x7fELF of the CPU")
    (bundle / "_C_cuda.abi3.so").write_bytes(b"\x7fELF\0sm_80 sm_90a\0of CUDA")
    gpu_bundle.describe(bundle, gpu_bundle.hash_of_sources(tmp_path))
    return tmp_path


def libraries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.so*")}


def test_a_fresh_bundle_replaces_the_libraries(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "gradstat" / "_C.abi3.so").write_bytes(b"an older one")
    assert gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == libraries(checkout / "gpu-bundle")
    assert "gpu-bundle: sm_80 sm_90a, compiled with torch" in capsys.readouterr().out
    made = json.loads((checkout / "gpu-bundle" / "manifest.json").read_text())
    assert set(made) == {"sources", "libraries", "architectures", "torch", "python"}
    assert set(made["libraries"]) == {"_C.abi3.so", "_C_cuda.abi3.so"}


@pytest.mark.parametrize("changed", ["csrc/stat.h", "csrc/stats_cuda.cu", *SOURCES])
def test_a_stale_bundle_is_refused(changed: str, checkout: Path) -> None:
    if changed == "csrc/stat.h":
        (checkout / changed).rename(checkout / "csrc" / "stat2.h")
    else:
        with (checkout / changed).open("a") as file:
            file.write("\n")
    with pytest.raises(RuntimeError, match=r"gpu-bundle/ is stale: it was compiled from other .*`make gpu-bundle`"):
        gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == {}


@pytest.mark.parametrize(("capability", "runs"), [((8, 6), True), ((9, 0), True), ((7, 5), False), ((10, 3), False)])
def test_a_bundle_for_other_gpus_is_refused(
    capability: tuple[int, int], runs: bool, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if runs:
        assert gpu_bundle.install(checkout)
        return
    name = "{}{}".format(*capability)
    sentence = rf"expected code for sm_{name}.*, got sm_80 sm_90a\. .*`make gpu-bundle ARCHITECTURES={name}`"
    with pytest.raises(RuntimeError, match=sentence):
        gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == {}


# The calls that compute-sanitizer watches (tools/gpu_gates/short_set.py): right results, and few launches ----


# Not Triton's interpreter, which would take minutes.
UNDER_TEST = [where for where in BACKENDS if where[0] == "emulated" or (where[1] == "cuda" and where[0] != "reference")]


@pytest.mark.parametrize("where", UNDER_TEST, ids="-".join, indirect=True)
def test_results_are_those_of_the_cpu_from_few_operations(where: tuple[str, str]) -> None:
    """On a GPU, tensors are large enough for its blocks to read many tiles each, and its warps several tensors.

    So they are for the emulated devices, which have fewer blocks.
    """
    backend, device = where
    with Operations() as operations:
        short_set.run([backend], device, *(() if device == "cuda" else (1 << 20,)))
    # Those of the comparisons on the CPU included. The reference alone would take 55 for each of thousands of tensors.
    assert len(operations.names) < 8000
