"""Monitoring of a training run: what went wrong, since which step, where it started, and what to try."""

from gradstat.monitor.diagnosis import Diagnosis, Incident
from gradstat.monitor.findings import Finding
from gradstat.monitor.kinds import DEFAULT_WATCH
from gradstat.monitor.log import LatestStep
from gradstat.monitor.monitor import Monitor
from gradstat.monitor.options import MonitorOptions
from gradstat.monitor.policies import POLICIES, AnomalyError
from gradstat.monitor.recording import Golden, Recording, Series
from gradstat.monitor.replay import Culprit, Schedule, find_culprit
from gradstat.monitor.reporting import AnomalyWarning
from gradstat.monitor.rules import RULES, Rule, default_rules, rule
from gradstat.monitor.testing import UnhealthyTrainingError, assert_healthy

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
    "assert_healthy",
    "default_rules",
    "find_culprit",
    "rule",
]
