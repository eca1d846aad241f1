"""Of trainings that are healthy the monitor says nothing.

``GRADSTAT_LONG=1`` trains longer, with more seeds; ``python tools/diagnosis.py --only healthy`` shows more of it.
"""

import math
import os

import pytest
from healthy import HEALTHY, Healthy, silence

LONG = os.environ.get("GRADSTAT_LONG") == "1"
SEEDS, STEPS = (10, 2000) if LONG else (1, 500)


@pytest.mark.usefixtures("_one_thread")
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
