"""What runs on a machine with a GPU: time limits, an archive that a killed run leaves, merged rows, the bundle."""

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import gpu
import pytest
import rows
from gpu import Command
from gpu_gates import short_set
from helpers.cuda_counts import Operations
from helpers.devices import BACKENDS


def python(name: str, seconds: float, source: str) -> Command:
    return Command(name, seconds, f"{{python}} -c '{source}'")


def test_a_command_that_fails_or_runs_over_does_not_stop_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = python("endless", 4, 'print("begun"); import time; time.sleep(600)')
    groups = [
        [python("failing", 60, "raise SystemExit(3)"), endless],
        [Command("missing", 60, "no-such-program")],
        [python("last", 60, 'print("{device}"); open("{rows}/some.jsonl", "w").write("rows")')],
    ]
    ended = gpu.run(groups, tmp_path, "cpu")
    how = {"failing": "FAILED", "endless": "STOPPED", "missing": "FAILED", "last": "passed"}
    assert dict(line.split(" after ")[0].split(": ") for line in ended) == how
    assert "\n".join(ended) in capsys.readouterr().out
    (archive,) = tmp_path.iterdir()
    with zipfile.ZipFile(archive) as file:
        assert set(file.namelist()) == {"outcomes.txt", "some.jsonl", *(f"{name}.txt" for name in how)}
        assert file.read("endless.txt") == b"begun\n"
        assert file.read("last.txt") == b"cpu\n"
        assert file.read("some.jsonl") == b"rows"
        assert file.read("outcomes.txt").decode() == "\n".join(ended)


def test_an_archive_is_written_while_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run that is killed, as where commands have a time limit, leaves what it had."""
    monkeypatch.setattr(gpu, "ARCHIVE_SECONDS", 0.1)
    waits = f'import os, time\nwhile not os.listdir("{tmp_path}"):\n    time.sleep(0.1)'
    (ended,) = gpu.run([[python("waiting", 30, waits)]], tmp_path, "cpu")
    assert "passed" in ended


def test_every_command_is_a_program_that_is_there_and_all_fit_into_one_call() -> None:
    groups = gpu.commands()
    assert sum(max(command.seconds for command in group) for group in groups) <= 600
    for command in (command for group in groups for command in group):
        files = [word for word in command.line.split() if word.endswith(".py")]
        assert files
        assert all((gpu.ROOT / file).exists() for file in files)


def measured(**others: object) -> rows.Row:
    made = rows.Row("gradstat.check", "case", "wall time", "us", 1.0, device="NVIDIA H100", driver="580", group="lists")
    return replace(made, **others)  # type: ignore[arg-type]


def test_rows_that_came_back_are_merged_once(tmp_path: Path) -> None:
    """From archives and from files; those of a rehearsal are refused."""
    back, results = tmp_path / "back", tmp_path / "results"
    rows.append([measured()], "full", back / "1")
    rows.append([measured(case="other"), measured()], "full", back / "2")
    shutil.make_archive(str(back / "2"), "zip", back / "2")
    shutil.rmtree(back / "2")
    for _ in range(2):
        assert gpu.merge(back, results) == [results / "nvidia-h100" / "full.jsonl"]
        assert rows.devices(results) == [[measured(), measured(case="other")]]
    rows.append([measured(driver="")], "numerics", back / "3")
    with pytest.raises(SystemExit, match="rows of NVIDIA H100, which is not a GPU"):
        gpu.merge(back, results)
    with pytest.raises(SystemExit, match="expected rows"):
        gpu.merge(results / "nowhere", results)
    assert [path.name for path in results.rglob("*.jsonl")] == ["full.jsonl"]


@pytest.mark.parametrize("changed", ["csrc/stats_cuda.cu", "setup.py", "gradstat/_fields.py", None])
def test_a_bundle_replaces_the_libraries_unless_it_is_of_other_sources(changed: str | None, tmp_path: Path) -> None:
    sources = ["csrc/stat.h", "csrc/stats_cuda.cu", "setup.py", "gradstat/_fields.py"]
    for name in [*sources, "gradstat/_C.abi3.so", "gpu-bundle/_C.abi3.so"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    library = tmp_path / "gradstat" / "_C.abi3.so"
    assert not gpu.install(tmp_path)
    (tmp_path / "gpu-bundle" / "sources.txt").write_text(gpu.hash_of_sources(tmp_path))
    if changed is None:
        assert gpu.install(tmp_path)
        assert library.read_text() == "gpu-bundle/_C.abi3.so"
        return
    (tmp_path / changed).write_text("changed")
    with pytest.raises(SystemExit, match=r"compiled from other sources; rebuild it \(`make gpu-bundle`\)"):
        gpu.install(tmp_path)
    assert library.read_text() == "gradstat/_C.abi3.so"


# The calls that compute-sanitizer watches (tools/gpu_gates/short_set.py). Not in Triton's interpreter, which would take
# minutes.
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
