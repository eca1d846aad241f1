"""From statistics of every step to an answer: what went wrong, since when, where it started, what to try."""

from gradstat.monitor.diagnosis import Diagnosis, Incident
from gradstat.monitor.findings import Finding
from gradstat.monitor.monitor import Monitor
from gradstat.monitor.policies import POLICIES, AnomalyError, AnomalyWarning
from gradstat.monitor.recording import Recording, Series
from gradstat.monitor.rules import RULES, Rule, default_rules, rule
from gradstat.monitor.testing import UnhealthyTrainingError, assert_healthy
from gradstat.monitor.watching import DEFAULT_WATCH

__all__ = [
    "DEFAULT_WATCH",
    "POLICIES",
    "RULES",
    "AnomalyError",
    "AnomalyWarning",
    "Diagnosis",
    "Finding",
    "Incident",
    "Monitor",
    "Recording",
    "Rule",
    "Series",
    "UnhealthyTrainingError",
    "assert_healthy",
    "default_rules",
    "rule",
]
