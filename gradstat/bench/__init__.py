"""Measures what gradstat, torch's clip, a naive loop and ``detect_anomaly`` cost in a training step.

``python -m gradstat bench`` runs them on a user's own model; the repository's benchmarks are built from the same parts.
"""

from gradstat.bench.command import main

__all__ = ["main"]
