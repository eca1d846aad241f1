"""Monitoring of a training run: what went wrong, since which step, where it started, and what to try."""

from gradstat._core.warn import AnomalyWarning
from gradstat.monitor.diagnosis import Diagnosis, Incident
from gradstat.monitor.log import LatestStep
from gradstat.monitor.monitor import Monitor
from gradstat.monitor.options import MonitorOptions
from gradstat.monitor.policies import POLICIES, AnomalyError
from gradstat.monitor.testing import UnhealthyTrainingError, assert_healthy
from gradstat.monitor.view import ViewerMissingError, write_page
from gradstat.recording import Golden, Recording, Series
from gradstat.recording.findings import Finding
from gradstat.recording.kinds import DEFAULT_WATCH
from gradstat.replay import Culprit, Schedule, find_culprit
from gradstat.rules import RULES, Rule, default_rules, rule

__all__ = [
    "DEFAULT_WATCH",
    "POLICIES",
    "RULES",
    "AnomalyError",
    "AnomalyWarning",
    "Culprit",
    "Diagnosis",
    "Finding",
    "Golden",
    "Incident",
    "LatestStep",
    "Monitor",
    "MonitorOptions",
    "Recording",
    "Rule",
    "Schedule",
    "Series",
    "UnhealthyTrainingError",
    "ViewerMissingError",
    "assert_healthy",
    "default_rules",
    "find_culprit",
    "rule",
    "write_page",
]
