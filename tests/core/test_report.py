"""The report: every derived value against torch, its conversions, its text."""

import json
import math
import pickle
import re

import numpy as np
import pytest
import torch

import gradstat
from gradstat import TensorStats


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    made = {f"layer{i}.weight": torch.randn(4, 5) * 10.0**-i for i in range(9)}
    made["layer3.weight"][1, 4] = math.nan
    made["layer5.weight"][0, 0] = made["layer5.weight"][3, 1] = -math.inf
    made["layer6.weight"][2, 2] = 0.0
    made["empty"] = torch.zeros(0, 3)
    made["scalar"] = torch.tensor(-2.5)
    made["bad"] = torch.full((3,), math.nan)
    return made


@pytest.fixture
def report(tensors: dict[str, torch.Tensor]) -> gradstat.Report:
    return gradstat.check_tensors(tensors)


def test_tensor_values(tensors: dict[str, torch.Tensor], report: gradstat.Report) -> None:
    for stats in [*report, *pickle.loads(pickle.dumps(list(report)))]:
        x = tensors[stats.name].double()
        finite = x[x.isfinite()]
        assert (stats.shape, stats.dtype, stats.device.type) == (x.shape, torch.float32, "cpu")
        counts = x.numel(), x.isnan().sum(), x.isinf().sum(), (x == 0).sum()
        assert (stats.numel, stats.nan_count, stats.inf_count, stats.zero_count) == counts
        assert stats.zero_fraction == pytest.approx(stats.zero_count / (stats.numel or math.nan), nan_ok=True)
        assert stats.ok == bool(x.isfinite().all())
        assert stats.finite_norm == pytest.approx(finite.norm().item(), rel=1e-7, abs=0.0)
        assert stats.l2_norm == pytest.approx(x.norm().item(), rel=1e-7, abs=0.0, nan_ok=True)
        expected = [math.nan] * 5
        if len(finite):
            values = finite.min(), finite.max(), finite.abs().max(), finite.mean(), finite.std(correction=0)
            expected = [value.item() for value in values]
        got = [stats.min, stats.max, stats.max_abs, stats.mean, stats.std]
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-12, nan_ok=True)
        bad = (~x.isfinite()).nonzero()
        assert stats.first_nonfinite == (tuple(bad[0].tolist()) if len(bad) else None)


def test_lookup_and_order(report: gradstat.Report) -> None:
    assert "scalar" in report
    assert "nothing" not in report
    assert report["scalar"].min == report[10].max == -2.5
    assert report[-1].name == "bad"
    with pytest.raises(KeyError, match="no tensor named 'nothing'"):
        report["nothing"]
    with pytest.raises(IndexError):
        report[99]
    assert [stats.name for stats in report.nonfinite] == ["bad", "layer3.weight", "layer5.weight"]
    assert [stats.name for stats in report.worst(4)][:3] == ["bad", "layer3.weight", "layer5.weight"]
    assert report.worst(1, by="zero_count")[0].name == "layer6.weight"
    norms = [stats.l2_norm for stats in report.worst(99, by="l2_norm")]
    assert [math.isfinite(norm) for norm in norms[:3]] == [False] * 3
    assert norms[3:] == sorted(norms[3:], reverse=True)
    assert len(norms) == len(report)
    with pytest.raises(ValueError, match=r"cannot order by 'median'.*l2_norm"):
        report.worst(by="median")


def test_numpy_holds_the_same_numbers_dict_is_json_and_scalars_are_flat_floats(report: gradstat.Report) -> None:
    array = report.to_numpy()
    for record, stats in zip(array, report, strict=True):
        for field in array.dtype.names:
            if field != "first_nonfinite":
                expected = getattr(stats, field)
                assert record[field] == (pytest.approx(expected, nan_ok=True) if field != "name" else expected), field
        assert (record["first_nonfinite"] == -1) == stats.ok
    assert len(gradstat.check_tensors([]).to_numpy()) == 0
    back = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert back["ok"] is False
    assert back["total_norm"] is None
    assert back["tensors"][3]["first_nonfinite"] == [1, 4]
    assert back["tensors"][0]["dtype"] == "float32"
    scalars = report.scalars("g/", per_tensor=["l2_norm"])
    assert all(type(value) is float for value in scalars.values())
    assert scalars["g/inf_count"] == 2.0
    assert scalars["g/l2_norm/scalar"] == 2.5
    with pytest.raises(ValueError, match="unknown column 'median'"):
        report.scalars(per_tensor=["median"])


def test_the_error_names_the_worst_and_carries_the_report(report: gradstat.Report) -> None:
    with pytest.raises(gradstat.NonFiniteGradientError) as caught:
        report.raise_if_nonfinite()
    text = str(caught.value)
    assert "3 of 12 tensors not finite (4 NaN, 2 Inf)" in text
    assert text.index("bad: 3 NaN of 3") < text.index("layer3.weight: 1 NaN of 20 elements, first at [1, 4]")
    assert caught.value.report is report
    assert isinstance(caught.value, RuntimeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    gradstat.check_tensors([torch.ones(3)]).raise_if_nonfinite()


def test_text_shows_the_bad_ones_first_then_the_extremes(report: gradstat.Report) -> None:
    lines = str(report).splitlines()
    assert lines[0] == "gradstat: 3 of 12 tensors NOT FINITE: 4 NaN and 2 Inf in 184 elements"
    assert lines[1] == "not finite, worst first:"
    assert lines[3].split()[:6] == ["bad", "3", "3", "-", "[0]", "nan"]
    assert any(line.startswith("largest norm") for line in lines)
    assert all(len(line) < 110 for line in lines)
    assert "not finite" in repr(report)
    again = pickle.loads(pickle.dumps(report))
    assert (str(again), again.names) == (str(report), report.names)
    assert str(gradstat.check_tensors([torch.ones(3)])).startswith("gradstat: 1 tensor of 3 elements, all finite")
    assert "largest |x| -" in str(gradstat.check_tensors([torch.ones(0)]))
    assert str(gradstat.check_tensors([])) == "gradstat: no tensor to check"
    assert "no gradient (2): weight, bias" in str(gradstat.check(torch.nn.Linear(2, 2)))


def test_a_report_is_true_only_if_everything_was_checked_and_finite() -> None:
    model = torch.nn.Linear(2, 2)
    nothing = gradstat.check(model)  # before backward()
    assert not nothing
    assert not nothing.ok
    assert nothing.to_dict()["ok"] is False
    assert repr(nothing) == "Report(0 gradients, nothing checked, total_norm=0)"
    message = "no gradient to check: none of 2 parameters has one. Call backward() first"
    with pytest.raises(gradstat.NonFiniteGradientError, match=re.escape(message)):
        nothing.raise_if_nonfinite()
    assert message in str(nothing)
    model(torch.ones(1, 2)).sum().backward()
    healthy = gradstat.check(model)
    assert healthy
    assert healthy[0]
    model.bias.grad[1] = math.nan
    bad = gradstat.check(model)
    assert not bad
    assert [bool(stats) for stats in bad] == [True, False]


def test_complex_runs_over_parts() -> None:
    stats = gradstat.check_tensors([torch.tensor([3 + 4j, 0j, complex(math.nan, 1)])])[0]
    assert isinstance(stats, TensorStats)
    assert (stats.numel, stats.nan_count, stats.zero_count, stats.finite_norm) == (3, 1, 1, 5.0)
    assert (stats.mean, stats.max) == (7 / 4, 4.0)
    assert stats.std == pytest.approx(np.std([3, 4, 0, 0]))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_beyond_float64_are_told_without_a_warning(sign: float) -> None:
    """A warning of numpy would be an error in programs that turn warnings into errors, as these tests do."""
    huge = torch.full((3,), torch.finfo(torch.float64).max, dtype=torch.float64)
    report = gradstat.check_tensors([huge, sign * huge])
    assert report.ok
    assert report["tensors[0]"].sum == math.inf
    assert report.max_abs == huge[0]
    assert report.total_norm == report["tensors[1]"].l2_norm == math.inf
    assert "tensors[0]" in str(report)


# Which of six layers, of a weight and a bias each, have NaN in gradients, biases in parentheses; and what is said.
DEPTHS = {
    "0 1 2 3 (0 1 2)": "Nearly all weights up to 3.weight are",
    "0 1 2 3 4 5 (0 1 2 4)": "Nearly all weights up to 5.weight are",
    "0 1 2 3 4 5 (0 1 2 3 4 5)": "All gradients are",
    "0 1 (0 1)": "",  # too few
    "0 2 4 (0 1 2)": "",  # not all up to a depth
    "0 1 2 ()": "",  # too few of all
}


@pytest.mark.parametrize("bad", DEPTHS)
def test_where_the_forward_pass_made_nan_the_text_points_there(bad: str) -> None:
    weights, biases = (list(map(int, part.split())) for part in bad.rstrip(")").split("("))
    parameters = {}
    for layer in range(6):
        for name, size, spoiled in (("weight", (2, 2), weights), ("bias", (2,), biases)):
            parameter = parameters[f"{layer}.{name}"] = torch.nn.Parameter(torch.ones(size))
            parameter.grad = torch.full(size, math.nan if layer in spoiled else 1.0)
    report, told = gradstat.check(parameters), DEPTHS[bad]
    with pytest.raises(RuntimeError) as raised:
        report.raise_if_nonfinite()
    for text in (str(report), report._repr_html_(), str(raised.value)):
        assert told in text
        assert ("made the first NaN" in text) == (not told)
        assert "find_culprit" in text
