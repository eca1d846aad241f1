"""Tests that need large frameworks: `make frameworks` runs them, and fails if one is not installed."""

import os
from collections.abc import Iterator

import pytest
from helpers.ranks import Ranks

collect_ignore_glob = [] if os.environ.get("GRADSTAT_FRAMEWORKS") == "1" else ["*"]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """New processes for each test, since frameworks keep process groups in global variables."""
    pool = Ranks()
    yield pool
    pool.stop()
