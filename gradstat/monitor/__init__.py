"""From statistics of every step to an answer: what went wrong, since when, where it started, what to try."""

from gradstat.monitor.findings import Finding
from gradstat.monitor.recording import Recording, Series

__all__ = ["Finding", "Recording", "Series"]
