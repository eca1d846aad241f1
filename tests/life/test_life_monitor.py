"""Life with a monitor: whatever a program does between steps, what is recorded is what was there."""

import os
import random
from datetime import date
from pathlib import Path

import pytest
from monitored_programs import Program

from gradstat.monitor.segments import PendingRows

LONG = os.environ.get("GRADSTAT_LONG") == "1"
# Others each day, and the same in all processes of a parallel run.
SEEDS = random.Random(date.today().toordinal()).sample(range(2**32), 500) if LONG else range(20)


@pytest.mark.filterwarnings("ignore::gradstat.monitor.AnomalyWarning")
@pytest.mark.filterwarnings("ignore:gradstat. no healthy state:RuntimeWarning")
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_recorded_is_what_was_there(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = seed % 2 == 1
    if late:  # all numbers say that they are on their way, and so are read a step later
        monkeypatch.setattr(PendingRows, "travels", True)
    program = Program(seed, tmp_path, late)
    try:
        for _ in range(4):
            program.run(15)
    except BaseException:
        print(program.options, program.done)
        raise
