"""Clips that choose their own limit, on the device, from previous norms or from the weights."""

from gradstat.adaptive._base import AdaptiveClip, NormClip, TensorClip

__all__ = ["AdaptiveClip", "NormClip", "TensorClip"]
