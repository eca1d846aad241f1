"""Everything gradstat writes to a disk: the effects of a crash, a full disk, damaged files and hostile content."""

import dataclasses
import io
import json
import math
import multiprocessing
import os
import pickle
import signal
import stat
import time
import traceback
import tracemalloc
import zipfile
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.processes import Forks
from helpers.recordings import HOSTILE, assert_same, npy, recording, rewritten
from torch import nn

import gradstat
from gradstat.__main__ import main
from gradstat._version import __version__
from gradstat.integrations.lightning import GradstatCallback
from gradstat.integrations.loggers import JsonlWriter
from gradstat.monitor import AnomalyError, AnomalyWarning, Finding, Recording, Series, write_page
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.recording import COLUMNS, VERSION, RecordingFileError, compare, load, save

# Names that try to harm pages, paths, terminals, lines and encodings.
NAMES = (
    *HOSTILE,
    "../../etc/passwd",
    "C:\\windows\\system32",
    "a\nstep,forged\r\n1,2",
    "\x1b[2J\x1b]0;title\x07",
    "\u202egpj.exe",
    "\ud800 half",
    "{{template}} %s %n ${x} @DATA@",
    "x" * 20_000,
    "=cmd|' /C calc'!A0",
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(small(), tmp_path / "run.gradstat")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(recording(12, 6, incident=9), tmp_path / "run.gradstat")


@pytest.mark.parametrize("seed", range(5))
def test_round_trips_are_exact(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    made = recording(int(rng.integers(1, 60)), int(rng.integers(1, 30)), start=seed * 1000, incident=None, seed=seed)
    for table in made.tables.values():  # random bits, including NaN of every kind
        table.values = rng.integers(0, 2**32, table.values.shape, np.uint32).view(np.float32)
    for values in made.scalars.values():
        values[:] = rng.integers(0, 2**64, values.shape, np.uint64).view(np.float64)
    assert_same(load(save(made, tmp_path / "a.gradstat")), made)


def test_empty_recordings_round_trip(tmp_path: Path) -> None:
    empty = Series((), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0, len(COLUMNS)), np.float32))
    made = Recording(np.zeros(0, np.int64), {"loss": np.zeros(0)}, {"gradient": empty})
    assert_same(load(save(made, tmp_path / "b.gradstat")), made)


def test_whatever_is_in_meta_is_saved_as_json(tmp_path: Path) -> None:
    made = recording(4, 2, incident=None)
    made.meta = {"dtype": torch.float32, "n": np.float32(math.nan), "a": np.arange(3), 3: (1, -math.inf)}
    path = save(made, tmp_path / "a.gradstat")
    with zipfile.ZipFile(path) as archive:
        assert archive.read("header.json").isascii()
    got = load(path).meta
    assert math.isnan(got.pop("n"))
    assert got == {"dtype": "torch.float32", "a": [0, 1, 2], "3": [1, -math.inf]}


def test_saving_twice_gives_the_same_bytes_in_folders_that_are_made_and_through_links(
    saved: Path, tmp_path: Path
) -> None:
    again = save(load(saved), str(tmp_path / "deep" / "er" / "again.gradstat"))
    assert again.read_bytes() == saved.read_bytes()
    link = tmp_path / "latest.gradstat"
    link.symlink_to(again)
    save(recording(3, 2, incident=None), link)
    assert link.is_symlink()
    assert_same(load(again), recording(3, 2, incident=None))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"steps": np.array([3, 3, 4])}, "steps must be at least 0 and strictly increasing"),
        ({"steps": np.array([0.5, 1, 2])}, "must be a list of integers"),
        ({"scalars": {"loss": np.zeros(2)}}, r"scalars\['loss'\] has shape \(2,\); expected \(3,\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(
    changed: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    made = dataclasses.replace(recording(3, 2, incident=None), **changed)
    with pytest.raises(ValueError, match=expected):
        save(made, tmp_path / "folder" / "a.gradstat")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["a folder", "locked", "full"])
def test_a_failure_while_writing_names_the_path_and_leaves_the_old_file_and_no_other(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("folder", "run.gradstat")
    path.mkdir(parents=True) if fails == "a folder" else save(small(), path)
    before = path.is_dir() or path.read_bytes()
    if fails == "locked":
        monkeypatch.setattr(os, "replace", lambda unfinished, _: os.rmdir(unfinished))
    if fails == "full":
        monkeypatch.setattr(os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"1"))
    with pytest.raises(OSError, match=r"folder/run\.gradstat'$") as error:
        save(recording(), path)
    assert ".tmp" not in "".join(traceback.format_exception(error.value))
    assert (path.is_dir() or path.read_bytes()) == before
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_as_json_leaves_the_old_file(saved: Path) -> None:
    made, before = recording(), saved.read_bytes()
    made.meta["self"] = made.meta
    with pytest.raises(ValueError, match="nested in more than 100 levels"):
        save(made, saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a recording\n" * 100, b"\x80\x04\x95", bytes(10_000)])
def test_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(RecordingFileError, match="other cannot be read as a gradstat recording: "):
        load(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing.gradstat")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


MEMBERS = (
    *(("header.json", text) for text in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"9" * 5000)),
    *(("steps.npy", npy(np.arange(12).astype(kind))) for kind in ("int32", ">i8")),
    *(("steps.npy", npy(steps)) for steps in (np.arange(12)[::-1].copy(), np.arange(-1, 11), np.array([{}] * 12))),
    ("steps.npy", npy(np.zeros((12, 1), np.int64))),
)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        *(({"members": {name: data}}, r"rewritten\.gradstat cannot be read") for name, data in MEMBERS),
        *(({"method": method}, "compressed by method") for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)),
    ],
    ids=lambda changed: str(changed)[:40],
)
def test_headers_members_and_compressions_that_do_not_fit_are_refused(
    changed: dict[str, Any], told: str, saved: Path
) -> None:
    with pytest.raises(RecordingFileError, match=told):
        load(rewritten(saved, **changed))


def test_a_bomb_is_refused_before_it_is_unpacked(saved: Path) -> None:
    claimed = npy(np.zeros(12, np.int64))[:128].replace(b"(12,)", b"(10**9,)")
    for data in (claimed, npy(np.zeros(2, np.int64))[:128].replace(b"(2,), }", b"(1 << 60,), }"), bytes(50 << 20)):
        bomb = rewritten(saved, {"steps.npy": data})
        tracemalloc.start()
        try:
            with pytest.raises(RecordingFileError):
                load(bomb)
            assert tracemalloc.get_traced_memory()[1] < 10 << 20
        finally:
            tracemalloc.stop()
    # A few bytes of JSON become a hundred of Python's; what is in texts does not count.
    for values, told in (
        (b"{}," * 3_000_000, "values, more than"),
        (b'"{,\\\\\\",,,,",' * 700_000, "has no 'version'"),
    ):
        bomb = rewritten(saved, {"header.json": b'{"format":"gradstat recording","meta":[%s0]}' % values})
        tracemalloc.start()
        with pytest.raises(RecordingFileError, match=told):
            load(bomb)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
        tracemalloc.stop()
    # A member of its declared size, and consistent with the header, but larger than the limit.
    n = 30_000
    large = rewritten(saved, {"steps.npy": npy(np.arange(n)), "scalars.npy": npy(np.zeros((7, n)))})
    with pytest.raises(RecordingFileError, match="larger than the limit"):
        load(large, limit=1 << 20)


def test_a_declared_size_that_deflate_cannot_reach_is_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(b"tables/1/values.npy"))
    data[place + 24 : place + 28] = (2**32 - 2).to_bytes(4, "little")
    saved.write_bytes(data)
    with pytest.raises(RecordingFileError, match="tables/1/values: expected 4,294,967,294 bytes"):
        load(saved, limit=8 << 30)


def test_a_recording_that_is_cut_at_any_byte_or_of_which_a_block_never_reached_the_disk_is_refused(tiny: Path) -> None:
    data = tiny.read_bytes()
    assert 500 < len(data) < 5000
    cut = [data[:length] for length in range(len(data))]
    holed = [(data[:at] + bytes(64) + data[at + 64 :])[: len(data)] for at in range(0, len(data), 32)]
    for damaged in cut + holed:
        tiny.write_bytes(damaged)
        with pytest.raises(RecordingFileError, match=r"run\.gradstat cannot be read as a gradstat recording"):
            load(tiny)


def test_a_bit_that_is_flipped_anywhere_is_noticed_or_without_effect(tiny: Path) -> None:
    data, whole = bytearray(tiny.read_bytes()), load(tiny)
    refused = 0
    for i in range(len(data)):
        data[i] ^= 1 << i % 8
        tiny.write_bytes(data)
        data[i] ^= 1 << i % 8
        try:
            assert_same(load(tiny), whole)
        except RecordingFileError:
            refused += 1
    assert refused > len(data) / 2  # the others are dates, versions of tools and attributes, which are not read


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # about fork in a process with threads
def test_killed_at_any_time_what_was_written_is_whole(tmp_path: Path) -> None:
    made = [recording(40, 20, seed=seed) for seed in (1, 2)]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def write_for_ever() -> None:
        log = JsonlWriter(tmp_path / "log.jsonl")
        for step in range(10**9):
            save(made[step % 2], tmp_path / "run.gradstat")
            for _ in range(50):
                log.write({"loss": 0.5, "norm": 2.0}, step)
            if step == 3:
                theirs.send("going")

    for after in (0.01, 0.05, 0.1):
        process = context.Process(target=write_for_ever, daemon=True)
        process.start()
        assert ours.poll(30)
        ours.recv()
        time.sleep(after)
        process.kill()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        there = load(tmp_path / "run.gradstat")
        assert_same(there, made[int(there.scalars["norm"][0] != made[0].scalars["norm"][0])])
        *lines, last = (tmp_path / "log.jsonl").read_text().split("\n")
        assert last == ""
        assert all(json.loads(line).keys() == {"step", "loss", "norm"} for line in lines)
    assert len(list(tmp_path.glob(".run.gradstat.*.tmp"))) <= 3  # one for each kill at most


FULL = """
import os, resource, sys, warnings
import torch
import gradstat
from helpers.recordings import recording
from gradstat._core.files import replacing
from gradstat.integrations.lightning import GradstatCallback
from gradstat.integrations.loggers import JsonlWriter
from gradstat.monitor import write_page
from gradstat.recording import save

large = recording(300, 300)
model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(200)))

folder = sys.argv[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
run, page = folder + "/run.gradstat", folder + "/run.html"
save(recording(40, 12), run)
with replacing(page) as file:
    file.write(b"old")
for write in (lambda: save(large, run), lambda: write_page(large, page)):
    try:
        write()
        print("written")
    except OSError as error:
        print("full")

# A monitor says so and goes on; the file keeps what it had.
monitor = gradstat.Monitor(model, save_to=run, on_anomaly="record")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(25):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) if step < 23 else torch.full_like(parameter, float("nan"))
        monitor.step(1.0)
print(monitor.steps, any("could not be saved" in str(warning.message) for warning in caught))
monitor._file.path = None  # nothing more at the end

# A log loses the line that did not fit, and no other.
os.remove(page)
path = folder + "/log.jsonl"
log, refused, step = JsonlWriter(path), 0, 0
while refused < 3:  # the first is cut, the others get nothing in
    try:
        log.write({"loss": 0.125, "norm": 2.5}, step)
        step += 1
    except OSError:
        refused += 1
with open(path, "rb+") as file:  # somebody makes room
    whole = file.read()
    file.truncate(len(whole) - 8000)
for loss in (0.25, 0.5):
    log.write({"loss": loss, "norm": 2.5}, 7)
lines = open(path).read().splitlines()
print(*lines[-2:], len(lines) > 500)
os.remove(path)
"""


def test_a_full_disk_costs_what_does_not_fit_and_nothing_else(tmp_path: Path, forks: Forks) -> None:
    """A file size limit of 64 KiB imitates a full disk."""
    *saved, lines = forks.output_of(FULL, tmp_path).splitlines()
    assert saved == ["full", "full", "25 True"]
    assert lines == '{"step": 7, "loss": 0.25, "norm": 2.5} {"step": 7, "loss": 0.5, "norm": 2.5} True'
    assert_same(load(tmp_path / "run.gradstat"), recording(40, 12))
    assert [path.name for path in tmp_path.iterdir()] == ["run.gradstat"]


class _Elements(HTMLParser):
    """Lists a page's elements with the names of their attributes, and collects its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[Any] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data: str) -> None:
        self.text += data


def named(names: tuple[str, ...]) -> Recording:
    steps = np.arange(2)
    values = np.ones((2, len(names), len(COLUMNS)), np.float32)
    findings = tuple(
        Finding(name or "r", "error", 1, name, {name: name}, (name,), (name,), name, name) for name in names
    )
    tables = {"gradient": Series(names, np.ones(len(names), np.int64), steps, values)}
    meta = {"model": names[0], "culprit": "\n".join(names), names[1]: names[2]}
    return Recording(steps, {"norm": np.ones(2), names[0]: np.ones(2)}, tables, findings, names, meta)


def small() -> Recording:
    return named(("a.weight", "b.bias", ""))


def test_names_that_mean_harm_are_saved_read_and_told_without_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(named(NAMES), tmp_path / "run.gradstat")
    assert main(["view", str(path), "--no-page"]) == 0
    assert main(["view", str(path), "--no-page", "--json"]) == 0
    shown = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in shown)  # others may be terminal escapes
    made = named(NAMES)
    made.scalars |= {name: np.full(2, np.inf) for name in NAMES}
    made.tables |= dict.fromkeys(NAMES, made.tables["gradient"])
    save(made, path)
    assert_same(load(path), made)
    assert list(tmp_path.iterdir()) == [path]


def test_files_whose_names_mean_harm_are_told_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save(small(), tmp_path / "\x1b[2J\n.gradstat"))
    assert main(["view", path]) == 0
    for arguments in ([path, path], [f"--{path}"], [path, "--no-page", "--output", path]):
        with pytest.raises(SystemExit, match="2"):
            main(["view", *arguments])
    shown = "".join(capsys.readouterr())
    Path(path).write_bytes(b"")
    for arguments in (["view", path], ["diff", path, path], ["view", f"{path}.none"]):
        assert main(arguments) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.count("\n") == 1
        assert told.err.startswith(f"gradstat {arguments[0]}: ")
        shown += told.err
    assert "No such file" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_of_a_hundred_thousand_findings_the_first_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = small()
    findings = [Finding("r", "warning", step, "w", {}) for step in range(0, 100_000, 5)]
    made.findings = (*findings, Finding("r", "error", 10**6, "w", {}))
    path = save(made, tmp_path / "run.gradstat")
    assert main(["view", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "... and 19,901 more findings" in shown
    assert shown.count("\n") < 500
    assert "19,901 more" in Diagnosis.of(made).to_html()
    assert [one["findings"][-1] for one in Diagnosis.of(made).to_dict()["incidents"]] == [19_999, 20_000]
    shown = path.with_suffix(".html").read_text()
    assert '"step":1000000' in shown
    assert '"findingsLeftOut":19001' in shown


@pytest.mark.parametrize("name", [name.replace(".", " ") for name in NAMES if 0 < len(name) < 100])
def test_names_that_mean_harm_reach_no_terminal(name: str) -> None:
    """Neither from reports and their errors, nor from findings, their warnings and errors, diagnoses and culprits."""

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))

        def forward(self) -> torch.Tensor:
            return getattr(self, name).sqrt().sum()

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = model()
        loss.backward()
        return loss

    model = Rooted()
    policy = {"error": ("warn", "raise"), "warning": "record"}
    monitor = gradstat.Monitor(model, torch.optim.SGD(model.parameters()), on_anomaly=policy, replay=step)
    texts = [str(gradstat.check(model))]  # it has no gradient yet
    with gradstat.MicroBatches(model) as micro_batches:
        step()
        micro_batches.check()
        texts += [str(micro_batches.result())]
    report = gradstat.check(model)
    with pytest.raises(gradstat.NonFiniteGradientError) as bad:
        report.raise_if_nonfinite()
    texts += [str(report), repr(report), repr(report[name]), str(bad.value)]
    with pytest.warns(AnomalyWarning) as told, pytest.raises(AnomalyError) as anomaly:
        monitor.step()
    texts += [str(anomaly.value), *(str(warning.message) for warning in told)]
    with pytest.raises(KeyError) as unknown:
        gradstat.check(model)[name + "x"]
    texts += [str(unknown.value), str(monitor.replay())]
    assert all(name in finding.name for finding in monitor.findings)  # as it is, to look it up
    diagnosis = monitor.diagnose()
    texts += [str(diagnosis), diagnosis.headline(), repr(diagnosis), *map(str, diagnosis.findings)]
    texts += [finding.text for finding in diagnosis.findings]
    shown = "".join(texts)
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert not name.isprintable() or name in shown
    lines = [line for text in texts for line in text.splitlines()]
    assert not any(line.lstrip().startswith("step,forged") for line in lines)


def test_pages_have_the_same_elements_whatever_the_names(tmp_path: Path) -> None:
    def report(names: tuple[str, ...]) -> str:
        tensors = {name: torch.tensor([1.0, float("nan")]) for name in names}
        return gradstat.check_tensors(tensors)._repr_html_()

    def page(names: tuple[str, ...]) -> str:
        return write_page(named(names), tmp_path / "run.html", names[0]).read_text()

    def diagnosis(names: tuple[str, ...]) -> str:
        return Diagnosis.of(named(names)).to_html()

    layers = tuple(f"layer{i}.weight" for i in range(len(NAMES)))
    for made in (page, diagnosis, report):
        hostile, harmless = _Elements(made(NAMES)), _Elements(made(layers))
        assert sorted(hostile.elements) == sorted(harmless.elements)
    assert "<img src=x" in _Elements(diagnosis(NAMES)).text  # shown as text


def test_a_rule_of_any_name_has_its_snapshot_in_the_folder(tmp_path: Path) -> None:
    def always(self: Any, window: Any) -> list[Finding]:
        return [self.found(0, "w", "always")]

    rules = [gradstat.monitor.rule(name, severity="error")(always) for name in ("../../evil", "a/b\0c", "r" * 500)]
    path = tmp_path / "in" / "run.gradstat"
    with gradstat.Monitor(nn.Linear(2, 2), rules=[made() for made in rules], on_anomaly="snapshot", save_to=path) as it:
        it.step(1.0)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert len(written) == 4
    assert all(path.startswith("in/run") for path in written)


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1])
def test_files_and_states_of_another_version_name_both_versions_and_the_remedy(
    version: int, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = rewritten(tiny, version=version, gradstat="99.1", columns="of another kind")
    expected = rf"\['version'\]: expected {VERSION}, got {version}, .* 99\.1; this is .*{__version__}\."
    with pytest.raises(RecordingFileError, match=expected):
        load(other)
    assert main(["view", str(other)]) == 2
    assert "Use the gradstat that wrote it" in capsys.readouterr().err
    monitor = gradstat.Monitor(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="^state" + expected):
        monitor.load_state_dict({**monitor.state_dict(), "version": version, "gradstat": "99.1"})


@dataclasses.dataclass
class _Payload:
    """Makes a folder when it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_loading_never_unpickles(tiny: Path, tmp_path: Path) -> None:
    harmed = tmp_path / "harmed"
    payload, as_torch = _Payload(str(harmed)), io.BytesIO()
    torch.save(payload, as_torch)
    members = pickle.dumps(payload), npy(np.array([payload], dtype=object))
    hostile = [*members, as_torch.getvalue()]
    with zipfile.ZipFile(tiny) as archive:
        names = archive.namelist()
    for name in names:
        for content in members:
            hostile.append(rewritten(tiny, {name: content}, method=zipfile.ZIP_STORED).read_bytes())
    for content in hostile:
        tiny.write_bytes(content)
        with pytest.raises(RecordingFileError):
            load(tiny)
    assert not harmed.exists()
    pickle.loads(hostile[0])
    assert harmed.exists()  # unpickling would have made it


def test_paths_stay_in_the_folder_in_which_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = tmp_path / "first", tmp_path / "later"
    later.mkdir()
    first.mkdir()
    monkeypatch.chdir(first)
    model = nn.Linear(2, 1)
    named = gradstat.Monitor(model, save_to="run.gradstat", on_anomaly="record")
    unnamed = gradstat.Monitor(model, on_anomaly="snapshot")
    lightning = GradstatCallback(save_to="lightning.gradstat", save_dir="saved")
    writer = JsonlWriter("log.jsonl")
    monkeypatch.chdir(later)
    model(torch.full((1, 2), torch.nan)).sum().backward()
    for monitor in (named, unnamed):
        monitor.step()
        monitor.detach()
    assert not list(later.iterdir())
    assert {path.suffix for path in first.iterdir()} == {".gradstat", ".jsonl"}
    assert len(list(first.glob("incident-step0-*"))) >= 1
    assert (lightning.arguments["save_to"], writer.path) == (first / "lightning.gradstat", first / "log.jsonl")


def test_devices_and_pipes_are_written_to_and_neither_replaced_nor_read(tiny: Path, tmp_path: Path) -> None:
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    save(recording(), null)
    assert main(["view", str(tiny), "--output", str(null)]) == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    read, write = os.pipe()
    for path in (f"/dev/fd/{read}", "/dev/null"):
        for reader in (load, gradstat.monitor.Golden.load):
            with pytest.raises(RecordingFileError, match=f"{path} is a pipe or a device; expected a regular file"):
                reader(path)
    save(small(), f"/dev/fd/{write}")
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == tiny.read_bytes()


STEPS = Recording(np.arange(9), {"loss": np.arange(9.0)}, {})
LINEAR = nn.Linear(2, 1)
CALLS: dict[str, Any] = {
    "on_anomaly watch rules save_to options": partial(gradstat.Monitor, LINEAR),
    "scaler closure model extra_groups": partial(gradstat.guarded_step, torch.optim.SGD(LINEAR.parameters())),
    "max_norm norm_type extra_groups": partial(gradstat.clip_grad_norm_, [*LINEAR.parameters()], max_norm=1.0),
    "tensors": gradstat.stats,
    "scale max_loss max_norm": gradstat.SpikeGuard,
    "path limit": partial(load, path="run.gradstat"),
    "recording": partial(save, path="run.gradstat"),
    "title": partial(write_page, STEPS, "run.html"),
    "recordings": gradstat.monitor.Golden.of,
    "a b tolerance": partial(compare, a=STEPS, b=STEPS),
    "state optimizer scaler": partial(gradstat.monitor.find_culprit, LINEAR, print),
    "allow step_fn": partial(gradstat.monitor.assert_healthy, LINEAR, step_fn=print, steps=3),
    "causes advice": partial(gradstat.monitor.rule, "name"),
}


NOT_LISTS = "on_anomaly watch rules extra_groups tensors recordings state optimizer allow causes advice"


@pytest.mark.parametrize(("name", "call"), [(name, call) for names, call in CALLS.items() for name in names.split()])
def test_an_argument_of_a_wrong_type_is_named(name: str, call: Any) -> None:
    told = rf"{name}\b.*expected|expected .*{name}|{name} has "
    for wrong in (object(), 1.5 if name in NOT_LISTS else [1]):
        with pytest.raises((TypeError, ValueError), match=told) as error:
            call(**{name: wrong})
        assert "not iterable" not in str(error.value)


def test_a_group_of_other_ranks_is_named() -> None:
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    for extra in (outside, [outside], [(outside, list(LINEAR.parameters()))]):
        with pytest.raises(ValueError, match="extra_groups has a group that this rank is not in"):
            gradstat.check(LINEAR, extra_groups=extra)
