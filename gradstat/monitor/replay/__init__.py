"""A step run again under watch, to name the first place that made a NaN or Inf; and anomaly mode now and then."""

from gradstat.monitor.replay.culprit import Culprit
from gradstat.monitor.replay.rerun import find_culprit
from gradstat.monitor.replay.schedule import Schedule
from gradstat.monitor.replay.step_state import RngState, StepState, StepStateKeeper

__all__ = ["Culprit", "RngState", "Schedule", "StepState", "StepStateKeeper", "find_culprit"]
