"""How monitors end: places that cannot be written to, programs and blocks that end, collections, forks, threads."""

import errno
import gc
import math
import os
import stat
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import Forks
from helpers.training import fill, trained
from torch import nn

import gradstat
from gradstat._core.files import replacing
from gradstat.monitor import AnomalyWarning, Finding, Rule, rule
from gradstat.monitor.segments import PendingRows
from gradstat.recording import load

SECONDS = 60


@rule("late", severity="error")
def late(self: Rule, window: Any) -> list[Finding]:
    """Finds something in step 5, but has no bands, so that the step waits for the next review."""
    return [self.found(5, "loss", "there it was")] if 5 in window.steps else []


def made(**options: Any) -> gradstat.Monitor:
    torch.manual_seed(0)
    return gradstat.Monitor(nn.Linear(3, 2), **{"on_anomaly": "record", **options})


def stepped(monitor: gradstat.Monitor, steps: int = 7) -> gradstat.Monitor:
    fill(monitor._model)
    for _ in range(steps):
        monitor.step(1.0)
    return monitor


def obstructed(folder: Path) -> None:
    """Replaces an empty folder by a file, so that nothing can be made below it."""
    folder.rmdir()
    folder.touch()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the current folder ``here`` and the temporary one ``temporary``."""
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


# Places ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/proc/nope/run.gradstat", "No such file"),
        ("", "Is a directory"),
        ("folder", "Is a directory"),
        ("file/run.gradstat", "Not a directory|File exists"),
        ("n" * 300, "File name too long"),
        ("a\0b", "null"),
    ],
)
@pytest.mark.parametrize("way", ["Monitor", "auto"])
def test_an_impossible_place_is_refused_before_anything_is_watched(
    way: str, place: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    make: Any = gradstat.Monitor if way == "Monitor" else gradstat.auto
    with pytest.raises(ValueError, match=rf"save_to: no file can be made at .*({reason}).*Choose a file"):
        make(model, optimizer, save_to=place, watch=["outputs"])
    assert not model._forward_hooks
    assert not model.weight._post_accumulate_grad_hooks
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_a_full_disk_does_not_keep_a_monitor_from_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("gradstat.monitor.flight_file.try_replacing", full)
        with pytest.warns(RuntimeWarning, match=r"save_to: no file can be made at .*No space left"):
            monitor = made(save_to=tmp_path / "run.gradstat")
    stepped(monitor).detach()
    assert len(load(tmp_path / "run.gradstat").steps) == 7


def test_a_place_is_tried_without_leaving_anything_but_its_folder(tmp_path: Path) -> None:
    monitor = made(save_to=tmp_path / "deep" / "er" / "run.gradstat")
    assert list((tmp_path / "deep" / "er").iterdir()) == []
    monitor.detach()
    assert load(tmp_path / "deep" / "er" / "run.gradstat").steps.size == 0


@pytest.mark.parametrize(
    "end",
    [
        lambda handle: handle.monitor.detach(),
        lambda handle: handle.monitor.__exit__(None, None, None),
        lambda handle: handle.remove(),
        lambda handle: handle.__exit__(None, None, None),
    ],
)
def test_a_place_that_is_gone_at_the_end_costs_a_warning_that_says_where_the_recording_is(
    end: Any, folders: Path
) -> None:
    model, path = nn.Linear(3, 2), folders / "gone" / "run.gradstat"
    handle = gradstat.auto(torch.optim.SGD(model.parameters()), model, save_to=path, on_anomaly="record")
    stepped(handle.monitor)
    obstructed(path.parent)
    expected = r"gone/run\.gradstat could not be saved: .*\. It is in .*/here/run-"
    with pytest.warns(RuntimeWarning, match=expected) as told:
        end(handle)
    (spare,) = (folders / "here").iterdir()
    assert str(spare) in str(told[0].message)
    assert len(load(spare).steps) == 7
    assert load(spare).meta["why"] == "the run ended"
    handle.remove()


def test_a_place_that_is_gone_in_the_middle_is_replaced_by_one_file_and_used_again_when_it_is_back(
    folders: Path,
) -> None:
    path = folders / "gone" / "run.gradstat"
    monitor = made(save_to=path)
    obstructed(path.parent)
    for _ in range(3):
        with pytest.warns(RuntimeWarning, match="could not be saved"):
            monitor.step(math.nan)
        stepped(monitor, 30)
    (spare,) = (folders / "here").iterdir()
    assert load(spare).meta["why"].startswith("[error] step 62")
    (folders / "gone").unlink()
    monitor.detach()
    assert len(load(path).steps) == 93


def test_without_a_current_folder_the_temporary_one_is_used_and_without_it_a_warning_remains(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = made(save_to="/dev/full")
    (folders / "here").rmdir()
    with pytest.warns(RuntimeWarning, match=r"/dev/full could not be saved.*space.*It is in .*/temporary/full-"):
        monitor.step(math.nan)
    (spare,) = (folders / "temporary").glob("full-*.gradstat")
    assert load(spare).findings
    spare.unlink()
    obstructed(folders / "temporary")
    with pytest.warns(RuntimeWarning, match="nor in the current or the temporary folder"):
        monitor.detach()


def test_a_recording_that_cannot_be_made_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_self: object) -> None:
        raise MemoryError("no memory left")

    monitor = stepped(made(save_to=tmp_path / "run.gradstat"))
    monkeypatch.setattr("gradstat.monitor.log.StepLog.recording", fails)
    with pytest.warns(RuntimeWarning, match=r"could not be saved: MemoryError: no memory left"):
        monitor.detach()


@pytest.mark.parametrize("policy", ["raise", lambda _monitor, _finding: [][1]])
@pytest.mark.parametrize("way", ["Monitor", "auto"])
def test_the_exception_that_ends_a_block_is_not_replaced(way: str, policy: Any, folders: Path) -> None:
    model = nn.Linear(3, 2)
    make: Any = gradstat.Monitor if way == "Monitor" else gradstat.auto
    options = {"rules": [late()], "on_anomaly": policy, "save_to": folders / "gone" / "run.gradstat"}
    watched = make(model, torch.optim.SGD(model.parameters()), **options)
    stepped(watched if way == "Monitor" else watched.monitor, 6)
    obstructed(folders / "gone")

    def block() -> None:
        with watched:
            _ = 1 // 0

    told = pytest.warns(AnomalyWarning, match="there it was|list index")
    with pytest.warns(RuntimeWarning, match="could not be saved"), told, pytest.raises(ZeroDivisionError):
        block()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o777])
def test_a_file_that_is_replaced_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "run.gradstat"
    mask = os.umask(0o027)
    try:
        made().save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640  # as of any new file
        path.chmod(mode)
        made().save(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(mask)


def test_a_file_is_never_more_readable_than_the_one_that_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor while it is written; and a file system without permissions ends nothing."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no permissions here")

    path = tmp_path / "run.gradstat"
    path.touch(0o600)
    monkeypatch.setattr(os, "chmod", refuse)
    with replacing(path) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# The last steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_monitor_that_goes_out_of_scope_warns_of_its_last_steps_and_writes_its_file(
    in_a_cycle: bool, tmp_path: Path
) -> None:
    gc.collect()
    path = tmp_path / "run.gradstat"
    monitor = stepped(made(rules=[late()], on_anomaly={"error": ("raise", "rollback")}, save_to=path))
    model = weakref.ref(monitor._model)
    if in_a_cycle:
        monitor._model.watched_by = [monitor]
    assert monitor.findings == []
    held = [monitor]
    del monitor
    with pytest.warns(AnomalyWarning, match="step 5, late: there it was"):
        (held.clear(), gc.collect())
    assert model() is None
    recording = load(path)
    assert len(recording.steps) == 7
    assert recording.findings[0].step == 5
    assert recording.meta["why"] == "nothing referred to the monitor any more"


def test_steps_whose_numbers_are_still_in_transit_are_read_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without asking other ranks, which may have ended."""
    monkeypatch.setattr(PendingRows, "needs_copy", True)
    monitor = stepped(made(save_to=tmp_path / "run.gradstat", options={"lag": 3}))
    monitor.step(math.nan)
    assert len(monitor._pending) == 3
    monitor._pending = deque(pending._replace(origin=pytest.fail) for pending in monitor._pending)
    del monitor
    recording = load(tmp_path / "run.gradstat")
    assert recording.steps.tolist() == list(range(8))
    assert recording.findings[0].rule == "nonfinite-loss"


def test_a_monitor_without_steps_does_not_overwrite_the_recording_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "run.gradstat"
    stepped(made(save_to=path)).detach()
    made(save_to=path)
    gc.collect()
    assert len(load(path).steps) == 7


def test_a_detached_monitor_ends_once_and_says_once_that_it_watches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.gradstat"
    monitor = stepped(made(save_to=path))
    monitor.detach()
    path.unlink()
    said = r"step\(\) of a monitor that was detached at step 7 watches nothing"
    with pytest.warns(AnomalyWarning, match=said) as told:
        assert monitor.step(1.0) == []
    assert [warning.filename for warning in told] == [__file__]
    assert monitor.batch(torch.ones(2)) == []
    assert monitor.steps == 7
    monitor.detach()
    del monitor
    assert not path.exists()


ENDING = """
import os, sys, warnings
import torch
import gradstat

def late(self, window):
    return [self.found(5, "loss", "there it was")] if 5 in window.steps else []

def watched(name, policy):
    rule = gradstat.monitor.rule(name, severity="error")(late)
    monitor = gradstat.Monitor(torch.nn.Linear(2, 2), rules=[rule()], on_anomaly=policy)
    for _ in range(7):
        monitor.step(1.0)
    return monitor

kept = [watched(policy, policy) for policy in ("warn", "raise", "record")]
kept.append(watched("calling", lambda monitor, finding: print("called", finding.step)))
kept.append(watched("failing", lambda monitor, finding: 1 // 0))
if sys.argv[1] == "fork":
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)  # only the child ends as programs do
elif sys.argv[1] != "default":
    warnings.simplefilter(sys.argv[1])
"""


@pytest.mark.parametrize("way", ["default", "ignore", "error", "fork"])
def test_the_errors_of_the_last_steps_are_shown_when_a_program_ends(way: str, forks: Forks) -> None:
    """If warnings are ignored, they are logged; if they are errors, all monitors end nevertheless."""
    ended = forks.run(ENDING, way, warnings="default")
    assert ended.returncode == 0
    shown = {name for name in ("warn", "raise", "record") if f"step 5, {name}: there it was" in ended.stderr}
    assert shown == (set() if way == "fork" else {"warn", "raise"}), ended.stderr
    assert way != "fork" or not ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == (way in ("default", "error"))
    assert ended.stdout == ("" if way == "fork" else "called 5\n")


def test_the_end_of_a_program_does_not_wait_for_ever_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstat.monitor.monitor._PATIENCE", 0.05)
    monitor = stepped(made())
    with ThreadPool(1) as pool:
        pool.apply(monitor._lock.acquire)
        with pytest.warns(RuntimeWarning, match="another thread is inside of the monitor"):
            monitor._end("the program ended")
        pool.apply(monitor._lock.release)


# Threads -----------------------------------------------------------------------------------------------------


def within_time(work: Callable[[], Any]) -> Any:
    """The result of ``work``, run in a thread of its own; fails if it does not end."""
    with ThreadPool(1) as pool:
        return pool.apply_async(work).get(SECONDS)


def test_threads_may_share_a_monitor(tmp_path: Path) -> None:
    threads, steps = 4, 150
    seen: list[int] = []
    policy = {"error": lambda m, finding: seen.append(finding.step), "warning": "record"}
    monitor = stepped(made(on_anomaly=policy, watch={"parameters": 3}, options={"review_every": 5}), 0)
    begin = threading.Barrier(threads)

    def work(number: int) -> None:
        begin.wait(SECONDS)
        for step in range(steps):
            monitor.batch(torch.full((2, 3), float(number)))
            monitor.step(math.nan if number == 0 and step == 70 else float(number))
            if step % 20 == number:
                monitor.save(tmp_path / f"{number}.gradstat")
                monitor.state_dict()
                monitor.diagnose()

    with ThreadPool(threads) as pool:
        pool.map_async(work, range(threads), chunksize=1).get(SECONDS)
    recording = load(monitor.save(tmp_path / "run.gradstat"))
    assert monitor.steps == threads * steps
    assert recording.steps.tolist() == list(range(threads * steps))
    losses = recording.scalars["loss"].tolist()
    assert [losses.count(float(number)) for number in range(threads)] == [steps - 1, steps, steps, steps]
    errors = [finding.step for finding in monitor.findings if finding.severity == "error"]
    assert seen == errors == [losses.index(next(loss for loss in losses if math.isnan(loss)))]
    measured = set(recording.tables["parameter"].steps.tolist())  # also after an error
    assert measured - {*seen} == {*range(0, threads * steps, 3)} - {*seen}


def test_what_a_policy_calls_may_use_the_monitor_in_any_thread(tmp_path: Path) -> None:
    """It runs outside of the lock."""
    seen: list[int] = []

    def respond(monitor: gradstat.Monitor, finding: Finding) -> None:
        within_time(lambda: (monitor.save(tmp_path / "run.gradstat"), monitor.step(1.0)))
        seen.append(within_time(lambda: len(monitor.diagnose().findings)))
        monitor.flush()

    monitor = made(on_anomaly=respond)
    within_time(lambda: [monitor.step(loss) for loss in (1.0, math.nan, 1.0)])
    assert monitor.recording().steps.tolist() == [0, 1, 2, 3]
    assert seen == [len(monitor.findings)]


@pytest.mark.filterwarnings("ignore::gradstat.monitor.AnomalyWarning")
@pytest.mark.parametrize("policy", ["replay", "record"])
def test_hooks_in_a_replay_may_use_the_monitor_in_any_thread(policy: str) -> None:
    """As those of a backward pass on a GPU, which run in threads of the device."""
    model = nn.Linear(3, 2)
    seen: list[bool] = []

    def hook(_gradient: object) -> None:
        seen.append(within_time(lambda: (monitor.step(1.0), monitor.batch(torch.ones(1)), monitor.diagnose().ok))[2])

    model.weight.register_post_accumulate_grad_hook(hook)

    def step() -> None:
        (model(torch.ones(2, 3)) * math.inf).sum().backward()

    monitor = gradstat.Monitor(model, on_anomaly=policy, replay=step)
    fill(model, math.nan)
    within_time(lambda: (monitor.step(), policy == "record" and monitor.replay()))
    assert seen
    assert monitor.culprit is not None
    assert monitor.recording().steps.tolist() == [0]


# Lazy modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["Monitor", "auto", "auto by optimizer"])
def test_a_model_with_lazy_modules_is_watched_once_it_has_shapes(way: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"on_anomaly": "record", "watch": ["parameters", "buffers"]}
    if way == "Monitor":
        monitor = gradstat.Monitor(model, optimizer, **options)
    else:
        monitor = gradstat.auto(optimizer, *[model] * (way == "auto"), **options).monitor
    assert monitor.recording().meta["parameters"] == 10
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        if way == "Monitor":
            monitor.step()
        optimizer.step()
    recording = monitor.recording()
    assert recording.steps.tolist() == [0, 1, 2]
    assert len(recording.backward_order) == 6
    assert recording.tables["parameter"].steps.tolist() == [0, 1, 2]
    assert recording.tables["parameter"].numel.sum() == recording.meta["parameters"]
    monitor.detach()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_module_that_never_gets_its_shape_is_left_out() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "lazy": nn.LazyLinear(3)})
    monitor = gradstat.Monitor(model, on_anomaly="record", watch=["parameters"])
    with pytest.warns(UserWarning, match=r"not watched: the parameter 'lazy\.weight'.*has no shape yet") as told:
        trained(monitor, lambda step: model["used"](torch.ones(1, 2)).sum(), 2)
    assert len(told) == 1
    assert monitor.recording().tables["parameter"].names == ("used.weight", "used.bias")
    assert set(monitor.recording().backward_order) == {"used.weight", "used.bias"}


def test_a_parameter_that_refuses_a_hook_leaves_no_other_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(nn.Parameter):
        def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
            raise NotImplementedError("no hooks here")

    model = nn.Linear(2, 2)
    model.bias = Refusing(torch.ones(2))
    with pytest.raises(NotImplementedError) as caught:
        gradstat.Monitor(model)
    assert caught.value.__traceback__ is not None  # holds what the constructor made
    assert not model.weight._post_accumulate_grad_hooks
