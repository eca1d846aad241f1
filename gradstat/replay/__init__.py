"""Replay: runs a step again to find the first place that produced a NaN or Inf; and scheduled anomaly mode."""

from gradstat.replay.culprit import Culprit
from gradstat.replay.rerun import find_culprit
from gradstat.replay.schedule import Schedule
from gradstat.replay.step_state import RngState, StepState, StepStateKeeper

__all__ = ["Culprit", "RngState", "Schedule", "StepState", "StepStateKeeper", "find_culprit"]
