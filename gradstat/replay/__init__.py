"""Replay: runs a step again to find the first place that produced a NaN or Inf; and scheduled anomaly mode."""

from gradstat.replay.step_state import RngState, StepState, StepStateKeeper

__all__ = ["RngState", "StepState", "StepStateKeeper"]
