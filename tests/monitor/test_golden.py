"""Golden runs: their statistics, what is found, and every way to use them."""

import math
import re
import runpy
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.recordings import rewritten
from helpers.training import RECORD, Clusters, backpropagated, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradstat.__main__ import main
from gradstat.monitor import Golden, Monitor, Recording, Series
from gradstat.recording import COLUMNS, RecordingFileError, load, save
from gradstat.recording import golden_statistics as statistics

NAMES = tuple(f"blocks.{i}.{part}" for i in range(4) for part in ("up.weight", "up.bias", "down.weight", "down.bias"))
SIZES = np.array([4096, 64, 4096, 64] * 4)


def series(seed: int, steps: np.ndarray, spread: float = 0.2, names: tuple[str, ...] = NAMES) -> Series:
    """Gradients whose norms differ by seed and step; how much is different for each tensor, but not for each seed."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(0)
    n, m = len(names), len(steps)
    level = fixed.normal(size=n) - np.log1p(steps / 30)[:, None]
    width = spread * fixed.gamma(3, 1 / 3, n)
    norm = np.exp(level + width * (rng.normal(size=n) + rng.normal(size=(m, n))))
    rms = norm / np.sqrt(SIZES[:n])
    columns = {
        "l2_norm": norm,
        "mean": rms * rng.normal(size=(m, n)) / np.sqrt(SIZES[:n]),
        "std": rms,
        "min": -rms * rng.uniform(3, 4, (m, n)),
        "max": rms * rng.uniform(3, 4, (m, n)),
    }
    values = np.stack([columns.get(name, np.zeros((m, n))) for name in COLUMNS], -1).astype(np.float32)
    return Series(names, SIZES[:n].astype(np.int64), steps, values)


def run(seed: int, steps: int = 100, every: int = 20) -> Recording:
    """A healthy run of gradients, parameters, a loss and a learning rate."""
    rng, at = np.random.default_rng(seed + 10_000), np.arange(steps)
    loss = np.exp(1 - at / 50 + 0.05 * rng.normal() + 0.1 * rng.normal(size=steps))
    tables = {"gradient": series(seed, at), "parameter": series(seed + 500, at[::every], 0.01)}
    return Recording(at, {"loss": loss, "lr": np.full(steps, 1e-3), "norm": np.ones(steps)}, tables)


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.of([run(seed) for seed in range(5)])


# Statistics --------------------------------------------------------------------------------------------------------


def test_windows_double_and_then_stay_and_cover_every_step() -> None:
    assert statistics.window_starts(100).tolist() == [0, 1, 3, 7, 15, 31, 47, 63, 79, 100]
    assert statistics.window_starts(1).tolist() == [0, 1]
    assert statistics.window_starts(2).tolist() == [0, 1, 2]
    for steps in (2, 3, 17, 160, 2000, 100_000):
        sizes = np.diff(statistics.window_starts(steps))
        assert sizes.sum() == steps
        assert len(sizes) < 40
        assert (sizes > 0).all()
        assert (np.diff(sizes[:-1]) >= 0).all()


def test_student_deviates_become_normal_ones() -> None:
    """Quantiles of Student's distribution, and of the normal one at the same probability (97.5, 99.5, 99.95 %)."""
    for t, freedom, z in ((2.2281, 10, 1.95996), (3.1693, 10, 2.57583), (8.6103, 4, 3.2905), (12.0, 1e8, 12.0)):
        assert float(statistics.normal_deviate(np.array(t), freedom)) == pytest.approx(z, rel=0.01)
    assert statistics.polygamma(0, 0.5) == pytest.approx(-1.9635100260, abs=1e-8)
    assert statistics.polygamma(1, 1.0) == pytest.approx(math.pi**2 / 6, abs=1e-7)
    for x in (0.3, 2.0, 50.0):
        assert statistics.inverse_trigamma(statistics.polygamma(1, x)) == pytest.approx(x, rel=1e-6)


@pytest.mark.parametrize("runs", [3, 5, 8])
def test_few_healthy_runs_are_called_unlike(runs: int) -> None:
    unlike = 0
    for first in range(0, 120, 12):
        golden = Golden.of([run(1000 + first + i) for i in range(runs)])
        unlike += sum(not golden.compare(run(3000 + first + seed)).ok for seed in range(12))
    assert unlike <= 9  # of 120, 6 are expected at most; more than 9 come with a probability of 5 %


def test_a_tensor_that_hardly_varies_has_a_narrower_interval_than_one_that_varies(golden: Golden) -> None:
    rng = np.random.default_rng(0)  # as `series` draws them
    rng.normal(size=len(NAMES))
    varies = rng.gamma(3, 1 / 3, len(NAMES))
    for j, is_ok in ((varies.argmin(), False), (varies.argmax(), True)):
        assert golden.compare(changed(4.0, ALL, NAMES[j])).ok == is_ok


# What is found -----------------------------------------------------------------------------------------------------


ALL = "l2_norm mean std min max"
UP = "blocks.2.up"


def changed(
    factor: float, columns: str = ALL, names: str = "", since: int = 0, what: str = "gradient", seed: int = 50
) -> Recording:
    """A healthy run with one series, or columns of some tensors of one kind, multiplied."""
    made = run(seed)
    if what in made.scalars:
        made.scalars[what][since:] *= factor
        return made
    table = made.tables[what]
    chosen = [names in name for name in table.names]
    for column in columns.split():
        table.column(column)[since:, chosen] *= factor
    return made


def with_series(made: Recording, name: str, factor: float) -> Recording:
    made.scalars[name] *= factor
    return made


def with_zeros(seed: int, later: float, first: float, name: str = NAMES[6]) -> Recording:
    """A healthy run in which such a share of a parameter is 0, in the first measurement and later."""
    made = run(seed)
    table = made.tables["parameter"]
    table.column("zero_fraction")[:, table.names.index(name)] = [first] + [later] * (len(table.steps) - 1)
    return made


# A run, where it is unlike, what is said of that (a pattern), and attributes of the first finding.
STORIES: dict[str, tuple[Callable[[], Recording], str, str, dict[str, Any]]] = {
    "a scaled loss": (lambda: with_series(changed(20), "loss", 20), "everywhere", "times.*like the loss",
                      {"name": "loss", "step": 0}),
    "scaled gradients": (lambda: changed(20), "everywhere", "unlike the loss", {"kind": "gradient"}),
    "one module": (lambda: changed(30, ALL, UP), UP, "", {"feature": "norm"}),
    "one kind of modules": (lambda: changed(30, ALL, "down"), "blocks.*.down", "", {"feature": "norm"}),
    "peaks": (lambda: changed(5, "min max", NAMES[6]), "blocks.1.down", "", {"name": NAMES[6], "feature": "peak"}),
    "means": (lambda: changed(60, "mean", NAMES[6]), "blocks.1.down", "", {"name": NAMES[6], "feature": "mean"}),
    "a row that nothing trains": (lambda: with_zeros(50, 0.02, 0.02), "blocks.1.down", "initial parameters",
                                  {"name": NAMES[6], "feature": "zeros"}),
    "late": (lambda: changed(30, since=63), "everywhere", "times", {"step": 63, "last": 78}),
    "another rate": (lambda: with_series(changed(30), "lr", 1.1), "the learning rate", "^times 1.1$", {"name": "lr"}),
    "how it began": (lambda: changed(2, what="parameter"), "everywhere", "initial parameters", {"kind": "parameter"}),
    "the optimizer": (lambda: changed(2, ALL, "", 1, "parameter"), "everywhere", "optimizer", {"kind": "parameter"}),
    "no gradient": (lambda: changed(math.nan, " ".join(COLUMNS), NAMES[3]), "blocks.0.down", "",
                    {"name": NAMES[3], "feature": "absent", "step": 0, "excess": math.inf}),
    "no loss": (lambda: changed(math.nan, since=7, what="loss"), "the loss", "",
                {"name": "loss", "feature": "absent", "step": 7}),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_what_is_unlike_is_named_and_nothing_else(story: str, golden: Golden) -> None:
    make, where, what, attributes = STORIES[story]
    found = golden.compare(make())
    first = found.findings[0]
    assert (found.ok, found.where, asdict(first) | attributes) == (False, where, asdict(first))
    assert re.search(what, found.what)
    assert first.excess > 1
    if where.startswith("blocks"):
        pattern = where.replace("*", r"\d")
        assert all(re.match(pattern, one.name) for one in found.findings)
    if first.feature in ("peak", "mean", "zeros", "absent"):
        assert len(found.findings) == 1


def test_a_parameter_that_begins_at_0_may_stay_there_in_part() -> None:
    """As the biases of units that are dead."""
    golden = Golden.of([with_zeros(seed, 0.0, 1.0) for seed in range(5)])
    assert golden.compare(with_zeros(50, 0.1, 1.0)).ok
    golden = Golden.of([with_zeros(seed, 0.0, 0.5) for seed in range(5)])
    assert [found.feature for found in golden.compare(with_zeros(50, 0.1, 0.5)).findings] == ["zeros"]


def test_a_value_beside_the_expected_one_and_what_is_only_absent(golden: Golden) -> None:
    (loss, *_) = golden.compare(STORIES["a scaled loss"][0]()).findings
    assert (loss.step, loss.value) == (0, pytest.approx(20 * loss.expected, rel=0.5))
    made = STORIES["no loss"][0]()
    assert "present in all golden runs" in str(golden.compare(made))
    made.scalars["loss_nonfinite"] = np.isnan(made.scalars["loss"]) * 1.0
    assert "since a step between 7 and 14, the loss: it is not finite" in str(golden.compare(made))
    del made.scalars["loss"]  # a monitor that is not told the loss
    assert golden.compare(made).ok


# A group whose rate is the first one's is recorded without it.
@pytest.mark.parametrize(("usual", "other", "told"), [
    (1e-4, 1e-5, "lr[1]: times 0.1"), (None, 1e-4, "lr[1]: times 0.1"), (1e-4, None, "lr[1]: times 10"),
    (1e-4, 0.0, "lr[1]: 0"),
])  # fmt: skip
def test_the_rate_of_each_group_is_compared(usual: float | None, other: float | None, told: str) -> None:
    def with_rate(seed: int, rate: float | None) -> Recording:
        made = run(seed)
        return made if rate is None else replace(made, scalars={**made.scalars, "lr[1]": np.full(100, rate)})

    golden = Golden.of(with_rate(seed, usual) for seed in range(5))
    assert golden.compare(with_rate(6, usual)).ok
    assert f"golden runs since step 0, the learning rate {told}\n" in str(golden.compare(with_rate(6, other)))


def test_an_expert_that_rested_in_all_golden_runs_may_be_used() -> None:
    def with_idle(seed: int, since: int) -> Recording:
        made = run(seed)
        made.tables["gradient"].values[since : since + 8, 3] = 0
        return made

    golden = Golden.of(with_idle(seed, 7) for seed in range(5))
    assert golden.compare(with_idle(6, 7)).ok
    assert golden.compare(run(7)).ok
    assert not golden.compare(with_idle(6, 31)).ok
    nothing = run(8)
    nothing.tables["gradient"].values[:] = 0
    assert "everywhere: gradients are 0\n" in str(golden.compare(nothing))


def test_several_kinds_of_modules_are_named_rather_than_what_holds_nearly_everything() -> None:
    kinds = ("norm", "attention.query", "attention.out", "mlp.up", "mlp.down")
    names = (*(f"body.layers.{i}.{kind}.weight" for i in range(3) for kind in kinds), "head.weight")

    def made(seed: int, *others: str) -> Recording:
        table = series(seed, np.arange(40), names=names)
        table.values[:, [any(other in name for other in others) for name in names], :5] *= 30
        return Recording(np.arange(40), {}, {"gradient": table})

    golden = Golden.of([made(seed) for seed in range(5)])
    for others, where in (
        (("norm",), ["body.layers.*.norm"]),
        (("norm", "up"), ["body.layers.*.mlp.up", "body.layers.*.norm"]),
        (("layers.1",), ["body.layers.1"]),
        (("layers.0.norm", "layers.2.norm"), ["body.layers.0.norm", "body.layers.2.norm"]),
        (("query", "out", "up", "norm"), ["everywhere"]),
    ):
        assert sorted(golden.compare(made(50, *others)).where.split(" and ")) == where


NONFINITE = [
    ("gradient", "nan_count", 0, "everywhere", "gradients are not finite"),
    ("gradient", "inf_count", 33, "everywhere", "gradients are not finite"),
    ("parameter", "nan_count", 0, "everywhere", "the initial parameters are not finite"),
    ("parameter", "inf_count", 1, "everywhere", "parameters are not finite"),
    ("loss", "", 31, "the loss", "it is not finite"),
    ("lr", "", 31, "the learning rate", "not finite"),
]


@pytest.mark.parametrize(("kind", "count", "since", "where", "what"), NONFINITE)
def test_what_is_not_finite_is_told_as_that(
    kind: str, count: str, since: int, where: str, what: str, golden: Golden
) -> None:
    for in_part in (False, True):
        made = run(50)
        if kind in made.scalars:
            made.scalars[kind][since:] = -math.inf if in_part else math.inf
        else:
            table = made.tables[kind]
            table.column(count)[since:] = 1 if in_part else table.numel
            if not in_part:  # then a monitor measures no finite element
                table.values[since:, :, :5] = [0, math.nan, math.nan, math.inf, -math.inf]
        found = golden.compare(made)
        assert (found.findings[0].feature, found.findings[0].value, found.where) == ("nonfinite", math.inf, where)
        assert found.findings[0].step <= since * (20 if kind == "parameter" else 1)
        assert found.what.startswith(what)
        assert "not finite, but finite in all golden runs" in str(found)


def test_one_step_of_a_window_that_is_not_finite_does_not_count(golden: Golden) -> None:
    overflown = run(50)  # as of a loss scaler
    overflown.tables["gradient"].column("inf_count")[70] = 1
    assert golden.compare(overflown).ok
    assert not Golden.of([run(0), run(1), overflown]).left_out


def test_a_changed_model_is_told_and_the_rest_is_compared(golden: Golden) -> None:
    made = changed(30, ALL, "blocks.3.up.weight")
    table = made.tables["gradient"]
    made.tables["gradient"] = Series(("new", *table.names[1:]), table.numel, table.steps, table.values)
    table.values[:, 2] *= 100
    table.numel[2] = 999
    found = golden.compare(made)
    for told in (
        "gradients only in the golden runs: blocks.0.up.weight",
        "gradients only in the run: new",
        "different sizes: blocks.0.down.weight (4,096 and 999)",
    ):
        assert told in str(found)
    assert {one.name for one in found.findings} == {"blocks.3.up.weight"}


def test_a_shorter_run_is_compared_in_what_it_has(golden: Golden) -> None:
    short = golden.compare(run(50, 40))
    assert (short.ok, short.steps) == (True, (0, 30))  # windows that it has as a whole
    whole = run(50)
    later = {"gradient": Series(NAMES, SIZES, whole.steps[50:], whole.tables["gradient"].values[50:])}
    part = Recording(whole.steps[50:], {name: values[50:] for name, values in whole.scalars.items()}, later)
    assert golden.compare(part).steps == (63, 99)
    late = Recording(np.arange(100, 103), {"loss": np.ones(3)}, {})
    with pytest.raises(ValueError, match=r"recording: it has steps 100 to 102, .*at most 100 steps"):
        golden.compare(late)


def test_rounding_noise_is_left_out_whatever_its_size() -> None:
    def with_key(seed: int, size: float) -> Recording:
        made = run(seed)
        made.tables["gradient"].values[:, 1] = made.tables["gradient"].values[:, 0] * size
        return made

    golden = Golden.of([with_key(seed, 1e-8) for seed in range(5)])
    assert golden.left_out == ("blocks.0.up.bias",)
    assert golden.compare(with_key(50, 1e-3)).ok
    assert golden.compare(with_key(50, 1e-3)).left_out == ("blocks.0.up.bias",)
    assert not Golden.of([with_key(seed, 0.5) for seed in range(5)]).compare(with_key(50, 1e-8)).ok


def test_the_sign_of_one_element_and_one_huge_tensor_do_not_matter_for_others() -> None:
    def with_scalar(seed: int, value: float) -> Recording:
        made = run(seed)
        table = made.tables["parameter"]
        table.numel[5] = 1
        table.values[:, 5, :5] = [abs(value), value, 0, value, value]
        table.values[:, 6, :5] = 0  # initialised with zeros
        return made

    golden = Golden.of([with_scalar(seed, 0.2) for seed in range(5)])
    assert golden.compare(with_scalar(50, -0.2)).ok
    found = golden.compare(with_scalar(50, 1e10))
    assert {one.name for one in found.findings} == {NAMES[5]}
    assert found.where == NAMES[5].rpartition(".")[0]


def test_a_loss_may_be_negative() -> None:
    def shifted(seed: int, by: float) -> Recording:
        made = run(seed)
        made.scalars["loss"] -= by
        return made

    golden = Golden.of([shifted(seed, 2) for seed in range(5)])
    assert golden.compare(shifted(50, 2)).ok
    found = golden.compare(shifted(50, 5))
    assert (found.where, found.findings[0].value < -2) == ("the loss", True)


def test_what_not_all_golden_runs_have_is_not_compared() -> None:
    made = [run(seed) for seed in range(3)]
    del made[1].scalars["loss"]
    del made[2].tables["parameter"]
    made[1].tables["gradient"].values[:, 4] = np.nan
    golden = Golden.of(made)
    assert golden.compare(with_series(changed(100, ALL, "blocks.1.up.weight"), "loss", 100)).ok
    assert golden.compare(changed(100, ALL, "blocks.1.up.bias")).where == "blocks.1.up"


# Files -------------------------------------------------------------------------------------------------------------


def test_a_file_gives_the_same_comparison(golden: Golden, tmp_path: Path) -> None:
    path = golden.save(tmp_path / "deep" / "golden.gradstat")
    loaded, made = Golden.load(path), changed(30, ALL, "blocks.2.up")
    assert (loaded.runs, loaded.steps) == (5, 100)
    assert loaded.compare(made) == golden.compare(made)
    assert golden.save(tmp_path / "again.gradstat").read_bytes() == path.read_bytes()


def test_too_few_runs_and_runs_without_a_common_window_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recordings: expected at least 3 golden runs .5 are advised., got 2"):
        Golden.of([run(0), run(1)])
    late = run(2)
    late.steps = late.steps + 100
    for table in late.tables.values():
        table.steps = table.steps + 100
    with pytest.raises(ValueError, match=r"recordings: .* no steps in common"):
        Golden.of([run(0), run(1), late])


def test_damaged_and_other_files_are_refused(golden: Golden, tmp_path: Path) -> None:
    path = golden.save(tmp_path / "golden.gradstat")
    with pytest.raises(RecordingFileError, match="cannot be read as a gradstat recording"):
        load(path)
    with pytest.raises(
        RecordingFileError, match=r"as a gradstat golden: it is a gradstat recording; `gradstat golden make`"
    ):
        Golden.load(save(run(0), tmp_path / "run.gradstat"))
    for wrong in ({"version": 2}, {"starts": [0] * 10}, {"starts": []}, {"intervals": [{}]}, {"sizes": {}}):
        with pytest.raises(RecordingFileError, match="cannot be read"):
            Golden.load(rewritten(path, **wrong))
    whole = path.read_bytes()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with pytest.raises(RecordingFileError):
            Golden.load(path)


# Ways to use them --------------------------------------------------------------------------------------------------


def test_the_commands_make_check_and_do_not_replace_what_they_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *files, good = (str(save(run(seed), tmp_path / f"{seed}.gradstat")) for seed in (0, 1, 2, 50))
    bad = str(save(changed(100, ALL, UP), tmp_path / "bad.gradstat"))
    golden, page, hard = (str(tmp_path / name) for name in ("golden.gradstat", "page.html", "hard.gradstat"))
    for arguments, status, told in (
        (["make", *files, "-o", golden], 0, "3 golden runs, steps 0 to 99"),
        (["make", *files, "-o", golden], 0, "3 golden runs"),  # again
        (["check", good, golden], 0, "Like the 3 golden runs in steps 0 to 99\n"),
        (["check", bad, golden], 1, UP),
        (["check", bad, golden, "--json"], 1, f'"where": "{UP}"'),
        (["make", *files[:2], "-o", golden], 2, "expected at least 3"),
        (["check", golden, golden], 2, "cannot be read as a gradstat recording"),
    ):
        assert main(["golden", *arguments]) == status
        said = capsys.readouterr()
        assert told in (said.err if status == 2 else said.out)
    Path(page).symlink_to(files[1])
    Path(hard).hardlink_to(files[2])
    before = {path: Path(path).read_bytes() for path in (*files, golden)}
    refused = [["golden", "make", *files, "-o", output] for output in (*files, page, hard)]
    refused += [["view", files[0], "--output", output] for output in (*files[:2], golden, page, hard)]
    for command in refused:
        assert main(command) == 2
        assert "is a recording or golden runs; choose another file" in capsys.readouterr().err
    assert before == {path: Path(path).read_bytes() for path in before}


def scalars(**values: float) -> Recording:
    steps = np.arange(64)
    return Recording(steps, {name: np.full(64, value) for name, value in values.items()}, {})


EXTREMES = [
    ([1e-3, 1e-3, 0.0], 1e-3, False),
    ([0.0, 0.0, 0.0], 1.0, True),
    ([1e-3, 1e-3, 1e-3], 0.0, True),
    ([1.7e308, 1.6e308, 1.7e308], 1.7e308, False),
    ([1.0, 1.1, 1.0], 1.7e308, True),
]


@pytest.mark.parametrize("name", ["lr", "loss"])
def test_extremes_are_compared(name: str) -> None:
    for values, of_run, is_unlike in EXTREMES:
        comparison = Golden.of(scalars(**{name: value}) for value in values).compare(scalars(**{name: of_run}))
        assert comparison.ok is not is_unlike
        assert ("Unlike" if is_unlike else "Like") in str(comparison)


def test_a_comparison_of_nothing_is_no_verdict(golden: Golden, tmp_path: Path, capsys: Any) -> None:
    other = run(1)
    renamed = {kind: replace(one, names=tuple(f"x.{name}" for name in one.names)) for kind, one in other.tables.items()}
    narrow = {kind: replace(one, numel=one.numel + 1) for kind, one in other.tables.items()}
    path = golden.save(tmp_path / "golden.gradstat")
    for tables in ({}, renamed, narrow):
        nothing = Recording(other.steps, other.scalars if tables is renamed else {}, tables)
        comparison = golden.compare(nothing)
        assert (comparison.ok, comparison.comparable) == (False, False)
        assert "Cannot tell: the run and the golden runs have no tensor name in common" in str(comparison)
        assert main(["golden", "check", str(save(nothing, tmp_path / "run.gradstat")), str(path)]) == 2
        assert "Cannot tell" in capsys.readouterr().out


def train(
    seed: int, steps: int = 40, lr: float = 1e-2, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> Recording:
    """Records a small training; each rank, if there are several, has its share of every batch."""
    torch.manual_seed(seed)
    model, draw = wrap(mlp()), Clusters(0, 16)
    draw.random.manual_seed(seed)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    monitor = Monitor(model, optimizer, on_anomaly=RECORD)
    for _ in range(steps):
        inputs, labels = draw()
        loss = backpropagated(optimizer, nn.functional.cross_entropy(model(inputs[rank::world]), labels[rank::world]))
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        monitor.step(mean / world)
        optimizer.step()
    return monitor.recording()


def test_a_run_is_compared_while_it_goes_on() -> None:
    golden = Golden.of([train(seed) for seed in range(1, 6)])
    assert golden.compare(train(50, 20)).ok
    comparison = golden.compare(train(50, 20, lr=2e-2))
    assert (comparison.where, comparison.what, comparison.findings[0].step) == ("the learning rate", "times 2", 0)


def test_the_example_tells_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "golden_example.py"))
    for mistake, status, told in (("none", 0, "Like the 5"), ("undivided", 1, "it is scaled")):
        monkeypatch.setattr("sys.argv", ["golden_example.py", "--mistake", mistake])
        assert example["main"]() == status
        assert told in capsys.readouterr().out


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model[4]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("wrap", [sharded, DistributedDataParallel])
def test_a_run_on_two_ranks_is_like_golden_runs_on_one(ranks: Ranks, wrap: Any) -> None:
    golden = Golden.of([train(seed) for seed in range(1, 6)])
    own = train(50).tables["gradient"].column("l2_norm")
    for made in ranks.run(2, train, 50, 40, 1e-2, wrap):
        comparison = golden.compare(made)
        assert comparison.ok, str(comparison)
        assert not comparison.structure
        np.testing.assert_allclose(made.tables["gradient"].column("l2_norm"), own, rtol=1e-3)
