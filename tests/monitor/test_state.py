"""The state of a monitor, and recordings: what is damaged is refused whole, and what is accepted never fails later."""

import copy
import json
import math
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recordings import recording, rewritten
from torch import nn

import gradstat
from gradstat.monitor import Finding, Rule, default_rules
from gradstat.monitor.command import describe
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.recording import RecordingFileError, compare, load, save
from gradstat.monitor.recording.page_data import page_data

SEED = 20261124
# More than the 250 that a mistake of one in a hundred would not survive.
MUTATIONS = 400
WATCH = dict.fromkeys(("parameters", "buffers", "optimizer", "outputs", "updates", "activations"), 1)


class Training:
    """A tiny training, whose monitor has something of everything."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        given = {
            "on_anomaly": "record",
            "watch": WATCH,
            "classes": 2,
            "guard": gradstat.SpikeGuard(window=16),
            **options,
        }
        self.monitor = gradstat.Monitor(self.model, self.optimizer, **given)

    def run(self, steps: int, bad: int | None = None) -> None:
        for step in range(steps):
            x, labels = torch.randn(8, 3), torch.randint(0, 2, (8,))
            self.monitor.batch({"x": x, "labels": labels})
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), labels)
            loss.backward()
            if step == bad:
                self.model[0].weight.grad[0, 0] = math.nan
            self.monitor.step(loss)
            if step != bad:
                self.optimizer.step()


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    training = Training()
    training.run(40, bad=30)
    saved = training.monitor.state_dict()
    assert saved["findings"]
    return saved


def frozen(value: Any) -> Any:
    """A value that is equal only if all in ``value`` is."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return [(key, frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return repr(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in nested containers; of long lists only the first."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list | tuple) else ()
    )
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def with_item(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy of nested containers in which ``change(container, key)`` was applied at ``path``."""
    made = list(value) if isinstance(value, tuple) else copy.copy(value)
    if len(path) == 1:
        change(made, path[0])
    else:
        made[path[0]] = with_item(value[path[0]], path[1:], change)
    return made


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -10, 0, 5, 2**62, 2**70, 10**400, 0.5, -0.0, 1e300, math.nan, math.inf, "", "x", "\ud800\x1b"),
    *([], [1], ["a"], [[1, 2]], [None], {}, {"a": 1}, {"a": "b"}, {1: 2.0}, {"a": math.nan}, ("a", {}), b"x", 1j),
    object(),
    *(torch.zeros(3), torch.arange(5), torch.tensor(1.0), torch.zeros(2, 3, 8), torch.empty(0, dtype=torch.int64)),
)  # fmt: skip


def mutated(state: Any, rng: random.Random) -> Any:
    """The state with one or two things changed."""
    for _ in range(rng.choice([1, 1, 1, 2])):
        path = rng.choice(list(places(state)))
        way = rng.choice(["replace", "replace", "remove", "rename", "twist"])

        def change(held: Any, key: Any, way: str = way) -> None:
            value = held[key]
            if way == "remove":
                del held[key]
            elif way == "rename" and isinstance(held, dict):
                held[rng.choice(["", "other", 7, "step"])] = held.pop(key)
            elif way == "twist" and isinstance(value, torch.Tensor) and value.dim():
                twists = (
                    *(value.float(), value.double(), value.to(torch.float16), value[:-1], value.flip(0), -value),
                    *(value[None], value + 10**6, torch.full_like(value.double(), math.nan), torch.cat([value, value])),
                )
                held[key] = rng.choice(twists)
            elif way == "twist" and isinstance(value, list | tuple):
                held[key] = rng.choice([[*value, *value], list(value)[::-1], [*value, None], list(value)[1:]])
            elif way == "twist" and isinstance(value, int | float):
                held[key] = rng.choice([-value, value + 1, value * 1000, float(value), str(value)])
            else:
                held[key] = rng.choice(HOSTILE)

        state = with_item(state, path, change)
    return state


def test_a_damaged_state_is_refused_whole_or_works(state: dict[str, Any], tmp_path: Path) -> None:
    """Warnings are errors here, so a rule that fails later and is switched off fails this test as well."""
    rng = random.Random(SEED)
    accepted, told = 0, []
    training = Training()
    training.run(12)
    before = training.monitor.state_dict()
    for number in range(MUTATIONS):
        damaged = mutated(state, rng)
        try:
            training.monitor.load_state_dict(damaged)
        except ValueError as error:
            told.append(str(error))
            assert frozen(training.monitor.state_dict()) == frozen(before), number
            continue
        accepted += 1
        assert str(training.monitor.diagnose())
        load(training.monitor.save(tmp_path / "run.gradstat"))
        training.run(4, bad=2)
        assert training.monitor.diagnose().to_html()
        written = load(training.monitor.save(tmp_path / "run.gradstat"))
        assert page_data(written)
        assert describe(written)
        copied = Training()
        copied.monitor.load_state_dict(training.monitor.state_dict())
        training = Training()
        training.run(12)
        before = training.monitor.state_dict()
    assert all("state" in text and text.isprintable() for text in told)
    assert len(told) > 100
    assert accepted > 50


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("history",), ..., r"state\['history'\] is missing"),
        (("steps",), -10, r"state\['steps'\].*-10; expected a whole number"),
        (("steps",), 3, r"state\['history'\].*it has step 39, and the state 3 steps"),
        (("findings",), 5, r"state\['findings'\].*expected list, got 5"),
        (("findings", 0, "severity"), "fatal", r"state\['findings'\].*severity is 'fatal'"),
        (("findings", 0, "advice"), ..., r"state\['findings'\].*a finding has no 'advice'"),
        (("findings", 0, "text"), 5, r"state\['findings'\].*the text of a finding is 5; expected text"),
        (("findings", 0, "step"), "8", r"state\['findings'\].*the step of a finding is '8'; expected an integer"),
        (("findings", 0, "causes"), "heat", r"state\['findings'\].*of a finding is 'heat'; expected a list of texts"),
        (("findings", 0, "step"), 2**64, r"state\['findings'\].*expected an integer of 64 bits"),
        (("should_stop",), 1, r"state\['should_stop'\].*expected bool"),
        (("backward_order",), ["a", 1], r"state\['backward_order'\].*expected a list of names"),
        (("history", "steps"), torch.zeros(40), r"state\['history'\].*expected tensors of torch.int64, got torch.floa"),
        (("version",), "1", r"state\['version'\].*it is '1'; expected a whole number"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_the_error_names_the_field_and_nothing_has_changed(
    path: tuple[Any, ...], value: Any, expected: str, state: dict[str, Any]
) -> None:
    def change(held: Any, key: Any) -> None:
        held[key] = value
        if value is ...:
            del held[key]

    training = Training()
    training.run(3)
    before = training.monitor.state_dict()
    with pytest.raises(ValueError, match=expected):
        training.monitor.load_state_dict(with_item(state, path, change))
    assert frozen(training.monitor.state_dict()) == frozen(before)


class Counting(Rule):
    """A user's rule that loads its state by itself, in the form of another version."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__()
        self._seen: Any = 0

    def review(self, window: Any) -> list[Finding]:
        self._seen += len(window.steps)
        return []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: Any) -> None:
        self._seen = state["seen"]


@pytest.mark.parametrize("fails", ["rule", "guard"])
def test_if_one_part_refuses_its_state_the_others_go_back(fails: str) -> None:
    rules: list[Rule] = default_rules()
    training = Training(rules=[*rules, Counting()] if fails == "rule" else rules, guard=gradstat.SpikeGuard(window=16))
    training.run(20)
    other = Training(guard=gradstat.SpikeGuard(window=16 if fails == "rule" else 32))
    other.run(30)
    damaged = other.monitor.state_dict()
    damaged["rules"].append(("counting", {}))
    before = training.monitor.state_dict()
    with pytest.raises(ValueError, match=r"state\['rules'\].*seen" if fails == "rule" else r"state\['guard'\]"):
        training.monitor.load_state_dict(damaged)
    assert frozen(training.monitor.state_dict()) == frozen(before)


def test_what_a_user_keeps_may_change_its_type() -> None:
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
    training.run(3)
    saved = training.monitor.state_dict()
    resumed.monitor.load_state_dict(saved)
    assert dict(resumed.monitor.state_dict()["rules"])["lowest"]["_names"] == ["a", 1]
    training.monitor.load_state_dict({**saved, "rules": [("lowest", {"_lowest": None})]})


def test_a_state_is_copied() -> None:
    training, resumed = Training(), Training()
    training.run(3)
    saved = training.monitor.state_dict()
    resumed.monitor.load_state_dict(saved)
    saved["history"]["tables"]["gradient"]["values"].fill_(7.0)
    saved["history"]["steps"].zero_()
    assert resumed.monitor.recording().steps.tolist() == [0, 1, 2]
    assert not (resumed.monitor.recording().tables["gradient"].values == 7.0).any()


def test_a_damaged_header_of_a_recording_is_refused_or_works(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    path = save(recording(12, 6, incident=9), tmp_path / "run.gradstat")
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("header.json"))
    whole = load(path)
    refused = accepted = 0
    for _ in range(MUTATIONS):
        damaged = mutated(header, rng)
        try:
            text = json.dumps(damaged, default=str, allow_nan=rng.random() < 0.5)
        except (ValueError, TypeError):  # what JSON cannot hold
            continue
        try:
            made = load(rewritten(path, {"header.json": text.encode("utf-8", "surrogatepass")}))
        except RecordingFileError:
            refused += 1
            continue
        accepted += 1
        assert str(Diagnosis.of(made))
        assert Diagnosis.of(made).to_html()
        assert all(c.isprintable() or c == "\n" for c in describe(made) + str(compare(made, whole)))
        assert page_data(made)
        load(save(made, tmp_path / "again.gradstat"))
    assert refused > 100
    assert accepted > 50


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = save(recording(3, 2, incident=None), tmp_path / "run.gradstat")
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    with pytest.raises(RecordingFileError, match="nested in more than 100 levels"):
        load(rewritten(path, meta={"nested": nested}))
