"""Monitoring of a training run: what went wrong, since which step, where it started, and what to try."""

from gradstat._core.warn import AnomalyWarning
from gradstat.monitor.diagnosis import Diagnosis, Incident
from gradstat.monitor.log import LatestStep
from gradstat.monitor.monitor import Monitor as Monitor  # public as gradstat.Monitor
from gradstat.monitor.options import MonitorOptions
from gradstat.monitor.policies import POLICIES, AnomalyError
from gradstat.monitor.testing import UnhealthyTrainingError, assert_healthy
from gradstat.monitor.view import ViewerMissingError, write_page
from gradstat.recording.findings import Finding
from gradstat.recording.golden import Golden
from gradstat.recording.kinds import DEFAULT_WATCH
from gradstat.recording.recording import Recording, Series
from gradstat.replay.culprit import Culprit
from gradstat.replay.rerun import find_culprit
from gradstat.replay.schedule import Schedule
from gradstat.rules import RULES, default_rules
from gradstat.rules.base import Rule, rule

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
