"""Gradient statistics for PyTorch in one pass: NaN and Inf, norms and extremes, on every step."""

import importlib
from typing import TYPE_CHECKING, Any

from gradstat import _torch_version as _torch_version  # first: it raises if torch is too old
from gradstat import amp
from gradstat._core.backends import BackendStatus, backends
from gradstat._core.native import BackendUnavailableError, StaleExtensionError
from gradstat._fields import NAMES as FIELDS
from gradstat._version import __version__
from gradstat.adaptive import AGC, AdaGC, AutoClip, ClipSummary, FixedClip, ZClip
from gradstat.check import PendingReport, check, check_async, check_tensors, stats
from gradstat.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from gradstat.counters import StepCounters, StepCounts, step_counters
from gradstat.guard import GuardCounts, SpikeGuard
from gradstat.report import NonFiniteGradientError, Report
from gradstat.step import StepResult, guarded_step
from gradstat.tensor_stats import TensorStats

if TYPE_CHECKING:
    from gradstat import distributed as distributed
    from gradstat import monitor as monitor
    from gradstat.accumulation import AccumulationReport, MicroBatches
    from gradstat.automatic import AutoHandle, auto
    from gradstat.lowprecision import QUANTIZATION_FIELDS, LowPrecision, quantization_stats
    from gradstat.monitor import Monitor
    from gradstat.patch import patch_torch

__all__ = [
    "AGC",
    "FIELDS",
    "QUANTIZATION_FIELDS",
    "AccumulationReport",
    "AdaGC",
    "AutoClip",
    "AutoHandle",
    "BackendStatus",
    "BackendUnavailableError",
    "ClipSummary",
    "FixedClip",
    "GuardCounts",
    "LowPrecision",
    "MicroBatches",
    "Monitor",
    "NonFiniteGradientError",
    "PendingReport",
    "Report",
    "SpikeGuard",
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
    "clip_grads_with_norm_",
    "get_total_norm",
    "guarded_step",
    "patch_torch",
    "quantization_stats",
    "stats",
    "step_counters",
]


# Imported on first use: not every program needs these names, and importing them eagerly more than doubles the import
# time. Maps each name to the module that defines it; None for names that are modules themselves.
_LAZY = {
    "AccumulationReport": "accumulation",
    "AutoHandle": "automatic",
    "LowPrecision": "lowprecision",
    "MicroBatches": "accumulation",
    "Monitor": "monitor",
    "QUANTIZATION_FIELDS": "lowprecision",
    "auto": "automatic",
    "distributed": None,
    "monitor": None,
    "patch_torch": "patch",
    "quantization_stats": "lowprecision",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _LAZY[name]
    if home is None:
        return importlib.import_module(f"gradstat.{name}")
    value = globals()[name] = getattr(importlib.import_module(f"gradstat.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})
