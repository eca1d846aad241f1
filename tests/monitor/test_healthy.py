"""Of trainings that are healthy the monitor says nothing.

``GRADSTAT_LONG=1`` trains longer, with more seeds; ``python tests/healthy.py`` shows more of it.
"""

import math
import os
from collections.abc import Iterator

import pytest
import torch
from healthy import HEALTHY, Healthy, silence

LONG = os.environ.get("GRADSTAT_LONG") == "1"
SEEDS, STEPS = (10, 2000) if LONG else (3, 500)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda healthy: healthy.name)
def test_the_monitor_is_silent(healthy: Healthy, seed: int) -> None:
    found, monitor = silence(healthy, seed, STEPS)
    assert found == []
    loss = monitor.recording().scalars["loss"]
    assert len(loss) == min(STEPS, 1000)
    # Training that learns nothing would be no healthy training.
    if not LONG:
        assert loss[-20:].mean() < 0.7 * loss[:20].mean()
    assert all(map(math.isfinite, loss))
