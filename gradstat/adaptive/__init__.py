"""Clips that choose their limit themselves, on the device: by the norms seen so far, or by the weights."""

from gradstat.adaptive._base import AdaptiveClip, NormClip, TensorClip
from gradstat.adaptive.norm_clips import AutoClip, FixedClip, LastNormClip, ZClip
from gradstat.adaptive.summary import ClipSummary
from gradstat.adaptive.tensor_clips import AGC, AdaGC

__all__ = [
    "AGC",
    "AdaGC",
    "AdaptiveClip",
    "AutoClip",
    "ClipSummary",
    "FixedClip",
    "LastNormClip",
    "NormClip",
    "TensorClip",
    "ZClip",
]
