"""Gradient statistics for PyTorch in one pass: NaN and Inf, norms and extremes, on every step."""

import importlib
from typing import Any

from gradstat import _torch_version as _torch_version  # first: it refuses a torch that is too old
from gradstat import amp
from gradstat._backends import BackendStatus, backends
from gradstat._fields import NAMES as FIELDS
from gradstat._native import BackendUnavailableError, StaleExtensionError
from gradstat._version import __version__
from gradstat.accumulation import AccumulationReport, MicroBatches
from gradstat.adaptive import AGC, AdaGC, AutoClip, ClipSummary, FixedClip, ZClip
from gradstat.automatic import AutoHandle, auto
from gradstat.check import PendingReport, check, check_async, check_tensors
from gradstat.clip import clip_grad_norm_, clip_grads_with_norm_
from gradstat.clip_value import clip_grad_value_
from gradstat.counters import StepCounters, StepCounts, step_counters
from gradstat.monitor import Monitor
from gradstat.patch import patch_torch
from gradstat.report import NonFiniteGradientError, Report
from gradstat.stats import stats
from gradstat.step import StepResult, guarded_step
from gradstat.tensor_stats import TensorStats
from gradstat.total_norm import get_total_norm

__all__ = [
    "AGC",
    "FIELDS",
    "AccumulationReport",
    "AdaGC",
    "AutoClip",
    "AutoHandle",
    "BackendStatus",
    "BackendUnavailableError",
    "ClipSummary",
    "FixedClip",
    "MicroBatches",
    "Monitor",
    "NonFiniteGradientError",
    "PendingReport",
    "Report",
    "StaleExtensionError",
    "StepCounters",
    "StepCounts",
    "StepResult",
    "TensorStats",
    "ZClip",
    "__version__",
    "amp",
    "auto",
    "backends",
    "check",
    "check_async",
    "check_tensors",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "guarded_step",
    "patch_torch",
    "stats",
    "step_counters",
]


def __getattr__(name: str) -> Any:
    if name == "distributed":  # needs torch.distributed, which is slow to import, and not everybody does
        return importlib.import_module("gradstat.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
