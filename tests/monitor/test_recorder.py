"""The file of a recording: exact round trips, crashes while saving, files that are damaged, newer or mean harm."""

import dataclasses
import json
import math
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recordings import assert_same, npy, recording, rewritten

from gradstat.monitor import Finding, Recording, Series
from gradstat.monitor.recording import COLUMNS, RecordingFileError, load, save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(recording(12, 6, incident=9), tmp_path / "run.gradstat")


@pytest.mark.parametrize("seed", range(5))
def test_round_trips_are_exact(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    made = recording(int(rng.integers(1, 60)), int(rng.integers(1, 30)), start=seed * 1000, incident=None, seed=seed)
    for table in made.tables.values():  # any bits, NaN of every kind among them
        table.values = rng.integers(0, 2**32, table.values.shape, np.uint32).view(np.float32)
    for values in made.scalars.values():
        values[:] = rng.integers(0, 2**64, values.shape, np.uint64).view(np.float64)
    assert_same(load(save(made, tmp_path / "a.gradstat")), made)


def test_empty_recordings_round_trip(tmp_path: Path) -> None:
    nothing = Recording(np.zeros(0, np.int64), {}, {})
    assert_same(load(save(nothing, tmp_path / "a.gradstat")), nothing)
    empty = Series((), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0, len(COLUMNS)), np.float32))
    made = Recording(np.zeros(0, np.int64), {"loss": np.zeros(0)}, {"gradient": empty})
    assert_same(load(save(made, tmp_path / "b.gradstat")), made)


def test_whatever_is_in_meta_is_saved_as_strict_json(tmp_path: Path) -> None:
    made = recording(4, 2, incident=None)
    made.meta = {
        "dtype": torch.float32,
        "n": np.float32(math.nan),
        "a": np.arange(3),
        "$float": "NaN",
        3: (1, -math.inf),
    }
    made.meta["nested"] = {"$pairs": [], "x": {"$float": 1}}
    path = save(made, tmp_path / "a.gradstat")
    with zipfile.ZipFile(path) as archive:
        json.loads(archive.read("header.json"), parse_constant=pytest.fail)
    got = load(path).meta
    assert math.isnan(got.pop("n"))
    assert got == {
        "dtype": "torch.float32",
        "a": [0, 1, 2],
        "$float": "NaN",
        "3": [1, -math.inf],
        "nested": {"$pairs": [], "x": {"$float": 1}},
    }


def test_numpy_alone_reads_the_file(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        header = json.loads(archive.read("header.json"))
        with archive.open("tables/0/values.npy") as member:
            values = np.load(member, allow_pickle=False)
    assert values.shape == (len(COLUMNS), 6, 12)
    assert header["columns"] == list(COLUMNS)
    np.testing.assert_array_equal(values.transpose(2, 1, 0), load(saved).tables["gradient"].values)


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


def spoiled(numel: int, steps: list[int], values: tuple[int, ...]) -> dict[str, object]:
    return {"tables": {"gradient": Series(("w",), np.ones(numel), np.array(steps), np.zeros(values))}}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"steps": np.array([3, 3, 4])}, "steps must be counted from 0 and rise"),
        ({"steps": np.array([-1, 3, 4])}, "steps must be counted from 0 and rise"),
        ({"steps": np.array([0.5, 1, 2])}, "must be a list of integers"),
        (
            {"scalars": {"loss": np.zeros(2)}},
            r"scalars\['loss'\] has shape \(2,\); expected one number for each of the 3",
        ),
        (spoiled(1, [0, 1, 2], (3, 2, 8)), "values has shape"),
        (spoiled(2, [0, 1, 2], (3, 1, 8)), "numel must hold 1"),
        (spoiled(1, [1, 0], (2, 1, 8)), "rise"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(
    changed: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    made = dataclasses.replace(recording(3, 2, incident=None), **changed)
    with pytest.raises(ValueError, match=expected):
        save(made, tmp_path / "folder" / "a.gradstat")
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_the_old_file_and_no_other(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save(recording(), saved)
    cyclic: dict[str, object] = {}
    cyclic["self"] = cyclic
    made = recording()
    made.meta = cyclic
    with pytest.raises(RecursionError):
        save(made, saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
    (saved.parent / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        save(recording(), saved.parent / "folder")
    assert {path.name for path in saved.parent.iterdir()} == {saved.name, "folder"}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a recording\n" * 100, b"\x80\x04\x95", bytes(10_000)])
def test_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(RecordingFileError, match=r"other is not a gradstat recording.*gradstat\.monitor\.record.*save"):
        load(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing.gradstat")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


def test_a_file_of_a_later_minor_version_is_read(saved: Path) -> None:
    members = {"more.npy": b"?"}
    with zipfile.ZipFile(saved) as archive:
        for name in ("tables/0/values.npy", "tables/1/values.npy"):
            members[name] = npy(np.insert(np.lib.format.read_array(archive.open(name)), 0, 7, 0))
    minor = rewritten(saved, members, version=[1, 9], columns=["kurtosis", *COLUMNS], more="?")
    assert_same(load(minor), load(saved))


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "something else"},
        {"version": None},
        {"n_steps": 13},
        {"n_steps": 10**18},
        {"n_steps": -1},
        {"columns": ["mean"]},
        {"columns": [*COLUMNS, "more"]},
        {"scalars": ["loss"] * 7},
        {"scalars": "abcdefg"},
        {"scalars": [{}] * 7},
        {"tables": {}},
        {"tables": [{"kind": "gradient", "names": ["w"], "n_steps": 12}]},
        {"findings": [{"rule": "x"}]},
        {"findings": [{**Finding("r", "error", 0, "n", {}).to_dict(), "severity": "fatal"}]},
        {"meta": 3},
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_is_refused(changed: dict[str, object], saved: Path) -> None:
    with pytest.raises(RecordingFileError, match=r"rewritten\.gradstat is not a gradstat recording, or is damaged"):
        load(rewritten(saved, **changed))


UNFIT: dict[str, dict[str, bytes]] = {
    **{
        f"header {text[:9]!r}": {"header.json": text}
        for text in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"$float": "1"}', b"9" * 5000)
    },
    **{
        f"steps {steps.dtype} {steps.shape} {steps.flat[0]}": {"steps.npy": npy(steps)}
        for steps in (
            np.arange(12, dtype=np.int32),
            np.arange(12).astype(">i8"),
            np.arange(12)[::-1].copy(),
            np.arange(-1, 11),
            np.zeros((12, 1), np.int64),
            np.array([{}] * 12, object),
        )
    },
}


@pytest.mark.parametrize("members", UNFIT.values(), ids=UNFIT)
def test_members_that_do_not_fit_are_refused(members: dict[str, bytes], saved: Path) -> None:
    with pytest.raises(RecordingFileError):
        load(rewritten(saved, members))


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
    # A member that is all that its declared size says, and consistent with the header, but beyond the limit.
    n = 30_000
    large = rewritten(saved, {"steps.npy": npy(np.arange(n)), "scalars.npy": npy(np.zeros((7, n)))}, n_steps=n)
    with pytest.raises(RecordingFileError, match="larger than the limit"):
        load(large, limit=1 << 20)


def test_a_declared_size_that_deflate_cannot_reach_is_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(b"tables/1/values.npy"))
    data[place + 24 : place + 28] = (2**32 - 2).to_bytes(4, "little")
    saved.write_bytes(data)
    with pytest.raises(RecordingFileError, match=r"declares 4,294,967,294 bytes in [\d,]+ compressed ones"):
        load(saved)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_compressions_are_refused(saved: Path, method: int) -> None:
    with pytest.raises(RecordingFileError, match="compressed by method"):
        load(rewritten(saved, method=method))
