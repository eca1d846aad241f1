"""Checks across ranks: who caused a NaN, do replicas agree, are batches different, is a framework's norm right.

Not imported by ``import gradstat``, as it needs ``torch.distributed``; accessing ``gradstat.distributed`` imports it.
"""

from gradstat._core.collectives import UnreachableRankError
from gradstat.distributed._explanations import Explanation, NormPart
from gradstat.distributed.audit import NormAudit, audit_norm
from gradstat.distributed.batches import BatchReport, RepeatedBatchError, verify_batches
from gradstat.distributed.origin import OriginReport, OriginTracker, track_origin
from gradstat.distributed.replicas import Drift, ReplicaMismatchError, ReplicaReport, verify_replicas

__all__ = [
    "BatchReport",
    "Drift",
    "Explanation",
    "NormAudit",
    "NormPart",
    "OriginReport",
    "OriginTracker",
    "RepeatedBatchError",
    "ReplicaMismatchError",
    "ReplicaReport",
    "UnreachableRankError",
    "audit_norm",
    "track_origin",
    "verify_batches",
    "verify_replicas",
]
