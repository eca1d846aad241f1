"""States and recordings in hostile hands: damaged ones are refused whole and by name, and no name or path does harm."""

import copy
import dataclasses
import errno
import io
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import stat
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.recordings import HOSTILE, assert_same, bits, npy, recording, rewritten
from helpers.training import backpropagated
from torch import nn
from typing_extensions import Self

import gradstat
from gradstat.__main__ import main
from gradstat.integrations.lightning import GradstatCallback
from gradstat.integrations.loggers import JsonlWriter
from gradstat.monitor import AnomalyError, AnomalyWarning, Finding, Recording, Rule, Series, default_rules, write_page
from gradstat.monitor.command import describe
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.page_data import page_data
from gradstat.recording import COLUMNS, VERSION, RecordingFileError, compare, load, save

SEED = 20261124
# More than the 250 that a mistake of one in a hundred would not survive.
MUTATIONS = 400
WATCH = dict.fromkeys(("parameters", "buffers", "optimizer", "outputs", "updates", "activations"), 1)

# States ------------------------------------------------------------------------------------------------------


class Training:
    """A tiny training, whose monitor has something of everything."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        given = {"watch": WATCH, "num_classes": 2, "guard": gradstat.SpikeGuard(window=16), **options}
        self.monitor = gradstat.Monitor(self.model, self.optimizer, on_anomaly="record", **given)

    def run(self, steps: int, bad: int | None = None) -> Self:
        for step in range(steps):
            x, labels = torch.randn(8, 3), torch.randint(0, 2, (8,))
            self.monitor.check_batch({"x": x, "labels": labels})
            loss = backpropagated(self.optimizer, nn.functional.cross_entropy(self.model(x), labels))
            if step == bad:
                self.model[0].weight.grad[0, 0] = math.nan
            self.monitor.step(loss)
            if step != bad:
                self.optimizer.step()
        return self


class Stateful:
    """Something that has a state, after three steps, and a step that uses it."""

    def __init__(self, made: Any, step: Callable[[Any], object]) -> None:
        self.made, self.state, self.step = made, made.state_dict, lambda: step(made)
        for _ in range(3):
            self.step()


def clip(made: Any) -> Stateful:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]

    def step(made: Any) -> object:
        for parameter in parameters:
            parameter.grad = torch.randn(3)
        made.clip_(parameters)
        return made.summary()

    return Stateful(made, step)


def guarded(guard: Any) -> object:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.randn(3)
    gradstat.guarded_step(torch.optim.SGD([parameter]), loss=torch.randn(()), guard=guard)
    return guard.read()


def monitored() -> Stateful:
    training = Training().run(12, bad=8)
    return Stateful(training.monitor, lambda _: training.run(1, bad=-(training.monitor.steps % 3)))


CLIPS: dict[str, Callable[[], Stateful]] = {
    "FixedClip": lambda: clip(gradstat.FixedClip(1.0, window=5)),
    "AutoClip": lambda: clip(gradstat.AutoClip(window=5)),
    "ZClip": lambda: clip(gradstat.ZClip(warmup=2, window=5)),
    "AdaGC": lambda: clip(gradstat.AdaGC(warmup=2, window=5)),
    "AGC": lambda: clip(gradstat.AGC(window=5)),
}
GUARDS: dict[str, Callable[[], Stateful]] = {
    "SpikeGuard": lambda: Stateful(gradstat.SpikeGuard(window=9, warmup=2), guarded),
    "SpikeGuard.sigma": lambda: Stateful(gradstat.SpikeGuard.sigma(window=9), guarded),
}
MADE = {**CLIPS, **GUARDS, "Monitor": monitored}
used = cache(lambda name: MADE[name]())  # what is refused changes nothing, so one is enough


def with_item(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> Any:
    """A copy of nested containers in which ``change(container, key)`` was applied at ``path``."""
    made = list(value) if isinstance(value, tuple) else copy.copy(value)
    made = made.clone() if isinstance(made, torch.Tensor) else made
    if len(path) == 1:
        change(made, path[0])
    else:
        made[path[0]] = with_item(value[path[0]], path[1:], change)
    return made


def doubles(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


MISSING = object()
DEEP: Any = {}
for _ in range(200):
    DEEP = {"x": DEEP}
Values = dict[tuple[Any, ...], tuple[Any, ...]]
# What is of the right kind, but would be read as something else, or make later steps wrong.
TENSORS = (doubles(5).float(), doubles(5).long(), doubles(5).to("meta"), doubles(4), doubles(6), doubles())
IMPOSSIBLE: dict[str, Values] = {
    "clip": {  # a window of five, in which three norms were recorded
        ("tensors", "totals"): TENSORS,
        **{("tensors", "totals", i): (-7.0, math.nan, math.inf, 1e300, 2.5) for i in range(4)},
        ("tensors", "totals", 4): (-1.0, 1e6, math.nan),
        ("tensors", "norms"): TENSORS,
        ("tensors", "norms", 0): (-1.0, math.nan, math.inf),
        ("tensors", "norms", 3): (2.0,),
        ("tensors", "smallest"): (doubles() - 0.5, doubles() + 2, doubles(1)),
    },
    "guard": {
        ("tensors", "totals"): TENSORS,
        **{("tensors", "totals", i): (-7.0, math.nan, 1e300, 2.5) for i in range(9)},
        ("tensors", "values"): (doubles(2, 8), doubles(18), doubles(3, 9)),
        ("tensors", "values", (1, 0)): (math.nan, -math.inf),
    },
    "ZClip": {
        ("tensors", "mean"): (doubles() + math.inf, doubles() - 1, doubles(1)),
        ("tensors", "deviation"): (doubles() + math.nan, doubles(2)),
    },
    "AdaGC": {("tensors", "means"): (doubles(), doubles(2, 1)), ("tensors", "means", 1): (-1.0, math.nan)},
    "Monitor": {
        ("version",): ("1", 0, 2),
        ("steps",): (-10, 2**70, 0.5, True),
        ("nonfinite_steps",): (-10, math.nan),
        ("findings", 0, "step"): ("8", 2**64, math.nan),
        ("findings", 0, "severity"): ("fatal",),
        ("columns",): (["mean"],),
        ("arrays", "steps"): (doubles(15), torch.arange(15).int()),
        ("rules",): ({"loss-spike": {}}, {"loss-spike": [5]}),
        ("contents",): (5, [], object()),
        ("contents", "kinds"): (["parameter"],),
        ("contents", "rows"): (doubles(7), doubles(6, 6)),
        ("contents", "ranks"): (-1, 0.5),
    },
}
OPTIONAL = (("guard",), ("contents",))
# What names no place, but what does not fit.
UNFIT: list[tuple[tuple[Any, ...], Any, str]] = [
    (("steps",), 3, "a measurement of step 14, and state['steps'] is 3"),
    (("findings", 0, "evidence", "x"), DEEP, "nested in more than 100 levels"),
    (("arrays", "steps"), torch.arange(15).flip(0), "steps must be at least 0 and strictly increasing"),
    (("arrays", "steps"), torch.arange(15) - 1, "steps must be at least 0 and strictly increasing"),
    (("arrays", "steps"), torch.arange(7), "scalars['loss'] has shape (15,); expected (7,)"),
    (("arrays", "tables/0/steps"), torch.zeros(15, dtype=torch.int64), ".steps must be at least 0 and strictly"),
    (("arrays", "tables/0/numel"), torch.arange(2), ".numel has shape (2,); expected"),
    (("arrays", "tables/0/numel"), torch.tensor([-1]), ".numel must be counts"),
    (("arrays", "tables/0/values"), torch.zeros(8, 2, 15), ".values has shape (15, 2, 8); expected"),
    (("scalars", 1), "loss", "two of its series or tables have the same name"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in nested containers; of long lists only the first."""
    items = dict(enumerate(value[:3])) if isinstance(value, list | tuple) else value if isinstance(value, dict) else {}
    for key, item in items.items():
        yield (*path, key)
        yield from places(item, (*path, key))


def damages(name: str, state: Any) -> Iterator[tuple[tuple[Any, ...], Any, list[str]]]:
    """Where, what is there instead, and words that the error must have."""
    kind = "clip" if name in CLIPS else "guard" if name in GUARDS else ""
    impossible = IMPOSSIBLE.get(kind, {}) | IMPOSSIBLE.get(name, {})
    cases = [(path, wrong) for path, wrongs in impossible.items() for wrong in wrongs]
    for path in places(state):
        if "evidence" in path[:-1] or path in OPTIONAL:  # which may hold anything, or be None
            continue
        others = ([None], [math.nan], {"a": None}, 1j, 2**70) if path[0] == "rules" and len(path) == 4 else ()
        cases += [(path, wrong) for wrong in (None, object(), *others)]
        if isinstance(path[-1], str) and (path[0] != "rules" or len(path) == 1):  # rules may be new, or have more
            cases.append((path, MISSING))
    yield from ((path, wrong, [repr(key) for key in path[:2] if isinstance(key, str)]) for path, wrong in cases)
    yield from ((path, wrong, [told]) for path, wrong, told in UNFIT if name == "Monitor")


@pytest.mark.parametrize("name", MADE)
def test_a_state_that_cannot_be_is_refused_by_the_name_of_what_is_wrong_and_nothing_has_changed(name: str) -> None:
    one = used(name)
    state, before = one.state(), bits(one.state())
    wholes: list[Any] = [((), [], ["state"]), ((), 5, ["state"]), ((), {}, ["state has no"])]
    for other in {*CLIPS, *GUARDS} - {name} if name != "Monitor" else ():
        wholes.append(((), used(other).state(), [f"state['rule']: expected '{name}', got '{other}'"]))
    for path, wrong, words in [*wholes, *damages(name, state)]:

        def change(held: Any, key: Any, wrong: Any = wrong) -> None:
            if wrong is MISSING:
                del held[key]
            else:
                held[key] = wrong

        with pytest.raises(ValueError, match=r"^state") as refused:
            one.made.load_state_dict(with_item(state, path, change) if path else wrong)
        told = str(refused.value)
        assert all(word in told for word in words), (path, wrong, told)
        assert told.isprintable()
    assert bits(one.state()) == before


NUMBERS = (0.0, 1.0, 2.0, 0.5, 50.0, -1.0, -7.0, 1e6, 1e300, -1e300, 2.0**53, 2.0**63, 5e-324, math.nan, math.inf)
ODD: tuple[Any, ...] = (
    *(None, True, False, -10, 0, 5, 2**62, 2**70, 10**400, 0.5, -0.0, 1e300, math.nan, math.inf, "", "x", "\ud800\x1b"),
    *([], [1], ["a"], [[1, 2]], [None], {}, {"a": 1}, {"a": "b"}, {1: 2.0}, {"a": math.nan}, ("a", {}), b"x", 1j),
    object(),
    *(torch.zeros(3), torch.arange(5), torch.tensor(1.0), torch.zeros(2, 3, 8), torch.empty(0, dtype=torch.int64)),
)  # fmt: skip


def mutated(state: Any, rng: random.Random) -> Any:
    """The state with one or two things changed."""
    for _ in range(rng.choice([1, 1, 1, 2])):
        path, way = rng.choice(list(places(state))), rng.randrange(6)

        def change(held: Any, key: Any, way: int = way) -> None:
            if way == 0:
                del held[key]
            elif way == 1 and isinstance(held, dict):
                held[rng.choice(["", "other", 7, "step"])] = held.pop(key)
            else:
                held[key] = rng.choice(ODD) if way < 4 else twisted(held[key], rng)

        state = with_item(state, path, change)
    return state


def twisted(value: Any, rng: random.Random) -> Any:
    """Something like the value."""
    if isinstance(value, torch.Tensor) and not (value.is_sparse or value.is_meta):
        if value.is_floating_point() and value.numel() and rng.random() < 0.7:
            changed = value.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[rng.randrange(changed.numel())] = doubles() + rng.choice(NUMBERS)
            return changed
        twists = [value.float(), value.double(), value.to("meta"), value.to_sparse(), value[None], -value]
        twists += [value + 10**6, torch.full_like(value.double(), math.nan), value.expand(2, *value.shape)]
        twists += [value[:-1], value.flip(0), torch.cat([value, value])] if value.dim() else []
        return rng.choice(twists)
    if isinstance(value, list | tuple):
        return rng.choice([[*value, *value], list(value)[::-1], [*value, None], list(value)[1:]])
    if isinstance(value, int | float) and abs(value) < 1e300:
        return rng.choice([-value, value + 1, value * 1000, float(value), str(value)])
    return rng.choice(ODD)


def loads_or_refuses(made: Any, state: Any) -> str | None:
    """Loads a state. If it is refused, checks that nothing has changed, and returns the message."""
    before = bits(made.state_dict())
    try:
        made.load_state_dict(state)
    except ValueError as error:
        assert bits(made.state_dict()) == before
        return str(error)
    return None


@pytest.mark.parametrize("name", MADE)
def test_a_damaged_state_is_refused_whole_or_works(name: str, tmp_path: Path) -> None:
    """Warnings are errors here, so a rule that fails later and is switched off fails this test as well."""
    trained, one, told = MADE[name](), MADE[name](), []
    states, whole, rng = [], one.state(), random.Random(f"{name}/{SEED}")
    if name == "Monitor":
        states += [Training().run(40, bad=30).monitor.state_dict()] * 9
    for _ in range(9):
        states.append(trained.state())
        trained.step()
    for _ in range(MUTATIONS):
        refused = loads_or_refuses(one.made, mutated(rng.choice(states), rng))
        if refused is not None:
            told.append(refused)
            continue
        try:
            for _ in range(3):
                one.step()
        except ValueError as error:  # the only thing that a clip cannot know when it loads a state
            if "AdaGC keeps a mean for each" not in str(error):
                raise
        if name == "Monitor":
            assert str(one.made.diagnose())
            can_be_shown(load(one.made.save(tmp_path / "run.gradstat")))
            Training().monitor.load_state_dict(one.state())
        one.made.load_state_dict(whole)
    assert all("state" in text and text.isprintable() for text in told)
    assert 100 < len(told) < MUTATIONS - 8


def can_be_shown(made: Recording) -> None:
    assert str(Diagnosis.of(made))
    assert Diagnosis.of(made).to_html()
    assert page_data(made)
    assert is_printable(describe(made))


def is_printable(text: str) -> bool:
    """Whether it has no other control characters than ends of lines, which may be a terminal's commands."""
    return all(character.isprintable() or character == "\n" for character in text)


class Counting(Rule):
    """A user's rule that loads its state by itself, in the form of another version."""

    name = "counting"

    def review(self, window: Any) -> list[Finding]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 5}

    def load_state_dict(self, state: Any) -> None:
        state["seen"]


@pytest.mark.parametrize(("window", "says"), [(16, "state['rules']['counting']: 'seen'"), (32, "state['guard']")])
def test_if_one_part_refuses_its_state_the_others_go_back(window: int, says: str) -> None:
    training = Training(rules=[*default_rules(), *[Counting()] * (window == 16)]).run(20)
    damaged = Training(guard=gradstat.SpikeGuard(window=window)).run(30).monitor.state_dict()
    damaged["rules"]["counting"] = [{}]
    assert says in loads_or_refuses(training.monitor, damaged)


def test_what_a_user_keeps_may_change_its_type_and_a_state_is_copied() -> None:
    class Lowest(Rule):
        name = "lowest"

        def __init__(self) -> None:
            super().__init__()
            self._lowest: Any = None

        def review(self, window: Any) -> list[Finding]:
            self._lowest = [0.5, "a"]
            return []

    resumed = Training(rules=[Lowest()]).monitor
    saved = Training(rules=[Lowest()]).run(3).monitor.state_dict()
    resumed.load_state_dict(saved)
    assert resumed.state_dict()["rules"]["lowest"][0]["_lowest"] == [0.5, "a"]
    saved["arrays"]["tables/0/values"].fill_(7.0)
    saved["arrays"]["steps"].zero_()
    assert resumed.recording().steps.tolist() == [0, 1, 2]
    assert not (resumed.recording().tables["gradient"].values == 7.0).any()
    resumed.load_state_dict({**resumed.state_dict(), "rules": {"lowest": [{"_lowest": None}]}})


# What is written ---------------------------------------------------------------------------------------------


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


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(small(), tmp_path / "run.gradstat")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(recording(12, 6, incident=9), tmp_path / "run.gradstat")


def test_round_trips_are_exact(tmp_path: Path) -> None:
    """Also of random bits, including NaN of every kind, and of nothing; of meta what JSON can hold."""
    empty = Series((), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0, len(COLUMNS)), np.float32))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        made = recording(*rng.integers(1, 30, 2).tolist(), start=seed * 1000, incident=None, seed=seed)
        for table in made.tables.values():
            table.values = rng.integers(0, 2**32, table.values.shape, np.uint32).view(np.float32)
        for values in made.scalars.values():
            values[:] = rng.integers(0, 2**64, values.shape, np.uint64).view(np.float64)
        path = save(made, tmp_path / "a.gradstat")
        assert_same(load(path), made)
        again = save(load(path), str(tmp_path / "deep" / "er" / "again.gradstat"))
        assert again.read_bytes() == path.read_bytes()
    made = Recording(np.zeros(0, np.int64), {"loss": np.zeros(0)}, {"gradient": empty})
    assert_same(load(save(made, again)), made)
    made.meta = {"dtype": torch.float32, "n": np.float32(math.nan), "a": np.arange(3), 3: (1, -math.inf)}
    link = tmp_path / "latest.gradstat"
    link.symlink_to(again)
    save(made, link)
    assert link.is_symlink()
    with zipfile.ZipFile(again) as archive:
        assert archive.read("header.json").isascii()
    got = load(again).meta
    assert math.isnan(got.pop("n"))
    assert got == {"dtype": "torch.float32", "a": [0, 1, 2], "3": [1, -math.inf]}


INCONSISTENT: dict[str, tuple[dict[str, Any], str]] = {
    "steps that do not increase": ({"steps": np.array([3, 3, 4])}, "steps must be at least 0 and strictly increasing"),
    "steps that are no integers": ({"steps": np.array([0.5, 1, 2])}, "must be a list of integers"),
    "too few losses": ({"scalars": {"loss": np.zeros(2)}}, r"scalars\['loss'\] has shape \(2,\); expected \(3,\)"),
    "deep meta": ({"meta": DEEP}, "nested in more than 100 levels"),
}


@pytest.mark.parametrize("fails", ["a folder", "locked", "full", *INCONSISTENT])
def test_a_failure_while_writing_says_why_and_leaves_the_old_file_and_no_other(
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
    changed, says = INCONSISTENT.get(fails, ({}, r"folder/run\.gradstat'$"))
    made = dataclasses.replace(recording(3, 2, incident=None), **changed)
    with pytest.raises(ValueError if changed else OSError, match=says) as error:
        save(made, path)
    assert ".tmp" not in "".join(traceback.format_exception(error.value))
    assert (path.is_dir() or path.read_bytes()) == before
    assert list(path.parent.iterdir()) == [path]
    if changed and "deep" not in fails:
        with pytest.raises(ValueError, match=says):
            save(made, tmp_path / "new" / "run.gradstat")
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("mode", [0o600, 0o444, 0o777])
def test_a_file_that_is_replaced_keeps_its_permissions(mode: int, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never more readable, not even while it is written; a file system without permissions ends nothing."""

    def permissions(file: Any) -> int:
        return stat.S_IMODE(os.stat(file).st_mode)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no permissions here")

    seen, write, mask = [], os.fsync, os.umask(0o027)
    monkeypatch.setattr(os, "fsync", lambda file: (seen.append(permissions(file)), write(file)))
    try:
        assert permissions(save(small(), tiny.with_name("new"))) == 0o640
        tiny.chmod(mode)
        assert permissions(save(small(), tiny)) == seen[2] == mode
        monkeypatch.setattr(os, "chmod", refuse)
        assert permissions(save(small(), tiny)) == seen[4] == mode & ~0o027
    finally:
        os.umask(mask)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # about fork in a process with threads
def test_killed_at_any_time_what_was_written_is_whole(tmp_path: Path) -> None:
    made = [recording(40, 20, seed=seed) for seed in (1, 2)]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    path, log = tmp_path / "run.gradstat", tmp_path / "log.jsonl"

    def write_for_ever() -> None:
        for step in itertools.count():
            save(made[step % 2], path)
            for _ in range(50):
                JsonlWriter(log).write({"loss": 0.5, "norm": 2.0}, step)
            if step == 3:
                theirs.send("going")

    for after in (0.01, 0.05, 0.1):
        process = context.Process(target=write_for_ever, daemon=True)
        process.start()
        assert ours.poll(120)
        ours.recv()
        time.sleep(after)
        process.kill()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        assert bits(load(path)) in list(map(bits, made))
        *lines, last = log.read_text().split("\n")
        assert last == ""
        assert all(json.loads(line).keys() == {"step", "loss", "norm"} for line in lines)
    assert len(list(tmp_path.glob(".run.gradstat.*.tmp"))) <= 3  # one for each kill at most


@contextmanager
def full_above(size: int) -> Iterator[None]:
    """Imitates a full disk by a limit of a file's size."""
    _, most = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_what_does_not_fit_and_nothing_else(tmp_path: Path) -> None:
    path = save(recording(40, 12), tmp_path / "run.gradstat")
    with full_above(1 << 14), pytest.raises(OSError, match="File too large"):
        save(recording(100, 40), path)
    monitor = gradstat.Monitor(nn.Linear(2, 2), save_to=path, on_anomaly="record")
    with full_above(1 << 10), pytest.warns(RuntimeWarning, match="could not be saved"):
        _ = [monitor.step(loss) for loss in (1.0, math.nan, 1.0)]
    with full_above(1 << 10), pytest.warns(RuntimeWarning, match="could not be saved"):
        monitor.remove()
    assert monitor.steps == 3
    assert_same(load(path), recording(40, 12))
    assert list(tmp_path.iterdir()) == [path]
    log = JsonlWriter(tmp_path / "log.jsonl")
    with full_above(1 << 14):
        for _ in range(3):  # the first line is cut, the others get nothing in
            with pytest.raises(OSError, match=r"File too large|No space left"):
                _ = [log.write({"loss": 0.125, "norm": 2.5}, step) for step in range(1000)]
        os.truncate(log.path, (1 << 14) - 4000)  # somebody makes room
        for loss in (0.25, 0.5):
            log.write({"loss": loss, "norm": 2.5}, 7)
    lines = log.path.read_text().splitlines()
    assert len(lines) > 100
    assert lines[-2:] == ['{"step": 7, "loss": 0.25, "norm": 2.5}', '{"step": 7, "loss": 0.5, "norm": 2.5}']


# What is read ------------------------------------------------------------------------------------------------


STRANGE = (b"", b"PK\x03\x04", b"not a recording\n" * 100, b"\x80\x04\x95", bytes(10_000))
MEMBERS = (
    *(("header.json", text) for text in (b"[]", b"{", b"\xff", b"[" * 100_000, b"9" * 5000)),
    *(("steps.npy", npy(np.arange(12).astype(kind))) for kind in ("int32", ">i8")),
    *(("steps.npy", npy(steps)) for steps in (np.arange(12)[::-1].copy(), np.arange(-1, 11), np.zeros((12, 1), "i8"))),
)


def test_what_is_no_recording_is_refused(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for content in STRANGE:
        other.write_bytes(content)
        with pytest.raises(RecordingFileError, match="other cannot be read as a gradstat recording: "):
            load(other)
    for missing, error in (("missing.gradstat", FileNotFoundError), ("", IsADirectoryError)):
        with pytest.raises(error):
            load(tmp_path / missing)
    changes: list[tuple[str, dict[str, Any]]] = [("cannot be read", {"members": dict([member])}) for member in MEMBERS]
    changes += [("compressed by method", {"method": method}) for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)]
    for told, change in [*changes, ("nested in more than 100 levels", {"meta": DEEP})]:
        with pytest.raises(RecordingFileError, match=rf"rewritten\.gradstat cannot be read.*{told}|{told}"):
            load(rewritten(saved, **change))


def refused_within(megabytes: int, path: Path, told: str = "cannot be read", **options: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RecordingFileError, match=told):
            load(path, **options)
        assert tracemalloc.get_traced_memory()[1] < megabytes << 20
    finally:
        tracemalloc.stop()


def test_a_bomb_is_refused_before_it_is_unpacked(saved: Path) -> None:
    claimed = npy(np.zeros(12, np.int64))[:128].replace(b"(12,)", b"(10**9,)")
    for data in (claimed, npy(np.zeros(2, np.int64))[:128].replace(b"(2,), }", b"(1 << 60,), }"), bytes(50 << 20)):
        refused_within(10, rewritten(saved, {"steps.npy": data}))
    # A few bytes of JSON become a hundred of Python's; what is in texts does not count.
    for values, told in (
        (b"{}," * 3_000_000, "values, more than"),
        (b'"{,\\\\\\",,,,",' * 700_000, "has no 'version'"),
    ):
        header = b'{"format":"gradstat recording","meta":[%s0]}' % values
        refused_within(100, rewritten(saved, {"header.json": header}), told)
    # A member of its declared size, and consistent with the header, but larger than the limit.
    n = 30_000
    large = rewritten(saved, {"steps.npy": npy(np.arange(n)), "scalars.npy": npy(np.zeros((7, n)))})
    refused_within(10, large, "larger than the limit", limit=1 << 20)
    # A declared size that deflate cannot reach.
    data = bytearray(saved.read_bytes())
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(b"tables/1/values.npy"))
    data[place + 24 : place + 28] = (2**32 - 2).to_bytes(4, "little")
    saved.write_bytes(data)
    refused_within(10, saved, "tables/1/values: expected 4,294,967,294 bytes", limit=8 << 30)


def test_a_recording_of_which_any_bytes_are_missing_or_a_bit_is_flipped_is_refused_or_unharmed(tiny: Path) -> None:
    data, whole = tiny.read_bytes(), load(tiny)
    assert 500 < len(data) < 5000
    cut = [data[:length] for length in range(len(data))]
    holed = [(data[:at] + bytes(64) + data[at + 64 :])[: len(data)] for at in range(0, len(data), 32)]  # a block
    for damaged in cut + holed:
        tiny.write_bytes(damaged)
        with pytest.raises(RecordingFileError, match=r"run\.gradstat cannot be read as a gradstat recording"):
            load(tiny)
    refused = 0
    for i in range(len(data)):
        tiny.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        try:
            assert_same(load(tiny), whole)
        except RecordingFileError:
            refused += 1
    assert refused > len(data) / 2  # the others are dates, versions of tools and attributes, which are not read


def test_a_damaged_header_of_a_recording_is_refused_or_works(saved: Path, tmp_path: Path) -> None:
    rng, whole = random.Random(SEED), load(saved)
    with zipfile.ZipFile(saved) as archive:
        header = json.loads(archive.read("header.json"))
    refused = accepted = 0
    for _ in range(MUTATIONS):
        try:
            text = json.dumps(mutated(header, rng), default=str, allow_nan=rng.random() < 0.5)
        except (ValueError, TypeError):  # what JSON cannot hold
            continue
        try:
            made = load(rewritten(saved, {"header.json": text.encode("utf-8", "surrogatepass")}))
        except RecordingFileError:
            refused += 1
            continue
        accepted += 1
        can_be_shown(made)
        assert is_printable(str(compare(made, whole)))
        load(save(made, tmp_path / "again.gradstat"))
    assert refused > 100
    assert accepted > 50


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1])
def test_files_and_states_of_another_version_name_both_and_the_remedy(version: int, tiny: Path, capsys: Any) -> None:
    other = rewritten(tiny, version=version, gradstat="99.1", columns="of another kind")
    expected = rf"\['version'\]: expected {VERSION}, got {version}, .* 99\.1; this is .*{gradstat.__version__}\."
    with pytest.raises(RecordingFileError, match=expected):
        load(other)
    assert main(["view", str(other)]) == 2
    assert "Use the gradstat that wrote it" in capsys.readouterr().err
    monitor = gradstat.Monitor(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="^state" + expected):
        monitor.load_state_dict({**monitor.state_dict(), "version": version, "gradstat": "99.1"})


@dataclasses.dataclass
class Payload:
    """Makes a folder when it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_loading_never_unpickles(tiny: Path, tmp_path: Path) -> None:
    harmed = tmp_path / "harmed"
    payload, as_torch = Payload(str(harmed)), io.BytesIO()
    torch.save(payload, as_torch)
    members = pickle.dumps(payload), npy(np.array([payload], dtype=object))
    hostile = [*members, as_torch.getvalue()]
    with zipfile.ZipFile(tiny) as archive:
        every = [(name, content) for name in archive.namelist() for content in members]
    for name, content in every:
        hostile.append(rewritten(tiny, {name: content}, method=zipfile.ZIP_STORED).read_bytes())
    for content in hostile:
        tiny.write_bytes(content)
        with pytest.raises(RecordingFileError):
            load(tiny)
    assert not harmed.exists()
    pickle.loads(hostile[0])
    assert harmed.exists()  # unpickling would have made it


# Names that mean harm: to pages, paths, terminals, lines and encodings ------------------------------------------


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


class Elements(HTMLParser):
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


def test_names_that_mean_harm_are_saved_read_and_told_without_harm(tmp_path: Path, capsys: Any) -> None:
    path = save(named(NAMES), tmp_path / "run.gradstat")
    assert main(["view", str(path), "--no-page"]) == 0
    assert main(["view", str(path), "--no-page", "--json"]) == 0
    assert is_printable(capsys.readouterr().out)
    made = named(NAMES)
    assert all(str(finding).isprintable() for finding in made.findings)
    made.scalars |= {name: np.full(2, np.inf) for name in NAMES}
    made.tables |= dict.fromkeys(NAMES, made.tables["gradient"])
    save(made, path)
    assert_same(load(path), made)
    assert list(tmp_path.iterdir()) == [path]


def test_files_whose_names_mean_harm_are_told_in_one_line_each(tmp_path: Path, capsys: Any) -> None:
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
        assert (told.out, told.err.count("\n")) == ("", 1)
        assert told.err.startswith(f"gradstat {arguments[0]}: ")
        shown += told.err
    assert "No such file" in shown
    assert is_printable(shown)


def test_of_thousands_of_findings_the_first_are_shown(tmp_path: Path, capsys: Any) -> None:
    made = small()
    findings = [Finding("r", "warning", step, "w", {}) for step in range(0, 10_000, 5)]
    made.findings = (*findings, Finding("r", "error", 10**6, "w", {}))
    path = save(made, tmp_path / "run.gradstat")
    assert main(["view", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "... and 1,901 more findings" in shown
    assert shown.count("\n") < 500
    assert "1,901 more" in Diagnosis.of(made).to_html()
    assert [one["findings"][-1] for one in Diagnosis.of(made).to_dict()["incidents"]] == [1_999, 2_000]
    shown = path.with_suffix(".html").read_text()
    assert '"step":1000000' in shown
    assert '"findingsLeftOut":1001' in shown


@pytest.mark.parametrize("name", [name.replace(".", " ") for name in NAMES if 0 < len(name) < 100])
def test_names_that_mean_harm_reach_no_terminal(name: str) -> None:
    """Neither from reports and their errors, nor from findings, their warnings and errors, diagnoses and culprits."""

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))

        def forward(self) -> torch.Tensor:
            return getattr(self, name).sqrt().sum()

    def step() -> None:
        model.zero_grad()
        model().backward()

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
    assert is_printable(shown)
    assert not name.isprintable() or name in shown
    assert not any(line.lstrip().startswith("step,forged") for text in texts for line in text.splitlines())


def test_pages_have_the_same_elements_whatever_the_names(tmp_path: Path) -> None:
    def report(names: tuple[str, ...]) -> str:
        return gradstat.check_tensors({name: torch.tensor([1.0, float("nan")]) for name in names})._repr_html_()

    def page(names: tuple[str, ...]) -> str:
        return write_page(named(names), tmp_path / "run.html", names[0]).read_text()

    def diagnosis(names: tuple[str, ...]) -> str:
        return Diagnosis.of(named(names)).to_html()

    layers = tuple(f"layer{i}.weight" for i in range(len(NAMES)))
    for made in (page, diagnosis, report):
        assert sorted(Elements(made(NAMES)).elements) == sorted(Elements(made(layers)).elements)
    assert "<img src=x" in Elements(diagnosis(NAMES)).text  # shown as text


# Paths and arguments -----------------------------------------------------------------------------------------


def test_files_stay_in_the_folder_in_which_they_were_given_whatever_the_name_of_a_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = tmp_path / "first", tmp_path / "later"
    later.mkdir()
    first.mkdir()
    monkeypatch.chdir(first)
    model = nn.Linear(2, 1)
    names = "../../evil", "a/b\0c", "r" * 500
    made = [gradstat.monitor.rule(name, severity="error")(lambda rule, _: [rule.found(0, "w", "")]) for name in names]
    with_name = gradstat.Monitor(model, save_to="run.gradstat", on_anomaly="snapshot", rules=[rule() for rule in made])
    without = gradstat.Monitor(model, on_anomaly="snapshot")
    lightning = GradstatCallback(save_to="lightning.gradstat", save_dir="saved")
    writer = JsonlWriter("log.jsonl")
    monkeypatch.chdir(later)
    model(torch.full((1, 2), torch.nan)).sum().backward()
    for monitor in (with_name, without):
        monitor.step()
        monitor.remove()
    assert not list(later.iterdir())
    assert {path.suffix for path in first.iterdir()} == {".gradstat", ".jsonl"}
    assert set(tmp_path.rglob("*")) == {first, later, *first.iterdir()}
    assert (len(list(first.glob("run*"))), len(list(first.glob("incident-step0-*"))) >= 1) == (4, True)
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
