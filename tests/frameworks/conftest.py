"""Tests that need large trainers installed: `make frameworks` runs them, and there a missing one is an error."""

import os
from collections.abc import Iterator

import pytest
from ranks import Ranks

collect_ignore_glob = [] if os.environ.get("GRADSTAT_FRAMEWORKS") == "1" else ["*"]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Processes of one test: trainers keep process groups in global variables."""
    pool = Ranks()
    yield pool
    pool.stop()
