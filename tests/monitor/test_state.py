"""States and recordings: what is damaged is refused whole and by name, and what is accepted never fails later."""

import copy
import json
import math
import random
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recordings import bits, recording, rewritten
from helpers.training import backpropagated
from torch import nn
from typing_extensions import Self

import gradstat
from gradstat.monitor import Finding, Rule, default_rules
from gradstat.monitor.command import describe
from gradstat.monitor.diagnosis import Diagnosis
from gradstat.monitor.page_data import page_data
from gradstat.recording import RecordingFileError, compare, load, save

SEED = 20261124
# More than the 250 that a mistake of one in a hundred would not survive.
MUTATIONS = 400
NUMBERS = (0.0, 1.0, 2.0, 0.5, 50.0, -1.0, -7.0, 1e6, 1e300, -1e300, 2.0**53, 2.0**63, 5e-324, math.nan, math.inf)
WATCH = dict.fromkeys(("parameters", "buffers", "optimizer", "outputs", "updates", "activations"), 1)


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
    made = made.clone() if isinstance(made, torch.Tensor) else made
    if len(path) == 1:
        change(made, path[0])
    else:
        made[path[0]] = with_item(value[path[0]], path[1:], change)
    return made


MISSING = object()
Damages = list[tuple[tuple[Any, ...], Any]]


def doubles(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


# Where, and what is there instead. A state without "rule" is of something else.
ANY: Damages = [((), []), ((), 5), ((), {}), ((), None)]
TENSORS: Damages = [
    *(((key,), wrong) for key in ("rule", "tensors") for wrong in (MISSING, None, 5, "ZClip.sigma", [], {})),
    *((("tensors", "totals"), wrong) for wrong in (MISSING, None, [0.0] * 5, "x", doubles(4), doubles(5, 1))),
    *((("tensors", "totals"), doubles(5).to(kind)) for kind in (torch.float32, torch.int64, torch.complex64, "meta")),
    (("tensors", "totals"), doubles(5).to_sparse()),
    *((("tensors", "totals", i), wrong) for i in range(4) for wrong in (-7.0, math.nan, math.inf, 1e300, 2.5)),
]
# A window of five, in which three norms were recorded.
CLIP: Damages = [
    *((("tensors", "totals", 4), wrong) for wrong in (-1.0, 1e6, math.nan)),
    *((("tensors", "norms", 0), wrong) for wrong in (-1.0, math.nan, math.inf)),
    (("tensors", "norms", 3), 2.0),
    *((("tensors", "norms"), wrong) for wrong in (MISSING, doubles(4), doubles(6), doubles())),
    *((("tensors", "smallest"), wrong) for wrong in (MISSING, doubles() - 0.5, doubles() + 2, doubles(1))),
]
Z_SCORE: Damages = [
    *((("tensors", "mean"), wrong) for wrong in (MISSING, doubles() + math.inf, doubles() - 1, doubles(1))),
    *((("tensors", "deviation"), wrong) for wrong in (MISSING, doubles() + math.nan, doubles(2))),
]
MEANS: Damages = [
    *((("tensors", "means"), wrong) for wrong in (MISSING, doubles(), doubles(2, 1))),
    *((("tensors", "means", 1), wrong) for wrong in (-1.0, math.nan)),
]
GUARD: Damages = [
    *((("tensors", "totals", i), wrong) for i in range(4, 9) for wrong in (-7.0, math.nan, 1e300, 2.5)),
    (("tensors", "totals", 6), 8.0),
    *((("tensors", "values", (1, 0)), wrong) for wrong in (math.nan, -math.inf)),
    *((("tensors", "values"), wrong) for wrong in (MISSING, doubles(2, 8), doubles(18), doubles(3, 9))),
]
DEEP: Any = {}
for _ in range(200):
    DEEP = {"x": DEEP}
MONITOR: Damages = [
    *((("version",), wrong) for wrong in (MISSING, "1", 0, 2, [1, 0], None)),
    *(((key,), wrong) for key in ("steps", "nonfinite_steps") for wrong in (MISSING, -10, 2**70, 0.5, math.nan, True)),
    *((("should_stop",), wrong) for wrong in (MISSING, 1, None, "x")),
    *((("findings",), wrong) for wrong in (MISSING, 5, {}, [5])),
    *((("findings", 0, key), wrong) for key in ("severity", "text", "name") for wrong in (MISSING, 5, None)),
    *((("findings", 0, "step"), wrong) for wrong in (MISSING, "8", 2**64, math.nan, True)),
    *((("findings", 0, "causes"), wrong) for wrong in (MISSING, "heat", [5])),
    *((("findings", 0, "evidence"), wrong) for wrong in (MISSING, None, [])),
    (("findings", 0, "severity"), "fatal"),
    *(((key,), wrong) for key in ("backward_order", "scalars") for wrong in (MISSING, "loss", ["a", 1], 5)),
    *((("columns",), wrong) for wrong in (MISSING, [], ["mean"])),
    *((("tables",), wrong) for wrong in (MISSING, {}, [5])),
    *((("tables", 0, key), wrong) for key in ("kind", "names") for wrong in (MISSING, 5, None)),
    *((("arrays",), wrong) for wrong in (MISSING, [], None)),
    *((("arrays", "steps"), wrong) for wrong in (MISSING, None, [0], doubles(15), torch.arange(15).int())),
    *((("arrays", "scalars"), wrong) for wrong in (MISSING, torch.zeros(3, 15))),
    *((("rules",), wrong) for wrong in (MISSING, [], {"loss-spike": {}}, {"loss-spike": [5]}, {5: []})),
    *((("rules", "loss-spike", 0, "_values"), wrong) for wrong in (None, 5, ["a"], [math.nan], [2**70])),
    *((("rules", "dead-gradient", 0, "_since"), wrong) for wrong in ([], {"a": math.nan}, {"a": 1e300}, {1: 2})),
    *((("rules", "no-learning", 0, "_reported"), wrong) for wrong in (["a"], {"a": "b"}, {1: 2})),
    *((("guard", *path), wrong) for path, wrong in (*TENSORS, *GUARD) if not isinstance(wrong, torch.Tensor)),
]
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


def placed(path: tuple[Any, ...]) -> str:
    """How errors name a place; attributes of rules have the rule's name before."""
    if path[:1] == ("rules",) and len(path) == 4:
        return f"{path[1]}.{path[3]}"
    return "state" + "".join(str(list(key)) if isinstance(key, tuple) else f"[{key!r}]" for key in path)


def damages() -> Iterator[Any]:
    own = {"ZClip": Z_SCORE, "AdaGC": MEANS, "Monitor": MONITOR}
    for name in MADE:
        common = CLIP if name in CLIPS else GUARD
        listed = [] if name == "Monitor" else [*TENSORS, *common]
        for path, wrong in [*ANY, *listed, *own.get(name, [])]:
            told = f"{placed(path[:-1])} has no {path[-1]!r}" if wrong is MISSING else placed(path)
            yield name, path, wrong, told
    yield from (("Monitor", path, wrong, told) for path, wrong, told in UNFIT)


@pytest.mark.parametrize("name", MADE)
def test_a_state_that_cannot_be_is_refused_by_the_name_of_what_is_wrong_and_nothing_has_changed(name: str) -> None:
    one = used(name)
    state = one.state()
    for _, path, wrong, told in (each for each in damages() if each[0] == name):

        def change(held: Any, key: Any, wrong: Any = wrong) -> None:
            if wrong is MISSING:
                del held[key]
            else:
                held[key] = wrong

        said = one.refuses(with_item(state, path, change) if path else wrong, "^state")
        assert told in said, (path, wrong)
        assert said.isprintable()


def test_every_attribute_of_a_rule_is_of_its_kind() -> None:
    one = used("Monitor")
    state, before = one.state(), bits(one.state())
    for name, (of_rule, *_) in state["rules"].items():
        for key in of_rule:
            for wrong in (None, [None], {"a": None}, {1: 2.0}, b"x", 1j, 2**70, object()):
                damaged = {**state, "rules": {name: [{**of_rule, key: wrong}]}}
                with pytest.raises(ValueError, match=rf"^state\['rules'\]\['{name}'\]: {name}\.{key}\b"):
                    one.made.load_state_dict(damaged)
    assert bits(one.state()) == before


@pytest.mark.parametrize("name", [*CLIPS, *GUARDS])
def test_the_state_of_another_method_or_window_is_refused(name: str) -> None:
    for other in {*CLIPS, *GUARDS} - {name}:
        used(name).refuses(used(other).state(), rf"^state\['rule'\]: expected '{name}', got '{other}'$")


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
                held[key] = rng.choice(HOSTILE)

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


@pytest.mark.parametrize("name", [*CLIPS, *GUARDS])
def test_a_damaged_state_of_a_clip_or_guard_is_refused_whole_or_works(name: str) -> None:
    trained, states, done = MADE[name](), [], 0
    for _ in range(9):
        states.append(trained.state())
        trained.step()
    rng = random.Random(f"{name}/{SEED}")
    for number in range(MUTATIONS):
        one = MADE[name]()
        before = bits(one.state())
        try:
            one.made.load_state_dict(mutated(rng.choice(states), rng))
        except ValueError:
            assert bits(one.state()) == before, number
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
    rng = random.Random(SEED)
    accepted, told = 0, []
    state = Training().run(40, bad=30).monitor.state_dict()
    assert state["findings"]
    training = Training().run(12)
    before = bits(training.monitor.state_dict())
    for number in range(MUTATIONS):
        try:
            training.monitor.load_state_dict(mutated(state, rng))
        except ValueError as error:
            told.append(str(error))
            assert bits(training.monitor.state_dict()) == before, number
            continue
        accepted += 1
        assert str(training.monitor.diagnose())
        load(training.monitor.save(tmp_path / "run.gradstat"))
        training.run(4, bad=2)
        assert training.monitor.diagnose().to_html()
        written = load(training.monitor.save(tmp_path / "run.gradstat"))
        assert page_data(written)
        assert describe(written)
        Training().monitor.load_state_dict(training.monitor.state_dict())
        training = Training().run(12)
        before = bits(training.monitor.state_dict())
    assert all("state" in text and text.isprintable() for text in told)
    assert len(told) > 100
    assert accepted > 50


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
    training = Training(rules=[*default_rules(), *[Counting()] * (fails == "rule")]).run(20)
    damaged = Training(guard=gradstat.SpikeGuard(window=16 if fails == "rule" else 32)).run(30).monitor.state_dict()
    damaged["rules"]["counting"] = [{}]
    before = bits(training.monitor.state_dict())
    told = r"state\['rules'\]\['counting'\].*seen" if fails == "rule" else r"state\['guard'\]"
    with pytest.raises(ValueError, match=told):
        training.monitor.load_state_dict(damaged)
    assert bits(training.monitor.state_dict()) == before


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
    assert resumed.monitor.state_dict()["rules"]["lowest"][0]["_names"] == ["a", 1]
    training.monitor.load_state_dict({**saved, "rules": {"lowest": [{"_lowest": None}]}})


def test_a_state_is_copied() -> None:
    training, resumed = Training(), Training()
    training.run(3)
    saved = training.monitor.state_dict()
    resumed.monitor.load_state_dict(saved)
    saved["arrays"]["tables/0/values"].fill_(7.0)
    saved["arrays"]["steps"].zero_()
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
        try:
            text = json.dumps(mutated(header, rng), default=str, allow_nan=rng.random() < 0.5)
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
    with pytest.raises(RecordingFileError, match="nested in more than 100 levels"):
        load(rewritten(path, meta=DEEP))
