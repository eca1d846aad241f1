"""Where two recordings diverge, and the commands view and diff."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.recordings import HOSTILE, assert_same, recording, series

from gradstat.__main__ import main
from gradstat.monitor import Diagnosis, Finding, Recording
from gradstat.monitor.command import describe
from gradstat.recording import COLUMNS, compare, load, save

NORM, MEAN, NAN, INF = (COLUMNS.index(name) for name in ("l2_norm", "mean", "nan_count", "inf_count"))


def run(m: int = 30, n: int = 8) -> Recording:
    """A healthy run with gradients of similar norms."""
    made = recording(m, n, incident=None)
    made.tables["gradient"].values[..., NORM] = 1 + np.random.default_rng(3).random((m, n))
    return made


def test_equal_runs_do_not_diverge() -> None:
    for make in (run, recording, lambda: recording(names=HOSTILE)):
        comparison = compare(make(), make(), tolerance=0)
        assert (comparison.same, comparison.divergences, comparison.exact_step) == (True, (), None)
        assert "do not diverge: bitwise equal in the" in str(comparison)
    for tolerance in (-1.0, math.nan):
        with pytest.raises(ValueError, match="tolerance must be a number of at least 0"):
            compare(run(), run(), tolerance)


def test_single_bits_do_not_matter_unless_they_shall_and_are_told() -> None:
    a, b = run(), run()
    values = b.tables["gradient"].values
    values[7, 3, NORM] = np.nextafter(values[7, 3, NORM], 9)
    values[12, 5, NORM] *= 1.01
    values[12, 4, NORM] *= 0.5
    values[20:] *= 2
    comparison = compare(a, b)
    assert not comparison.same
    assert (comparison.exact_step, comparison.step) == (7, 12)
    names = a.tables["gradient"].names
    # Ordered from upstream to downstream, not by size.
    assert [(p.kind, p.name, p.column) for p in comparison.first] == [("gradient", names[i], "l2_norm") for i in (4, 5)]
    assert comparison.first[0].b == pytest.approx(comparison.first[0].a / 2)
    assert comparison.backward_first == names[5]
    third = next(p for p in comparison.divergences if p.name == names[3])
    assert (third.exact_step, third.step) == (7, 20)
    text = str(comparison)
    assert text.startswith("The runs diverge in step 12 by more than 0.001 (bitwise different since step 7):")
    assert f"the first of these gradients in the backward pass: {names[5]}" in text
    a, b = run(), run()
    b.scalars["loss"][9] = np.nextafter(b.scalars["loss"][9], 9)
    comparison, exact = compare(a, b), compare(a, b, tolerance=0)
    assert (comparison.same, comparison.exact_step, comparison.step) == (True, 9, None)
    assert "are bitwise different since step 9, but nowhere by more than 0.001" in str(comparison)
    assert (exact.same, exact.step) == (False, 9)
    assert "bitwise equal before" in str(exact)


@pytest.mark.parametrize(
    ("kind", "column", "change", "at"),
    [
        ("series", "lr", lambda x: x * 2, slice(5, None)),
        ("series", "loss_scale", lambda x: x / 2, slice(5, None)),
        ("series", "loss", lambda x: math.inf, 5),
        ("gradient", "nan_count", lambda x: 1, 5),
        ("gradient", "mean", lambda x: x + 1, 5),
        ("gradient", "zero_fraction", lambda x: x + 0.01, 5),
        ("gradient", "l2_norm", lambda x: math.nan, 5),
        ("parameter", "l2_norm", lambda x: x * 2, 1),  # the second measurement is of step 5
    ],
)
def test_whatever_differs_is_named(
    kind: str, column: str, change: Callable[[np.ndarray], object], at: slice | int
) -> None:
    a, b = run(), run()
    values = b.scalars[column] if kind == "series" else b.tables[kind].column(column)[:, 2]
    values[at] = change(values[at])
    expected = (kind, column, "") if kind == "series" else (kind, a.tables[kind].names[2], column)
    for comparison in (compare(a, b), compare(b, a)):
        assert comparison.exact_step == comparison.step == 5
        (first,) = comparison.first
        assert (first.kind, first.name, first.column) == expected


def test_within_a_step_causes_come_before_effects() -> None:
    a, b = run(), run()
    for r in (a, b):
        for kind in ("exp_avg", "update", "output", "activation", "buffer", "batch"):
            r.tables[kind] = series(3, r.steps)
        r.scalars["lr[1]"] = r.scalars["lr"]  # of another group
    for table in b.tables.values():
        at = int(np.flatnonzero(table.steps == 10)[0])
        table.values[at, 1, NORM] *= 3
    b.scalars = {name: np.where(b.steps == 10, 3 * x + 1, x) for name, x in b.scalars.items()}
    kinds = [p.kind if p.kind != "series" else p.name for p in compare(a, b).first]
    order = ["lr", "loss_scale", "lr[1]", "batch", "update", "parameter", "buffer", "activation", "output", "loss"]
    assert kinds == [*order, "gradient", "norm", "finite_norm", "nonfinite", "missing", "exp_avg"]


def test_names_sizes_kinds_and_series_of_one_only_are_named() -> None:
    a, b = run(), run()
    gradient = b.tables["gradient"]
    gradient.names = ("other", *gradient.names[1:])
    gradient.numel = gradient.numel + np.eye(8, dtype=np.int64)[3]
    b.tables["update"] = series(2, b.steps)
    del b.scalars["lr"]
    comparison = compare(a, b)
    assert (comparison.same, comparison.step) == (False, None)
    for expected in (
        "series only in the first: lr",
        "tables only in the second: update",
        f"gradients only in the first: {a.tables['gradient'].names[0]}",
        "gradients only in the second: other",
        f"gradients of different sizes: {gradient.names[3]} (",
        "bitwise equal",
    ):
        assert expected in str(comparison)


def test_neither_the_order_of_tensors_matters_nor_what_rounding_leaves() -> None:
    a, b = run(), run()
    table = b.tables["gradient"]
    table.names, table.numel, table.values = table.names[::-1], table.numel[::-1], table.values[:, ::-1]
    assert compare(a, b, tolerance=0).same
    for r, place, left in ((a, 6, 1e-9), (b, 1, 4e-9)):
        r.tables["gradient"].values[:, place] = [left] * 5 + [0] * 3  # as of a bias that a norm layer cancels
    assert (compare(a, b).same, compare(a, b).exact_step) == (True, 0)


WRAPPINGS: dict[str, Callable[[str], str]] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "DDP of a compiled one": lambda name: f"module._orig_mod.{name}",
    "FSDP of blocks": lambda name: f"_fsdp_wrapped_module.{name.replace('.', '._fsdp_wrapped_module.', 1)}",
    "checkpoints of blocks": lambda name: name.replace(".", "._checkpoint_wrapped_module.", 1),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_names_do_not_depend_on_wrappers(wrapping: str) -> None:
    """Names of a batch's tensors have no wrappers."""
    a, b = run(), run()
    wrap = WRAPPINGS[wrapping]
    for table in b.tables.values():
        table.names = tuple(map(wrap, table.names))
    for r in (a, b):
        r.tables["output"] = series(1, r.steps[::5], names=("logits",))
        r.tables["constant"] = series(1, r.steps[::5], names=("batch['x']",))
    b.backward_order = tuple(map(wrap, b.backward_order))
    names = a.tables["gradient"].names
    finding = Finding("vanished", "warning", 3, names[0], {}, about="gradient")
    a.findings, b.findings = (finding,), (dataclasses.replace(finding, name=wrap(names[0])),)
    assert compare(a, b, tolerance=0).same
    assert compare(b, b, tolerance=0).same
    assert compare(a, b).findings_a == compare(a, b).findings_b == ()
    b.tables["gradient"].values[12:, 4:6] *= 2
    comparison = compare(a, b)
    assert [divergence.name for divergence in comparison.first] == list(names[4:6])
    assert comparison.backward_first == names[5]


def test_only_common_steps_are_compared_and_without_any_it_is_said() -> None:
    a, later = run(30), run(30)
    later.steps, later.scalars = later.steps[12:], {name: x[12:] for name, x in later.scalars.items()}
    for table in later.tables.values():
        keep = table.steps >= 12
        table.steps, table.values = table.steps[keep], table.values[keep]
    assert (compare(a, later).same, compare(a, later).common_steps) == (True, 18)
    later.scalars["loss"] = later.scalars["loss"] + 1
    assert "diverge in step 12 by more than 0.001 (the first common step" in str(compare(a, later))
    for b, words in (
        (recording(5, 8, start=100, incident=None), "the second steps 100 to 104"),
        (Recording(np.zeros(0, np.int64), {}, {}), "the second no steps"),
    ):
        comparison = compare(a, b)
        assert (comparison.comparable, comparison.same) == (False, False)
        assert f"cannot be compared: the first has steps 0 to 29, {words}, and no step is in both" in str(comparison)


def test_findings_of_one_only_are_listed() -> None:
    a, b = run(), run()
    b.findings = tuple(Finding("rule", "warning", step, "loss", {}, text="It rose.") for step in (3, 99))
    comparison = compare(a, b)
    assert comparison.same  # findings are derived from numbers, which are equal
    assert comparison.findings_b == b.findings[:1]
    assert "Found only in the second: [warning] since step 3, rule: It rose." in str(comparison)


def test_a_comparison_is_jsonable_and_its_text_is_of_printable_lines() -> None:
    a, b = recording(names=HOSTILE), recording(names=HOSTILE)
    b.tables["gradient"].values[3] *= 2
    b.scalars["loss"][2] = math.nan
    content = json.loads(json.dumps(compare(a, b).to_dict(), allow_nan=False))
    assert (content["step"], content["divergences"][0]["b"]) == (2, "NaN")
    assert all(line.isprintable() for line in str(compare(a, b)).split("\n"))


def test_diff_has_the_exit_status_of_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run()
    a = str(save(made, tmp_path / "a.gradstat"))
    made.tables["gradient"].values[4:] *= 1.01
    b = str(save(made, tmp_path / "b.gradstat"))
    other = str(save(recording(5, 8, start=500, incident=None), tmp_path / "c.gradstat"))
    for arguments, status, told in (
        ([a, a], 0, "do not diverge"),
        ([a, b], 1, "The runs diverge in step 4"),
        ([a, b, "--tolerance", "0.1"], 0, "but nowhere by more than 0.1"),
        ([a, b, "--json"], 1, '"step": 4'),
        ([a, other], 2, "cannot be compared"),
    ):
        assert main(["diff", *arguments]) == status
        assert told in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["diff", a, b, "--tolerance", "-1"])


def test_view_prints_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = save(recording(names=HOSTILE), tmp_path / "run.gradstat"), tmp_path / "folder" / "page.html"
    assert main(["view", str(path)]) == 0
    out, culprit = capsys.readouterr().out, "blocks.0.mlp.down.weight"
    assert f"first in step 30: The gradient of {culprit} has" in " ".join(out.split())
    assert out.endswith(f"\npage: {tmp_path / 'run.html'}\n")
    assert main(["view", str(path), "--output", str(other), "--json"]) == 0
    content = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (content["page"], content["incidents"][0]["first"]) == (str(other), 30)
    assert content["findings"][0]["evidence"]["largest"] == "Infinity"
    assert other.exists()
    assert (tmp_path / "run.html").exists()


def test_view_can_leave_the_page_out_and_never_overwrites_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recording()
    path = save(made, tmp_path / "run.html")
    assert main(["view", str(path)]) == 0
    assert_same(load(path), made)
    assert (tmp_path / "run.html.page.html").exists()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    absent = tmp_path / "absent.html"
    assert main(["view", str(path), "--output", str(absent)]) == 2
    assert 'pip install "gradstat[view]"' in capsys.readouterr().err
    assert not absent.exists()
    assert main(["view", str(path), "--no-page"]) == 0
    with pytest.raises(SystemExit):
        main(["view", str(path), "--no-page", "--output", "x.html"])
    assert main(["view", str(path), "--output", str(path)]) == 2
    assert_same(load(path), made)


def test_a_description_names_findings_evidence_causes_and_advice() -> None:
    text = describe(recording())
    assert "nonfinite-gradient (error), since step 30\n   The gradient of" in text
    assert "   evidence: NaN elements = 7, largest = inf" in text
    assert "   likely causes:\n     - an overflow in the forward pass\n" in text
    assert "   what to try:\n     - lower the learning rate" in text
    told = "Recorded: steps 0 to 29; series: 8 gradients, 8 parameters\n\ngradstat: nothing wrong in 30 steps of GPT"
    assert describe(run()) == told
    made = Recording(np.arange(3), {}, {kind: series(2, np.arange(3)) for kind in ("batch", "gradient", "exp_avg")})
    assert ": 2 batches, 2 gradients, 2 exp_avg states\n" in describe(made)
    told = "Recorded: no steps\n\ngradstat: nothing is known about the model, since no step was seen"
    assert describe(Recording(np.zeros(0, np.int64), {}, {})) == told


def test_of_what_no_rule_judged_the_cause_among_what_is_bad_in_one_step_is_noted() -> None:
    made = recording(incident=None)
    made.tables |= {"exp_avg": series(2, made.steps), "batch": series(1, made.steps, names=("batch['x']",))}
    for kind in ("gradient", "exp_avg", "batch"):
        made.tables[kind].values[10, 0, NAN] = 1
    assert Diagnosis.of(made).notes == ("step 10: NaN or Inf in the batch of batch['x']; no rule reports it",)
    del made.tables["batch"]
    assert Diagnosis.of(made).notes[0].startswith("step 10: NaN or Inf in the gradient of ")
    # The first steps under a loss scaler, which a rule has judged, and a mask of -Inf, are not noted.
    made = recording(incident=None)
    made.tables["gradient"].values[:3, :, INF] = 1
    made.tables["buffer"] = series(2, made.steps)
    made.tables["buffer"].values[:, 1, INF] = 496
    assert Diagnosis.of(made).notes
    made.findings = (Finding("nonfinite-gradient", "info", 0, "x", {}, about="gradient"),)
    assert Diagnosis.of(made).notes == ()
    made.tables["buffer"].values[20, 1, INF] = 497
    assert Diagnosis.of(made).notes[0].startswith("step 20: NaN or Inf in the buffer of ")
