"""Clips that choose their own limit, on the device, from previous norms or from the weights."""

from gradstat.adaptive._base import AdaptiveClip, NormClip, TensorClip
from gradstat.adaptive.norm_clips import AutoClip, FixedClip, ZClip
from gradstat.adaptive.summary import ClipSummary
from gradstat.adaptive.tensor_clips import AGC, AdaGC

__all__ = ["AGC", "AdaGC", "AdaptiveClip", "AutoClip", "ClipSummary", "FixedClip", "NormClip", "TensorClip", "ZClip"]
