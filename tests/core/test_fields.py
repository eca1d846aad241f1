"""The definition of the statistic, and that everything compiled was built from it."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradstat
from gradstat import _fields

ROOT = Path(__file__).resolve().parents[2]


def test_the_header_is_rendered_from_the_fields(tmp_path: Path) -> None:
    for folder in ("gradstat", "csrc", "tools"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "gradstat" / "_fields.py", tmp_path / "gradstat")
    program = shutil.copy(ROOT / "tools" / "fields.py", tmp_path / "tools")
    header = tmp_path / "csrc" / "stat_fields.def"
    printed = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout
    assert printed == (ROOT / "csrc" / "stat_fields.def").read_text(), "run `make fields`"
    assert not header.exists()
    said = subprocess.run([sys.executable, program, "--write"], capture_output=True, text=True, check=True).stdout
    assert said == f"wrote {header}\n"
    assert header.read_text() == printed


def test_fields_are_unique_public_and_in_an_order_that_slices_rely_on() -> None:
    """`Report.ok` reads both counts of nonfinite elements as one slice, gradstat/_core/sharded.py all sums."""
    assert len(set(_fields.NAMES)) == len(_fields.FIELDS)
    assert gradstat.FIELDS == _fields.NAMES
    merges = [field.merge for field in _fields.FIELDS]
    assert set(merges) == {"sum", "min", "max"}
    assert "sum" not in merges[merges.count("sum") :]
    assert _fields.NAMES[_fields.NONFINITE] == ("nan_count", "inf_count")


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30), st.integers(0, 30))
def test_rows_merge_in_any_grouping(values: list[float], cut: int) -> None:
    """Counts and extremes exactly, norms up to rounding; chunks, ranks and steps rely on this."""

    parts = [torch.tensor(part, dtype=torch.float64) for part in (values, values[:cut], values[cut:])]
    table = gradstat.stats(parts, backend="reference")
    whole, merged = table[0], _fields.merge(torch, table[1:])

    def norm(fields: torch.Tensor) -> float:
        return float(_fields.l2_norm(torch, fields))

    for name in ("nan_count", "inf_count", "zero_count", "min", "max"):
        assert whole[_fields.INDEX[name]] == merged[_fields.INDEX[name]]
    assert norm(merged) == pytest.approx(norm(whole), rel=1e-14, abs=0.0)


def test_columns_grow_with_the_elements_as_their_degrees_say() -> None:
    values = [3.0, -0.5, 0.0, math.nan, math.inf, 2.0**500, 2.0**-520, -7.0]
    for part in (values, values[:3], values[4:6]):
        ones, threes = gradstat.stats(
            [torch.tensor(part, dtype=torch.float64), 4 * torch.tensor(part, dtype=torch.float64)], backend="reference"
        )
        expected = ones * torch.tensor([4.0**degree for degree in _fields.DEGREES], dtype=torch.float64)
        torch.testing.assert_close(threes, expected, rtol=1e-15, atol=0.0, equal_nan=True)
