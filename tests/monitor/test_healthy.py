"""The monitor finds nothing in healthy trainings.

``GRADSTAT_LONG=1`` trains longer, with more seeds; ``python tools/diagnosis.py --only healthy`` prints details.
"""

import math
import os
import random

import pytest
import torch
from healthy import HEALTHY, Healthy, serious_findings
from public_programs import PROGRAMS, Program, run

LONG = os.environ.get("GRADSTAT_LONG") == "1"
SEEDS, STEPS = (10, 2000) if LONG else (1, 500)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda healthy: healthy.name)
def test_the_monitor_is_silent(healthy: Healthy, seed: int) -> None:
    found, monitor = serious_findings(healthy, seed, STEPS)
    assert found == []
    loss = monitor.recording().scalars["loss"]
    assert len(loss) == min(STEPS, 1000)
    # A training that learns nothing would not be a healthy one.
    if not LONG:
        assert loss[-20:].mean() < 0.7 * loss[:20].mean()
    assert all(map(math.isfinite, loss))


@pytest.mark.parametrize("seed", range(5 if LONG else 1))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_of_others_are_neither_accused_nor_changed(program: Program, seed: int) -> None:
    steps = program.steps if LONG else program.short
    watched, found, monitors = run(program, seed, steps)
    drawn = torch.get_rng_state(), random.getstate()
    assert found == []
    assert all(monitor.steps for monitor in monitors)
    assert monitors
    assert all(map(math.isfinite, watched.curve))
    first, last = watched.ends()
    assert program.falls is None or last < program.falls * first
    alone, _, nobody = run(program, seed, steps, on=False)
    assert nobody == []
    assert watched.curve == alone.curve
    assert watched.bits() == alone.bits()
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == random.getstate()
