"""Checks across ranks: which rank caused a NaN, whether replicas still agree, whether ranks got different batches.

Not imported by ``import gradstat``, as it needs ``torch.distributed``; accessing ``gradstat.distributed`` imports it.
"""

from gradstat._core.collectives import UnreachableRankError
from gradstat.distributed.batches import BatchReport, RepeatedBatchError, verify_batches
from gradstat.distributed.origin import OriginReport, OriginTracker, track_origin
from gradstat.distributed.replicas import Drift, ReplicaMismatchError, ReplicaReport, verify_replicas

__all__ = [
    "BatchReport",
    "Drift",
    "OriginReport",
    "OriginTracker",
    "RepeatedBatchError",
    "ReplicaMismatchError",
    "ReplicaReport",
    "UnreachableRankError",
    "track_origin",
    "verify_batches",
    "verify_replicas",
]
