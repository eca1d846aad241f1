"""docs/diagnosis.md matches the code: it lists the existing rules and the trainings of the tests."""

import re

import diagnosis
from helpers.training import HEALTHY
from training_programs import PROGRAMS


def test_the_rules_are_rendered_from_the_code() -> None:
    document = diagnosis.DOCUMENT.read_text()
    assert len(diagnosis.MARKED.findall(document)) == 3, "a marker was lost"
    fresh = diagnosis.rendered(document, {"rules": diagnosis.rules()})
    assert fresh == document, "run `python tools/diagnosis.py --write --only rules`"


def test_the_healthy_trainings_are_those_that_are_run() -> None:
    title, items = diagnosis.listed(diagnosis.DOCUMENT.read_text(), "healthy")
    assert items == [healthy.name for healthy in HEALTHY], "run `python tools/diagnosis.py --write`"
    ((seeds, steps),) = re.findall(r"^(\d+) seeds of ([\d,]+) steps each$", title)
    assert int(seeds) >= 3
    assert int(steps.replace(",", "")) >= 500


def test_the_programs_are_those_that_are_run() -> None:
    _, items = diagnosis.listed(diagnosis.DOCUMENT.read_text(), "programs")
    assert items == [f"{program.name} {program.steps:,}" for program in PROGRAMS], "run `python tools/diagnosis.py`"
