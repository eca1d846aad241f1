"""Every injected fault is found: the right rule first, with the right name and step."""

import numpy as np
import pytest
from helpers.ranks import Ranks
from helpers.training_faults import FAULTS, Fault, inject

from gradstat.monitor import RULES, Diagnosis, Finding, Recording


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_first_finding_is_the_fault(fault: Fault, request: pytest.FixtureRequest) -> None:
    ranks: Ranks | None = request.getfixturevalue("ranks") if fault.ranks > 1 else None
    outcome = inject(fault, ranks)
    first = outcome.first
    told = "\n".join(map(str, outcome.findings))
    assert first is not None, "nothing was found"
    assert (first.rule, first.name) == (fault.rule, fault.name), told
    assert 0 <= first.step - fault.step <= fault.late, told
    assert {finding.rule for finding in outcome.findings} >= set(fault.also), told
    assert all((first.text, first.causes, first.advice))
    assert Finding.from_dict(first.to_dict()) == first


def test_every_rule_that_is_no_mere_info_is_met_by_a_fault() -> None:
    met = {fault.rule for fault in FAULTS} | {rule for fault in FAULTS for rule in fault.also}
    assert {rule.name for rule in RULES if rule.severity != "info"} <= met


def test_of_findings_in_one_step_the_cause_is_the_first() -> None:
    def found(rule: str, step: int, severity: str = "error") -> Finding:
        return Finding(rule, severity, step, "", {})  # type: ignore[arg-type]

    def ranked(*findings: Finding) -> list[Finding]:
        return list(Diagnosis.of(Recording(np.arange(9), {}, {}, findings)).findings)

    batch, loss, parameter = found("nonfinite-batch", 7), found("nonfinite-loss", 7), found("nonfinite-parameter", 8)
    info = found("clip-activity", 1, "info")
    assert ranked(info, parameter, loss, batch) == [batch, loss, parameter, info]
