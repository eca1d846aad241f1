"""States and recordings in hostile hands: damaged ones are refused whole and by name, and no name or path does harm."""

import copy
import dataclasses
import errno
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import signal
import stat
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.processes import Forks
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
        given = {"watch": WATCH, "classes": 2, "guard": gradstat.SpikeGuard(window=16), **options}
        self.monitor = gradstat.Monitor(self.model, self.optimizer, on_anomaly="record", **given)

    def run(self, steps: int, bad: int | None = None) -> Self:
        for step in range(steps):
            x, labels = torch.randn(8, 3), torch.randint(0, 2, (8,))
            self.monitor.batch({"x": x, "labels": labels})
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

    def refuses(self, state: Any, match: str) -> str:
        """Checks that a state is refused and nothing has changed; returns the error's message."""
        before = bits(self.state())
        with pytest.raises(ValueError, match=match) as refused:
            self.made.load_state_dict(state)
        assert bits(self.state()) == before
        return str(refused.value)


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
    return Stateful(training.monitor, lambda _: training.run(1))


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
NO_INTEGERS = (-10, 2**70, 0.5, math.nan, True)
NO_COUNTS = (-7.0, math.nan, math.inf, 1e300, 2.5)
Values = dict[tuple[Any, ...], tuple[Any, ...]]
# What is of the right kind, but cannot be.
KINDS: tuple[Any, ...] = (torch.float32, torch.int64, torch.complex64, "meta")
IMPOSSIBLE: dict[str, Values] = {
    "clip": {  # a window of five, in which three norms were recorded
        ("rule",): ("another",),
        ("tensors", "totals"): tuple(doubles(5).to(kind) for kind in KINDS),
        **{("tensors", "totals", i): NO_COUNTS for i in range(4)},
        ("tensors", "totals", 4): (-1.0, 1e6, math.nan),
        ("tensors", "norms"): (doubles(4), doubles(6), doubles()),
        ("tensors", "norms", 0): (-1.0, math.nan, math.inf),
        ("tensors", "norms", 3): (2.0,),
        ("tensors", "smallest"): (doubles() - 0.5, doubles() + 2, doubles(1)),
    },
    "guard": {
        ("tensors", "totals"): tuple(doubles(9).to(kind) for kind in KINDS),
        **{("tensors", "totals", i): (-7.0, math.nan, 1e300, 2.5, 8.0)[: 4 + (i == 6)] for i in range(9)},
        ("tensors", "values"): (doubles(2, 8), doubles(18), doubles(3, 9)),
        ("tensors", "values", (1, 0)): (math.nan, -math.inf),
    },
    "ZClip": {
        ("tensors", "mean"): (doubles() + math.inf, doubles() - 1, doubles(1)),
        ("tensors", "deviation"): (doubles() + math.nan, doubles(2)),
    },
    "AdaGC": {("tensors", "means"): (doubles(), doubles(2, 1)), ("tensors", "means", 1): (-1.0, math.nan)},
    "Monitor": {
        ("version",): ("1", 0, 2, [1, 0]),
        ("steps",): NO_INTEGERS,
        ("nonfinite_steps",): NO_INTEGERS,
        ("findings", 0, "step"): ("8", 2**64, math.nan, True),
        ("findings", 0, "severity"): ("fatal",),
        ("columns",): (["mean"],),
        ("arrays", "steps"): (doubles(15), torch.arange(15).int()),
        ("rules",): ({"loss-spike": {}}, {"loss-spike": [5]}, {5: []}),
    },
}
# What names no place, but what does not fit.
UNFIT: list[tuple[tuple[Any, ...], Any, str]] = [
    (("steps",), 3, "a measurement of step 14, and state['steps'] is 3"),
    (("findings", 0, "evidence", "x"), DEEP, "nested in more than 100 levels"),
    (("arrays", "steps"), torch.arange(15).flip(0), "steps must be at least 0 and strictly increasing"),
    (("arrays", "steps"), torch.arange(15) - 1, "steps must be at least 0 and strictly increasing"),
    (("arrays", "steps"), torch.arange(7), "scalars['loss'] has shape (15,); expected (7,)"),
    (("arrays", "tables/0/steps"), torch.zeros(15, dtype=torch.int64), ".steps must be at least 0 and strictly"),
    (("arrays", "tables/0/numel"), torch.arange(2), ".numel has shape (2,); expected"),
    (("arrays", "tables/0/values"), torch.zeros(8, 2, 15), ".values has shape (15, 2, 8); expected"),
    (("scalars", 1), "loss", "two of its series or tables have the same name"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in nested containers; of long lists only the first."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list | tuple) else ()
    )
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def placed(path: tuple[Any, ...]) -> str:
    """How errors name a place; attributes of rules have the rule's name before."""
    if path[:1] == ("rules",) and len(path) == 4:
        return f"{path[1]}.{path[3]}"
    return "state" + "".join(str(list(key)) if isinstance(key, tuple) else f"[{key!r}]" for key in path)


def damages(name: str, state: Any) -> Iterator[tuple[tuple[Any, ...], Any, str]]:
    """Where, what is there instead, and what the error must say."""
    kind = "clip" if name in CLIPS else "guard" if name in GUARDS else ""
    for path, wrongs in (IMPOSSIBLE.get(kind, {}) | IMPOSSIBLE.get(name, {})).items():
        yield from ((path, wrong, placed(path)) for wrong in wrongs)
    if name == "Monitor":
        yield from UNFIT
        for path, wrongs in IMPOSSIBLE["guard"].items():
            yield from ((("guard", *path), w, placed(("guard", *path))) for w in wrongs if not torch.is_tensor(w))
    for path in places(state):
        if "evidence" in path[:-1] or path == ("guard",):  # which may hold anything, and be None
            continue
        is_attribute = path[:1] == ("rules",) and len(path) == 4
        others = ([None], [math.nan], [2**70], {"a": None}, {1: 2.0}, b"x", 1j, 2**70) if is_attribute else ()
        told = placed(path[:4] if path[0] == "rules" else path[:1] if path[0] == "columns" else path)
        yield from ((path, wrong, told) for wrong in (None, object(), *others))
        if isinstance(path[-1], str) and (path[0] != "rules" or len(path) == 1):  # rules may be new, or have more
            yield path, MISSING, f"{placed(path[:-1])} has no {path[-1]!r}"


@pytest.mark.parametrize("name", MADE)
def test_a_state_that_cannot_be_is_refused_by_the_name_of_what_is_wrong_and_nothing_has_changed(name: str) -> None:
    one = used(name)
    state, before = one.state(), bits(one.state())
    for wrong in ([], 5, {}, None):  # a state without "rule" is of something else
        one.refuses(wrong, r"^state")
    for path, wrong, told in damages(name, state):

        def change(held: Any, key: Any, wrong: Any = wrong) -> None:
            if wrong is MISSING:
                del held[key]
            else:
                held[key] = wrong

        with pytest.raises(ValueError, match=r"^state") as refused:
            one.made.load_state_dict(with_item(state, path, change))
        assert told in str(refused.value), (path, wrong)
        assert str(refused.value).isprintable()
    assert bits(one.state()) == before
    for other in {*CLIPS, *GUARDS} - {name} if name != "Monitor" else ():
        one.refuses(used(other).state(), rf"^state\['rule'\]: expected '{name}', got '{other}'$")


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
        path = rng.choice(list(places(state)))
        way = rng.choice(["replace", "replace", "remove", "rename", "twist", "twist"])

        def change(held: Any, key: Any, way: str = way) -> None:
            value = held[key]
            if way == "remove":
                del held[key]
            elif way == "rename" and isinstance(held, dict):
                held[rng.choice(["", "other", 7, "step"])] = held.pop(key)
            elif way == "twist" and isinstance(value, torch.Tensor) and not (value.is_sparse or value.is_meta):
                held[key] = twisted(value, rng)
            elif way == "twist" and isinstance(value, list | tuple):
                held[key] = rng.choice([[*value, *value], list(value)[::-1], [*value, None], list(value)[1:]])
            elif way == "twist" and isinstance(value, int | float) and abs(value) < 1e300:
                held[key] = rng.choice([-value, value + 1, value * 1000, float(value), str(value)])
            else:
                held[key] = rng.choice(ODD)

        state = with_item(state, path, change)
    return state


def twisted(value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Another tensor, or the same with another number in one place."""
    if value.is_floating_point() and value.numel() and rng.random() < 0.7:
        changed = value.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[rng.randrange(changed.numel())] = doubles() + rng.choice(NUMBERS)
        return changed
    twists = [value.float(), value.double(), value.to(torch.float16), value.to("meta"), value.to_sparse(), value[None]]
    twists += [-value, value + 10**6, torch.full_like(value.double(), math.nan), value.expand(2, *value.shape)]
    twists += [value[:-1], value.flip(0), torch.cat([value, value])] if value.dim() else []
    return rng.choice(twists)


def loads_or_refuses(one: Any, state: Any) -> str | None:
    """Loads a state. If it is refused, checks that nothing has changed, and returns the message."""
    before = bits(one.state_dict())
    try:
        one.load_state_dict(state)
    except ValueError as error:
        assert bits(one.state_dict()) == before
        return str(error)
    return None


@pytest.mark.parametrize("name", [*CLIPS, *GUARDS])
def test_a_damaged_state_of_a_clip_or_guard_is_refused_whole_or_works(name: str) -> None:
    trained, states, done = MADE[name](), [], 0
    for _ in range(9):
        states.append(trained.state())
        trained.step()
    rng = random.Random(f"{name}/{SEED}")
    for _ in range(MUTATIONS):
        one = MADE[name]()
        if loads_or_refuses(one.made, mutated(rng.choice(states), rng)) is not None:
            continue
        done += 1
        try:
            for _ in range(3):
                one.step()
        except ValueError as error:  # the only thing that a clip cannot know when it loads a state
            if "AdaGC keeps a mean for each" not in str(error):
                raise
    assert 8 < done < MUTATIONS - 100


def test_a_damaged_state_of_a_monitor_is_refused_whole_or_works(tmp_path: Path) -> None:
    """Warnings are errors here, so a rule that fails later and is switched off fails this test as well."""
    rng, told = random.Random(SEED), []
    state = Training().run(40, bad=30).monitor.state_dict()
    assert state["findings"]
    training = Training().run(12)
    whole = training.monitor.state_dict()
    for _ in range(MUTATIONS):
        try:
            training.monitor.load_state_dict(mutated(state, rng))
        except ValueError as error:
            told.append(str(error))
            if len(told) % 10 == 0:
                assert bits(training.monitor.state_dict()) == bits(whole)
            continue
        assert str(training.monitor.diagnose())
        training.run(3, bad=1)
        can_be_shown(load(training.monitor.save(tmp_path / "run.gradstat")))
        Training().monitor.load_state_dict(training.monitor.state_dict())
        training = Training()
        training.monitor.load_state_dict(whole)
    assert all("state" in text and text.isprintable() for text in told)
    assert 100 < len(told) < MUTATIONS - 50


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


@pytest.mark.parametrize("fails", ["rule", "guard"])
def test_if_one_part_refuses_its_state_the_others_go_back(fails: str) -> None:
    training = Training(rules=[*default_rules(), *[Counting()] * (fails == "rule")]).run(20)
    damaged = Training(guard=gradstat.SpikeGuard(window=16 if fails == "rule" else 32)).run(30).monitor.state_dict()
    damaged["rules"]["counting"] = [{}]
    told = loads_or_refuses(training.monitor, damaged)
    assert "state['guard']" in told if fails == "guard" else "state['rules']['counting']" in told and "seen" in told


def test_what_a_user_keeps_may_change_its_type_and_a_state_is_copied() -> None:
    class Lowest(Rule):
        name = "lowest"

        def __init__(self) -> None:
            super().__init__()
            self._lowest: Any = None
            self._names: list[Any] = []

        def review(self, window: Any) -> list[Finding]:
            self._lowest, self._names = 0.5, ["a", 1]
            return []

    training, resumed = Training(rules=[Lowest()]), Training(rules=[Lowest()])
    saved = training.run(3).monitor.state_dict()
    resumed.monitor.load_state_dict(saved)
    assert resumed.monitor.state_dict()["rules"]["lowest"][0]["_names"] == ["a", 1]
    training.monitor.load_state_dict({**saved, "rules": {"lowest": [{"_lowest": None}]}})
    saved["arrays"]["tables/0/values"].fill_(7.0)
    saved["arrays"]["steps"].zero_()
    assert resumed.monitor.recording().steps.tolist() == [0, 1, 2]
    assert not (resumed.monitor.recording().tables["gradient"].values == 7.0).any()


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


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o777])
def test_a_file_that_is_replaced_keeps_its_permissions(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never more readable, not even while it is written; a file system without permissions ends nothing."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no permissions here")

    path, seen = tmp_path / "run.gradstat", []
    write = os.fsync
    mask = os.umask(0o027)
    try:
        save(small(), path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640  # as of any new file
        path.chmod(mode)
        monkeypatch.setattr(os, "fsync", lambda file: (seen.append(stat.S_IMODE(os.fstat(file).st_mode)), write(file)))
        save(small(), path)
        assert stat.S_IMODE(path.stat().st_mode) == seen[0] == mode
        monkeypatch.setattr(os, "chmod", refuse)
        save(small(), path)
        assert stat.S_IMODE(path.stat().st_mode) == seen[2] == mode & ~0o027
    finally:
        os.umask(mask)


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
        assert ours.poll(120)
        ours.recv()
        time.sleep(after)
        process.kill()
        process.join(120)
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
from gradstat.integrations.loggers import JsonlWriter
from gradstat.recording import save

folder = sys.argv[1]
run, path = f"{folder}/run.gradstat", f"{folder}/log.jsonl"
save(recording(40, 12), run)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
try:
    save(recording(100, 40), run)
except OSError:
    print("full")

# A monitor says so and goes on; the file keeps what it had.
monitor = gradstat.Monitor(torch.nn.Linear(2, 2), save_to=run, on_anomaly="record")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 14))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    _ = [monitor.step(loss) for loss in (1.0, float("nan"), 1.0)]
    monitor.detach()
print(monitor.steps, any("could not be saved" in str(warning.message) for warning in caught))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))

# A log loses the line that did not fit, and no other.
log, refused, step = JsonlWriter(path), 0, 0
while refused < 3:  # the first is cut, the others get nothing in
    try:
        log.write({"loss": 0.125, "norm": 2.5}, step)
        step += 1
    except OSError:
        refused += 1
with open(path, "rb+") as file:  # somebody makes room
    whole = file.read()
    file.truncate(len(whole) - 4000)
for loss in (0.25, 0.5):
    log.write({"loss": loss, "norm": 2.5}, 7)
lines = open(path).read().splitlines()
print(*lines[-2:], len(lines) > 100)
os.remove(path)
"""


def test_a_full_disk_costs_what_does_not_fit_and_nothing_else(tmp_path: Path, forks: Forks) -> None:
    """A limit of a file's size imitates it."""
    *told, lines = forks.output_of(FULL, tmp_path).splitlines()
    assert told == ["full", "3 True"]
    assert lines == '{"step": 7, "loss": 0.25, "norm": 2.5} {"step": 7, "loss": 0.5, "norm": 2.5} True'
    assert_same(load(tmp_path / "run.gradstat"), recording(40, 12))
    assert [path.name for path in tmp_path.iterdir()] == ["run.gradstat"]


# What is read ------------------------------------------------------------------------------------------------


STRANGE: dict[str, bytes] = {
    "nothing": b"",
    "an archive": b"PK\x03\x04",
    "a text": b"not a recording\n" * 100,
    "a pickle": b"\x80\x04\x95",
    "zeros": bytes(10_000),
}
MEMBERS = (
    *(("header.json", text) for text in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"9" * 5000)),
    *(("steps.npy", npy(np.arange(12).astype(kind))) for kind in ("int32", ">i8")),
    *(("steps.npy", npy(steps)) for steps in (np.arange(12)[::-1].copy(), np.arange(-1, 11), np.array([{}] * 12))),
    ("steps.npy", npy(np.zeros((12, 1), np.int64))),
)


def test_what_is_no_recording_is_refused(saved: Path, tmp_path: Path) -> None:
    for content in STRANGE.values():
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(RecordingFileError, match="other cannot be read as a gradstat recording: "):
            load(tmp_path / "other")
    for missing, error in (("missing.gradstat", FileNotFoundError), ("", IsADirectoryError)):
        with pytest.raises(error):
            load(tmp_path / missing)
    for name, data in MEMBERS:
        with pytest.raises(RecordingFileError, match=r"rewritten\.gradstat cannot be read"):
            load(rewritten(saved, {name: data}))
    for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        with pytest.raises(RecordingFileError, match="compressed by method"):
            load(rewritten(saved, method=method))
    with pytest.raises(RecordingFileError, match="nested in more than 100 levels"):
        load(rewritten(saved, meta=DEEP))


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
def test_files_and_states_of_another_version_name_both_versions_and_the_remedy(
    version: int, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_names_that_mean_harm_are_saved_read_and_told_without_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(named(NAMES), tmp_path / "run.gradstat")
    assert main(["view", str(path), "--no-page"]) == 0
    assert main(["view", str(path), "--no-page", "--json"]) == 0
    assert is_printable(capsys.readouterr().out)
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
        assert (told.out, told.err.count("\n")) == ("", 1)
        assert told.err.startswith(f"gradstat {arguments[0]}: ")
        shown += told.err
    assert "No such file" in shown
    assert is_printable(shown)


def test_of_thousands_of_findings_the_first_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    micro_batches = gradstat.MicroBatches(model)
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


def test_paths_stay_in_the_folder_in_which_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = tmp_path / "first", tmp_path / "later"
    later.mkdir()
    first.mkdir()
    monkeypatch.chdir(first)
    model = nn.Linear(2, 1)
    monitor = gradstat.Monitor(model, save_to="run.gradstat", on_anomaly="record")
    lightning = GradstatCallback(save_to="lightning.gradstat")
    writer = JsonlWriter("log.jsonl")
    monkeypatch.chdir(later)
    model(torch.full((1, 2), torch.nan)).sum().backward()
    monitor.step()
    monitor.detach()
    assert not list(later.iterdir())
    assert {path.suffix for path in first.iterdir()} == {".gradstat", ".jsonl"}
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
    "scaler extra_groups": partial(gradstat.guarded_step, torch.optim.SGD(LINEAR.parameters())),
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
