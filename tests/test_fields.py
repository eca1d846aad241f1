"""The definition of the statistic, and that everything compiled was built from it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradstat
from gradstat import _fields, _native, _norms

ROOT = Path(__file__).resolve().parent.parent


def test_the_header_is_rendered_from_the_fields() -> None:
    assert (ROOT / "csrc" / "stat_fields.def").read_text() == _fields.render_header(), "run `make fields`"


def test_fields_are_unique_and_public() -> None:
    assert len(set(_fields.NAMES)) == len(_fields.FIELDS)
    assert gradstat.FIELDS == _fields.NAMES
    assert {field.merge for field in _fields.FIELDS} == {"sum", "min", "max"}


def test_an_unknown_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"unknown field 'median'.*nan_count.*first_nonfinite"):
        _fields.column("median")
    assert _fields.column("max") == _fields.NAMES.index("max")


def test_a_stale_extension_is_refused_with_the_remedy() -> None:
    stale = _fields.FINGERPRINT.replace("zero_count:sum,", "")
    with pytest.raises(gradstat.StaleExtensionError, match=r"stale.*zero_count.*Rebuild"):
        _native.check_fingerprint(stale, Path("_C.abi3.so"))
    _native.check_fingerprint(_fields.FINGERPRINT, Path("_C.abi3.so"))


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30), st.integers(0, 30))
def test_rows_merge_in_any_grouping(values: list[float], cut: int) -> None:
    """Counts and extremes exactly, norms to rounding: what chunks, ranks and steps rely on."""

    def row(part: list[float]) -> list[float]:
        table: list[float] = gradstat.stats([torch.tensor(part, dtype=torch.float64)], backend="reference")[0].tolist()
        return table

    def norm(fields: list[float]) -> float:
        with np.errstate(over="ignore"):
            return float(
                _fields.l2_norm(
                    np, *(np.float64(fields[_fields.INDEX[f"sq_sum{s}"]]) for s in ("", "_large", "_small"))
                )
            )

    whole, merged = row(values), _fields.merge_rows([row(values[:cut]), row(values[cut:])])
    for name in ("nan_count", "inf_count", "zero_count", "min", "max"):
        assert whole[_fields.INDEX[name]] == merged[_fields.INDEX[name]]
    assert norm(merged) == pytest.approx(norm(whole), rel=1e-14)


def test_merging_nothing_gives_the_identity() -> None:
    assert _fields.merge_rows([]) == [field.identity for field in _fields.FIELDS]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norms_of_a_table_say_nan_before_inf(norm_type: float) -> None:
    tensors = [torch.tensor([3.0, -4.0]), torch.zeros(0)]
    expected = 5.0 if norm_type == 2.0 else 4.0
    assert _norms.total_norm(gradstat.stats(tensors), norm_type).item() == pytest.approx(expected)
    assert _norms.total_norm(gradstat.stats([*tensors, torch.tensor(-math.inf)]), norm_type).item() == math.inf
    both = [*tensors, torch.tensor([math.inf, math.nan])]
    assert math.isnan(_norms.total_norm(gradstat.stats(both), norm_type).item())


def test_the_counts_of_nonfinite_elements_are_neighbours() -> None:
    """`Report.ok` reads both as one slice."""
    assert _fields.INDEX["inf_count"] == _fields.INDEX["nan_count"] + 1


def test_summed_columns_come_first() -> None:
    """gradstat/_reduction.py takes them as a view."""
    merges = [field.merge for field in _fields.FIELDS]
    assert "sum" not in merges[merges.count("sum") :]
