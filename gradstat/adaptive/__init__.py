"""Clips that choose their limit themselves, on the device: by the norms seen so far, or by the weights."""

from gradstat.adaptive._base import AdaptiveClip, NormClip, TensorClip
from gradstat.adaptive.norm_clips import AutoClip, FixedClip, ZClip
from gradstat.adaptive.summary import ClipSummary

__all__ = ["AdaptiveClip", "AutoClip", "ClipSummary", "FixedClip", "NormClip", "TensorClip", "ZClip"]
